"""`headsplit bayes`: lines stored one by one, interruption and going on, and the figure from the store alone."""

import shutil

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

import compare.bayes
from compare import load
from figures.bayes import draw, final_risk, table
from headsplit.cli import app

runner = CliRunner()
SMALL = ["bayes", "--prior", "sign_flips([0],[1])", "--prior-heads", "2", "--snrs", "2,8", "--heads", "1,2",
         "--trained-snrs", "8", "--replicas", "3", "--no-progress"]  # fmt: skip


@pytest.fixture
def computed(monkeypatch, tmp_path):
    """Runs in an empty directory; lines are known numbers, and their making is counted (and may be interrupted)."""
    monkeypatch.chdir(tmp_path)
    calls = {"count": 0, "stop_at": None}

    def line(name, values, **quantities):
        calls["count"] += 1
        if calls["count"] == calls["stop_at"]:
            raise KeyboardInterrupt
        data = {q: (name, np.full(len(values), v)) for q, v in quantities.items()}
        return xr.Dataset(data, coords={name: list(values)})

    optimum = {"risk": 0.3, "error": 1e-5, "gradient": 1e-6, "spread": 2e-4}
    monkeypatch.setattr(compare.bayes, "optima_against_snr", lambda *a, snrs, **k: line("snr", snrs, **optimum))
    monkeypatch.setattr(compare.bayes, "optima_against_heads", lambda *a, heads, **k: line("heads", heads, **optimum))
    monkeypatch.setattr(
        compare.bayes, "bayes_against_snr", lambda *a, snrs, length: line("snr", snrs, bayes=0.2, bayes_error=1e-6)
    )

    def trained(*args, replicas, **options):
        calls["count"] += 1
        risk = np.stack([np.full(replicas, 0.9), 0.4 + 0.1 * np.arange(replicas)], axis=1)
        return xr.Dataset({"risk": (("replica", "time"), risk), "result": ("replica", np.zeros(replicas, int))})

    monkeypatch.setattr(compare.bayes, "trained_risk", trained)
    return calls


def test_stores_every_line_and_draws_again_without_computing(computed, tmp_path):
    done = runner.invoke(app, SMALL)
    assert done.exit_code == 0, done.output
    assert computed["count"] == 10  # Bayes, and for each activation optima against ν and H, and trained layers
    store = load(tmp_path / "results/bayes/result.zarr")
    assert store.metadata["status"] == "complete"
    assert store.configuration["snrs"] == [2.0, 8.0]
    assert "0.5000 ± 6e-02" in done.output  # mean and standard error of .4, .5, .6
    again = runner.invoke(app, SMALL)
    assert again.exit_code == 0
    assert "not recomputed" in again.output
    drawn = runner.invoke(app, ["figure", "bayes", "results/bayes"])
    assert drawn.exit_code == 0
    assert computed["count"] == 10


def test_an_interrupted_run_goes_on_where_it_stopped(computed, tmp_path):
    computed["stop_at"] = 5
    stopped = runner.invoke(app, SMALL)
    assert stopped.exit_code == 130
    kept = load(tmp_path / "results/bayes/result.zarr")
    assert kept.metadata["status"] == "unfinished"
    assert f"{len(kept.datasets)} lines are kept" in stopped.output
    assert runner.invoke(app, ["figure", "bayes", "results/bayes"]).exit_code == 2  # not complete, and says so
    before, computed["stop_at"] = computed["count"], None
    assert runner.invoke(app, SMALL).exit_code == 0
    assert computed["count"] - before <= 10 - len(kept.datasets)  # what was stored is not computed again
    whole = load(tmp_path / "results/bayes/result.zarr")
    assert whole.metadata["status"] == "complete"
    assert len(whole.datasets) == 10
    assert set(kept.datasets) < set(whole.datasets)


def test_another_configuration_is_refused_by_name(computed):
    assert runner.invoke(app, SMALL).exit_code == 0
    other = runner.invoke(app, [*SMALL, "--dim", "300"])
    assert other.exit_code == 2
    assert "dim: 300 here, 400 there" in other.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--snrs", "2,x"], "snrs: expected numbers with commas"),
        (["--snrs", "8,2"], "snrs: expected at least one value, increasing"),
        (["--heads", "0,2"], "heads: expected a whole number >= 1"),
        (["--snr", "0"], "snr: expected positive numbers"),
        (["--prior", "one_hot(2)"], "prior_heads: expected one number of heads per prior"),
        (["--dim", "2"], "dim: expected a whole number >= 3"),
        (["--tolerance", "1"], "tolerance: expected a number from 1e-8 to 1e-2"),
    ],
)
def test_wrong_options_are_named(computed, options, message):
    done = runner.invoke(app, [*SMALL, *options])
    assert done.exit_code == 2
    assert message in done.output
    assert computed["count"] == 0


def test_the_figure_shows_the_stored_numbers(computed, tmp_path):
    runner.invoke(app, SMALL)
    store = load(tmp_path / "results/bayes/result.zarr")
    figure = draw(store)
    above, below = figure.axes
    lines = {tuple(line.get_ydata()) for line in above.get_lines() if len(line.get_xdata()) == 2}
    assert lines >= {(0.2, 0.2), (0.3, 0.3)}
    assert np.all(np.array([line.get_ydata() for line in below.get_lines()]).min() == 0.2)
    assert final_risk(store["trained_0_0_0"])[0] == pytest.approx(0.5)
    assert "0.3000 (2e-04)" in table(store)


def test_every_panel_shows_all_it_draws(computed, tmp_path):
    two = [*SMALL, "--prior", "one_hot(2)", "--prior-heads", "2"]
    assert runner.invoke(app, two).exit_code == 0
    store = load(tmp_path / "results/bayes/result.zarr")
    higher = {name: data for name, data in store.datasets.items() if name.startswith("heads_1")}
    store.datasets.update({name: data.assign(risk=2 * data["risk"]) for name, data in higher.items()})
    figure = draw(store)
    below = figure.axes[2:]  # they share their axis, and the second panel reaches higher
    low, high = below[0].get_ylim()
    assert low == 0
    assert high > 0.6


def test_brackets_are_explained_where_there_are_some(computed):
    explained = "in brackets: highest less lowest"
    assert explained in runner.invoke(app, SMALL).output
    single = runner.invoke(app, [*SMALL, "--starts", "1", "--out", "single"]).output
    assert "evaluation errors up to 1e-05" in single
    assert explained not in single


@pytest.mark.parametrize("damage", ["cut off", "group gone", "no text"])
@pytest.mark.parametrize("unfinished", [False, True])
def test_a_damaged_store_is_refused_and_left_alone(computed, tmp_path, damage, unfinished):
    if unfinished:
        computed["stop_at"] = 5
    runner.invoke(app, SMALL)
    computed["stop_at"] = None
    store = tmp_path / "results/bayes/result.zarr"
    if damage == "cut off":
        piece = next(path for path in sorted(store.glob("bayes_0/bayes/c/**/*")) if path.is_file())
        piece.write_bytes(piece.read_bytes()[:-5])
    elif damage == "group gone":
        shutil.rmtree(store / "bayes_0")
    else:
        (store / "zarr.json").write_text("")
    left, count = {path: path.stat().st_mtime_ns for path in store.rglob("*")}, computed["count"]
    again = runner.invoke(app, SMALL)
    assert again.exit_code == 2
    assert "result.zarr: " in again.output
    assert "(delete it to compute again, or give another --out)" in again.output
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == left
    assert computed["count"] == count


def test_defaults_are_in_the_help():
    shown = runner.invoke(app, ["bayes", "--help"]).output
    assert "2,4,8,16" in shown
