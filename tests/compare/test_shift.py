"""Time shift and amplitude: exact on residuals made of a delay, a bump and noise."""

import numpy as np
import pytest
import synthetic

from compare import agreement, time_shift
from compare.shift import pooled_shift

TIME = np.linspace(0, 10, 41)


def path(at):
    """Two components that rise at different times."""
    return np.stack([np.tanh(at - 4), 2 / (1 + np.exp(-(at - 6)))], axis=-1)


def test_a_delay_is_found_and_leaves_nothing():
    delays = np.array([-0.02, 0.01, 0.03])
    predicted = np.tile(path(TIME), (3, 1, 1))
    residual = np.stack([path(TIME + delay) for delay in delays]) - predicted
    found = time_shift(TIME, predicted, residual, TIME > 0)
    np.testing.assert_allclose(found.each, delays, rtol=0.02)
    assert found.shift == pytest.approx(delays.mean(), rel=0.02)
    assert found.error == pytest.approx(delays.std(ddof=1) / 3**0.5, rel=0.02)
    assert found.amplitude < 0.03 * found.scatter
    assert np.max(np.abs(found.remainder)) < 0.03 * np.max(np.abs(residual.mean(0)))


def test_an_amplitude_is_left_alone():
    """What is orthogonal to the rate is no shift."""
    predicted = path(TIME)[None]
    rate = np.gradient(path(TIME), TIME, axis=0)
    bump = np.stack([rate[:, 1], -rate[:, 0]], axis=-1)[None]
    found = time_shift(TIME, predicted, bump, TIME > 0)
    assert abs(found.shift) < 0.01
    assert found.amplitude == pytest.approx(found.scatter, rel=1e-3)
    np.testing.assert_allclose(found.remainder, bump[0], atol=0.01)
    assert np.isnan(found.error)


def test_unused_records_do_not_count():
    predicted = np.tile(path(TIME), (2, 1, 1))
    residual = path(TIME + 0.01)[None] - predicted
    residual[:, TIME > 5] = 100.0
    assert time_shift(TIME, predicted, residual, TIME <= 5).shift == pytest.approx(0.01, rel=0.02)


def test_error_is_the_spread_over_ensembles():
    """300 ensembles of 10 noisy replicas: the spread of δ is the error that is stated, to 15 % (4 standard errors)."""
    rng = np.random.default_rng(0)
    predicted = np.tile(path(TIME), (10, 1, 1))
    found = [time_shift(TIME, predicted, rng.normal(size=predicted.shape), TIME > 0) for _ in range(300)]
    spread, stated = np.std([f.shift for f in found]), np.mean([f.error for f in found])
    assert stated == pytest.approx(spread, rel=0.16)


@pytest.mark.filterwarnings("error")
def test_a_theory_at_rest_has_no_shift():
    still = np.ones((3, 41, 2))
    found = time_shift(TIME, still, np.full(still.shape, 0.1), TIME > 0)
    assert np.isnan(found.shift)
    assert np.all(np.isnan(found.each))
    np.testing.assert_allclose(found.remainder, 0.1)
    assert all(np.isnan(pooled_shift([(found, found.error)])))
    time_shift(TIME[:3], still[:, :3], still[:, :3], TIME[:3] > 0)


def test_agreement_carries_and_prints_shifts():
    theory = synthetic.ideal(0)
    m = np.asarray(theory.order.m)
    ahead = 0.05 * np.gradient(m, np.asarray(theory.time), axis=1)
    ahead[:, 0] = 0
    verdict = agreement(theory, synthetic.simulated(theory, 0, scale=0.1, shift=ahead))
    assert verdict.shift("m").shift == pytest.approx(0.05, abs=0.02)
    assert abs(verdict.time_shift - 0.05) < 0.02
    assert verdict.shift("m").amplitude < verdict.shift("m").scatter
    assert "simulation ahead in τ" in str(verdict)
    data = verdict.to_xarray()
    np.testing.assert_array_equal(data["m_shift"], verdict.shift("m").each)
    assert data["m_remainder"].dims == ("time", "head", "feature")
    assert data.attrs["time_shift"] == verdict.time_shift
