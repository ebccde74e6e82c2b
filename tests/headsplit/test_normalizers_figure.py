"""`headsplit figure normalizers`: computed once, drawn from the store, its numbers those of the functions."""

import numpy as np
import pytest
import xarray as xr

import theory as th
from compare import load
from figures.normalizers import Configuration, short, stable_brackets
from headsplit.figures import run

SMALL = {
    "activations": ("Softmax()", "TopK(power=0.5)"), "lengths": (4, 16), "tokens": 2**14, "temperatures": (1.0,),
    "stable_length": 4, "least_rate": 1.0, "rates": 2, "dim": 20, "time": 1.0, "replicas": 2,
}  # fmt: skip


@pytest.mark.slow
def test_a_small_one_end_to_end(tmp_path):
    said: list[str] = []
    run("normalizers", Configuration(**SMALL), tmp_path, progress=False, say=said.append)
    store = load(tmp_path / "result.zarr")
    assert set(store.datasets) == {"risk_0", "risk_1", "gradient_0", "gradient_1", "stable_0"}
    table = next(text for text in said if "Bayes risk" in text)
    bayes = th.bayes_risk(th.SingleLocation(16, 4 * np.log(16), th.discrete([[1.0]])))
    assert f"{float(bayes):.4f}" in table
    assert "top-√L: risk" in table
    assert "softmax at T = 1" in table
    assert (tmp_path / "normalizers.pdf").stat().st_size > 5000

    again: list[str] = []
    run("normalizers", Configuration(**SMALL), tmp_path, progress=False, say=again.append)
    assert any("loaded, not recomputed" in text for text in again)
    assert table in again
    with pytest.raises(ValueError, match="another configuration"):
        run("normalizers", Configuration(**SMALL, seed=1), tmp_path, progress=False, say=again.append)


def test_rates_without_a_bracket_are_told_apart():
    def line(largest):
        return xr.Dataset(
            {"largest": ("activation", [largest])},
            {"activation": ["Softmax(temperature=0.5)"], "learning_rate": [1.0, 2.0]},
        )

    temperatures, low, high = stable_brackets([line(1.0), line(2.0), line(0.0)])
    assert temperatures.tolist() == [0.5] * 3
    np.testing.assert_array_equal(low, [1.0, 2.0, np.nan])
    np.testing.assert_array_equal(high, [2.0, np.nan, 1.0])
    assert short(line(1.0).isel(activation=0)) == "softmax"
