"""A swept Dataset as curves or as a heat map, in one line; only what the Dataset holds is drawn.

Its dimensions are the swept names, "replica" if there are replicas, and those of the run itself; `status` says which
runs are missing (0), done (1) or failed (2).
"""

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from compare.sweeps.gridded import DONE, FAILED, MISSING
from figures.scale import LONG, Scale, label, value_text
from figures.style import COLUMN, WIDE, look, style
from theory._checks import invalid

BANDS = {  # what the line is, and the band about it
    "quartiles": ("median", "quartiles"),
    "error": ("mean", "±1.96 standard errors"),
    "range": ("median", "least to greatest"),
}
REDUCTIONS = {"mean": np.nanmean, "median": np.nanmedian}
MOST_LOOKS = 6  # more numbers are told apart by a colour map
MOST_MARKERS = 24
BAND_ALPHA = 0.18
HATCH: dict[str, Any] = {"hatch": "/////", "edgecolor": "0.65", "facecolor": "white", "linewidth": 0}
CROSS: dict[str, Any] = {"linestyle": "", "marker": "x", "markersize": 4, "markeredgewidth": 1.0}
LINES = ListedColormap(colormaps["viridis"](np.linspace(0, 0.88, 256)))  # its yellow end is lost on white paper


def curves(
    data: xr.Dataset,
    quantity: str,
    *,
    x: str,
    hue: str | None = None,
    ax: Axes | None = None,
    band: str = "quartiles",
    at: Mapping[str, Any] | None = None,
) -> list[Any]:
    """A quantity against `x`, one curve for each value of `hue`: over replicas the middle and a band.

    Runs that are not there leave gaps; those that failed are marked by crosses on the x axis, and counted.

    Args:
        data: a swept Dataset.
        quantity: which of its variables.
        x: a dimension of it: a swept name, "time", ...
        hue: another one (of more than 6 numbers: by a colour map).
        ax: where to draw; a new figure of one column unless given.
        band: over replicas: "quartiles" or "range" about the median, or "error", 1.96 standard errors about the mean.
        at: values of all other dimensions but "replica", as they are in the Dataset.

    Returns:
        The artists: lines, bands, crosses.

    Raises:
        ValueError: what is not in the Dataset, naming what is; a dimension that is neither drawn nor fixed.
    """
    if band not in BANDS:
        raise invalid("band", " or ".join(map(repr, BANDS)), repr(band))
    picked = _picked(data, quantity, {"hue": hue, "x": x}, at or {})
    across, shade = Scale.of(data, x), None if hue is None else Scale.of(data, hue)
    middle, low, high = _summary(picked.values, band)
    norm = None
    if shade is not None and shade.texts is None and len(shade.values) > MOST_LOOKS:
        norm = (LogNorm if shade.log else Normalize)(shade.values.min(), shade.values.max())
    artists: list[Any] = []
    handles: list[Any] = []
    crosses: list[Any] = []
    named = across.texts is not None  # nothing lies between them: no lines, and curves side by side
    with style():
        ax = _new_axes() if ax is None else ax
        for i in range(len(middle)):
            own = {**look(i), "markeredgewidth": 0.6, "markerfacecolor": "white"}
            if norm is not None and shade is not None:
                own |= {"color": LINES(norm(shade.values[i])), "marker": "o", "linestyle": "-"}
            if picked.replicas is None:  # theory: a line, with dots where it was computed
                own |= {"marker": ".", "markersize": 4, "markerfacecolor": own["color"]}
            own |= {"linestyle": ""} if named else {}
            aside = (i - (len(middle) - 1) / 2) * min(0.12, 0.6 / len(middle)) if named else 0.0
            places = across.values[across.order] + aside
            line, lower, upper = (part[i][across.order] for part in (middle, low, high))
            alone = np.isfinite(line) if named else _alone(line)
            marked = np.ones(len(line), bool) if x != "time" and len(line) <= MOST_MARKERS else alone
            artists += ax.plot(places, line, markevery=np.flatnonzero(marked).tolist(), **own)
            if picked.replicas is not None:
                shape = {"color": own["color"], "alpha": BAND_ALPHA, "zorder": 1}
                artists.append(ax.fill_between(places, lower, upper, linewidth=0, **shape))
                if np.any(alone):  # which neither a line nor its band shows
                    artists.append(ax.vlines(places[alone], lower[alone], upper[alone], linewidth=4, **shape))
            if shade is not None and norm is None:
                state = "" if np.any(np.isfinite(line)) else " (failed)" if np.any(picked.failed[i]) else " (missing)"
                handles.append(Line2D([], [], **own, label=shade.text(i) + state))
                handles[-1].set_marker(own["marker"] if np.any(marked) else "")
            spots = across.values[picked.failed[i]] if x in picked.swept else np.empty(0)
            if spots.size:
                spots = spots + aside
                height = 0.03 + 0.04 * picked.failed[:i].sum(axis=0)[picked.failed[i]]  # above those of other curves
                above = {"transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 4}
                crosses += ax.plot(spots, height, color=own["color"], **above, **CROSS)
        if shade is not None and norm is not None:
            _colour_bar(ax, ScalarMappable(norm, LINES), shade.label, shade)
        if crosses:
            ax.margins(y=0.12)
        across.apply(ax, "x")
        ax.set_ylabel(label(data, quantity))
        shown = (
            []
            if picked.replicas is None
            else ["{}: {}, bands: {} of {}".format("points" if named else "lines", *BANDS[band], picked.counted())]
        )
        _notes(ax, [*picked.notes(bool(crosses)), *shown], handles, shade.label if handles and shade else "")
    return [*artists, *crosses]


def heat_map(
    data: xr.Dataset,
    quantity: str,
    *,
    x: str,
    y: str,
    ax: Axes | None = None,
    at: Mapping[str, Any] | None = None,
    reduce: str = "mean",
) -> list[Any]:
    """A quantity over two dimensions, in cells about their values; the mean over replicas if there are some.

    Cells without a value are hatched, those with failed runs have a cross, and both are counted.

    Args:
        data: a swept Dataset.
        quantity: which of its variables.
        x: a dimension of it.
        y: another one.
        ax: where to draw; a new figure of one column unless given.
        at: values of all other dimensions but "replica", as they are in the Dataset.
        reduce: "mean" or "median" over replicas.

    Returns:
        The artists: the mesh, hatched cells, crosses.

    Raises:
        ValueError: as `curves`.
    """
    if reduce not in REDUCTIONS:
        raise invalid("reduce", " or ".join(map(repr, REDUCTIONS)), repr(reduce))
    picked = _picked(data, quantity, {"y": y, "x": x}, at or {})
    across, up = Scale.of(data, x), Scale.of(data, y)
    sorted_cells = np.ix_(up.order, across.order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # cells without any run
        cells = REDUCTIONS[reduce](picked.values, axis=-1)[sorted_cells]
    columns, rows = across.edges().tolist(), up.edges().tolist()
    with style():
        ax = _new_axes() if ax is None else ax
        mesh = ax.pcolormesh(columns, rows, np.ma.masked_invalid(cells), cmap="viridis")
        artists: list[Any] = [mesh]
        for j, i in np.argwhere(~np.isfinite(cells)):
            box = Rectangle((columns[i], rows[j]), columns[i + 1] - columns[i], rows[j + 1] - rows[j], **HATCH)
            artists.append(ax.add_patch(box))
        spots = np.argwhere(picked.failed)
        if spots.size:
            halo = [withStroke(linewidth=2.2, foreground="white")]
            places = across.values[spots[:, 1]], up.values[spots[:, 0]]
            artists += ax.plot(*places, color="black", zorder=4, path_effects=halo, **CROSS)
        across.apply(ax, "x")
        up.apply(ax, "y")
        ax.set_xlim(columns[0], columns[-1])
        ax.set_ylim(rows[0], rows[-1])
        ax.tick_params(which="both", direction="out", top=False, right=False)
        words = "" if picked.replicas is None else f"\n({reduce} of {picked.counted()})"
        _colour_bar(ax, mesh, label(data, quantity) + words)
        blank = [] if np.all(np.isfinite(cells)) else ["hatched: no value"]
        _notes(ax, [*picked.notes(bool(spots.size)), *blank], [], "")
    return artists


KINDS = {"curves": curves, "heat_map": heat_map}


def draw(data: xr.Dataset, kind: str, quantity: str, **options: Any) -> Figure:
    """A figure with one picture: `kind` is "curves" or "heat_map", the options are theirs; wider for long names."""
    if kind not in KINDS:
        raise invalid("kind", " or ".join(map(repr, KINDS)), repr(kind))
    names = [str(name) for name in (options.get("x"), options.get("y")) if name in data.dims]
    long = any(len(text) > LONG for name in names for text in Scale.of(data, name).texts or [])
    with style():
        figure = Figure(figsize=(WIDE if long else COLUMN, 2.7), layout="constrained")
        KINDS[kind](data, quantity, ax=figure.subplots(), **options)
    return figure


class _Picked(NamedTuple):
    """What is drawn of a Dataset.

    Attributes:
        values: (hue or y, x, replica), axes of length one where there is no such dimension; NaN where nothing is.
        failed: (hue or y, x) whether a run failed.
        swept: the dimensions of the sweep.
        replicas: how many, None without that dimension.
        runs: numbers of runs that are missing, done and failed.
        fixed: what is held, for the legend.
    """

    values: np.ndarray
    failed: np.ndarray
    swept: tuple[str, ...]
    replicas: int | None
    runs: tuple[int, int, int]
    fixed: list[str]

    def counted(self) -> str:
        """How many replicas have values, where any has."""
        count = np.sum(np.isfinite(self.values), axis=-1)
        some = count[count > 0]
        if not some.size or some.min() == some.max() == self.replicas:
            return f"{self.replicas} replicas"
        return f"{some.min()}–{some.max()} replicas" if some.min() < some.max() else f"{some.min()} replicas"

    def notes(self, crosses: bool) -> list[str]:
        """What is held, and how many runs failed or are missing."""
        missing, _, failed = self.runs
        lost = [f"{failed} failed{' (crosses)' if crosses else ''}"] if failed else []
        lost += [f"{missing} missing"] if missing else []
        return [", ".join(self.fixed), f"of {sum(self.runs)} runs {', '.join(lost)}" if lost else ""]


def _picked(data: xr.Dataset, quantity: str, axes: Mapping[str, str | None], at: Mapping[str, Any]) -> _Picked:
    """The numbers to draw along `axes` (by the names of their arguments), all else fixed by `at`."""
    if quantity not in data.data_vars:
        raise invalid("quantity", f"one of {', '.join(map(str, data.data_vars))}", repr(quantity))
    array = data[quantity]
    if array.dtype.kind not in "biuf":
        raise invalid("quantity", "a variable of numbers", f"{quantity!r} of {array.dtype}")
    dims = [str(dim) for dim in array.dims]
    along = [name for name in axes.values() if name is not None]
    for field, name in axes.items():
        if name is not None and (name not in dims or along.count(name) > 1):
            raise invalid(field, f"one of the dimensions of {quantity} ({', '.join(dims)}), each once", repr(name))
    free = [dim for dim in dims if dim not in along]
    for name in at:
        if name not in free:
            raise invalid(
                "at", f"dimensions of {quantity} that are not drawn ({', '.join(free) or 'none'})", repr(name)
            )
    places = {name: _place(data, name, value) for name, value in at.items()}
    for dim in free:
        if dim not in places and dim != "replica" and array.sizes[dim] > 1:
            raise invalid("at", f"a value of {dim} ({_listed(data[dim].values)}), on which {quantity} depends", "none")
    averaged = "replica" in free and "replica" not in places
    wanted = [*axes.values(), "replica" if averaged else None]

    def arranged(part: xr.DataArray) -> np.ndarray:
        part = part.isel({name: place for name, place in places.items() if name in part.dims})
        part = part.squeeze([dim for dim in part.dims if dim not in wanted], drop=True)
        values = part.transpose(*(name for name in wanted if name in part.dims)).values
        return values.reshape([part.sizes[name] if name in part.dims else 1 for name in wanted])

    if "status" in data and quantity != "status" and set(data["status"].dims) <= {*dims}:
        array = array.where(data["status"] == DONE)  # what a failed run had before it failed is no result
    values = arranged(array.astype(float))
    status = arranged(data["status"]) if "status" in data else np.full((1, 1, 1), DONE)
    missing, done, failed = (int(np.sum(status == code)) for code in (MISSING, DONE, FAILED))
    return _Picked(
        np.where(np.isfinite(values), values, np.nan),
        np.broadcast_to(np.any(status == FAILED, axis=-1), values.shape[:2]),
        tuple(str(dim) for dim in data["status"].dims) if "status" in data else (),
        array.sizes["replica"] if averaged else None,
        (missing, done, failed),
        [f"{name} = {value_text(data, name, place)}" for name, place in places.items()],
    )


def _place(data: xr.Dataset, name: str, value: Any) -> int:
    """Where the dimension has this value, up to rounding."""
    known = data[name].values
    if known.dtype.kind in "iuf":
        number = not isinstance(value, bool) and isinstance(value, (int, float, np.integer, np.floating))
        found = np.flatnonzero(np.isclose(known, value, rtol=1e-9, atol=0)) if number else np.empty(0, int)
    else:
        found = np.flatnonzero([str(one) == str(value) for one in known])
    if not found.size:
        raise invalid("at", f"a value of {name} that is there ({_listed(known)})", repr(value))
    return int(found[0])


def _listed(values: np.ndarray) -> str:
    """The values of a dimension; of many only the ends."""
    texts = [str(value) for value in values.tolist()]
    return ", ".join(texts if len(texts) <= 20 else [*texts[:9], "…", *texts[-9:]])


def _summary(values: np.ndarray, band: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Middle over the last axis, lower and upper edge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no replica at all, or one without a standard error
        middle = (np.nanmean if band == "error" else np.nanmedian)(values, axis=-1)
        if band == "quartiles":
            low, high = np.nanquantile(values, [0.25, 0.75], axis=-1)
        elif band == "range":
            low, high = np.nanmin(values, axis=-1), np.nanmax(values, axis=-1)
        else:
            width = 1.96 * np.nanstd(values, axis=-1, ddof=1) / np.sqrt(np.sum(np.isfinite(values), axis=-1))
            low, high = middle - width, middle + width
    return middle, low, high


def _alone(line: np.ndarray) -> np.ndarray:
    """Points without a neighbour."""
    there = np.pad(np.isfinite(line), 1)
    return there[1:-1] & ~there[:-2] & ~there[2:]


def _colour_bar(ax: Axes, mappable: ScalarMappable, text: str, scale: Scale | None = None) -> None:
    """Beside the axes, with ticks at the values of `scale` where these are few."""
    bar = ax.figure.colorbar(mappable, ax=ax)
    bar.set_label(text)
    bar.outline.set_linewidth(0.6)  # type: ignore[operator]
    ticks = None if scale is None else scale.ticks()
    if ticks is not None:
        bar.set_ticks(ticks[0], labels=ticks[1])
        bar.ax.tick_params(which="minor", length=0)


def _notes(ax: Axes, notes: Sequence[str], handles: list[Any], meaning: str) -> None:
    """Above the axes, where they cover nothing: notes, and what the colours mean."""
    text = "\n".join(textwrap.fill(note, 64) for note in notes if note)
    if not handles:
        ax.set_title(text, fontsize=6.5)
        return
    longest = max(len(str(handle.get_label())) for handle in handles)
    legend = ax.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=1.2, borderaxespad=0.2,
        ncols=max(1, min(len(handles), 60 // (longest + 6))), title="\n".join(filter(None, [text, meaning])),
        title_fontsize=6.5,
    )  # fmt: skip
    legend.get_title().set_multialignment("center")


def _new_axes() -> Axes:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(COLUMN, 2.7), layout="constrained")[1]
