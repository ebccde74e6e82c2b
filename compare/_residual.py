"""Residuals of one quantity, and the rotation test of their mean (defined in the text of `compare.agreement`)."""

import functools
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float, Int

ROTATIONS = 9999  # with the observed mean itself, 10^4 directions


class Residual(eqx.Module):
    """Residuals of one quantity, simulation − theory, averaged over replicas.

    Attributes:
        name: m, r, bias, scale, risk or loss.
        dims: names of the axes after time.
        mean: (T, ...) mean residual.
        error: (T, ...) its standard error, pooled over like components; NaN with one replica.
        scatter: (T, ...) root mean square residual of single replicas.
        bias: (T, ...) the bias allowance.
        way: (T, ...) ∫ |dx̄/dτ| dτ, how far the theory's mean over replicas has gone.
        each: (R, T, ...) residuals of single replicas.
        critical: critical value on |mean|/error; NaN without a verdict.
        judged: (T,) whether the verdict covers this time.
    """

    name: str = eqx.field(static=True)
    dims: tuple[str, ...] = eqx.field(static=True)
    mean: Float[np.ndarray, "T ..."]
    error: Float[np.ndarray, "T ..."]
    scatter: Float[np.ndarray, "T ..."]
    bias: Float[np.ndarray, "T ..."]
    way: Float[np.ndarray, "T ..."]
    each: Float[np.ndarray, "R T ..."]
    critical: float
    judged: Bool[np.ndarray, " T"]

    @property
    def z(self) -> Float[np.ndarray, "T ..."]:
        """mean / error; 0 where both vanish."""
        return np.divide(self.mean, self.error, out=np.zeros_like(self.mean), where=self.error != 0)

    @property
    def allowed(self) -> Float[np.ndarray, "T ..."]:
        """critical × error + bias: what |mean| may be."""
        return self.critical * self.error + self.bias

    @property
    def worst(self) -> tuple[int, ...]:
        """Index of the judged entry that lies closest to (or furthest beyond) what is allowed."""
        excess = np.abs(self.mean) - self.bias
        exact = np.where(excess > 0, np.inf, np.finfo(float).min)  # where there is no error to compare with
        ratio = np.divide(excess, self.error, out=exact, where=self.error > 0)
        ratio[~self.judged] = -np.inf
        return tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))

    @property
    def within(self) -> bool:
        """Whether |mean| ≤ allowed wherever judged."""
        return bool(np.all(np.abs(self.mean[self.judged]) <= self.allowed[self.judged]))

    @property
    def resolution(self) -> float:
        """Relative drift errors above this would have been noticed; inf if none would, NaN without errors."""
        allowed, way = self.allowed[self.judged], self.way[self.judged]
        ratio = np.divide(allowed, way, out=np.where(np.isnan(allowed), np.nan, np.inf), where=way > 0)
        return float(np.min(ratio)) if ratio.size else float("nan")

    def label(self, index: tuple[int, ...]) -> str:
        """`m[head 1, feature 2]` for an index that starts with time; counted from 1, as in the mathematics."""
        inner = ", ".join(f"{dim.rstrip('_')} {i + 1}" for dim, i in zip(self.dims, index[1:], strict=True))
        return f"{self.name}[{inner}]" if inner else self.name


def residual_of(
    name: str,
    predicted: Float[np.ndarray, "R T ..."],
    seen: Float[np.ndarray, "R T ..."],
    bias: Float[np.ndarray, "T ..."],
    judged: Bool[np.ndarray, " T"],
    level: float,
) -> Residual:
    count, steps, *shape = predicted.shape
    groups, columns = _groups(name, tuple(shape))
    d = (seen - predicted).reshape(count, steps, groups.size)
    bias = _pooled(bias.reshape(steps, -1), groups, np.max)
    mean = scatter = error = np.full(d.shape[1:], np.nan)
    critical = float("nan")
    if count:
        mean, scatter = d.mean(axis=0), np.sqrt(np.mean(d**2, axis=0))
    if count >= 2:
        error = np.sqrt(_pooled(np.var(d, axis=0, ddof=1), groups, np.mean) / count)
    if count >= 2 and np.any(judged):
        shifted = d - np.clip(mean, -bias, bias)  # the nearest residuals that the allowance explains
        critical = _critical_value(shifted[:, judged][:, :, columns], groups[columns], level)
    way = np.zeros(d.shape[1:])
    if count:
        moves = np.abs(np.diff(predicted.mean(axis=0).reshape(steps, -1), axis=0))
        way[1:] = np.cumsum(moves, axis=0)
    dims = {"m": ("head", "feature"), "r": ("head", "head_")}.get(name, ("head",) * len(shape))
    mean, error, scatter, bias, way = (part.reshape(steps, *shape) for part in (mean, error, scatter, bias, way))
    return Residual(name, dims, mean, error, scatter, bias, way, seen - predicted, critical, judged)


def _groups(name: str, shape: tuple[int, ...]) -> tuple[Int[np.ndarray, " C"], Int[np.ndarray, " K"]]:
    """Numbers of the components, equal where they play the same part, and which to count (r only once each).

    The parts of heads that start from unequal biases may differ: pooling them is less sharp, and as well calibrated.
    """
    if name == "m":
        groups, counted = np.broadcast_to(np.arange(shape[1]), shape), np.ones(shape, dtype=bool)
    elif name == "r":
        groups, counted = 1 - np.eye(shape[0], dtype=int), np.triu(np.ones(shape, dtype=bool))
    else:
        groups, counted = np.zeros(shape, dtype=int), np.ones(shape, dtype=bool)
    return groups.reshape(-1), np.flatnonzero(counted)


def _pooled(values: np.ndarray, groups: np.ndarray, reduce: Any) -> np.ndarray:
    """`reduce` over each group of components (last axis), given back to every one of its members."""
    out = np.empty_like(values)
    for group in np.unique(groups):
        members = groups == group
        out[..., members] = reduce(values[..., members], axis=-1, keepdims=True)
    return out


def _critical_value(residuals: Float[np.ndarray, "R T C"], groups: Int[np.ndarray, " C"], level: float) -> float:
    """The (1 − level) quantile of max |mean|/error over rotations of the replicas."""
    directions = _directions(len(residuals))
    largest = np.zeros(ROTATIONS)
    for group in np.unique(groups):
        for y in np.moveaxis(residuals[:, :, groups == group], 1, 0):  # one time at a time: little memory
            square = (directions @ y) ** 2
            variance = (np.sum(y**2, axis=0).mean() - square.mean(axis=1)).clip(0) / (len(y) - 1)
            ratio = np.divide(square.max(axis=1), variance, out=np.zeros(ROTATIONS), where=variance > 0)
            np.maximum(largest, ratio, out=largest)
    rank = int(level * (ROTATIONS + 1))  # of the largest, counting the observed direction itself
    return float(np.sqrt(np.partition(largest, -rank)[-rank]))


@functools.cache
def _directions(replicas: int) -> Float[np.ndarray, "K R"]:
    """Uniform directions, always the same ones, so that a verdict can be repeated."""
    normal = np.random.default_rng(0).standard_normal((ROTATIONS, replicas))
    return normal / np.linalg.norm(normal, axis=1, keepdims=True)
