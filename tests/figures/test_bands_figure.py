"""The figure of bands: bands, single runs and powers of D are what the store says."""

import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

from compare import Store
from figures import bands as picture
from figures.bands import Configuration
from headsplit.figures import run

mpl.use("Agg")


@pytest.fixture
def store():
    """Two heads and one feature; deviations of 0.1 in m and 0.2 in r at D = 100, scatter of exactly D^-1/2."""
    time, dims, heads = np.linspace(0, 2, 5), np.array([100, 400]), 2
    flow_m, flow_r = np.ones((5, heads, 1)), np.ones((5, heads, heads))
    scatter = np.array([1.0, 2.0, 0.5])[:, None] / np.sqrt(dims)
    quantity = ("quantity", "dim")
    data = xr.Dataset(
        {
            "flow_m": (("time", "head", "feature"), flow_m),
            "flow_r": (("time", "head", "head_"), flow_r),
            "m_deviation": (("time", "head", "feature"), 0.1 * flow_m),
            "r_deviation": (("time", "head", "head_"), 0.2 * flow_r),
            "run_m": (("replica", "time", "head", "feature"), np.arange(3.0)[:, None, None, None] + flow_m),
            "run_r": (("replica", "time", "head", "head_"), np.arange(3.0)[:, None, None, None] + flow_r),
            "scatter": (quantity, scatter),
            "scatter_error": (quantity, scatter / 20),
            "mean": (quantity, np.where(dims < 200, scatter / 10, np.nan)),
            "mean_error": (quantity, scatter / 50),
            "scatter_slope": ("quantity", [-0.5, -0.51, -0.49]),
            "scatter_slope_error": ("quantity", [0.01, 0.02, 0.03]),
            **{name: ("banded", [0.95, 0.94]) for name in ("coverage", "ratio")},
            **{name: ("banded", [0.01, 0.02]) for name in ("coverage_error", "ratio_error")},
        },
        coords={"time": time, "dim": dims, "quantity": ["m", "r", "risk"], "banded": ["m", "r"]},
    )

    configuration = {
        "length": 5,
        "snr": 2.0,
        "start": [[0.1], [0.1]],
        "shown": 100,
        "single": 2,
        "learning_rate": 1.0,
        "batch": 1,
    }
    return Store(Path("result.zarr"), {"bands": data}, configuration, {})


def test_bands_are_1_96_deviations_about_the_flow(store):
    overlaps, norms, _ = picture.draw(store).axes
    for ax, deviation in ((overlaps, 0.1), (norms, 0.2)):
        heights = ax.collections[0].get_paths()[0].vertices[:, 1]
        np.testing.assert_allclose([heights.min(), heights.max()], [1 - 1.96 * deviation, 1 + 1.96 * deviation])
    assert len(overlaps.lines) == 2 + 1  # single runs, flow
    np.testing.assert_array_equal(overlaps.lines[1].get_ydata(), [2.0] * 5)
    np.testing.assert_array_equal(overlaps.lines[2].get_ydata(), [1.0] * 5)


def test_scatter_is_drawn_with_the_prediction_of_the_bands(store):
    against = picture.draw(store).axes[2]
    points = [bars[0].get_ydata() for bars in against.containers]
    np.testing.assert_array_equal(points[::2], store["bands"]["scatter"].values)
    np.testing.assert_array_equal(points[1::2], store["bands"]["mean"].values)
    lines = [line for line in against.lines if line.get_linestyle() != "None"]
    np.testing.assert_allclose([line.get_ydata() for line in lines], [[0.1, 0.05], [0.2, 0.1]])


def test_numbers_are_those_of_the_store(store):
    found = picture.numbers(store)
    assert found["exponent of the scatter of r"] == -0.51
    assert found["its standard error, risk"] == 0.03
    assert found["share of m in the 95 % band"] == 0.95


def test_predicted_scatter_counts_each_entry_of_r_once_and_no_start():
    values = np.zeros((2, 2, 2))
    values[1] = [[3.0, 100.0], [4.0, 5.0]]
    values[1, 0, 1] = 4.0
    data = xr.Dataset({"r_deviation": (("time", "head", "head_"), values)})
    assert picture.predicted_scatter(data, "r", 1) == pytest.approx(np.sqrt((9 + 16 + 25) / 3))
    assert np.isnan(picture.predicted_scatter(data, "risk", 1))


def test_a_dimension_whose_records_lie_between_steps_is_refused():
    with pytest.raises(ValueError, match="whole number of steps"):
        Configuration(dims=(100, 401), replicas=(4, 4), shown=100).check()
    with pytest.raises(ValueError, match="at least two D"):
        Configuration(dims=(100, 200), replicas=(4, 4), shown=300).check()


@pytest.mark.slow
def test_a_tiny_one_end_to_end(tmp_path):
    c = Configuration(
        prior="discrete(points=[[1.5]])", length=6, snr=1.0, start=((0.2,),), dims=(100, 400), replicas=(16, 16),
        shown=100, learning_rate=1.0, time=4.0, records=5,
    )  # fmt: skip
    found = run("bands", c, tmp_path, progress=False, say=lambda _: None)
    assert abs(found["exponent of the scatter of m"] + 0.5) < 4 * found["its standard error, m"]
    assert abs(found["measured/predicted scatter of m"] - 1) < 4 * found["its standard error, scatter of m"]
    assert json.loads((tmp_path / "numbers.json").read_text()) == found
