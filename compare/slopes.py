"""How stage times grow with log D: least squares over the replicas of runs at several D (docs/model.md §5)."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from compare._words import plus_minus
from compare.stages import StageTimes
from theory._checks import instance, whole


class StageSlope(eqx.Module):
    """Least squares of stage times, by feature; prints as a table. NaN for features with nothing to fit.

    Attributes:
        slope: (F,) of the stage time against log D.
        error: (F,) its standard error, from the scatter of the residuals (equal at all D): (slope − truth)/error is
            Student's t with `used` − 2 degrees of freedom (− 3 with `own_start`) if they are Gaussian.
        intercept: (F,) stage time at abscissa 0.
        scatter: (F,) standard deviation of the residuals.
        used: (F,) number of runs fitted.
        dropped: (F,) number left out: censored, or split at the first record already.
        variance: (F,) Var θ_f.
        dims: the D.
        own_start: whether each replica's own initial amplitude was taken out.
    """

    slope: Float[np.ndarray, " F"]
    error: Float[np.ndarray, " F"]
    intercept: Float[np.ndarray, " F"]
    scatter: Float[np.ndarray, " F"]
    used: Int[np.ndarray, " F"]
    dropped: Int[np.ndarray, " F"]
    variance: Float[np.ndarray, " F"]
    dims: tuple[int, ...] = eqx.field(static=True)
    own_start: bool = eqx.field(static=True)

    def to_xarray(self) -> xr.Dataset:
        """Dimension feature (and dim, for the D); the report in `attrs`."""
        names = ("slope", "error", "intercept", "scatter", "used", "dropped", "variance")
        return xr.Dataset(
            {name: ("feature", getattr(self, name)) for name in names},
            coords={"feature": np.arange(len(self.slope)), "dim": np.array(self.dims)},
            attrs={"own_start": int(self.own_start), "report": str(self)},
        )

    def __str__(self) -> str:
        own = " at equal own starts" if self.own_start else ""
        lines = [
            f"Stage times against log D{own}; D = {', '.join(map(str, self.dims))}",
            f"  {'feature':>7}{'Var θ':>9}{'slope ± error':>21}{'intercept':>11}{'scatter':>10}"
            f"{'used':>7}{'dropped':>9}",
        ]
        for f in range(len(self.slope)):
            numbers = f"{self.intercept[f]:11.4g}{self.scatter[f]:10.3g}"
            lines.append(
                f"  {f + 1:>7}{self.variance[f]:9.3g}{plus_minus(self.slope[f], self.error[f]):>21}"
                f"{numbers.replace('nan', '  –')}{self.used[f]:7d}{self.dropped[f]:9d}"
            )
        if np.any(self.dropped):
            lines.append(
                "  dropped: not split within the records, or at the first one; slopes tend to come out too small"
            )
        return "\n".join(lines)


def log_dim_slope(
    dims: Sequence[int], stages: Sequence[StageTimes], *, own_start: bool = False, drop_censored: bool = False
) -> StageSlope:
    """Least squares of the stage time on log D over all replicas of runs at several D, feature by feature.

    With `own_start` the regressors are log D and log(a_f(0) √D), each replica's own amplitude at τ = 0. The second does
    not depend on D in law, so the slope estimates the same as without it, but the scatter of the starts is gone. (On
    log a_f(0) alone, SGD's noise before the split would make slopes too small: it is part of the amplitude too.)

    Args:
        dims: D of each entry of `stages`.
        stages: stage times of one task with one number of heads, one threshold.
        own_start: take out each replica's own start.
        drop_censored: leave out what was not seen to split within the records (censored, or split at the first record
            already) instead of refusing. Leaving out the latest makes slopes too small.

    Returns:
        A `StageSlope`; NaN for features without a stage, with fewer than 3 runs left, or with all at one abscissa.

    Raises:
        ValueError: runs that do not belong together, fewer than two D, runs that did not split
            within the records without `drop_censored`, or `own_start` where records do not start at τ = 0 or heads
            start identical.
    """
    dims = tuple(whole("dims", dim, 1) for dim in dims)
    if len(dims) != len(stages) or not dims:
        raise ValueError(f"dims: expected one D >= 1 for each of the {len(stages)} stage times, got {list(dims)}")
    for one in stages:
        instance("stages", one, StageTimes)
    if len(set(dims)) < 2:
        raise ValueError(f"dims: expected at least two different D to fit a slope, got {list(dims)}")
    ours, *others = (_identity(one) for one in stages)
    for theirs in others:
        for name in ours:
            if theirs[name] != ours[name]:
                raise ValueError(f"{name}: expected the same in all stages, got {ours[name]} and {theirs[name]}")
    replicas = [len(one.records) for one in stages]
    times = np.concatenate([one.stage_time for one in stages])
    early = np.concatenate([one.at_start for one in stages])
    used = np.isfinite(times) & ~early
    out = ~used & (stages[0].scale > 0)
    if np.any(out) and not drop_censored:
        per_dim = np.repeat(dims, replicas)[np.any(out, axis=1)]
        where = ", ".join(str(dim) for dim in sorted(set(per_dim.tolist())))
        raise ValueError(
            f"stages: expected splits within the records, got {int((out & ~early).sum())} stage times censored and "
            f"{int((out & early).sum())} at the first record (D = {where}); record longer, or drop_censored=True"
        )
    logs = np.broadcast_to(np.log(np.repeat(dims, replicas).astype(float))[:, None], times.shape)
    columns = [np.ones_like(logs), logs]
    if own_start:
        if any(one.time[0] != 0 for one in stages):
            raise ValueError("stages: expected a first record at τ = 0, where own_start reads the amplitude")
        start = np.concatenate([one.amplitude[:, 0] for one in stages])
        if np.any(used & (start == 0)):
            raise ValueError("stages: expected heads that differ at τ = 0 for own_start, got an amplitude of exactly 0")
        columns.append(np.log(np.where(used, start, 1.0)) + columns[1] / 2)
    designs = np.stack(columns, axis=-1)
    fits = [_plane(designs[kept, f], times[kept, f]) for f, kept in enumerate(used.T)]
    slope, error, intercept, scatter = np.array(fits).T
    counts = used.sum(axis=0), out.sum(axis=0)
    return StageSlope(slope, error, intercept, scatter, *counts, stages[0].variance, dims, own_start)


def _identity(one: StageTimes) -> dict[str, Any]:
    """What stage times must share to be fitted together."""
    task = {name: one.configuration[name] for name in ("length", "snr", "prior", "activation")}
    return {**task, "heads": one.heads, "threshold": one.threshold}


def _plane(design: Float[np.ndarray, "N P"], y: Float[np.ndarray, " N"]) -> tuple[float, float, float, float]:
    """Least squares: coefficient of the second column, its standard error, that of the first, and the scatter."""
    freedom = len(y) - design.shape[1]
    if freedom < 1 or np.linalg.matrix_rank(design) < design.shape[1]:
        return float("nan"), float("nan"), float("nan"), float("nan")
    solution = np.linalg.lstsq(design, y, rcond=None)[0]
    scatter = float(np.sqrt(np.sum((y - design @ solution) ** 2) / freedom))
    error = scatter * float(np.linalg.inv(design.T @ design)[1, 1]) ** 0.5
    return float(solution[1]), error, float(solution[0]), scatter
