"""Checks of arguments outside jit: each error names the field, what was expected and what came."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def is_concrete(*values: Any) -> bool:
    """Whether the values are known numbers (not traced), so that they can be checked now."""
    leaves = jax.tree.leaves(values)
    return not any(isinstance(leaf, Tracer) for leaf in leaves)


def invalid(name: str, expected: str, got: Any) -> ValueError:
    """The one form in which bad input is reported."""
    return ValueError(f"{name}: expected {expected}, got {got}")


def real_array(name: str, value: Any, ndim: int | tuple[int, ...] | None = None) -> jax.Array:
    """`value` as a float64 array of finite numbers, with one of the allowed numbers of axes."""
    try:
        array = jnp.asarray(value, dtype=jnp.float64)
    except (TypeError, ValueError) as error:
        raise invalid(name, "an array of real numbers", f"{value!r} ({error})") from error
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    if allowed is not None and array.ndim not in allowed:
        raise invalid(name, f"{' or '.join(map(str, allowed))} axes", f"shape {array.shape}")
    if is_concrete(array) and not np.all(np.isfinite(np.asarray(array))):
        raise invalid(name, "finite numbers", np.asarray(array).tolist())
    return array


def non_negative(name: str, value: Any, ndim: int | tuple[int, ...] | None = None) -> jax.Array:
    """As `real_array`, and nowhere negative."""
    array = real_array(name, value, ndim)
    if is_concrete(array) and np.any(np.asarray(array) < 0):
        raise invalid(name, "no negative entry", np.asarray(array).tolist())
    return array


def positive(name: str, value: Any, ndim: int | tuple[int, ...] | None = None) -> jax.Array:
    """As `real_array`, and everywhere positive."""
    array = real_array(name, value, ndim)
    if is_concrete(array) and np.any(np.asarray(array) <= 0):
        raise invalid(name, "positive numbers", np.asarray(array).tolist())
    return array


def whole(name: str, value: Any, least: int) -> int:
    """`value` as a Python int no smaller than `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise invalid(name, f"a whole number >= {least}", repr(value))
    if value < least:
        raise invalid(name, f"a whole number >= {least}", value)
    return int(value)


def times_array(name: str, value: Any) -> np.ndarray:
    """Strictly increasing non-negative times as a float64 NumPy array."""
    times = np.asarray(real_array(name, value, 1))
    if times.size == 0 or times[0] < 0 or np.any(np.diff(times) <= 0):
        raise invalid(name, "strictly increasing times >= 0", times.tolist())
    return times


def instance(name: str, value: Any, kind: type) -> None:
    """Refuse a value of another type."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise invalid(name, f"{article} {kind.__name__}", repr(value))


def leading_index(index: Any, size: int) -> Any:
    """`index` of a leading axis; a whole number out of range is an IndexError (JAX would take the last entry)."""
    if isinstance(index, (int, np.integer)) and not -size <= index < size:
        raise IndexError(f"index {index} is out of range for {size} entries")
    return index


def typed_key(name: str, key: Any) -> jax.Array:
    """`key`, if it is one typed key."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()):
        raise invalid(name, "one typed key, as from jax.random.key", repr(key))
    return key
