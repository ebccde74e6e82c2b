"""Exact averages of attention weights with one normalizer for all heads and tokens, at a cost independent of L.

With a_ℓ = T_ℓ/Σ T, T a function of one token's Gaussian vector x, s = log T and 1/Z^n = ∫ e^{nu − e^u Z} du/Γ(n),

    E Σ_ℓ (δ_ℓε − a_ℓ)² = (L−1) ∫ du φ_ε(u) { 2 E[G₂(u+s)] φ^{L−2} + (L−2) (E G(u+s))² φ^{L−3} },

φ_ε = E g(u+s_ε), φ = E g(u+s), g(v) = exp(−e^v), G = e^v g, G₂ = e^{2v} g: 1 − a_ε was written as the sum of the
other weights, so every term is positive, small risks keep their digits, and the window is that of the other tokens.

All averages are of the derivatives of γ₀ = 1 − g: γ₁ = G, γ₂ = G − G₂, … They are taken on given points, and by
Price's theorem (∂/∂cov E f = ½ E ∇²f) their derivatives are averages of the same form, of higher γ: singular
covariances are ordinary points, and the rule applies to itself. (No tangent enters an average: reverse mode would
drop the rule of a function of tangents, and a second derivative would miss the covariance.)
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
from theory._nodes import (
    EDGE,
    Points,
    bent_nodes,
    bent_span,
    half_again,
    most_spread,
    normal_points,
    tensor_points,
    tensor_size,
)
from theory.activation import Activation, BayesSoftmax
from theory.order import OrderParameters
from theory.scores import Scores, score_law
from theory.task import SingleLocation

MOST_POINTS = 2**18  # of a product of rules; beyond, Sobol points
SOBOL_POINTS = 2**16

# x (A,) -> s and coefficients c (J, M) of M averages E Σ_j c_jm γ_j(u + s)
Terms = Callable[[Array], tuple[Array, Array]]
UP = np.asarray([1, 0.5, 0.25, 0.1, 0.03, 0.01, 0.001])  # powers of the moments that bound the window
DOWN = np.asarray([0.001, 0.01, 0.1, 0.3, 1, 3, 10, 30])
_CEILING = 5.8  # e^{−e^5.8} = 1e-143: as good as zero, and its products are no denormal numbers
_CHUNK = 4096  # points whose γ are held at once


class Grid(NamedTuple):
    """Nodes and accuracy: tail mass, log of the inverse weight at which points end, nodes in u, points (a count per
    principal axis, or a number of Sobol points), the seed of the latter, and the points themselves once laid out."""

    tail: float
    log_tail: float
    nodes: int
    points: tuple[int, ...] | int
    seed: int = 0
    laid: Any = None

    def laid_out(self, points: Any) -> "Grid":
        """This grid with its points as arrays, which may differ between calls of compiled code."""
        return self._replace(log_tail=0.0, points=0, seed=0, laid=jax.tree.map(jnp.asarray, points))


class Window(NamedTuple):
    """Where the integrand lives."""

    left: Array
    bend: Array  # where its exponential left tail begins
    right: Array


def gammas(v: Array, count: int) -> list[Array]:
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


def tabulate(
    s: Float[Array, " N"], weighted: Float[Array, "N J M"], orders: int, u: Float[Array, " U"]
) -> Float[Array, "K M U"]:
    """Σ_n Σ_j weighted_njm γ_{k+j}(u + s_n) for k = 0 … orders−1."""
    count, many, columns = weighted.shape
    chunk = min(_CHUNK, count)
    fill = -count % chunk
    s_parts = jnp.pad(s, (0, fill)).reshape(-1, chunk)
    weighted_parts = jnp.pad(weighted, ((0, fill), (0, 0), (0, 0))).reshape(-1, chunk, many, columns)

    @jax.checkpoint
    def part(total: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
        s, weighted = one
        values = gammas(u[:, None] + s[None, :], orders + many - 1)
        found = [jnp.sum(jnp.stack([values[k + j] @ weighted[:, j] for j in range(many)]), 0) for k in range(orders)]
        return total + jnp.stack(found), None

    start = jnp.zeros((orders, u.shape[0], columns))
    return jnp.swapaxes(jax.lax.scan(part, start, (s_parts, weighted_parts))[0], 1, 2)


def principal_axes(covariance: Float[Array, "*batch A A"]) -> Float[Array, "*batch A A"]:
    """A root whose columns are the principal axes times their standard deviations, narrow first; no derivative."""
    values, vectors = jnp.linalg.eigh(jax.lax.stop_gradient(covariance))
    return vectors * jnp.sqrt(jnp.clip(values, 0))[..., None, :]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def averages(
    terms: Terms, orders: int, mean: Array, covariance: Array, u: Array, points: Points
) -> Float[Array, "C K M U"]:
    """E Σ_j c_jm γ_{k+j}(u + s) for k = 0 … orders−1, x ~ N(mean, covariance), for each of C laws.

    Points have a leading axis of C, or of 1. Not differentiated in u.
    """

    def one(law: tuple[Array, Array, Array]) -> Array:
        index, mean, covariance = law
        z, weight = (a[jnp.minimum(index, a.shape[0] - 1)] for a in points)
        s, c = jax.vmap(terms, in_axes=1)(mean[:, None] + principal_axes(covariance) @ z)
        return tabulate(s, c * weight[:, None, None], orders, u)

    return jax.lax.map(one, (jnp.arange(mean.shape[0]), mean, covariance))


@averages.defjvp
def _averages_jvp(terms, orders, primals, tangents):
    mean, covariance, u, points = primals
    d_mean, d_covariance, *_ = tangents
    i, j = np.triu_indices(mean.shape[-1])
    half = np.where(i == j, 0.5, 1.0)[None, None]

    def slopes(x: Array) -> tuple[Array, Array]:
        """Coefficients of ∇f and of ½∇²f (upper triangle, each pair once), for every f of `terms`."""
        (s, c), first, second = terms(x), jax.jacfwd(terms)(x), jax.jacfwd(jax.jacfwd(terms))(x)
        ds, dc = first[0][None, None], first[1]  # (1, 1, A) and (J, M, A)
        dds, ddc = second[0][None, None, i, j] * half, second[1][:, :, i, j] * half
        c = c[:, :, None]
        mixed = (ds[..., i] * dc[..., j] + dc[..., i] * ds[..., j]) * half
        higher = lambda table, by: jnp.pad(table, ((by, 2 - by), (0, 0), (0, 0)))  # noqa: E731
        along = higher(dc, 0) + higher(c * ds, 1)
        bent = higher(ddc, 0) + higher(mixed + c * dds, 1) + higher(c * ds[..., i] * ds[..., j] * half, 2)
        both = jnp.concatenate([along, bent], axis=-1)  # (J+2, M, A + A(A+1)/2)
        return s, both.reshape(both.shape[0], -1)

    value = averages(terms, orders, mean, covariance, u, points)
    slope = averages(slopes, orders, mean, covariance, u, points)
    d_symmetric = (d_covariance + jnp.swapaxes(d_covariance, -1, -2)) / 2
    direction = jnp.concatenate([d_mean, d_symmetric[:, i, j]], axis=-1)
    return value, jnp.einsum("ckmiu,ci->ckmu", slope.reshape(*value.shape[:3], -1, u.shape[0]), direction)


def law(task: SingleLocation, activation: Activation, order: OrderParameters) -> tuple[Scores, Float[Array, " H"]]:
    """Law of the scores, and the biases of the heads."""
    resolved = activation.resolved(jnp.diagonal(order.r))
    assert isinstance(resolved, BayesSoftmax)
    return score_law(task, order), resolved.biases(order.heads)


def spreads(scores: Scores) -> Float[Array, " H"]:
    """Largest standard deviation of a head along each principal axis, narrow first, over the laws of all tokens."""
    axes = principal_axes(jnp.concatenate([scores.noise[None], scores.signal]))
    return without_rounding(jnp.max(jnp.abs(axes), axis=(0, 1)))


def without_rounding(spread: Float[Array, " A"]) -> Float[Array, " A"]:
    """Spreads with zeros where only the root of rounding is left."""
    return jnp.where(spread > 1e-7 * jnp.max(spread), spread, 0.0)


def too_sharp(spread: Float[Array, " A"], grid: Grid, tolerance: float) -> Array:
    """Whether these spreads need more counts on some axis than a product grid has, for even this tolerance."""
    if not isinstance(grid.points, tuple):
        return jnp.asarray(False)
    widest = np.array([most_spread(count, log_tail_at(tolerance)) for count in grid.points])
    return jnp.any(spread > widest)


def log_tail_at(tolerance: float) -> float:
    """Log of the inverse weight at which points end for one token."""
    return float(np.log(20 / tolerance))


def layout(counts: tuple[int, ...], log_tail: float) -> tuple[int, ...] | int:
    """These counts on the principal axes, or Sobol points if there would be too many."""
    return counts if tensor_size(counts, log_tail) <= MOST_POINTS else SOBOL_POINTS


def check_counts(counts: tuple[int, ...], axes: int, owner: str) -> None:
    """Refuses another number of counts than one per `owner`."""
    if len(counts) != axes:
        raise invalid("points", f"one count per {owner} ({axes})", counts)


def standard_points(grid: Grid, axes: int, owner: str) -> Points:
    """The grid's points in so many dimensions: the product of its counts (one per `owner`), or Sobol points."""
    if grid.laid is not None:
        return grid.laid
    if isinstance(grid.points, tuple):
        check_counts(grid.points, axes, owner)
        return tensor_points(grid.points, grid.log_tail)
    z = normal_points(grid.points, 1, axes, seed=grid.seed)[0]
    return Points(z, np.full(z.shape[-1], 1 / z.shape[-1]))


def points_of(grid: Grid, heads: int, components: int) -> tuple[Points, Points]:
    """Points for ℓ≠ε, and for token ε with a leading axis: one set for all components, or one for each."""
    if grid.laid is not None:
        return grid.laid
    noise = standard_points(grid, heads, "head")
    if isinstance(grid.points, tuple):
        return noise, Points(noise.z[None], noise.weight[None])
    each = max(64, 2 ** int(np.log2(noise.z.shape[-1] / components)))  # consecutive parts fill space as evenly
    parts = normal_points(each * components, 1, heads, seed=grid.seed + 1)[0][:, : each * components]
    split = np.moveaxis(parts.reshape(heads, components, each), 1, 0)
    return noise, Points(split, np.full((components, each), 1 / each))


def padded(points: Any, *, least: int = 64) -> Any:
    """Points of weight zero added, up to `least` or a power of two beyond: few different numbers, for grids of many
    sizes to share compiled code."""

    def fill(array: Any) -> np.ndarray:
        count = array.shape[-1]
        whole = max(least, 2 ** (count - 1).bit_length())
        return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, whole - count)])

    return jax.tree.map(fill, points)


def _terms(x: Float[Array, " H"]) -> tuple[Array, Array]:
    """s = log Σ_h e^{x_h}, and the average of γ itself."""
    return logsumexp(x), jnp.ones((1, 1))


def prepared(scores: Scores, biases: Array, grid: Grid) -> tuple[Points, Points, Window, Array]:
    """Points, window and L−1."""
    points = points_of(grid, scores.noise.shape[-1], scores.weights.shape[0])
    noise, signal = jax.tree.map(jnp.asarray, points)
    return noise, signal, *_placed(scores, biases, (noise, signal), grid.tail)


def _placed(scores: Scores, biases: Array, points: tuple[Points, Points], tail: float | Array) -> tuple[Window, Array]:
    """Window and L−1."""
    noise, signal = points
    components = scores.weights.shape[0]
    others = jnp.asarray(scores.length, jnp.float64) - 1

    def s(mean: Array, covariance: Array, z: Array) -> Array:
        return logsumexp((mean - biases)[:, None] + principal_axes(covariance) @ z, axis=0)

    z, weight = (jnp.broadcast_to(a, (components, *a.shape[1:])) for a in signal)
    s_signal = jax.vmap(s)(scores.mean, scores.signal, z)
    s_noise = s(jnp.zeros_like(biases), scores.noise, noise.z)
    place = window((s_noise, noise.weight), (s_signal, scores.weights[:, None] * weight), others, tail)
    return place, others


def needed(scores: Scores, biases: Array, points: tuple[Points, Points], tail: float | Array) -> Array:
    """Nodes in u, for these points."""
    place, others = _placed(scores, biases, points, tail)
    return needed_nodes(place, others, tail)


def exceeds(scores: Scores, biases: Array, grid: Grid, tolerance: float) -> Array:
    """Whether the scores need more than the grid for even this tolerance."""
    _, _, place, others = prepared(scores, biases, grid)
    return (needed_nodes(place, others, tolerance) > grid.nodes) | too_sharp(spreads(scores), grid, tolerance)


def refined(grid: Grid) -> Grid:
    """Half as many nodes again on every axis, and less outside."""
    points = tuple(map(half_again, grid.points)) if isinstance(grid.points, tuple) else grid.points
    return grid._replace(
        tail=grid.tail / 100, log_tail=grid.log_tail + 4.6, nodes=half_again(grid.nodes), points=points
    )


def rescrambled(grid: Grid, others: int, sets: int) -> tuple[Grid, ...]:
    """Further grids with Sobol points of their own, each of several sets; none for a product of rules."""
    if isinstance(grid.points, tuple):
        return ()
    return tuple(grid._replace(seed=sets * (i + 1)) for i in range(others))


def joint_risk(scores: Scores, biases: Float[Array, " H"], grid: Grid) -> Float[Array, ""]:
    """E Σ_ℓ (δ_ℓε − a_ℓ)² with a_ℓ = Σ_h e^{χ_hℓ − b_h}/Σ; differentiable in everything but the length."""
    noise, signal, place, others = prepared(scores, biases, grid)
    u, du = jax.lax.stop_gradient(bent_nodes(*place, grid.nodes))
    alone = jax.tree.map(lambda a: a[None], noise)
    tables = averages(_terms, 3, -biases[None], scores.noise[None], u, alone)[0, :, 0]

    miss = scores.weights @ averages(_terms, 1, scores.mean - biases[None], scores.signal, u, signal)[:, 0, 0]
    return risk(tables, miss, du, others)


class Moments(NamedTuple):
    """Of a law of s: log E e^{as} for the a of `UP`, log E e^{−as} for those of `DOWN`, and E s e^s/E e^s."""

    up: Array
    down: Array
    centre: Array

    @classmethod
    def of(cls, s: Array, weight: Array) -> "Moments":
        """From values and weights (…, N)."""
        tilted = weight * jnp.exp(s - jnp.max(s))
        return cls(_log_moments(UP, s, weight), _log_moments(-DOWN, s, weight), jnp.sum(tilted * s) / jnp.sum(tilted))


def _log_moments(powers: np.ndarray, s: Array, weight: Array) -> Array:
    """log E e^{as} for each power a."""
    return jax.lax.map(lambda one: logsumexp(one * s, b=weight), powers)


def window(noise: tuple[Array, Array], signal: tuple[Array, Array], others: Array, tail: float | Array) -> Window:
    """Window of the integrand for s with weights (…, N), of another token and of token ε."""
    noise, signal = jax.lax.stop_gradient((noise, signal))
    return bounded(Moments.of(*noise), _log_moments(-DOWN, *signal), others, tail)


def bounded(noise: Moments, signal: Array | None, others: Array, tail: float | Array) -> Window:
    """Window of the integrand: by 1 − g(v) ≤ e^{av} (0 < a ≤ 1), g(v) ≤ (a/e)^a e^{−av}.

    Without the moments (of `DOWN`) of token ε only the other tokens bound it on the right.
    """
    log_tail = jnp.log(1 / tail)
    log_rare, log_edge = log_tail + jnp.log(others), log_tail + EDGE
    left = jnp.max((-log_rare - noise.up) / UP)
    bound = DOWN * (jnp.log(DOWN) - 1)
    right = jnp.min((bound + noise.down + log_edge / others) / DOWN)
    if signal is not None:
        right = jnp.minimum(right, jnp.min((bound + signal + log_edge) / DOWN))
    right = jnp.maximum(right, left + 4)
    bend = jnp.minimum(-noise.centre, right - 3.5)
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
