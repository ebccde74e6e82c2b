"""The figure of distinguishable tokens: the ball against direct sums, its artists, its numbers."""

from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from compare.store import Store
from figures.distinguishable import Configuration, _scores, _synthetic, curves, draw, heads, in_ball, numbers
from figures.synthetic import ENCODER, ISOTROPIC, SYNTHETIC, normal_logits, unit_vectors

TINY = Configuration(length=24, counts=(1, 16), dim=6, spreads=(2.0,), draws=3, queries=2)


@pytest.fixture(scope="module")
def store():
    """The encoder's heads are the draws of isotropic vectors."""
    datasets = {kind: _synthetic(TINY, kind) for kind in SYNTHETIC}
    own = datasets[ISOTROPIC].isel(spread=0).rename(draw="head").expand_dims("layer")
    datasets[ENCODER] = own.assign(upper_printed=own["distinguishable"] - 0.1 * (own["selected"] > 1) + 0.01)
    return Store(Path("none.zarr"), datasets, asdict(TINY), {})


def test_the_ball_token_by_token():
    keys = jax.random.split(jax.random.key(0), 2)
    x = np.asarray(unit_vectors(keys[0], (2, 9, 3), 0.0))
    weights = np.asarray(jax.nn.softmax(normal_logits(keys[1], (2, 4, 9), 2.0)))
    radius = np.full((2, 4), 0.4)
    found = np.asarray(in_ball(weights, x, radius, 5))
    for set_, row in np.ndindex(2, 4):
        chosen = np.argsort(-weights[set_, row])[:5]
        y = weights[set_, row, chosen, None] * x[set_, chosen]
        near = [np.linalg.norm(y.sum(axis=0) - one) <= 0.4 for one in y]
        assert found[set_, row] == pytest.approx(np.mean(near))


def test_artists_hold_the_store(store):
    data = store[ISOTROPIC]
    artists = curves(Figure().subplots(), data)
    for artist, name in zip(artists[:3], ("limit", "lower", "upper"), strict=True):
        np.testing.assert_allclose(artist.get_ydata(), data[name].isel(spread=0).mean("draw"))
    for artist, name in zip(artists[3:], ("distinguishable", "in_ball"), strict=True):
        np.testing.assert_allclose(artist[0].get_ydata(), data[name].isel(spread=0).mean("draw"))
    artists = heads(Figure().subplots(), store[ENCODER])
    np.testing.assert_allclose(artists[3][0].get_ydata(), store[ENCODER]["distinguishable"].median(("layer", "head")))
    assert len(draw(store).axes) == 3


def test_numbers(store):
    found = numbers(store)
    assert 3 <= len(found) <= 12
    own = store["shifted"]["distinguishable"].sel(selected=16)
    assert found["N_s/N, N ≥ 16, shifted, spread 2"] == pytest.approx(float(own.mean()))
    assert found["heads above the printed upper bound, N = 1"] == 0
    one = store[ISOTROPIC].sel(selected=1)
    np.testing.assert_array_equal(one["distinguishable"], 1)  # s is the only one's y
    np.testing.assert_array_equal(one["in_ball"], 1)


def test_what_is_outside_the_bounds_counts():
    values = xr.DataArray([0.4, 0.6], dims="draw")
    inside, below, zero = (xr.DataArray([value, value], dims="draw") for value in (0.5, 0.3, 0.0))
    assert float(_scores(values, zero, inside)) == 0
    assert float(_scores(values, zero, below)) == pytest.approx(0.2 / 0.1)
    assert float(_scores(values, inside + 0.1, inside + 0.2)) == pytest.approx(0.1 / 0.1)


def test_counts_that_are_refused():
    with pytest.raises(ValueError, match="counts"):
        Configuration(length=64).check()
