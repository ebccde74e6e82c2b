"""Nodes of the integrals: in the integration variable u of a normalizer, and for averages over Gaussian vectors."""

from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.polynomial.hermite_e import hermegauss
from scipy.special import gamma, ndtri
from scipy.stats import qmc

_MOST_SOBOL = 21201  # dimensions SciPy has direction numbers for


# Right ends lie where e^{−t} is below the tail by e^{−12} more: derivatives bring powers of t there
EDGE = 12.0


def rounded_count(count: float) -> int:
    """A number of nodes, coarse enough for nearby states to share compiled code: 8, and from 64 on about 15 %."""
    step = max(8, 2 ** (int(np.ceil(np.log2(max(count, 1)))) - 3))
    return int(np.ceil(count / step) * step)


def rounded_up(count: Array) -> Array:
    """The same for a traced number."""
    step = jnp.maximum(8.0, 2.0 ** (jnp.ceil(jnp.log2(jnp.maximum(count, 1.0))) - 3))
    return (jnp.ceil(count / step) * step).astype(int)


def half_again(count: int) -> int:
    """Half as many nodes again, for the refinement that estimates an error; one node stays one."""
    return count if count == 1 else -(-3 * count // 2)


def inverse_bend(distance: Array) -> Array:
    """t with t − e^{−t} = −distance, by Newton on the convex s + e^s = distance, s = −t."""
    s = jnp.where(distance > 1, jnp.log(jnp.maximum(distance, 1.0)), jnp.minimum(distance, 0.5) - 0.5)
    for _ in range(8):
        s = s - (s + jnp.exp(s) - distance) / (1 + jnp.exp(s))
    return -s


def bent_span(left: Array, bend: Array, right: Array) -> Array:
    """Length of [left, right] in t, u = bend + t − e^{−t}."""
    return inverse_bend(bend - right) - inverse_bend(bend - left)


def bent_nodes(left: Array, bend: Array, right: Array, count: int) -> tuple[Array, Array]:
    """Nodes u and weights du (..., count), uniform in t: a left tail e^u decays doubly exponentially in t."""
    at = jnp.linspace(0, 1, count).reshape((1,) * bend.ndim + (-1,))
    return bent_nodes_at(left[..., None], bend[..., None], right[..., None], at, count)


def bent_nodes_at(left: Array, bend: Array, right: Array, at: Array, count: Any) -> tuple[Array, Array]:
    """Those of `count` nodes that lie at these fractions of [left, right] in t."""
    first, last = inverse_bend(bend - left), inverse_bend(bend - right)
    t = first + (last - first) * at
    return bend + t - jnp.exp(-t), (last - first) / (count - 1) * (1 + jnp.exp(-t))


class Points(NamedTuple):
    """Standard normal points with weights that sum to one."""

    z: Float[Any, "A N"]
    weight: Float[Any, " N"]


def axis_count(spread: float, log_tail: float) -> int:
    """Nodes on one axis for averages of functions as sharp as exp(−e^x) of scores with this standard deviation.

    The integrand is analytic for |Im z| < π/(2·spread), where the trapezoid rule of step h errs by
    exp(−2πd/h + d²/2). On narrow axes Gauss–Hermite needs less; its count is an empirical bound.
    """
    if spread < 1e-12:
        return 1
    reach = np.sqrt(2 * log_tail)
    strip = min(np.pi / (2 * spread), reach)
    trapezoid = int(np.ceil(2 * reach * (log_tail + strip**2 / 2) / (2 * np.pi * strip))) + 1
    gauss_hermite = int(np.ceil(2 + spread * log_tail * (0.5 + log_tail / 20)))
    return min(trapezoid, gauss_hermite) if gauss_hermite < _least_trapezoid(log_tail) else trapezoid


def axis_counts(spreads: Any, log_tail: float) -> tuple[int, ...]:
    """`axis_count` of each axis."""
    return tuple(axis_count(spread, log_tail) for spread in spreads)


def most_spread(count: int, log_tail: float) -> float:
    """The widest standard deviation for which `count` nodes are enough."""
    widths = np.geomspace(1e-3, 1e3, 200)
    enough = [width for width in widths if axis_count(width, log_tail) <= count]
    return max(enough, default=1e-12)


def _least_trapezoid(log_tail: float) -> int:
    """The count from which an axis is taken by the trapezoid rule."""
    return int(np.ceil(2 * log_tail / np.pi)) + 1


def is_wide(count: int, log_tail: float) -> bool:
    """Whether an axis with so many nodes is taken by the trapezoid rule."""
    return count >= _least_trapezoid(log_tail)


@cache
def axis_rule(count: int, log_tail: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of one axis."""
    if is_wide(count, log_tail):
        z = np.linspace(-1, 1, count) * np.sqrt(2 * log_tail)
        weight = np.exp(-(z**2) / 2)
    else:
        z, weight = hermegauss(count)
    return z, weight / weight.sum()


def tensor_points(counts: tuple[int, ...], log_tail: float) -> Points:
    """The product of one rule per axis, without the corners whose weight is below the tail."""
    axes = [axis_rule(count, log_tail) for count in counts]
    z = np.stack([a.reshape(-1) for a in np.meshgrid(*(axis[0] for axis in axes), indexing="ij")])
    weight = np.ones(1)
    for axis in axes:
        weight = np.multiply.outer(weight, axis[1]).reshape(-1)
    wide = [j for j, count in enumerate(counts) if is_wide(count, log_tail)]
    # how many are kept must not hang on the rounding of the ends, which lie on the edge: code is compiled for a number
    kept = np.sum(z[wide] ** 2, axis=0) <= 2 * log_tail * (1 + 1e-9)
    return Points(z[:, kept], weight[kept] / weight[kept].sum())


def tensor_size(counts: tuple[int, ...], log_tail: float) -> float:
    """About how many points `tensor_points` keeps: a ball of the wide axes."""
    wide = sum(is_wide(count, log_tail) for count in counts)
    return float(np.prod(np.asarray(counts, float)) * (np.sqrt(np.pi) / 2) ** wide / gamma(wide / 2 + 1))


def normal_points(samples: int, length: int, heads: int, seed: int) -> Float[np.ndarray, "L H N"]:
    """Standard normal points that fill space evenly: scrambled Sobol, plain draws beyond its dimensions."""
    if length * heads > _MOST_SOBOL:
        return np.random.default_rng(seed).standard_normal((length, heads, samples))
    sobol = qmc.Sobol(length * heads, scramble=True, rng=np.random.default_rng(seed))
    uniform = sobol.random_base2(int(np.ceil(np.log2(samples))))
    return ndtri(np.clip(uniform, 2.0**-53, 1 - 2.0**-53)).T.reshape(length, heads, -1)
