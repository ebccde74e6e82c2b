"""A stored sweep: one folder with the manifest, the numbers, and a lock that one driver at a time holds."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xarray as xr

from compare.driver import HOLDER, LOCK, only_driver
from compare.store import differences
from compare.sweeps.gridded import Entry, configuration_text, gridded
from compare.sweeps.manifest import MANIFEST, SCHEMA, Manifest, circumstances
from compare.sweeps.plan import Plan
from compare.sweeps.points import Grid, Point
from compare.sweeps.rows import Damaged, Rows, mend
from compare.sweeps.work import Outcome, Report
from theory._checks import invalid
from theory._words import counted

_SHOWN = 20  # failures that are printed


class SweepStore:
    """The folder of a sweep, open for writing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = Manifest(folder)
        self._rows: Rows | None = None

    @property
    def rows(self) -> Rows:
        if self._rows is None:
            self._rows = Rows(self.folder, write=True)
        return self._rows

    def check(self, grid: Grid) -> None:
        """Refuses a grid that is not of the same sweep.

        Raises:
            ValueError: another run, other fixed values, other swept names or other flags of JAX.
        """
        header = self.manifest.header
        if not header:
            return
        ours, theirs = _flat(grid.base), _flat(header["base"])
        lines = differences(ours, theirs)
        if {*grid.labels} != {*header["names"]}:
            lines.append(f"swept names: {list(grid.labels)} here, {header['names']} there")
        lines += differences(circumstances()["flags"], self.manifest.plans[0]["flags"]) if self.manifest.plans else []
        if lines:
            raise ValueError(
                f"store: {self.folder} holds another sweep ({'; '.join(lines)}); give another store. New values of "
                "the swept names, or more replicas, would extend it"
            )

    def entries(self, points: Sequence[Point], *, retry: bool) -> dict[str, Outcome]:
        """What is stored of these points; with `retry` only what is done and whole.

        Raises:
            ValueError: points whose numbers are damaged, by name (not with `retry`: they count as missing).
        """
        if retry:
            mend(self.folder)
        rows = Rows(self.folder, write=False)
        found, damaged = {}, []
        for point in points:
            end = self.manifest.ends.get(point.name)
            if end is None or (retry and end["state"] == "failed"):
                continue
            try:
                found[point.name] = _read(rows, self.manifest, point.name)
            except Damaged as error:
                damaged.append(str(error))
        if damaged and not retry:
            raise ValueError(_damage(self.folder, damaged))
        return found

    @property
    def replicated(self) -> bool:
        """Whether it has a dimension of replicas, which is then no name for the run to use."""
        return any(plan["grid"]["replicas"] is not None for plan in self.manifest.plans)

    def kinds(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """Dimensions and type of each stored variable, of whatever point.

        Raises:
            ValueError: an array that cannot be read.
        """
        labels = {*self.manifest.header.get("names", ()), *(["replica"] if self.replicated else [])}
        try:
            return Rows(self.folder, write=False).kinds(labels, len(self.manifest.points))
        except Damaged as error:
            raise ValueError(_damage(self.folder, [str(error)], "array")) from error

    def begin(self, plan: Plan) -> None:
        """Writes down what is about to be done."""
        manifest, points = self.manifest, {point.name: point for point in plan.grid.points}
        lines: list[tuple[str, Any]] = []
        if not manifest.header:
            lines.append(("sweep", {"schema": SCHEMA, "base": plan.grid.base, "names": list(plan.grid.labels)}))
        grid = {"labels": plan.grid.labels, "replicas": plan.grid.replicas}
        lines.append(("plan", {**circumstances(), "grid": grid, "calls": len(plan.batches)}))
        row = len(manifest.points)
        for batch in plan.batches:
            for name in batch:
                if name not in manifest.points:
                    point = points[name]
                    own = {"row": row, "labels": point.labels, "replica": point.replica}
                    lines.append(("point", {"name": name, **own, "configuration": point.configuration}))
                    row += 1
        known = {tuple(batch) for batch in manifest.batches}
        batches = [list(batch) for batch in plan.batches if batch not in known]
        if batches:  # all in one line: what a kill leaves of them would be cut otherwise afterwards
            lines.append(("batches", batches))
        manifest.add(lines)
        ordered = sorted(manifest.points.values(), key=lambda point: point["row"])
        columns = {name: [point["labels"][name] for point in ordered] for name in manifest.header["names"]}
        if ordered:
            replicas = {"replica": [point["replica"] for point in ordered]} if self.replicated else {}
            self.rows.label({**columns, **replicas})

    def record(self, names: Sequence[str], report: Report) -> None:
        """Keeps what became of the points of a call: first the numbers, then the line that says they are there."""
        assert report.outcomes is not None
        ends = dict(zip(names, report.outcomes, strict=True))
        kept = {name: outcome.data for name, outcome in ends.items() if outcome.data is not None}
        rows = [self.manifest.points[name]["row"] for name in kept]
        told = self.rows.write(rows, list(kept.values()), len(self.manifest.points))
        described = dict(zip(kept, told, strict=True))
        lines = []
        for name, outcome in ends.items():
            line: dict[str, Any] = {"name": name, "state": "failed" if outcome.failure else "done"}
            line |= {"plan": len(self.manifest.plans) - 1, "seconds": report.seconds / len(names)}
            if outcome.failure:
                line |= {"error": outcome.failure, "trace": outcome.trace}
            lines.append({**line, "device": report.device, "data": described.get(name)})
        self.manifest.add([("ended", lines)])


@contextmanager
def opened(path: str | Path) -> Iterator[SweepStore]:
    """The store at `path`, made if there is none, for one driver at a time.

    Raises:
        ValueError: something else is there, a store of another schema, or a damaged manifest.
        InUse: another driver is at work on it.
    """
    folder = Path(path)
    _check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise invalid("store", "a folder, or a place for one", f"{folder}, inside a file") from error
    with only_driver(folder):
        yield SweepStore(folder)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise invalid("store", "a folder", f"{folder}, a file")
    strange = {entry.name for entry in folder.iterdir()} - {LOCK, HOLDER} if folder.exists() else set()
    if strange and MANIFEST not in strange:
        shown = ", ".join(sorted(strange)[:3])
        got = f"{folder} with {shown} and no {MANIFEST}"
        raise invalid("store", "a stored sweep, an empty folder, or none yet", got)


def _flat(base: Mapping[str, Any]) -> dict[str, Any]:
    """What is not swept, one entry for each name."""
    return {**{f"fixed {name}": value for name, value in base["values"].items()},
            **{name: value for name, value in base.items() if name != "values"}}  # fmt: skip


def _read(rows: Rows, manifest: Manifest, name: str) -> Outcome:
    end, point = manifest.ends[name], manifest.points[name]
    where = ", ".join(f"{key}={value}" for key, value in {**point["labels"], "replica": point["replica"]}.items())
    data = None if end["data"] is None else rows.read(point["row"], end["data"], where)
    return Outcome(data, end.get("error", ""), end.get("trace", ""))


def _damage(folder: Path, damaged: Sequence[str], what: str = "point") -> str:
    more = f", and {len(damaged) - 3} more" if len(damaged) > 3 else ""
    return (
        f"store: {folder} is damaged, {counted(len(damaged), what)}: {'; '.join(damaged[:3])}{more}. Nothing was "
        "changed; `retry=True` (--retry-failed) runs points that are damaged again"
    )


class StoredSweep:
    """A sweep on the disk, read; prints as its status.

    Attributes:
        folder: where it lies.
        manifest: what happened.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = Manifest(folder)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Labels, replica, error, traceback and configuration of each failed point."""
        found = []
        for name, end in self.manifest.ends.items():
            if end["state"] == "failed":
                point = self.manifest.points[name]
                own = {key: point[key] for key in ("labels", "replica", "configuration")}
                found.append({**own, "error": end["error"], "trace": end["trace"]})
        return found

    @property
    def labels(self) -> dict[str, list[Any]]:
        """Every value of each swept name that a point has: numbers in order, others as they came."""
        found = {
            name: list({_key(point["labels"][name]): point["labels"][name] for point in self._points}.values())
            for name in self._names
        }
        numbers = {name: all(isinstance(v, int | float) for v in values) for name, values in found.items()}
        return {name: sorted(values) if numbers[name] else values for name, values in found.items()}

    def dataset(self) -> xr.Dataset:
        """All that is stored, as `sweep` returns it, over every value that was ever swept.

        Raises:
            ValueError: numbers that are missing or damaged, by the point.
        """
        labels, rows, entries, damaged = self.labels, Rows(self.folder, write=False), [], []
        where = {name: {_key(value): i for i, value in enumerate(values)} for name, values in labels.items()}
        for name, end in self.manifest.ends.items():
            point = self.manifest.points[name]
            place = tuple(where[key][_key(point["labels"][key])] for key in self._names)
            try:
                outcome = _read(rows, self.manifest, name)
            except Damaged as error:
                damaged.append(str(error))
                continue
            entries.append(Entry((*place, point["replica"]), outcome.data, end["state"], outcome.failure))
        if damaged:
            raise ValueError(_damage(self.folder, damaged))
        attrs = {"configuration": configuration_text(self.manifest.header["base"], labels)}
        return gridded(labels, self._replicas, entries, attrs)

    @property
    def _names(self) -> list[str]:
        return self.manifest.header["names"]

    @property
    def _points(self) -> list[dict[str, Any]]:
        return list(self.manifest.points.values())

    @property
    def _replicas(self) -> int | None:
        counts = [plan["grid"]["replicas"] for plan in self.manifest.plans]
        return None if all(count is None for count in counts) else max(count or 1 for count in counts)

    def __str__(self) -> str:
        states = list(self.manifest.states.values())
        done, failed = states.count("done"), states.count("failed")
        total = len(self.manifest.points)
        plans = self.manifest.plans
        lines = [
            f"Sweep of {self.manifest.header['base']['run']} in {self.folder}: {counted(total, 'point')}, "
            f"{done} done, {failed} failed, {total - done - failed} missing",
            *(f"  {name}: {_listed(values)}" for name, values in self.labels.items()),
        ]
        if self._replicas is not None:
            lines.append(f"  replicas: {self._replicas}")
        for number, plan in enumerate(plans):
            own = [end for end in self.manifest.ends.values() if end["plan"] == number]
            if own:
                spent, devices = sum(end["seconds"] for end in own), sorted({end["device"] for end in own})
                versions = f"headsplit {plan['versions']['headsplit']}, jax {plan['versions']['jax']}"
                lines.append(
                    f"  {plan['started']}: {counted(len(own), 'point')} in {spent:.3g} s on {', '.join(devices)} "
                    f"({versions}, commit {plan['commit'] or 'unknown'})"
                )
        failures = self.failures
        for failure in failures[:_SHOWN]:
            own = ", ".join(f"{name}={value}" for name, value in failure["labels"].items())
            own += f", replica {failure['replica']}" if self._replicas is not None else ""
            lines.append(f"  failed: {own}: {failure['error']}")
        if len(failures) > _SHOWN:
            lines.append(f"  … and {len(failures) - _SHOWN} more, in `.failures`")
        return "\n".join(lines)


def _key(value: Any) -> tuple[bool, Any]:
    """True is not 1."""
    return isinstance(value, bool), value


def _listed(values: Sequence[Any]) -> str:
    shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    return ", ".join(shown) if len(shown) <= 8 else f"{', '.join(shown[:3])}, …, {shown[-1]} ({len(shown)} values)"


def open_sweep(path: str | Path) -> StoredSweep:
    """The stored sweep at `path`, to look at; nothing is run or changed, also while a driver is at work on it.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: no stored sweep, one of another schema, or a damaged manifest.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no stored sweep here")
    _check_folder(folder)
    stored = StoredSweep(folder)
    if not stored.manifest.header:
        raise ValueError(f"{folder}: a sweep that was stopped before it began, with nothing in it yet")
    return stored
