"""What a worker does with one call, and what it sends back."""

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import xarray as xr

from compare.store import FLAGS
from compare.sweeps.identity import point_key
from compare.sweeps.results import Interrupted, dataset_of
from compare.sweeps.runs import Values, run_of


class Job(NamedTuple):
    """One call.

    Attributes:
        function: the run, as the user gave it.
        values: of each point.
        keys: seed, digest and replica of each point.
        flags: of JAX, that random numbers depend on.
    """

    function: Callable[..., Any]
    values: Sequence[Values]
    keys: Sequence[tuple[int, str, int]]
    flags: dict[str, Any]


class Outcome(NamedTuple):
    """What became of one point: its Dataset, and why it failed ("" if it did not)."""

    data: xr.Dataset | None
    failure: str
    trace: str = ""


class Report(NamedTuple):
    """What became of a call; no outcomes if the user stopped it.

    Attributes:
        outcomes: of each point.
        seconds: that it took.
        device: where it ran.
    """

    outcomes: list[Outcome] | None
    seconds: float
    device: str


def flags() -> dict[str, Any]:
    """JAX's flags here that random numbers depend on."""
    return {name: getattr(jax.config, name) for name in FLAGS}


def work(job: Job) -> Report:
    """Runs the points of a call. If they fail together they are tried one by one, so that only those to blame fail."""
    start = time.perf_counter()
    for name, value in job.flags.items():  # a process of its own has those of its own start
        if getattr(jax.config, name) != value:
            jax.config.update(name, value)
    try:
        outcomes = _outcomes(job)
    except (Interrupted, KeyboardInterrupt):
        outcomes = None
    return Report(outcomes, time.perf_counter() - start, str(jax.devices()[0].device_kind))


def _outcomes(job: Job) -> list[Outcome]:
    run = run_of(job.function)
    keys = [point_key(*key) if run.random else None for key in job.keys]
    try:
        results = run.together(job.values, keys)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        if len(keys) > 1:
            singles = (job._replace(values=[v], keys=[k]) for v, k in zip(job.values, job.keys, strict=True))
            return [outcome for single in singles for outcome in _outcomes(single)]
        results = [error]
    return [_outcome(result) for result in results]


def _outcome(result: Any) -> Outcome:
    try:
        if isinstance(result, Exception):
            raise result
        return Outcome(*dataset_of(result))
    except Interrupted:
        raise
    except Exception as error:
        trajectory = getattr(error, "trajectory", None)  # what `RunFailed` had
        data = None if trajectory is None else dataset_of(trajectory)[0]
        return Outcome(data, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
