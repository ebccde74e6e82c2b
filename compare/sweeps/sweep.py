"""Parameter sweeps: a grid of points, run together where shapes allow, on any executor, and kept."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import xarray as xr
from tqdm import tqdm

from compare.sweeps.gridded import OURS, Entry, configuration_text, gridded
from compare.sweeps.plan import Plan, plan_of
from compare.sweeps.points import Grid, grid_of
from compare.sweeps.results import conflict
from compare.sweeps.runs import run_of
from compare.sweeps.store import SweepStore, open_sweep, opened
from compare.sweeps.work import Job, Outcome, Report, flags, work
from theory._checks import invalid, positive
from theory._words import counted

_POLL = 0.2  # seconds, for executors whose jobs cannot be waited for
_MEMORY = 2**28


class SweepInterrupted(RuntimeError):
    """A sweep that was stopped before its end; what had ended is in the store."""


def sweep(
    run: Callable[..., Any],
    *,
    grid: Any,
    fixed: Any = None,
    replicas: Any = None,
    seed: Any = 0,
    store: Any = None,
    executor: Any = None,
    retry: bool = False,
    memory: Any = _MEMORY,
    progress: bool = True,
    say: Callable[[str], Any] | None = print,
) -> xr.Dataset:
    """Runs every combination of the grid's values, and returns one Dataset with a dimension for each swept name.

    *Runs.* Ours take flat names: `length`, `snr`, `prior`; `activation`, `heads`; `dim` and `variance` of the start;
    and their options.

    - `bayes_risk`: `tolerance`.
    - `population_risk`: `activation`, `order`, `tolerance`.
    - `gradient_flow`: `heads`, `dim`, `variance` (or `order`, the same start for all), `times`, `step_size`, rates.
    - `optimal_risk`: `heads`, `starts`, `tolerance`.
    - `predict_stages`: `heads`, `dim`, `variance`, `step_size`, `threshold`, `samples`, `until`, rates.
    - `train`, `train_reduced`: `heads`, `dim`, `variance`, `learning_rate`, `time`, `batch`, `record`, `loss`,
      `evaluation`, rates.
    - `agreement`: those of `train`, `replicas` that it judges together, `simulator` ("train" or "train_reduced"),
      `until`, `level`.

    Any other function is called with the values by name, and with `key=` if it has a parameter of that name. It may
    return a Trajectory, a Dataset, a number, an array, or a dict of numbers and arrays. On executors that start
    processes it has to be importable.

    *Names.* A name of the grid is a parameter, or a path into one: `"prior.amplitude[1]"` is an argument of the call
    that the prior's canonical name is, and the prior is made again from it. All else follows from the values set.

    *Points.* A point is one set of values and one replica. Its identity is a digest of the full configuration: run,
    values of all parameters, seed, replica; floats to the last digit, 2 and 2.0 alike. Its key is folded from seed,
    values and replica, and depends on nothing else: not on the grid around it, nor on the number of replicas.

    *Calls.* Points whose values differ in numbers alone (ν, strengths of the prior, temperatures, …) run side by side
    in one compiled call, as far as `memory` allows; others loop outside. Errors and divergence stay with their point.

    *The Dataset* has the swept names as dimensions, in the order of the grid, then `replica` if replicas are given,
    then those of the run. `status` is 0 (missing), 1 (done) or 2 (failed), `failure` says why. How points of different
    shapes are filled up: `compare.sweeps.gridded`. Simulated records have the `time` that was asked for and the exact
    clock `tau`.

    Args:
        run: one of our runs, or a function.
        grid: values of each swept name.
        fixed: values of the other parameters without a default.
        replicas: independent repetitions of each point.
        seed: of all keys.
        store: folder of results. Points that are there are not run again; new values and more replicas extend it.
            One driver at a time.
        executor: anything with the interface of `concurrent.futures.Executor`; this process without one.
        retry: whether points that are stored as failed, or are damaged, run again.
        memory: bytes that one call may take, roughly.
        progress: a bar, with the number of failed points.
        say: where plan and messages go; None for nowhere.

    Raises:
        ValueError: naming what is wrong with the arguments; a store that is damaged, newer or of another sweep.
        SweepInterrupted: Ctrl-C, or workers that died. What had ended is in the store, and the same call goes on.
        OSError: the store cannot be written; likewise.
        InUse: another driver is at work on the store.

    Example:
        >>> import theory as th
        >>> fixed = {"length": 5, "prior": th.sign_flips([0.0], [1.0])}
        >>> data = sweep(th.bayes_risk, grid={"snr": [4.0, 8.0]}, fixed=fixed, say=None, progress=False)
        >>> data.risk.dims, [f"{risk:.5f}" for risk in data.risk.values]
        (('snr',), ['0.43237', '0.17254'])
    """
    say = say or (lambda text: None)
    points = grid_of(run_of(run), grid, {} if fixed is None else fixed, replicas=replicas, seed=seed)
    with nullcontext() if store is None else opened(store) as kept:
        known: dict[str, Outcome] = {}
        if kept is not None:
            kept.check(points)
            known = kept.entries(points.points, retry=retry)
        kinds, taken = _kinds(points, kept)
        states = {name: _state(outcome) for name, outcome in known.items()}
        plan = _plan(points, kept, states, retry=retry, memory=memory, shared_out=executor is not None, store=store)
        say(str(plan))
        if plan.todo:
            _drive(run, plan, kept, known, kinds, taken, executor, seed=seed, progress=progress)
    ended = [(point, known[point.name]) for point in points.points if point.name in known]
    entries = [Entry((*p.place, p.replica), own.data, _state(own), own.failure) for p, own in ended]
    failed = [entry.failure for entry in entries if entry.failure]
    if failed:
        again = "`retry=True` (--retry-failed) tries them again"
        say(f"{counted(len(failed), 'point')} failed, such as: {failed[0]}. {again}")
    attrs = {"configuration": configuration_text(points.base, points.labels)}
    return gridded(points.labels, points.replicas, entries, attrs)


def plan_sweep(
    run: Callable[..., Any],
    *,
    grid: Any,
    fixed: Any = None,
    replicas: Any = None,
    seed: Any = 0,
    store: Any = None,
    executor: Any = None,
    retry: bool = False,
    memory: Any = _MEMORY,
) -> Plan:
    """What `sweep` would do with these arguments; prints as a table. Nothing is run or written."""
    points = grid_of(run_of(run), grid, {} if fixed is None else fixed, replicas=replicas, seed=seed)
    kept = None
    if store is not None and Path(store).exists():
        kept = SweepStore(open_sweep(store).folder)
        kept.check(points)
    states = {} if kept is None else kept.manifest.states
    return _plan(points, kept, states, retry=retry, memory=memory, shared_out=executor is not None, store=store)


def _kinds(points: Grid, kept: SweepStore | None) -> tuple[dict[str, Any], set[str]]:
    """Kinds of the variables that the store has, of whatever point, and names that the run must not use."""
    kinds = {} if kept is None else kept.kinds()
    taken = {*points.labels, *OURS}
    if points.replicas is not None and any("replica" in (name, *dims) for name, (dims, _) in kinds.items()):
        raise invalid("replicas", "none: the stored points have a 'replica' of their own", points.replicas)
    if points.replicas is not None or (kept is not None and kept.replicated):
        taken.add("replica")
    return kinds, taken


def _plan(
    points: Grid,
    kept: SweepStore | None,
    states: Mapping[str, str],
    *,
    retry: bool,
    memory: Any,
    shared_out: bool,
    store: Any,
) -> Plan:
    return plan_of(
        points,
        states,
        [] if kept is None else kept.manifest.batches,
        retry=retry,
        memory=float(positive("memory", memory, 0)),
        shared_out=shared_out,
        store="" if store is None else str(store),
    )


def _state(outcome: Outcome) -> str:
    return "failed" if outcome.failure else "done"


def _drive(
    run: Callable[..., Any],
    plan: Plan,
    kept: SweepStore | None,
    known: dict[str, Outcome],
    kinds: dict[str, Any],
    taken: set[str],
    executor: Any,
    *,
    seed: int,
    progress: bool,
) -> None:
    """Runs the calls of a plan, and keeps what comes back in `known` and the store."""
    points, own = {point.name: point for point in plan.grid.points}, flags()
    jobs = [
        Job(
            run,
            [points[name].values for name in batch],
            [(seed, points[name].words, points[name].replica) for name in batch],
            own,
        )
        for batch in plan.batches
    ]
    failed = 0
    where = "nothing is kept without a store"
    if kept is not None:
        where = f"what had ended is in {kept.folder}, and the same call goes on"
    with tqdm(total=plan.todo, unit=" points", delay=2, leave=False, disable=not progress) as bar:
        try:
            if kept is not None:
                kept.begin(plan)
            for index, report in _reports(jobs, executor):
                if report.outcomes is None:
                    raise KeyboardInterrupt
                names, outcomes = plan.batches[index], [_beside(kinds, own, taken) for own in report.outcomes]
                if kept is not None:
                    kept.record(names, report._replace(outcomes=outcomes))
                known.update(zip(names, outcomes, strict=True))
                failed += sum(bool(outcome.failure) for outcome in outcomes)
                if failed:
                    bar.set_postfix_str(f"{failed} failed", refresh=False)
                bar.update(len(names))
        except KeyboardInterrupt:
            raise SweepInterrupted(f"interrupted: {where}") from None
        except (BrokenExecutor, CancelledError) as error:
            raise SweepInterrupted(f"executor: a worker died ({error}); {where}") from error
        except OSError as error:
            text = f"store: cannot be written ({error.strerror or error}); {where}"
            raise OSError(error.errno, text, error.filename) from error


def _beside(kinds: dict[str, Any], outcome: Outcome, taken: set[str]) -> Outcome:
    """The outcome, or the failure that it is if its variables are not those of other points."""
    trouble = "" if outcome.data is None else conflict(kinds, outcome.data, taken)
    return Outcome(None, trouble) if trouble else outcome


def _reports(jobs: Sequence[Job], executor: Any) -> Iterator[tuple[int, Report]]:
    """The calls as they end; those that wait are cancelled when this is left."""
    if executor is None:
        for index, job in enumerate(jobs):
            yield index, work(job)
        return
    with executor.batch() if hasattr(executor, "batch") else nullcontext():  # submitit: one array of jobs
        running = {executor.submit(work, job): index for index, job in enumerate(jobs)}
    try:
        while running:
            for future in _ended(list(running)):
                index = running.pop(future)
                yield index, _report(future, jobs[index])
    finally:
        for future in running:
            future.cancel()


def _ended(running: list[Any]) -> list[Any]:
    """Some that have ended, once there are any."""
    if all(isinstance(future, Future) for future in running):
        return list(wait(running, return_when=FIRST_COMPLETED).done)
    ended = [future for future in running if future.done()]
    if not ended:
        time.sleep(_POLL)
    return ended


def _report(future: Any, job: Job) -> Report:
    """What a worker sent; if it could send nothing, its points have failed, unless the executor itself is broken."""
    try:
        return future.result()
    except (BrokenExecutor, CancelledError):
        raise
    except Exception as error:
        failure = Outcome(None, f"the worker sent no result ({type(error).__name__}: {error})")
        return Report([failure] * len(job.values), 0.0, "unknown")
