"""Which points run together, and what a sweep will take."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from compare.sweeps.points import Grid, Point
from theory._words import counted

MOST_TOGETHER = 1024  # points in one call
_LONGEST = 30.0  # seconds of one call, roughly: what a kill loses
_PARTS, _SHORTEST = 16, 3.0  # if workers share the calls: their number, unless they get shorter than these seconds
_COMPILATION = 5.0  # seconds, roughly


class Plan(NamedTuple):
    """What a sweep is about to do; prints as a table.

    Attributes:
        grid: the points.
        batches: the points of each call, by their identities.
        done: points that are stored already.
        failed: points that are stored as failed, and not tried again.
        shapes: sets of shapes among the points that will run, each compiled for itself.
        memory: bytes of the largest call, roughly.
        seconds: roughly, on one core; None if nothing is known.
        store: where results go, "" if nowhere.
    """

    grid: Grid
    batches: tuple[tuple[str, ...], ...]
    done: int
    failed: int
    shapes: int
    memory: float
    seconds: float | None
    store: str

    @property
    def todo(self) -> int:
        """Points that will run."""
        return sum(map(len, self.batches))

    def __str__(self) -> str:
        run, points = self.grid.run, self.grid.points
        swept = " × ".join(f"{name} ({len(values)})" for name, values in self.grid.labels.items())
        replicas = f" × {counted(self.grid.replicas, 'replica')}" if self.grid.replicas is not None else ""
        lines = [f"Sweep of {run.name}: {swept or 'nothing swept'}{replicas} = {counted(len(points), 'point')}"]
        if self.done or self.failed:
            failed = f", {self.failed} failed (not tried again unless asked)" if self.failed else ""
            lines.append(f"  stored: {self.done} done{failed}")
        if not self.todo:
            lines.append("  nothing to run")
            return "\n".join(lines)
        together = "one by one" if run.alone else f"values of {', '.join(sorted(run.shared))} side by side"
        shapes = f"; {counted(self.shapes, 'set')} of shapes, each compiled once at most" if run.ours else ""
        lines.append(f"  to run: {self.todo} in {counted(len(self.batches), 'call')}, {together}{shapes}")
        if not run.alone:
            lines.append(f"  memory: at most {self.memory / 2**20:.3g} MiB a call, roughly")
        if self.seconds is not None:
            lines.append(f"  time: {_duration(self.seconds)} of one core, compilation included, roughly")
        if self.store:
            lines.append(f"  store: {self.store}")
        return "\n".join(lines)


def plan_of(
    grid: Grid,
    states: Mapping[str, str],
    kept: Sequence[Sequence[str]],
    *,
    retry: bool,
    memory: float,
    shared_out: bool,
    store: str = "",
) -> Plan:
    """What is missing, in calls.

    Args:
        grid: all points.
        states: "done" or "failed", of the points that are stored.
        kept: calls planned before: they stay together, so that a sweep that was stopped goes on bit for bit, unless
            they take more memory than is allowed now.
        retry: whether failed points run again.
        memory: bytes that a call may take.
        shared_out: whether an executor shares the calls among workers.
        store: where results go.
    """
    run = grid.run
    done = {name for name, state in states.items() if state == "done"}
    failed = {name for name, state in states.items() if state == "failed"}
    settled = done | (set() if retry else failed)
    todo = {point.name: point for point in grid.points if point.name not in settled}
    batches: list[tuple[str, ...]] = []
    costs = {name: run.cost(point.values) for name, point in todo.items()}
    placed: set[str] = set()
    for batch in kept:
        if not batch or any(name not in todo or name in placed for name in batch):
            continue
        if len(batch) == 1 or sum(costs[name][1] for name in batch) <= memory:
            batches.append(tuple(batch))
            placed |= {*batch}
    groups: dict[str, list[Point]] = {}
    shapes = {name: run.shape(point.values) for name, point in todo.items()}
    for name, point in todo.items():
        if name not in placed:
            groups.setdefault(shapes[name], []).append(point)
    total = sum(own or 0.0 for own, _ in costs.values())
    longest = max(_SHORTEST, min(_LONGEST, total / _PARTS)) if shared_out else _LONGEST
    for points in groups.values():
        size = 1 if run.alone else _together([costs[point.name] for point in points], memory, longest)
        batches += [tuple(point.name for point in points[i : i + size]) for i in range(0, len(points), size)]
    seconds = None if run.seconds is None else total + _COMPILATION * len(set(shapes.values()))
    most = max((sum(costs[name][1] for name in batch) for batch in batches), default=0.0)
    wanted = {point.name for point in grid.points}
    return Plan(
        grid, tuple(batches), len(done & wanted), 0 if retry else len(failed & wanted), len(set(shapes.values())), most,
        seconds, store,
    )  # fmt: skip


def _together(costs: Sequence[tuple[float | None, float]], memory: float, longest: float) -> int:
    """How many points of equal shapes, of these seconds and bytes each, one call takes."""
    size = min(MOST_TOGETHER, int(memory // max(own for _, own in costs)))
    slowest = max(own or 0.0 for own, _ in costs)
    return max(1, min(size, int(longest / slowest)) if slowest > 0 else size)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"
