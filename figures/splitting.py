"""Hierarchical splitting: heads in two groups along the strongest feature, each again along the next; an excursion.

Above, the overlaps of every head with each feature: flow and exact chain from one random start. Below, a start with
more heads on one side of the only feature than on the other: the uneven split is a saddle as well, which a head leaves
by turning back, crossing zero and joining the other side (docs/model.md §14: an excursion).
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
from figures.style import DOUBLE, NOISE, look, style, theory_line
from sim import train_reduced
from sim._lanes import repeated
from theory import OrderParameters, SingleLocation, Trajectory, gradient_flow
from theory._checks import invalid, positive, whole
from theory.names import parse_activation, parse_prior

_START, _DATA = 1, 2  # purposes of randomness
SINGLE: dict[str, Any] = {"linewidth": 0.5, "alpha": 0.45, "zorder": 1.5}  # runs of the chain
CROSSING: dict[str, Any] = {"marker": "o", "color": "0.2", "markersize": 3.5, "markerfacecolor": "white"}
PARTS = ("tree", "excursion")


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    tree_prior: str = "sign_flips(mean=[0.0, 0.0], amplitude=[1.0, 0.8])"
    tree_length: int = 10
    tree_snr: float = 4.0
    tree_heads: int = 4
    tree_time: float = 400.0
    excursion_prior: str = "sign_flips(mean=[0.0], amplitude=[1.0])"
    excursion_length: int = 4
    excursion_snr: float = 4.0
    excursion_start: tuple[float, ...] = (1.05, 1.0, 0.9, -2.95)  # m of the heads, in units of √(r_0/D)
    excursion_time: float = 400.0
    activation: str = "Softmax(temperature=1.0)"
    dim: int = 500
    replicas: int = 8
    variance: float = 0.25
    learning_rate: float = 8.0
    batch: int = 16
    loss: str = "limit"
    records: int = 121
    seed: int = 0

    def check(self) -> None:
        """Refuses wrong values by name, before anything is computed or written."""
        whole("replicas", self.replicas, 2)
        whole("records", self.records, 4)
        whole("tree_heads", self.tree_heads, 2)
        positive("variance", self.variance, 0)
        if len(self.excursion_start) < 3:
            raise invalid("excursion_start", "at least three heads, for an uneven split", self.excursion_start)


SMALL = Configuration()
FULL = Configuration(
    tree_prior="sign_flips(mean=[0.0, 0.0, 0.0], amplitude=[1.0, 0.8, 0.6])", tree_heads=8, tree_time=600.0, dim=10_000,
    excursion_time=900.0, replicas=32, records=301,
)  # fmt: skip


def lines(c: Configuration) -> Iterator[Line]:
    """For the tree and the excursion: the flow, and runs of the chain from the same start."""
    for part in PARTS:
        yield Line(f"{part}_flow", f"flow, {part}", partial(_flow, c, part))
        yield Line(f"{part}_runs", f"{c.replicas} runs of the chain, {part}", partial(_runs, c, part))


def _task(c: Configuration, part: str) -> SingleLocation:
    length, snr, prior = (getattr(c, f"{part}_{name}") for name in ("length", "snr", "prior"))
    return SingleLocation(length, snr, parse_prior(prior))


def _order(c: Configuration, part: str) -> OrderParameters:
    """The start that flow and runs share."""
    if part == "excursion":
        m = np.sqrt(c.variance / c.dim) * np.asarray(c.excursion_start)[:, None]
        return OrderParameters(m, m @ m.T + c.variance * np.eye(len(m)))
    key = jax.random.fold_in(jax.random.key(c.seed), _START)
    features = _task(c, part).features
    return OrderParameters.initial(key, heads=c.tree_heads, features=features, dim=c.dim, variance=c.variance)


def _described(c: Configuration, part: str, run: Trajectory) -> xr.Dataset:
    """The trajectory, and when its features split and heads change sides."""
    stages = stage_times(run)
    names = ("stage_time", "excursion_replica", "excursion_head", "excursion_feature", "excursion_zero",
             "excursion_arrived", "plus", "minus")  # fmt: skip
    measured = stages.to_xarray()[list(names)]
    if run.replicas is None:
        measured = measured.isel(replica=0)
    return run.to_xarray().merge(measured.drop_vars("time"), compat="override", join="override")


def _flow(c: Configuration, part: str) -> xr.Dataset:
    run = gradient_flow(
        _task(c, part), parse_activation(c.activation), _order(c, part),
        np.linspace(0, getattr(c, f"{part}_time"), c.records), step_size=c.learning_rate / c.batch, progress=False,
        corrector_points=512, tolerance=1e-5,
    )  # fmt: skip
    return _described(c, part, run)


def _runs(c: Configuration, part: str) -> xr.Dataset:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(c.seed), _DATA), PARTS.index(part))
    run = train_reduced(
        _task(c, part), parse_activation(c.activation), repeated(_order(c, part), c.replicas), dim=c.dim,
        learning_rate=c.learning_rate, batch=c.batch, time=getattr(c, f"{part}_time"), key=key, record=c.records,
        loss=c.loss, evaluation=2, progress=False, throw=False,
    )  # fmt: skip
    return _described(c, part, run)


def draw(store: Store) -> Figure:
    """Above a panel for each feature of the tree, below the excursion."""
    c, features = store.configuration, store["tree_flow"].sizes["feature"]
    with style():
        figure = Figure(figsize=(DOUBLE, 4.2), layout="constrained")
        grid = figure.add_gridspec(2, features)
        for feature in range(features):
            ax = figure.add_subplot(grid[0, feature])
            overlaps(ax, store, "tree", feature)
            ax.set_title(f"feature {feature + 1}, {_facts(c, 'tree', feature)}")
        ax = figure.add_subplot(grid[1, :])
        overlaps(ax, store, "excursion", 0)
        crossings(ax, store)
        start = ", ".join(f"{x:g}" for x in c["excursion_start"]).replace("-", "−")
        ax.set_title(
            f"one feature, {_facts(c, 'excursion', 0)}, from an uneven start m = ({start}) " + r"$\sqrt{r_0/D}$"
        )
        figure.legend(handles=_handles(store), loc="outside lower center", ncols=5)
    return figure


def _facts(c: dict[str, Any], part: str, feature: int) -> str:
    variance = np.asarray(parse_prior(c[f"{part}_prior"]).variance())[feature]
    return f"Var θ = {variance:.3g}, L = {c[f'{part}_length']}, ν = {c[f'{part}_snr']:g}"


def _handles(store: Store) -> list[Any]:
    c = store.configuration
    heads = max(store[f"{part}_flow"].sizes["head"] for part in PARTS)
    return [
        *(Line2D([], [], **{**look(h), "marker": ""}, label=f"head {h + 1}, flow") for h in range(heads)),
        Line2D([], [], color="0.3", **SINGLE, label=f"{c['replicas']} runs of the chain, D = {c['dim']}"),
        Patch(facecolor=NOISE, linewidth=0, label=r"$\pm\sqrt{r_0/D}$"),
        Line2D([], [], linestyle="", **CROSSING, label="settled heads of the chain cross 0"),
    ]  # fmt: skip


def overlaps(ax: Axes, store: Store, part: str, feature: int) -> list:
    """m_hf of every head along one feature: the flow, single runs faint, and the scale of a random start."""
    c, flow, runs = store.configuration, store[f"{part}_flow"], store[f"{part}_runs"]
    floor = np.sqrt(c["variance"] / c["dim"])
    artists: list[Any] = [ax.axhspan(-floor, floor, color=NOISE, linewidth=0, zorder=0)]
    m = runs["m"].isel(feature=feature).transpose("head", "time", "replica").values
    for h in range(flow.sizes["head"]):
        artists += theory_line(ax, runs["time"], m[h], h, **SINGLE)
        artists += theory_line(ax, flow["time"], flow["m"].isel(head=h, feature=feature), h)
    ax.set_xlim(0, float(flow["time"][-1]))
    ax.set_xlabel("τ")
    ax.set_ylabel(f"$m_{{h{feature + 1}}}$")
    return artists


def crossings(ax: Axes, store: Store) -> list:
    """Where heads of the runs went through 0 on their way to the other side, on the line m = 0."""
    found = zeros(store["excursion_runs"])
    options: dict[str, Any] = {"linestyle": "", "zorder": 4, **CROSSING}
    return [ax.axhline(0, color="black", linewidth=0.5, zorder=1), *ax.plot(found, np.zeros(len(found)), **options)]


def zeros(data: xr.Dataset) -> np.ndarray:
    """When heads of finished excursions went through 0."""
    return data["excursion_zero"].values[np.isfinite(data["excursion_arrived"].values)]


def last_crossings(data: xr.Dataset) -> np.ndarray:
    """(replica,) when the last head went through 0 along the first feature (linear between records), NaN if none did.

    Of all runs, also of those whose noise moved a head over before it had settled on a side.
    """
    m = np.atleast_3d(data["m"].isel(feature=0).transpose("time", "head", ...).values)
    before, after = m[:-1], m[1:]
    share = np.divide(before, before - after, where=before * after < 0, out=np.full(before.shape, np.nan))
    time = data["time"].values
    crossed = time[:-1, None, None] + share * np.diff(time)[:, None, None]
    latest = np.max(np.where(np.isnan(crossed), -np.inf, crossed), axis=(0, 1))
    return np.where(np.isfinite(latest), latest, np.nan)


def patterns(m: np.ndarray) -> np.ndarray:
    """(..., H) the sides of heads at all features as one number each, from overlaps (..., H, F)."""
    return np.sum((m > 0) * 2 ** np.arange(m.shape[-1]), axis=-1)


def numbers(store: Store) -> dict[str, float]:
    """Groups at the end, stage times and crossings, of the flow and of the runs."""
    flow, runs = store["tree_flow"], store["tree_runs"]
    ended = patterns(flow["m"].isel(time=-1).values)
    own = patterns(runs["m"].isel(time=-1).values)
    found = {
        "groups of heads at the end, flow": float(len(np.unique(ended))),
        "the same, mean of the runs": float(np.mean([len(np.unique(one)) for one in own])),
    }
    for f, time in enumerate(flow["stage_time"].values):
        seen = runs["stage_time"].values[:, f]
        found[f"stage time, feature {f + 1}, flow"] = float(time)
        found[f"stage time, feature {f + 1}, median of the runs"] = float(np.median(seen))
        finite = seen[np.isfinite(seen)]
        found[f"stage time, feature {f + 1}, its scatter"] = (
            float(np.std(finite, ddof=1)) if len(finite) > 1 else np.nan
        )
    flow_last, last = (last_crossings(store[f"excursion_{name}"]) for name in ("flow", "runs"))
    crossed = last[np.isfinite(last)]
    plus = np.sum(store["excursion_runs"]["m"].isel(time=-1).values > 0, axis=(1, 2))
    found["last crossing of 0, flow"] = float(flow_last[0])
    found["the same, median of the runs"] = float(np.median(crossed)) if len(crossed) else np.nan
    found["its scatter"] = float(crossed.std(ddof=1)) if len(crossed) > 1 else np.nan
    found["excursions of settled heads in the runs"] = float(len(zeros(store["excursion_runs"])))
    found["runs that end even"] = float(np.sum(2 * plus == store["excursion_runs"].sizes["head"]))
    return found
