"""Growth rates of specialization at the unspecialized point: curvatures, their law, and rates of small splits."""

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

from compare import Store
from compare.lines import Line
from figures.style import COLUMN, look, simulation_points, style, theory_line
from sim import train_reduced
from sim._lanes import repeated
from theory import (
    OrderParameters,
    Quadrature,
    SingleLocation,
    Softmax,
    Trajectory,
    gradient_flow,
    hessian_spectrum,
    sign_flips,
    unspecialized_point,
)
from theory._checks import invalid

LAW, CHAIN = 1, 2  # purposes of randomness, folded into key(seed)


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    mean: float = 2.0  # E θ_1
    amplitudes: tuple[float, ...] = (1.0, 1.5, 2.0, 2.5)  # θ_2 = ± each of these, in a task of its own
    length: int = 10
    snr: float = 1.0
    heads: int = 4
    accuracy: float = 1e-8  # of the risk
    samples: int = 2**20  # of E S_εε
    time: float = 30.0  # of the splits
    flow_split: float = 0.02  # root of Σ_h δm_h², at the end
    chain_split: float = 0.04  # smaller ones drown in its noise
    dim: int = 500
    learning_rate: float = 1.0
    batch: int = 20  # at larger η/B growth along the marginal directions, orthogonal to the spikes, changes κ
    loss: str = "limit"  # the finite one changes κ by (L + ν E|θ|²)/D
    replicas: int = 8
    seed: int = 0

    def check(self) -> None:
        """Refuses what has no split."""
        if self.heads < 2:
            raise invalid("heads", "at least 2, for a split", self.heads)
        if self.mean == 0 or not self.amplitudes or min(self.amplitudes) <= 0:
            raise invalid("amplitudes", "at least one, all of them positive, and a mean that is not 0", self.amplitudes)


SMALL = Configuration()
FULL = Configuration(amplitudes=(0.5, 1.0, 1.5, 2.0, 2.5, 3.0), dim=2000, replicas=16, chain_split=0.02)


def lines(c: Configuration) -> Iterator[Line]:
    """Curvatures and their law, then splits that start small: under the flow and under the chain."""
    yield Line("law", "E S_εε", partial(law, c))
    yield Line("spectrum", "curvatures at the unspecialized point", partial(spectrum, c))
    yield Line("flow", "splits under the flow", partial(flow, c), ("spectrum",))
    yield Line("chain", "splits under the chain", partial(chain, c), ("spectrum",))


def law(c: Configuration) -> xr.Dataset:
    """The slope of κ in Var θ, (2/H) ν E S_εε at scores of the calibrated point (docs/model.md §5), by sampling."""
    square = c.snr * c.mean**2
    normal = jax.random.normal(jax.random.fold_in(jax.random.key(c.seed), LAW), (c.samples, c.length))
    sigma = jax.nn.softmax(square**0.5 * normal + jnp.where(jnp.arange(c.length) == 0, square, 0.0)[None], axis=1)
    hit, rest = sigma[:, 0], sigma[:, 1:]
    s = np.asarray(hit * (1 - 2 * hit) * ((1 - hit) ** 2 + jnp.sum(rest**2, axis=1)), np.float64)
    factor = 2 * c.snr / c.heads
    return xr.Dataset(
        {
            "slope": ((), factor * s.mean(), {"long_name": "growth rate per Var θ"}),
            "slope_error": ((), factor * s.std() / c.samples**0.5, {"long_name": "standard error of slope"}),
        }
    )


def spectrum(c: Configuration) -> xr.Dataset:
    """Growth rates, minus the curvatures of splits along θ_2, and how far the H − 1 of them are apart."""
    rates, spreads = [], []
    for task in _tasks(c):
        method = Quadrature(c.accuracy)
        point = unspecialized_point(task, Softmax(), c.heads, method=method)
        found = hessian_spectrum(task, Softmax(), point, method=method)
        own = [label == "split, feature 2" for label in found.labels]
        values = -np.asarray(found.eigenvalues)[own]
        rates.append(values.mean() if len(values) == c.heads - 1 else np.nan)
        spreads.append(np.ptp(values) if len(values) else np.nan)
    return _dataset(c, {"rate": (rates, "growth rate κ"), "spread": (spreads, "largest less least of H − 1 rates")})


def flow(c: Configuration, spectrum: xr.Dataset) -> xr.Dataset:
    """Rates of small splits under gradient flow."""
    rates = []
    for task, start in zip(_tasks(c), _starts(c, spectrum, c.flow_split), strict=True):
        run = gradient_flow(task, Softmax(), start, [0.0, c.time], tolerance=1e-8, progress=False)
        rates.append(np.log(_growth(run)) / c.time)
    return _dataset(c, {"rate": (rates, "growth rate κ, measured")})


def chain(c: Configuration, spectrum: xr.Dataset) -> xr.Dataset:
    """Rates of small splits under the exact chain: of the mean split of the replicas, which is linear in the noise."""
    root = jax.random.fold_in(jax.random.key(c.seed), CHAIN)
    rates, errors = [], []
    for i, (task, start) in enumerate(zip(_tasks(c), _starts(c, spectrum, c.chain_split), strict=True)):
        run = train_reduced(
            task, Softmax(), repeated(start, c.replicas), dim=c.dim, learning_rate=c.learning_rate, batch=c.batch,
            time=c.time, record=2, loss=c.loss, evaluation=2, key=jax.random.fold_in(root, i), progress=False,
        )  # fmt: skip
        growth = _growth(run)
        rates.append(np.log(growth.mean()) / float(run.time[-1]))
        errors.append(growth.std(ddof=1) / c.replicas**0.5 / growth.mean() / float(run.time[-1]))
    return _dataset(c, {"rate": (rates, "growth rate κ, measured"), "error": (errors, "standard error of rate")})


def _tasks(c: Configuration) -> list[SingleLocation]:
    return [SingleLocation(c.length, c.snr, sign_flips([c.mean, 0.0], [0.0, a])) for a in c.amplitudes]


def _starts(c: Configuration, spectrum: xr.Dataset, split: float) -> list[OrderParameters]:
    """Heads at the calibrated point and alternately at ±, so that splits end at about the same size."""
    pattern = np.resize([1.0, -1.0], c.heads)
    pattern -= pattern.mean()
    pattern /= np.linalg.norm(pattern)
    starts = []
    for rate in spectrum["rate"].values:
        m = np.stack([np.full(c.heads, c.snr**0.5 * c.mean), split * np.exp(-rate * c.time) * pattern], axis=1)
        starts.append(OrderParameters(m, m @ m.T))
    return starts


def _growth(run: Trajectory) -> Any:
    """The split at the end, along that at the start and in units of it."""
    split = np.asarray(run.order.m)[..., 1]
    return np.sum(split[..., -1, :] * split[..., 0, :], axis=-1) / np.sum(split[..., 0, :] ** 2, axis=-1)


def _dataset(c: Configuration, values: dict[str, tuple[list[float], str]]) -> xr.Dataset:
    return xr.Dataset(
        {name: ("variance", np.asarray(x, float), {"long_name": text}) for name, (x, text) in values.items()},
        coords={"variance": ("variance", np.square(c.amplitudes), {"long_name": "Var θ"})},
    )


def draw(store: Store) -> Figure:
    """Rates against Var θ above, measured over predicted ones below."""
    c = store.configuration
    with style():
        figure = Figure(figsize=(COLUMN, 3.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        rates(above, store["law"], store["spectrum"], store["flow"], store["chain"])
        ratios(below, store["spectrum"], store["flow"], store["chain"])
        text = f"softmax, L = {c['length']}, H = {c['heads']}, ν = {c['snr']:g}, E θ = ({c['mean']:g}, 0)"
        above.set_title(text)
        above.legend(loc="upper left")
        below.set_xlabel("Var θ along the split")
    return figure


def rates(ax: Axes, law: xr.Dataset, spectrum: xr.Dataset, flow: xr.Dataset, chain: xr.Dataset) -> list:
    """The law as a line, curvatures as crosses, measured rates as points."""
    variance = spectrum["variance"].values
    ends = np.array([0.0, 1.08 * variance.max()])
    artists = theory_line(ax, ends, float(law["slope"]) * ends, 0, label="(2/H) ν E[S$_{εε}$] Var θ")
    artists += ax.plot(
        variance, spectrum["rate"], linestyle="", marker="+", markersize=10, color="black", zorder=2.5,
        label="−eigenvalue of the Hessian",
    )  # fmt: skip
    artists += _measured(ax, flow, chain, 1.0)
    ax.set_xlim(0, ends[1])
    ax.set_ylim(0, None)
    ax.set_ylabel("growth rate κ per unit of τ")
    return artists


def ratios(ax: Axes, spectrum: xr.Dataset, flow: xr.Dataset, chain: xr.Dataset) -> list:
    """Measured rates over minus the eigenvalue."""
    artists = [ax.axhline(1.0, color="black", linewidth=0.8)]
    artists += _measured(ax, flow, chain, spectrum["rate"].values)
    ax.set_ylabel("measured /\npredicted")
    return artists


def _measured(ax: Axes, flow: xr.Dataset, chain: xr.Dataset, unit: Any) -> list:
    """Crosses: flow; circles with error bars: chain."""
    options: dict[str, Any] = {"fmt": "o", "markersize": 4.5, "elinewidth": 0.9, "capsize": 2}
    options["label"] = "exact chain, small split"
    artists = simulation_points(ax, chain["variance"], chain["rate"] / unit, chain["error"] / unit, 1, **options)
    return artists + ax.plot(
        flow["variance"], flow["rate"] / unit, linestyle="", marker="x", markersize=4.5, markeredgewidth=1.1,
        color=look(2)["color"], zorder=4, label="flow, small split",
    )  # fmt: skip


def numbers(store: Store) -> dict[str, float]:
    """Slopes of κ in Var θ, and measured over predicted rates."""
    law, spectrum, flow, chain = (store[name] for name in ("law", "spectrum", "flow", "chain"))
    per_variance = spectrum["rate"] / spectrum["variance"]
    ratio, error = (chain[name] / spectrum["rate"] for name in ("rate", "error"))
    weight = error**-2
    return {
        "slope, (2/H) ν E S": float(law["slope"]),
        "its standard error": float(law["slope_error"]),
        "slope, Hessian, least": float(per_variance.min()),
        "slope, Hessian, largest": float(per_variance.max()),
        "spread of H − 1 rates": float(spectrum["spread"].max()),
        "flow/predicted, least": float((flow["rate"] / spectrum["rate"]).min()),
        "flow/predicted, largest": float((flow["rate"] / spectrum["rate"]).max()),
        "chain/predicted": float((weight * ratio).sum() / weight.sum()),
        "standard error of chain/predicted": float(weight.sum() ** -0.5),
        "largest |chain − predicted| in standard errors": float((abs(ratio - 1) / error).max()),
    }
