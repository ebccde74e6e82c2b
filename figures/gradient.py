"""Gradient of a row in its logits against temperature, with its bounds (docs/limits.md §5)."""

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
from scipy.stats import norm as normal

from compare import Store
from compare.attention import gradient_against_temperature
from compare.lines import Line
from figures.attention import PRINTED, SHARP
from figures.style import BIAS, DOUBLE, lettered, look, simulation_points, style, theory_line
from figures.synthetic import ENCODER, TITLES, Encoder, described, mean_and_error, normal_logits
from theory import Softmax
from theory.limits import (
    directional_gradient,
    softmax_difference_bound,
    softmax_jacobian_bound,
    softmax_jacobian_norm,
)

RANDOM = "random"
HEADS = ("layer", "head")
LARGEST, MEAN, DIRECTION, STEPS = 0, 3, 2, 4  # looks, the last of the first ε
GUIDE: dict[str, Any] = {"color": "0.3", "linestyle": (0, (1, 1)), "linewidth": 0.9}


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    temperatures: tuple[float, ...] = (0.01, 0.0316, 0.1, 0.316, 1.0, 3.16, 10.0, 31.6)
    sizes: tuple[float, ...] = (1e-3, 0.1, 10.0)  # ε of finite steps
    length: int = 512
    spread: float = 3.0  # standard deviation of random logits
    random_rows: int = 2048
    directions: int = 8  # of each
    rows: int = 64  # query rows of the encoder
    seed: int = 0


SMALL, FULL = Configuration(), Configuration(random_rows=2**15, rows=512)


def lines(c: Configuration) -> Iterator[Line]:
    """The encoder's logits, and random ones."""
    encoder = Encoder.load(c.length)
    options: dict[str, Any] = {"temperatures": c.temperatures, "sizes": c.sizes, "rows": c.rows, "progress": False}
    options["key"] = jax.random.fold_in(jax.random.key(c.seed), 0)
    yield Line(ENCODER, "gradients, encoder", partial(gradient_against_temperature, encoder.attention, **options))
    yield Line(RANDOM, "gradients, random logits", partial(_random, c))


def _random(c: Configuration) -> xr.Dataset:
    """‖J‖₂, ‖J‖_F/√L and finite differences of every row."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(c.seed), 1), 2)
    logits = normal_logits(keys[0], (c.random_rows, c.length), c.spread)
    shape = (len(c.temperatures), c.random_rows)
    norm, root_mean_square, steps = np.empty(shape), np.empty(shape), np.empty((*shape, len(c.sizes)))
    largest = np.empty((len(c.temperatures), len(c.sizes)))
    for i, temperature in enumerate(c.temperatures):
        activation = Softmax(temperature)
        weights = activation(logits)
        norm[i] = softmax_jacobian_norm(weights, temperature=temperature)
        squares = jnp.sum(weights**2, axis=-1)
        square = squares - 2 * jnp.sum(weights**3, axis=-1) + squares**2
        frobenius = jnp.sqrt(jnp.maximum(square, 0)) / temperature  # rounding may take it below 0
        root_mean_square[i] = frobenius / np.sqrt(c.length)
        for j, size in enumerate(c.sizes):
            found = np.asarray(directional_gradient(activation, logits, size, key=keys[1], directions=c.directions))
            steps[i, :, j], largest[i, j] = np.sqrt(np.mean(found**2, axis=0)), found.max()
    rows, t, e = ("temperature", "row"), np.array(c.temperatures), np.array(c.sizes)
    named = {
        "norm": (rows, norm, "spectral norm of the softmax Jacobian"),
        "root_mean_square": (rows, root_mean_square, "‖J‖_F/√L, root mean square of ‖Jv‖ over directions v"),
        "gradient": ((*rows, "size"), steps, "‖α(l+εv)−α(l)‖/ε, root mean square over directions"),
        "largest": (("temperature", "size"), largest, "‖α(l+εv)−α(l)‖/ε, largest of all rows and directions"),
        "norm_bound": (rows[:1], np.asarray(softmax_jacobian_bound(t)), "bound 1/(2T) on the spectral norm"),
        "bound_printed": (
            rows[:1], np.asarray(softmax_jacobian_bound(t, form="printed")), "printed bound min{1/(4T), √2} (false)",
        ),
        "gradient_bound": (
            ("temperature", "size"), np.asarray(softmax_difference_bound(t[:, None], e[None])),
            "bound min{1/(2T), √2/ε} on the difference",
        ),
    }  # fmt: skip
    data = xr.Dataset({name: (dims, values, described(text)) for name, (dims, values, text) in named.items()})
    return data.assign_coords(
        temperature=("temperature", t, described("temperature T")), size=("size", e, described("size ε of the step"))
    )


def gap_density(length: int, spread: float) -> float:
    """Density at 0 of the gap between the two largest of L logits N(0, spread²).

    L(L−1) ∫ φ(x)² Φ(x)^{L−2} dx / spread. It is the mean of ‖J‖₂ at T → 0: rows whose gap g is of order T have
    ‖J‖₂ = 2σ(g/T)σ(−g/T)/T, all others none.
    """
    x, step = np.linspace(-10, 10, 20001, retstep=True)
    values = np.exp(2 * normal.logpdf(x) + (length - 2) * normal.logcdf(x))
    return float(length * (length - 1) * step * np.sum(values) / spread)


def draw(store: Store) -> Figure:
    """Norms of random rows, of the encoder's heads, and finite steps of both."""
    c = store.configuration
    with style():
        figure = Figure(figsize=(DOUBLE, 3.2), layout="constrained")
        axes = figure.subplots(1, 3)
        random_rows(axes[0], store[RANDOM], c)
        encoder_rows(axes[1], store[ENCODER])
        finite_steps(axes[2], store[RANDOM], store[ENCODER])
        axes[0].set_title(f"logits N(0, {c['spread']:g}²), L = {c['length']}")
        axes[1].set_title(f"{TITLES[ENCODER]}, L = {store[ENCODER].attrs['length']}")
        axes[2].set_title("steps of size ε, largest")
        low = min(axes[0].get_ylim()[0], axes[1].get_ylim()[0])
        for ax in axes[:2]:
            ax.set_ylim(low, 200)
        lettered(axes)
        figure.legend(handles=_handles(), loc="outside upper center", ncols=3)
    return figure


def random_rows(ax: Axes, data: xr.Dataset, c: dict[str, Any]) -> list:
    """Largest and mean ‖J‖₂ of all rows and ‖Jv‖ in random directions against T, with bounds and predictions."""
    t = data["temperature"].values
    artists = _bounds(ax, data, data["norm"].max("row"))
    artists += theory_line(ax, t, _root(data["root_mean_square"])[0], DIRECTION, linestyle="-")
    density = gap_density(c["length"], c["spread"])
    artists += ax.plot([t[0], 1], [density, density], **GUIDE)
    hot = np.array([1.0, t[-1]])
    artists += ax.plot(hot, 1 / (c["length"] * hot), **GUIDE)
    artists += simulation_points(ax, t, data["norm"].max("row"), np.zeros(len(t)), LARGEST)
    artists += simulation_points(ax, t, *mean_and_error(data["norm"], "row"), MEAN)
    artists += simulation_points(ax, t, *_root(data["gradient"].isel(size=0)), DIRECTION)
    _axes(ax)
    return artists


def encoder_rows(ax: Axes, data: xr.Dataset) -> list:
    """Largest ‖J‖₂ of all heads and rows, quartiles over heads of the rows' mean, the largest random direction."""
    t = data["temperature"].values
    artists = _bounds(ax, data, data["norm"].max(HEADS))
    artists += simulation_points(ax, t, data["norm"].max(HEADS), np.zeros(len(t)), LARGEST)
    low, middle, high = (data["norm_mean"].quantile(q, HEADS).values for q in (0.25, 0.5, 0.75))
    artists += simulation_points(ax, t, middle, [middle - low, high - middle], MEAN)
    artists += simulation_points(ax, t, data["gradient"].isel(size=0).max(HEADS), np.zeros(len(t)), DIRECTION, fmt="v")
    _axes(ax)
    ax.set_ylabel("")
    return artists


def finite_steps(ax: Axes, data: xr.Dataset, encoder: xr.Dataset) -> list:
    """Largest difference quotient at each ε, random rows (open) and encoder (filled), with the bounds."""
    artists = []
    t = data["temperature"].values
    for i, size in enumerate(data["size"].values):
        own = {"color": look(i + STEPS)["color"], "linestyle": "", "markersize": 4.2 - 0.8 * i}
        bound = data["gradient_bound"].isel(size=i)
        artists += theory_line(ax, t, bound, i + STEPS, linestyle="-", label=f"ε = {size:g}")
        artists += ax.plot(t, data["largest"].isel(size=i), marker="o", markerfacecolor="white", **own)
        artists += ax.plot(t, encoder["gradient"].isel(size=i).max(HEADS), marker="v", **own)
    _axes(ax)
    ax.set_ylabel("‖α(l+εv) − α(l)‖/ε")
    ax.legend(loc="lower left", handlelength=1.2)
    return artists


def exceeded(values: xr.DataArray, bound: xr.DataArray) -> np.ndarray:
    """Where values are above a bound by more than rounding."""
    return (values > bound * (1 + 1e-9)).values


def numbers(store: Store) -> dict[str, float]:
    """How near the norms come to the bounds, where they exceed the printed one, and the predictions."""
    c = store.configuration
    random, encoder = store[RANDOM], store[ENCODER]
    t = random["temperature"].values
    largest = {RANDOM: random["norm"].max("row"), ENCODER: encoder["norm"].max(HEADS)}
    found: dict[str, float] = {}
    for kind, values in largest.items():
        found[f"largest norm over 1/(2T), {kind}"] = float((values * 2 * t).max())
        above = t[exceeded(values, random["bound_printed"])]
        found[f"largest T above the printed bound, {kind}"] = float(above.max()) if above.size else np.nan
    some = t <= 1
    found["exponent of T ≤ 1, encoder"] = float(np.polyfit(np.log(t[some]), np.log(largest[ENCODER][some]), 1)[0])
    at = int(np.argmin(np.abs(np.log(t))))
    direction = float(encoder["gradient"].isel(size=0, temperature=at).max())
    found[f"norm over largest random direction, T = {t[at]:g}, encoder"] = float(largest[ENCODER][at]) / direction
    mean, error = mean_and_error(random["norm"], "row")
    density = gap_density(c["length"], c["spread"])
    found["mean norm at the least T, random"], found["its limit T → 0"] = float(mean[0]), density
    found["standard errors between them"] = float(abs(mean[0] - density) / error[0])
    residual = random["gradient"].isel(size=0) ** 2 - random["root_mean_square"] ** 2
    mean, error = mean_and_error(residual, "row")
    found["random directions off ‖J‖_F/√L, most standard errors"] = float(np.max(np.abs(mean / error)))
    return found


def _bounds(ax: Axes, data: xr.Dataset, largest: xr.DataArray) -> list:
    """Both bounds, and grey where the printed one is exceeded."""
    t = data["temperature"].values
    corners = np.sort(np.append(t, 1 / (4 * np.sqrt(2))))  # of the printed bound
    printed = np.asarray(softmax_jacobian_bound(corners, form="printed"))
    artists = [*ax.plot(t, data["norm_bound"], **SHARP), *ax.plot(corners, printed, **PRINTED)]
    above = t[exceeded(largest, data["bound_printed"])]
    shaded = [ax.axvspan(above[0], above[-1], color=BIAS, linewidth=0, zorder=0)] if above.size else []
    return artists + shaded


def _root(values: xr.DataArray) -> tuple[np.ndarray, np.ndarray]:
    """Root mean square over rows, and its standard error."""
    mean, error = mean_and_error(values**2, "row")
    return np.sqrt(mean), error / (2 * np.sqrt(mean))


def _axes(ax: Axes) -> None:
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("temperature T")
    ax.set_ylabel("‖J‖₂, ‖Jv‖")


def _handles() -> list:
    def marker(index: int, kind: str, text: str, **own: Any) -> Line2D:
        return Line2D([], [], **{"color": look(index)["color"], "linestyle": "", "markersize": 3, "marker": kind,
                                 "markerfacecolor": "white", "label": text, **own})  # fmt: skip

    return [
        marker(LARGEST, look(LARGEST)["marker"], "largest ‖J‖₂"),
        marker(MEAN, look(MEAN)["marker"], "mean ‖J‖₂ of rows (b: quartiles of heads)"),
        marker(
            DIRECTION, look(DIRECTION)["marker"], "random direction ‖Jv‖ (b: largest); line ‖J‖$_F$/√L", linestyle="-"
        ),
        Line2D([], [], **SHARP, label="1/(2T), sharp"),
        Line2D([], [], **PRINTED, label="min{1/(4T), √2}, printed (false)"),
        Line2D([], [], **GUIDE, label="mean ‖J‖₂ as T → 0 and T → ∞"),
        Patch(color=BIAS, linewidth=0, label="printed bound exceeded"),
        marker(6, "v", "c: heads (filled), random rows (open)", markerfacecolor="black"),
    ]
