"""α-entmax of a row without sorting: the largest weight by a secant, sums of powers of few operations.

XLA sorts slowly on CPUs, and derivatives through an iteration are wrong: entmax has the closed rule of its Jacobian.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from theory._iterate import until_settled

_MOST_STEPS = 200  # never met: the secant takes some five, with kinks some thirty
_DIRECT = 8.0  # exponents up to which powers are taken of u, beyond it of 1 + (u − 1)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def entmax(scores: Float[Array, "*batch L"], alpha: float) -> Float[Array, "*batch L"]:
    """p_i = [(α−1)z_i − τ]_+^{1/(α−1)} with Σp = 1, 1 < α ≤ 2, of finite scores (docs/limits.md §1)."""
    z = (scores - jnp.max(scores, axis=-1, keepdims=True)) * (alpha - 1)
    exponent = 1 / (alpha - 1)
    if exponent in (1, 2):
        weights = _power(z - _newton(z, int(exponent)), exponent)
    else:
        rows = z.reshape(-1, z.shape[-1])
        x = _largest_weight(rows, exponent)
        inside = ~(rows <= -jnp.exp(x / exponent))  # NaN stays
        weights = jnp.where(inside, _weights(rows, x, exponent), jnp.zeros((), z.dtype)).reshape(z.shape)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


@entmax.defjvp
def _entmax_jvp(alpha: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """J = diag(g) − ggᵀ/Σg with g_i = p_i^{2−α} on the support and 0 off it: one-sided where p_i = 0 at its edge."""
    weights = entmax(primals[0], alpha)
    inside = weights > 0
    zero, one = jnp.zeros((), weights.dtype), jnp.ones((), weights.dtype)
    g = jnp.where(inside, _power(jnp.where(inside, weights, one), 2 - alpha), zero)
    share = g / jnp.sum(g, axis=-1, keepdims=True)
    moved = jnp.where(inside, tangents[0], zero)
    return weights, g * (moved - jnp.sum(share * moved, axis=-1, keepdims=True))


def _power(u: Array, exponent: float) -> Array:
    """[u]_+^exponent; next to nothing where u ≤ 0, if it is not 0."""
    if exponent == round(exponent) and abs(exponent) <= _DIRECT:
        return jax.lax.integer_pow(jnp.maximum(u, jnp.zeros((), u.dtype)), round(exponent))
    if exponent == 0.5:
        return jnp.sqrt(jnp.maximum(u, jnp.zeros((), u.dtype)))
    # XLA's power is slow, and so is a sum over what is chosen by a comparison
    return jnp.exp(exponent * jnp.log(jnp.maximum(u, jnp.finfo(u.dtype).tiny)))


def _newton(z: Float[Array, "*batch L"], exponent: int) -> Float[Array, "*batch 1"]:
    """τ with Σ[z−τ]_+^e = 1, e = 1 or 2, max z = 0. ‖[z−τ]_+‖_e is convex in τ: from the left steps stay there."""
    least = 2 * float(jnp.finfo(z.dtype).eps)

    def body(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tau, moving, count = state
        u = jnp.maximum(z - tau, jnp.zeros((), z.dtype))
        # compares would keep XLA from SIMD
        slope = jnp.minimum(u * 1e30, jnp.ones((), z.dtype)) if exponent == 1 else u
        total = u if exponent == 1 else u * u
        total, slope = (jnp.sum(terms, axis=-1, keepdims=True) for terms in (total, slope))
        change = (total - total ** (1 - 1 / exponent)) / slope
        far = moving & (change > least * jnp.maximum(jnp.abs(tau), least))
        return jnp.where(moving & (change == change), tau + change, tau), far, count + 1

    start = jnp.full_like(z[..., :1], -1)
    state = (start, jnp.ones_like(start, bool), jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(lambda s: jnp.any(s[1]) & (s[2] < _MOST_STEPS), body, state)[0]


def _weights(z: Float[Array, "rows L"], x: Float[Array, "rows 1"], exponent: float) -> Float[Array, "rows L"]:
    """p_i = [e^{x/e} + z_i]_+^e: x is the logarithm of the largest of them, whose z is 0."""
    if exponent > _DIRECT:  # u has lost digits that its high power needs: u − 1 has not
        below = jnp.maximum(jnp.expm1(x / exponent) + z, -1 + jnp.finfo(z.dtype).eps)
        return jnp.exp(exponent * jnp.log1p(below))
    return _power(jnp.exp(x / exponent) + z, exponent)


class _Secant(NamedTuple):
    x: Array
    before: Array  # the point tried before, and what was found there
    found: Array
    slope: Array
    low: Array
    high: Array
    moving: Array
    steps: Array


def _largest_weight(z: Float[Array, "rows L"], exponent: float) -> Float[Array, "rows 1"]:
    """x = log of the largest weight, by the secant of y = log Σp between bounds.

    As p_i ≤ max p, y has a slope ≥ 1 in x: the root is between x and x − y.
    """
    eps = float(jnp.finfo(z.dtype).eps)
    # a last step of size d leaves an error of order d^e by bends at the edge of the support, and of d times that before
    tolerance = min(eps ** (1 / exponent), eps**0.5 / 8)

    def body(z: Array, state: _Secant) -> _Secant:
        x, first = state.x, state.steps == 0
        y = jnp.log(jnp.sum(_weights(z, x, exponent), axis=-1, keepdims=True))
        low = jnp.maximum(state.low, jnp.where(y >= 0, x - y, x))
        high = jnp.minimum(state.high, jnp.where(y >= 0, x, x - y))
        slope = (y - state.found) / (x - state.before)
        slope = jnp.where((slope >= 1) & (slope < jnp.inf), slope, state.slope)
        slope = jnp.where(first, 1 + y / exponent, slope)  # a guess: about right for normal scores
        close = jnp.where(first, 4 * eps, tolerance).astype(z.dtype)
        done = ~(jnp.abs(y) > close) | (high - low <= 2 * eps)  # NaN ends a row as well
        following = x - y / slope
        halved = ~done & (((state.steps >= 8) & (state.steps % 2 == 0)) | ~((following >= low) & (following <= high)))
        following = jnp.where(halved, (low + high) / 2, jnp.clip(following, low, high))
        news = _Secant(following, x, y, slope, low, high, ~done, state.steps + 1)
        kept = jax.tree.map(lambda new, old: jnp.where(state.moving, new, old), news._replace(steps=state.steps), state)
        return kept._replace(steps=news.steps)

    zero, most = jnp.zeros_like(z[:, :1]), math.log(z.shape[-1]) + 0.01  # rounding has some room
    start = _Secant(zero, zero, zero, zero + 1, zero - most, zero + 0.01, zero == 0, jnp.zeros((), jnp.int32))
    return until_settled(body, z, start, _MOST_STEPS).x
