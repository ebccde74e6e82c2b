"""The figure shows what the store says, in the order and units it says."""

import matplotlib as mpl
import numpy as np
import pytest
import synthetic
import xarray as xr

from compare import agreement, align, load, save
from figures import compare as picture
from figures.style import COLOURS, look, save_figure, style


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    def store(name, trained=None, **setup):
        theory = synthetic.ideal(0, **setup)
        run = synthetic.simulated(theory, 0)
        if trained is not None:
            theory, run = synthetic.trained(theory, run, 0, own=trained == "per head")
        datasets = {
            "theory": theory.to_xarray(),
            "simulation": run.to_xarray(),
            "aligned": align(theory, run).to_xarray(),
            "agreement": agreement(theory, run).to_xarray(),
        }
        return load(save(tmp_path_factory.mktemp(name) / "result.zarr", datasets, {"dim": synthetic.DIM}))

    return store


@pytest.mark.parametrize(
    "setup",
    [
        {"features": 3, "heads": 4, "growth": 0.5, "times": 31},
        {"features": 1, "heads": 1},
        {"replicas": 1},
        {"features": 5, "heads": 9, "times": 3},
    ],
)
def test_draws_and_saves_any_shape(make, setup, tmp_path):
    figure = picture.draw(make("any", **setup))
    features = setup.get("features", 2)
    assert len(figure.axes) == 2 * (features + 2) + 1
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert "risk" in labels
    assert rf"$m_{{h{features}}}$" in labels
    written = save_figure(figure, tmp_path / "deep/compare")
    assert [p.name for p in written] == ["compare.pdf", "compare.png"]
    assert all(p.stat().st_size > 1000 for p in written)


@pytest.mark.parametrize(("trained", "label"), [("shared", "$b$"), ("per head", "$b_h$")])
def test_trained_numbers_get_panels(make, tmp_path, trained, label):
    store = make("trained", trained=trained)
    figure = picture.draw(store)
    assert len(figure.axes) == 2 * (2 + 2 + 2) + 1
    panels = {ax.get_ylabel(): ax for ax in figure.axes}
    lines = [line for line in panels[label].get_lines() if line.get_linewidth() == 1.0 and len(line.get_xdata()) == 7]
    means = store["aligned"]["theory_bias"].mean("replica")
    if trained == "shared":
        assert {line.get_color() for line in lines} == {"black"}
        np.testing.assert_allclose(lines[0].get_ydata(), means)
    else:
        for h, line in enumerate(line for line in lines if line.get_linestyle() == "-"):
            np.testing.assert_allclose(line.get_ydata(), means.isel(head=h))
    assert all(p.stat().st_size > 1000 for p in save_figure(figure, tmp_path / "compare"))


def legend_of(figure):
    """Title, head labels and the other labels."""
    ax = figure.axes[-1]
    above, below = (artist for artist in ax.get_children() if isinstance(artist, mpl.legend.Legend))
    labels = [[text.get_text() for text in legend.get_texts()] for legend in (above, below)]
    return above.get_title().get_text(), *labels


def test_legend_says_how_far_the_verdict_goes_and_names_every_line(make):
    title, heads, labels = legend_of(picture.draw(make("legend", growth=0.5, times=31)))
    assert "theory and SGD: agree for τ ≤ 5" in title
    assert "bars: standard error" in title
    assert heads == ["1", "2"]
    assert {"noise floor", "with O(1/D) bias", "both, fresh loss", "judged up to here"} < set(labels)


def test_legend_names_nothing_that_is_not_drawn(make):
    figure = picture.draw(make("bare", replicas=1, growth=0.5, times=31))
    title, _, labels = legend_of(figure)
    assert "no verdict" in title
    assert "bars" not in title
    assert labels == ["theory", "SGD; Δ = SGD − theory", picture.FRESH_LABEL]
    _, _, labels = legend_of(picture.draw(make("whole")))
    assert "judged up to here" not in labels


def test_heads_beyond_the_palette_look_different(make):
    _, heads, _ = legend_of(picture.draw(make("many", heads=9, times=4)))
    assert heads == [str(h) for h in range(1, 10)]
    assert len({tuple(map(str, look(h).values())) for h in range(21)}) == 21
    assert len({(look(h)["color"], look(h)["marker"]) for h in range(21)}) == 21
    title, heads, _ = legend_of(picture.draw(make("too many", heads=22, times=4, features=1)))
    assert "22… repeat" in title
    assert len(heads) == 21


def test_legend_keeps_clear_of_other_text_in_two_columns(make):
    figure = picture.draw(make("two", features=1))
    figure.canvas.draw()
    labels = [ax.xaxis.label.get_window_extent() for ax in figure.axes[:-1] if ax.get_xlabel()]
    above, below = (a for a in figure.axes[-1].get_children() if isinstance(a, mpl.legend.Legend))
    boxes = [legend.get_window_extent() for legend in (above, below)]
    assert not boxes[0].overlaps(boxes[1])
    assert not any(box.overlaps(label) for box in boxes for label in labels)


def test_lines_are_theory_means_and_markers_the_simulation(make):
    store = make("lines", growth=0.5)
    with style():
        ax = mpl.figure.Figure().subplots()
        picture.overlaps(ax, store["aligned"], store, feature=1)
    lines = [line for line in ax.get_lines() if line.get_linewidth() == 1.0 and line.get_linestyle() == "-"]
    means = store["aligned"]["theory_m"].mean("replica").isel(feature=1)
    for h, line in enumerate(lines):
        assert line.get_color() == COLOURS[h]
        np.testing.assert_allclose(line.get_ydata(), means.isel(head=h))
    points = [container.lines[0] for container in ax.containers]
    seen = store["aligned"]["simulation_m"].mean("replica").isel(feature=1)
    for h, point in enumerate(points):
        np.testing.assert_allclose(point.get_ydata(), seen.isel(head=h))
        np.testing.assert_allclose(point.get_xdata(), store["simulation"]["time"])


def test_failed_replicas_are_not_drawn(make):
    store = make("failed")
    broken = store["simulation"].copy(deep=True)
    broken["result"][2] = 1
    store.datasets["simulation"] = broken
    ax = mpl.figure.Figure().subplots()
    picture.risk(ax, store)
    keep = [i for i in range(8) if i != 2]
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), store["theory"]["risk"][keep].mean("replica"))


def test_residual_panel_shows_mean_error_and_both_bands(make):
    agreement_data = make("bands")["agreement"]
    ax = mpl.figure.Figure().subplots()
    picture.residuals(ax, agreement_data, "m", feature=0)
    allowed, noise = (collection.get_paths()[0].vertices[:, 1].max() for collection in ax.collections[:2])
    m = agreement_data.isel(feature=0)
    assert allowed == pytest.approx(1e3 * float(m["m_allowed"].max()))
    assert noise == pytest.approx(1e3 * float((m["m_allowed"] - m["m_bias"]).max()))
    np.testing.assert_allclose(ax.containers[1].lines[0].get_ydata(), 1e3 * m["m_residual"].isel(head=1))


def test_style_leaves_matplotlib_as_it_was():
    before = dict(mpl.rcParams)
    with style():
        assert mpl.rcParams["pdf.fonttype"] == 42
        assert not mpl.rcParams["text.usetex"]
    assert dict(mpl.rcParams) == before


def test_long_records_are_thinned():
    assert len(picture._thinned(1000)) <= picture.MAX_MARKERS
    np.testing.assert_array_equal(picture._thinned(5), np.arange(5))


def test_diagonal_of_r():
    r = xr.DataArray(np.arange(8.0).reshape(2, 2, 2), dims=("time", "head", "head_"))
    np.testing.assert_array_equal(picture._diagonal(r), [[0, 3], [4, 7]])


def test_predicted_bands_are_shaded_about_the_mean_of_the_theory(make):
    store = make("shaded", growth=0.5)
    time = store["agreement"]["time"]
    width = 0.01 * np.arange(time.size)
    m = xr.DataArray(np.ones((time.size, 2, 2)) * width[:, None, None], dims=("time", "head", "feature"))
    r = xr.DataArray(np.ones((time.size, 2, 2)) * width[:, None, None], dims=("time", "head", "head_"))
    with style():
        bare = mpl.figure.Figure().subplots()
        picture.overlaps(bare, store["aligned"], store, feature=1)
        store.datasets["agreement"] = store["agreement"].assign(m_deviation=m, r_deviation=r)
        ax = mpl.figure.Figure().subplots()
        picture.overlaps(ax, store["aligned"], store, feature=1)
    assert len(ax.collections) == len(bare.collections) + 2
    until = np.asarray(time <= float(store["agreement"].attrs["until"]))
    line = store["aligned"]["theory_m"].mean("replica").isel(feature=1, head=0)[until]
    vertices = [c for c in ax.collections if c not in bare.collections][-2].get_paths()[0].vertices
    assert vertices[:, 1].max() == pytest.approx(float((line + 1.96 * width[until]).max()))
    _, _, labels = legend_of(picture.draw(store))
    assert "95 % of runs about own theory" in labels
