"""The figures of the limits with the packaged encoder: what they need is said first; small ones end to end."""

from importlib import import_module

import pytest

from compare import load
from headsplit.figures import configured, run

SMALL = {
    "distance": ("lengths=[16, 32]", "counts=[4, 16]", "draws=2", "queries=2", "rows=2"),
    "critical": ("lengths=[8, 16]", "shifts=[0.5]", "queries=2", "draws=2", "rows=2"),
    "distinguishable": ("length=32", "counts=[1, 16]", "draws=2", "queries=2", "rows=2"),
    "gradient": ("temperatures=[0.1, 1.0]", "sizes=[0.1]", "length=16", "random_rows=8", "rows=2"),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_missing_encoder_is_told_before_anything_is_computed(name, monkeypatch, tmp_path):
    monkeypatch.setattr("sim.pretrained.files.DEFAULT", "gt-none")
    with pytest.raises(ImportError, match="pip install"):
        run(name, configured(name), tmp_path / "out", progress=False, say=print)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_small_ones_end_to_end(name, tmp_path):
    found = run(name, configured(name, changes=SMALL[name]), tmp_path, progress=False, say=print)
    assert found == import_module(f"figures.{name}").numbers(load(tmp_path / "result.zarr"))
    assert (tmp_path / f"{name}.pdf").stat().st_size > 5000


def test_a_text_longer_than_the_encoder_reads_is_refused(tmp_path):
    with pytest.raises(ValueError, match="512 tokens"):
        run("gradient", configured("gradient", changes=["length=1024"]), tmp_path, progress=False, say=print)
