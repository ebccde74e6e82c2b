"""The risk against τ: a staircase of plateaus at the predicted saddles, with steps at the predicted times.

Runs of the exact chain from random starts against the flows of `predict_stages`, of which nothing is fitted. Means over
runs are compared with means over starts; single runs, whose steps come at random times, are drawn thin.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from compare import Store, stage_times
from compare.lines import Line
from figures.style import DOUBLE, WIDE, look, simulation_points, style, theory_line
from sim import train_reduced
from theory import OrderParameters, SingleLocation, predict_stages
from theory._checks import invalid, whole
from theory.names import parse_activation, parse_prior

_STARTS, _DATA = 1, 2  # purposes of randomness
LEVEL: dict[str, Any] = {"color": "0.35", "linestyle": (0, (4, 2)), "linewidth": 0.7, "zorder": 1}
SPAN_ALPHA = 0.2
MAX_MARKERS = 20
_GRID = 201  # times at which the mean risk of the flows is stored


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    prior: str = "gaussian(mean=[0.0, 0.0], variance=[1.0, 0.6])"
    activation: str = "Softmax(temperature=1.0)"
    heads: int = 4
    length: int = 4
    snr: float = 8.0
    dims: tuple[int, ...] = (1000,)
    replicas: tuple[int, ...] = (32,)  # for each D
    variance: float = 0.1
    learning_rate: float = 8.0
    batch: int = 16
    loss: str = "limit"
    time: float = 150.0
    records: int = 101
    threshold: float = 0.25
    samples: int = 16
    seed: int = 0

    def check(self) -> None:
        """Refuses wrong values by name, before anything is computed or written."""
        if len(self.replicas) != len(self.dims):
            raise invalid("replicas", f"one number per D ({len(self.dims)})", self.replicas)
        for replicas in self.replicas:
            whole("replicas", replicas, 2)
        whole("records", self.records, 4)


SMALL = Configuration()
FULL = Configuration(dims=(1000, 10_000, 100_000), replicas=(200, 64, 16), time=250.0, samples=256)


def lines(c: Configuration) -> Iterator[Line]:
    """The prediction at every D, and runs of the chain at each."""
    yield Line("prediction", "saddles and stage times", partial(_prediction, c))
    for i in range(len(c.dims)):
        yield Line(f"runs_{i}", f"{c.replicas[i]} runs at D = {c.dims[i]}", partial(_runs, c, i))


def _task(c: Configuration) -> SingleLocation:
    return SingleLocation(c.length, c.snr, parse_prior(c.prior))


def _prediction(c: Configuration) -> xr.Dataset:
    """What `StagePrediction.to_xarray` holds, and the risk of its flows: mean over starts and its standard error."""
    found = predict_stages(
        _task(c), parse_activation(c.activation), c.heads, list(c.dims), variance=c.variance,
        step_size=c.learning_rate / c.batch, threshold=c.threshold, samples=c.samples, until=c.time, progress=False,
    )  # fmt: skip
    time = np.linspace(0, c.time, _GRID)
    mean, error = found.mean_risk(time)
    return found.to_xarray().assign(
        risk=(("dim", "time"), mean, {"long_name": "population risk, mean over starts"}),
        risk_error=(("dim", "time"), error, {"long_name": "standard error of the mean risk"}),
        time=("time", time, {"long_name": "clock τ = η·steps/D"}),
    )


def _runs(c: Configuration, i: int) -> xr.Dataset:
    """Risk of each run, when its stages came, and its plateaus."""
    start, data = (jax.random.fold_in(jax.random.fold_in(jax.random.key(c.seed), p), i) for p in (_STARTS, _DATA))
    task = _task(c)
    order = OrderParameters.initial(
        start, heads=c.heads, features=task.features, dim=c.dims[i], variance=c.variance, replicas=c.replicas[i]
    )
    run = train_reduced(
        task, parse_activation(c.activation), order, dim=c.dims[i], learning_rate=c.learning_rate, batch=c.batch,
        time=c.time, key=data, record=c.records, loss=c.loss, evaluation=2, progress=False, throw=False,
    )  # fmt: skip
    measured = stage_times(run, threshold=c.threshold).to_xarray()
    return measured[["stage_time", "plateau_risk", "plateau_time"]].assign(run.to_xarray()[["risk", "result"]])


def draw(store: Store) -> Figure:
    """A row for each D; on the right the last step enlarged where there are several."""
    c, levels = store.configuration, store["prediction"]["saddle_risk"].values
    columns = 2 if len(levels) > 2 else 1
    with style():
        figure = Figure(figsize=(DOUBLE if columns == 2 else WIDE, 0.8 + 2.1 * len(c["dims"])), layout="constrained")
        axes = figure.subplots(len(c["dims"]), columns, sharex=True, sharey="col", squeeze=False)
        for i, row in enumerate(axes):
            for ax in row:
                staircase(ax, store, i)
            row[0].set_ylabel("population risk")
            row[0].set_title(f"D = {c['dims'][i]}, {c['replicas'][i]} runs")
            if columns == 2:
                gap = levels[-2] - levels[-1]
                row[1].set_ylim(levels[-1] - 0.5 * gap, levels[-2] + 1.2 * gap)
                row[1].set_title("the last step, enlarged")
        for ax in axes[-1]:
            ax.set_xlabel("τ")
        features = [f for f in range(store["prediction"].sizes["feature"]) if _staged(store, f)]
        variance = np.asarray(parse_prior(c["prior"]).variance())
        points: dict[str, Any] = {"color": "0.3", "markerfacecolor": "white", "markersize": 3}
        handles = [
            Line2D([], [], color="black", label="predicted mean over starts"),
            Line2D([], [], **LEVEL, label="predicted saddles"),
            *(
                Patch(facecolor=look(f + 1)["color"], alpha=SPAN_ALPHA, linewidth=0,
                      label=f"predicted stage {f + 1} (Var θ = {variance[f]:.3g}), median and 25–75 %")
                for f in features
            ),
            Line2D([], [], color=look(0)["color"], linewidth=0.5, label="chain, single runs"),
            Line2D([], [], linestyle="", marker="o", **points, label="chain, mean ± s.e."),
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def staircase(ax: Axes, store: Store, i: int) -> list:
    """Risk of single runs and their mean at one D, on the predicted mean, levels and times."""
    prediction, runs = store["prediction"], store[f"runs_{i}"]
    artists: list[Any] = []
    for level in prediction["saddle_risk"].values:
        artists.append(ax.axhline(level, **LEVEL))
    for f in filter(partial(_staged, store), range(prediction.sizes["feature"])):
        low, middle, high = (_stage(store, i, f, level) for level in (0.25, 0.5, 0.75))
        colour = look(f + 1)["color"]
        if np.isfinite(low):
            end = min(high, float(runs["time"][-1]))
            artists.append(ax.axvspan(low, end, color=colour, alpha=SPAN_ALPHA, linewidth=0, zorder=0))
        if np.isfinite(middle):
            artists.append(ax.axvline(middle, color=colour, linewidth=0.9, zorder=1))
    faint = {"linewidth": 0.4, "alpha": 0.5, "zorder": 1.5}
    artists += theory_line(ax, runs["time"], runs["risk"].transpose("time", "replica"), 0, **faint)
    artists += theory_line(ax, prediction["time"], prediction["risk"][i], color="black", linewidth=1.2)
    mean, error = mean_risk(runs)
    some = np.arange(0, len(mean), -(-len(mean) // MAX_MARKERS))
    artists += simulation_points(
        ax, runs["time"][some], mean[some], error[some], color="0.2", markeredgecolor="0.2", zorder=4
    )
    ax.set_xlim(0, float(runs["time"][-1]))
    return artists


def mean_risk(runs: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """(time,) mean over runs and its standard error."""
    risk = runs["risk"].transpose("replica", "time").values
    return risk.mean(axis=0), risk.std(axis=0, ddof=1) / np.sqrt(len(risk))


def _staged(store: Store, feature: int) -> bool:
    return bool(np.isin(feature, store["prediction"]["saddle_feature"].values))


def _stage(store: Store, i: int, feature: int, level: float) -> float:
    return float(store["prediction"]["quantile"].isel(dim=i, feature=feature).sel(level=level))


def deviation(store: Store, i: int) -> np.ndarray:
    """(time,) mean risk of the runs less the predicted one, in standard errors of both together, from τ > 0 on."""
    prediction, runs = store["prediction"], store[f"runs_{i}"]
    mean, error = mean_risk(runs)
    own = [np.interp(runs["time"], prediction["time"], prediction[name][i]) for name in ("risk", "risk_error")]
    return ((mean - own[0]) / np.hypot(error, own[1]))[1:]


def numbers(store: Store) -> dict[str, float]:
    """Levels predicted and measured (median over runs), stage times, and the deviation of the mean risk."""
    prediction = store["prediction"]
    found: dict[str, float] = {}
    for k, level in enumerate(prediction["saddle_risk"].values):
        found[f"risk at saddle {k}"] = float(level)
        plateau = store["runs_0"]["plateau_risk"].values[:, min(k, store["runs_0"].sizes["plateau"] - 1)]
        found[f"median plateau {k}, D = {store.configuration['dims'][0]}"] = float(np.nanmedian(plateau))
    for i, dim in enumerate(store.configuration["dims"]):
        for f in filter(partial(_staged, store), range(prediction.sizes["feature"])):
            found[f"stage {f + 1}, D = {dim}: median predicted"] = _stage(store, i, f, 0.5)
            found[f"stage {f + 1}, D = {dim}: median measured"] = float(
                np.median(store[f"runs_{i}"]["stage_time"][:, f])
            )
        found[f"rms deviation of the mean risk, D = {dim}, standard errors"] = float(
            np.sqrt(np.nanmean(deviation(store, i) ** 2))
        )
    return found
