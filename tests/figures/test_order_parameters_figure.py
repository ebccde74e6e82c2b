"""The picture of order parameters: runs and flows as stored, deviations by hand, a tiny case computed."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from figures import order_parameters as picture

RNG = np.random.default_rng(0)


class Fake(SimpleNamespace):
    def __getitem__(self, group):
        return self.groups[group]


@pytest.fixture
def store():
    """Two D with three runs and one; the flows lie exactly ±3/√D, in turns, from the runs."""
    c = picture.Configuration(
        prior="sign_flips(mean=[1.0, 0.0], amplitude=[0.0, 1.0])", heads=2, snr=1.0, dims=(100, 400), replicas=(3, 1),
        time=8.0, records=9,
    )  # fmt: skip
    time, groups, m, r = np.arange(9.0), {}, [], []
    for i, (dim, count) in enumerate(zip(c.dims, c.replicas, strict=True)):
        own = 0.02 * np.exp(0.4 * time)[None, :, None, None] * np.array([[1.0, 1.0], [1.0, -1.0]])
        own = own * (1 + 0.01 * RNG.standard_normal((count, 1, 2, 2)))
        off = 3 / np.sqrt(dim) * np.where(np.arange(9) % 2, 1, -1)[:, None, None]
        gram = own @ np.swapaxes(own, -1, -2) + np.eye(2)
        m.append(own - off)
        r.append(gram - off)
        groups[f"runs_{i}"] = dataset(time, own, gram)
    groups["flows"] = dataset(time, np.concatenate(m), np.concatenate(r))
    groups["band"] = xr.Dataset(
        {
            "m_deviation": (("time", "head", "feature"), np.full((9, 2, 2), 2.0)),
            "r_deviation": (("time", "head", "head_"), np.full((9, 2, 2), 3.0)),
        },
        coords={"time": time},
    )
    return Fake(configuration=asdict(c), groups=groups)


def dataset(time, m, r):
    return xr.Dataset(
        {
            "m": (("replica", "time", "head", "feature"), m),
            "r": (("replica", "time", "head", "head_"), r),
        },
        coords={"time": time},
    )


@pytest.mark.parametrize("feature", [0, 1, None])
def test_lines_are_flows_and_points_the_run_of_the_same_start(store, feature):
    for i, first in enumerate((0, 3)):
        ax = Figure().subplots()
        picture.one_run(ax, store, i, feature)
        for h in range(2):
            flow, run = store["flows"].isel(replica=first), store[f"runs_{i}"].isel(replica=0)
            colour = picture.look(h)["color"]
            line = next(x for x in ax.get_lines() if x.get_linestyle() != "None" and x.get_color() == colour)
            expected = flow["m"][:, h, feature] if feature is not None else flow["r"][:, h, h]
            np.testing.assert_array_equal(line.get_ydata(), expected)
            seen = run["m"][:, h, feature] if feature is not None else run["r"][:, h, h]
            np.testing.assert_array_equal(ax.containers[h].lines[0].get_ydata(), seen)


@pytest.mark.parametrize("feature", [0, 1, None])
def test_deviations_are_in_units_of_one_over_root_dim(store, feature):
    for i in range(2):
        value, error = picture.scaled_deviation(store, i, feature)
        np.testing.assert_allclose(value, 3.0)
        np.testing.assert_allclose(error, 0.0 if i == 0 else np.nan, atol=1e-12)  # one run tells no error
    np.testing.assert_array_equal(picture.predicted(store, feature), 2.0 if feature is not None else 3.0)


def test_judged_up_to_the_last_record_before_splits_begin(store):
    """Spread .02 e^{.4τ} along the second feature has tripled, and passed .05, after τ = 2.7."""
    store.groups["flows"] = store["flows"].assign(m=store["runs_0"]["m"].isel(replica=[0, 0, 0, 0]))
    assert picture.judged_until(store) == 2.0
    still = store["flows"]["m"] * 0
    store.groups["flows"] = store["flows"].assign(m=still)
    assert picture.judged_until(store) == 8.0


def test_numbers_compare_with_the_prediction(store):
    found = picture.numbers(store)
    for start, expected, count in (("m, ", 1.5, 2), ("r_hh", 1.0, 1)):
        ratios = [value for name, value in found.items() if name.startswith(start) and "rms" in name]
        np.testing.assert_allclose(ratios, expected)
        assert len(ratios) == count
    for dim in (100, 400):  # ±3/√D, the same for all heads
        np.testing.assert_allclose(abs(found[f"m, feature 1, D = {dim}: D × mean of SGD − flow"]), 3 * np.sqrt(dim))


def test_the_figure_has_a_panel_for_each_dim_and_quantity(store):
    figure = picture.draw(store)
    assert len(figure.axes) == 9
    assert [ax.get_title() for ax in figure.axes[:2]] == ["D = 100", "D = 400"]
    assert mpl.rcParams["font.size"] == mpl.rcParamsDefault["font.size"]


def test_wrong_configurations_are_named():
    for name, wrong in (("replicas", {"replicas": (1,)}), ("records", {"records": 32}), ("records", {"records": 2})):
        with pytest.raises(ValueError, match=name):
            replace(picture.SMALL, **wrong).check()
    picture.SMALL.check()
    picture.FULL.check()


@pytest.mark.slow
def test_a_tiny_case_is_computed_as_the_prediction_says(tmp_path):
    """One head that does not split: rms deviations within 5 standard errors of the prediction, which is no fit."""
    from headsplit.figures import run

    c = picture.Configuration(
        prior="discrete(points=[[1.0]])", heads=1, snr=1.0, dims=(100, 400), replicas=(64, 64), learning_rate=1.0,
        batch=2, loss="limit", time=4.0, records=5,
    )  # fmt: skip
    found = run("order_parameters", c, tmp_path, progress=False, say=lambda _: None)
    ratio, error = (found[f"m, feature 1, D = 400: {what}"] for what in ("rms / predicted", "its error"))
    assert abs(ratio - 1) < 5 * error + 0.05
