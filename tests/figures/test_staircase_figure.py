"""The picture of the staircase: risks, levels and times as stored, means and deviations by hand."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from figures import staircase as picture
from figures.style import COLOURS

LEVELS = [0.025, 0.25, 0.5, 0.75, 0.975]


class Fake(SimpleNamespace):
    def __getitem__(self, group):
        return self.groups[group]


@pytest.fixture
def store():
    """Two D, two features of which the first alone splits; the mean risk of the runs lies .03 above the prediction."""
    time = np.linspace(0, 20, 41)
    risk = np.stack([0.7 - 0.01 * time, 0.75 - 0.01 * time])
    quantile = np.full((2, 2, 5), np.inf)
    quantile[:, 0] = np.array([[4.0, 6.0, 8.0, 12.0, 15.0], [6.0, 8.0, 10.0, 14.0, np.inf]])
    prediction = xr.Dataset(
        {
            "risk": (("dim", "time"), risk),
            "risk_error": (("dim", "time"), np.full(risk.shape, 0.004)),
            "saddle_risk": ("stage", np.array([0.7, 0.5])),
            "saddle_feature": ("stage", np.array([0, -1])),
            "quantile": (("dim", "feature", "level"), quantile),
        },
        coords={"time": time, "level": LEVELS},
    )
    groups = {"prediction": prediction}
    for i, count in enumerate((2, 4)):
        own = np.linspace(0, 20, 11)
        off = 0.03 + 0.003 * np.sqrt(count - 1) * np.where(np.arange(count) % 2, 1, -1)
        groups[f"runs_{i}"] = xr.Dataset(
            {
                "risk": (("replica", "time"), 0.7 + 0.05 * i - 0.01 * own + off[:, None]),
                "stage_time": (("replica", "feature"), np.full((count, 2), [9.0, np.inf])),
                "plateau_risk": (("replica", "plateau"), np.full((count, 3), [0.69, 0.5, np.nan])),
            },
            coords={"time": own},
        )
    c = replace(picture.SMALL, dims=(100, 1000), replicas=(2, 4), time=20.0)
    return Fake(configuration=asdict(c), groups=groups)


def test_levels_times_runs_and_means_are_those_stored(store):
    for i in range(2):
        ax = Figure().subplots()
        picture.staircase(ax, store, i)
        runs = store[f"runs_{i}"]
        flat = [line.get_ydata()[0] for line in ax.get_lines() if line.get_color() == picture.LEVEL["color"]]
        assert flat == [0.7, 0.5]
        (middle,) = (line for line in ax.get_lines() if line.get_color() == COLOURS[1])
        assert middle.get_xdata()[0] == [8.0, 10.0][i]
        black = next(line for line in ax.get_lines() if line.get_color() == "black")
        np.testing.assert_array_equal(black.get_ydata(), store["prediction"]["risk"][i])
        single = [line for line in ax.get_lines() if line.get_color() == COLOURS[0]]
        for own, line in enumerate(single):
            np.testing.assert_array_equal(line.get_ydata(), runs["risk"][own])
        assert len(single) == runs.sizes["replica"]
        np.testing.assert_allclose(ax.containers[0].lines[0].get_ydata(), runs["risk"].mean("replica"))


def test_spans_end_with_the_panel_and_features_without_a_stage_have_none(store):
    store["prediction"]["quantile"][:, 0, 3] = np.inf
    ax = Figure().subplots()
    picture.staircase(ax, store, 0)
    (span,) = ax.patches
    assert (span.get_x(), span.get_x() + span.get_width()) == (6.0, 20.0)


def test_deviations_are_in_errors_of_both(store):
    """Runs scatter by ±.003 √(n − 1) about their mean: standard error .003; with .004 of the prediction .005."""
    for i in range(2):
        np.testing.assert_allclose(picture.deviation(store, i), 0.03 / 0.005)
    found = picture.numbers(store)
    np.testing.assert_allclose(found["rms deviation of the mean risk, D = 100, standard errors"], 6.0)
    assert found["stage 1, D = 1000: median predicted"] == 10.0
    assert found["stage 1, D = 1000: median measured"] == 9.0
    assert (found["risk at saddle 1"], found["median plateau 1, D = 100"]) == (0.5, 0.5)


def test_the_figure_has_a_row_for_each_dim_and_enlarges_the_last_of_several_steps(store):
    figure = picture.draw(store)
    assert [ax.get_title() for ax in figure.axes] == ["D = 100, 2 runs", "D = 1000, 4 runs"]
    prediction = store["prediction"].drop_vars(["saddle_risk", "saddle_feature"])
    more = prediction.assign(saddle_risk=("stage", [0.7, 0.6, 0.55]), saddle_feature=("stage", [0, -1, -1]))
    store.groups["prediction"] = more
    figure = picture.draw(store)
    assert len(figure.axes) == 4
    np.testing.assert_allclose(figure.axes[1].get_ylim(), (0.525, 0.66))


def test_wrong_configurations_are_named():
    for name, wrong in (
        ("replicas", {"replicas": (1,)}),
        ("replicas", {"replicas": (1, 2)}),
        ("records", {"records": 2}),
    ):
        with pytest.raises(ValueError, match=name):
            replace(picture.SMALL, **wrong).check()
    picture.SMALL.check()
    picture.FULL.check()
