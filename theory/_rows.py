"""Rows of scores: which tokens count, and numbers of heads beside them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

from theory._checks import invalid

Mask = Bool[Array, "..."] | None


def unmasked(scores: Float[Array, "*batch L"], where: Any) -> Bool[Array, "*batch L"]:
    """The tokens that count: not excluded by `where`, and with a score above −∞."""
    keep = scores != -jnp.inf  # not `>`: NaN is no mask
    if where is None:
        return keep
    shape, kind = np.shape(where), getattr(where, "dtype", type(where))
    try:
        fits = kind in (bool, jnp.bool_) and np.broadcast_shapes(shape, scores.shape) == scores.shape
    except ValueError:
        fits = False
    if not fits:
        raise invalid("where", f"booleans that broadcast to {scores.shape}", f"{kind} of shape {shape}")
    return keep & jnp.broadcast_to(jnp.asarray(where), scores.shape)


def zeroed(values: Float[Array, "*batch L"], keep: Bool[Array, "*batch L"]) -> Float[Array, "*batch L"]:
    """Zero, without derivative, for tokens that do not count."""
    return jnp.where(keep, values, jnp.zeros((), values.dtype))


def lowered(
    values: Float[Array, "*batch L"], keep: Bool[Array, "*batch L"], axes: int | tuple[int, ...] = -1
) -> Float[Array, "*batch L"]:
    """A number far below all others along the axes for tokens that do not count, without derivative.

    It is finite when divided by a temperature's square, if the others are.
    """
    most = float(jnp.finfo(values.dtype).max)
    least = jnp.min(jax.lax.stop_gradient(values), axis=axes, keepdims=True, where=keep, initial=0)
    return jnp.where(keep, values, jnp.maximum(2 * least, -most) - math.sqrt(most))


def length(keep: Bool[Array, "*batch L"], dtype: Any) -> Num[Array, "*batch 1"]:
    """n: tokens that count, at least 1."""
    return jnp.maximum(jnp.sum(keep, axis=-1, keepdims=True, dtype=dtype), jnp.ones((), dtype))


def per_head(name: str, value: Array, heads: int) -> Float[Array, " H"]:
    """One number for all heads, or one per head, as an array (H,)."""
    if value.ndim == 1 and value.shape != (heads,):
        raise invalid(name, f"one number or one per head ({heads},)", value.shape)
    return jnp.broadcast_to(value, (heads,))


def beside(name: str, value: Array, scores: Array) -> Array:
    """`value` of each head, in the scores' type and number of axes (..., H, 1); one number for a single row."""
    if scores.ndim == 1:
        if value.ndim:
            raise invalid(name, "one number, for a single row of scores", f"shape {value.shape}")
        return value.astype(scores.dtype).reshape(1)
    shape = (1,) * (scores.ndim - 2) + (-1, 1)
    return per_head(name, value, scores.shape[-2]).astype(scores.dtype).reshape(shape)
