"""Softmax-1 and the exact engine with a sink: sampling, limits, extremes, derivatives, the stated error, the flow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from tests.theory.sampling import finite_difference, sampled_risks, softmax1
from tests.theory.states import DEGENERATE, PRIORS, WORKED, random_state

# counts beyond what any state here needs, so that all of one shape share compiled code
FINE = th.Quadrature(1e-10, nodes=128, frequencies=192)
COARSE = th.Quadrature(1e-6, nodes=56, frequencies=80)
PER_HEAD = np.array([-1.5, 0.0, 1.0, 2.5])


@jax.jit
def fine_risk(task, activation, order):
    return th.population_risk(task, activation, order, FINE)


@jax.jit
def coarse_risk(task, activation, order):
    return th.population_risk(task, activation, order, COARSE, with_error=True)


CASES = [
    (0.0, 1.0),
    (1.0, 4.0),
    (PER_HEAD, 3.0),
    (PER_HEAD, np.array([4.0, 1.0, -0.5, 0.0])),
]


# 12 · 4 comparisons at |z| < 4: false-alarm rate 48 · 6.3e-5 = 0.30 %, seeds fixed
@pytest.mark.parametrize("length", [2, 3, 10])
@pytest.mark.parametrize("prior", PRIORS)
def test_quadrature_equals_sampling(prior, length):
    task = th.SingleLocation(jnp.asarray(length), 1.5, PRIORS[prior])
    order = random_state(length, m=1.2)
    sampled = sampled_risks(task, order, [softmax1(b, c) for b, c in CASES], 100_000, seed=length)
    for (b, c), (mean, standard_error) in zip(CASES, sampled, strict=True):
        exact, error = coarse_risk(task, th.Softmax1(np.broadcast_to(b, 4), np.broadcast_to(c, 4)), order)
        assert abs(float(exact) - mean) < 4 * standard_error
        assert error < 2e-6


def test_one_number_is_shared_by_all_heads():
    order = random_state(3)
    shared = th.population_risk(WORKED, th.Softmax1(0.7, 2.0), order, COARSE)
    each = th.population_risk(WORKED, th.Softmax1(np.full(4, 0.7), np.full(4, 2.0)), order, COARSE)
    assert float(shared) == float(each)


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS)
def test_quadrature_equals_many_samples(prior):
    # 4 · 4 · 4 comparisons at |z| < 4: false-alarm rate 0.40 %
    for length in (2, 3, 10, 200):
        task = th.SingleLocation(length, 1.5, PRIORS[prior])
        order = random_state(40 + length, m=1.5)
        sampled = sampled_risks(
            task, order, [softmax1(b, c) for b, c in CASES], 1_000_000 if length <= 10 else 50_000, seed=length
        )
        for (b, c), (mean, standard_error) in zip(CASES, sampled, strict=True):
            exact = th.population_risk(task, th.Softmax1(b, c), order)
            assert abs(float(exact) - mean) < 4 * standard_error


# --- limits and extremes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [-60.0, -700.0, -1e4])
def test_without_a_sink_it_is_softmax(bias):
    order = random_state(1)
    value = fine_risk(WORKED, th.Softmax1(np.full(4, bias), np.ones(4)), order)
    assert float(value) == pytest.approx(float(th.population_risk(WORKED, th.Softmax(), order, FINE)), abs=1e-9)


@pytest.mark.parametrize("bias", [60.0, 700.0, 1e4])
def test_a_deep_sink_silences_all_heads(bias):
    value = fine_risk(WORKED, th.Softmax1(np.full(4, bias), np.ones(4)), random_state(1))
    assert float(value) == pytest.approx(1.0, abs=1e-9)


def test_a_silent_head_leaves_the_others_at_a_rescaled_weight():
    two, one = random_state(2, heads=2), random_state(2, heads=2)
    one = th.OrderParameters(one.m[:1], one.r[:1, :1])
    both = th.population_risk(WORKED, th.Softmax1([0.5, 300.0], [3.0, 3.0]), two)
    alone = th.population_risk(WORKED, th.Softmax1(0.5, 1.5), one)
    assert float(both) == pytest.approx(float(alone), abs=2e-8)


def test_heads_may_be_permuted():
    order, turn = random_state(5), np.array([2, 0, 3, 1])
    turned = th.OrderParameters(order.m[turn], order.r[turn][:, turn])
    c = np.array([4.0, 1.0, -0.5, 2.0])
    straight = fine_risk(WORKED, th.Softmax1(PER_HEAD, c), order)
    assert float(fine_risk(WORKED, th.Softmax1(PER_HEAD[turn], c[turn]), turned)) == pytest.approx(
        float(straight), abs=1e-10
    )


def test_zero_keys_have_a_closed_form():
    # σ = c/(e^b + L) for every token: risk (1 − a)² + (L−1) a², a = mean of σ over heads
    zero = DEGENERATE["zero heads"]
    for length in (2, 10, 10**6):
        task = th.SingleLocation(jnp.asarray(length), 1.0, WORKED.prior)
        a = np.mean(np.array([4.0, 1.0, -0.5, 2.0]) / (np.exp(PER_HEAD) + length))
        value = th.population_risk(
            task, th.Softmax1(PER_HEAD, [4.0, 1.0, -0.5, 2.0]), zero, th.Quadrature(1e-8, nodes=128, frequencies=192)
        )
        assert float(value) == pytest.approx((1 - a) ** 2 + (length - 1) * a**2, abs=1e-7)


EXTREMES = {
    "a million tokens": (th.SingleLocation(jnp.asarray(10**6), 4.0, WORKED.prior), random_state(1)),
    "snr 10^4": (th.SingleLocation(jnp.asarray(10), 1e4, WORKED.prior), random_state(1, m=0.05, w=0.1)),
    "zero weights": (
        th.SingleLocation(
            jnp.asarray(10), 1.0, th.GaussianMixture([0.5, 0, 0.5], np.eye(3), [np.eye(3), np.eye(3), 0 * np.eye(3)])
        ),
        random_state(1),
    ),
    "identical heads": (WORKED, DEGENERATE["identical heads"]),
    "zero heads": (WORKED, DEGENERATE["zero heads"]),
    "r_perp = 0": (WORKED, DEGENERATE["r_perp = 0"]),
}


@jax.jit
def fine_slope(task, activation, order):
    return jax.value_and_grad(lambda a, o: th.population_risk(task, a, o, FINE), argnums=(0, 1))(activation, order)


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_have_finite_values_and_gradients(name):
    task, order = EXTREMES[name]
    task = th.SingleLocation(jnp.asarray(task.length), task.snr, task.prior)
    for bias in (np.full(4, -50.0), PER_HEAD, np.full(4, 50.0)):
        value, gradient = fine_slope(task, th.Softmax1(bias, np.full(4, 4.0)), order)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
        assert -1e-9 < float(value) < 25  # Σ a ≤ c = 4, so the loss is at most (1 + c)²


@pytest.mark.slow
def test_scores_of_a_thousand():
    task = th.SingleLocation(10, 1e6, th.discrete([[1.0]]))
    for m, bias, expected in ((1.0, 0.0, 0.0), (-1.0, 500.0, 1.0), (1.0, 2000.0, 1.0)):
        order = th.OrderParameters([[m]], [[1.0]])
        activation = th.Softmax1(bias)
        method = th.Quadrature(1e-6).fitted(task, activation, order)
        value, gradient = jax.value_and_grad(lambda o, a=activation, q=method: th.population_risk(task, a, o, q))(order)
        assert float(value) == pytest.approx(expected, abs=1e-6)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_one_head_one_feature_and_a_sink_against_a_double_integral():
    # L=2, one head: χ_ε, χ independent normal, by Gauss–Hermite in both
    task, order = th.SingleLocation(2, 2.0, th.discrete([[1.3]])), th.OrderParameters([[0.7]], [[1.1]])
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / weights.sum()
    x, y = np.exp(np.sqrt(2.0) * 1.3 * 0.7 + np.sqrt(1.1) * nodes)[:, None], np.exp(np.sqrt(1.1) * nodes)[None]
    total = np.exp(0.4) + x + y
    expected = weights @ ((1 - 1.5 * x / total) ** 2 + (1.5 * y / total) ** 2) @ weights
    risk, error = th.population_risk(task, th.Softmax1(0.4, 1.5), order, th.Quadrature(1e-11), with_error=True)
    assert float(risk) == pytest.approx(expected, abs=1e-10)
    assert error < 1e-9


# --- derivatives -------------------------------------------------------------------------------------------------

STATES = {"random": random_state(11), **{name: order for name, order in DEGENERATE.items() if order.heads == 4}}


@jax.jit
def risk_of(x):
    m, r, bias, scale = x
    return th.population_risk(WORKED, th.Softmax1(bias, scale), th.OrderParameters(m, r), FINE)


gradient_of = jax.jit(jax.grad(risk_of))
curvature_of = jax.jit(lambda x, d: jax.jvp(jax.grad(risk_of), (x,), (d,))[1])


def a_direction(seed, x):
    rng = np.random.default_rng(seed)
    m, r, *rest = (rng.standard_normal(leaf.shape) for leaf in x)
    return tuple(jnp.asarray(d) for d in (m, r + r.T, *rest))


def a_point(order):
    return order.m, order.r, jnp.asarray(PER_HEAD), jnp.asarray([4.0, 1.0, -0.5, 2.0])


@pytest.mark.parametrize("state", STATES)
def test_gradient_equals_finite_differences(state):
    # the engine is an entire function of (m, r, b, c): a symmetric difference is right even at the cone's edge
    x = a_point(STATES[state])
    gradient = gradient_of(x)
    np.testing.assert_allclose(gradient[1], gradient[1].T, atol=1e-13)
    for seed in range(3):
        direction = a_direction(seed, x)
        slope = sum(jnp.vdot(g, d) for g, d in zip(gradient, direction, strict=True))
        estimate = finite_difference(risk_of, x, direction, 1e-3)
        assert float(slope) == pytest.approx(float(estimate), rel=1e-7, abs=3e-7)


@pytest.mark.parametrize("state", STATES)
def test_second_derivatives_equal_differences_of_the_gradient(state):
    x = a_point(STATES[state])
    direction = a_direction(5, x)
    estimate = finite_difference(gradient_of, x, direction, 1e-3)
    for curvature, difference in zip(curvature_of(x, direction), estimate, strict=True):
        np.testing.assert_allclose(curvature, difference, atol=1e-6, rtol=1e-6)


def test_hessian_in_bias_and_scale_and_vmap_over_them():
    order = random_state(13, heads=2)
    risk = lambda x: th.population_risk(WORKED, th.Softmax1(x[:2], x[2:]), order, COARSE)  # noqa: E731
    x = jnp.asarray([0.3, -0.5, 2.0, 1.0])
    hessian = jax.jit(jax.hessian(risk))(x)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-12)
    slopes = jax.jit(jax.vmap(jax.grad(risk)))(x[None] + 1e-4 * jnp.concatenate([jnp.eye(4), -jnp.eye(4)]))
    np.testing.assert_allclose(hessian, (slopes[:4] - slopes[4:]) / 2e-4, atol=1e-5)
    # quadratic in c: its second derivative is 2/H² E Σ σσ', positive definite
    assert np.linalg.eigvalsh(hessian[2:, 2:]).min() > 0


@pytest.mark.slow
def test_the_stated_error_covers_the_error():
    # 20 states, two methods; the change under refinement may miss the error by more than 3 times in one of them
    missed = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        length = int(rng.choice([2, 3, 10, 1000, 10**5]))
        task = th.SingleLocation(jnp.asarray(length), float(rng.uniform(0.1, 4)), WORKED.prior)
        order = random_state(seed, heads=2, m=float(rng.uniform(0.1, 1.5)), w=float(rng.uniform(0, 1)))
        activation = th.Softmax1(rng.uniform(-3, 8, 2), rng.uniform(-1, 3, 2))
        best = float(fine_risk(task, activation, order))
        for method in (th.Quadrature(1e-4, 16, 24), th.Quadrature(1e-5, 32, 32)):
            value, error = th.population_risk(task, activation, order, method, with_error=True)
            missed += abs(float(value) - best) > 3 * float(error) + 1e-9
    assert missed <= 1


@pytest.mark.parametrize("tolerance", [1e-4, pytest.param(1e-7, marks=pytest.mark.slow)])
def test_the_tolerance_is_kept(tolerance):
    for seed, length in enumerate((2, 10, 10**5)):
        task = th.SingleLocation(jnp.asarray(length), 2.0, WORKED.prior)
        order = random_state(seed, heads=2, w=0.8)
        for b in ((-2.0, 3.0), (9.0, 30.0)):
            activation = th.Softmax1(np.array(b), np.array([2.0, 2.0]))
            value = th.population_risk(task, activation, order, th.Quadrature(tolerance))
            assert abs(float(value - fine_risk(task, activation, order))) < 4 * tolerance  # c² times one weight's


def test_monte_carlo_agrees():
    order, activation = random_state(6), th.Softmax1(PER_HEAD, 3.0)
    mean, error = th.population_risk(WORKED, activation, order, th.MonteCarlo(50_000), with_error=True)
    assert abs(float(mean) - float(th.population_risk(WORKED, activation, order, COARSE))) < 4 * float(error)


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: th.Softmax1(np.zeros((2, 2))), "bias: expected 0 or 1 axes"),
        (lambda: th.Softmax1(scale=np.zeros((2, 2))), "scale: expected 0 or 1 axes"),
        (lambda: th.Softmax1(bias=np.inf), "bias: expected finite numbers"),
        (lambda: th.Softmax1(scale=np.nan), "scale: expected finite numbers"),
        (lambda: th.Softmax1(trained="temperature"), "trained: expected True, False, 'bias' or 'scale'"),
        (lambda: th.population_risk(WORKED, th.Softmax1(np.zeros(3)), random_state(0)), "bias: expected one number"),
        (
            lambda: th.population_risk(WORKED, th.Softmax1(scale=np.ones(2)), random_state(0)),
            "scale: expected one number",
        ),
        (
            lambda: th.population_risk(
                WORKED, th.Softmax1(), random_state(0), th.Quadrature(nodes=32, points=(8, 8, 8, 8))
            ),
            "method: expected frequencies in place of points for Softmax1",
        ),
        (
            lambda: th.population_risk(WORKED, th.Softmax(), random_state(0), th.Quadrature(nodes=32, points=64)),
            "method: expected frequencies in place of points for Softmax",
        ),
        (lambda: th.Quadrature(nodes=32), "nodes, frequencies, points: expected"),
        (lambda: th.Quadrature(nodes=32, frequencies=32, points=64), "nodes, frequencies, points: expected"),
        (lambda: th.Quadrature(nodes=32, points=10), "points: expected a whole number >= 64"),
        (lambda: th.Quadrature(nodes=32, points=(10, 0)), "points: expected a whole number >= 1"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- the flow of trained biases and scales -----------------------------------------------------------------------

LOOSE = th.Quadrature(1e-5, 40, 48)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, "bias", "scale"])
def test_a_short_flow_starts_along_the_gradient(trained):
    order = random_state(1, heads=2, m=0.5)
    bias, scale = np.array([0.5, -0.3]), np.array([1.5, 1.0])
    activation = th.Softmax1(bias, scale, trained)
    rates = {"bias_rate": 0.7, "scale_rate": 0.3}
    span = 1e-3
    flow = th.gradient_flow(
        WORKED, activation, order, [0.0, span, 2 * span], method=LOOSE, tolerance=1e-11, progress=False, **rates
    )
    slope = jax.grad(lambda a: th.population_risk(WORKED, a, order, LOOSE))(activation)
    for name in ("bias", "scale"):
        path = np.asarray(getattr(flow.activation, name))
        if name in activation.trained:
            moved = (-3 * path[0] + 4 * path[1] - path[2]) / (2 * span)
            np.testing.assert_allclose(moved, -rates[f"{name}_rate"] * getattr(slope, name), rtol=1e-4, atol=1e-8)
        else:
            np.testing.assert_array_equal(np.broadcast_to(path, (3, 2))[1], getattr(activation, name))


@pytest.mark.slow
def test_a_shared_bias_moves_by_the_sum_over_heads():
    order = random_state(1, heads=2, m=0.5)
    shared = jax.grad(lambda b: th.population_risk(WORKED, th.Softmax1(b), order, LOOSE))(0.3)
    each = jax.grad(lambda b: th.population_risk(WORKED, th.Softmax1(b), order, LOOSE))(jnp.full(2, 0.3))
    assert float(shared) == pytest.approx(float(each.sum()), abs=1e-12)
    flow = th.gradient_flow(WORKED, th.Softmax1(0.3, 1.0, "bias"), order, [0.01], method=LOOSE, progress=False)
    assert float(flow.activation.bias[0] - 0.3) / 0.01 == pytest.approx(-float(shared), rel=0.02)


@pytest.mark.slow
def test_replicas_with_trained_leaves_are_their_single_flows():
    starts = th.OrderParameters.initial(jax.random.key(2), heads=2, features=3, dim=300, replicas=2)
    activation = th.Softmax1(np.array([0.2, 0.1]), 2.0, True)
    options = {"method": LOOSE, "progress": False, "tolerance": 1e-7}
    together = th.gradient_flow(WORKED, activation, starts, [0.0, 4.0, 8.0], **options)
    alone = th.gradient_flow(WORKED, activation, starts[1], [0.0, 4.0, 8.0], **options)
    np.testing.assert_allclose(together.activation.bias[1], alone.activation.bias, atol=1e-5)
    np.testing.assert_allclose(together.activation.scale[1], alone.activation.scale, atol=1e-5)
    np.testing.assert_allclose(together.order.m[1], alone.order.m, atol=1e-5)
    np.testing.assert_allclose(together.risk[1], alone.risk, atol=1e-6)
    assert np.all(np.diff(together.risk) < 0)
