"""Every figure of the papers from a stored result of its small size: its key numbers and its picture; slow: anew."""

import json
import zipfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from compare import load
from compare.store import differences
from headsplit.figures import FIGURES, run

RECORDED = Path(__file__).parent / "recorded"
KEPT = [name for name in FIGURES if (RECORDED / f"{name}.zip").exists()]


@pytest.fixture
def stored(request, tmp_path):
    """(name, store) of one figure."""
    with zipfile.ZipFile(RECORDED / f"{request.param}.zip") as kept:
        kept.extractall(tmp_path)
    return request.param, load(tmp_path / "result.zarr")


each_figure = pytest.mark.parametrize("stored", KEPT, indirect=True)


@each_figure
def test_the_picture_shows_finite_numbers_on_named_axes(stored, tmp_path):
    name, store = stored
    assert not differences(asdict(import_module(FIGURES[name].computed).SMALL), store.configuration)
    figure = import_module(FIGURES[name].drawn).draw(store)
    figure.draw_without_rendering()
    shown = [ax for ax in figure.axes if ax.axison]
    assert any(ax.get_xlabel() for ax in shown)
    assert any(ax.get_ylabel() for ax in shown)
    assert figure.get_size_inches()[0] <= 7.01  # two columns at most
    for ax in shown:
        drawn = [np.asarray(line.get_ydata(), float) for line in ax.get_lines()]
        drawn += [np.asarray(points.get_offsets(), float)[:, 1] for points in ax.collections]
        assert ax.images or any(np.isfinite(values).any() for values in drawn)
        low, high = ax.get_ylim()
        assert np.isfinite([low, high]).all()
    texts = [text.get_text() for ax in shown for text in (ax.xaxis.label, ax.yaxis.label, ax.title)]
    assert not any("nan" in text.lower().split() for text in texts)


@each_figure
def test_key_numbers_are_those_recorded(stored):
    name, store = stored
    recorded = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    numbers = import_module(FIGURES[name].drawn).numbers(store)
    assert list(numbers) == list(recorded)
    for key, value in recorded.items():
        assert numbers[key] == pytest.approx(value, rel=1e-9, nan_ok=True), key


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_key_numbers_computed_anew(name, tmp_path):
    recorded = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    configuration = import_module(FIGURES[name].computed).SMALL
    numbers = run(name, configuration, tmp_path, progress=False, say=lambda _: None)
    # the same random numbers: what differs is rounding, which a long run may carry on
    assert numbers == pytest.approx(recorded, rel=1e-3, abs=1e-6, nan_ok=True)
