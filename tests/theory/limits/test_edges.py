"""Rows at the edge: one token, all selected, no weight, masked, identical vectors; what is refused; never NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from theory.limits import (
    distance_bound,
    distances,
    effective_support,
    entropy,
    expected_distance,
    jacobian_bound,
    mean_distances,
    norm_interval,
    second_moment,
    separability,
    separability_bounds,
    softmax_jacobian_norm,
    softmax_weight_bounds,
)

ALL = (
    distances,
    distance_bound,
    lambda *args, **options: distance_bound(*args, form="printed", **options),
    norm_interval,
    expected_distance,
    lambda *args, **options: expected_distance(*args, form="printed", **options),
    second_moment,
)
L = 6
VECTORS = np.random.default_rng(0).normal(size=(L, 3))
ROWS = {
    "flat": np.full(L, 1 / L),
    "one": np.eye(L)[2],
    "none": np.zeros(L),
    "two": np.array([0.5, 0.5, 0, 0, 0, 0]),
    "tiny": np.array([1 - 1e-30, 1e-30, 0, 0, 0, 0]),
}


def finite(tree):
    return all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("vectors", [VECTORS, np.ones((L, 3)), np.zeros((L, 3))], ids=["any", "equal", "zero"])
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
def test_nothing_is_nan(vectors, dtype):
    weights, x = np.stack(list(ROWS.values())).astype(dtype), vectors.astype(dtype)
    counts = [1, 2, L - 1, L]
    mask = np.tril(np.ones((len(weights), L), bool), -1)  # the first row has no token
    for where in (None, mask):
        for count in ("own", "all"):
            options = {"where": where, "count": count}
            for function in ALL:
                found = function(weights, x, counts, **options)
                assert finite(found)
                assert all(leaf.dtype in (dtype, np.int32) for leaf in jax.tree.leaves(found))
            apart = separability(weights, x, counts, **options)
            assert not np.any(np.isnan(apart.radius))
            assert finite((apart.fraction, apart.number))
            assert finite(mean_distances(weights[None], x, **options))
        for form in ("sharp", "mcdiarmid", "limit", "printed"):
            for radius in (0.0, 0.1, 2.0):
                options = {"dim": 3, "separation": 0.1, "form": form, "where": where}
                low, high = separability_bounds(weights, radius, counts, **options)
                assert not np.any(np.isnan(low))
                assert finite(high)
        assert finite((entropy(weights, where=where), effective_support(weights, where=where)))
        assert finite((jacobian_bound(weights, where=where), softmax_jacobian_norm(weights, where=where)))


def test_one_token():
    weights, x = np.ones(1), np.ones((1, 2))
    found = distances(weights, x, 1)
    assert float(found.sum_of_norms) == float(found.norm_of_sum) == float(found.per_token) == 0
    assert float(found.context_norm) == pytest.approx(np.sqrt(2))
    for function in ALL[1:]:
        assert all(float(np.max(leaf)) == 0 for leaf in jax.tree.leaves(function(weights, x, 1)))
    assert float(entropy(weights)) == 0
    assert float(effective_support(weights)) == 1
    assert float(softmax_jacobian_norm(weights)) == 0


def test_masked_tokens_may_hold_anything():
    weights, mask = np.where(np.arange(L) < 4, 0.25, np.nan), np.arange(L) < 4
    found = distances(weights, VECTORS, 2, where=mask)
    row = distances(weights[:4], VECTORS[:4], 2)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(row), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_equal_weights_are_ranked_by_position():
    found = distances(np.full(4, 0.25), np.diag([1.0, 2.0, 3.0, 4.0]), 2)
    assert float(found.context_norm) == pytest.approx(0.25 * np.sqrt(5))


def test_half_precision_and_whole_numbers_are_taken_as_single():
    found = distances(jnp.full(L, 1 / L, jnp.bfloat16), jnp.ones((L, 2), jnp.int32), 2)
    assert found.sum_of_norms.dtype == jnp.float32


def test_whole_numbers_keep_their_digits_beside_double_precision():
    for one in (1, 1.0):
        assert float(distances([one, 0, 0], [[2**24 + 1], [0], [0]], 1).context_norm) == 2**24 + 1
        assert float(distances([2**24 + 1, 0, 0], [[one], [0], [0]], 1).context_norm) == 2**24 + 1


W = np.full((2, L), 1 / L)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: distances(W, VECTORS, 0), r"counts: expected numbers from 1 to 6, the tokens there are, got \[0\]"),
        (lambda: distances(W, VECTORS, [1, 7]), "counts: expected numbers from 1 to 6"),
        (lambda: distances(W, VECTORS, 1.5), "counts: expected a whole number"),
        (lambda: distances(W, VECTORS, []), "counts: expected a whole number"),
        (lambda: distances(W, VECTORS), "counts, selected: expected one of them, got neither"),
        (lambda: distances(W, VECTORS, 1, selected=W > 0), "counts, selected: expected one of them, got both"),
        (lambda: distances(W, VECTORS, selected=W), "selected: expected True and False"),
        (lambda: distances(W, VECTORS, selected=W > 1), "selected: expected at least one token"),
        (lambda: distances(W, VECTORS, selected=np.ones(5, bool)), "selected: expected a shape"),
        (lambda: distances(W, VECTORS[:5], 1), "vectors: expected one per weight"),
        (lambda: distances(W, VECTORS[0], 1), "vectors: expected shape"),
        (lambda: distances(W, VECTORS[None], 1), "vectors: expected shape"),
        (lambda: distances(W * np.nan, VECTORS, 1), "weights: expected finite"),
        (lambda: distances(W, VECTORS * np.inf, 1), "vectors: expected finite"),
        (lambda: distances(W, VECTORS, 1, where=W), "where: expected True and False"),
        (lambda: distances(W, VECTORS, 1, where=np.ones((3, L), bool)), "where: expected a shape"),
        (lambda: distances(W, VECTORS, 1, count="mine"), "count: expected 'own' or 'all'"),
        (lambda: distances(W, VECTORS, 1, memory=0), "memory: expected"),
        (lambda: distances(W + 1j, VECTORS, 1), "weights: expected real numbers"),
        (lambda: distances(np.zeros((0, L)), VECTORS, 1), "weights: expected at least"),
        (lambda: distance_bound(W, VECTORS, 1, form="tight"), "form: expected"),
        (lambda: expected_distance(W, VECTORS, 1, form="tight"), "form: expected"),
    ],
)
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_counts_that_are_not_known_yet_are_checked_when_run():
    run = jax.jit(lambda n: distances(W, VECTORS, n).sum_of_norms)
    np.testing.assert_allclose(run(jnp.array([2])), distances(W, VECTORS, [2]).sum_of_norms)
    with pytest.raises(Exception, match="counts: expected 1 to L"):
        jax.block_until_ready(run(jnp.array([0])))


def test_a_masked_token_far_away_costs_no_digits():
    weights, where = np.array([0.5, 0.5, 0], np.float32), np.array([True, True, False])
    vectors = np.array([[1, 0], [-1, 0], [1e6, 1e6]], np.float32)
    found = distance_bound(weights, vectors, 1, where=where)
    assert float(found) == float(distance_bound(weights[:2], vectors[:2], 1)) == 1.0
    assert float(distances(weights, vectors, 1, where=where).sum_of_norms) <= float(found)


def test_a_row_of_one_token_has_weight_one_however_wide_the_logits():
    low, high = softmax_weight_bounds([1, 2], 1000.0)
    assert low.tolist() == [1.0, 0.0]
    assert high.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "bound",
    [
        lambda w: distance_bound(w, np.eye(2), 1),
        lambda w: norm_interval(w, np.eye(2), 1),
        jacobian_bound,
        softmax_jacobian_norm,
    ],
)
def test_bounds_refuse_negative_weights(bound):
    with pytest.raises(ValueError, match=r"weights: expected no negative entry, got -1\.0"):
        bound(np.array([2.0, -1.0]))


def test_a_radius_of_another_shape_is_named():
    weights = np.full((2, 4), 0.25)
    with pytest.raises(ValueError, match=r"radius: expected a shape that broadcasts to \(2,\)"):
        separability(weights, np.eye(4), [1, 2], radius=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=r"radius: expected a shape that broadcasts to \(2, 2\)"):
        separability_bounds(weights, [0.1, 0.2, 0.3], [1, 2], dim=4)
