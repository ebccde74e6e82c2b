"""One driver at a time writes into a folder of results."""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK, HOLDER = ".lock", "driver.json"  # the first stays beside the results, the second while a driver is at work


class InUse(RuntimeError):
    """Another driver is at work on the folder; the message says which."""


@contextmanager
def only_driver(folder: Path) -> Iterator[None]:
    """Holds an existing folder, also on a shared file system, until the block ends.

    Raises:
        InUse: another driver is at work on it.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        held = f"{folder} is in use by another driver{_holder(folder)}"
        raise InUse(f"store: {held}; wait for it, or stop it") from error
    try:
        (folder / HOLDER).write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}))
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    try:
        held = json.loads((folder / HOLDER).read_text())
        return f" (process {held['pid']} on {held['host']})"
    except (OSError, ValueError, KeyError):
        return ""
