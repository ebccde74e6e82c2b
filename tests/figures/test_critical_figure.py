"""The figure of the critical N: heads made at random against a direct call, its threshold, its artists."""

from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure
from scipy.stats import ks_2samp

from compare.store import Store
from figures.critical import (
    SHARP,
    Configuration,
    _large,
    _synthetic,
    critical_statistic,
    draw,
    numbers,
    ratios,
    statistics,
)
from figures.synthetic import ENCODER, normal_logits, unit_vectors
from theory.limits import critical_count

TINY = Configuration(lengths=(8, 16), shifts=(0.0, 0.5), dim=6, heads=6, queries=2, draws=2)


@pytest.fixture(scope="module")
def store():
    """The encoder's Datasets are made up."""
    count, layers = np.array([2.0, 4.0]), np.array([[1.0, np.nan], [3.0, 5.0]])
    encoder = xr.Dataset(
        {
            "critical_count": ("length", count),
            "ratio": ("length", count / TINY.lengths),
            "layer_critical_count": (("length", "layer"), layers),
            "statistic": (("length", "selected"), np.linspace(1, 0, 30).reshape(2, 15)),
        },
        {"length": list(TINY.lengths), "selected": np.arange(1, 16)},
    )
    datasets = {"shift_0": _synthetic(TINY, 0), "shift_1": _synthetic(TINY, 1)}
    return Store(Path("none.zarr"), {**datasets, ENCODER: encoder, SHARP: encoder}, asdict(TINY), {})


def test_the_search_is_that_of_critical_count(store):
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), (1000 + 1) * 1000 + 1), 3)
    spreads = np.linspace(1.0, 3.0, 6)[:, None, None]
    weights = jax.nn.softmax(normal_logits(keys[1], (6, 2, 16), spreads))
    found = critical_count(weights, unit_vectors(keys[0], (16, 6), 0.5))
    data = store["shift_1"].isel(draw=1)
    assert float(data["critical_count"][1]) == found.count
    np.testing.assert_array_equal(data["statistic"][: len(found.statistic)], found.statistic)


def test_vectors_of_large_d():
    x = np.asarray(_large(5, 0.5))
    np.testing.assert_allclose(x @ x.T, 0.2 + 0.8 * np.eye(5), atol=1e-12)


def test_the_threshold_is_that_of_the_test():
    low = critical_statistic(12, 0.01)
    for steps, differ in ((0, True), (1, False)):
        shift = round(low * 12) - steps
        assert (ks_2samp(np.arange(12), np.arange(12) + shift - 0.5 * (shift > 0)).pvalue < 0.01) == differ
    assert np.isnan(critical_statistic(4, 0.01))
    with pytest.raises(ValueError, match="heads"):
        Configuration(heads=4).check()


def test_artists_hold_the_store(store):
    shifts = [store["shift_0"], store["shift_1"]]
    artists = ratios(Figure().subplots(), shifts, store[ENCODER], store[SHARP])
    np.testing.assert_allclose(artists[0].get_ydata(), (shifts[0]["limit"] / [8, 16]).mean("draw"))
    np.testing.assert_allclose(artists[2][0].get_ydata(), (shifts[0]["critical_count"] / [8, 16]).mean("draw"))
    np.testing.assert_array_equal(artists[6].get_ydata(), store[ENCODER]["ratio"])
    np.testing.assert_array_equal(artists[8].get_ydata(), [1 / 8, 3 / 16])
    artists = statistics(Figure().subplots(), shifts, store[ENCODER], 0.5)
    np.testing.assert_array_equal(artists[2].get_ydata(), store[ENCODER]["statistic"][-1])
    assert len(draw(store).axes) == 2


def test_numbers(store):
    found = numbers(store)
    assert 3 <= len(found) <= 12
    assert found["N/L, shift 0.5"] == pytest.approx(float(store["shift_1"]["critical_count"][:, 1].mean() / 16))
    assert found["exponent of L, encoder"] == pytest.approx(1)
