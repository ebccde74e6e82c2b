"""Stored sweeps: kills, damage, locks, full disks, extension; workers are in test_sweep_executors."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import sweepable
import xarray as xr

import sim
import theory as th
from compare import SweepInterrupted, open_sweep, plan_sweep, save, sweep
from compare.sweeps import sweep as _sweep_module  # noqa: F401
from compare.sweeps.manifest import MANIFEST
from compare.sweeps.rows import DATA, Rows
from compare.sweeps.store import SweepStore

QUIET = {"say": None, "progress": False}
PRIOR = th.sign_flips([0.0], [1.0])
GRID = {"x": [1, 2, 3], "y": [0.5, 1.5]}


def traced(folder, store="store", grid=GRID, **options):
    fixed = {"log": str(folder / "log")} | ({} if "y" in grid else {"y": 0.5})
    kept = None if store is None else folder / store
    return sweep(sweepable.traced, grid=grid, fixed=fixed, store=kept, **{**QUIET, **options})


def calls(folder):
    return sweepable.calls(folder / "log")


class TestResume:
    def test_what_is_there_does_not_run_again(self, tmp_path):
        first = traced(tmp_path)
        assert len(calls(tmp_path)) == 6
        again = traced(tmp_path)
        assert len(calls(tmp_path)) == 6
        xr.testing.assert_identical(first, again)
        xr.testing.assert_identical(first, traced(tmp_path, store=None))
        xr.testing.assert_identical(first, open_sweep(tmp_path / "store").dataset())

    def test_extension(self, tmp_path):
        """New values and replicas run, old ones stay, wherever the new ones come."""
        old = traced(tmp_path, replicas=2)
        grid = {"x": [0, 1, 2, 2.5, 3], "y": [1.5, 0.5]}
        new = traced(tmp_path, grid=grid, replicas=3)
        assert len(calls(tmp_path)) == 30
        assert len(set(calls(tmp_path))) == 30
        assert np.array_equal(new.noise.sel(x=[1, 2, 3], y=[0.5, 1.5], replica=[0, 1]), old.noise)
        assert new.x.values.tolist() == [0, 1, 2, 2.5, 3]
        whole = open_sweep(tmp_path / "store").dataset()
        xr.testing.assert_equal(whole.sel(y=[1.5, 0.5]), new)
        part = traced(tmp_path, grid={"x": [2.5], "y": [0.5]})
        assert np.array_equal(part.noise[0, 0], new.noise.sel(x=2.5, y=0.5, replica=0))
        assert len(calls(tmp_path)) == 30

    def test_of_ragged_shapes(self, tmp_path):
        """Points with more heads than any before."""
        sweep(sweepable.ragged, grid={"heads": [2], "features": [1]}, store=tmp_path / "s", **QUIET)
        grid = {"heads": [4, 2, 1], "features": [1, 3]}
        grown = sweep(sweepable.ragged, grid=grid, store=tmp_path / "s", **QUIET)
        xr.testing.assert_identical(grown, sweep(sweepable.ragged, grid=grid, **QUIET))

    @pytest.mark.slow
    def test_interrupted_runs_of_ours(self, tmp_path, monkeypatch):
        """Bit for bit: the calls that were planned stay together."""
        options = {"length": 3, "heads": 2, "dim": 40, "prior": PRIOR, "learning_rate": 1.0, "time": 0.3, "batch": 2}
        runs = {
            sim.train_reduced: ({"snr": [1.0, 2.0, 3.0]}, {**options, "record": 3, "evaluation": 20}, 3),
            th.bayes_risk: ({"snr": [0.5, 1.0, 4.0, 9.0]}, {"length": 3, "prior": PRIOR}, None),
        }
        for run, (grid, fixed, replicas) in runs.items():
            given = {"grid": grid, "fixed": fixed, "replicas": replicas, "memory": 2 * 2**12, **QUIET}
            assert len(plan_sweep(run, **{k: v for k, v in given.items() if k not in QUIET}).batches) >= 2
            whole = sweep(run, **given)
            monkeypatch.setattr("compare.sweeps.sweep.work", _stopped_after(1))
            with pytest.raises(SweepInterrupted, match=r"interrupted: what had ended is in .*the same call goes on"):
                sweep(run, store=tmp_path / run.__name__, **given)
            monkeypatch.undo()
            assert "missing" in str(open_sweep(tmp_path / run.__name__))
            assert (open_sweep(tmp_path / run.__name__).dataset().status == 1).any()
            xr.testing.assert_identical(sweep(run, store=tmp_path / run.__name__, **given), whole)

    def test_without_a_store(self, monkeypatch):
        monkeypatch.setattr("compare.sweeps.sweep.work", _stopped_after(0))
        with pytest.raises(SweepInterrupted, match="nothing is kept without a store"):
            sweep(sweepable.deterministic, grid={"x": [1]}, **QUIET)


def _stopped_after(count):
    from compare.sweeps.work import work

    left = [count]

    def stopped(job):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return work(job)

    return stopped


DRIVER = """
    import sys
    sys.path.insert(0, {tests!r})
    import sweepable
    from compare import sweep

    if __name__ == "__main__":
        sweep(sweepable.traced, grid={{"x": list(range(12)), "y": [1.0]}}, store={store!r},
              fixed={{"log": {log!r}, "pause": 0.15}}, progress=False)
"""


def _driver(folder):
    script = folder / "driver.py"
    text = DRIVER.format(tests=str(Path(__file__).parent), store=str(folder / "store"), log=str(folder / "log"))
    script.write_text(textwrap.dedent(text))
    return script


def _stopped(folder, monkeypatch, snrs, **options):
    """A sweep of Bayes risks that is stopped in its first call."""
    monkeypatch.setattr("compare.sweeps.sweep.work", _stopped_after(0))
    with pytest.raises(SweepInterrupted):
        sweep(th.bayes_risk, grid={"snr": snrs}, fixed=BAYES, store=folder, **options, **QUIET)
    monkeypatch.undo()


BAYES = {"length": 3, "prior": PRIOR}


class TestPlannedBefore:
    def test_no_point_runs_twice(self, tmp_path, monkeypatch):
        """Calls that were planned for a part of the grid, and then for all of it."""
        for snrs in ([1.0, 2.0, 3.0], [1.0], [1.0, 2.0]):
            _stopped(tmp_path / "s", monkeypatch, snrs)
        plan = plan_sweep(th.bayes_risk, grid={"snr": [1.0, 2.0, 3.0]}, fixed=BAYES, store=tmp_path / "s")
        assert [len(batch) for batch in plan.batches] == [3]

    def test_calls_that_took_too_much_memory(self, tmp_path, monkeypatch):
        _stopped(tmp_path / "s", monkeypatch, [1.0, 2.0])
        given = {"grid": {"snr": [1.0, 2.0]}, "fixed": BAYES, "store": tmp_path / "s"}
        assert [len(batch) for batch in plan_sweep(th.bayes_risk, **given).batches] == [2]
        assert [len(batch) for batch in plan_sweep(th.bayes_risk, **given, memory=2**12).batches] == [1, 1]

    def test_are_one_line(self, tmp_path, monkeypatch):
        """However much of it a kill leaves, the calls are those of a sweep that nothing disturbed."""
        snrs = [1.0, 2.0, 3.0]
        _stopped(tmp_path / "s", monkeypatch, snrs, memory=2**12)
        lines = [json.loads(line) for line in (tmp_path / "s" / MANIFEST).read_text().splitlines()]
        assert [len(line["batches"]) for line in lines if "batches" in line] == [3]


class TestKilled:
    def test_driver(self, tmp_path):
        """kill -9 between any two instructions: exactly the points without a line in the manifest run again."""
        script, root = _driver(tmp_path), Path(__file__).parents[2]
        seen = 0
        for number, more in enumerate((3, 4)):
            process = subprocess.Popen([sys.executable, script], cwd=root, stdout=subprocess.DEVNULL)
            try:
                deadline = time.monotonic() + 120
                while len(calls(tmp_path)) < seen + more and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(0.07 * number)
            finally:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            seen = len(calls(tmp_path))
            assert 0 < len(open_sweep(tmp_path / "store").manifest.ends) < 12
        done = set(open_sweep(tmp_path / "store").manifest.ends)
        plan = {"grid": {"x": list(range(12)), "y": [1.0]}, "fixed": {"log": str(tmp_path / "log"), "pause": 0.15}}
        resumed = sweep(sweepable.traced, store=tmp_path / "store", **plan, **QUIET)
        assert len(calls(tmp_path)) - seen == 12 - len(done)
        ended = open_sweep(tmp_path / "store").manifest
        assert {ended.ends[name]["plan"] for name in done} <= {0, 1}
        assert sum(end["plan"] == 2 for end in ended.ends.values()) == 12 - len(done)
        xr.testing.assert_identical(resumed, sweep(sweepable.traced, **plan, **QUIET))

    def test_end_of_a_line(self, tmp_path):
        """What a kill leaves of the last line counts for nothing, and is gone after the next."""
        whole = traced(tmp_path)
        manifest = tmp_path / "store" / MANIFEST
        text = manifest.read_bytes()
        for cut in (1, 40, len(text.splitlines()[-1]) - 1):
            manifest.write_bytes(text[:-cut])
            assert "5 done, 0 failed, 1 missing" in str(open_sweep(tmp_path / "store"))
            xr.testing.assert_identical(traced(tmp_path), whole)
            for line in manifest.read_text().splitlines():
                json.loads(line)

    def test_before_anything_is_written(self, tmp_path):
        (tmp_path / "store").mkdir()
        with pytest.raises(ValueError, match="stopped before it began"):
            open_sweep(tmp_path / "store")
        traced(tmp_path)


class TestFullDisk:
    def test_for_numbers(self, tmp_path, monkeypatch):
        whole, write, left = traced(tmp_path, store=None), Rows.write, [3]

        def full(self, rows, points, total):
            if left[0] == 0:
                write(self, rows[:1], [points[0][["total"]]], total)  # some of it is there
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left[0] -= 1
            return write(self, rows, points, total)

        monkeypatch.setattr(Rows, "write", full)
        with pytest.raises(OSError, match=r"store: cannot be written .No space left.* the same call goes on"):
            traced(tmp_path)
        monkeypatch.undo()
        before = len(calls(tmp_path))
        assert "3 done, 0 failed, 3 missing" in str(open_sweep(tmp_path / "store"))
        xr.testing.assert_identical(traced(tmp_path), whole)
        assert len(calls(tmp_path)) - before == 3

    @pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="limits of file size")
    def test_for_the_manifest(self, tmp_path):
        """The operating system cuts a line in the middle."""
        script, root = _driver(tmp_path), Path(__file__).parents[2]
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (11000, 11000))\n"
        script.write_text(limit + script.read_text())
        done = subprocess.run([sys.executable, script], cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "store: cannot be written (File too large); what had ended is in" in done.stderr
        raw = (tmp_path / "store" / MANIFEST).read_bytes()
        assert len(raw) == 11000
        assert raw[-1:] != b"\n"
        ended = len(open_sweep(tmp_path / "store").manifest.ends)
        assert 0 < ended < 12
        before = len(calls(tmp_path))
        plan = {"grid": {"x": list(range(12)), "y": [1.0]}, "fixed": {"log": str(tmp_path / "log"), "pause": 0.15}}
        resumed = sweep(sweepable.traced, store=tmp_path / "store", **plan, **QUIET)
        assert len(calls(tmp_path)) - before == 12 - ended
        assert (resumed.status == 1).all()


class TestRefused:
    def test_two_drivers(self, tmp_path):
        """By name; and the first one is not disturbed."""
        script, root = _driver(tmp_path), Path(__file__).parents[2]
        process = subprocess.Popen([sys.executable, script], cwd=root, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while not calls(tmp_path) and time.monotonic() < deadline:
                time.sleep(0.01)
            plan = {"grid": {"x": list(range(12)), "y": [1.0]}, "fixed": {"log": str(tmp_path / "log"), "pause": 0.15}}
            with pytest.raises(RuntimeError, match=f"in use by another driver .process {process.pid} on "):
                sweep(sweepable.traced, store=tmp_path / "store", **plan, **QUIET)
            assert "missing" in str(open_sweep(tmp_path / "store"))  # looking is allowed
        finally:
            assert process.wait(120) == 0
        assert len(calls(tmp_path)) == 12
        sweep(sweepable.traced, store=tmp_path / "store", **plan, **QUIET)
        assert len(calls(tmp_path)) == 12

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"fixed": {"y": 3.0}}, "fixed y: 2 here|fixed y: 3 here, 2 there"),
            ({"grid": {"y": [1.0]}, "fixed": {"x": 2.0}}, "swept names"),
            ({"run": sweepable.fails_on, "fixed": {"bad": 1}}, "run: 'sweepable:fails_on' here"),
        ],
    )
    def test_another_sweep(self, tmp_path, change, match):
        sweep(sweepable.deterministic, grid={"x": [1.0]}, fixed={"y": 2.0}, store=tmp_path / "s", **QUIET)
        before = _bytes(tmp_path / "s")
        given = {"grid": {"x": [1.0]}, "fixed": {"y": 2.0}, **change}
        run = given.pop("run", sweepable.deterministic)
        with pytest.raises(ValueError, match=match):
            sweep(run, store=tmp_path / "s", **given, **QUIET)
        assert _bytes(tmp_path / "s") == before

    def test_another_version_of_the_function(self, tmp_path):
        def f(x):
            return x + 1

        sweep(f, grid={"x": [1.0]}, store=tmp_path / "s", **QUIET)

        def f(x):
            return x + 2

        with pytest.raises(ValueError, match="source: "):
            sweep(f, grid={"x": [1.0, 2.0]}, store=tmp_path / "s", **QUIET)

    def test_other_random_numbers(self, tmp_path):
        traced(tmp_path)
        was = jax.config.jax_threefry_partitionable
        jax.config.update("jax_threefry_partitionable", not was)
        try:
            with pytest.raises(ValueError, match="jax_threefry_partitionable: "):
                traced(tmp_path, grid={"x": [7], "y": [1.0]})
        finally:
            jax.config.update("jax_threefry_partitionable", was)

    def test_what_is_no_store(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"a folder, got .*file"):
            traced(tmp_path, store="file")
        save(tmp_path / "other.zarr", {"a": xr.Dataset({"v": 1.0})}, {})
        for path in ("other.zarr", "."):
            with pytest.raises(ValueError, match=r"store: expected a stored sweep.*no manifest.jsonl"):
                traced(tmp_path, store=path)
        with pytest.raises(FileNotFoundError):
            open_sweep(tmp_path / "nothing")

    def test_another_schema(self, tmp_path):
        traced(tmp_path)
        manifest = tmp_path / "store" / MANIFEST
        manifest.write_text(manifest.read_text().replace("headsplit-sweep-1", "headsplit-sweep-99"))
        for look in (lambda: traced(tmp_path), lambda: open_sweep(tmp_path / "store")):
            with pytest.raises(ValueError, match="store: expected schema headsplit-sweep-1, got headsplit-sweep-99"):
                look()

    def test_a_damaged_manifest(self, tmp_path):
        traced(tmp_path)
        manifest = tmp_path / "store" / MANIFEST
        lines = manifest.read_text().splitlines(keepends=True)
        manifest.write_text("".join([*lines[:3], lines[3][:20] + "\n", *lines[4:]]))
        with pytest.raises(ValueError, match=r"line 4 cannot be read .damaged."):
            traced(tmp_path)

    @pytest.mark.parametrize("harm", ["delete", "truncate", "flip", "swap", "array"])
    def test_damaged_numbers(self, tmp_path, harm):
        """Named by point and variable, nothing changed; `retry` runs these points again, and no other."""
        whole = traced(tmp_path)
        store = tmp_path / "store"
        row = next(p["row"] for p in open_sweep(store).manifest.points.values() if p["labels"] == {"x": 2, "y": 1.5})
        chunk, other = (store / DATA / "total" / "c" / str(i) for i in (row, (row + 1) % 6))
        count = 1
        if harm == "delete":
            chunk.unlink()
        elif harm == "truncate":
            chunk.write_bytes(chunk.read_bytes()[:-3])
        elif harm == "flip":
            raw = bytearray(chunk.read_bytes())
            raw[len(raw) // 2] ^= 1
            chunk.write_bytes(bytes(raw))
        elif harm == "swap":
            shutil.copy(other, chunk)
        else:
            shutil.rmtree(store / DATA / "total")
            count = 6
        before, ran = _bytes(store), len(calls(tmp_path))
        for look in (lambda: traced(tmp_path), lambda: open_sweep(store).dataset()):
            with pytest.raises(ValueError, match=rf"damaged, {count} point.*: x=.*y=.*: total"):
                look()
        assert _bytes(store) == before
        xr.testing.assert_identical(traced(tmp_path, retry=True), whole)
        assert len(calls(tmp_path)) - ran == count
        xr.testing.assert_identical(traced(tmp_path), whole)

    @pytest.mark.parametrize("name", ["total/zarr.json", "zarr.json"])
    @pytest.mark.parametrize("harm", ["cut", "delete"])
    def test_damaged_descriptions(self, tmp_path, name, harm):
        """Of an array or the group: named, nothing changed, also if other points are asked for; `retry` mends it."""
        whole, store = traced(tmp_path), tmp_path / "store"
        path = store / DATA / name
        path.write_text(path.read_text()[:30]) if harm == "cut" else path.unlink()
        before = _bytes(store)
        for look in (lambda: traced(tmp_path), lambda: open_sweep(store).dataset()):
            with pytest.raises(ValueError, match=r"store: .* is damaged, 6 points"):
                look()
        if harm == "cut":
            with pytest.raises(ValueError, match=r"store: .* is damaged, 1 array"):
                traced(tmp_path, grid={"x": [9], "y": [0.5]})
        assert _bytes(store) == before
        xr.testing.assert_identical(traced(tmp_path, retry=True), whole)
        xr.testing.assert_identical(open_sweep(store).dataset(), whole)

    def test_missing_numbers_are_not_made(self, tmp_path):
        traced(tmp_path)
        shutil.rmtree(tmp_path / "store" / DATA)
        with pytest.raises(ValueError, match="damaged, 6 points"):
            traced(tmp_path)
        assert not (tmp_path / "store" / DATA).exists()

    @pytest.mark.parametrize("lost", [1, 2, 7])
    def test_lost_lines_of_the_manifest(self, tmp_path, lost):
        """A row would be given to two points."""
        traced(tmp_path)
        manifest = tmp_path / "store" / MANIFEST
        lines = manifest.read_text().splitlines(keepends=True)
        manifest.write_text("".join(lines[:lost] + lines[lost + 1 :]))
        for look in (lambda: traced(tmp_path), lambda: open_sweep(tmp_path / "store").dataset()):
            with pytest.raises(ValueError, match=r"cannot be read .damaged.*lines are missing"):
                look()

    @pytest.mark.parametrize(("kept", "match"), [(0, "nothing in it"), (5, "6 rows, the manifest 3 points")])
    def test_a_manifest_that_was_cut(self, tmp_path, kept, match):
        """The numbers of points it has no more are not written over."""
        traced(tmp_path)
        manifest = tmp_path / "store" / MANIFEST
        manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:kept]))
        before = _bytes(tmp_path / "store")
        with pytest.raises(ValueError, match=match):
            traced(tmp_path, grid={"x": [7], "y": [0.5]})
        assert _bytes(tmp_path / "store") == before


class TestNamesInTheStore:
    def test_another_type_than_at_points_of_another_grid(self, tmp_path):
        sweep(sweepable.kinds, grid={"x": [1]}, store=tmp_path / "s", **QUIET)
        data = sweep(sweepable.kinds, grid={"x": [9]}, store=tmp_path / "s", **QUIET)
        assert "v is int64 with dimensions ('v_0',), at other points float64" in data.failure.item()
        assert open_sweep(tmp_path / "s").dataset().status.values.tolist() == [1, 2]

    def test_replicas_of_the_run_itself(self, tmp_path):
        given = {"grid": {"x": [1.0, 3.0]}, "store": tmp_path / "s", **QUIET}
        data = sweep(sweepable.runs_of_its_own, **given)
        assert data.v.values.tolist() == [[1.0, 2.0], [3.0, 6.0]]
        xr.testing.assert_identical(sweep(sweepable.runs_of_its_own, **given), data)
        xr.testing.assert_identical(open_sweep(tmp_path / "s").dataset(), data)

    def test_the_other_way_round(self, tmp_path):
        given = {"grid": {"x": [1.0]}, "store": tmp_path / "s", **QUIET}
        sweep(_dataset_of_replicas, **given)
        with pytest.raises(ValueError, match="replicas: expected none: the stored points have a 'replica'"):
            sweep(_dataset_of_replicas, replicas=2, **given)

    def test_order_of_the_names(self, tmp_path):
        old = traced(tmp_path)
        new = traced(tmp_path, grid={"y": [1.5, 0.5], "x": [3, 2, 1]})
        assert len(calls(tmp_path)) == 6
        xr.testing.assert_equal(new.sortby(["x", "y"]).transpose("x", "y", ...), old)

    def test_true_and_one(self, tmp_path):
        """Are two points, here by their text."""
        data = sweep(sweepable.deterministic, grid={"x": [2, True, 1]}, store=tmp_path / "s", **QUIET)
        assert data.x.values.tolist() == ["2", "True", "1"]
        assert open_sweep(tmp_path / "s").dataset().status.values.tolist() == [1, 1, 1]


def _dataset_of_replicas(x, key=None):
    return sweepable.runs_of_its_own(x)


def _bytes(folder):
    """Everything in it but the lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


class TestFailures:
    def test_are_kept_and_tried_again_alone(self, tmp_path):
        repaired = tmp_path / "repaired"
        given = {"grid": {"x": [1, 2, 3]}, "fixed": {"bad": 2, "repaired": str(repaired)}, "store": tmp_path / "s"}
        first = sweep(sweepable.fails_on, **given, **QUIET)
        assert first.status.values.tolist() == [1, 2, 1]
        stored = open_sweep(tmp_path / "s")
        (failure,) = stored.failures
        assert failure["labels"] == {"x": 2}
        assert failure["error"] == "ArithmeticError: no value at 2"
        assert "in fails_on" in failure["trace"]
        assert failure["configuration"]["values"]["x"] == 2
        assert "failed: x=2: ArithmeticError: no value at 2" in str(stored)
        repaired.write_text("")
        xr.testing.assert_identical(sweep(sweepable.fails_on, **given, **QUIET), first)
        again = sweep(sweepable.fails_on, **given, retry=True, **QUIET)
        assert again.square.values.tolist() == [1.0, 4.0, 9.0]
        assert not open_sweep(tmp_path / "s").failures
        assert sum(end["plan"] > 0 for end in open_sweep(tmp_path / "s").manifest.ends.values()) == 1

    def test_what_a_diverged_run_had_is_kept(self, tmp_path):
        fixed = {"length": 3, "heads": 1, "dim": 20, "snr": 1.0, "prior": PRIOR, "learning_rate": 1e30, "batch": 1}
        fixed |= {"time": 5e29, "record": [0, 1e29, 5e29], "evaluation": 20}
        data = sweep(sim.train, grid={"variance": [1.0]}, fixed=fixed, store=tmp_path / "s", **QUIET)
        assert data.status.item() == 2
        assert np.isfinite(data.m[0]).values.ravel().tolist() == [True, False, False]
        xr.testing.assert_identical(open_sweep(tmp_path / "s").dataset(), data)


class TestManifest:
    def test_says_what_made_each_point(self, tmp_path):
        fixed = {"length": 5, "prior": PRIOR}
        sweep(th.bayes_risk, grid={"snr": [0.1, 1 / 3]}, fixed=fixed, store=tmp_path / "s", **QUIET)
        manifest = open_sweep(tmp_path / "s").manifest
        values = [point["configuration"]["values"] for point in manifest.points.values()]
        assert [own["snr"] for own in values] == [0.1, 1 / 3]
        assert values[0]["prior"] == PRIOR.name
        assert values[0]["tolerance"] == 1e-6
        (plan,) = manifest.plans
        assert plan["versions"]["jax"] == jax.__version__
        assert {"commit", "flags", "host", "started"} <= set(plan)
        assert {end["device"] for end in manifest.ends.values()} == {"cpu"}

    def test_the_group_is_labelled_by_itself(self, tmp_path):
        traced(tmp_path)
        with xr.open_zarr(tmp_path / "store" / DATA, consolidated=False) as group:
            assert group.sizes["point"] == 6
            assert np.allclose(group.total, group.x + 10 * group.y)
            assert all(chunk == 1 for chunk in group.total.chunks[0])


def test_planning_writes_nothing(tmp_path):
    options = {"grid": {"x": [1, 2], "y": [1.0]}, "fixed": {"log": str(tmp_path / "log")}}
    plan = plan_sweep(sweepable.traced, store=tmp_path / "s", **options)
    assert (plan.todo, plan.done) == (2, 0)
    assert not (tmp_path / "s").exists()
    sweep(sweepable.traced, store=tmp_path / "s", **options, **QUIET)
    before = _bytes(tmp_path / "s")
    plan = plan_sweep(sweepable.traced, store=tmp_path / "s", **{**options, "grid": {"x": [1, 2, 3], "y": [1.0]}})
    assert (plan.todo, plan.done) == (1, 2)
    assert _bytes(tmp_path / "s") == before
    assert SweepStore(tmp_path / "s").manifest.header
