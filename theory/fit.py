"""Node counts that states need, for both exact engines."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory import _heads, _joint
from theory._checks import invalid, is_concrete
from theory._nodes import Points, axis_count, rounded_count
from theory.activation import Activation, BayesSoftmax, HeadNormalized
from theory.method import Quadrature
from theory.order import OrderParameters
from theory.scores import Scores
from theory.task import SingleLocation

# Where values are traced the state cannot choose its nodes: enough for scores of variance up to about 20
_TRACED_NODES, _TRACED_FREQUENCIES, _TRACED_AXIS, TRACED_LENGTH = 64, 80, 16, 1000
MOST_NODES = 2048
_ROUNDING = 1e-15  # relative error of L times a table entry, seen up to L = 10^12


class TooWide(ValueError):
    """Scores that spread too widely for the most nodes allowed."""


# trained leaves of an activation and order parameters that belong together
State = tuple[Activation, OrderParameters]
# law of the scores, and the heads' form or (one normalizer) biases
Law = tuple[Scores, Any]


def repeated(tree: Any, lead: tuple[int, ...]) -> Any:
    """Every array with the leading axes `lead` added."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*lead, *leaf.shape)), tree)


def flat(tree: Any, lead: int) -> Any:
    """Every array with one leading axis in place of the first `lead`."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[lead:]), tree)


def fit(method: Quadrature, task: SingleLocation, rest: Activation, states: State) -> Quadrature:
    """`method` with counts for the hardest of several states (one leading axis); `rest`: what is not trained."""
    grid = grid_for(method, task, rest, states)
    if isinstance(grid, _joint.Grid):
        return Quadrature(method.tolerance, grid.nodes, points=grid.points)
    return Quadrature(method.tolerance, grid.nodes, grid.frequencies)


def grid_for(method: Quadrature, task: SingleLocation, rest: Activation, states: State) -> _heads.Grid | _joint.Grid:
    """The grid of the exact engine that the activation has."""
    if isinstance(rest, HeadNormalized):
        return head_grid(method, task, rest, states)
    if isinstance(rest, BayesSoftmax):
        return joint_grid(method, task, rest, states)
    raise invalid("method", f"MonteCarlo(...), the only one that {type(rest).__name__} supports", method)


@eqx.filter_jit
def law_of(task: SingleLocation, activation: Activation, order: OrderParameters) -> Law:
    """All that the risk depends on. It does not know the number of features: states of different tasks share code."""
    law = (_joint if isinstance(activation, BayesSoftmax) else _heads).law(task, activation, order)
    # with weak types (those of Python numbers) code would be compiled again
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64) if eqx.is_inexact_array(leaf) else leaf, law)


@eqx.filter_jit
def _laws(task: SingleLocation, rest: Activation, states: State) -> Law:
    """The laws of several states, with their leading axis."""
    one = lambda state: law_of(task, eqx.combine(state[0], rest), state[1])  # noqa: E731
    return eqx.filter_vmap(one, out_axes=eqx.if_array(0))(states)


def nodes_needed(method: Quadrature, task: SingleLocation, rest: Activation, states: State) -> Float[Array, " N"]:
    """The largest count that each state needs in one integration variable."""
    laws = _laws(task, rest, states)
    if isinstance(rest, BayesSoftmax):
        return _joint_need(laws, _laid_out(method, _log_rare(method, task), _spreads(laws[0]).max(0)))
    return jnp.maximum(*_heads_need(laws, jnp.asarray(method.tail)))


def head_grid(method: Quadrature, task: SingleLocation, rest: Activation, states: State) -> _heads.Grid:
    """The grid for heads normalized each on its own."""
    _check_rounding(method, task)
    if method.points is not None:
        raise invalid("method", f"frequencies in place of points for {type(rest).__name__}", method)
    if method.nodes is not None and method.frequencies is not None:
        return _heads.Grid(method.tail, method.nodes, method.frequencies)
    if not is_concrete(states, task, rest):
        return _heads.Grid(method.tail, _TRACED_NODES, _TRACED_FREQUENCIES)
    nodes, frequencies = _heads_need(_laws(task, rest, states), jnp.asarray(method.tail))
    grid = _heads.Grid(method.tail, *_heads.rounded_counts(float(nodes.max()), float(frequencies.max())))
    if max(grid.nodes, grid.frequencies) > MOST_NODES:
        raise _too_wide(
            f"one that this state reaches with at most {MOST_NODES} nodes (loosen it, or use MonteCarlo)",
            f"{method.tolerance}, which needs {max(grid.nodes, grid.frequencies)}",
        )
    return grid


@eqx.filter_jit
def _heads_need(laws: Law, tail: Array) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Nodes and frequencies that each law of heads normalized one by one needs."""
    return eqx.filter_vmap(lambda law: _heads.needed(law[0], law[1].sink, tail))(laws)


def joint_grid(method: Quadrature, task: SingleLocation, rest: Activation, states: State) -> _joint.Grid:
    """The grid for heads with one normalizer."""
    return points_grid(
        method,
        task,
        type(rest).__name__,
        traced=None if is_concrete(states, task, rest) else (_TRACED_NODES, (_TRACED_AXIS,) * states[1].heads),
        spreads=lambda log_tail: _spreads(_laws(task, rest, states)[0]).max(0),
        need=lambda grid: _joint_need(_laws(task, rest, states), grid).max(),
    )


def points_grid(
    method: Quadrature,
    task: SingleLocation,
    owner: str,
    *,
    traced: tuple[int, tuple[int, ...]] | None,
    spreads: Callable[[float], Array],
    need: Callable[[_joint.Grid], Array],
) -> _joint.Grid:
    """The grid of an average over one token's Gaussian vector, whose principal axes have these standard deviations
    (narrow first; given the log of the inverse weight at which points end). `traced` are its nodes, and points per
    axis, where values are not known; `need` says how many nodes a grid with its points needs."""
    _check_rounding(method, task)
    if method.frequencies is not None:
        raise invalid("method", f"points in place of frequencies for {owner}", method)
    log_tail = _log_rare(method, task)
    if method.nodes is not None and method.points is not None:
        return _joint.Grid(method.tail, log_tail, method.nodes, method.points)
    if traced is not None:
        nodes, counts = traced
        return _joint.Grid(method.tail, log_tail, nodes, _joint.layout(counts, log_tail))
    grid = _laid_out(method, log_tail, spreads(log_tail))
    needed = float(need(grid))
    if not needed <= MOST_NODES:
        raise _too_wide(
            f"one that this state reaches with at most {MOST_NODES} nodes (loosen it, or use MonteCarlo)",
            f"{method.tolerance}, which needs {needed:.0f}",
        )
    return grid._replace(nodes=rounded_count(needed + 6))


def _log_rare(method: Quadrature, task: SingleLocation) -> float:
    """Log of the inverse weight at which points may end: rare among all tokens."""
    length = int(task.length) if is_concrete(task.length) else TRACED_LENGTH
    return float(np.log((length - 1) / (5 * method.tail)))


def _laid_out(method: Quadrature, log_tail: float, spreads: Array) -> _joint.Grid:
    """Points for these spreads; nodes are yet to be counted."""
    counts = tuple(axis_count(spread, log_tail) for spread in np.asarray(spreads))
    return _joint.Grid(method.tail, log_tail, 4, _joint.layout(counts, log_tail))


@eqx.filter_jit
def _spreads(scores: Scores) -> Float[Array, "N H"]:
    return eqx.filter_vmap(_joint.spreads)(scores)


def _joint_need(laws: Law, grid: _joint.Grid) -> Float[Array, " N"]:
    """Nodes that each law of heads with one normalizer needs on the points of the grid."""
    points = _joint.points_of(grid, laws[0].noise.shape[-1], laws[0].mean.shape[-2])
    return _need_on(laws, jax.tree.map(jnp.asarray, _joint.padded(points)), jnp.asarray(grid.tail))


@eqx.filter_jit
def _need_on(laws: Law, points: tuple[Points, Points], tail: Array) -> Float[Array, " N"]:
    arrays, fixed = eqx.partition(laws, eqx.is_array)

    def one(own: Law) -> Array:
        scores, biases = eqx.combine(own, fixed)
        return _joint.needed(scores, biases, points, tail)

    return jax.lax.map(one, arrays)


def _too_wide(expected: str, got: str) -> TooWide:
    return TooWide(str(invalid("tolerance", expected, got)))


def _check_rounding(method: Quadrature, task: SingleLocation) -> None:
    if is_concrete(task.length) and method.tolerance < _ROUNDING * int(task.length):
        raise invalid(
            "tolerance",
            f"at least {_ROUNDING * int(task.length):.0e} at L = {task.length}, the rounding of L terms in float64",
            method.tolerance,
        )
