"""The figure of the gradient: norms against dense matrices, its predictions, its artists, its numbers."""

from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from compare.store import Store
from figures.gradient import (
    RANDOM,
    Configuration,
    _random,
    draw,
    encoder_rows,
    exceeded,
    finite_steps,
    gap_density,
    numbers,
    random_rows,
)
from figures.synthetic import ENCODER, normal_logits

TINY = Configuration(temperatures=(0.1, 1.0), sizes=(1e-3, 10.0), length=6, random_rows=40)


@pytest.fixture(scope="module")
def store():
    """The rows of the random logits are the encoder's heads."""
    data = _random(TINY)
    own = data.rename(row="head").expand_dims(layer=1).assign_attrs(length=6)
    own = own.assign(norm_mean=own["norm"], **{name: data[name] for name in ("norm_bound", "bound_printed")})
    return Store(Path("none.zarr"), {RANDOM: data, ENCODER: own}, asdict(TINY), {})


def test_norms_of_dense_matrices(store):
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 1), 2)
    logits = np.asarray(normal_logits(keys[0], (40, 6), 3.0))
    for i, temperature in enumerate(TINY.temperatures):
        for row in range(3):
            weights = np.exp((logits[row] - logits[row].max()) / temperature)
            weights /= weights.sum()
            jacobian = (np.diag(weights) - np.outer(weights, weights)) / temperature
            data = store[RANDOM].isel(temperature=i, row=row)
            assert float(data["norm"]) == pytest.approx(np.linalg.norm(jacobian, 2), rel=1e-6)
            assert float(data["root_mean_square"]) == pytest.approx(np.linalg.norm(jacobian) / np.sqrt(6), abs=1e-7)
    assert bool((store[RANDOM]["largest"] <= store[RANDOM]["gradient_bound"]).all())


def test_the_density_of_the_gap():
    # of two logits the gap is |N(0, 2 spread²)|
    assert gap_density(2, 3.0) == pytest.approx(2 / np.sqrt(2 * np.pi * 2 * 9.0))
    two = np.sort(np.random.default_rng(0).normal(0, 3.0, (100_000, 20)), axis=1)[:, -2:]
    share = np.mean(np.diff(two) < 0.05)
    assert share / 0.05 == pytest.approx(gap_density(20, 3.0), abs=5 * np.sqrt(share / 100_000) / 0.05)


def test_artists_hold_the_store(store):
    data, c = store[RANDOM], store.configuration
    artists = random_rows(Figure().subplots(), data, c)
    np.testing.assert_array_equal(artists[0].get_ydata(), data["norm_bound"])
    np.testing.assert_array_equal(artists[-3][0].get_ydata(), data["norm"].max("row"))
    np.testing.assert_array_equal(artists[-2][0].get_ydata(), data["norm"].mean("row"))
    heads = store[ENCODER]
    artists = encoder_rows(Figure().subplots(), heads)
    np.testing.assert_array_equal(artists[-3][0].get_ydata(), heads["norm"].max(("layer", "head")))
    np.testing.assert_allclose(artists[-2][0].get_ydata(), heads["norm_mean"].median(("layer", "head")))
    artists = finite_steps(Figure().subplots(), data, heads)
    np.testing.assert_array_equal(artists[3].get_ydata(), data["gradient_bound"].isel(size=1))
    np.testing.assert_array_equal(artists[4].get_ydata(), data["largest"].isel(size=1))
    assert len(draw(store).axes) == 3


def test_numbers(store):
    found = numbers(store)
    assert 3 <= len(found) <= 12
    largest = store[RANDOM]["norm"].max("row").values
    assert found["largest norm over 1/(2T), random"] == pytest.approx(max(2 * largest * TINY.temperatures))
    assert found["exponent of T ≤ 1, encoder"] == pytest.approx(np.log10(largest[1] / largest[0]))
    assert found["random directions off ‖J‖_F/√L, most standard errors"] < 5


def test_rounding_exceeds_no_bound():
    ones = xr.DataArray([1.0, 1.0, 1.0])
    assert exceeded(ones * [1 + 1e-12, 1.1, 0.9], ones).tolist() == [False, True, False]
