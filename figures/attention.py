"""Attention of a transformer: heat maps over layers and heads, and the five experiments, from stored Datasets alone."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from compare import Store
from figures.style import COLOURS, DOUBLE, NOISE, lettered, look, style
from theory._checks import invalid

MAPPED = {  # quantities of the figure of heads: short title, logarithmic colours, fixed range
    "effective_support": ("effective support (tokens)", True, None),
    "top_weight": ("largest weight", False, None),
    "distinguishable": ("N$_s$/N", False, (0.0, 1.0)),
    "distance_per_token": ("d̃/(L−N)", False, None),
    "selected_weight": ("weight A of the N largest", False, (0.0, 1.0)),
    "jacobian_norm": ("‖J‖₂", True, None),
}
COLUMNS = {  # columns of the table, quartiles over heads: title, digits
    "entropy": ("entropy (nat)", ".2f"),
    "effective_support": ("e^entropy", ".3g"),
    "top_weight": ("top weight", ".2f"),
    "distance_per_token": ("d̃/(L−N)", ".2f"),
    "distinguishable": ("N_s/N", ".2f"),
    "jacobian_norm": ("‖J‖", ".2g"),
}
EXPERIMENTS = {
    "distance_against_length",
    "distance_against_selected",
    "critical_against_length",
    "separability_against_selected",
    "gradient_against_temperature",
}
PLATEAU = (0.7, 0.85)  # of N_s/N beyond N = 16, as reported for GPT-2
REPORTED_RATIO = 0.06  # critical N over L, likewise
SHARP: dict[str, Any] = {"color": COLOURS[1], "linestyle": "-"}
PRINTED: dict[str, Any] = {"color": COLOURS[1], "linestyle": (0, (4, 1.5))}
EXPECTED: dict[str, Any] = {"color": COLOURS[2], "linestyle": "-"}
EXPECTED_PRINTED: dict[str, Any] = {"color": COLOURS[2], "linestyle": (0, (4, 1.5))}
MEASURED: dict[str, Any] = {
    "color": COLOURS[0], "fmt": "o", "markerfacecolor": "white", "markeredgewidth": 0.6, "elinewidth": 0.6, "zorder": 3,
}  # fmt: skip
HEADS = ("layer", "head")


def heat_map(ax: Axes, report: xr.Dataset, quantity: str, *, log: bool = False, limits: Any = None) -> list[Any]:
    """A quantity of every head, layers upwards; saturated heads have a dot where the quantity is N_s/N.

    Args:
        ax: where to draw.
        report: of `compare.attention_report`.
        quantity: one of its variables over layer and head.
        log: whether colours are logarithmic.
        limits: least and greatest value of the colours; those of the data unless given.

    Returns:
        The mesh, the colour bar, and the dots.

    Raises:
        ValueError: a quantity that is not there.
    """
    known = [str(name) for name, values in report.items() if values.dims == HEADS]
    if quantity not in known:
        raise invalid("quantity", f"one of {', '.join(known)}", repr(quantity))
    values = report[quantity].values.astype(float)
    low, high = (np.nanmin(values), np.nanmax(values)) if limits is None else limits
    norm = LogNorm(low, high) if log and low > 0 else Normalize(low, high)
    heads, layers = report["head"].values, report["layer"].values
    mesh = ax.pcolormesh(heads, layers, values, cmap="viridis", norm=norm, shading="nearest")
    artists: list[Any] = [mesh]
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=18)
    if isinstance(norm, LogNorm):
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        bar.ax.yaxis.set_major_formatter(_PLAIN)
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
    artists.append(bar)
    if quantity == "distinguishable":
        rows, columns = np.nonzero(report["saturated"].values)
        artists += ax.plot(
            heads[columns], layers[rows], linestyle="", marker=".", markersize=2.5, color="white",
            markeredgecolor="black", markeredgewidth=0.3,
        )  # fmt: skip
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(7, integer=True))
    ax.tick_params(which="both", direction="out", top=False, right=False)
    return artists


def distance_curves(ax: Axes, data: xr.Dataset) -> list[Any]:
    """d̃ against L or N: medians over heads, measured with quartiles, bounds and expectations as lines (log–log)."""
    x = "length" if "length" in data.dims else "selected"
    places = data[x].values
    artists: list[Any] = []
    for name, own in (
        ("distance_bound", SHARP),
        ("distance_bound_printed", PRINTED),
        ("expected", EXPECTED),
        ("expected_printed", EXPECTED_PRINTED),
    ):
        artists += ax.plot(places, data[name].median(HEADS), **own)
    middle = data["distance"].median(HEADS).values
    low, high = (data["distance"].quantile(q, HEADS).values for q in (0.25, 0.75))
    artists.append(ax.errorbar(places, middle, yerr=[middle - low, high - middle], linestyle="", **MEASURED))
    ax.set_xscale("log")
    ax.set_yscale("log")
    _plain(ax, places)
    ax.set_xlabel("text length L (tokens)" if x == "length" else "selected tokens N")
    ax.set_ylabel("distance d̃")
    return artists


def separability_boxes(ax: Axes, data: xr.Dataset) -> list[Any]:
    """N_s/N against N as boxes over heads (whiskers to the extremes), medians of the sharp and printed bounds."""
    counts = data["selected"].values
    places = np.arange(len(counts))
    artists: list[Any] = [ax.axhspan(*PLATEAU, color=NOISE, alpha=0.5, linewidth=0, zorder=0)]
    values = [data["distinguishable"].sel(selected=count).values.ravel() for count in counts]
    line = {"color": COLOURS[0], "linewidth": 0.7}
    artists.append(
        ax.boxplot(
            values, positions=places, widths=0.5, whis=(0, 100), manage_ticks=False, patch_artist=True, zorder=3,
            boxprops={**line, "facecolor": "white"}, whiskerprops=line, capprops=line,
            medianprops={"color": COLOURS[0], "linewidth": 1.2},
        )
    )  # fmt: skip
    for side in ("lower", "upper"):
        artists += ax.plot(places, data[side].median(HEADS), **SHARP, zorder=2)
        artists += ax.plot(places, data[f"{side}_printed"].median(HEADS), **PRINTED, zorder=2)
    ax.set_xticks(places, [str(count) for count in counts])
    ax.set_xlim(-0.6, len(counts) - 0.4)
    ax.set_ylim(0, 1.05)  # the printed lower bound goes below 0, where it says nothing
    ax.set_xlabel("selected tokens N")
    ax.set_ylabel("distinguishable N$_s$/N")
    ax.tick_params(axis="x", which="both", top=False)
    return artists


def critical_counts(ax: Axes, data: xr.Dataset) -> list[Any]:
    """The critical N against L: all heads together, those of each layer as small marks, and N = 0.06 L."""
    lengths = data["length"].values
    artists: list[Any] = []
    each = data["layer_critical_count"].transpose("length", "layer").values
    for layer in range(each.shape[1]):
        artists += ax.plot(lengths, each[:, layer], linestyle="", marker="_", markersize=5, color="0.55")
    own = {**look(0), "linestyle": "-", "markerfacecolor": "white", "markeredgewidth": 0.6}
    artists += ax.plot(lengths, data["critical_count"].values, **own)
    artists += ax.plot(lengths, REPORTED_RATIO * lengths, color="0.35", linestyle=(0, (1, 1)))
    ax.set_xscale("log")
    ax.set_yscale("log")
    _plain(ax, lengths)
    ax.set_xlabel("text length L (tokens)")
    ax.set_ylabel("critical N")
    return artists


def gradient_curves(ax: Axes, data: xr.Dataset) -> list[Any]:
    """Largest difference quotient and largest spectral norm of all heads and rows against T, with bounds (log–log)."""
    temperature = data["temperature"].values
    artists = ax.plot(temperature, data["norm_bound"], **SHARP)
    artists += ax.plot(temperature, data["bound_printed"], **PRINTED)
    artists += ax.plot(temperature, data["norm"].max(HEADS), color="black", marker="x", markersize=3, linestyle="")
    for index, size in enumerate(data["size"].values):
        own = look((0, 2, 3)[index] if index < 3 else index + 1)
        values = data["gradient"].sel(size=size).max(HEADS)
        artists += ax.plot(
            temperature, values, **{**own, "linestyle": ":"}, linewidth=0.6, markerfacecolor="white",
            markeredgewidth=0.6, label=f"ε = {size:g}",
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("temperature T")
    ax.set_ylabel("sensitivity to logits")
    return artists


def draw(store: Store) -> Figure:
    """The five experiments and the map of N_s/N, two rows of three."""
    length_data, selected_data = store["distance_against_length"], store["distance_against_selected"]
    with style():
        figure = Figure(figsize=(DOUBLE, 4.3), layout="constrained")
        axes = figure.subplots(2, 3)
        distance_curves(axes[0, 0], length_data)
        axes[0, 0].set_title(f"N = {length_data.attrs['selected']}")
        distance_curves(axes[0, 1], selected_data)
        axes[0, 1].set_title(f"L = {selected_data.attrs['length']}")
        critical_counts(axes[0, 2], store["critical_against_length"])
        axes[0, 2].set_title(f"Kolmogorov–Smirnov, level {store['critical_against_length'].attrs['level']}")
        separability_boxes(axes[1, 0], store["separability_against_selected"])
        axes[1, 0].set_title("sphere bounds; grey: GPT-2")
        gradient_curves(axes[1, 1], store["gradient_against_temperature"])
        axes[1, 1].set_title("largest of all heads and rows")
        report = store["report"]
        heat_map(axes[1, 2], report, "distinguishable", limits=(0.0, 1.0))
        axes[1, 2].set_title(f"N$_s$/N at N = {report.attrs['selected']}; dots: saturated")
        _legends(axes)
        measured: dict[str, Any] = {"linestyle": "", "marker": "o", "color": COLOURS[0], "markerfacecolor": "white"}
        handles = [
            Line2D([], [], **measured, label="measured, median and quartiles of heads"),
            Line2D([], [], **SHARP, label="bound, sharp"),
            Line2D([], [], **PRINTED, label="bound, printed (false)"),
            Line2D([], [], **EXPECTED, label="expectation, random sets, median of heads"),
            Line2D([], [], **EXPECTED_PRINTED, label="expectation, printed"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
        lettered(axes.ravel())
    return figure


def draw_heads(report: xr.Dataset) -> Figure:
    """Heat maps of the main quantities of every head."""
    with style():
        figure = Figure(figsize=(DOUBLE, 3.6), layout="constrained")
        axes = figure.subplots(2, 3, sharex=True, sharey=True)
        for ax, (quantity, (title, log, limits)) in zip(axes.ravel(), MAPPED.items(), strict=True):
            heat_map(ax, report, quantity, log=log, limits=limits)
            ax.set_title(title)
            ax.label_outer()
    return figure


def table(store: Store) -> str:
    """Quartiles over the heads of each layer, the heads that are saturated, the critical N, and the experiments."""
    report = store["report"]
    attrs = report.attrs
    layers, heads, length = report.sizes["layer"], report.sizes["head"], int(attrs["length"])
    least = int(attrs.get("least_heads", 0))
    kind = "causal" if attrs["causal"] in (True, "true") else "bidirectional"
    titles = "".join(f"{title:>19}" for title, _ in COLUMNS.values())
    lines = [
        "",
        f"{attrs['model']} on {attrs['text']}: {kind}, {layers} layers of {heads} heads, L = {length} tokens, "
        f"N = {attrs['selected']}, means over {attrs['averaged_rows']} query rows",
        f"  {'layer':>5}{titles}{'critical N':>12}  saturated heads",
    ]
    for layer in range(layers):
        own = report.isel(layer=layer)
        row = ""
        for name, (_, digits) in COLUMNS.items():
            row += f"{' '.join(format(q, digits) for q in np.quantile(own[name], (0.25, 0.5, 0.75))):>19}"
        own_count = _count(own["layer_critical_count"], few=heads < least)
        lines.append(f"  {layer:>5}{row}{own_count:>12}  {_saturated(own['saturated'].values)}")
    count = float(report["critical_count"])
    share = "" if np.isnan(count) else f" = {count / length:.3f} L"
    lines.append(f"  critical N of all heads: {_count(count, few=layers * heads < least)}{share}")
    lines += _experiments(store) if set(store.datasets) >= EXPERIMENTS else []
    lines += [
        "",
        "quartiles over heads; layers and heads count from 0; distances in units of ‖x‖"
        + (", x normalized" if attrs["normalize"] in (True, "true") else "")
        + f" ({attrs['vectors']}); saturated: N_s/N ≥ 0.7 at N ≥ 16;",
        f"critical N: first at which a Kolmogorov-Smirnov test (level {attrs['level']}) of measured against expected d̃ "
        "sees no difference (–: none"
        + (f"; few: fewer than {least} heads can never differ)" if heads < least else ")"),
        "",
    ]
    return "\n".join(lines)


def _experiments(store: Store) -> list[str]:
    """The main number of each experiment, medians over heads."""
    both = ("layer", "head")
    lines = [""]
    for group, x in (("distance_against_length", "length"), ("distance_against_selected", "selected")):
        data = store[group]
        name = f"L (N = {data.attrs['selected']})" if x == "length" else f"N (L = {data.attrs['length']})"
        values = data[x].values
        lines.append(f"  {name:>32}" + "".join(f"{value:>9}" for value in values))
        for title, quantity in (
            ("d̃", "distance"), ("sharp bound", "distance_bound"), ("printed bound (false)", "distance_bound_printed"),
            ("expectation, random sets", "expected"), ("printed expectation", "expected_printed"),
        ):  # fmt: skip
            lines.append(f"  {title:>32}" + "".join(f"{value:>9.3g}" for value in data[quantity].median(both).values))
    data = store["critical_against_length"]
    lines.append(f"  {'L':>32}" + "".join(f"{value:>9}" for value in data["length"].values))
    lines.append(f"  {'critical N':>32}" + "".join(f"{_count(value):>9}" for value in data["critical_count"].values))
    lines.append(f"  {'critical N/L':>32}" + "".join(f"{value:>9.3f}" for value in data["ratio"].values))
    data = store["separability_against_selected"]
    lines.append(f"  {'N':>32}" + "".join(f"{value:>9}" for value in data["selected"].values))
    for title, quantity in (("N_s/N", "distinguishable"), ("bounds on a sphere: lower", "lower"), ("upper", "upper")):
        lines.append(f"  {title:>32}" + "".join(f"{value:>9.3f}" for value in data[quantity].median(both).values))
    data = store["gradient_against_temperature"]
    lines.append(f"  {'T':>32}" + "".join(f"{value:>9g}" for value in data["temperature"].values))
    for size in data["size"].values:
        largest = data["gradient"].sel(size=size).max(both).values
        lines.append(f"  {f'largest gradient, ε = {size:g}':>32}" + "".join(f"{value:>9.2g}" for value in largest))
    for title, values in (
        ("largest ‖J‖", data["norm"].max(both)), ("bound 1/(2T)", data["norm_bound"]),
        ("printed bound (false)", data["bound_printed"]),
    ):  # fmt: skip
        lines.append(f"  {title:>32}" + "".join(f"{value:>9.2g}" for value in values.values))
    return lines


def _legends(axes: np.ndarray) -> None:
    layer = Line2D([], [], linestyle="", marker="_", markersize=5, color="0.55", label="heads of a layer")
    own: dict[str, Any] = {**look(0), "markerfacecolor": "white"}
    every = Line2D([], [], **own, label="all heads")
    reported = Line2D([], [], color="0.35", linestyle=(0, (1, 1)), label="0.06 L (reported, GPT-2)")
    low, high = axes[0, 2].get_ylim()
    axes[0, 2].set_ylim(low, high * (high / low) ** 0.4)  # room for the legend
    axes[0, 2].legend(handles=[every, layer, reported], loc="upper left")
    sizes, _ = axes[1, 1].get_legend_handles_labels()
    norm = Line2D([], [], color="black", marker="x", markersize=3, linestyle="", label="‖J‖₂")
    axes[1, 1].legend(handles=[norm, *sizes], loc="lower left", handlelength=1.2)


_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def _plain(ax: Axes, places: np.ndarray) -> None:
    """Whole numbers under an axis of lengths or counts."""
    ax.set_xticks(places, [str(place) for place in places])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.minorticks_off()
    ax.yaxis.set_minor_locator(LogLocator(subs=tuple(range(2, 10))))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _saturated(heads: np.ndarray) -> str:
    """Which of a layer, the shorter list of those that are and are not."""
    yes, no = (", ".join(map(str, np.flatnonzero(part))) for part in (heads, ~heads))
    if not yes or not no:
        return "all" if yes else "none"
    return yes if np.sum(heads) <= np.sum(~heads) else f"all but {no}"


def _count(value: Any, *, few: bool = False) -> str:
    """A critical N; `few`: of heads too few to differ."""
    number = float(value)
    if few:
        return "few"
    return f"{number:.0f}" if number == number else "–"
