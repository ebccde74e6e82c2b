"""Random rows and vectors of several kinds, and everything about them computed directly, one difference at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

LONG = pytest.mark.slow
SHAPES = [
    pytest.param((2, 1), marks=LONG),
    pytest.param((5, 3), marks=LONG),
    (16, 4),
    pytest.param((40, 8), marks=LONG),
]  # (L, d)
VECTORS = ("isotropic", "clustered", "equal", "collinear")
WEIGHTS = ("flat", "peaked", "sparse")
SETS, ROWS = 250, 400  # vectors, and rows for each: 10^5 trials


def numpy(tree):
    """Its arrays as those of NumPy, which mixes types."""
    return jax.tree.map(np.asarray, tree)


def counts_of(length):
    """N from one token to all but one."""
    return sorted({1, max(1, length // 4), max(1, length // 2), length - 1})


def random_vectors(kind, key, sets, length, dim):
    """(sets, L, d)."""
    keys = jax.random.split(key, 3)
    normal = jax.random.normal(keys[0], (sets, length, dim), jnp.float64)
    if kind == "isotropic":
        return normal
    one = jax.random.normal(keys[1], (sets, 1, dim), jnp.float64)
    if kind == "clustered":
        return one + 0.01 * normal
    if kind == "equal":
        return jnp.broadcast_to(one, normal.shape)
    return one * jax.random.normal(keys[2], (sets, length, 1), jnp.float64)


def random_weights(kind, key, *shape):
    """(..., L), rows that sum to 1."""
    keys = jax.random.split(key, 3)
    if kind == "flat":
        return jax.nn.softmax(0.1 * jax.random.normal(keys[0], shape, jnp.float64), axis=-1)
    scale = jnp.exp(2 * jax.random.normal(keys[1], (*shape[:-1], 1), jnp.float64))
    weights = jax.nn.softmax(scale * jax.random.normal(keys[0], shape, jnp.float64), axis=-1)
    if kind == "peaked":
        return weights
    kept = jnp.where(jax.random.bernoulli(keys[2], 0.3, shape), weights, 0).at[..., 0].add(1e-3)
    return kept / jnp.sum(kept, axis=-1, keepdims=True)


def trials(shape, kind, weighting, seed=0, sets=SETS, rows=ROWS):
    """weights (sets, rows, L) and vectors (sets, L, d)."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), shape[0]), 2)
    made = random_weights(weighting, keys[0], sets, rows, shape[0]), random_vectors(kind, keys[1], sets, *shape)
    return np.asarray(made[0]), np.asarray(made[1])


def top(weights, number):
    """Sets of the N largest: True for them, equal ones by position."""
    order = np.argsort(-np.asarray(weights), axis=-1, kind="stable")
    chosen = np.zeros(weights.shape, bool)
    np.put_along_axis(chosen, order[..., :number], True, axis=-1)
    return chosen


def direct_distances(weights, vectors, chosen):
    """‖s − α_i x_i‖ of every token, (sets, rows, L): differences are taken, then their norms."""
    return np.asarray(_direct(jnp.asarray(weights), jnp.asarray(vectors), jnp.asarray(chosen)))


@jax.jit
def _direct(weights, vectors, chosen):
    def one(args):
        weights, vectors, chosen = args
        y = weights[:, :, None] * vectors[None]
        s = jnp.sum(jnp.where(chosen[:, :, None], y, 0), axis=1)
        return jnp.sqrt(jnp.sum((s[:, None] - y) ** 2, axis=-1))

    return jax.lax.map(one, (weights, vectors, chosen))


def stated_rounding(dtype, number, dim, scale, delta):
    """The error of a distance δ that `distances` states, S the scale."""
    eps = float(jnp.finfo(dtype).eps)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_size = np.where(delta > 0, (dim + 4) * eps * scale**2 / delta, np.inf)
    return number * eps * scale / 2 + np.minimum(by_size, np.sqrt((dim + 4) * eps) * scale)
