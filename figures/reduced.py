"""The exact chain of the order parameters against SGD on the layer, in law; the chain at D = 10^6 against the flow."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import ks_2samp

from compare import Store
from compare.lines import Line
from figures.scale import number_text
from figures.style import DOUBLE, NOISE, look, simulation_points, style, theory_line
from sim import MultiHeadAttention, train, train_reduced
from sim._lanes import repeated
from theory import OrderParameters, SingleLocation, Softmax, fluctuations, gradient_flow
from theory._checks import invalid
from theory.names import parse_prior

START, LAYER, CHAIN, LARGE = 1, 2, 3, 4  # purposes of randomness, folded into key(seed)
WIDTH = 1.96  # standard deviations on either side hold 95 %
LAYER_DASHES = ((0, (2, 1)), (0, (1, 1)))


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    prior: str = "sign_flips(mean=[0.0], amplitude=[1.0])"  # heads split along the first feature
    length: int = 4
    snr: float = 4.0
    heads: int = 2
    variance: float = 0.1
    dims: tuple[int, ...] = (200, 1000)
    replicas: tuple[int, ...] = (200, 64)  # of each kind, at each D, all from the same keys
    learning_rate: float = 4.0
    batch: int = 4
    time: float = 10.0
    records: int = 9
    large_dim: int = 1_000_000
    large_start: tuple[tuple[float, ...], ...] = ((0.03,), (-0.03,))  # m at τ = 0; r_⊥ = variance · I
    large_learning_rate: float = 8.0
    large_batch: int = 1
    large_records: int = 21
    corrector_points: int = 2**14  # of the flow: the error of its usual 2^11 is larger than the deviation at D = 10^6
    seed: int = 0

    def check(self) -> None:
        """Refuses numbers that do not fit each other."""
        if len(self.replicas) != len(self.dims) or not self.dims:
            raise invalid("replicas", f"one number for each D ({len(self.dims)})", self.replicas)
        if len(self.large_start) != self.heads:
            raise invalid("large_start", f"one row for each of {self.heads} heads", self.large_start)


SMALL = Configuration()
FULL = Configuration(dims=(200, 500, 1000), replicas=(2000, 1000, 500), large_learning_rate=1.0)


def lines(c: Configuration) -> Iterator[Line]:
    """Layer and chain at each D, and the chain at a large one."""
    for i, dim in enumerate(c.dims):
        yield Line(f"layer_{i}", f"SGD on the layer, D = {dim}", partial(runs, c, i, LAYER))
        yield Line(f"chain_{i}", f"chain, D = {dim}", partial(runs, c, i, CHAIN))
    yield Line("large", f"chain and flow, D = {c.large_dim}", partial(large, c))


def runs(c: Configuration, index: int, kind: int) -> xr.Dataset:
    """Replicas of the layer or of the chain, all from the same keys."""
    task, dim, root = SingleLocation(c.length, c.snr, parse_prior(c.prior)), c.dims[index], jax.random.key(c.seed)
    start, own = (jax.random.fold_in(jax.random.fold_in(root, purpose), index) for purpose in (START, kind))
    layer = MultiHeadAttention.initial(start, heads=c.heads, features=task.features, dim=dim, variance=c.variance)
    options: dict[str, Any] = {
        "learning_rate": c.learning_rate, "batch": c.batch, "time": c.time, "record": c.records, "evaluation": 2,
        "key": own, "progress": False,
    }  # fmt: skip
    if kind == LAYER:
        many = MultiHeadAttention(repeated(layer.keys, c.replicas[index]), features=task.features)
        run = train(task, many, **options)
    else:
        run = train_reduced(task, Softmax(), repeated(layer.order(), c.replicas[index]), dim=dim, **options)
    return run.to_xarray()[["m", "r", "risk"]].assign_attrs(dim=dim)


def large(c: Configuration) -> xr.Dataset:
    """One run of the chain, the flow from its start and the predicted deviation."""
    task, m = SingleLocation(c.length, c.snr, parse_prior(c.prior)), np.asarray(c.large_start)
    start = OrderParameters(m, m @ m.T + c.variance * np.eye(c.heads))
    own = jax.random.fold_in(jax.random.key(c.seed), LARGE)
    run = train_reduced(
        task, Softmax(), start, dim=c.large_dim, learning_rate=c.large_learning_rate, batch=c.large_batch, time=c.time,
        record=c.large_records, evaluation=2, key=own, progress=False,
    )  # fmt: skip
    flow = gradient_flow(
        task, Softmax(), start, run.time, step_size=c.large_learning_rate / c.large_batch,
        corrector_points=c.corrector_points, progress=False,
    )  # fmt: skip
    band = fluctuations(flow, dim=c.large_dim).to_xarray()
    return xr.Dataset(
        {
            **{f"chain_{name}": values for name, values in run.to_xarray()[["m", "r", "risk"]].items()},
            **{f"flow_{name}": values for name, values in flow.to_xarray()[["m", "r", "risk"]].items()},
            **band.data_vars,
        },
        attrs={"dim": c.large_dim},
    )


def split(data: xr.Dataset) -> np.ndarray:
    """(replica, time) standard deviation over heads of their overlaps with the first feature."""
    return data["m"].isel(feature=0).std("head").transpose("replica", "time").values


def draw(store: Store) -> Figure:
    """Means over runs against τ; distribution at the end; a run at large D less the flow."""
    c = store.configuration
    pairs = [(store[f"layer_{i}"], store[f"chain_{i}"]) for i in range(len(c["dims"]))]
    with style():
        figure = Figure(figsize=(DOUBLE, 2.9), layout="constrained")
        mosaic: Any = [["means", "law", "path"], ["means", "law", "residual"]]
        axes = figure.subplot_mosaic(mosaic, height_ratios=(1.2, 1))
        means, law, path, residual = (axes[name] for name in ("means", "law", "path", "residual"))
        for i, (layer, chain) in enumerate(pairs):
            mean_splits(means, layer, chain, i)
            distributions(law, layer, chain, i)
        entries = [("m", 0, 0), ("m", 1, 0), ("r", 0, 0), ("r", 0, 1)]  # as many as have a panel's room
        paths(path, store["large"], entries)
        residuals(residual, store["large"], entries)
        rate = f"η = {c['learning_rate']:g}, B = {c['batch']}"
        means.set_title(f"L = {c['length']}, H = {c['heads']}, ν = {c['snr']:g}, {rate}")
        means.set_xlabel("τ")
        means.set_ylabel("split of m, mean over runs")
        means.set_ylim(0, 1.3 * means.get_ylim()[1])  # room for the legend
        means.legend(loc="upper left")
        law.set_title(f"the same, {' and '.join(map(str, c['replicas']))} runs of each")
        law.set_xlabel(f"split of m at τ = {c['time']:g}")
        law.set_ylabel("fraction of runs below")
        law.set_ylim(0, 1)
        law.legend(loc="lower right")
        path.set_title(f"D = {number_text(c['large_dim'])}, η = {c['large_learning_rate']:g}, B = {c['large_batch']}")
        path.set_xticklabels([])
        residual.set_xlim(path.get_xlim())
        residual.set_xlabel("τ")
    return figure


def mean_splits(ax: Axes, layer: xr.Dataset, chain: xr.Dataset, index: int) -> list:
    """The chain as a line with a band of one standard error, the layer as points with theirs."""
    time, colour = chain["time"].values, look(index)["color"]
    (middle, error), (seen, bars) = (mean_and_error(split(data)) for data in (chain, layer))
    dim = int(chain.attrs["dim"])
    artists = [ax.fill_between(time, middle - error, middle + error, color=colour, alpha=0.3, linewidth=0)]
    artists += theory_line(ax, time, middle, index, label=f"chain, D = {dim}")
    label = f"SGD on the layer, D = {dim}"
    return artists + simulation_points(ax, layer["time"], seen, bars, index, markersize=4, label=label)


def distributions(ax: Axes, layer: xr.Dataset, chain: xr.Dataset, index: int) -> list:
    """Fractions of runs whose split at the end is smaller; p of the Kolmogorov-Smirnov test."""
    artists, ends = [], [split(data)[:, -1] for data in (chain, layer)]
    texts = f"chain, D = {int(chain.attrs['dim'])}", f"layer, p = {same_law(*ends):.2f}"
    looks = {"color": look(index)["color"]}, {"color": "black", "linestyle": LAYER_DASHES[index % 2]}
    for values, text, own in zip(ends, texts, looks, strict=True):
        values = np.sort(values)
        steps = np.arange(len(values) + 1) / len(values)
        artists += ax.step([values[0], *values], steps, where="post", linewidth=1.1, label=text, **own)
    return artists


def paths(ax: Axes, data: xr.Dataset, entries: list[tuple[str, int, int]]) -> list:
    """Entries of m and r: flow as lines, one run of the chain as points."""
    time, artists = data["time"].values, []
    for i, (name, row, column) in enumerate(entries):
        flow, chain = (data[f"{kind}_{name}"].values[:, row, column] for kind in ("flow", "chain"))
        artists += theory_line(ax, time, flow, i)
        text = f"{name}$_{{{row + 1}{column + 1}}}$"
        artists += simulation_points(ax, time, chain, np.full(len(time), np.nan), i, markersize=3, label=text)
    ax.set_ylabel("flow, chain")
    ax.legend(loc="upper left", ncols=2, columnspacing=0.8, handletextpad=0.2)
    return artists


def residuals(ax: Axes, data: xr.Dataset, entries: list[tuple[str, int, int]]) -> list:
    """The run less the flow in units of the predicted deviation at this D."""
    time = data["time"].values[1:]
    artists: list = [ax.axhspan(-WIDTH, WIDTH, color=NOISE, alpha=0.5, linewidth=0)]
    artists += [ax.axhline(0.0, color="black", linewidth=0.6)]
    for i, (name, row, column) in enumerate(entries):
        z = standardized(data, name)[:, row, column]
        artists += simulation_points(ax, time, z, np.full(len(time), np.nan), i, markersize=3)
    ax.set_ylim(-4, 4)
    ax.set_ylabel("(chain − flow) /\npredicted sd")
    ax.annotate("95 % band", (0.02, 0.92), xycoords="axes fraction", va="top", fontsize=6)
    return artists


def standardized(data: xr.Dataset, name: str) -> np.ndarray:
    """(time, ...) chain less flow over the predicted deviation, τ > 0."""
    return ((data[f"chain_{name}"] - data[f"flow_{name}"])[1:] / data[f"{name}_deviation"][1:]).values


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Over replicas."""
    return values.mean(axis=0), values.std(axis=0, ddof=1) / len(values) ** 0.5


def same_law(one: np.ndarray, other: np.ndarray) -> float:
    """p of the Kolmogorov-Smirnov test of two samples."""
    return float(ks_2samp(one, other)[1])  # pyright: ignore


def deviations(layer: xr.Dataset, chain: xr.Dataset) -> np.ndarray:
    """(time,) chain less layer of the mean split, of the risk and of the mean r_hh, in standard errors; τ > 0."""
    found = []
    for quantity in (split, lambda data: data["risk"].values, lambda data: np.einsum("rthh->rt", data["r"].values)):
        (one, error), (other, bar) = (mean_and_error(quantity(data)) for data in (chain, layer))
        found.append((one - other)[1:] / np.hypot(error, bar)[1:])
    return np.array(found)


def numbers(store: Store) -> dict[str, float]:
    """Agreement in law at each D, and of one run at large D with the flow and its band."""
    c, found = store.configuration, {}
    for i, dim in enumerate(c["dims"]):
        layer, chain = store[f"layer_{i}"], store[f"chain_{i}"]
        found[f"D = {dim}: mean split of the chain at the end"] = float(split(chain)[:, -1].mean())
        found[f"D = {dim}: largest |chain − layer| in standard errors"] = float(abs(deviations(layer, chain)).max())
        p_value = same_law(split(layer)[:, -1], split(chain)[:, -1])
        found[f"D = {dim}: Kolmogorov-Smirnov p of the split at the end"] = p_value
    data = store["large"]
    z = [standardized(data, name) for name in ("m", "r")]
    inside = np.concatenate([abs(part).reshape(len(part), -1) <= WIDTH for part in z], axis=1)
    found["D large: share of records in the 95 % band"] = float(inside.mean())
    found["D large: largest |chain − flow| of m"] = float(abs(data["chain_m"] - data["flow_m"]).max())
    found["D large: largest |chain − flow| of the risk"] = float(abs(data["chain_risk"] - data["flow_risk"]).max())
    return found
