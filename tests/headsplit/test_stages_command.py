"""`headsplit stages`: lines stored one by one, and the table and the figure from the store."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

import compare.staircase
import theory as th
from compare import load, save, stage_times
from figures.stages import draw
from headsplit.cli import app
from headsplit.stages import usual_replicas, usual_shown

runner = CliRunner()
ONE = ["--prior", "sign_flips([0],[1])", "--heads", "2"]
SIZES = ["--dims", "100,1000", "--replicas", "40,20", "--shown", "100", "--no-progress"]
SMALL = ["stages", *ONE, "--prior", "sign_flips([0],[0.5])", "--heads", "2", *SIZES]
REAL = {name: getattr(compare.staircase, name) for name in ("predicted_stages", "measured_stages")}
RATES = {1.0: 0.4, 0.25: 0.1}


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """In an empty directory: amplitudes grow at a known rate from random starts; lines that are made are counted."""
    calls = {"count": 0, "stop_at": None}

    def counted():
        calls["count"] += 1
        if calls["count"] == calls["stop_at"]:
            raise KeyboardInterrupt

    def rate(prior):
        return RATES[float(prior.variance()[0])]

    def times(prior, dim, count):
        # where the split of normal starts has grown from √(r_0/D) to full size
        levels = (np.arange(count) + 0.5) / count
        return np.log(np.sqrt(dim) / np.sqrt(-2 * np.log(levels))) / rate(prior)

    def predicted(*, prior, dims, samples, coverage, **options):
        counted()
        drawn = np.stack([times(prior, dim, samples) for dim in dims])[:, :, None]
        levels = np.array([0.25, 0.5, 0.75])
        slope = np.array([0.5 / rate(prior)])
        return xr.Dataset(
            {
                "stage_time": (("dim", "sample", "feature"), drawn),
                "quantile": (("dim", "feature", "level"), np.moveaxis(np.quantile(drawn, levels, axis=1), 0, -1)),
                "end": ("dim", np.quantile(drawn[:, :, 0], coverage, axis=1)),
                "growth": ("feature", 0.5 / slope),
                "limit_slope": ("feature", slope),
                "predicted_slope": ("feature", slope),
                "variance": ("feature", np.asarray(prior.variance())),
                "rank": ("feature", np.array([0])),
            },
            coords={"dim": list(dims), "level": levels},
        )

    def measured(prediction, *, prior, dim, replicas, length, snr, threshold, activation, **options):
        counted()
        end = float(prediction["end"].sel(dim=dim))
        clock = np.linspace(0, end, 201)
        unit = threshold * np.sqrt(snr * float(prior.variance()[0]))
        growth = unit * np.exp(rate(prior) * (clock - times(prior, dim, replicas)[:, None]))
        m = growth[:, :, None, None] * np.array([[1.0], [-1.0]])
        order = th.OrderParameters(m, m @ np.swapaxes(m, -1, -2) + np.eye(2))
        task = th.SingleLocation(length, snr, prior)
        state = (jnp.asarray(clock), order, activation, jnp.ones((replicas, len(clock))), None, None)
        run = th.Trajectory(*state, jnp.zeros(replicas, jnp.int32), task)
        found = stage_times(run, threshold=threshold)
        return found.to_xarray().assign(scale=("feature", found.scale), records=("replica", found.records))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("stages"))
        patch.setattr(compare.staircase, "predicted_stages", predicted)
        patch.setattr(compare.staircase, "measured_stages", measured)
        yield calls


@pytest.fixture(scope="module")
def done(computed):
    """The small run, in results/stages."""
    made = runner.invoke(app, SMALL)
    assert made.exit_code == 0, made.output
    return made


def test_every_line_is_stored_and_drawn_again_without_computing(computed, done):
    store = load("results/stages/result.zarr")
    assert store.metadata["status"] == "complete"
    assert store.configuration["dims"] == [100, 1000]
    assert len(store.datasets) == 8
    before = computed["count"]
    Path("results/stages/stages.png").unlink()
    again = runner.invoke(app, SMALL)
    assert again.exit_code == 0
    assert "not recomputed" in again.output
    assert Path("results/stages/stages.png").exists()
    drawn = runner.invoke(app, ["figure", "stages", "results/stages"])
    assert drawn.exit_code == 0
    assert "1.250 ± 0.000" in drawn.output  # at equal starts the times lie on a line
    assert computed["count"] == before


def test_fits_and_tests_find_what_was_put_in(done):
    store = load("results/stages/result.zarr")
    for p, rate in enumerate(RATES.values()):
        found = store[f"comparison_{p}"]
        np.testing.assert_allclose(found["own_slope"], 0.5 / rate, rtol=1e-6)
        assert abs(float(found["slope"][0]) - 0.5 / rate) < 3 * float(found["slope_error"][0])
        assert np.all(found["p_value"] > 0.5)  # the same law
        np.testing.assert_array_equal(found["split"] + found["unsplit"], [[40], [20]])
        assert found["unsplit"].sum() <= 2
        # the samples lie at levels (i + ½)/S, so that beyond the 99 % quantile there is 1 %, up to half a sample
        np.testing.assert_allclose(found["expected"][:, 0], [0.4, 0.2], atol=40 / (2 * 128))
        assert f"{float(found['expected'][0, 0]):10.1f}" in done.output


def test_another_configuration_is_refused_by_name(done):
    other = runner.invoke(app, [*SMALL, "--batch", "8"])
    assert other.exit_code == 2
    assert "batch: 8 here, 4 there" in other.output


def test_the_figure_shows_the_stored_numbers(done):
    store = load("results/stages/result.zarr")
    left, right = draw(store).axes[:2]
    medians = store["comparison_1"]["measured"].isel(feature=0, level=1)
    assert any(np.array_equal(c.lines[0].get_ydata(), medians) for c in left.containers)
    assert right.get_xlabel().endswith("D = 100")


def test_an_interrupted_run_goes_on_where_it_stopped(computed):
    command = ["stages", *ONE, *SIZES, "--out", "stopped"]
    before, computed["stop_at"] = computed["count"], computed["count"] + 2
    stopped = runner.invoke(app, command)
    assert stopped.exit_code == 130
    kept = load("stopped/result.zarr")
    assert kept.metadata["status"] == "unfinished"
    assert "prediction_0" in kept.datasets
    assert f"{len(kept.datasets)} lines are kept" in stopped.output
    assert runner.invoke(app, ["figure", "stages", "stopped"]).exit_code == 2
    computed["stop_at"] = None
    assert runner.invoke(app, command).exit_code == 0
    assert computed["count"] - before <= 2 + 3 - len(kept.datasets) + 1  # what was stored is not computed again
    whole = load("stopped/result.zarr")
    assert whole.metadata["status"] == "complete"
    assert set(kept.datasets) < set(whole.datasets) == {"prediction_0", "runs_0_0", "runs_0_1", "comparison_0"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dims", "100,x"], "dims: expected numbers with commas"),
        (["--dims", "1000,100"], "dims: expected at least one D, increasing"),
        (["--dims", "2,1000", "--shown", "1000"], "dims: expected a whole number >= 3"),
        (["--replicas", "40"], "replicas: expected one number per D (2)"),
        (["--shown", "500"], "shown: expected one of the D (100, 1000)"),
        (["--heads", "3"], "heads: expected one number of heads per prior (2)"),
        (["--loss", "full"], "loss: expected 'finite' or 'limit'"),
        (["--coverage", "1"], "coverage: expected a share"),
        (["--snr", "0"], "snr: expected positive numbers"),
        (["--activation", "Relu()"], "activation: expected one of"),
    ],
)
def test_wrong_options_are_named(computed, options, message):
    before = computed["count"]
    refused = runner.invoke(app, [*SMALL, *options])
    assert refused.exit_code == 2
    assert message in refused.output
    assert computed["count"] == before


def test_one_head_is_refused(computed):
    refused = runner.invoke(app, ["stages", "--prior", "sign_flips([0],[1])", "--heads", "1"])
    assert refused.exit_code == 2
    assert "heads: expected a whole number >= 2" in refused.output


def test_dims_alone_choose_the_rest(computed):
    made = runner.invoke(app, ["stages", *ONE, "--dims", "300", "--no-progress", "--out", "alone"])
    assert made.exit_code == 0, made.output
    store = load("alone/result.zarr")
    assert (store.configuration["replicas"], store.configuration["shown"]) == ([200], 300)


def test_usual_numbers_of_runs():
    assert usual_replicas((10, 1000, 3162, 10**6)) == (200, 200, 100, 50)
    assert [usual_shown(dims) for dims in ((5,), (5, 6), (5, 6, 7))] == [5, 5, 6]


def test_another_kind_of_store_is_not_drawn(tmp_path):
    save(tmp_path / "result.zarr", {"theory": xr.Dataset()}, {})
    refused = runner.invoke(app, ["figure", "stages", str(tmp_path)])
    assert refused.exit_code == 2
    assert "expected a result of the figure 'stages'" in refused.output


def test_defaults_are_in_the_help():
    shown = runner.invoke(app, ["stages", "--help"]).output
    assert "316,1000,3162,10000" in shown


@pytest.mark.slow
def test_heads_of_a_small_layer_split_when_predicted(monkeypatch, tmp_path):
    """Nothing replaced: prediction, chain and comparison at a small size."""
    for name, function in REAL.items():
        monkeypatch.setattr(compare.staircase, name, function)
    options = ["--prior", "sign_flips([0],[1])", "--heads", "2", "--dims", "100,316", "--replicas", "40,40",
               "--shown", "316", "--samples", "16", "--coverage", "0.9", "--no-progress"]  # fmt: skip
    made = runner.invoke(app, ["stages", *options, "--out", str(tmp_path)])
    assert made.exit_code == 0, made.output
    found = load(tmp_path / "result.zarr")["comparison_0"]
    assert np.all(found["p_value"] > 0.001)
    assert np.all(found["unsplit"] < 12)
