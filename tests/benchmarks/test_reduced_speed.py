"""Samples per second of the reduced chain, at small and large D, against drawing its normals alone.

Run with `pytest -m benchmark -s tests/benchmarks/test_reduced_speed.py`. All run in this process and in turn. The
reference is a compiled loop that draws as many normals as a step does, flat and from one key, and does nothing else.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulators import chain, full, in_turn, report

from sim._normals import normals

NORMALS = 118  # of a sample: 73 of the tokens, 10 + 4 + 20 + 6 of the rest, 5 proposals of χ variables


def _draw_alone(batch, replicas, steps):
    size = NORMALS * batch * replicas

    @jax.jit
    def run(buffer):
        draw = lambda i, _: normals(jax.random.fold_in(jax.random.key(2), i), (size,))  # noqa: E731
        return jax.lax.fori_loop(0, steps, draw, buffer)

    buffer = jnp.zeros(size, jnp.float32)
    return lambda: jax.block_until_ready(run(buffer))


@pytest.mark.benchmark
@pytest.mark.parametrize(("batch", "replicas"), [(10, 100), (10, 1000), (1, 1000), (10, 10)])
def test_cost_does_not_depend_on_the_dimension(batch, replicas, benchmark):
    steps = max(2, 50_000 // (batch * replicas))
    runs = {
        "drawing alone": _draw_alone(batch, replicas, steps),
        "D = 10^3": chain(10**3, batch, replicas, "finite", steps),
        "D = 10^8": chain(10**8, batch, replicas, "finite", steps),
        "limit loss": chain(10**3, batch, replicas, "limit", steps),
    }
    taken = in_turn(runs, dict.fromkeys(runs, steps * batch * replicas))
    across = np.median(taken["D = 10^8"] / taken["D = 10^3"])
    heading = f"B = {batch}, {replicas} replicas; D = 10^8 takes {across:.3f} of D = 10^3"
    report(benchmark, heading, taken, "drawing alone", lambda ratio: f"{ratio:.2f}× drawing alone")
    benchmark.pedantic(runs["D = 10^3"], rounds=3)
    assert across < 1.1


@pytest.mark.benchmark
@pytest.mark.parametrize("dim", [10**3, 10**4, 10**5])
def test_reduced_against_full(dim, benchmark):
    """The same 100 replicas with B = 10; the full simulator makes fewer steps of them."""
    batch, replicas, steps = 10, 100, max(1, 10**4 // dim)
    runs = {"train": full(dim, batch, replicas, "finite", steps), "reduced": chain(dim, batch, replicas, "finite", 50)}
    taken = in_turn(runs, {"train": steps * batch * replicas, "reduced": 50 * batch * replicas}, rounds=5)
    ratio = np.median(taken["train"] / taken["reduced"])
    rates = ", ".join(f"{name} {1 / seconds.min():,.0f} samples/s" for name, seconds in taken.items())
    print(f"\nD = {dim}: {rates}, the reduced chain is {ratio:,.0f}× as fast")
    benchmark.extra_info["train / reduced"] = ratio
    benchmark.pedantic(runs["reduced"], rounds=3)
    assert ratio > 0.005 * dim
