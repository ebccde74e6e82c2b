"""Pictures of sweeps: every curve, band, cell, gap and cross is what the Dataset says."""

import numpy as np
import pytest
import xarray as xr
from matplotlib import pyplot
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from figures import sweep as picture
from figures.scale import Scale, number_text, shortened
from figures.style import COLOURS, COLUMN, WIDE, save_figure

FLIPS = [f"sign_flips(mean=[0.0, 0.0], amplitude=[{a}, 1.0])" for a in (0.0, 0.5)]


def swept(snr=(4.0, 1.0, 2.0), dim=(100, 1000, 10_000), *, replicas=5):
    """Every number differs; snr 1 at D = 1000 is missing, the first replica of snr 2 at D = 10⁴ failed."""
    time = np.linspace(0, 1, 4)
    shape = (len(snr), len(dim), replicas, len(time))
    risk = np.random.default_rng(0).uniform(1, 2, shape)
    status = np.ones(shape[:3], np.int8)
    status[1, 1], status[2, 2, 0] = 0, 2
    each = ("snr", "dim", "replica")
    return xr.Dataset(
        {
            "risk": (
                (*each, "time"),
                np.where((status == 1)[..., None], risk, np.nan),
                {"long_name": "population risk"},
            ),
            "status": (each, status),
            "failure": (each, np.where(status == 2, "ValueError: no", "").astype(object)),
        },
        coords={"snr": list(snr), "dim": list(dim), "time": ("time", time, {"long_name": "clock τ"})},
    )


@pytest.fixture
def data():
    return swept()


@pytest.fixture
def ax():
    return Figure(layout="constrained").subplots()


def lines(artists):
    return [one for one in artists if hasattr(one, "get_xdata") and one.get_marker() != "x"]


def crosses(artists):
    return [one for one in artists if hasattr(one, "get_xdata") and one.get_marker() == "x"]


def bands(artists):
    return [one for one in artists if type(one).__name__ == "FillBetweenPolyCollection"]


def said(ax):
    """All text above the axes."""
    legend = ax.get_legend()
    texts = [ax.get_title()]
    if legend is not None:
        texts += [legend.get_title().get_text(), *(text.get_text() for text in legend.get_texts())]
    return "\n".join(texts)


def test_curves_are_means_over_replicas_along_time(data, ax):
    artists = picture.curves(data, "risk", x="time", hue="snr", at={"dim": 100}, ax=ax)
    drawn = lines(artists)
    assert len(drawn) == 3
    for i, line in enumerate(drawn):
        np.testing.assert_array_equal(line.get_xdata(), data["time"])
        np.testing.assert_allclose(line.get_ydata(), data["risk"][i, 0].median("replica"))
        assert line.get_color() == COLOURS[i]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("clock τ", "population risk")
    assert said(ax).splitlines()[1:] == [
        "dim = 100",
        "lines: median, bands: quartiles of 5 replicas",
        "snr",
        "4",
        "1",
        "2",
    ]
    assert not crosses(artists)


@pytest.mark.parametrize("band", picture.BANDS)
def test_bands_are_of_the_kind_that_is_named(data, ax, band):
    artists = picture.curves(data, "risk", x="time", hue="snr", at={"dim": 100}, band=band, ax=ax)
    values = data["risk"][0, 0].values
    half = 1.96 * values.std(axis=0, ddof=1) / np.sqrt(5)
    low, high = {
        "quartiles": np.quantile(values, [0.25, 0.75], axis=0),
        "error": (values.mean(axis=0) - half, values.mean(axis=0) + half),
        "range": (values.min(axis=0), values.max(axis=0)),
    }[band]
    corners = bands(artists)[0].get_paths()[0].vertices
    for time, lower, upper in zip(data["time"].values, low, high, strict=True):
        edges = corners[np.isclose(corners[:, 0], time), 1]
        assert edges.min() == pytest.approx(lower)
        assert edges.max() == pytest.approx(upper)
    assert picture.BANDS[band][1] in said(ax)


def test_what_is_missing_is_a_gap_and_what_failed_a_cross(data, ax):
    artists = picture.curves(data, "risk", x="dim", hue="snr", at={"time": 1.0}, ax=ax)
    gap = lines(artists)[1].get_ydata()
    assert np.isnan(gap).tolist() == [False, True, False]
    np.testing.assert_allclose(lines(artists)[2].get_ydata()[2], data["risk"][2, 2, 1:, -1].median())
    (cross,) = crosses(artists)
    assert cross.get_xdata().tolist() == [10_000]
    assert cross.get_color() == COLOURS[2]
    assert "of 45 runs 1 failed (crosses), 5 missing" in said(ax)
    assert "of 4–5 replicas" in said(ax)
    assert ax.get_xscale() == "log"
    assert sum(type(one).__name__ == "LineCollection" for one in artists) == 1  # bands of the two single points


def test_a_curve_without_any_value_says_so(data, ax):
    data["risk"][2, 2] = np.nan
    data["status"][2, 2] = 2
    picture.curves(data, "risk", x="time", hue="snr", at={"dim": 1000}, ax=ax)
    assert "1 (missing)" in said(ax)
    other = Figure().subplots()
    picture.curves(data, "risk", x="time", hue="snr", at={"dim": 10_000}, ax=other)
    assert "2 (failed)" in said(other)
    assert "of 15 runs 5 failed\n" in said(other)  # no crosses: the curve has no place for one


def test_what_a_failed_run_had_is_not_drawn(data, ax):
    data["risk"][2, 2, 0, :2] = 1e6
    at = {"dim": 10_000, "snr": 2}
    (line,) = lines(picture.curves(data, "risk", x="time", at=at, ax=ax))
    np.testing.assert_allclose(line.get_ydata(), data["risk"][2, 2, 1:].median("replica"))


def test_values_of_x_are_sorted(data, ax):
    (line,) = lines(picture.curves(data, "risk", x="snr", at={"time": 1, "dim": 100}, ax=ax))
    assert line.get_xdata().tolist() == [1, 2, 4]
    np.testing.assert_allclose(line.get_ydata(), data["risk"][[1, 2, 0], 0, :, -1].median("replica"))
    assert ax.get_xscale() == "linear"


def test_many_numbers_have_a_colour_bar(ax):
    data = swept(snr=np.geomspace(1, 64, 7))
    drawn = lines(picture.curves(data, "risk", x="time", hue="snr", at={"dim": 100}, ax=ax))
    assert len({to_rgba(line.get_color()) for line in drawn}) == 7
    assert [other.get_ylabel() for other in ax.figure.axes[1:]] == ["snr"]
    assert ax.figure.axes[1].get_yscale() == "log"


def test_single_runs_have_no_band_and_one_replica_can_be_chosen(data, ax):
    one = picture.curves(data, "risk", x="time", at={"dim": 100, "snr": 4, "replica": 3}, ax=ax)
    assert len(one) == 1
    np.testing.assert_array_equal(one[0].get_ydata(), data["risk"][0, 0, 3])
    plain = picture.curves(data.isel(replica=0, drop=True), "risk", x="time", hue="snr", at={"dim": 100}, ax=ax)
    assert len(plain) == 3
    each = picture.curves(data, "risk", x="time", hue="replica", at={"dim": 100, "snr": 4}, ax=ax)
    assert len(each) == 5


def test_names_stand_side_by_side_without_lines(ax):
    data = swept().isel(snr=[0, 1]).rename(snr="prior").assign_coords(prior=np.array(FLIPS, dtype=object))
    artists = picture.curves(data, "risk", x="prior", hue="dim", at={"time": 1.0}, ax=ax)
    assert all(line.get_linestyle() == "None" for line in lines(artists))
    assert [text.get_text() for text in ax.get_xticklabels()] == ["amplitude=[0,1]", "amplitude=[0.5,1]"]
    at = {"prior": FLIPS[1], "dim": 100}
    (line,) = lines(picture.curves(data, "risk", x="time", at=at, ax=Figure().subplots()))
    np.testing.assert_allclose(line.get_ydata(), data["risk"][1, 0].median("replica"))


def test_a_dataset_without_status_is_drawn(data, ax):
    assert len(lines(picture.curves(data[["risk"]], "risk", x="time", hue="snr", at={"dim": 100}, ax=ax))) == 3


def test_one_line_makes_a_figure_of_its_own(data):
    before = pyplot.get_fignums()
    artists = picture.curves(data, "risk", x="time", hue="snr", at={"dim": 100})
    (new,) = set(pyplot.get_fignums()) - set(before)
    assert artists[0].figure is pyplot.figure(new)
    pyplot.close(new)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": "time", "hue": "snr"}, r"at: expected a value of dim \(100, 1000, 10000\), on which risk depends"),
        (
            {"x": "time", "hue": "snr", "at": {"dim": 500}},
            r"a value of dim that is there \(100, 1000, 10000\), got 500",
        ),
        ({"x": "time", "hue": "snr", "at": {"dim": True}}, "a value of dim that is there .* got True"),
        ({"x": "time", "at": {"snr": 1, "dim": 100, "head": 0}}, r"not drawn \(snr, dim, replica\), got 'head'"),
        ({"x": "time", "hue": "snr", "at": {"time": 1}}, "dimensions of risk that are not drawn"),
        (
            {"x": "steps"},
            r"x: expected one of the dimensions of risk \(snr, dim, replica, time\), each once, got 'steps'",
        ),
        ({"x": "time", "hue": "time"}, "hue: expected .* each once"),
        ({"x": "time", "band": "sigma"}, "band: expected 'quartiles' or 'error' or 'range', got 'sigma'"),
    ],
)
def test_what_is_not_there_is_named(data, ax, options, message):
    with pytest.raises(ValueError, match=message):
        picture.curves(data, "risk", ax=ax, **options)


def test_unknown_quantities_are_named(data, ax):
    with pytest.raises(ValueError, match="quantity: expected one of risk, status, failure, got 'loss'"):
        picture.curves(data, "loss", x="time", ax=ax)
    with pytest.raises(ValueError, match="quantity: expected a variable of numbers, got 'failure'"):
        picture.curves(data, "failure", x="dim", ax=ax)
    with pytest.raises(ValueError, match="kind: expected 'curves' or 'heat_map', got 'pie'"):
        picture.draw(data, "pie", "risk")


@pytest.mark.parametrize("reduce", ["mean", "median"])
def test_cells_are_means_over_replicas_about_sorted_values(data, ax, reduce):
    artists = picture.heat_map(data, "risk", x="dim", y="snr", at={"time": 1.0}, reduce=reduce, ax=ax)
    expected = getattr(data["risk"][[1, 2, 0], :, :, -1], reduce)("replica").values
    cells = artists[0].get_array()
    np.testing.assert_allclose(cells.filled(np.nan), expected)
    np.testing.assert_allclose(artists[0].get_coordinates()[0, :, 0], 10 ** np.array([1.5, 2.5, 3.5, 4.5]))
    np.testing.assert_allclose(artists[0].get_coordinates()[:, 0, 1], [0.5, 1.5, 3, 5])
    (hatched,) = [one for one in artists if type(one).__name__ == "Rectangle"]
    assert hatched.get_hatch()
    np.testing.assert_allclose([hatched.get_x(), hatched.get_y()], [10**2.5, 0.5])
    (cross,) = crosses(artists)
    assert (cross.get_xdata().tolist(), cross.get_ydata().tolist()) == ([10_000], [2])
    assert ax.figure.axes[1].get_ylabel() == f"population risk\n({reduce} of 4–5 replicas)"
    assert said(ax).splitlines() == ["time = 1", "of 45 runs 1 failed (crosses), 5 missing", "hatched: no value"]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear")


def test_one_value_still_has_a_cell(data, ax):
    mesh = picture.heat_map(data.isel(snr=[0]), "risk", x="dim", y="snr", at={"time": 1.0}, ax=ax)[0]
    np.testing.assert_allclose(mesh.get_coordinates()[:, 0, 1], [3.5, 4.5])
    with pytest.raises(ValueError, match="reduce: expected 'mean' or 'median', got 'sum'"):
        picture.heat_map(data, "risk", x="dim", y="snr", at={"time": 1.0}, reduce="sum", ax=ax)
    with pytest.raises(ValueError, match="y: expected one of the dimensions"):
        picture.heat_map(data, "risk", x="dim", y="dim", at={"time": 1.0}, ax=ax)


def test_figures_are_wider_for_long_names_and_are_written(data, tmp_path):
    names = ["gaussian(mean=[0.0, 0.0], variance=[1.0, 1.0])", "one_hot(features=2, weights=[0.5, 0.5])"]
    named = data.isel(snr=[0, 1]).rename(snr="prior").assign_coords(prior=names)
    wide = picture.draw(named, "heat_map", "risk", x="dim", y="prior", at={"time": 1.0})
    slim = picture.draw(data, "heat_map", "risk", x="dim", y="snr", at={"time": 1.0})
    assert (wide.get_figwidth(), slim.get_figwidth()) == (WIDE, COLUMN)
    assert all(path.exists() for path in save_figure(wide, tmp_path / "heat"))


@pytest.mark.parametrize(
    ("values", "log"),
    [
        ([1, 10, 100], True), ([1, 2, 5, 10, 20, 50], True), ([1, 2, 4, 8], False), ([0, 1, 10, 100], False),
        (np.linspace(1, 100, 10), False), ([5], False),
    ],
)  # fmt: skip
def test_logarithmic_axes_are_for_geometric_values(values, log):
    data = xr.Dataset(coords={"x": np.asarray(values, float)})
    assert Scale.of(data, "x").log == log


def test_numbers_and_names_are_short():
    assert [number_text(x) for x in (1000, 1e4, 31622.8, 2e7, 0.25, 1e-6)] == [
        "1000", "$10^{4}$", "31622.8", r"$2\times 10^{7}$", "0.25", "$10^{-6}$",
    ]  # fmt: skip
    assert shortened(FLIPS) == ["amplitude=[0,1]", "amplitude=[0.5,1]"]
    assert shortened([FLIPS[0], "Softmax(temperature=1.0)"]) == ["sign_flips([0,0], [0,1])", "Softmax(1)"]
    assert shortened(["plain", "text (here"]) == ["plain", "text (here"]
    assert shortened(["f(x)", "g(a=b)"]) == ["f(x)", "g(a=b)"]
    close = [f"gaussian(mean=[{', '.join(['0.0'] * 30)}], variance=[{', '.join([v] * 30)}])" for v in ("1.0", "2.0")]
    assert len(set(shortened(close))) == 2
