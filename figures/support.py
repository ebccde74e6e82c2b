"""Least risk against the number of heads, for discrete priors with several numbers of support points."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from compare import Store
from compare.bayes import ACTIVATIONS, bayes_against_snr, optima_against_heads
from compare.lines import Line
from figures.bayes import BAYES
from figures.style import DOUBLE, NOISE, look, style
from theory._checks import invalid
from theory.names import parse_prior

SEARCH = 1  # purpose of randomness, folded into key(seed)
POINTS = {"color": "0.35", "linewidth": 0.9, "linestyle": (0, (1, 1.5)), "zorder": 1}


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    priors: tuple[str, ...] = (
        "sign_flips(mean=[0.0], amplitude=[1.0])",
        "discrete(points=[[1.0, 0.0], [-0.5, 0.8660254037844386], [-0.5, -0.8660254037844386]])",
    )
    activations: tuple[str, ...] = ("softmax", "B-softmax")
    more: int = 1  # heads beyond one for each support point
    length: int = 5
    snr: float = 8.0
    starts: int = 2
    tolerance: float = 1e-4
    seed: int = 0

    def check(self) -> None:
        """Refuses activations that are not known and priors that are not discrete."""
        for name in self.activations:
            if name not in ACTIVATIONS:
                raise invalid("activations", f"names among {', '.join(ACTIVATIONS)}", name)
        for text in self.priors:
            if np.any(np.asarray(parse_prior(text).covariances)):
                raise invalid("priors", "discrete priors", text)


SMALL = Configuration()
FULL = Configuration(
    priors=(
        "one_hot(features=2)",
        "one_hot(features=3)",
        *SMALL.priors,
        "sign_flips(mean=[0.0, 0.0], amplitude=[1.0, 1.0])",
    ),
    activations=tuple(ACTIVATIONS),
    more=2,
    starts=8,
    tolerance=1e-5,
)


def lines(c: Configuration) -> Iterator[Line]:
    """For each prior the Bayes risk, and for each activation its optima."""
    for p, text in enumerate(c.priors):
        yield Line(f"bayes_{p}", f"Bayes risk, {text}", partial(bayes, c, p))
        for a, name in enumerate(c.activations):
            yield Line(f"optima_{p}_{a}", f"{name}: optima against H, {text}", partial(optima, c, p, a))


def bayes(c: Configuration, prior: int) -> xr.Dataset:
    """Bayes risk and number of support points."""
    own = parse_prior(c.priors[prior])
    data = bayes_against_snr(own, snrs=[c.snr], length=c.length)
    return data.assign(points=((), own.components, {"long_name": "number of support points"}))


def optima(c: Configuration, prior: int, activation: int) -> xr.Dataset:
    """Optima for H = 1 … the number of support points and beyond."""
    own = parse_prior(c.priors[prior])
    key = jax.random.key(c.seed)
    for number in (SEARCH, prior, activation):
        key = jax.random.fold_in(key, number)
    return optima_against_heads(
        own, c.activations[activation], heads=range(1, own.components + c.more + 1), snr=c.snr, length=c.length,
        starts=c.starts, key=key, tolerance=c.tolerance, progress=False,
    )  # fmt: skip


def draw(store: Store) -> Figure:
    """A column for each prior: risk against H above, its excess over the Bayes risk below."""
    c = store.configuration
    count, names = len(c["priors"]), c["activations"]
    with style():
        figure = Figure(figsize=(DOUBLE, 3.5), layout="constrained")
        axes = figure.subplots(2, count, squeeze=False, sharex="col", sharey="row", height_ratios=(1, 1.1))
        for p, text in enumerate(c["priors"]):
            found = [store[f"optima_{p}_{a}"] for a in range(len(names))]
            risks(axes[0, p], store[f"bayes_{p}"], found)
            excesses(axes[1, p], store[f"bayes_{p}"], found, c["tolerance"])
            axes[0, p].set_title(f"{title(text)}\n{int(store[f'bayes_{p}']['points'])} support points")
            axes[1, p].set_xlabel("heads H")
        axes[0, 0].set_ylim(bottom=0)  # shared: when all is drawn
        axes[1, 0].set_ylim(bottom=c["tolerance"] / 4)
        axes[0, 0].set_ylabel("least risk")
        axes[1, 0].set_ylabel("least risk − Bayes risk")
        handles = [Line2D([], [], **_look(a), label=name) for a, name in enumerate(names)]
        handles += [
            Line2D([], [], label="Bayes risk", **BAYES),
            Line2D([], [], label="H = number of support points", **POINTS),
            Line2D([], [], color=NOISE, linewidth=5, label="error of the evaluation"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
        axes[0, 0].annotate(
            f"L = {c['length']}, ν = {c['snr']:g}", (0.05, 0.06), xycoords="axes fraction", fontsize=6.5
        )
    return figure


def risks(ax: Axes, bayes: xr.Dataset, found: list[xr.Dataset]) -> list:
    """Least risk of each activation, the Bayes risk and the number of support points."""
    artists = [ax.axhline(float(bayes["bayes"][0]), **BAYES), ax.axvline(int(bayes["points"]), **POINTS)]
    for a, own in enumerate(found):
        artists += ax.plot(own["heads"], own["risk"], **_look(a))
    _heads_axis(ax, found)
    return artists


def excesses(ax: Axes, bayes: xr.Dataset, found: list[xr.Dataset], tolerance: float) -> list:
    """The same less the Bayes risk; what the evaluation cannot tell from 0 lies in the band, with an arrow."""
    artists: list = [ax.axhspan(tolerance / 4, tolerance, color=NOISE, alpha=0.6, linewidth=0)]
    artists += [ax.axvline(int(bayes["points"]), **POINTS)]
    floor = tolerance / 2
    for a, own in enumerate(found):
        over = excess(bayes, own)
        artists += ax.plot(own["heads"], np.where(over > tolerance, over, floor), **_look(a))
    ax.set_yscale("log")
    ax.annotate("0 within the error", (0.04, 0.06), xycoords="axes fraction", fontsize=6)
    _heads_axis(ax, found)
    return artists


def excess(bayes: xr.Dataset, own: xr.Dataset) -> np.ndarray:
    """Least risk less the Bayes risk for each H."""
    return own["risk"].values - float(bayes["bayes"][0])


def numbers(store: Store) -> dict[str, float]:
    """For each prior and activation, the excess over the Bayes risk with one head per support point, and one fewer."""
    c, values = store.configuration, {}
    for p in range(len(c["priors"])):
        bayes = store[f"bayes_{p}"]
        points = int(bayes["points"])
        for a, name in enumerate(c["activations"]):
            over = excess(bayes, store[f"optima_{p}_{a}"])
            for heads in (points - 1, points):
                if heads:
                    values[f"{title(c['priors'][p])}: {name} − Bayes, H = {heads}"] = float(over[heads - 1])
    return values


def title(text: str) -> str:
    """A short name of a prior."""
    prior = parse_prior(text)
    kind, _, _ = text.partition("(")
    names = {"one_hot": "one-hot", "sign_flips": "sign flips", "discrete": "points"}
    return f"{names.get(kind, kind)}, F = {prior.features}"


def _look(index: int) -> dict:
    return {**look(index), "markerfacecolor": "white", "markeredgewidth": 0.8, "markersize": 4, "linewidth": 1.0}


def _heads_axis(ax: Axes, found: list[xr.Dataset]) -> None:
    most = int(found[0]["heads"].max())
    ax.set_xlim(0.6, most + 0.4)
    ax.set_xticks(range(1, most + 1))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
