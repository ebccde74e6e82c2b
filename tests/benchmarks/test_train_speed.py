"""Samples per second of `train`: against drawing its tokens alone, and against what one would write first.

Run with `pytest -m benchmark -s tests/benchmarks/test_train_speed.py`. All that is compared runs in this process and in
turn, so that a busy machine slows all alike; ratios are medians over the rounds. Drawing alone is a compiled loop that
draws the tokens of a step, in the same chunks, for one replica after another, and does nothing else.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulators import ETA, FEATURES, HEADS, TASK, full, in_turn, report, start

from sim import draw_tokens
from sim._sgd import samples_that_fit


def _draw_alone(dim, batch, replicas, steps):
    chunk = min(batch, samples_that_fit(TASK, start(dim)))
    assert batch % chunk == 0
    draw = lambda key: draw_tokens(TASK, key, chunk, dim=dim)  # noqa: E731

    @jax.jit
    def run(keys, blank):
        def one(key):
            one_chunk = lambda i, _: draw(jax.random.fold_in(key, i))  # noqa: E731
            return jax.lax.fori_loop(0, steps * (batch // chunk), one_chunk, blank)

        return jax.lax.map(one, keys)

    keys = jax.random.split(jax.random.key(1), replicas)
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draw, keys[0]))
    return lambda: jax.block_until_ready(run(keys, blank))


def _numpy_loop(dim, batch, steps):
    """A loop with the gradient written by hand."""
    rng = np.random.default_rng(0)
    values = np.asarray(TASK.prior.means, np.float32)
    keys = np.array(start(dim).keys)

    def run():
        for _ in range(steps):
            x = rng.standard_normal((batch, TASK.length, dim), np.float32)
            x[:, 0, :FEATURES] += values[rng.integers(len(values), size=batch)]
            chi = np.einsum("hd,bld->bhl", keys, x, optimize=True) / np.sqrt(np.float32(dim))
            s = np.exp(chi - chi.max(axis=-1, keepdims=True))
            s /= s.sum(axis=-1, keepdims=True)
            miss = s.mean(axis=1)
            miss[:, 0] -= 1
            off = np.matmul(miss[:, None], x)
            slope = 2 / (HEADS * batch * dim) * np.matmul(x, np.swapaxes(off, 1, 2))[..., 0]
            g = s * (slope[:, None] - np.sum(s * slope[:, None], axis=-1, keepdims=True))
            keys[:] -= ETA / np.sqrt(np.float32(dim)) * np.einsum("bhl,bld->hd", g, x, optimize=True)

    return run


def _first_jax(dim, batch):
    """(key, keys of the layer) to the keys a step later, as one would write it first."""
    values = jnp.asarray(TASK.prior.means, jnp.float32)

    def loss(keys, x):
        chi = jnp.einsum("hd,bld->bhl", keys, x) / jnp.sqrt(jnp.float32(dim))
        a = jax.nn.softmax(chi, axis=-1).mean(axis=1)
        return jnp.mean(jnp.sum(jnp.square(jnp.einsum("bl,bld->bd", a, x) - x[:, 0]), axis=-1)) / dim

    def step(keys, key):
        noise, choice = jax.random.split(key)
        x = jax.random.normal(noise, (batch, TASK.length, dim), jnp.float32)
        x = x.at[:, 0, :FEATURES].add(values[jax.random.randint(choice, (batch,), 0, len(values))])
        return keys - ETA * jax.grad(loss)(keys, x)

    return step


def _jax_loop(dim, batch, steps):
    step = jax.jit(_first_jax(dim, batch))
    keys = [start(dim).keys]

    def run():
        for key in jax.random.split(jax.random.key(3), steps):
            keys[0] = step(keys[0], key)
        jax.block_until_ready(keys[0])

    return run


def _jax_scan(dim, batch, steps):
    step = _first_jax(dim, batch)
    scan = jax.jit(lambda keys, draws: jax.lax.scan(lambda k, key: (step(k, key), None), keys, draws)[0])
    keys = [start(dim).keys]

    def run():
        keys[0] = jax.block_until_ready(scan(keys[0], jax.random.split(jax.random.key(3), steps)))

    return run


@pytest.mark.benchmark
@pytest.mark.parametrize(
    ("dim", "batch", "replicas", "most"),
    [(1000, 10, 1, 1 / 0.85), (1000, 10, 8, 1.3), (10_000, 10, 1, 1.3), (10_000, 10, 8, 1.3), (100_000, 2, 1, 1.4)],
)
def test_a_step_costs_little_more_than_its_tokens(dim, batch, replicas, most, benchmark):
    steps = max(1, 2 * 10**7 // (dim * batch * TASK.length * replicas))
    runs = {"drawing alone": _draw_alone(dim, batch, replicas, steps)}
    runs |= {f"{loss} loss": full(dim, batch, replicas, loss, steps) for loss in ("finite", "limit")}
    taken = in_turn(runs, dict.fromkeys(runs, steps * batch * replicas))
    wording = lambda ratio: f"{1 / ratio:.3f} of the rate of drawing alone"  # noqa: E731
    report(benchmark, f"D = {dim}, B = {batch}, {replicas} replicas", taken, "drawing alone", wording)
    benchmark.pedantic(runs["finite loss"], rounds=3)
    assert np.median(taken["finite loss"] / taken["drawing alone"]) < most


@pytest.mark.benchmark
@pytest.mark.parametrize(("dim", "batch", "least"), [(1000, 10, 1.2), (10_000, 10, 1.0)])
def test_against_what_one_would_write_first(dim, batch, least, benchmark):
    steps = 10**6 // dim
    runs = {
        "train": full(dim, batch, 1, "finite", steps),
        "lax.scan": _jax_scan(dim, batch, steps),
        "JAX loop": _jax_loop(dim, batch, steps // 2),
        "NumPy loop": _numpy_loop(dim, batch, steps // 10),
    }
    shares = {"train": 1, "lax.scan": 1, "JAX loop": 2, "NumPy loop": 10}
    taken = in_turn(runs, {name: steps // share * batch for name, share in shares.items()})
    wording = lambda ratio: f"train is {ratio:.2f}× as fast"  # noqa: E731
    report(benchmark, f"D = {dim}, B = {batch}", taken, "train", wording)
    benchmark.pedantic(runs["train"], rounds=3)
    assert np.median(taken["lax.scan"] / taken["train"]) > least
