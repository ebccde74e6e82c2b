"""Stores: what is read is what was written; never half a store, never a silent overwrite."""

import json
import shutil

import numpy as np
import pytest
import synthetic
import xarray as xr

from compare import agreement, load, save
from compare.store import differences

CONFIGURATION = {
    "snr": 0.1 + 0.2,
    "length": 10,
    "prior": "sign_flips(mean=[2.0], amplitude=[0.0])",
    "trained": None,
    "finite": True,
    "strengths": {"a": [1e-300, 2]},
    "count": np.int64(3),
}


def results():
    theory = synthetic.ideal(0)
    run = synthetic.simulated(theory, 0)
    return {
        "theory": theory.to_xarray(),
        "simulation": run.to_xarray(),
        "agreement": agreement(theory, run).to_xarray(),
    }


def test_round_trip(tmp_path):
    written = results()
    written["theory"].attrs.update({"none": None, "flag": True, "table": {"a": 1}, "list": [1, None]})
    written["theory"]["label"] = ("feature", ["a", "b"])
    path = save(tmp_path / "run.zarr", written, CONFIGURATION)
    store = load(path)
    assert list(store.datasets) == ["theory", "simulation", "agreement"]
    for group, data in written.items():
        assert store[group].equals(data)
        for name in data.variables:
            assert store[group][name].dtype == data[name].dtype or data[name].dtype.kind == "U"
    assert written["theory"].attrs["none"] is None
    assert written["theory"]["label"].dtype.kind == "U"
    assert store.configuration == {**CONFIGURATION, "count": 3}
    assert store.configuration["snr"] == 0.1 + 0.2
    assert store["theory"].attrs["none"] == "null"
    assert json.loads(store["theory"].attrs["table"]) == {"a": 1}
    assert store.metadata["status"] == "complete"
    assert store.metadata["versions"]["jax"]
    assert store.metadata["flags"]["jax_enable_x64"] is True
    assert "complete" in str(store)
    with pytest.raises(KeyError, match="it holds theory, simulation, agreement"):
        store["sweep"]


def test_nan_and_empty_chunks_survive(tmp_path):
    data = xr.Dataset({"x": ("time", np.full(5, np.nan)), "zero": ("time", np.zeros(5))})
    store = load(save(tmp_path / "nan.zarr", {"a": data}, {}))
    assert store["a"].equals(data)


def test_no_silent_overwrite(tmp_path):
    path = save(tmp_path / "run.zarr", results(), CONFIGURATION)
    with pytest.raises(FileExistsError, match="exists already"):
        save(path, results(), {})
    assert load(path).configuration["length"] == 10
    save(path, results(), {"length": 11}, status="interrupted", replace=True)
    assert load(path).configuration == {"length": 11}
    assert load(path).metadata["status"] == "interrupted"
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_crash_while_writing_leaves_no_half_store(tmp_path, monkeypatch, replace):
    path = tmp_path / "run.zarr"
    if replace:
        save(path, results(), CONFIGURATION)
    original = xr.DataTree.to_zarr

    def crash(tree, target, **options):
        original(tree, target, **options)
        shutil.rmtree(target / "simulation")
        raise KeyboardInterrupt

    monkeypatch.setattr(xr.DataTree, "to_zarr", crash)
    with pytest.raises(KeyboardInterrupt):
        save(path, results(), {}, replace=replace)
    assert [p.name for p in tmp_path.iterdir()] == (["run.zarr"] if replace else [])
    if replace:
        assert load(path).configuration["length"] == 10


def test_a_store_that_appeared_meanwhile_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "run.zarr"
    original = xr.DataTree.to_zarr

    def race(tree, target, **options):
        original(tree, path, **options)
        original(tree, target, **options)

    monkeypatch.setattr(xr.DataTree, "to_zarr", race)
    with pytest.raises(FileExistsError, match="exists already"):
        save(path, results(), {})
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


class TestDamage:
    @pytest.fixture
    def path(self, tmp_path):
        return save(tmp_path / "run.zarr", results(), CONFIGURATION)

    @pytest.mark.parametrize(
        ("victim", "message"),
        [
            ("theory/m/c", "theory/m differs from what was written"),
            ("simulation/loss", "simulation/loss is missing"),
            ("agreement", "group agreement is missing"),
        ],
    )
    def test_missing_parts_are_named(self, path, victim, message):
        shutil.rmtree(path / victim)
        with pytest.raises(ValueError, match=message):
            load(path)

    @pytest.mark.parametrize("array", ["theory/m", "simulation/time"])
    @pytest.mark.parametrize("share", [0.0, 0.5])
    def test_cut_off_chunks_are_named(self, path, array, share):
        chunk = next(file for file in (path / array / "c").rglob("*") if file.is_file())
        data = chunk.read_bytes()
        chunk.write_bytes(data[: int(share * len(data))])
        with pytest.raises(ValueError, match=f"{array} .*damaged or cut off"):
            load(path)

    def test_cut_off_metadata(self, path):
        text = (path / "zarr.json").read_text()
        (path / "zarr.json").write_text(text[: len(text) // 2])
        with pytest.raises(ValueError, match="not a readable store"):
            load(path)

    def test_other_schema(self, path):
        meta = path / "zarr.json"
        meta.write_text(meta.read_text().replace("headsplit-store-1", "headsplit-store-0"))
        with pytest.raises(ValueError, match="expected schema headsplit-store-1, got headsplit-store-0"):
            load(path)

    def test_not_a_store(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no store here"):
            load(tmp_path / "absent.zarr")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match="empty: "):
            load(tmp_path / "empty")


def test_unknown_kinds_of_values_are_named(tmp_path):
    with pytest.raises(TypeError, match="configuration: expected strings"):
        save(tmp_path / "a.zarr", {}, {"key": object()})
    data = xr.Dataset({"x": ("t", np.zeros(2), {"unit": {1, 2}})})
    with pytest.raises(TypeError, match="a/x: attribute unit"):
        save(tmp_path / "a.zarr", {"a": data}, {})


def test_differences_are_named():
    assert differences(CONFIGURATION, {**CONFIGURATION, "count": 3}) == []
    found = differences(CONFIGURATION, {**CONFIGURATION, "length": 12, "extra": 1})
    assert found == ["extra: 'absent' here, 1 there", "length: 10 here, 12 there"]
