"""Dilution: the largest weight that L bounded logits allow, and normalizers that escape it (docs/limits.md §2)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from compare import Store
from compare.lines import Line
from figures.normalizers import short
from figures.style import DOUBLE, lettered, look, simulation_points, style, theory_line
from figures.synthetic import described
from theory import Activation, ScalableSoftmax, Sigmoid, Softmax
from theory.limits import softmax_weight_bounds
from theory.names import parse_activation


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    lengths: tuple[int, ...] = (4, 16, 64, 256, 1024, 4096, 16384)
    spreads: tuple[float, ...] = (0.5, 2.0, 4.0)  # Δ/T, logits in [−Δ, Δ]
    rows: int = 256  # of uniform logits
    activations: tuple[str, ...] = (
        "Softmax()", "ScalableSoftmax(0.43)", "Sparsemax()", "Entmax(1.5)", "TopK(power=0.5)", "Sigmoid()",
    )  # fmt: skip
    logit: float = 6.0  # of one token among N(0, 1)
    draws: int = 64
    seed: int = 0


SMALL, FULL = Configuration(), Configuration(rows=2048, draws=512)


def lines(c: Configuration) -> Iterator[Line]:
    """Rows of bounded logits, and one logit among noise for each normalizer."""
    yield Line("bounded", "largest weights of bounded logits", partial(_bounded, c))
    for i, name in enumerate(c.activations):
        yield Line(f"noise_{i}", f"one logit among noise, {name}", partial(_among_noise, c, name))


def _bounded(c: Configuration) -> xr.Dataset:
    """Softmax at T = 1 of uniform and of extremal rows, with both bounds."""
    shape = len(c.spreads), len(c.lengths)
    mean, error, largest, extremal = (np.empty(shape) for _ in range(4))
    for place in np.ndindex(shape):
        spread, length = c.spreads[place[0]], c.lengths[place[1]]
        key = jax.random.fold_in(jax.random.key(c.seed), 1000 * place[0] + place[1])
        logits = jax.random.uniform(key, (c.rows, length), jnp.float64, -spread, spread)
        top = np.asarray(jnp.max(Softmax()(logits), axis=-1))
        mean[place], error[place], largest[place] = top.mean(), top.std(ddof=1) / np.sqrt(c.rows), top.max()
        extremal[place] = Softmax()(jnp.full(length, -spread).at[0].set(spread))[0]
    spreads, lengths = np.array(c.spreads)[:, None], np.array(c.lengths)[None]
    dims = ("spread", "length")
    named = {
        "mean": (mean, "largest weight, mean of rows with uniform logits"),
        "error": (error, "its standard error"),
        "largest": (largest, "largest weight of all rows with uniform logits"),
        "extremal": (extremal, "largest weight, one logit at Δ and all others at −Δ"),
        "sharp": (np.asarray(softmax_weight_bounds(lengths, spreads)[1]), "sharp bound"),
        "printed": (np.asarray(softmax_weight_bounds(lengths, spreads, form="printed")[1]), "printed bound"),
    }
    data = xr.Dataset({name: (dims, values, described(text)) for name, (values, text) in named.items()})
    return data.assign_coords(
        spread=("spread", list(c.spreads), described("bound Δ/T on logits")),
        length=("length", list(c.lengths), described("tokens L", "tokens")),
    )


def _among_noise(c: Configuration, name: str) -> xr.Dataset:
    """Weight of one logit among N(0, 1); the same noise for every normalizer."""
    activation = parse_activation(name)
    weights = np.empty((len(c.lengths), c.draws))
    for i, length in enumerate(c.lengths):
        key = jax.random.fold_in(jax.random.key(c.seed), 10**6 + i)
        logits = jax.random.normal(key, (c.draws, length), jnp.float64).at[:, 0].set(c.logit)
        weights[i] = activation(logits)[:, 0]
    dims = ("activation", "length")
    named = {
        "weight": (weights.mean(axis=1), "mean weight of the token that stands out"),
        "error": (weights.std(axis=1, ddof=1) / np.sqrt(c.draws), "its standard error"),
        "expected": (_expected(activation, c.lengths, c.logit), "its expectation (NaN: not known)"),
    }
    data = xr.Dataset({key: (dims, values[None], described(text)) for key, (values, text) in named.items()})
    return data.assign_coords(
        activation=("activation", [activation.name], described("normalizer")),
        length=("length", list(c.lengths), described("tokens L", "tokens")),
    )


def _expected(activation: Activation, lengths: tuple[int, ...], logit: float) -> np.ndarray:
    """Of softmax, scalable softmax and sigmoid."""
    if isinstance(activation, Sigmoid):
        return 1 / (1 + np.array(lengths) * np.exp(-logit))
    if isinstance(activation, Softmax):
        return np.array([expected_weight(length, logit, 1 / float(activation.temperature)) for length in lengths])
    if isinstance(activation, ScalableSoftmax):
        scale = float(activation.scale)
        return np.array([expected_weight(length, logit, scale * np.log(length)) for length in lengths])
    return np.full(len(lengths), np.nan)


def expected_weight(length: int, logit: float, inverse_temperature: float) -> float:
    """E of the softmax weight of one logit among L−1 from N(0, 1).

    ∫ e^{−u} φ(u)^{L−1} du with φ(u) = E exp(−u e^{β(x − logit)}), by the trapezoidal rule.
    """
    noise, width = np.linspace(-9, 9, 1801, retstep=True)
    density = width * np.exp(-(noise**2) / 2) / np.sqrt(2 * np.pi)
    log_u, step = np.linspace(-60, 5, 3251, retstep=True)
    u = np.exp(log_u)
    lost = density @ -np.expm1(-u * np.exp(inverse_temperature * (noise - logit))[:, None])  # 1 − φ
    return float(step * np.sum(u * np.exp(-u + (length - 1) * np.log1p(-lost))))


def draw(store: Store) -> Figure:
    """Bounded logits under softmax, and one logit among noise under several normalizers."""
    c = store.configuration
    with style():
        figure = Figure(figsize=(DOUBLE, 2.7), layout="constrained")
        bounded, noise = figure.subplots(1, 2)
        bounded_weights(bounded, store["bounded"])
        noise_weights(noise, _noise(store))
        bounded.set_title("softmax, logits in [−Δ, Δ]")
        noise.set_title(f"one logit {c['logit']:g} among N(0, 1)")
        lettered((bounded, noise))
    return figure


def bounded_weights(ax: Axes, data: xr.Dataset) -> list:
    """Largest weights against L at each Δ/T: bounds as lines, uniform and extremal rows as markers."""
    artists = []
    lengths = data["length"].values
    for i, spread in enumerate(data["spread"].values):
        own = data.sel(spread=spread)
        artists += theory_line(ax, lengths, own["sharp"], i, linestyle="-")
        artists += theory_line(ax, lengths, own["printed"], i, linestyle=(0, (1, 1.2)), linewidth=0.9)
        artists += simulation_points(ax, lengths, own["mean"], own["error"], i, fmt="o")
        artists += simulation_points(
            ax, lengths, own["extremal"], np.zeros(len(lengths)), i, fmt="x", markersize=3.6, markeredgewidth=0.9
        )
    _axes(ax, lengths)
    ax.set_ylim(top=30)  # room for the legend; no weight is above 1
    ax.set_ylabel("largest weight")
    spreads = data["spread"].values
    colours = [Line2D([], [], color=look(i)["color"], label=f"Δ/T = {spread:g}") for i, spread in enumerate(spreads)]
    grey = {"color": "0.3", "markersize": 3}
    kinds = [
        Line2D([], [], color="0.3", label="bound, sharp"),
        Line2D([], [], color="0.3", linestyle=(0, (1, 1.2)), label="printed, $e^{2Δ/T}/L$"),
        Line2D([], [], **grey, linestyle="", marker="x", label="extremal row"),
        Line2D([], [], **grey, linestyle="", marker="o", markerfacecolor="white", label="uniform logits"),
    ]
    first = ax.legend(handles=colours, loc="upper right", handlelength=1.2)
    ax.add_artist(first)
    ax.legend(handles=kinds, loc="lower left", handlelength=1.8, labelspacing=0.3)
    return artists


def noise_weights(ax: Axes, groups: list[xr.Dataset]) -> list:
    """Weight of the token that stands out against L: sampled as markers, expectation as line where it is known.

    Markers are smaller and smaller: those that lie on each other are all seen.
    """
    artists = []
    for i, group in enumerate(groups):
        own = group.isel(activation=0)
        if np.isfinite(own["expected"]).any():
            artists += theory_line(ax, own["length"], own["expected"], i, linestyle="-")
        points = own["length"], own["weight"], own["error"]
        artists += simulation_points(ax, *points, i, label=short(own), markersize=5.2 - 0.5 * i)
    lengths = groups[0]["length"].values
    _axes(ax, lengths)
    ax.set_ylim(top=1.6)
    ax.set_ylabel("weight of the token that stands out")
    handles, _ = ax.get_legend_handles_labels()
    handles.append(Line2D([], [], color="0.3", label="expectation"))
    ax.legend(handles=handles, loc="lower left", labelspacing=0.3)
    return artists


def numbers(store: Store) -> dict[str, float]:
    """Top weights among noise, the uniform rows' decay, and how close rows come to the bound."""
    data = store["bounded"]
    far = data.isel(length=slice(-2, None))
    decay = np.diff(np.log(far["mean"].values), axis=1) / np.diff(np.log(far["length"].values))
    found = {
        "exponent of L, uniform logits": float(decay.mean()),
        "largest of all rows over sharp bound": float((data["largest"] / data["sharp"]).max()),
        "extremal row over sharp bound": float((data["extremal"] / data["sharp"]).mean()),
        "printed over sharp bound, most": float((data["printed"] / data["sharp"]).max()),
    }
    deviation = 0.0
    for own in (group.isel(activation=0) for group in _noise(store)):
        found[f"top weight, {short(own)}, L = {int(own['length'][-1])}"] = float(own["weight"][-1])
        noisy = own["error"] > 1e-12  # a sigmoid sees no other token
        score = abs((own["weight"] - own["expected"]) / own["error"]).where(noisy)
        deviation = float(np.nanmax([deviation, *score.values]))
    return found | {"top weights and expectation, most standard errors": deviation}


def table(store: Store) -> str:
    """Top weights of every normalizer at every L, and the numbers of the bounds."""
    groups = _noise(store)
    lines = [f"{'top weight, L':>24}" + "".join(f"{length:>9}" for length in groups[0]["length"].values)]
    for group in groups:
        own = group.isel(activation=0)
        lines.append(f"{short(own):>24}" + "".join(f"{value:9.3f}" for value in own["weight"].values))
        if np.isfinite(own["expected"]).any():
            lines.append(f"{'expectation':>24}" + "".join(f"{value:9.3f}" for value in own["expected"].values))
    rest = {name: value for name, value in numbers(store).items() if not name.startswith("top weight,")}
    return "\n".join([*lines, "", *(f"{name}: {value:.4g}" for name, value in rest.items())])


def _noise(store: Store) -> list[xr.Dataset]:
    return [store[f"noise_{i}"] for i in range(len(store.configuration["activations"]))]


def _axes(ax: Axes, lengths: np.ndarray) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length}" for length in lengths])
    ax.set_xlabel("tokens L")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(numticks=12))
    ax.yaxis.set_minor_formatter(NullFormatter())
