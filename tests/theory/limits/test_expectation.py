"""Random sets: the expectation of d̃ and the second moment against all sets there are, and against draws of sets."""

from itertools import combinations

import jax
import numpy as np
import pytest

from tests.theory.limits.trials import LONG, trials
from theory.limits import expected_distance, second_moment

FALSE_ALARM = 5.0  # standard errors: one in 1.7 million, two-sided


def by_enumeration(weights, vectors, number):
    """E d̃ over all sets of N, and E‖s − y_i‖² over all sets of N others, for one row."""
    y = weights[:, None] * vectors
    length = len(y)
    total, moments, seen = 0.0, np.zeros(length), np.zeros(length)
    sets = list(combinations(range(length), number))
    for chosen in sets:
        norms = np.linalg.norm(y[list(chosen)].sum(axis=0) - y, axis=-1)
        left = np.ones(length, bool)
        left[list(chosen)] = False
        total += norms[left].sum()
        moments[left] += norms[left] ** 2
        seen[left] += 1
    return total / len(sets), moments / np.maximum(seen, 1)


@pytest.mark.parametrize("kind", ["isotropic", "clustered", "equal", "collinear"])
@pytest.mark.parametrize("length", [2, pytest.param(3, marks=LONG), 7])
def test_against_every_set_there_is(kind, length):
    weights, vectors = trials((length, 3), kind, "peaked", sets=4, rows=6)
    counts = list(range(1, length + 1))
    found = expected_distance(weights, vectors, counts)
    moments = second_moment(weights, vectors, counts)
    assert moments.shape == (4, 6, length, length)
    for g in range(4):
        for q in range(6):
            for k, number in enumerate(counts):
                exact, squares = by_enumeration(weights[g, q], vectors[g], number)
                value, error = float(found.value[g, q, k]), float(found.error[g, q, k])
                assert error >= 0
                assert value * (1 - 1e-12) - 1e-12 <= exact <= (value + error) * (1 + 1e-12) + 1e-12
                np.testing.assert_allclose(moments[g, q, k], squares, rtol=1e-9, atol=1e-13)
                if length == 2:  # nothing is left to chance: exact
                    assert error <= 1e-12
                    assert value == pytest.approx(exact, abs=1e-12)


def test_the_printed_expectation_is_another_number():
    weights, vectors = trials((7, 3), "isotropic", "flat", sets=1, rows=1)
    exact, _ = by_enumeration(weights[0, 0], vectors[0], 2)
    printed = expected_distance(weights, vectors, 2, form="printed")
    assert printed.error is None
    sharp = expected_distance(weights, vectors, 2)
    y = weights[0, 0][:, None] * vectors[0]
    by_hand = 5 / 7 * np.linalg.norm(y - (y.sum(axis=0) - y), axis=-1).sum()
    assert float(printed.value[0, 0]) == pytest.approx(by_hand, rel=1e-12)
    assert float(printed.value[0, 0]) > float(sharp.value[0, 0] + sharp.error[0, 0]) >= exact - 1e-12


@pytest.mark.parametrize("weighting", ["flat", "peaked"])
def test_against_drawn_sets(weighting):
    """20,000 sets: outside the interval by more than five standard errors, one time in over a million."""
    length, number, draws = 40, 10, 20_000
    weights, vectors = trials((length, 8), "isotropic", weighting, sets=1, rows=1)
    y = weights[0, 0][:, None] * vectors[0]
    ranks = np.argsort(np.random.default_rng(0).random((draws, length)), axis=-1)
    chosen = ranks < number
    s = chosen @ y
    norms = np.linalg.norm(s[:, None] - y, axis=-1)
    d = np.sum(np.where(chosen, 0, norms), axis=-1)
    mean, spread = d.mean(), d.std() / np.sqrt(draws)
    found = expected_distance(weights[0, 0], vectors[0], number)
    assert float(found.value) - FALSE_ALARM * spread <= mean <= float(found.value + found.error) + FALSE_ALARM * spread
    # the second moment of each token, exact: forty comparisons, together one in some forty thousand
    exact = np.asarray(second_moment(weights[0, 0], vectors[0], number))
    for i in range(length):
        squares = norms[~chosen[:, i], i] ** 2
        assert abs(squares.mean() - exact[i]) <= FALSE_ALARM * squares.std() / np.sqrt(len(squares))


def test_rows_of_their_own_length():
    weights, vectors = trials((9, 3), "isotropic", "peaked", sets=1, rows=9)
    mask = np.tril(np.ones((9, 9), bool))
    found = expected_distance(weights[0], vectors[0], [2, 4], where=mask)
    moments = second_moment(weights[0], vectors[0], [2, 4], where=mask)
    for n in (1, 2, 3, 4, 9):
        for k, number in enumerate((2, 4)):
            if number > n:
                assert float(found.value[n - 1, k]) == float(found.error[n - 1, k]) == 0
                assert np.all(moments[n - 1, k] == 0)
                continue
            row = expected_distance(weights[0, n - 1, :n], vectors[0, :n], number)
            np.testing.assert_allclose(found.value[n - 1, k], row.value, rtol=1e-10)
            np.testing.assert_allclose(found.error[n - 1, k], row.error, rtol=1e-8, atol=1e-14)
            np.testing.assert_allclose(
                moments[n - 1, k, :n],
                second_moment(weights[0, n - 1, :n], vectors[0, :n], number),
                rtol=1e-9,
                atol=1e-14,
            )


def test_single_precision_follows():
    weights, vectors = trials((40, 8), "isotropic", "peaked", sets=3, rows=20)
    double = expected_distance(weights, vectors, [1, 10, 30])
    single = expected_distance(weights.astype(np.float32), vectors.astype(np.float32), [1, 10, 30])
    for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(double), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=2e-5)
