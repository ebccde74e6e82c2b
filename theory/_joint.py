"""Exact averages of attention weights with one normalizer for all heads and tokens, at a cost independent of L.

With a_ℓ = T_ℓ/Σ T, T a function of one token's Gaussian vector x, s = log T and 1/Z^n = ∫ e^{nu − e^u Z} du/Γ(n),

    E Σ_ℓ (δ_ℓε − a_ℓ)² = (L−1) ∫ du φ_ε(u) { 2 E[G₂(u+s)] φ^{L−2} + (L−2) (E G(u+s))² φ^{L−3} },

φ_ε = E g(u+s_ε), φ = E g(u+s), g(v) = exp(−e^v), G = e^v g, G₂ = e^{2v} g: 1 − a_ε was written as the sum of the
other weights, so every term is positive, small risks keep their digits, and the window is that of the other tokens.

All averages are of the derivatives of γ₀ = 1 − g: γ₁ = G, γ₂ = G − G₂, … They are taken on given points, and by
Price's theorem (∂/∂cov E f = ½ E ∇²f) their derivatives are averages of the same form, of higher γ: singular
covariances are ordinary points, and the rule applies to itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from theory._checks import invalid
from theory._nodes import Points, bent_nodes, bent_span, most_spread, normal_points, tensor_points, tensor_size
from theory.activation import Activation, BayesSoftmax
from theory.order import OrderParameters
from theory.scores import Scores, score_law
from theory.task import SingleLocation

MOST_POINTS = 2**17  # of a product of rules; beyond, Sobol points
SOBOL_POINTS = 2**14

# (args, x (A,)) -> s and the coefficients c_j, all scalars
Terms = Callable[[Any, Array], tuple[Array, tuple[Array, ...]]]
_CEILING = 6.5  # e^{−e^6.5} = 1e-289: as good as zero, and no denormal number


class Grid(NamedTuple):
    """Nodes and accuracy: tail mass, log of the inverse weight at which points end, nodes in u, points (a count per
    principal axis, or a number of Sobol points) and the seed of the latter."""

    tail: float
    log_tail: float
    nodes: int
    points: tuple[int, ...] | int
    seed: int = 0


class Window(NamedTuple):
    """Where the integrand lives."""

    left: Array
    bend: Array  # where its exponential left tail begins
    right: Array


def _gammas(v: Array, count: int) -> list[Array]:
    """γ_0 … γ_{count−1} at v: γ_j = P_j(e^v) g(v) with P_1 = t, P_{j+1} = t (P_j' − P_j)."""
    t = jnp.exp(jnp.minimum(v, _CEILING))
    g = jnp.exp(-t)
    found, polynomial = [-jnp.expm1(-t)], np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(1, count):
        value = jnp.full_like(t, polynomial.coef[-1])
        for coefficient in polynomial.coef[-2::-1]:
            value = value * t + coefficient
        found.append(value * g)
        polynomial = np.polynomial.Polynomial([0.0, 1.0]) * (polynomial.deriv() - polynomial)
    return found


def tabulate(s: Float[Array, " N"], weighted: list[Array], orders: int, u: Float[Array, " U"]) -> Float[Array, "K U"]:
    """Σ_n Σ_j weighted_jn γ_{k+j}(u + s_n) for k = 0 … orders−1."""
    many = len(weighted)

    @jax.checkpoint
    def at(u: Array) -> Array:
        # one product after the other: a stack of the γ would be computed ten times more slowly
        gammas = _gammas(u + s, orders + many - 1)
        return jnp.stack(
            [jnp.sum(jnp.stack([gammas[k + j] @ weighted[j] for j in range(many)])) for k in range(orders)]
        )

    return jax.lax.map(at, u).T


def principal_axes(covariance: Float[Array, "*batch A A"]) -> Float[Array, "*batch A A"]:
    """A root whose columns are the principal axes times their standard deviations, narrow first; no derivative."""
    values, vectors = jnp.linalg.eigh(jax.lax.stop_gradient(covariance))
    return vectors * jnp.sqrt(jnp.clip(values, 0))[..., None, :]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def averages(
    terms: Terms, orders: int, args: Any, mean: Array, covariance: Array, u: Array, points: Points
) -> Float[Array, "K U"]:
    """E Σ_j c_j γ_{k+j}(u + s) for k = 0 … orders−1, x ~ N(mean, covariance); not differentiated in u."""
    x = mean[:, None] + principal_axes(covariance) @ points.z
    s, coefficients = jax.vmap(terms, in_axes=(None, 1))(args, x)
    return tabulate(s, [jnp.broadcast_to(c, s.shape) * points.weight for c in coefficients], orders, u)


@averages.defjvp
def _averages_jvp(terms, orders, primals, tangents):
    args, mean, covariance, u, points = primals
    d_args, d_mean, d_covariance, *_ = tangents

    def tangent(both: Any, x: Array) -> tuple[Array, tuple[Array, ...]]:
        (args, d_args), d_mean, d_covariance = both
        flat = lambda args, x: jnp.stack([terms(args, x)[0], *terms(args, x)[1]])  # noqa: E731
        values, slopes = jax.jvp(flat, (args, x), (d_args, d_mean))
        along = lambda d: lambda y: jax.jvp(lambda z: flat(args, z), (y,), (d,))[1]  # noqa: E731
        unit = jnp.eye(x.shape[0])
        first = jax.vmap(lambda e: along(e)(x))(unit).T  # (1+J, A)
        bent = jax.vmap(lambda e, d: jax.jvp(along(d), (x,), (e,))[1])(unit, d_covariance).sum(0)  # tr(dC ∇²) of each
        s, c = values[0], values[1:]
        spread = first @ d_covariance @ first[0]  # ∇· dC ∇s
        found = [jnp.zeros_like(s) for _ in range(c.shape[0] + 2)]
        for j in range(c.shape[0]):
            found[j] += slopes[1 + j] + bent[1 + j] / 2
            found[j + 1] += c[j] * (slopes[0] + bent[0] / 2) + spread[1 + j]
            found[j + 2] += c[j] * spread[0] / 2
        return s, tuple(found)

    value = averages(terms, orders, args, mean, covariance, u, points)
    slope = averages(tangent, orders, ((args, d_args), d_mean, d_covariance), mean, covariance, u, points)
    return value, slope


def law(task: SingleLocation, activation: Activation, order: OrderParameters) -> tuple[Scores, Float[Array, " H"]]:
    """Law of the scores, and the biases of the heads."""
    resolved = activation.resolved(jnp.diagonal(order.r))
    assert isinstance(resolved, BayesSoftmax)
    return score_law(task, order), resolved.biases(order.heads)


def spreads(scores: Scores) -> Float[Array, " H"]:
    """Largest standard deviation of a head along each principal axis, narrow first, over the laws of all tokens."""
    axes = principal_axes(jnp.concatenate([scores.noise[None], scores.signal]))
    found = jnp.max(jnp.abs(axes), axis=(0, 1))
    return jnp.where(found > 1e-7 * jnp.max(found), found, 0.0)  # the root of rounding


def layout(counts: tuple[int, ...], log_tail: float) -> tuple[int, ...] | int:
    """These counts on the principal axes, or Sobol points if there would be too many."""
    return counts if tensor_size(counts, log_tail) <= MOST_POINTS else SOBOL_POINTS


def _points(grid: Grid, heads: int, components: int) -> tuple[Points, Points]:
    """Points for ℓ≠ε, and for token ε with a leading axis: one set for all components, or one for each."""
    if isinstance(grid.points, tuple):
        if len(grid.points) != heads:
            raise invalid("points", f"one count per head ({heads})", grid.points)
        points = tensor_points(grid.points, grid.log_tail)
        return points, Points(points.z[None], points.weight[None])
    z = normal_points(grid.points, 1, heads, seed=grid.seed)[0]
    each = max(64, 2 ** int(np.log2(z.shape[-1] / components)))  # consecutive parts fill space as evenly
    parts = normal_points(each * components, 1, heads, seed=grid.seed + 1)[0][:, : each * components]
    split = np.moveaxis(parts.reshape(heads, components, each), 1, 0)
    return (
        Points(z, np.full(z.shape[-1], 1 / z.shape[-1])),
        Points(split, np.full((components, each), 1 / each)),
    )


def _terms(biases: Float[Array, " H"], x: Float[Array, " H"]) -> tuple[Array, tuple[Array, ...]]:
    """s = log Σ_h e^{χ_h − b_h}."""
    return logsumexp(x - biases), (jnp.ones(()),)


def _prepared(scores: Scores, biases: Array, grid: Grid) -> tuple[Points, Points, Window, Array]:
    """Points, window and L−1."""
    components = scores.weights.shape[0]
    noise, signal = jax.tree.map(jnp.asarray, _points(grid, scores.noise.shape[-1], components))
    others = jnp.asarray(scores.length, jnp.float64) - 1

    def s(mean: Array, covariance: Array, z: Array) -> Array:
        return logsumexp((mean - biases)[:, None] + principal_axes(covariance) @ z, axis=0)

    z, weight = (jnp.broadcast_to(a, (components, *a.shape[1:])) for a in signal)
    s_signal = jax.vmap(s)(scores.mean, scores.signal, z)
    s_noise = s(jnp.zeros_like(biases), scores.noise, noise.z)
    place = window((s_noise, noise.weight), (s_signal, scores.weights[:, None] * weight), others, grid.tail)
    return noise, signal, place, others


def needed(scores: Scores, biases: Array, grid: Grid) -> Array:
    """Nodes in u, for the points of the grid."""
    _, _, place, others = _prepared(scores, biases, grid)
    return needed_nodes(place, others, grid.tail)


def exceeds(scores: Scores, biases: Array, grid: Grid, tolerance: float) -> Array:
    """Whether the scores need more than the grid for even this tolerance."""
    _, _, place, others = _prepared(scores, biases, grid)
    beyond = needed_nodes(place, others, tolerance) > grid.nodes
    if isinstance(grid.points, tuple):
        log_tail = float(np.log(20 / tolerance))
        widest = np.array([most_spread(count, log_tail) for count in grid.points])
        beyond = beyond | jnp.any(spreads(scores) > widest)
    return beyond


def refined(grid: Grid) -> Grid:
    """Half as many nodes again on every axis, and less outside."""
    points = grid.points
    if isinstance(points, tuple):
        points = tuple(count if count == 1 else -(-3 * count // 2) for count in points)
    return grid._replace(
        tail=grid.tail / 100, log_tail=grid.log_tail + 4.6, nodes=-(-3 * grid.nodes // 2), points=points
    )


def joint_risk(scores: Scores, biases: Float[Array, " H"], grid: Grid) -> Float[Array, ""]:
    """E Σ_ℓ (δ_ℓε − a_ℓ)² with a_ℓ = Σ_h e^{χ_hℓ − b_h}/Σ; differentiable in everything but the length."""
    noise, signal, place, others = _prepared(scores, biases, grid)
    u, du = jax.lax.stop_gradient(bent_nodes(*place, grid.nodes))
    tables = averages(_terms, 3, biases, jnp.zeros_like(biases), scores.noise, u, noise)

    def component(c: tuple[Array, Array, Array]) -> Array:
        index, mean, covariance = c
        points = jax.tree.map(lambda a: a[jnp.minimum(index, a.shape[0] - 1)], signal)
        return averages(_terms, 1, biases, mean, covariance, u, points)[0]

    index = jnp.arange(scores.weights.shape[0])
    miss = scores.weights @ jax.lax.map(component, (index, scores.mean, scores.signal))
    return risk(tables, miss, du, others)


def window(noise: tuple[Array, Array], signal: tuple[Array, Array], others: Array, tail: float | Array) -> Window:
    """Window of the integrand for s with weights (…, N): by 1 − g(v) ≤ e^{av} (0 < a ≤ 1), g(v) ≤ (a/e)^a e^{−av}."""
    (s, w), (s_signal, w_signal) = jax.lax.stop_gradient((noise, signal))
    log_tail = jnp.log(1 / tail)
    log_rare = log_tail + jnp.log(others)

    def moment(a: Array, s: Array, w: Array) -> Array:
        """log E e^{as} for each a."""
        return jax.lax.map(lambda one: logsumexp(one * s, b=w), a)

    up, down = jnp.asarray([1, 0.5, 0.25, 0.1, 0.03, 0.01, 0.001]), jnp.asarray([0.001, 0.01, 0.1, 0.3, 1, 3, 10, 30])
    left = jnp.max((-log_rare - moment(up, s, w)) / up)
    bound = down * (jnp.log(down) - 1)
    right_noise = jnp.min((bound + moment(-down, s, w) + log_tail / others) / down)
    right_signal = jnp.min((bound + moment(-down, s_signal, w_signal) + log_tail) / down)
    right = jnp.maximum(jnp.minimum(right_noise, right_signal), left + 4)
    tilted = w * jnp.exp(s - jnp.max(s))
    bend = jnp.minimum(-jnp.sum(tilted * s) / jnp.sum(tilted), right - 3.5)
    return Window(left, jnp.maximum(bend, left), right)


def needed_nodes(window: Window, others: Array, tail: float | Array) -> Array:
    """Nodes in u: the integrand may be as sharp as G, whose transform decays like e^{−πk/2}."""
    sharpest = 2 * (jnp.log(1 / tail) + jnp.log(others)) / jnp.pi
    density = jnp.maximum(sharpest, (window.bend - window.left) / 2) / (2 * jnp.pi)
    return bent_span(window.left, window.bend, window.right) * density * 1.2


def risk(
    noise: Float[Array, "3 U"], signal: Float[Array, " U"], du: Float[Array, " U"], others: Array
) -> Float[Array, ""]:
    """The integral above from E γ_0, γ_1, γ_2 of another token and E γ_0 of token ε at nodes u of weight du."""
    miss, g1, g2 = noise[0], noise[1], noise[1] - noise[2]
    # 1 − 1e-13 keeps the logarithm finite where nothing is left of the integrand
    log_phi = jnp.log1p(-jnp.minimum(miss, 1 - 1e-13))
    two = 2 * g2 * jnp.exp((others - 1) * log_phi)
    three = (others - 1) * g1**2 * jnp.exp(jnp.maximum(others - 2, 0) * log_phi)
    return others * jnp.sum(du * (1 - signal) * (two + three))
