"""The staircase of specializations predicted: saddle to saddle, and when, with its finite-D distribution.

*Saddles.* From the unspecialized point the most unstable split says which feature the heads divide along. The risk is
then minimized with the heads of each group tied: the next, partially specialized saddle. And so on until nothing
is unstable (docs/model.md §14).

*Times.* From k_h ~ N(0, r_0 I) all heads are statistically equal: along this symmetric path (m_h = m(τ), r with one
diagonal and one off-diagonal value) the covariance S of the fluctuations is integrated from the start's, r_0/D for m,
with SGD's own noise added (docs/model.md §15). D·S does not depend on D. While splits are small they are Gaussian with
that covariance. At the matching time, when the first of them reaches `MATCH` of the threshold, an ensemble of states
is drawn from it, and the nonlinear flow takes each on, through all later stages. Noise after matching is added to the
drawn amplitudes as what it feeds into a growing split, (η/(BD)) Σ/(2κ). Nothing is fitted.
"""

import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy.special import ndtri
from scipy.stats import qmc

from theory._checks import instance, invalid, non_negative, positive, whole
from theory.activation import Activation, BayesSoftmax
from theory.fit import fit
from theory.flow import gradient_flow
from theory.fluctuation import Fluctuations, fluctuations
from theory.method import Method, Quadrature
from theory.order import OrderParameters
from theory.passage import SPLIT_FRACTION, first_passage, full_split, head_deviation
from theory.saddle import CriticalPoint, HessianSpectrum, hessian_spectrum, tied_minimum, unspecialized_point
from theory.task import SingleLocation
from theory.trajectory import Trajectory

MATCH = 0.2  # of the threshold: splits of this size are still Gaussian, and grow at the path's rate
_LATEST = 6.0  # e-folds that the smallest of the drawn splits may lie behind
_RECORDS, _PATH_RECORDS = 101, 41
_MOST_HEADS = 12  # whose sign patterns are tried
_EXTENSIONS = 8
_ALIKE = 1e-6  # directions and differences of heads below are rounding errors
_GROWS = 1e-7  # curvatures nearer to 0 are marginal
_SOBOL = 0x73706C69
_TOLERANCE = 1e-4  # of the ensemble's flows
_POINTS, _FEW_POINTS = 2048, 256  # per mixture component, for the path and for the ensemble


class Stage(eqx.Module):
    """One saddle of the staircase, and how it is left.

    Attributes:
        point: the saddle.
        spectrum: its curvatures.
        feature: index of the feature that the heads divide along there for the first time (of several, the largest
            part); −1 if there is none, as where groups divide further along features split before.
        rate: κ, at which that split grows in the limit D → ∞, η/B → 0.
        multiplicity: number of directions with that rate.
        signs: (H,) side that each head takes in the most even of the splits along them; 0 if none.
        direction: (H, F) how they move apart in it, one unit each.
        also: other features along which heads divide equally fast.
        ending: why the staircase ends here; empty if it goes on.
    """

    point: CriticalPoint
    spectrum: HessianSpectrum
    feature: int = eqx.field(static=True)
    rate: float
    multiplicity: int = eqx.field(static=True)
    signs: tuple[int, ...] = eqx.field(static=True)
    direction: Float[np.ndarray, "H F"]
    also: tuple[int, ...] = eqx.field(static=True)
    ending: str = eqx.field(static=True)

    @property
    def scale(self) -> float:
        """√(ν Var θ_f), the largest of the features along which the heads divide; 0 if they do not."""
        return float(np.max(full_split(self.point.task)[np.any(self.direction, axis=0)], initial=0.0))

    @property
    def slope(self) -> float:
        """1/(2κ): asymptotic stage time per unit of log D; inf if nothing grows."""
        return 1 / (2 * self.rate) if self.rate > 0 else float("inf")


class StagePrediction(eqx.Module):
    """The staircase and when its steps come; prints as a table.

    Attributes:
        stages: the saddles, from the unspecialized point to the last.
        dims: (N,) the D asked for.
        times: (N, S, F) stage times of an ensemble of S starts at each D: first passage of the standard deviation over
            heads through `threshold`·√(ν Var θ_f); inf beyond the end of the flow, NaN for features without a stage.
        match: (N,) matching time τ_m.
        path_slope: (N,) d(stage time)/d(log D) of the first split along the path.
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
        """Features in the order in which the saddles are left along them."""
        return tuple(stage.feature for stage in self.stages if stage.feature >= 0)

    def quantile(self, level: float | Float[np.ndarray, " Q"]) -> Float[np.ndarray, "..."]:
        """(..., N, F) stage times below which a fraction `level` of the runs lies; inf if later than the flows end."""
        ranked = np.sort(self.times, axis=1)
        place = np.asarray(level) * ranked.shape[1] - 0.5
        low = np.clip(np.floor(place), 0, ranked.shape[1] - 1).astype(int)
        high = np.clip(low + 1, 0, ranked.shape[1] - 1)
        share = np.clip(place - low, 0, 1)[..., None, None]
        below, above = np.moveaxis(ranked[:, low], 0, -2), np.moveaxis(ranked[:, high], 0, -2)
        with np.errstate(invalid="ignore"):
            return np.where(share == 0, below, below + share * (above - below))

    def cdf(self, times: Any, *, feature: int, dim: int | None = None) -> Any:
        """Predicted probability that the stage of `feature` (from 0) comes before each of `times`.

        Linear between the ensemble's ranks; its own error is about 1/S.
        """
        own = self.dims.index(dim) if dim is not None else 0
        ranked = np.sort(self.times[own, :, feature])
        level = (np.arange(len(ranked)) + 0.5) / len(ranked)
        known = np.isfinite(ranked)
        return np.interp(times, ranked[known], level[known], left=0.0, right=level[known][-1] if known.any() else 0.0)

    def to_xarray(self) -> xr.Dataset:
        """`stage_time` (dim, sample, feature), quantiles, and the saddles with rates and asymptotic slopes."""
        levels = np.array([0.025, 0.25, 0.5, 0.75, 0.975])
        quantiles = np.moveaxis(self.quantile(levels), 0, -1)
        stages = self.stages
        return xr.Dataset(
            {
                "stage_time": (("dim", "sample", "feature"), self.times, {"long_name": "predicted stage time"}),
                "quantile": (("dim", "feature", "level"), quantiles, {"long_name": "its quantiles"}),
                "match": ("dim", self.match, {"long_name": "matching time"}),
                "path_slope": ("dim", self.path_slope, {"long_name": "slope of the first stage along the path"}),
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
        heads = self.stages[0].point.order.heads
        lines = [
            f"Staircase of {type(self.stages[0].point.activation).__name__} with {heads} heads",
            f"  {'saddle':>6}{'groups':>8}{'risk':>11}{'splits along':>14}{'rate κ':>11}{'times':>7}{'1/(2κ)':>8}",
        ]
        for i, stage in enumerate(self.stages):
            groups = len(set(stage.point.groups))
            start = f"  {i:>6}{groups:>8}{float(stage.point.risk):11.6f}"
            if stage.ending:
                lines.append(f"{start}  {stage.ending}")
                continue
            sides = "".join("+" if sign > 0 else "-" for sign in stage.signs)
            growth = f"{stage.rate:11.7f}{stage.multiplicity:>7}{stage.slope:8.3f}"
            along = f"feature {stage.feature + 1}" if stage.feature >= 0 else "within groups"
            lines.append(f"{start}{along:>14}{growth} {sides}")
            if stage.also:
                lines.append(f"         and equally along features {', '.join(str(f + 1) for f in stage.also)}")
        if self.times.size:
            lines.append(
                f"  stage times from r_0 = {self.variance:g} (spread over heads at {self.threshold:g} of √(ν Var θ_f), "
                f"{self.times.shape[1]} starts)"
            )
            lines.append(f"  {'D':>12}{'feature':>9}{'median':>10}{'25 … 75 %':>20}{'2.5 … 97.5 %':>22}{'slope':>9}")
            levels = self.quantile(np.array([0.025, 0.25, 0.5, 0.75, 0.975]))
            for n, dim in enumerate(self.dims):
                for f in range(self.times.shape[2]):
                    q = levels[:, n, f]
                    if np.isnan(q[2]):
                        continue
                    slope = f"{self.path_slope[n]:9.3f}" if f == self.order[0] else ""
                    lines.append(
                        f"  {dim:>12}{f + 1:>9}{q[2]:10.2f}{f'{q[1]:.2f} … {q[3]:.2f}':>20}"
                        f"{f'{q[0]:.2f} … {q[4]:.2f}':>22}{slope}"
                    )
        return "\n".join(lines)


def saddle_path(
    task: SingleLocation, activation: Activation, heads: int, *, method: Method | None = None
) -> tuple[Stage, ...]:
    """The saddles from the unspecialized point on, each left along its fastest split, until nothing grows.

    At each saddle the heads take the sides of the most even split within the unstable directions; uneven ones are
    repaired later (excursions), which the flows of `predict_stages` show.

    Args:
        task: the task.
        activation: the activation.
        heads: H, at most 12.
        method: as for `unspecialized_point`.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=4, snr=4.0, prior=th.sign_flips([0.0], [1.0]))
        >>> [f"{stage.rate:.6f}" for stage in saddle_path(task, th.Softmax(), 2)]
        ['0.375000', '0.000000']
    """
    if whole("heads", heads, 1) > _MOST_HEADS:
        raise invalid("heads", f"at most {_MOST_HEADS}, whose sign patterns are tried", heads)
    point = unspecialized_point(task, activation, heads, method=method)
    free = np.asarray(point.order.m) != 0
    found: list[Stage] = []
    while True:
        spectrum = hessian_spectrum(task, activation, point, method=method)
        stage = _leaving(task, point, spectrum)
        found.append(stage)
        if stage.ending:
            return tuple(found)
        start = point.order.m + jnp.asarray(0.5 * stage.scale * stage.direction)
        free = free | np.any(stage.direction, axis=0)
        groups = tuple(2 * group + int(sign > 0) for group, sign in zip(point.groups, stage.signs, strict=True))
        following = tied_minimum(task, point.activation, start, groups, free, method=method)
        if not float(following.risk) < float(point.risk):
            return (*found[:-1], _ended(stage, "no lower point was found along this split"))
        point = following


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
    samples: int = 32,
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
        samples: starts for the distribution at each D (scrambled Sobol; quantiles err by about 1/samples).
        until: τ to which the flows run; by default until the slowest split of the saddles has had time to grow.
        method: of the saddles' risk, see `unspecialized_point`.
        progress: bars.
    """
    instance("task", task, SingleLocation)
    dims = tuple(whole("dim", d, task.features + heads) for d in np.atleast_1d(dim).tolist())
    variance, step_size = float(positive("variance", variance, 0)), float(non_negative("step_size", step_size, 0))
    threshold, samples = float(positive("threshold", threshold, 0)), whole("samples", samples, 1)
    rates = {"step_size": step_size, "bias_rate": bias_rate, "scale_rate": scale_rate}
    stages = saddle_path(task, activation, heads, method=method)
    unit = full_split(task)
    blank = np.full((len(dims), samples, task.features), np.nan)
    blank[:, :, unit > 0] = np.inf
    none = np.full(len(dims), np.nan)
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
        leading = int(np.argmax(amplitude[k]))
        growth = np.gradient(np.log(scaled[:, leading]), path.time)
        slopes.append(0.5 / growth[k] if growth[k] > 0 else np.inf)
        end = until
        if end is None:
            later = [s for s in stages if not s.ending]
            waits = [np.log(max(np.sqrt(d / variance) * s.scale, np.e)) / s.rate for s in later[1:]]
            end = float(path.time[k]) + (np.log(1 / MATCH) + _LATEST) / max(growth[k], later[0].rate / 2) + sum(waits)
        ensemble = _ensemble(path, band, k, d, samples, end, rates, activation, progress)
        ensembles.append(ensemble)
        match.append(float(path.time[k]))
        amplitudes = head_deviation(np.asarray(ensemble.order.m)) / np.where(unit > 0, unit, 1.0)
        clock = np.asarray(ensemble.time)
        passages = [[first_passage(clock, own[:, f], threshold) for f in range(task.features)] for own in amplitudes]
        times.append(np.where(unit > 0, np.asarray(passages), np.nan))
    return StagePrediction(
        stages, dims, np.stack(times), np.asarray(match), np.asarray(slopes), tuple(ensembles), path, band,
        threshold, variance,
    )  # fmt: skip


def _leaving(task: SingleLocation, point: CriticalPoint, spectrum: HessianSpectrum) -> Stage:
    """How a saddle is left: the fastest growing directions, and the sides of the heads."""
    values: np.ndarray = np.asarray(spectrum.eigenvalues)
    m: np.ndarray = np.asarray(point.order.m)
    if not spectrum.unstable.any():
        ending = "stable: nothing grows"
        least = float(spectrum.orthogonal[0])
        if least < -_GROWS:  # heads that gain by differing where there is no signal
            ending = f"stable within the spikes' span; parts orthogonal to it grow (κ = {-least:.6f})"
        return Stage(point, spectrum, -1, 0.0, 0, (0,) * len(m), np.zeros(m.shape), (), ending)
    fastest = np.flatnonzero(np.isclose(values, values[0], rtol=1e-6, atol=1e-7))
    directions = np.asarray(spectrum.directions)[fastest]
    named = sorted({spectrum.features[i] for i in fastest} - {-1})
    along = _axes(directions, point.groups)
    if named:  # the first of those that are equally fast, and the same one for all groups
        along = np.broadcast_to(np.eye(m.shape[1])[named[0]], m.shape)
    signs = _most_even(directions, along)
    new = np.where((full_split(task) > 0) & (np.ptp(m, axis=0) < _ALIKE), np.max(np.abs(along), axis=0), 0.0)
    feature = int(np.argmax(new)) if np.any(new > 0) else -1
    moved = np.asarray(signs)[:, None] * along
    found = Stage(point, spectrum, feature, float(-values[0]), len(fastest), signs, moved, tuple(named[1:]), "")
    if not np.any(moved):
        return _ended(found, f"unstable (κ = {found.rate:.6f}) in what the activation trains: not followed further")
    return found


def _axes(directions: Float[np.ndarray, "N H F"], groups: tuple[int, ...]) -> Float[np.ndarray, "H F"]:
    """The unit vector of feature space along which the heads of each group move the most, 0 where they do not."""
    axes = np.zeros(directions.shape[1:])
    for group in set(groups):
        own = np.asarray(groups) == group
        _, lengths, vectors = np.linalg.svd(directions[:, own].reshape(-1, directions.shape[-1]), full_matrices=False)
        axes[own] = vectors[0] if lengths[0] > _ALIKE else 0.0
    return np.where(np.abs(axes) > _ALIKE, axes, 0.0)


def _most_even(directions: Float[np.ndarray, "N H F"], along: Float[np.ndarray, "H F"]) -> tuple[int, ...]:
    """The sides ±1 of the heads that lie most within the directions."""
    patterns = np.asarray([(1, *rest) for rest in itertools.product((1, -1), repeat=len(along) - 1)])
    moved = patterns[:, :, None] * along
    scores = np.sum(np.einsum("phf,nhf->pn", moved, directions) ** 2, axis=1)
    best = patterns[int(np.flatnonzero(scores > scores.max() - 1e-9)[0])]
    return tuple(int(sign) for sign in best)


def _method(task: SingleLocation, activation: Activation, stages: tuple[Stage, ...], variance: float) -> Method:
    """Nodes for the flows: those of the start, of every saddle, and of the saddles with the start's r_⊥ as well."""
    accuracy = 1e-4 if isinstance(activation, BayesSoftmax) else 1e-6
    ms = jnp.stack([jnp.zeros_like(stages[0].point.order.m), *(stage.point.order.m for stage in stages)])
    orders = OrderParameters(ms, ms @ jnp.swapaxes(ms, -1, -2) + variance * jnp.eye(ms.shape[1])[None])
    rest = activation.split()[1]
    first = [activation, *(stage.point.activation for stage in stages)]
    trained = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(one.split()[0] for one in first))
    return fit(Quadrature(accuracy), task, rest, (trained, orders))


def _ended(stage: Stage, why: str) -> Stage:
    return dataclasses.replace(stage, feature=-1, also=(), ending=why)


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
    growth = max(np.log(target * np.max(unit) * np.sqrt(dim / variance)), 1.0)
    last = 5 + 1.2 * growth / stages[0].rate
    for _ in range(_EXTENSIONS):
        times = last * np.linspace(0, 1, _PATH_RECORDS) ** 1.5
        path = gradient_flow(task, activation, start, times, progress=False, corrector_points=_POINTS, **rates)
        band = fluctuations(path, dim=dim, variance=variance, points=_POINTS, method=rates["method"])
        block = _overlap_block(band.covariance, band)
        square = np.einsum("hk,thfkf->tf", _split(heads), block) / heads
        amplitude = np.sqrt(np.clip(square, 0, None)) / np.where(unit > 0, unit, np.inf)
        if amplitude[-1].max() >= target:
            return path, band, amplitude * np.sqrt(dim)
        last *= 1.5
    raise RuntimeError(
        f"predict_stages: no split reached {target:g} of its full size by τ = {last / 1.5:g} at D = {dim}: the noise "
        "η/B keeps the heads from the saddle where they would grow"
    )


def _first_at(amplitude: Float[np.ndarray, " T"], target: float) -> int | None:
    reached = np.flatnonzero(amplitude >= target)
    return int(reached[0]) if reached.size else None


def _ensemble(
    path: Trajectory,
    band: Fluctuations,
    k: int,
    dim: int,
    samples: int,
    end: float,
    rates: dict[str, Any],
    activation: Activation,
    progress: bool,
) -> Trajectory:
    """Flows from states drawn at record k of the path, on the clock of the whole run."""
    heads, features = band.heads, band.features
    size = heads * features
    covariance = _overlap_block(band.covariance[k], band) * band.dim / dim
    rate, noise = (_overlap_block(x[k], band) for x in (band.rates, band.noise))
    split = _split(heads)
    for f in range(features):
        growth = np.einsum("hk,hk->", split, rate[:, f, :, f]) / max(heads - 1, 1)
        fed = np.einsum("hk,hk->", split, noise[:, f, :, f]) / max(heads - 1, 1)
        if growth > 0:  # what the noise after matching feeds into a growing split, seen from here
            covariance[:, f, :, f] += split * rates["step_size"] / dim * fed / (2 * growth)
    values, vectors = np.linalg.eigh(covariance.reshape(size, size))
    normal = ndtri(qmc.Sobol(size, rng=np.random.default_rng(_SOBOL)).random(samples).clip(1e-12, 1 - 1e-12))
    drawn = (normal * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    middle = path.order[k]
    m = middle.m[None] + jnp.asarray(drawn.reshape(samples, heads, features))
    order = OrderParameters(m, m @ jnp.swapaxes(m, -1, -2) + middle.r_perp[None])
    trained, rest = path.activation.split()
    own = eqx.combine(jax.tree.map(lambda leaf: leaf[k], trained), rest)
    matched = float(path.time[k])
    times = np.linspace(0, max(end - matched, 1.0), _RECORDS)
    flow = gradient_flow(
        path.task, own, order, times, progress=progress, throw=False, tolerance=_TOLERANCE,
        corrector_points=_FEW_POINTS, **rates,
    )  # fmt: skip
    return eqx.tree_at(lambda t: t.time, flow, flow.time + matched)
