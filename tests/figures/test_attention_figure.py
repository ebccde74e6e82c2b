"""The pictures of a transformer's attention: every line, box, mark and cell is what the store says."""

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

from figures import attention as picture

HEADS = ("layer", "head")
PLACES = {"layer": np.arange(2), "head": np.arange(3)}
RNG = np.random.default_rng(0)


def positive(*shape):
    return RNG.uniform(0.2, 0.9, shape)


def distances(x, values):
    names = ("distance", "distance_bound", "distance_bound_printed", "expected", "expected_printed")
    data = {name: ((*HEADS, x), positive(2, 3, len(values))) for name in names}
    return xr.Dataset(data, coords={**PLACES, x: values}, attrs={"selected": 5, "length": 64})


@pytest.fixture
def store():
    """Two layers of three heads; attributes as they are before they are stored."""
    report = xr.Dataset({name: (HEADS, positive(2, 3)) for name in {*picture.MAPPED, *picture.COLUMNS}}, coords=PLACES)
    report["saturated"] = HEADS, np.array([[True, False, True], [False, False, False]])
    report["critical_count"], report["layer_critical_count"] = 7.0, ("layer", np.array([3.0, np.nan]))
    report.attrs = {"model": "small", "text": "a.txt", "causal": True, "length": 64, "selected": 20, "level": 0.01,
                    "averaged_rows": 44, "normalize": True, "vectors": "inputs"}  # fmt: skip
    lengths, counts, sizes = np.array([32, 64]), np.array([1, 4, 16]), np.array([0.001, 10.0])
    critical = xr.Dataset(
        {
            "critical_count": ("length", [5.0, np.nan]),
            "ratio": ("length", [5 / 32, np.nan]),
            "layer_critical_count": (("length", "layer"), [[1.0, 2.0], [3.0, np.nan]]),
        },
        coords={"length": lengths, "layer": np.arange(2)},
        attrs={"level": 0.01},
    )
    names = ("distinguishable", "lower", "upper", "lower_printed", "upper_printed")
    apart = {name: ((*HEADS, "selected"), positive(2, 3, 3)) for name in names}
    temperatures = np.array([0.1, 1.0])
    gradient = xr.Dataset(
        {
            "gradient": ((*HEADS, "temperature", "size"), positive(2, 3, 2, 2)),
            "norm": ((*HEADS, "temperature"), positive(2, 3, 2)),
            "norm_bound": ("temperature", 1 / (2 * temperatures)),
            "bound_printed": ("temperature", positive(2)),
        },
        coords={**PLACES, "temperature": temperatures, "size": sizes},
    )

    class Fake:
        datasets = {  # noqa: RUF012
            "report": report,
            "distance_against_length": distances("length", lengths),
            "distance_against_selected": distances("selected", counts),
            "critical_against_length": critical,
            "separability_against_selected": xr.Dataset(apart, coords={**PLACES, "selected": counts}),
            "gradient_against_temperature": gradient,
        }

        def __getitem__(self, group):
            return self.datasets[group]

    return Fake()


@pytest.fixture
def ax():
    return mpl.figure.Figure().subplots()


def test_cells_are_heads_and_dots_the_saturated_ones(store, ax):
    report = store["report"]
    mesh, _, dots = picture.heat_map(ax, report, "distinguishable", limits=(0, 1))
    np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(2, 3), report["distinguishable"])
    assert mesh.get_clim() == (0, 1)
    assert set(zip(dots.get_xdata(), dots.get_ydata(), strict=True)) == {(0, 0), (2, 0)}
    assert len(picture.heat_map(ax, report, "entropy", log=True)) == 2  # no dots elsewhere


def test_an_unknown_quantity_is_named(store, ax):
    with pytest.raises(ValueError, match=r"quantity: expected one of .*entropy.*, got 'size'"):
        picture.heat_map(ax, store["report"], "size")


@pytest.mark.parametrize("group", ["distance_against_length", "distance_against_selected"])
def test_lines_are_medians_and_bars_quartiles_over_heads(store, ax, group):
    data = store[group]
    *lines, points = picture.distance_curves(ax, data)
    names = ("distance_bound", "distance_bound_printed", "expected", "expected_printed")
    for line, name in zip(lines, names, strict=True):
        np.testing.assert_allclose(line.get_ydata(), np.median(data[name].values, axis=(0, 1)))
    marks, _, (bars,) = points.lines
    np.testing.assert_allclose(marks.get_ydata(), np.median(data["distance"].values, axis=(0, 1)))
    ends = np.array([segment[:, 1] for segment in bars.get_segments()])
    quartiles = np.quantile(data["distance"].values.reshape(6, -1), [0.25, 0.75], axis=0).T
    np.testing.assert_allclose(ends, quartiles)
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_boxes_are_of_heads(store, ax):
    data = store["separability_against_selected"]
    _, boxes, *lines = picture.separability_boxes(ax, data)
    for place, median in enumerate(boxes["medians"]):
        values = data["distinguishable"].values[..., place]
        np.testing.assert_allclose(median.get_ydata(), np.median(values))
        ends = [boxes["caps"][2 * place + i].get_ydata()[0] for i in range(2)]
        np.testing.assert_allclose(ends, [values.min(), values.max()])
    for line, name in zip(lines, ("lower", "lower_printed", "upper", "upper_printed"), strict=True):
        np.testing.assert_allclose(line.get_ydata(), np.median(data[name].values, axis=(0, 1)))


def test_critical_counts_that_are_not_there_leave_gaps(store, ax):
    *layers, every, reported = picture.critical_counts(ax, store["critical_against_length"])
    np.testing.assert_array_equal(every.get_ydata(), [5, np.nan])
    np.testing.assert_array_equal([line.get_ydata() for line in layers], [[1, 3], [2, np.nan]])
    np.testing.assert_allclose(reported.get_ydata(), [0.06 * 32, 0.06 * 64])


def test_gradients_are_the_largest_of_all_heads(store, ax):
    data = store["gradient_against_temperature"]
    bound, _, norm, *sizes = picture.gradient_curves(ax, data)
    np.testing.assert_array_equal(bound.get_ydata(), data["norm_bound"])
    np.testing.assert_array_equal(norm.get_ydata(), data["norm"].values.max(axis=(0, 1)))
    for line, values in zip(sizes, np.moveaxis(data["gradient"].values.max(axis=(0, 1)), -1, 0), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), values)
    assert [line.get_label() for line in sizes] == ["ε = 0.001", "ε = 10"]


def test_both_figures_are_drawn(store):
    for figure, panels in ((picture.draw(store), 6), (picture.draw_heads(store["report"]), 6)):
        figure.canvas.draw()
        assert len([ax for ax in figure.axes if ax.get_label() != "<colorbar>"]) == panels


def test_the_table_says_what_is_stored(store):
    text = picture.table(store)
    assert "small on a.txt: causal, 2 layers of 3 heads, L = 64 tokens, N = 20, means over 44 query rows" in text
    assert "critical N of all heads: 7 = 0.109 L" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert lines["0"].endswith("3  all but 1")
    assert lines["1"].endswith("–  none")
    assert "(–: none)" in text
    store["report"].attrs["least_heads"] = 5  # more than the 3 of a layer, fewer than the 6 of the model
    few = picture.table(store)
    assert " few  all but 1" in few
    assert "critical N of all heads: 7 = 0.109 L" in few
    assert "(–: none; few: fewer than 5 heads can never differ)" in few
    low, middle, high = np.quantile(store["report"]["entropy"].values[0], [0.25, 0.5, 0.75])
    assert f"{low:.2f} {middle:.2f} {high:.2f}" in lines["0"]
    del store.datasets["gradient_against_temperature"]
    assert "largest gradient" in text
    assert "largest gradient" not in picture.table(store)
