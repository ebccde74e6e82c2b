"""How many tokens a row attends to: entropy and effective support (docs/limits.md §2)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from theory.limits._rows import non_negative_rows, one_of


def entropy(weights: Any, *, where: Any = None) -> Float[Array, "..."]:
    """Entropy −Σ p_i log p_i in nats, p = α/Σα.

    Args:
        weights: α ≥ 0, (..., L), of any sum.
        where: True where a token may be attended; masked weights count as 0.

    Returns:
        (...), 0 for one token; 0 too for a row without any weight.

    Raises:
        ValueError: a weight is negative or not finite, or a shape does not fit.

    >>> import jax.numpy as jnp
    >>> from theory.limits import entropy
    >>> entropy(jnp.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])).tolist()
    [0.693..., 0.0]
    """
    return _entropy(_shares(weights, where))


def effective_support(weights: Any, *, kind: str = "entropy", where: Any = None) -> Float[Array, "..."]:
    """Effective number of tokens: e^entropy, or 1/Σ p_i² ("participation"), p = α/Σα; from 1 to L.

    Args:
        weights: α ≥ 0, (..., L), of any sum.
        kind: "entropy" or "participation" (never the larger of the two).
        where: True where a token may be attended; masked weights count as 0.

    Returns:
        (...); 0 for a row without any weight.

    Raises:
        ValueError: a weight is negative or not finite, a shape does not fit, or an unknown kind.

    >>> import jax.numpy as jnp
    >>> from theory.limits import effective_support
    >>> weights = jnp.array([0.8, 0.2])
    >>> [round(float(effective_support(weights, kind=kind)), 4) for kind in ("entropy", "participation")]
    [1.6494, 1.4706]
    """
    one_of("kind", kind, ("entropy", "participation"))
    return _support(_shares(weights, where), kind == "entropy")


def _shares(weights: Any, where: Any) -> Float[Array, "... L"]:
    rows = non_negative_rows(weights, where=where)
    return _normalized(rows.weights.reshape(*rows.lead, -1))


@jax.jit
def _normalized(weights: Array) -> Array:
    largest = jnp.max(weights, axis=-1, keepdims=True)
    scaled = weights / jnp.where(largest > 0, largest, 1)  # sums of the smallest numbers there are stay normal
    return scaled / jnp.maximum(jnp.sum(scaled, axis=-1, keepdims=True), 1)


@jax.jit
def _entropy(shares: Array) -> Array:
    return jnp.maximum(-jnp.sum(shares * jnp.log(jnp.where(shares > 0, shares, 1)), axis=-1), 0)


def _support(shares: Array, by_entropy: bool) -> Array:
    if by_entropy:
        return jnp.where(jnp.any(shares > 0, axis=-1), jnp.exp(_entropy(shares)), 0)
    squares = jnp.sum(shares**2, axis=-1)
    return jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1), 0)
