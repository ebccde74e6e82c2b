"""Risk against ν and against H for the three activations, with the Bayes line and trained layers."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from compare import Store
from compare.bayes import ACTIVATIONS
from figures.style import COLUMN, DOUBLE, look, plain_ticks, simulation_points, style, theory_line

BAYES = {"color": "black", "linewidth": 1.2, "linestyle": (0, (4, 1.5)), "marker": ""}


def draw(store: Store) -> Figure:
    """One column per prior: risk against ν above, against H below."""
    configuration = store.configuration
    priors = configuration["priors"]
    with style():
        width = COLUMN if len(priors) == 1 else DOUBLE
        figure = Figure(figsize=(width, 3.8), layout="constrained")
        axes = figure.subplots(2, len(priors), squeeze=False, sharey="row")
        for p, text in enumerate(priors):
            above, below = axes[0, p], axes[1, p]
            against_snr(above, store, p)
            against_heads(below, store, p)
            above.set_title(_title(text), fontsize=6.5)
            for ax, row in ((above, "ν"), (below, "H")):
                ax.set_xlabel(row)
                if p == 0:
                    ax.set_ylabel("risk")
            above.text(0.05, 0.06, f"H = {configuration['prior_heads'][p]}", transform=above.transAxes, fontsize=6.5)
            below.text(0.05, 0.06, f"ν = {configuration['snr']:g}", transform=below.transAxes, fontsize=6.5)
        handles = [Line2D([], [], **theory_look(a), label=name) for a, name in enumerate(ACTIVATIONS)]
        handles.append(Line2D([], [], label="Bayes", **BAYES))
        grey = {"color": "0.3", "markerfacecolor": "white", "markersize": 3}
        label = f"SGD, D = {configuration['dim']}, {configuration['replicas']} layers"
        handles.append(Line2D([], [], linestyle="", marker="o", **grey, label=label))
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles) if len(priors) > 1 else 3)
    return figure


def theory_look(index: int) -> dict:
    """Colour and dashes of an activation's line."""
    return {**look(index), "marker": "", "linestyle": "-"}


def against_snr(ax: Axes, store: Store, prior: int) -> list:
    """Optima as lines, the Bayes risk, and trained layers as points with the standard error over replicas."""
    bayes = store[f"bayes_{prior}"]
    artists = theory_line(ax, bayes["snr"], bayes["bayes"], **BAYES, zorder=2.5)
    for a in range(len(ACTIVATIONS)):
        line = store[f"snr_{prior}_{a}"]
        artists += theory_line(ax, line["snr"], line["risk"], **theory_look(a))
        for i, snr in enumerate(store.configuration["trained_snrs"]):
            mean, error = final_risk(store[f"trained_{prior}_{a}_{i}"])
            shift = 1.06 ** (a - 1)  # side by side where they coincide
            artists += simulation_points(ax, [snr * shift], [mean], [error], a, markersize=3)
    snrs = store.configuration["snrs"]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(snrs[0] / 1.2, snrs[-1] * 1.2)
    ax.set_xticks(snrs, [f"{snr:g}" for snr in snrs])
    plain_ticks(ax.yaxis)
    return artists


def against_heads(ax: Axes, store: Store, prior: int) -> list:
    """Optima as lines with marks at whole H, and the Bayes risk as a level."""
    level = float(store[f"bayes_{prior}"]["bayes"].sel(snr=store.configuration["snr"]))
    artists = [ax.axhline(level, **{k: v for k, v in BAYES.items() if k != "marker"})]
    for a in range(len(ACTIVATIONS)):
        line = store[f"heads_{prior}_{a}"]
        artists += theory_line(ax, line["heads"], line["risk"], **{**theory_look(a), "marker": ".", "markersize": 4})
    ax.set_xticks(store.configuration["heads"])
    ax.set_ylim(bottom=0, auto=True)  # panels that share the axis may reach higher
    return artists


def final_risk(trained: xr.Dataset) -> tuple[float, float]:
    """Mean and standard error, over replicas that reached their end, of the last population risk."""
    risk = trained["risk"].isel(time=-1).where(trained["result"] == 0).dropna("replica")
    count = risk.sizes["replica"]
    if count == 0:
        return np.nan, np.nan
    return float(risk.mean()), float(risk.std(ddof=1)) / np.sqrt(count) if count > 1 else np.nan


def numbers(store: Store) -> dict[str, float]:
    """Key numbers: for each prior the Bayes risk and the optima at the largest ν, and the final risks of layers."""
    found = {}
    for p, prior in enumerate(store.configuration["priors"]):
        found[f"Bayes risk, {prior}"] = float(store[f"bayes_{p}"]["bayes"][-1])
        for a, name in enumerate(ACTIVATIONS):
            found[f"{name}, {prior}"] = float(store[f"snr_{p}_{a}"]["risk"][-1])
            found[f"{name} trained, {prior}"] = final_risk(store[f"trained_{p}_{a}_0"])[0]
    return found


def table(store: Store) -> str:
    """Every number of the figure, with its error: starts' spread for optima, standard error for trained layers."""
    configuration, lines = store.configuration, []
    names = list(ACTIVATIONS)
    optima = [data for group, data in store.datasets.items() if group.startswith(("snr_", "heads_"))]
    worst = max(float(data["error"].max()) for data in optima)
    head = "".join(f"{name:>20}" for name in names)
    for p, prior in enumerate(configuration["priors"]):
        bayes = store[f"bayes_{p}"]
        lines += ["", f"{prior}, L = {configuration['length']}"]
        for kind, title in (
            ("snr", f"ν (H = {configuration['prior_heads'][p]})"),
            ("heads", f"H (ν = {configuration['snr']:g})"),
        ):
            lines.append(f"  {title:>12}{'Bayes':>11}{head}")
            series = [store[f"{kind}_{p}_{a}"] for a in range(len(names))]
            for value in series[0][kind].values:
                level = bayes["bayes"].sel(snr=value if kind == "snr" else configuration["snr"])
                row = "".join(_optimum(s.sel({kind: value}), several=configuration["starts"] > 1) for s in series)
                lines.append(f"  {value:>12g}{float(level):>11.4f}{row}")
        lines.append(
            f"  SGD, D = {configuration['dim']}: mean ± standard error over {configuration['replicas']} layers"
        )
        for i, snr in enumerate(configuration["trained_snrs"]):
            points = (final_risk(store[f"trained_{p}_{a}_{i}"]) for a in range(len(names)))
            row = "".join(f"{mean:>11.4f} ± {error:.0e}" for mean, error in points)
            lines.append(f"  {snr:>12g}{float(bayes['bayes'].sel(snr=snr)):>11.4f}{row}")
    brackets = ["in brackets: highest less lowest risk reached from the starts"] if configuration["starts"] > 1 else []
    return "\n".join([*lines, "", *brackets, f"evaluation errors up to {worst:.0e}", ""])


def _optimum(data: xr.Dataset, *, several: bool) -> str:
    """A risk, and in brackets how far apart the starts ended if there were several."""
    spread = f" ({float(data['spread']):.0e})" if several else " " * 8
    return f"{float(data['risk']):>11.4f}{spread}"


def _title(prior: str) -> str:
    """A short form of a prior's canonical name."""
    name, arguments = prior.rstrip(")").split("(", 1)
    short = {"sign_flips": "sign flips", "one_hot": "one-hot", "gaussian": "Gaussian"}.get(name, name)
    return f"{short}\n{arguments.replace('.0', '').replace(' ', '')}"
