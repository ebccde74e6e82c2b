"""The Bayes risk: the least that any predictor of the informative token can reach, and the heads that reach it.

Given the tokens' projections u_ℓ on the spikes, P(ε = ℓ | X) = p_ℓ ∝ w(u_ℓ), w(u) = E_θ exp(√ν θ·u − ν‖θ‖²/2), and the
posterior mean of X_ε is Σ_ℓ p_ℓ X_ℓ. Its risk is E Σ_ℓ (δ_ℓε − p_ℓ)² = 1 − E p_ε. w is also the ratio of the laws of
token ε and of another, so averages over token ε are averages over the noise, E_ε f = E[w f], and (docs/model.md §12)

    E_Bayes = (L−1) ∫ du e^{−u} (E G(u+s))² φ(u)^{L−2},   s = log w(u), u ~ N(0, I_F), φ = E g(u+s).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from theory import _joint
from theory._checks import instance, invalid, is_concrete
from theory._each import each, finite, first
from theory._nodes import EDGE, axis_counts, bent_nodes, rounded_up, tensor_size
from theory._products import LONGEST, Rules, capacity, laid_out, moments
from theory._products import integrated as streamed
from theory.activation import BayesSoftmax
from theory.fit import (
    MOST_NEEDED,
    cheap,
    check_points,
    check_rounding,
    fit_points,
    log_rare,
    of_one_length,
    points_grid,
)
from theory.method import Method, MonteCarlo, Quadrature
from theory.order import OrderParameters
from theory.risk import GUARD, SCRAMBLES, refused_if
from theory.task import SingleLocation

OWNER = "the Bayes risk"  # of points, in messages
_TRACED_AXES, _TRACED_NODES = {1: 256, 2: 128, 3: 48}, 96


def bayes_risk(task: SingleLocation, method: Method | None = None, with_error: bool = False) -> Any:
    """E Σ_ℓ (δ_ℓε − p_ℓ)² = 1 − E p_ε of the posterior p: no predictor has a lower risk (docs/model.md §11).

    Args:
        task: the task.
        method: `Quadrature` (default, to 1e-6; `points` are counts per axis of the spikes' span, or a number of Sobol
            points) or `MonteCarlo`.
        with_error: also return an error estimate: for `Quadrature` the change under 1.5 times the nodes, plus how far
            the two forms of the risk differ, on Sobol points the standard deviation over scrambles as well; for
            `MonteCarlo` the standard error.

    Returns:
        The risk, or (risk, error). Differentiable in ν > 0 and in the prior.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=5, snr=8.0, prior=th.sign_flips([0.0], [1.0]))
        >>> print(f"{th.bayes_risk(task):.5f}")
        0.17254
    """
    instance("task", task, SingleLocation)
    method = Quadrature(1e-6) if method is None else method
    if isinstance(method, MonteCarlo):
        if not is_concrete(task.length):
            raise invalid("task.length", "a known number for MonteCarlo, which draws that many tokens", task.length)
        value, error = _sampled(task, int(task.length), method)
    elif isinstance(method, Quadrature):
        grid = _grid(task, method)
        value, other = _integrated(task, _alone(grid, task))
        if not is_concrete(task) and method.points is None:
            spread = _spreads(task, _joint.log_tail_at(GUARD))
            value = refused_if(value, _joint.too_sharp(spread, grid, GUARD))
        error = _refinement(task, _checking(grid), (value, other)) if with_error else None
    else:
        raise invalid("method", "Quadrature(...), MonteCarlo(...) or None", repr(method))
    return (value, error) if with_error else value


def each_bayes_risk(
    tasks: SingleLocation, method: Method | None = None
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Bayes risks and errors of many tasks (NumPy arrays with a leading axis), counts fitted to each of them.

    NaN where a number is not finite, or where the prior is too sharp for any number of points.
    """
    method = Quadrature(1e-6) if method is None else method
    found, left = np.full((2, len(tasks.snr)), np.nan), finite(tasks)
    if isinstance(method, Quadrature) and left.any():
        counts, log_tails, own = _product_counts(method, tasks, left)
        if own.any():
            rules = [make(counts, log_tails, method.tail) for make in (Rules.of, Rules.refined)]
            shared = capacity(rules[1].count[own]), jnp.asarray(method.nodes or 0)
            found = np.stack(each(_risk_streamed, (tasks, Rules.together(*rules)), own, shared))
        left = left & ~own
    for fitted, own in _fit_each(method, tasks, left) if left.any() else ():
        for chosen in of_one_length(tasks, own):
            if isinstance(fitted, MonteCarlo):
                evaluate, shared = _sampled_at, (int(tasks.length[chosen][0]), fitted)
            else:
                task = first(tasks, chosen)
                grid = _grid(task, fitted)
                evaluate, shared = _risk_on, tuple(_with_points(grid, task) for grid in (grid, *_checking(grid)))
            found = np.where(chosen, each(evaluate, tasks, chosen, shared), found)
    return found[0], found[1]


def fitted_to_bayes(task: SingleLocation, tolerance: float = 1e-6) -> Quadrature:
    """The method with the counts that `bayes_risk` takes for this task: for others like it to share compiled code."""
    grid = _grid(task, Quadrature(tolerance))
    return Quadrature(tolerance, grid.nodes, points=grid.points)


def bayes_heads(task: SingleLocation) -> tuple[OrderParameters, BayesSoftmax]:
    """The B-softmax heads that are the posterior of a discrete prior, one per support point (docs/model.md §11).

    m_h = √ν θ^(h), r = m mᵀ, b_h = ν‖θ^(h)‖²/2 − log w_h.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=5, snr=8.0, prior=th.sign_flips([0.0], [1.0]))
        >>> order, activation = bayes_heads(task)
        >>> print(f"{th.population_risk(task, activation, order):.5f}")
        0.17254
    """
    instance("task", task, SingleLocation)
    prior = task.prior
    if is_concrete(prior) and np.any(np.asarray(prior.covariances)):
        raise invalid(
            "task.prior", "a discrete prior: no finite number of heads is the posterior of another", task.prior
        )
    kept = np.asarray(prior.weights) > 0 if is_concrete(prior) else slice(None)
    m = jnp.sqrt(task.snr) * prior.means[kept]
    return OrderParameters(m, m @ m.T), BayesSoftmax(jnp.sum(m**2, axis=1) / 2 - jnp.log(prior.weights[kept]))


class _Ratio(NamedTuple):
    """log w(u) as a mixture of Gaussian log-density ratios: token ε is N(mean_c, factor_c factor_cᵀ)."""

    weights: Float[Array, " C"]
    means: Float[Array, "C F"]
    factors: Float[Array, "C F F"]

    @classmethod
    def of(cls, task: SingleLocation) -> "_Ratio":
        prior = task.prior
        covariances = jnp.eye(prior.features)[None] + task.snr * prior.covariances
        return cls(prior.weights, jnp.sqrt(task.snr) * prior.means, jnp.linalg.cholesky(covariances))

    def log(self, u: Float[Array, "F N"]) -> Float[Array, " N"]:
        """log w at N points."""

        def component(c: "_Ratio") -> Array:
            # a triangular solve of many columns is slow on CPUs
            white = solve_triangular(c.factors, jnp.eye(u.shape[0]), lower=True) @ (u - c.means[:, None])
            log_determinant = jnp.sum(jnp.log(jnp.diagonal(c.factors)))
            return (jnp.sum(u**2, 0) - jnp.sum(white**2, 0)) / 2 - log_determinant

        # weights beside the exponentials, so that a weight of zero has a derivative
        return logsumexp(jax.lax.map(component, self), axis=0, b=self.weights[:, None])


def _axes(task: SingleLocation) -> Float[Array, "F F"]:
    """Principal directions of the signal, weak first: the noise is isotropic, so any rotation of the nodes is exact."""
    prior = task.prior
    moment = jnp.einsum("c,cf,cg->fg", prior.weights, prior.means, prior.means)
    moment = moment + jnp.einsum("c,cfg->fg", prior.weights, prior.covariances)
    return jnp.linalg.eigh(jax.lax.stop_gradient(moment))[1]


def _even(task: SingleLocation, axes: Float[Array, "F F"]) -> Bool[Array, " F"]:
    """Along which axes w is even for certain: those of a feature whose sign the prior does not know."""
    weights, means, covariances = task.prior.weights, task.prior.means, task.prior.covariances

    def mass(means: Array, covariances: Array) -> Array:
        """Of components with each of these means and covariances."""
        same = jnp.all(means[:, None] == task.prior.means[None], axis=-1)
        same &= jnp.all(covariances[:, None] == task.prior.covariances[None], axis=(-1, -2))
        return jnp.where(same, weights[None], 0.0).sum(axis=1)

    def unknown(sign: Array) -> Array:
        reflected = mass(sign[None] * means, (sign[:, None] * sign[None])[None] * covariances)
        return jnp.all(jnp.abs(reflected - mass(means, covariances)) <= 1e-15)

    signs = jax.lax.map(unknown, 1.0 - 2.0 * jnp.eye(task.features))
    return jnp.any((jnp.abs(axes) == 1) & signs[:, None], axis=0)


def _grid(task: SingleLocation, method: Quadrature) -> _joint.Grid:
    each = _TRACED_AXES.get(task.features, _TRACED_AXES[3])
    return points_grid(
        method,
        task,
        OWNER,
        traced=None if is_concrete(task) else (_TRACED_NODES, (each,) * task.features),
        spreads=lambda log_tail: _spreads(task, log_tail),
        need=lambda grid: _need(task, _with_points(grid, task, cheap)),
    )


def _fit_each(
    method: Method, tasks: SingleLocation, chosen: Bool[np.ndarray, " N"]
) -> list[tuple[Method, Bool[np.ndarray, " N"]]]:
    """`fit_each` for the Bayes risk."""
    if not isinstance(method, Quadrature) or method.nodes is not None:
        return [(method, chosen)]

    def need(grid: _joint.Grid, own: np.ndarray) -> np.ndarray:
        return each(_need_at, tasks, own, _with_points(grid, first(tasks, own), cheap))

    log_tails = log_rare(method.tail, tasks.length)
    spreads = each(_spreads_at, (tasks, log_tails), chosen, None)
    return fit_points(method, tasks, chosen, spreads=spreads, need=need)


def _with_points(grid: _joint.Grid, task: SingleLocation, changed: Callable[[Any], Any] = lambda p: p) -> _joint.Grid:
    """The grid with its points, so that compiled code serves every length."""
    return grid.laid_out(changed(_joint.standard_points(grid, task.features, "feature")))


def _alone(grid: _joint.Grid, task: SingleLocation) -> _joint.Grid:
    """The grid for one task, as `laid_out_alone`."""
    known = grid.laid is None and is_concrete(task)
    return _with_points(grid, task, _joint.padded) if known else grid


def _need_at(task: SingleLocation, grid: _joint.Grid) -> Array:
    return _need(task, grid)


def _product_counts(
    method: Quadrature, tasks: SingleLocation, chosen: Bool[np.ndarray, " N"]
) -> tuple[Int[np.ndarray, "N A"], Float[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Nodes on each axis, the log of the inverse weight at which they end, and which tasks a product is small for."""
    check_rounding(method, tasks, chosen)
    check_points(method, OWNER)
    log_tails, axes = log_rare(method.tail, tasks.length), first(tasks, chosen).features
    if isinstance(method.points, tuple):
        _joint.check_counts(method.points, axes, "feature")
        return np.tile(method.points, (len(chosen), 1)), log_tails, chosen
    if method.points is not None:  # Sobol points
        return np.ones((len(chosen), axes), int), log_tails, np.zeros_like(chosen)
    spreads = each(_spreads_at, (tasks, log_tails), chosen, None)
    counts = np.ones(spreads.shape, int)
    own = chosen & np.isfinite(spreads).all(1)
    for i in np.flatnonzero(own):
        found = axis_counts(spreads[i], log_tails[i])
        own[i] = max(found) <= LONGEST and tensor_size(found, log_tails[i]) <= _joint.MOST_POINTS
        counts[i] = found if own[i] else 1
    return counts, log_tails, own


def _risk_streamed(point: tuple[SingleLocation, Rules], shared: tuple[int, Array]) -> tuple[Array, Array]:
    """The risk on the first of two products of rules, and its error by the second; `shared` is room for the points,
    and how many nodes in u, 0 for as many as the window needs."""
    (task, rules), (room, given) = point, shared
    others, ratio, axes = jnp.asarray(task.length, jnp.float64) - 1, _Ratio.of(task), _axes(task)
    even = _even(task, axes)

    def on(before: Array, rule: Rules) -> tuple[Array, tuple[Array, ...]]:
        laid = laid_out(lambda z: ratio.log(axes @ z), rule, even, room)
        place = _windowed(moments(laid), others, rule.tail)
        needed = _joint.needed_nodes(place, others, rule.tail)
        own = jnp.where(given > 0, given, rounded_up(needed + 6))
        count = jnp.where(before > 0, -(-3 * before // 2), own)
        risks = streamed(laid, place, count, lambda u, du, tables: _forms(u, du, tables, others))
        return count, (*risks, jnp.where(given > 0, 0.0, needed))

    _, (form, other, needed) = jax.lax.scan(on, jnp.zeros((), int), rules)
    error = jnp.abs(form[0] - other[0]) + jnp.abs(form[0] - form[1])
    wide = jnp.where(needed[0] > MOST_NEEDED, jnp.nan, 0.0)
    return form[0] + wide, error + wide


def _spreads_at(point: tuple[SingleLocation, Array], shared: None) -> Array:
    return _spreads(*point)


def _risk_on(task: SingleLocation, grids: tuple[_joint.Grid, ...]) -> tuple[Array, Array]:
    """The risk on the first grid, and its error by the others."""
    both = _integrated(task, grids[0])
    return both[0], _refinement(task, grids[1:], both)


def _sampled_at(task: SingleLocation, shared: tuple[int, MonteCarlo]) -> tuple[Array, Array]:
    return _sampled(task, *shared)


def _checking(grid: _joint.Grid) -> tuple[_joint.Grid, ...]:
    """Grids that tell how far the risk on this one may be off: a finer one, other scrambles."""
    return _joint.refined(grid), *_joint.rescrambled(grid, SCRAMBLES, 1)


def _refinement(task: SingleLocation, checking: tuple[_joint.Grid, ...], both: tuple[Array, Array]) -> Array:
    """How far the risk may be off: by its two forms, and the grids that check its own."""
    value, other = both
    refined, *more = [_integrated(task, _alone(grid, task))[0] for grid in checking]
    error = jnp.abs(value - other) + jnp.abs(value - refined)
    return error + jnp.std(jnp.stack([value, *more]), ddof=1) if more else error


@eqx.filter_jit
def _need(task: SingleLocation, grid: _joint.Grid) -> Float[Array, ""]:
    return _joint.needed_nodes(_laid_out(task, grid)[2], jnp.asarray(task.length, jnp.float64) - 1, grid.tail)


@eqx.filter_jit
def _spreads(task: SingleLocation, log_tail: float | Array) -> Float[Array, " F"]:
    """Slopes of log w along the axes; a Gaussian component's grows with u, to where sharpness still counts."""
    axes, ratio = _axes(task), _Ratio.of(task)
    identity = jnp.eye(task.features)
    inverse = jax.vmap(lambda factor: cho_solve((factor, True), identity))(ratio.factors)
    slopes = jnp.abs(jnp.einsum("cf,cfg,gj->cj", ratio.means, inverse, axes))
    bends = jnp.abs(jnp.einsum("fj,cfg,gj->cj", axes, identity[None] - inverse, axes))
    return _joint.without_rounding((slopes + 0.4 * jnp.sqrt(2 * log_tail) * bends).max(0))


def _laid_out(task: SingleLocation, grid: _joint.Grid) -> tuple[Array, Array, _joint.Window]:
    """s at the points, their weights, and the window: bounded by E w = 1, e^{−u} E G(u+s) ≤ e^{−u−1}, and the noise."""
    points = _joint.standard_points(grid, task.features, "feature")
    others = jnp.asarray(task.length, jnp.float64) - 1
    s, weight = _Ratio.of(task).log(_axes(task) @ jnp.asarray(points.z)), jnp.asarray(points.weight)
    moments = _joint.Moments.of(*jax.lax.stop_gradient((s, weight)))
    return s, weight, _windowed(moments, others, grid.tail)


def _windowed(noise: _joint.Moments, others: Array, tail: float | Array) -> _joint.Window:
    """The window for the law of s of a token without signal."""
    place = _joint.bounded(noise, None, others, tail)
    left = -jnp.log(others / tail)
    right = jnp.minimum(place.right, jnp.log(1 / tail) + EDGE)
    return _joint.Window(left, jnp.clip(place.bend, left, right - 3.5), right)


@eqx.filter_jit
def _integrated(task: SingleLocation, grid: _joint.Grid) -> tuple[Array, Array]:
    """1 − E p_ε and E Σ_ℓ (δ_ℓε − p_ℓ)²."""
    s, weight, place = _laid_out(task, grid)
    others = jnp.asarray(task.length, jnp.float64) - 1
    u, du = bent_nodes(*place, grid.nodes)
    return _forms(u, du, _joint.tabulate(s, weight[:, None, None], 3, u)[:, 0], others)


def _forms(u: Array, du: Array, tables: Float[Array, "3 U"], others: Array) -> tuple[Array, Array]:
    """The two integrals over nodes u of weight du."""
    miss, g1, _ = tables
    signal = jnp.exp(-u) * g1  # E_ε g
    form = others * jnp.sum(du * signal * g1 * jnp.exp((others - 1) * jnp.log1p(-jnp.minimum(miss, 1 - 1e-13))))
    return form, _joint.risk(tables, 1 - signal, du, others)


@eqx.filter_jit
def _sampled(task: SingleLocation, length: int, method: MonteCarlo) -> tuple[Array, Array]:
    """Mean of 1 − p_ε over samples, shared equally by the components, and its standard error."""
    ratio, features = _Ratio.of(task), task.features
    each = -(-method.samples // task.prior.components)
    size = max(1, min(each, 2**19 // (length * features)))
    chunks = -(-each // size)

    def component(c: tuple[Array, _Ratio]) -> tuple[Array, Array]:
        index, own = c
        key = jax.random.fold_in(jax.random.key(method.seed), index)

        def chunk(i: Array) -> tuple[Array, Array]:
            u = jax.random.normal(jax.random.fold_in(key, i), (features, length * size), jnp.float64)
            first = own.means[:, None] + own.factors @ u[:, :size]
            log_w = ratio.log(jnp.concatenate([first, u[:, size:]], axis=1)).reshape(length, size)
            miss = -jnp.expm1(log_w[0] - logsumexp(log_w, axis=0))
            kept = i * size + jnp.arange(size) < each
            return jnp.sum(jnp.where(kept, miss, 0.0)) / each, jnp.sum(jnp.where(kept, miss**2, 0.0)) / each

        first, second = jax.tree.map(jnp.sum, jax.lax.map(jax.checkpoint(chunk), jnp.arange(chunks)))
        return first, second - jax.lax.stop_gradient(first) ** 2

    means, variances = jax.lax.map(component, (jnp.arange(task.prior.components), ratio))
    weights = task.prior.weights
    return weights @ means, jnp.sqrt(jnp.sum(jax.lax.stop_gradient(weights**2 * jnp.maximum(variances, 0)) / each))
