"""The saddles one after the other: each stationary, left along a true unstable direction by all features in it."""

import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from theory.saddle import moving_features, tied_minimum
from theory.staircase import _leaving, saddle_path, staircase_lines

COARSE = th.Quadrature(1e-7)
CORRELATED = th.SingleLocation(4, 4.0, th.gaussian([0, 0], [[1, 0.1], [0.1, 0.6]]))


@pytest.fixture(scope="module")
def correlated():
    return saddle_path(CORRELATED, th.Softmax(), 2, method=COARSE)


@pytest.mark.slow
def test_heads_leave_along_the_unstable_eigenvector(correlated):
    """The leading eigenvector of Cov θ, with parts along both features."""
    first = correlated[0]
    leading = np.linalg.eigh(np.asarray(CORRELATED.prior.covariance()))[1][:, -1]
    leading = leading * np.sign(leading[0])
    np.testing.assert_allclose(first.direction, [leading, -leading], atol=1e-6)
    assert first.features == (0, 1)
    assert first.signs == (1, -1)


@pytest.mark.slow
def test_a_broken_reflection_holds_nothing(correlated):
    """θ → −θ is the only reflection, so that heads split along feature 1 are free to move along feature 2."""
    last = correlated[-1]
    assert last.ending == "stable: nothing grows"
    assert last.point.stationary
    np.testing.assert_allclose(np.abs(last.point.order.m), [[1.3035, 0.3077]] * 2, atol=1e-4)
    assert abs(float(last.point.risk) - 0.647115) < 1e-6


def test_a_point_with_a_gradient_is_never_called_stable():
    """The same case with feature 2 held at 0: a minimum of its own, .648814, where the flow does not rest."""
    free, start = np.array([[True, False]] * 2), jnp.array([[1.3, 0.0], [-1.3, 0.0]])
    held = tied_minimum(CORRELATED, th.Softmax(), start, (0, 1), free, method=COARSE)
    assert abs(float(held.risk) - 0.648814) < 1e-6
    assert not held.stationary
    assert str(held).startswith("No critical point")
    stage = _leaving(held, th.hessian_spectrum(CORRELATED, th.Softmax(), held, method=COARSE))
    assert stage.ending.startswith("not stationary (gradient 5.4e-03)")
    assert stage.features == ()


@pytest.mark.parametrize(
    ("prior", "broken", "moving"),
    [
        (CORRELATED.prior, [False, False], [False, False]),
        (CORRELATED.prior, [True, False], [True, True]),
        (th.gaussian([0, 0], [1, 0.6]), [True, False], [True, False]),
        (th.discrete([[1.0, 1.0], [-1.0, -1.0]]), [False, True], [True, True]),
        (th.gaussian([0, 0], [[1, 1e-5], [1e-5, 1e-10]]), [True, False], [True, True]),  # small, but not rounding
    ],
)
def test_what_the_unbroken_reflections_hold(prior, broken, moving):
    assert moving_features(prior, np.array(broken)).tolist() == moving


@pytest.mark.slow
def test_all_features_of_a_direction_are_named():
    """One spike of two: heads split along (e_1 − e_2)/√2."""
    first, last = saddle_path(th.SingleLocation(4, 4.0, th.one_hot(2)), th.Softmax(), 2, method=COARSE)
    np.testing.assert_allclose(first.direction, np.array([[1, -1], [-1, 1]]) / 2**0.5, atol=1e-6)
    assert first.features == (0, 1)
    assert first.multiplicity == 1
    assert last.ending.startswith("stable")


@pytest.mark.slow
def test_all_features_of_a_multiplet_are_named_and_rank_alike():
    """Of equally fast directions the heads take the first feature's; both have the same rate and place."""
    stages = saddle_path(th.SingleLocation(4, 4.0, th.gaussian([0, 0], [1, 1])), th.Softmax(), 2, method=COARSE)
    assert (stages[0].features, stages[0].multiplicity) == ((0, 1), 2)
    np.testing.assert_allclose(stages[0].direction, [[1, 0], [-1, 0]], atol=1e-9)
    np.testing.assert_allclose(stages[0].rates, stages[0].rate)
    assert stages[-1].ending.startswith("stable")
    assert "together with feature 2" in "\n".join(staircase_lines(stages))
    times = np.ones((1, 3, 2))
    found = th.StagePrediction(stages, (100,), times, np.ones(1), np.ones(1), (), None, None, 0.25, 1.0)
    assert found.order == (0, 1)
    assert found.ranks == (0, 0)


def test_a_small_signal_grows_at_its_small_rate():
    """κ = (2/H)(1/L)(1−1/L)(1−2/L) ν E θ² = 9.4e-8; the risk falls by less than rounding, and that is said."""
    (only,) = saddle_path(th.SingleLocation(4, 1.0, th.sign_flips([0.0], [1e-3])), th.Softmax(), 2)
    np.testing.assert_allclose(only.rate, 1 / 4 * 3 / 4 * 1 / 2 * 1e-6, rtol=0.01)
    assert "no lower point" in only.ending
    assert "stable: nothing" not in only.ending


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_saddle_is_stationary_whatever_the_covariance(seed):
    """Random Cov θ of two features, two heads: gradients vanish, the risk falls, nothing is left that grows."""
    root = np.random.default_rng(seed).standard_normal((2, 2))
    task = th.SingleLocation(4, 4.0, th.gaussian([0, 0], root @ root.T + 0.1 * np.eye(2)))
    stages = saddle_path(task, th.Softmax(), 2)
    assert all(stage.point.stationary for stage in stages)
    assert np.all(np.diff([float(stage.point.risk) for stage in stages]) < 0)
    assert stages[-1].ending.startswith("stable")
