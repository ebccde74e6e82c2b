"""Fraction N_s/N of selected tokens that can be told apart, against N (docs/limits.md §4)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from compare import Store
from compare.attention import separability_against_selected
from compare.lines import Line
from figures.attention import PLATEAU
from figures.style import COLOURS, DOUBLE, NOISE, lettered, look, simulation_points, style, theory_line
from figures.synthetic import (
    ENCODER,
    ISOTROPIC,
    KINDS,
    SYNTHETIC,
    TITLES,
    Encoder,
    described,
    mean_and_error,
    normal_logits,
    unit_vectors,
)
from theory._checks import invalid
from theory.limits import separability, separability_bounds

LEAST = 16  # N from which the plateau is reported
HEADS = ("layer", "head")
NAMES = {
    "distinguishable": "fraction N_s/N of distinguishable tokens",
    "in_ball": "fraction of selected tokens in a ball whose radius does not depend on x",
    "radius": "radius r, distance of the nearest token left out",
    "lower": "sharp lower bound on the fraction in the ball, x uniform on a sphere",
    "upper": "sharp upper bound on the fraction in the ball, x uniform on a sphere",
    "limit": "fraction in the ball, x uniform on a sphere, d → ∞",
}
BOUND: dict[str, Any] = {"linestyle": (0, (3, 1.5)), "linewidth": 0.8, "zorder": 1.5}
PRINTED: dict[str, Any] = {"linestyle": (0, (1, 1)), "linewidth": 1.0, "color": COLOURS[3]}


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    length: int = 512
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    dim: int = 64
    shift: float = 0.5  # of every component, before vectors are normalized
    spreads: tuple[float, ...] = (1.5, 3.0)  # standard deviations of logits
    draws: int = 32  # of vectors
    queries: int = 8  # rows for each
    rows: int = 64  # query rows of the encoder
    seed: int = 0

    def check(self) -> None:
        """Every N must leave a token out, and one belong to the plateau."""
        if max(self.counts) >= self.length or max(self.counts) < LEAST:
            raise invalid("counts", f"numbers below {self.length}, the largest at least {LEAST}", self.counts)


SMALL, FULL = Configuration(), Configuration(draws=256, queries=32, rows=512)


def lines(c: Configuration) -> Iterator[Line]:
    """The encoder, and both kinds of vectors."""
    encoder = Encoder.load(c.length)
    options: dict[str, Any] = {"counts": c.counts, "rows": c.rows, "progress": False}
    yield Line(ENCODER, "N_s/N, encoder", partial(separability_against_selected, encoder.attention, **options))
    for kind in SYNTHETIC:
        yield Line(kind, f"N_s/N, {kind}", partial(_synthetic, c, kind))


def _synthetic(c: Configuration, kind: str) -> xr.Dataset:
    """Means over the rows of each draw of vectors, at each spread of logits."""
    parts = []
    for i, spread in enumerate(c.spreads):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(c.seed), 2 * i + (kind == ISOTROPIC)), 2)
        x = unit_vectors(keys[0], (c.draws, c.length, c.dim), 0.0 if kind == ISOTROPIC else c.shift)
        weights = jax.nn.softmax(normal_logits(keys[1], (c.draws, c.queries, c.length), spread), axis=-1)
        found = separability(weights, x, c.counts)
        # a radius of the same law that does not depend on x: what the bounds speak of
        radius = separability(weights, jnp.roll(x, 1, axis=0), c.counts).radius
        lower, upper = separability_bounds(weights, radius, c.counts, dim=c.dim)
        limit, _ = separability_bounds(weights, radius, c.counts, form="limit")
        ball = jnp.stack([in_ball(weights, x, radius[..., k], count) for k, count in enumerate(c.counts)], axis=-1)
        values = (found.fraction, ball, found.radius, lower, upper, limit)
        parts.append([np.asarray(value).mean(axis=1) for value in values])
    variables = {
        name: (
            ("spread", "draw", "selected"),
            np.stack(columns),
            described(NAMES[name], "norm of x" if name == "radius" else "1"),
        )
        for name, columns in zip(NAMES, zip(*parts, strict=True), strict=True)
    }
    return xr.Dataset(variables).assign_coords(
        spread=("spread", list(c.spreads), described("standard deviation of logits")),
        selected=("selected", list(c.counts), described("selected tokens N", "tokens")),
    )


def in_ball(
    weights: Float[Array, "S Q L"], x: Float[Array, "S L d"], radius: Float[Array, "S Q"], count: int
) -> Float[Array, "S Q"]:
    """Fraction of the N largest weights' y_i = α_i x_i no further than r from their sum."""
    largest, order = jax.lax.top_k(weights, count)
    y = largest[..., None] * jax.vmap(lambda own, places: own[places])(x, order)
    distance = jnp.linalg.norm(jnp.sum(y, axis=2, keepdims=True) - y, axis=-1)
    return jnp.mean(distance <= radius[..., None], axis=-1)


def draw(store: Store) -> Figure:
    """Isotropic vectors, vectors with a common mean, and the encoder's heads."""
    c = store.configuration
    with style():
        figure = Figure(figsize=(DOUBLE, 2.8), layout="constrained")
        axes = figure.subplots(1, 3, sharey=True)
        for ax, kind in zip(axes, KINDS, strict=True):
            (heads if kind == ENCODER else curves)(ax, store[kind])
            _axes(ax, np.array(c["counts"]))
            ax.set_title(f"{TITLES[kind]}, L = {c['length']}")
        axes[0].set_ylabel("distinguishable N$_s$/N")
        lettered(axes)
        grey: dict[str, Any] = {"color": "0.3", "linestyle": "", "markersize": 3.5}
        handles = [
            *(
                Line2D([], [], color=look(i)["color"], marker=look(i)["marker"], linestyle="", markersize=3,
                       markerfacecolor="white", label=f"logits N(0, {spread:g}²)")
                for i, spread in enumerate(c["spreads"])
            ),
            Line2D([], [], **grey, marker="x", label="in a ball of independent r"),
            Line2D([], [], color="0.3", label="the same, d → ∞"),
            Line2D([], [], color="0.3", **BOUND, label="sharp bounds, uniform x"),
            Line2D([], [], **PRINTED, label="upper bound as printed (false)"),
            Line2D([], [], color="black", marker="o", linestyle="", markerfacecolor="white", markersize=3,
                   label="heads, median and quartiles"),
            Patch(color=NOISE, alpha=0.5, linewidth=0, label="reported, GPT-2"),
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure


def curves(ax: Axes, data: xr.Dataset) -> list:
    """Random rows: N_s/N and the fraction in a ball of independent radius, means over draws; bounds and d → ∞."""
    artists: list = []
    places = data["selected"].values
    for i in range(data.sizes["spread"]):
        own = data.isel(spread=i)
        mean, error = own.mean("draw"), own.std("draw", ddof=1) / np.sqrt(own.sizes["draw"])
        artists += theory_line(ax, places, mean["limit"], i, linestyle="-")
        artists += [theory_line(ax, places, mean[side], i, **BOUND)[0] for side in ("lower", "upper")]
        artists += simulation_points(ax, places, mean["distinguishable"], error["distinguishable"], i, markersize=3.2)
        artists += simulation_points(ax, places, mean["in_ball"], error["in_ball"], i, fmt="x", markersize=3)
    return artists


def heads(ax: Axes, data: xr.Dataset) -> list:
    """The encoder: medians and quartiles over heads, medians of the bounds."""
    places = data["selected"].values
    middle = data.median(HEADS)
    low, high = (data["distinguishable"].quantile(q, HEADS).values for q in (0.25, 0.75))
    value = middle["distinguishable"].values
    return [
        *(ax.plot(places, middle[side], color="black", **BOUND)[0] for side in ("lower", "upper")),
        *ax.plot(places, middle["upper_printed"], **PRINTED),
        ax.errorbar(
            places, value, yerr=[value - low, high - value], fmt="o", color="black", markerfacecolor="white",
            markersize=3.2, markeredgewidth=0.6, elinewidth=0.6, zorder=3,
        ),
    ]  # fmt: skip


def _axes(ax: Axes, counts: np.ndarray) -> None:
    ax.axhspan(*PLATEAU, color=NOISE, alpha=0.5, linewidth=0, zorder=0)
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.set_ylim(0, 1.05)
    ax.set_xlabel("selected tokens N")


def numbers(store: Store) -> dict[str, float]:
    """The plateau of each, and how far the ball's fraction is from its bounds."""
    found: dict[str, float] = {}
    for kind in SYNTHETIC:
        data = store[kind]
        for i, spread in enumerate(data["spread"].values):
            own = _plateau(data.isel(spread=i))
            found[f"N_s/N, N ≥ {LEAST}, {kind}, spread {spread:g}"] = float(own["distinguishable"].mean())
    measured, printed = store[ENCODER]["distinguishable"], store[ENCODER]["upper_printed"]
    own = _plateau(store[ENCODER])["distinguishable"]
    found[f"N_s/N, N ≥ {LEAST}, encoder, median"] = float(own.median(HEADS).mean())
    found[f"N_s/N, N ≥ {LEAST}, encoder, mean"] = float(own.mean())
    found["heads within what is reported"] = float(((own >= PLATEAU[0]) & (own <= PLATEAU[1])).mean())
    found["heads above the printed upper bound, N = 1"] = float((measured > printed).isel(selected=0).mean())
    data = store[ISOTROPIC]
    off = {"sharp bounds": ("lower", "upper"), "limit d → ∞": ("limit", "limit")}
    for text, sides in off.items():
        scores = _scores(data["in_ball"], *(data[side] for side in sides))
        found[f"isotropic, in the ball, off the {text}, most standard errors"] = float(scores.max())
    return found


def _plateau(data: xr.Dataset) -> xr.Dataset:
    return data.sel(selected=data["selected"] >= LEAST)


def _scores(values: xr.DataArray, lower: xr.DataArray, upper: xr.DataArray) -> np.ndarray:
    """How far means over draws are outside their bounds, in standard errors; 0 where it is rounding."""
    worst = []
    for side in (lower - values, values - upper):
        mean, error = mean_and_error(side, "draw")
        worst.append(np.where(mean > 1e-12, mean / np.maximum(error, 1e-300), 0))
    return np.maximum(*worst)
