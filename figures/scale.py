"""Dimensions of a Dataset as axes: numbers in place, on a logarithmic axis where they are made for one, or names."""

import ast
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

INDICES = ("head", "head_", "feature", "replica")  # numbers that are names, not amounts
LOG_SPAN = 30
MOST_TICKS = 8  # values that may all have a tick
CHARACTER = 0.05  # inches, the width of one in a tick's text, about
LONG = 14  # characters of a text on an axis before it is broken
_LONGEST = 34  # characters of a short name


class Scale(NamedTuple):
    """The values of a dimension as places on an axis.

    Attributes:
        label: of the axis.
        values: places, in the Dataset's order.
        order: indices that sort them.
        texts: names of the values if they are no numbers.
        log: whether the axis is logarithmic.
    """

    label: str
    values: np.ndarray
    order: np.ndarray
    texts: list[str] | None
    log: bool

    @classmethod
    def of(cls, data: xr.Dataset, name: str) -> "Scale":
        """The scale of one dimension."""
        values = data[name].values
        if values.dtype.kind in "iuf" and name not in INDICES:
            places = values.astype(float)
            return cls(label(data, name), places, np.argsort(places, kind="stable"), None, geometric(places))
        texts = shortened([str(value) for value in values.tolist()])
        return cls(label(data, name), np.arange(len(texts), dtype=float), np.arange(len(texts)), texts, False)

    def text(self, index: int) -> str:
        """One value, for a legend."""
        return self.texts[index] if self.texts is not None else number_text(self.values[index])

    def edges(self) -> np.ndarray:
        """Edges of cells about the sorted values: halfway between them, and as far beyond the outer ones."""
        centres = np.log(self.values[self.order]) if self.log else self.values[self.order]
        if len(centres) == 1:
            edges = centres[0] + np.array([-0.5, 0.5])
        else:
            middles = (centres[1:] + centres[:-1]) / 2
            edges = np.array([2 * centres[0] - middles[0], *middles, 2 * centres[-1] - middles[-1]])
        return np.exp(edges) if self.log else edges

    def ticks(self) -> tuple[list[float], list[str]] | None:
        """The values and their texts, None where these would touch: ticks are then matplotlib's."""
        if self.texts is not None:
            return self.values.tolist(), self.texts
        places = np.unique(np.log(self.values) if self.log else self.values)
        texts = [number_text(value) for value in self.values]
        if len(places) > MOST_TICKS or np.any(np.diff(places) < 0.1 * (places[-1] - places[0])):
            return None
        return None if sum(map(len, texts)) > 50 else (self.values.tolist(), texts)

    def apply(self, ax: Axes, direction: str) -> None:
        """Label, kind and ticks of the "x" or "y" axis."""
        axis = ax.xaxis if direction == "x" else ax.yaxis
        axis.set_label_text(self.label)
        if self.log:
            (ax.set_xscale if direction == "x" else ax.set_yscale)("log")
        ticks = self.ticks()
        if ticks is None:
            return
        texts = [text if len(text) <= LONG else _in_lines(text) for text in ticks[1]]
        widest = max(len(line) for text in texts for line in text.split("\n"))
        slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
        full = direction == "x" and widest * len(texts) * CHARACTER > ax.bbox.width / ax.figure.dpi
        axis.set_ticks(ticks[0], texts, **(slanted if full else {}))
        axis.set_ticks([], minor=True)


def geometric(values: np.ndarray) -> bool:
    """Whether values are positive, span a factor of 30 and are spaced about evenly on a logarithmic axis."""
    values = np.unique(values)
    if len(values) < 2 or not np.all(values > 0) or values[-1] < LOG_SPAN * values[0]:
        return False
    steps = np.diff(np.log(values))
    return bool(steps.max() <= 3 * steps.min())


def long_name(data: xr.Dataset, name: str) -> str:
    """What a variable or dimension is called in a picture."""
    return str(data[name].attrs.get("long_name", name))


def label(data: xr.Dataset, name: str) -> str:
    """The same in lines that fit an axis."""
    return textwrap.fill(long_name(data, name), 34)


def value_text(data: xr.Dataset, name: str, place: int) -> str:
    """One value of a dimension."""
    value = data[name].values[place]
    return number_text(float(value)) if data[name].dtype.kind in "iuf" else shortened([str(value)])[0]


def number_text(value: float) -> str:
    """Six digits at most, large and small powers of ten as such."""
    text = f"{value:g}"
    if value >= 1e4 and float(f"1e{len(text) - 1}") == value:
        return f"$10^{{{len(text) - 1}}}$"
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    power = f"10^{{{int(exponent)}}}"
    return f"${power}$" if mantissa == "1" else rf"${mantissa}\times {power}$"


def shortened(names: Sequence[str]) -> list[str]:
    """Names of priors and activations in short, all different: what all of them share is left out.

    Example:
        >>> shortened(["Softmax1(bias=0.0, scale=1.0)", "Softmax1(bias=0.0, scale=2.5)"])
        ['scale=1', 'scale=2.5']
    """
    calls = [_call(name) for name in names]
    known = [call for call in calls if call is not None]
    alike = len(known) == len(names) > 1 and len({maker for maker, _ in known}) == 1
    short = []
    for name, call in zip(names, calls, strict=True):
        if call is None:
            short.append(name)
            continue
        maker, own = call
        differing = {key: text for key, text in own.items() if any(one.get(key) != text for _, one in known)}
        if alike and differing:
            short.append(", ".join(f"{key}={text}" for key, text in differing.items()))
        else:
            short.append(f"{maker}({', '.join(own.values())})")
    cut = [text if len(text) <= _LONGEST else f"{text[: _LONGEST - 12]}…{text[-11:]}" for text in short]
    return [text if cut.count(text) == 1 else f"{text} #{i + 1}" for i, text in enumerate(cut)]


def _call(name: str) -> tuple[str, dict[str, str]] | None:
    """The maker of a canonical name and its arguments as short text; None for another string."""
    try:
        call = ast.parse(name, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        return ast.unparse(call.func), {str(word.arg): _plain(ast.literal_eval(word.value)) for word in call.keywords}
    except (SyntaxError, ValueError):
        return None


def _in_lines(text: str) -> str:
    """A short name in lines, after its maker and between its arguments."""
    return textwrap.fill(text.replace("(", "( ", 1), LONG + 4, break_long_words=False).replace("( ", "(")


def _plain(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_plain, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
