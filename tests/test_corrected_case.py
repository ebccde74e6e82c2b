"""The case of docs/model.md §4.4, with a large corrector, by three computations that share no integrals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from sim import MultiHeadAttention, train

pytestmark = pytest.mark.slow

TASK = th.SingleLocation(length=5, snr=4.0, prior=th.sign_flips([1.0, 0.0], [0.0, 1.0]))
EXPECTED = {0.0: 1.1278, 8.0: 2.2587}  # r_11 at τ = 6, by step size η/B


@pytest.mark.parametrize("step_size", EXPECTED)
def test_flow(step_size):
    start = th.OrderParameters(jnp.zeros((2, 2)), 0.09 * jnp.eye(2))
    options = {"step_size": step_size, "corrector_points": 2**14, "progress": False}
    r = th.gradient_flow(TASK, th.Softmax(), start, [6.0], **options).order.r[0]
    assert float(r[0, 0]) == pytest.approx(EXPECTED[step_size], abs=2e-4)


def sampled_drift(m, r, step_size, n, rng):
    """The first form of the equations of docs/model.md §4.1, in NumPy: draws of u and χ, g written out."""
    theta = np.stack([np.ones(n), rng.choice([-1.0, 1.0], n)], 1)
    u = rng.standard_normal((n, 5, 2))
    u[:, 0] += 2 * theta  # √ν = 2
    values, vectors = np.linalg.eigh(r - m @ m.T)
    chi = u @ m.T + rng.standard_normal((n, 5, 2)) @ (vectors * np.sqrt(values.clip(0))).T
    sigma = np.exp(chi - chi.max(1, keepdims=True))
    sigma /= sigma.sum(1, keepdims=True)
    slope = 2 * sigma.mean(2, keepdims=True)  # ∂ℓ/∂a
    slope[:, 0] -= 2
    g = sigma * (slope - (sigma * slope).sum(1, keepdims=True)) / 2
    turn = np.einsum("nlh,nlk->hk", g, chi) / n
    return -np.einsum("nlh,nlf->hf", g, u) / n, -turn - turn.T + step_size * np.einsum("nlh,nlk->hk", g, g) / n


@pytest.mark.parametrize("step_size", EXPECTED)
def test_sampled_flow(step_size):
    rng, m, r, h = np.random.default_rng(0), np.zeros((2, 2)), 0.09 * np.eye(2), 0.1
    for _ in range(60):
        dm, dr = sampled_drift(m, r, step_size, 200_000, rng)
        dm2, dr2 = sampled_drift(m + h * dm, r + h * dr, step_size, 200_000, rng)
        m, r = m + h / 2 * (dm + dm2), r + h / 2 * (dr + dr2)
    assert np.diag(r) == pytest.approx(EXPECTED[step_size], abs=2e-3)


SEEN = [(800, "limit", 2.2668), (800, "finite", 2.3021), (4000, "limit", 2.2597), (4000, "finite", 2.2663)]


# beside the residual of order 1/D, 4 standard errors over 200 replicas
@pytest.mark.parametrize(("dim", "loss", "seen"), SEEN)
def test_sgd(dim, loss, seen):
    replicas = 200
    keys = jnp.zeros((replicas, 2, dim), jnp.float32).at[:, [0, 1], [2, 3]].set(0.3 * dim**0.5)  # m = 0, r = .09 I
    layer = MultiHeadAttention(keys, features=2)
    options = {"learning_rate": 8.0, "time": 6.0, "batch": 1, "key": jax.random.key(0), "record": [6.0], "loss": loss}
    r = train(TASK, layer, **options, evaluation=2, progress=False).order.r[:, 0]
    each = np.asarray(jnp.trace(r, axis1=-2, axis2=-1)) / 2
    error = each.std(ddof=1) / replicas**0.5
    print(f"D = {dim}, {loss}: r_11 = {each.mean():.4f} ± {error:.4f}")
    assert abs(each.mean() - seen) < 4 * error
    if loss == "limit":
        assert abs(each.mean() - EXPECTED[8.0]) < 4 * error + 4 / dim
