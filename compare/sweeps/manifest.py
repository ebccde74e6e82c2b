"""The manifest of a stored sweep: one line of JSON for everything that happened, only ever added to.

Lines are {"sweep": …} (the first: schema, what is not swept, the swept names), {"plan": …} (a driver started: its grid,
versions, flags, commit), {"point": …} (a point, its row, labels and configuration), {"batches": …} (points of
each new call) and {"ended": …} (what became of all points of a call). What a kill cut off is the end of the last line,
which then counts for nothing.
"""

import datetime
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compare.store import PACKAGES, commit
from compare.sweeps.rows import DATA
from compare.sweeps.work import flags
from theory._checks import invalid
from theory._versions import installed

SCHEMA = "headsplit-sweep-1"
MANIFEST = "manifest.jsonl"


class Manifest:
    """What a manifest says, read once; `add` writes to the file and here.

    Attributes:
        path: of the file.
        header: what all points share.
        plans: of each time a driver started.
        points: row, labels, replica and configuration by identity.
        batches: calls, the latest last.
        ends: what became of each point that ended, the latest: `state` is "done" or "failed".
    """

    def __init__(self, folder: Path):
        self.path = folder / MANIFEST
        self.header: dict[str, Any] = {}
        self.plans: list[dict[str, Any]] = []
        self.points: dict[str, dict[str, Any]] = {}
        self.batches: list[list[str]] = []
        self.ends: dict[str, dict[str, Any]] = {}
        self._whole = 0  # bytes of whole lines
        numbers = (folder / DATA).exists()
        if self.path.exists():
            self._read()
            if numbers and not self.header:
                raise ValueError(f"{self.path}: nothing in it, beside {DATA} (damaged)")

    def _read(self) -> None:
        raw = self.path.read_bytes()
        self._whole = raw.rfind(b"\n") + 1
        for number, line in enumerate(raw[: self._whole].splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{self.path}: line {number} cannot be read (damaged): {error!r}") from error
            if number == 1 and self.header.get("schema") != SCHEMA:
                got = self.header.get("schema", "none")
                raise invalid("store", f"schema {SCHEMA}", f"{got} in {self.path}")

    def _take(self, line: dict[str, Any]) -> None:
        (kind, what), *_ = line.items()
        if kind == "sweep":
            self.header = what
        elif kind == "plan":
            self.plans.append(what)
        elif kind == "point":
            if what["row"] != len(self.points):
                raise ValueError(f"row {what['row']} after {len(self.points)} points: lines are missing")
            self.points[what["name"]] = what
        elif kind == "batches":
            self.batches += what
        elif kind == "ended":
            for end in what:
                if end["name"] not in self.points or end["plan"] >= len(self.plans):
                    raise ValueError(f"the end of {end['name']}, which no line before began: lines are missing")
                self.ends[end["name"]] = end
        else:
            raise ValueError(f"unknown kind of line {kind!r}")

    @property
    def states(self) -> dict[str, str]:
        """ "done" or "failed" of each point that ended."""
        return {name: end["state"] for name, end in self.ends.items()}

    def add(self, lines: Iterable[tuple[str, Any]]) -> None:
        """Writes (kind, what) lines, on the disk before this returns."""
        lines = list(lines)
        text = "".join(json.dumps({kind: what}) + "\n" for kind, what in lines).encode()
        with open(self.path, "r+b" if self.path.exists() else "xb") as file:
            file.truncate(self._whole)  # what a kill or a full disk left of a line
            file.seek(self._whole)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._whole += len(text)
        for kind, what in lines:
            self._take({kind: what})


def circumstances() -> dict[str, Any]:
    """When, where and with what a driver started."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "commit": commit(),
        "versions": {name: installed(name) for name in PACKAGES},
        "python": platform.python_version(),
        "flags": flags(),
    }
