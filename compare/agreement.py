"""Whether a simulation agrees with the theory: paired residuals, errors, bands, and a verdict with a stated level.

Each replica is compared with the theory started from *its own* initial order parameters, so the residual
d = simulation − theory starts at 0 and is Gaussian of order D^-1/2 as long as the heads have not split. Residuals
are paired: they need no alignment of heads or signs.

The verdict. For each quantity (m, r, the biases and scales that the activation trains, risk, loss) the mean residual
over R replicas must lie within

    critical value × standard error + bias allowance

at every component and every time 0 < τ ≤ `until`.

*Standard error.* At each time the variance is pooled over components that play the same part: the heads at one
feature of m, the diagonal of r, its upper triangle, the heads of a bias or a scale.

*Critical value.* A rotation test. For Gaussian residuals the law of the R residuals does not change when they are
rotated among replicas, whatever their correlation across times, heads and features. So the largest |mean|/error
over all times and components has the same law as with the direction (1,…,1)/√R of the mean replaced by a uniform
one. The quantile of these rotations is the critical value: no count of effective comparisons or degrees of freedom
enters, and the false-alarm rate of the whole verdict is at most `level` (`level` / number of quantities for each).

*Bias allowance.* Two effects of order 1/D are expected, and are not errors of the theory:

β × path, only when the finite-D loss is trained: its drift differs by a relative amount of order
β = (L + ν E‖θ‖²)/D. At zero keys the drift of m is larger by the factor 1 + (L + (1 − 1/L) ν‖θ‖²)/D exactly: the
target's own length gives ν‖θ‖², the correlation of scores with the Gram matrix of the tokens gives L. So each
component may be off by β times the way it has gone, path = ∫|dx/dτ| dτ on the record grid, the largest among the
components pooled with it (mean over replicas). r is quadratic in the keys, and the risk is where the prior has no
mean: there it is twice the path, for r that of m mᵀ and of r_⊥ together. With the D → ∞ loss the drift of m is exact
at any D, that of r up to the corrector, and there is no such term. The fresh finite-D loss itself is larger than the
risk; ν E‖θ‖²/D of the risk is allowed for it on top (an allowance, not a bound: docs/model.md §6). The drift of a bias
or scale may vanish in the limit while it does not at finite D, where ν‖θ‖² Δ_ε²/D is added to the loss. That pulls a
scale to a rest at most ν E‖θ‖²/D higher, relatively, and a bias at a rate below (ν E‖θ‖²/D) κ_b s/2, s the share of the
sink e^b among L zero scores (docs/model.md §8): both are allowed on top.

scatter²: where replicas scatter by s around their theory, curvature shifts the mean by about s². s² is the
variance of the residuals of m, pooled over heads and summed over features, plus that of trained biases and scales. The
part of m is exactly the shift of r = m mᵀ + r_⊥; for all else the constant is taken to be one as well.

*Power.* A drift wrong by a fraction ε moves the mean of x by about ε × way, way = ∫ |dx̄/dτ| dτ of the theory's mean
over replicas x̄ (what differs in sign between replicas cancels in the mean residual, and says nothing here). The
*resolution* of a quantity is the least allowed/way over all that is judged: relative drift errors above it would have
been noticed. Where it is `WEAKEST` or more for m or for r, or fewer than `FEWEST` records are judged, residuals within
the allowance are no agreement: there is no verdict. Beyond the allowance they remain a disagreement. Biases and scales
may rightly stand still: where one's resolution is that poor the table says so, and the verdict is about the rest.

*Bands.* With predicted bands (`theory.fluctuations`, docs/model.md §15) the scatter is judged too, for m, r and what is
trained. z is the residual of a single replica over its predicted deviation. The band does not include the O(1/D) bias
of the mean, which is judged above: so the *coverage* counts residuals less their mean over replicas, within ± 1.96 of
the deviations that these have if single ones have the predicted (for replica i of variance σ_i²: σ_i² (1 − 2/R) + mean
of σ²/R). It is pooled over replicas, judged times and components (r_hh' once), its standard error is clustered by
replica. Coverage of the raw residuals and measured/predicted scatter (rms of z less its mean) are stated beside it. The
coverage must satisfy

    |coverage − 95 %| ≤ min(noise + granted, max(noise, 2 %)).

`noise` is a test: the (1 − level/N) quantile of |coverage − 95 %| in ensembles of R replicas drawn from the predicted
Gaussian law of the whole path (more than 64 are scaled from 64), some three standard errors. N counts this test for
each banded quantity beside the rotation test of each quantity: if the band is right, the false-alarm rate of the whole
verdict is at most `level`. `granted` is an accuracy: the slope of the coverage in the log width, .229, times the
relative error that the widths may have: β, scatter², the band's grid error and 1 % for its Sobol points. 2 % is the
most that is accepted, unless the replicas' own noise exceeds it; `Band.unseen` says which widths would have passed.
Bands hold before the first split, like the rest of the verdict.

*Time shift.* After a split, replicas differ mostly by a delay. Each residual is split by least squares into δ dx/dτ and
a remainder (`compare.shift`), over all records, judged or not. This is stated, not judged.
"""

import json
from typing import Any

import equinox as eqx
import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from compare._bands import COVERED, Band, bands_of, check_bands, kept_paths
from compare._bias import allowances
from compare._pair import RATES, check_pair, successful, values_of
from compare._residual import Residual, residual_of
from compare.shift import TimeShift, pooled_shift, time_shift
from theory import Fluctuations, Trajectory
from theory._words import counted
from theory.passage import SPLIT_FRACTION, full_split, head_deviation

WEAKEST = 0.5  # a verdict that would not notice a drift wrong by half is none
FEWEST = 3  # records that must be judged
SPLIT_GROWTH = 3.0  # of the scatter at the start, for features whose full split is not far above it


_TEXT_OF_BANDS = [
    "  bands: predicted Gaussian law of single replicas, before the first split. They do not include the O(1/D) bias",
    "  of the mean, which is taken out before the coverage is judged. Allowed are the noise of the replicas (a test)",
    "  and the O(1/D) error of the widths (an accuracy), 2 % at most unless the noise alone is more",
]


class Agreement(eqx.Module):
    """The verdict of `agreement`; prints as a table.

    Attributes:
        agrees: True, False, or None where there is no verdict.
        reasons: which quantity, when, observed and allowed; or why there is no verdict.
        time: (T,) clock τ.
        residuals: one `Residual` per quantity.
        bands: one `Band` for m, r and each trained bias or scale; empty without predicted bands.
        shifts: one `TimeShift` per quantity, over all records with τ > 0.
        time_shift: δ of m, r and what is trained together.
        time_shift_error: its standard error.
        index: (R,) numbers of the replicas used.
        until: the verdict covers 0 < τ ≤ until.
        onset: record at which the theory first predicts a split, NaN if none within the records.
        level: bound on the false-alarm rate.
        replicas: number of replicas used.
        excluded: number left out because the theory or the simulation failed.
        dim: D.
        beta: (L + ν E‖θ‖²)/D, or 0 when the D → ∞ loss was trained.
        configuration: of the simulation, with the theory's `step_size`.
    """

    agrees: bool | None = eqx.field(static=True)
    reasons: tuple[str, ...] = eqx.field(static=True)
    time: Float[np.ndarray, " T"]
    residuals: tuple[Residual, ...]
    bands: tuple[Band, ...]
    shifts: tuple[TimeShift, ...]
    time_shift: float
    time_shift_error: float
    index: Int[np.ndarray, " R"]
    until: float
    onset: float
    level: float
    replicas: int
    excluded: int
    dim: int
    beta: float
    configuration: dict[str, Any] = eqx.field(static=True)

    def __getitem__(self, name: str) -> Residual:
        """The residual of one quantity."""
        for residual in self.residuals:
            if residual.name == name:
                return residual
        raise KeyError(f"{name}: expected one of {', '.join(r.name for r in self.residuals)}")

    def band(self, name: str) -> Band:
        """The band of one quantity."""
        for band in self.bands:
            if band.name == name:
                return band
        raise KeyError(f"{name}: expected one of {', '.join(b.name for b in self.bands) or 'none'}")

    def shift(self, name: str) -> TimeShift:
        """The time shift of one quantity."""
        return self.shifts[[r.name for r in self.residuals].index(self[name].name)]

    @property
    def sup_norm(self) -> dict[str, float]:
        """Largest |mean residual| of each quantity over all judged times and components."""
        return {r.name: float(np.max(np.abs(r.mean[r.judged]), initial=0.0)) for r in self.residuals}

    def to_xarray(self) -> xr.Dataset:
        """`m_residual`, `m_error`, `m_scatter`, `m_bias`, `m_allowed`, `m_remainder`, … against time.

        With bands also `m_deviation`, `m_z`, `m_coverage`. `m_shift` is each replica's time shift. The verdict is in
        `attrs`.
        Coordinates head and feature count from 0, as arrays do; the printed table counts from 1, as the mathematics.
        """
        text = {
            "residual": "mean over replicas of simulation − theory",
            "error": "standard error of the mean residual, pooled over like components",
            "scatter": "root mean square residual of single replicas",
            "bias": "bias allowance of order 1/D",
            "allowed": "critical value × error + bias allowance",
        }
        data, shapes = {}, {}
        for r in self.residuals:
            parts = (r.mean, r.error, r.scatter, r.bias, r.allowed)
            for (part, meaning), values in zip(text.items(), parts, strict=True):
                data[f"{r.name}_{part}"] = (("time", *r.dims), values, {"long_name": f"{r.name}: {meaning}"})
            shapes.update(dict(zip(r.dims, r.mean.shape[1:], strict=True)))
            shift = self.shift(r.name)
            text_of = {"long_name": f"{r.name}: mean residual less the common time shift"}
            data[f"{r.name}_remainder"] = (("time", *r.dims), shift.remainder, text_of)
            text_of = {"long_name": f"{r.name}: time by which the simulation is ahead"}
            data[f"{r.name}_shift"] = ("replica", shift.each, text_of)
        for b in self.bands:
            lead = ("time",) if b.deviation.ndim == len(b.dims) + 1 else ("replica", "time")
            text_of = {"long_name": f"{b.name}: predicted standard deviation of single replicas"}
            data[f"{b.name}_deviation"] = ((*lead, *b.dims), b.deviation, text_of)
            text_of = {"long_name": f"{b.name}: residual / predicted deviation"}
            data[f"{b.name}_z"] = (("replica", "time", *b.dims), b.z, text_of)
            text_of = {"long_name": f"{b.name}: coverage of the 95 % band, mean residual taken out"}
            data[f"{b.name}_coverage"] = ("time", b.by_time, text_of)
        return xr.Dataset(
            data,
            coords={
                "time": ("time", self.time, {"long_name": "clock τ = η·steps/D"}),
                "replica": ("replica", self.index),
                **{dim: np.arange(size) for dim, size in shapes.items()},
            },
            attrs={
                "agrees": json.dumps(self.agrees),
                "reasons": json.dumps(self.reasons),
                "until": float(self.until),
                "onset": float(self.onset),
                "level": float(self.level),
                "replicas": self.replicas,
                "excluded": self.excluded,
                "beta": float(self.beta),
                "critical": json.dumps({r.name: r.critical for r in self.residuals}),
                "resolution": json.dumps({r.name: r.resolution for r in self.residuals}),
                "judged": int(np.sum(self.residuals[0].judged)),
                "time_shift": float(self.time_shift),
                "time_shift_error": float(self.time_shift_error),
                "coverage": json.dumps({b.name: [b.coverage, b.coverage_error, b.allowed] for b in self.bands}),
                "ratio": json.dumps({b.name: [b.ratio, b.ratio_error] for b in self.bands}),
                "report": str(self),
                "configuration": json.dumps(self.configuration),
            },
        )

    def __str__(self) -> str:
        word = {True: "AGREES", False: "DISAGREES", None: "NO VERDICT"}[self.agrees]
        step = self.configuration["step_size"]
        flow = f"with the finite-step corrector (step size {step:g})" if step else "plain gradient flow (step size 0)"
        failed = f", {self.excluded} failed and left out" if self.excluded else ""
        split = f"first split predicted at τ = {self.onset:.3g}" if np.isfinite(self.onset) else "no split predicted"
        judged = self.residuals[0].judged
        lines = [
            f"Theory against simulation: {word}",
            f"  D = {self.dim}, {counted(self.replicas, 'replica')}, each against the theory from its own start"
            f"{failed}; {flow}",
            f"  judged {judged.sum()} of {counted(len(judged), 'record')}, 0 < τ ≤ {self.until:.4g} of "
            f"{self.time[-1]:.4g} ({split}); false-alarm rate ≤ {self.level:g}",
        ]
        if np.any(judged) and self.replicas:
            lines.append(
                f"  {'':6}{'worst at':>24}{'τ':>8}{'mean':>11}{'± error':>10}{'z':>8}{'critical':>10}"
                f"{'bias':>9}{'allowed':>10}{'visible':>9}{'sup|mean|':>11}{'scatter·√D':>12}"
            )
            lines += [self._row(r) for r in self.residuals]
            lines += self._band_lines() + self._shift_lines()
        lines += [f"  {reason}" for reason in self.reasons]
        if np.any(judged) and self.replicas >= 2:
            lines += [
                f"  drift errors of the {r.name} up to {_percent(r.resolution)} would pass unseen"
                if np.isfinite(r.resolution)
                else f"  the theory's {r.name} does not move"
                for r in self.residuals
                if r.name in RATES and not r.resolution < WEAKEST
            ]
            trained = " and ".join(f"the {r.name}" for r in self.residuals if r.name in RATES)
            pulled = f" (and the signal's pull on {trained})" if trained and self.beta else ""
            lines += _TEXT_OF_BANDS if self.bands else []
            lines += [
                "  |mean residual| is to stay within allowed = critical × ± error + bias,",
                f"  bias = β·path + scatter²{pulled}, β = {self.beta:.3g} ((L + ν E‖θ‖²)/D; 0 for the D → ∞ loss);",
                "  visible: drift errors above this fraction of the theory's way would have been noticed;",
                "  the corrector is not tested separately unless its effect exceeds what is allowed;",
                "  residuals are paired, so heads and signs need no alignment",
            ]
        return "\n".join(lines)

    def _band_lines(self) -> list[str]:
        if not self.bands or self.replicas < 2:
            return []
        lines = [
            f"  {'':6}{'in 95 % band ± error':>24}{'mean out ± error':>20}{'allowed':>12}{'measured/predicted':>21}"
            f"{'widths that pass':>19}"
        ]
        for b in self.bands:
            least, largest = b.unseen
            widths = f"{least:.2f} … {largest:.2f}" if np.isfinite(b.allowed) else "–"
            lines.append(
                f"  {b.name:6}{f'{100 * b.raw:.1f} ± {100 * b.raw_error:.1f} %':>24}"
                f"{f'{100 * b.coverage:.1f} ± {100 * b.coverage_error:.1f} %':>20}"
                f"{f'95 ± {100 * b.allowed:.1f} %':>12}{f'{b.ratio:.3f} ± {b.ratio_error:.3f}':>21}{widths:>19}"
            )
        return lines

    def _shift_lines(self) -> list[str]:
        parts = [(r.name, s) for r, s in zip(self.residuals, self.shifts, strict=True) if r.name != "loss"]
        parts = [(name, s) for name, s in parts if np.isfinite(s.shift) and np.isfinite(s.error)]
        if not parts:
            return []
        shifts = ", ".join(f"{name} {s.shift:+.2g} ± {s.error:.2g}" for name, s in parts)
        left = ", ".join(f"{name} {s.scatter:.2g} → {s.amplitude:.2g}" for name, s in parts)
        return [
            f"  simulation ahead in τ, all records: {shifts}; together {self.time_shift:+.2g} ± "
            f"{self.time_shift_error:.2g}",
            f"  scatter of single replicas → without each one's own shift: {left}",
        ]

    def _row(self, r: Residual) -> str:
        scatter = np.sqrt(np.mean(r.scatter[r.judged] ** 2)) * self.dim**0.5
        end = f"{self.sup_norm[r.name]:11.5f}{scatter:12.2f}"
        if not np.isfinite(r.critical):
            return f"  {r.name:6}{'–':>24}{'–':>8}{'–':>11}{'–':>10}{'–':>8}{'–':>10}{'–':>9}{'–':>10}{'–':>9}{end}"
        where = r.worst
        return (
            f"  {r.name:6}{r.label(where):>24}{self.time[where[0]]:8.2f}{r.mean[where]:11.5f}{r.error[where]:10.5f}"
            f"{r.z[where]:8.2f}{r.critical:10.2f}{r.bias[where]:9.5f}{r.allowed[where]:10.5f}"
            f"{_percent(r.resolution):>9}{end}"
        )


def agreement(
    theory: Trajectory,
    simulation: Trajectory,
    *,
    bands: Fluctuations | None = None,
    until: float | None = None,
    level: float = 0.01,
) -> Agreement:
    """Compare a simulation with the theory, replica by replica (this module's text defines every quantity).

    Args:
        theory: result of `gradient_flow` from the simulation's own initial order parameters, biases and scales, with
            its rates.
        simulation: result of `train` or `train_reduced` recorded at the same times, the first of them τ = 0.
        bands: of `fluctuations`, at the simulation's D and η/B and from starts without variance: along the theory of
            every replica, or along one path that all of them are close to.
        until: > 0; the verdict covers 0 < τ ≤ until. By default the last record before the first split that the theory
            predicts: the first record at which, in any replica, the heads' standard deviation along a feature with
            Var θ_f > 0 exceeds a quarter of √(ν Var θ_f), its size when the heads have split, and three times its
            (root mean square) start. From there on single runs go different ways; residuals are reported, not judged.
        level: bound on the false-alarm rate of the whole verdict, 0.001 ≤ level < 1.

    Returns:
        An `Agreement`.

    Raises:
        ValueError: clocks, tasks, activations, rates, shapes, replicas, starts, step sizes or bands that do not belong
            together.
    """
    if not 0.001 <= level < 1:
        raise ValueError(f"level: expected 0.001 <= level < 1, got {level}")
    if until is not None and not until > 0:
        raise ValueError(f"until: expected a time > 0, got {until}")
    dim = check_pair(theory, simulation)
    if bands is not None:
        check_bands(bands, theory, simulation)
    time = np.asarray(theory.time)
    names = ("m", "r", *theory.activation.trained, "risk")
    values = {name: (values_of(theory, name), values_of(simulation, name)) for name in names}
    if simulation.loss is not None:
        values["loss"] = (values["risk"][0], np.asarray(simulation.loss).reshape(values["risk"][0].shape))

    kept = successful(theory) & successful(simulation)
    for pair in values.values():
        for side in pair:
            kept &= np.all(np.isfinite(side.reshape(len(kept), -1)), axis=1)
    count, excluded = int(kept.sum()), int((~kept).sum())
    values = {name: (predicted[kept], seen[kept]) for name, (predicted, seen) in values.items()}

    first = _onset(values["m"][0], theory)
    onset = float("nan") if first is None else float(time[first])
    if until is None:
        until = float(time[-1] if first is None else time[max(first - 1, 0)])
    judged = (time > 0) & (time <= until)
    reasons = []
    if count < 2:
        what = f"{counted(count, 'complete replica')} {'gives' if count == 1 else 'give'}"
        reasons.append(f"no verdict: {what} no standard error, at least 2 are needed")
    if not np.any(judged):
        reasons.append(f"no verdict: no record in 0 < τ ≤ {until:g}")

    biases, beta, spread = allowances(values, theory, simulation)
    banded = ("m", "r", *theory.activation.trained) if bands is not None else ()
    share = level / (len(values) + len(banded))
    residuals = tuple(residual_of(name, *pair, biases[name], judged, share) for name, pair in values.items())
    found = {r.name: r for r in residuals}
    covers: tuple[Band, ...] = ()
    if bands is not None:
        each, dims = {name: found[name].each for name in banded}, {name: found[name].dims for name in banded}
        width = beta + float(np.max(spread[judged], initial=0.0))
        covers = bands_of(kept_paths(bands, kept), each, dims, judged, share, width)
    shifts = tuple(time_shift(time, values[r.name][0], r.each, time > 0) for r in residuals)
    parts = [s for r, s in zip(residuals, shifts, strict=True) if r.name in ("m", "r", *RATES)]
    delay = pooled_shift([(part, part.error) for part in parts])
    agrees = None if reasons else all(r.within for r in residuals) and all(b.within for b in covers)
    if agrees is False:
        reasons = [_reason(r, time) for r in residuals if not r.within] + [_cover(b) for b in covers if not b.within]
    elif agrees:
        reasons = _too_weak(residuals, int(judged.sum()))
        agrees = None if reasons else True
    step_size = dict(theory.settings)["step_size"]
    configuration = {**simulation.configuration(), "step_size": step_size}
    return Agreement(
        agrees, tuple(reasons), time, residuals, covers, shifts, *delay, np.flatnonzero(kept),
        until, onset, level, count, excluded, dim, beta, configuration,
    )  # fmt: skip


def _too_weak(residuals: tuple[Residual, ...], judged: int) -> list[str]:
    """Why residuals within the allowance would not mean that theory and simulation agree; empty if they do."""
    found = []
    if judged < FEWEST:
        found.append(f"only {counted(judged, 'record')} judged, at least {FEWEST} are needed")
    found += [
        f"drift errors of {r.name} up to {_percent(r.resolution)} would pass unseen (below {_percent(WEAKEST)} needed)"
        if np.isfinite(r.resolution)
        else f"the theory's {r.name} does not move"
        for r in residuals
        if r.name in ("m", "r") and not r.resolution < WEAKEST
    ]
    return [f"too weak to tell: {'; '.join(found)}. Use more replicas, larger D or more records"] if found else []


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if fraction < 0.995 else f"{100 * fraction:.0f} %"


def _reason(residual: Residual, time: np.ndarray) -> str:
    w = residual.worst
    return (
        f"{residual.label(w)} at τ = {time[w[0]]:.4g}: |mean residual| {abs(residual.mean[w]):.4g} > allowed "
        f"{residual.allowed[w]:.4g} = {residual.critical:.3g} × {residual.error[w]:.3g} + {residual.bias[w]:.3g}"
    )


def _cover(band: Band) -> str:
    wide = "wide" if band.coverage > COVERED else "narrow"
    return (
        f"{band.name}: {100 * band.coverage:.2f} ± {100 * band.coverage_error:.2f} % of the replicas' residuals lie in "
        f"the predicted 95 % band, allowed 95 ± {100 * band.allowed:.2f} %: it is too {wide}"
    )


def _onset(m: Float[np.ndarray, "R T H F"], theory: Trajectory) -> int | None:
    """Index of the first record at which any replica's theory has split along a feature; None if none."""
    full, amplitude = full_split(theory.task), head_deviation(m)
    start = np.sqrt(np.mean(amplitude[:, 0] ** 2, axis=0)) if len(m) else np.zeros_like(full)
    split = (full > 0) & (amplitude > np.maximum(SPLIT_FRACTION * full, SPLIT_GROWTH * start))
    when = np.flatnonzero(np.any(split, axis=(0, 2)))
    return int(when[0]) if len(when) else None
