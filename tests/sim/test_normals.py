"""Standard normals from pairs of words: their law, and the same numbers on any number of devices.

At fixed keys: right numbers fail a test with the probability that it states.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from sim import _normals
from sim._mesh import check_mesh, layout
from sim._normals import normals

KEY = jax.random.key(7)


@pytest.mark.parametrize("piece", [2**20, 256])
@pytest.mark.parametrize("length", [1, 2, 3, 10, 11])
def test_all_are_independent_normals(piece, length, monkeypatch):
    """Law, and correlations between tokens and with the number after it; false alarm 1e-3 a case."""
    monkeypatch.setattr(_normals, "bytes_at_once", lambda: piece)
    x = np.asarray(normals(KEY, (40, length, 501), axis=1), np.float64)
    assert len(np.unique(x)) > 0.98 * x.size  # of 2^23 values; none was left blank or made twice
    assert stats.kstest(x.ravel(), "norm").pvalue > 1e-3 / 4
    rows = np.swapaxes(x, 0, 1).reshape(length, -1)
    after = np.sum(rows[:, 1:] * rows[:, :-1], axis=1) / np.sqrt(rows.shape[1])
    assert np.max(np.abs(after)) < stats.norm.isf(1e-3 / 8 / length)
    between = (rows @ rows.T)[np.triu_indices(length, 1)] / np.sqrt(rows.shape[1])
    if between.size:
        assert np.max(np.abs(between)) < stats.norm.isf(1e-3 / 8 / between.size)
        squares = (rows**2 - 1) @ (rows**2 - 1).T / 2 / np.sqrt(rows.shape[1])
        assert np.max(np.abs(squares[np.triu_indices(length, 1)])) < stats.norm.isf(1e-3 / 8 / between.size)


def test_every_word_is_a_number():
    """Symmetric and finite at the ends, compiled or not: a midpoint may not be rounded to ±1."""
    words = jnp.array([0, 2**31 - 1, 2**31, 2**32 - 1], jnp.uint32)
    for normal in (_normals._normal, jax.jit(_normals._normal)):
        x = np.asarray(normal(words))
        np.testing.assert_array_equal(x, -x[::-1])
        np.testing.assert_allclose(x[2:], stats.norm.ppf([0.5 + 2**-24, 1 - 2**-24]), rtol=2e-6)


def test_moments_to_six_digits():
    """Variance and fourth moment over all 2^24 words that differ, within the rounding of float32 and the cut tail."""
    words = jnp.arange(2**24, dtype=jnp.uint32) << 8
    x = np.asarray(jax.jit(_normals._normal)(words), np.float64)
    np.testing.assert_allclose([np.mean(x**2), np.mean(x**4)], [1, 3], rtol=5e-6)


@pytest.mark.parametrize(("shape", "axes"), [((4, 5, 6), ("batch", None, None)), ((3, 4, 10), (None, None, "batch"))])
@pytest.mark.parametrize("piece", [2**20, 120])
def test_each_device_draws_the_same(shape, axes, piece, monkeypatch):
    monkeypatch.setattr(_normals, "bytes_at_once", lambda: piece)
    mesh = check_mesh(jax.make_mesh((2,), ("batch",), devices=jax.devices()[:2]), {"batch": {}})
    sharding = layout(mesh, shape, *axes)
    split = jax.jit(lambda key: normals(key, shape, axis=1, sharding=sharding))(KEY)
    assert len(split.addressable_shards) == 2
    np.testing.assert_array_equal(split, normals(KEY, shape, axis=1))


def test_other_types_are_those_of_jax():
    np.testing.assert_array_equal(
        normals(KEY, (3, 4), jnp.float64, axis=1), jax.random.normal(KEY, (12,), jnp.float64).reshape(3, 4)
    )
