"""Distances between a row's context vector and its tokens, by matrix products."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from theory.limits._rows import Row, product, root


class Vectors(NamedTuple):
    """Token vectors and their squared norms."""

    vectors: Float[Array, "L d"]
    squares: Float[Array, " L"]


class Contexts(NamedTuple):
    """Of each selection: s, and ‖s − α_i x_i‖ of every token."""

    context: Float[Array, "K d"]
    distances: Float[Array, "K L"]


def with_squares(vectors: Float[Array, "L d"]) -> Vectors:
    """The vectors with their squared norms."""
    return Vectors(vectors, jnp.sum(vectors**2, axis=-1))


def contexts(row: Row, given: Vectors) -> Contexts:
    """s = Σ α_j x_j over each selection and the distances of all tokens from it (docs/limits.md §3)."""
    w = row.weights[None]
    context = product(jnp.where(row.selected, w, 0), given.vectors)
    dots = product(context, given.vectors.T)
    own = jnp.sum(context**2, axis=-1, keepdims=True)
    return Contexts(context, root(own - 2 * w * dots + w**2 * given.squares[None]))


def pairwise(vectors: Float[Array, "L d"]) -> Float[Array, "L L"]:
    """‖x_i − x_j‖ by differences: a product of matrices would lose those of neighbours beside a token far away."""
    return jax.lax.map(lambda own: jnp.linalg.norm(vectors - own[None], axis=-1), vectors)
