"""How often single replicas stay within the predicted band (defined in the text of `compare.agreement`)."""

from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import norm

from compare._pair import RATES
from theory import Fluctuations, Trajectory

COVERED = 0.95  # what a band of ± NORMAL deviations holds
NORMAL = float(norm.ppf((1 + COVERED) / 2))
TOLERANCE = 0.02  # accuracy that is asked of the coverage
_SLOPE = 2 * NORMAL * float(norm.pdf(NORMAL))  # −d coverage / d log width
_POINTS = 0.01  # relative error of deviations from the points that Σ is averaged on
_MOST = 64  # replicas of a drawn ensemble; larger ones are scaled to


class Band(eqx.Module):
    """How the residuals of one quantity lie in the predicted band.

    Attributes:
        name: m, r, bias or scale.
        dims: names of the axes after time.
        deviation: ((R,) T, ...) predicted standard deviation.
        z: (R, T, ...) residual / predicted deviation; NaN where that is 0.
        raw: fraction of |z| ≤ 1.96 over replicas, judged times and components.
        raw_error: its standard error, clustered by replica.
        coverage: the same for residuals less their mean over replicas, which the O(1/D) bias shifts.
        coverage_error: its standard error, clustered by replica.
        allowed: what |coverage − 95 %| may be; NaN without a verdict.
        noise: the part of it that is the noise of R replicas, (1 − level) quantile of the predicted law.
        by_time: (T,) coverage at each record.
        ratio: measured/predicted scatter (rms of z less its mean).
        ratio_error: its standard error, clustered by replica.
    """

    name: str = eqx.field(static=True)
    dims: tuple[str, ...] = eqx.field(static=True)
    deviation: Float[np.ndarray, "..."]
    z: Float[np.ndarray, "R T ..."]
    raw: float
    raw_error: float
    coverage: float
    coverage_error: float
    allowed: float
    noise: float
    by_time: Float[np.ndarray, " T"]
    ratio: float
    ratio_error: float

    @property
    def within(self) -> bool:
        """Whether |coverage − 95 %| ≤ allowed."""
        return abs(self.coverage - COVERED) <= self.allowed

    @property
    def unseen(self) -> tuple[float, float]:
        """True widths over predicted ones between these (the least and the largest) would have passed unseen."""
        covered = np.clip([COVERED + self.allowed, COVERED - self.allowed], 0, 1)
        with np.errstate(divide="ignore"):
            least, largest = NORMAL / norm.ppf((1 + covered) / 2)
        return float(least), float(largest)


def check_bands(bands: Any, theory: Trajectory, simulation: Trajectory) -> None:
    """Refuses bands that belong to other runs."""
    settings, order, time = dict(simulation.settings), theory.order, np.asarray(theory.time)
    dim, step = int(settings["dim"]), settings["learning_rate"] / settings["batch"]
    if not isinstance(bands, Fluctuations):
        raise ValueError(f"bands: expected a result of `fluctuations`, got {type(bands).__name__}")
    if bands.time.shape != time.shape or np.any(np.abs(bands.time - time) > 1e-9 * max(1.0, float(time[-1]))):
        raise ValueError("bands: expected the records of theory and simulation, got other times")
    if bands.dim != dim:
        raise ValueError(f"bands: expected D = {dim} of the simulation, got {bands.dim}")
    if abs(bands.step_size - step) > 1e-12 * step:
        raise ValueError(f"bands: expected η/B = {step!r} of the simulation, got {bands.step_size!r}")
    if dict(theory.settings)["step_size"] == 0:
        raise ValueError("bands: expected a theory with the finite-step corrector, got plain gradient flow")
    if (bands.heads, bands.features) != (order.heads, order.features):
        raise ValueError(
            f"bands: expected H = {order.heads}, F = {order.features}, got {bands.heads} and {bands.features}"
        )
    names = tuple(name for name, _ in bands.trained)
    if names != tuple(theory.activation.trained):
        raise ValueError(f"bands: expected trained {list(theory.activation.trained)}, got {list(names)}")
    replicas = theory.replicas or 1
    if bands.replicas not in (None, replicas):
        raise ValueError(f"bands: expected one path, or one for each of {replicas} replicas, got {bands.replicas}")
    if np.any(np.abs(np.asarray(bands.covariance)[..., 0, :, :]) > 0):
        raise ValueError("bands: expected S(0) = 0, each replica's theory from its own start, got a variance of starts")


def kept_paths(bands: Fluctuations, kept: Bool[np.ndarray, " R"]) -> Fluctuations:
    """The paths of the replicas that are kept."""
    if bands.replicas is None:
        return bands
    fields = ("covariance", "rates", "noise", "propagators")
    where = lambda b: [getattr(b, name) for name in fields]  # noqa: E731
    return eqx.tree_at(where, bands, [getattr(bands, name)[kept] for name in fields])


def bands_of(
    bands: Fluctuations,
    residuals: dict[str, Float[np.ndarray, "R T ..."]],
    dims: dict[str, tuple[str, ...]],
    judged: Bool[np.ndarray, " T"],
    level: float,
    width: float,
) -> tuple[Band, ...]:
    """The band of m, r and each trained leaf.

    Args:
        bands: of one path, or one for every replica.
        residuals: simulation − theory.
        dims: names of their axes after time.
        judged: which records count.
        level: bound on the false-alarm rate of each.
        width: relative error of the predicted deviations that is granted.
    """
    count = len(residuals["m"])
    noise = dict.fromkeys(residuals, float("nan"))
    if count >= 2 and np.any(judged):
        noise = _noise(bands, list(residuals), judged, count, level)
    granted = min(TOLERANCE, _SLOPE * (width + bands.error + _POINTS))
    return tuple(_band(bands, name, d, dims[name], judged, noise[name], granted) for name, d in residuals.items())


def _band(
    bands: Fluctuations,
    name: str,
    residual: np.ndarray,
    dims: tuple[str, ...],
    judged: np.ndarray,
    noise: float,
    granted: float,
) -> Band:
    deviation = bands.leaf(name) if name in RATES else getattr(bands, name)
    count, steps = residual.shape[:2]
    sigma = np.broadcast_to(deviation, residual.shape)
    known = sigma > 0
    z = np.divide(residual, sigma, out=np.full(residual.shape, np.nan), where=known)
    counted = np.ones(residual.shape[2:], dtype=bool)
    if name == "r":
        counted = np.triu(counted)
    flat, sigma = (x.reshape(count, steps, counted.size)[:, :, counted.reshape(-1)] for x in (residual, sigma))
    raw, raw_error = _clustered(_covered(flat, sigma)[:, judged])
    centred, predicted = _centred(flat, sigma)
    covered = _covered(centred, predicted) if count >= 2 else np.full(flat.shape, np.nan)
    coverage, coverage_error = _clustered(covered[:, judged])
    square = np.divide(centred, predicted, out=np.full(flat.shape, np.nan), where=predicted > 0) ** 2
    ratio, ratio_error = _clustered(square[:, judged])
    with np.errstate(invalid="ignore"):
        ratio = float(np.sqrt(ratio))
    # the noise of the replicas and what the theory grants itself, but never beyond the tolerance if they resolve it
    allowed = min(noise + granted, max(noise, TOLERANCE)) if np.isfinite(noise) else float("nan")
    known_times = np.isfinite(covered).any((0, 2)) if covered.size else np.zeros(steps, bool)
    by_time = np.full(steps, np.nan)
    by_time[known_times] = np.nanmean(covered[:, known_times], axis=(0, 2))
    return Band(
        name, dims, deviation, z, raw, raw_error, coverage, coverage_error, allowed, noise, by_time,
        ratio, ratio_error / (2 * ratio) if ratio > 0 else float("nan"),
    )  # fmt: skip


def _covered(x: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """1 within the band, 0 outside, NaN where there is none."""
    return np.where(sigma > 0, np.abs(x) <= NORMAL * sigma, np.nan)


def _centred(x: Float[np.ndarray, "*batch R T C"], sigma: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Residuals less their mean over replicas, and the deviations these have when single ones have `sigma`."""
    count = x.shape[-3]
    if not count:
        return x, sigma
    variance = sigma**2 * (1 - 2 / count) + np.mean(sigma**2, axis=-3, keepdims=True) / count
    return x - x.mean(axis=-3, keepdims=True), np.sqrt(np.clip(variance, 0, None))


def _clustered(values: Float[np.ndarray, "R T C"]) -> tuple[float, float]:
    """Mean over all that is known, and its standard error from the replicas' own means."""
    known = np.isfinite(values)
    weight = known.sum(axis=(1, 2))
    if not weight.sum():
        return float("nan"), float("nan")
    mean, count = float(np.sum(values[known]) / weight.sum()), int(np.sum(weight > 0))
    if count < 2:
        return mean, float("nan")
    off = np.where(known, values, 0).sum(axis=(1, 2)) - weight * mean
    return mean, float(np.sqrt(np.sum(off**2) * count / (count - 1)) / weight.sum())


def _noise(bands: Fluctuations, names: list[str], judged: np.ndarray, count: int, level: float) -> dict[str, float]:
    """The (1 − level) quantile of |coverage − 95 %| of R replicas whose deviations have the predicted law."""
    used = min(count, _MOST)
    own = kept_paths(bands, np.arange(bands.replicas or 1) < used)
    ensembles = max(999, int(np.ceil(5 / level)))
    size = own.covariance.shape[-1]
    sigma = np.sqrt(np.clip(np.diagonal(own.covariance, axis1=-2, axis2=-1), 0, None))[..., judged, :]
    sigma = np.broadcast_to(sigma, (used, *sigma.shape[-2:]))
    group = max(1, 2**22 // (used * size * len(judged)))  # some 32 MB at a time
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for number, first in enumerate(range(0, ensembles, group)):
        some = min(group, ensembles - first)
        if bands.replicas is None:
            x = own.draw(some * used, seed=number).reshape(some, used, len(judged), size)
        else:
            x = np.moveaxis(own.draw(some, seed=number), 1, 0)
        covered = _covered(*_centred(x[:, :, judged], sigma))
        for name in names:
            found[name].append(np.nanmean(covered[..., own.columns(name)], axis=(1, 2, 3)))
    rank = int(level * (ensembles + 1))
    off = {name: np.abs(np.concatenate(parts) - COVERED) for name, parts in found.items()}
    return {name: float(np.partition(x, -rank)[-rank]) * (used / count) ** 0.5 for name, x in off.items()}
