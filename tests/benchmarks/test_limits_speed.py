"""All measures on attention of 144 heads and 1024 tokens (d = 768): a part of it, and the whole extrapolated."""

import time

import jax
import jax.numpy as jnp
import pytest

import theory as th
from theory import limits

pytestmark = pytest.mark.benchmark

HEADS, LENGTH, DIM = 144, 1024, 768
PART = 3  # heads that are run
COUNTS = [1, 5, 10, 20, 100]


def test_all_measures_of_a_model_take_minutes():
    x = jax.random.normal(jax.random.key(0), (LENGTH, DIM), jnp.float32)
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    spread = jnp.array([1.5, 2.0, 3.0], jnp.float32)[:, None, None]
    logits = spread * jax.random.normal(jax.random.key(1), (PART, LENGTH, LENGTH), jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
    upto = 128  # the search passes N = 1 … 64, then 1 … 128, if the critical N is at most 128
    jobs = {
        "distances": lambda: limits.distances(weights, x, COUNTS, where=mask),
        "their bound": lambda: limits.distance_bound(weights, x, COUNTS, where=mask),
        "their expectation": lambda: limits.expected_distance(weights, x, COUNTS, where=mask),
        "separability": lambda: limits.separability(weights, x, COUNTS, where=mask),
        "its bounds": lambda: limits.separability_bounds(weights, 0.1, COUNTS, dim=DIM, where=mask),
        "entropy": lambda: limits.entropy(weights, where=mask),
        "Jacobian norms": lambda: limits.jacobian_norm(th.Softmax(), logits, where=mask),
        "search to 64": lambda: limits.mean_distances(weights, x, upto=64, form="printed", where=mask),
        "search to 128": lambda: limits.mean_distances(weights, x, upto=upto, form="printed", where=mask),
    }
    total = 0.0
    print(f"\n{'':20s}{PART} heads    {HEADS} heads (extrapolated), seconds")
    for name, job in jobs.items():
        jax.block_until_ready(job())
        start = time.perf_counter()
        jax.block_until_ready(job())
        seconds = time.perf_counter() - start
        total += seconds * HEADS / PART
        print(f"{name:20s}{seconds:7.2f}{seconds * HEADS / PART:11.0f}")
    print(f"{'together':20s}{total * PART / HEADS:7.2f}{total:11.0f}")
    assert total < 30 * 60  # on two cores, also while other work runs there
