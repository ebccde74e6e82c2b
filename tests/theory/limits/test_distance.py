"""Distances: against differences taken one by one; no bound fails in 10^5 trials of each kind; printed ones do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.theory.limits.trials import (
    ROWS,
    SETS,
    SHAPES,
    VECTORS,
    WEIGHTS,
    counts_of,
    direct_distances,
    numpy,
    random_vectors,
    random_weights,
    stated_rounding,
    top,
    trials,
)
from theory.limits import distance_bound, distances, norm_interval

ROUNDING = 1e-11  # relative, of sums of some tens of numbers in float64


@functools.cache
def measured(shape, kind, weighting):
    """Weights, vectors, counts, and per count the set and d̃ by differences."""
    weights, vectors = trials(shape, kind, weighting)
    found = []
    for number in counts_of(shape[0]):
        chosen = top(weights, number)
        norms = direct_distances(weights, vectors, chosen)
        found.append(np.sum(np.where(chosen, 0, norms), axis=-1))
    return weights, vectors, counts_of(shape[0]), np.stack(found, axis=-1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("weighting", WEIGHTS)
def test_bounds_hold_in_every_trial(shape, kind, weighting):
    weights, vectors, counts, direct = measured(shape, kind, weighting)
    assert weights.shape[0] * weights.shape[1] >= 100_000
    size = float(jnp.max(jnp.linalg.norm(vectors, axis=-1)))
    slack = ROUNDING * size * shape[0]
    bound = np.asarray(distance_bound(weights, vectors, counts))

    assert np.all(direct <= bound + slack)
    low, high = norm_interval(weights, vectors, counts)
    assert np.all(direct >= low - slack)
    assert np.all(direct <= high + slack)

    found = jax.tree.map(np.asarray, distances(weights, vectors, counts))
    scale = (found.weight + np.max(weights, axis=-1, keepdims=True)) * size
    stated = stated_rounding(float, np.array(counts), shape[1], scale, 0.0) * found.unselected
    assert np.all(np.abs(found.sum_of_norms - direct) <= stated)
    assert np.all(found.norm_of_sum <= direct + slack)
    if kind == "equal":  # the bound is attained
        np.testing.assert_allclose(bound, direct, rtol=1e-10, atol=slack)
    measured.cache_clear()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("weighting", ["peaked", "sparse"])
def test_bounds_of_any_set_hold_in_every_trial(shape, kind, weighting):
    weights, vectors = trials(shape, kind, weighting, seed=1)
    chosen = np.array(jax.random.bernoulli(jax.random.key(2), 0.4, weights.shape))
    chosen[..., 0], chosen[..., -1] = True, False
    direct = np.sum(np.where(chosen, 0, direct_distances(weights, vectors, chosen)), axis=-1)
    slack = ROUNDING * shape[0] * float(jnp.max(jnp.linalg.norm(vectors, axis=-1)))
    assert np.all(direct <= distance_bound(weights, vectors, selected=chosen) + slack)
    low, high = norm_interval(weights, vectors, selected=chosen)
    assert np.all((low - slack <= direct) & (direct <= high + slack))


@pytest.mark.slow
def test_top_sets_and_given_sets_agree():
    weights, vectors = trials((16, 4), "isotropic", "peaked", sets=3, rows=5)
    chosen = top(weights, 4)
    for function in (distances, distance_bound, norm_interval):
        by_count, by_set = function(weights, vectors, 4), function(weights, vectors, selected=chosen)
        for a, b in zip(jax.tree.leaves(by_count), jax.tree.leaves(by_set), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_the_bound_of_the_top_set_has_the_closed_form():
    weights, vectors = trials((16, 4), "isotropic", "peaked", sets=3, rows=5)
    for number in (1, 4, 15):
        chosen = top(weights, number)
        selected = np.sum(np.where(chosen, weights, 0), axis=-1)
        pairs = np.linalg.norm(vectors[:, :, None] - vectors[:, None], axis=-1)
        reach = np.max(np.where(chosen[..., None] & ~chosen[:, :, None], pairs[:, None], 0), axis=(-2, -1))
        norms = np.max(np.where(chosen, np.linalg.norm(vectors, axis=-1)[:, None], 0), axis=-1)
        bracket = selected * (16 - number) - (1 - selected)
        expected = (1 - selected) * reach + norms * bracket
        np.testing.assert_allclose(distance_bound(weights, vectors, number), expected, rtol=1e-10)
        printed = (1 - selected) * reach + norms * np.sqrt(bracket)
        np.testing.assert_allclose(distance_bound(weights, vectors, number, form="printed"), printed, rtol=1e-10)


def test_the_printed_bound_fails():
    weights, x = jnp.full(16, 1 / 16), jnp.ones((16, 4))
    assert float(distances(weights, x, 4).sum_of_norms) == pytest.approx(4.5)  # (L−N)(A − 1/L)‖x‖
    assert float(distance_bound(weights, x, 4, form="printed")) == pytest.approx(3.0)
    # and in a share of random trials, not only there
    weights, vectors, counts, direct = measured((40, 8), "clustered", "flat")
    failed = np.mean(direct > distance_bound(weights, vectors, counts, form="printed") + 1e-9)
    assert 0.2 < failed < 0.9


def test_more_tokens_in_proportion_do_not_by_themselves_make_distances_vanish():
    """At N = L/2 the mean distance of a token left out stays half of ‖x‖ as L grows, where all x share a mean."""
    for length in (64, 256, 1024):
        x = 1.0 + 0.1 * jax.random.normal(jax.random.key(0), (length, 16), jnp.float64)
        found = distances(jnp.full(length, 1 / length), x, length // 2)
        assert 0.45 < float(found.per_token) / 4.0 < 0.55
        assert float(found.per_token) == pytest.approx(float(found.context_norm), rel=0.05)


def test_one_token_and_all_tokens():
    weights, vectors = trials((16, 4), "isotropic", "peaked", sets=2, rows=7)
    found = numpy(distances(weights, vectors, [1, 16]))
    assert np.all(found.sum_of_norms[..., 1] == 0)
    assert np.all(found.norm_of_sum[..., 1] == 0)
    assert np.all(found.unselected == np.array([15, 0]))
    # N = 1 with nearly all the weight: single terms ‖α_1 x_1‖
    sharp = jax.nn.softmax(40.0 * jnp.eye(16)[0])
    one = distances(sharp, vectors[0], 1)
    assert float(one.sum_of_norms) == pytest.approx(15 * float(jnp.linalg.norm(vectors[0, 0])), rel=1e-12)


rows = st.integers(1, 12).flatmap(
    lambda length: st.tuples(
        st.lists(st.floats(0, 1), min_size=length, max_size=length),
        st.lists(st.floats(-1e3, 1e3), min_size=2 * length, max_size=2 * length),
        st.integers(1, length),
    )
)


@given(rows)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_bounds_hold_for_any_non_negative_weights(row):
    """Whatever they sum to; padded to one shape so that one piece of code serves all."""
    weights, vectors = np.zeros(12), np.zeros((12, 2))
    length = len(row[0])
    weights[:length], vectors[:length] = row[0], np.reshape(row[1], (length, 2))
    mask = np.arange(12) < length
    chosen = top(np.where(mask, weights, -1)[None, None], row[2])
    direct = direct_distances(weights[None, None], vectors[None], chosen)[0, 0]
    total = np.sum(direct[mask & ~chosen[0, 0]])
    slack = 1e-9 * (1 + np.max(np.abs(vectors)))
    assert total <= float(distance_bound(weights, vectors, row[2], where=mask)) + slack
    low, high = norm_interval(weights, vectors, row[2], where=mask)
    assert float(low) - slack <= total <= float(high) + slack
    # rounding below 4 √ε S for each token, as d = 2 (see `distances`)
    found = float(distances(weights, vectors, row[2], where=mask).sum_of_norms)
    assert abs(found - total) <= 6e-8 * 12 * 13 * (1e-12 + np.max(np.linalg.norm(vectors, axis=-1)) * np.max(weights))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("weighting", WEIGHTS)
def test_rounding_stays_within_what_is_stated(dtype, kind, weighting):
    """Single distances through r, against differences in float64."""
    from theory.limits._rows import Row, ranked
    from theory.limits._vectors import contexts, with_squares

    weights, vectors = trials((64, 48), kind, weighting, sets=20, rows=10, seed=5)
    weights, vectors = weights.astype(dtype), vectors.astype(dtype)
    exact_w, exact_x = np.asarray(weights, float), np.asarray(vectors, float)

    def one(w, x, chosen):
        rank, order = ranked(w, jnp.ones(64, bool))
        return contexts(Row(w, jnp.ones(64, bool), chosen[None], rank, order), with_squares(x)).distances[0]

    for number in (1, 16, 60):
        chosen = top(exact_w, number)
        found = jax.jit(jax.vmap(jax.vmap(one, in_axes=(0, None, 0))))(weights, vectors, jnp.asarray(chosen))
        assert found.dtype == dtype
        delta = direct_distances(exact_w, exact_x, chosen)
        norms = exact_w * np.linalg.norm(exact_x, axis=-1)[:, None]
        scale = np.sum(np.where(chosen, norms, 0), axis=-1, keepdims=True) + norms
        assert np.all(np.abs(np.asarray(found, float) - delta) <= stated_rounding(dtype, number, 48, scale, delta))


def test_rounding_of_long_rows_of_equal_vectors():
    """The sum s of N equal terms errs by more than a few units: the error stated grows with N."""
    length, x = 4096, np.array([[0.7, -1.3, 0.4]], np.float32)
    vectors, weights = np.tile(x, (length, 1)), np.full(length, 1 / length, np.float32)
    found = float(distances(weights, vectors, selected=np.arange(length) < length - 1).sum_of_norms)
    size = np.linalg.norm(x.astype(float))
    delta = size * (length - 2) / length
    assert abs(found - delta) <= stated_rounding(np.float32, length - 1, 3, size, delta)


def test_shapes_leading_axes_and_shared_vectors():
    weights = random_weights("peaked", jax.random.key(0), 2, 3, 7, 10)
    shared = random_vectors("isotropic", jax.random.key(1), 1, 10, 4)[0]
    own = jnp.broadcast_to(shared, (2, 3, 10, 4))
    together = distances(weights, shared, [1, 3])
    assert together.sum_of_norms.shape == (2, 3, 7, 2)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(distances(weights, own, [1, 3])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    for a, b in zip(
        jax.tree.leaves(together), jax.tree.leaves(distances(weights, shared, [1, 3], memory=1)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12)  # row by row
    single = distances(weights[1, 2, 3], shared, 3)
    assert single.sum_of_norms.shape == ()
    np.testing.assert_allclose(single.sum_of_norms, together.sum_of_norms[1, 2, 3, 1], rtol=1e-12)
    np.testing.assert_allclose(
        jax.jit(lambda w: distances(w, shared, 3).per_token)(weights), distances(weights, shared, 3).per_token
    )


def test_rows_of_their_own_length_are_the_shorter_rows():
    weights = random_weights("peaked", jax.random.key(0), 12, 12)
    x = random_vectors("isotropic", jax.random.key(1), 1, 12, 4)[0]
    mask = jnp.tril(jnp.ones((12, 12), bool))
    own = distances(weights, x, 3, where=mask)
    bound = distance_bound(weights, x, 3, where=mask)
    everything = distances(weights, x, 3, where=mask, count="all")
    for n in (1, 3, 4, 12):
        row = distances(weights[n - 1, :n], x[:n], min(3, n))
        np.testing.assert_allclose(own.sum_of_norms[n - 1], row.sum_of_norms, rtol=1e-10, atol=1e-12)
        assert int(own.unselected[n - 1]) == max(n - 3, 0)
        np.testing.assert_allclose(
            bound[n - 1], distance_bound(weights[n - 1, :n], x[:n], min(3, n)), rtol=1e-10, atol=1e-12
        )
        # tokens that are masked lie at ‖s − 0‖
        masked = 12 - max(n, 3)
        np.testing.assert_allclose(
            everything.sum_of_norms[n - 1], row.sum_of_norms + masked * row.context_norm, rtol=1e-10
        )
        assert int(everything.unselected[n - 1]) == 9


def test_new_counts_recompile_nothing():
    weights, vectors = trials((16, 4), "isotropic", "peaked", sets=2, rows=7)
    distances(weights, vectors, [1, 2]), distance_bound(weights, vectors, [1, 2])
    compiled = []
    listen = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    distances(weights, vectors, [3, 12]), distance_bound(weights, vectors, [3, 12])
    assert not compiled
    jax.jit(lambda: jnp.sin(jnp.arange(17.0)))()
    assert compiled  # the listener does hear


assert SETS * ROWS >= 100_000
