"""The Kolmogorov–Smirnov search: against SciPy, and the running pass over N against matrix products."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from tests.theory.limits.trials import numpy, random_vectors, random_weights
from theory.limits import critical_count, distances, expected_distance, ks_p_value, ks_statistic, mean_distances


@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=9),  # with many ties
    st.lists(st.floats(-4, 4), min_size=1, max_size=9),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_statistic_against_scipy(first, second):
    ours = ks_statistic(first, second)
    assert float(ours) == pytest.approx(ks_2samp(first, second, method="asymp").statistic, abs=1e-12)


def test_the_statistic_of_many_columns():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(20, 6)), rng.normal(0.5, size=(13, 6))
    expected = [ks_2samp(first[:, k], second[:, k]).statistic for k in range(6)]
    np.testing.assert_allclose(ks_statistic(first, second), expected, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (5, 5), (12, 12), (144, 144), (1, 7), (30, 50), (50, 30)])
def test_p_values_against_scipy(sizes):
    rng = np.random.default_rng(sizes[0])
    for shift in (0.0, 0.3, 1.0, 9.0):
        exact = ks_2samp(rng.normal(size=sizes[0]), rng.normal(shift, size=sizes[1]), method="exact")
        assert float(ks_p_value(exact.statistic, *sizes)) == pytest.approx(exact.pvalue, rel=1e-8)
    assert float(ks_p_value(0.0, *sizes)) == 1


@pytest.mark.parametrize("sizes", [(4, 4), (3, 4), (5, 7)])
def test_p_values_on_and_off_the_lattice(sizes):
    """Against every order of the two samples."""
    n, m = sizes
    orders = [np.isin(np.arange(n + m), places) for places in itertools.combinations(range(n + m), n)]
    heights = np.array([np.abs(np.cumsum(np.where(order, m, -n))).max() for order in orders])  # in units of 1/(nm)
    off = np.array([0.3, 0.55, 0.6, 0.75, 0.8, 0.571])
    on = np.arange(n * m + 1) / (n * m)
    expected = [np.mean(heights >= d * n * m - 1e-9) for d in (*off, *on)]
    np.testing.assert_allclose(ks_p_value([*off, *on], n, m), expected, rtol=1e-12)
    beside = np.clip(np.array([np.nextafter(on, 0), np.nextafter(on, 1)]), 0, 1)  # rounding is no step
    np.testing.assert_allclose(ks_p_value(beside, n, m)[:, 1:], [expected[len(off) + 1 :]] * 2, rtol=1e-12)


@pytest.mark.parametrize("form", ["sharp", "printed"])
@pytest.mark.parametrize("count", ["own", "all"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_running_pass_against_matrix_products(form, count, shared):
    heads, length = 3, 20
    weights = random_weights("peaked", jax.random.key(0), heads, length, length)
    vectors = random_vectors("isotropic", jax.random.key(1), 1 if shared else heads, length, 5)
    vectors = vectors[0] if shared else vectors
    mask = jnp.tril(jnp.ones((length, length), bool))
    options = {"where": mask, "count": count}
    rows = 3 * 8 * length * 8  # bytes of three rows
    found = numpy(mean_distances(weights, vectors, form=form, memory=rows, **options))
    counts = list(range(1, length + 1))
    each = numpy(distances(weights, vectors, counts, **options))
    expected = expected_distance(weights, vectors, counts, form=form, **options).value
    expected = np.asarray(expected)
    for k in range(length):
        used = np.asarray(each.unselected[0, :, k]) > 0
        assert np.all(found.rows[:, k] == used.sum())
        if used.any():
            np.testing.assert_allclose(found.measured[:, k], each.sum_of_norms[:, used, k].mean(axis=1), rtol=1e-9)
            np.testing.assert_allclose(found.expected[:, k], expected[:, used, k].mean(axis=1), rtol=1e-9)
        else:
            assert np.all(found.measured[:, k] == 0)
    part = mean_distances(weights, vectors, upto=7, form=form, **options)
    np.testing.assert_allclose(part.measured[:, :7], found.measured[:, :7], rtol=1e-12)
    assert np.all(part.measured[:, 7:] == 0)


def test_single_precision_follows():
    weights = random_weights("peaked", jax.random.key(0), 4, 32, 256)
    vectors = random_vectors("isotropic", jax.random.key(1), 1, 256, 64)[0]
    double = mean_distances(weights, vectors)
    single = mean_distances(weights.astype(jnp.float32), vectors.astype(jnp.float32))
    assert single.measured.dtype == jnp.float32
    np.testing.assert_allclose(single.measured, double.measured, rtol=1e-4)
    np.testing.assert_allclose(single.expected, double.expected, rtol=1e-4)


def model(heads=24, length=160):
    """Heads of different spread: causal rows of their own length."""
    spread = jnp.linspace(1.5, 3.0, heads)[:, None, None]
    logits = spread * jax.random.normal(jax.random.key(2), (heads, length, length), jnp.float64)
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask[None], logits, -jnp.inf), axis=-1)
    vectors = 0.5 + jax.random.normal(jax.random.key(3), (length, 16), jnp.float64)
    return weights, vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True), mask


@pytest.mark.parametrize("form", ["printed", "sharp"])
def test_the_search_against_a_plain_one(form):
    weights, vectors, mask = model()
    found = critical_count(weights, vectors, where=mask, form=form)
    every = mean_distances(weights, vectors, where=mask, form=form)
    measured, expected = np.asarray(every.measured), np.asarray(every.expected)
    first = next(
        (n for n in range(1, 160) if ks_2samp(measured[:, n - 1], expected[:, n - 1], method="exact").pvalue >= 0.01),
        None,
    )
    assert found.count == first
    np.testing.assert_allclose(found.measured, measured[:, : len(found.counts)], rtol=1e-9)
    if form == "printed":
        assert 2 <= found.count < 80
    else:  # random sets carry less weight than the top ones until nearly all tokens are selected
        assert found.count is None or found.count > 120


def test_a_test_that_always_sees_a_difference():
    weights, vectors, mask = model()
    found = critical_count(weights, vectors, where=mask, form="sharp", upto=70)
    assert found.count is None
    assert found.counts[-1] == 70
    assert np.all(found.p_value < 0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: critical_count(np.ones((4, 2, 3)) / 3, np.ones((3, 1))), "weights: expected more heads"),
        (lambda: critical_count(np.ones((2, 3)) / 3, np.ones((3, 1))), "weights: expected shape"),
        (lambda: critical_count(np.ones((8, 2, 1)), np.ones((1, 1))), "weights: expected a row that can leave out"),
        (lambda: critical_count(np.ones((8, 2, 3)) / 3, np.ones((3, 1)), level=1.0), "level: expected"),
        (lambda: mean_distances(np.ones(3) / 3, np.ones((3, 1))), "weights: expected shape"),
        (lambda: mean_distances(np.ones((2, 3)) / 3, np.ones((3, 1)), upto=4), "upto: expected"),
        (lambda: mean_distances(np.ones((2, 3)) / 3, np.ones((3, 1)), form="p"), "form: expected"),
        (lambda: ks_statistic([[1.0, 2.0]], [1.0]), "first, second: expected samples"),
        (lambda: ks_statistic([np.nan], [1.0]), "first, second: expected finite"),
        (lambda: ks_p_value(1.5, 3, 3), "statistic: expected"),
        (lambda: ks_p_value(0.5, 0, 3), "first: expected"),
    ],
)
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
