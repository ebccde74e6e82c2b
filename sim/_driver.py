"""The Python side of a simulation: which steps are recorded, and the loop over blocks between them.

Progress, Ctrl-C and divergence are looked after at the boundaries of blocks.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from theory import Result
from theory._checks import invalid, times_array, whole

DEFAULT_RECORDS = 31


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
        last = round(time * dim / learning_rate)
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


class Log(NamedTuple):
    """What a run left.

    Attributes:
        records: (R, T, ...) of each measured quantity, NaN where a replica did not get.
        result: (R,) codes of `Result`.
        failures: what went wrong and when, in words.
    """

    records: dict[str, np.ndarray]
    result: np.ndarray
    failures: list[str]


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
    """
    result = np.full(replicas, Result.successful, np.int32)
    failures: list[str] = []
    records = {name: np.full((replicas, grid.steps.size, *shape), np.nan) for name, shape in shapes.items()}
    step = 0

    def check(sound: Any, since: int) -> None:
        lost = np.flatnonzero(~np.asarray(sound) & (result == Result.successful))
        if lost.size:
            result[lost] = Result.diverged
            when = f"between τ = {grid.clock(since):.6g} and" if since < step else "at"
            failures.append(f"replica {', '.join(map(str, lost))} diverged {when} τ = {grid.clock(step):.6g}")

    total = int(grid.steps[-1]) * batch * replicas
    with (
        interruptible() as interrupted,
        tqdm(total=total, unit=" samples", unit_scale=True, delay=2, leave=False, disable=not progress) as bar,
    ):
        for index, target in enumerate(grid.steps.tolist()):
            while step < target and not interrupted.is_set() and np.any(result == Result.successful):
                count = min(block, target - step)
                state, sound = advance(state, step, count)
                step += count
                check(sound, step - count)
                bar.set_description(f"SGD, τ = {grid.clock(step):.3g}", refresh=False)
                bar.update(count * batch * replicas)
            if step < target or not np.any(result == Result.successful):
                break
            values = {name: np.asarray(value) for name, value in measure(state, step).items()}
            check(np.all([np.isfinite(x).reshape(replicas, -1).all(axis=-1) for x in values.values()], axis=0), step)
            kept = result == Result.successful
            for name, value in values.items():
                records[name][kept, index] = value[kept]
    if step < grid.steps[-1] and interrupted.is_set() and np.any(result == Result.successful):
        failures.append(f"interrupted at τ = {grid.clock(step):.6g}")
        result[result == Result.successful] = Result.interrupted
    return Log(records, result, failures)


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the block in progress ends and its records stay; a second one stops at once."""
    event = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield event  # only the main thread may take signals, and ignored ones stay ignored
        return

    def handle(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
