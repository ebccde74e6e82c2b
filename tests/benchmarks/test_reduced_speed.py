"""Samples per second of the reduced chain, at small and large D, against drawing its normals alone.

Run with `pytest -m benchmark -s tests/benchmarks/test_reduced_speed.py`. All run in this process and in turn. The
reference is a compiled loop that draws as many normals as a step does, flat and from one key, and does nothing else.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sim._chain import Setting, State, advance, factor
from sim._normals import normals
from theory import OrderParameters, SingleLocation, Softmax, sign_flips

TASK = SingleLocation(10, 1.0, sign_flips([2.0, 0, 0], [0, 2.5, 1.5]))
HEADS, FEATURES = 4, 3
NORMALS = 118  # of a sample: 73 of the tokens, 10 + 4 + 20 + 6 of the rest, 5 proposals of χ variables
ROUNDS = 9


def _chain(dim, batch, replicas, loss):
    order = OrderParameters.initial(jax.random.key(0), heads=HEADS, features=FEATURES, dim=dim, replicas=replicas)
    heads = np.concatenate([np.asarray(order.m), factor(np.asarray(order.r_perp))], axis=-1)
    trained, rest = Softmax().split()
    rates = {name: jnp.asarray(5.0 / dim, jnp.float64) for name in ("order", "bias", "scale")}
    keys = jax.random.split(jax.random.key(1), replicas)
    setting = Setting(rest, TASK, keys, jnp.asarray(dim, jnp.float64), rates, batch, loss)
    state = [State(jnp.asarray(heads), trained)]

    def run(steps):
        state[0], sound = advance((setting, jnp.asarray(0), jnp.asarray(steps)), state[0])
        assert np.all(sound)

    return run


def _draw_alone(batch, replicas):
    size = NORMALS * batch * replicas

    @jax.jit
    def run(steps, buffer):
        draw = lambda i, _: normals(jax.random.fold_in(jax.random.key(2), i), (size,))  # noqa: E731
        return jax.lax.fori_loop(0, steps, draw, buffer)

    buffer = jnp.zeros(size, jnp.float32)
    return lambda steps: jax.block_until_ready(run(steps, buffer))


@pytest.mark.benchmark
@pytest.mark.parametrize(("batch", "replicas"), [(10, 100), (10, 1000), (1, 1000), (10, 10)])
def test_cost_does_not_depend_on_the_dimension(batch, replicas, benchmark):
    steps = max(2, 50_000 // (batch * replicas))
    runs = {
        "drawing alone": _draw_alone(batch, replicas),
        "D = 10^3": _chain(10**3, batch, replicas, "finite"),
        "D = 10^8": _chain(10**8, batch, replicas, "finite"),
        "limit loss": _chain(10**3, batch, replicas, "limit"),
    }
    taken = {name: [] for name in runs}
    for run in runs.values():
        run(steps)
    for _ in range(ROUNDS):  # in turn, so that a busy machine slows all alike
        for name, run in runs.items():
            start = time.perf_counter()
            run(steps)
            taken[name].append((time.perf_counter() - start) / (steps * batch * replicas))
    ratio = {name: np.median(np.divide(times, taken["drawing alone"])) for name, times in taken.items()}
    across = np.median(np.divide(taken["D = 10^8"], taken["D = 10^3"]))
    print(f"\nB={batch} replicas={replicas}: ", end="")
    for name, times in taken.items():
        print(f"{name} {1 / min(times):,.0f} samples/s ({ratio[name]:.2f}× the drawing); ", end="")
    print(f"D = 10^8 takes {across:.3f} of D = 10^3")
    benchmark.extra_info.update({f"{name} / drawing": value for name, value in ratio.items()})
    benchmark.pedantic(runs["D = 10^3"], args=(steps,), rounds=3)
    assert across < 1.1
