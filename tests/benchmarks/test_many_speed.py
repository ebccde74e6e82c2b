"""A sweep of a thousand points in one call against a loop of single calls, both with all their compilations."""

import time

import jax
import numpy as np
import pytest

import theory as th
from theory.many import bayes_risks, population_risks

pytestmark = pytest.mark.benchmark

SOFTMAX = th.Softmax()
ORDER = th.OrderParameters([[1.0, 0.6], [1.0, -0.6]], [[1.56, 0.64], [0.64, 1.56]])
TASKS = [
    th.SingleLocation(5, snr, th.sign_flips([0.0, 0.0], [a, b]))
    for snr in np.linspace(0.5, 10, 20)
    for a in np.linspace(0.3, 1.5, 10)
    for b in np.linspace(0.3, 1.5, 5)
]
CALLS = {
    "Bayes risk": (bayes_risks, lambda task: th.bayes_risk(task, with_error=True), 50),
    "population risk": (
        lambda tasks: population_risks(tasks, [SOFTMAX] * len(tasks), [ORDER] * len(tasks)),
        lambda task: th.population_risk(task, SOFTMAX, ORDER, with_error=True),
        100,
    ),
}


def seconds(call):
    """Wall time and time of the processor: the latter is what counts on a machine with other work."""
    wall, own = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return np.array([time.perf_counter() - wall, time.process_time() - own])


@pytest.mark.parametrize("name", CALLS)
def test_a_thousand_points_against_a_loop(name):
    many, single, count = CALLS[name]
    jax.clear_caches()
    together = seconds(lambda: many(TASKS))
    jax.clear_caches()
    # a regular part of the grid, shifted from row to row so that every value of every axis is met
    stride = len(TASKS) // count
    sample = [TASKS[stride * i + i % stride] for i in range(count)]
    first = sum(seconds(lambda t=task: single(t)) for task in sample)
    again = sum(seconds(lambda t=task: single(t)) for task in sample)
    # 850 of the 1000 Bayes risks have counts of their own (near proportion), the population risks three (the bound)
    # compilations (first − again) are shared by points with the same counts, so they grow more slowly than the points:
    # those of the sample alone are a lower bound, and the evaluations are extrapolated
    least = first - again + again * len(TASKS) / count
    print(
        f"\n{name}: {len(TASKS)} points together {together[0]:.1f} s (processor {together[1]:.1f} s); loop at least "
        f"{least[0]:.0f} s ({least[1]:.0f} s), in proportion {first[0] * stride:.0f} s ({first[1] * stride:.0f} s): "
        f"{least[1] / together[1]:.1f} to {first[1] * stride / together[1]:.1f} times more"
    )
