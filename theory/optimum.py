"""The best order parameters of an activation: minima of the population risk, from several starts."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float
from scipy.optimize import minimize
from tqdm import tqdm

from theory._checks import instance, invalid, typed_key, whole
from theory.activation import Activation, BayesSoftmax
from theory.fit import Law, State, TooWide, fit, grid_for, law_of
from theory.method import Method, Quadrature, default_method
from theory.order import OrderParameters
from theory.risk import evaluate_risk, risk_and_slope, risk_error, varied
from theory.task import SingleLocation

_MAX_STEPS = 1000
_NEGATIVE = 10  # times the tolerance: an eigenvalue below −this is no error of the evaluation
_REFITS = 5
_ROUGH = 1e-2  # tolerance of nodes for starts
_HALVINGS, _NARROW = 12, 64  # a start that roughly needs more nodes than this is narrowed


class Optimum(eqx.Module):
    """The lowest minimum found, and what the other starts say about it.

    Attributes:
        risk: its population risk.
        error: of the evaluation of that risk; how far a lower minimum may lie nobody knows.
        order: its order parameters.
        activation: the activation, with its trained leaves at their best.
        gradient: largest entry of the risk's gradient there (in m along r = m mᵀ + W Wᵀ, and in trained leaves).
        orthogonal: least eigenvalue of ∂E/∂r there: not negative (but for errors) where heads gain nothing by a part
            orthogonal to the spikes.
        starts: (S,) risk reached from each start, lowest first; NaN where a start did not end.
        task: the task.
        method: how the risk was evaluated, with the node counts taken.
    """

    risk: Float[Array, ""]
    error: Float[Array, ""]
    order: OrderParameters
    activation: Activation
    gradient: Float[Array, ""]
    orthogonal: Float[Array, ""]
    starts: Float[Array, " S"]
    task: SingleLocation
    method: Method = eqx.field(static=True)

    @property
    def spread(self) -> float:
        """Highest less lowest risk among the starts that ended."""
        return float(jnp.nanmax(self.starts) - jnp.nanmin(self.starts))

    @property
    def hits(self) -> int:
        """How many starts ended within 1e-5 of the lowest risk."""
        return int(jnp.sum(self.starts <= self.risk + 1e-5))

    def to_xarray(self) -> xr.Dataset:
        """Risk, error, residual gradient, m and r, the starts; trained leaves as `bias` and `scale`."""
        trained = self.activation.split()[0]
        leaves = {name: np.asarray(getattr(trained, name)) for name in self.activation.trained}
        return xr.Dataset(
            {
                "risk": ((), np.asarray(self.risk), {"long_name": "lowest population risk found"}),
                "error": ((), np.asarray(self.error), {"long_name": "error of its evaluation"}),
                "gradient": ((), np.asarray(self.gradient), {"long_name": "largest entry of its gradient"}),
                "orthogonal": ((), np.asarray(self.orthogonal), {"long_name": "least eigenvalue of dE/dr"}),
                "m": (("head", "feature"), np.asarray(self.order.m), {"long_name": "overlap of head and spike"}),
                "r": (("head", "head_"), np.asarray(self.order.r), {"long_name": "overlap of heads"}),
                "starts": ("start", np.asarray(self.starts), {"long_name": "risk reached from each start"}),
                **{name: (("head",) if leaf.ndim else (), leaf) for name, leaf in leaves.items()},
            },
            attrs={**self.task.configuration(), "activation": self.activation.name},
        )

    def __str__(self) -> str:
        lines = [
            f"Optimum of {type(self.activation).__name__} with {self.order.heads} heads: "
            f"risk {float(self.risk):.6f} ± {float(self.error):.0e}",
            f"  residual gradient {float(self.gradient):.1e}, least eigenvalue of ∂E/∂r {float(self.orthogonal):.1e}",
            f"  {self.hits} of {len(self.starts)} starts ended within 1e-5 of it, others up to {self.spread:.1e} above",
            "  head  " + "".join(f"{f'm_{f + 1}':>9}" for f in range(self.order.features)) + f"{'r_hh':>9}",
        ]
        for head, (m, r) in enumerate(zip(np.asarray(self.order.m), np.diagonal(self.order.r), strict=True)):
            lines.append(f"  {head + 1:>4}  " + "".join(f"{x:9.4f}" for x in m) + f"{r:9.4f}")
        trained = self.activation.split()[0]
        for name in self.activation.trained:
            lines.append(f"  {name}: {np.array2string(np.asarray(getattr(trained, name)), precision=4)}")
        return "\n".join(lines)


def optimal_risk(
    task: SingleLocation,
    activation: Activation,
    heads: int,
    *,
    starts: int = 8,
    key: Any = None,
    method: Method | None = None,
    first: tuple[OrderParameters, Activation] | None = None,
    progress: bool = True,
) -> Optimum:
    """Minimize the population risk over the order parameters, and over what the activation trains.

    BFGS (SciPy's) from `starts` points: heads at √ν times draws of θ from the prior, one support point after the
    other in the first start, at random scales with noise in the others. It moves heads inside the spikes' span,
    r = m mᵀ. Whether they gain by a part orthogonal to it is then asked of ∂E/∂r: where that has a negative eigenvalue,
    the search goes on in (m, W), r = m mᵀ + W Wᵀ. There are local minima: the result is the lowest one found.

    Args:
        task: the task.
        activation: trained leaves are optimized, fixed ones kept. A trained scale starts at H (useful because heads are
            averaged), a trained bias at the level of the noise.
        heads: number H of heads.
        starts: number of starts.
        key: a typed key for them; `jax.random.key(0)` unless given.
        method: of `population_risk`; the exact engine to 1e-5 unless given. Counts are fitted to what is met, and those
            given are taken as the least (the `method` of a nearby optimum: compiled code is used again).
        first: a state that replaces the first start, such as the optimum at a nearby ν.
        progress: a bar if it takes over two seconds.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=5, snr=8.0, prior=th.sign_flips([0.0], [1.0]))
        >>> best = th.optimal_risk(task, th.Softmax1(trained=True), heads=2, starts=2)
        >>> print(f"{best.risk:.4f}")
        0.2486
    """
    instance("task", task, SingleLocation)
    instance("activation", activation, Activation)
    heads, starts = whole("heads", heads, 1), whole("starts", starts, 1)
    activation.check_heads(heads)
    key = typed_key("key", jax.random.key(0) if key is None else key)
    if method is None:
        method = default_method(activation, 1e-5)
    begin = [_start(task, activation, heads, i, jax.random.fold_in(key, i)) for i in range(starts)]
    if first is not None:
        begin[0] = _given(first, task, activation, heads)
    rest = activation.split()[1]
    points = [_narrowed(method, task, rest, (trained, m, None)) for trained, m in begin]
    least = method
    for point in points:  # roughly, and one compiled function for all of them
        least = _fitted(least, task, rest, point, rough=True)
        if least is None:
            raise invalid("method", "a method that integrates the starts", method)
    bar = tqdm(points, desc="starts", delay=2, leave=False, disable=not progress)
    ends = [_descend(task, rest, point, least) for point in bar]
    risks = np.array([np.nan if end is None else end[1] for end in ends])
    if not np.isfinite(risks).any():
        raise RuntimeError(
            f"optimal_risk: none of {starts} starts ended in a state that {method} integrates; "
            "loosen its tolerance, or give another `first` start"
        )
    best = ends[int(np.nanargmin(risks))]
    assert best is not None
    y, _, fitted = best
    slope = _value_and_slope(task, rest, _state(y), fitted)[1]
    values, vectors = np.linalg.eigh(np.asarray(slope[1].r))
    if values[0] < -_NEGATIVE * (method.tolerance if isinstance(method, Quadrature) else 1e-3):
        wider = _descend(task, rest, (y[0], y[1], 0.1 * jnp.asarray(vectors[:, :1])), fitted)
        if wider is not None and wider[1] < best[1]:
            y, risks[int(np.nanargmin(risks))], fitted = wider
            slope = _value_and_slope(task, rest, _state(y), fitted)[1]
            values = np.linalg.eigvalsh(np.asarray(slope[1].r))
    order, combined = _state(y)[1], eqx.combine(y[0], rest)
    risk = float(np.nanmin(risks))
    error = risk_error(task, combined, order, fitted, jnp.asarray(risk))
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(_pulled_back(y, slope)))
    gradient, orthogonal, reached = jnp.asarray(largest), jnp.asarray(values[0]), jnp.sort(jnp.asarray(risks))
    return Optimum(jnp.asarray(risk), error, order, combined, gradient, orthogonal, reached, task, fitted)


# trained leaves, m (H, F), and W (H, K) or None
Coordinates = tuple[Activation, Array, Array | None]


def _start(
    task: SingleLocation, activation: Activation, heads: int, index: int, key: Array
) -> tuple[Activation, Array]:
    """Heads at draws from the prior, and trained leaves that suit them."""
    prior = task.prior
    choose, normal, rescale, noise = jax.random.split(key, 4)
    turns = jnp.arange(prior.components)
    component = jnp.resize(turns if index == 0 else jax.random.permutation(choose, turns), (heads,))
    values, vectors = jnp.linalg.eigh(prior.covariances)
    root = vectors * jnp.sqrt(jnp.clip(values, 0))[:, None, :]
    own = jax.random.normal(normal, (heads, prior.features), jnp.float64)
    m = jnp.sqrt(task.snr) * (prior.means[component] + jnp.einsum("hfg,hg->hf", root[component], own))
    # a broad component's log-likelihood ratio is less steep than √ν θ
    flatter = vectors / jnp.sqrt(1 + task.snr * jnp.clip(values, 0))[:, None, :] @ jnp.swapaxes(vectors, -1, -2)
    m = jnp.einsum("hfg,hg->hf", flatter[component], m)
    if index > 0:
        scale = jax.random.uniform(rescale, (), jnp.float64, 0.3, 1.0)
        m = scale * m + 0.3 * jax.random.normal(noise, m.shape, jnp.float64)
    square = jnp.sum(m**2, axis=1) / 2

    def begin(path: Any, leaf: Array) -> Array:
        if path[0].name == "scale":
            return jnp.full_like(leaf, heads)
        level = square if isinstance(activation, BayesSoftmax) else square + jnp.log(task.length * 1.0)
        return level if leaf.ndim else jnp.mean(level)

    return jax.tree.map_with_path(begin, activation.split()[0]), m


def _given(first: Any, task: SingleLocation, activation: Activation, heads: int) -> tuple[Activation, Array]:
    """The start that the user gave, if it fits."""
    if not (isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], OrderParameters)):
        raise invalid("first", "a pair (OrderParameters, activation)", repr(first))
    order, own = first
    if order.m.shape != (heads, task.features):
        raise invalid("first", f"m of shape {(heads, task.features)}", order.m.shape)
    if type(own) is not type(activation) or own.trained != activation.trained:
        raise invalid("first", f"an activation with the trained leaves of {activation.name}", own)
    shapes = [[leaf.shape for leaf in jax.tree.leaves(one.split()[0])] for one in (own, activation)]
    if shapes[0] != shapes[1]:
        raise invalid("first", f"trained leaves of shapes {shapes[1]}", shapes[0])
    return own.split()[0], order.m


def _state(y: Coordinates) -> State:
    trained, m, w = y
    return trained, OrderParameters(m, m @ m.T + (0.0 if w is None else w @ w.T))


def _descend(
    task: SingleLocation, rest: Activation, y: Coordinates, least: Method
) -> tuple[Coordinates, float, Method] | None:
    """The minimum reached, its risk, and the method with the nodes it needs (no fewer than `least`); None if none."""
    fitted, value = least, np.nan
    for _ in range(_REFITS):
        y, value = _minimized(task, rest, y, fitted)
        if not np.isfinite(value):
            return None
        wider = _fitted(fitted, task, rest, y)
        if wider is None:
            return None
        if wider == fitted:
            break
        fitted = wider
    return y, value, fitted


def _fitted(
    least: Method, task: SingleLocation, rest: Activation, y: Coordinates, *, rough: bool = False
) -> Method | None:
    """`least` with more nodes where the state needs them, rounded up to few different numbers; None if too many."""
    if not isinstance(least, Quadrature):
        return least
    tolerance = max(least.tolerance, _ROUGH) if rough else least.tolerance
    try:
        needed = fit(Quadrature(tolerance), task, rest, jax.tree.map(lambda leaf: leaf[None], _state(y)))
    except TooWide:  # the scores have run away
        return None
    return least.at_least(needed.coarsened())


def _narrowed(method: Method, task: SingleLocation, rest: Activation, y: Coordinates) -> Coordinates:
    """The start with its heads halved, while that helps, until few nodes are enough: minima lie at moderate scores."""
    if not isinstance(method, Quadrature):
        return y

    def most(y: Coordinates) -> float:
        fitted = _fitted(Quadrature(method.tolerance), task, rest, y, rough=True)
        counts = (fitted.nodes, fitted.frequencies) if isinstance(fitted, Quadrature) else (np.inf,)
        return float(max(n for n in counts if n))

    count = most(y)
    for _ in range(_HALVINGS):
        if count <= _NARROW:
            break
        half = (y[0], y[1] / 2, y[2])
        less = most(half)
        if less >= count and np.isfinite(count):
            break
        y, count = half, less
    return y


def _minimized(task: SingleLocation, rest: Activation, y: Coordinates, method: Method) -> tuple[Coordinates, float]:
    flat, back = ravel_pytree(y)

    def both(x: np.ndarray) -> tuple[float, np.ndarray]:
        y = back(jnp.asarray(x))
        value, slope = _value_and_slope(task, rest, _state(y), method)
        return float(value), np.asarray(ravel_pytree(_pulled_back(y, slope))[0])

    gtol = min(1e-6, method.tolerance / 10) if isinstance(method, Quadrature) else 1e-6
    with warnings.catch_warnings():  # a line search that ends at the risk's own error says nothing new
        warnings.simplefilter("ignore", RuntimeWarning)
        found = minimize(both, np.asarray(flat), jac=True, method="BFGS", options={"gtol": gtol, "maxiter": _MAX_STEPS})
    return back(jnp.asarray(found.x)), float(found.fun)


def _value_and_slope(task: SingleLocation, rest: Activation, state: State, method: Method) -> tuple[Array, State]:
    """The risk, and ∂E in the trained leaves, m and r."""
    if not isinstance(method, Quadrature):
        return _sampled_slope(task, rest, state, method)
    law = law_of(task, eqx.combine(state[0], rest), state[1])
    value, slope = risk_and_slope(law, grid_for(method, task, rest, state))
    return value, _chained(task, rest, state, slope)


@eqx.filter_jit
def _chained(task: SingleLocation, rest: Activation, state: State, slope: Law) -> State:
    """The slope in the state from that in the law."""
    own = lambda state: varied(law_of(task, eqx.combine(state[0], rest), state[1]))  # noqa: E731
    return jax.vjp(own, state)[1](slope)[0]


@eqx.filter_jit
def _sampled_slope(task: SingleLocation, rest: Activation, state: State, method: Method) -> tuple[Array, State]:
    return jax.value_and_grad(lambda s: evaluate_risk(task, eqx.combine(s[0], rest), s[1], method)[0])(state)


def _pulled_back(y: Coordinates, slope: State) -> Coordinates:
    """The gradient in the coordinates, r = m mᵀ + W Wᵀ."""
    _, m, w = y
    return slope[0], slope[1].m + 2 * slope[1].r @ m, None if w is None else 2 * slope[1].r @ w
