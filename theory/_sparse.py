"""Sparse weights of a row, without sorting: α-entmax by Newton's method, the k largest by bisection.

XLA sorts slowly on CPUs, and derivatives through an iteration are wrong: entmax has the closed rule of its Jacobian.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from theory._rows import length, lowered

_MOST_STEPS = 200  # never met: Newton's method takes some five, with safeguards some ten
_DIRECT = 8.0  # exponents up to which powers are taken of u, beyond it of 1 + (u − 1)
_EARLY = 9  # thresholds tried before scores that several share are looked for


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def entmax(scores: Float[Array, "*batch L"], alpha: float) -> Float[Array, "*batch L"]:
    """p_i = [(α−1)z_i − τ]_+^{1/(α−1)} with Σp = 1, α > 1, of finite scores (docs/limits.md §1)."""
    z = (scores - jnp.max(scores, axis=-1, keepdims=True)) * (alpha - 1)
    exponent = 1 / (alpha - 1)
    if alpha > 2:
        weights = _by_largest(z, alpha - 1)
    elif exponent == round(exponent) and exponent <= _DIRECT:
        weights = _power(z - _newton(z, round(exponent)), round(exponent))
    else:
        # a higher power of numbers below 1 is less: its root is a start on the left
        start = _newton(z, min(int(exponent) + 1, int(_DIRECT))) if exponent <= _DIRECT else None
        weights = _by_logarithms(z, exponent, start)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


@entmax.defjvp
def _entmax_jvp(alpha: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """J = diag(g) − ggᵀ/Σg with g_i = p_i^{2−α} on the support and 0 off it: one-sided where p_i = 0 at its edge."""
    weights = entmax(primals[0], alpha)
    inside = weights > 0
    if alpha == 2:
        g = inside.astype(weights.dtype)
    else:
        g = jnp.where(inside, jnp.where(inside, weights, jnp.ones((), weights.dtype)) ** (2 - alpha), 0)
    share = g / jnp.sum(g, axis=-1, keepdims=True)
    moved = jnp.where(inside, tangents[0], jnp.zeros((), weights.dtype))
    return weights, g * (moved - jnp.sum(share * moved, axis=-1, keepdims=True))


def _power(u: Array, exponent: int) -> Array:
    return jax.lax.integer_pow(jnp.maximum(u, jnp.zeros((), u.dtype)), exponent)


def _newton(z: Float[Array, "*batch L"], exponent: int) -> Float[Array, "*batch 1"]:
    """τ with Σ[z−τ]_+^e = 1, max z = 0. ‖[z−τ]_+‖_e is convex in τ: from the left every step stays there."""

    def step(tau: Array) -> Array:
        u = jnp.maximum(z - tau, jnp.zeros((), z.dtype))
        if exponent == 1:
            total, slope = u, jnp.minimum(u * 1e30, jnp.ones((), z.dtype))  # compares would keep XLA from SIMD
        else:
            slope = jax.lax.integer_pow(u, exponent - 1)
            total = slope * u
        total, slope = (jnp.sum(terms, axis=-1, keepdims=True) for terms in (total, slope))
        return (total - total ** (1 - 1 / exponent)) / slope

    return _climbed(step, jnp.full_like(z[..., :1], -1))


def _by_logarithms(
    z: Float[Array, "*batch L"], exponent: float, start: Float[Array, "*batch 1"] | None
) -> Float[Array, "*batch L"]:
    """[z−τ]_+^e with a sum of nearly 1, for any e > 1, by powers of u or, from no start, of 1 + (u − 1)."""
    zero, one = jnp.zeros((), z.dtype), jnp.ones((), z.dtype)

    def logarithm(tau: Array) -> tuple[Array, Array]:
        """log u on the support, and which tokens are there."""
        if start is None:
            below = z - tau  # here τ stands for τ + 1, which is small
            inside = below > -1
            return jnp.log1p(jnp.where(inside, below, zero)), inside
        u = z - tau
        inside = u > 0
        return jnp.log(jnp.where(inside, u, one)), inside

    def step(tau: Array) -> Array:
        log, inside = logarithm(tau)
        slope = jnp.where(inside, jnp.exp((exponent - 1) * log), zero)
        total = slope * (1 + (z - tau) if start is None else z - tau)
        total, slope = (jnp.sum(jnp.where(inside, x, zero), axis=-1, keepdims=True) for x in (total, slope))
        return (total - total ** (1 - 1 / exponent)) / slope

    # a step of size d, beyond bends of u^{e−1} at the edge of the support, leaves an error of order d^min(e, 2)
    rounding = float(jnp.finfo(z.dtype).eps) ** (1 / min(exponent, 2)) / 8
    log, inside = logarithm(_climbed(step, jnp.zeros_like(z[..., :1]) if start is None else start, rounding))
    return jnp.where(inside, jnp.exp(exponent * log), zero)


def _climbed(step: Callable[[Array], Array], start: Float[Array, "*batch 1"], rounding: float = 0.0) -> Array:
    """`start` + steps until they are rounding; each row stops by itself, whatever rows there are beside it."""
    least = max(rounding, 2 * float(jnp.finfo(start.dtype).eps))

    def body(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        value, moving, count = state
        change = step(value)
        far = moving & (change > least * jnp.maximum(jnp.abs(value), least))
        return jnp.where(moving & (change == change), value + change, value), far, count + 1

    moving = jnp.ones_like(start, bool)
    state = (start, moving, jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(lambda s: jnp.any(s[1]) & (s[2] < _MOST_STEPS), body, state)[0]


class _Bracket(NamedTuple):
    low: Array
    high: Array
    value: Array
    moving: Array
    steps: Array


def _by_largest(z: Float[Array, "*batch L"], a: float) -> Float[Array, "*batch L"]:
    """(w^a + z)_+^{1/a} with a sum of nearly 1, a > 1: the largest weight w by Newton's method within a bracket."""
    zero, one, eps = jnp.zeros((), z.dtype), jnp.ones((), z.dtype), jnp.finfo(z.dtype).eps

    def logarithm(w: Array) -> tuple[Array, Array]:
        u = w**a + z
        inside = u > 0
        return jnp.log(jnp.where(inside, u, one)) / a, inside

    def body(state: _Bracket) -> _Bracket:
        w = state.value
        log, inside = logarithm(w)
        p = jnp.where(inside, jnp.exp(log), zero)
        slope = jnp.where(inside, jnp.exp((a - 1) * (jnp.log(w) - log)), zero)
        total, slope = (jnp.sum(x, axis=-1, keepdims=True) for x in (p, slope))
        low = jnp.where(state.moving & (total < 1), w, state.low)
        high = jnp.where(state.moving & (total >= 1), w, state.high)
        moving = state.moving & (jnp.abs(total - 1) > 4 * eps) & (high - low > 2 * eps * high)
        newton = w - (total - 1) / slope
        within = (newton > low) & (newton < high) & (state.steps % 4 != 3)
        following = jnp.where(within, newton, jnp.sqrt(low * high))
        return _Bracket(low, high, jnp.where(moving, following, w), moving, state.steps + 1)

    high = jnp.minimum((-_newton(z, 1)) ** (1 / a), one)
    low = jnp.full_like(high, 1 / z.shape[-1])
    high = jnp.maximum(high * (1 + 4 * eps), low)
    start = _Bracket(low * (1 - 4 * eps), high, high, jnp.ones_like(high, bool), jnp.zeros((), jnp.int32))
    end = jax.lax.while_loop(lambda s: jnp.any(s.moving) & (s.steps < _MOST_STEPS), body, start)
    log, inside = logarithm(end.value)
    return jnp.where(inside, jnp.exp(log), zero)


def largest(
    scores: Float[Array, "*batch L"], keep: Bool[Array, "*batch L"], count: Float[Array, "*batch 1"]
) -> Bool[Array, "*batch L"]:
    """The kept tokens that are no smaller than the `count`-th largest of them; finite scores, 1 ≤ count.

    A threshold between bounds, by interpolation of log counts and by bisection in turn; a row ends when `count` tokens
    are above it, or at a score that several share.
    """
    above = lowered(scores, keep)
    number = lambda t: jnp.sum(above >= t, axis=-1, keepdims=True, dtype=scores.dtype)  # noqa: E731
    low = jnp.min(jnp.where(keep, scores, jnp.inf), axis=-1, keepdims=True)
    high = jnp.max(above, axis=-1, keepdims=True)
    low = jnp.minimum(low, high)  # where all is masked
    at_low, at_high = length(keep, scores.dtype), number(high)

    def proposal(state: _Thresholds) -> Array:
        low, high = state.low, state.high
        reach = jnp.log(state.at_low / count) / jnp.log(state.at_low / state.at_high)
        share = jnp.where(state.step % 3 == 2, 0.5, jnp.clip(reach, 0.02, 0.98)).astype(low.dtype)
        return low + (high - low) * share

    def late(state: _Thresholds) -> Array:
        """The largest score below the upper end, and half way in the order of floating-point numbers, in turn."""
        low, high = state.low, state.high
        below = lambda: jnp.max(jnp.where(above < high, above, -jnp.inf), axis=-1, keepdims=True)  # noqa: E731
        return jax.lax.cond(state.step % 2 == 0, below, lambda: _between(low, high))

    def body(state: _Thresholds) -> _Thresholds:
        low, high, step = state.low, state.high, state.step
        threshold = jax.lax.cond(step >= _EARLY, late, proposal, state)
        found = number(threshold)
        up, down = state.moving & (found >= count), state.moving & (found < count)
        shared = up & (step >= _EARLY) & (step % 2 == 0)
        low, high = jnp.where(up, threshold, low), jnp.where(down, threshold, high)
        at_low, at_high = jnp.where(up, found, state.at_low), jnp.where(down, found, state.at_high)
        moving = state.moving & (found != count) & ~shared & (_between(low, high) > low)
        return _Thresholds(low, high, at_low, at_high, moving, step + 1)

    low = jnp.where(at_high >= count, high, low)
    moving = (at_high < count) & (at_low > count)
    start = _Thresholds(low, high, at_low, at_high, moving, jnp.zeros((), jnp.int32))
    return keep & (above >= jax.lax.while_loop(lambda s: jnp.any(s.moving), body, start).low)


class _Thresholds(NamedTuple):
    low: Array
    high: Array
    at_low: Array  # scores no smaller than the lower end: at least as many as are sought
    at_high: Array  # and fewer
    moving: Array
    step: Array


def _between(low: Array, high: Array) -> Array:
    """The floating-point number half way in their order; `low` where there is none between."""
    kind = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[low.dtype.itemsize]
    sign = jnp.asarray(jnp.iinfo(kind).max, kind)

    def ordered(x: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(x, kind)
        return jnp.where(bits < 0, bits ^ sign, bits)  # of negative numbers, larger bits are smaller

    a, b = ordered(low), ordered(high)
    middle = (a & b) + ((a ^ b) >> 1)
    return jax.lax.bitcast_convert_type(jnp.where(middle < 0, middle ^ sign, middle), low.dtype)
