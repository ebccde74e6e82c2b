"""The figure of dilution: its numbers by other routes, and what it draws."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

import theory as th
from compare.store import Store
from figures.dilution import Configuration, bounded_weights, draw, expected_weight, lines, noise_weights, numbers, table

TINY = Configuration(
    lengths=(4, 64), spreads=(0.5, 2.0), rows=16, activations=("Softmax()", "Sparsemax()", "Sigmoid()"), draws=16
)


@pytest.fixture(scope="module")
def store():
    return Store(Path("none.zarr"), {line.group: line.compute() for line in lines(TINY)}, asdict(TINY), {})


def test_numbers_by_another_route(store):
    data = store["bounded"]
    low, high = np.exp(-2.0), np.exp(2.0)
    assert float(data["extremal"].sel(spread=2.0, length=64)) == pytest.approx(high / (high + 63 * low))
    np.testing.assert_allclose(data["extremal"], data["sharp"])
    assert bool((data["mean"] <= data["largest"]).all())
    assert bool((data["largest"] < data["sharp"]).all())
    np.testing.assert_allclose(data["printed"].sel(spread=0.5), np.e / np.array(TINY.lengths))
    found = numbers(store)
    assert 3 <= len(found) <= 12
    assert found["extremal row over sharp bound"] == pytest.approx(1)
    assert found["top weight, sigmoid, L = 64"] == pytest.approx(1 / (1 + 64 * np.exp(-6.0)))
    assert found["top weights and expectation, most standard errors"] < 5
    ratio = data["mean"].sel(length=64) / data["mean"].sel(length=4)
    assert found["exponent of L, uniform logits"] == pytest.approx(float(np.log(ratio).mean() / np.log(16)))
    assert "sparsemax" in table(store)


def test_the_expected_weight():
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    direct = weights @ (1 / (1 + np.exp(1.5 * (nodes - 3.0)))) / np.sqrt(2 * np.pi)  # two tokens: one integral
    assert expected_weight(2, 3.0, 1.5) == pytest.approx(direct, rel=1e-8)
    assert expected_weight(1, 3.0, 1.5) == pytest.approx(1)
    assert expected_weight(10**6, 6.0, 1.0) == pytest.approx(1 / (1 + (10**6 - 1) * np.exp(0.5 - 6)), rel=1e-3)


def test_artists_hold_the_store(store):
    ax = Figure().subplots()
    artists = bounded_weights(ax, store["bounded"])
    own = store["bounded"].isel(spread=1)
    for artist, name in zip(artists[4:6], ("sharp", "printed"), strict=True):
        np.testing.assert_array_equal(artist.get_ydata(), own[name])
    for artist, name in zip(artists[6:8], ("mean", "extremal"), strict=True):
        np.testing.assert_array_equal(artist[0].get_ydata(), own[name])
    groups = [store[f"noise_{i}"] for i in range(3)]
    artists = noise_weights(Figure().subplots(), groups)
    assert len(artists) == 5  # no line where the expectation is not known
    np.testing.assert_array_equal(artists[2][0].get_ydata(), groups[1]["weight"][0])
    assert th.Sparsemax().name == str(groups[1]["activation"].values[0])
    assert len(draw(store).axes) == 2
