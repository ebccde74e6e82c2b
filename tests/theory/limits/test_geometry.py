"""Distinguishable tokens: by hand, and their expected number on the sphere against draws and bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.theory.limits.trials import LONG, direct_distances, numpy, top, trials
from theory.limits import coverage, separability, separability_bounds

DRAWS = 20_000
FALSE_ALARM = 5.0  # standard errors: one in 1.7 million for each comparison, some hundred of them


def on_sphere(key, *shape):
    x = jax.random.normal(key, shape, jnp.float64)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", ["isotropic", "clustered"])
def test_against_differences(kind):
    weights, vectors = trials((40, 8), kind, "peaked", sets=10, rows=100)
    for number in (1, 5, 39):
        chosen = top(weights, number)
        norms = direct_distances(weights, vectors, chosen)
        radius = np.min(np.where(chosen, np.inf, norms), axis=-1)
        found = numpy(separability(weights, vectors, number))
        np.testing.assert_allclose(found.radius, radius, atol=1e-8 * np.max(np.abs(vectors)) * 10)
        close = norms < radius[..., None]
        undecided = np.abs(norms - radius[..., None]) < 1e-6  # rounding may turn these
        assert np.all(found.number >= np.sum(chosen & close & ~undecided, axis=-1))
        assert np.all(found.number <= np.sum(chosen & (close | undecided), axis=-1))
        np.testing.assert_array_equal(found.fraction, np.asarray(found.number) / number)


def test_a_given_radius():
    weights, vectors = trials((40, 8), "isotropic", "peaked", sets=4, rows=50)
    chosen = top(weights, 10)
    norms = direct_distances(weights, vectors, chosen)
    for radius in (0.05, 0.3, 1.0):
        alone = ~np.any(~chosen & (norms <= radius), axis=-1)
        expected = np.sum(chosen & (norms <= radius), axis=-1) * alone
        np.testing.assert_array_equal(separability(weights, vectors, 10, radius=radius).number, expected)


def test_nothing_left_out_and_identical_tokens():
    x = jnp.ones((6, 3))
    everything = separability(jnp.full(6, 1 / 6), x, 6)
    assert (int(everything.number), float(everything.fraction)) == (6, 1.0)
    assert float(everything.radius) == np.inf
    same = separability(jnp.full(6, 1 / 6), x, 3)  # all at one distance: strictly nearer is none
    assert int(same.number) == 0
    mask = jnp.tril(jnp.ones((6, 6), bool))
    rows = separability(jnp.where(mask, 1 / 6, 0), x, 4, where=mask)
    np.testing.assert_array_equal(rows.fraction, [1, 1, 1, 1, 0, 0])
    nobody = separability(jnp.zeros(6), x, 2, where=jnp.zeros(6, bool))
    assert (int(nobody.number), float(nobody.fraction)) == (0, 1.0)


@functools.cache
def drawn(dim, number, spread):
    """Weights and the distances of the selected tokens in draws of x on the sphere."""
    weights = np.sort(
        np.asarray(jax.nn.softmax(spread * jax.random.normal(jax.random.key(number), (64,), jnp.float64)))
    )
    y = weights[::-1][:number]
    found = []
    for part in range(10):
        x = on_sphere(jax.random.fold_in(jax.random.key(dim), part), DRAWS // 10, number, dim)
        x = np.asarray(x) * y[:, None]
        found.append(np.linalg.norm(x.sum(axis=1, keepdims=True) - x, axis=-1))
    return weights[::-1], np.concatenate(found)


@pytest.mark.parametrize("dim", [pytest.param(2, marks=LONG), 8, pytest.param(64, marks=LONG)])
@pytest.mark.parametrize("number", [1, 2, 16])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_expected_numbers_lie_within_bounds(dim, number, spread):
    weights, norms = drawn(dim, number, spread)
    middle = float(np.mean(norms))
    for factor in (0.5, 0.9, 1.0, 1.1, 2.0):
        radius = factor * middle if middle > 0 else factor
        fractions = np.mean(norms <= radius, axis=-1)
        error = FALSE_ALARM * fractions.std() / np.sqrt(DRAWS)
        for form in ("sharp", "mcdiarmid"):
            low, high = separability_bounds(weights.copy(), radius, number, dim=dim, form=form)
            assert float(low) - error - 1e-12 <= fractions.mean() <= float(high) + error + 1e-12, (form, factor)
        low, _ = separability_bounds(weights.copy(), radius, number, separation=0.0, form="printed")
        assert float(low) - error <= fractions.mean()
    drawn.cache_clear()


def test_two_tokens_are_not_random():
    """‖s − α_i x_i‖ = α_j M: the fraction is known, and the limit form is exact."""
    for radius, share in ((0.05, 0.0), (0.3, 0.5), (0.9, 1.0)):
        low, high = separability_bounds([0.8, 0.2], radius, 2, form="limit")
        assert float(low) == float(high) == share
        for form in ("sharp", "mcdiarmid"):
            low, high = separability_bounds([0.8, 0.2], radius, 2, dim=3, form=form)
            assert float(low) <= share <= float(high)


def test_the_limit_of_many_dimensions():
    weights = np.asarray(jax.nn.softmax(jnp.linspace(2.0, 0.0, 32)))
    x = np.asarray(on_sphere(jax.random.key(0), 100, 8, 4096))
    y = weights[:8, None] * x
    norms = jnp.linalg.norm(jnp.sum(y, axis=1, keepdims=True) - y, axis=-1)
    v = np.sqrt(np.sum(weights[:8] ** 2) - weights[:8] ** 2)
    np.testing.assert_allclose(norms, np.broadcast_to(v, norms.shape), rtol=0.1)
    radius = float((v[3] + v[4]) / 2)
    share, _ = separability_bounds(weights, radius, 8, form="limit")
    assert float(share) == np.mean(v < radius) == 0.5
    for form in ("sharp", "mcdiarmid"):  # both close up on it, here at a radius that is not between neighbours
        low, high = separability_bounds(weights, 1.5 * v.max(), 8, dim=1e9, form=form)
        assert float(high) == 1
        assert float(low) > (1 - 1e-6 if form == "sharp" else 0.1)
    low, high = separability_bounds(weights, radius, 8, dim=1e9, form="sharp")
    assert float(high) - float(low) < 1e-4


def test_the_printed_upper_bound_fails():
    """Every ‖s − α_i x_i‖ ≤ A − α_i < r: all tokens are in the ball, whatever x, and the printed bound says fewer."""
    weights = np.full(64, 1 / 64)
    _, high = separability_bounds(weights, 1.0, 16, separation=0.0, form="printed")
    low, _ = separability_bounds(weights, 1.0, 16, dim=64)
    x = on_sphere(jax.random.key(0), 1000, 16, 64) / 64
    norms = jnp.linalg.norm(jnp.sum(x, axis=1, keepdims=True) - x, axis=-1)
    assert bool(jnp.all(norms < 1.0))
    assert float(high) < 0.8 < 0.999 < float(low)


def test_the_printed_lower_bound_is_negative_at_the_measured_radius():
    weights = jax.nn.softmax(2 * jax.random.normal(jax.random.key(0), (32, 256), jnp.float64))
    x = on_sphere(jax.random.key(1), 256, 64)
    found = separability(weights, x, 64)
    low, _ = separability_bounds(weights, found.radius, 64, separation=1.0, form="printed")
    assert float(jnp.mean(low < 0)) > 0.5


@pytest.mark.parametrize("length", [512, 1024])
@pytest.mark.parametrize("number", [64, 128])
@pytest.mark.parametrize("spread", [1.5, 3.0])
def test_the_plateau_is_one_of_embeddings_that_share_a_mean(length, number, spread):
    """Isotropic embeddings 0.25–0.36 distinguishable; with a common mean of half their norm 0.72–0.86.

    Means over 32 draws of x with 32 rows each have standard errors up to 0.003, and the limits below lie three or more
    from what was measured: with other keys one of the eight would leave them less than one time in a hundred.
    """
    keys = jax.random.split(jax.random.key(length + number), 2)
    weights = jax.nn.softmax(spread * jax.random.normal(keys[0], (32, 32, length), jnp.float32))
    normal = jax.random.normal(keys[1], (32, length, 64), jnp.float32)

    def fraction(x):
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return float(jnp.mean(separability(weights, x, number).fraction))

    assert 0.24 <= fraction(normal) <= 0.37
    assert 0.71 <= fraction(normal + 0.5) <= 0.87


def test_bounds_take_rows_and_counts():
    weights, vectors = trials((40, 8), "isotropic", "peaked", sets=2, rows=3)
    counts = [1, 4, 16]
    radius = separability(weights, vectors, counts).radius
    low, high = separability_bounds(weights, radius, counts, dim=8)
    assert low.shape == high.shape == (2, 3, 3)
    for k, number in enumerate(counts):
        one = separability_bounds(weights, radius[..., k], number, dim=8)
        np.testing.assert_allclose(low[..., k], one[0], rtol=1e-12)
        by_set = separability_bounds(weights, radius[..., k], selected=top(weights, number), dim=8)
        np.testing.assert_allclose(high[..., k], by_set[1], rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-9), (np.float32, 1e-5)])
def test_scale_of_the_sphere_and_of_the_weights(dtype, tolerance):
    """The bounds take r over M and the weights: no power of a number may under- or overflow."""
    weights = np.asarray(jax.nn.softmax(jnp.linspace(2.0, 0.0, 32)), dtype)
    for form in ("sharp", "mcdiarmid", "limit", "printed"):
        plain = np.array(separability_bounds(weights, 0.1, 8, dim=5, separation=0.3, form=form))
        for of_weights, norm in ((1, 7.0), (1, 1e-8), (1, 1e12), (1, 1e-30), (1, 1e30), (1e-25, 1.0), (1e-25, 1e-9)):
            given = (weights * dtype(of_weights), 0.1 * norm * of_weights, 8)
            scaled = separability_bounds(*given, dim=5, norm=norm, separation=0.3 * norm, form=form)
            if of_weights == 1 or form != "printed":  # whose upper side takes M alone
                np.testing.assert_allclose(scaled, plain, rtol=tolerance)
    equal = np.full(64, 1 / 64, dtype)
    low, high = separability_bounds(equal, 0.061e-8, 16, dim=64, norm=1e-8)
    assert 0.008 < float(low) < 0.0085
    assert float(high) == 1


def test_coverage():
    levels = np.array([0.0, 0.3, 1.0, 1e-12])
    np.testing.assert_allclose(coverage(levels, 12), 1 - (1 - levels) ** 12, atol=1e-15)
    np.testing.assert_allclose(coverage(1e-12, 12), 1.2e-11, rtol=1e-9)
    assert coverage([[0.5], [0.8]], [1, 2, 3]).shape == (2, 3)
    assert float(coverage(1.0, 0)) == 0
    draws = np.random.default_rng(0).random((100_000, 5)) < 0.3  # independent heads; five standard errors
    assert abs(draws.any(axis=1).mean() - float(coverage(0.3, 5))) < 5 * np.sqrt(0.17 * 0.83 / 100_000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: separability_bounds([0.5, 0.5], 1.0, 1), "dim: expected a number with form='sharp'"),
        (lambda: separability_bounds([0.5, 0.5], 1.0, 1, form="printed"), "separation: expected a number"),
        (lambda: separability_bounds([0.5, 0.5], 1.0, 1, dim=2, form="exact"), "form: expected"),
        (lambda: separability_bounds([0.5, 0.5], -1.0, 1, dim=2), "radius: expected no negative"),
        (lambda: separability_bounds([0.5, -0.5], 1.0, 1, dim=2), "weights: expected no negative"),
        (lambda: separability([0.5, 0.5], np.ones((2, 1)), 1, radius=-1.0), "radius: expected no negative"),
        (lambda: coverage(1.5, 2), "level: expected numbers from 0 to 1"),
    ],
)
def test_what_is_wrong_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
