"""The lines of a staircase: when all have split, with runs that never do, and what features that go together share."""

import numpy as np
import pytest

import theory as th
from compare.staircase import all_split, distribution, limit_slopes

COARSE = th.Quadrature(1e-7)


def test_all_have_split_when_the_last_feature_has():
    """Two features, each early in the other's late runs; a feature without a stage (NaN) is not waited for."""
    early, late = np.arange(4.0), np.array([9.0, 8.0, 7.0, 6.0])
    times = np.stack([np.r_[early, late], np.r_[late, early], np.full(8, np.nan)], axis=1)[None]
    np.testing.assert_allclose(all_split(times, 0.5), [7.5])
    times[0, :2, 0] = np.inf
    assert all_split(times, 0.99).tolist() == [np.inf]
    times[0, :, 1] = np.inf
    assert all_split(times, 0.5).tolist() == [np.inf]


def test_a_distribution_of_runs_that_never_split_is_not_known():
    assert np.isnan(distribution(np.full(4, np.inf), np.array([1.0, 2.0]), end=3.0)).all()
    np.testing.assert_allclose(distribution(np.array([1.0, 2.0, np.inf, np.inf]), np.array([1.5]), end=3.0), [2 / 3])


@pytest.mark.slow
def test_features_that_split_together_have_one_slope():
    stages = th.saddle_path(th.SingleLocation(4, 4.0, th.one_hot(2)), th.Softmax(), 2, method=COARSE)
    np.testing.assert_allclose(limit_slopes(stages, 2), [stages[0].slope] * 2)


@pytest.mark.slow
def test_a_later_feature_waits_for_the_e_folds_that_are_left():
    """Var θ = 1 and .6: while feature 1 splits at the rate κ, feature 2 gains κ_2/κ of the e-folds that it needs."""
    stages = th.saddle_path(th.SingleLocation(4, 4.0, th.gaussian([0, 0], [1, 0.6])), th.Softmax(), 4, method=COARSE)
    first, second = stages[:2]
    assert (first.features, second.features) == ((0,), (1,))
    behind = 1 - first.rates[1] / first.rate
    expected = [first.slope, first.slope + behind * second.slope]
    np.testing.assert_allclose(limit_slopes(stages, 2), expected)
