"""Finite-D fluctuations around the flow: a band for every order parameter, and an SDE for the escape from saddles.

One step of SGD moves x = (trained leaves, m, r) by η/D times the mean over the batch of increments ξ, which have the
mean f(x) = dx/dτ, the drift with corrector, and a covariance Σ(x). Around the flow the deviation is therefore Gaussian
of order D^-1/2, with the covariance S (docs/model.md §15),

    dS/dτ = J S + S Jᵀ + (η/(B D)) Σ,   J = ∂f/∂x.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float
from scipy.interpolate import CubicSpline
from scipy.linalg import expm
from tqdm import tqdm

from theory._checks import instance, invalid, non_negative, positive, times_array, typed_key, whole
from theory._increments import flat_of, increments, order_of, shaped, square
from theory._montecarlo import root
from theory._nodes import normal_points
from theory.activation import Activation
from theory.fit import State, fit, flat, repeated
from theory.flow import drift
from theory.method import Method, Quadrature
from theory.order import OrderParameters
from theory.risk import check_model, recorded_risk
from theory.task import SingleLocation
from theory.trajectory import Result, Trajectory

_SUBSTEPS = 8  # between two records, for the covariance equation
_CORRECTOR_POINTS = 1024  # of the points, for the corrector's part of J
_TOGETHER = 8  # replicas side by side


class Fluctuations(eqx.Module):
    """Predicted covariance of the finite-D deviation from a flow.

    Coordinates x are flat: trained leaves in the order of `activation.trained`, m row by row, then the upper
    triangle of r row by row.

    Attributes:
        time: (T,) clock τ.
        covariance: (..., T, N, N) S.
        rates: (..., T, N, N) J, whose eigenvalues are the local growth rates.
        noise: (..., T, N, N) Σ of one sample.
        propagators: (..., T−1, N, N) what a deviation at a record has become at the next one, but for new noise.
        error: relative error of the standard deviations from the spacing of the records (largest change when every
            second one is left out, over the largest deviation of that coordinate).
        heads: H.
        features: F.
        trained: (name, size) of the trained leaves.
        dim: D.
        step_size: η/B.
    """

    time: Float[np.ndarray, " T"]
    covariance: Float[np.ndarray, "*batch T N N"]
    rates: Float[np.ndarray, "*batch T N N"]
    noise: Float[np.ndarray, "*batch T N N"]
    propagators: Float[np.ndarray, "*batch U N N"]
    error: float
    heads: int = eqx.field(static=True)
    features: int = eqx.field(static=True)
    trained: tuple[tuple[str, tuple[int, ...]], ...] = eqx.field(static=True)
    dim: int = eqx.field(static=True)
    step_size: float = eqx.field(static=True)

    @property
    def replicas(self) -> int | None:
        """Number of paths, None for a single one."""
        return None if self.covariance.ndim == 3 else self.covariance.shape[0]

    def _deviation(self) -> Float[np.ndarray, "*batch T N"]:
        return np.sqrt(np.clip(np.diagonal(self.covariance, axis1=-2, axis2=-1), 0, None))

    @property
    def m(self) -> Float[np.ndarray, "*batch T H F"]:
        """Standard deviation of m."""
        values = self._deviation()[..., self.columns("m")]
        return values.reshape(*values.shape[:-1], self.heads, self.features)

    @property
    def r(self) -> Float[np.ndarray, "*batch T H H"]:
        """Standard deviation of r."""
        return square(self._deviation()[..., self.columns("r")], self.heads)

    def leaf(self, name: str) -> Float[np.ndarray, "..."]:
        """Standard deviation of a trained leaf."""
        for own, shape in self.trained:
            if own == name:
                values = self._deviation()[..., self.columns(name)]
                return values.reshape(*values.shape[:-1], *shape)
        raise KeyError(f"{name}: expected one of {', '.join(own for own, _ in self.trained) or 'none'}")

    def columns(self, name: str) -> slice:
        """Where m, r (its upper triangle, row by row) or a trained leaf lies among the flat coordinates."""
        start, last = 0, {"m": self.heads * self.features, "r": self.heads * (self.heads + 1) // 2}
        for own, size in {**{own: int(np.prod(shape)) for own, shape in self.trained}, **last}.items():
            if own == name:
                return slice(start, start + size)
            start += size
        raise KeyError(f"{name}: expected m, r or a trained leaf")

    def draw(self, count: int, *, seed: int = 0) -> Float[np.ndarray, "*batch count T N"]:
        """Deviations of `count` runs from the Gaussian law of the whole path, correlated in time as the theory says."""
        rng, size = np.random.default_rng(seed), self.covariance.shape[-1]
        lead = self.covariance.shape[:-3]
        steps = np.swapaxes(self.propagators, -1, -2)
        fresh = self.covariance[..., 1:, :, :] - self.propagators @ self.covariance[..., :-1, :, :] @ steps
        factors = np.swapaxes(_factor(np.concatenate([self.covariance[..., :1, :, :], fresh], axis=-3)), -1, -2)
        out = np.empty((*lead, count, len(self.time), size))
        for t in range(len(self.time)):
            out[..., t, :] = rng.standard_normal((*lead, count, size)) @ factors[..., t, :, :]
            if t:
                out[..., t, :] += out[..., t - 1, :] @ steps[..., t - 1, :, :]
        return out

    def to_xarray(self) -> xr.Dataset:
        """`m_deviation`, `r_deviation` and those of trained leaves, with dimensions (replica,) time, head, …"""
        lead = ("replica", "time")[-(self.covariance.ndim - 2) :]
        data: dict[str, Any] = {
            "m_deviation": ((*lead, "head", "feature"), self.m, {"long_name": "predicted standard deviation of m"}),
            "r_deviation": ((*lead, "head", "head_"), self.r, {"long_name": "predicted standard deviation of r"}),
        }
        for name, shape in self.trained:
            data[f"{name}_deviation"] = ((*lead, *("head",) * len(shape)), self.leaf(name))
        coords = {"time": ("time", self.time, {"long_name": "clock τ = η·steps/D"})}
        return xr.Dataset(data, coords=coords, attrs={"dim": self.dim, "error": self.error})

    def __str__(self) -> str:
        lines = [
            f"Fluctuations at D = {self.dim}: {len(self.time)} times, error of the grid {self.error:.1e}",
            f"{'τ':>8}{'sd of m':>12}{'sd of r':>12}   (root mean square over entries)",
        ]
        for t in np.unique(np.linspace(0, len(self.time) - 1, 6).astype(int)):
            parts = [np.sqrt(np.mean(np.take(part, t, axis=part.ndim - 3) ** 2)) for part in (self.m, self.r)]
            lines.append(f"{self.time[t]:8.3f}" + "".join(f"{part:12.5f}" for part in parts))
        return "\n".join(lines)


def fluctuations(
    flow: Trajectory, *, dim: int, variance: Any = None, points: int = 4096, method: Method | None = None
) -> Fluctuations:
    """The covariance equation along a flow, for one-pass SGD with the same η/B at dimension D.

    Gaussian and to first order in D^-1/2: right until the deviations along a growing direction are no longer small
    (the first split), and up to the O(1/D) bias of the mean. Records must be dense enough for J(τ) and Σ(τ) to be
    interpolated between them; `error` of the result says how well they are.

    Args:
        flow: result of `gradient_flow` from τ = 0, single or with replicas, at least 4 records; its `step_size`
            η/B is that of the noise too.
        dim: D.
        variance: None compares each run with the flow from its own start, S(0) = 0. A number r_0 compares
            an ensemble of starts k_h ~ N(0, r_0 I) with this one flow: Var m = r_0/D, Var r_hh = 2r_0²/D,
            Var r_hh' = r_0²/D.
        points: Sobol points per mixture component for Σ, which errs by about 1 % (and for the corrector's part of J at
            most 1024 of them).
        method: of the drift; the exact engine to 1e-4 unless given.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=6, snr=1.0, prior=th.discrete([[1.5]]))
        >>> start = th.OrderParameters([[0.2]], [[0.8]])
        >>> flow = th.gradient_flow(task, th.Softmax(), start, [0.0, 2.5, 5.0, 7.5, 10.0], step_size=1.0)
        >>> band = th.fluctuations(flow, dim=1000)
        >>> band.m.shape
        (5, 1, 1)
    """
    instance("flow", flow, Trajectory)
    dim, points = whole("dim", dim, flow.order.features + flow.order.heads), whole("points", points, 2)
    settings = dict(flow.settings)
    if settings.get("source") != "gradient_flow":
        raise invalid("flow", "a result of gradient_flow", settings.get("source"))
    if flow.time.shape[0] < 4 or float(flow.time[0]) != 0:
        raise invalid("flow", "at least 4 records, the first at τ = 0", f"{flow.time.shape[0]} from {flow.time[0]:g}")
    if not np.isfinite(np.asarray(flow.order.r)).all():
        raise invalid("flow", "a flow that reached its end", "records that are NaN")
    trained, rest = flow.activation.split()
    states: State = (trained, flow.order)
    lead = flow.risk.shape[:-1]
    each = flat(states, len(lead) + 1)
    if method is None:
        method = fit(Quadrature(1e-4), flow.task, rest, each)
    heads, features = flow.order.heads, flow.order.features
    standard = jnp.asarray(normal_points(points, int(flow.task.length), heads + features, seed=0))
    numbers = {name: jnp.asarray(settings[name]) for name in ("step_size", "bias_rate", "scale_rate")}
    rates, noise = (np.asarray(x) for x in _along(flow.task, rest, each, numbers, standard, method))
    shapes = tuple((name, getattr(flow.activation, name).shape[len(lead) + 1 :]) for name in flow.activation.trained)
    size = rates.shape[-1]
    start = np.zeros((size, size))
    if variance is not None:
        start = _start_covariance(float(positive("variance", variance, 0)), heads, features, size) / dim
    rates, noise = (x.reshape(-1, flow.time.shape[0], size, size) for x in (rates, noise))
    time, scale = np.asarray(flow.time), settings["step_size"] / dim
    paths, steps = (np.stack(x) for x in zip(*map(partial(_integrated, time, scale, start), rates, noise), strict=True))
    kept = np.r_[np.arange(0, len(time) - 1, 2), len(time) - 1]
    coarse = [_integrated(time[kept], scale, start, j[kept], s[kept])[0] for j, s in zip(rates, noise, strict=True)]
    deviations = [np.sqrt(np.clip(np.diagonal(x, axis1=-2, axis2=-1), 0, None)) for x in (paths[:, kept], coarse)]
    largest = np.max(deviations[0], axis=1, keepdims=True)
    error = np.max(np.abs(deviations[0] - deviations[1]) / np.where(largest > 0, largest, 1.0))
    shape = (*lead, len(time), size, size)
    return Fluctuations(
        time, paths.reshape(shape), rates.reshape(shape), noise.reshape(shape),
        steps.reshape(*lead, len(time) - 1, size, size), float(error),
        heads, features, shapes, dim, float(settings["step_size"]),
    )  # fmt: skip


def stochastic_flow(
    task: SingleLocation,
    activation: Activation,
    order: OrderParameters,
    times: Any,
    *,
    dim: int,
    step_size: Any,
    key: Any,
    bias_rate: Any = 1.0,
    scale_rate: Any = 1.0,
    step: float = 0.05,
    points: int = 512,
    method: Method | None = None,
    progress: bool = True,
) -> Trajectory:
    """The Itô equation dx = f dτ + √(η/(B D)) G dw, Σ = G Gᵀ, of SGD at finite D: escapes from saddles, all orders.

    Euler–Maruyama steps in (trained leaves, m, r); after each, r_⊥ = r − m mᵀ is projected onto the positive
    semi-definite cone (negative eigenvalues to 0). G has one column per Sobol point, so that it needs no
    factorization and Σ is never indefinite. Errors: of first order in `step` (weak), O(1/D) in the drift, and those of
    the points (about 2 % of Σ at the default). `train_reduced` is the exact chain.

    Args:
        task: the task.
        activation: the activation; what it trains starts at its values.
        order: start; leading axis = replicas, replica i with the noise of `fold_in(key, i)`.
        times: strictly increasing τ ≥ 0 to record; each is moved to the nearest multiple of the step.
        dim: D.
        step_size: η/B > 0.
        key: a typed key.
        bias_rate: κ_b.
        scale_rate: κ_c.
        step: dτ.
        points: Sobol points per mixture component, for Σ and the corrector.
        method: of the drift; the exact engine to 1e-4, with nodes for heads that are specialized, unless given.
        progress: a bar if it takes over two seconds.

    Returns:
        A `Trajectory` with the replicas of `order` and `risk`, without `loss`.
    """
    check_model(task, activation, order)
    times = times_array("times", times)
    dim, points = whole("dim", dim, task.features + order.heads), whole("points", points, 2)
    numbers = {
        "step_size": positive("step_size", step_size, 0),
        "bias_rate": non_negative("bias_rate", bias_rate, 0),
        "scale_rate": non_negative("scale_rate", scale_rate, 0),
    }
    step = float(positive("step", step, 0))
    typed_key("key", key)
    single = order.m.ndim == 2
    starts = jax.tree.map(lambda leaf: leaf[None], order) if single else order
    replicas = starts.m.shape[0]
    keys = key[None] if single else jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(replicas))
    trained, rest = activation.split()
    state: State = (repeated(trained, (replicas,)), starts)
    if method is None:
        method = _specialized_method(task, activation, starts)
    standard = jnp.asarray(normal_points(points, int(task.length), order.heads + order.features, seed=0))
    steps = np.rint(times / step).astype(int)
    twins = np.flatnonzero(np.diff(steps) == 0)
    if twins.size:
        raise invalid("times", f"different multiples of step = {step:g}", times[twins[0] : twins[0] + 2])
    records, done = [], 0
    for target in tqdm(steps, desc="SDE", unit=" records", delay=2, leave=False, disable=not progress):
        state = _diffuse(
            (task, rest, numbers, standard, method), state, keys, jnp.asarray(dim), jnp.asarray(step),
            jnp.asarray(done), jnp.asarray(target - done),
        )  # fmt: skip
        done = int(target)
        records.append(state)
    moved, orders = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *records)
    recorded = eqx.combine(moved, rest)
    finite = np.isfinite(np.asarray(orders.r)).all((-1, -2, -3))
    trajectory = Trajectory(
        time=jnp.asarray(steps * step),
        order=orders,
        activation=recorded,
        risk=recorded_risk(task, recorded, orders),
        loss=None,
        loss_error=None,
        result=jnp.asarray(np.where(finite, Result.successful, Result.diverged).astype(np.int32)),
        task=task,
        settings={
            "source": "stochastic_flow",
            "activation": activation.name,
            "heads": order.heads,
            "dim": dim,
            **{name: float(value) for name, value in numbers.items()},
            "step": step,
            "points": points,
            "method": repr(method),
            "key": tuple(np.asarray(jax.random.key_data(key)).tolist()),
        },
    )
    return trajectory[0] if single else trajectory


@eqx.filter_jit
def _along(
    task: SingleLocation, rest: Activation, states: State, numbers: dict[str, Array], points: Array, method: Method
) -> tuple[Float[Array, "T N N"], Float[Array, "T N N"]]:
    """J and Σ at each state."""
    corrector = points[:, : states[1].heads, :_CORRECTOR_POINTS]

    def one(state: State) -> tuple[Array, Array]:
        def field(x: Array) -> Array:
            trained, order = shaped(x, state)
            activation = eqx.combine(trained, rest)
            return flat_of(drift(task, activation, order, **numbers, method=method, points=corrector))

        x = flat_of(state)
        jacobian = jax.jacfwd(field)(x)
        samples, weights = increments(task, rest, state, numbers, points)
        weight = weights[:, None] / samples.shape[1]
        mean = jnp.einsum("cn,cnp->p", jnp.broadcast_to(weight, samples.shape[:2]), samples)
        centred = samples - mean[None, None]
        return jacobian, jnp.einsum("cn,cnp,cnq->pq", jnp.broadcast_to(weight, samples.shape[:2]), centred, centred)

    return jax.lax.map(one, states)


@eqx.filter_jit
def _diffuse(
    model: tuple[SingleLocation, Activation, dict[str, Array], Array, Method],
    states: State,
    keys: Array,
    dim: Array,
    step: Array,
    first: Array,
    count: Array,
) -> State:
    """Each replica `count` Euler–Maruyama steps further."""
    task, rest, numbers, points, method = model
    scale = jnp.sqrt(numbers["step_size"] * step / dim)

    def one(replica: tuple[State, Array]) -> State:
        start, key = replica

        def advance(index: Array, state: State) -> State:
            trained, order = state
            activation = eqx.combine(trained, rest)
            corrector = points[:, : order.heads]
            slope = flat_of(drift(task, activation, order, **numbers, method=method, points=corrector))
            samples, weights = increments(task, rest, state, numbers, points)
            weight = jnp.broadcast_to(weights[:, None] / samples.shape[1], samples.shape[:2])
            centred = samples - jnp.einsum("cn,cnp->p", weight, samples)[None, None]
            normal = jax.random.normal(jax.random.fold_in(key, index), samples.shape[:2], jnp.float64)
            noise = jnp.einsum("cn,cnp->p", jnp.sqrt(weight) * normal, centred)
            moved, order = shaped(flat_of(state) + step * slope + scale * noise, state)
            factor = root(order.r_perp)
            return moved, order_of(order.m, order.m @ order.m.T + factor @ factor.T)

        return jax.lax.fori_loop(first, first + count, advance, start)

    return jax.lax.map(one, (states, keys), batch_size=_TOGETHER)


def _specialized_method(task: SingleLocation, activation: Activation, starts: OrderParameters) -> Quadrature:
    """Nodes for the starts and for heads at √ν times the support of the prior: what the escape may lead to."""
    trained, rest = activation.split()
    means = np.sqrt(float(task.snr)) * np.asarray(task.prior.means)
    ends = jnp.asarray(means[np.resize(np.arange(len(means)), starts.heads)])
    both = jax.tree.map(
        lambda own, end: jnp.concatenate([own, end[None]]),
        starts,
        order_of(ends, ends @ ends.T + jnp.mean(starts.r, 0)),
    )
    lead = both.m.shape[0]
    return fit(Quadrature(1e-4), task, rest, (repeated(trained, (lead,)), both))


def _integrated(
    time: np.ndarray, scale: float, start: np.ndarray, rates: np.ndarray, noise: np.ndarray
) -> tuple[Float[np.ndarray, "T N N"], Float[np.ndarray, "U N N"]]:
    """S at the records and propagators between them: exponential midpoint steps, J and Σ interpolated by splines."""
    fine = np.concatenate([*(np.linspace(a, b, _SUBSTEPS, endpoint=False) for a, b in pairwise(time)), time[-1:]])
    middle, widths = (fine[1:] + fine[:-1]) / 2, np.diff(fine)
    mid_rates, mid_noise = CubicSpline(time, rates)(middle), CubicSpline(time, noise)(middle)
    covariance, steps = [start], []
    for index, (width, jacobian, sigma) in enumerate(zip(widths, mid_rates, mid_noise, strict=True)):
        half = expm(jacobian * width / 2)
        whole_step = half @ half
        # Simpson's rule for ∫ e^{J(h−s)} Σ e^{Jᵀ(h−s)} ds
        fed = (sigma + 4 * half @ sigma @ half.T + whole_step @ sigma @ whole_step.T) * width / 6
        begins = index % _SUBSTEPS == 0
        grown = whole_step @ covariance[-1] @ whole_step.T + scale * fed
        steps = [*steps, whole_step] if begins else [*steps[:-1], whole_step @ steps[-1]]
        covariance = [*covariance, grown] if begins else [*covariance[:-1], grown]
    return np.stack(covariance), np.stack(steps)


def _factor(covariance: Float[np.ndarray, "*batch N N"]) -> Float[np.ndarray, "*batch N N"]:
    """A with A Aᵀ = covariance, negative eigenvalues (of rounding and interpolation) to 0."""
    values, vectors = np.linalg.eigh(covariance)
    return vectors * np.sqrt(np.clip(values, 0, None))[..., None, :]


def _start_covariance(variance: float, heads: int, features: int, size: int) -> Float[np.ndarray, "N N"]:
    """D·S(0) of starts k_h ~ N(0, r_0 I): Var m = r_0, Var r_hh = 2r_0², Var r_hh' = r_0²."""
    rows, columns = np.triu_indices(heads)
    own = np.r_[np.full(heads * features, variance), np.where(rows == columns, 2.0, 1.0) * variance**2]
    return np.diag(np.r_[np.zeros(size - len(own)), own])
