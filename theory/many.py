"""Sweeps: many points that share shapes, evaluated by code compiled once, whatever their number.

A point's numbers do not depend on the others where the method gives its counts, nor do Bayes risks on products of
rules, whose counts are the point's own: points are taken one after the other in the same compiled code. Otherwise
counts are fitted once, to the hardest point that can be integrated.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory._checks import instance, invalid, is_concrete, non_negative
from theory._each import copied, row
from theory.activation import Activation
from theory.bayes import each_bayes_risk
from theory.flow import Run, flow_method
from theory.method import Method, MonteCarlo, Quadrature
from theory.order import OrderParameters
from theory.risk import check_model, each_risk
from theory.task import SingleLocation
from theory.trajectory import Trajectory


def bayes_risks(
    tasks: Sequence[SingleLocation], *, method: Method | None = None
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """The Bayes risk of every task, and its error, as `bayes_risk` gives them.

    Args:
        tasks: at least one; of priors with the same class, shapes and flipped features. Lengths, ν and the priors'
            numbers may differ.
        method: of `bayes_risk`. Each task has the counts that it needs unless given (Sobol points: those that the
            hardest needs); with `MonteCarlo` code is compiled for each length.

    Returns:
        (risks, errors). NaN for a task that cannot be integrated.

    Example:
        >>> import theory as th
        >>> tasks = [th.SingleLocation(length=5, snr=snr, prior=th.sign_flips([0.0], [1.0])) for snr in (1, 2, 4, 8)]
        >>> risks, errors = bayes_risks(tasks)
        >>> print(risks.round(4))
        [0.7448 0.6407 0.4324 0.1725]
    """
    _check_method(method)
    stacked = _stacked("tasks", tasks, SingleLocation)
    return _as_arrays(each_bayes_risk(stacked, method))


def population_risks(
    tasks: Sequence[SingleLocation],
    activations: Sequence[Activation],
    orders: Sequence[OrderParameters],
    *,
    method: Method | None = None,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """The population risk of every point (task, activation, order parameters), and its error, as `population_risk`.

    Eight or more tasks with the same overlaps r, length and activation are taken by one functional of their signal
    (docs/model.md §7.4) where the method does not give the counts.

    Args:
        tasks: as for `bayes_risks`.
        activations: one for each task, all of the same kind and shapes; their numbers may differ.
        orders: one state for each task, all with the same numbers of heads and features.
        method: of `population_risk`. Counts are fitted to the hardest point unless given; with `MonteCarlo` code is
            compiled for each length.

    Returns:
        (risks, errors). NaN for a point that cannot be integrated.

    Example:
        >>> import theory as th
        >>> tasks = [th.SingleLocation(length=5, snr=snr, prior=th.sign_flips([0.0], [1.0])) for snr in (1, 2, 4, 8)]
        >>> order = th.OrderParameters([[1.0], [-1.0]], [[1.0, -1.0], [-1.0, 1.0]])
        >>> risks, errors = population_risks(tasks, [th.Softmax()] * 4, [order] * 4)
        >>> print(risks.round(4))
        [0.7682 0.7228 0.647  0.5403]
    """
    _check_method(method)
    models = _stacked_models(tasks, activations, orders)
    risks, errors = each_risk(models, method, with_error=True)
    return _as_arrays((risks, errors))


def gradient_flows(
    tasks: Sequence[SingleLocation],
    activations: Sequence[Activation],
    orders: Sequence[OrderParameters],
    times: Any,
    *,
    step_size: Any = 0.0,
    bias_rate: float = 1.0,
    scale_rate: float = 1.0,
    method: Method | None = None,
    tolerance: float = 1e-6,
    corrector_points: int = 2048,
    progress: bool = True,
) -> list[Trajectory]:
    """The flow from every point (task, activation, start), as `gradient_flow` gives it with `throw=False`.

    Args:
        tasks: as for `bayes_risks`; of one length where a step size is not 0, because the corrector's points have it.
        activations: as for `population_risks`.
        orders: one start for each task.
        times: as for `gradient_flow`, the same for all.
        step_size: η/B, one number or one for each task.
        bias_rate: κ_b.
        scale_rate: κ_c.
        method: of `gradient_flow`. Node counts are fitted to the hardest recorded state of all unless given.
        tolerance: of the solver.
        corrector_points: of the corrector.
        progress: bars for groups that take over two seconds.

    Returns:
        A `Trajectory` for each point. One that needs more nodes than are allowed is NaN, with `Result.diverged`.

    Example:
        >>> import theory as th
        >>> tasks = [th.SingleLocation(length=5, snr=snr, prior=th.sign_flips([0.0], [1.0])) for snr in (1, 2, 4)]
        >>> start = th.OrderParameters([[0.1], [-0.2]], [[0.2, 0.0], [0.0, 0.2]])
        >>> flows = gradient_flows(tasks, [th.Softmax()] * 3, [start] * 3, [0.0, 5.0])
        >>> [flow.order.m.shape for flow in flows]
        [(2, 2, 1), (2, 2, 1), (2, 2, 1)]
    """
    _check_method(method)
    models = _stacked_models(tasks, activations, orders)
    count, heads = len(tasks), orders[0].heads
    step_sizes = np.asarray(non_negative("step_size", step_size, (0, 1)))
    if step_sizes.shape not in ((), (count,)):
        raise invalid("step_size", f"one number or one for each of {count} tasks", f"shape {step_sizes.shape}")
    step_sizes = np.broadcast_to(step_sizes, (count,))
    if step_sizes.any() and len({int(task.length) for task in tasks}) > 1:
        raise invalid("tasks", "one length where step_size is not 0", sorted({int(task.length) for task in tasks}))
    method = flow_method(activations[0]) if method is None else method
    run = Run(times, bias_rate, scale_rate, method, tolerance, corrector_points)
    (trained, states), codes, _ = run.solved(models, step_sizes, progress=progress)
    trained, states, codes = jax.tree.map(np.asarray, (trained, states, codes))
    # the records of all points as models of their own: point after point
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (trained, states))
    task, rest = jax.tree.map(lambda leaf: np.repeat(leaf, run.times.size, axis=0), (models[0], models[1].split()[1]))
    risks, _ = each_risk((task, eqx.combine(flat[0], rest), flat[1]), method)
    risks = risks.reshape(count, -1)
    return [
        Trajectory(
            time=jnp.asarray(run.times),
            order=_as_arrays(row(states, i)),
            activation=eqx.combine(_as_arrays(row(trained, i)), activations[i].split()[1]),
            risk=jnp.asarray(risks[i]),
            loss=None,
            loss_error=None,
            result=jnp.asarray(codes[i]),
            task=tasks[i],
            settings=run.settings(activations[i], heads, float(step_sizes[i])),
        )
        for i in range(count)
    ]


def _stacked_models(tasks: Any, activations: Any, orders: Any) -> tuple[SingleLocation, Activation, OrderParameters]:
    """The points with a leading axis, after checks of each."""
    models = (
        _stacked("tasks", tasks, SingleLocation),
        _stacked("activations", activations, Activation),
        _stacked("orders", orders, OrderParameters),
    )
    for name, given in (("activations", activations), ("orders", orders)):
        if len(given) != len(tasks):
            raise invalid(name, f"one for each of {len(tasks)} tasks", f"{len(given)}")
    if orders[0].m.ndim != 2:
        raise invalid("orders", "single states: m of shape (H, F)", f"m of shape {orders[0].m.shape}")
    check_model(tasks[0], activations[0], orders[0])
    activations[0].check_heads(orders[0].heads)
    return models


def _stacked(name: str, trees: Any, kind: type) -> Any:
    """Trees of one structure as one, whose NumPy arrays have a leading axis."""
    if not isinstance(trees, Sequence) or len(trees) == 0:
        raise invalid(name, f"a sequence of at least one {kind.__name__}", repr(trees))
    for i, tree in enumerate(trees):
        instance(f"{name}[{i}]", tree, kind)
    if not is_concrete(*trees):
        raise invalid(name, "known numbers: a sweep is driven from Python, not jitted", "tracers")
    first, leaves = _form(trees[0]), []
    if all(tree is trees[0] for tree in trees):
        return copied(jax.tree.map(_number, trees[0]), len(trees))
    for i, tree in enumerate(trees):
        if _form(tree) != first:
            raise invalid(f"{name}[{i}]", f"classes, shapes and fixed fields as in {name}[0], {trees[0]}", tree)
        leaves.append([_number(leaf) for leaf in jax.tree.leaves(tree)])
    return jax.tree.unflatten(first[0], [np.stack(same) for same in zip(*leaves, strict=True)])


def _form(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _number(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array


def _check_method(method: Any) -> None:
    if not (method is None or isinstance(method, (Quadrature, MonteCarlo))):
        raise invalid("method", "Quadrature(...), MonteCarlo(...) or None", repr(method))


def _as_arrays(found: Any) -> Any:
    return jax.tree.map(jnp.asarray, found)
