"""Critical N, from which the test of heads' distances sees no difference, against L (docs/limits.md §3, §6)."""

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
from matplotlib.ticker import FuncFormatter

from compare import Store
from compare.attention import critical_against_length
from compare.lines import Line
from figures.attention import REPORTED_RATIO
from figures.style import DOUBLE, lettered, look, simulation_points, style, theory_line
from figures.synthetic import ENCODER, Encoder, described, mean_and_error, normal_logits, unit_vectors
from theory._checks import invalid
from theory.limits import critical_count, ks_p_value

SHARP = f"{ENCODER}_sharp"
BAND: dict[str, Any] = {"alpha": 0.2, "linewidth": 0, "zorder": 1}  # standard error of what is sampled at d → ∞


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    shifts: tuple[float, ...] = (0.0, 0.15, 0.5)  # of every component, before vectors are normalized
    dim: int = 64
    heads: int = 72
    spreads: tuple[float, float] = (1.0, 3.0)  # standard deviation of logits, from the first head to the last
    queries: int = 8  # rows of each head
    draws: int = 4
    rows: int = 64  # query rows of the encoder
    level: float = 0.01
    seed: int = 0

    def check(self) -> None:
        """Samples of so few heads must be able to differ."""
        if not np.isfinite(critical_statistic(self.heads, self.level)):
            raise invalid("heads", f"enough to differ at level {self.level}", self.heads)


SMALL, FULL = Configuration(), Configuration(queries=64, draws=16, rows=512)


def lines(c: Configuration) -> Iterator[Line]:
    """The encoder, with both expectations, and heads made at random with vectors of each shift."""
    encoder = Encoder.load(max(c.lengths))
    options: dict[str, Any] = {"lengths": c.lengths, "level": c.level, "rows": c.rows, "truncate": True}
    search = partial(critical_against_length, encoder.model, encoder.text, progress=False, **options)
    yield Line(ENCODER, "critical N, encoder", search)
    yield Line(SHARP, "critical N, encoder, expectation of random sets", partial(search, form="sharp"))
    for i, shift in enumerate(c.shifts):
        yield Line(f"shift_{i}", f"critical N, shift {shift:g}", partial(_synthetic, c, i))


def _synthetic(c: Configuration, index: int) -> xr.Dataset:
    shift = c.shifts[index]
    counts, limit = (np.full((c.draws, len(c.lengths)), np.nan) for _ in range(2))
    statistic = np.full((c.draws, max(c.lengths) - 1), np.nan)
    spreads = np.linspace(*c.spreads, c.heads)[:, None, None]
    for draw, place in np.ndindex(counts.shape):
        length = c.lengths[place]
        keys = jax.random.split(jax.random.fold_in(jax.random.key(c.seed), (index * 1000 + draw) * 1000 + place), 3)
        x = unit_vectors(keys[0], (length, c.dim), shift)
        for found, key, vectors in ((counts, keys[1], x), (limit, keys[2], _large(length, shift))):
            weights = jax.nn.softmax(normal_logits(key, (c.heads, c.queries, length), spreads), axis=-1)
            one = critical_count(weights, vectors, level=c.level)
            found[draw, place] = np.nan if one.count is None else one.count
            if found is counts and length == max(c.lengths):
                statistic[draw, : len(one.statistic)] = one.statistic
    both = ("draw", "length")
    data = xr.Dataset(
        {
            "critical_count": (both, counts, described(f"critical N, d = {c.dim}", "tokens")),
            "limit": (both, limit, described("critical N, d → ∞", "tokens")),
            "statistic": (
                ("draw", "selected"), statistic, described("Kolmogorov–Smirnov statistic at the largest L"),
            ),
        }
    )  # fmt: skip
    return data.assign_coords(
        length=("length", list(c.lengths), described("tokens L", "tokens")),
        selected=("selected", np.arange(1, max(c.lengths)), described("selected tokens N", "tokens")),
    )


def _large(length: int, shift: float) -> Float[Array, "L d"]:
    """Vectors with the products x_i·x_j = shift²/(1 + shift²) that d → ∞ gives."""
    product = shift**2 / (1 + shift**2)
    own = jnp.sqrt(1 - product) * jnp.eye(length)
    return jnp.concatenate([jnp.full((length, 1), jnp.sqrt(product)), own], axis=1)


def critical_statistic(heads: int, level: float) -> float:
    """The least statistic that is a difference; NaN if none is."""
    values = np.arange(heads + 1) / heads
    differ = np.flatnonzero(ks_p_value(values, heads, heads) < level)
    return float(values[differ[0]]) if differ.size else np.nan


def draw(store: Store) -> Figure:
    """Critical N over L against L, and the statistic against N at the largest L."""
    c = store.configuration
    with style():
        figure = Figure(figsize=(DOUBLE, 3.1), layout="constrained")
        ratio, statistic = figure.subplots(1, 2)
        ratios(ratio, _shifts(store), store[ENCODER], store[SHARP])
        statistics(statistic, _shifts(store), store[ENCODER], critical_statistic(c["heads"], c["level"]))
        ratio.set_title(f"Kolmogorov–Smirnov, level {c['level']:g}")
        statistic.set_title(f"L = {max(c['lengths'])}")
        lettered((ratio, statistic))
        grey = {"color": "0.3", "markersize": 3, "linestyle": ""}
        handles = [
            *(
                Line2D([], [], **{**look(i), "linestyle": "-"}, markerfacecolor="white", markersize=3, label=text)
                for i, text in enumerate(f"shift {shift:g}{'' if shift else ' (isotropic)'}" for shift in c["shifts"])
            ),
            Line2D([], [], color="0.3", label=f"d → ∞ (a), d = {c['dim']} (b)"),
            Line2D([], [], **{**grey, "color": "black"}, marker="P", label="MiniLM, all heads"),
            Line2D([], [], **grey, marker="_", label="MiniLM, heads of one layer"),
            Line2D([], [], **{**grey, "color": "black"}, marker="D", markerfacecolor="white",
                   label="the same against random sets"),
            Line2D([], [], color="0.35", linestyle=(0, (1, 1)), label="0.06 L (reported, GPT-2)"),
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure


def ratios(ax: Axes, shifts: list[xr.Dataset], encoder: xr.Dataset, sharp: xr.Dataset) -> list:
    """Critical N over L: means over draws with standard errors, d → ∞ as lines; the encoder's heads."""
    artists = []
    lengths = encoder["length"].values
    for i, data in enumerate(shifts):
        limit, error = _ratio(data["limit"])
        artists += theory_line(ax, lengths, limit, i, linestyle="-")
        artists.append(ax.fill_between(lengths, limit - error, limit + error, color=look(i)["color"], **BAND))
        artists += simulation_points(ax, lengths, *_ratio(data["critical_count"]), i, markersize=3.2)
    black: dict[str, Any] = {"color": "black", "zorder": 4}
    artists += ax.plot(lengths, encoder["ratio"], marker="P", markersize=3.5, linewidth=0.5, linestyle=":", **black)
    artists += ax.plot(
        lengths, sharp["ratio"], marker="D", markersize=3, linewidth=0.5, linestyle=":", markerfacecolor="white",
        **black,
    )  # fmt: skip
    layers = encoder["layer_critical_count"].transpose("length", "layer").values / lengths[:, None]
    artists += ax.plot(lengths, layers, marker="_", markersize=4, color="0.5", linestyle="", zorder=1)
    artists.append(ax.axhline(REPORTED_RATIO, color="0.35", linestyle=(0, (1, 1))))
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xlabel("tokens L")
    ax.set_ylabel("critical N/L")
    return artists


def statistics(ax: Axes, shifts: list[xr.Dataset], encoder: xr.Dataset, threshold: float) -> list:
    """The statistic against N/L at the largest L, up to where the search ended: means over draws, and the encoder."""
    artists = []
    length = int(encoder["length"][-1])
    for i, data in enumerate(shifts):
        values = data["statistic"].mean("draw", skipna=False).values
        artists += theory_line(ax, data["selected"].values / length, values, i, linestyle="-")
    own = encoder["statistic"].isel(length=-1)
    artists += ax.plot(encoder["selected"].values / length, own, color="black", linewidth=1.4, linestyle=(0, (4, 1)))
    artists.append(ax.axhspan(0, threshold, color="#E2E2E2", linewidth=0, zorder=0))
    ax.annotate("no difference seen", (1 / length, 0.2 * threshold), va="center")
    middle = len(own) // 16
    at = float(encoder["selected"][middle]) / length, float(own[middle])
    ax.annotate("MiniLM", at, xytext=(4, 4), textcoords="offset points")
    ax.set_xscale("log")
    ax.set_xlim(0.8 / length, 1.1)
    ax.set_ylim(0, 1.05)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xlabel("selected N/L")
    ax.set_ylabel("Kolmogorov–Smirnov statistic")
    return artists


def _ratio(counts: xr.DataArray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of N/L over draws, and its standard error."""
    return mean_and_error(counts / counts["length"], "draw")


def numbers(store: Store) -> dict[str, float]:
    """Critical N over L at the largest L, how that of the encoder grows, and the distance from d → ∞."""
    c = store.configuration
    found: dict[str, float] = {}
    for shift, data in zip(c["shifts"], _shifts(store), strict=True):
        name = f"N/L, shift {shift:g}"
        found[name] = float(_ratio(data["critical_count"])[0][-1])
        found[f"{name}, d → ∞"] = float(_ratio(data["limit"])[0][-1])
    encoder, lengths = store[ENCODER], np.log(c["lengths"])
    found["N/L, encoder"] = float(encoder["ratio"][-1])
    found["N/L, encoder, least of all L"] = float(encoder["ratio"].min())
    found["N/L, encoder, random sets"] = float(store[SHARP]["ratio"][-1])
    found["exponent of L, encoder"] = float(np.polyfit(lengths, np.log(encoder["critical_count"].values), 1)[0])
    return found | {"least statistic that is a difference": critical_statistic(c["heads"], c["level"])}


def _shifts(store: Store) -> list[xr.Dataset]:
    return [store[f"shift_{i}"] for i in range(len(store.configuration["shifts"]))]
