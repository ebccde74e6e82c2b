"""Predicted bands of single runs at finite D around the flow, and how the scatter of runs narrows as D grows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from compare import Store, agreement, residual_scaling
from compare.lines import Line
from figures.style import DOUBLE, look, simulation_points, style, theory_line
from sim import train_reduced
from sim._lanes import repeated
from theory import OrderParameters, SingleLocation, Softmax, Trajectory, fluctuations, gradient_flow
from theory._checks import invalid
from theory.names import parse_prior

RUNS = 1  # purpose of randomness, folded into key(seed)
WIDTH = 1.96  # standard deviations on either side hold 95 %
SHADE = 0.25
GREY: dict[str, Any] = {"color": "0.3", "markerfacecolor": "white", "markersize": 4}


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    prior: str = "sign_flips(mean=[1.0, 0.0], amplitude=[0.0, 1.0])"
    length: int = 5
    snr: float = 2.0
    start: tuple[tuple[float, ...], ...] = ((0.1, 0.1), (-0.1, -0.1))  # m at τ = 0, the same in every run
    variance: float = 0.1  # r_⊥ = this · I at τ = 0
    dims: tuple[int, ...] = (100, 200, 400, 1000, 2000)
    replicas: tuple[int, ...] = (128, 128, 128, 128, 128)  # runs at each D
    shown: int = 400  # D of the bands
    single: int = 8  # runs that are drawn
    learning_rate: float = 2.0
    batch: int = 1
    time: float = 10.0
    records: int = 21
    seed: int = 0

    def check(self) -> None:
        """Refuses a D whose records lie between two steps: all D have the same."""
        if self.shown not in self.dims or len(self.dims) < 2 or len(self.replicas) != len(self.dims):
            raise invalid("dims", "at least two D, shown among them, and replicas for each", self.dims)
        for dim in self.dims:
            steps = self.time / (self.records - 1) * dim / self.learning_rate
            if abs(steps - round(steps)) > 1e-9:
                raise invalid("dims", "a whole number of steps between two records", f"{steps:g} at D = {dim}")


SMALL = Configuration()
FULL = Configuration(dims=(100, 200, 400, 1000, 2000, 4000, 10_000), replicas=(400,) * 7)


def lines(c: Configuration) -> Iterator[Line]:
    """One: all of it is made from the same flow."""
    yield Line("bands", "bands around the flow, and runs of the chain", partial(bands, c))


def bands(c: Configuration) -> xr.Dataset:
    """Flow and predicted deviations at one D, runs there, and the scatter of runs against D."""
    task = SingleLocation(c.length, c.snr, parse_prior(c.prior))
    m = np.asarray(c.start)
    start = OrderParameters(m, m @ m.T + c.variance * np.eye(len(m)))
    times = np.linspace(0, c.time, c.records)
    flow = gradient_flow(task, Softmax(), start, times, step_size=c.learning_rate / c.batch, progress=False)
    band = fluctuations(flow, dim=c.shown)
    root = jax.random.fold_in(jax.random.key(c.seed), RUNS)
    found, shown = [], None
    for dim, replicas in zip(c.dims, c.replicas, strict=True):
        run = train_reduced(
            task, Softmax(), repeated(start, replicas), dim=dim, learning_rate=c.learning_rate, batch=c.batch,
            time=c.time, record=times, evaluation=2, key=jax.random.fold_in(root, dim), progress=False,
        )  # fmt: skip
        own = repeated_flow(flow, replicas)
        found.append(agreement(own, run, bands=band if dim == c.shown else None, until=c.time))
        if dim == c.shown:
            shown = run.to_xarray()[["m", "r"]]
    scaling = residual_scaling(found, until=c.time)
    assert shown is not None
    judged = found[c.dims.index(c.shown)]
    ratios = {name: judged.band(name) for name in ("m", "r")}
    data = {
        **{f"flow_{name}": values for name, values in flow.to_xarray()[["m", "r"]].items()},
        **band.to_xarray().data_vars,
        **{f"run_{name}": values for name, values in shown.items()},
        **{name: values for name, values in scaling.to_xarray().items() if name != "replicas"},
        "coverage": ("banded", [b.coverage for b in ratios.values()], {"long_name": "share of runs in the 95 % band"}),
        "coverage_error": ("banded", [b.coverage_error for b in ratios.values()], {"long_name": "its standard error"}),
        "ratio": ("banded", [b.ratio for b in ratios.values()], {"long_name": "measured / predicted scatter"}),
        "ratio_error": ("banded", [b.ratio_error for b in ratios.values()], {"long_name": "its standard error"}),
    }
    return xr.Dataset(data, coords={"banded": list(ratios)}, attrs={"dim": c.shown, "report": str(scaling)})


def repeated_flow(flow: Trajectory, replicas: int) -> Trajectory:
    """One flow as the theory of replicas with the same start."""
    parts = lambda t: (t.order, t.risk, t.result)  # noqa: E731
    return eqx.tree_at(parts, flow, tuple(repeated(part, replicas) for part in parts(flow)))


def draw(store: Store) -> Figure:
    """m and r against τ with their bands and single runs; scatter and mean residual against D."""
    c, data = store.configuration, store["bands"]
    with style():
        figure = Figure(figsize=(DOUBLE, 2.7), layout="constrained")
        overlaps, norms, against = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
        of_spikes, of_heads = (
            [(0, f) for f in range(data.sizes["feature"])],
            [(0, h) for h in range(min(2, data.sizes["head"]))],
        )
        banded(overlaps, data, "m", of_spikes, c["single"])
        banded(norms, data, "r", of_heads, c["single"])
        scatter(against, data, c["shown"])
        overlaps.set_ylabel("overlap m")
        norms.set_ylabel("overlap r")
        overlaps.set_title(f"L = {c['length']}, H = {len(c['start'])}, ν = {c['snr']:g}, D = {c['shown']}")
        norms.set_title(f"η = {c['learning_rate']:g}, B = {c['batch']}, D = {c['shown']}")
        handles = [
            Line2D([], [], color="0.3", linewidth=1.2, label="flow"),
            Patch(facecolor="0.3", alpha=SHADE, linewidth=0, label="predicted band, 95 % of runs"),
            Line2D([], [], color="0.3", linewidth=0.4, label=f"{c['single']} single runs"),
            Line2D([], [], linestyle="", marker="o", **GREY, label="scatter of runs, its fitted power"),
            Line2D([], [], color="0.3", linewidth=1.0, label="scatter, predicted"),
            Line2D([], [], linestyle="", marker="x", **GREY, label="mean residual, where resolved"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def banded(ax: Axes, data: xr.Dataset, name: str, entries: list[tuple[int, int]], single: int) -> list:
    """Entries of m or r: flow, band and single runs."""
    time, artists = data["time"].values, []
    for i, (row, column) in enumerate(entries):
        at = (..., row, column)
        middle, width = data[f"flow_{name}"].values[at], WIDTH * data[f"{name}_deviation"].values[at]
        colour = look(i)["color"]
        artists += [ax.fill_between(time, middle - width, middle + width, color=colour, alpha=SHADE, linewidth=0)]
        artists += ax.plot(time, data[f"run_{name}"].values[at][:single].T, color=colour, linewidth=0.4, zorder=1.5)
        artists += theory_line(ax, time, middle, i, linewidth=1.4)
        ax.annotate(
            f"{name}$_{{{row + 1}{column + 1}}}$", (time[-1], middle[-1]), xytext=(3, 0), textcoords="offset points",
            color=colour, va="center", annotation_clip=False, fontsize=7,
        )  # fmt: skip
    ax.set_xlim(0, time[-1])
    ax.set_xlabel("τ")
    return artists


def scatter(ax: Axes, data: xr.Dataset, shown: int) -> list:
    """Scatter of runs against D with its fitted power, that of the bands, and the mean residual where resolved."""
    dims, artists = data["dim"].values, []
    for q, name in enumerate(data["quantity"].values):
        own = data.sel(quantity=name)
        slope, error = float(own["scatter_slope"]), float(own["scatter_slope_error"])
        artists += simulation_points(
            ax, dims, own["scatter"], own["scatter_error"], q, markersize=4,
            label=f"{name}: D$^{{{slope:.3f}}}$ ± {error:.3f}".replace("-", "−"),
        )  # fmt: skip
        predicted = predicted_scatter(data, str(name), shown)
        if np.isfinite(predicted):
            artists += theory_line(ax, dims, predicted * np.sqrt(shown / dims), q)
        mean, error = own["mean"].values, own["mean_error"].values
        colour = look(q)["color"]
        artists += [
            ax.errorbar(dims, mean, yerr=error, fmt="x", color=colour, markersize=3.5, elinewidth=0.6, zorder=4)
        ]
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.set_xticks([dims[0], shown, dims[-1]], [f"{dim}" for dim in (dims[0], shown, dims[-1])])
    ax.set_xlim(dims[0] / 1.3, dims[-1] * 1.3)
    low, high = ax.get_ylim()
    ax.set_ylim(low / (high / low) ** 0.45, high)  # room for the legend
    ax.set_xlabel("D")
    ax.set_ylabel("chain − flow, root mean square")
    ax.legend(loc="lower left")
    return artists


def predicted_scatter(data: xr.Dataset, name: str, shown: int) -> float:
    """Root mean square deviation of the bands over the records and entries that `scatter` counts; NaN without bands."""
    if f"{name}_deviation" not in data:
        return float("nan")
    own = data[f"{name}_deviation"].values[1:]
    if name == "r":
        own = own[..., *np.triu_indices(own.shape[-1])]
    return float(np.sqrt(np.mean(own**2)))


def numbers(store: Store) -> dict[str, float]:
    """Exponents of the scatter and of the mean residual, and how well the bands hold."""
    data, found = store["bands"], {}
    for name in data["quantity"].values:
        own = data.sel(quantity=name)
        found[f"exponent of the scatter of {name}"] = float(own["scatter_slope"])
        found[f"its standard error, {name}"] = float(own["scatter_slope_error"])
    for name in data["banded"].values:
        own = data.sel(banded=name)
        found[f"share of {name} in the 95 % band"] = float(own["coverage"])
        found[f"measured/predicted scatter of {name}"] = float(own["ratio"])
        found[f"its standard error, scatter of {name}"] = float(own["ratio_error"])
    return found
