"""Pairs of trajectories with known residuals: Gaussian, of order D^-1/2, correlated in time and across heads."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from theory import OrderParameters, SingleLocation, Softmax, Softmax1, Trajectory, sign_flips

DIM = 1000


def task(features=2):
    mean, amplitude = np.zeros(features), np.full(features, 1.5)
    mean[0], amplitude[0] = 2.0, 0.0
    return SingleLocation(length=6, snr=1.0, prior=sign_flips(mean, amplitude))


def ideal(seed, *, replicas=8, times=7, heads=2, features=2, end=6.0, growth=0.0, step_size=0.5, drift=1.0):
    """A theory-like trajectory: the mean direction saturates, splits grow exponentially from their start."""
    rng = np.random.default_rng(seed)
    time = np.linspace(0, end, times)
    m = rng.normal(size=(replicas, 1, heads, features)) / np.sqrt(DIM) * np.exp(growth * time)[:, None, None]
    m[..., 0] += (drift * 2.0 * (1 - np.exp(-time / 3)))[:, None]
    return build(time, m, {"step_size": step_size})


def build(time, m, settings, *, perp=1.0):
    heads = m.shape[-2]
    r = m @ np.swapaxes(m, -1, -2) + perp * np.eye(heads)
    risk = 0.9 - 0.2 * np.mean(m[..., 0], axis=-1)
    return trajectory(time, m, r, risk, settings)


def trajectory(time, m, r, risk, settings, *, loss=None, result=None):
    result = jnp.zeros(m.shape[:-3], dtype=int) if result is None else jnp.asarray(result)
    loss, error = (None, None) if loss is None else (jnp.asarray(loss), jnp.full(loss.shape, 1e-3))
    order, prior = OrderParameters(m, r), task(m.shape[-1])
    return Trajectory(jnp.asarray(time), order, Softmax(), jnp.asarray(risk), loss, error, result, prior, settings)


def noise(rng, shape, scale, mixing):
    """Brownian in time (axis 1), from 0; components mixed, so that heads are correlated."""
    steps = rng.normal(size=shape)
    steps[:, 0] = 0
    path = np.cumsum(steps, axis=1) / np.sqrt(shape[1])
    flat = path.reshape(*shape[:2], -1) @ mixing
    return scale * flat.reshape(shape)


def simulated(theory, seed, *, dim=DIM, scale=1.0, shift=0.0, loss="finite", fresh=True, batch=10):
    """`theory` plus residuals of order scale/√dim with mean `shift` (an array like m, or 0)."""
    rng = np.random.default_rng(10_000 + seed)
    m, r, risk = (np.asarray(x) for x in (theory.order.m, theory.order.r, theory.risk))
    size = scale / np.sqrt(dim)
    count = m.shape[-1] * m.shape[-2]
    mixing = (np.eye(count) + 0.5) / np.sqrt(1 + count)
    dm = noise(rng, m.shape, size, mixing)
    perp = noise(rng, r.shape, size, np.eye(r.shape[-1] ** 2))
    moved = m + dm + shift
    dr = moved @ np.swapaxes(moved, -1, -2) - m @ np.swapaxes(m, -1, -2) + perp + np.swapaxes(perp, -1, -2)
    new_risk = risk + noise(rng, (*risk.shape, 1), 0.3 * size, np.eye(1))[..., 0] - 0.2 * np.mean(dm[..., 0], -1)
    sampled = new_risk + rng.normal(size=risk.shape) * 1e-3 if fresh else None
    settings = {"dim": dim, "learning_rate": 0.5 * batch, "batch": batch, "loss": loss}
    result = np.asarray(theory.result)
    return trajectory(theory.time, moved, r + dr, new_risk, settings, loss=sampled, result=result)


def trained(theory, run, seed, *, own=False, scale=1.0, shift=0.0):
    """The pair with a bias that goes from 0 to 0.5 (the other heads' a little less far) and a scale from 2 to 1.

    `own`: one per head. Residuals of the simulation as those of m, with mean `shift` in the bias.
    """
    rng = np.random.default_rng(20_000 + seed)
    time, shape = np.asarray(theory.time), np.shape(theory.risk) + ((theory.order.heads,) if own else ())
    gone = (1 - np.exp(-time / 3)).reshape(-1, *(1,) * own) * (1 - 0.1 * np.arange(shape[-1] if own else 1))
    values = {"bias": 0.5 * gone, "scale": 2.0 - gone}
    start = {name: np.broadcast_to(np.asarray(value[0]), shape[2:]) for name, value in values.items()}
    pair = []
    for side, size, moved in ((theory, 0.0, 0.0), (run, scale / np.sqrt(DIM), shift)):
        activation = Softmax1(**start, trained=True)
        settings = {**dict(side.settings), "activation": activation.name}
        records = tuple(
            jnp.asarray(
                np.broadcast_to(value.reshape(shape[1:]), shape)
                + noise(rng, (*shape, 1), size, np.eye(int(np.prod(shape[2:], initial=1))))[..., 0]
                + (moved if name == "bias" else 0.0)
            )
            for name, value in values.items()
        )
        activation = eqx.tree_at(lambda a: (a.bias, a.scale), activation, records)
        fields = (side.time, side.order, activation, side.risk, side.loss, side.loss_error, side.result, side.task)
        pair.append(Trajectory(*fields, settings))
    return tuple(pair)
