"""The figure of distances: synthetic rows against direct sums, its artists, its numbers."""

from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from compare.store import Store
from figures.distance import NAMES, Configuration, _against_length, _against_selected, _scores, curves, draw, numbers
from figures.synthetic import ENCODER, ISOTROPIC, SYNTHETIC, unit_vectors

TINY = Configuration(lengths=(6, 12), selected=2, counts=(6, 11), dim=4, draws=3, queries=4)


@pytest.fixture(scope="module")
def store():
    """Those against L hold the numbers of those against N, those of the encoder have draws as heads."""
    datasets = {}
    for kind in SYNTHETIC:
        data = _against_selected(TINY, kind)
        lengths = data.rename(selected="length").assign_coords(length=list(TINY.lengths))
        datasets |= {f"{kind}_length": lengths, f"{kind}_selected": data}
    for x in ("length", "selected"):
        heads = datasets[f"{ISOTROPIC}_{x}"].rename(draw="head").expand_dims("layer").drop_vars("random")
        datasets[f"{ENCODER}_{x}"] = heads
    return Store(Path("none.zarr"), datasets, asdict(TINY), {})


def test_bounds_and_limits(store):
    for data in store.datasets.values():
        assert bool((data["distance"] <= data["distance_bound"] * (1 + 1e-12)).all())
        assert all(data[name].attrs["units"] for name in data)
    one_left = store[f"{ISOTROPIC}_selected"].sel(selected=11)
    # one token is left out: its distance is at most A + its weight
    assert bool((one_left["distance"] <= 1).all())
    assert bool((one_left["random"] <= 1).all())
    assert bool((one_left["selected_weight"] > 11 / 12).all())


@pytest.mark.slow
def test_against_length():
    data = _against_length(TINY, ISOTROPIC)
    assert data["distance"].shape == (3, 2)
    assert bool((data["distance"] <= data["distance_bound"]).all())
    assert bool(
        (np.abs(data["distance"] - data["context_norm"] * (data["length"] - 2)) <= 1).all()
    )  # docs/limits.md §3


def test_shifted_vectors_share_a_mean():
    x = np.asarray(unit_vectors(jax.random.key(0), (4000, 64), 0.5))
    np.testing.assert_allclose(np.linalg.norm(x, axis=-1), 1)
    assert np.linalg.norm(x.mean(axis=0)) ** 2 == pytest.approx(0.25 / 1.25, rel=0.02)
    assert np.linalg.norm(np.asarray(unit_vectors(jax.random.key(0), (4000, 64), 0.0)).mean(axis=0)) < 0.05


def test_artists_hold_the_store(store):
    data = store[f"{ISOTROPIC}_length"]
    artists = curves(Figure().subplots(), data)
    np.testing.assert_allclose(artists[0].get_ydata(), data["distance_bound"].mean("draw"))
    np.testing.assert_allclose(artists[1].get_ydata(), data["distance_bound_printed"].mean("draw"))
    np.testing.assert_allclose(artists[3][0].get_ydata(), data["distance"].mean("draw"))
    np.testing.assert_allclose(artists[4][0].get_ydata(), data["random"].mean("draw"))
    heads = store[f"{ENCODER}_length"]
    artists = curves(Figure().subplots(), heads)
    assert len(artists) == 4
    np.testing.assert_allclose(artists[3][0].get_ydata(), heads["distance"].median(("layer", "head")))
    assert len(draw(store).axes) == 6


def test_numbers(store):
    found = numbers(store)
    assert 3 <= len(found) <= 12
    middle = store["shifted_length"]["distance"].mean("draw").values
    assert found["exponent of L, shifted"] == pytest.approx(float(np.log2(middle[1] / middle[0])))
    selected = store["isotropic_selected"]["distance"].mean("draw").values
    assert found["d̃/(L−N) at N = 6, isotropic"] == pytest.approx(float(selected[0] / 6))
    assert found["d̃ over sharp bound, most"] <= 1 + 1e-12


def test_random_sets_are_judged_beyond_the_bound_on_the_error():
    ones = {name: (("draw", "length"), np.ones((4, 2))) for name in NAMES}
    data = xr.Dataset(ones, {"length": [4, 8]})
    noise = xr.DataArray([-0.1, 0.1, -0.1, 0.1], dims="draw")
    error = np.std(noise, ddof=1) / 2
    inside = data.assign(random=data["expected"] + 0.5 + noise)
    np.testing.assert_array_equal(_scores(inside), 0)
    np.testing.assert_allclose(_scores(data.assign(random=data["expected"] + 2 + noise)), 1 / error)
    np.testing.assert_allclose(_scores(data.assign(random=data["expected"] - 1 + noise)), 1 / error)


def test_an_n_that_leaves_no_token_out_is_refused():
    with pytest.raises(ValueError, match="counts"):
        Configuration(lengths=(8, 16), counts=(16,)).check()
