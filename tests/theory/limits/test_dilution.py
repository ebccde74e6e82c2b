"""Dilution and support: no violation in 10^5 rows of each kind, the extremes are attained, closed forms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory.limits import effective_support, entropy, entropy_bound, softmax_weight_bounds, weight_bounds

FUNCTIONS = {  # positive on [−2, 2], with their minimum and maximum there
    "exp": (jnp.exp, np.exp(-2.0), np.exp(2.0)),
    "softplus": (jax.nn.softplus, np.log1p(np.exp(-2.0)), np.log1p(np.exp(2.0))),
    "square": (lambda l: 1 + l**2, 1.0, 5.0),
    "sigmoid": (jax.nn.sigmoid, 1 / (1 + np.exp(2.0)), 1 / (1 + np.exp(-2.0))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_no_weight_leaves_its_bounds(name, length):
    function, smallest, largest = FUNCTIONS[name]
    logits = jax.random.uniform(jax.random.key(length), (100_000, length), jnp.float64, -2, 2)
    ends = jnp.where(logits > 0, 2.0, -2.0)
    for l in (logits, ends):
        values = function(l)
        weights = values / jnp.sum(values, axis=-1, keepdims=True)
        for form in ("sharp", "printed"):
            low, high = weight_bounds(length, smallest, largest, form=form)
            assert float(jnp.min(weights)) >= float(low) * (1 - 1e-12)
            assert float(jnp.max(weights)) <= float(high) * (1 + 1e-12)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_sharp_bounds_are_attained(length):
    low, high = softmax_weight_bounds(length, 1.5, temperature=0.5)
    for sign, bound in ((-1, low), (1, high)):
        logits = np.full(length, -sign * 1.5)
        logits[0] = sign * 1.5
        assert float(jax.nn.softmax(logits / 0.5)[0]) == pytest.approx(float(bound), rel=1e-12)
    printed = softmax_weight_bounds(length, 1.5, temperature=0.5, form="printed")
    np.testing.assert_allclose(printed, [np.exp(-6) / length, np.exp(6) / length], rtol=1e-12)
    assert float(printed[0]) <= float(low) <= float(high) <= float(printed[1])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("length", [2, 16, 128])
def test_entropy_is_never_below_its_bounds(length, temperature):
    """Uniform logits in [−Δ, Δ], and logits at the ends, where entropy is least."""
    keys = jax.random.split(jax.random.key(length), 3)
    logits = jax.random.uniform(keys[0], (50_000, length), jnp.float64, -1, 1)
    share = jax.random.uniform(keys[1], (50_000, 1), jnp.float64)
    ends = jnp.where(jax.random.uniform(keys[2], (50_000, length), jnp.float64) < share, 1.0, -1.0)
    least = float(jnp.min(entropy(jax.nn.softmax(jnp.concatenate([logits, ends]) / temperature))))
    sharp = float(entropy_bound(length, 1.0, temperature=temperature))
    assert least >= sharp - 1e-12
    assert sharp >= float(entropy_bound(length, 1.0, temperature=temperature, form="printed")) - 1e-12


@pytest.mark.parametrize("gap", [0.0, 1e-6, 1e-3, 0.5, 3.0, 30.0, 2000.0])
def test_the_entropy_bound_is_the_least_over_rows_of_two_levels(gap):
    for length in (1, 2, 3, 17, 100):
        levels = [np.where(np.arange(length) < k, 0.0, -gap) for k in range(1, length + 1)]
        least = min(float(entropy(jax.nn.softmax(row))) for row in levels)
        assert float(entropy_bound(length, gap / 2)) == pytest.approx(least, rel=1e-10, abs=1e-13)


def test_two_levels_are_the_worst():
    """All rows on a grid of logits: none has less entropy than the bound."""
    grid = np.array(list(itertools.product(np.linspace(-1, 1, 9), repeat=4)))
    assert float(jnp.min(entropy(jax.nn.softmax(grid * 2.0)))) == pytest.approx(float(entropy_bound(4, 2.0)), rel=1e-12)


def test_bounds_broadcast():
    low, high = softmax_weight_bounds([[4], [8]], [0.5, 1.0, 2.0], temperature=[1.0, 2.0, 4.0])
    assert low.shape == high.shape == (2, 3)
    np.testing.assert_allclose(low[1], softmax_weight_bounds(8, 0.5)[0])
    assert entropy_bound([16, 64], 1.0).shape == (2,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weight_bounds(0, 1, 2), "length: expected"),
        (lambda: weight_bounds(0.5, 1, 2), "length: expected numbers from 1"),
        (lambda: weight_bounds(3, 0, 2), "smallest: expected positive"),
        (lambda: weight_bounds(3, 2, 1), "largest: expected no number below smallest"),
        (lambda: weight_bounds(3, 1, 2, form="best"), "form: expected 'sharp' or 'printed', got 'best'"),
        (lambda: softmax_weight_bounds(3, -1), "spread: expected"),
        (lambda: entropy_bound(3, 1, temperature=0), "temperature: expected positive"),
        (lambda: entropy([0.5, -0.5]), "weights: expected no negative entry"),
        (lambda: entropy([0.5, np.nan]), "weights: expected finite"),
        (lambda: effective_support([1.0], kind="top"), "kind: expected 'entropy' or 'participation'"),
    ],
)
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_entropy_and_support_of_known_rows(dtype):
    rows = np.array([[0.25] * 4, [1, 0, 0, 0], [0.5, 0.5, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0], [1e-30] * 4], dtype)
    h = entropy(rows)
    assert h.dtype == dtype
    np.testing.assert_allclose(h, [np.log(4), 0, np.log(2), np.log(2), 0, np.log(4)], rtol=1e-6)
    for kind in ("entropy", "participation"):
        np.testing.assert_allclose(effective_support(rows, kind=kind), [4, 1, 2, 2, 0, 4], rtol=1e-6)


def test_masked_weights_do_not_count():
    rows = np.array([[0.5, 0.5, 7.0], [1.0, np.nan, np.nan]])
    mask = np.array([[True, True, False], [True, False, False]])
    np.testing.assert_allclose(entropy(rows, where=mask), [np.log(2), 0], atol=1e-15)
    np.testing.assert_allclose(effective_support(rows, kind="participation", where=mask), [2, 1])


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=6, max_size=6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_support_lies_between_one_and_all_tokens(weights):
    both = [float(effective_support(np.array(weights), kind=kind)) for kind in ("participation", "entropy")]
    if sum(weights) == 0:
        assert both == [0, 0]
    else:
        assert 1 - 1e-12 <= both[0] <= both[1] * (1 + 1e-12) <= 6 * (1 + 1e-11)
