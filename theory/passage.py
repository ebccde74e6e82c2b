"""When heads have split along a feature: the amplitude and its first passage, for theory and simulations alike.

And the law of an ensemble of such times: sorted, the i-th of S stands for the level (i + ½)/S.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from theory.task import SingleLocation

SPLIT_FRACTION = 0.25  # of √(ν Var θ_f), the spread of heads that have split fully along feature f
_NO_VARIANCE = 1e-12  # of E θ_f²: less than that is rounding


def full_split(task: SingleLocation) -> Float[np.ndarray, " F"]:
    """√(ν Var θ_f), the standard deviation over heads of a full ± split; 0 for features that do not vary."""
    mean, variance = np.asarray(task.prior.mean()), np.clip(np.asarray(task.prior.variance()), 0, None)
    varies = variance > _NO_VARIANCE * (mean**2 + variance)
    return np.sqrt(float(task.snr) * np.where(varies, variance, 0.0))


def head_deviation(m: Float[np.ndarray, "*batch H F"]) -> Float[np.ndarray, "*batch F"]:
    """Standard deviation over heads (1/H): exactly 0 for equal heads, exactly the same under permutations and flips."""
    m = np.sort(m, axis=-2)
    m = m - (m[..., :1, :] + m[..., -1:, :]) / 2
    mean = (m.sum(axis=-2) + np.ascontiguousarray(m[..., ::-1, :]).sum(axis=-2)) / (2 * m.shape[-2])
    return np.sqrt(np.sort((m - mean[..., None, :]) ** 2, axis=-2).mean(axis=-2))


def first_passage(time: Float[np.ndarray, " T"], amplitude: Float[np.ndarray, " T"], threshold: float) -> float:
    """When the amplitude first reaches the threshold; inf if it never does, time[0] if it starts there.

    Log-linear between records, for amplitudes that grow exponentially (linear from an amplitude of exactly 0). A value
    exactly at the threshold gives its record's time. NaN never reaches it.
    """
    reached = amplitude >= threshold
    if not reached.any():
        return float("inf")
    k = int(reached.argmax())
    if k == 0 or amplitude[k] == threshold:
        return float(time[k])
    before, after = amplitude[k - 1], amplitude[k]
    if before > 0:  # differences of logarithms: a quotient may overflow
        before, after, threshold = np.log(before), np.log(after), np.log(threshold)
    share = (threshold - before) / (after - before)
    return float(time[k - 1] + np.clip(share, 0, 1) * (time[k] - time[k - 1]))


def rank_quantile(times: Float[np.ndarray, "N S *rest"], level: Any) -> Float[np.ndarray, "..."]:
    """(..., N, *rest) quantiles of S times at the levels (...), linear between ranks; inf counts as later than all.

    Between a finite time and inf it is inf, and NaN only where all times are.
    """
    ranked = np.sort(times, axis=1)
    place = np.asarray(level) * ranked.shape[1] - 0.5
    low = np.clip(np.floor(place), 0, ranked.shape[1] - 1).astype(int)
    high = np.clip(low + 1, 0, ranked.shape[1] - 1)
    share = np.clip(place - low, 0, 1)[(..., *[None] * (ranked.ndim - 1))]
    below, above = np.moveaxis(ranked[:, low], 0, place.ndim), np.moveaxis(ranked[:, high], 0, place.ndim)
    finite = np.isfinite(above)
    between = below + share * (np.where(finite, above, 0.0) - np.where(finite, below, 0.0))
    return np.where(share == 0, below, np.where(finite, between, above))


def rank_cdf(ensemble: Float[np.ndarray, " S"], times: Any) -> Any:
    """Share of an ensemble of times that lies before each of `times`, linear between ranks; inf is later than all."""
    ranked = np.sort(ensemble)
    level = (np.arange(len(ranked)) + 0.5) / len(ranked)
    known = np.isfinite(ranked)
    if not known.any():
        return np.zeros(np.shape(times))
    return np.interp(times, ranked[known], level[known], left=0.0)
