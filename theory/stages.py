"""When the steps of the staircase come, with their finite-D distribution (docs/model.md §14).

From k_h ~ N(0, r_0 I) all heads are statistically equal: along this symmetric path (m_h = m(τ), r with one
diagonal and one off-diagonal value) the covariance S of the fluctuations is integrated from the start's, r_0/D for m,
with SGD's own noise added (docs/model.md §15). D·S does not depend on D. While splits are small they are Gaussian with
that covariance. At the matching time, when the first of them reaches `MATCH` of the threshold, an ensemble of states
is drawn from it, and the nonlinear flow takes each on, through all later stages. Noise after matching is added to the
drawn amplitudes as what it feeds into a growing split, (η/(BD)) Σ/(2κ). Nothing is fitted.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.interpolate import CubicSpline, PchipInterpolator
from scipy.special import ndtri
from scipy.stats import qmc

from theory._checks import instance, invalid, non_negative, positive, real_array, whole
from theory._words import counted
from theory.activation import Activation, BayesSoftmax, HeadNormalized
from theory.fit import fit
from theory.flow import gradient_flow
from theory.fluctuation import Fluctuations, fluctuations
from theory.method import Method, Quadrature
from theory.order import OrderParameters
from theory.passage import SPLIT_FRACTION, first_passage, full_split, head_deviation, rank_cdf, rank_quantile
from theory.risk import recorded_risk
from theory.staircase import Stage, saddle_path, staircase_lines
from theory.task import SingleLocation
from theory.trajectory import Trajectory

MATCH = 0.2  # of the threshold: splits of this size are still Gaussian, and grow at the path's rate
_BEYOND = 2.5  # times the threshold: typical splits have passed it when the path ends
_LATEST = 6.0  # e-folds that the smallest of the drawn splits may lie behind
_RECORDS, _PATH_RECORDS = 101, 57
_EXTENSIONS = 8
_SOBOL = 0x73706C69
_TOLERANCE = 1e-4  # of the ensemble's flows
_POINTS, _FEW_POINTS = 2048, 256  # per mixture component, for the path and for the ensemble
_LEVELS = (0.025, 0.25, 0.5, 0.75, 0.975)  # of the quantiles that are printed


class StagePrediction(eqx.Module):
    """The staircase and when its steps come; prints as a table.

    Attributes:
        stages: the saddles, from the unspecialized point to the last.
        dims: (N,) the D asked for.
        times: (N, S, F) stage times of an ensemble of S starts at each D: first passage of the standard deviation over
            heads through `threshold`·√(ν Var θ_f); inf beyond the end of the flow, NaN for features without a stage.
        match: (N,) matching time τ_m.
        path_slope: (N,) d(stage time)/d(log D) of the first split at its median: 1/(2κ), κ the growth rate along
            the path at that time.
        ensembles: the flows themselves, from τ_m on, one trajectory with S replicas for each D.
        path: the symmetric path, with its `band` at the first D (covariances ∝ 1/D).
        band: see `path`.
        threshold: in units of √(ν Var θ_f).
        variance: r_0.
    """

    stages: tuple[Stage, ...]
    dims: tuple[int, ...] = eqx.field(static=True)
    times: Float[np.ndarray, "N S F"]
    match: Float[np.ndarray, " N"]
    path_slope: Float[np.ndarray, " N"]
    ensembles: tuple[Trajectory, ...]
    path: Trajectory | None
    band: Fluctuations | None
    threshold: float
    variance: float

    @property
    def order(self) -> tuple[int, ...]:
        """Features in the order in which the saddles are left along them; `ranks` tells which come together."""
        return tuple(dict.fromkeys(f for stage in self.stages for f in stage.features))

    @property
    def ranks(self) -> tuple[int, ...]:
        """(F,) place in the staircase, from 0, equal for features that split together; −1 if no saddle is left so."""
        steps = [stage.features for stage in self.stages if stage.features]
        found = {f: place for place, features in reversed([*enumerate(steps)]) for f in features}
        return tuple(found.get(f, -1) for f in range(self.times.shape[2]))

    def quantile(self, level: float | Float[np.ndarray, " Q"]) -> Float[np.ndarray, "..."]:
        """(..., N, F) stage times below which a fraction `level` of the runs lies; inf if later than the flows end.

        Linear between the ensemble's ranks; good to about 1/S in level, and NaN only where there is no stage.
        """
        if not np.all((np.asarray(real_array("level", level)) >= 0) & (np.asarray(level) <= 1)):
            raise invalid("level", "shares from 0 to 1", level)
        return rank_quantile(self.times, level)

    def cdf(self, times: Any, *, feature: int, dim: int | None = None) -> Any:
        """Predicted probability that the stage of `feature` (from 0) comes before each of `times`.

        Linear between the ensemble's ranks; its own error is about 1/S. Past the last of them it stays at the share
        that splits before the flows end.

        Args:
            times: τ.
            feature: with a stage.
            dim: one of `dims`; may be left out if there is one only.
        """
        features = self.times.shape[2]
        if whole("feature", feature, 0) >= features or np.isnan(self.times[:, :, feature]).any():
            staged = [f for f in range(features) if not np.isnan(self.times[:, :, f]).any()]
            raise invalid("feature", f"one with a stage ({', '.join(map(str, staged)) or 'there is none'})", feature)
        if dim not in self.dims and not (dim is None and len(self.dims) == 1):
            raise invalid("dim", f"one of {', '.join(map(str, self.dims))}", dim)
        return rank_cdf(self.times[0 if dim is None else self.dims.index(dim), :, feature], times)

    def mean_risk(self, times: Any) -> tuple[Float[np.ndarray, "N T"], Float[np.ndarray, "N T"]]:
        """Population risk at each D: its mean over the starts, and the standard error of that.

        Until the matching time the starts are drawn, at each record of the path, from the Gaussian law around it; from
        then on it is the risk of their flows. Between records monotone cubics.

        Args:
            times: (T,) τ ≥ 0, not after the first of the flows ends.
        """
        if self.path is None or self.band is None:
            raise invalid("prediction", "one with a split", "one without")
        times = np.asarray(non_negative("times", times, 1))
        latest = min(float(flow.time[-1]) for flow in self.ensembles)
        if times.max() > latest:
            raise invalid("times", f"up to τ = {latest:.6g}, where the first flow ends", times.max())
        samples, clock, found = self.times.shape[1], np.asarray(self.path.time), []
        for dim, matched, flow in zip(self.dims, self.match, self.ensembles, strict=True):
            states = [
                _starts(self.path, self.band, k, dim, samples, 0.0) for k in map(int, np.flatnonzero(clock < matched))
            ]
            trained, orders = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
            trained = jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], samples, axis=1), trained)
            activation = eqx.combine(trained, self.path.activation.split()[1])
            early = recorded_risk(self.path.task, activation, orders)
            risks = np.concatenate([np.asarray(early), np.asarray(flow.risk).T])
            records = np.concatenate([clock[clock < matched], np.asarray(flow.time)])
            scatter = risks.std(axis=1, ddof=1) if samples > 1 else np.full(len(records), np.inf)
            error = np.interp(times, records, scatter / np.sqrt(samples))
            found.append((PchipInterpolator(records, risks.mean(axis=1))(times), error))
        mean, errors = np.moveaxis(np.asarray(found), 1, 0)
        return mean, errors

    def to_xarray(self) -> xr.Dataset:
        """`stage_time` (dim, sample, feature), quantiles, and the saddles with rates and asymptotic slopes."""
        levels = np.array(_LEVELS)
        quantiles = np.moveaxis(self.quantile(levels), 0, -1)
        stages = self.stages
        return xr.Dataset(
            {
                "stage_time": (("dim", "sample", "feature"), self.times, {"long_name": "predicted stage time"}),
                "quantile": (("dim", "feature", "level"), quantiles, {"long_name": "its quantiles"}),
                "match": ("dim", self.match, {"long_name": "matching time"}),
                "path_slope": ("dim", self.path_slope, {"long_name": "d(stage time)/d(log D) of the first stage"}),
                "saddle_m": (("stage", "head", "feature"), np.stack([np.asarray(s.point.order.m) for s in stages])),
                "saddle_risk": ("stage", np.array([float(s.point.risk) for s in stages])),
                "saddle_feature": ("stage", np.array([s.feature for s in stages])),
                "rate": ("stage", np.array([s.rate for s in stages]), {"long_name": "growth rate of the split"}),
                "slope": ("stage", np.array([s.slope for s in stages]), {"long_name": "1/(2 rate)"}),
            },
            coords={"dim": list(self.dims), "level": levels},
            attrs={"threshold": self.threshold, "variance": self.variance, "report": str(self)},
        )

    def __str__(self) -> str:
        lines = staircase_lines(self.stages)
        shown = np.flatnonzero(~np.isnan(self.times).any(axis=(0, 1)))
        if not len(shown):
            return "\n".join(lines)
        samples = self.times.shape[1]
        lines += [
            f"  stage times from r_0 = {self.variance:g} (spread over heads at {self.threshold:g} of √(ν Var θ_f)); "
            f"{counted(samples, 'start')}, so that quantiles are good to {100 / samples:.2g} % in level",
            f"  {'D':>12}{'feature':>9}{'median':>10}{'25 … 75 %':>20}{'2.5 … 97.5 %':>22}{'dτ/dlog D':>11}",
        ]
        levels = self.quantile(np.array(_LEVELS))
        for n, dim in enumerate(self.dims):
            for f in shown:
                q = levels[:, n, f]
                slope = f"{self.path_slope[n]:11.3f}" if self.ranks[f] == 0 else ""
                lines.append(
                    f"  {dim:>12}{f + 1:>9}{q[2]:10.2f}{f'{q[1]:.2f} … {q[3]:.2f}':>20}"
                    f"{f'{q[0]:.2f} … {q[4]:.2f}':>22}{slope}"
                )
        if np.isinf(levels).any():
            lines.append("  inf: never, or later than the flows end")
        return "\n".join(lines)


def predict_stages(
    task: SingleLocation,
    activation: Activation,
    heads: int,
    dim: Any,
    *,
    variance: Any = 1.0,
    step_size: Any = 0.0,
    bias_rate: Any = 1.0,
    scale_rate: Any = 1.0,
    threshold: Any = SPLIT_FRACTION,
    samples: int = 64,
    until: float | None = None,
    method: Method | None = None,
    progress: bool = True,
) -> StagePrediction:
    """When the heads specialize along each feature, as a distribution over starts and SGD noise (this module's text).

    Args:
        task: the task.
        activation: the activation; what it trains starts at its values.
        heads: H.
        dim: D, one or several.
        variance: r_0 of the keys at the start.
        step_size: η/B of the SGD that is described.
        bias_rate: κ_b.
        scale_rate: κ_c.
        threshold: of the amplitude, in units of √(ν Var θ_f), at which a feature counts as split.
        samples: starts for the distribution at each D (scrambled Sobol; quantiles err by about 1/samples in level, and
            all D have the same points, so that the errors are alike). For two heads the quantiles of the first stage
            are exact to the spacing of their ranks.
        until: τ to which the flows run; by default until the slowest split of the saddles has had time to grow.
        method: of the saddles' risk, see `unspecialized_point`.
        progress: bars.

    Raises:
        ValueError: arguments that are wrong, such as an `until` before the ensemble starts.
        RuntimeError: a first saddle that could not be followed, or noise that keeps the heads from it.
    """
    instance("task", task, SingleLocation)
    instance("activation", activation, Activation)
    if not isinstance(activation, (HeadNormalized, BayesSoftmax)):
        raise invalid("activation", "softmax, softmax-1 or B-softmax", activation)
    heads = whole("heads", heads, 1)
    dims = tuple(whole("dim", d, task.features + heads) for d in np.atleast_1d(dim).tolist())
    if not dims:
        raise invalid("dim", "at least one D", dim)
    if until is not None:
        until = float(positive("until", until, 0))
    variance, step_size = float(positive("variance", variance, 0)), float(non_negative("step_size", step_size, 0))
    threshold, samples = float(positive("threshold", threshold, 0)), whole("samples", samples, 1)
    rates = {"step_size": step_size, "bias_rate": bias_rate, "scale_rate": scale_rate}
    stages = saddle_path(task, activation, heads, method=method)
    unit = full_split(task)
    blank = np.full((len(dims), samples, task.features), np.nan)
    blank[:, :, unit > 0] = np.inf
    none = np.full(len(dims), np.nan)
    if stages[0].ending and (stages[0].rate > 0 or not stages[0].point.stationary):
        raise RuntimeError(f"predict_stages: the unspecialized point is {stages[0].ending}")
    if stages[0].ending or heads == 1:
        return StagePrediction(stages, dims, blank, none, none, (), None, None, threshold, variance)

    target = MATCH * threshold
    rates["method"] = _method(task, activation, stages, variance)
    path, band, scaled = _symmetric_path(task, activation, heads, max(dims), variance, rates, unit, target, stages)
    times, match, slopes, ensembles = [], [], [], []
    for d in dims:
        amplitude = scaled / np.sqrt(d)
        k = _first_at(amplitude.max(axis=1), target)
        if k is None:
            raise RuntimeError(
                f"predict_stages: no split reached {target:g} of its full size along the path at D = {d}"
            )
        matched, leading = float(path.time[k]), int(np.argmax(amplitude[k]))
        growth = CubicSpline(path.time, np.log(scaled[:, leading])).derivative()
        if until is not None and until <= matched:
            raise invalid("until", f"a time after τ = {matched:.3g}, where the first splits are still small", until)
        end = until
        if end is None:
            later = [s for s in stages if not s.ending]
            waits = [np.log(max(np.sqrt(d / variance) * s.scale, np.e)) / s.rate for s in later[1:]]
            end = matched + (np.log(1 / MATCH) + _LATEST) / max(growth(matched), later[0].rate / 2) + sum(waits)
        ensemble = _ensemble(path, band, k, d, samples, end, rates, progress)
        ensembles.append(ensemble)
        match.append(matched)
        amplitudes = head_deviation(np.asarray(ensemble.order.m)) / np.where(unit > 0, unit, 1.0)
        clock = np.asarray(ensemble.time)
        passages = [[first_passage(clock, own[:, f], threshold) for f in range(task.features)] for own in amplitudes]
        times.append(np.where(unit > 0, np.asarray(passages), np.nan))
        slopes.append(_slope_at(growth, float(np.median(times[-1][:, leading])), float(path.time[-1])))
    return StagePrediction(
        stages, dims, np.stack(times), np.asarray(match), np.asarray(slopes), tuple(ensembles), path, band,
        threshold, variance,
    )  # fmt: skip


def _method(task: SingleLocation, activation: Activation, stages: tuple[Stage, ...], variance: float) -> Method:
    """Nodes for the flows: those of the start, of every saddle, and of the saddles with the start's r_⊥ as well."""
    accuracy = 1e-4 if isinstance(activation, BayesSoftmax) else 1e-6
    ms = jnp.stack([jnp.zeros_like(stages[0].point.order.m), *(stage.point.order.m for stage in stages)])
    orders = OrderParameters(ms, ms @ jnp.swapaxes(ms, -1, -2) + variance * jnp.eye(ms.shape[1])[None])
    rest = activation.split()[1]
    first = [activation, *(stage.point.activation for stage in stages)]
    trained = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(one.split()[0] for one in first))
    return fit(Quadrature(accuracy), task, rest, (trained, orders))


def _split(heads: int) -> Float[np.ndarray, "H H"]:
    """Projector onto motions of the heads whose sum is zero."""
    return np.eye(heads) - 1 / heads


def _overlap_block(matrix: np.ndarray, band: Fluctuations) -> Float[np.ndarray, "... H F H F"]:
    """The rows and columns of m in matrices over the flat coordinates of `Fluctuations`."""
    start = sum(int(np.prod(shape)) for _, shape in band.trained)
    size = band.heads * band.features
    block = matrix[..., start : start + size, start : start + size]
    return block.reshape(*matrix.shape[:-2], band.heads, band.features, band.heads, band.features)


def _symmetric_path(
    task: SingleLocation,
    activation: Activation,
    heads: int,
    dim: int,
    variance: float,
    rates: dict[str, Any],
    unit: np.ndarray,
    target: float,
    stages: tuple[Stage, ...],
) -> tuple[Trajectory, Fluctuations, Float[np.ndarray, "T F"]]:
    """The path of statistically equal heads, its band at D, and √D × the predicted split over √(ν Var θ_f) along it."""
    start = OrderParameters(jnp.zeros((heads, task.features)), variance * jnp.eye(heads))
    wanted = target / MATCH * _BEYOND
    growth = max(np.log(wanted * np.max(unit) * np.sqrt(dim / variance)), 1.0)
    last = 5 + 1.2 * growth / stages[0].rate
    for extension in range(_EXTENSIONS):
        times = last * np.linspace(0, 1, _PATH_RECORDS) ** 1.5
        path = gradient_flow(task, activation, start, times, progress=False, corrector_points=_POINTS, **rates)
        band = fluctuations(path, dim=dim, variance=variance, points=_POINTS, method=rates["method"])
        block = _overlap_block(band.covariance, band)
        square = np.einsum("hk,thfkf->tf", _split(heads), block) / heads
        amplitude = np.sqrt(np.clip(square, 0, None)) / np.where(unit > 0, unit, np.inf)
        if amplitude[-1].max() >= (wanted if extension + 1 < _EXTENSIONS else target):
            return path, band, amplitude * np.sqrt(dim)
        last *= 1.5
    raise RuntimeError(
        f"predict_stages: no split reached {target:g} of its full size by τ = {last / 1.5:g} at D = {dim}: the noise "
        "η/B keeps the heads from the saddle where they would grow"
    )


def even_normals(size: int, samples: int) -> Float[np.ndarray, "S size"]:
    """Standard normals on scrambled Sobol points whose |z| lie, in each coordinate, exactly at levels (j + ½)/S.

    At a quarter of its cell, a point and those of the other sign fill |z| evenly; none is 0.
    """
    enough = int(np.ceil(np.log2(samples)))
    points = qmc.Sobol(size, rng=np.random.default_rng(_SOBOL)).random_base2(enough)[:samples]
    cells = points.argsort(axis=0).argsort(axis=0)
    return ndtri((cells + 0.25) / samples)


def _slope_at(growth: Any, time: float, last: float) -> float:
    """1/(2κ) at a time; NaN beyond the path, inf where nothing grows."""
    if not time <= last:
        return float("nan")
    rate = float(growth(time))
    return 0.5 / rate if rate > 0 else float("inf")


def _first_at(amplitude: Float[np.ndarray, " T"], target: float) -> int | None:
    reached = np.flatnonzero(amplitude >= target)
    return int(reached[0]) if reached.size else None


def _starts(
    path: Trajectory, band: Fluctuations, k: int, dim: int, samples: int, step_size: float
) -> tuple[Activation, OrderParameters]:
    """States (S, ...) drawn from the Gaussian law around the path at its record k.

    With what noise of this η/B after that record feeds into a growing split, seen from there.
    """
    heads, features = band.heads, band.features
    size = heads * features
    covariance = _overlap_block(band.covariance[k], band) * band.dim / dim
    rate, noise = (_overlap_block(x[k], band) for x in (band.rates, band.noise))
    split = _split(heads)
    for f in range(features):
        growth = np.einsum("hk,hk->", split, rate[:, f, :, f]) / max(heads - 1, 1)
        fed = np.einsum("hk,hk->", split, noise[:, f, :, f]) / max(heads - 1, 1)
        if growth > 0:
            covariance[:, f, :, f] += split * step_size / dim * fed / (2 * growth)
    values, vectors = np.linalg.eigh(covariance.reshape(size, size))
    drawn = (even_normals(size, samples) * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    middle = path.order[k]
    m = middle.m[None] + jnp.asarray(drawn.reshape(samples, heads, features))
    trained, _ = path.activation.split()
    own = jax.tree.map(lambda leaf: leaf[k], trained)
    return own, OrderParameters(m, m @ jnp.swapaxes(m, -1, -2) + middle.r_perp[None])


def _ensemble(
    path: Trajectory,
    band: Fluctuations,
    k: int,
    dim: int,
    samples: int,
    end: float,
    rates: dict[str, Any],
    progress: bool,
) -> Trajectory:
    """Flows from states drawn at record k of the path, on the clock of the whole run."""
    trained, order = _starts(path, band, k, dim, samples, rates["step_size"])
    own = eqx.combine(trained, path.activation.split()[1])
    matched = float(path.time[k])
    times = np.linspace(0, max(end - matched, 1.0), _RECORDS)
    flow = gradient_flow(
        path.task, own, order, times, progress=progress, throw=False, tolerance=_TOLERANCE,
        corrector_points=_FEW_POINTS, **rates,
    )  # fmt: skip
    return eqx.tree_at(lambda t: t.time, flow, flow.time + matched)
