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
from theory.activation import Activation, BayesSoftmax
from theory.corrector import gradient_covariance
from theory.fit import State, fit, repeated
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
    bias_rate: float = 1.0,
    scale_rate: float = 1.0,
    method: Method | None = None,
    tolerance: float = 1e-6,
    corrector_points: int = 2048,
    progress: bool = True,
    throw: bool = True,
) -> Trajectory:
    """Integrate dm/dτ = −∂E/∂m − 2(∂E/∂r)m and the same for r, from τ = 0 (docs/model.md §4).

    Trained biases and scales of the activation move with them, db/dτ = −κ_b ∂E/∂b and dc/dτ = −κ_c ∂E/∂c.

    Without corrector the state is (m, W), r = m mᵀ + W Wᵀ, which keeps r positive semi-definite; with it, (m, r_⊥),
    dr_⊥/dτ = −2[(∂E/∂r) r_⊥ + transpose] + (η/B) C, C from `corrector_points` Sobol points per mixture component
    (fixed, so that the flow is a flow; relative error of C about 1 %).

    Driven from Python, because it chooses node counts by the states it meets: not for use inside `jit` or `vmap`.

    Args:
        task: the task.
        activation: the attention activation; what it trains starts at its values, in every replica.
        order: start at τ = 0; leading axis = replicas, each with its own start.
        times: strictly increasing τ ≥ 0 at which to record, τ = η·steps/D.
        step_size: η/B of the SGD that is described; 0 is gradient flow.
        bias_rate: κ_b.
        scale_rate: κ_c.
        method: of `population_risk`; default `Quadrature(1e-7)`, with a joint normalizer `Quadrature(1e-4)`, with
            nodes fitted to the hardest recorded state.
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
    trained, rest = activation.split()
    start: State = (repeated(trained, (starts.m.shape[0],)), starts)
    rates = {"bias": non_negative("bias_rate", bias_rate, 0), "scale": non_negative("scale_rate", scale_rate, 0)}
    points = None
    if step_size > 0:
        points = jnp.asarray(normal_points(corrector_points, int(task.length), order.heads, seed=0))
    if method is None:
        method = default_method(activation, 1e-4 if isinstance(activation, BayesSoftmax) else 1e-7)
    flow = _Flow(task, rest, {**rates, "step_size": jnp.asarray(step_size)}, points)
    solve = partial(_solve_all, flow, start, times, progress=progress)
    if isinstance(method, Quadrature) and method.nodes is None:
        rough = fit(Quadrature(max(1e-4, method.tolerance)), task, rest, start)
        # once roughly, to see how far the scores will spread
        states, _ = _solve_all(flow, start, times, rough, max(tolerance, 1e-3), progress=False)
        fitted = _hardest(method, task, rest, states, rough)
        while True:
            states, codes = solve(fitted, tolerance)
            wider = _hardest(method, task, rest, states, fitted)
            if wider == fitted:
                break
            fitted = wider
    else:
        fitted = method
        states, codes = solve(fitted, tolerance)

    recorded = eqx.combine(states[0], rest)
    trajectory = Trajectory(
        time=jnp.asarray(times),
        order=states[1],
        activation=recorded,
        risk=recorded_risk(task, recorded, states[1], method),
        loss=None,
        loss_error=None,
        result=codes,
        task=task,
        settings={
            "source": "gradient_flow",
            "activation": activation.name,
            "heads": order.heads,
            "step_size": step_size,
            "bias_rate": float(rates["bias"]),
            "scale_rate": float(rates["scale"]),
            "method": repr(method),
            "tolerance": tolerance,
            "corrector_points": corrector_points if step_size > 0 else 0,
        },
    )
    trajectory = trajectory[0] if single else trajectory
    failed = np.flatnonzero(np.asarray(codes))
    if throw and failed.size:
        reached = np.isfinite(np.asarray(states[1].m[failed[0]])).all((-1, -2))
        raise RunFailed(
            f"gradient_flow: {failed.size} of {len(codes)} runs did not reach their end; replica {failed[0]}: "
            f"{Result(int(codes[failed[0]])).message} after τ = {times[reached][-1] if reached.any() else 0.0:g}. "
            "The records up to there are in `.trajectory` of this error (throw=False returns them).",
            trajectory,
        )
    return trajectory


class _Flow(eqx.Module):
    """The right-hand side of the flow; its numbers are traced, so that changing one never recompiles."""

    task: SingleLocation
    rest: Activation  # what is not trained
    rates: dict[str, Array]  # κ of each trained leaf by its name, and η/B as "step_size"
    points: Float[Array, "L H N"] | None  # of the corrector; None for gradient flow

    def slopes(self, state: State, method: Method) -> State:
        """−∂E in the trained leaves (times κ), dm/dτ = −∂E/∂m − 2(∂E/∂r)m, and in place of r −∂E/∂r."""

        def risk(state: State) -> Array:
            return evaluate_risk(self.task, eqx.combine(state[0], self.rest), state[1], method)[0]

        trained, order = jax.tree.map(jnp.negative, jax.grad(risk)(state))
        trained = jax.tree.map_with_path(lambda path, slope: self.rates[path[0].name] * slope, trained)
        dm = order.m + 2 * order.r @ state[1].m
        return trained, eqx.tree_at(lambda o: o.m, order, dm)

    def perpendicular(self, state: State, slope: Array) -> Array:
        """dr_⊥/dτ = −2[(∂E/∂r) r_⊥ + transpose] + (η/B) C, slope = −∂E/∂r."""
        change = 2 * slope @ state[1].r_perp
        change = change + change.T
        if self.points is None:
            return change
        activation = eqx.combine(state[0], self.rest).resolved(jnp.diagonal(state[1].r))
        noise = gradient_covariance(activation, score_law(self.task, state[1]), self.points)
        return change + self.rates["step_size"] * noise


def drift(
    task: SingleLocation,
    activation: Activation,
    order: OrderParameters,
    *,
    step_size: float | Array = 0.0,
    bias_rate: float | Array = 1.0,
    scale_rate: float | Array = 1.0,
    method: Method = _DEFAULT,
    points: Float[Array, "L H N"] | None = None,
) -> State:
    """(d(trained leaves)/dτ, (dm/dτ, dr/dτ)) at one state: the right-hand side of the flow.

    `points` as for `gradient_covariance`, without which there is no corrector.
    """
    trained, rest = activation.split()
    rates = {"bias": bias_rate, "scale": scale_rate, "step_size": step_size}
    flow = _Flow(task, rest, {name: jnp.asarray(rate) for name, rate in rates.items()}, points)
    moved, slope = flow.slopes((trained, order), method)
    along = slope.m @ order.m.T
    dr = along + along.T + flow.perpendicular((trained, order), slope.r)
    return moved, eqx.tree_at(lambda o: o.r, slope, dr)


@eqx.filter_jit
def _solve(
    flow: _Flow,
    trained: Activation,
    m: Array,
    r_perp: Array,
    times: Array,
    method: Method,
    tolerance: Array,
    meter: dfx.AbstractProgressMeter,
) -> tuple[Activation, Array, Array, Array]:
    """Trained leaves (R, T, ...), m (R, T, H, F), r_⊥ (R, T, H, H) and result codes (R,) of a batch of starts."""
    corrected = flow.points is not None

    def field(t: Any, y: Any, args: Any) -> Any:
        del t, args
        trained, m, second = y  # W without corrector, r_⊥ with it
        r_perp = second if corrected else second @ second.T
        state = (trained, OrderParameters(m, m @ m.T + r_perp))
        moved, slope = flow.slopes(state, method)
        return moved, slope.m, flow.perpendicular(state, slope.r) if corrected else 2 * slope.r @ second

    def one(trained: Activation, m: Array, r_perp: Array) -> tuple[Activation, Array, Array, Array]:
        solution = dfx.diffeqsolve(
            dfx.ODETerm(field),
            dfx.Tsit5(),
            t0=0.0,
            t1=times[-1],
            dt0=None,
            y0=(trained, m, r_perp if corrected else root(r_perp)),
            saveat=dfx.SaveAt(ts=times),
            stepsize_controller=dfx.PIDController(rtol=tolerance, atol=tolerance),
            max_steps=_MAX_STEPS,
            progress_meter=meter,
            throw=False,
        )
        moved, ms, second = solution.ys  # pyright: ignore
        perp = second if corrected else second @ jnp.swapaxes(second, -1, -2)
        leaves = [leaf.reshape(times.shape[0], -1) for leaf in jax.tree.leaves((moved, ms, perp))]
        finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all(-1) for leaf in leaves]), axis=0)
        broken = jnp.any(jnp.stack([jnp.isnan(leaf).any() for leaf in leaves]))
        ended = solution.result == dfx.RESULTS.successful
        code = jnp.where(ended & finite.all(), Result.successful, jnp.where(broken, Result.diverged, Result.stalled))
        known = jax.tree.map(
            lambda leaf: jnp.where(finite.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.nan), (moved, ms, perp)
        )
        return *known, code.astype(jnp.int32)

    return jax.vmap(one)(trained, m, r_perp)


def _solve_all(
    flow: _Flow, start: State, times: np.ndarray, method: Method, tolerance: float, *, progress: bool
) -> tuple[State, Array]:
    """All replicas in groups of one compiled size; records with leading axes (replica, time)."""
    trained, order = start
    replicas = order.m.shape[0]
    if times[-1] == 0:
        return jax.tree.map(lambda leaf: leaf[:, None], start), jnp.zeros(replicas, jnp.int32)
    group = min(_TOGETHER, replicas)
    meter = _Meter() if progress else dfx.NoProgressMeter()
    collected = []
    for first in range(0, replicas, group):
        index = np.minimum(np.arange(first, first + group), replicas - 1)  # the last group is filled up
        own, m, r_perp = jax.tree.map(lambda leaf: leaf[index], (trained, order.m, order.r_perp))  # noqa: B023
        collected.append(_solve(flow, own, m, r_perp, jnp.asarray(times), method, jnp.asarray(tolerance), meter))
    moved, m, r_perp, codes = jax.tree.map(lambda *parts: jnp.concatenate(parts)[:replicas], *collected)
    # a solver keeps r_⊥ positive semi-definite to its tolerance only: put what is recorded back on the cone
    known = jnp.isfinite(r_perp)
    factor = root(jnp.where(known, r_perp, 0.0))
    r_perp = jnp.where(known, factor @ factor, jnp.nan)
    # not through the constructor, which refuses the NaN of failed runs
    return (moved, eqx.tree_at(lambda o: (o.m, o.r), order, (m, m @ jnp.swapaxes(m, -1, -2) + r_perp))), codes


def _hardest(
    method: Quadrature, task: SingleLocation, rest: Activation, states: State, least: Quadrature
) -> Quadrature:
    """`method` with the nodes that the hardest state (as far as known) needs, and no fewer than `least`."""
    known = np.isfinite(np.asarray(states[1].r)).all((-1, -2))
    if not known.any():
        return least
    return fit(method, task, rest, jax.tree.map(lambda leaf: leaf[known], states)).at_least(least)
