"""Iterations row by row: each row stops by itself, and the last few go on without the others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

_FEW = 8  # rows over this are few
_LEAST = 8  # fewer rows are not worth gathering


def until_settled(
    body: Callable[[Float[Array, "rows L"], Any], Any], values: Float[Array, "rows L"], state: Any, most: int
) -> Any:
    """`state` after steps `body(values, state)` until no row is `state.moving`, at most `most` with all rows.

    Leaves of the state are (rows, 1), and the body treats each row alone and leaves rows that do not move as they are;
    a leaf without axes counts steps.
    """
    rows = values.shape[0]
    few = rows // _FEW

    def going(state: Any, above: int) -> Array:
        return (jnp.sum(state.moving, dtype=jnp.int32) > above) & (state.steps < most)

    if few < _LEAST:
        return jax.lax.while_loop(lambda s: going(s, 0), lambda s: body(values, s), state)
    state = jax.lax.while_loop(lambda s: going(s, few), lambda s: body(values, s), state)
    at = jnp.nonzero(state.moving[:, 0], size=few, fill_value=rows)[0]  # beyond the end: the last row, in vain

    def gathered(leaf: Array) -> Array:
        return jnp.take(leaf, at, axis=0, mode="clip") if leaf.ndim else leaf

    rest: PyTree = jax.tree.map(gathered, state)
    last = gathered(values)
    rest = jax.lax.while_loop(lambda s: going(s, 0), lambda s: body(last, s), rest)
    return jax.tree.map(lambda a, b: a.at[at].set(b, mode="drop") if a.ndim else b, state, rest)
