"""The flow of the order parameters under one-pass SGD as D → ∞."""

import time as clock
from functools import partial
from typing import Any

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from theory._checks import invalid, is_concrete, non_negative, times_array, whole
from theory._each import copied, finite
from theory._montecarlo import root
from theory._nodes import normal_points
from theory.activation import Activation, BayesSoftmax
from theory.corrector import gradient_covariance
from theory.fit import Grid, Model, State, apart, fit_each, grid_at, laid_out, too_wide
from theory.method import Method, MonteCarlo, Quadrature, default_method
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
        corrector_points: Sobol points per mixture component for C; r errs by some .01 at η/B = 8 with the default,
            less with more (docs/model.md §15).
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
    step_size = float(non_negative("step_size", step_size, 0))
    if order.m.ndim not in (2, 3):
        raise invalid("order", "m of shape (H, F) or (replica, H, F)", f"m of shape {order.m.shape}")
    single = order.m.ndim == 2
    starts = jax.tree.map(lambda leaf: leaf[None], order) if single else order
    method = flow_method(activation) if method is None else method
    replicas, rest = starts.m.shape[0], activation.split()[1]
    run = Run(times, bias_rate, scale_rate, method, tolerance, corrector_points)
    models = (*copied((task, activation), replicas), jax.tree.map(np.asarray, starts))
    states, codes, within = run.solved(
        models, np.full(replicas, step_size), progress=progress, group=min(_TOGETHER, replicas)
    )
    if not within.all():
        raise too_wide(run.accuracy, "more")
    recorded = eqx.combine(states[0], rest)
    trajectory = Trajectory(
        time=jnp.asarray(run.times),
        order=states[1],
        activation=recorded,
        risk=recorded_risk(task, recorded, states[1], method),
        loss=None,
        loss_error=None,
        result=codes,
        task=task,
        settings=run.settings(activation, order.heads, step_size),
    )
    trajectory = trajectory[0] if single else trajectory
    failed = np.flatnonzero(np.asarray(codes))
    if throw and failed.size:
        reached = np.isfinite(np.asarray(states[1].m[failed[0]])).all((-1, -2))
        raise RunFailed(
            f"gradient_flow: {failed.size} of {len(codes)} runs did not reach their end; replica {failed[0]}: "
            f"{Result(int(codes[failed[0]])).message} after τ = {run.times[reached][-1] if reached.any() else 0.0:g}. "
            "The records up to there are in `.trajectory` of this error (throw=False returns them).",
            trajectory,
        )
    return trajectory


def flow_method(activation: Activation) -> Method:
    """How flows integrate unless they are told."""
    return default_method(activation, 1e-4 if isinstance(activation, BayesSoftmax) else 1e-7)


class Run:
    """Options of the flow, checked, and the solution for any number of models by code compiled once."""

    def __init__(
        self,
        times: Any,
        bias_rate: float,
        scale_rate: float,
        method: Method,
        tolerance: float,
        corrector_points: int,
    ):
        self.times, self.method = times_array("times", times), method
        if not (isinstance(tolerance, (float, int)) and 1e-13 <= tolerance <= 1e-1):
            raise invalid("tolerance", "a number from 1e-13 (float64 reaches no further) to 0.1", repr(tolerance))
        self.tolerance, self.corrector_points = tolerance, whole("corrector_points", corrector_points, 2)
        self.bias_rate = float(non_negative("bias_rate", bias_rate, 0))
        self.scale_rate = float(non_negative("scale_rate", scale_rate, 0))

    @property
    def accuracy(self) -> float:
        """Tolerance of the integrals."""
        assert isinstance(self.method, Quadrature)
        return self.method.tolerance

    def settings(self, activation: Activation, heads: int, step_size: float) -> dict[str, Any]:
        """How a flow was made, for its trajectory."""
        return {
            "source": "gradient_flow",
            "activation": activation.name,
            "heads": heads,
            "step_size": step_size,
            "bias_rate": self.bias_rate,
            "scale_rate": self.scale_rate,
            "method": repr(self.method),
            "tolerance": self.tolerance,
            "corrector_points": self.corrector_points if step_size > 0 else 0,
        }

    def solved(
        self, models: Model, step_sizes: Float[np.ndarray, " N"], *, progress: bool, group: int = _TOGETHER
    ) -> tuple[State, Int[Array, " N"], Bool[np.ndarray, " N"]]:
        """States (model, time, ...) of the flows from these models, their result codes, and which can be integrated
        with the nodes allowed: the others are NaN. Nodes are fitted to the hardest recorded state of all.

        So many as `group` are solved at once: rounding depends on that number, not on which they are."""
        task, activation, order = models
        trained, rest = activation.split()
        chosen = finite((models, step_sizes))
        rates = {"bias": self.bias_rate, "scale": self.scale_rate}
        flow = _Flow(task, rest, {**copied(rates, chosen.size), "step_size": step_sizes}, None)
        if (step_sizes > 0).any():
            points = normal_points(self.corrector_points, int(task.length[0]), order.heads, seed=0)
            flow = eqx.tree_at(lambda f: f.points, flow, jnp.asarray(points), is_leaf=lambda leaf: leaf is None)
        start: State = (trained, order)
        solve = partial(_solve_all, flow, start, self.times, group=group)
        method = self.method
        if not (isinstance(method, Quadrature) and method.nodes is None):
            return *solve(chosen, method, self.tolerance, progress=progress), chosen
        begin = jax.tree.map(lambda leaf: leaf[:, None], start)
        rough, within = _hardest(Quadrature(max(1e-4, method.tolerance)), flow, begin, chosen)
        chosen &= within
        # once roughly, to see how far the scores will spread
        states, _ = solve(chosen, rough, max(self.tolerance, 1e-3), progress=False)
        fitted, within = _hardest(method, flow, states, chosen, rough)
        while True:
            chosen &= within
            states, codes = solve(chosen, fitted, self.tolerance, progress=progress)
            wider, within = _hardest(method, flow, states, chosen, fitted)
            if wider == fitted and within[chosen].all():
                return states, codes, chosen
            fitted = wider


class _Flow(eqx.Module):
    """The right-hand side of the flow; its numbers are traced, so that changing one never recompiles.

    For several flows at once all but the points have a leading axis.
    """

    task: SingleLocation
    rest: Activation  # what is not trained
    rates: dict[str, Any]  # κ of each trained leaf by its name, and η/B as "step_size"
    points: Float[Array, "L H N"] | None  # of the corrector; None for gradient flow

    def slopes(self, state: State, method: Method | Grid) -> State:
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
    method: MonteCarlo | Grid,
    tolerance: Array,
    meter: dfx.AbstractProgressMeter,
) -> tuple[Activation, Array, Array, Array]:
    """Trained leaves (R, T, ...), m (R, T, H, F), r_⊥ (R, T, H, H) and result codes (R,) of a batch of starts."""
    corrected = flow.points is not None
    several, fixed = eqx.partition(_numbers(flow), eqx.is_array)

    def one(own: Any, trained: Activation, m: Array, r_perp: Array) -> tuple[Activation, Array, Array, Array]:
        single = _Flow(**eqx.combine(own, fixed), points=flow.points)

        def field(t: Any, y: Any, args: Any) -> Any:
            del t, args
            trained, m, second = y  # W without corrector, r_⊥ with it
            r_perp = second if corrected else second @ second.T
            state = (trained, OrderParameters(m, m @ m.T + r_perp))
            moved, slope = single.slopes(state, method)
            return moved, slope.m, single.perpendicular(state, slope.r) if corrected else 2 * slope.r @ second

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

    return jax.vmap(one)(several, trained, m, r_perp)


def _solve_all(
    flow: _Flow,
    start: State,
    times: np.ndarray,
    chosen: Bool[np.ndarray, " N"],
    method: Method,
    tolerance: float,
    *,
    progress: bool,
    group: int,
) -> tuple[State, Array]:
    """The chosen flows in groups of one compiled size; records with leading axes (flow, time), NaN of the others."""
    trained, order = start
    if times[-1] == 0:
        records = jax.tree.map(lambda leaf: jnp.where(_beside(chosen, leaf), leaf, jnp.nan)[:, None], start)
        return records, jnp.where(chosen, Result.successful, Result.diverged).astype(jnp.int32)
    meter = _Meter() if progress else dfx.NoProgressMeter()
    begin = (trained, order.m, np.asarray(order.r_perp))
    rows, parts = [], []
    for part in _apart(flow, start, chosen, method):
        own, evaluation = _prepared(flow, start, part, method)
        index = np.flatnonzero(part)
        for first in range(0, index.size, group):
            filled = index[np.minimum(np.arange(first, first + group), index.size - 1)]  # the last group is filled up
            lanes, starts = jax.tree.map(
                # a length that samples are drawn for is one number
                lambda leaf: leaf if np.ndim(leaf) == 0 else jnp.asarray(leaf[filled]),  # noqa: B023
                (_numbers(own), begin),
            )
            solution = _solve(
                _Flow(**lanes, points=own.points),
                starts[0],
                starts[1],
                starts[2],
                jnp.asarray(times),
                evaluation,
                jnp.asarray(tolerance),
                meter,
            )
            rows.append(index[first : first + group])
            parts.append(solution)

    def placed(nothing: Any, like: Any, *found: Array) -> Array:
        whole = np.full((chosen.size, *like), nothing)
        for own, values in zip(rows, found, strict=True):
            whole[own] = np.asarray(values)[: own.size]
        return jnp.asarray(whole)

    records = jax.tree.map(
        lambda leaf, *found: placed(np.nan, (times.size, *leaf.shape[1:]), *found), begin, *(p[:3] for p in parts)
    )
    codes = placed(np.int32(Result.diverged), (), *(p[3] for p in parts))
    moved, m, r_perp = records
    # a solver keeps r_⊥ positive semi-definite to its tolerance only: put what is recorded back on the cone
    known = jnp.isfinite(r_perp)
    factor = root(jnp.where(known, r_perp, 0.0))
    r_perp = jnp.where(known, factor @ factor, jnp.nan)
    # not through the constructor, which refuses the NaN of failed runs
    return (moved, eqx.tree_at(lambda o: (o.m, o.r), order, (m, m @ jnp.swapaxes(m, -1, -2) + r_perp))), codes


def _numbers(flow: _Flow) -> dict[str, Any]:
    """What differs between flows."""
    return {"task": flow.task, "rest": flow.rest, "rates": flow.rates}


def _apart(flow: _Flow, start: State, chosen: Bool[np.ndarray, " N"], method: Method) -> list[Bool[np.ndarray, " N"]]:
    """The chosen flows in parts that share compiled code: with one grid, and with or without corrector."""
    models = (flow.task, eqx.combine(start[0], flow.rest), start[1])
    corrected = flow.rates["step_size"] > 0
    both = (chosen & corrected, chosen & ~corrected)
    return [part for each in both for part in apart(method, models, each)]


def _prepared(
    flow: _Flow, start: State, part: Bool[np.ndarray, " N"], method: Method
) -> tuple[_Flow, MonteCarlo | Grid]:
    """The flow and the grid or samples of a part."""
    first = np.flatnonzero(part)[0]
    if flow.rates["step_size"][first] == 0:
        flow = _Flow(flow.task, flow.rest, flow.rates, None)
    if isinstance(method, MonteCarlo):
        return eqx.tree_at(lambda f: f.task.length, flow, int(flow.task.length[first])), method
    models = (flow.task, eqx.combine(start[0], flow.rest), start[1])
    return flow, laid_out(grid_at(method, models, part), models)


def _hardest(
    method: Quadrature,
    flow: _Flow,
    states: State,
    chosen: Bool[np.ndarray, " N"],
    least: Quadrature | None = None,
) -> tuple[Quadrature, Bool[np.ndarray, " N"]]:
    """`method` with the nodes that the hardest of the recorded states needs, and no fewer than `least`; and which flows
    have no state that needs too many."""
    records = states[1].m.shape[1]
    trained, order = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), states)
    task, rest = jax.tree.map(lambda leaf: np.repeat(leaf, records, axis=0), (flow.task, flow.rest))
    models = (task, eqx.combine(trained, rest), order)
    known = finite(models) & np.repeat(chosen, records)
    fits = fit_each(method, models, known) if known.any() else []
    integrated = np.any([~known, *(own for _, own in fits)], axis=0)
    for each in [fitted for fitted, _ in fits] + [least]:
        method = method.at_least(each) if isinstance(each, Quadrature) else method
    return method, integrated.reshape(-1, records).all(1)


def _beside(chosen: np.ndarray, leaf: Any) -> np.ndarray:
    return chosen.reshape(-1, *[1] * (leaf.ndim - 1))
