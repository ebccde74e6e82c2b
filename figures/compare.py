"""`headsplit compare` as a picture: order parameters and risk against τ, each with residuals and what is allowed.

Biases and scales are order parameters where they are trained.
"""

import json
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from compare.store import Store
from figures.style import BIAS, COLOURS, DASHES, DOUBLE, NOISE, WIDE, look, simulation_points, style, theory_line

FRESH: dict[str, Any] = {"fmt": "x", "color": COLOURS[1], "zorder": 2.5}  # the fresh-sample loss
FRESH_LABEL = "SGD, fresh-sample loss"
TRAINED = {"bias": "b", "scale": "c"}  # what the activation may train, and its letter
SHADE: dict[str, Any] = {"alpha": 0.15, "linewidth": 0, "zorder": 0.5}  # where 95 % of single runs are predicted
MAX_MARKERS = 16  # more records are drawn as every n-th


def draw(store: Store) -> Figure:
    """The figure of one stored comparison (groups theory, simulation, aligned, agreement)."""
    agreement, aligned = store["agreement"], store["aligned"]
    features, trained = aligned.sizes["feature"], _trained(aligned)
    blocks = features + 2 + len(trained)
    columns = 2 if blocks < 4 else 3
    rows = -(-(blocks + 1) // columns)  # one place is for the legend
    width, height = {2: WIDE, 3: DOUBLE}[columns], 0.45 + 2.05 * rows
    with style():
        figure = Figure(figsize=(width, height))
        edges = {"left": 0.52 / width, "right": 1 - 0.08 / width, "bottom": 0.36 / height, "top": 1 - 0.08 / height}
        grid = figure.add_gridspec(rows, columns, **edges, wspace=0.36, hspace=0.24)
        for block in range(blocks):
            inner = grid[divmod(block, columns)].subgridspec(2, 1, height_ratios=(2.2, 1), hspace=0.08)
            above = figure.add_subplot(inner[0])
            below = figure.add_subplot(inner[1], sharex=above)
            if block < features:
                overlaps(above, aligned, store, feature=block)
                residuals(below, agreement, "m", feature=block)
            elif block == features:
                norms(above, aligned, store)
                residuals(below, agreement, "r")
            elif block < blocks - 1:
                name = trained[block - features - 1]
                numbers(above, aligned, store, name)
                residuals(below, agreement, name)
            else:
                risk(above, store)
                residuals(below, agreement, "risk")
            above.tick_params(labelbottom=False)
            above.yaxis.set_major_locator(MaxNLocator(5, prune="lower"))
            below.yaxis.set_major_locator(MaxNLocator(3, prune="both"))
            for ax in (above, below):
                unjudged(ax, agreement)
                ax.yaxis.set_label_coords(-0.19, 0.5)
            below.set_xlabel(r"$\tau = \eta\,\mathrm{steps}/D$")
        corner = figure.add_subplot(grid[divmod(blocks, columns)])
        corner.axis("off")
        legend(corner, store)
    return figure


def overlaps(ax: Axes, aligned: xr.Dataset, store: Store, *, feature: int) -> list:
    """m_hf of every head along one feature: means over the aligned replicas, single replicas of the theory faint."""
    keep = _successful(store)
    theory = aligned["theory_m"].isel(feature=feature, replica=keep)
    seen = aligned["simulation_m"].isel(feature=feature, replica=keep)
    ax.set_ylabel(rf"$m_{{h{feature + 1}}}$")
    return _heads(ax, theory, seen) + _shaded(ax, theory, store, "m", feature)


def norms(ax: Axes, aligned: xr.Dataset, store: Store) -> list:
    """r_hh of every head."""
    keep = _successful(store)
    theory, seen = (_diagonal(aligned[f"{side}_r"].isel(replica=keep)) for side in ("theory", "simulation"))
    ax.set_ylabel(r"$r_{hh}$")
    return _heads(ax, theory, seen) + _shaded(ax, theory, store, "r")


def numbers(ax: Axes, aligned: xr.Dataset, store: Store, name: str) -> list:
    """A trained bias or scale: of every head, or the one that all share in black."""
    keep = _successful(store)
    theory, seen = (aligned[f"{side}_{name}"].isel(replica=keep) for side in ("theory", "simulation"))
    shared = "head" not in theory.dims
    ax.set_ylabel(rf"${TRAINED[name]}{'' if shared else '_h'}$")
    if not shared:
        return _heads(ax, theory, seen)
    return _heads(ax, theory.expand_dims("head"), seen.expand_dims("head"), color="black")


def _heads(ax: Axes, theory: xr.DataArray, seen: xr.DataArray, **colour: Any) -> list:
    artists = []
    edge = {"markeredgecolor": colour["color"]} if colour else {}
    some = _thinned(seen.sizes["time"])
    error = _standard_error(seen - theory)
    for h in range(theory.sizes["head"]):
        one, other = theory.isel(head=h), seen.isel(head=h)
        if one.sizes["replica"] > 1:
            faint = {"linewidth": 0.35, "alpha": 0.25, "zorder": 1}
            artists += theory_line(ax, one["time"], one.transpose("time", "replica"), h, **faint, **colour)
        artists += theory_line(ax, one["time"], one.mean("replica"), h, **colour)
        point = other.mean("replica").isel(time=some)
        artists += simulation_points(ax, point["time"], point, error.isel(head=h, time=some), h, **colour, **edge)
    return artists


def _shaded(ax: Axes, theory: xr.DataArray, store: Store, name: str, feature: int | None = None) -> list:
    """The predicted 95 % band of single runs about the theory's mean, up to where the verdict ends; one width for all
    heads, which play the same part until they split."""
    agreement = store["agreement"]
    if f"{name}_deviation" not in agreement:
        return []
    deviation = agreement[f"{name}_deviation"]
    deviation = _diagonal(deviation) if name == "r" else deviation.isel(feature=feature)
    others = [dim for dim in deviation.dims if dim != "time"]
    width = 1.96 * np.sqrt((deviation**2).mean(others))
    until = np.asarray(agreement["time"] <= float(agreement.attrs["until"]))
    time, width, middle = theory["time"][until], width[until], theory.mean("replica").isel(time=until)
    return [
        ax.fill_between(time, line - width, line + width, color=look(h)["color"], **SHADE)
        for h, line in enumerate(middle.transpose("head", "time"))
    ]


def risk(ax: Axes, store: Store) -> list:
    """Population risk of theory and simulation, and the simulation's fresh-sample loss."""
    theory, simulation, keep = store["theory"], store["simulation"], _successful(store)
    expected, seen = theory["risk"].isel(replica=keep), simulation["risk"].isel(replica=keep)
    some = _thinned(theory.sizes["time"])
    black: dict[str, Any] = {"color": "black", "markeredgecolor": "black"}
    artists = theory_line(ax, theory["time"], expected.mean("replica"), color="black")
    point = seen.mean("replica").isel(time=some)
    artists += simulation_points(ax, point["time"], point, _standard_error(seen - expected).isel(time=some), **black)
    if "loss" in simulation:
        loss = simulation["loss"].isel(replica=keep)
        point = loss.mean("replica").isel(time=some)
        error = _standard_error(loss - expected).isel(time=some)
        artists += simulation_points(ax, point["time"], point, error, **FRESH)
    ax.set_ylabel("risk")
    return artists


def residuals(ax: Axes, agreement: xr.Dataset, name: str, *, feature: int | None = None) -> list:
    """Mean residuals (times 10³) on the noise floor (critical value × standard error) and the bias allowance."""
    mean, error, bias, allowed = _parts(agreement, name, feature)
    time, artists, some = mean["time"], [], _thinned(mean.sizes["time"])
    most, noise = allowed.max("head"), (allowed - bias).max("head")
    if np.any(np.isfinite(most)):
        artists.append(ax.fill_between(time, -most, most, color=BIAS, linewidth=0))
        artists.append(ax.fill_between(time, -noise, noise, color=NOISE, linewidth=0))
    artists.append(ax.axhline(0, color="black", linewidth=0.5))
    own = "head" in agreement[f"{name}_residual"].dims
    black: dict[str, Any] = {} if own else {"color": "black", "markeredgecolor": "black"}
    for h in range(mean.sizes["head"]):
        point, bar = mean.isel(head=h, time=some), error.isel(head=h, time=some)
        artists += simulation_points(ax, point["time"], point, bar, h, markersize=2.0, **black)
    judged = (time > 0) & (time <= float(agreement.attrs["until"]))
    reach = [most, abs(mean).max("head") + error.max("head")]
    if name == "risk" and "loss_residual" in agreement:
        loss, bar, _, band = (part.isel(head=0) for part in _parts(agreement, "loss", None))
        artists += simulation_points(ax, time[some], loss[some], bar[some], **FRESH, markersize=2.2)
        for sign in (-1, 1) if np.any(np.isfinite(band)) else ():
            artists += ax.plot(time, sign * band, color=FRESH["color"], linewidth=0.6, linestyle=":")
        reach += [band, abs(loss) + bar]
    top = max(float(part.where(judged).max(skipna=True)) for part in reach)
    if np.isfinite(top) and top > 0:  # what comes after the split is not judged and may leave the picture
        ax.set_ylim(-1.35 * top, 1.35 * top)
    ax.set_ylabel(r"$\Delta\times 10^3$")
    return artists


def unjudged(ax: Axes, agreement: xr.Dataset) -> list:
    """A line where judging ends, if anything is judged."""
    until, end = float(agreement.attrs["until"]), float(agreement["time"][-1])
    ax.set_xlim(-0.03 * end, 1.03 * end)
    return (
        []
        if until >= end or not _banded(agreement)
        else [ax.axvline(until, color="black", linewidth=0.6, linestyle=(0, (4, 2)), zorder=1.5)]
    )


def legend(ax: Axes, store: Store) -> list:
    """What the marks mean, with the numbers of the run and the verdict."""
    configuration, agreement = store.configuration, store["agreement"]
    heads, replicas = store["aligned"].sizes["head"], int(agreement.attrs["replicas"])
    until, end = float(agreement.attrs["until"]), float(agreement["time"][-1])
    grey = {"color": "0.3", "markerfacecolor": "white", "markersize": 3}
    entries: list[Any] = [
        Line2D([], [], color="0.3", label=f"theory{' (faint: single runs)' if replicas > 1 else ''}"),
        Line2D([], [], linestyle="", marker="o", **grey, label="SGD; Δ = SGD − theory"),
    ]
    if "loss" in store["simulation"]:
        entries.append(Line2D([], [], linestyle="", marker="x", color=FRESH["color"], markersize=3, label=FRESH_LABEL))
    if "m_deviation" in agreement:
        entries.append(
            Patch(color=COLOURS[0], alpha=SHADE["alpha"], linewidth=0, label="95 % of runs about own theory")
        )
    if _banded(agreement):
        entries += [Patch(color=NOISE, label="noise floor"), Patch(color=BIAS, label="with O(1/D) bias")]
        if "loss_allowed" in agreement:
            entries.append(Line2D([], [], color=FRESH["color"], linewidth=0.6, linestyle=":", label="both, fresh loss"))
        if until < end:
            entries.append(
                Line2D([], [], color="black", linewidth=0.6, linestyle=(0, (4, 2)), label="judged up to here")
            )
    verdict = {True: "agree", False: "disagree", None: "no verdict"}[json.loads(agreement.attrs["agrees"])]
    several = [f"D = {configuration['dim']}, {replicas} replicas, aligned"]
    lines = several if replicas > 1 else [f"D = {configuration['dim']}, {replicas} replica"]
    lines.append(f"theory and SGD: {verdict}" + ("" if verdict == "no verdict" else f" for τ ≤ {until:.4g}"))
    if replicas > 1:
        lines.append("bars: standard error")
    distinct = len(COLOURS) * len(DASHES)
    lines.append("head" if heads <= distinct else f"head ({distinct + 1}… repeat from 1)")
    names = [
        Line2D([], [], **look(h), markersize=3, markerfacecolor="white", label=f"{h + 1}")
        for h in range(min(heads, distinct))
    ]
    place: dict[str, Any] = {"borderaxespad": 0.0, "borderpad": 0.0, "fontsize": 6.5, "handlelength": 1.8}
    columns = min(len(names), 4 if len(names) <= 8 else 7)
    narrow: dict[str, Any] = {"columnspacing": 0.6, "handletextpad": 0.3} if columns > 4 else {"columnspacing": 1.0}
    if columns > 4:
        narrow["fontsize"], narrow["handlelength"] = 5.5, 1.1
    above = ax.legend(
        handles=names, title="\n".join(lines), title_fontsize=6.5, alignment="left", ncols=columns,
        loc="upper left", bbox_to_anchor=(-0.12, 0.88), **{**place, **narrow},
    )  # fmt: skip
    ax.add_artist(above)
    below = ax.legend(handles=entries, loc="lower left", bbox_to_anchor=(-0.12, -0.05), labelspacing=0.3, **place)
    return [above, below]


def _banded(agreement: xr.Dataset) -> bool:
    """Whether there are residuals that were judged, and so bands to draw."""
    return bool(np.any(np.isfinite(agreement["m_allowed"])))


def _parts(agreement: xr.Dataset, name: str, feature: int | None) -> tuple[xr.DataArray, ...]:
    """Residual, error, bias, allowed (times 10³), each (time, head); one "head" for what all heads share."""

    def part(kind: str) -> xr.DataArray:
        values = 1e3 * agreement[f"{name}_{kind}"]
        if name == "r":
            return _diagonal(values)
        values = values.isel(feature=feature) if feature is not None else values
        return values if "head" in values.dims else values.expand_dims("head", axis=-1)

    return tuple(part(kind) for kind in ("residual", "error", "bias", "allowed"))


def _trained(aligned: xr.Dataset) -> list[str]:
    """What is there of trained biases and scales."""
    return [name for name in TRAINED if f"theory_{name}" in aligned]


def _diagonal(r: xr.DataArray) -> xr.DataArray:
    same = xr.DataArray(np.arange(r.sizes["head"]), dims="head")
    return r.isel(head=same, head_=same)


def _standard_error(residual: xr.DataArray) -> xr.DataArray:
    count = residual.sizes["replica"]
    return residual.std("replica", ddof=1) / np.sqrt(count) if count > 1 else np.nan * residual.sum("replica")


def _successful(store: Store) -> np.ndarray:
    return np.flatnonzero((store["theory"]["result"] == 0) & (store["simulation"]["result"] == 0))


def _thinned(count: int) -> np.ndarray:
    """Indices of the records that get a marker."""
    return np.arange(0, count, -(-count // MAX_MARKERS))
