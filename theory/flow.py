"""The flow of the order parameters under one-pass SGD as D → ∞."""

import time as clock
from functools import partial
from typing import Any

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from theory._checks import invalid, is_concrete, non_negative, times_array, whole
from theory._montecarlo import root
from theory._nodes import normal_points
from theory.activation import Activation
from theory.corrector import gradient_covariance
from theory.method import Method, Quadrature, default_method
from theory.order import OrderParameters
from theory.risk import check_model, evaluate_risk, recorded_risk
from theory.scores import score_law
from theory.task import SingleLocation
from theory.trajectory import Result, RunFailed, Trajectory

_TOGETHER = 8  # replicas in one compiled solve
_MAX_STEPS = 10_000
_DEFAULT = Quadrature()


class _Meter(dfx.TqdmProgressMeter):
    """A bar that stays away from solves of under two seconds."""

    @staticmethod
    def _init_bar() -> tqdm:
        return tqdm(
            total=100, desc="flow", delay=2, bar_format="{desc} {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
        )

    @staticmethod
    def _step_bar(bar: tqdm, progress: Any) -> None:
        bar.n = 100 * float(progress)
        if clock.time() > bar.start_t + bar.delay:
            bar.refresh()


def gradient_flow(
    task: SingleLocation,
    activation: Activation,
    order: OrderParameters,
    times: Any,
    *,
    step_size: float = 0.0,
    method: Method | None = None,
    tolerance: float = 1e-6,
    corrector_points: int = 2048,
    progress: bool = True,
    throw: bool = True,
) -> Trajectory:
    """Integrate dm/dτ = −∂E/∂m − 2(∂E/∂r)m and the same for r, from τ = 0 (docs/model.md §4).

    Without corrector the state is (m, W), r = m mᵀ + W Wᵀ, which keeps r positive semi-definite; with it, (m, r_⊥),
    dr_⊥/dτ = −2[(∂E/∂r) r_⊥ + transpose] + (η/B) C, C from `corrector_points` Sobol points per mixture component
    (fixed, so that the flow is a flow; relative error of C about 1 %).

    Driven from Python, because it chooses node counts by the states it meets: not for use inside `jit` or `vmap`.

    Args:
        task: the task.
        activation: the attention activation.
        order: start at τ = 0; leading axis = replicas, each with its own start.
        times: strictly increasing τ ≥ 0 at which to record, τ = η·steps/D.
        step_size: η/B of the SGD that is described; 0 is gradient flow.
        method: of `population_risk`; default `Quadrature(1e-7)` with nodes fitted to the hardest recorded state.
        tolerance: relative and absolute error per step of the solver (Tsit5 with adaptive steps). On the
            reference trajectory (docs/model.md §9) the default errs by 4e-6 in m, 2e-5 in r and 6e-7 in the risk.
        corrector_points: Sobol points per mixture component for C.
        progress: show a progress bar if it takes over two seconds.
        throw: raise `RunFailed` (which keeps what was computed) if a replica does not reach the end; otherwise
            its code in `result` says so and its later records are NaN.

    Returns:
        A `Trajectory` with `risk` and without `loss`.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=10, snr=1.0, prior=th.sign_flips([2, 0, 0], [0, 2.5, 1.5]))
        >>> start = th.OrderParameters([[0.01, 0.02, 0.0], [0.0, -0.02, 0.01]], [[0.1, 0.0], [0.0, 0.1]])
        >>> flow = th.gradient_flow(task, th.Softmax(), start, [0.0, 5.0, 10.0])
        >>> flow.order.m.shape
        (3, 2, 3)
    """
    check_model(task, activation, order)
    if not is_concrete(task, activation, order, times, step_size):
        raise invalid("task, order, times", "known numbers: gradient_flow is driven from Python, not jitted", "tracers")
    times = times_array("times", times)
    step_size = float(non_negative("step_size", step_size, 0))
    if not (isinstance(tolerance, (float, int)) and 1e-13 <= tolerance <= 1e-1):
        raise invalid("tolerance", "a number from 1e-13 (float64 reaches no further) to 0.1", repr(tolerance))
    whole("corrector_points", corrector_points, 2)
    if order.m.ndim not in (2, 3):
        raise invalid("order", "m of shape (H, F) or (replica, H, F)", f"m of shape {order.m.shape}")
    single = order.m.ndim == 2
    starts = jax.tree.map(lambda leaf: leaf[None], order) if single else order
    points = None
    if step_size > 0:
        points = jnp.asarray(normal_points(corrector_points, int(task.length), order.heads, seed=0))
    method = default_method(activation, 1e-7) if method is None else method
    solve = partial(_solve_all, task, activation, starts, times, step_size, points=points, progress=progress)
    if isinstance(method, Quadrature) and method.nodes is None:
        rough = Quadrature(1e-4).fitted(task, activation, starts)
        states, _ = solve(rough, max(tolerance, 1e-3), progress=False)  # to see how far the scores will spread
        fitted = _hardest(method, task, activation, states, rough)
        while True:
            states, codes = solve(fitted, tolerance)
            wider = _hardest(method, task, activation, states, fitted)
            if wider == fitted:
                break
            fitted = wider
    else:
        fitted = method
        states, codes = solve(fitted, tolerance)

    trajectory = Trajectory(
        time=jnp.asarray(times),
        order=states,
        activation=activation,
        risk=recorded_risk(task, activation, states, method),
        loss=None,
        loss_error=None,
        result=codes,
        task=task,
        settings={
            "source": "gradient_flow",
            "heads": order.heads,
            "step_size": step_size,
            "method": repr(method),
            "tolerance": tolerance,
            "corrector_points": corrector_points if step_size > 0 else 0,
        },
    )
    trajectory = trajectory[0] if single else trajectory
    failed = np.flatnonzero(np.asarray(codes))
    if throw and failed.size:
        reached = np.isfinite(np.asarray(states.m[failed[0]])).all((-1, -2))
        raise RunFailed(
            f"gradient_flow: {failed.size} of {len(codes)} runs did not reach their end; replica {failed[0]}: "
            f"{Result(int(codes[failed[0]])).message} after τ = {times[reached][-1] if reached.any() else 0.0:g}. "
            "The records up to there are in `.trajectory` of this error (throw=False returns them).",
            trajectory,
        )
    return trajectory


def drift(
    task: SingleLocation,
    activation: Activation,
    order: OrderParameters,
    *,
    step_size: float | Array = 0.0,
    method: Method = _DEFAULT,
    points: Float[Array, "L H N"] | None = None,
) -> OrderParameters:
    """(dm/dτ, dr/dτ) at one state: the right-hand side of the flow; `points` as for `gradient_covariance`."""
    dm, slope = _slopes(task, activation, order, method)
    change = dm @ order.m.T + 2 * slope @ order.r_perp
    dr = change + change.T
    if points is not None:
        dr = dr + step_size * gradient_covariance(activation, score_law(task, order), points)
    return eqx.tree_at(lambda o: (o.m, o.r), order, (dm, dr))


def _slopes(
    task: SingleLocation, activation: Activation, order: OrderParameters, method: Method
) -> tuple[Array, Array]:
    """dm/dτ = −∂E/∂m − 2(∂E/∂r)m, and −∂E/∂r."""
    slope = jax.grad(lambda o: evaluate_risk(task, activation, o, method)[0])(order)
    return -slope.m - 2 * slope.r @ order.m, -slope.r


@eqx.filter_jit
def _solve(
    task: SingleLocation,
    activation: Activation,
    m: Array,
    r_perp: Array,
    times: Array,
    step_size: Array,
    method: Method,
    tolerance: Array,
    points: Array | None,
    meter: dfx.AbstractProgressMeter,
) -> tuple[Array, Array, Array]:
    """m (R, T, H, F), r_⊥ (R, T, H, H) and result codes (R,) of a batch of starts."""

    def gradient_field(t: Any, y: tuple[Array, Array], args: Any) -> tuple[Array, Array]:
        del t, args
        m, w = y
        dm, slope = _slopes(task, activation, OrderParameters(m, m @ m.T + w @ w.T), method)
        return dm, 2 * slope @ w

    def corrected_field(t: Any, y: tuple[Array, Array], args: Any) -> tuple[Array, Array]:
        del t, args
        m, r_perp = y
        order = OrderParameters(m, m @ m.T + r_perp)
        dm, slope = _slopes(task, activation, order, method)
        change = 2 * slope @ r_perp
        assert points is not None
        noise = gradient_covariance(activation, score_law(task, order), points)
        return dm, change + change.T + step_size * noise

    def one(m: Array, r_perp: Array) -> tuple[Array, Array, Array]:
        solution = dfx.diffeqsolve(
            dfx.ODETerm(gradient_field if points is None else corrected_field),
            dfx.Tsit5(),
            t0=0.0,
            t1=times[-1],
            dt0=None,
            y0=(m, root(r_perp) if points is None else r_perp),
            saveat=dfx.SaveAt(ts=times),
            stepsize_controller=dfx.PIDController(rtol=tolerance, atol=tolerance),
            max_steps=_MAX_STEPS,
            progress_meter=meter,
            throw=False,
        )
        ms, second = solution.ys  # pyright: ignore
        perp = second @ jnp.swapaxes(second, -1, -2) if points is None else second
        finite = jnp.isfinite(perp).all((-1, -2)) & jnp.isfinite(ms).all((-1, -2))
        keep = finite[:, None, None]
        ended = solution.result == dfx.RESULTS.successful
        broken = jnp.isnan(perp).any() | jnp.isnan(ms).any()
        code = jnp.where(ended & finite.all(), Result.successful, jnp.where(broken, Result.diverged, Result.stalled))
        return jnp.where(keep, ms, jnp.nan), jnp.where(keep, perp, jnp.nan), code.astype(jnp.int32)

    return jax.vmap(one)(m, r_perp)


def _solve_all(
    task: SingleLocation,
    activation: Activation,
    starts: OrderParameters,
    times: np.ndarray,
    step_size: float,
    method: Method,
    tolerance: float,
    *,
    points: Array | None,
    progress: bool,
) -> tuple[OrderParameters, Array]:
    """All replicas in groups of one compiled size; records with leading axes (replica, time)."""
    replicas = starts.m.shape[0]
    if times[-1] == 0:
        return jax.tree.map(lambda leaf: leaf[:, None], starts), jnp.zeros(replicas, jnp.int32)
    group = min(_TOGETHER, replicas)
    meter = _Meter() if progress else dfx.NoProgressMeter()
    collected = []
    for first in range(0, replicas, group):
        index = np.minimum(np.arange(first, first + group), replicas - 1)  # the last group is filled up
        collected.append(
            _solve(
                task,
                activation,
                starts.m[index],
                starts.r_perp[index],
                jnp.asarray(times),
                jnp.asarray(step_size),
                method,
                jnp.asarray(tolerance),
                points,
                meter,
            )
        )
    m, r_perp, codes = (jnp.concatenate(parts)[:replicas] for parts in zip(*collected, strict=True))
    # a solver keeps r_⊥ positive semi-definite to its tolerance only: put what is recorded back on the cone
    known = jnp.isfinite(r_perp)
    factor = root(jnp.where(known, r_perp, 0.0))
    r_perp = jnp.where(known, factor @ factor, jnp.nan)
    # not through the constructor, which refuses the NaN of failed runs
    return eqx.tree_at(lambda o: (o.m, o.r), starts, (m, m @ jnp.swapaxes(m, -1, -2) + r_perp)), codes


def _hardest(
    method: Quadrature, task: SingleLocation, activation: Activation, states: OrderParameters, least: Quadrature
) -> Quadrature:
    """`method` with the nodes that the hardest state (as far as known) needs, and no fewer than `least`."""
    known = np.isfinite(np.asarray(states.r)).all((-1, -2))
    found = method.fitted(task, activation, states[known]) if known.any() else least
    nodes, frequencies = (max(a or 0, b or 0) for a, b in zip(found.counts, least.counts, strict=True))
    return Quadrature(method.tolerance, nodes, frequencies)
