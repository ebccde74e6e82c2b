"""Distance d̃ of tokens left out against L and N, with its bounds and its expectation (docs/limits.md §3)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from compare import Store
from compare.attention import distance_against_length, distance_against_selected
from compare.lines import Line
from figures.attention import EXPECTED, MEASURED, PRINTED, SHARP
from figures.style import COLOURS, DOUBLE, lettered, style
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
from theory.limits import distance_bound, distances, expected_distance

LINES = {  # with the words of the legend
    "distance_bound": (SHARP, "bound, sharp"),
    "distance_bound_printed": (PRINTED, "bound, printed (false)"),
}
BAND: dict[str, Any] = {"color": EXPECTED["color"], "alpha": 0.3, "linewidth": 0.8, "zorder": 1}
RANDOM: dict[str, Any] = {**MEASURED, "color": COLOURS[2], "fmt": "s", "markersize": 2.8}
NAMES = {
    "distance": "cumulative distance d̃ of the N largest weights",
    "distance_bound": "sharp upper bound on d̃",
    "distance_bound_printed": "printed bound on d̃ (false)",
    "expected": "expectation of d̃ over random sets",
    "expected_error": "bound on the error of the expectation",
    "random": "d̃ of a random set",
    "context_norm": "norm ‖s‖ of the selected context",
    "selected_weight": "sum A of the N largest weights",
}


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    selected: int = 5  # N, against L
    counts: tuple[int, ...] = (1, 5, 20, 50, 100, 200, 400, 500)  # N, at the largest L
    dim: int = 64
    shift: float = 0.5  # of every component, before vectors are normalized
    spread: float = 2.0  # standard deviation of logits
    draws: int = 16  # of vectors
    queries: int = 16  # rows for each
    rows: int = 64  # query rows of the encoder
    seed: int = 0

    def check(self) -> None:
        """Every N must leave a token out."""
        if max(self.counts) >= max(self.lengths) or self.selected >= min(self.lengths):
            raise invalid("counts, selected", "numbers below those of the tokens", (self.counts, self.selected))


SMALL, FULL = Configuration(), Configuration(draws=128, queries=64, rows=512)


def lines(c: Configuration) -> Iterator[Line]:
    """Both kinds of vectors and the encoder, against L and against N."""
    encoder = Encoder.load(max(c.lengths))
    shared: dict[str, Any] = {"rows": c.rows, "progress": False}
    options: dict[str, Any] = {"selected": c.selected, "lengths": c.lengths, "truncate": True, **shared}
    against_length = partial(distance_against_length, encoder.model, encoder.text, **options)
    against_selected = partial(distance_against_selected, encoder.attention, counts=c.counts, **shared)
    yield Line(f"{ENCODER}_length", "distances against L, encoder", against_length)
    yield Line(f"{ENCODER}_selected", "distances against N, encoder", against_selected)
    for kind in SYNTHETIC:
        yield Line(f"{kind}_length", f"distances against L, {kind}", partial(_against_length, c, kind))
        yield Line(f"{kind}_selected", f"distances against N, {kind}", partial(_against_selected, c, kind))


def _against_length(c: Configuration, kind: str) -> xr.Dataset:
    parts = [_measured(c, kind, length, (c.selected,)) for length in c.lengths]
    variables = {name: np.concatenate([part[name] for part in parts], axis=1) for name in NAMES}
    return _labelled(variables, "length", c.lengths, "tokens L")


def _against_selected(c: Configuration, kind: str) -> xr.Dataset:
    return _labelled(_measured(c, kind, max(c.lengths), c.counts), "selected", c.counts, "selected tokens N")


def _measured(c: Configuration, kind: str, length: int, counts: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Means over the rows of each draw of vectors, (draws, K)."""
    key = jax.random.fold_in(jax.random.key(c.seed), 2 * length + (kind == ISOTROPIC))
    keys = jax.random.split(jax.random.fold_in(key, len(counts)), 3)
    x = unit_vectors(keys[0], (c.draws, length, c.dim), 0.0 if kind == ISOTROPIC else c.shift)
    weights = jax.nn.softmax(normal_logits(keys[1], (c.draws, c.queries, length), c.spread), axis=-1)
    order = jnp.argsort(jax.random.uniform(keys[2], weights.shape), axis=-1)  # a random set: its first N
    found, expected = distances(weights, x, counts), expected_distance(weights, x, counts)
    random = [distances(weights, x, selected=order < count).sum_of_norms for count in counts]
    of_rows = {
        "distance": found.sum_of_norms,
        "distance_bound": distance_bound(weights, x, counts),
        "distance_bound_printed": distance_bound(weights, x, counts, form="printed"),
        "expected": expected.value,
        "expected_error": expected.error,
        "random": jnp.stack(random, axis=-1),
        "context_norm": found.context_norm,
        "selected_weight": found.weight,
    }
    return {name: np.asarray(values).mean(axis=1) for name, values in of_rows.items()}


def _labelled(variables: dict[str, np.ndarray], x: str, places: tuple[int, ...], text: str) -> xr.Dataset:
    units = {name: "1" if name == "selected_weight" else "norm of x" for name in NAMES}
    data = {name: (("draw", x), values, described(NAMES[name], units[name])) for name, values in variables.items()}
    return xr.Dataset(data).assign_coords({x: (x, list(places), described(text, "tokens"))})


def draw(store: Store) -> Figure:
    """Kinds of vectors beside each other, against L above and against N below."""
    c = store.configuration
    with style():
        figure = Figure(figsize=(DOUBLE, 4.2), layout="constrained")
        axes = figure.subplots(2, 3, sharey="row")
        for column, kind in enumerate(KINDS):
            for row, x in enumerate(("length", "selected")):
                curves(axes[row, column], store[f"{kind}_{x}"])
                if column:
                    axes[row, column].set_ylabel("")
            axes[0, column].set_title(f"{TITLES[kind]}, N = {c['selected']}")
            axes[1, column].set_title(f"{TITLES[kind]}, L = {max(c['lengths'])}")
        lettered(axes.ravel())
        markers = {"linestyle": "", "markerfacecolor": "white", "markersize": 3}
        handles = [
            Line2D([], [], marker="o", color=MEASURED["color"], label="N largest weights", **markers),
            Line2D([], [], marker="s", color=RANDOM["color"], label="random sets", **markers),
            *(Line2D([], [], **own, label=text) for own, text in LINES.values()),
            Patch(**BAND, label="expectation of random sets"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=5)
        text = "a, b, d, e: means over draws, bars: standard errors. c, f: medians over heads, bars: quartiles"
        figure.supxlabel(text, fontsize=6.5)
    return figure


def curves(ax: Axes, data: xr.Dataset) -> list:
    """d̃ against L or N: means over draws with standard errors, or medians over heads with quartiles.

    Bounds are lines; the expectation of random sets is a band, as wide as the bound on its error.
    """
    x = "length" if "length" in data.dims else "selected"
    places = data[x].values
    artists: list = []
    for name, (own, _) in LINES.items():
        artists += ax.plot(places, _middle(data[name]), **own)
    low, high = _middle(data["expected"]), _middle(data["expected"] + data["expected_error"])
    artists.append(ax.fill_between(places, low, high, **BAND))
    for name, own in (("distance", MEASURED), ("random", RANDOM)):
        if name in data:
            middle, low, high = _middle(data[name]), *_bars(data[name])
            artists.append(ax.errorbar(places, middle, yerr=[low, high], linestyle="", **own))
    ax.set_xscale("log", base=2 if x == "length" else 10)
    ax.set_yscale("log")
    shown = places if x == "length" else [place for place in places if place not in (50, 200, 400)]
    ax.set_xticks(shown, [str(place) for place in shown])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_minor_locator(LogLocator(subs=tuple(range(2, 10))))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("tokens L" if x == "length" else "selected tokens N")
    ax.set_ylabel("distance d̃ (norm of x)")
    return artists


def _middle(values: xr.DataArray) -> np.ndarray:
    return (values.mean("draw") if "draw" in values.dims else values.median(("layer", "head"))).values


def _bars(values: xr.DataArray) -> tuple[np.ndarray, np.ndarray]:
    """Down and up: standard errors over draws, or quartiles over heads."""
    if "draw" in values.dims:
        _, error = mean_and_error(values, "draw")
        return error, error
    low, high = (values.quantile(q, ("layer", "head")).values for q in (0.25, 0.75))
    return _middle(values) - low, high - _middle(values)


def numbers(store: Store) -> dict[str, float]:
    """Growth with L, what is left per token when many are selected, and whether bounds and expectation hold."""
    found: dict[str, float] = {}
    groups = list(store.datasets.values())
    for kind in KINDS:
        middle, lengths = _middle(store[f"{kind}_length"]["distance"]), store[f"{kind}_length"]["length"].values
        found[f"exponent of L, {kind}"] = float(np.log(middle[-1] / middle[-2]) / np.log(lengths[-1] / lengths[-2]))
    for kind in KINDS:
        data = store[f"{kind}_selected"]
        length, counts = max(store.configuration["lengths"]), data["selected"].values
        half = int(np.argmin(np.abs(counts - length / 2)))
        found[f"d̃/(L−N) at N = {counts[half]}, {kind}"] = float(
            _middle(data["distance"])[half] / (length - counts[half])
        )
    for name, text in (("distance_bound", "sharp"), ("distance_bound_printed", "printed")):
        found[f"d̃ over {text} bound, most"] = max(float((data["distance"] / data[name]).max()) for data in groups)
    scores = [_scores(store[f"{kind}_{x}"]) for kind in SYNTHETIC for x in ("length", "selected")]
    return found | {
        "random sets outside their expectation, most standard errors": float(np.nanmax(np.concatenate(scores)))
    }


def _scores(data: xr.Dataset) -> np.ndarray:
    """How far mean d̃ of random sets is outside [value, value + error] of the expectation, in standard errors."""
    mean, error = mean_and_error(data["random"] - data["expected"], "draw")
    return np.maximum(0, np.maximum(-mean, mean - data["expected_error"].mean("draw").values)) / error
