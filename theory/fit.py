"""Node counts that states need, for both exact engines."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from theory import _heads, _joint
from theory._checks import invalid, is_concrete
from theory._each import each, first, row
from theory._nodes import Points, axis_counts, rounded_count, tensor_size
from theory.activation import Activation, BayesSoftmax, HeadNormalized
from theory.method import Method, Quadrature
from theory.order import OrderParameters
from theory.scores import Scores
from theory.task import SingleLocation

# Where values are traced the state cannot choose its nodes: enough for scores of variance up to about 20
_TRACED_NODES, _TRACED_FREQUENCIES, _TRACED_AXIS, TRACED_LENGTH = 64, 80, 16, 1000
MOST_NODES = 2048
MOST_NEEDED = 0.9 * MOST_NODES  # of what is then rounded up
_SOBOL = 99  # tier of those for which a product of rules is too large
_ROUNDING = 1e-15  # relative error of L times a table entry, seen up to L = 10^12


class TooWide(ValueError):
    """Scores that spread too widely for the most nodes allowed."""


# trained leaves of an activation and order parameters that belong together
State = tuple[Activation, OrderParameters]
# task, activation and order parameters of a point, or of several (NumPy arrays with a leading axis)
Model = tuple[SingleLocation, Activation, OrderParameters]
Grid = _heads.Grid | _joint.Grid
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


def grid_for(method: Quadrature, task: SingleLocation, rest: Activation, states: State) -> Grid:
    """The grid of the exact engine that the activation has."""
    if isinstance(rest, HeadNormalized):
        return head_grid(method, task, rest, states)
    if isinstance(rest, BayesSoftmax):
        return joint_grid(method, task, rest, states)
    raise unsupported(method, rest)


def unsupported(method: Method, activation: Activation) -> ValueError:
    """What is raised where an activation has no exact engine."""
    return invalid("method", f"MonteCarlo(...), the only one that {type(activation).__name__} supports", method)


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
        raise too_wide(method.tolerance, max(grid.nodes, grid.frequencies))
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
    check_points(method, owner)
    log_tail = float(log_rare(method.tail, int(task.length) if is_concrete(task.length) else TRACED_LENGTH))
    if method.nodes is not None and method.points is not None:
        return _joint.Grid(method.tail, log_tail, method.nodes, method.points)
    if traced is not None:
        nodes, counts = traced
        return _joint.Grid(method.tail, log_tail, nodes, _joint.layout(counts, log_tail))
    counts = axis_counts(np.asarray(spreads(log_tail)), log_tail)
    grid = _joint.Grid(method.tail, log_tail, 4, _joint.layout(counts, log_tail))
    needed = float(need(grid))
    if not needed <= MOST_NODES:
        raise too_wide(method.tolerance, f"{needed:.0f}")
    return grid._replace(nodes=rounded_count(needed + 6))


def check_points(method: Quadrature, owner: str) -> None:
    """Refuses the counts of heads normalized each on its own."""
    if method.frequencies is not None:
        raise invalid("method", f"points in place of frequencies for {owner}", method)


def log_rare(tail: float, length: Any) -> Any:
    """Log of the inverse weight at which points may end: rare among all tokens."""
    return np.log((length - 1) / (5 * tail))


def cheap(points: Any) -> Any:
    """Points filled up to very few numbers, for what costs little on each."""
    return _joint.padded(points, least=2**12)


@eqx.filter_jit
def _spreads(scores: Scores) -> Float[Array, "N H"]:
    return eqx.filter_vmap(_joint.spreads)(scores)


def _joint_need(laws: Law, grid: _joint.Grid) -> Float[Array, " N"]:
    """Nodes that each law of heads with one normalizer needs on the points of the grid."""
    points = _joint.points_of(grid, laws[0].noise.shape[-1], laws[0].mean.shape[-2])
    return _need_on(laws, jax.tree.map(jnp.asarray, cheap(points)), jnp.asarray(grid.tail))


@eqx.filter_jit
def _need_on(laws: Law, points: tuple[Points, Points], tail: Array) -> Float[Array, " N"]:
    arrays, fixed = eqx.partition(laws, eqx.is_array)

    def one(own: Law) -> Array:
        scores, biases = eqx.combine(own, fixed)
        return _joint.needed(scores, biases, points, tail)

    return jax.lax.map(one, arrays)


def fit_each(
    method: Method, models: Model, chosen: Bool[np.ndarray, " N"]
) -> list[tuple[Method, Bool[np.ndarray, " N"]]]:
    """`method` with counts for the hardest of the chosen models, and which it integrates.

    Those whose scores spread too widely for the most nodes are left out. Averages over points cost in proportion to
    their number: models that need up to 8, 64, 512, … have a method each, and so have those that take Sobol points.
    """
    if not isinstance(method, Quadrature) or method.nodes is not None:
        return [(method, chosen)]
    if not isinstance(models[1], (HeadNormalized, BayesSoftmax)):
        raise unsupported(method, models[1])
    if isinstance(models[1], HeadNormalized):
        check_rounding(method, models[0], chosen)
        needed = np.stack(each(_heads_needed_at, models, chosen, jnp.asarray(method.tail)))
        own = needed.max(0) <= MOST_NEEDED
        if not own.any():
            return []
        nodes, frequencies = _heads.rounded_counts(*needed[:, own].max(1))
        return [(Quadrature(method.tolerance, nodes, frequencies), own)]

    def need(grid: _joint.Grid, own: np.ndarray) -> np.ndarray:
        points = jax.tree.map(jnp.asarray, cheap(_points_at(grid, models)))
        return each(_joint_needed_at, models, own, (points, jnp.asarray(grid.tail)))

    return fit_points(method, models[0], chosen, spreads=each(_spreads_at, models, chosen, None), need=need)


def fit_points(
    method: Quadrature,
    tasks: SingleLocation,
    chosen: Bool[np.ndarray, " N"],
    *,
    spreads: Float[np.ndarray, "N A"],
    need: Callable[[_joint.Grid, np.ndarray], np.ndarray],
) -> list[tuple[Method, Bool[np.ndarray, " N"]]]:
    """`fit_each` for averages over one token's Gaussian vector: as `points_grid`, where `need` says how many nodes the
    chosen points, which have the same length, need on a grid."""
    check_rounding(method, tasks, chosen)
    chosen = chosen & np.isfinite(spreads).all(1)
    log_tails = log_rare(method.tail, tasks.length)
    counts, tier = np.ones(spreads.shape), np.zeros(chosen.shape, int)
    for i in np.flatnonzero(chosen):
        own_counts = axis_counts(spreads[i], log_tails[i])
        counts[i], size = own_counts, tensor_size(own_counts, log_tails[i])
        tier[i] = np.ceil(np.log2(size) / 3) if size <= _joint.MOST_POINTS else _SOBOL
    # not even Sobol points see where so much as one axis takes more points than all may
    chosen = chosen & (counts.max(1) <= _joint.MOST_POINTS)
    found = []
    for each_tier in np.unique(tier[chosen]):
        own = chosen & (tier == each_tier)
        points = _joint.layout(tuple(int(count) for count in counts[own].max(0)), log_tails[own].max())
        needed = np.full(own.shape, np.nan)
        for same in of_one_length(tasks, own):
            grid = _joint.Grid(method.tail, float(log_tails[same][0]), 4, points)
            needed = np.where(same, need(grid, same), needed)
        own = needed <= MOST_NEEDED
        if own.any():
            found.append((Quadrature(method.tolerance, rounded_count(needed[own].max() + 6), points=points), own))
    return found


def of_one_length(tasks: SingleLocation, chosen: Bool[np.ndarray, " N"]) -> Iterator[Bool[np.ndarray, " N"]]:
    """The chosen tasks, those of each length by themselves."""
    for length in np.unique(tasks.length[chosen]):
        yield chosen & (tasks.length == length)


def apart(method: Method, models: Model, chosen: Bool[np.ndarray, " N"]) -> Iterator[Bool[np.ndarray, " N"]]:
    """The chosen models in parts that share a grid, or samples: of one length unless heads are normalized each on its
    own."""
    if isinstance(method, Quadrature) and isinstance(models[1], HeadNormalized):
        return iter([chosen] if chosen.any() else [])
    return of_one_length(models[0], chosen)


def grid_at(method: Quadrature, models: Model, chosen: Bool[np.ndarray, " N"]) -> Grid:
    """The grid, by a method with counts, of a part of the models that shares one."""
    task, activation, order = first(models, chosen)
    return grid_for(method, task, activation, (activation, order))


def laid_out(grid: Grid, models: Model) -> Grid:
    """The grid with its points, so that compiled code serves every length."""
    return grid if isinstance(grid, _heads.Grid) else grid.laid_out(_points_at(grid, models))


def laid_out_alone(grid: Grid, law: Law) -> Grid:
    """The grid for one law, where it is known, with its points filled up: a loop over laws shares compiled code."""
    if isinstance(grid, _heads.Grid) or not is_concrete(law):
        return grid
    return grid.laid_out(_joint.padded(_joint.points_of(grid, law[0].noise.shape[-1], law[0].mean.shape[-2])))


def _points_at(grid: _joint.Grid, models: Model) -> tuple[Points, Points]:
    task, _, order = first(models, np.ones(1, bool))
    return _joint.points_of(grid, order.heads, task.prior.components)


def _heads_needed_at(model: Model, tail: Array) -> tuple[Array, Array]:
    scores, form = law_of(*model)
    return _heads.needed(scores, form.sink, tail)


def _spreads_at(model: Model, shared: None) -> Array:
    return _joint.spreads(law_of(*model)[0])


def _joint_needed_at(model: Model, shared: tuple[tuple[Points, Points], Array]) -> Array:
    scores, biases = law_of(*model)
    return _joint.needed(scores, biases, *shared)


def check_rounding(method: Quadrature, tasks: SingleLocation, chosen: Bool[np.ndarray, " N"]) -> None:
    """Refuses a tolerance below the rounding of the longest chosen task."""
    _check_rounding(method, row(tasks, np.argmax(np.where(chosen, tasks.length, 0))))


def too_wide(tolerance: float, needed: Any) -> TooWide:
    """What is raised where the most nodes allowed are not enough."""
    expected = f"one that this state reaches with at most {MOST_NODES} nodes (loosen it, or use MonteCarlo)"
    return TooWide(str(invalid("tolerance", expected, f"{tolerance}, which needs {needed}")))


def _check_rounding(method: Quadrature, task: SingleLocation) -> None:
    if is_concrete(task.length) and method.tolerance < _ROUNDING * int(task.length):
        raise invalid(
            "tolerance",
            f"at least {_ROUNDING * int(task.length):.0e} at L = {task.length}, the rounding of L terms in float64",
            method.tolerance,
        )
