"""Dilution: bounds on single weights and on the entropy of a row of L tokens (docs/limits.md §2)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory._checks import invalid, is_concrete, non_negative, positive
from theory.limits._rows import FORMS, one_of


def weight_bounds(
    length: Any, smallest: Any, largest: Any, *, form: str = "sharp"
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Least and largest weight α_i = F(l_i)/Σ_j F(l_j) for any positive F and logits in [−a, a].

    With C_1 = min F/max F on the interval, printed: C_1/L ≤ α_i ≤ 1/(C_1 L). Sharp: 1/(1 + (L−1)/C_1) ≤ α_i ≤
    1/(1 + (L−1) C_1), both attained, by one logit at one end and all others at the other. Both are true. F must not
    depend on L.

    Args:
        length: L ≥ 1, any shape that broadcasts with the others.
        smallest: the minimum of F on [−a, a], positive.
        largest: its maximum.
        form: "sharp" or "printed".

    Returns:
        (lower, upper), float64.

    Raises:
        ValueError: L < 1, F not positive, largest < smallest, or an unknown form.

    >>> from theory.limits import weight_bounds
    >>> low, high = weight_bounds(5, smallest=1.0, largest=4.0)
    >>> float(low), float(high)  # 1/17 and 4/8
    (0.0588..., 0.5)
    >>> [round(float(bound), 6) for bound in weight_bounds(5, 1.0, 4.0, form="printed")]
    [0.05, 0.8]
    """
    one_of("form", form, FORMS)
    length, smallest, largest = _length(length), positive("smallest", smallest), positive("largest", largest)
    if is_concrete(smallest, largest) and bool(np.any(np.asarray(largest) < np.asarray(smallest))):
        raise invalid("largest", "no number below smallest", f"{largest} with {smallest}")
    return _bounds(length, _with(jnp.divide, smallest, largest), form)


def softmax_weight_bounds(
    length: Any, spread: Any, *, temperature: Any = 1.0, form: str = "sharp"
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Least and largest softmax weight of logits in [−Δ, Δ] at temperature T; printed (1/L) e^{∓2Δ/T}.

    `weight_bounds` with C_1 = e^{−2Δ/T}. For logits q·k_i, Δ = ‖q‖ max_i‖k_i‖ (divided by what divides the logits).

    Args:
        length: L ≥ 1, any shape that broadcasts with the others.
        spread: Δ ≥ 0.
        temperature: T > 0.
        form: "sharp" or "printed".

    Returns:
        (lower, upper), float64.

    Raises:
        ValueError: L < 1, a negative Δ, T not positive, or an unknown form.

    >>> from theory.limits import softmax_weight_bounds
    >>> low, high = softmax_weight_bounds([64, 1024, 16384], 1.0)
    >>> [round(float(most), 5) for most in high]
    [0.10497, 0.00717, 0.00045]
    """
    one_of("form", form, FORMS)
    return _bounds(_length(length), jnp.exp(-_gap(spread, temperature)), form)


def entropy_bound(length: Any, spread: Any, *, temperature: Any = 1.0, form: str = "sharp") -> Float[Array, "..."]:
    """Least entropy (nats) of softmax weights of L logits in [−Δ, Δ] at temperature T.

    Printed: log L − 2Δ/T. Sharp: the least there is, that of k logits at Δ and L−k at −Δ with the worst k; near
    log L + log u − u + 1, u = g/(1 − e^{−g}), g = 2Δ/T, where k is not 1. Both are true.

    Args:
        length: L ≥ 1, any shape that broadcasts with the others.
        spread: Δ ≥ 0.
        temperature: T > 0.
        form: "sharp" or "printed".

    Returns:
        The bound, float64.

    Raises:
        ValueError: L < 1, a negative Δ, T not positive, or an unknown form.

    >>> from theory.limits import entropy_bound
    >>> round(float(entropy_bound(1024, 1.0)), 4), round(float(entropy_bound(1024, 1.0, form="printed")), 4)
    (6.457, 4.9315)
    """
    one_of("form", form, FORMS)
    length, gap = _length(length), _gap(spread, temperature)
    if form == "printed":
        return _with(jnp.subtract, jnp.log(length), gap)
    length, gap = jnp.broadcast_arrays(*_aligned(length, gap))
    # entropy against k has one minimum, near L (u − 1)/(e^g − 1): take the whole numbers beside it
    small = gap < 1e-4
    safe = jnp.where(small, 1.0, gap)
    fraction = jnp.where(small, 0.5, (safe / -jnp.expm1(-safe) - 1) / jnp.expm1(jnp.minimum(safe, 700.0)))
    below = jnp.floor(fraction * length)
    worst = [_two_level(length, gap, jnp.clip(k, 1, jnp.maximum(length - 1, 1))) for k in (below, below + 1)]
    return jnp.where(length > 1, jnp.minimum(*worst), 0.0)


def _two_level(length: Array, gap: Array, k: Array) -> Array:
    low = (length - k) * jnp.exp(-gap)
    return jnp.log(k + low) + gap * low / (k + low)


def _length(length: Any) -> Array:
    array = positive("length", length)
    if is_concrete(array) and bool(np.any(np.asarray(array) < 1)):
        raise invalid("length", "numbers from 1", array.tolist())
    return array


def _gap(spread: Any, temperature: Any) -> Array:
    return 2 * _with(jnp.divide, non_negative("spread", spread), positive("temperature", temperature))


def _bounds(length: Array, ratio: Array, form: str) -> tuple[Array, Array]:
    length, ratio = _aligned(length, ratio)
    if form == "printed":
        return ratio / length, 1 / (ratio * length)
    others = length - 1
    least = ratio / jnp.where(others > 0, ratio + others, 1)  # the ratio may underflow
    return jnp.where(others > 0, least, 1), 1 / (1 + others * ratio)


def _aligned(*arrays: Array) -> list[Array]:
    """The arrays with as many axes, ones in front."""
    axes = max(array.ndim for array in arrays)
    return [array.reshape((1,) * (axes - array.ndim) + array.shape) for array in arrays]


def _with(combine: Any, first: Array, second: Array) -> Array:
    return combine(*_aligned(first, second))
