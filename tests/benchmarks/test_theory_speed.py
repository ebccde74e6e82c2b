"""The exact engine against sampling with autodiff, and the reference trajectory. Ratios, taken in one run."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th

pytestmark = pytest.mark.benchmark

TASK = th.SingleLocation(length=10, snr=1.0, prior=th.sign_flips([2.0, 0.0, 0.0], [0.0, 2.5, 1.5]))
SOFTMAX = th.Softmax()


def reference_start():
    keys = jax.random.normal(jax.random.PRNGKey(0), (4, 1000), jnp.float64)
    return th.OrderParameters(keys[:, :3] / np.sqrt(1000), keys @ keys.T / 1000)


def specialized_state():
    m = np.array([[2.2, 2.3, 0.1], [2.2, -2.4, 0.1], [2.1, 0.3, 1.4], [2.0, 0.2, -1.6]])
    return th.OrderParameters(m, m @ m.T + 0.3 * np.eye(4))


def sampled_losses(m, w, key, samples):
    """What one would write first: draw tokens' coordinates, softmax, loss; differentiable in m and w."""
    keys = jax.random.split(key, 3)
    theta = TASK.prior.means[jax.random.randint(keys[0], (samples,), 0, 4)]
    u = jax.random.normal(keys[1], (samples, 10, 3), jnp.float64).at[:, 0].add(theta)
    v = jax.random.normal(keys[2], (samples, 10, 4), jnp.float64)
    attention = jax.nn.softmax(u @ m.T + v @ w.T, axis=1).mean(-1)
    return jnp.sum((jnp.zeros((1, 10)).at[0, 0].set(1.0) - attention) ** 2, axis=-1)


def median_seconds(run, rounds=15):
    jax.block_until_ready(run())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.parametrize("state", ["start", "specialized"])
def test_risk_and_gradient_against_sampling_with_autodiff(state, benchmark):
    order = reference_start() if state == "start" else specialized_state()
    best = float(th.population_risk(TASK, SOFTMAX, order, th.Quadrature(1e-12)))

    def exact(tolerance):
        method = th.Quadrature(tolerance).fitted(TASK, SOFTMAX, order)
        run = jax.jit(jax.value_and_grad(lambda o: th.population_risk(TASK, SOFTMAX, o, method)))
        value, _ = run(order)
        return lambda: jax.block_until_ready(run(order)), abs(float(value) - best), method

    run, error, method = exact(1e-6)
    benchmark.pedantic(run, rounds=15, warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    loose_run, loose_error, _ = exact(1e-4)
    loose_seconds = median_seconds(loose_run)

    samples = 20_000
    w = jnp.linalg.cholesky(order.r_perp + 1e-12 * jnp.eye(4))
    sampling = jax.jit(jax.value_and_grad(lambda m, w, key: sampled_losses(m, w, key, samples).mean(), argnums=(0, 1)))
    sampling_seconds = median_seconds(lambda: sampling(order.m, w, jax.random.key(0)))
    spread = float(sampled_losses(order.m, w, jax.random.key(1), samples).std())
    sampling_at_1e4 = sampling_seconds / samples * (spread / 1e-4) ** 2

    benchmark.extra_info["sampling / exact at 1e-4"] = sampling_at_1e4 / loose_seconds
    print(
        f"\n{state}: risk and gradient {1e3 * seconds:.1f} ms at error {error:.1e} "
        f"({method.nodes} nodes, {method.frequencies} frequencies); {1e3 * loose_seconds:.1f} ms at {loose_error:.1e}; "
        f"sampling with autodiff to 1e-4: {sampling_at_1e4:.1f} s = {sampling_at_1e4 / loose_seconds:.0f} times more"
    )
    assert error <= 1e-6
    assert loose_error <= 1e-4
    assert sampling_at_1e4 > 500 * loose_seconds


def test_reference_trajectory(benchmark):
    start, times = reference_start(), np.linspace(0, 400, 201)
    run = lambda: th.gradient_flow(TASK, SOFTMAX, start, times, progress=False)  # noqa: E731
    first = time.perf_counter()
    trajectory = run()
    first = time.perf_counter() - first
    benchmark.pedantic(lambda: jax.block_until_ready(run().risk), rounds=3)
    seconds = benchmark.stats.stats.median
    print(f"\ntrajectory to τ = 400 with 201 records: {seconds:.2f} s; the first, with compilation, {first:.1f} s")
    np.testing.assert_allclose(trajectory.risk[jnp.array([50, 200])], [0.398945, 0.376651], atol=5e-7)


@pytest.mark.parametrize("length", [10, 10**5])
def test_bayes_softmax_to_1e4(length, benchmark):
    task, order = th.SingleLocation(length, 1.0, TASK.prior), specialized_state()
    activation = th.BayesSoftmax("norm")
    best = th.population_risk(task, activation, order, th.Quadrature(1e-6, nodes=40, points=(16, 28, 44, 52)))
    # as fitted to 1e-4 at L = 10; the same for both lengths, so that only the length differs
    method = th.Quadrature(1e-4, nodes=32, points=(7, 24, 37, 34))
    risk = lambda o: th.population_risk(task, activation, o, method)  # noqa: E731
    value, slope = jax.jit(risk), jax.jit(jax.value_and_grad(risk))
    error = abs(float(value(order) - best))
    benchmark.pedantic(lambda: jax.block_until_ready(value(order)), rounds=15, warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    both = median_seconds(lambda: slope(order))
    print(
        f"\nB-softmax, L = {length}: risk {1e3 * seconds:.1f} ms, with its gradient {1e3 * both:.1f} ms at error "
        f"{error:.1e} ({method.nodes} nodes, points {method.points})"
    )
    assert error <= 1e-4


@pytest.mark.parametrize("length", [10, 10**5])
def test_bayes_risk_to_1e4(length, benchmark):
    prior, method = TASK.prior, th.Quadrature(1e-4, nodes=256, points=(22, 28, 35))
    best = th.bayes_risk(th.SingleLocation(length, 1.0, prior), th.Quadrature(1e-7, nodes=600, points=(36, 44, 52)))
    risk = lambda snr: th.bayes_risk(th.SingleLocation(length, snr, prior), method)  # noqa: E731
    value, slope = jax.jit(risk), jax.jit(jax.value_and_grad(risk))
    error = abs(float(value(1.0) - best))
    benchmark.pedantic(lambda: jax.block_until_ready(value(1.0)), rounds=15, warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    both = median_seconds(lambda: slope(1.0))
    print(
        f"\nBayes risk, L = {length}: {1e3 * seconds:.1f} ms, with its gradient in ν {1e3 * both:.1f} ms at error "
        f"{error:.1e} ({method.nodes} nodes, points {method.points})"
    )
    assert error <= 1e-4
