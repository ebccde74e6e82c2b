"""The command: options, folders, messages and exit codes (the computation replaced by a known result)."""

import json
import logging
import subprocess
import sys
from dataclasses import asdict

import pytest
import synthetic
from typer.testing import CliRunner

import headsplit.compare
from compare import agreement, align, load, save
from headsplit.cli import app
from headsplit.compare import Configuration, Interrupted

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
    assert sorted(p.name for p in folder.iterdir()) == ["compare.pdf", "compare.png", "result.zarr"]
    assert "AGREES" in done.output
    assert "aligned with replica 0" in done.output
    for name in ("result.zarr", "compare.pdf", "compare.png"):
        assert f"results/compare/L10-H4-snr1-D500-seed3/{name}" in done.output
    assert load(folder / "result.zarr").configuration == asdict(Configuration(dim=500, seed=3))


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
        (KeyboardInterrupt(), 130, "nothing is kept"),
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
        (["--prior", "one_hott(3)"], "expected one of sign_flips"),
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


def test_the_default_prior_is_a_canonical_name():
    from headsplit.parse import parse_prior

    assert parse_prior(Configuration().prior).name == Configuration().prior


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
