"""Folders of stored results: what lies there is found again, refused, or gone on with."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STORE = "result.zarr"


class Interrupted(Exception):
    """Stopped by the user; the message says what is kept."""


def is_complete(
    folder: Path,
    wanted: Mapping[str, Any],
    *,
    say: Callable[[str], Any],
    unfinished: str,
    added: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the folder holds the finished result of this configuration already; says what it found.

    Args:
        folder: where the store lies or will lie.
        wanted: the configuration.
        say: where messages go.
        unfinished: what happens to an unfinished result.
        added: values of fields that older stores lack.

    Raises:
        ValueError: the folder is a file, or holds another configuration.
    """
    from compare import load
    from compare.store import differences

    there = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if there is not None and not there.is_dir():
        raise ValueError(f"out: expected a folder, {there} is a file")
    path = folder / STORE
    if not path.exists():
        return False
    try:
        stored = load(path)
    except ValueError as error:
        raise ValueError(f"{error} (delete it to compute again, or give another --out)") from error
    other = differences(wanted, {**(added or {}), **stored.configuration})
    if other:
        raise ValueError(f"out: {folder} holds another configuration ({'; '.join(other)}); give another --out")
    complete = stored.metadata["status"] == "complete"
    if complete:
        say(f"{path} holds this result already (computed {stored.metadata['created']}): loaded, not recomputed")
    else:
        say(f"{path} holds an unfinished run of this configuration: {unfinished}")
    return complete
