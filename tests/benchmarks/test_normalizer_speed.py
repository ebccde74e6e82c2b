"""Normalizers against `jax.nn.softmax` on 1024 rows of 1024 scores in float32, forward and backward.

Run with `pytest -m benchmark -s tests/benchmarks/test_normalizer_speed.py`. All run in this process and in turn.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulators import in_turn

import theory as th

pytestmark = pytest.mark.benchmark

ROWS = LENGTH = 1024
MOST = 10.0  # times the softmax's time
WITHIN = [
    th.Softmax(), th.Softmax1(), th.ScalableSoftmax(0.43), th.Sigmoid(), th.SelfAdjustedSoftmax(),
    th.SelfAdjustedSoftmax(False), th.AdaptiveSoftmax(), th.TopK(32), th.TopK(power=0.5), th.Sparsemax(),
]  # fmt: skip
POWERS = [th.Entmax(alpha) for alpha in (1.05, 1.25, 1.3, 1.5, 1.75, 2.0)]


def _timed(call):
    """Weights, and weights with the pullback of a cotangent, as compiled functions to time."""
    scores = jax.random.normal(jax.random.key(0), (ROWS, LENGTH), jnp.float32)
    cotangent = jax.random.normal(jax.random.key(1), (ROWS, LENGTH), jnp.float32)
    forward = jax.jit(call)
    backward = jax.jit(lambda x, t: jax.vjp(call, x)[1](t)[0])
    return (
        lambda: jax.block_until_ready(forward(scores)),
        lambda: jax.block_until_ready(backward(scores, cotangent)),
    )


def _ratios(activations):
    """Median ratio to the softmax of each, forward and backward."""
    found = {}
    names = {"softmax": jax.nn.softmax} | {a.name: lambda x, a=a: a(x) for a in activations}
    timed = {name: _timed(call) for name, call in names.items()}
    for i, way in enumerate(("forward", "backward")):
        taken = in_turn({name: both[i] for name, both in timed.items()}, dict.fromkeys(timed, ROWS), rounds=21)
        for name, seconds in taken.items():
            found[name, way] = np.median(seconds / taken["softmax"])
            print(f"\n{name}, {way}: {1e3 * ROWS * np.median(seconds):.2f} ms, {found[name, way]:.1f}×", end="")
    return found


@pytest.mark.parametrize("activations", [WITHIN, POWERS], ids=["others", "entmax"])
def test_at_most_ten_softmaxes(activations, benchmark):
    ratios = _ratios(activations)
    benchmark.extra_info.update({f"{name}, {way}": ratio for (name, way), ratio in ratios.items()})
    benchmark.pedantic(_timed(lambda x: activations[-1](x))[0], rounds=5)
    assert all(ratio <= MOST for ratio in ratios.values())
