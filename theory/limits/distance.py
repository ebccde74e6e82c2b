"""How far a head's context vector lies from tokens left out: measured, bounded, expected (docs/limits.md §3)."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from theory.limits._rows import FORMS, MEMORY, Row, non_negative_rows, one_of, over_rows, product, root, rows_of
from theory.limits._vectors import Vectors, contexts, pairwise, with_squares


class Distances(eqx.Module):
    """Distances of one context vector per row and selection; axes (..., K), or (...) for a single selection."""

    sum_of_norms: Float[Array, "..."]  # d̃ = Σ_{i∉I} ‖s − α_i x_i‖
    norm_of_sum: Float[Array, "..."]  # ‖Σ_{i∉I} (s − α_i x_i)‖
    context_norm: Float[Array, "..."]  # ‖s‖
    weight: Float[Array, "..."]  # A, the sum of the selected weights
    unselected: Int[Array, "..."]  # L − N

    @property
    def per_token(self) -> Float[Array, "..."]:
        """d̃/(L − N), the mean distance of a token left out; 0 where none is."""
        return self.sum_of_norms / jnp.maximum(self.unselected, 1).astype(self.sum_of_norms.dtype)


class Expectation(eqx.Module):
    """E d̃ over random sets: between `value` and `value + error`; `error` is None where there is no such bound."""

    value: Float[Array, "..."]
    error: Float[Array, "..."] | None


def distances(
    weights: Any,
    vectors: Any,
    counts: Any = None,
    *,
    selected: Any = None,
    where: Any = None,
    count: str = "own",
    memory: int = MEMORY,
) -> Distances:
    """Measured distances between the context vector s = Σ_{i∈I} α_i x_i and the tokens left out.

    The distances come from ‖s‖² − 2 α_i s·x_i + α_i²‖x_i‖²: with S = Σ_{j∈I} α_j‖x_j‖ + α_i‖x_i‖ and ε the distance of
    1 to the next number of the type, one of size δ has an error below N ε S/2 + min((d+4) ε S²/δ, √((d+4) ε) S),
    whatever the order of sums (docs/limits.md §3), as long as squares of α_i‖x_i‖ neither under- nor overflow (in
    float32: from 1e-18 to 1e18). Equal weights are ranked by position.

    Args:
        weights: α, (..., L), any leading axes (layers, heads, queries).
        vectors: x, (L, d) for all rows, or (*lead, L, d) with weights (*lead, Q, L): one set per head.
        counts: N, one number or several (K,): I is the set of the N largest weights. New numbers recompile nothing.
        selected: instead of counts, the set itself, (..., L), True for its tokens.
        where: True where a token may be attended, of a shape that broadcasts to that of the weights; a causal row
            is `jnp.tril(jnp.ones((L, L), bool))`. Masked weights count as 0.
        count: "own" for rows that have only the tokens they may attend (a row with no more than N of them leaves
            none out, d̃ = 0), "all" for rows of L tokens, masked ones among those left out.
        memory: bytes of working arrays; rows are taken as many at a time as fit.

    Returns:
        `Distances` with axes (...) for one number or set, (..., K) for several.

    Raises:
        ValueError: a shape does not fit, N is not in 1 … L, a number is not finite, a set is empty.

    >>> import jax, jax.numpy as jnp
    >>> from theory.limits import distances
    >>> x = jax.random.normal(jax.random.key(0), (50, 8), jnp.float32)
    >>> weights = jax.nn.softmax(jax.random.normal(jax.random.key(1), (3, 7, 50), jnp.float32))
    >>> found = distances(weights, x, [1, 5, 50])
    >>> found.sum_of_norms.shape, float(found.sum_of_norms[0, 0, 2])
    ((3, 7, 3), 0.0)
    """
    rows = rows_of(weights, vectors, where=where, count=count)
    return over_rows(_measured, rows, counts, selected, prepare=with_squares, memory=memory)


def distance_bound(
    weights: Any,
    vectors: Any,
    counts: Any = None,
    *,
    selected: Any = None,
    form: str = "sharp",
    where: Any = None,
    count: str = "own",
    memory: int = MEMORY,
) -> Float[Array, "..."]:
    """Upper bound on d̃, for non-negative weights whatever they sum to.

    With d_1 = max_{i∉I, j∈I}‖x_i − x_j‖, A the selected weight and B the weight left out (1 − A if rows sum to 1):
    sharp, B d_1 + max_{j∈I}‖x_j‖ Σ_{i∉I}|A − α_i|, where the sum is A(L−N) − B for the top set; equality if all x are
    equal. The printed form has the square root of that sum and is false: with all x equal and weights 1/L it fails
    as soon as (L−N)N/L > 1 + B/N.

    Args:
        weights, vectors, counts, selected, where, count, memory: as in `distances`.
        form: "sharp" or "printed".

    Returns:
        The bound, (...) or (..., K); 0 where no token is left out.

    Raises:
        ValueError: as `distances`, or an unknown form.

    >>> import jax.numpy as jnp
    >>> from theory.limits import distance_bound, distances
    >>> weights, x = jnp.full(16, 1 / 16), jnp.ones((16, 4))  # equal vectors: the bound is attained
    >>> float(distances(weights, x, 4).sum_of_norms), float(distance_bound(weights, x, 4))
    (4.5, 4.5)
    >>> float(distance_bound(weights, x, 4, form="printed"))  # false
    3.0
    """
    one_of("form", form, FORMS)
    rows = non_negative_rows(weights, vectors, where=where, count=count)
    options = {"prepare": _with_pairs, "memory": memory}
    if selected is None:
        kernel = _bound_top if form == "sharp" else _bound_top_printed
    else:
        kernel = _bound_set if form == "sharp" else _bound_set_printed
        options["arrays"] = rows.weights.shape[-1]  # a masked (L, L) table for each row
    return over_rows(kernel, rows, counts, selected, **options)


def norm_interval(
    weights: Any,
    vectors: Any,
    counts: Any = None,
    *,
    selected: Any = None,
    where: Any = None,
    count: str = "own",
    memory: int = MEMORY,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Two-sided bound on d̃: |d̃ − (L−N)‖s‖| ≤ B max_{i∉I}‖x_i‖, B the weight left out; non-negative weights.

    So a number N in proportion to L does not by itself make distances vanish: d̃/(L−N) stays near ‖s‖.

    Args:
        weights, vectors, counts, selected, where, count, memory: as in `distances`.

    Returns:
        (lower, upper), each (...) or (..., K).

    Raises:
        ValueError: as `distances`.

    >>> import jax.numpy as jnp
    >>> from theory.limits import norm_interval
    >>> low, high = norm_interval(jnp.array([0.5, 0.25, 0.25]), jnp.eye(3), 1)
    >>> float(low), float(high)
    (0.5, 1.5)
    """
    rows = non_negative_rows(weights, vectors, where=where, count=count)
    return over_rows(_interval, rows, counts, selected, prepare=with_squares, arrays=2, memory=memory)


def expected_distance(
    weights: Any,
    vectors: Any,
    counts: Any,
    *,
    form: str = "sharp",
    where: Any = None,
    count: str = "own",
    memory: int = MEMORY,
) -> Expectation:
    """E d̃ over sets of N tokens drawn uniformly, with its error bound.

    With y_i = α_i x_i and p = N/(L−1): value = (L−N)/L Σ_i m_i, m_i = ‖y_i − p Σ_{j≠i} y_j‖, and
    0 ≤ E d̃ − value ≤ error = (L−N)/L Σ_i (√(m_i² + V_i) − m_i), V_i as in `second_moment`. The printed form has
    m_i = ‖y_i − Σ_{j≠i} y_j‖ instead, without p: the curve the paper draws, but no expectation over random sets.

    Args:
        weights, vectors, counts, where, count, memory: as in `distances`.
        form: "sharp" or "printed".

    Returns:
        `Expectation`; the printed form has no error bound.

    Raises:
        ValueError: as `distances`, or an unknown form.

    >>> import jax.numpy as jnp
    >>> from theory.limits import expected_distance
    >>> found = expected_distance(jnp.array([0.5, 0.5]), jnp.eye(2), 1)  # either set leaves out one token
    >>> float(found.value), float(found.error)
    (0.707..., 0.0)
    """
    one_of("form", form, FORMS)
    rows = rows_of(weights, vectors, where=where, count=count)
    kernel = _expected if form == "sharp" else _expected_printed
    return over_rows(kernel, rows, counts, None, prepare=with_squares, memory=memory)


def second_moment(
    weights: Any,
    vectors: Any,
    counts: Any,
    *,
    where: Any = None,
    count: str = "own",
    memory: int = MEMORY,
) -> Float[Array, "... L"]:
    """E ‖s − α_i x_i‖² over sets of N of the other tokens drawn uniformly, for every token i: m_i² + V_i, exact.

    V_i = p(1−p)(L−1)/(L−2) [Σ_{j≠i}‖y_j‖² − ‖Σ_{j≠i} y_j‖²/(L−1)], 0 at L = 2.

    Args:
        weights, vectors, counts, where, count, memory: as in `distances`.

    Returns:
        (..., L) or (..., K, L); 0 for tokens that the row does not have, and where no token is left out.

    Raises:
        ValueError: as `distances`.

    >>> import jax.numpy as jnp
    >>> from theory.limits import second_moment
    >>> second_moment(jnp.array([0.5, 0.5, 0.0]), jnp.eye(3), 1).tolist()
    [0.375, 0.375, 0.25]
    """
    rows = rows_of(weights, vectors, where=where, count=count)
    return over_rows(_second_moment, rows, counts, None, prepare=with_squares, memory=memory)


def _left_out(row: Row) -> Array:
    return row.counted[None] & ~row.selected


def _summed(row: Row, mask: Array) -> Float[Array, " K"]:
    return jnp.sum(jnp.where(mask, row.weights[None], 0), axis=-1)


def _measured(row: Row, given: Vectors, counts: Array) -> Distances:
    found, left = contexts(row, given), _left_out(row)
    unselected = jnp.sum(left, axis=-1, dtype=jnp.int32)
    others = product(jnp.where(left, row.weights[None], 0), given.vectors)
    total = unselected[:, None].astype(others.dtype) * found.context - others
    return Distances(
        jnp.sum(jnp.where(left, found.distances, 0), axis=-1),
        jnp.linalg.norm(total, axis=-1),
        jnp.linalg.norm(found.context, axis=-1),
        _summed(row, row.selected),
        unselected,
    )


class _Pairs(NamedTuple):
    norms: Float[Array, " L"]
    pairs: Float[Array, "L L"]


def _with_pairs(vectors: Float[Array, "L d"]) -> _Pairs:
    return _Pairs(jnp.linalg.norm(vectors, axis=-1), pairwise(vectors))


def _bound(row: Row, given: _Pairs, reach: Float[Array, " K"], *, rooted: bool) -> Float[Array, " K"]:
    left = _left_out(row)
    selected_weight = _summed(row, row.selected)
    gaps = jnp.sum(jnp.where(left, jnp.abs(selected_weight[:, None] - row.weights[None]), 0), axis=-1)
    largest = jnp.max(jnp.where(row.selected, given.norms[None], 0), axis=-1)
    return _summed(row, left) * reach + largest * (jnp.sqrt(gaps) if rooted else gaps)


def _reach_of_top(row: Row, given: _Pairs, counts: Array) -> Float[Array, " K"]:
    """d_1 of each top set: the row's tokens are met once, in their order."""
    ascending = jnp.argsort(counts)

    def upto(carry, count):
        start, farthest = carry
        farthest = jax.lax.fori_loop(start, count, lambda k, f: jnp.maximum(f, given.pairs[row.order[k]]), farthest)
        left = row.counted & (row.rank >= count)
        return (count, farthest), jnp.max(jnp.where(left, farthest, 0))

    begin = (jnp.zeros((), counts.dtype), jnp.zeros_like(given.norms))
    return jnp.zeros(counts.shape, given.norms.dtype).at[ascending].set(jax.lax.scan(upto, begin, counts[ascending])[1])


def _reach_of_set(row: Row, given: _Pairs) -> Float[Array, " K"]:
    across = row.selected[:, :, None] & _left_out(row)[:, None, :]
    return jnp.max(jnp.where(across, given.pairs[None], 0), axis=(-2, -1))


def _bound_top(row: Row, given: _Pairs, counts: Array) -> Array:
    return _bound(row, given, _reach_of_top(row, given, counts), rooted=False)


def _bound_top_printed(row: Row, given: _Pairs, counts: Array) -> Array:
    return _bound(row, given, _reach_of_top(row, given, counts), rooted=True)


def _bound_set(row: Row, given: _Pairs, counts: Array) -> Array:
    return _bound(row, given, _reach_of_set(row, given), rooted=False)


def _bound_set_printed(row: Row, given: _Pairs, counts: Array) -> Array:
    return _bound(row, given, _reach_of_set(row, given), rooted=True)


def _interval(row: Row, given: Vectors, counts: Array) -> tuple[Array, Array]:
    left = _left_out(row)
    context = product(jnp.where(row.selected, row.weights[None], 0), given.vectors)
    number = jnp.sum(left, axis=-1).astype(context.dtype)
    middle = number * jnp.linalg.norm(context, axis=-1)
    width = _summed(row, left) * jnp.sqrt(jnp.max(jnp.where(left, given.squares[None], 0), axis=-1))
    return jnp.maximum(middle - width, 0), middle + width


def random_means(
    y: Float[Array, "*#b L"], dots: Float[Array, "*#b L"], total: Float[Array, "*#b 1"], p: Float[Array, "*#b 1"]
) -> Float[Array, "*c L"]:
    """m_i = ‖y_i − p Σ_{j≠i} y_j‖ from ‖y_i‖², y_i·Y and ‖Y‖², Y = Σ_j y_j."""
    return root((1 + p) ** 2 * y - 2 * p * (1 + p) * dots + p**2 * total)


def _moments(row: Row, given: Vectors, counts: Array, *, whole: bool) -> tuple[Array, Array, Array]:
    """m_i and V_i (K, L), and the share (L−N)/L of tokens left out (K); `whole` puts 1 for p."""
    w, dtype = row.weights, row.weights.dtype
    number = jnp.sum(row.counted).astype(dtype)
    n = counts.astype(dtype)
    share = jnp.maximum(number - n, 0) / jnp.maximum(number, 1)
    p = jnp.minimum(n / jnp.maximum(number - 1, 1), 1)[:, None]
    y = w**2 * given.squares
    sum_all = product(w, given.vectors)
    dots, total = w * product(given.vectors, sum_all), jnp.sum(sum_all**2)
    means = random_means(y[None], dots[None], total[None, None], jnp.ones_like(p) if whole else p)
    others = (jnp.sum(y) - y) - jnp.maximum(total - 2 * dots + y, 0) / jnp.maximum(number - 1, 1)
    factor = jnp.where(number > 2, (number - 1) / jnp.maximum(number - 2, 1), 0)
    return means, p * (1 - p) * factor * jnp.maximum(others, 0)[None], share


def _expected(row: Row, given: Vectors, counts: Array) -> Expectation:
    means, spread, share = _moments(row, given, counts, whole=False)
    # √(m² + V) − m without its cancellation
    lower = root(means**2 + spread) + means
    excess = jnp.where(lower > 0, spread / jnp.where(lower > 0, lower, 1), 0)
    means, excess = (jnp.where(row.counted[None], part, 0) for part in (means, excess))
    return Expectation(share * jnp.sum(means, axis=-1), share * jnp.sum(excess, axis=-1))


def _expected_printed(row: Row, given: Vectors, counts: Array) -> Expectation:
    means, _, share = _moments(row, given, counts, whole=True)
    return Expectation(share * jnp.sum(jnp.where(row.counted[None], means, 0), axis=-1), None)


def _second_moment(row: Row, given: Vectors, counts: Array) -> Float[Array, "K L"]:
    means, spread, share = _moments(row, given, counts, whole=False)
    return jnp.where(row.counted[None] & (share[:, None] > 0), means**2 + spread, 0)
