"""The verdict on the real pair: agreement, a halved drift term found, the bias falling with D."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compare import agreement
from sim import MultiHeadAttention, train
from theory import OrderParameters, SingleLocation, Softmax, Trajectory, gradient_flow, population_risk, sign_flips

TASK = SingleLocation(length=5, snr=1.0, prior=sign_flips(mean=[2.0, 0.0], amplitude=[0.0, 1.5]))
TIME, RATE, BATCH = 6.0, 2.0, 20


def simulate(dim, replicas, seed=0, loss="finite"):
    start, data = (jax.random.fold_in(jax.random.key(seed), purpose) for purpose in (1, 2))
    layer = MultiHeadAttention.initial(start, heads=2, features=2, dim=dim, replicas=replicas)
    run = train(TASK, layer, learning_rate=RATE, time=TIME, batch=BATCH, key=data, record=7, loss=loss, progress=False)
    return layer.order(), run


@jax.jit
def own_flow(order, times, factor):
    """Gradient flow by Adams and Bashforth's second rule, written out, with a factor on the terms in ∂E/∂m."""
    substeps = 10
    value_and_grad = jax.value_and_grad(lambda m, r: population_risk(TASK, Softmax(), OrderParameters(m, r)), (0, 1))

    def step(carry, h):
        m, r, before = carry
        risk, (gm, gr) = value_and_grad(m, r)
        half = factor * gm @ m.T + 2.0 * gr @ r
        slope = (-factor * gm - 2.0 * gr @ m, -half - half.T)
        old = jax.tree.map(lambda now, was: jnp.where(jnp.isnan(was), now, was), slope, before)
        m, r = (x + h * (1.5 * now - 0.5 * was) for x, now, was in zip((m, r), slope, old, strict=True))
        return (m, r, slope), (carry[0], carry[1], risk)

    def single(m, r):
        steps = jnp.repeat(jnp.diff(times, append=times[-1:] + 1.0) / substeps, substeps)
        start = (m, r, (jnp.full(m.shape, jnp.nan), jnp.full(r.shape, jnp.nan)))
        return jax.tree.map(lambda x: x[::substeps], jax.lax.scan(step, start, steps)[1])

    m, r, risk = jax.vmap(single)(order.m, order.r)
    ended = jnp.zeros(len(m), dtype=int)
    return Trajectory(times, OrderParameters(m, r), Softmax(), risk, None, None, ended, TASK, {"step_size": 0.0})


@pytest.fixture(scope="module")
def small():
    return simulate(dim=300, replicas=8)


def test_theory_and_simulation_agree(small):
    order, run = small
    theory = gradient_flow(TASK, Softmax(), order, run.time, step_size=RATE / BATCH, progress=False)
    verdict = agreement(theory, run)
    assert verdict.agrees is True, str(verdict)
    assert verdict.replicas == 8
    assert verdict.until >= 4.0  # most of the run is judged


def test_a_halved_drift_term_flips_the_verdict(small):
    order, run = small
    right, wrong = (own_flow(order, run.time, factor) for factor in (1.0, 0.5))
    assert agreement(right, run).agrees is True
    verdict = agreement(wrong, run)
    assert verdict.agrees is False
    assert verdict.reasons[0].startswith("m[")


@pytest.mark.slow
def test_the_bias_falls_when_the_dimension_doubles():
    """Mean residuals of many replicas at D and 2D: their ratio is 2 within the errors, and they are there."""
    means, errors = [], []
    for dim in (100, 200):
        order, run = simulate(dim, replicas=64)
        theory = gradient_flow(TASK, Softmax(), order, run.time, step_size=RATE / BATCH, progress=False)
        residual = agreement(theory, run)["m"]
        means.append(residual.mean[-1, :, 0].mean())
        errors.append(residual.error[-1, 0, 0])
    assert abs(means[0]) > 5 * errors[0]
    assert abs(means[1]) < abs(means[0])
    assert abs(means[0] - 2 * means[1]) < 4 * np.hypot(errors[0], 2 * errors[1])
