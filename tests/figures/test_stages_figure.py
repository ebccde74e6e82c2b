"""The picture of stage times: every line, band, point and step is what the store says."""

from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

from figures import stages as picture
from figures.style import COLOURS

DIMS = [100, 1000]


def case(variances, ranks):
    """A prediction and a comparison of one prior whose features have these variances and places."""
    features = len(variances)
    rates = 0.4 * np.asarray(variances)
    levels = np.array([0.025, 0.25, 0.5, 0.75, 0.975])
    drawn = (0.5 * np.log(np.array(DIMS)[:, None, None]) + np.linspace(0.5, 3, 16)[:, None]) / rates
    quantile = np.moveaxis(np.quantile(drawn, levels, axis=1), 0, -1)
    prediction = xr.Dataset(
        {
            "stage_time": (("dim", "sample", "feature"), drawn),
            "quantile": (("dim", "feature", "level"), quantile),
            "growth": ("feature", rates),
            "limit_slope": ("feature", 0.5 / rates),
            "predicted_slope": ("feature", 0.55 / rates),
            "variance": ("feature", np.asarray(variances, float)),
            "rank": ("feature", np.asarray(ranks)),
        },
        coords={"dim": DIMS, "level": levels},
    )
    measured = quantile[..., 1:4] + 0.1 * np.arange(3)
    each = ("dim", "feature")
    comparison = xr.Dataset(
        {
            **{name: ("feature", 0.5 / rates) for name in ("slope", "own_slope")},
            **{name: ("feature", 0.01 / rates) for name in ("slope_error", "own_error")},
            "measured": ((*each, "level"), measured),
            **{name: (each, np.full((2, features), 5)) for name in ("split", "unsplit")},
            **{name: (each, np.full((2, features), 0.25)) for name in ("ks", "p_value")},
            "expected": (each, np.full((2, features), 4.2)),
        }
    )
    runs = [
        xr.Dataset(
            {"stage_time": (("replica", "feature"), np.where(np.arange(10)[:, None] < 9, drawn[i, ::-1][:10], np.inf))},
            coords={"time": np.linspace(0, drawn[i].max(), 5)},
        )
        for i in range(2)
    ]
    return prediction, comparison, runs


@pytest.fixture
def store():
    """Two priors: one feature, and two of which the second splits later (and a third that never does)."""
    found = {}
    for p, (variances, ranks) in enumerate([((1.0,), (0,)), ((0.8, 0.4, 0.1), (0, 1, -1))]):
        found[f"prediction_{p}"], found[f"comparison_{p}"], runs = case(variances, ranks)
        found.update({f"runs_{p}_{i}": run for i, run in enumerate(runs)})

    class Fake(SimpleNamespace):
        def __getitem__(self, group):
            return found[group]

    configuration = {
        "dims": DIMS, "shown": 1000, "priors": ["flat", "deep"], "heads": [2, 4], "length": 4, "snr": 4.0,
        "threshold": 0.25, "variance": 0.1, "learning_rate": 2.0, "batch": 4, "samples": 16,
    }  # fmt: skip
    return Fake(configuration=configuration, groups=found)


def test_only_features_with_a_stage_are_drawn(store):
    assert [(one.prior, one.feature) for one in picture.series(store)] == [(0, 0), (1, 0), (1, 1)]


def test_lines_are_predicted_medians_and_points_measured_ones(store):
    ax = mpl.figure.Figure().subplots()
    picture.against_dim(ax, store)
    solid = [line for line in ax.get_lines() if line.get_linestyle() == "-" and len(line.get_xdata()) == 2]
    for index, one in enumerate(picture.series(store)):
        line = next(line for line in solid if line.get_color() == COLOURS[index])
        middle = one.prediction["quantile"].values[:, one.feature, 2]
        np.testing.assert_array_equal(line.get_ydata(), middle)
        point, _, (bars,) = ax.containers[index].lines
        seen = one.comparison["measured"].values[:, one.feature]
        np.testing.assert_array_equal(point.get_ydata(), seen[:, 1])
        ends = np.array([segment[:, 1] for segment in bars.get_segments()])
        np.testing.assert_allclose(ends, seen[:, [0, 2]])
        band = ax.collections[2 * index].get_paths()[0].vertices[:, 1]  # bands and bars take turns
        np.testing.assert_allclose(band.max(), one.prediction["quantile"].values[1, one.feature, 3])


def test_guides_have_the_limit_slope(store):
    ax = mpl.figure.Figure().subplots()
    picture.against_dim(ax, store)
    guides = [line for line in ax.get_lines() if line.get_color() == picture.GUIDE["color"]]
    for guide, one in zip(guides, picture.series(store), strict=True):
        slope = np.diff(guide.get_ydata()) / np.diff(np.log(guide.get_xdata()))
        np.testing.assert_allclose(slope, one.prediction["limit_slope"].values[one.feature])


def test_steps_count_the_runs_that_split(store):
    ax = mpl.figure.Figure().subplots()
    picture.first_stage(ax, store)
    steps = [line for line in ax.get_lines() if line.get_drawstyle() == "steps-post"]
    assert len(steps) == 2  # first stages alone
    for p, line in enumerate(steps):
        times = store[f"runs_{p}_1"]["stage_time"].values[:, 0]
        seen = np.sort(times[np.isfinite(times)])
        np.testing.assert_array_equal(line.get_xdata()[1:], seen)
        assert line.get_ydata()[-1] == 1.0
    smooth = [line for line in ax.get_lines() if line.get_drawstyle() != "steps-post"]
    assert all(np.all(np.diff(line.get_ydata()) >= 0) and line.get_ydata()[-1] == 1.0 for line in smooth)
    assert "n = 9, p = 0.25" in ax.texts[0].get_text()


def test_a_measured_median_beyond_the_end_leaves_a_gap(store):
    store.groups["comparison_0"]["measured"].values[1, 0] = [7.0, np.inf, np.inf]
    ax = mpl.figure.Figure().subplots()
    picture.against_dim(ax, store)
    assert np.isfinite(ax.get_ylim()).all()
    picture.draw(store).canvas.draw()


def test_draws_one_dim_without_slopes(store):
    store.configuration["dims"] = [1000]
    for group, data in store.groups.items():
        store.groups[group] = data.isel(dim=[1]) if "dim" in data.dims else data
    for p in range(2):
        store.groups[f"runs_{p}_0"] = store.groups[f"runs_{p}_1"]
    figure = picture.draw(store)
    figure.canvas.draw()
    assert not any(line.get_color() == picture.GUIDE["color"] for line in figure.axes[0].get_lines())


def test_the_table_says_every_number(store):
    text = picture.table(store)
    assert "1.250 ± 0.025" in text
    assert "deep, H = 4" in text
    assert text.count("0.250    0.25") == 2 * 3  # KS and p of each D and feature with a stage
    assert text.count("10        5       4.2") == 2 * 3  # runs, unsplit, expected


def test_features_that_split_together_are_both_shown(store):
    """Both first, with the same predicted times: two lines of each panel, two notes that do not cover each other."""
    store.groups["prediction_1"]["rank"].values[:] = [0, 0, -1]
    store.groups["prediction_1"]["quantile"].values[:, 1] = store.groups["prediction_1"]["quantile"].values[:, 0]
    assert [(one.prior, one.feature) for one in picture.series(store)] == [(0, 0), (1, 0), (1, 1)]
    left, right = picture.draw(store).axes[:2]
    steps = [line for line in right.get_lines() if line.get_drawstyle() == "steps-post"]
    assert len(steps) == 3
    heights = sorted(note.xy[1] for note in left.texts)
    assert len(heights) == 3
    assert np.all(np.diff(heights) >= picture.NOTE - 1e-12)
    assert picture.table(store).count("deep, H = 4") == 1


def test_a_feature_predicted_never_to_split_leaves_its_note(store):
    for name in ("quantile", "stage_time"):
        store.groups["prediction_0"][name].values[:] = np.inf
    figure = picture.draw(store)
    figure.canvas.draw()
    assert len(figure.axes[0].texts) == 3
    assert "inf … inf" in picture.table(store)


def test_axes_end_with_the_data(store):
    left, right = picture.draw(store).axes[:2]
    assert left.get_xlim()[1] <= 2 * DIMS[-1]
    assert right.get_ylabel() == "fraction split, of those split by the end"
