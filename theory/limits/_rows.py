"""Rows of attention weights: what they may be, how tokens are selected, and maps over many rows in bounded memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from theory._checks import invalid, is_concrete, whole

MEMORY = 2**26  # bytes of working arrays, unless the caller says otherwise
FORMS = ("sharp", "printed")


class Rows(NamedTuple):
    """Groups of rows that share vectors, and the shape to give back."""

    weights: Float[Array, "G R L"]  # 0 where masked
    present: Bool[Array, "G R L"]  # tokens that may be attended
    counted: Bool[Array, "G R L"]  # tokens that the length counts
    vectors: Float[Array, "G L d"] | None
    lead: tuple[int, ...]


class Row(NamedTuple):
    """One row and its selections, one per count."""

    weights: Float[Array, " L"]
    counted: Bool[Array, " L"]
    selected: Bool[Array, "K L"]
    rank: Int[Array, " L"]
    order: Int[Array, " L"]


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses what is not one of the choices."""
    if value not in choices:
        raise invalid(name, " or ".join(map(repr, choices)), repr(value))


def floats(name: str, *values: Any, least_axes: int = 0, beside: Any = None) -> list[Array]:
    """The values as arrays of one type, float32 at least; NaN and infinities are refused.

    It is float64 if that of one is, `beside` counted, or if all are whole numbers.
    """
    kept = [jnp.asarray(value) for value in values]
    given = [array.dtype for array in (*kept, *(() if beside is None else (beside,)))]
    fractions = [dtype for dtype in given if jnp.issubdtype(dtype, jnp.floating)]
    dtype = jnp.float64 if jnp.float64 in fractions or not fractions else jnp.float32
    for array in kept:
        if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
            raise invalid(name, "real numbers", f"type {array.dtype}")
        if array.ndim < least_axes or array.size == 0:
            raise invalid(name, f"at least {least_axes} axes, none of them empty", f"shape {array.shape}")
        if is_concrete(array) and not np.all(np.isfinite(np.asarray(array))):
            raise invalid(name, "finite numbers", "NaN or infinity")
    return [array.astype(dtype) for array in kept]


def counts_array(counts: Any, length: int) -> Int[Array, " K"]:
    """Numbers of selected tokens, 1 … L, as int32; traced ones are checked when run."""
    if is_concrete(counts):
        listed = np.atleast_1d(np.asarray(counts))
        if listed.ndim != 1 or listed.size == 0 or not np.issubdtype(listed.dtype, np.integer):
            raise invalid("counts", "a whole number or a list of them", repr(counts))
        if listed.min() < 1 or listed.max() > length:
            raise invalid("counts", f"numbers from 1 to {length}, the tokens there are", listed.tolist())
        return jnp.asarray(listed, jnp.int32)
    array = jnp.atleast_1d(jnp.asarray(counts))
    return eqx.error_if(array, jnp.any((array < 1) | (array > length)), "counts: expected 1 to L").astype(jnp.int32)


def rows_of(weights: Any, vectors: Any = None, *, where: Any = None, count: str = "own") -> Rows:
    """Checks and brings to one shape weights (..., L) with vectors (L, d), or (*lead, Q, L) with (*lead, L, d)."""
    one_of("count", count, ("own", "all"))
    if where is not None:  # what is masked may hold anything
        where = jnp.asarray(where)
        if where.dtype != jnp.bool_:
            raise invalid("where", "True and False", f"type {where.dtype}")
        weights = jnp.asarray(weights)
        try:
            where = jnp.broadcast_to(where, weights.shape)
        except ValueError as error:
            raise invalid("where", f"a shape that broadcasts to {weights.shape}", f"shape {where.shape}") from error
        weights = jnp.where(where, weights, jnp.zeros((), weights.dtype))
    if vectors is None:
        (weights,) = floats("weights", weights, least_axes=1)
        groups, shared = 1, None
    else:
        vectors = jnp.asarray(vectors)
        if vectors.ndim < 2:
            raise invalid("vectors", "shape (L, d) or (..., L, d)", f"shape {vectors.shape}")
        (vectors,) = floats("vectors", vectors, least_axes=2, beside=jnp.asarray(weights))
        (weights,) = floats("weights", weights, least_axes=1, beside=vectors)
        tokens, dim = vectors.shape[-2:]
        if tokens != weights.shape[-1]:
            raise invalid("vectors", f"one per weight, {weights.shape[-1]}", f"shape {vectors.shape}")
        if vectors.ndim > 2 and vectors.shape[:-2] != weights.shape[:-2]:
            raise invalid("vectors", f"shape (L, d) or {(*weights.shape[:-2], tokens, dim)}", f"shape {vectors.shape}")
        groups = int(np.prod(vectors.shape[:-2]))
        shared = vectors.reshape(groups, tokens, dim)
    length = weights.shape[-1]
    shape = (groups, weights.size // (groups * length), length)
    present = jnp.ones(shape, bool) if where is None else where.reshape(shape)
    counted = present if count == "own" else jnp.ones(shape, bool)
    return Rows(weights.reshape(shape), present, counted, shared, weights.shape[:-1])


def non_negative_rows(weights: Any, vectors: Any = None, *, where: Any = None, count: str = "own") -> Rows:
    """As `rows_of`, of weights that are nowhere negative."""
    rows = rows_of(weights, vectors, where=where, count=count)
    if is_concrete(rows.weights) and bool(np.any(np.asarray(rows.weights) < 0)):
        raise invalid("weights", "no negative entry", float(np.min(np.asarray(rows.weights))))
    return rows


def ranked(weights: Float[Array, " L"], present: Bool[Array, " L"]) -> tuple[Int[Array, " L"], Int[Array, " L"]]:
    """(rank of each token, tokens by rank): largest weight first, equal ones by position, masked ones last."""
    length = weights.shape[0]
    place = jnp.arange(length, dtype=jnp.int32)
    order = jax.lax.sort((jnp.where(present, -weights, jnp.inf), place), num_keys=1, is_stable=True)[1]
    return jnp.zeros(length, jnp.int32).at[order].set(place, unique_indices=True), order


def root(square: Array) -> Array:
    """√ of what is not negative but for rounding."""
    return jnp.sqrt(jnp.maximum(square, 0))


def product(a: Array, b: Array) -> Array:
    """Matrix product at the full precision of its type on every device."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def chunk_of(memory: Any, row_bytes: int) -> int:
    """Rows at a time so that their working arrays take about `memory` bytes."""
    return max(1, whole("memory", memory, 1) // max(1, row_bytes))


def over_rows(
    kernel: Callable[..., Any],
    rows: Rows,
    counts: Any,
    selected: Any,
    *,
    prepare: Callable[[Float[Array, "L d"]], Any] = lambda vectors: vectors,
    arrays: int = 6,
    extra: tuple[Array, ...] = (),
    memory: int = MEMORY,
) -> Any:
    """kernel(row, prepare(its group's vectors), counts, *extra) of every row; answers (K, ...) become (*lead, K, ...).

    Top sets come from `counts`, other sets from `selected` (K = 1, and no axis in the answer): one of them is given.
    `kernel` and `prepare` must be the same objects from call to call: they are what compiled code is found by.
    """
    length = rows.weights.shape[-1]
    if (counts is None) == (selected is None):
        raise invalid("counts, selected", "one of them", "both" if counts is not None else "neither")
    if selected is None:
        numbers, sets = counts_array(counts, length), None
        single = np.ndim(counts) == 0
    else:
        sets = jnp.asarray(selected)
        if sets.dtype != jnp.bool_:
            raise invalid("selected", "True and False", f"type {sets.dtype}")
        try:
            sets = jnp.broadcast_to(sets, (*rows.lead, length)).reshape(rows.weights.shape)
        except ValueError as error:
            raise invalid("selected", f"a shape that broadcasts to {(*rows.lead, length)}", sets.shape) from error
        if is_concrete(sets, rows.counted) and not np.all(np.any(np.asarray(sets) & np.asarray(rows.counted), axis=-1)):
            raise invalid("selected", "at least one token in every row", "a row with none")
        numbers, single = jnp.zeros(1, jnp.int32), True
    width = max(length, 0 if rows.vectors is None else rows.vectors.shape[-1])
    row_bytes = arrays * numbers.shape[0] * width * rows.weights.dtype.itemsize
    chunk = min(chunk_of(memory, row_bytes), rows.weights.shape[1])
    answers = _mapped(kernel, prepare, chunk, rows._replace(lead=()), numbers, sets, extra)

    def shaped(answer: Array) -> Array:
        answer = answer.reshape(*rows.lead, *answer.shape[2:])
        return jnp.squeeze(answer, len(rows.lead)) if single else answer

    return jax.tree.map(shaped, answers)


@eqx.filter_jit
def _mapped(kernel, prepare, chunk, rows, numbers, sets, extra):
    def group(args):
        (weights, present, counted, vectors), sets, extra = args
        ready = None if vectors is None else prepare(vectors)

        def one(args):
            weights, present, counted, chosen, extra = args
            rank, order = ranked(weights, present)
            top = rank[None] < numbers[:, None] if chosen is None else chosen[None]
            chosen = top & counted[None]
            return kernel(Row(weights, counted, chosen, rank, order), ready, numbers, *extra)

        return jax.lax.map(one, (weights, present, counted, sets, extra), batch_size=chunk)

    return jax.lax.map(group, (tuple(rows[:4]), sets, extra))
