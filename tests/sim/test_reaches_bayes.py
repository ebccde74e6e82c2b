"""SGD of B-softmax, one head per support point, comes to the Bayes risk."""

import itertools

import jax
import numpy as np
import pytest

import theory as th
from sim import MultiHeadAttention, train

TASK = th.SingleLocation(5, 8.0, th.sign_flips([0.0], [1.0]))


def gap(*, dim, replicas, loss):
    """Population risk less Bayes risk at τ = 60, η/B = 0.2: mean over replicas and its standard error."""
    layer = MultiHeadAttention.initial(
        jax.random.fold_in(jax.random.key(0), dim), heads=2, features=1, dim=dim, variance=0.1,
        activation=th.BayesSoftmax([0.0, 0.0], trained=True), replicas=replicas,
    )  # fmt: skip
    key = jax.random.fold_in(jax.random.key(1), dim)
    run = train(task=TASK, layer=layer, learning_rate=2.0, time=60.0, batch=10, key=key, record=[60.0], loss=loss)
    found = np.asarray(run.risk)[:, -1] - float(th.bayes_risk(TASK))
    return found.mean(), found.std(ddof=1) / np.sqrt(replicas)


@pytest.mark.slow
def test_limit_loss_comes_within_a_hundredth_at_large_dim():
    # what is left, .0056 at any D, is the finite step and time: of η/B = 0.2 and τ = 60
    mean, error = gap(dim=2000, replicas=2, loss="limit")
    print(f"D = 2000, limit loss: {mean:.5f} ± {error:.5f}")
    assert 0 < mean < 1e-2


@pytest.mark.slow
def test_finite_loss_comes_closer_as_dim_grows():
    """Each gap is below the one before by 3 standard errors: chance of passing without a trend 2e-6, keys fixed."""
    gaps = [gap(dim=dim, replicas=16, loss="finite") for dim in (25, 100, 400)]
    print([f"{mean:.5f} ± {error:.5f}" for mean, error in gaps])
    for (before, error), (after, other) in itertools.pairwise(gaps):
        assert before - after > 3 * np.hypot(error, other)
