"""What the mean residual may be beside its noise: effects of order 1/D (the text of `compare.agreement` says which)."""

import numpy as np
from jaxtyping import Float

from compare._pair import RATES
from theory import BayesSoftmax, Trajectory


def allowances(
    values: dict[str, tuple[np.ndarray, np.ndarray]], theory: Trajectory, simulation: Trajectory
) -> tuple[dict[str, np.ndarray], float, Float[np.ndarray, " T"]]:
    """(T, ...) allowance of every quantity of `values` (theory, simulation), before pooling; β; and scatter²."""
    settings, trained, count = dict(simulation.settings), theory.activation.trained, len(values["m"][0])
    dim, finite_loss = int(settings["dim"]), settings["loss"] == "finite"
    second = np.asarray(theory.task.prior.mean()) ** 2 + np.asarray(theory.task.prior.variance())
    signal = float(theory.task.snr) * float(second.sum()) / dim
    beta = int(theory.task.length) / dim + signal if finite_loss else 0.0
    spread = sum((_spread(values[name]) for name in ("m", *trained)), np.zeros(values["m"][0].shape[1]))
    found = _biases({name: predicted for name, (predicted, _) in values.items()}, beta, spread)
    if "loss" in values and finite_loss:
        found["loss"] += signal * np.abs(values["loss"][0]).sum(axis=0) / max(count, 1)
    for name in trained if finite_loss else ():
        found[name] += signal * _pull(name, values[name][0], theory, float(settings.get(RATES[name], 1.0)))
    return found, beta, spread


def _biases(predicted: dict[str, np.ndarray], beta: float, spread: Float[np.ndarray, " T"]) -> dict[str, np.ndarray]:
    """β × path + scatter² of every quantity and component, mean over replicas."""
    m, r, risk = (predicted[name] for name in ("m", "r", "risk"))
    along = m @ np.swapaxes(m, -1, -2)
    twofold = {"r": (2 * along, 2 * (r - along)), "risk": (2 * risk,), "loss": (2 * risk,)}

    def path(x: np.ndarray) -> np.ndarray:
        steps = np.abs(np.diff(x, axis=1)).sum(axis=0) / max(len(x), 1)
        return np.concatenate([np.zeros((1, *x.shape[2:])), np.cumsum(steps, axis=0)])

    return {
        name: beta * sum(path(part) for part in twofold.get(name, (x,))) + spread.reshape(-1, *(1,) * (x.ndim - 2))
        for name, x in predicted.items()
    }


def _spread(pair: tuple[np.ndarray, np.ndarray]) -> Float[np.ndarray, " T"]:
    """Variance of the residuals over replicas, mean over heads (if there are), summed over features (if there are)."""
    residual = pair[1] - pair[0]
    if len(residual) < 2:
        return np.zeros(residual.shape[1])
    variance = np.var(residual, axis=0, ddof=1)
    variance = variance.reshape(*variance.shape[:2], -1) if variance.ndim > 1 else variance[:, None, None]
    return variance.mean(axis=1).sum(axis=-1)


def _pull(name: str, predicted: np.ndarray, theory: Trajectory, rate: float) -> np.ndarray:
    """What the length of the signal moves a bias or scale by, per ν E‖θ‖²/D (docs/model.md §8), mean over replicas."""
    if name == "scale":
        return np.abs(predicted).sum(axis=0) / max(len(predicted), 1)
    own = theory.order.heads if predicted.ndim > 2 else 1
    joint = isinstance(theory.activation, BayesSoftmax)
    share = np.full(predicted.shape, 1 - 1 / own) if joint else 1 / (1 + int(theory.task.length) * np.exp(-predicted))
    slope = rate * share.sum(axis=0) / max(len(share), 1) / (2 * own)
    steps = np.diff(np.asarray(theory.time)).reshape(-1, *(1,) * (slope.ndim - 1)) * (slope[1:] + slope[:-1]) / 2
    return np.concatenate([np.zeros((1, *slope.shape[1:])), np.cumsum(steps, axis=0)])
