"""Sweeps: a thousand points against a loop of single calls, and two workers of one thread against one."""

import time

import jax
import numpy as np
import pytest

import sim
import theory as th
from compare import sweep
from headsplit.executors import executor_for

pytestmark = pytest.mark.benchmark

QUIET = {"say": None, "progress": False}
SNRS, FIRST, SECOND = np.linspace(0.5, 10, 20), np.linspace(0.3, 1.5, 10), np.linspace(0.3, 1.5, 5)
ORDER = th.OrderParameters([[1.0, 0.6], [1.0, -0.6]], [[1.56, 0.64], [0.64, 1.56]])


def single(run, snr, first, second):
    task = th.SingleLocation(5, snr, th.sign_flips([0.0, 0.0], [first, second]))
    if run is th.bayes_risk:
        return run(task, with_error=True)
    return run(task, th.Softmax(), ORDER, with_error=True)


@pytest.mark.parametrize("run", [th.bayes_risk, th.population_risk])
def test_a_thousand_points_against_a_loop(run, benchmark):
    """Planning, evaluation with errors and the labelled Dataset, against single calls: with all code still to be
    compiled, and once more, compiled."""
    fixed = {"length": 5, "prior": th.sign_flips([0.0, 0.0], [1.0, 1.0])}
    if run is th.population_risk:
        fixed["order"] = ORDER
    grid = {"snr": SNRS, "prior.amplitude[0]": FIRST, "prior.amplitude[1]": SECOND}
    points = [(snr, a, b) for snr in SNRS for a in FIRST for b in SECOND]

    def timed(call):
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def together():
        assert (sweep(run, grid=grid, fixed=fixed, **QUIET).status == 1).all()

    def loop():
        jax.block_until_ready([single(run, *point) for point in points])

    jax.clear_caches()
    first, *sweeps = [timed(together) for _ in range(4)]
    jax.clear_caches()
    first_loop, *loops = [timed(loop) for _ in range(3)]
    again, loop_again = min(sweeps), min(loops)
    print(
        f"\n{run.__name__}, 1000 points: sweep {first:.1f} s, then {again:.2f} s; loop {first_loop:.1f} s, then "
        f"{loop_again:.1f} s: {first_loop / first:.1f} times as fast, then {loop_again / again:.1f}"
    )
    benchmark.extra_info["loop / sweep"] = loop_again / again
    benchmark.pedantic(lambda: None)
    # with compilations, of which the loop over Bayes risks has one for each number of points and nodes
    assert first_loop / first > (8 if run is th.bayes_risk else 2)
    assert loop_again / again > 8


def test_two_workers_against_one(benchmark, monkeypatch):
    """SGD of the layer at eight ν, in processes of one thread, which have compiled before."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of the tests: two devices would be two threads
    fixed = {"length": 10, "heads": 4, "prior": th.sign_flips([2.0, 0, 0], [0, 2.5, 1.5]), "dim": 1000, "batch": 10,
             "learning_rate": 5.0, "time": 60.0, "record": 5}  # fmt: skip
    grid, taken = {"snr": np.linspace(0.5, 2, 8)}, {}
    memory = 2**21  # a point a call
    for workers in (1, 2):
        with executor_for("processes", workers=workers) as pool:
            warm = {**fixed, "time": 0.1, "record": 2}
            sweep(sim.train, grid=grid, fixed=warm, executor=pool, memory=memory, **QUIET)
            start = time.perf_counter()
            data = sweep(sim.train, grid=grid, fixed=fixed, executor=pool, memory=memory, **QUIET)
            taken[workers] = time.perf_counter() - start
        assert (data.status == 1).all()
    ratio = taken[1] / taken[2]
    print(f"\none worker {taken[1]:.1f} s, two {taken[2]:.1f} s: {ratio:.2f} times as fast")
    benchmark.extra_info["one / two"] = ratio
    benchmark.pedantic(lambda: None)
