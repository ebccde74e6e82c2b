"""One look for all figures: print size, colour-blind-safe, theory = line, simulation = markers with error bars."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLUMN = 3.4  # inches: one column
WIDE = 5.1  # one and a half
DOUBLE = 7.0  # two, with the gutter

# Okabe and Ito's colours without yellow, which is lost on white paper
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.2)), (0, (1, 1)))  # the colours' first, second and third round
NOISE = "#BBBBBB"  # noise floor
BIAS = "#E2E2E2"  # what lies beyond it and is still allowed


def look(index: int) -> dict[str, Any]:
    """Colour, marker and line style of head (or series) `index`, all different for the first 21."""
    around, place = divmod(index, len(COLOURS))
    marker = MARKERS[(place + around) % len(MARKERS)]
    return {"color": COLOURS[place], "marker": marker, "linestyle": DASHES[around % len(DASHES)]}


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib settings of every figure; nothing outside the block changes."""
    with mpl.rc_context(
        {
            "font.family": "DejaVu Sans",  # comes with matplotlib and has the Greek letters
            "mathtext.fontset": "dejavusans",
            "font.size": 7.0,
            "axes.titlesize": 7.0,
            "axes.labelsize": 7.0,
            "xtick.labelsize": 6.5,
            "ytick.labelsize": 6.5,
            "legend.fontsize": 6.5,
            "legend.frameon": False,
            "axes.linewidth": 0.6,
            "lines.linewidth": 1.0,
            "lines.markersize": 2.6,
            "xtick.direction": "in",
            "ytick.direction": "in",
            "xtick.top": True,
            "ytick.right": True,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "pdf.fonttype": 42,  # text stays text
            "svg.fonttype": "none",
            "savefig.dpi": 300,
        }
    ):
        yield


def theory_line(ax: Axes, time: Any, values: Any, index: int = 0, **options: Any) -> list[Any]:
    """Theory: a line, in the colour of head (or series) `index`."""
    own = {**look(index), "marker": "", "zorder": 2}
    return list(ax.plot(np.asarray(time), np.asarray(values), **{**own, **options}))


def simulation_points(ax: Axes, time: Any, values: Any, errors: Any, index: int = 0, **options: Any) -> list[Any]:
    """Simulation: open markers with error bars (none where the error is unknown)."""
    own = look(index)
    bars = np.where(np.isfinite(np.asarray(errors)), errors, 0.0)
    defaults = {
        "fmt": own["marker"],
        "color": own["color"],
        "markerfacecolor": "white",
        "markeredgewidth": 0.6,
        "elinewidth": 0.6,
        "zorder": 3,
    }
    return [ax.errorbar(np.asarray(time), np.asarray(values), yerr=bars, **{**defaults, **options})]


def lettered(axes: Iterable[Axes]) -> None:
    """Panels a, b, c, … in their order."""
    for place, ax in enumerate(axes):
        ax.set_title(chr(ord("a") + place), loc="left", fontweight="bold")


def plain_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 times powers of ten, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write `path` with the endings .pdf (vectors) and .png (for screens); returns both paths."""
    base = Path(path)
    base.parent.mkdir(parents=True, exist_ok=True)
    written = [base.with_name(base.name + ending) for ending in (".pdf", ".png")]
    with style():
        for name in written:
            # no date inside: the same data give the same file
            figure.savefig(name, metadata={"CreationDate": None} if name.suffix == ".pdf" else None)
    return written
