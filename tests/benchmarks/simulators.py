"""The simulators' compiled blocks of steps as functions to time, and their timing in turn."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from sim import MultiHeadAttention, _chain, _sgd
from sim._lanes import Lane, repeated
from theory import OrderParameters, SingleLocation, Softmax, sign_flips

TASK = SingleLocation(10, 1.0, sign_flips([2.0, 0, 0], [0, 2.5, 1.5]))
HEADS, FEATURES, ETA = 4, 3, 5.0


def in_turn(runs, samples, rounds=11):
    """Seconds per sample of each run, by rounds: in turn, so that a busy machine slows all alike."""
    for run in runs.values():
        run()  # compiles
    taken = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            taken[name].append((time.perf_counter() - start) / samples[name])
    return {name: np.array(seconds) for name, seconds in taken.items()}


def report(benchmark, heading, taken, reference, ratio_of):
    """Prints the rate of each run and `ratio_of` its time over the reference's, and keeps the latter."""
    print(f"\n{heading}:")
    for name, seconds in taken.items():
        ratio = np.median(seconds / taken[reference])
        print(f"  {name}: {1 / seconds.min():,.0f} samples/s, {ratio_of(ratio)}")
        benchmark.extra_info[f"{name} / {reference}"] = ratio


def start(dim, replicas=None):
    return MultiHeadAttention.initial(jax.random.key(0), heads=HEADS, features=FEATURES, dim=dim, replicas=replicas)


def full(dim, batch, replicas, loss, steps):
    """`train`."""
    layer = start(dim, replicas)
    rates = {"keys": jnp.asarray(ETA)}
    params, rest = eqx.partition(layer, _sgd.trained_leaves(layer, rates))
    plan = _sgd.Plan.make(TASK, layer, batch=batch, loss=loss)
    lanes = Lane(jax.random.split(jax.random.key(2), replicas), *repeated((TASK, rest), replicas))
    setting = _sgd.Setting(lanes, rates, plan)
    return _repeated(_sgd.advance, setting, params, steps)


def chain(dim, batch, replicas, loss, steps):
    """`train_reduced`."""
    order = OrderParameters.initial(jax.random.key(0), heads=HEADS, features=FEATURES, dim=dim, replicas=replicas)
    heads = np.concatenate([np.asarray(order.m), _chain.factor(np.asarray(order.r_perp))], axis=-1)
    trained, rest = Softmax().split()
    rates = {name: jnp.asarray(ETA / dim, jnp.float64) for name in ("order", "bias", "scale")}
    lanes = Lane(jax.random.split(jax.random.key(1), replicas), *repeated((TASK, rest), replicas))
    setting = _chain.Setting(lanes, jnp.asarray(dim, jnp.float64), rates, batch, loss)
    return _repeated(_chain.advance, setting, _chain.State(jnp.asarray(heads), trained), steps)


def _repeated(advance, setting, state, steps):
    held = [state]

    def run():
        held[0], sound = advance((setting, jnp.asarray(0), jnp.asarray(steps)), held[0])
        assert np.all(sound)

    return run
