"""Stationary points of the risk where heads are still alike, and the curvature there (docs/model.md §5, §14).

Heads that are alike are tied: a partition of the heads says which move together. A prior that is the same under
θ_f → −θ_f keeps heads that have no overlap with k*_f there for ever, so those overlaps are held at 0. In the space that
is left the point is a minimum; in the full space it is a saddle, and the Hessian's negative eigenvalues are
the rates at which heads specialize.
"""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float
from scipy.optimize import minimize

from theory._checks import instance, invalid, whole
from theory._words import counted
from theory.activation import Activation, BayesSoftmax
from theory.fit import State, fit
from theory.method import Method, Quadrature, default_method
from theory.order import OrderParameters
from theory.prior import Prior
from theory.risk import check_model, evaluate_risk
from theory.task import SingleLocation

_ALIKE = 1e-7  # heads whose overlaps differ by less are one group
_RESOLUTION, _MULTIPLET = 1e-7, 10.0  # of the largest curvature: what is marginal; times that: what is one multiplet
_ROUGH = 30.0  # times the risk's tolerance: errors of curvatures, relative to the largest
_CLEAR = 0.9  # share of a direction that gives it its name
_MOST_REFLECTIONS = 12
_STEPS, _SLOPE = 100, 10.0  # of the minimization, which ends at gradients of 10 times the risk's tolerance
_STATIONARY = 10.0  # times that: gradients of a stationary point


class CriticalPoint(eqx.Module):
    """A stationary point of the population risk.

    Attributes:
        order: order parameters; r = m mᵀ.
        activation: with its trained leaves at the point.
        risk: E there.
        gradient: largest entry of the gradient in the coordinates m (along r = m mᵀ) and trained leaves.
        tolerance: up to which that counts as 0.
        groups: (H,) heads with equal numbers are alike.
        task: the task.
    """

    order: OrderParameters
    activation: Activation
    risk: Float[Array, ""]
    gradient: Float[Array, ""]
    tolerance: float = eqx.field(static=True)
    groups: tuple[int, ...] = eqx.field(static=True)
    task: SingleLocation

    @property
    def stationary(self) -> bool:
        """Whether the gradient is 0 up to the tolerance; a minimum with entries held is stationary only by symmetry."""
        return float(self.gradient) <= self.tolerance

    def to_xarray(self) -> xr.Dataset:
        """m, r, group of each head, risk and residual gradient."""
        return xr.Dataset(
            {
                "m": (("head", "feature"), np.asarray(self.order.m), {"long_name": "overlap of head and spike"}),
                "r": (("head", "head_"), np.asarray(self.order.r), {"long_name": "overlap of heads"}),
                "group": ("head", np.asarray(self.groups), {"long_name": "heads of one group are alike"}),
                "risk": ((), np.asarray(self.risk), {"long_name": "population risk"}),
                "gradient": ((), np.asarray(self.gradient), {"long_name": "largest entry of the gradient"}),
            },
            attrs={**self.task.configuration(), "activation": self.activation.name},
        )

    def __str__(self) -> str:
        groups = sorted(set(self.groups))
        lines = [
            f"{'Critical point' if self.stationary else 'No critical point'} of {type(self.activation).__name__}: "
            f"{counted(self.order.heads, 'head')} in {counted(len(groups), 'group')}, "
            f"risk {float(self.risk):.8f}, residual gradient {float(self.gradient):.1e}",
            "  heads  " + "".join(f"{f'm_{f + 1}':>10}" for f in range(self.order.features)),
        ]
        for group in groups:
            members = [h for h, own in enumerate(self.groups) if own == group]
            lines.append(f"  {len(members):>5}  " + "".join(f"{x:10.5f}" for x in np.asarray(self.order.m)[members[0]]))
        return "\n".join(lines)


class HessianSpectrum(eqx.Module):
    """Curvatures of the risk at a point, and their directions; prints as a table of multiplets.

    Attributes:
        eigenvalues: (N,) of the Hessian in the coordinates m, with r = m mᵀ + r_⊥ at fixed r_⊥, and in the trained
            leaves; ascending. The flow with κ_b = κ_c = 1 grows at the rate −eigenvalue.
        directions: (N, H, F) their part in m.
        trained: for each trained leaf, (N, ...) their part in it.
        kinds: (N,) "split" (heads of one group of equal heads move apart), "mean" (they move together) or "mixed",
            with ", trained" where it is not m that moves.
        features: (N,) index of the feature along which m moves, −1 where it is not one.
        orthogonal: (H,) eigenvalues along one direction orthogonal to all spikes and heads (2 ∂E/∂r), ascending;
            there are D − F − rank r_⊥ such directions.
        orthogonal_directions: (H, H) their directions.
        orthogonal_kinds: (H,) as `kinds`.
        resolution: curvatures nearer to 0 are marginal: 1e-7 of the largest, or the error of the risk's method.
    """

    eigenvalues: Float[Array, " N"]
    directions: Float[Array, "N H F"]
    trained: dict[str, Float[Array, "N ..."]]
    kinds: tuple[str, ...] = eqx.field(static=True)
    features: tuple[int, ...] = eqx.field(static=True)
    orthogonal: Float[Array, " H"]
    orthogonal_directions: Float[Array, "H H"]
    orthogonal_kinds: tuple[str, ...] = eqx.field(static=True)
    resolution: float

    @property
    def labels(self) -> tuple[str, ...]:
        """(N,) such as `split, feature 2`; counted from 1, as in the mathematics."""
        return tuple(
            f"{kind}, feature {feature + 1}" if feature >= 0 else kind
            for kind, feature in zip(self.kinds, self.features, strict=True)
        )

    @property
    def unstable(self) -> Bool[np.ndarray, " N"]:
        """(N,) whether the direction grows."""
        return np.asarray(self.eigenvalues) < -self.resolution

    def multiplets(self) -> list[tuple[float, int, str]]:
        """(eigenvalue, multiplicity, label) of those along m and trained leaves, ascending."""
        found: list[tuple[float, int, str]] = []
        same = _MULTIPLET * self.resolution
        for value, label in zip(np.asarray(self.eigenvalues), self.labels, strict=True):
            if found and found[-1][2] == label and abs(value - found[-1][0]) < same:
                found[-1] = (found[-1][0], found[-1][1] + 1, label)
            else:
                found.append((float(value), 1, label))
        return found

    def to_xarray(self) -> xr.Dataset:
        """`eigenvalue`, `direction`, `label` along `mode`, and the orthogonal ones along `orthogonal_mode`."""
        return xr.Dataset(
            {
                "eigenvalue": ("mode", np.asarray(self.eigenvalues), {"long_name": "curvature of the risk"}),
                "direction": (("mode", "head", "feature"), np.asarray(self.directions)),
                "label": ("mode", list(self.labels)),
                **{
                    f"direction_{name}": (("mode", "head")[: leaf.ndim], np.asarray(leaf))
                    for name, leaf in self.trained.items()
                },
                "orthogonal_eigenvalue": ("orthogonal_mode", np.asarray(self.orthogonal)),
                "orthogonal_direction": (("orthogonal_mode", "head"), np.asarray(self.orthogonal_directions)),
                "orthogonal_label": ("orthogonal_mode", list(self.orthogonal_kinds)),
            }
        )

    def __str__(self) -> str:
        lines = [f"  {'curvature':>13}{'times':>7}  direction"]
        lines += [f"  {value:13.8f}{times:7d}  {label}" for value, times, label in self.multiplets()]
        lines.append("  along each direction orthogonal to the spikes")
        for kind in dict.fromkeys(self.orthogonal_kinds):
            values = [
                v for v, own in zip(np.asarray(self.orthogonal), self.orthogonal_kinds, strict=True) if own == kind
            ]
            for value in np.unique(np.round(values, 10)):
                lines.append(f"  {value:13.8f}{int(np.sum(np.isclose(values, value))):7d}  {kind}")
        return "\n".join(lines)


def unspecialized_point(
    task: SingleLocation, activation: Activation, heads: int, *, method: Method | None = None
) -> CriticalPoint:
    """The point where all heads are equal, k_h = k, with a minimum of the risk among such points (docs/model.md §5).

    It is the local minimum next to √ν E θ, where heads that start small arrive; a skewed prior may have a lower one.
    Overlaps that the prior's reflections keep at zero are zero; for a non-random mean direction softmax has
    m = √ν E θ there. What the activation trains is equal for all heads and at its best too. Heads lie inside the
    spikes' span (r = m mᵀ), where the flow takes them as η/B → 0. Where a common move of all heads lowers the risk in a
    way that the reflections forbid, the spectrum shows it as an unstable "mean".

    Args:
        task: the task.
        activation: trained leaves are optimized from their values; one per head start at their mean.
        heads: H.
        method: of `population_risk`; the exact engine to 1e-10 (to 1e-8 with a joint normalizer) unless given.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=10, snr=1.0, prior=th.sign_flips([2, 0, 0], [0, 2.5, 1.5]))
        >>> point = th.unspecialized_point(task, th.Softmax(), heads=4)
        >>> print(f"{point.risk:.8f}")
        0.44687973
    """
    instance("task", task, SingleLocation)
    instance("activation", activation, Activation)
    heads = whole("heads", heads, 1)
    activation.check_heads(heads)
    start = jnp.broadcast_to(jnp.sqrt(task.snr) * task.prior.mean()[None], (heads, task.features))
    free = np.broadcast_to(moving_features(task.prior), (heads, task.features))
    return tied_minimum(task, activation, start, (0,) * heads, free, method=method)


def hessian_spectrum(
    task: SingleLocation,
    activation: Activation,
    point: CriticalPoint | OrderParameters,
    *,
    method: Method | None = None,
) -> HessianSpectrum:
    """Curvatures of m ↦ E(m, m mᵀ + r_⊥) at fixed r_⊥, in trained leaves, and along orthogonal directions.

    The flow of (m, trained leaves) has the Jacobian −Hessian for κ_b = κ_c = 1. Multiplets are exact: identical heads
    are no special case for the engine.

    Args:
        task: the task.
        activation: the activation; at a `CriticalPoint` its trained leaves are the point's.
        point: where; any state of one replica.
        method: as for `unspecialized_point`.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=10, snr=1.0, prior=th.sign_flips([2, 0, 0], [0, 2.5, 1.5]))
        >>> point = th.unspecialized_point(task, th.Softmax(), heads=4)
        >>> th.hessian_spectrum(task, th.Softmax(), point).multiplets()[0]
        (-0.06393945..., 3, 'split, feature 2')
    """
    instance("activation", activation, Activation)
    if isinstance(point, CriticalPoint):
        if type(point.activation) is not type(activation):
            raise invalid("activation", f"that of the point, {point.activation.name}", activation.name)
        activation, order = point.activation, point.order
    elif isinstance(point, OrderParameters):
        order = point
    else:
        raise invalid("point", "a CriticalPoint or OrderParameters", repr(point))
    check_model(task, activation, order)
    if order.m.ndim != 2:
        raise invalid("point", "one state: m of shape (H, F)", f"m of shape {order.m.shape}")
    trained, rest = activation.split()
    fitted = _fitted(method, task, rest, (trained, order))
    _, _, hessian, along = _derivatives(task, rest, (trained, order), fitted)
    groups = alike(order, trained)
    split, *features = _projectors(trained, groups, order.features)
    values, vectors = np.linalg.eigh(np.asarray(hessian))
    around, turned = np.linalg.eigh(np.asarray(along))
    largest = max(np.max(np.abs(values)), np.max(np.abs(around)))
    resolution = max(_RESOLUTION, _ROUGH * _precision(fitted)) * float(largest)
    vectors = _aligned(values, vectors, [split, *features], _MULTIPLET * resolution)
    shares = np.asarray([[v @ p @ v for p in features] for v in vectors.T])
    in_m = shares.sum(axis=1) > 1 - _CLEAR
    turned = _aligned(around, turned, [_split_projector(groups)], _MULTIPLET * resolution)
    back = jax.vmap(ravel_pytree((trained, order.m))[1])(jnp.asarray(vectors.T))
    return HessianSpectrum(
        jnp.asarray(values),
        back[1],
        {name: getattr(back[0], name) for name in activation.trained},
        tuple(_kind(v, split) + ("" if own else ", trained") for v, own in zip(vectors.T, in_m, strict=True)),
        tuple(int(np.argmax(share)) if np.max(share) > _CLEAR else -1 for share in shares),
        jnp.asarray(around),
        jnp.asarray(turned.T),
        tuple(_kind(v, _split_projector(groups)) for v in turned.T),
        resolution,
    )


def moving_features(prior: Prior, broken: Bool[np.ndarray, " F"] | None = None) -> Bool[np.ndarray, " F"]:
    """Which overlaps may leave 0: those that no unbroken reflection turns round.

    A reflection changes signs, θ_f → ±θ_f, and leaves P_θ the same. An overlap that is not 0 (`broken`) breaks those
    that turn it round.
    """
    features = prior.features
    if features > _MOST_REFLECTIONS:
        raise invalid("prior", f"at most {_MOST_REFLECTIONS} features, whose reflections are tried", features)
    weights, means, covariances = (np.asarray(x) for x in (prior.weights, prior.means, prior.covariances))
    size = np.sqrt(np.max(means**2 + np.diagonal(covariances, axis1=1, axis2=2), axis=0))
    size = np.where(size > 0, size, 1.0)  # in units of its own size a feature that is small is no rounding error
    means, covariances = means / size, covariances / (size[:, None] * size)
    laws = np.concatenate([weights[:, None], means, covariances.reshape(len(weights), -1)], axis=1)
    moving = np.ones(features, bool)
    kept = np.zeros(features, bool) if broken is None else broken
    for signs in itertools.product([1.0, -1.0], repeat=features):
        sign = np.asarray(signs)
        if np.any(kept & (sign < 0)):
            continue
        turned = covariances * sign[:, None] * sign[None, :]
        image = np.concatenate([weights[:, None], means * sign, turned.reshape(len(weights), -1)], axis=1)
        apart = np.max(np.abs(image[:, None] - laws[None]), axis=-1)
        if np.all(apart.min(axis=1) < 1e-12) and np.all(apart.min(axis=0) < 1e-12):
            moving &= sign > 0
    return moving


def tied_minimum(
    task: SingleLocation,
    activation: Activation,
    start: Float[Array, "H F"],
    groups: tuple[int, ...],
    free: Bool[np.ndarray, "H F"],
    *,
    method: Method | None = None,
) -> CriticalPoint:
    """The minimum of the risk with the heads of each group alike, and only the entries `free` of m not zero.

    Newton steps in a trust region (SciPy's), with the exact Hessian. Trained leaves, one per head, are tied too.
    """
    trained, rest = activation.split()
    flat, back = ravel_pytree((trained, start))
    ties = _ties(trained, groups, free)
    y = np.linalg.lstsq(ties, np.asarray(flat), rcond=None)[0]

    def full(y: np.ndarray) -> State:
        own, m = back(jnp.asarray(ties @ y))
        return own, OrderParameters(m, m @ m.T)

    fitted = _fitted(method, task, rest, full(y))
    precision = _precision(fitted)
    while y.size:
        derivatives = _remembered(lambda y: _derivatives(task, rest, full(y), fitted))  # noqa: B023
        found = minimize(
            lambda y: float(derivatives(y)[0]),  # noqa: B023
            y,
            jac=lambda y: ties.T @ np.asarray(derivatives(y)[1]),  # noqa: B023
            hess=lambda y: ties.T @ np.asarray(derivatives(y)[2]) @ ties,  # noqa: B023
            method="trust-exact",
            options={"gtol": _SLOPE * precision, "maxiter": _STEPS},
        )
        y = np.asarray(found.x)
        wider = _fitted(method, task, rest, full(y))
        if wider == fitted:
            break
        fitted = wider
    own, order = full(y)
    value, slope, _, _ = _derivatives(task, rest, full(y), fitted)
    gradient, tolerance = jnp.max(jnp.abs(slope)), _STATIONARY * _SLOPE * precision
    return CriticalPoint(order, eqx.combine(own, rest), value, gradient, tolerance, _numbered(groups), task)


def alike(order: OrderParameters, trained: Activation) -> tuple[int, ...]:
    """Numbers of the groups of heads with the same overlaps and trained leaves."""
    own = [np.asarray(leaf)[:, None] for leaf in jax.tree.leaves(trained) if leaf.ndim]
    rows = np.concatenate([np.asarray(order.m), np.diagonal(order.r_perp)[:, None], *own], axis=1)
    groups: list[int] = []
    for head, row in enumerate(rows):
        same = [groups[other] for other in range(head) if np.max(np.abs(rows[other] - row)) < _ALIKE]
        groups.append(same[0] if same else len(set(groups)))
    return tuple(groups)


def _numbered(groups: tuple[int, ...]) -> tuple[int, ...]:
    """Group numbers 0, 1, … in order of appearance."""
    names = list(dict.fromkeys(groups))
    return tuple(names.index(group) for group in groups)


def _ties(trained: Activation, groups: tuple[int, ...], free: np.ndarray) -> Float[np.ndarray, "N n"]:
    """The matrix from free numbers to the flat (trained leaves, m): one column for what moves together."""
    columns: list[Any] = []
    for path, leaf in jax.tree.leaves_with_path(trained):
        columns += [(path[0].name, group) for group in groups] if leaf.ndim else [(path[0].name, None)]
    for head, group in enumerate(groups):
        columns += [("m", group, f) if free[head, f] else None for f in range(free.shape[1])]
    names = [name for name in dict.fromkeys(columns) if name is not None]
    return np.asarray([[float(column == name) for name in names] for column in columns]).reshape(len(columns), -1)


def _remembered(function: Any) -> Any:
    """`function` with its last result kept: the optimizer asks for value, slope and curvature one by one."""
    last: list[Any] = [None, None]

    def call(y: np.ndarray) -> Any:
        if last[0] is None or not np.array_equal(last[0], y):
            last[:] = [y.copy(), function(y)]
        return last[1]

    return call


def _fitted(method: Method | None, task: SingleLocation, rest: Activation, state: State) -> Method:
    """The method, by default an exact engine, with the nodes that the state needs."""
    if method is None:
        method = default_method(rest, 1e-8 if isinstance(rest, BayesSoftmax) else 1e-10)
    if not isinstance(method, Quadrature):
        return method
    return fit(method, task, rest, jax.tree.map(lambda leaf: leaf[None], state)).at_least(method)


def _precision(method: Method) -> float:
    """Error of the risk that the method allows itself."""
    return method.tolerance if isinstance(method, Quadrature) else 1e-4


@eqx.filter_jit
def _derivatives(
    task: SingleLocation, rest: Activation, state: State, method: Method
) -> tuple[Array, Array, Array, Array]:
    """Risk, gradient and Hessian in the flat (trained leaves, m) at fixed r_⊥; that along an orthogonal direction."""
    order = state[1]
    flat, back = ravel_pytree((state[0], order.m))

    def risk(x: Array, r_perp: Array) -> Array:
        trained, m = back(x)
        return evaluate_risk(task, eqx.combine(trained, rest), OrderParameters(m, m @ m.T + r_perp), method)[0]

    value, (slope, along) = jax.value_and_grad(risk, argnums=(0, 1))(flat, order.r_perp)
    row = lambda direction: jax.jvp(lambda x: jax.grad(risk)(x, order.r_perp), (flat,), (direction,))[1]  # noqa: E731
    return value, slope, jax.lax.map(row, jnp.eye(flat.size)), along + along.T


def _projectors(trained: Activation, groups: tuple[int, ...], features: int) -> list[np.ndarray]:
    """Projectors, in the flat (trained leaves, m), that commute at a point with these groups, and give names."""
    heads = len(groups)
    width = sum(leaf.size for leaf in jax.tree.leaves(trained))
    split = np.zeros((width + heads * features,) * 2)
    split[width:, width:] = np.kron(_split_projector(groups), np.eye(features))
    start = 0
    for leaf in jax.tree.leaves(trained):
        if leaf.ndim:
            split[start : start + heads, start : start + heads] = _split_projector(groups)
        start += leaf.size
    along = [np.diag(np.r_[np.zeros(width), np.tile(np.eye(features)[f], heads)]) for f in range(features)]
    return [split, *along]


def _split_projector(groups: tuple[int, ...]) -> Float[np.ndarray, "H H"]:
    """Onto motions of the heads with zero sum in every group."""
    same = np.asarray(groups)[:, None] == np.asarray(groups)[None, :]
    return np.eye(len(groups)) - same / same.sum(axis=1, keepdims=True)


def _aligned(values: np.ndarray, vectors: np.ndarray, projectors: list[np.ndarray], same: float) -> np.ndarray:
    """Eigenvectors turned, among values `same` apart, so that each has a name if any turning gives it one."""
    operator = sum((np.sqrt(2) ** -i * 1.1**i * p for i, p in enumerate(projectors)), np.zeros_like(projectors[0]))
    turned, start = vectors.copy(), 0
    while start < len(values):
        end = start + 1
        while end < len(values) and values[end] - values[end - 1] < same:
            end += 1
        own = vectors[:, start:end]
        turned[:, start:end] = own @ np.linalg.eigh(own.T @ operator @ own)[1]
        start = end
    return turned


def _kind(vector: np.ndarray, projector: np.ndarray) -> str:
    share = vector @ projector @ vector
    return "split" if share > _CLEAR else "mean" if share < 1 - _CLEAR else "mixed"
