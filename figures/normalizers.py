"""What limits normalizers in the single-location model: risk and gradient against L, stable rates against T."""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from compare import Store
from figures.style import DOUBLE, look, simulation_points, style

SHORT = {
    "Softmax": "softmax",
    "Softmax1": "softmax-1",
    "BayesSoftmax": "B-softmax",
    "ScalableSoftmax": "scalable",
    "Sparsemax": "sparsemax",
    "Entmax": "entmax",
    "Sigmoid": "sigmoid",
    "SelfAdjustedSoftmax": "self-adjusted",
    "AdaptiveSoftmax": "adaptive",
    "TopK": "top-k",
}


def draw(store: Store) -> Figure:
    """Three panels: risk against L, gradient against L, largest stable rate against T."""
    c = store.configuration
    with style():
        figure = Figure(figsize=(DOUBLE, 2.6), layout="constrained")
        risk, gradient, stable = figure.subplots(1, 3)
        handles = risk_curves(risk, _groups(store, "risk"))
        gradient_curves(gradient, _groups(store, "gradient"))
        stable_rates(stable, _groups(store, "stable"))
        risk.set_title(f"keys no longer than {c['key_length']:g}, ν = {c['snr_per_log']:g} log L")
        gradient.set_title(f"the same keys, of length {c['gradient_key_length']:g}, ν = {c['gradient_snr']:g}")
        stable.set_title(f"softmax at its best keys, L = {c['stable_length']}, ν = {c['stable_snr']:g}")
        figure.legend(handles=handles, loc="outside lower center", ncols=6)
    return figure


def risk_curves(ax: Axes, lines: Sequence[xr.Dataset]) -> list:
    """Risk of each activation, with error bars where it is sampled, above the Bayes risk."""
    first = lines[0]
    bayes = ax.plot(
        first["length"], first["bayes"], color="black", linewidth=1.4, linestyle=(0, (4, 1.5)), label="Bayes"
    )
    artists = []
    for i, line in enumerate(lines):
        own = line.isel(activation=0)
        artists += simulation_points(
            ax, own["length"], own["risk"], own["error"], i, linestyle=look(i)["linestyle"], label=short(own)
        )
    _length_axis(ax, first["length"].values)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel("risk")
    return [*bayes, *artists]


def gradient_curves(ax: Axes, lines: Sequence[xr.Dataset]) -> list:
    """Norm of the mean gradient of each activation, and a guide of slope −1."""
    artists = []
    for i, line in enumerate(lines):
        own = line.isel(activation=0)
        seen = own["gradient"] > 3 * own["error"]  # below, it is noise
        artists += simulation_points(
            ax,
            own["length"],
            own["gradient"].where(seen),
            own["error"],
            i,
            linestyle=look(i)["linestyle"],
            label=short(own),
        )
    lengths = lines[0]["length"].values
    far = lengths[-3:]
    guide = float(lines[0]["gradient"][0, -1]) * far[-1] / far / 4  # below the curves it is to be compared with
    artists += ax.plot(far, guide, color="0.3", linewidth=0.8, linestyle=(0, (1, 1)))
    ax.annotate("∝ 1/L", (far[1], guide[1]), xytext=(-4, -2), textcoords="offset points", ha="right", va="top")
    _length_axis(ax, lengths)
    ax.set_yscale("log")
    ax.set_ylabel("norm of the mean gradient")
    return artists


def stable_rates(ax: Axes, lines: Sequence[xr.Dataset]) -> list:
    """Largest stable and smallest unstable rate at each temperature, and the law T²."""
    temperatures, low, high = stable_brackets(lines)
    high = np.where(np.isfinite(high), high, low)  # no rate was too large: a lower bound, without a bar
    middle = np.sqrt(low * high)
    artists = [
        ax.errorbar(temperatures, middle, yerr=[middle - low, high - middle], fmt="o", color=look(0)["color"],
                    markerfacecolor="white", markeredgewidth=0.6, elinewidth=0.8, label="chain")
    ]  # fmt: skip
    at = np.geomspace(temperatures.min(), temperatures.max(), 50)
    if np.any(np.isfinite(middle)):
        level = float(np.exp(np.nanmean(np.log(middle / temperatures**2))))
        artists += ax.plot(at, level * at**2, color="black", linewidth=1.0, label="∝ T²")
        ax.set_yscale("log", base=2)
    ax.set_xscale("log", base=2)
    ax.set_xticks(temperatures, [f"{t:g}" for t in temperatures])
    ax.set_xlabel("temperature T")
    ax.set_ylabel("largest stable learning rate η")
    ax.legend(loc="upper left")
    return artists


def stable_brackets(lines: Sequence[xr.Dataset]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Temperatures, the largest rates up to which all are stable, and the next ones; NaN where there is none."""
    temperatures, low, high = [], [], []
    for line in lines:
        own = line.isel(activation=0)
        rates, largest = own["learning_rate"].values, float(own["largest"])
        above = rates[rates > largest]
        temperatures.append(float(str(own["activation"].values).split("=")[1].rstrip(")")))
        low.append(largest if largest > 0 else np.nan)
        high.append(above[0] if above.size else np.nan)
    return np.array(temperatures), np.array(low), np.array(high)


def short(line: xr.Dataset) -> str:
    """A short name of a line's activation."""
    name, _, arguments = str(line["activation"].values).partition("(")
    if name == "Entmax":
        return f"entmax {arguments.split(',')[0].removeprefix('alpha=')}"
    if name == "TopK":
        return "top-√L" if "power=0.5" in arguments else f"top-k, {arguments.split(', temp')[0]}"
    return SHORT.get(name, name)


def table(store: Store) -> str:
    """The numbers, one line for each activation and temperature."""
    risks, gradients = _groups(store, "risk"), _groups(store, "gradient")
    lengths = risks[0]["length"].values
    head = f"{'L':>28}" + "".join(f"{length:>12}" for length in lengths)
    lines = [head, f"{'Bayes risk':>28}" + "".join(f"{value:12.4f}" for value in risks[0]["bayes"].values)]
    for name, groups in (("risk", risks), ("gradient", gradients)):
        for group in groups:
            own = group.isel(activation=0)
            what = f"{short(own)}: {'risk' if name == 'risk' else '|gradient|'}"
            values = zip(own[name].values, own["error"].values, strict=True)
            lines.append(f"{what:>28}" + "".join(f"{_with_error(*pair):>12}" for pair in values))
    for temperature, low, high in zip(*stable_brackets(_groups(store, "stable")), strict=True):
        lines.append(f"softmax at T = {temperature:g}: rates are stable up to {low:.3g}, not at {high:.3g}")
    return "\n".join(lines)


def _with_error(value: float, error: float) -> str:
    return f"{value:.4f}" if error < 5e-5 else f"{value:.3f}±{error:.3f}"


def _groups(store: Store, kind: str) -> list[xr.Dataset]:
    count = sum(name.startswith(f"{kind}_") for name in store.datasets)
    return [store[f"{kind}_{i}"] for i in range(count)]


def _length_axis(ax: Axes, lengths: np.ndarray) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length}" for length in lengths])
    ax.set_xlabel("tokens L")
