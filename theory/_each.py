"""One compiled function over any number of points, each rounded the same in whatever company."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

_TOGETHER = 128  # points in one compiled loop; places that are left over cost nothing


def each(evaluate: Callable[[Any, Any], Any], points: Any, chosen: Bool[np.ndarray, " N"], shared: Any) -> Any:
    """`evaluate(point, shared)` of the chosen points (NumPy arrays with a leading axis), NaN for the others.

    One point after the other in the same compiled code, on each of XLA's threads: a point's numbers do not depend on
    how many others there are.
    It is compiled again for another `evaluate` (a function of a module, known by identity), other shapes, and other
    values in `shared` that are no arrays.
    """
    index, device = np.flatnonzero(chosen), jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    parts = [index[begin : begin + _TOGETHER] for begin in range(0, max(index.size, 1), _TOGETHER)]

    def found(own: Int[np.ndarray, " n"]) -> Any:
        filled = np.resize(own if own.size else [0], _TOGETHER)
        with jax.default_device(device):  # which a thread does not inherit
            together = jax.tree.map(lambda leaf: jnp.asarray(leaf[filled]), points)
            values = _loop(evaluate, together, jnp.asarray(np.arange(_TOGETHER) < own.size), shared)
            return jax.tree.map(np.asarray, values)

    values = [found(parts[0])]  # the first compiles, for all
    if len(parts) > 1:
        with ThreadPoolExecutor(_threads()) as pool:
            values += pool.map(found, parts[1:])

    def placed(*given: np.ndarray) -> np.ndarray:
        whole = np.full((len(chosen), *given[0].shape[1:]), np.nan)
        for own, some in zip(parts, given, strict=True):
            whole[own] = some[: own.size]
        return whole

    return jax.tree.map(placed, *values)


def _threads() -> int:
    """How many XLA has, by the same variable."""
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdigit() and int(given) else os.cpu_count() or 1


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
