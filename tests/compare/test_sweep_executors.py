"""Sweeps on processes, Dask and submitit's local jobs, and what becomes of workers that are killed."""

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sweepable
import xarray as xr

import sim
import theory as th
from compare import SweepInterrupted, open_sweep, sweep

QUIET = {"say": None, "progress": False}
FIXED = {
    "length": 3, "heads": 2, "dim": 40, "prior": th.sign_flips([0.0], [1.0]), "learning_rate": 1.0, "time": 0.2,
    "batch": 2, "record": 2, "evaluation": 20,
}  # fmt: skip
CHAIN = {"grid": {"snr": [1.0, 2.0]}, "fixed": FIXED, "replicas": 2}


def spawned(workers=2):
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def here():
    return sweep(sim.train_reduced, **CHAIN, **QUIET)


def test_processes(here, tmp_path):
    with spawned() as pool:
        data = sweep(sim.train_reduced, store=tmp_path / "s", executor=pool, **CHAIN, **QUIET)
        pids = sweep(sweepable.pid, grid={"x": range(6)}, fixed={"pause": 0.2}, executor=pool, **QUIET).pid
    xr.testing.assert_identical(data, here)
    xr.testing.assert_identical(open_sweep(tmp_path / "s").dataset(), here)
    assert os.getpid() not in pids
    assert len(np.unique(pids)) == 2


def test_a_killed_process(tmp_path):
    """The pool is broken; what had ended is kept, the rest runs in the next."""
    (tmp_path / "fuse").write_text("")
    given = {"grid": {"x": list(range(6))}, "fixed": {"log": str(tmp_path / "log"), "fuse": str(tmp_path / "fuse")}}
    with spawned() as pool, pytest.raises(SweepInterrupted, match=r"a worker died .*the same call goes on"):
        sweep(sweepable.dies_once, store=tmp_path / "s", executor=pool, **given, **QUIET)
    done = len(open_sweep(tmp_path / "s").manifest.ends)
    with spawned() as pool:
        data = sweep(sweepable.dies_once, store=tmp_path / "s", executor=pool, **given, **QUIET)
    assert data.value.values.tolist() == [float(x) ** 2 for x in range(6)]
    ended = [end["plan"] for end in open_sweep(tmp_path / "s").manifest.ends.values()]
    assert ended.count(0) == done
    assert ended.count(1) == 6 - done


def test_dask(here, tmp_path):
    """A cluster of two workers, one of which is killed on the way: its point runs on the other."""
    distributed = pytest.importorskip("distributed")
    (tmp_path / "fuse").write_text("")
    given = {"grid": {"x": list(range(6))}, "fixed": {"log": str(tmp_path / "log"), "fuse": str(tmp_path / "fuse")}}
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "local_directory": str(tmp_path)}
    with distributed.LocalCluster(host="127.0.0.1", **options) as cluster, distributed.Client(cluster) as client:
        pool = client.get_executor()
        data = sweep(sim.train_reduced, store=tmp_path / "s", executor=pool, **CHAIN, **QUIET)
        killed = sweep(sweepable.dies_once, store=tmp_path / "k", executor=pool, **given, **QUIET)
        assert not (tmp_path / "fuse").exists()
    xr.testing.assert_identical(data, here)
    assert killed.value.values.tolist() == [float(x) ** 2 for x in range(6)]
    assert set(sweepable.calls(tmp_path / "log")) == {str(x) for x in range(6)}


@pytest.mark.slow
def test_submitit(here, tmp_path, monkeypatch):
    """Local jobs; one whose process is killed fails alone, and is tried again."""
    submitit = pytest.importorskip("submitit")
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(Path(__file__).parent)]))
    pool = submitit.LocalExecutor(folder=tmp_path / "jobs", python=sys.executable)
    pool.update_parameters(timeout_min=5)
    data = sweep(sim.train_reduced, store=tmp_path / "s", executor=pool, **{**CHAIN, "replicas": None}, **QUIET)
    xr.testing.assert_identical(data, here.isel(replica=0, drop=True).assign_attrs(data.attrs))
    (tmp_path / "fuse").write_text("")
    given = {"grid": {"x": [2, 3]}, "fixed": {"log": str(tmp_path / "log"), "fuse": str(tmp_path / "fuse")}}
    first = sweep(sweepable.dies_once, store=tmp_path / "k", executor=pool, **given, **QUIET)
    assert sorted(first.status.values.tolist()) == [1, 2]
    assert "the worker sent no result" in "".join(first.failure.values)
    again = sweep(sweepable.dies_once, store=tmp_path / "k", executor=pool, retry=True, **given, **QUIET)
    assert again.value.values.tolist() == [4.0, 9.0]
    assert sorted(sweepable.calls(tmp_path / "log")) == ["2", "3"]


def test_failures_in_workers():
    with ThreadPoolExecutor(2) as pool:
        data = sweep(sweepable.fails_on, grid={"x": [1, 2, 3]}, fixed={"bad": 2}, executor=pool, **QUIET)
    assert data.status.values.tolist() == [1, 2, 1]


def test_what_cannot_be_sent():
    """A function that exists here only: the points fail, and say why."""
    with spawned(1) as pool:
        data = sweep(lambda x: x, grid={"x": [1]}, executor=pool, **QUIET)
    assert data.status.item() == 2
    assert "pickle" in data.failure.item()


class Jobs:
    """An executor whose jobs can be asked whether they are done, and not waited for; they run when asked."""

    def submit(self, function, job):
        return Job(function, job)


class Job:
    def __init__(self, function, job):
        self.call, self.asked = (function, job), 0

    def done(self):
        self.asked += 1
        return self.asked > 1

    def result(self):
        function, job = self.call
        return function(job)

    def cancel(self):
        pass


def test_jobs_that_cannot_be_waited_for():
    data = sweep(sweepable.deterministic, grid={"x": [1.0, 2.0]}, executor=Jobs(), **QUIET)
    assert data.value.values.tolist() == [1.0, 2.0]


def test_cancelled_jobs(tmp_path):
    """An executor that was shut down under the sweep."""

    class Cancels:
        def submit(self, function, job):
            future = Future()
            if job.values[0]["x"] == 1:
                future.set_result(function(job))
            else:
                future.cancel()
                future.set_running_or_notify_cancel()
            return future

    with pytest.raises(SweepInterrupted, match="a worker died"):
        sweep(sweepable.deterministic, grid={"x": [1, 2]}, executor=Cancels(), store=tmp_path / "s", **QUIET)
    assert len(open_sweep(tmp_path / "s").manifest.ends) <= 1


def test_workers_do_not_outlive_their_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "from headsplit.executors import executor_for\n"
        "if __name__ == '__main__':\n"
        "    with executor_for('processes', workers=1) as pool:\n"
        "        print(pool.submit(os.getpid).result(), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, script], cwd=root, stdout=subprocess.PIPE, timeout=120, check=False)
    worker = Path("/proc") / done.stdout.decode().strip()  # its output is closed: it has ended
    deadline = time.monotonic() + 20
    while worker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done.returncode == -9
    assert not worker.exists()
