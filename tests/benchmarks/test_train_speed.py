"""Time of an SGD step against the drawing of its tokens alone, both in this process and taken in turn.

Run with `pytest -m benchmark -s tests/benchmarks/test_train_speed.py`. The reference is a compiled loop that draws the
step's noise, flat, in the same chunks and for as many replicas side by side, into a buffer and does nothing else.
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sim import MultiHeadAttention
from sim._sgd import CHUNK_BYTES, Plan, Setting, advance, trained_leaves
from theory import SingleLocation, sign_flips

TASK = SingleLocation(10, 1.0, sign_flips([2.0, 0, 0], [0, 2.5, 1.5]))
ROUNDS = 15


def _draw_alone(dim: int, batch: int, replicas: int):
    fit = max(1, CHUNK_BYTES // (TASK.length * dim * 4))
    chunk = min(batch, fit)
    assert batch % chunk == 0
    size = chunk * TASK.length * dim

    @jax.jit
    def run(keys, steps, buffer):
        def one(pair):
            key, buffer = pair
            draw = lambda i, _: jax.random.normal(jax.random.fold_in(key, i), (size,), jnp.float32)  # noqa: E731
            return jax.lax.fori_loop(0, steps * (batch // chunk), draw, buffer)

        return jax.lax.map(one, (keys, buffer), batch_size=fit // chunk)

    keys = jax.random.split(jax.random.key(1), replicas)
    buffer = jnp.zeros((replicas, size), jnp.float32)
    return lambda steps: jax.block_until_ready(run(keys, steps, buffer))


def _steps(dim: int, batch: int, replicas: int, loss: str):
    layer = MultiHeadAttention.initial(jax.random.key(0), heads=4, features=3, dim=dim, replicas=replicas)
    rates = {"keys": jnp.asarray(5.0)}
    params, rest = eqx.partition(layer, trained_leaves(layer, rates))
    plan = Plan.make(TASK, layer, batch=batch, loss=loss)
    setting = Setting(rest, TASK, jax.random.split(jax.random.key(2), replicas), rates, plan)
    state = [params]

    def run(steps):
        state[0], sound = advance((setting, jnp.asarray(0), jnp.asarray(steps)), state[0])
        jax.block_until_ready(sound)

    return run


@pytest.mark.benchmark
@pytest.mark.parametrize(
    ("dim", "batch", "replicas", "most"),
    [(1000, 10, 1, 1.2), (1000, 10, 8, 1.2), (10_000, 10, 1, 1.2), (10_000, 10, 8, 1.2), (100_000, 2, 1, 1.4)],
)
def test_step_costs_little_more_than_its_tokens(dim, batch, replicas, most, benchmark):
    steps = max(1, 10**7 // (dim * batch * TASK.length * replicas))
    runs = {
        "draw": _draw_alone(dim, batch, replicas),
        "finite": _steps(dim, batch, replicas, "finite"),
        "limit": _steps(dim, batch, replicas, "limit"),
    }
    taken = {name: [] for name in runs}
    for run in runs.values():
        run(steps)
    for _ in range(ROUNDS):  # in turn, so that a busy machine slows all alike
        for name, run in runs.items():
            start = time.perf_counter()
            run(steps)
            taken[name].append((time.perf_counter() - start) / steps)
    best = {name: min(times) for name, times in taken.items()}
    ratio = {name: np.median(np.divide(times, taken["draw"])) for name, times in taken.items()}
    normals = batch * TASK.length * dim * replicas
    print(f"\nD={dim} B={batch} replicas={replicas}: ", end="")
    print(f"drawing {normals / best['draw'] / 1e6:.0f} M normals/s, ", end="")
    for loss in ("finite", "limit"):
        samples = batch * replicas / best[loss]
        print(f"{loss} loss {ratio[loss]:.3f}× the drawing", end=" ")
        print(f"(of the best: {best[loss] / best['draw']:.3f}), {samples:.0f} samples/s; ", end="")
    print()
    benchmark.extra_info.update({f"step / drawing, {loss} loss": ratio[loss] for loss in ("finite", "limit")})
    benchmark.pedantic(runs["finite"], args=(steps,), rounds=3)
    assert ratio["finite"] < most
