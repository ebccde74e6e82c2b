"""Checkpoints: a run that is stopped in any way goes on bit for bit, and a file that is not its own is refused by name.

Run as a script, this file is the process that the tests stop: `python test_checkpoint.py KIND PATH [MOMENT]`.
"""

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from riskless import without_risk

import sim._checkpoint
from sim import MultiHeadAttention, train, train_reduced
from sim._driver import interruptible
from theory import OrderParameters, Result, RunFailed, SingleLocation, Softmax1, sign_flips

TASK = SingleLocation(3, 3.0, sign_flips([1.0], [1.0]))
ACTIVATION = Softmax1([0.1, -0.2], 2.0, trained="bias")  # the scale is a number that is not trained


def layer_of(**change):
    options = {"heads": 2, "features": 1, "dim": 20, "variance": 0.5, "activation": ACTIVATION, "replicas": 3}
    return MultiHeadAttention.initial(jax.random.key(1), **options | change)


LAYER = layer_of()
OPTIONS = {
    "learning_rate": 2.0, "time": 3.0, "batch": 2, "key": jax.random.key(5), "record": 4, "evaluation": 10,
    "bias_rate": 0.7, "progress": False,
}  # fmt: skip
LONG = {"time": 40.0, "record": 9}  # 400 steps
EVERY = {"block": 4, "checkpoint_seconds": 0}


def simulated(kind, *, task=TASK, layer=LAYER, **options):
    """A run of the simulator from the start that `layer` is."""
    if kind == "sgd":
        return train(task, layer, **OPTIONS | options)
    order = layer.order()
    return train_reduced(task, layer.activation, order, dim=layer.dim, **OPTIONS | options)


KINDS = ("sgd", "reduced")


@pytest.fixture(scope="module", autouse=True)
def _without_risk():
    with without_risk():
        yield


@pytest.fixture(scope="module", autouse=True)
def _shared_compilation(tmp_path_factory):
    """All processes compile once."""
    options = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled"))}
    options |= {"jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in options}
    compilation_cache.reset_cache()  # it may have found that there is none
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        for name, value in options.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def whole():
    """Runs that were never stopped."""
    return {kind: simulated(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The checkpoint of a finished run."""
    path = tmp_path_factory.mktemp("finished") / "run.npz"
    simulated("sgd", checkpoint=path)
    return path


def same(a, b):
    """Bit for bit, whatever NaN."""
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(x, eqx.is_array))] for x in (a, b)]
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert [(x.dtype, x.shape, x.tobytes()) for x in leaves[0]] == [(x.dtype, x.shape, x.tobytes()) for x in leaves[1]]


def never(*args):
    raise AssertionError("nothing is to be computed")


def header_of(path):
    with np.load(path) as file:
        return json.loads(file["header"].tobytes())


def crash(monkeypatch, saves, kind="sgd", **options):
    """A run that ends without a word when it is about to write the checkpoint after `saves` of them."""
    replace, left = os.replace, iter([*[False] * saves, True])

    def replace_or_stop(aside, path):
        if next(left):
            raise KeyboardInterrupt
        replace(aside, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_or_stop)
        with pytest.raises(KeyboardInterrupt):
            simulated(kind, **EVERY | options)


# --- going on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 4, 1000])
def test_a_resumed_run_is_the_run_that_never_stopped(kind, block, whole, monkeypatch, tmp_path):
    path = tmp_path / "run.npz"
    for saves in (1, 3, 4, 8):  # at the start, before and at a record, late
        crash(monkeypatch, saves, kind, checkpoint=path)
        assert header_of(path)["step"] == [0, 4, 8, 10, 14, 18, 20, 24, 28, 30][saves - 1]
        same(simulated(kind, resume=path, block=block), whole[kind])
        path.unlink()


def test_crashes_one_after_another(whole, monkeypatch, tmp_path):
    path = tmp_path / "run.npz"
    crash(monkeypatch, 2, checkpoint=path)
    crash(monkeypatch, 3, resume=path)
    crash(monkeypatch, 2, resume=path, block=3)
    assert header_of(path)["step"] == 4 + 6 + 3  # a resumed run first writes what it read
    same(simulated("sgd", resume=path), whole["sgd"])
    assert header_of(path)["recorded"] == 4
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]


def test_single_runs(monkeypatch, tmp_path):
    crash(monkeypatch, 3, layer=LAYER[0], checkpoint=tmp_path / "run.npz")
    resumed = simulated("sgd", layer=LAYER[0], resume=tmp_path / "run.npz")
    same(resumed, simulated("sgd", layer=LAYER[0]))
    assert resumed.replicas is None


def test_resume_writes_on_in_the_same_file_or_in_another(whole, monkeypatch, tmp_path):
    old, new = tmp_path / "old.npz", tmp_path / "new.npz"
    crash(monkeypatch, 3, checkpoint=old)
    before = old.read_bytes()
    same(simulated("sgd", resume=str(old), checkpoint=new), whole["sgd"])
    assert old.read_bytes() == before
    assert header_of(new)["step"] == 30
    same(simulated("sgd", resume=old, checkpoint=old), whole["sgd"])
    assert header_of(old)["step"] == 30
    same(simulated("sgd", resume=old, checkpoint=tmp_path / "copy.npz"), whole["sgd"])
    same(simulated("sgd", resume=tmp_path / "copy.npz"), whole["sgd"])  # a finished run leaves the file asked for too


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_is_returned_at_once(kind, whole, monkeypatch, tmp_path):
    path = tmp_path / "run.npz"
    same(simulated(kind, checkpoint=path), whole[kind])
    before = path.stat()
    module = importlib.import_module("sim.train" if kind == "sgd" else "sim.reduced")
    monkeypatch.setattr(module, "advance", never)
    monkeypatch.setattr(module, "measure", never)
    same(simulated(kind, resume=path), whole[kind])
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_written_no_more_often_than_asked(tmp_path, monkeypatch):
    written = []
    write = sim._checkpoint._write
    monkeypatch.setattr(sim._checkpoint, "_write", lambda *args: (written.append(args[1].step), write(*args)))
    simulated("sgd", checkpoint=tmp_path / "a.npz", block=4, checkpoint_seconds=1000)
    assert written == [0, 30]  # the start and the end
    written.clear()
    simulated("sgd", checkpoint=tmp_path / "b.npz", block=10, checkpoint_seconds=0)
    assert written == [0, 10, 20, 30, 30]  # the last one with the last record


def test_the_bar_starts_where_the_run_does(monkeypatch, tmp_path):
    crash(monkeypatch, 4, checkpoint=tmp_path / "run.npz")
    module = importlib.import_module("sim._driver")
    bars, tqdm = [], module.tqdm
    monkeypatch.setattr(module, "tqdm", lambda **options: bars.append(tqdm(**options)) or bars[-1])
    simulated("sgd", resume=tmp_path / "run.npz", progress=True)
    samples = 2 * 3  # of a step
    assert (bars[0].initial, bars[0].n, bars[0].total) == (10 * samples, 30 * samples, 30 * samples)


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_of_a_replica_survives(kind, whole, monkeypatch, tmp_path):
    if kind == "sgd":
        bad = eqx.tree_at(lambda layer: layer.keys, LAYER, LAYER.keys.at[1].mul(1e25))
    else:
        bad = eqx.tree_at(lambda layer: layer.keys, LAYER, LAYER.keys.at[1].mul(1e21))
    crash(monkeypatch, 5, kind, layer=bad, checkpoint=tmp_path / "run.npz", throw=False)
    failures = header_of(tmp_path / "run.npz")["failures"]
    resumed = simulated(kind, layer=bad, resume=tmp_path / "run.npz", block=3, throw=False)
    same(resumed, simulated(kind, layer=bad, throw=False))
    assert resumed.result.tolist() == [Result.successful, Result.diverged, Result.successful]
    for i in (0, 2):
        same(resumed[i].order, whole[kind][i].order)
    with pytest.raises(RunFailed, match="SGD: replica 1 diverged") as failure:  # said again by the finished run
        simulated(kind, layer=bad, resume=tmp_path / "run.npz")
    assert failures[0] in str(failure.value)


def test_outside_the_main_thread(whole, tmp_path):
    found = []
    run = lambda: found.append(simulated("sgd", checkpoint=tmp_path / "run.npz", **EVERY))  # noqa: E731
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    same(found[0], whole["sgd"])


# --- what stops a run


def started(kind, path, moment=""):
    """Another process that runs on with `path`, or begins to write it."""
    words = [sys.executable, __file__, kind, str(path), moment]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(path, process, step):
    """Until the checkpoint holds a step beyond this one."""
    while not path.exists() or header_of(path)["step"] <= step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def kill_and_resume(kind, path, moments, rng):
    """A run killed by SIGKILL again and again, at last in the middle of writing or of anything else, and its end."""
    step = 0
    for moment in moments:
        process = started(kind, path, moment)
        if moment == "any":
            wait_for_step(path, process, step)
            time.sleep(rng.uniform(0, 0.1))
            process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        reached = header_of(path)["step"]
        assert reached >= step
        step = reached
    assert 0 < step < 400
    return simulated(kind, resume=path, **LONG)


def test_kill_at_any_moment(tmp_path):
    resumed = kill_and_resume("sgd", tmp_path / "run.npz", ["any", "writing", "renaming"], np.random.default_rng(0))
    same(resumed, simulated("sgd", **LONG))
    assert len(list(tmp_path.iterdir())) >= 3  # what was written aside stays, and does no harm


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kill_at_many_moments(kind, tmp_path):
    rng, expected = np.random.default_rng(1), simulated(kind, **LONG)
    for i in range(4):
        moments = [*rng.choice(["any", "writing", "renaming"], 2), "any"]
        same(kill_and_resume(kind, tmp_path / f"{i}.npz", moments, rng), expected)


def test_signals_end_the_block_and_say_how_to_go_on(tmp_path):
    path, step = tmp_path / "run.npz", -1
    for number, word in ((signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")):
        process = started("sgd", path)
        wait_for_step(path, process, step)
        process.send_signal(number)
        said, errors = process.communicate()
        assert process.returncode == 0, errors
        step = header_of(path)["step"]
        tau = f"{step * 2.0 / 20:.6g}"
        assert said.strip() == (
            f"SGD: {word} at τ = {tau}, resume={str(path)!r} goes on from there; the records made before that are kept"
        )
    assert 0 < step < 400
    same(simulated("sgd", resume=path, **LONG), simulated("sgd", **LONG))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_what_it_did_before(number):
    seen = []
    before = signal.signal(number, lambda *args: seen.append(args[0]))
    try:
        mine = signal.getsignal(number)
        with interruptible() as stop:
            signal.raise_signal(number)
            assert stop.is_set()
            assert not seen
            signal.raise_signal(number)
        assert seen == [number]
        assert signal.getsignal(number) is mine
        signal.signal(number, signal.SIG_IGN)
        with interruptible() as stop:
            signal.raise_signal(number)
            assert not stop.is_set()  # ignored ones stay ignored
    finally:
        signal.signal(number, before)


def test_a_full_disk_leaves_the_checkpoint_before(whole, monkeypatch, tmp_path):
    path, calls, savez = tmp_path / "run.npz", [], np.savez

    def full(file, **arrays):
        calls.append(path.read_bytes() if path.exists() else b"")
        if len(calls) == 4:
            file.write(b"PK" * 100)
            raise OSError(errno.ENOSPC, "No space left on device")
        savez(file, **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(OSError, match=r"checkpoint: .*run\.npz cannot be written .*No space left.*resume= goes on"):
            simulated("sgd", checkpoint=path, **EVERY)
    assert path.read_bytes() == calls[-1]
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]
    assert header_of(path)["step"] == 8
    same(simulated("sgd", resume=path), whole["sgd"])


def test_a_folder_that_cannot_be_written_is_noticed_before_anything_is_computed(monkeypatch, tmp_path):
    module = importlib.import_module("sim.train")
    monkeypatch.setattr(module, "advance", never)
    monkeypatch.setattr(module, "measure", never)
    (tmp_path / "file").touch()
    for path in (tmp_path / "none/run.npz", tmp_path / "file/run.npz"):
        with pytest.raises(OSError, match=r"checkpoint: .*run\.npz cannot be written") as failure:
            simulated("sgd", checkpoint=path)
        assert "resume" not in str(failure.value)


# --- what is refused


def test_an_existing_file_is_not_overwritten(finished, tmp_path):
    other = tmp_path / "mine.txt"
    other.write_text("mine")
    for path, options in ((finished, {}), (other, {}), (other, {"resume": finished}), (tmp_path, {})):
        with pytest.raises(ValueError, match=r"checkpoint: expected .* \(resume= goes on with a run\), got .* exists"):
            simulated("sgd", checkpoint=path, **options)
    assert other.read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": 3}, "checkpoint: expected a path, got 3"),
        ({"checkpoint": ""}, "checkpoint: expected a path, got ''"),
        ({"resume": True}, "resume: expected a path, got True"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds: expected no negative entry"),
        ({"checkpoint_seconds": [1, 2]}, "checkpoint_seconds: expected 0 axes"),
    ],
)
def test_refuses_options(change, message):
    with pytest.raises(ValueError, match=message):
        simulated("sgd", **change)


def test_nothing_to_resume(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"resume: no checkpoint at .*none\.npz"):
        simulated("sgd", resume=tmp_path / "none.npz")


def test_truncated_files(finished, tmp_path):
    content = finished.read_bytes()
    cut = tmp_path / "cut.npz"
    with zipfile.ZipFile(finished) as archive:
        entries = [(entry.header_offset, entry.compress_size) for entry in archive.infolist()]
        directory = archive.start_dir
    places = {0, 1, 3, 4, 5, directory, directory + 10, len(content) - 22, len(content) - 1}
    for offset, size in entries:  # before, in and after an entry's own header, its data and its neighbour
        places |= {offset + step for step in (-1, 0, 1, 10, 35, size // 2, size)}
    for place in sorted(place for place in places if 0 <= place < len(content)):
        cut.write_bytes(content[:place])
        with pytest.raises(ValueError, match=r"resume: .*cut\.npz is truncated, damaged or no checkpoint") as failure:
            simulated("sgd", resume=cut)
        assert failure.value.__suppress_context__  # no traceback of zipfile


def test_a_changed_byte_is_noticed_or_means_nothing(finished, whole, tmp_path):
    content = finished.read_bytes()
    changed, refused = tmp_path / "changed.npz", 0
    for place in np.random.default_rng(0).integers(len(content), size=150):
        changed.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            run = simulated("sgd", resume=changed)
        except ValueError as error:
            assert str(error).startswith(f"resume: {changed} is")  # noqa: PT017
            refused += 1
        else:
            same(run, whole["sgd"])  # a date or another field that nothing reads
    assert refused > 100


def test_foreign_files(tmp_path):
    path = tmp_path / "foreign.npz"
    path.write_text("τ, risk\n0.0, 0.75\n")
    refused = pytest.raises(ValueError, match=r"resume: .*foreign\.npz is .*no checkpoint of headsplit")
    with refused:
        simulated("sgd", resume=path)
    for arrays in (
        {"a": np.ones(3)},
        {"header": np.frombuffer(b'{"format": "other"}', np.uint8)},
        {"header": np.ones(3)},
    ):
        np.savez(path, **arrays)
        with refused:
            simulated("sgd", resume=path)
    for values in (np.ones(3), np.array([{"a": 1}], dtype=object)):  # a pickle is not opened
        with open(path, "wb") as file:
            np.save(file, values)
        with refused:
            simulated("sgd", resume=path)
    path.unlink()
    path.mkdir()
    with refused:
        simulated("sgd", resume=path)


def rewrite(path, new, change):
    """A copy with another header."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays["header"].tobytes())
    change(header)
    np.savez(new, **arrays | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)})
    return new


def test_newer_checkpoints(finished, tmp_path):
    new = tmp_path / "new.npz"

    def newer_format(header):
        header.clear()
        header.update(format="headsplit-checkpoint", number=2, made={"headsplit": "0.9.0"}, all_else="as it likes")

    for change, message in (
        (newer_format, r"newer: it has format 2 of headsplit 0\.9\.0, this is headsplit \d.* with format 1"),
        (
            lambda header: header["made"].update(headsplit="99.0.1rc2"),
            r"newer: it has format 1 of headsplit 99\.0\.1rc2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            simulated("sgd", resume=rewrite(finished, new, change))


def test_other_versions_are_a_warning(finished, whole, tmp_path):
    older = rewrite(
        finished, tmp_path / "old.npz", lambda header: header["made"].update(jax="0.1.0", headsplit="0.0.9")
    )
    with pytest.warns(UserWarning, match=r"written with headsplit 0\.0\.9, now .*; jax 0\.1\.0, now .*not bit for bit"):
        same(simulated("sgd", resume=older), whole["sgd"])


def test_arrays_that_are_not_those_of_the_header(finished, tmp_path):
    def other_digest(header):
        header["arrays"]["records.m"][2] = "0" * 64

    def one_more(header):
        header["arrays"].update(more=header["arrays"]["result"])

    for change, message in (
        (other_digest, r"is damaged: records\.m differs"),
        (one_more, "is truncated, damaged"),
    ):
        changed = rewrite(finished, tmp_path / "a.npz", change)
        with pytest.raises(ValueError, match=message):
            simulated("sgd", resume=changed)


@pytest.mark.parametrize(
    ("name", "change", "values"),
    [
        ("learning_rate", {"learning_rate": 1.0}, ("2.0", "1.0")),
        ("learning_rate", {"learning_rate": np.nextafter(2.0, 3)}, ("2.0", "2.0000000000000004")),
        ("time", {"time": 4.0}, ("3.0", "4.0")),
        ("batch", {"batch": 3}, ("2", "3")),
        ("key", {"key": jax.random.key(6)}, (r"\[0, 5\]", r"\[0, 6\]")),
        ("key_impl", {"key": jax.random.key(5, impl="rbg")}, ("'threefry2x32'", "'rbg'")),
        ("record", {"record": 3}, (r"'4 steps from 0 to 30 \(\w+\)'", r"'3 steps from 0 to 30 \(\w+\)'")),
        ("record", {"record": [0, 1, 2.1, 3]}, (r"'4 steps from 0 to 30 \(\w+\)'", r"'4 steps from 0 to 30 \(\w+\)'")),
        ("loss", {"loss": "limit"}, ("'finite'", "'limit'")),
        ("bias_rate", {"bias_rate": 1}, ("0.7", "1.0")),
        ("scale_rate", {"scale_rate": 0}, ("1.0", "0.0")),
        ("evaluation", {"evaluation": 11}, ("10", "11")),
        ("length", {"task": SingleLocation(4, 3.0, sign_flips([1.0], [1.0]))}, ("3", "4")),
        ("snr", {"task": SingleLocation(3, 3.5, sign_flips([1.0], [1.0]))}, ("3.0", "3.5")),
        ("prior", {"task": SingleLocation(3, 3.0, sign_flips([1.0], [1 + 1e-15]))}, (r".*\[1\.0\].*", r".*1\.00+1.*")),
        ("activation", {"layer": layer_of(activation=Softmax1([0.1, -0.2], 3.0, trained="bias"))}, (".*2.*", ".*3.*")),
        ("start", {"layer": layer_of(variance=0.6)}, (r"'\w+'", r"'\w+'")),
        ("start", {"layer": eqx.tree_at(lambda x: x.keys, LAYER, LAYER.keys[::-1])}, (r"'\w+'", r"'\w+'")),
        ("dim", {"layer": layer_of(dim=30)}, ("20", "30")),
        ("replicas", {"layer": layer_of(replicas=2)}, ("3", "2")),
        ("heads", {"layer": layer_of(heads=3, activation=Softmax1(0.1, 2.0, trained="bias"))}, ("2", "3")),
        ("dtype", {"layer": layer_of(dtype=jnp.float64)}, ("'float32'", "'float64'")),
    ],
)  # fmt: skip
def test_another_run_is_refused_by_what_differs(name, change, values, finished):
    before = finished.read_bytes()
    with pytest.raises(
        ValueError, match=rf"resume: (.*; )?{name} differs: checkpoint has {values[0]}, this run {values[1]}"
    ):
        simulated("sgd", resume=finished, **change)
    assert finished.read_bytes() == before


def test_another_simulator_start_or_way_to_draw_is_refused(finished, tmp_path):
    with pytest.raises(ValueError, match="source differs: checkpoint has 'sgd', this run 'reduced'"):
        simulated("reduced", resume=finished)
    simulated("reduced", checkpoint=tmp_path / "run.npz")
    order = LAYER.order()
    moved = OrderParameters(order.m.at[0, 0, 0].add(1e-15), order.r)
    with pytest.raises(ValueError, match="resume: start differs"):
        train_reduced(TASK, ACTIVATION, moved, dim=20, resume=tmp_path / "run.npz", **OPTIONS)
    flag = jax.config.jax_threefry_partitionable
    with (
        jax.threefry_partitionable(not flag),
        pytest.raises(ValueError, match=f"resume: jax_threefry_partitionable differs: checkpoint has '{flag}'"),
    ):
        simulated("sgd", resume=finished)


def _die_at(moment):
    """Kills this process in the middle of writing its fifth checkpoint, or between writing and renaming it."""
    savez, calls = np.savez, []

    def half(file, **arrays):
        calls.append(file)
        savez(file, **arrays)
        if len(calls) == 5:
            file.flush()
            os.truncate(file.name, file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def not_renamed(aside, path):
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(aside, path)

    rename = os.replace
    if moment == "writing":
        np.savez = half
    elif moment == "renaming":
        np.savez = lambda file, **arrays: (calls.append(file), savez(file, **arrays))
        os.replace = not_renamed


if __name__ == "__main__":
    kind, path, moment = sys.argv[1:]
    _die_at(moment)
    here = {"resume" if Path(path).exists() else "checkpoint": path}
    with without_risk():
        try:
            simulated(kind, **LONG, **here, block=1, checkpoint_seconds=0)
        except RunFailed as failure:
            print(failure)
