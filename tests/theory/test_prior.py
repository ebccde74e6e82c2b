"""Priors: moments, names that make them again, samples, and refusals; tasks and order parameters likewise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from tests.theory.states import FLIPS, PRIORS
from theory import GaussianMixture, SingleLocation, discrete, gaussian, one_hot, sign_flips

NAMESPACE = {f.__name__: f for f in (GaussianMixture, discrete, gaussian, one_hot, sign_flips)}


@pytest.mark.parametrize("prior", [*PRIORS.values(), discrete([[1.0, 0.1], [0.3, -2.0]], [0.25, 0.75])])
def test_the_canonical_name_makes_the_prior_again(prior):
    again = eval(prior.name, NAMESPACE)
    assert type(again) is type(prior)
    for a, b in zip(jax.tree.leaves(prior), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_sign_flips_are_the_product_of_signs():
    assert FLIPS.components == 4
    assert {tuple(p) for p in np.asarray(FLIPS.means).tolist()} == {
        (2.0, a, b) for a in (2.5, -2.5) for b in (1.5, -1.5)
    }
    np.testing.assert_allclose(FLIPS.mean(), [2, 0, 0])
    np.testing.assert_allclose(FLIPS.variance(), [0, 6.25, 2.25])


def test_moments_of_a_mixture():
    prior = PRIORS["mixture"]
    np.testing.assert_allclose(prior.mean(), [0.3 - 0.7, 0.7, 0.15])
    second = 0.3 * (np.outer([1, 0, 0.5], [1, 0, 0.5]) + np.diag([1, 0.5, 0])) + 0.7 * (
        np.outer([-1, 1, 0], [-1, 1, 0]) + 0.3 * np.eye(3)
    )
    np.testing.assert_allclose(prior.covariance(), second - np.outer(prior.mean(), prior.mean()), atol=1e-15)


@pytest.mark.parametrize("name", PRIORS)
def test_samples_have_the_moments(name):
    # 12 moments of 4 priors at |z| < 5: false-alarm rate 48 · 5.7e-7
    prior = PRIORS[name]
    draws = np.asarray(prior.sample(jax.random.key(3), 100_000))
    centred = draws - np.asarray(prior.mean())
    error = draws.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(centred.mean(0)) <= 5 * error + 1e-12)
    products = centred[:, :, None] * centred[:, None, :]
    error = products.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(products.mean(0) - np.asarray(prior.covariance())) <= 5 * error + 1e-9)


def test_zero_weights_are_dropped_and_nearly_one_is_normalized():
    prior = discrete([[1.0], [2.0], [3.0]], [0.5, 0.0, 0.5 + 5e-7])
    assert prior.components == 2
    assert float(prior.weights.sum()) == pytest.approx(1, abs=1e-15)


def test_changing_a_field_changes_the_prior():
    # a swept strength must not meet a cached mixture
    def risk(amplitude):
        task = SingleLocation(10, 1.0, sign_flips([2.0, 0, 0], jnp.array([0.0, 1.0, 0.0]) * amplitude))
        return task.prior.means

    assert not np.allclose(risk(1.0), risk(1.5))


INITIAL = dict(heads=2, features=1, dim=10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: discrete([[1.0], [2.0]], [0.5, 0.6]), r"weights: expected a sum of 1 .*, got \[0.5, 0.6\]"),
        (lambda: discrete([[1.0], [2.0]], [0.5, -0.5]), "weights: expected no negative entry"),
        (lambda: discrete([1.0, 2.0]), "points: expected 2 axes"),
        (lambda: discrete([[np.nan]]), "points: expected finite numbers"),
        (lambda: sign_flips([1.0, 2.0], [1.0]), r"amplitude: expected one entry per entry of mean \(2,\).*got \(1,\)"),
        (lambda: one_hot(0), "features: expected a whole number >= 1, got 0"),
        (lambda: one_hot(2, [0.2, 0.3]), "weights: expected a sum of 1"),
        (lambda: gaussian([0.0], [-1.0]), "variance: expected positive semi-definite"),
        (lambda: gaussian([0.0, 0.0], [[1.0, 2.0], [0.0, 1.0]]), "variance: expected symmetric"),
        (lambda: gaussian([0.0, 0.0], [1.0]), "variance: expected shape"),
        (lambda: GaussianMixture([1.0], [[0.0, 0.0]], [[[1.0]]]), "covariances: expected shape"),
        (lambda: GaussianMixture([1.0], [["a"]], [[[1.0]]]), "means: expected an array of real numbers"),
        (lambda: SingleLocation(1, 1.0, FLIPS), "length: expected a whole number >= 2, got 1"),
        (lambda: SingleLocation(jnp.array(1), 1.0, FLIPS), "length: expected a whole number >= 2, got 1"),
        (lambda: SingleLocation(jnp.array(2.5), 1.0, FLIPS), "length: expected one whole number"),
        (lambda: discrete([[]]), "points: expected at least one point"),
        (lambda: sign_flips(np.zeros(40), np.ones(40)), "amplitude: expected at most 12 non-zero entries"),
        (lambda: SingleLocation(2.5, 1.0, FLIPS), "length: expected a whole number >= 2, got 2.5"),
        (lambda: SingleLocation(10, -1.0, FLIPS), "snr: expected no negative entry, got -1.0"),
        (lambda: SingleLocation(10, np.inf, FLIPS), "snr: expected finite numbers"),
        (lambda: th.Softmax(0.0), "temperature: expected positive numbers, got 0.0"),
        (lambda: th.OrderParameters([[1.0]], [[0.5]]), r"r: expected r - m mᵀ positive semi-definite"),
        (lambda: th.OrderParameters([[1.0]], [[np.nan]]), "r: expected finite numbers"),
        (lambda: th.OrderParameters([[1.0]], [[1.0, 0.0], [0.0, 1.0]]), r"r: expected shape \(1, 1\)"),
        (lambda: th.OrderParameters([1.0], [[1.0]]), "m: expected shape"),
        (lambda: th.OrderParameters.initial(jax.random.key(0), **INITIAL | {"heads": 0}), "heads: expected"),
        (lambda: th.OrderParameters.initial(jax.random.key(0), **INITIAL | {"dim": 2}), "dim: expected a whole number"),
        (lambda: th.OrderParameters.initial(jax.random.key(0), **INITIAL, variance=0.0), "variance: expected positive"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_initial_order_parameters_have_the_law_of_gaussian_keys():
    # means and variances of m, r against k ~ N(0, v I_D) drawn outright; 4 + 6 comparisons at |z| < 5: 6e-6
    dim, variance, replicas = 40, 0.7, 4000
    order = th.OrderParameters.initial(
        jax.random.key(1), heads=2, features=1, dim=dim, variance=variance, replicas=replicas
    )
    keys = np.sqrt(variance) * np.random.default_rng(0).standard_normal((replicas, 2, dim))
    m, r = keys[:, :, 0] / np.sqrt(dim), np.einsum("nhd,nkd->nhk", keys, keys) / dim
    ours = np.concatenate([np.asarray(order.m[:, :, 0]), np.asarray(order.r).reshape(replicas, 4)], 1)
    theirs = np.concatenate([m, r.reshape(replicas, 4)], 1)
    for power in (1, 2):
        a, b = (ours - theirs.mean(0)) ** power, (theirs - theirs.mean(0)) ** power
        spread = np.sqrt((a.var(0) + b.var(0)) / replicas)
        assert np.all(np.abs(a.mean(0) - b.mean(0)) < 5 * spread)


def test_initial_replicas_are_drawn_by_folding_in_their_index():
    key = jax.random.key(5)
    many = th.OrderParameters.initial(key, heads=3, features=2, dim=50, replicas=3)
    alone = th.OrderParameters.initial(jax.random.fold_in(key, 2), heads=3, features=2, dim=50)
    np.testing.assert_allclose(many[2].r, alone.r, rtol=1e-14)
    assert not np.allclose(many.m[0], many.m[1])
    limit = th.OrderParameters.initial(key, heads=3, features=2, dim=None, variance=0.5)
    np.testing.assert_array_equal(limit.r, 0.5 * np.eye(3))


def test_an_index_out_of_range_is_an_error_and_iteration_ends():
    many = th.OrderParameters.initial(jax.random.key(0), heads=2, features=1, dim=10, replicas=2)
    with pytest.raises(IndexError, match="index 5 is out of range for 2 entries"):
        many[5]
    assert len(list(many)) == 2
    np.testing.assert_array_equal(many[-1].m, many[1].m)
    with pytest.raises(IndexError, match="one state"):
        many[0][0]
