"""Heads and spike signs put in one order before means over replicas are taken.

The model does not care how heads are numbered, nor, when its prior is symmetric under flips of some spikes'
signs, which sign is which: replicas end in copies of each other under these moves, and their plain mean would be
zero. Residuals (`agreement`) are paired and need none of this; pictures of mean order parameters do.
"""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Int
from scipy.optimize import linear_sum_assignment

from theory import Activation, Trajectory
from theory.prior import Prior

MAX_FEATURES = 12  # all sign vectors are tried: 4096 at most


class Alignment(eqx.Module):
    """Theory and simulation with the same permutation of heads and signs of spikes in each replica.

    Attributes:
        theory: the aligned theory.
        simulation: the aligned simulation, paired with it as before.
        permutation: (R, H): new head h is old head permutation[h].
        signs: (R, F): factor on feature f, a symmetry of the prior.
        reference: the replica that the others were matched to.
    """

    theory: Trajectory
    simulation: Trajectory
    permutation: Int[np.ndarray, "R H"]
    signs: Int[np.ndarray, "R F"]
    reference: int = eqx.field(static=True)

    def to_xarray(self) -> xr.Dataset:
        """`theory_m`, `theory_r`, `simulation_m`, `simulation_r` as aligned, and `permutation`, `signs`.

        Also `theory_bias` and so on for what the activation trains.
        """
        sides = {"theory": self.theory.to_xarray(), "simulation": self.simulation.to_xarray()}
        names = ("m", "r", *self.theory.activation.trained)
        data = xr.Dataset({f"{side}_{name}": sides[side][name] for side in sides for name in names})
        data["permutation"] = (("replica", "head"), self.permutation, {"long_name": "head before alignment"})
        data["signs"] = (("replica", "feature"), self.signs, {"long_name": "factor on the feature's spike"})
        return data.assign_attrs(reference=self.reference, report=str(self))

    def __str__(self) -> str:
        moved = np.any(self.permutation != np.arange(self.permutation.shape[1]), axis=1)
        flipped = np.any(self.signs < 0, axis=1)
        return (
            f"Before averaging, replicas are aligned with replica {self.reference} at the theory's last record:\n"
            f"  heads permuted in {int(moved.sum())} and spike signs flipped in {int(flipped.sum())} "
            f"of {len(moved)} replicas, theory and simulation alike"
        )


def align(theory: Trajectory, simulation: Trajectory) -> Alignment:
    """Match every replica's heads and spike signs to one reference replica.

    For each replica the permutation and the signs are those that bring the *theory's* last m closest (in the sum
    of squares) to that of the first replica whose theory is finite to its end. They are applied at all times to
    theory and simulation, so the pairing is kept. A head takes along the bias and scale that it trains as its own.
    Only signs that leave the prior as it is are considered (`sign_symmetries`). Replicas whose theory failed are left
    as they are.

    Args:
        theory: a trajectory with a replica axis.
        simulation: its simulation, of the same shape.

    Raises:
        ValueError: no replica axis, shapes that differ, or an activation that tells heads apart (`check_shared`).
    """
    if theory.replicas is None or theory.order.m.shape != simulation.order.m.shape:
        raise ValueError(
            f"order: expected m of one shape (R, T, H, F), got {theory.order.m.shape} (theory), "
            f"{simulation.order.m.shape} (simulation)"
        )
    for side in (theory, simulation):
        check_shared(side.activation)
    last = np.asarray(theory.order.m)[:, -1]
    count, heads, features = last.shape
    finite = np.all(np.isfinite(last), axis=(1, 2))
    reference = int(np.argmax(finite))
    symmetries = sign_symmetries(theory.task.prior)
    permutation = np.tile(np.arange(heads), (count, 1))
    signs = np.ones((count, features), dtype=int)
    for replica in np.flatnonzero(finite):
        if replica != reference:
            permutation[replica], signs[replica] = _match(last[replica], last[reference], symmetries)
    return Alignment(
        _moved(theory, permutation, signs), _moved(simulation, permutation, signs), permutation, signs, reference
    )


def check_shared(activation: Activation) -> None:
    """Refuses an activation that tells heads apart, by numbers of their own that differ and are not trained.

    Trained ones are order parameters: permuted with their heads they make the same layer.

    Raises:
        ValueError: naming the parameter.
    """
    for path, leaf in jax.tree.leaves_with_path(activation.split()[1]):
        if np.ndim(leaf) and np.any(np.asarray(leaf) != np.asarray(leaf)[0]):
            raise ValueError(
                f"activation: expected one that all heads share, got {path[0].name} = {np.asarray(leaf).tolist()}"
            )


def sign_symmetries(prior: Prior) -> Int[np.ndarray, "S F"]:
    """The sign vectors s for which s·θ has the same law as θ; the first is (1, …, 1).

    A flip is a symmetry when every mixture component meets, at its flipped mean and covariance, the same weight.
    """
    weights, means, covariances = (np.asarray(x) for x in (prior.weights, prior.means, prior.covariances))
    features = prior.features
    if features > MAX_FEATURES:
        raise ValueError(f"prior: expected at most {MAX_FEATURES} features to find its sign symmetries, got {features}")
    scale = max(1e-300, np.abs(means).max(), np.sqrt(np.abs(covariances).max()))

    def weight_at(mean: np.ndarray, covariance: np.ndarray) -> float:
        near = np.all(np.abs(means - mean) <= 1e-9 * scale, axis=1)
        near &= np.all(np.abs(covariances - covariance) <= 1e-9 * scale**2, axis=(1, 2))
        return float(weights[near].sum())

    def symmetric(sign: np.ndarray) -> bool:
        return all(
            abs(weight_at(mean, cov) - weight_at(sign * mean, sign[:, None] * cov * sign)) <= 1e-9
            for mean, cov in zip(means, covariances, strict=True)
        )

    candidates = (np.array(sign) for sign in itertools.product([1, -1], repeat=features))
    return np.stack([sign for sign in candidates if symmetric(sign)])


def _match(m: np.ndarray, target: np.ndarray, symmetries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The permutation p and signs s with m[p]·s closest to target."""
    best = (np.inf, np.arange(len(m)), symmetries[0])
    for sign in symmetries:
        cost = np.sum((target[:, None] - sign * m[None]) ** 2, axis=-1)
        rows, heads = linear_sum_assignment(cost)
        total = cost[rows, heads].sum()
        if total < best[0] - 1e-12:
            best = (total, heads, sign)
    return best[1], best[2]


def _moved(trajectory: Trajectory, permutation: np.ndarray, signs: np.ndarray) -> Trajectory:
    m, r = np.asarray(trajectory.order.m), np.asarray(trajectory.order.r)
    m = np.take_along_axis(m, permutation[:, None, :, None], axis=2) * signs[:, None, None, :]
    r = np.take_along_axis(r, permutation[:, None, :, None], axis=2)
    r = np.take_along_axis(r, permutation[:, None, None, :], axis=3)
    order = eqx.tree_at(lambda o: (o.m, o.r), trajectory.order, (m, r))
    trained, rest = trajectory.activation.split()

    def with_heads(leaf: Array) -> Array:
        """One number for all heads (R, T), or one per head (R, T, H), which go where the heads go."""
        return leaf if leaf.ndim == 2 else jnp.take_along_axis(leaf, permutation[:, None, :], axis=2)

    activation = eqx.combine(jax.tree.map(with_heads, trained), rest)
    return eqx.tree_at(lambda t: (t.order, t.activation), trajectory, (order, activation))
