"""One compiled function over any number of points, each rounded the same in whatever company."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

_TOGETHER = 128  # points in one compiled loop; places that are left over cost nothing


def each(evaluate: Callable[[Any, Any], Any], points: Any, chosen: Bool[np.ndarray, " N"], shared: Any) -> Any:
    """`evaluate(point, shared)` of the chosen points (NumPy arrays with a leading axis), NaN for the others.

    One point after the other in the same compiled code: a point's numbers do not depend on how many others there are.
    It is compiled again for another `evaluate` (a function of a module, known by identity), other shapes, and other
    values in `shared` that are no arrays.
    """
    index = np.flatnonzero(chosen)
    parts = []
    for begin in range(0, max(index.size, 1), _TOGETHER):
        own = index[begin : begin + _TOGETHER]
        filled = np.resize(own if own.size else [0], _TOGETHER)
        together = jax.tree.map(lambda leaf: jnp.asarray(leaf[filled]), points)  # noqa: B023
        parts.append((own, _loop(evaluate, together, jnp.asarray(np.arange(_TOGETHER) < own.size), shared)))

    def placed(*found: Array) -> np.ndarray:
        whole = np.full((len(chosen), *found[0].shape[1:]), np.nan)
        for (own, _), values in zip(parts, found, strict=True):
            whole[own] = np.asarray(values)[: own.size]
        return whole

    return jax.tree.map(placed, *(values for _, values in parts))


def copied(tree: Any, count: int) -> Any:
    """Every number as a NumPy array with a leading axis of that many copies."""
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (count, *np.shape(leaf))), tree)


def row(points: Any, index: Any) -> Any:
    """One of several points."""
    return jax.tree.map(lambda leaf: leaf[index], points)


def first(points: Any, chosen: Bool[np.ndarray, " N"]) -> Any:
    """The first of the chosen points, as JAX arrays."""
    return jax.tree.map(jnp.asarray, row(points, np.flatnonzero(chosen)[0]))


def finite(points: Any) -> Bool[np.ndarray, " N"]:
    """Which points have finite numbers only."""
    return np.all([np.isfinite(leaf).reshape(leaf.shape[0], -1).all(-1) for leaf in jax.tree.leaves(points)], axis=0)


@eqx.filter_jit
def _loop(evaluate: Callable[[Any, Any], Any], points: Any, used: Array, shared: Any) -> Any:
    arrays, fixed = eqx.partition(points, eqx.is_array)
    own = lambda arrays: evaluate(eqx.combine(arrays, fixed), shared)  # noqa: E731
    shapes = jax.eval_shape(own, row(arrays, 0))

    def one(place: tuple[Any, Array]) -> Any:
        arrays, used = place
        # a branch, not a choice: what is left over is not evaluated
        nothing = lambda _: jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), shapes)  # noqa: E731
        return jax.lax.cond(used, own, nothing, arrays)

    return jax.lax.map(one, (arrays, used))
