"""When heads specialize, measured the same way on theory and on simulation.

`stage_times` reads the times off a trajectory (docs/model.md §5); `compare.slopes` fits how they grow with log D.
Nothing here is averaged over heads or replicas before it is measured, so nothing needs aligning.
"""

import collections
import itertools
import json
from typing import Any

import equinox as eqx
import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from compare._words import plus_minus
from theory import Trajectory
from theory._checks import instance, invalid
from theory._words import counted
from theory.passage import SPLIT_FRACTION, first_passage, full_split, head_deviation

SAME_VARIANCE = 1e-9  # relative: features whose variances differ by less have no order to keep
FEWEST = 3  # records that a plateau is read from


class Excursions(eqx.Module):
    """Heads that change sides after the split, one entry each; times of the records, in the order of the arrays.

    Attributes:
        replica: (N,) and `feature`, `head`: whose; `side`: the one it left, +1 or −1.
        left: (N,) the last record on that side.
        zero: (N,) when m_hf − √ν E θ_f last went through 0 before it arrived (linear between records); NaN if it
            has not.
        arrived: (N,) the first record on the other side; NaN for a head in transit at the end (unfinished).
    """

    replica: Int[np.ndarray, " N"]
    feature: Int[np.ndarray, " N"]
    head: Int[np.ndarray, " N"]
    side: Int[np.ndarray, " N"]
    left: Float[np.ndarray, " N"]
    zero: Float[np.ndarray, " N"]
    arrived: Float[np.ndarray, " N"]

    def count(self, shape: tuple[int, ...], *, unfinished: bool = False) -> Int[np.ndarray, "R F"]:
        """Finished (or unfinished) excursions of each replica and feature, `shape` = (R, F)."""
        found, kept = np.zeros(shape, dtype=int), np.isnan(self.arrived) == unfinished
        np.add.at(found, (self.replica[kept], self.feature[kept]), 1)
        return found


class StageTimes(eqx.Module):
    """What `stage_times` measures (defined there); prints as a table. R = 1 for a single run.

    Attributes:
        time: (T,) clock τ of the records.
        threshold: in units of √(ν Var θ_f).
        variance: (F,) Var θ_f.
        scale: (F,) √(ν Var θ_f), 0 for features without a stage.
        amplitude: (R, T, F) a_f(τ); NaN for features without a stage and for records that are not there.
        stage_time: (R, F) τ of the first passage; inf if censored, NaN for features without a stage.
        at_start: (R, F) whether the amplitude was there at the first record already: the time is an upper bound.
        censored: (R, F) whether it was not there by `end`: the time is later than that.
        records: (R,) number of records before the first that is not finite.
        side: (R, T, H, F) +1, −1, or 0 (undecided); 0 too where there is no record or no stage.
        excursions: the heads that changed sides.
        plateau_time: (R, F+1) record of the plateau with 0, 1, … features split; NaN where there is none.
        plateau_risk: (R, F+1) population risk there.
        plateau_slope: (R, F+1) dE/dτ there.
        configuration: of the trajectory.
    """

    time: Float[np.ndarray, " T"]
    threshold: float
    variance: Float[np.ndarray, " F"]
    scale: Float[np.ndarray, " F"]
    amplitude: Float[np.ndarray, "R T F"]
    stage_time: Float[np.ndarray, "R F"]
    at_start: Bool[np.ndarray, "R F"]
    censored: Bool[np.ndarray, "R F"]
    records: Int[np.ndarray, " R"]
    side: Int[np.ndarray, "R T H F"]
    excursions: Excursions
    plateau_time: Float[np.ndarray, "R S"]
    plateau_risk: Float[np.ndarray, "R S"]
    plateau_slope: Float[np.ndarray, "R S"]
    configuration: dict[str, Any] = eqx.field(static=True)

    @property
    def heads(self) -> int:
        """Number H of heads."""
        return self.side.shape[2]

    @property
    def failed(self) -> Bool[np.ndarray, " R"]:
        """Replicas with records that are not finite."""
        return self.records < len(self.time)

    @property
    def end(self) -> Float[np.ndarray, " R"]:
        """τ of the last finite record, where a replica is censored; NaN if it has none."""
        return np.where(self.records > 0, self.time[np.maximum(self.records - 1, 0)], np.nan)

    @property
    def order(self) -> Int[np.ndarray, "R F"]:
        """Features in the order of their stage times, then −1 for those that have none within the records."""
        seen = np.isfinite(self.stage_time)
        order = np.argsort(np.where(seen, self.stage_time, np.inf), axis=1, kind="stable")
        return np.where(np.arange(order.shape[1]) < seen.sum(axis=1, keepdims=True), order, -1)

    @property
    def in_order(self) -> Float[np.ndarray, " R"]:
        """1 if of two features the one with the larger variance always came first, 0 if not; NaN if none tell."""
        larger = (self.variance[:, None] > (1 + SAME_VARIANCE) * self.variance[None]) & (self.scale > 0)
        first, second = self.stage_time[:, :, None], self.stage_time[:, None, :]
        right = np.any(larger & (first < second), axis=(1, 2))
        wrong = np.any(larger & (first > second), axis=(1, 2))
        return np.where(wrong, 0.0, np.where(right, 1.0, np.nan))

    @property
    def in_order_of_variance(self) -> float:
        """Fraction of the replicas that tell whose features came in the order of Var θ_f; NaN if none tells."""
        told = self.in_order[np.isfinite(self.in_order)]
        return float(told.mean()) if told.size else float("nan")

    @property
    def groups(self) -> Int[np.ndarray, "R T F 3"]:
        """Numbers of heads on the + side, the − side, and undecided; −1 where there is no record or no stage."""
        counts = np.stack([np.sum(self.side == which, axis=2) for which in (1, -1, 0)], axis=-1)
        return np.where(np.isfinite(self.amplitude)[..., None], counts, -1)

    @property
    def last_groups(self) -> Int[np.ndarray, "R F 3"]:
        """`groups` at each replica's last finite record."""
        return self.groups[np.arange(len(self.records)), np.maximum(self.records - 1, 0)]

    @property
    def summary(self) -> xr.Dataset:
        """Over replicas, by feature: counts, median, means.

        `count_reached` (within the records), `count_at_start`, `count_censored`; `median` of all, censored ones as
        +inf and those at the start at the first record; `mean` of τ and `log_mean` of log τ over the reached ones
        alone, with standard errors `mean_error`, `log_mean_error` (NaN with fewer than two).
        """
        reached = np.isfinite(self.stage_time) & ~self.at_start
        with np.errstate(divide="ignore"):
            logs = np.log(np.where(reached, self.stage_time, 1.0))
        described = {
            "count_reached": (reached.sum(axis=0), "replicas that split within the records"),
            "count_at_start": (self.at_start.sum(axis=0), "replicas split at the first record already"),
            "count_censored": (self.censored.sum(axis=0), "replicas not split by their last finite record"),
            "median": (np.median(self.stage_time, axis=0), "median stage time, censored ones as inf"),
        }
        for prefix, values, text in (("", self.stage_time, "stage time"), ("log_", logs, "log stage time")):
            with np.errstate(invalid="ignore"):
                means = np.array([_mean(column[kept]) for column, kept in zip(values.T, reached.T, strict=True)]).T
            described[f"{prefix}mean"] = (means[0], f"mean {text} of the reached")
            described[f"{prefix}mean_error"] = (means[1], f"standard error of the mean {text}")
        return xr.Dataset({name: ("feature", value, {"long_name": text}) for name, (value, text) in described.items()})

    def to_xarray(self) -> xr.Dataset:
        """Dimensions replica, time, head, feature, plateau, excursion; `summary` and the report with it."""
        replicas, features = self.stage_time.shape
        each, by_time = ("replica", "feature"), ("replica", "time", "feature")
        sides = ("plus", "minus", "undecided")
        data: dict[str, tuple[Any, Any, str]] = {
            "stage_time": (each, self.stage_time, "first passage of the amplitude, inf: censored, NaN: no stage"),
            "at_start": (each, self.at_start, "at or above the threshold at the first record"),
            "censored": (each, self.censored, "below the threshold up to the last finite record"),
            "order": (("replica", "rank"), self.order, "features by stage time, -1: none within the records"),
            "in_order": ("replica", self.in_order, "1: in the order of variance, 0: not, NaN: cannot be told"),
            "end": ("replica", self.end, "last finite record"),
            "failed": ("replica", self.failed, "records that are not finite"),
            "variance": ("feature", self.variance, "Var θ_f"),
            "amplitude": (by_time, self.amplitude, "standard deviation over heads / √(ν Var θ_f)"),
            "side": (("replica", "time", "head", "feature"), self.side, "+1, -1, or 0: undecided"),
            **{name: (by_time, self.groups[..., i], f"heads {name}, -1: none") for i, name in enumerate(sides)},
            "excursions": (each, self.excursions.count((replicas, features)), "heads that changed sides"),
            "unfinished": (each, self.excursions.count((replicas, features), unfinished=True), "heads in transit"),
            "plateau_time": (("replica", "plateau"), self.plateau_time, "record of the plateau"),
            "plateau_risk": (("replica", "plateau"), self.plateau_risk, "population risk on the plateau"),
            "plateau_slope": (("replica", "plateau"), self.plateau_slope, "dE/dτ on the plateau"),
        }
        for name in ("replica", "feature", "head", "side", "left", "zero", "arrived"):
            data[f"excursion_{name}"] = ("excursion", getattr(self.excursions, name), f"{name} of an excursion")
        sizes = {"replica": replicas, "feature": features, "head": self.heads, "plateau": features + 1}
        return xr.Dataset(
            {name: (dims, values, {"long_name": text}) for name, (dims, values, text) in data.items()},
            coords={
                "time": ("time", self.time, {"long_name": "clock τ = η·steps/D"}),
                **{name: np.arange(size) for name, size in sizes.items()},
            },
            attrs={
                "threshold": float(self.threshold),
                "in_order_of_variance": self.in_order_of_variance,
                "report": str(self),
                "configuration": json.dumps(self.configuration),
            },
        ).merge(self.summary)

    def __str__(self) -> str:
        told, failed = int(np.isfinite(self.in_order).sum()), int(self.failed.sum())
        lines = [
            f"Stage times: standard deviation over heads first at {self.threshold:g} √(ν Var θ_f)",
            f"  H = {self.heads}, {counted(len(self.records), 'run')}, τ = {self.time[0]:g} … {self.time[-1]:g}"
            + (f"; {failed} failed, censored at the last finite record" if failed else ""),
            f"  {'feature':>7}{'Var θ':>9}{'reached':>9}{'at start':>10}{'censored':>10}{'median τ':>10}"
            f"{'mean τ ± error':>19}{'mean log τ ± error':>21}{'excursions':>14}   groups at the end (runs)",
        ]
        summary = {str(name): values.to_numpy() for name, values in self.summary.items()}
        shape = self.stage_time.shape
        done, going = (self.excursions.count(shape, unfinished=which).sum(axis=0) for which in (False, True))
        for f, variance in enumerate(self.variance):
            if self.scale[f] == 0:
                lines.append(f"  {f + 1:>7}{variance:9.3g}   no stage: √(ν Var θ_f) = 0")
                continue
            s = {name: values[f] for name, values in summary.items()}
            moved = f"{done[f]}" + (f" (+{going[f]})" if going[f] else "")
            lines.append(
                f"  {f + 1:>7}{variance:9.3g}{s['count_reached']:9d}{s['count_at_start']:10d}{s['count_censored']:10d}"
                f"{s['median']:10.4g}{plus_minus(s['mean'], s['mean_error']):>19}"
                f"{plus_minus(s['log_mean'], s['log_mean_error']):>21}{moved:>14}   {self._partitions(f)}"
            )
        fraction = f"{self.in_order_of_variance:.0%} of {counted(told, 'run')} that tell" if told else "cannot be told"
        lines.append(f"  features in the order of their variance: {fraction}")
        if self.heads == 1:
            lines.append("  one head has nothing to split from: no stage is ever reached")
        if not np.any(self.scale > 0):
            lines.append("  no signal varies (ν Var θ_f = 0 for every feature): there are no stages")
        if np.any(self.at_start) or np.any(self.censored):
            lines.append("  medians count censored runs as later than all; means are over the reached ones alone")
        return "\n".join(lines)

    def _partitions(self, feature: int) -> str:
        """`2|2 (6), 3|1 (2)`: the larger and the smaller side, `+1?` one undecided."""
        found = collections.Counter()
        for plus, minus, rest in self.last_groups[:, feature].tolist():
            if plus >= 0:
                found[f"{max(plus, minus)}|{min(plus, minus)}" + (f"+{rest}?" if rest else "")] += 1
        shown = [f"{name} ({number})" for name, number in found.most_common(3)]
        return ", ".join(shown) + (", …" if len(found) > 3 else "")


def stage_times(trajectory: Trajectory, *, threshold: float = SPLIT_FRACTION) -> StageTimes:
    """When the heads of each replica specialize along each feature, with groups, excursions and plateaus.

    *Amplitude.* a_f(τ) is the standard deviation over heads (with 1/H) of m_hf, in units of √(ν Var θ_f): a full split
    of a ± feature has a_f of order 1. A feature with ν Var θ_f = 0 has no stage (NaN). One head alone never splits.

    *Stage time* of feature f in a replica: where a_f first reaches `threshold`, log-linearly interpolated between the
    two records (amplitudes grow exponentially; linearly if the earlier one is exactly 0). A value exactly at the
    threshold at a record gives that record's time. At or above it at the first record: that record's time, and
    `at_start`. Never within the records: inf, and `censored` at the last record; a replica with records that are not
    finite is read up to the last finite one before them, censored there, and `failed`. It is a first passage:
    falling below the threshold later does not matter.

    *Order.* The features by their stage times, and the fraction of replicas in which larger variance came first: no
    pair of features with different Var θ_f was seen the other way round (variances equal to 1e-9 may come in any
    order, and so may features with equal times, as at the start). A censored feature comes after every reached one. A
    replica in which no such pair is told apart does not count.

    *Groups.* A head is on the + side of feature f if m_hf − √ν E θ_f ≥ threshold·√(ν Var θ_f), on the − side if it is
    ≤ −threshold·√(ν Var θ_f), else undecided.

    *Excursions.* From the first record at which f has split, a head that is on one side and later on the other, with
    the last record on the old side, the last passage through zero in between (linearly interpolated) and the first
    record on the new side. A head that was on a side and is undecided at the last finite record is in transit: counted
    as unfinished, and whether it is past zero is told.

    *Plateaus.* The stage times of a replica cut its records into intervals, one before the first, one between any two
    consecutive ones, one from the last to its last finite record. The plateau is the record of smallest |dE/dτ| (E the
    population risk, second-order differences between records) in the middle half of the interval (without the first
    and the last quarter of its length in τ); NaN where fewer than 3 records lie there.

    Args:
        trajectory: of `gradient_flow` or of a simulation, with or without replicas.
        threshold: > 0, in units of √(ν Var θ_f).

    Returns:
        A `StageTimes`.

    Raises:
        ValueError: a threshold that is not a positive number, or more than one leading axis.

    Example:
        >>> import jax.numpy as jnp
        >>> import theory as th
        >>> task = th.SingleLocation(length=4, snr=1.0, prior=th.sign_flips([0.0], [1.0]))
        >>> time = jnp.linspace(0.0, 20.0, 11)
        >>> m = 0.01 * jnp.exp(0.2 * time)[:, None, None] * jnp.array([[1.0], [-1.0]])  # made by hand: log(25)/0.2
        >>> order = th.OrderParameters(m, m @ jnp.swapaxes(m, 1, 2) + jnp.eye(2))
        >>> run = th.Trajectory(time, order, th.Softmax(), jnp.ones(11), None, None, jnp.array(0), task)
        >>> stage_times(run).stage_time.round(2).tolist()
        [[16.09]]
    """
    instance("trajectory", trajectory, Trajectory)
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float, np.number)) or not 0 < threshold < np.inf:
        raise invalid("threshold", "a number > 0", repr(threshold))
    m, risk = (np.asarray(x, dtype=np.float64) for x in (trajectory.order.m, trajectory.risk))
    if m.ndim == 3:
        m, risk = m[None], risk[None]
    if m.ndim != 4:
        raise ValueError(f"trajectory: expected m of shape (T, H, F) or (R, T, H, F), got {m.shape}")
    time, prior, snr = np.asarray(trajectory.time), trajectory.task.prior, float(trajectory.task.snr)
    mean, variance = np.asarray(prior.mean()), np.clip(np.asarray(prior.variance()), 0, None)
    scale = full_split(trajectory.task)
    staged = scale > 0

    finite = np.logical_and.accumulate(np.all(np.isfinite(m), axis=(2, 3)), axis=1)
    records = finite.sum(axis=1)
    unit = np.where(staged, scale, 1.0)
    there = finite[:, :, None] & staged
    amplitude = np.where(there, head_deviation(np.where(finite[:, :, None, None], m, 0.0)) / unit, np.nan)
    reached = amplitude >= threshold  # False where NaN
    first = np.where(reached.any(axis=1), reached.argmax(axis=1), len(time))
    stage_time = np.where(staged, np.inf, np.full(first.shape, np.nan))
    for replica, feature in np.argwhere(first < len(time)):
        stage_time[replica, feature] = first_passage(time, amplitude[replica, :, feature], threshold)

    off = m - np.sqrt(snr) * mean
    with np.errstate(invalid="ignore"):
        side = ((off >= threshold * unit).astype(np.int8) - (off <= -threshold * unit)) * there[:, :, None]
    plateaus = [_plateaus(time[:n], risk[r, :n], stage_time[r]) for r, n in enumerate(records)]
    return StageTimes(
        time=time,
        threshold=float(threshold),
        variance=variance,
        scale=scale,
        amplitude=amplitude,
        stage_time=stage_time,
        at_start=first == 0,
        censored=(first == len(time)) & staged,
        records=records,
        side=side.astype(np.int8),
        excursions=_excursions(time, off, side, first, records),
        plateau_time=np.stack([p[0] for p in plateaus]),
        plateau_risk=np.stack([p[1] for p in plateaus]),
        plateau_slope=np.stack([p[2] for p in plateaus]),
        configuration=trajectory.configuration(),
    )


def _excursions(
    time: Float[np.ndarray, " T"],
    off: Float[np.ndarray, "R T H F"],
    side: Int[np.ndarray, "R T H F"],
    first: Int[np.ndarray, "R F"],
    records: Int[np.ndarray, " R"],
) -> Excursions:
    rows = []
    for replica, feature in np.argwhere(first < records[:, None]):
        window = slice(first[replica, feature], records[replica])
        clock = time[window]
        for head in range(side.shape[2]):
            sides, values = side[replica, window, head, feature], off[replica, window, head, feature]
            decided = np.flatnonzero(sides)
            for old, new in itertools.pairwise([*decided, len(sides)]):  # the last: to the end
                if old < len(sides) - 1 and (new == len(sides) or sides[old] != sides[new]):
                    zero = _zero(clock[old : new + 1], sides[old] * values[old : new + 1])
                    arrived = clock[new] if new < len(sides) else np.nan
                    rows.append((replica, feature, head, sides[old], clock[old], zero, arrived))
    table = np.array(rows, dtype=np.float64).reshape(-1, 7)
    return Excursions(*table[:, :4].astype(np.int64).T, *table[:, 4:].T)


def _zero(time: Float[np.ndarray, " W"], values: Float[np.ndarray, " W"]) -> float:
    """Where `values`, positive at first, last come down to 0; NaN if they end positive."""
    k = int(np.flatnonzero(values >= 0)[-1])
    if values[k] == 0:
        return float(time[k])
    if k == len(values) - 1:
        return float("nan")
    return float(time[k] + values[k] / (values[k] - values[k + 1]) * (time[k + 1] - time[k]))


def _plateaus(
    time: Float[np.ndarray, " T"], risk: Float[np.ndarray, " T"], stage_time: Float[np.ndarray, " F"]
) -> Float[np.ndarray, "3 S"]:
    """Time, risk and slope of the plateaus of one replica."""
    found = np.full((3, len(stage_time) + 1), np.nan)
    if len(time) < FEWEST:
        return found
    slope = np.gradient(risk, time)
    bounds = [time[0], *np.sort(stage_time[np.isfinite(stage_time)]), time[-1]]
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        margin = (end - start) / 4
        middle = np.flatnonzero((time >= start + margin) & (time <= end - margin) & np.isfinite(slope))
        if len(middle) >= FEWEST:
            k = middle[np.argmin(np.abs(slope[middle]))]
            found[:, i] = time[k], risk[k], slope[k]
    return found


def _mean(values: Float[np.ndarray, " N"]) -> tuple[float, float]:
    """Mean and its standard error, NaN where there are too few."""
    count = len(values)
    error = float(np.std(values, ddof=1)) / count**0.5 if count > 1 else float("nan")
    return (float(np.mean(values)) if count else float("nan")), error
