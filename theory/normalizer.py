"""Normalizers beside softmax: sparse, scaled by the row's length, adjusted to the row, or none (docs/limits.md §1).

Each is an `Activation`; the risk of heads that use one is known by sampling only. Masked tokens and ranks are those of
every activation: see `Activation`.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory._checks import instance, invalid, positive, real_array, whole
from theory._largest import largest
from theory._rows import Mask, beside, length, lowered, unmasked, zeroed
from theory._sparse import entmax
from theory.activation import Activation, numbers

_ENTROPY_POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)  # highest power first
_LEAST_ENTROPY = 0.5
_MOST_ALPHA = 2.0  # beyond, a small weight hangs on more digits of τ than there are


class ScalableSoftmax(Activation):
    """σ_ℓ = softmax(s log(n) χ)_ℓ, n the length of the row: what stands out by Δ keeps its weight if sΔ > 1.

    Args:
        scale: s, one number or one per head (H,).

    Example:
        >>> scores = jnp.zeros(1024).at[0].set(3.0)
        >>> print(f"{ScalableSoftmax(0.43)(scores)[0]:.3f} {jax.nn.softmax(scores)[0]:.3f}")
        0.882 0.019
    """

    scale: Float[Array, "..."]
    trained: tuple[str, ...] = eqx.field(static=True, default=())

    def __init__(self, scale: Any = 1.0):
        self.scale, self.trained = real_array("scale", scale, (0, 1)), ()

    def __call__(self, scores: Float[Array, "*batch L"], where: Mask = None) -> Float[Array, "*batch L"]:
        keep = unmasked(scores, where)
        factor = jnp.log(length(keep, scores.dtype)) * beside("scale", self.scale, scores)
        return zeroed(jax.nn.softmax(lowered(zeroed(scores, keep) * factor, keep), axis=-1), keep)

    @property
    def name(self) -> str:
        return f"ScalableSoftmax(scale={numbers(self.scale)})"


class Sparsemax(Activation):
    """σ_ℓ = [χ_ℓ/T − τ]_+ with Σσ = 1: the point of the simplex nearest to χ/T.

    Its derivative is diag(1_S) − 1_S 1_Sᵀ/|S| over T on the support S, tokens of positive weight; a token just at the
    edge, with χ/T = τ, is outside: of the two one-sided derivatives that is the one from below.

    Args:
        temperature: T > 0, one number or one per head (H,).

    Example:
        >>> Sparsemax()(jnp.array([0.0, 1.0, 1.5])).tolist()
        [0.0, 0.25, 0.75]
    """

    temperature: Float[Array, "..."]
    trained: tuple[str, ...] = eqx.field(static=True, default=())

    def __init__(self, temperature: Any = 1.0):
        self.temperature, self.trained = positive("temperature", temperature, (0, 1)), ()

    def __call__(self, scores: Float[Array, "*batch L"], where: Mask = None) -> Float[Array, "*batch L"]:
        return _entmax(scores, where, 2.0, self.temperature)

    @property
    def twice_differentiable(self) -> bool:
        """No: kinks where a token enters the support."""
        return False

    @property
    def name(self) -> str:
        return f"Sparsemax(temperature={numbers(self.temperature)})"


class Entmax(Activation):
    """σ_ℓ = [(α−1)χ_ℓ/T − τ]_+^{1/(α−1)} with Σσ = 1: softmax at α = 1, sparsemax at 2.

    Its derivative is (diag(g) − ggᵀ/Σg)/T with g = σ^{2−α} on the support; a token just at its edge is outside.

    Args:
        alpha: α, a Python number from 1 to 2; compiled code is that of one α.
        temperature: T > 0, one number or one per head (H,).

    Example:
        >>> print(Entmax(1.5)(jnp.array([0.0, 0.0, 1.0])).round(4))
        [0.1299 0.1299 0.7403]
    """

    temperature: Float[Array, "..."]
    alpha: float = eqx.field(static=True)
    trained: tuple[str, ...] = eqx.field(static=True, default=())

    def __init__(self, alpha: Any = 1.5, temperature: Any = 1.0):
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha <= _MOST_ALPHA:
            raise invalid("alpha", f"a Python number from 1 to {_MOST_ALPHA:g}", repr(alpha))
        self.alpha = float(alpha)
        self.temperature, self.trained = positive("temperature", temperature, (0, 1)), ()

    def __call__(self, scores: Float[Array, "*batch L"], where: Mask = None) -> Float[Array, "*batch L"]:
        return _entmax(scores, where, self.alpha, self.temperature)

    @property
    def twice_differentiable(self) -> bool:
        """α < 5/3: the second derivative σ^{3−2α}, infinite at the edge of the support, then has a variance."""
        return self.alpha < 5 / 3

    @property
    def name(self) -> str:
        return f"Entmax(alpha={self.alpha!r}, temperature={numbers(self.temperature)})"


class Sigmoid(Activation):
    """σ_ℓ = 1/(1 + n e^{−χ_ℓ}), n the length of the row: no normalizer, Σσ = n/(1+n) at scores of zero.

    Example:
        >>> Sigmoid()(jnp.zeros(4)).tolist()
        [0.2, 0.2, 0.2, 0.2]
    """

    trained: tuple[str, ...] = eqx.field(static=True, default=())

    def __call__(self, scores: Float[Array, "*batch L"], where: Mask = None) -> Float[Array, "*batch L"]:
        keep = unmasked(scores, where)
        return zeroed(jax.nn.sigmoid(zeroed(scores, keep) - jnp.log(length(keep, scores.dtype))), keep)

    @property
    def name(self) -> str:
        return "Sigmoid()"


class SelfAdjustedSoftmax(Activation):
    """σ_ℓ = u_ℓ softmax(χ)_ℓ with u = χ, or normalized u_ℓ = (χ_ℓ − a)/(b − a), a = min(min χ, 0), b = max(0, max χ).

    Rows do not sum to 1. A normalized row whose scores are all 0 has no range b − a: it is zeros, with derivative 0.
    Scores that tie for the least or greatest share its derivative equally; at min χ = 0 that of a is 0, likewise of b.

    Args:
        normalized: whether u is scaled to [0, 1].

    Example:
        >>> print(SelfAdjustedSoftmax()(jnp.array([-1.0, 0.0, 1.0])).round(4))
        [0.     0.1224 0.6652]
    """

    normalized: bool = eqx.field(static=True)
    trained: tuple[str, ...] = eqx.field(static=True, default=())

    def __init__(self, normalized: Any = True):
        instance("normalized", normalized, bool)
        self.normalized, self.trained = normalized, ()

    def __call__(self, scores: Float[Array, "*batch L"], where: Mask = None) -> Float[Array, "*batch L"]:
        keep = unmasked(scores, where)
        scores = zeroed(scores, keep)  # neither end of the range is beyond 0
        weights = jax.nn.softmax(lowered(scores, keep), axis=-1)
        if not self.normalized:
            return zeroed(scores * weights, keep)
        low, high = jnp.min(scores, axis=-1, keepdims=True), jnp.max(scores, axis=-1, keepdims=True)
        low, high = jnp.where(low >= 0, 0, low), jnp.where(high <= 0, 0, high)
        some = ~(high - low < jnp.finfo(scores.dtype).tiny)  # NaN stays
        spread = jnp.where(some, high - low, 1)
        unit = jax.lax.stop_gradient(1 / spread)  # the square of a tiny range would be 0
        return zeroed((scores - low) * unit / (spread * unit) * weights, keep & some)

    @property
    def twice_differentiable(self) -> bool:
        """Not if normalized: kinks where another token becomes the least or greatest."""
        return not self.normalized

    @property
    def name(self) -> str:
        return f"SelfAdjustedSoftmax(normalized={self.normalized})"


class AdaptiveSoftmax(Activation):
    """σ = softmax(βχ), β ≥ 1 a polynomial of the entropy of softmax(χ): see `adaptive_inverse_temperature`.

    Derivatives include that of β.

    Example:
        >>> scores = jnp.zeros(256).at[0].set(4.0)
        >>> print(f"{AdaptiveSoftmax()(scores)[0]:.3f} {jax.nn.softmax(scores)[0]:.3f}")
        0.973 0.176
    """

    trained: tuple[str, ...] = eqx.field(static=True, default=())

    def __call__(self, scores: Float[Array, "*batch L"], where: Mask = None) -> Float[Array, "*batch L"]:
        keep = unmasked(scores, where)
        scores = zeroed(scores, keep)
        top = jax.lax.stop_gradient(jnp.max(lowered(scores, keep), axis=-1, keepdims=True))
        scores = zeroed(scores - top, keep)
        shares = zeroed(jnp.exp(scores), keep)
        total = jnp.maximum(jnp.sum(shares, axis=-1, keepdims=True), 1)  # at least e^0, unless all is masked
        entropy = jnp.log(total) - jnp.sum(shares * scores, axis=-1, keepdims=True) / total
        sharper = lowered(scores * adaptive_inverse_temperature(entropy), keep)
        return zeroed(jax.nn.softmax(sharper, axis=-1), keep)

    @property
    def twice_differentiable(self) -> bool:
        """No: kinks where the polynomial crosses 1."""
        return False

    @property
    def name(self) -> str:
        return "AdaptiveSoftmax()"


def adaptive_inverse_temperature(entropy: Float[Array, "..."]) -> Float[Array, "..."]:
    """β = max(polynomial(H), 1) for H > 0.5 and 1 below: it exceeds 1 for 0.8486 < H < 5.9445 only (docs/limits.md §1).

    Args:
        entropy: H in nats.

    Example:
        >>> adaptive_inverse_temperature(jnp.array([0.6, 4.4124, 7.0])).round(4).tolist()
        [1.0, 2.4214, 1.0]
    """
    value = jnp.polyval(jnp.asarray(_ENTROPY_POLYNOMIAL, entropy.dtype), entropy)
    return jnp.where((entropy > _LEAST_ENTROPY) & (value > 1), value, jnp.ones((), entropy.dtype))


class TopK(Activation):
    """Softmax over the k largest scores of a row, all others 0.

    Every token no smaller than the k-th largest takes part: where several tie with it, more than k do. Derivatives are
    those of the softmax over the tokens that take part. A row shorter than k is a softmax.

    Args:
        count: k ≥ 1; or
        power: k = ⌈n^power⌉ from 0 to 1, n the length of the row.
        temperature: T > 0, one number or one per head (H,).

    Example:
        >>> print(TopK(2)(jnp.array([0.0, 1.0, 2.0])).round(4))
        [0.     0.2689 0.7311]
        >>> print(TopK(power=0.5)(jnp.array([0.0, 1.0, 2.0, 0.5])).round(4))
        [0.     0.2689 0.7311 0.    ]
    """

    temperature: Float[Array, "..."]
    count: int | None = eqx.field(static=True)
    power: float | None = eqx.field(static=True)
    trained: tuple[str, ...] = eqx.field(static=True, default=())

    def __init__(self, count: Any = None, power: Any = None, temperature: Any = 1.0):
        if (count is None) == (power is None):
            raise invalid("count, power", "one of them", f"{count}, {power}")
        if power is not None and (
            isinstance(power, bool) or not isinstance(power, (int, float)) or not 0 <= power <= 1
        ):
            raise invalid("power", "a Python number from 0 to 1", repr(power))
        self.count = None if count is None else whole("count", count, 1)
        self.power = None if power is None else float(power)
        self.temperature, self.trained = positive("temperature", temperature, (0, 1)), ()

    def selected(self, length: int) -> int:
        """k of a row of that length."""
        if self.count is not None or self.power is None:
            return min(self.count or 1, length)
        exact = length**self.power
        return max(1, round(exact) if math.isclose(exact, round(exact), rel_tol=1e-12) else math.ceil(exact))

    def __call__(self, scores: Float[Array, "*batch L"], where: Mask = None) -> Float[Array, "*batch L"]:
        keep = unmasked(scores, where)
        scores = zeroed(scores, keep)
        if self.count is None:
            counts = np.array([self.selected(n) for n in range(1, scores.shape[-1] + 1)])
            kept = length(keep, scores.dtype).astype(jnp.int32)
            count = jnp.asarray(counts, scores.dtype)[kept - 1]
        else:
            count = jnp.minimum(length(keep, scores.dtype), self.count)
        scaled = scores / beside("temperature", self.temperature, scores)
        chosen = jax.lax.stop_gradient(largest(jax.lax.stop_gradient(scores), keep, count))
        chosen |= keep & jnp.isnan(jnp.sum(0 * scores, axis=-1, keepdims=True))  # NaN and +∞ make the row NaN
        return zeroed(jax.nn.softmax(lowered(scaled, chosen), axis=-1), chosen)

    @property
    def twice_differentiable(self) -> bool:
        """No: weights jump where another token becomes the k-th largest."""
        return False

    @property
    def name(self) -> str:
        return f"TopK(count={self.count}, power={self.power!r}, temperature={numbers(self.temperature)})"


def _entmax(scores: Array, where: Mask, alpha: float, temperature: Array) -> Array:
    keep = unmasked(scores, where)
    scaled = lowered(zeroed(scores, keep) / beside("temperature", temperature, scores), keep)
    return zeroed(jax.nn.softmax(scaled, axis=-1) if alpha == 1 else entmax(scaled, alpha), keep)
