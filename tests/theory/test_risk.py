"""The exact engine against sampling, closed forms, finite differences and itself."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from tests.theory.sampling import sampled_risks, softmax
from tests.theory.states import DEGENERATE, FLIPS, PRIORS, WORKED, random_state

SOFTMAX = th.Softmax()


def sampled_risk(task, order, samples, seed):
    """(mean, standard error) of the loss of softmax heads."""
    return sampled_risks(task, order, [softmax], samples, seed)[0]


# 12 comparisons at |z| < 4: false-alarm rate 12 · 6.3e-5 = 0.08 %, keys fixed
@pytest.mark.parametrize("length", [*(pytest.param(length, marks=pytest.mark.slow) for length in (2, 3)), 10])
@pytest.mark.parametrize("prior", PRIORS)
def test_quadrature_equals_sampling(prior, length):
    task = th.SingleLocation(length, 1.5, PRIORS[prior])
    order = random_state(length, m=1.2)
    exact, error = th.population_risk(task, SOFTMAX, order, with_error=True)
    mean, standard_error = sampled_risk(task, order, 1_000_000 if prior == "mixture" else 200_000, seed=length)
    assert abs(float(exact) - mean) < 4 * standard_error
    assert error < 1e-7


def test_quadrature_equals_sampling_with_many_tokens():
    task = th.SingleLocation(1000, 4.0, FLIPS)
    order = random_state(7)
    mean, standard_error = sampled_risk(task, order, 20_000, seed=1)
    assert abs(float(th.population_risk(task, SOFTMAX, order)) - mean) < 4 * standard_error


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS)
def test_quadrature_equals_a_million_samples(prior):
    # 16 comparisons at |z| < 4: false-alarm rate 0.10 %
    for length in (2, 3, 10, 1000):
        task = th.SingleLocation(length, 1.5, PRIORS[prior])
        order = random_state(20 + length % 97, m=1.2)
        mean, standard_error = sampled_risk(task, order, 1_000_000, seed=length)
        assert abs(float(th.population_risk(task, SOFTMAX, order)) - mean) < 4 * standard_error


@pytest.mark.parametrize("length", [2, 3, 10, 1000, 10**6])
def test_zero_keys_give_uniform_attention(length):
    order = th.OrderParameters(np.zeros((3, 3)), np.zeros((3, 3)))
    risk = th.population_risk(th.SingleLocation(length, 1.0, FLIPS), SOFTMAX, order)
    assert float(risk) == pytest.approx(1 - 1 / length, abs=1e-8)


def test_one_head_two_tokens_against_a_one_dimensional_integral():
    # L=2: the risk is E 2(1−σ(Δ))², Δ = χ_ε − χ ~ N(√ν θ m, 2r)
    task = th.SingleLocation(2, 2.0, th.discrete([[1.3]]))
    order = th.OrderParameters([[0.7]], [[1.1]])
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    delta = np.sqrt(2.0) * 1.3 * 0.7 + np.sqrt(2 * 1.1) * nodes
    expected = np.sum(weights / weights.sum() * 2 / (1 + np.exp(delta)) ** 2)
    risk, error = th.population_risk(task, SOFTMAX, order, th.Quadrature(1e-12), with_error=True)
    assert float(risk) == pytest.approx(expected, abs=1e-11)
    assert error < 1e-10


def test_identical_heads_are_one_head():
    single = random_state(3, heads=1)
    copies = th.OrderParameters(jnp.tile(single.m, (4, 1)), jnp.tile(single.r, (4, 4)))
    for length in (2, 10, 1000):
        task = th.SingleLocation(length, 1.0, FLIPS)
        one = th.population_risk(task, SOFTMAX, single, th.Quadrature(1e-10))
        four = th.population_risk(task, SOFTMAX, copies, th.Quadrature(1e-10))
        assert float(one) == pytest.approx(float(four), abs=1e-9)


def test_temperature_rescales_the_scores():
    order = random_state(4)
    temperature = np.array([0.7, 1.0, 1.9, 2.5])
    scaled = th.OrderParameters(order.m / temperature[:, None], order.r / np.outer(temperature, temperature))
    by_head = th.population_risk(WORKED, th.Softmax(temperature), order)
    assert float(by_head) == pytest.approx(float(th.population_risk(WORKED, SOFTMAX, scaled)), abs=1e-8)
    mean, error = th.population_risk(WORKED, th.Softmax(temperature), order, th.MonteCarlo(200_000), with_error=True)
    assert abs(float(by_head) - float(mean)) < 4 * float(error)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_the_stated_error_covers_the_error(seed):
    rng = np.random.default_rng(seed)
    task = th.SingleLocation(int(rng.choice([2, 5, 30, 10**5])), float(rng.uniform(0.5, 4)), FLIPS)
    order = random_state(seed, m=float(rng.uniform(0.3, 3)), w=float(rng.uniform(0.1, 2)))
    best = th.population_risk(task, SOFTMAX, order, th.Quadrature(max(1e-12, 2e-15 * task.length)))
    for method in (th.Quadrature(1e-4), th.Quadrature(1e-7), th.Quadrature(1e-8, nodes=16, frequencies=16)):
        value, error = th.population_risk(task, SOFTMAX, order, method, with_error=True)
        assert abs(float(value - best)) <= 2 * float(error) + 1e-10
        if method.nodes is None:
            assert abs(float(value - best)) <= method.tolerance


def test_wide_scores_move_the_windows():
    # the worked flow at τ = 400 and beyond: a window fixed at u ∈ [−14, 4] is off by more than 0.01
    m = np.array([[3.25, 0.34, 0.06], [3.28, -0.35, -0.06], [0.98, 2.37, 0.0], [0.96, -2.39, 0.0]])
    for scale in (1.0, 3.0):
        order = th.OrderParameters(scale * m, scale**2 * (m @ m.T) + 0.1 * np.eye(4))
        mean, standard_error = sampled_risk(WORKED, order, 300_000, seed=5)
        value, error = th.population_risk(WORKED, SOFTMAX, order, with_error=True)
        assert abs(float(value) - mean) < 4 * standard_error
        assert error < 1e-6


@pytest.mark.parametrize("tolerance", [1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize(("length", "variance"), [(10, 100.0), (1000, 1000.0), (10, 1.0)])
def test_the_tolerance_is_kept_by_one_wide_head(length, variance, tolerance):
    # with the nodes of a Gaussian width the largest of L−1 scores, which is sharper, went unresolved: 1e-7 at 1e-12
    task = th.SingleLocation(length, 1.0, th.sign_flips([1.0], [0.5]))
    order = th.OrderParameters([[0.0]], [[variance]])
    value = th.population_risk(task, SOFTMAX, order, th.Quadrature(tolerance))
    best = th.population_risk(task, SOFTMAX, order, th.Quadrature(1e-12, 400, 64))
    assert abs(float(value - best)) < tolerance


def test_a_length_whose_rounding_exceeds_the_tolerance_is_refused():
    task = th.SingleLocation(10**12, 1.0, FLIPS)
    with pytest.raises(ValueError, match="tolerance: expected at least 1e-03 at L = 1000000000000"):
        th.population_risk(task, SOFTMAX, random_state(0))


def test_scores_too_wide_for_the_fixed_nodes_are_an_error_not_a_number():
    order = random_state(1, m=12.0, w=0.0)
    wide = th.OrderParameters(jnp.tile(order.m[:1], (4, 1)), jnp.tile(order.r[:1, :1], (4, 4)))
    with pytest.raises(Exception, match="fitted"):
        jax.block_until_ready(jax.jit(lambda o: th.population_risk(WORKED, SOFTMAX, o))(wide))
    method = th.Quadrature(1e-5).fitted(WORKED, SOFTMAX, wide)
    inside = jax.jit(lambda o: th.population_risk(WORKED, SOFTMAX, o, method))(wide)
    assert float(inside) == pytest.approx(
        float(th.population_risk(WORKED, SOFTMAX, wide, th.Quadrature(1e-6))), abs=1e-5
    )


def test_the_cost_does_not_depend_on_the_length():
    # the same compiled code, so the same arithmetic: no timing needed; a timing would be noise
    method = th.Quadrature(1e-6, nodes=48, frequencies=80)
    run = eqx.filter_jit(
        eqx.debug.assert_max_traces(lambda t, o: th.population_risk(t, SOFTMAX, o, method), max_traces=1)
    )
    order = random_state(2)
    for length in (10, 1000, 10**6):
        task = th.SingleLocation(jnp.asarray(length), 1.0, FLIPS)
        value = run(task, order)
        reference = th.population_risk(th.SingleLocation(length, 1.0, FLIPS), SOFTMAX, order)
        assert float(value) == pytest.approx(float(reference), abs=1e-5)


def test_a_million_tokens_take_no_longer_than_ten():
    order = random_state(2)
    seconds = {}
    for length in (10, 10**6):
        task = th.SingleLocation(length, 1.0, FLIPS)
        method = th.Quadrature(1e-6, nodes=48, frequencies=80)
        run = jax.jit(lambda o, task=task, method=method: th.population_risk(task, SOFTMAX, o, method))
        run(order).block_until_ready()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            run(order).block_until_ready()
            times.append(time.perf_counter() - start)
        seconds[length] = min(times)
    assert seconds[10**6] < 2 * seconds[10]


def finite_difference(f, x, direction, step):
    """Five-point derivative of f at x along direction."""
    shifted = [f(jax.tree.map(lambda a, d, s=s: a + s * step * d, x, direction)) for s in (-2, -1, 1, 2)]
    return (shifted[0] - 8 * shifted[1] + 8 * shifted[2] - shifted[3]) / (12 * step)


STATES = {"random": random_state(11), **DEGENERATE}


# node counts for the hardest of the states, so that all of one shape share compiled code
FINE = th.Quadrature(1e-11, nodes=128, frequencies=224)


@jax.jit
def fine_risk(x):
    return th.population_risk(WORKED, SOFTMAX, th.OrderParameters(*x), FINE)


fine_gradient = jax.jit(jax.grad(fine_risk))
fine_curvature = jax.jit(lambda x, d: jax.jvp(jax.grad(fine_risk), (x,), (d,))[1])


@pytest.mark.parametrize("state", STATES)
def test_gradient_equals_finite_differences(state):
    # the engine is an entire function of (m, r), so a symmetric difference is right even at the cone's edge
    order = STATES[state]
    counts = th.Quadrature(1e-11).fitted(WORKED, SOFTMAX, order)
    assert counts.nodes <= FINE.nodes
    assert counts.frequencies <= FINE.frequencies
    x = (order.m, order.r)
    gradient = fine_gradient(x)
    np.testing.assert_allclose(gradient[1], gradient[1].T, atol=1e-14)
    rng = np.random.default_rng(0)
    for _ in range(3):
        dm, dr = rng.standard_normal(order.m.shape), rng.standard_normal(order.r.shape)
        direction = (jnp.asarray(dm), jnp.asarray(dr + dr.T))
        slope = sum(jnp.vdot(g, d) for g, d in zip(gradient, direction, strict=True))
        assert float(slope) == pytest.approx(float(finite_difference(fine_risk, x, direction, 1e-3)), abs=3e-8)


@pytest.mark.parametrize("state", STATES)
def test_second_derivatives_equal_differences_of_the_gradient(state):
    order = STATES[state]
    x = (order.m, order.r)
    rng = np.random.default_rng(2)
    dr = rng.standard_normal(order.r.shape)
    direction = (jnp.asarray(rng.standard_normal(order.m.shape)), jnp.asarray(dr + dr.T))
    estimate = [finite_difference(lambda y, i=i: fine_gradient(y)[i], x, direction, 3e-3) for i in range(2)]
    for curvature, difference in zip(fine_curvature(x, direction), estimate, strict=True):
        np.testing.assert_allclose(curvature, difference, atol=3e-7, rtol=0)


def test_gradient_in_task_and_temperature_equals_finite_differences():
    order = random_state(12)
    prior = PRIORS["mixture"]
    method = th.Quadrature(1e-11).fitted(th.SingleLocation(10, 1.3, prior), th.Softmax(1.2), order)

    def risk(x):
        snr, temperature, weights, means, covariances = x
        changed = eqx.tree_at(lambda p: (p.weights_, p.means_, p.covariances_), prior, (weights, means, covariances))
        task = th.SingleLocation(10, snr, changed)
        return th.population_risk(task, th.Softmax(temperature), order, method)

    x = (jnp.asarray(1.3), jnp.full(4, 1.2), prior.weights, prior.means, prior.covariances)
    gradient = jax.jit(jax.grad(risk))(x)
    rng = np.random.default_rng(1)
    for index in range(len(x)):
        direction = [jnp.zeros_like(a) for a in x]
        step = rng.standard_normal(x[index].shape)
        direction[index] = jnp.asarray(step + np.swapaxes(step, -1, -2) if step.ndim == 3 else step)
        slope = jnp.vdot(gradient[index], direction[index])
        estimate = finite_difference(jax.jit(risk), x, tuple(direction), 1e-3)
        assert float(slope) == pytest.approx(float(estimate), abs=1e-8)


def test_jax_hessian_is_the_matrix_of_second_derivatives():
    order = random_state(13, heads=2)
    risk = lambda m: th.population_risk(WORKED, SOFTMAX, th.OrderParameters(m, order.r), FINE)  # noqa: E731
    hessian = jax.jit(jax.hessian(risk))(order.m)
    direction = jnp.asarray(np.random.default_rng(2).standard_normal(order.m.shape))
    along_m = fine_curvature((order.m, order.r), (direction, jnp.zeros_like(order.r)))[0]
    np.testing.assert_allclose(jnp.einsum("hfkg,kg->hf", hessian, direction), along_m, atol=1e-12)


def test_vmap_and_jit_equal_single_calls():
    orders = [random_state(s) for s in range(3)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *orders)
    together = jax.jit(jax.vmap(lambda o: th.population_risk(WORKED, SOFTMAX, o)))(batch)
    each = [float(th.population_risk(WORKED, SOFTMAX, o)) for o in orders]
    np.testing.assert_allclose(together, each, atol=3e-8)
    tasks = [th.SingleLocation(10, snr, FLIPS) for snr in (0.5, 1.0, 4.0)]
    swept = jax.vmap(lambda snr: th.population_risk(th.SingleLocation(10, snr, FLIPS), SOFTMAX, orders[0]))(
        jnp.array([0.5, 1.0, 4.0])
    )
    np.testing.assert_allclose(swept, [th.population_risk(t, SOFTMAX, orders[0]) for t in tasks], atol=3e-8)


def test_only_the_symmetric_part_of_r_is_read():
    order = random_state(5)
    tilt = jnp.zeros((4, 4)).at[0, 1].set(0.3).at[1, 0].set(-0.3)
    tilted = eqx.tree_at(lambda o: o.r, order, order.r + tilt)
    assert float(th.population_risk(WORKED, SOFTMAX, tilted)) == float(th.population_risk(WORKED, SOFTMAX, order))


# --- Monte Carlo -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("state", ["random", "identical heads"])
def test_monte_carlo_and_its_gradient_agree_with_quadrature(state):
    order = STATES[state]
    exact = jax.grad(lambda o: th.population_risk(WORKED, SOFTMAX, o))(order)
    value, error = th.population_risk(WORKED, SOFTMAX, order, th.MonteCarlo(100_000), with_error=True)
    assert abs(float(value) - float(th.population_risk(WORKED, SOFTMAX, order))) < 4 * float(error)
    estimates = [
        jax.jit(jax.grad(lambda o, s=s: th.population_risk(WORKED, SOFTMAX, o, th.MonteCarlo(1_000, seed=s))))(order)
        for s in range(8)
    ]
    # t with 7 degrees of freedom at |t| < 10: false-alarm rate 2.1e-5 an entry, ≤ 28 entries, 0.06 % a state
    for name in ("m", "r"):
        draws = np.stack([np.asarray(getattr(e, name)) for e in estimates])
        spread = draws.std(0, ddof=1) / np.sqrt(len(draws)) + 1e-12
        assert np.all(np.abs(draws.mean(0) - np.asarray(getattr(exact, name))) < 10 * spread + 1e-7)


def test_monte_carlo_is_the_same_number_alone_and_under_differentiation():
    order, method = random_state(6), th.MonteCarlo(2_000)
    alone = th.population_risk(WORKED, SOFTMAX, order, method)
    under, _ = jax.value_and_grad(lambda o: th.population_risk(WORKED, SOFTMAX, o, method))(order)
    assert float(alone) == pytest.approx(float(under), abs=1e-14)
    assert float(alone) != float(th.population_risk(WORKED, SOFTMAX, order, th.MonteCarlo(2_000, seed=1)))


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: th.Quadrature(1e-16), "tolerance: expected a number from 1e-13"),
        (lambda: th.Quadrature(nodes=10), "nodes, frequencies, points: expected nodes with"),
        (lambda: th.Quadrature(nodes=2, frequencies=10), "nodes: expected a whole number >= 4, got 2"),
        (lambda: th.MonteCarlo(samples=1), "samples: expected a whole number >= 2, got 1"),
        (lambda: th.population_risk(WORKED, SOFTMAX, random_state(0, features=2)), "order: expected m with F = 3"),
        (lambda: th.population_risk(WORKED, th.Softmax(np.ones(3)), random_state(0)), "temperature: expected"),
        (
            lambda: th.population_risk(WORKED, SOFTMAX, jax.tree.map(lambda a: a[None], random_state(0))),
            "order: expected one state",
        ),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
