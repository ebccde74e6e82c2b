"""Sequential learning: a Gaussian prior with unequal variances is learned one direction after the other.

The amplitude of a feature is the standard deviation over heads of its overlaps, in units of √(ν Var θ_f). At small keys
it grows like exp(κ_f τ), κ_f = (2/H)(1/L)(1−1/L)(1−2/L) ν Var θ_f (docs/model.md §5): dashed on the left. Later
stages wait at saddles where rates are lower. On the right are the stage times of runs of the exact chain against those
of the flows from the same starts.
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
from matplotlib.ticker import FuncFormatter

from compare import Store, stage_times
from compare.lines import Line
from figures.style import DOUBLE, look, plain_ticks, simulation_points, style, theory_line
from sim import train_reduced
from theory import OrderParameters, Quadrature, SingleLocation, Trajectory, gradient_flow
from theory._checks import invalid, whole
from theory.names import parse_activation, parse_prior

_START, _DATA = 1, 2  # purposes of randomness
GUIDE: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 0.8, "zorder": 1.5}
MAX_MARKERS = 16


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    prior: str = "gaussian(mean=[0.0, 0.0, 0.0], variance=[1.0, 0.65, 0.42])"
    activation: str = "Softmax(temperature=1.0)"
    heads: int = 6
    length: int = 4
    snr: float = 16.0
    dim: int = 500
    replicas: int = 8
    variance: float = 0.1
    learning_rate: float = 8.0
    batch: int = 16
    loss: str = "limit"
    first: float = 1.0  # record after the start; the others follow geometrically
    time: float = 300.0
    records: int = 61
    threshold: float = 0.1
    seed: int = 0

    def check(self) -> None:
        """Refuses wrong values by name, before anything is computed or written."""
        whole("replicas", self.replicas, 2)
        whole("records", self.records, 4)
        if not 0 < self.first < self.time:
            raise invalid("first", f"a time τ before the end ({self.time:g})", self.first)


SMALL = Configuration()
FULL = Configuration(dim=10_000, replicas=64, time=1000.0, records=121)


def lines(c: Configuration) -> Iterator[Line]:
    """Runs of the chain, and flows from their starts."""
    yield Line("runs", f"{c.replicas} runs at D = {c.dim}", partial(_runs, c))
    yield Line("flows", f"{c.replicas} flows from their starts", partial(_flows, c))


def _task(c: Configuration) -> SingleLocation:
    return SingleLocation(c.length, c.snr, parse_prior(c.prior))


def _clock(c: Configuration) -> np.ndarray:
    return np.array([0.0, *np.geomspace(c.first, c.time, c.records - 1)])


def _order(c: Configuration) -> OrderParameters:
    key = jax.random.fold_in(jax.random.key(c.seed), _START)
    return OrderParameters.initial(
        key, heads=c.heads, features=_task(c).features, dim=c.dim, variance=c.variance, replicas=c.replicas
    )


def _described(c: Configuration, run: Trajectory) -> xr.Dataset:
    stages = stage_times(run, threshold=c.threshold).to_xarray()
    return stages[["amplitude", "stage_time", "order", "variance"]].assign(risk=run.to_xarray()["risk"])


def _runs(c: Configuration) -> xr.Dataset:
    run = train_reduced(
        _task(c), parse_activation(c.activation), _order(c), dim=c.dim, learning_rate=c.learning_rate, batch=c.batch,
        time=c.time, key=jax.random.fold_in(jax.random.key(c.seed), _DATA), record=_clock(c), loss=c.loss,
        evaluation=2, progress=False, throw=False,
    )  # fmt: skip
    return _described(c, run)


def _flows(c: Configuration) -> xr.Dataset:
    run = gradient_flow(
        _task(c), parse_activation(c.activation), _order(c), _clock(c),
        step_size=c.learning_rate / c.batch, method=Quadrature(1e-4), tolerance=1e-4, corrector_points=256,
        progress=False,
    )  # fmt: skip
    return _described(c, run)


def growth_rates(length: int, snr: float, heads: int, variance: np.ndarray) -> np.ndarray:
    """κ_f of splits at zero keys, softmax, mean 0 (docs/model.md §5)."""
    return 2 / heads / length * (1 - 1 / length) * (1 - 2 / length) * snr * np.asarray(variance)


def draw(store: Store) -> Figure:
    """Left: amplitudes on a logarithmic axis with the first growth; right: stage times of flows and runs."""
    c = store.configuration
    with style():
        figure = Figure(figsize=(DOUBLE, 2.9), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
        amplitudes(left, store)
        times(right, store)
        grey: dict[str, Any] = {"color": "0.3", "markerfacecolor": "white", "markersize": 3}
        variance = store["runs"]["variance"].values
        handles = [
            *(Line2D([], [], color=look(f)["color"], label=f"Var θ = {v:.3g}") for f, v in enumerate(variance)),
            Line2D([], [], color="0.3", label="flows, median"),
            Line2D(
                [],
                [],
                color="0.3",
                linestyle="",
                marker="|",
                markersize=7,
                markeredgewidth=1.6,
                label="their median stage time",
            ),
            Line2D([], [], linestyle="", marker="o", **grey, label=f"chain, D = {c['dim']}, median and 25–75 %"),
            Line2D([], [], color="0.3", **GUIDE, label=r"$\propto e^{\kappa_f\tau}$, zero keys"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def amplitudes(ax: Axes, store: Store) -> list:
    """Medians over flows and over runs, and the growth from the median start."""
    c, runs, flows = store.configuration, store["runs"], store["flows"]
    variance = runs["variance"].values
    rates = growth_rates(c["length"], c["snr"], c["heads"], variance)
    artists, time = [], runs["time"].values
    some = np.arange(1, len(time), -(-len(time) // MAX_MARKERS))
    for f, rate in enumerate(rates):
        low, middle, high = np.quantile(runs["amplitude"].values[:, some, f], [0.25, 0.5, 0.75], axis=0)
        errors = np.stack([middle - low, high - middle])
        artists += simulation_points(ax, time[some], middle, errors, f)
        artists += theory_line(ax, flows["time"], np.median(flows["amplitude"].values[:, :, f], axis=0), f)
        start = float(np.median(runs["amplitude"].values[:, 0, f]))
        clock = np.linspace(0, min(np.log(1 / start) / rate, time[-1]), 100)
        artists += ax.plot(clock, start * np.exp(rate * clock), color=look(f)["color"], **GUIDE)
        middle = float(np.median(flows["stage_time"].values[:, f]))
        if np.isfinite(middle):
            artists.append(ax.axvline(middle, ymax=0.06, color=look(f)["color"], linewidth=1.6))
    artists.append(ax.axhline(c["threshold"], color="0.5", linewidth=0.6, linestyle=(0, (1, 1)), zorder=1))
    ax.annotate(
        "threshold of a stage", (time[1], c["threshold"]), xytext=(2, 2), textcoords="offset points", fontsize=6
    )  # fmt: skip
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xscale("log")
    ax.set_xlim(time[1], time[-1])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xlabel("τ")
    ax.set_ylabel("spread of $m_{hf}$ over heads,\nin units of " + r"$(\nu\,\mathrm{Var}\,\theta_f)^{1/2}$")
    return artists


def times(ax: Axes, store: Store) -> list:
    """Stage times of each run against those of its own flow; equal on the diagonal."""
    expected, seen = (store[group]["stage_time"].values for group in ("flows", "runs"))
    artists: list[Any] = []
    for f in range(seen.shape[1]):
        artists += simulation_points(
            ax, expected[:, f], seen[:, f], np.nan * seen[:, f], f, linestyle="", markersize=3.5
        )
    both = np.concatenate([expected, seen])
    both = both[np.isfinite(both)]
    if both.size:
        ends = np.array([both.min() / 1.25, both.max() * 1.25])
        artists += ax.plot(ends, ends, color="black", linewidth=0.8, zorder=1)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(*ends)
        ax.set_ylim(*ends)
    for axis in (ax.xaxis, ax.yaxis):
        plain_ticks(axis)
    ax.set_xlabel("stage time τ, flow from the same start")
    ax.set_ylabel("stage time τ, chain")
    return artists


def delays(store: Store, feature: int) -> np.ndarray:
    """Stage times of the runs less those of their own flows, where both are there."""
    with np.errstate(invalid="ignore"):
        difference = (store["runs"]["stage_time"] - store["flows"]["stage_time"]).values[:, feature]
    return difference[np.isfinite(difference)]


def numbers(store: Store) -> dict[str, float]:
    """For each feature its rate, median stage times, and the mean delay of runs after their flows with its error."""
    c, runs, flows = store.configuration, store["runs"], store["flows"]
    rates = growth_rates(c["length"], c["snr"], c["heads"], runs["variance"].values)
    found = {}
    for f, rate in enumerate(rates):
        late = delays(store, f)
        found[f"feature {f + 1}: κ at zero keys"] = float(rate)
        found[f"feature {f + 1}: median stage time, flows"] = float(np.median(flows["stage_time"].values[:, f]))
        found[f"feature {f + 1}: median stage time, chain"] = float(np.median(runs["stage_time"].values[:, f]))
        if len(late) > 1:
            found[f"feature {f + 1}: mean delay of the chain"] = float(late.mean())
            found[f"feature {f + 1}: its error"] = float(late.std(ddof=1) / np.sqrt(len(late)))
    found["runs in the order of variance"] = float(runs.attrs["in_order_of_variance"])
    return found
