"""`headsplit sweep`: the file, what is refused by name, stores left alone or gone on with, figures, executors."""

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

import compare
import sim
import theory as th
from compare import InUse
from headsplit.cli import app
from headsplit.executors import ONE_THREAD, executor_for, one_thread
from headsplit.sweep import Configuration

runner = CliRunner()
FILE = """
run = "train_reduced"
replicas = 2
[fixed]
length = 4
prior = "sign_flips([0.0], [1.0])"
[grid]
snr = [1.0, 2.0]
dim = {from = 1e2, to = 1e4, count = 3, spacing = "log", whole = true}
[[figure]]
kind = "curves"
quantity = "risk"
x = "time"
hue = "snr"
at = {dim = 1000}
"""
MORE = """
[[figure]]
kind = "curves"
quantity = "risk"
x = "dim"
at = {time = 1.0, snr = 2.0}
band = "range"
[[figure]]
kind = "heat_map"
quantity = "risk"
x = "dim"
y = "snr"
at = {time = 1.0}
"""


class Plan(SimpleNamespace):
    def __str__(self):
        return f"plan: {len(self.grid.points)} points, {self.done} done"


@pytest.fixture
def swept(monkeypatch, tmp_path):
    """In an empty directory, sweeps whose store is one file of the points that are done or failed."""
    monkeypatch.chdir(tmp_path)
    calls = {"runs": [], "failing": set(), "error": None}

    def states(store):
        file = None if store is None else Path(store) / "points.json"
        return {tuple(key): state for key, state in json.loads(file.read_text())} if file and file.exists() else {}

    def plan_sweep(run, *, grid, store, retry=False, **options):
        points = list(itertools.product(*grid.values()))
        known = {point: state for point, state in states(store).items() if point in points}
        failed = sum(state == "failed" for state in known.values())
        todo = len(points) - len(known) + (failed if retry else 0)
        return Plan(grid=SimpleNamespace(points=points), done=len(known) - failed, failed=failed, todo=todo)

    def sweep(run, *, executor, progress, say, retry=False, **options):
        calls["runs"].append({"run": run, "executor": executor, "retry": retry, **options})
        plan = plan_sweep(run, retry=retry, **options)
        say(str(plan))
        store, known = Path(options["store"]), states(options["store"])
        todo = [p for p in plan.grid.points if known.get(p) not in ({"done"} if retry else {"done", "failed"})]
        store.mkdir(parents=True, exist_ok=True)
        for i, point in enumerate(todo):
            if calls["error"] is not None and i == 2:
                raise calls["error"]
            known[point] = "failed" if point in calls["failing"] else "done"
            (store / "points.json").write_text(json.dumps(list(known.items())))
        return dataset(options["grid"], options["replicas"], known)

    def dataset(grid, replicas, known):
        sizes = [*map(len, grid.values()), replicas]
        status = np.zeros(sizes, np.int8)
        for place, point in zip(np.ndindex(*sizes[:-1]), itertools.product(*grid.values()), strict=True):
            status[place] = {"done": 1, "failed": 2}[known[point]]
        risk = np.where(status[..., None] == 1, np.linspace(1, 2, 5), np.nan)
        dims = (*grid, "replica")
        coords = {**grid, "time": np.linspace(0, 1, 5)}
        return xr.Dataset({"risk": ((*dims, "time"), risk), "status": (dims, status)}, coords)

    class Stored(SimpleNamespace):
        def __str__(self):
            return f"stored: {len(states(self.path))} points"

        def dataset(self):
            grid = {"snr": [1.0, 2.0], "dim": [100, 1000, 10_000]}
            return dataset(grid, 2, states(self.path))

    def open_sweep(path):
        if not Path(path).exists():
            raise FileNotFoundError(f"{path}: no stored sweep here")
        return Stored(path=path)

    for function in (plan_sweep, sweep, open_sweep):
        monkeypatch.setattr(compare, function.__name__, function, raising=False)
    interrupted = type("SweepInterrupted", (RuntimeError,), {})
    monkeypatch.setattr(compare, "SweepInterrupted", interrupted, raising=False)
    calls["interrupted"] = interrupted("interrupted: what had ended is kept, and the same call goes on")
    Path("small.toml").write_text(FILE)
    return calls


def call(*arguments):
    return runner.invoke(app, ["sweep", "small.toml", *arguments])


def test_a_file_says_all_that_is_run(swept):
    Path("small.toml").write_text(FILE + MORE)
    done = call()
    assert done.exit_code == 0, done.output
    (given,) = swept["runs"]
    assert given["run"] is sim.train_reduced
    assert given["grid"] == {"snr": [1.0, 2.0], "dim": [100, 1000, 10_000]}
    assert given["fixed"] == {"length": 4, "prior": "sign_flips([0.0], [1.0])"}
    assert (given["replicas"], given["seed"], given["memory"], given["executor"]) == (2, 0, 2**28, None)
    assert given["store"] == Path("results/sweep/small/store")
    assert "plan: 6 points, 0 done" in done.output
    written = {
        f"{name}.{ending}" for name in ("curves_risk", "curves_risk_2", "heat_map_risk") for ending in ("pdf", "png")
    }
    assert {path.name for path in Path("results/sweep/small").iterdir()} == {*written, "store", "figures.json"}
    assert "results/sweep/small/curves_risk_2.pdf" in done.output


def test_a_whole_store_is_drawn_again_and_part_of_one_left_alone(swept):
    call("--out", "here")
    Path("here/curves_risk.png").unlink()
    assert call("--out", "here", "--executor", "processes").exit_code == 0
    assert swept["runs"][-1]["executor"] is None  # nothing to do for it
    assert Path("here/curves_risk.png").exists()
    Path("small.toml").write_text(FILE.replace("[1.0, 2.0]", "[1.0, 2.0, 4.0]"))
    refused = call("--out", "here")
    assert refused.exit_code == 2
    assert "here/store holds 6 of 9 points of this configuration; --resume computes the other 3" in refused.output
    assert len(swept["runs"]) == 2
    assert call("--out", "here", "--resume").exit_code == 0


def test_an_interrupted_sweep_says_how_to_go_on(swept):
    swept["error"] = swept["interrupted"]
    stopped = call("--out", "here")
    assert stopped.exit_code == 130
    assert (
        "headsplit sweep: interrupted: what had ended is kept, and the same call goes on with --resume"
        in stopped.output
    )
    assert not Path("here/figures.json").exists()
    swept["error"] = None
    assert call("--out", "here").exit_code == 2
    assert call("--out", "here", "--resume").exit_code == 0


def test_failed_points_are_an_exit_code_and_run_again_if_asked(swept):
    swept["failing"] = {(1.0, 100)}
    assert call("--out", "here").exit_code == 1
    swept["failing"] = set()
    assert call("--out", "here").exit_code == 1
    assert not swept["runs"][-1]["retry"]
    assert call("--out", "here", "--retry-failed").exit_code == 0
    assert swept["runs"][-1]["retry"]


def test_failed_points_that_leave_nothing_to_draw(swept, monkeypatch):
    """Are failed points, not wrong usage."""
    swept["failing"] = set(itertools.product([1.0, 2.0], [100, 1000, 10_000]))
    sweep = compare.sweep
    monkeypatch.setattr(compare, "sweep", lambda *a, **b: sweep(*a, **b).drop_vars("risk"))
    done = call("--out", "here")
    assert done.exit_code == 1
    assert "figure 1: quantity: expected one of status" in done.output


def test_a_plan_writes_nothing(swept):
    done = call("--dry-run")
    assert (done.exit_code, done.output) == (0, "plan: 6 points, 0 done\n")
    assert {path.name for path in Path().iterdir()} == {"small.toml"}
    assert not swept["runs"]


def test_status_is_that_of_the_store(swept):
    assert "no stored sweep here" in call("--status").output
    call()
    assert call("--status").output == "stored: 6 points\n"


def test_figures_are_drawn_again_from_the_store(swept):
    call("--out", "here")
    Path("here/curves_risk.png").unlink()
    drawn = runner.invoke(app, ["figure", "sweep", "here"])
    assert drawn.exit_code == 0, drawn.output
    assert Path("here/curves_risk.png").exists()
    assert len(swept["runs"]) == 1
    Path("here/figures.json").unlink()
    assert "expected the figures of a finished" in runner.invoke(app, ["figure", "sweep", "here"]).output
    Path("here/figures.json").write_text("[]")
    assert "no [[figure]]" in runner.invoke(app, ["figure", "sweep", "here"]).output
    assert runner.invoke(app, ["figure", "sweep", "nowhere"]).exit_code == 2


def test_a_figure_that_cannot_be_drawn_keeps_no_other_from_it(swept):
    Path("small.toml").write_text(FILE.replace("dim = 1000}", "dim = 500}") + MORE)
    done = call("--out", "here")
    assert done.exit_code == 2
    assert "figure 1: at: expected a value of dim that is there (100, 1000, 10000), got 500" in done.output
    assert "the points are stored" in done.output
    assert Path("here/curves_risk_2.png").exists()


def test_another_driver_at_work_is_one_line(swept):
    swept["error"] = InUse("store: here is in use by another driver")
    refused = call()
    assert refused.exit_code == 2
    assert refused.output.endswith("headsplit sweep: store: here is in use by another driver\n")


def test_the_users_own_function_is_found_where_the_command_runs(swept, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    Path("my_runs_of_a_test.py").write_text("def squares(snr, dim):\n    return snr**2\n")
    Path("small.toml").write_text(FILE.replace("train_reduced", "my_runs_of_a_test:squares"))
    assert call().exit_code == 0
    assert swept["runs"][0]["run"](3, 1) == 9
    for name, message in [("my_runs_of_a_test:cubes", "cubes"), ("no_such_module_here:f", "No module named")]:
        Path("small.toml").write_text(FILE.replace("train_reduced", name))
        refused = call()
        assert refused.exit_code == 2
        assert f"run: expected package.module:function, got '{name}'" in refused.output
        assert message in refused.output


@pytest.mark.parametrize("name", ["gradient_flow", "bayes_risk", "population_risk", "optimal_risk", "predict_stages"])
def test_runs_of_the_theory_go_by_their_names(swept, name):
    Path("small.toml").write_text(f'run = "{name}"\n[grid]\nsnr = [1.0]')
    assert Configuration.read(Path("small.toml")).function() is getattr(th, name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('run = "train_reduced"', 'run = "training"', "run: expected one of gradient_flow, .* got 'training'"),
        ('run = "train_reduced"', "", "run: expected the name of a run, got 'none'"),
        ("replicas = 2", "replica = 2", "expected keys among run, replicas, .* got 'replica'"),
        ("replicas = 2", "replicas = 0", "replicas: expected a whole number >= 1, got 0"),
        ("replicas = 2", "seed = -1", "seed: expected a whole number >= 0, got -1"),
        ("replicas = 2", 'memory = "1 GiG"', "memory: expected bytes or text such as '256 MiB'.* got '1 GiG'"),
        ("replicas = 2", "memory = 0.5", "memory: expected a whole number >= 1, got 0.5"),
        ("replicas = 2", "fixed = 3", "Cannot overwrite a value|fixed"),
        ("replicas = 2", "replicas = ", r"small.toml: Invalid value \(at line 3"),
        ("[1.0, 2.0]", "1.0", r"grid.snr: expected a list of values or a range \{from, to, count\}, got 1.0"),
        ("count = 3", "number = 3", "grid.dim: expected keys among from, to, count, spacing, whole, got 'number'"),
        ("count = 3", "count = 1", "grid.dim.count: expected a whole number >= 2, got 1"),
        ("count = 3, ", "", "grid.dim.count: expected a whole number >= 2, got 'none'"),
        ("from = 1e2", "from = 0", "grid.dim: expected positive ends with spacing 'log', got 0 and"),
        ("from = 1e2, ", "", "grid.dim.from: expected a number, got 'none'"),
        ("to = 1e4", "to = 101", "grid.dim: expected 3 different values"),
        ('"log"', '"geometric"', "grid.dim.spacing: expected 'linear' or 'log', got 'geometric'"),
        ("whole = true", "whole = 1", "grid.dim.whole: expected true or false, got 1"),
        ("[fixed]", "[executor]\nkind = 'threads'\n[fixed]", "executor.kind: expected one of none, processes, dask"),
        (
            "[fixed]",
            "[executor]\nworkers = 2\n[fixed]",
            "executor of kind 'none': expected keys among kind, got 'workers'",
        ),
        (
            "[fixed]",
            "[executor]\nkind = 'dask'\nworkers = 0\n[fixed]",
            "executor.workers: expected a whole number >= 1",
        ),
        ("[fixed]", "[executor]\nkind = 'dask'\naddress = 1\n[fixed]", "executor.address: expected text, got 1"),
        ('hue = "snr"', 'color = "snr"', "figure 1: expected keys among kind, quantity, x, hue, at, band, got 'color'"),
        ('hue = "snr"', 'y = "snr"', "figure 1: expected keys .* got 'y'"),
        ('y = "snr"', "", "figure 3: y: expected text, got 'none'"),
        ('kind = "heat_map"', "", "figure 3: kind: expected one of curves, heat_map, got 'none'"),
        ("at = {dim = 1000}", "at = 1000", "figure 1: at: expected a table of values, got 1000"),
        ("at = {dim = 1000}", 'at = {prior = "flips()"}', "prior: expected one of sign_flips"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(swept, old, new, message):
    assert old in FILE + MORE
    Path("small.toml").write_text((FILE + MORE).replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        Configuration.read(Path("small.toml"))
    refused = call()
    assert refused.exit_code == 2
    assert refused.output.startswith("headsplit sweep: small.toml: ")
    assert not swept["runs"]


def test_files_that_are_not_there_are_named(swept):
    refused = runner.invoke(app, ["sweep", "nothing.toml"])
    assert refused.exit_code == 2
    assert "nothing.toml" in refused.output


def test_ranges_memory_and_labels(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(
        'run = "agreement"\nmemory = "1.5 GiB"\n[grid]\na = {from = 0, to = 1, count = 11}\n'
        'b = {from = 1, to = 1e-3, count = 4, spacing = "log"}\n"prior.amplitude[0]" = [0.5]\n'
        '[[figure]]\nkind = "curves"\nquantity = "risk"\nx = "time"\n'
        'at = {prior = "one_hot(2)", activation = "Softmax()", loss = "limit"}\n'
    )
    read = Configuration.read(file)
    assert read.memory == 3 * 2**29
    assert read.grid["a"] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert read.grid["b"] == [1.0, 0.1, 0.01, 0.001]
    assert read.grid["prior.amplitude[0]"] == [0.5]
    assert read.figures[0]["at"] == {
        "prior": th.one_hot(2).name, "activation": "Softmax(temperature=1.0)", "loss": "limit",
    }  # fmt: skip


def test_another_executor_keeps_the_options_it_knows(tmp_path):
    file = tmp_path / "a.toml"
    text = 'run = "train"\n[grid]\nsnr = [1.0]\n[executor]\nkind = "dask"\nworkers = 3\naddress = "tcp://a:1"\n'
    file.write_text(text)
    read = Configuration.read(file)
    assert read.on(None, None).executor == {"kind": "dask", "workers": 3, "address": "tcp://a:1"}
    assert read.on("processes", None).executor == {"kind": "processes", "workers": 3}
    assert read.on("processes", 2).executor == {"kind": "processes", "workers": 2}
    assert read.on("none", None).executor == {"kind": "none"}
    with pytest.raises(ValueError, match=r"executor.kind: expected one of .* got 'slurm'"):
        read.on("slurm", None)
    with pytest.raises(ValueError, match="executor of kind 'none': expected keys among kind, got 'workers'"):
        read.on("none", 2)


def test_the_example_in_the_help_is_a_configuration(tmp_path):
    shown = runner.invoke(app, ["sweep", "--help"]).output
    example = shown[shown.index("    run =") : shown.index("  Ranges are rounded")]
    assert tomllib.loads(example)["executor"] == {"kind": "processes", "workers": 2}
    file = tmp_path / "example.toml"
    file.write_text(example)
    read = Configuration.read(file)
    assert [figure["kind"] for figure in read.figures] == ["curves", "heat_map"]
    assert read.grid["dim"] == [1000, 10_000, 100_000]


def busy_threads():
    """Threads of this process that compute a product and a function of each entry, as shares of all their time."""
    import jax
    import jax.numpy as jnp

    product = jax.jit(lambda x: x @ x)
    entries = jax.jit(lambda x: jnp.tanh(jnp.sin(x) * jnp.exp(-x)))
    found = []
    for function, x in ((product, jnp.ones((1500, 1500))), (entries, jnp.ones((4000, 2000)))):
        function(x).block_until_ready()
        before = _ticks()
        for _ in range(4):
            function(x).block_until_ready()
        spent = [now - before.get(thread, 0) for thread, now in _ticks().items()]
        found.append(max(spent) / max(sum(spent), 1))
    return found


def _ticks():
    """Processor time of each thread."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        numbers = (task / "stat").read_text().rpartition(")")[2].split()
        found[task.name] = int(numbers[11]) + int(numbers[12])
    return found


def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def interrupt_self():
    os.kill(os.getpid(), signal.SIGINT)
    return "still here"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted on Linux")
def test_workers_compute_on_one_thread_and_leave_ctrl_c_alone(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # two devices have two threads
    with executor_for("processes", workers=1) as pool:
        product, entries = pool.submit(busy_threads).result()
        assert product > 0.9
        assert entries > 0.9
        assert pool.submit(interrupt_self).result() == "still here"


def test_workers_of_a_sweep_that_is_stopped_end():
    with pytest.raises(KeyboardInterrupt), executor_for("processes", workers=1) as pool:  # noqa: PT012
        pool.submit(os.getpid).result()
        pool.submit(deaf)
        time.sleep(0.5)
        workers = list(pool._processes.values())
        raise KeyboardInterrupt
    workers[0].join(20)
    assert not workers[0].is_alive()


def test_one_thread_is_the_environment(monkeypatch):
    for name in ONE_THREAD:
        monkeypatch.setenv(name, "8")
    one_thread()
    assert all(os.environ[name] == "1" for name in ONE_THREAD)


def test_unknown_executors_and_missing_packages_are_named(monkeypatch):
    with pytest.raises(ValueError, match=r"executor: expected one of none, .* got 'threads'"), executor_for("threads"):
        pass
    for kind, package in (("dask", "distributed"), ("submitit", "submitit")):
        monkeypatch.setitem(sys.modules, package, None)
        message = rf"executor: {kind} needs {package}, which is not installed: pip install 'headsplit\[cluster\]'"
        with pytest.raises(ValueError, match=message), executor_for(kind):
            pass


@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")
def test_jobs_of_submitit(tmp_path):
    with executor_for("submitit", folder=str(tmp_path), cluster="local", parameters={"timeout_min": 1}) as pool:
        assert pool.submit(max, 1, 2).result() == 2


@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="dask's distributed is not installed")
def test_workers_of_dask(tmp_path):
    code = (
        "import os\nfrom headsplit.executors import executor_for\n"
        "if __name__ == '__main__':\n"
        "    with executor_for('dask', workers=1) as pool:\n"
        "        print(pool.submit(os.getenv, 'NPROC').result())\n"
    )
    file = tmp_path / "go.py"  # its processes start from a file
    file.write_text(code)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "1\n", done.stderr
