"""Averages on products of axis rules whose counts differ from point to point, by code that is compiled once.

A product grid of any shape is a range of numbers: loops over blocks of it end where the point's own grid ends, so a
point costs what it needs and not what the hardest of a sweep needs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from theory import _joint
from theory._nodes import axis_rule, bent_nodes_at, half_again, is_wide

# points, and nodes in u, that are held at once: XLA gives more than 2048 numbers to threads that wait for each other
_BLOCK, _NODES = 128, 16
_REACH = 340.0  # |u + s| beyond which e^{u+s} counts as 0 or ∞; its square is still a number
LEAST_CAPACITY = 2**12
LONGEST = 2**12  # nodes on one axis: every point holds a table as long as the longest


class Rules(NamedTuple):
    """One rule per axis of each of several points, filled up to the same length.

    Attributes:
        z: nodes.
        weight: their weights.
        count: how many there are.
        wide: whether corners of small weight are cut on this axis.
        log_tail: of the weight at which they are.
        tail: the mass outside the window in u.
    """

    z: Float[Any, "N A K"]
    weight: Float[Any, "N A K"]
    count: Int[Any, "N A"]
    wide: Bool[Any, "N A"]
    log_tail: Float[Any, " N"]
    tail: Float[Any, " N"]

    @classmethod
    def of(cls, counts: Int[np.ndarray, "N A"], log_tails: Float[np.ndarray, " N"], tail: float) -> "Rules":
        """The rules of these counts."""
        length = 2 ** int(np.ceil(np.log2(max(32, counts.max()))))
        z, weight = np.zeros((2, *counts.shape, length))
        wide = np.zeros(counts.shape, bool)
        for place, count in np.ndenumerate(counts):
            own = axis_rule(int(count), float(log_tails[place[0]]))
            z[place][:count], weight[place][:count] = own
            wide[place] = is_wide(int(count), float(log_tails[place[0]]))
        return cls(z, weight, counts, wide, log_tails, np.full(len(counts), tail))

    @classmethod
    def refined(cls, counts: Int[np.ndarray, "N A"], log_tails: Float[np.ndarray, " N"], tail: float) -> "Rules":
        """Those that tell how far averages on these counts may be off (as `_joint.refined`)."""
        finer = np.vectorize(half_again, otypes=[int])(counts)
        return cls.of(finer, log_tails + 4.6, tail / 100)

    @classmethod
    def together(cls, coarse: "Rules", fine: "Rules") -> "Rules":
        """Both rules of each point, along a second axis."""
        more = fine.z.shape[-1] - coarse.z.shape[-1]
        filled = lambda table: np.pad(table, ((0, 0), (0, 0), (0, more)))  # noqa: E731
        coarse = coarse._replace(z=filled(coarse.z), weight=filled(coarse.weight))
        return cls(*(np.stack(leaves, axis=1) for leaves in zip(coarse, fine, strict=True)))


def capacity(counts: Int[np.ndarray, "N A"]) -> int:
    """Room for the largest of the products, as a power of eight times the least."""
    room = LEAST_CAPACITY
    while room < counts.prod(axis=1).max():
        room *= 8
    return room


class _Laid(NamedTuple):
    """s and weights of one point's grid, in blocks up to a capacity, and how many blocks are used."""

    s: Float[Array, "B n"]
    weight: Float[Array, "B n"]
    blocks: Int[Array, ""]


def laid_out(log_ratio: Callable[[Array], Array], rule: Rules, even: Bool[Array, " A"], capacity: int) -> _Laid:
    """s = `log_ratio(z)`, z of shape (A, n), on the grid of a rule without leading axis; half of each axis in which
    `log_ratio` is even."""
    axes, middle = rule.count.shape[0], jnp.where(even, rule.count // 2, 0)
    count = rule.count - middle
    centre = even & (rule.count % 2 == 1)
    strides = jnp.concatenate([jnp.cumprod(count[:0:-1])[::-1], jnp.ones(1, count.dtype)])
    size = jnp.prod(count)
    blocks = -(-size // _BLOCK)

    def fill(block: Array, laid: tuple[Array, Array]) -> tuple[Array, Array]:
        index = block * _BLOCK + jnp.arange(_BLOCK)
        place = (index[None] // strides[:, None]) % count[:, None]
        at = jnp.arange(axes)[:, None], place + middle[:, None]
        z, weight = rule.z[at], rule.weight[at] * jnp.where(centre[:, None] & (place == 0), 0.5, 1.0)
        outside = jnp.sum(jnp.where(rule.wide[:, None], z**2, 0.0), axis=0) > 2 * rule.log_tail * (1 + 1e-9)
        kept = (index < size) & ~outside
        values = log_ratio(z), jnp.where(kept, jnp.prod(weight, axis=0), 0.0)
        return laid[0].at[block].set(values[0]), laid[1].at[block].set(values[1])

    nothing = jnp.zeros((capacity // _BLOCK, _BLOCK))
    s, weight = jax.lax.fori_loop(0, blocks, fill, (nothing, nothing))
    return _Laid(s, weight / jnp.sum(weight), blocks)


def moments(laid: _Laid) -> _joint.Moments:
    """What the window is made of."""

    def extremes(block: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        s, used = laid.s[block], laid.weight[block] > 0
        low, high = jnp.min(jnp.where(used, s, jnp.inf)), jnp.max(jnp.where(used, s, -jnp.inf))
        return jnp.minimum(ends[0], low), jnp.maximum(ends[1], high)

    low, high = jax.lax.fori_loop(0, laid.blocks, extremes, (jnp.inf, -jnp.inf))

    def add(block: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        s, weight = laid.s[block], laid.weight[block]
        used = weight > 0
        up = jnp.exp(_joint.UP[:, None] * jnp.where(used, s - high, 0.0)[None])
        down = jnp.exp(-_joint.DOWN[:, None] * jnp.where(used, s - low, 0.0)[None])
        return sums[0] + up @ weight, sums[1] + down @ weight, sums[2] + up[0] @ (weight * s)

    start = jnp.zeros(_joint.UP.shape), jnp.zeros(_joint.DOWN.shape), jnp.zeros(())
    up, down, first = jax.lax.fori_loop(0, laid.blocks, add, start)
    return _joint.Moments(jnp.log(up) + _joint.UP * high, jnp.log(down) - _joint.DOWN * low, first / up[0])


def integrated(
    laid: _Laid, window: _joint.Window, count: Int[Array, ""], integrand: Callable[..., Any]
) -> tuple[Array, ...]:
    """Σ over the nodes u of `integrand(u, du, tables)`, with tables (3, U) of E γ_k(u + s), k = 0, 1, 2.

    Args:
        laid: s.
        window: where the nodes lie.
        count: how many there are.
        integrand: a tuple of sums.
    """

    last = (count - 1).astype(float)

    def part(block: Array, total: tuple[Array, ...]) -> tuple[Array, ...]:
        index = block * _NODES + jnp.arange(_NODES)
        u, du = bent_nodes_at(*window, index.astype(float) / last, last + 1)
        u = jnp.minimum(u, window.right)

        middle = u[_NODES // 2]
        step = jnp.exp(u - middle)

        def add(block: Array, sums: Array) -> Array:
            """Σ w t^k e^{−t} / e^{k(u−c)}, k = 0, 1, 2, t = e^{u+s} = e^{u−c} e^{s+c}: one exponential a pair."""
            e = jnp.exp(jnp.clip(laid.s[block] + middle, -_REACH, _REACH))
            t = step[:, None] * e[None]
            g = jnp.where(t < 2 * _REACH, jnp.exp(-t), 0.0)
            return sums + g @ (laid.weight[block][None] * jnp.stack([jnp.ones_like(e), e, e**2])).T

        zeroth, first, second = jax.lax.fori_loop(0, laid.blocks, add, jnp.zeros((_NODES, 3))).T
        first, second = first * step, second * step**2
        tables = jnp.stack([1 - zeroth, first, first - second])
        found = integrand(u, jnp.where(index < count, du, 0.0), tables)
        return tuple(a + b for a, b in zip(total, found, strict=True))

    zeros = tuple(jnp.zeros(()) for _ in jax.eval_shape(integrand, *_shapes()))
    return jax.lax.fori_loop(0, -(-count // _NODES), part, zeros)


def _shapes() -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = lambda *size: jax.ShapeDtypeStruct(size, jnp.float64)  # noqa: E731
    return shape(_NODES), shape(_NODES), shape(3, _NODES)
