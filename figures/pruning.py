"""Risk after heads are removed from a trained layer, excess heads first or specialized heads first."""

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
from matplotlib.ticker import MaxNLocator

from compare import Store
from compare.bayes import ACTIVATIONS
from compare.lines import Line
from figures.bayes import BAYES
from figures.style import DOUBLE, look, simulation_points, style, theory_line
from figures.support import POINTS, title
from sim import MultiHeadAttention, prune_heads, train
from sim.reduced import coordinates
from theory import SingleLocation, Trajectory, bayes_risk
from theory._checks import invalid
from theory.names import parse_prior

START, DATA, FRESH = 1, 2, 3  # purposes of randomness, folded into key(seed) after the activation's number
ORDERS = {"greedy": "least useful first", "worst": "most useful first"}
WIDTHS, SIZES = (2.0, 1.0), (4.5, 2.8)  # of lines and markers: the first order shows around the second


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    prior: str = "one_hot(features=3)"
    activations: tuple[str, ...] = ("softmax", "softmax-1", "B-softmax")
    shares: tuple[str, ...] = ("renormalized", "kept", "kept")  # what becomes of 1/H, for each activation
    heads: int = 6
    length: int = 5
    snr: float = 12.0
    dim: int = 400
    variance: float = 0.1
    learning_rate: float = 4.0
    batch: int = 10
    time: float = 120.0
    bias_rate: float = 5.0
    layers: int = 2  # trained from different starts
    samples: int = 4000  # fresh ones, for the loss
    tolerance: float = 0.01  # of the risk: heads that cost less are redundant
    seed: int = 0

    def check(self) -> None:
        """Refuses what is not known."""
        if len(self.shares) != len(self.activations):
            raise invalid("shares", f"one for each activation ({len(self.activations)})", self.shares)
        for name in self.activations:
            if name not in ACTIVATIONS:
                raise invalid("activations", f"names among {', '.join(ACTIVATIONS)}", name)


SMALL = Configuration()
FULL = Configuration(dim=1000, time=200.0, layers=8, samples=20_000)


def lines(c: Configuration) -> Iterator[Line]:
    """The Bayes risk, and for each activation a trained layer without some of its heads."""
    yield Line("bayes", "Bayes risk", partial(bayes, c))
    for a, name in enumerate(c.activations):
        yield Line(f"pruned_{a}", f"{name}: trained and pruned", partial(pruned, c, a))


def bayes(c: Configuration) -> xr.Dataset:
    """Bayes risk and number of support points."""
    prior = parse_prior(c.prior)
    risk = float(bayes_risk(SingleLocation(c.length, c.snr, prior)))
    return xr.Dataset(
        {
            "bayes": ((), risk, {"long_name": "Bayes risk"}),
            "points": ((), prior.components, {"long_name": "number of support points"}),
        }
    )


def pruned(c: Configuration, index: int) -> xr.Dataset:
    """Risk and loss against heads left, in both orders, of layers trained by SGD; their m as well."""
    name, task = c.activations[index], SingleLocation(c.length, c.snr, parse_prior(c.prior))
    root = jax.random.fold_in(jax.random.key(c.seed), index)
    start, data, fresh = (jax.random.fold_in(root, purpose) for purpose in (START, DATA, FRESH))
    layer = MultiHeadAttention.initial(
        start, heads=c.heads, features=task.features, dim=c.dim, variance=c.variance,
        activation=ACTIVATIONS[name](c.heads), replicas=c.layers,
    )  # fmt: skip
    run = train(
        task, layer, learning_rate=c.learning_rate, time=c.time, batch=c.batch, key=data, bias_rate=c.bias_rate,
        record=2, evaluation=2, progress=False,
    )  # fmt: skip
    found = []
    for i in range(c.layers):
        own = trained_layer(run[i], c.dim)
        shared: dict[str, Any] = {"share": c.shares[index], "samples": c.samples, "key": jax.random.fold_in(fresh, i)}
        both = [prune_heads(task, own, strategy=order, **shared) for order in ORDERS]
        redundant = [each.redundant(c.tolerance) for each in both]
        data = xr.concat([each.to_xarray() for each in both], "order")
        data["redundant"] = ("order", redundant, {"long_name": "heads that can go before the risk has grown"})
        data["m"] = (("head", "feature"), np.asarray(own.order().m), {"long_name": "overlap of head and spike"})
        found.append(data)
    return xr.concat(found, "layer").assign_coords(order=list(ORDERS))


def trained_layer(run: Trajectory, dim: int) -> MultiHeadAttention:
    """A layer with the order parameters and the activation that a run ended with: its loss has the same law."""
    keys = np.zeros((run.order.heads, dim))
    own = coordinates(run.order[-1])
    keys[:, : own.shape[1]] = np.sqrt(dim) * own
    trained, rest = run.activation.split()
    activation = eqx.combine(jax.tree.map(lambda leaf: leaf[-1], trained), rest)
    return MultiHeadAttention(keys.astype(np.float32), features=run.order.features, activation=activation)


def draw(store: Store) -> Figure:
    """A panel for each activation."""
    c = store.configuration
    with style():
        figure = Figure(figsize=(DOUBLE, 2.7), layout="constrained")
        axes = figure.subplots(1, len(c["activations"]), squeeze=False, sharey=True)[0]
        for a, (ax, name) in enumerate(zip(axes, c["activations"], strict=True)):
            pruning(ax, store[f"pruned_{a}"], store["bayes"])
            ax.set_title(f"{name}, 1/H {c['shares'][a]}" if name != "B-softmax" else name)
        axes[0].set_ylim(bottom=0)  # shared: when all is drawn
        axes[0].set_ylabel("risk without training again")
        text = f"{title(c['prior'])}\nL = {c['length']}, ν = {c['snr']:g}"
        axes[0].annotate(text, (0.05, 0.95), xycoords="axes fraction", va="top")
        grey: dict[str, Any] = {"color": "0.3", "markerfacecolor": "white", "markersize": 3.5}
        handles = [
            Line2D([], [], **{**look(i), "marker": "", "linewidth": WIDTHS[i]}, label=text)
            for i, text in enumerate(ORDERS.values())
        ]
        handles += [
            Line2D([], [], linestyle="", marker="o", **grey, label=f"loss at D = {c['dim']}, {c['layers']} layers"),
            Line2D([], [], label="Bayes risk", **BAYES),
            Line2D([], [], label="heads = support points", **POINTS),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def pruning(ax: Axes, data: xr.Dataset, bayes: xr.Dataset) -> list:
    """A line for the risk of each layer in each order, points with error bars for its finite-D loss."""
    artists: list = [ax.axhline(float(bayes["bayes"]), **BAYES), ax.axvline(int(bayes["points"]), **POINTS)]
    for i, order in enumerate(data["order"].values):
        for layer in range(data.sizes["layer"]):
            own = data.sel(order=order).isel(layer=layer)
            artists += theory_line(ax, own["heads_left"], own["risk"], i, linewidth=WIDTHS[i])
            artists += simulation_points(ax, own["heads_left"], own["loss"], own["loss_error"], i, markersize=SIZES[i])
    most = int(data["heads_left"].max())
    ax.set_xlim(most + 0.4, -0.4)  # heads go from left to right
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("heads left")
    return artists


def numbers(store: Store) -> dict[str, float]:
    """Of each activation, means over layers: redundant heads; the risk of all heads, of too few, without the best."""
    c, values = store.configuration, {"Bayes risk": float(store["bayes"]["bayes"])}
    few = max(int(store["bayes"]["points"]) - 1, 0)
    for a, name in enumerate(c["activations"]):
        data = store[f"pruned_{a}"].mean("layer")
        least, most = data.sel(order="greedy"), data.sel(order="worst")
        values[f"{name}: redundant heads"] = float(least["redundant"])
        values[f"{name}: risk"] = float(least["risk"].sel(heads_left=c["heads"]))
        values[f"{name}: risk, {few} left, {ORDERS['greedy']}"] = float(least["risk"].sel(heads_left=few))
        values[f"{name}: risk without the most useful head"] = float(most["risk"].sel(heads_left=c["heads"] - 1))
    return values
