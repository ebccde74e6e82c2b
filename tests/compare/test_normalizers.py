"""Normalizers in the single-location model: dilution, vanishing gradients, stable learning rates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from compare.normalizers import gradient_against_length, risk_against_length, stability_against_rate

ONE = th.discrete([[1.0]])
BOUND = th.OrderParameters([[2.0]], [[4.0]])
LENGTHS = [4, 64, 1024]
SNRS = [4 * np.log(length) for length in LENGTHS]  # so that the Bayes risk goes down with L
QUIET = {"progress": False}


@pytest.fixture(scope="module")
def risks():
    activations = [th.Softmax(), th.ScalableSoftmax(0.43), th.TopK(power=0.5)]
    return risk_against_length(
        ONE, activations, BOUND, LENGTHS, snrs=SNRS, scales=[0.5, 0.75, 1.0], tokens=2**18, **QUIET
    )


def test_the_bayes_risk_goes_down_where_bounded_softmax_goes_up(risks):
    """Dilution, exactly: at the same signal the gap of softmax with bounded keys grows with L."""
    softmax = risks.sel(activation=th.Softmax().name)
    assert np.all(np.diff(risks.bayes) < 0)
    assert np.all(np.diff(softmax.gap) > 0)
    assert float(softmax.gap[-1]) > 0.1
    for length, snr, risk in zip(LENGTHS, SNRS, softmax.risk.values, strict=True):
        assert risk == pytest.approx(
            float(th.population_risk(th.SingleLocation(length, snr, ONE), th.Softmax(), BOUND)), abs=1e-8
        )


def test_what_selects_stays_near_the_bayes_risk(risks):
    """Sampled risks, so with five standard errors (false alarms below 1e-6 each)."""
    softmax, scalable, top = (risks.isel(activation=i) for i in range(3))
    assert np.all(risks.gap.values > -5 * risks.error.values - 1e-6)  # nothing beats Bayes
    for better in (scalable, top):
        assert float(better.risk[-1] + 5 * better.error[-1]) < float(softmax.risk[-1])


def test_sampled_risks_are_those_of_other_samples(risks):
    """Against NumPy's own draws: within five standard errors of the difference."""
    rng = np.random.default_rng(0)
    for j in (0, 1):
        found = risks.isel(activation=1, length=j)
        m = 2 * float(found.scale)
        tokens = rng.standard_normal((4000, LENGTHS[j]))
        tokens[:, 0] += np.sqrt(SNRS[j])
        logits = 0.43 * np.log(LENGTHS[j]) * m * tokens
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        losses = (1 - weights[:, 0]) ** 2 + (weights[:, 1:] ** 2).sum(1)
        scatter = np.hypot(losses.std() / np.sqrt(4000), float(found.error))
        assert abs(losses.mean() - float(found.risk)) < 5 * scatter


def test_the_gradient_vanishes_like_one_over_length_at_bounded_logits():
    data = gradient_against_length(
        ONE, [th.Softmax()], th.OrderParameters([[0.5]], [[0.25]]), [200, 2000], snrs=1.0, tokens=2**21,
        key=jax.random.key(1), **QUIET,
    )  # fmt: skip
    exact = []
    for j, length in enumerate((200, 2000)):  # one coordinate: the gradient is dE/dm along r = m²
        task = th.SingleLocation(length, 1.0, ONE)
        risk = lambda m, task=task: th.population_risk(task, th.Softmax(), th.OrderParameters(m, m @ m.T))  # noqa: E731
        exact.append(abs(float(jax.grad(risk)(jnp.full((1, 1), 0.5))[0, 0])))
        assert abs(float(data.gradient[0, j]) - exact[j]) < 5 * float(data.error[0, j]) < exact[j] / 2
    assert exact[1] * 2000 == pytest.approx(exact[0] * 200, rel=0.2)


def test_the_gradient_in_directions_outside_the_spikes_counts():
    """Two heads with parts of their own: against differences of the risk in (m, W)."""
    m, w = np.array([[0.8], [-0.5]]), np.array([[0.6, 0.0], [0.2, 0.5]])
    order = th.OrderParameters(m, m @ m.T + w @ w.T)
    prior, task = th.sign_flips([0.2], [1.0]), th.SingleLocation(6, 2.0, th.sign_flips([0.2], [1.0]))
    data = gradient_against_length(prior, [th.Softmax()], order, [6], snrs=2.0, key=jax.random.key(2), **QUIET)

    def risk(heads):
        own = heads[:, 1:]
        return th.population_risk(
            task, th.Softmax(), th.OrderParameters(heads[:, :1], heads[:, :1] @ heads[:, :1].T + own @ own.T)
        )

    exact = float(jnp.linalg.norm(jax.grad(risk)(jnp.asarray(np.concatenate([m, w], axis=1)))))
    assert abs(float(data.gradient[0, 0]) - exact) < 5 * float(data.error[0, 0])
    assert float(data.error[0, 0]) < 0.05 * exact


def test_the_stable_rate_at_temperature_t_is_t_squared_times_that_at_one():
    """The same attention, number by number: keys and temperature scaled by T, rates by T²."""
    task = th.SingleLocation(5, 8.0, ONE)
    options = {"dim": 50, "batch": 1, "time": 30.0, "replicas": 4, "key": jax.random.key(3), **QUIET}
    rates = np.array([1.0, 8.0, 64.0])
    whole = [
        stability_against_rate(task, [th.Softmax(t)], [th.OrderParameters([[2.0 * t]], [[4.0 * t**2]])], t**2 * rates,
                               **{**options, "time": options["time"] * t**2})
        for t in (1.0, 0.25)
    ]  # fmt: skip
    np.testing.assert_allclose(whole[0].loss, whole[1].loss, rtol=1e-4)
    assert whole[0].stable.values.tolist() == [[True, True, False]]
    assert float(whole[1].largest[0]) == float(whole[0].largest[0]) / 16


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match="activations"):
        risk_against_length(ONE, [], BOUND, [4], snrs=1.0)
    with pytest.raises(ValueError, match="activations: expected at least one, all different"):
        risk_against_length(ONE, [th.Softmax(), th.Softmax()], BOUND, [4], snrs=1.0)
    with pytest.raises(ValueError, match="snrs: expected one number or one for each of 1 lengths"):
        risk_against_length(ONE, [th.Softmax()], BOUND, [4], snrs=[1.0, 2.0])
    with pytest.raises(ValueError, match="scales"):
        risk_against_length(ONE, [th.Softmax()], BOUND, [4], snrs=1.0, scales=[2.0])
    with pytest.raises(ValueError, match="rates"):
        stability_against_rate(
            th.SingleLocation(4, 1.0, ONE), [th.Softmax()], [BOUND], [2.0, 1.0], dim=50, batch=1, time=1.0, replicas=2,
            key=jax.random.key(0),
        )  # fmt: skip
