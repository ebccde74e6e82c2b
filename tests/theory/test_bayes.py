"""The Bayes risk: the reference tables, the heads that reach it, sampling, derivatives; and nothing goes below it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import theory as th
from tests.theory.sampling import finite_difference
from tests.theory.states import FLIPS, PRIORS, random_state

FLIP = th.sign_flips([0.0], [1.0])
TABLES = {
    "one spike": (th.discrete([[1.0]]), [0.63918, 0.49995, 0.30022, 0.10579, 0.01286]),
    "sign flip": (FLIP, [0.74482, 0.64067, 0.43237, 0.17254, 0.02346]),
    "isotropic": (th.gaussian([0.0, 0.0], [1.0, 1.0]), [0.70572, 0.58358, 0.42065, 0.26595, 0.15241]),
}
LINE = th.Quadrature(1e-8, nodes=96, points=(128,))
PLANE = th.Quadrature(1e-8, nodes=96, points=(96, 96))
SPACE = th.Quadrature(1e-6, nodes=64, points=(40, 40, 40))


def sampled_bayes_risk(task, samples, seed):
    """1 − E Σ p², plain NumPy, by the densities of token ε and of the noise. Shares no code with the package."""
    rng = np.random.default_rng(seed)
    w, mu, cov = (np.asarray(a) for a in (task.prior.weights, task.prior.means, task.prior.covariances))
    nu, length, features = float(task.snr), int(task.length), mu.shape[1]
    total = np.eye(features) + nu * cov
    component = rng.choice(len(w), p=w, size=samples)
    u = rng.standard_normal((samples, length, features))
    u[:, 0] = np.sqrt(nu) * mu[component] + np.einsum("nfg,ng->nf", np.linalg.cholesky(total)[component], u[:, 0])
    ratio = np.zeros((samples, length))
    for weight, centre, matrix in zip(w, np.sqrt(nu) * mu, total, strict=True):
        away = u - centre
        square = np.einsum("nlf,fg,nlg->nl", away, np.linalg.inv(matrix), away) - (u**2).sum(-1)
        ratio += weight * np.exp(-square / 2) / np.sqrt(np.linalg.det(matrix))
    p = ratio / ratio.sum(1, keepdims=True)
    return 1 - (p**2).sum(1).mean(), (p**2).sum(1).std() / np.sqrt(samples), (p[:, 0] - (p**2).sum(1)).mean()


@pytest.mark.parametrize("name", TABLES)
def test_reference_tables(name):
    prior, expected = TABLES[name]
    method = LINE if prior.features == 1 else PLANE
    for snr, digits in zip((1, 2, 4, 8, 16), expected, strict=True):
        task = th.SingleLocation(jnp.asarray(5), snr, prior)
        value, error = th.bayes_risk(task, method, with_error=True)
        # error: the two forms differ by less, and so does the value under half as many nodes again
        assert f"{float(value):.5f}" == f"{digits:.5f}"
        assert error < 1e-6
    assert f"{float(th.bayes_risk(task)):.5f}" == f"{digits:.5f}"


# 8 comparisons at |z| < 4: false-alarm rate 0.05 %, seeds fixed
@pytest.mark.parametrize("prior", [pytest.param(p, marks=pytest.mark.slow if p == "one hot" else ()) for p in PRIORS])
def test_quadrature_equals_sampling(prior):
    for length in (2, 10):
        task = th.SingleLocation(jnp.asarray(length), 1.5, PRIORS[prior])
        value, error = th.bayes_risk(task, SPACE, with_error=True)
        mean, standard_error, _ = sampled_bayes_risk(task, 60_000, seed=length)
        assert abs(float(value) - mean) < 4 * standard_error
        assert error < 1e-5
    task = th.SingleLocation(10, 1.5, PRIORS[prior])
    sampled, spread = th.bayes_risk(task, th.MonteCarlo(50_000), with_error=True)
    assert abs(float(sampled - value)) < 4 * float(spread)


def test_sobol_points_know_their_error():
    missed = 0
    for snr in (0.5, 1, 2, 4, 8):
        task = th.SingleLocation(jnp.asarray(10), snr, FLIPS)
        value, error = th.bayes_risk(task, th.Quadrature(1e-6, 64, points=4096), with_error=True)
        missed += abs(float(value - th.bayes_risk(task, SPACE))) > 3 * float(error) + 1e-6
    assert missed <= 1


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 10])
def test_without_signal_every_token_is_as_likely(length):
    assert float(th.bayes_risk(th.SingleLocation(length, 0.0, FLIP))) == pytest.approx(1 - 1 / length, abs=1e-6)


@pytest.mark.parametrize("length", [100, 1000, 10**6])
def test_without_signal_every_token_is_as_likely_in_long_sequences(length):
    assert float(th.bayes_risk(th.SingleLocation(length, 0.0, FLIP))) == pytest.approx(1 - 1 / length, abs=1e-6)


def test_the_default_method_keeps_its_tolerance_in_long_sequences():
    task = th.SingleLocation(jnp.asarray(1000), 1.0, FLIP)
    best = th.bayes_risk(task, th.Quadrature(1e-9, nodes=800, points=(400,)))
    assert float(th.bayes_risk(task)) == pytest.approx(float(best), abs=1e-5)


def test_sampling_takes_a_length_that_is_an_array():
    risks = [
        th.bayes_risk(th.SingleLocation(length, 1.0, FLIP), th.MonteCarlo(1_000)) for length in (jnp.asarray(5), 5)
    ]
    assert risks[0] == risks[1]


def test_extremes_are_finite():
    for prior in (
        FLIP,
        th.gaussian([0.0], [1.0]),
        th.GaussianMixture([0.5, 0.0, 0.5], [[1.0], [9.0], [0.0]], [[[0.0]]] * 3),
    ):
        slope = jax.jit(jax.value_and_grad(lambda snr, n, p=prior: th.bayes_risk(th.SingleLocation(n, snr, p), LINE)))
        for length, snr in ((2, 1e4), (10, 1e4), (10**6, 30.0), (2, 1e-3)):
            value, gradient = slope(snr, jnp.asarray(length))
            assert np.isfinite(value)
            assert np.isfinite(gradient)
            assert -1e-9 < float(value) < 1.001


# --- the heads that reach it -------------------------------------------------------------------------------------

DISCRETE = {
    "sign flip": FLIP,
    "one hot": th.one_hot(2, [0.7, 0.3]),
    "random": th.discrete(np.random.default_rng(0).standard_normal((3, 2)), [0.5, 0.3, 0.2]),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_one_head_for_each_support_point_reaches_it(name):
    prior = DISCRETE[name]
    method = th.Quadrature(1e-7, 96, points=(64,) * prior.features)
    for length in (2, 5, 50):
        task = th.SingleLocation(jnp.asarray(length), 3.0, prior)
        order, activation = th.bayes_heads(task)
        assert order.heads == prior.components
        heads = th.population_risk(
            task,
            activation,
            order,
            th.Quadrature(1e-7, 48, points=(1,) * (order.heads - prior.features) + (64,) * prior.features),
        )
        assert float(heads) == pytest.approx(float(th.bayes_risk(task, method)), abs=1e-5)
    # b_h = r_hh/2 − log w_h
    norm = th.BayesSoftmax("norm", weights=prior.weights).resolved(jnp.diagonal(order.r))
    np.testing.assert_allclose(norm.bias, activation.bias, atol=1e-12)


def test_heads_reach_it_by_the_default_methods():
    task = th.SingleLocation(5, 2.0, FLIP)
    order, activation = th.bayes_heads(task)
    for each in (activation, th.BayesSoftmax("norm", weights=[0.5, 0.5])):
        value = th.population_risk(task, each, order)
        assert float(value) == pytest.approx(float(th.bayes_risk(task)), abs=2e-6)


def test_no_finite_number_of_heads_is_the_posterior_of_a_gaussian():
    with pytest.raises(ValueError, match="prior: expected a discrete prior"):
        th.bayes_heads(th.SingleLocation(5, 2.0, th.gaussian([0.0], [1.0])))


def test_support_points_without_weight_have_no_head():
    order, _ = th.bayes_heads(th.SingleLocation(5, 2.0, th.one_hot(3, [0.5, 0.5, 0.0])))
    assert order.heads == 2


def test_the_slope_in_a_weight_of_zero_is_not_nan():
    risk = lambda w: th.bayes_risk(th.SingleLocation(5, 1.0, th.one_hot(2, w)), PLANE)  # noqa: E731
    assert np.isfinite(jax.grad(risk)(jnp.asarray([1.0, 0.0]))).all()


# --- derivatives -------------------------------------------------------------------------------------------------


def test_derivatives_equal_finite_differences():
    points, weights = jnp.asarray([[1.0, 0.2], [-0.5, 0.7]]), jnp.asarray([0.4, 0.6])
    covariances = jnp.stack([0.3 * jnp.eye(2), jnp.zeros((2, 2))])

    method = th.Quadrature(1e-7, nodes=64, points=(72, 72))

    @jax.jit
    def risk(x):
        snr, tilt, means, spread = x
        mixture = th.GaussianMixture(weights + tilt * jnp.asarray([1.0, -1.0]), means, spread)
        return th.bayes_risk(th.SingleLocation(5, snr, mixture), method)

    x = (jnp.asarray(2.0), jnp.asarray(0.0), points, covariances)
    gradient, curvature = jax.jit(jax.grad(risk)), jax.jit(lambda x, d: jax.jvp(jax.grad(risk), (x,), (d,))[1])
    slopes, rng = gradient(x), np.random.default_rng(1)
    for index in range(4):
        direction = [jnp.zeros_like(a) for a in x]
        step = rng.standard_normal(x[index].shape)
        direction[index] = jnp.asarray(step @ np.swapaxes(step, -1, -2) if step.ndim == 3 else step)
        estimate = finite_difference(risk, x, tuple(direction), 1e-3)
        assert float(jnp.vdot(slopes[index], direction[index])) == pytest.approx(float(estimate), abs=1e-6)
        estimate = finite_difference(gradient, x, tuple(direction), 1e-3)
        for a, b in zip(curvature(x, tuple(direction)), estimate, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_jit_vmap_and_hessian():
    risk = lambda snr: th.bayes_risk(th.SingleLocation(5, snr, FLIP), LINE)  # noqa: E731
    values = jax.jit(jax.vmap(risk))(jnp.asarray([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(values, TABLES["sign flip"][1][:3], atol=6e-6)
    assert np.isfinite(jax.hessian(risk)(2.0))


# --- nothing goes below ------------------------------------------------------------------------------------------

BELOW = {
    "softmax": th.Quadrature(1e-5, 64, 96),
    "softmax1": th.Quadrature(1e-5, 64, 96),
    "bayes": th.Quadrature(1e-5, 40, points=(40, 48)),
}


@pytest.mark.slow
@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    family=st.sampled_from(["flips", "one hot", "gaussian", "mixture"]),
    length=st.sampled_from([2, 3, 10, 50]),
    snr=st.floats(0.05, 8),
    size=st.floats(0, 1.2),
)
def test_no_activation_beats_it(seed, family, length, snr, size):
    rng = np.random.default_rng(seed)
    random, even, uneven = rng.standard_normal((2, 2)), [0.5, 0.5], rng.dirichlet([1, 1])
    weights, means, width = {
        "flips": (even, np.array([[0.5, 1.0], [0.5, -1.0]]), 0.0),
        "one hot": (uneven, np.eye(2), 0.0),
        "gaussian": (even, np.array([random[0]] * 2), 0.6),
        "mixture": (uneven, random, 0.6),
    }[family]
    root = width * rng.standard_normal((2, 2, 2))
    root = root[[0, 0]] if family == "gaussian" else root
    prior = th.GaussianMixture(weights, means, root @ np.swapaxes(root, -1, -2))
    task = th.SingleLocation(jnp.asarray(length), snr, prior)
    order = random_state(seed, heads=2, features=2, m=size, w=0.5 * size)
    bayes, slack = th.bayes_risk(task, th.Quadrature(1e-6, nodes=96, points=(72, 72)), with_error=True)
    for name, activation in {
        "softmax": th.Softmax(),
        "softmax1": th.Softmax1(rng.uniform(-2, 4, 2), rng.uniform(0.5, 2.5, 2)),
        "bayes": th.BayesSoftmax(rng.uniform(-1, 1, 2)),
    }.items():
        value, error = th.population_risk(task, activation, order, BELOW[name], with_error=True)
        assert float(value) >= float(bayes) - float(slack + 3 * error) - 1e-6
        assert float(slack + error) < 0.02


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: th.bayes_risk(t, th.Quadrature(1e-6, 32, 32)), "method: expected points in place of frequencies"),
        (
            lambda t: th.bayes_risk(t, th.Quadrature(1e-6, 32, points=(9, 9))),
            r"points: expected one count per feature \(1\)",
        ),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(th.SingleLocation(5, 1.0, FLIP))


def test_tolerances_below_the_rounding_of_many_tokens_are_refused():
    with pytest.raises(ValueError, match="tolerance: expected at least 1e-05 at L = 10000000000"):
        th.bayes_risk(th.SingleLocation(10**10, 1.0, FLIP))
