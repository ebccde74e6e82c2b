"""Checkpoints: all that a run needs to go on bit for bit, in one file that is there whole or not at all.

The file is an uncompressed `.npz`. Its entry `header` is JSON: format, versions, the run's configuration, and shape,
type and SHA-256 of every other entry. Nothing in it is pickled.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from theory._checks import invalid, non_negative
from theory._versions import installed

FORMAT, NUMBER = "headsplit-checkpoint", 1
FLAGS = ("jax_threefry_partitionable", "jax_default_matmul_precision")  # what a run depends on besides its arguments


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

    def of_lane(self, i: int) -> tuple[dict[str, np.ndarray], int]:
        """Records and result of one replica."""
        return {name: values[i] for name, values in self.records.items()}, int(self.result[i])


class Snapshot(NamedTuple):
    """A run at a block boundary.

    Attributes:
        step: steps made.
        recorded: records made.
        log: what was recorded and what went wrong.
        leaves: of the state.
    """

    step: int
    recorded: int
    log: Log
    leaves: list[Any]


class Files(NamedTuple):
    """Options of a run, unchecked."""

    checkpoint: Any
    checkpoint_seconds: Any
    resume: Any


class Checkpoints:
    """Where and how often a run is saved, and what it goes on from.

    Attributes:
        path: the file that is written, None without one.
        start: what the run goes on from, None for a new one.
    """

    def __init__(self, files: Files, configuration: Callable[[], dict[str, Any]]):
        """Checks the options and reads what is to be resumed.

        Raises:
            ValueError: `checkpoint` exists; `resume` is no readable checkpoint, a newer one, or of another run.
            FileNotFoundError: nothing at `resume`.
        """
        path, resume = (_path(name, getattr(files, name)) for name in ("checkpoint", "resume"))
        self.path = path or resume
        self._seconds = float(non_negative("checkpoint_seconds", files.checkpoint_seconds, 0))
        self._saved, self._due = None, 0.0
        if path is not None and path != resume and path.exists():
            raise invalid("checkpoint", "a path where nothing lies (resume= goes on with a run)", f"{path}: it exists")
        if self.path is not None:
            flags = {name: _flag(name) for name in FLAGS} | {"backend": jax.default_backend()}
            self._configuration = json.loads(json.dumps(configuration() | flags))
        self.start = None if resume is None else _load(resume, self._configuration)

    def save(self, snapshot: Snapshot, *, now: bool) -> None:
        """Writes the snapshot, unless it is there already or neither `now` nor due.

        Raises:
            OSError: it cannot be written; what was there before is whole.
        """
        place = snapshot.step, snapshot.recorded
        if self.path is None or place == self._saved or not (now or time.monotonic() >= self._due):
            return
        try:
            _write(self.path, snapshot, self._configuration)
        except OSError as error:
            kept = "; the checkpoint written before is whole, resume= goes on from it" if self.path.exists() else ""
            raise OSError(f"checkpoint: {self.path} cannot be written ({error}){kept}") from error
        self._saved, self._due = place, time.monotonic() + self._seconds


def digest(*arrays: Any) -> str:
    """SHA-256 of the arrays' types, shapes and bytes."""
    total = hashlib.sha256()
    for array in map(np.asarray, arrays):
        total.update(f"{array.dtype}{array.shape}".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


def _write(path: Path, snapshot: Snapshot, configuration: Mapping[str, Any]) -> None:
    """Aside first, down to the disk, then renamed: a run that is killed leaves the earlier file, or the new one."""
    log = snapshot.log
    arrays: dict[str, Any] = {f"records.{name}": values for name, values in log.records.items()}
    arrays["result"] = log.result
    arrays |= {f"state.{i}": np.asarray(leaf) for i, leaf in enumerate(snapshot.leaves)}
    header = {
        "format": FORMAT,
        "number": NUMBER,
        "made": _made(),
        "configuration": configuration,
        "step": snapshot.step,
        "recorded": snapshot.recorded,
        "failures": log.failures,
        "arrays": {name: _contents(values) for name, values in arrays.items()},
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(aside, "xb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # the rename is on the disk too, where folders can be synchronized
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _Refused(ValueError):
    """Read, but not to be used."""


def _load(path: Path, configuration: Mapping[str, Any]) -> Snapshot:
    """The snapshot in a file, if it belongs to a run of this configuration."""
    if not path.exists():
        raise FileNotFoundError(f"resume: no checkpoint at {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes()) if "header" in file.files else {}
            _check_header(path, header, configuration)
            arrays = {name: file[name] for name in header["arrays"]}
        for name, values in arrays.items():
            if _contents(values) != header["arrays"][name]:
                raise _Refused(f"resume: {path} is damaged: {name} differs from what was written")
    except _Refused as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # whatever NumPy, zipfile and JSON make of bytes that are not what they were
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"resume: {path} is truncated, damaged or no checkpoint of headsplit ({why})") from None
    records = {name.removeprefix("records."): arrays[name] for name in arrays if name.startswith("records.")}
    leaves = [arrays[f"state.{i}"] for i in range(sum(name.startswith("state.") for name in arrays))]
    return Snapshot(header["step"], header["recorded"], Log(records, arrays["result"], header["failures"]), leaves)


def _check_header(path: Path, header: dict[str, Any], configuration: Mapping[str, Any]) -> None:
    """Refuses what is foreign, newer or of another run; warns of what makes the run another in its last digits."""
    if header.get("format") != FORMAT:
        raise _Refused(f"resume: {path} is no checkpoint of headsplit")
    theirs, ours = header["made"], _made()
    if header["number"] > NUMBER or _release(theirs["headsplit"]) > _release(ours["headsplit"]):
        newer = f"it has format {header['number']} of headsplit {theirs['headsplit']}"
        raise _Refused(f"resume: {path} is newer: {newer}, this is headsplit {ours['headsplit']} with format {NUMBER}")
    stored = header["configuration"]
    other = [
        f"{name} differs: checkpoint has {stored.get(name)!r}, this run {configuration.get(name)!r}"
        for name in {**configuration, **stored}
        if name not in stored or name not in configuration or stored[name] != configuration[name]
    ]
    if other:
        raise _Refused(f"resume: {'; '.join(other)} ({path})")
    changed = [f"{name} {theirs[name]}, now {ours[name]}" for name in ours if theirs[name] != ours[name]]
    if changed:
        message = f"resume: {path} was written with {'; '.join(changed)}: the run goes on, but not bit for bit"
        warnings.warn(message, stacklevel=6)  # the caller of `train`


def _contents(values: np.ndarray) -> list[Any]:
    """Shape, type and digest, as in the header."""
    return [list(values.shape), str(values.dtype), digest(values)]


def _made() -> dict[str, str]:
    """What bits depend on, besides the configuration."""
    versions = {name: installed(name) for name in ("headsplit", "jax", "jaxlib", "numpy")}
    return {**versions, "platform": f"{jax.devices()[0].device_kind} ({platform.machine()})"}


def _release(version: str) -> tuple[int, ...]:
    """(1, 2, 3) of "1.2.3rc1"."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", version)[0])))  # type: ignore[index]  # it may be empty


def _flag(name: str) -> str:
    return str(getattr(jax.config, name))


def _path(name: str, value: Any) -> Path | None:
    """Where a file really lies, so that a link stays one."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not str(value) or "\0" in str(value):
        raise invalid(name, "a path", repr(value))
    return Path(value).resolve()
