"""The staircase of saddles: from the unspecialized point along the fastest split, again and again (docs/model.md §14).

At a saddle the heads of each group take the two sides of an unstable direction. The risk is then minimized with the
heads that are still alike tied, and with those overlaps at 0 that the reflections left unbroken keep there: both are
symmetries of the flow, so that what is found is stationary among all states.
"""

import dataclasses
import itertools

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from theory._checks import instance, invalid, whole
from theory._words import counted
from theory.activation import Activation
from theory.method import Method
from theory.passage import full_split
from theory.saddle import (
    CriticalPoint,
    HessianSpectrum,
    hessian_spectrum,
    moving_features,
    tied_minimum,
    unspecialized_point,
)
from theory.task import SingleLocation

MOST_HEADS = 12  # whose sign patterns are tried
_ALIKE = 1e-6  # parts of directions and differences of heads below are rounding errors
_PART = 1e-3  # of a unit direction: features with less do not take part in it
_MULTIPLET = 10.0  # times the resolution: rates at points found by minimization err by more than the curvatures do
_LOWER = 1e-12  # differences of the risk below are rounding errors


class Stage(eqx.Module):
    """One saddle of the staircase, and how it is left.

    Attributes:
        point: the saddle.
        spectrum: its curvatures.
        feature: index of the feature that the heads divide along there for the first time (of several, the largest
            part); −1 if there is none, as where groups divide further along features split before.
        rate: κ, at which that split grows in the limit D → ∞, η/B → 0.
        multiplicity: number of directions with that rate.
        signs: (H,) side that each head takes in the most even of the splits along them; 0 if it does not move.
        direction: (H, F) how they move in it: an unstable eigenvector, of length one for the head that moves most.
        also: the other features that take part for the first time, in this direction or in others of the same rate.
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
    def features(self) -> tuple[int, ...]:
        """All features that the heads divide along there for the first time."""
        return (self.feature, *self.also) if self.feature >= 0 else ()

    @property
    def scale(self) -> float:
        """√(ν Var θ·d), the largest over the heads' own directions d; 0 if they do not move."""
        task = self.point.task
        variances = np.einsum("hf,fg,hg->h", self.direction, np.asarray(task.prior.covariance()), self.direction)
        return float(np.sqrt(float(task.snr) * np.max(variances, initial=0.0)))

    @property
    def rates(self) -> Float[np.ndarray, " F"]:
        """(F,) growth rate of the fastest direction in which heads divide along each feature; −inf where none is."""
        divided = np.ptp(np.asarray(self.spectrum.directions), axis=1) > _PART
        return np.max(np.where(divided, -np.asarray(self.spectrum.eigenvalues)[:, None], -np.inf), axis=0)

    @property
    def slope(self) -> float:
        """1/(2κ): asymptotic stage time per unit of log D; inf if nothing grows."""
        return 1 / (2 * self.rate) if self.rate > 0 else float("inf")


def saddle_path(
    task: SingleLocation, activation: Activation, heads: int, *, method: Method | None = None
) -> tuple[Stage, ...]:
    """The saddles from the unspecialized point on, each left along its fastest split, until nothing grows.

    At each saddle the heads take the sides of the most even split within the unstable directions; uneven ones are
    repaired later (excursions), which the flows of `predict_stages` show. Of directions that are equally fast, the
    one nearest to the first feature is taken.

    Args:
        task: the task.
        activation: the activation.
        heads: H, at most 12.
        method: as for `unspecialized_point`.

    Returns:
        The stages; the last one's `ending` says why it is the last: "stable", or what stopped the search.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=4, snr=4.0, prior=th.sign_flips([0.0], [1.0]))
        >>> [f"{stage.rate:.6f}" for stage in saddle_path(task, th.Softmax(), 2)]
        ['0.375000', '0.000000']
    """
    instance("task", task, SingleLocation)
    instance("activation", activation, Activation)
    if whole("heads", heads, 1) > MOST_HEADS:
        raise invalid("heads", f"at most {MOST_HEADS}, whose sign patterns are tried", heads)
    point = unspecialized_point(task, activation, heads, method=method)
    found: list[Stage] = []
    while True:
        stage = _leaving(point, hessian_spectrum(task, activation, point, method=method))
        found.append(stage)
        if stage.ending:
            return tuple(found)
        start = point.order.m + 0.5 * stage.scale * stage.direction
        broken = np.any(np.asarray(start) != 0, axis=0)
        free = np.broadcast_to(moving_features(task.prior, broken), start.shape)
        groups = tuple(2 * group + int(sign > 0) for group, sign in zip(point.groups, stage.signs, strict=True))
        following = tied_minimum(task, point.activation, start, groups, free, method=method)
        if not float(following.risk) < float(point.risk) - _LOWER:
            why = f"unstable (κ = {stage.rate:.3g}), but no lower point was found along this split"
            return (*found[:-1], _ended(stage, why))
        point = following


def staircase_lines(stages: tuple[Stage, ...]) -> list[str]:
    """The stages as the lines of a table."""
    first = stages[0].point
    lines = [
        f"Staircase of {type(first.activation).__name__} with {counted(first.order.heads, 'head')}",
        f"  {'saddle':>6}{'groups':>8}{'risk':>11}{'splits along':>14}{'rate κ':>11}{'modes':>7}{'1/(2κ)':>9}",
    ]
    for i, stage in enumerate(stages):
        start = f"  {i:>6}{len(set(stage.point.groups)):>8}{float(stage.point.risk):11.6f}"
        if stage.ending:
            lines.append(f"{start}  {stage.ending}")
            continue
        sides = "".join("+" if sign > 0 else "-" if sign < 0 else "0" for sign in stage.signs)
        together = np.ptp(stage.direction, axis=0).max() < _ALIKE
        along = "within groups" if stage.feature < 0 else f"feature {stage.feature + 1}"
        along = "all together" if together else along
        lines.append(f"{start}{along:>14}{stage.rate:11.6g}{f'×{stage.multiplicity}':>7}{stage.slope:9.4g} {sides}")
        if stage.also:
            noun = "feature" if len(stage.also) == 1 else "features"
            lines.append(f"         together with {noun} {', '.join(str(f + 1) for f in stage.also)}")
    return lines


def _leaving(point: CriticalPoint, spectrum: HessianSpectrum) -> Stage:
    """How a saddle is left: the fastest growing directions, and the sides of the heads."""
    values: np.ndarray = np.asarray(spectrum.eigenvalues)
    m: np.ndarray = np.asarray(point.order.m)
    staying = Stage(point, spectrum, -1, 0.0, 0, (0,) * len(m), np.zeros(m.shape), (), "")
    if not point.stationary:
        return _ended(staying, f"not stationary (gradient {float(point.gradient):.1e}): not followed further")
    if not spectrum.unstable.any():
        least = float(spectrum.orthogonal[0])
        if least < -spectrum.resolution:  # heads that gain by differing where there is no signal
            return _ended(staying, f"stable within the spikes' span; parts orthogonal to it grow (κ = {-least:.6f})")
        return _ended(staying, "stable: nothing grows")
    rate = float(-values[0])
    fastest = values - values[0] <= min(_MULTIPLET * spectrum.resolution, 0.1 * rate)
    directions = np.asarray(spectrum.directions)[fastest]
    along = _axes(directions, point.groups)
    sides = _most_even(directions, along)
    moved = _within(directions, sides[:, None] * along)
    if not np.any(moved):
        why = f"unstable (κ = {rate:.6f}) in what the activation trains: not followed further"
        return _ended(dataclasses.replace(staying, rate=rate, multiplicity=int(fastest.sum())), why)
    divided = np.max(np.ptp(directions, axis=1), axis=0)  # by feature, the farthest that any two heads move apart
    new = (full_split(point.task) > 0) & (np.ptp(m, axis=0) < _ALIKE) & (divided > _PART)
    part = np.where(new, np.ptp(moved, axis=0), -1.0)
    feature = int(np.argmax(part > part.max() - _ALIKE)) if new.any() else -1
    also = tuple(int(f) for f in np.flatnonzero(new) if f != feature)
    signs = tuple(int(side) for side in np.where(np.any(moved, axis=1), sides, 0))
    return Stage(point, spectrum, feature, rate, int(fastest.sum()), signs, moved, also, "")


def _axes(directions: Float[np.ndarray, "N H F"], groups: tuple[int, ...]) -> Float[np.ndarray, "H F"]:
    """The unit vector of feature space along which the heads of each group move the most, 0 where they do not.

    Where several move them as much, that nearest to one feature: the first feature of those that come nearest, and the
    same for all groups.
    """
    spaces: dict[int, np.ndarray] = {}
    for group in set(groups):
        own = directions[:, np.asarray(groups) == group].reshape(-1, directions.shape[-1])
        _, lengths, vectors = np.linalg.svd(own, full_matrices=False)
        most = vectors[(lengths > (1 - _ALIKE) * lengths[0]) & (lengths > _ALIKE)]
        spaces[group] = most.T @ most
    nearest = sum(np.diagonal(space) for space in spaces.values())
    feature = int(np.argmax(nearest > np.max(nearest) - _ALIKE))
    axes = np.zeros(directions.shape[1:])
    for group, space in spaces.items():
        # a group that does not move along that feature: along its own largest one
        own = feature if space[feature, feature] > _ALIKE else int(np.argmax(np.diagonal(space)))
        length = np.sqrt(space[own, own])
        axes[np.asarray(groups) == group] = space[own] / length if length > _ALIKE else 0.0
    return np.where(np.abs(axes) > _ALIKE, axes, 0.0)


def _most_even(directions: Float[np.ndarray, "N H F"], along: Float[np.ndarray, "H F"]) -> Int[np.ndarray, " H"]:
    """The sides ±1 of the heads that lie most within the directions."""
    patterns = np.asarray([(1, *rest) for rest in itertools.product((1, -1), repeat=len(along) - 1)])
    moved = patterns[:, :, None] * along
    scores = np.sum(np.einsum("phf,nhf->pn", moved, directions) ** 2, axis=1)
    return patterns[int(np.flatnonzero(scores > scores.max() - 1e-9)[0])]


def _within(directions: Float[np.ndarray, "N H F"], pattern: Float[np.ndarray, "H F"]) -> Float[np.ndarray, "H F"]:
    """The part of a pattern within the directions, the longest row of length one; 0 if there is none."""
    moved = np.einsum("nhf,n->hf", directions, np.einsum("nhf,hf->n", directions, pattern))
    longest = np.max(np.linalg.norm(moved, axis=1))
    moved = moved / longest if longest > _ALIKE else np.zeros_like(moved)
    return np.where(np.abs(moved) > _ALIKE, moved, 0.0)


def _ended(stage: Stage, why: str) -> Stage:
    return dataclasses.replace(stage, feature=-1, also=(), ending=why)
