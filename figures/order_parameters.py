"""Order parameters against τ: the flow and one-pass SGD of the layer at several D, and how fast they approach.

Each run is compared with the flow from its own start. One panel for each D and quantity shows one run; the last column
the root mean square deviation of all runs in units of D^-1/2, with the scatter predicted to first order along the
symmetric path (docs/model.md §14, §15). The finite loss adds a bias of order 1/D (§6), which shows at small D, and the
prediction ends where splits are no longer small. Along a feature that splits, the start (√(r_0/D)) and SGD's noise are
both of order D^-1/2 and grow at the same rate, so that a run leaves the saddle earlier or later than its flow at any D.
All else converges.
"""

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
from matplotlib.ticker import MaxNLocator

from compare import Store
from compare.lines import Line
from figures.style import DOUBLE, NOISE, look, plain_ticks, simulation_points, style, theory_line
from sim import MultiHeadAttention, train
from theory import OrderParameters, SingleLocation, fluctuations, gradient_flow
from theory._checks import invalid, whole
from theory.names import parse_activation, parse_prior
from theory.passage import SPLIT_FRACTION, full_split, head_deviation
from theory.stages import MATCH

_STARTS, _DATA = 1, 2  # purposes of randomness
PALEST = 0.65  # grey of the smallest D in the last column


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    prior: str = "sign_flips(mean=[0.5, 0.0], amplitude=[0.0, 1.5])"
    activation: str = "Softmax(temperature=1.0)"
    heads: int = 4
    length: int = 5
    snr: float = 4.0
    dims: tuple[int, ...] = (200, 600, 1800)
    replicas: tuple[int, ...] = (16, 12, 6)  # for each D; the first is shown
    variance: float = 0.25
    learning_rate: float = 2.0
    batch: int = 4
    loss: str = "finite"
    time: float = 30.0
    records: int = 31
    points: int = 1024  # for the covariance of one sample, per mixture component
    seed: int = 0

    def check(self) -> None:
        """Refuses wrong values by name, before anything is computed or written."""
        if len(self.replicas) != len(self.dims):
            raise invalid("replicas", f"one number per D ({len(self.dims)})", self.replicas)
        whole("records", self.records, 4)
        for dim in self.dims:
            steps = self.time / (self.records - 1) * dim / self.learning_rate
            if abs(steps - round(steps)) > 1e-9 * steps:
                raise invalid("records", f"whole numbers of steps between them at every D, D = {dim}", steps)


SMALL = Configuration()
FULL = Configuration(
    prior="sign_flips(mean=[2.0, 0.0, 0.0], amplitude=[0.0, 2.5, 1.5])", length=10, snr=1.0, dims=(250, 1000, 4000),
    replicas=(32, 16, 8), learning_rate=5.0, batch=10, time=120.0, records=41, points=4096,
)  # fmt: skip


def lines(c: Configuration) -> Iterator[Line]:
    """Runs at each D, the flows from their starts, and the predicted deviations."""
    for i in range(len(c.dims)):
        yield Line(f"runs_{i}", f"{c.replicas[i]} runs at D = {c.dims[i]}", partial(_runs, c, i))
    runs = tuple(f"runs_{i}" for i in range(len(c.dims)))
    yield Line("flows", "flows from their starts", partial(_flows, c), runs)
    yield Line("band", "predicted deviations", partial(_band, c), runs[-1:])


def _task(c: Configuration) -> SingleLocation:
    return SingleLocation(c.length, c.snr, parse_prior(c.prior))


def _runs(c: Configuration, i: int) -> xr.Dataset:
    start, data = (jax.random.fold_in(jax.random.fold_in(jax.random.key(c.seed), p), i) for p in (_STARTS, _DATA))
    task = _task(c)
    layer = MultiHeadAttention.initial(
        start, heads=c.heads, features=task.features, dim=c.dims[i], variance=c.variance, replicas=c.replicas[i],
        activation=parse_activation(c.activation),
    )  # fmt: skip
    return train(
        task, layer, learning_rate=c.learning_rate, batch=c.batch, time=c.time, key=data, record=c.records,
        loss=c.loss, evaluation=2, progress=False, throw=False,
    ).to_xarray()  # fmt: skip


def _starts(*runs: xr.Dataset) -> OrderParameters:
    m, r = (np.concatenate([run[name].isel(time=0).values for run in runs]) for name in ("m", "r"))
    return OrderParameters(m, r)


def _flow(c: Configuration, order: OrderParameters) -> Any:
    return gradient_flow(
        _task(c), parse_activation(c.activation), order, np.linspace(0, c.time, c.records),
        step_size=c.learning_rate / c.batch, tolerance=1e-5, progress=False,
    )  # fmt: skip


def _flows(c: Configuration, *runs: xr.Dataset) -> xr.Dataset:
    return _flow(c, _starts(*runs)).to_xarray().assign_coords(dim=("replica", np.repeat(c.dims, c.replicas)))


def _band(c: Configuration, run: xr.Dataset) -> xr.Dataset:
    """Deviations times √D along the symmetric path: the limit D → ∞ of every start, before heads split."""
    heads, features = run.sizes["head"], run.sizes["feature"]
    order = OrderParameters(jnp.zeros((heads, features)), c.variance * jnp.eye(heads))
    found = fluctuations(_flow(c, order), dim=c.dims[-1], points=c.points).to_xarray()
    scaled = {name: np.sqrt(c.dims[-1]) * found[name] for name in ("m_deviation", "r_deviation")}
    return xr.Dataset({k: v.assign_attrs(long_name=f"√D × deviation of {k[0]}") for k, v in scaled.items()})


def draw(store: Store) -> Figure:
    """A column for each D: m along each feature and r_hh of one run; a last one with the deviations of all runs."""
    c = store.configuration
    features = store["flows"].sizes["feature"]
    with style():
        figure = Figure(figsize=(DOUBLE, 0.7 + 1.25 * (features + 1)), layout="constrained")
        axes = figure.subplots(features + 1, len(c["dims"]) + 1, sharex=True, squeeze=False)
        for row in range(features + 1):
            for i, ax in enumerate(axes[row, :-1]):
                one_run(ax, store, i, row if row < features else None)
                ax.sharey(axes[row, 0])
                ax.tick_params(labelleft=i == 0)
                ax.yaxis.set_major_locator(MaxNLocator(5))
            axes[row, 0].set_ylabel(f"$m_{{h{row + 1}}}$" if row < features else "$r_{hh}$")
            deviations(axes[row, -1], store, row if row < features else None)
        for i, ax in enumerate(axes[0, :-1]):
            ax.set_title(f"D = {c['dims'][i]}")
        axes[0, -1].set_title(r"$\sqrt{D}\,\times$ rms(SGD − own flow)")
        for ax in axes[-1]:
            ax.set_xlabel(r"$\tau = \eta\,\mathrm{steps}/D$")
        figure.legend(handles=_handles(store), loc="outside lower center", ncols=5)
    return figure


def _handles(store: Store) -> list[Any]:
    c, grey = store.configuration, {"color": "0.3", "markerfacecolor": "white", "markersize": 3}
    return [
        Line2D([], [], color="0.3", label="flow, η/B corrector"),
        Line2D([], [], linestyle="", marker="o", **grey, label="SGD, colour: head"),
        Patch(facecolor=NOISE, linewidth=0, label=r"start, $\pm\sqrt{r_0/D}$"),
        Line2D([], [], color="black", label="predicted scatter, before the split"),
        *(
            Line2D([], [], **_look(store, i), markersize=3, markerfacecolor="white", label=f"D = {dim}")
            for i, dim in enumerate(c["dims"])
        ),
    ]


def _look(store: Store, index: int) -> dict[str, Any]:
    """One D in the last column: a grey of its own, black for the last, whose markers are those of heads elsewhere."""
    last = max(len(store.configuration["dims"]) - 1, 1)
    return {"color": f"{PALEST * (1 - index / last):.3g}", "linestyle": "", "marker": look(index)["marker"]}


def one_run(ax: Axes, store: Store, i: int, feature: int | None) -> list:
    """The first run at one D on its flow: every head's overlap with a feature, or (None) its square r_hh."""
    c = store.configuration
    run, flow = store[f"runs_{i}"].isel(replica=0), own_flows(store, i).isel(replica=0)
    artists: list[Any] = []
    if feature is not None:
        floor = np.sqrt(c["variance"] / c["dims"][i])
        artists.append(ax.axhspan(-floor, floor, color=NOISE, linewidth=0, alpha=0.6, zorder=0))
    seen, expected = quantity(run, feature), quantity(flow, feature)
    some = np.arange(0, run.sizes["time"], -(-run.sizes["time"] // 16))
    for h in range(run.sizes["head"]):
        artists += theory_line(ax, flow["time"], expected[:, h], h)
        artists += simulation_points(ax, run["time"][some], seen[some, h], np.nan * some, h)
    return artists


def deviations(ax: Axes, store: Store, feature: int | None) -> list:
    """√D × root mean square deviation over runs and heads at each D, with its error, and the predicted one."""
    artists, time = [], store["flows"]["time"].values
    until = judged_until(store)
    own = time <= until
    artists += theory_line(ax, time[own][1:], predicted(store, feature)[own][1:], color="black")
    for i in range(len(store.configuration["dims"])):
        value, error = scaled_deviation(store, i, feature)
        some = np.arange(1, len(time), -(-len(time) // 16))
        own_look = _look(store, i)
        artists += simulation_points(
            ax, time[some], value[some], error[some], fmt=own_look["marker"], color=own_look["color"]
        )
    if until < time[-1]:
        artists.append(ax.axvline(until, color="black", linewidth=0.6, linestyle=(0, (4, 2))))
    ax.set_yscale("log")
    plain_ticks(ax.yaxis)
    return artists


def quantity(data: xr.Dataset, feature: int | None) -> np.ndarray:
    """(..., time, head) overlaps with a feature, or r_hh."""
    if feature is not None:
        return data["m"].isel(feature=feature).values
    return np.diagonal(data["r"].values, axis1=-2, axis2=-1)


def own_flows(store: Store, i: int) -> xr.Dataset:
    """The flows from the starts of the runs at one D."""
    first = sum(store.configuration["replicas"][:i])
    return store["flows"].isel(replica=slice(first, first + store.configuration["replicas"][i]))


def scaled_deviation(store: Store, i: int, feature: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(time,) √D × root mean square of SGD − flow at one D over runs and heads, and its error over runs."""
    residual = quantity(store[f"runs_{i}"], feature) - quantity(own_flows(store, i), feature)
    squares = store.configuration["dims"][i] * np.mean(residual**2, axis=-1)
    value, count = np.sqrt(squares.mean(axis=0)), len(squares)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.std(squares, axis=0, ddof=1) / np.sqrt(count) / (2 * value) if count > 1 else np.nan * value
    return value, error


def predicted(store: Store, feature: int | None) -> np.ndarray:
    """(time,) the same from the covariance equation, root mean square over heads."""
    band = store["band"]
    if feature is not None:
        each = band["m_deviation"].isel(feature=feature).values
    else:
        each = np.diagonal(band["r_deviation"].values, axis1=-2, axis2=-1)
    return np.sqrt(np.mean(each**2, axis=-1))


def judged_until(store: Store) -> float:
    """The last record at which the flows at the largest D have not begun to split: spreads below `MATCH` of a split."""
    flows, c = own_flows(store, len(store.configuration["dims"]) - 1), store.configuration
    unit = full_split(SingleLocation(c["length"], c["snr"], parse_prior(c["prior"])))
    spread = head_deviation(flows["m"].values)
    grown = (spread >= MATCH * SPLIT_FRACTION * unit) & (unit > 0) & (spread > 3 * spread[:, :1])
    began = np.any(grown, axis=(0, 2))
    last = int(np.argmax(began)) - 1 if began.any() else len(began) - 1
    return float(flows["time"].values[max(last, 0)])


def bias(store: Store, i: int, feature: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(time,) D × mean of SGD − flow over runs and heads, and its standard error over runs."""
    residual = quantity(store[f"runs_{i}"], feature) - quantity(own_flows(store, i), feature)
    each = store.configuration["dims"][i] * residual.mean(axis=2)
    count = len(each)
    error = np.std(each, axis=0, ddof=1) / np.sqrt(count) if count > 1 else np.full(each.shape[1], np.nan)
    return each.mean(axis=0), error


def numbers(store: Store) -> dict[str, float]:
    """Before the split: deviations at the largest D over the predicted scatter, and D × bias at the two smallest."""
    c, time, until = store.configuration, store["flows"]["time"].values, judged_until(store)
    k, last = int(np.argmin(np.abs(time - until / 2))), len(c["dims"]) - 1
    found = {"before the split: until τ": until, "compared at τ": float(time[k])}
    for f in (*range(store["flows"].sizes["feature"]), None):
        name = "r_hh" if f is None else f"m, feature {f + 1}"
        value, error = (row[k] / predicted(store, f)[k] for row in scaled_deviation(store, last, f))
        found[f"{name}, D = {c['dims'][last]}: rms / predicted"] = float(value)
        found[f"{name}, D = {c['dims'][last]}: its error"] = float(error)
    for i, dim in enumerate(c["dims"][:2]):
        value, error = (row[k] for row in bias(store, i, 0))
        found[f"m, feature 1, D = {dim}: D × mean of SGD − flow"] = float(value)
        found[f"m, feature 1, D = {dim}: its error, times D"] = float(error)
    return found
