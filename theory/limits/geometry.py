"""How many selected tokens stand apart from the rest: measured, and bounded on the sphere (docs/limits.md §4)."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from theory._checks import invalid, is_concrete, non_negative, positive
from theory.limits._rows import MEMORY, Row, floats, non_negative_rows, one_of, over_rows, rows_of
from theory.limits._vectors import Vectors, contexts, with_squares

FORMS = ("sharp", "mcdiarmid", "limit", "printed")


class Separability(eqx.Module):
    """Selected tokens that are distinguishable, per row and count; axes (..., K), or (...) for a single count."""

    number: Int[Array, "..."]  # N_s
    fraction: Float[Array, "..."]  # N_s/N, N no more than the row has tokens
    radius: Float[Array, "..."]  # r; infinite where no token is left out


def separability(
    weights: Any,
    vectors: Any,
    counts: Any = None,
    *,
    selected: Any = None,
    radius: Any = None,
    where: Any = None,
    count: str = "own",
    memory: int = MEMORY,
) -> Separability:
    """N_s of the selected tokens are distinguishable: ‖s − α_i x_i‖ < r, with r = min_{i∉I}‖s − α_i x_i‖.

    Computed as `distances` does, to the same error; a token nearer to r than that may fall on either side.

    Args:
        weights, vectors, counts, selected, where, count, memory: as in `distances`.
        radius: r of the ball instead, a number or (...) per row: then N_s counts ‖s − α_i x_i‖ ≤ r, and is 0 if a
            token left out is in the ball too.

    Returns:
        `Separability`. Where no token is left out all are distinguishable: fraction 1, radius infinite.

    Raises:
        ValueError: as `distances`, or a negative radius.

    >>> import jax.numpy as jnp
    >>> from theory.limits import separability
    >>> found = separability(jnp.array([0.4, 0.3, 0.2, 0.1]), jnp.eye(4), [1, 3])
    >>> found.number.tolist(), [round(float(r), 4) for r in found.radius]
    ([1, 3], [0.4123, 0.5477])
    """
    rows = rows_of(weights, vectors, where=where, count=count)
    options = {"prepare": with_squares, "memory": memory}
    if radius is None:
        return over_rows(_separated, rows, counts, selected, **options)
    (radius,) = floats("radius", radius)
    if is_concrete(radius) and bool(np.any(np.asarray(radius) < 0)):
        raise invalid("radius", "no negative entry", radius.tolist())
    each = _shaped_radius(radius.astype(rows.weights.dtype), rows.lead).reshape(rows.weights.shape[:2])
    return over_rows(_separated_within, rows, counts, selected, extra=(each,), **options)


def separability_bounds(
    weights: Any,
    radius: Any,
    counts: Any = None,
    *,
    selected: Any = None,
    dim: Any = None,
    norm: Any = 1.0,
    separation: Any = None,
    form: str = "sharp",
    where: Any = None,
    memory: int = MEMORY,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Bounds on the expected fraction of i∈I with ‖s − α_i x_i‖ ≤ r, for x uniform on a sphere and fixed weights and r.

    With v_i² = M² Σ_{j∈I, j≠i} α_j²:

    - "sharp": (1/N) Σ_{r>v_i} (1−κ_i) and (1/N)(#{r ≥ v_i} + Σ_{r<v_i} κ_i), κ_i = (2/d)v_i⁴/((r²−v_i²)² + (2/d)v_i⁴);
    - "mcdiarmid": 1 − (1/N) Σ exp(−(r−v_i)²_+/(2v_i²)) and (1/N) Σ exp(−(v_i/√(1+2/d) − r)²_+/(2v_i²));
    - "limit": both the fraction of i with v_i < r, what d → ∞ gives;
    - "printed": 1 − Σ ξ_i/(rN) and (1/N) Σ exp(−(ξ_i−r)²/(2M²)), ξ_i² = M²(A−α_i)² − (δ²/2)Σ_{j≠k≠i} α_jα_k. The
      upper side is false (with every ξ_i far below r all tokens are in the ball, and it says fewer), the lower
      usually negative.

    They speak of the tokens in the ball; that no token left out lies there is a second condition. With the measured r
    of `separability` it holds by choice, but r then depends on x, and the bounds are an approximation.

    Args:
        weights: α ≥ 0, (..., L).
        radius: r ≥ 0, of a shape that broadcasts to the answer's.
        counts, selected: the top sets or a set, as in `distances`.
        dim: d, needed by "sharp" and "mcdiarmid".
        norm: M, the radius of the sphere.
        separation: δ, the least distance of two tokens, needed by "printed".
        form: one of the above.
        where: True where a token may be attended.
        memory: bytes of working arrays.

    Returns:
        (lower, upper), each (...) or (..., K).

    Raises:
        ValueError: as `distances`, a form without its dim or separation, an unknown form.

    >>> import jax.numpy as jnp
    >>> from theory.limits import separability_bounds
    >>> low, high = separability_bounds(jnp.full(64, 1 / 64), 0.2, 16, dim=64)  # v_i = √15/64 = 0.06
    >>> round(float(low), 4), float(high)
    (0.9997, 1.0)
    """
    one_of("form", form, FORMS)
    for name, value, forms in (("dim", dim, ("sharp", "mcdiarmid")), ("separation", separation, ("printed",))):
        if form in forms and value is None:
            raise invalid(name, f"a number with form={form!r}", None)
    rows = non_negative_rows(weights, where=where)
    dtype = rows.weights.dtype
    number = 1 if counts is None else jnp.atleast_1d(jnp.asarray(counts)).shape[0]
    flat = counts is None or np.ndim(counts) == 0
    (radius,) = floats("radius", radius)
    if is_concrete(radius) and bool(np.any(np.asarray(radius) < 0)):
        raise invalid("radius", "no negative entry", radius.tolist())
    each = _shaped_radius(radius.astype(jnp.float64), rows.lead if flat else (*rows.lead, number))
    m = positive("norm", norm, 0)  # everything below is in units of M
    if form == "printed":
        other = non_negative("separation", separation, 0) / m
    else:
        other = 2 / positive("dim", 1.0 if dim is None else dim, 0)
    each = (each / m).astype(dtype).reshape(*rows.weights.shape[:2], number)
    others = jnp.broadcast_to(other.astype(dtype), rows.weights.shape[:2])
    return over_rows(_BOUNDS[form], rows, counts, selected, extra=(each, others), memory=memory)


def coverage(level: Any, heads: Any) -> Float[Array, "..."]:
    """Share of tokens that at least one of H independent heads tells apart, 1 − (1−p)^H; axes broadcast.

    Args:
        level: p, from 0 to 1, of each head.
        heads: H ≥ 0.

    Raises:
        ValueError: p is not from 0 to 1 or H negative.

    >>> from theory.limits import coverage
    >>> float(coverage(0.8, 2))
    0.96
    """
    level, heads = non_negative("level", level), non_negative("heads", heads)
    if is_concrete(level) and bool(np.any(np.asarray(level) > 1)):
        raise invalid("level", "numbers from 0 to 1", level.tolist())
    axes = max(level.ndim, heads.ndim)
    level, heads = (part.reshape((1,) * (axes - part.ndim) + part.shape) for part in (level, heads))
    safe = jnp.where(level < 1, level, 0)
    return jnp.where((level < 1) | (heads == 0), -jnp.expm1(heads * jnp.log1p(-safe)), 1.0)


def _shaped_radius(radius: Array, shape: tuple[int, ...]) -> Array:
    try:
        return jnp.broadcast_to(radius, shape)
    except ValueError as error:
        raise invalid("radius", f"a shape that broadcasts to {shape}", f"shape {radius.shape}") from error


def _of(row: Row, close: Array, radius: Array) -> Separability:
    number = jnp.sum(close, axis=-1, dtype=jnp.int32)
    size = jnp.sum(row.selected, axis=-1)
    share = number.astype(row.weights.dtype) / jnp.maximum(size, 1).astype(row.weights.dtype)
    return Separability(number, jnp.where(size > 0, share, 1), radius)


def _separated(row: Row, given: Vectors, counts: Array) -> Separability:
    found = contexts(row, given).distances
    radius = jnp.min(jnp.where(row.counted[None] & ~row.selected, found, jnp.inf), axis=-1)
    return _of(row, row.selected & (found < radius[:, None]), radius)


def _separated_within(row: Row, given: Vectors, counts: Array, radius: Array) -> Separability:
    found = contexts(row, given).distances
    alone = ~jnp.any(row.counted[None] & ~row.selected & (found <= radius), axis=-1)
    close = row.selected & (found <= radius) & alone[:, None]
    return _of(row, close, jnp.broadcast_to(radius, alone.shape))


def _mean_over_selected(row: Row, terms: Array) -> Array:
    size = jnp.maximum(jnp.sum(row.selected, axis=-1), 1).astype(terms.dtype)
    return jnp.sum(jnp.where(row.selected, terms, 0), axis=-1) / size


def _others(row: Row, power: int) -> Float[Array, "K L"]:
    """(Σ_{j∈I, j≠i} α_j^p)^{1/p} for i∈I, p = 1 or 2: of weights as small as they may be.

    For the largest weight that is the sum of the rest: a difference would leave no digits.
    """
    inside = jnp.where(row.selected, row.weights[None], 0)
    largest = jnp.arange(row.weights.shape[0])[None] == jnp.argmax(inside, axis=-1, keepdims=True)

    def sum_beside(values: Array, left_out: Array | float) -> Array:
        top = jnp.max(values, axis=-1, keepdims=True)
        unit = jnp.where(top > 0, top, 1)
        total = jnp.sum((values / unit) ** power, axis=-1, keepdims=True)
        rest = jnp.maximum(total - (left_out / unit) ** power, 0)
        return unit * (jnp.sqrt(rest) if power == 2 else rest)

    return jnp.where(largest, sum_beside(jnp.where(largest, 0, inside), 0.0), sum_beside(inside, inside))


def _sharp(row: Row, given: None, counts: Array, radius: Array, noise: Array) -> tuple[Array, Array]:
    v, r = _others(row, 2), radius[:, None]
    ratio = r / jnp.where(v > 0, v, 1)
    total = ((ratio - 1) * (ratio + 1)) ** 2 + noise
    kappa = jnp.where((v > 0) & (total > 0), noise / jnp.where(total > 0, total, 1), 0)
    return (
        _mean_over_selected(row, jnp.where(r > v, 1 - kappa, 0)),
        _mean_over_selected(row, jnp.where(r >= v, 1, kappa)),
    )


def _mcdiarmid(row: Row, given: None, counts: Array, radius: Array, noise: Array) -> tuple[Array, Array]:
    v, r = _others(row, 2), radius[:, None]

    def tail(gap):  # exp(−gap²₊/(2v²)), with its limit at v = 0
        gap = jnp.maximum(gap, 0)
        ratio = gap / jnp.where(v > 0, v, 1)
        return jnp.where(v > 0, jnp.exp(-(ratio**2) / 2), jnp.where(gap > 0, 0, 1))

    upper = tail(v / jnp.sqrt(1 + noise) - r)
    return 1 - _mean_over_selected(row, tail(r - v)), _mean_over_selected(row, upper)


def _limit(row: Row, given: None, counts: Array, radius: Array, noise: Array) -> tuple[Array, Array]:
    v = _others(row, 2)
    share = _mean_over_selected(row, jnp.where(v < radius[:, None], 1, 0).astype(v.dtype))
    return share, share


def _printed(row: Row, given: None, counts: Array, radius: Array, separation: Array) -> tuple[Array, Array]:
    apart, v, r = _others(row, 1), _others(row, 2), radius[:, None]
    pairs = jnp.maximum(1 - (v / jnp.where(apart > 0, apart, 1)) ** 2, 0)  # Σ_{j≠k≠i} α_jα_k over (A − α_i)²
    less = jnp.where(pairs > 0, separation**2 / 2 * pairs, 0)
    xi = apart * jnp.sqrt(jnp.maximum(1 - less, 0))
    ratio = jnp.where(r > 0, xi / jnp.where(r > 0, r, 1), jnp.where(xi > 0, jnp.inf, 0))
    upper = jnp.exp(-((xi - r) ** 2) / 2)
    return 1 - _mean_over_selected(row, ratio), _mean_over_selected(row, upper)


_BOUNDS = {"sharp": _sharp, "mcdiarmid": _mcdiarmid, "limit": _limit, "printed": _printed}
