"""The command: options, folders, messages and exit codes (the computation replaced by a known result)."""

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import equinox as eqx
import numpy as np
import pytest
import synthetic
from typer.testing import CliRunner

import headsplit.compare
from compare import agreement, align, load, save
from compare.driver import only_driver
from compare.lines import Interrupted
from headsplit.cli import app
from headsplit.compare import Configuration
from theory import Softmax1, Trajectory

runner = CliRunner()


@pytest.fixture
def computed(monkeypatch, tmp_path):
    """Runs in an empty directory; computing gives residuals with the `drift` asked for, and is counted."""
    monkeypatch.chdir(tmp_path)
    calls = {"count": 0, "drift": 1.0, "error": None}

    def compute(configuration, path, *, progress, say):
        calls["count"] += 1
        if calls["error"] is not None:
            raise calls["error"]
        theory = synthetic.ideal(0, drift=calls["drift"])
        run = synthetic.simulated(synthetic.ideal(0), 0)
        datasets = {
            "theory": theory.to_xarray(),
            "simulation": run.to_xarray(),
            "aligned": align(theory, run).to_xarray(),
            "agreement": agreement(theory, run).to_xarray(),
        }
        save(path, datasets, asdict(configuration), replace=True)

    monkeypatch.setattr(headsplit.compare, "_compute", compute)
    return calls


def test_writes_a_store_and_figures_and_says_where(computed, tmp_path):
    done = runner.invoke(app, ["compare", "--dim", "500", "--seed", "3"])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "results/compare/L10-H4-snr1-D500-seed3"
    assert sorted(p.name for p in folder.glob("[!.]*")) == ["compare.pdf", "compare.png", "result.zarr"]
    assert "AGREES" in done.output
    assert "aligned with replica 0" in done.output
    for name in ("result.zarr", "compare.pdf", "compare.png"):
        assert f"results/compare/L10-H4-snr1-D500-seed3/{name}" in done.output
    assert load(folder / "result.zarr").configuration == asdict(Configuration(dim=500, seed=3))


def test_a_second_driver_of_a_folder_is_refused(computed, tmp_path):
    (tmp_path / "here").mkdir()
    with only_driver(tmp_path / "here"):
        refused = runner.invoke(app, ["compare", "--out", "here"])
    assert refused.exit_code == 2
    assert f"in use by another driver (process {os.getpid()} on " in refused.output.replace("\n", "")
    assert computed["count"] == 0
    assert runner.invoke(app, ["compare", "--out", "here"]).exit_code == 0


def test_bands_can_be_left_out(computed, tmp_path):
    assert runner.invoke(app, ["compare", "--no-bands", "--out", "here"]).exit_code == 0
    assert load(tmp_path / "here/result.zarr").configuration == asdict(Configuration(bands=False))


def test_a_result_that_is_there_is_not_computed_again(computed, tmp_path):
    runner.invoke(app, ["compare", "--out", "here"])
    (tmp_path / "here/compare.png").unlink()
    again = runner.invoke(app, ["compare", "--out", "here"])
    assert again.exit_code == 0
    assert "loaded, not recomputed" in again.output
    assert "AGREES" in again.output
    assert computed["count"] == 1
    assert (tmp_path / "here/compare.png").exists()


def test_another_configuration_in_the_folder_is_refused_by_name(computed):
    runner.invoke(app, ["compare", "--out", "here"])
    done = runner.invoke(app, ["compare", "--out", "here", "--snr", "2"])
    assert done.exit_code == 2
    assert "here holds another configuration (snr: 2.0 here, 1.0 there)" in done.output
    assert computed["count"] == 1


def test_the_activation_and_its_rates_reach_the_store(computed, tmp_path):
    options = ["--activation", "Softmax1(scale=4, trained=True)", "--bias-rate", "2", "--scale-rate", "0.5"]
    assert runner.invoke(app, ["compare", *options]).exit_code == 0
    name = "Softmax1(bias=0.0, scale=4.0, trained=True)"
    folder = "L10-H4-snr1-D1000-Softmax1_bias_0.0_scale_4.0_trained_True-biasrate2-scalerate0.5-seed0"
    stored = load(tmp_path / "results/compare" / folder / "result.zarr").configuration
    assert stored == asdict(Configuration(activation=name, bias_rate=2.0, scale_rate=0.5))


def test_a_store_from_before_there_were_activations_is_read(computed, tmp_path):
    runner.invoke(app, ["compare", "--out", "here"])
    store = load(tmp_path / "here/result.zarr")
    added = ("activation", "bias_rate", "scale_rate")
    older = {name: value for name, value in store.configuration.items() if name not in added}
    save(tmp_path / "here/result.zarr", store.datasets, older, replace=True)
    again = runner.invoke(app, ["compare", "--out", "here"])
    assert again.exit_code == 0
    assert "loaded, not recomputed" in again.output
    assert runner.invoke(app, ["figure", "compare", "here"]).exit_code == 0
    other = runner.invoke(app, ["compare", "--out", "here", "--activation", "Softmax1()"])
    assert other.exit_code == 2
    assert "activation: 'Softmax1(bias=0.0, scale=1.0, trained=False)' here, 'Softmax(temperature=1.0)'" in other.output
    assert computed["count"] == 1


def test_an_unfinished_run_is_computed_again(computed, tmp_path):
    save(tmp_path / "here/result.zarr", {}, asdict(Configuration()), status="interrupted")
    done = runner.invoke(app, ["compare", "--out", "here"])
    assert done.exit_code == 0
    assert "unfinished" in done.output
    assert load(tmp_path / "here/result.zarr").metadata["status"] == "complete"


def test_disagreement_is_exit_code_one(computed):
    computed["drift"] = 2.0
    done = runner.invoke(app, ["compare"])
    assert done.exit_code == 1
    assert "DISAGREES" in done.output


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("length: expected a whole number >= 2, got 1"), 2, "compare: length: expected a whole"),
        (Interrupted("interrupted: the simulation up to τ = 3 is kept in x"), 130, "kept in x"),
        (KeyboardInterrupt(), 130, "interrupted: what is stored stays, nothing else is kept"),  # there may be a store
    ],
)
def test_errors_are_one_line(computed, error, code, message):
    computed["error"] = error
    done = runner.invoke(app, ["compare"])
    assert done.exit_code == code
    assert message in done.output
    assert "Traceback" not in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prior", "one_hott(3)"], "prior: expected one of sign_flips"),
        (["--activation", "Softmax3()"], "activation: expected one of Softmax"),
        (["--level", "2"], "level"),
        (["--hats", "3"], "hats"),
        (["--heads", "two"], "heads"),
    ],
)
def test_wrong_usage_is_exit_code_two(computed, options, message):
    done = runner.invoke(app, ["compare", *options])
    assert done.exit_code == 2
    assert message in done.output
    assert computed["count"] == 0


@pytest.mark.parametrize("there", [False, True], ids=["new folder", "existing folder"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "0"], "replicas: expected a whole number >= 1, got 0"),
        (["--dim", "3"], "dim: expected a whole number >= 7, got 3"),
        (["--heads", "0"], "heads: expected"),
        (["--length", "1"], "length: expected"),
        (["--batch", "0"], "batch: expected"),
        (["--records", "1"], "records: expected"),
        (["--time", "nan"], "time: expected finite numbers"),
        (["--learning-rate", "-1"], "learning_rate: expected"),
        (["--variance", "0"], "variance: expected"),
        (["--snr", "inf"], "snr: expected"),
        (["--loss", "mse"], "loss: expected"),
        (["--activation", "Softmax([1, 2])"], "temperature: expected one number or one per head (4,), got (2,)"),
        (["--activation", "Softmax([1, 2, 1, 1])"], "activation: expected one that all heads share"),
        (["--bias-rate", "2"], "bias_rate: expected an activation that trains its bias, got Softmax(temperature"),
        (["--scale-rate", "-1"], "scale_rate: expected no negative entry"),
        (["--until", "0"], "until: expected a time > 0, got 0.0"),
        (["--until", "nan"], "until: expected"),
    ],
)
def test_wrong_values_are_named_before_anything_is_done(computed, tmp_path, options, message, there):
    if there:
        save(tmp_path / "here/result.zarr", {}, asdict(Configuration()))
    done = runner.invoke(app, ["compare", "--out", "here", *options])
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert computed["count"] == 0
    assert there or not (tmp_path / "here").exists()


@pytest.mark.parametrize("out", ["file", "file/deeper"])
def test_out_that_is_a_file(computed, tmp_path, out):
    (tmp_path / "file").write_text("mine")
    done = runner.invoke(app, ["compare", "--out", out])
    assert done.exit_code == 2
    assert "out: expected a folder, file is a file" in done.output


def test_a_damaged_store_is_wrong_usage_not_disagreement(computed, tmp_path):
    runner.invoke(app, ["compare", "--out", "here"])
    chunk = next(file for file in (tmp_path / "here/result.zarr/theory/m/c").rglob("*") if file.is_file())
    chunk.write_bytes(chunk.read_bytes()[:20])
    for words in (["compare", "--out", "here"], ["figure", "compare", "here"]):
        done = runner.invoke(app, words)
        assert done.exit_code == 2
        assert "theory/m" in done.output


def test_what_an_interrupted_run_left_can_be_used_as_the_message_says(computed, tmp_path):
    run = synthetic.simulated(synthetic.ideal(0), 0).to_xarray()
    path = save(tmp_path / "here/result.zarr", {"simulation": run}, asdict(Configuration()), status="interrupted")
    done = runner.invoke(app, ["figure", "compare", "here"])
    assert done.exit_code == 2
    assert "compare.load('here/result.zarr')['simulation'] reads it in Python" in done.output
    assert "computes again from the start" in done.output  # there is no checkpoint beside it
    assert load(path)["simulation"].equals(run)


@pytest.mark.parametrize("activation", ["Softmax()", "Softmax1(scale=2, trained=True)"])
def test_when_every_replica_diverges_no_theory_is_solved(monkeypatch, tmp_path, activation):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("theory.gradient_flow", None)
    options = "--dim 100 --heads 2 --length 3 --replicas 3 --learning-rate 1e30 --time 1e30 --records 3 --no-progress"
    done = runner.invoke(app, ["compare", "--out", "here", "--activation", activation, *options.split()])
    assert done.exit_code == 0, done.output
    assert "SGD diverged in 3 of 3 replicas (replica 0 after τ = 0" in done.output
    assert "NO VERDICT" in done.output
    assert "0 complete replicas" in done.output
    stored = load(tmp_path / "here/result.zarr")
    assert stored["simulation"]["result"].values.tolist() == [1, 1, 1]
    assert runner.invoke(app, ["figure", "compare", "here"]).exit_code == 0


def test_the_theory_is_solved_only_where_sgd_reached_its_end(monkeypatch):
    theory = synthetic.ideal(0, replicas=4)
    theory, run = synthetic.trained(theory, synthetic.simulated(theory, 0), 0, own=True)
    lost = run.result.at[1].set(1), run.risk.at[1, 3:].set(float("nan")), run.order.m.at[1, 3:].set(float("nan"))
    run = eqx.tree_at(lambda t: (t.result, t.risk, t.order.m), run, lost)
    kept = np.array([0, 2, 3])
    parts = lambda t: (t.order.m, t.order.r, t.activation.bias, t.activation.scale, t.risk, t.result)  # noqa: E731
    part = eqx.tree_at(parts, theory, tuple(leaf[kept] for leaf in parts(theory)))
    start, given = Softmax1([0.0, 0.0], [2.0, 2.0], trained=True), {}
    rates = {"step_size": 0.5, "bias_rate": 1.0, "scale_rate": 1.0}

    def flow(task, activation, order, times, *, progress, throw, **options):
        given.update(activation=activation, options=options)
        return part

    monkeypatch.setattr("theory.gradient_flow", flow)
    solved = headsplit.compare._flow(run, start, theory.order, kept, rates=rates, progress=False)
    assert given == {"activation": start, "options": rates}
    for values, known in ((solved.order.m, theory.order.m), (solved.activation.scale, theory.activation.scale)):
        np.testing.assert_array_equal(values[kept], known[kept])
        assert np.all(np.isnan(values[1]))
    assert solved.result.tolist() == [0, 1, 0, 0]
    verdict = agreement(solved, run)
    assert (verdict.replicas, verdict.excluded) == (3, 1)
    align(solved, run).to_xarray()
    assert "1 of 4 replicas (replica 1 after τ = 2)" in headsplit.compare._diverged(run)


def test_figure_compare_draws_again(computed, tmp_path):
    runner.invoke(app, ["compare", "--out", "here"])
    before = (tmp_path / "here/compare.pdf").read_bytes()
    (tmp_path / "here/compare.pdf").unlink()
    for store in ("here", "here/result.zarr"):
        done = runner.invoke(app, ["figure", "compare", store])
        assert done.exit_code == 0
        assert "AGREES" in done.output
    assert (tmp_path / "here/compare.pdf").read_bytes() == before
    missing = runner.invoke(app, ["figure", "compare", "there"])
    assert missing.exit_code == 2
    assert "there/result.zarr: no store here" in missing.output


def test_folders_are_named_by_what_varies():
    assert Configuration().folder() == "L10-H4-snr1-D1000-seed0"
    other = Configuration(snr=0.5, prior="one_hot(features=3, weights=[0.5, 0.25, 0.25])", loss="limit", time=7.5)
    assert other.folder() == "L10-H4-snr0.5-D1000-one_hot_features_3_weights_0.5_0.25_0.25-tau7.5-losslimit-seed0"
    fields = {name: (value or 0) + 1 for name, value in asdict(Configuration()).items() if not isinstance(value, str)}
    assert len({Configuration(**{name: value}).folder() for name, value in fields.items()}) == len(fields)


def test_the_default_prior_and_activation_are_canonical_names():
    from theory.names import parse_activation, parse_prior

    assert parse_prior(Configuration().prior).name == Configuration().prior
    assert parse_activation(Configuration().activation).name == Configuration().activation


def test_help_and_version_do_not_import_jax():
    code = "import sys; from headsplit.cli import app; {}; assert 'jax' not in sys.modules"
    for words in (["--version"], ["--help"], ["compare", "--help"]):
        call = f"app({words!r}, standalone_mode=False)"
        done = subprocess.run([sys.executable, "-c", code.format(call)], capture_output=True, text=True, check=True)
        assert "headsplit" in done.stdout or "Usage" in done.stdout
    assert "τ = η·steps/D" in runner.invoke(app, ["--help"]).output


def test_jax_does_not_complain_about_absent_accelerators(computed):
    runner.invoke(app, ["figure", "compare", "nothing"])
    assert logging.getLogger("jax._src.xla_bridge").level == logging.ERROR


def test_stored_verdict_is_json(computed, tmp_path):
    runner.invoke(app, ["compare", "--out", "here"])
    assert json.loads(load(tmp_path / "here/result.zarr")["agreement"].attrs["agrees"]) is True


def test_a_comparison_that_is_stopped_goes_on(monkeypatch, tmp_path):
    """Ctrl-C in the simulation, then in the theory; the simulation is the one that never stopped."""
    monkeypatch.chdir(tmp_path)
    options = "--dim 30 --heads 1 --length 3 --replicas 2 --time 1 --records 3 --no-bands --no-progress"
    words = ["compare", "--prior", "gaussian([1], [0])", *options.split()]

    def stop(*args, **options):
        raise KeyboardInterrupt

    def as_simulated(run, *args, **options):
        settings = {"source": "flow", **options["rates"]}
        return Trajectory(run.time, run.order, run.activation, run.risk, None, None, run.result, run.task, settings)

    def press(aside, path):
        rename(aside, path)
        os.replace = rename
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:  # before anything is written
        patch.setattr("sim.train", stop)
        done = runner.invoke(app, [*words, "--out", "here"])
    assert done.exit_code == 130
    assert "interrupted: what is stored stays, nothing else is kept" in done.output

    rename = os.replace
    for name, double, reached in (("os.replace", press, "0"), ("theory.gradient_flow", stop, "1")):
        with monkeypatch.context() as patch:
            patch.setattr(name, double)
            done = runner.invoke(app, [*words, "--out", "here"])
        assert done.exit_code == 130, done.output
        assert f"interrupted: the simulation up to τ = {reached} is kept in here/result.zarr" in done.output
        assert "the same command goes on" in done.output
        assert (tmp_path / "here/checkpoint.npz").exists()
    other = runner.invoke(app, [*words, "--out", "here", "--snr", "2"])
    assert other.exit_code == 2
    (tmp_path / "here/result.zarr").rename(tmp_path / "moved.zarr")  # as after a kill
    other = runner.invoke(app, [*words, "--out", "here", "--snr", "2"])
    assert other.exit_code == 2
    assert "resume: snr differs: checkpoint has 1.0, this run 2.0" in other.output
    assert "(delete it to compute again, or give another --out)" in other.output
    with monkeypatch.context() as patch:
        patch.setattr("sim._driver.interruptible", None)  # the simulation is not run again
        patch.setattr("headsplit.compare._flow", as_simulated)  # the theory takes its time to compile
        done = runner.invoke(app, [*words, "--out", "here"])
    assert done.exit_code == 0, done.output
    monkeypatch.setattr("theory.gradient_flow", stop)
    runner.invoke(app, [*words, "--out", "whole"])
    kept = sorted(file.name for file in (tmp_path / "here").glob("[!.]*"))
    assert kept == ["compare.pdf", "compare.png", "result.zarr"]
    here, whole = (load(tmp_path / folder / "result.zarr") for folder in ("here", "whole"))
    assert here.metadata["status"] == "complete"
    assert here["simulation"].identical(whole["simulation"])
