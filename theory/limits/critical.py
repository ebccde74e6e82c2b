"""The critical number of selected tokens: where measured and expected distances cease to differ (docs/limits.md §3)."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from theory._checks import invalid, whole
from theory.limits._rows import FORMS, MEMORY, chunk_of, one_of, product, ranked, root, rows_of
from theory.limits._vectors import with_squares
from theory.limits.distance import random_means


class CriticalCount(eqx.Module):
    """What the search for the critical N found, with the curves it looked at (N = 1 … K, the last one looked at)."""

    count: int | None  # None: the test sees a difference at every N up to K
    level: float
    counts: np.ndarray  # (K,)
    measured: np.ndarray  # (heads, K), d̃ averaged over query rows
    expected: np.ndarray  # (heads, K), its expectation, likewise
    statistic: np.ndarray  # (K,)
    p_value: np.ndarray  # (K,)


class MeanDistances(NamedTuple):
    """d̃ of the top set and its expectation, averaged over the query rows that leave tokens out."""

    measured: Float[Array, "*lead L"]  # for N = 1 … L; 0 where no row leaves any out
    expected: Float[Array, "*lead L"]
    rows: Float[Array, "*lead L"]  # how many rows were averaged


def ks_statistic(first: Any, second: Any) -> np.ndarray:
    """Two-sample Kolmogorov–Smirnov statistic max_x |F_1(x) − F_2(x)| along the first axis.

    Args:
        first: (n, ...).
        second: (m, ...), the same other axes.

    Returns:
        (...).

    Raises:
        ValueError: shapes differ after the first axis, a sample is empty, or a number is not finite.

    >>> from theory.limits import ks_statistic
    >>> float(ks_statistic([1.0, 2.0, 3.0, 4.0], [3.5, 4.5, 5.0, 6.0]))
    0.75
    """
    first, second = np.asarray(first, float), np.asarray(second, float)
    if first.ndim < 1 or first.shape[1:] != second.shape[1:] or not first.size * second.size:
        raise invalid("first, second", "samples along the first axis", f"shapes {first.shape}, {second.shape}")
    both = np.concatenate([first, second])
    if not np.all(np.isfinite(both)):
        raise invalid("first, second", "finite numbers", "NaN or infinity")
    order = np.argsort(both, axis=0, kind="stable")
    steps = np.where(order < len(first), len(second), -len(first))  # in units of 1/(n m): whole numbers, no rounding
    values = np.take_along_axis(both, order, axis=0)
    last = np.concatenate([values[1:] > values[:-1], np.ones((1, *values.shape[1:]), bool)])  # of its ties
    gaps = np.abs(np.cumsum(steps, axis=0)) * last
    return np.asarray(gaps.max(axis=0) / (len(first) * len(second)))


def ks_p_value(statistic: Any, first: int, second: int) -> np.ndarray:
    """P(D ≥ statistic) for two independent samples of sizes n and m from one continuous law: exact.

    Both sorted together are a path of n + m steps drawn uniformly; that D ≥ statistic is to meet |i/n − j/m| ≥
    statistic at i steps of the first and j of the second. Takes (n + m) n operations for each different statistic.

    Args:
        statistic: D, any shape, from 0 to 1; one that is no multiple of 1/(nm) counts as the next.
        first: n.
        second: m.

    Returns:
        p-values of the same shape.

    Raises:
        ValueError: a size below 1, or D outside 0 … 1.

    >>> from theory.limits import ks_p_value
    >>> [round(float(p), 6) for p in ks_p_value([0.5, 0.75], 4, 4)]
    [0.771429, 0.228571]
    """
    n, m = whole("first", first, 1), whole("second", second, 1)
    statistic = np.asarray(statistic, float)
    if not np.all((statistic >= 0) & (statistic <= 1)):
        raise invalid("statistic", "numbers from 0 to 1", statistic.tolist())
    scaled = statistic * n * m
    near = np.rint(scaled)
    least = np.where(np.abs(scaled - near) <= 1e-12 * near, near, np.ceil(scaled))  # of |i m − j n|, whole numbers
    heights, places = np.unique(least, return_inverse=True)
    return np.asarray(_meeting(heights, n, m)[places.reshape(statistic.shape)])


def _meeting(heights: Float[np.ndarray, " U"], n: int, m: int) -> Float[np.ndarray, " U"]:
    """Probability that |i m − j n| reaches each height on the path: a sum of what gets there, without differences."""
    i = np.arange(n + 1)
    below = np.zeros((len(heights), n + 1))  # probability of i at this step, the height not reached yet
    below[:, 0] = 1
    reached = np.zeros(len(heights))
    for step in range(n + m + 1):
        if step:
            of_first = (n - i[:-1]) / (n + m - step + 1)
            of_second = np.maximum(m - (step - 1 - i), 0) / (n + m - step + 1)
            below[:, 1:], below[:, 0] = (
                below[:, 1:] * of_second[1:] + below[:, :-1] * of_first,
                below[:, 0] * of_second[0],
            )
        there = np.abs(i * m - (step - i) * n) >= heights[:, None]
        reached += np.where(there, below, 0).sum(axis=-1)
        below[there] = 0
    return np.minimum(reached, 1)


def mean_distances(
    weights: Any,
    vectors: Any,
    *,
    upto: int | None = None,
    form: str = "sharp",
    where: Any = None,
    count: str = "own",
    memory: int = MEMORY,
) -> MeanDistances:
    """d̃ of the N largest weights and its expectation for every N up to `upto`, averaged over query rows.

    One pass over N adds one token at a time to ‖s‖² and s·x_i through x_i·x_j: as costly as a few N by matrix products.
    A squared distance has an error below (N+d+4) ε S², S and ε as in `distances`: where ‖s‖ is far below S, float64 is
    safer. New `upto` recompile nothing.

    Args:
        weights: α, (*lead, Q, L).
        vectors: x, (L, d), or (*lead, L, d).
        upto: the largest N, L unless given.
        form: of the expectation, as in `expected_distance`.
        where, count, memory: as in `distances`. Rows with no more than N tokens are not averaged.

    Returns:
        `MeanDistances`, (*lead, L); zeros beyond `upto`.

    Raises:
        ValueError: as `distances`; weights without a query axis; an unknown form.

    >>> import jax, jax.numpy as jnp
    >>> from theory.limits import distances, mean_distances
    >>> x = jax.random.normal(jax.random.key(0), (30, 8))
    >>> weights = jax.nn.softmax(jax.random.normal(jax.random.key(1), (2, 5, 30)))
    >>> found = mean_distances(weights, x)
    >>> one_by_one = jnp.mean(distances(weights, x, 7).sum_of_norms, axis=-1)
    >>> bool(jnp.allclose(found.measured[:, 6], one_by_one))
    True
    """
    one_of("form", form, FORMS)
    if np.ndim(weights) < 2:
        raise invalid("weights", "shape (..., Q, L)", f"shape {np.shape(weights)}")
    rows = rows_of(weights, vectors, where=where, count=count)
    queries, length = np.shape(weights)[-2:]
    upto = length if upto is None else whole("upto", upto, 1)
    if upto > length:
        raise invalid("upto", f"no more than the {length} tokens", upto)
    lead = rows.lead[:-1]
    heads = int(np.prod(lead))
    shape = (heads, queries, length)
    parts = [part.reshape(shape) for part in (rows.weights, rows.present, rows.counted)]
    chunk = min(queries, chunk_of(memory, 8 * length * rows.weights.dtype.itemsize))
    sums = _sums(*parts, rows.vectors, jnp.asarray(upto), chunk, form == "sharp")
    measured, expected, number = (part.reshape(*lead, length) for part in sums)
    filled = jnp.maximum(number, 1)
    return MeanDistances(measured / filled, expected / filled, number)


def critical_count(
    weights: Any,
    vectors: Any,
    *,
    level: float = 0.01,
    form: str = "printed",
    upto: int | None = None,
    where: Any = None,
    count: str = "own",
    memory: int = MEMORY,
) -> CriticalCount:
    """The first N at which a two-sample Kolmogorov–Smirnov test between the heads' measured and expected d̃ sees none.

    The samples are the heads' distances, averaged over query rows. They are paired, and not independent: the level
    is a convention, no false-alarm rate. The paper's expectation is the printed one, without p, hence the default:
    it meets the measured distance once the selected weight is near 1. The sharp one, of random sets, does so only as
    N → L.

    Args:
        weights: α, (*heads, Q, L): all leading axes but the queries' are heads.
        vectors: x, (L, d), or (*heads, L, d).
        level: of the test.
        form: of the expectation, as in `expected_distance`.
        upto: the largest N looked at; unless given, the largest that leaves out a token in some row.
        where, count, memory: as in `distances`.

    Returns:
        `CriticalCount`.

    Raises:
        ValueError: as `mean_distances`; a level outside 0 … 1, or one that no samples of so few heads can reach
            (5 heads are the least at 0.01).

    >>> import jax, jax.numpy as jnp
    >>> from theory.limits import critical_count
    >>> x = jax.random.normal(jax.random.key(0), (64, 16))
    >>> logits = 2.0 * jax.random.normal(jax.random.key(1), (12, 8, 64))
    >>> found = critical_count(jax.nn.softmax(logits), x)
    >>> found.count, found.measured.shape
    (2, (12, 63))
    """
    if not (isinstance(level, (int, float)) and 0 < level < 1):
        raise invalid("level", "a number between 0 and 1", repr(level))
    if np.ndim(weights) < 3:
        raise invalid("weights", "shape (heads, Q, L), or more axes of heads", f"shape {np.shape(weights)}")
    length = np.shape(weights)[-1]
    heads = int(np.prod(np.shape(weights)[:-2]))
    if heads < least_heads(level):
        raise invalid("weights", f"more heads: samples of {heads} never differ at level {level}", np.shape(weights))
    last = length - 1
    if count == "own" and where is not None:
        last = int(np.max(np.sum(np.broadcast_to(np.asarray(where), (*np.shape(where)[:-1], length)), axis=-1))) - 1
    if upto is not None:
        last = min(last, whole("upto", upto, 1))
    if last < 1:
        raise invalid("weights", "a row that can leave out a token", f"{last + 1} tokens at most")
    options = {"form": form, "where": where, "count": count, "memory": memory}

    def curves(stop: int) -> list[np.ndarray]:
        found = mean_distances(weights, vectors, upto=stop, **options)
        return [np.asarray(part).reshape(-1, length)[:, :stop] for part in found[:2]]

    measured, expected, statistic, p_value = until_alike(curves, last, level)
    same = np.flatnonzero(p_value >= level)
    return CriticalCount(
        int(same[0]) + 1 if same.size else None,
        float(level),
        np.arange(1, len(p_value) + 1),
        measured,
        expected,
        statistic,
        p_value,
    )


def least_heads(level: float) -> int:
    """The fewest heads whose samples can differ at the level: two of n that do not overlap have p = 2/C(2n, n)."""
    return next(heads for heads in itertools.count(1) if ks_p_value(1.0, heads, heads) < level)


def until_alike(
    curves: Callable[[int], Sequence[np.ndarray]], last: int, level: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Measured and expected curves (heads, K), the test's statistic and p-value: K, at most `last`, is doubled until
    the test sees no difference somewhere. `curves` gives both for N = 1 … K."""
    stop = min(last, 64)
    while True:  # each pass starts again: twice the work of the last at most
        measured, expected = curves(stop)
        statistic = ks_statistic(measured, expected)
        p_value = ks_p_value(statistic, len(measured), len(expected))
        if stop == last or np.any(p_value >= level):
            return measured, expected, statistic, p_value
        stop = min(last, 2 * stop)


@partial(jax.jit, static_argnames=("chunk", "sharp"))
def _sums(
    weights: Float[Array, "H Q L"],
    present: Bool[Array, "H Q L"],
    counted: Bool[Array, "H Q L"],
    vectors: Float[Array, "G L d"],
    upto: Array,
    chunk: int,
    sharp: bool,
) -> tuple[Array, Array, Array]:
    """Sums over rows of d̃ and of its expectation, and the rows in them, (H, L) each: column N−1 for N."""
    _, queries, length = weights.shape
    padded = -(-queries // chunk) * chunk
    whole_chunks = ((0, padded - queries), (0, 0))
    shared = vectors.shape[0] == 1

    def head(args):
        weights, present, counted, own = args
        given = with_squares(vectors[0] if shared else own)
        gram = product(given.vectors, given.vectors.T)

        def add(total, args):
            weights, present, counted = args
            found = _chunk_sums(weights, present, counted, given, gram, upto, sharp)
            return jax.tree.map(jnp.add, total, found), None

        parts = tuple(jnp.pad(p, whole_chunks).reshape(-1, chunk, length) for p in (weights, present, counted))
        return jax.lax.scan(add, (jnp.zeros(length, weights.dtype),) * 3, parts)[0]

    return jax.lax.map(head, (weights, present, counted, None if shared else vectors))


def _chunk_sums(weights, present, counted, given, gram, upto, sharp):
    rows, length = weights.shape
    dtype, w = weights.dtype, weights
    rank, order = jax.vmap(ranked)(weights, present)
    number = jnp.sum(counted, axis=-1).astype(dtype)
    squares = given.squares[None]
    y = w**2 * squares
    total = product(w, given.vectors)
    dots_all = w * product(total, given.vectors.T)
    square_all = jnp.sum(total**2, axis=-1, keepdims=True)
    place = jnp.arange(rows)
    whole_sum = jnp.sum(
        jnp.where(counted, random_means(y, dots_all, square_all, jnp.ones((rows, 1), dtype)), 0), axis=-1
    )

    def select(k, state):
        dots, own, out = state
        token = order[:, k]
        weight = w[place, token]
        own = own + weight * (2 * dots[place, token] + weight * given.squares[token])
        dots = dots + weight[:, None] * gram[token]
        n = (k + 1).astype(dtype)
        distance = root(own[:, None] - 2 * w * dots + y)
        left_out = number > n
        measured = jnp.sum(jnp.where(counted & (rank > k) & left_out[:, None], distance, 0))
        share = jnp.where(left_out, (number - n) / jnp.maximum(number, 1), 0)
        if sharp:
            p = jnp.minimum(n / jnp.maximum(number - 1, 1), 1)[:, None]
            means = jnp.sum(jnp.where(counted, random_means(y, dots_all, square_all, p), 0), axis=-1)
        else:
            means = whole_sum
        found = (measured, jnp.sum(share * means), jnp.sum(left_out).astype(dtype))
        return dots, own, tuple(column.at[k].set(value) for column, value in zip(out, found, strict=True))

    out = (jnp.zeros(length, dtype),) * 3
    return jax.lax.fori_loop(0, upto, select, (jnp.zeros_like(w), jnp.zeros(rows, dtype), out))[2]
