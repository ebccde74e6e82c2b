"""The law of the sampled tokens. Keys are fixed; a bound of 5 standard errors fails once in 1.7 million keys."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sim
from theory import GaussianMixture, SingleLocation, gaussian, one_hot, sign_flips

draw_tokens = eqx.filter_jit(sim.draw_tokens)
PRIORS = {
    "sign_flips": sign_flips([2.0, 0.0], [0.0, 1.5]),
    "one_hot": one_hot(2, [0.3, 0.7]),
    "gaussian": gaussian([1.0, -1.0], [[1.0, 0.5], [0.5, 2.0]]),
    "mixture": GaussianMixture([0.25, 0.75], [[1.0, 0.0], [-1.0, 2.0]], [np.eye(2), np.zeros((2, 2))]),
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
def test_law_of_tokens(prior):
    task, dim, count = SingleLocation(3, 2.0, prior), 6, 40_000
    tokens = draw_tokens(task, jax.random.key(11), count, dim=dim, dtype=jnp.float64)
    x, position = np.asarray(tokens.materialize()), np.asarray(tokens.position)

    frequency = np.bincount(position, minlength=3) / count
    np.testing.assert_allclose(frequency, 1 / 3, atol=5 * np.sqrt(2 / 9 / count))

    chosen = x[np.arange(count), position]
    mean, covariance = np.zeros(dim), np.eye(dim)
    mean[:2] = np.sqrt(2.0) * np.asarray(prior.mean())
    covariance[:2, :2] += 2.0 * np.asarray(prior.covariance())
    products = (chosen - mean)[:, :, None] * (chosen - mean)[:, None, :]
    for sample, expected in ((chosen, mean), (products, covariance)):
        error = np.std(sample, axis=0) / np.sqrt(count)
        assert np.all(np.abs(sample.mean(axis=0) - expected) < 5 * error)

    others = x[np.arange(count), (position + 1) % 3]
    assert np.all(np.abs(others.mean(axis=0)) < 5 / np.sqrt(count))
    np.testing.assert_allclose(others.T @ others / count, np.eye(dim), atol=5 * np.sqrt(2 / count))


def test_signal_takes_the_values_of_the_prior():
    task = SingleLocation(3, 2.0, PRIORS["sign_flips"])
    tokens = draw_tokens(task, jax.random.key(0), 200, dim=10, dtype=jnp.float64)
    expected = np.sqrt(2.0) * np.array([[2.0, -1.5], [2.0, 1.5]])
    np.testing.assert_allclose(np.unique(np.round(tokens.signal, 12), axis=0), expected)


def test_materialized_tokens_are_noise_plus_signal():
    task = SingleLocation(4, 3.0, PRIORS["gaussian"])
    tokens = draw_tokens(task, jax.random.key(0), 7, dim=9)
    x = np.array(tokens.noise)
    for b in range(7):
        x[b, tokens.position[b], :2] += np.asarray(tokens.signal[b])
    np.testing.assert_array_equal(tokens.materialize(), x)
    assert tokens.noise.dtype == tokens.signal.dtype == tokens.materialize().dtype == jnp.float32
    assert (tokens.length, tokens.dim) == (4, 9)


def test_draws_depend_on_the_key_alone():
    task = SingleLocation(4, 3.0, PRIORS["gaussian"])
    one, again, other = (draw_tokens(task, jax.random.key(k), 5, dim=9) for k in (0, 0, 1))
    np.testing.assert_array_equal(one.noise, again.noise)
    assert not np.any(np.asarray(one.noise) == np.asarray(other.noise))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "count: expected a whole number >= 1, got 0"),
        ({"dim": 1}, "dim: expected a whole number >= 2, got 1"),
        ({"dtype": jnp.int32}, "dtype: expected a floating-point type"),
    ],
)
def test_refuses(change, message):
    options = {"count": 2, "dim": 8, **change}
    task = SingleLocation(4, 3.0, PRIORS["gaussian"])
    with pytest.raises(ValueError, match=message):
        draw_tokens(task, jax.random.key(0), options.pop("count"), **options)
