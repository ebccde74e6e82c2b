"""Residuals split into a shift in time and what remains.

After a split replicas differ mostly by a delay: the simulation is where the theory is δ earlier or later. To first
order x_sim(τ) = x_theory(τ + δ) means a residual δ dx/dτ, so δ is found by least squares on the theory's rate, and the
rest of the residual is an error of amplitude.
"""

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float
from scipy.interpolate import CubicSpline


class TimeShift(eqx.Module):
    """What `time_shift` finds; δ > 0: the simulation is ahead of the theory.

    Attributes:
        each: (R,) δ of every replica; NaN where the theory does not move.
        shift: δ of all replicas together.
        error: its standard error, clustered by replica; NaN with one.
        scatter: root mean square residual of single replicas.
        amplitude: root mean square of what is left once each replica's own δ is taken out.
        remainder: (T, ...) mean residual less `shift` times the mean rate.
    """

    each: Float[np.ndarray, " R"]
    shift: float
    error: float
    scatter: float
    amplitude: float
    remainder: Float[np.ndarray, "T ..."]


def time_shift(
    time: Float[np.ndarray, " T"],
    predicted: Float[np.ndarray, "R T ..."],
    residual: Float[np.ndarray, "R T ..."],
    used: Bool[np.ndarray, " T"],
) -> TimeShift:
    """Least squares of the residual on δ dx/dτ over the records `used` and all components, equally weighted.

    One δ for each replica, and one for all. First order in δ: right while δ is short against the time in which dx/dτ
    changes. dx/dτ is the derivative of a cubic spline through the records (differences, with fewer than four).

    Args:
        time: τ of the records.
        predicted: x of each replica's theory.
        residual: simulation − theory.
        used: which records count.

    Example:
        >>> tau = np.linspace(0.0, 4.0, 9)
        >>> x = np.sin(tau)[None, :, None]
        >>> late = time_shift(tau, x, np.sin(tau - 0.01)[None, :, None] - x, tau > 0)
        >>> round(late.shift, 3)
        -0.01
    """
    rate = _rate(time, predicted)
    shape = (len(residual), int(used.sum()) * int(np.prod(residual.shape[2:])))
    flat_rate, flat = (x[:, used].reshape(shape) for x in (rate, residual))
    along, square = np.sum(flat * flat_rate, axis=1), np.sum(flat_rate**2, axis=1)
    moves = square > 0
    each = np.divide(along, square, out=np.full(len(square), np.nan), where=moves)
    total, count = float(square.sum()), int(moves.sum())
    shift = float(along.sum()) / total if total > 0 else float("nan")
    error = float("nan")
    if count > 1:
        off = square[moves] * (each[moves] - shift)
        error = float(np.sqrt(np.sum(off**2) * count / (count - 1))) / total
    left = flat - np.where(moves, each, 0.0)[:, None] * flat_rate
    remainder = _mean(residual) - (shift if total > 0 else 0.0) * _mean(rate)
    return TimeShift(each, shift, error, _rms(flat), _rms(left), remainder)


def pooled_shift(parts: list[tuple[TimeShift, float]]) -> tuple[float, float]:
    """One δ for several quantities, and its standard error.

    The best compromise between the δ of each replica, every quantity with its weight: the inverse variance of the mean.

    Args:
        parts: the shifts, each with its standard error.
    """
    known = [(part, error) for part, error in parts if np.isfinite(part.shift) and error > 0]
    if not known:
        return float("nan"), float("nan")
    weights = np.array([error**-2 for _, error in known])
    weights = weights / weights.sum()
    shift = float(sum(weight * part.shift for weight, (part, _) in zip(weights, known, strict=True)))
    each = sum(weight * part.each for weight, (part, _) in zip(weights, known, strict=True))
    each = np.asarray(each)[np.isfinite(each)]
    error = float(np.std(each, ddof=1) / len(each) ** 0.5) if len(each) > 1 else float("nan")
    return shift, error


def _rate(time: np.ndarray, x: np.ndarray) -> np.ndarray:
    if len(time) >= 4:
        return np.asarray(CubicSpline(time, x, axis=1)(time, 1)) if len(x) else np.zeros_like(x)
    return np.gradient(x, time, axis=1) if len(time) > 1 else np.zeros_like(x)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2))) if x.size else float("nan")


def _mean(x: np.ndarray) -> np.ndarray:
    return x.mean(axis=0) if len(x) else np.full(x.shape[1:], np.nan)
