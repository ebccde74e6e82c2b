"""The Python side of a simulation: which steps are recorded, and the loop over blocks between them.

Progress, checkpoints, signals and divergence are looked after at the boundaries of blocks.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from sim._checkpoint import Checkpoints, Log, Snapshot
from theory import Result
from theory._checks import invalid, times_array, whole

DEFAULT_RECORDS = 31
MOST_STEPS = 2.0**53  # beyond, step·η/D is no longer exact


class RecordGrid(NamedTuple):
    """Steps at which a run is recorded and their exact times.

    Attributes:
        steps: (T,) int64.
        learning_rate: η.
        dim: D.
    """

    steps: np.ndarray
    learning_rate: float
    dim: int

    @classmethod
    def make(cls, record: Any, time: float, learning_rate: float, dim: int) -> "RecordGrid":
        """The steps nearest to the times in `record`: an array of τ, a number of equally spaced ones, or None."""
        span = time * (dim / learning_rate)
        if not span <= MOST_STEPS:
            raise invalid("time", f"at most 2^53 steps, each learning_rate/D = {learning_rate / dim:g}", time)
        last = round(span)
        if last < 1:
            raise invalid("time", f"at least one step, η/D = {learning_rate / dim:g}", time)
        if record is None:
            record = min(DEFAULT_RECORDS, last + 1)
        if np.ndim(record) == 0:
            times = np.linspace(0.0, time, whole("record", record, 2))
        else:
            times = times_array("record", record)
        if times[-1] > time * (1 + 1e-12):
            raise invalid("record", f"times up to time = {time:g}", times[-1])
        steps = np.rint(times * dim / learning_rate).astype(np.int64)
        twins = np.flatnonzero(np.diff(steps) == 0)
        if twins.size:
            a, b = times[twins[0]], times[twins[0] + 1]
            expected = f"times on different steps (a step is η/D = {learning_rate / dim:g})"
            raise invalid("record", expected, f"{a:g} and {b:g}, both nearest to step {steps[twins[0]]}")
        return cls(steps, learning_rate, dim)

    def clock(self, step: int | np.ndarray) -> Any:
        """τ = step·η/D."""
        return np.float64(step) * self.learning_rate / self.dim

    @property
    def times(self) -> np.ndarray:
        """(T,) recorded times τ."""
        return self.clock(self.steps)


def drive(
    grid: RecordGrid,
    state: Any,
    *,
    advance: Callable[[Any, int, int], tuple[Any, Any]],
    measure: Callable[[Any, int], Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    replicas: int,
    block: int,
    batch: int,
    progress: bool,
    checkpoints: Checkpoints,
) -> Log:
    """Runs all replicas to the last recorded step.

    Args:
        grid: what to record.
        state: the start.
        advance: (state, step, count) to the state `count` steps later and which replicas (R,) are still sound.
        measure: (state, step) to the recorded quantities, each with a leading axis R.
        shapes: of these quantities, for one replica and time.
        replicas: R.
        block: the most steps in one call of `advance`.
        batch: samples of one replica and step, for the progress bar.
        progress: whether to show it.
        checkpoints: where the run is saved, and what it goes on from instead of `state`.
    """
    step = recorded = 0
    log = Log(
        {name: np.full((replicas, grid.steps.size, *shape), np.nan) for name, shape in shapes.items()},
        np.full(replicas, Result.successful, np.int32),
        [],
    )
    if checkpoints.start is not None:
        step, recorded, log, leaves = checkpoints.start
        was, structure = jax.tree.flatten(state)
        state = [jnp.array(leaf, copy=True, device=own.sharding) for leaf, own in zip(leaves, was, strict=True)]
        state = jax.tree.unflatten(structure, state)
    records, result, failures = log
    last = int(grid.steps[-1])

    def alive() -> bool:
        return bool(np.any(result == Result.successful))

    def check(sound: Any, since: int) -> None:
        lost = np.flatnonzero(~np.asarray(sound) & (result == Result.successful))
        if lost.size:
            result[lost] = Result.diverged
            when = f"between τ = {grid.clock(since):.6g} and" if since < step else "at"
            failures.append(f"replica {', '.join(map(str, lost))} diverged {when} τ = {grid.clock(step):.6g}")

    def save(*, now: bool) -> None:
        checkpoints.save(Snapshot(step, recorded, log, jax.tree.leaves(state)), now=now)

    if recorded == grid.steps.size or not alive():  # a finished run was resumed
        if checkpoints.path is not None and not checkpoints.path.exists():  # it goes on in another file
            save(now=True)
        return log
    samples = batch * replicas
    with (
        interruptible() as stop,
        tqdm(
            total=last * samples,
            initial=step * samples,
            unit=" samples",
            unit_scale=True,
            delay=2,
            leave=False,
            disable=not progress,
        ) as bar,
    ):
        save(now=True)  # a folder that cannot be written is noticed before anything is computed
        for target in grid.steps[recorded:].tolist():
            while step < target and alive() and not stop.is_set():
                count = min(block, target - step)
                state, sound = advance(state, step, count)
                step += count
                check(sound, step - count)
                bar.set_description(f"SGD, τ = {grid.clock(step):.3g}", refresh=False)
                bar.update(count * samples)
                save(now=False)
            if step < target or not alive():
                break
            values = {name: np.asarray(value) for name, value in measure(state, step).items()}
            check(np.all([np.isfinite(x).reshape(replicas, -1).all(axis=-1) for x in values.values()], axis=0), step)
            kept = result == Result.successful
            for name, value in values.items():
                records[name][kept, recorded] = value[kept]
            recorded += 1
        save(now=True)
    if step < last and stop.is_set() and alive():
        go_on = "" if checkpoints.path is None else f", resume={str(checkpoints.path)!r} goes on from there"
        failures.append(f"{stop.word} at τ = {grid.clock(step):.6g}{go_on}")
        result[result == Result.successful] = Result.interrupted
    return log


class Stop(threading.Event):
    """Set by a signal; `word` is what it does to a run."""

    word = "interrupted"


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """SIGINT (Ctrl-C) and SIGTERM set the event, so that the block in progress ends and its records stay.

    A second one does at once what it did before.
    """
    stop = Stop()
    previous: dict[int, Any] = {}

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            signal.signal(number, previous[number])
            signal.raise_signal(number)
        else:
            stop.word = "terminated" if number == signal.SIGTERM else "interrupted"
            stop.set()

    if threading.current_thread() is threading.main_thread():  # no other thread may take signals
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        previous = {number: was for number, was in handlers.items() if was not in (signal.SIG_IGN, None)}
    try:
        for number in previous:
            signal.signal(number, handle)
        yield stop
    finally:
        for number, was in previous.items():
            signal.signal(number, was)
