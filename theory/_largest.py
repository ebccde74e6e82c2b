"""The k largest scores of a row, without sorting: a threshold between the k-th largest and the next, by counting."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jaxtyping import Array, Bool, Float

from theory._iterate import until_settled
from theory._rows import length

_EARLY = 12  # thresholds tried before scores that several share are looked for
_MOST_STEPS = 400  # never met: halving the numbers between two takes at most twice their bits


def largest(
    scores: Float[Array, "*batch L"], keep: Bool[Array, "*batch L"], count: Float[Array, "*batch 1"]
) -> Bool[Array, "*batch L"]:
    """The kept tokens that are no smaller than the `count`-th largest of them; finite scores, 1 ≤ count.

    The first thresholds are those of a normal distribution; then, between bounds, log counts are interpolated, with
    halving in turn. A row ends when `count` tokens are above, or one less, or at a score that several share.
    """
    above = jnp.where(keep, scores, -jnp.inf).reshape(-1, scores.shape[-1])
    number, count = length(keep, scores.dtype).reshape(-1, 1), count.reshape(-1, 1)
    most = jnp.full_like(number, jnp.finfo(scores.dtype).max)
    filled = jnp.where(keep, scores, 0).reshape(above.shape)
    mean = jnp.sum(filled, axis=-1, keepdims=True) / number
    square = jnp.sum(filled * filled, axis=-1, keepdims=True) / number
    spread = jnp.sqrt(jnp.maximum(square - mean * mean, 0))
    share = (count - 0.5) / number
    quantile = -ndtri(share)
    hazard = jnp.exp(-quantile * quantile / 2) / (math.sqrt(2 * math.pi) * share)
    state = _Thresholds(
        mean + spread * quantile, spread / hazard, -most, most, number, jnp.zeros_like(number), count, number > count,
        jnp.zeros((), jnp.int32),
    )  # fmt: skip
    end = until_settled(_narrowed, above, state, _MOST_STEPS)
    below = jnp.max(jnp.where(above < end.high, above, -jnp.inf), axis=-1, keepdims=True)
    least = jnp.where(end.at_high == count - 1, below, end.low)
    return keep & ~(above < least).reshape(keep.shape)  # NaN is chosen, to be seen


class _Thresholds(NamedTuple):
    value: Array  # to be tried
    scale: Array  # a guess of −1 over the slope of log counts
    low: Array
    high: Array
    at_low: Array  # scores no smaller than the lower end: at least as many as are sought
    at_high: Array  # and fewer
    sought: Array
    moving: Array
    steps: Array


def _narrowed(above: Float[Array, "rows L"], state: _Thresholds) -> _Thresholds:
    """Scores above the value counted, one end moved there, and the next value."""
    count, steps, half = state.sought, state.steps, 0.5
    inside = (state.value > state.low) & (state.value < state.high)
    value = jnp.where(inside, state.value, _between(state.low, state.high))
    found = jnp.sum(above >= value, axis=-1, keepdims=True, dtype=above.dtype)
    up, down = state.moving & (found >= count), state.moving & (found < count)
    low, high = jnp.where(up, value, state.low), jnp.where(down, value, state.high)
    at_low, at_high = jnp.where(up, found, state.at_low), jnp.where(down, found, state.at_high)
    shared = up & (steps >= _EARLY) & (steps % 2 == 0)
    moving = state.moving & (found != count) & (at_high != count - 1) & ~shared & (_between(low, high) > low)

    def early() -> Array:
        most = jnp.finfo(above.dtype).max
        reach = jnp.log(at_low / (count - half)) / jnp.log(at_low / jnp.maximum(at_high, half))
        share = jnp.where(steps % 3 == 2, half, jnp.clip(reach, 0.05, 0.95)).astype(low.dtype)
        step = state.scale * (1 + 0.5 * steps.astype(low.dtype)) * jnp.log(jnp.maximum(found, half) / (count - half))
        return jnp.where((low > -most) & (high < most), low + (high - low) * share, value + step)

    def late() -> Array:
        """The largest score below the upper end, and half way in the order of floating-point numbers, in turn."""
        below = lambda: jnp.max(jnp.where(above < high, above, -jnp.inf), axis=-1, keepdims=True)  # noqa: E731
        return jax.lax.cond((steps + 1) % 2 == 0, below, lambda: _between(low, high))

    following = jax.lax.cond(steps + 1 >= _EARLY, late, early)
    return _Thresholds(following, state.scale, low, high, at_low, at_high, count, moving, steps + 1)


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
