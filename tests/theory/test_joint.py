"""Bayes-softmax and the exact engine of a joint normalizer: sampling, limits, extremes, derivatives, error, flow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from tests.theory.sampling import bayes_softmax, finite_difference, sampled_risks
from tests.theory.states import DEGENERATE, PRIORS, WORKED, random_state
from theory import _joint
from theory.fit import law_of

# counts beyond what any state here needs, so that all of one shape share compiled code
FINE = th.Quadrature(1e-9, nodes=56, points=(24, 40, 64))
COARSE = th.Quadrature(1e-5, nodes=32, points=(14, 24, 40))
BIAS = np.array([-1.0, 0.0, 1.5])
WEIGHTS = np.array([0.5, 0.3, 0.2])


@jax.jit
def coarse_risk(task, activation, order):
    return th.population_risk(task, activation, order, COARSE)


# 12 · 3 comparisons at |z| < 4: false-alarm rate 36 · 6.3e-5 = 0.23 %, seeds fixed
@pytest.mark.parametrize("prior", PRIORS)
def test_quadrature_equals_sampling(prior):
    for length in (2, 3, 10):
        task = th.SingleLocation(jnp.asarray(length), 1.5, PRIORS[prior])
        order = random_state(length, heads=3, m=0.5)
        norm = np.diagonal(order.r) / 2 - np.log(WEIGHTS)
        even = np.diagonal(order.r) / 2 + np.log(3)
        cases = [(th.BayesSoftmax(BIAS), BIAS), (th.BayesSoftmax(norm), norm)]
        sampled = sampled_risks(task, order, [bayes_softmax(b) for b in (BIAS, norm, even)], 100_000, seed=length)
        values = [coarse_risk(task, activation, order) for activation, _ in cases]
        values.append(coarse_risk(task, th.BayesSoftmax(even), order))
        for value, (mean, standard_error) in zip(values, sampled, strict=True):
            assert abs(float(value) - mean) < 4 * standard_error
        if prior == "sign flips":  # "norm" is these numbers
            by_norm = coarse_risk(task, th.BayesSoftmax("norm", weights=WEIGHTS), order)
            assert float(by_norm) == pytest.approx(float(values[1]), abs=1e-12)
            by_norm = coarse_risk(task, th.BayesSoftmax("norm"), order)
            assert float(by_norm) == pytest.approx(float(values[2]), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS)
def test_default_method_equals_many_samples(prior):
    # 4 · 4 comparisons at |z| < 4: false-alarm rate 0.10 %; four heads are Sobol points
    for length in (2, 3, 10, 200):
        task = th.SingleLocation(length, 1.5, PRIORS[prior])
        order, bias = random_state(40 + length, m=1.2), np.array([-1.0, 0.0, 1.5, 0.5])
        ((mean, standard_error),) = sampled_risks(
            task, order, [bayes_softmax(bias)], 1_000_000 if length <= 10 else 50_000, seed=length
        )
        value, error = th.population_risk(task, th.BayesSoftmax(bias), order, with_error=True)
        assert abs(float(value) - mean) < 4 * standard_error + 3 * float(error)


# --- limits and extremes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 10**5])
def test_one_head_is_softmax(length):
    task = th.SingleLocation(jnp.asarray(length), 1.0, WORKED.prior)
    for seed, m in ((0, 0.2), (1, 1.5)):
        order = random_state(seed, heads=1, m=m)
        joint = th.population_risk(task, th.BayesSoftmax(0.7), order, th.Quadrature(1e-8, nodes=64, points=(128,)))
        alone = th.population_risk(task, th.Softmax(), order, th.Quadrature(1e-8, nodes=128, frequencies=128))
        assert float(joint) == pytest.approx(float(alone), abs=2e-8)


def test_identical_heads_are_one_softmax_head():
    single = random_state(3, heads=1)
    copies = th.OrderParameters(jnp.tile(single.m, (3, 1)), jnp.tile(single.r, (3, 3)))
    value = th.population_risk(WORKED, th.BayesSoftmax(0.4), copies)
    assert float(value) == pytest.approx(float(th.population_risk(WORKED, th.Softmax(), single)), abs=1e-6)


def test_a_common_bias_cancels_and_heads_may_be_permuted():
    order, turn = random_state(5, heads=3), np.array([2, 0, 1])
    turned = th.OrderParameters(order.m[turn], order.r[turn][:, turn])
    straight = float(coarse_risk(WORKED, th.BayesSoftmax(BIAS), order))
    assert float(coarse_risk(WORKED, th.BayesSoftmax(BIAS + 700.0), order)) == pytest.approx(straight, abs=1e-9)
    assert float(coarse_risk(WORKED, th.BayesSoftmax(BIAS[turn]), turned)) == pytest.approx(straight, abs=1e-9)


def test_a_head_behind_a_high_bias_is_not_there():
    order = random_state(6, heads=2)
    alone = th.OrderParameters(order.m[:1], order.r[:1, :1])
    value = th.population_risk(WORKED, th.BayesSoftmax([0.0, 500.0]), order)
    assert float(value) == pytest.approx(float(th.population_risk(WORKED, th.Softmax(), alone)), abs=1e-6)


SPARSE = th.GaussianMixture([0.5, 0, 0.5, 0], np.eye(4, 3), [np.eye(3), np.eye(3), 0 * np.eye(3), np.eye(3)])
EXTREMES = {
    "a million tokens": (th.SingleLocation(jnp.asarray(10**6), 4.0, WORKED.prior), random_state(1, heads=3)),
    "two tokens": (th.SingleLocation(jnp.asarray(2), 4.0, WORKED.prior), random_state(1, heads=3)),
    "snr 10^4": (th.SingleLocation(jnp.asarray(10), 1e4, WORKED.prior), random_state(1, heads=3, m=0.05, w=0.1)),
    "scores of 1000": (th.SingleLocation(jnp.asarray(10), 1e6, WORKED.prior), random_state(1, heads=3, m=0.5)),
    "zero weights": (th.SingleLocation(jnp.asarray(10), 1.0, SPARSE), random_state(1, heads=3)),
    "zero heads": (WORKED, th.OrderParameters(np.zeros((3, 3)), np.zeros((3, 3)))),
    "identical heads": (WORKED, th.OrderParameters(np.tile([[2.0, 0, 0]], (3, 1)), np.full((3, 3), 4.0))),
}


@jax.jit
def coarse_slope(task, activation, order):
    risk = lambda a, o: th.population_risk(task, a, o, COARSE)  # noqa: E731
    return jax.value_and_grad(risk, argnums=(0, 1))(activation, order)


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_have_finite_values_and_gradients(name):
    task, order = EXTREMES[name]
    task = th.SingleLocation(jnp.asarray(task.length), task.snr, task.prior)
    for bias in (BIAS, np.array([-700.0, 0.0, 700.0])):
        value, gradient = coarse_slope(task, th.BayesSoftmax(bias), order)
        assert -1e-9 < float(value) < 2
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_zero_keys_give_uniform_attention():
    for length in (2, 10**6):
        zero = DEGENERATE["zero heads"]
        value = th.population_risk(th.SingleLocation(length, 1.0, WORKED.prior), th.BayesSoftmax(), zero)
        assert float(value) == pytest.approx(1 - 1 / length, abs=1e-6)


# --- derivatives -------------------------------------------------------------------------------------------------

STATES = {
    "random": random_state(11, heads=3),
    "identical heads": EXTREMES["identical heads"][1],
    "zero heads": EXTREMES["zero heads"][1],
    "r_perp = 0": th.OrderParameters(
        np.arange(9.0).reshape(3, 3) / 10, np.arange(9.0).reshape(3, 3) @ np.arange(9.0).reshape(3, 3).T / 100
    ),
    "one zero head": th.OrderParameters([[0.0, 0, 0], [1, 0.5, 0], [0, 0, 0.3]], np.diag([0.0, 2.0, 0.5])),
}


@jax.jit
def risk_of(x):
    m, r, bias = x
    return th.population_risk(WORKED, th.BayesSoftmax(bias), th.OrderParameters(m, r), FINE)


@jax.jit
def risk_by_norm(x):
    return th.population_risk(WORKED, th.BayesSoftmax("norm", weights=WEIGHTS), th.OrderParameters(*x), FINE)


gradient_of = jax.jit(jax.grad(risk_of))
curvature_of = jax.jit(lambda x, d: jax.jvp(jax.grad(risk_of), (x,), (d,))[1])


def a_direction(seed, x):
    """Random, with a change of r inside the cone."""
    rng = np.random.default_rng(seed)
    m, r, *rest = (rng.standard_normal(leaf.shape) for leaf in x)
    return tuple(jnp.asarray(d) for d in (m, r @ r.T / 3, *rest))


@pytest.mark.parametrize("state", STATES)
def test_gradient_equals_finite_differences(state):
    x = (STATES[state].m, STATES[state].r, jnp.asarray(BIAS))
    gradient = gradient_of(x)
    np.testing.assert_allclose(gradient[1], gradient[1].T, atol=1e-12)
    assert float(gradient[2].sum()) == pytest.approx(0, abs=1e-8)  # a common bias cancels
    sides, step = ("both", 3e-3) if state == "random" else ("inside", 5e-3)
    for seed in range(2):
        direction = a_direction(seed, x)
        slope = sum(jnp.vdot(g, d) for g, d in zip(gradient, direction, strict=True))
        estimate = finite_difference(risk_of, x, direction, step, sides)
        assert float(slope) == pytest.approx(float(estimate), abs=2e-6)


@pytest.mark.parametrize(
    "method",
    [th.Quadrature(1e-9, nodes=48, points=(64,)), pytest.param(th.MonteCarlo(2_000), marks=pytest.mark.slow)],
    ids=["quadrature", "sampling"],
)
@pytest.mark.parametrize(
    "order",
    [
        *(pytest.param(order, marks=pytest.mark.slow) for order in ("forward over forward", "forward over reverse")),
        "reverse over reverse",
    ],
)
def test_every_order_of_differentiation_gives_the_same_curvature(order, method):
    task = th.SingleLocation(5, 1.0, th.discrete([[1.0]]))

    def risk(r):
        state = th.OrderParameters(jnp.full((1, 1), 0.5), r[None, None])
        return th.population_risk(task, th.BayesSoftmax(), state, method)

    outer, inner = {
        "forward over forward": (jax.jacfwd, jax.jacfwd),
        "forward over reverse": (jax.jacfwd, jax.jacrev),
        "reverse over reverse": (jax.jacrev, jax.jacrev),
    }[order]
    # softmax with one head; sampled to about 0.01 (without Price's rule reverse mode would say 0)
    assert float(outer(inner(risk))(1.0)) == pytest.approx(
        -0.0578526018, abs=1e-8 if isinstance(method, th.Quadrature) else 0.03
    )


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_second_derivatives_equal_differences_of_the_gradient(state):
    x = (STATES[state].m, STATES[state].r, jnp.asarray(BIAS))
    direction = a_direction(5, x)
    sides, step = ("both", 3e-3) if state == "random" else ("inside", 5e-3)
    estimate = finite_difference(gradient_of, x, direction, step, sides)
    for curvature, difference in zip(curvature_of(x, direction), estimate, strict=True):
        np.testing.assert_allclose(curvature, difference, atol=2e-5)


def test_norm_adds_half_the_slope_in_the_bias_to_that_in_the_norm():
    order = STATES["random"]
    bias = jnp.diagonal(order.r) / 2 - jnp.log(jnp.asarray(WEIGHTS))
    plain, norm = gradient_of((order.m, order.r, bias)), jax.jit(jax.grad(risk_by_norm))((order.m, order.r))
    np.testing.assert_allclose(norm[0], plain[0], atol=1e-12)
    np.testing.assert_allclose(norm[1], plain[1] + jnp.diag(plain[2]) / 2, atol=1e-12)


@pytest.mark.slow
def test_hessian_and_vmap_in_two_heads():
    order = random_state(13, heads=2)
    method = th.Quadrature(1e-9, nodes=48, points=(44, 64))

    def risk(x):
        order_x = th.OrderParameters(x[2:].reshape(2, 3), order.r)
        return th.population_risk(WORKED, th.BayesSoftmax(x[:2]), order_x, method)

    x = jnp.concatenate([jnp.asarray([0.3, -0.5]), order.m.reshape(-1)])
    hessian = jax.jit(jax.hessian(risk))(x)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-10)
    slopes = jax.jit(jax.vmap(jax.grad(risk)))(x[None] + 1e-3 * jnp.concatenate([jnp.eye(8), -jnp.eye(8)]))
    np.testing.assert_allclose(hessian, (slopes[:8] - slopes[8:]) / 2e-3, atol=1e-5)


def test_the_stated_error_covers_the_error():
    # 20 states, three methods: the change under refinement may miss the error by more than 3 times in one case
    missed = 0
    best_method = th.Quadrature(1e-10, nodes=96, points=(64, 96))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        task = th.SingleLocation(jnp.asarray(10), float(rng.uniform(0.1, 4)), WORKED.prior)
        order = random_state(seed, heads=2, m=float(rng.uniform(0.1, 1.5)), w=float(rng.uniform(0, 1)))
        activation = th.BayesSoftmax(rng.uniform(-3, 3, 2))
        best = float(th.population_risk(task, activation, order, best_method))
        for method in (th.Quadrature(1e-4, 16, points=(8, 16)), th.Quadrature(1e-5, 24, points=(16, 28))):
            value, error = th.population_risk(task, activation, order, method, with_error=True)
            missed += abs(float(value) - best) > 3 * float(error) + 1e-9
    assert missed <= 1


@pytest.mark.slow
def test_sobol_points_know_their_error():
    order, missed = random_state(7, heads=3), 0
    for seed in range(4):
        activation = th.BayesSoftmax(np.random.default_rng(seed).uniform(-2, 2, 3))
        value, error = th.population_risk(
            WORKED, activation, order, th.Quadrature(1e-5, 32, points=2048), with_error=True
        )
        missed += abs(float(value - coarse_risk(WORKED, activation, order))) > 3 * float(error) + 1e-6
    assert missed <= 1


def test_added_points_of_weight_zero_change_no_count():
    scores, biases = law_of(WORKED, th.BayesSoftmax(BIAS), random_state(5, heads=3, m=0.5))
    points = _joint.points_of(_joint.Grid(1e-6, 14.0, 4, (5, 9, 17)), 3, WORKED.prior.components)
    more = _joint.padded(points)
    assert more[0].z.shape[-1] > points[0].z.shape[-1]
    few, many = (_joint.needed(scores, biases, jax.tree.map(jnp.asarray, p), 1e-6) for p in (points, more))
    assert float(few) == pytest.approx(float(many), rel=1e-12)


def test_monte_carlo_agrees():
    order = random_state(6, heads=3)
    for activation in (th.BayesSoftmax(BIAS), th.BayesSoftmax("norm", weights=WEIGHTS)):
        mean, error = th.population_risk(WORKED, activation, order, th.MonteCarlo(50_000), with_error=True)
        resolved = activation.resolved(jnp.diagonal(order.r))
        assert abs(float(mean) - float(coarse_risk(WORKED, resolved, order))) < 4 * float(error)


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: th.BayesSoftmax(np.zeros((2, 2))), "bias: expected 0 or 1 axes"),
        (lambda: th.BayesSoftmax(np.nan), "bias: expected finite numbers"),
        (lambda: th.BayesSoftmax("norms"), "bias: expected numbers or 'norm'"),
        (lambda: th.BayesSoftmax("norm", trained=True), "trained: expected False with bias='norm'"),
        (lambda: th.BayesSoftmax(weights=[0.5, 0.5]), "weights: expected None unless bias='norm'"),
        (lambda: th.BayesSoftmax("norm", weights=[1.0, 0.0]), "weights: expected positive numbers"),
        (lambda: th.BayesSoftmax("norm", weights=0.5), "weights: expected 1 axes"),
        (lambda: th.BayesSoftmax("norm")(jnp.zeros((2, 3))), "bias: expected numbers: bias='norm' needs"),
        (lambda: th.population_risk(WORKED, th.BayesSoftmax(np.zeros(3)), random_state(0)), "bias: expected one num"),
        (
            lambda: th.population_risk(WORKED, th.BayesSoftmax("norm", weights=[0.5, 0.5]), random_state(0)),
            "weights: expected one number or one per head",
        ),
        (
            lambda: th.population_risk(WORKED, th.BayesSoftmax(), random_state(0), th.Quadrature(1e-6, 32, 32)),
            "method: expected points in place of frequencies for BayesSoftmax",
        ),
        (
            lambda: th.population_risk(
                WORKED, th.BayesSoftmax(), random_state(0), th.Quadrature(1e-6, 32, points=(8, 8))
            ),
            r"points: expected one count per head \(4\)",
        ),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_scores_too_wide_for_the_fixed_nodes_are_an_error_not_a_number():
    with pytest.raises(Exception, match="fitted"):
        jax.block_until_ready(coarse_risk(WORKED, th.BayesSoftmax(BIAS), random_state(1, heads=3, m=30.0)))


# --- the flow ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_flow_of_norm_descends():
    order = random_state(1, heads=2, m=0.4, w=0.3)
    loose = th.Quadrature(1e-4, 24, points=(16, 24))
    flow = th.gradient_flow(
        WORKED, th.BayesSoftmax("norm"), order, np.linspace(0, 10, 11), method=loose, tolerance=1e-5, progress=False
    )
    assert np.all(np.diff(flow.risk) < 0)


@pytest.mark.slow
def test_a_trained_bias_starts_along_its_gradient():
    order = random_state(1, heads=2, m=0.4, w=0.3)
    loose = th.Quadrature(1e-4, 24, points=(16, 24))
    activation = th.BayesSoftmax([0.5, -0.5], trained=True)
    short = th.gradient_flow(
        WORKED, activation, order, [0.0, 1e-3, 2e-3], method=loose, tolerance=1e-9, bias_rate=0.7, progress=False
    )
    path = np.asarray(short.activation.bias)
    slope = jax.grad(lambda b: th.population_risk(WORKED, th.BayesSoftmax(b), order, loose))(activation.bias)
    np.testing.assert_allclose((-3 * path[0] + 4 * path[1] - path[2]) / 2e-3, -0.7 * slope, rtol=1e-3, atol=1e-7)
