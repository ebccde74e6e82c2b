"""What limits normalizers in the single-location model: risk and gradient against L, stable rates against T."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare import Store, gradient_against_length, risk_against_length, stability_against_rate
from compare.lines import Line
from figures.style import DOUBLE, look, plain_ticks, simulation_points, style
from theory import OrderParameters, SingleLocation, Softmax
from theory.names import parse_activation, parse_prior

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


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    prior: str = "discrete(points=[[1.0]])"
    activations: tuple[str, ...] = (
        "Softmax()", "Softmax1()", "ScalableSoftmax(0.43)", "Sparsemax()", "Entmax(1.5)", "Sigmoid()",
        "SelfAdjustedSoftmax()", "AdaptiveSoftmax()", "TopK(power=0.5)",
    )  # fmt: skip
    key_length: float = 2.0  # the longest keys, |k|/√D
    lengths: tuple[int, ...] = (4, 16, 64, 256, 1024)
    snr_per_log: float = 4.0  # ν = this · log L, against L
    gradient_key_length: float = 1.0
    gradient_snr: float = 4.0  # the same at every L: logits are bounded
    tokens: int = 2**21
    temperatures: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    stable_length: int = 5
    stable_snr: float = 8.0
    least_rate: float = 4.0  # at temperature 1
    rates: int = 10  # each √2 times the one before
    dim: int = 200
    batch: int = 1
    time: float = 40.0  # at temperature 1
    replicas: int = 64
    seed: int = 0


SMALL, FULL = Configuration(), Configuration(lengths=(4, 16, 64, 256, 1024, 4096), tokens=2**24, rates=14, replicas=256)


def lines(c: Configuration) -> Iterator[Line]:
    """Risk and gradient of each activation, stable rates of each temperature."""
    prior, activations = parse_prior(c.prior), [parse_activation(text) for text in c.activations]
    direction = np.asarray(prior.means[:1])
    direction = direction / np.linalg.norm(direction)
    keys = [OrderParameters(size * direction, [[size**2]]) for size in (c.key_length, c.gradient_key_length)]
    shared: dict[str, Any] = {"lengths": c.lengths, "tokens": c.tokens, "progress": False}
    snrs = [c.snr_per_log * float(np.log(length)) for length in c.lengths]
    scales = np.arange(1, 9) / 8
    for i, activation in enumerate(activations):
        risk = partial(
            risk_against_length, prior, [activation], keys[0], snrs=snrs, scales=scales, seed=c.seed, **shared
        )
        yield Line(f"risk_{i}", f"risk against L, {activation.name}", risk)
        gradient = partial(
            gradient_against_length,
            prior,
            [activation],
            keys[1],
            snrs=c.gradient_snr,
            key=jax.random.key(c.seed),
            **shared,
        )
        yield Line(f"gradient_{i}", f"gradient against L, {activation.name}", gradient)
    for i, temperature in enumerate(c.temperatures):
        yield Line(f"stable_{i}", f"learning rates at T = {temperature:g}", partial(_stable, c, temperature))


def _stable(c: Configuration, temperature: float) -> xr.Dataset:
    """Softmax at temperature T from its best keys, whose length is T times that at 1."""
    prior = parse_prior(c.prior)
    size = temperature * c.key_length
    direction = np.asarray(prior.means[:1])
    order = OrderParameters(size * direction / np.linalg.norm(direction), [[size**2]])
    rates = c.least_rate * temperature**2 * 2 ** (np.arange(c.rates) / 2)
    # keys of their own for each temperature: equal ones would give the same numbers but for the scale
    key = jax.random.fold_in(jax.random.key(c.seed), round(1e6 * temperature))
    return stability_against_rate(
        SingleLocation(c.stable_length, c.stable_snr, prior), [Softmax(temperature)], [order], rates, dim=c.dim,
        batch=c.batch, time=c.time * temperature**2, replicas=c.replicas, key=key, progress=False,
    )  # fmt: skip


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
        artists += _curve(ax, own, own["risk"], i)
    _length_axis(ax, first["length"].values)
    ax.set_yscale("log")
    plain_ticks(ax.yaxis)
    ax.set_ylabel("risk")
    return [*bayes, *artists]


def gradient_curves(ax: Axes, lines: Sequence[xr.Dataset]) -> list:
    """Norm of the mean gradient of each activation, and a guide of slope −1."""
    artists = []
    for i, line in enumerate(lines):
        own = line.isel(activation=0)
        seen = own["gradient"] > 3 * own["error"]  # below, it is noise
        artists += _curve(ax, own, own["gradient"].where(seen), i)
    lengths = lines[0]["length"].values
    far = lengths[-3:]
    guide = float(lines[0]["gradient"][0, -1]) * far[-1] / far / 4  # below the curves it is to be compared with
    artists += ax.plot(far, guide, color="0.3", linewidth=0.8, linestyle=(0, (1, 1)))
    ax.annotate("∝ 1/L", (far[1], guide[1]), xytext=(-4, -2), textcoords="offset points", ha="right", va="top")
    _length_axis(ax, lengths)
    ax.set_yscale("log")
    ax.set_ylabel("norm of the mean gradient")
    return artists


def _curve(ax: Axes, own: xr.Dataset, values: xr.DataArray, i: int) -> list:
    """Points of one activation, joined; the first shows around those that it is compared with."""
    wide: dict[str, Any] = {"linewidth": 2.2, "markersize": 4.5, "zorder": 2} if i == 0 else {}
    line = {"linestyle": look(i)["linestyle"], "label": short(own), **wide}
    return simulation_points(ax, own["length"], values, own["error"], i, **line)


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


def numbers(store: Store) -> dict[str, float]:
    """Key numbers: risks at the largest L above the Bayes risk, decay of the softmax's gradient, stable rates."""
    risks, gradients = _groups(store, "risk"), _groups(store, "gradient")
    found = {"Bayes risk": float(risks[0]["bayes"][-1])}
    found |= {f"risk, {short(own.isel(activation=0))}": float(own["risk"][0, -1]) for own in risks}
    first = gradients[0].isel(activation=0, length=slice(-2, None))
    ratio = (np.log(first[name].values) for name in ("gradient", "length"))
    found["gradient exponent, softmax"] = float(np.divide(*map(np.diff, ratio))[0])
    for temperature, low, _ in zip(*stable_brackets(_groups(store, "stable")), strict=True):
        found[f"stable rate, T = {temperature:g}"] = float(low)
    return found


def _with_error(value: float, error: float) -> str:
    return f"{value:.4f}" if error < 5e-5 else f"{value:.3f}±{error:.3f}"


def _groups(store: Store, kind: str) -> list[xr.Dataset]:
    count = sum(name.startswith(f"{kind}_") for name in store.datasets)
    return [store[f"{kind}_{i}"] for i in range(count)]


def _length_axis(ax: Axes, lengths: np.ndarray) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length}" for length in lengths])
    ax.set_xlabel("tokens L")
