"""Stage times against log D, predicted and measured: the lines of one task, each a Dataset that can be stored.

`predicted_stages` asks the theory (docs/model.md §14), `measured_stages` runs the exact chain at one D and measures it
as `stage_times` does, `compared` lays the two beside each other: slopes, medians, and the distributions.
"""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, Key
from scipy.stats import kstest

from compare.slopes import log_dim_slope
from compare.stages import Excursions, StageTimes, stage_times
from sim import train_reduced
from theory import Activation, OrderParameters, Prior, SingleLocation, Stage, predict_stages
from theory.passage import rank_cdf, rank_quantile

LEVELS = (0.25, 0.5, 0.75)  # of the measured times, between which bars are drawn
FEWEST = 8  # stage times that a distribution is judged by


def predicted_stages(
    prior: Prior, activation: Activation, *, heads: int, length: int, snr: float, dims: Sequence[int], variance: float,
    step_size: float, threshold: float, samples: int, coverage: float, progress: bool = True,
) -> xr.Dataset:  # fmt: skip
    """`predict_stages` at every D, with rates and slopes by feature and the time by which almost all have split.

    Beside what `StagePrediction.to_xarray` holds: `growth` (κ at the saddle that is left along the feature),
    `limit_slope` (see `limit_slopes`), `predicted_slope` (least squares of the predicted medians on log D), `rank`
    (place in the staircase, equal for features that split together, −1 without a stage) and `end` (dim), at which a
    share `coverage` of the ensemble, good to 1/samples, has split along every feature; the end of the flows if it has
    not by then.

    Raises:
        ValueError: a task whose heads do not split, or one where the noise keeps them from it.
    """
    task = SingleLocation(length, snr, prior)
    try:
        found = predict_stages(
            task, activation, heads, list(dims), variance=variance, step_size=step_size, threshold=threshold,
            samples=samples, progress=progress,
        )  # fmt: skip
    except RuntimeError as error:
        raise ValueError(f"{prior.name}, H = {heads}: {error}") from error
    first = found.stages[0]
    if first.ending:
        raise ValueError(f"{prior.name}, H = {heads}: heads do not split, the unspecialized point is {first.ending}")
    growth = np.full(task.features, np.nan)
    for stage in reversed(found.stages):  # the first stage of a feature counts
        growth[list(stage.features)] = stage.rate
    medians = found.quantile(0.5)
    latest = np.array([float(flow.time[-1]) for flow in found.ensembles])
    ends = all_split(found.times, coverage)
    added = {
        "growth": ("feature", growth, "κ at the saddle that is left along the feature"),
        "limit_slope": ("feature", limit_slopes(found.stages, task.features), "slope as D → ∞"),
        "predicted_slope": ("feature", _slopes(dims, medians), "slope of the predicted medians"),
        "variance": ("feature", np.asarray(prior.variance()), "Var θ_f"),
        "rank": ("feature", np.array(found.ranks), "place in the staircase, −1: no stage"),
        "end": ("dim", np.minimum(ends, latest), "time by which almost all have split"),
    }
    data = found.to_xarray()
    return data.assign({name: (dim, values, {"long_name": text}) for name, (dim, values, text) in added.items()})


def all_split(times: Float[np.ndarray, "N S F"], coverage: float) -> Float[np.ndarray, " N"]:
    """(N,) when a share `coverage` of the ensemble has split along every feature with a stage; inf if it has not."""
    staged = ~np.isnan(times).any(axis=(0, 1))
    return rank_quantile(times[:, :, staged].max(axis=2), coverage)


def limit_slopes(stages: Sequence[Stage], features: int) -> Float[np.ndarray, " F"]:
    """d(stage time)/d(log D) as D → ∞, by feature; NaN for features along which no saddle is left.

    A split amplitude starts at √(r_0/D): ½ log D e-folds below full size. For the first feature that gives 1/(2κ).
    For a later one the e-folds left when a saddle is reached are those that its growth rate at the earlier saddles (the
    largest among the directions of this feature; a decaying split stays at the noise) has not yet brought. Where groups
    divide further along features split before, nothing is waited for: these splits have grown with the first one.
    """
    behind, clock, slopes = np.ones(features), 0.0, np.full(features, np.nan)
    for stage in stages:
        if stage.ending:
            break
        new = [f for f in stage.features if np.isnan(slopes[f])]
        if not new:
            continue
        wait = behind[stage.feature] / stage.rate
        clock += wait
        behind = np.clip(behind - np.maximum(stage.rates, 0) * wait, 0, 1)
        slopes[new] = clock / 2
    return slopes


def measured_stages(
    prediction: xr.Dataset, *, prior: Prior, activation: Activation, heads: int, length: int, snr: float, dim: int,
    replicas: int, variance: float, learning_rate: float, batch: int, loss: str, threshold: float, records: int,
    key: Key[Array, ""], progress: bool = True,
) -> xr.Dataset:  # fmt: skip
    """`stage_times` of replicas of the exact chain at D, each from its own random start, until the predicted `end`."""
    task = SingleLocation(length, snr, prior)
    time = float(prediction["end"].sel(dim=dim))
    start, data = jax.random.split(key)
    order = OrderParameters.initial(
        start, heads=heads, features=prior.features, dim=dim, variance=variance, replicas=replicas
    )
    run = train_reduced(
        task, activation, order, dim=dim, learning_rate=learning_rate, time=time, batch=batch, key=data, loss=loss,
        record=min(records, round(time * dim / learning_rate) + 1), evaluation=2, progress=progress, throw=False,
    )  # fmt: skip
    found = stage_times(run, threshold=threshold)
    return found.to_xarray().assign(
        scale=("feature", found.scale, {"long_name": "√(ν Var θ_f)"}),
        records=("replica", found.records, {"long_name": "finite records"}),
    )


def compared(prediction: xr.Dataset, *runs: xr.Dataset) -> xr.Dataset:
    """Slopes, medians and distributions of the measured stage times beside the predicted ones.

    By feature: `slope` ± `slope_error` of the stage time against log D (`log_dim_slope`); `own_slope` ± `own_error`,
    against log D with each replica's own start taken out. By dim and feature: `measured` quantiles
    at `LEVELS` (runs that have not split count as later), `split` and `unsplit` runs, and of how many the latter are
    `expected` (good to runs/samples); `ks` and `p_value` of the
    Kolmogorov–Smirnov test against the predicted distribution, given that the run splits before the end: the constant
    is predicted, nothing is fitted.

    Args:
        prediction: of `predicted_stages`.
        runs: of `measured_stages`, one for each D in the order of the prediction.
    """
    dims = [int(d) for d in prediction["dim"].values]
    stages = [restored(run) for run in runs]
    features = prediction.sizes["feature"]
    blank = np.full(features, np.nan)
    slope = slope_error = own = own_error = blank
    if len(dims) > 1:
        fit = log_dim_slope(dims, stages, drop_censored=True)
        slope, slope_error = fit.slope, fit.error
        taken_out = log_dim_slope(dims, stages, own_start=True, drop_censored=True)
        own, own_error = taken_out.slope, taken_out.error
    measured = np.full((len(dims), features, len(LEVELS)), np.nan)
    counts = np.zeros((2, len(dims), features), dtype=np.int64)
    ks, p_value, expected = np.full((3, len(dims), features), np.nan)
    for i, stage in enumerate(stages):
        for f in np.flatnonzero(stage.scale > 0):
            times = stage.stage_time[:, f]
            seen = times[np.isfinite(times)]
            counts[:, i, f] = len(seen), len(times) - len(seen)
            measured[i, f] = np.quantile(times, LEVELS, method="inverted_cdf")
            predicted = prediction["stage_time"].values[i, :, f]
            expected[i, f] = len(times) * (1 - rank_cdf(predicted, float(stage.time[-1])))
            if len(seen) >= FEWEST and expected[i, f] < len(times):
                test = kstest(distribution(predicted, seen, end=float(stage.time[-1])), "uniform")
                ks[i, f], p_value[i, f] = test.statistic, test.pvalue
    each = ("dim", "feature")
    data = {
        "slope": ("feature", slope, "fitted slope against log D"),
        "slope_error": ("feature", slope_error, "its standard error"),
        "own_slope": ("feature", own, "fitted slope against log D, own starts taken out"),
        "own_error": ("feature", own_error, "its standard error"),
        "measured": ((*each, "level"), measured, "quantiles of the measured stage times"),
        "split": (each, counts[0], "runs that split"),
        "unsplit": (each, counts[1], "runs that did not split before the end"),
        "expected": (each, expected, "runs predicted not to split before the end"),
        "ks": (each, ks, "Kolmogorov–Smirnov statistic, given a split before the end"),
        "p_value": (each, p_value, "its p-value"),
    }
    return xr.Dataset(
        {name: (names, values, {"long_name": text}) for name, (names, values, text) in data.items()},
        coords={"dim": dims, "level": list(LEVELS)},
    )


def distribution(
    predicted: Float[np.ndarray, " S"], times: Float[np.ndarray, "..."], *, end: float = np.inf
) -> Float[np.ndarray, "..."]:
    """Predicted probability that a stage comes before each of `times`, given that it comes before `end`.

    Linear between the ranks of the predicted times (inf where the flow had not split by its own end); NaN if none
    comes before `end`.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.clip(rank_cdf(predicted, times) / rank_cdf(predicted, end), 0, 1)


def restored(run: xr.Dataset) -> StageTimes:
    """The `StageTimes` of a Dataset of `measured_stages`, fresh or from a store."""
    values = {name: run[name].values for name in map(str, run.data_vars)}
    own = ("variance", "scale", "amplitude", "stage_time", "at_start", "censored", "records", "side",
           "plateau_time", "plateau_risk", "plateau_slope")  # fmt: skip
    moved = ("replica", "feature", "head", "side", "left", "zero", "arrived")
    return StageTimes(
        time=run["time"].values,
        threshold=float(run.attrs["threshold"]),
        excursions=Excursions(**{name: values[f"excursion_{name}"] for name in moved}),
        configuration=_object(run.attrs["configuration"]),
        **{name: values[name] for name in own},
    )


def _object(text: Any) -> Any:
    """JSON text as what it says, however often it was wrapped."""
    while isinstance(text, str):
        text = json.loads(text)
    return text


def _slopes(dims: Sequence[int], medians: Float[np.ndarray, "N F"]) -> Float[np.ndarray, " F"]:
    """Slopes of medians on log D; NaN where one is missing."""
    if len(dims) < 2:
        return np.full(medians.shape[1], np.nan)
    logs = np.log(np.asarray(dims, dtype=float))
    with np.errstate(invalid="ignore"):
        return np.einsum("n,nf->f", logs - logs.mean(), medians) / np.sum((logs - logs.mean()) ** 2)
