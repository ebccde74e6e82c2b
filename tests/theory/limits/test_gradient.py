"""Jacobian norms: power iteration against dense matrices and the secular equation; bounds in 10^5 rows of each kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import theory as th
from tests.theory.limits.trials import LONG, WEIGHTS, random_weights
from theory.limits import (
    directional_gradient,
    jacobian_bound,
    jacobian_norm,
    softmax_difference_bound,
    softmax_jacobian_bound,
    softmax_jacobian_norm,
)


def dense(activation, logits):
    """‖J‖₂ of each row, from the whole matrix."""
    one = jax.jacfwd(lambda l: activation(l[None])[0])
    return np.linalg.norm(np.asarray(jax.vmap(one)(logits)), ord=2, axis=(-2, -1))


@pytest.mark.parametrize("activation", [th.Softmax(0.4), th.Softmax1(0.5, 2.0)], ids=str)
@pytest.mark.parametrize("scale", [pytest.param(0.1, marks=LONG), 1.0, pytest.param(6.0, marks=LONG)])
def test_power_iteration_against_dense_matrices(activation, scale):
    logits = scale * jax.random.normal(jax.random.key(0), (60, 23), jnp.float64)
    found = jacobian_norm(activation, logits)
    exact = dense(activation, logits)
    assert bool(jnp.all(found.converged))
    assert bool(jnp.all(found.residual <= 1e-3))
    rounding = 1e-15 / 0.4  # of the activation's own derivatives, where weights are saturated
    assert np.all(np.asarray(found.value) <= exact * (1 + 1e-12) + rounding)
    np.testing.assert_allclose(found.value, exact, rtol=5e-4, atol=rounding)  # what the tolerance says
    tight = jacobian_norm(activation, logits, tolerance=1e-7, iterations=100_000)
    np.testing.assert_allclose(tight.value, exact, rtol=1e-7, atol=rounding)


def test_any_function_and_its_asymmetric_jacobian():
    def softplus(l):
        values = jax.nn.softplus(l)
        return values / jnp.sum(values, axis=-1, keepdims=True)

    logits = 3 * jax.random.normal(jax.random.key(1), (40, 11), jnp.float64)
    found = jacobian_norm(softplus, logits, tolerance=1e-6, iterations=20_000)
    np.testing.assert_allclose(found.value, dense(softplus, logits), rtol=1e-6)
    slope = jnp.max(jax.nn.sigmoid(logits) / jax.nn.softplus(logits), axis=-1)
    bound = jacobian_bound(softplus(logits), slope=slope)
    assert bool(jnp.all(found.value <= bound * (1 + 1e-9)))
    assert bool(jnp.all(bound <= 0.5 * slope * (1 + 1e-12)))


def test_heads_that_share_a_normalizer_are_taken_together():
    activation = th.BayesSoftmax([0.0, 0.7])
    logits = jax.random.normal(jax.random.key(2), (5, 2, 6), jnp.float64)
    flat = jax.vmap(jax.jacfwd(lambda l: activation(l.reshape(2, 6)).reshape(12)))(logits.reshape(5, 12))
    found = jacobian_norm(activation, logits, tolerance=1e-6, iterations=20_000)
    assert found.value.shape == (5,)
    np.testing.assert_allclose(found.value, np.linalg.norm(flat, ord=2, axis=(-2, -1)), rtol=1e-6)


def test_a_temperature_for_each_head():
    logits = jax.random.normal(jax.random.key(3), (4, 2, 9), jnp.float64)
    found = jacobian_norm(th.Softmax([0.5, 2.0]), logits, tolerance=1e-6, iterations=20_000)
    for h, t in enumerate((0.5, 2.0)):
        np.testing.assert_allclose(found.value[:, h], dense(th.Softmax(t), logits[:, h]), rtol=1e-6)


@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("length", [2, pytest.param(5, marks=LONG), 24])
def test_the_secular_equation_against_dense_matrices(weighting, length):
    weights = random_weights(weighting, jax.random.key(length), 2000, length)
    a = np.asarray(weights)
    exact = np.linalg.norm(a[:, :, None] * np.eye(length) - a[:, :, None] * a[:, None], ord=2, axis=(-2, -1))
    np.testing.assert_allclose(softmax_jacobian_norm(weights, temperature=0.3), exact / 0.3, rtol=1e-9, atol=1e-13)
    single = softmax_jacobian_norm(weights.astype(jnp.float32), temperature=0.3)
    np.testing.assert_allclose(single, exact / 0.3, rtol=3e-5, atol=3e-7)


@pytest.mark.parametrize("weighting", WEIGHTS)
@pytest.mark.parametrize("length", [2, pytest.param(5, marks=LONG), 24])
def test_no_norm_is_above_its_bound(weighting, length):
    """10^5 rows each; softmax is the general form with |F'/F| = 1/T."""
    weights = random_weights(weighting, jax.random.key(100 + length), 100_000, length)
    norms = softmax_jacobian_norm(weights, temperature=0.25)
    bound = jacobian_bound(weights, slope=4.0)
    assert bool(jnp.all(norms <= bound * (1 + 1e-9)))
    assert bool(jnp.all(bound <= float(softmax_jacobian_bound(0.25)) * (1 + 1e-12)))


def test_the_bound_is_attained_and_the_printed_one_fails():
    for temperature in (0.05, 1.0, 3.0):
        norm = float(jacobian_norm(th.Softmax(temperature), jnp.zeros(2)).value)
        assert norm == pytest.approx(1 / (2 * temperature), rel=1e-12)
        assert norm == pytest.approx(float(softmax_jacobian_bound(temperature)), rel=1e-12)
        assert norm > 1.9 * float(softmax_jacobian_bound(temperature, form="printed"))
    # in rows of many tokens too: two that share the weight
    logits = jnp.zeros(100).at[:2].set(10.0)
    assert float(jacobian_norm(th.Softmax(), logits).value) > 0.49
    # what 1/(4T) does bound: single entries
    weights = random_weights("peaked", jax.random.key(0), 10_000, 5)
    entries = weights[:, :, None] * (jnp.eye(5)[None] - weights[:, None])
    assert float(jnp.max(jnp.abs(entries))) <= 0.25


@pytest.mark.parametrize("size", [1e-3, 1e-1, 10.0])
@pytest.mark.parametrize("temperature", [0.02, pytest.param(0.3, marks=LONG), pytest.param(5.0, marks=LONG)])
def test_differences_stay_below_their_bound(size, temperature):
    logits = jax.random.normal(jax.random.key(4), (20_000, 8), jnp.float64)
    found = directional_gradient(th.Softmax(temperature), logits, size, key=jax.random.key(5), directions=5)
    assert found.shape == (5, 20_000)
    assert float(jnp.max(found)) <= float(softmax_difference_bound(temperature, size)) * (1 + 1e-9)


def test_a_finite_step_exceeds_the_printed_bound():
    """Along (1, −1)/√2 at equal logits: 0.5/T, and above √2 at low temperature."""
    step = np.array([1.0, -1.0]) / np.sqrt(2) * 1e-3
    moved = np.asarray(th.Softmax(0.05)(jnp.asarray([step]))[0])
    gradient = np.linalg.norm(moved - 0.5) / 1e-3
    assert gradient > 7 * float(softmax_difference_bound(0.05, 1e-3, form="printed"))
    assert gradient <= float(softmax_difference_bound(0.05, 1e-3))


def test_a_small_step_in_a_random_direction_is_the_jacobian_there():
    logits = jax.random.normal(jax.random.key(6), (7, 12), jnp.float64)
    found = directional_gradient(th.Softmax(), logits, 1e-6, key=jax.random.key(7), directions=2)
    norms = jacobian_norm(th.Softmax(), logits, tolerance=1e-6, iterations=20_000).value[None]
    assert bool(jnp.all(found <= norms * (1 + 1e-5)))
    assert bool(jnp.all(found > 0))


def test_a_random_direction_underestimates_the_norm():
    """Two tokens that share the weight, 4096 in all: the direction that matters is one of 4096."""
    logits = jnp.zeros(4096).at[:2].set(20.0)
    norm = float(jacobian_norm(th.Softmax(), logits).value)
    found = directional_gradient(th.Softmax(), logits, 1e-3, key=jax.random.key(8), directions=200)
    ratio = norm / np.asarray(found)
    assert np.median(ratio) > 60  # √4096/|normal| on average
    assert norm / np.max(found) > 15  # two hundred directions do not find it
    assert np.all(ratio > 1)


def test_masked_tokens():
    logits = jax.random.normal(jax.random.key(9), (6, 6), jnp.float64)
    mask = jnp.tril(jnp.ones((6, 6), bool)).at[3].set(False)
    found = jacobian_norm(
        th.Softmax(0.5), jnp.where(mask, logits, jnp.nan), where=mask, tolerance=1e-6, iterations=9999
    )
    for n in (0, 2, 3, 5):
        expected = 0 if n in (0, 3) else dense(th.Softmax(0.5), logits[n : n + 1, : n + 1])[0]
        assert float(found.value[n]) == pytest.approx(expected, rel=1e-6, abs=1e-15)
    secular = softmax_jacobian_norm(
        jnp.where(mask, jax.nn.softmax(jnp.where(mask, logits / 0.5, -1e30)), 0), temperature=0.5, where=mask
    )
    np.testing.assert_allclose(found.value, secular, rtol=1e-6, atol=1e-15)
    moved = directional_gradient(th.Softmax(0.5), logits, 1e-3, key=jax.random.key(0), where=mask)
    assert bool(jnp.all(jnp.isfinite(moved)))
    assert bool(jnp.all(moved[0, jnp.array([0, 3])] == 0))


def test_norms_of_saturated_rows():
    """Weights of all but one token far below the rounding unit: small norms, or 0, and never NaN."""
    for dtype in (jnp.float32, jnp.float64):
        logits = jnp.array([[30.0, 0.0, 0.0], [500.0, 0.0, 0.0], [90.0, 0.0, -5.0]], dtype)
        found = jacobian_norm(th.Softmax(), logits)
        assert bool(jnp.all(found.converged))
        secular = softmax_jacobian_norm(jax.nn.softmax(logits))
        assert float(secular[0]) == pytest.approx(3 * np.exp(-30), rel=1e-5)  # direction (2, −1, −1)
        assert bool(jnp.all(jnp.isfinite(secular)))
        np.testing.assert_allclose(found.value, secular, rtol=1e-3, atol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_rounding_ends_the_iteration(dtype):
    """Norms from far above the rounding of the derivative, ε/T, to far below: none is iterated on without gain."""
    temperature, eps = 0.3, float(jnp.finfo(dtype).eps)
    gaps = temperature * np.linspace(1, 24 if dtype == jnp.float32 else 48, 24)
    logits = jnp.zeros((24, 6), dtype).at[:, 0].set(jnp.asarray(gaps, dtype)).at[0].set(1.23)
    where = jnp.ones(logits.shape, bool).at[0, 1:].set(False)  # a row of one token
    activation = th.Softmax(temperature)
    found = jacobian_norm(activation, logits, where=where)
    exact = softmax_jacobian_norm(activation(logits, where), temperature=temperature, where=where)
    assert int(found.iterations) < 20
    assert (float(found.value[0]), float(found.residual[0]), bool(found.converged[0])) == (0, 0, True)
    assert bool(jnp.all(found.converged | (exact < 5000 * eps / temperature)))
    # 1 − p_0 of 6 tokens: five sums and a division round by ε/2 or less each, here and again in the derivative
    np.testing.assert_allclose(found.value, exact, rtol=1e-3, atol=10 * eps / temperature)


def test_single_precision():
    logits = jax.random.normal(jax.random.key(1), (3, 50, 64), jnp.float32)
    found = jacobian_norm(th.Softmax(), logits)
    assert found.value.dtype == jnp.float32
    assert bool(jnp.all(found.converged))
    np.testing.assert_allclose(found.value, softmax_jacobian_norm(jax.nn.softmax(logits)), rtol=5e-4)


def test_too_few_iterations_are_told():
    logits = jax.random.normal(jax.random.key(1), (3, 64), jnp.float64)
    found = jacobian_norm(th.Softmax(), logits, iterations=2, tolerance=1e-9)
    assert not bool(jnp.any(found.converged))
    assert int(found.iterations) == 2


@given(st.lists(st.floats(-50, 50), min_size=5, max_size=5), st.floats(0.05, 20))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_norm_is_below_its_bounds_for_any_logits(logits, temperature):
    activation = th.Softmax(temperature)
    l = jnp.asarray(logits)
    found = float(jacobian_norm(activation, l).value)
    bound = float(jacobian_bound(activation(l[None])[0], slope=1 / temperature))
    assert found <= bound * (1 + 1e-9) + 1e-15 / temperature
    assert bound <= float(softmax_jacobian_bound(temperature)) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jacobian_norm("softmax", [0.0]), "activation: expected"),
        (lambda: jacobian_norm(jnp.sum, np.zeros((3, 2))), "activation: expected a map that keeps the shape"),
        (lambda: jacobian_norm(th.Softmax(), [np.nan, 0.0]), "logits: expected finite"),
        (lambda: jacobian_norm(th.Softmax(), [0.0], tolerance=2), "tolerance: expected"),
        (lambda: jacobian_norm(th.Softmax(), [0.0], iterations=0), "iterations: expected"),
        (lambda: jacobian_norm(th.Softmax(), [0.0], joint=1), "joint: expected"),
        (lambda: directional_gradient(th.Softmax(), [0.0], 0, key=jax.random.key(0)), "size: expected positive"),
        (lambda: directional_gradient(th.Softmax(), [0.0], 1.0, key=0), "key: expected"),
        (lambda: softmax_jacobian_bound(0), "temperature: expected positive"),
        (lambda: softmax_jacobian_norm([1.5, -0.5]), "weights: expected no negative"),
        (lambda: jacobian_bound([0.5, 0.5], slope=-1), "slope: expected"),
    ],
)
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
