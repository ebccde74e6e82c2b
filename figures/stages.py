"""Stage times against log D with the predicted lines and slopes, and their distribution at one D."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from compare import Store
from compare.staircase import distribution
from figures.style import NOISE, WIDE, look, simulation_points, style, theory_line

GUIDE = {"color": "0.35", "linestyle": (0, (4, 2)), "linewidth": 0.7, "marker": "", "zorder": 1.5}
KS_LEVEL, KS_FACTOR = 0.05, 1.358  # of the band around a predicted distribution: 1.358/√n
BAND_ALPHA = 0.18
NOTE = 0.24  # height of a note of four lines, as a share of the axes


class Series(NamedTuple):
    """One feature of one prior: a line of the figure."""

    prior: int
    feature: int
    prediction: xr.Dataset
    comparison: xr.Dataset

    @property
    def label(self) -> str:
        """Its variance, and which one it is of several."""
        variances = self.prediction["variance"].values
        name = f"feature {self.feature + 1}, " if len(variances) > 1 else ""
        return f"{name}Var θ = {float(variances[self.feature]):.3g}"


def draw(store: Store) -> Figure:
    """Left: stage times against D for every feature with a stage; right: the first stage's distribution at one D."""
    with style():
        figure = Figure(figsize=(WIDE, 2.75), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        against_dim(left, store)
        first_stage(right, store)
        points: dict[str, Any] = {"color": "0.3", "markerfacecolor": "white", "markersize": 3}
        several = len(store.configuration["dims"]) > 1
        handles = [
            Line2D([], [], color="0.3", label="predicted median, distribution"),
            Patch(facecolor="0.3", alpha=BAND_ALPHA, linewidth=0, label="predicted 25–75 %"),
            *([Line2D([], [], **GUIDE, label="slope as D → ∞")] if several else []),
            Line2D([], [], linestyle="", marker="o", **points, label="SGD, median and 25–75 %"),
            Line2D([], [], color="0.3", drawstyle="steps-post", linewidth=0.6, label="SGD, n runs"),
            Patch(facecolor=NOISE, linewidth=0, label=f"predicted, {100 * (1 - KS_LEVEL):.0f} % of n runs"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def series(store: Store) -> Iterator[Series]:
    """Every feature with a stage."""
    for p in range(len(store.configuration["priors"])):
        prediction, comparison = store[f"prediction_{p}"], store[f"comparison_{p}"]
        for feature in np.flatnonzero(prediction["rank"].values >= 0):
            yield Series(p, int(feature), prediction, comparison)


def against_dim(ax: Axes, store: Store) -> None:
    """Predicted medians as lines with their quartiles, measured ones as points with theirs, guides of limit slope."""
    dims = np.asarray(store.configuration["dims"], dtype=float)
    notes: list[tuple[int, float, str]] = []
    for index, one in enumerate(series(store)):
        low, middle, high = (_finite(quantile(one, level)) for level in (0.25, 0.5, 0.75))
        theory_line(ax, dims, middle, index)
        ax.fill_between(dims, low, high, color=look(index)["color"], alpha=BAND_ALPHA, linewidth=0)
        slope = float(one.prediction["limit_slope"].values[one.feature])
        if len(dims) > 1:
            guide = np.array([dims[0], dims[-1]])
            ax.plot(guide, middle[0] + slope * np.log(guide / dims[0]), **GUIDE)
            text = f"{one.label}\nfitted {_number(one, 'own_slope')}\nmedians {_number(one, 'predicted_slope')}"
            notes.append((index, float(np.nan_to_num(middle[-1])), f"{text}\nD → ∞ {slope:.2f}"))
        seen = _finite(one.comparison["measured"].values[:, one.feature].T)
        errors = np.stack([seen[1] - seen[0], seen[2] - seen[1]])
        simulation_points(ax, dims, seen[1], errors, index, markersize=3, capsize=1.5)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlabel("D")
    ax.set_ylabel("stage time τ")
    ax.set_xlim(dims[0] / 1.5, dims[-1] * 1.5)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)  # as it is now: the notes stand beside their lines
    heights = _apart([(height - low) / (high - low) for _, height, _ in notes])
    for (index, _, text), height in zip(notes, heights, strict=True):
        ax.annotate(
            text, (1.03, height), xycoords="axes fraction", color=look(index)["color"], ha="left", va="center",
            fontsize=6, annotation_clip=False,
        )  # fmt: skip


def first_stage(ax: Axes, store: Store) -> None:
    """The first stage's times at one D: predicted distribution with the noise of n runs, measured one as steps."""
    dim = store.configuration["shown"]
    place = list(store.configuration["dims"]).index(dim)
    earliest, last, shown = np.inf, 0.0, 0
    for index, one in enumerate(series(store)):
        if one.prediction["rank"].values[one.feature] != 0:
            continue
        run = store[f"runs_{one.prior}_{place}"]
        end = float(run["time"].values[-1])
        times = run["stage_time"].values[:, one.feature]
        seen = np.sort(times[np.isfinite(times)])
        predicted = one.prediction["stage_time"].values[place, :, one.feature]
        first = min([float(np.min(predicted)), end, *seen[:1]])
        clock = np.linspace(first, end, 400)
        chance = distribution(predicted, clock, end=end)
        if len(seen):
            width = KS_FACTOR / np.sqrt(len(seen))
            band = np.clip(chance - width, 0, 1), np.clip(chance + width, 0, 1)
            ax.fill_between(clock, *band, color=NOISE, alpha=0.6, linewidth=0, zorder=1)
            steps = np.arange(len(seen) + 1) / len(seen)
            ax.step([first, *seen], steps, where="post", color=look(index)["color"], linewidth=0.6, zorder=3)
        theory_line(ax, clock, chance, index)
        p_value = float(one.comparison["p_value"].values[place, one.feature])
        text = f"{one.label}\nn = {len(seen)}, p = {'–' if np.isnan(p_value) else f'{p_value:.2f}'}"
        ax.annotate(
            text, (0.97, 0.05 + 0.13 * shown), xycoords="axes fraction", ha="right", va="bottom",
            color=look(index)["color"], fontsize=6.5,
        )  # fmt: skip
        shown += 1
        earliest = min(earliest, first)
        last = max(last, end)
    if shown:
        ax.set_xlim(max(earliest - 0.1 * (last - earliest), 0), last)
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xlabel(f"first stage time τ at D = {dim}")
    ax.set_ylabel("fraction split, of those split by the end")


def quantile(one: Series, level: float) -> np.ndarray:
    """(dim,) predicted stage time below which a fraction `level` lies, inf where beyond the end of the flows."""
    return one.prediction["quantile"].sel(level=level).values[:, one.feature]


def numbers(store: Store) -> dict[str, float]:
    """Key numbers: for each feature that splits the slope against log D, in the limit, predicted here, and fitted."""
    found = {}
    for one in series(store):
        for name, quantity in (("limit", "limit_slope"), ("predicted", "predicted_slope"), ("fitted", "own_slope")):
            data = one.prediction if quantity in one.prediction else one.comparison
            found[f"slope, {one.label}, {name}"] = float(data[quantity].values[one.feature])
    return found


def table(store: Store) -> str:
    """Slopes predicted and fitted, and for each D the medians and the Kolmogorov–Smirnov test."""
    c, lines = store.configuration, []
    for p, (text, heads) in enumerate(zip(c["priors"], c["heads"], strict=True)):
        lines += ["", f"{text}, H = {heads}, L = {c['length']}, ν = {c['snr']:g}"]
        own = [one for one in series(store) if one.prior == p]
        lines.append(
            f"  {'feature':>7}{'Var θ':>8}{'κ':>10}{'slope: D → ∞':>14}{'medians':>9}{'fitted to log D':>18}"
            f"{'at equal starts':>18}{'ratio':>16}"
        )
        for one in own:
            get = {name: float(values.values[one.feature]) for name, values in _by_feature(one)}
            medians = "–" if np.isnan(get["predicted_slope"]) else f"{get['predicted_slope']:.3f}"
            ratio, error = (get[name] / get["predicted_slope"] for name in ("own_slope", "own_error"))
            lines.append(
                f"  {one.feature + 1:>7}{get['variance']:8.3g}{get['growth']:10.5f}{get['limit_slope']:14.3f}"
                f"{medians:>9}{_pair(get['slope'], get['slope_error']):>18}"
                f"{_pair(get['own_slope'], get['own_error']):>18}{_pair(ratio, error):>16}"
            )
        lines.append(
            f"  {'feature':>7}{'D':>8}{'runs':>6}{'unsplit':>9}{'expected':>10}{'end':>7}"
            f"{'median: predicted':>20}{'measured':>10}{'25 … 75 %: predicted':>23}{'measured':>17}{'KS':>8}{'p':>8}"
        )
        for one in own:
            predicted = [quantile(one, level) for level in (0.25, 0.5, 0.75)]
            for i, dim in enumerate(c["dims"]):
                low, middle, high = (values[i] for values in predicted)
                seen = one.comparison["measured"].values[i, one.feature]
                quartiles = f"{low:.2f} … {high:.2f}", f"{seen[0]:.2f} … {seen[2]:.2f}"
                split, unsplit = (int(one.comparison[name].values[i, one.feature]) for name in ("split", "unsplit"))
                ks, p_value, expected = (
                    float(one.comparison[name].values[i, one.feature]) for name in ("ks", "p_value", "expected")
                )
                end = float(store[f"runs_{p}_{i}"]["time"].values[-1])
                lines.append(
                    f"  {one.feature + 1:>7}{dim:>8}{split + unsplit:>6}{unsplit:>9}{expected:10.1f}{end:7.1f}"
                    f"{middle:20.2f}{seen[1]:10.2f}{quartiles[0]:>23}{quartiles[1]:>17}"
                    f"{ks:8.3f}{p_value:8.2f}"
                )
    lines += [
        "",
        f"κ: growth rate at the saddle that is left; stage: spread over heads at {c['threshold']:g} √(ν Var θ); "
        f"r_0 = {c['variance']:g}, η = {c['learning_rate']:g}, B = {c['batch']}",
        "slopes per unit of log D: medians = of the predicted ones at the same D; at equal starts = each run's own",
        "amplitude at τ = 0 taken out; ratio of the latter to that of the medians. expected: runs predicted unsplit",
        f"at the end, good to {1 / c['samples']:.2g} of the runs. KS: Kolmogorov-Smirnov, against the predicted",
        f"distribution ({c['samples']} starts, nothing fitted) given a split before the end",
        "",
    ]
    return "\n".join(lines)


def _finite(values: np.ndarray) -> np.ndarray:
    """NaN, which is not drawn, instead of inf."""
    return np.where(np.isfinite(values), values, np.nan)


def _apart(heights: list[float]) -> list[float]:
    """Heights (shares of the axes) moved up until notes there do not cover each other, in the same order."""
    moved, last = list(heights), -np.inf
    for place in np.argsort(heights, kind="stable"):
        moved[place] = last = max(heights[place], last + NOTE)
    return moved


def _by_feature(one: Series) -> Iterator[tuple[str, xr.DataArray]]:
    for data in (one.prediction, one.comparison):
        yield from ((str(name), values) for name, values in data.items() if values.dims == ("feature",))


def _number(one: Series, name: str) -> str:
    """A value by feature, with its error where it has one."""
    get = {key: float(values.values[one.feature]) for key, values in _by_feature(one)}
    error = get.get(name.replace("slope", "error"), np.nan)
    if np.isnan(get[name]):
        return "–"
    return f"{get[name]:.2f}" + (f" ± {error:.2f}" if np.isfinite(error) and name != "predicted_slope" else "")


def _pair(value: float, error: float) -> str:
    return "–" if np.isnan(value) else f"{value:.3f} ± {error:.3f}"
