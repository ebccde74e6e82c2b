"""Results made line by line in a folder: what lies there is found again, refused, or gone on with."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from compare.driver import only_driver
from compare.store import differences, load, save
from sim._driver import interruptible

STORE = "result.zarr"


class Interrupted(KeyboardInterrupt):
    """Stopped by the user; the message says what is kept."""


def stored_at(place: Path) -> Path:
    """The store in a folder, or the store itself."""
    return place if place.suffix == ".zarr" else place / STORE


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


def completed(
    configuration: Any,
    folder: Path,
    lines: Callable[[], Sequence["Line"]],
    *,
    progress: bool,
    say: Callable[[str], Any],
) -> Path:
    """The store of a result made line by line, a dataclass says of what; lines that are missing are computed."""
    path, wanted = folder / STORE, asdict(configuration)
    if not is_complete(folder, wanted, say=say, unfinished="going on with what is missing"):
        compute_lines(lines(), path, wanted, progress=progress, say=say)
    return path


class Line(NamedTuple):
    """One Dataset of a result that is computed line by line.

    Attributes:
        group: its name in the store.
        text: what it is, for messages.
        compute: makes it, from the Datasets of `needs`.
        needs: groups that it is made from.
    """

    group: str
    text: str
    compute: Callable[..., Any]
    needs: tuple[str, ...] = ()


def compute_lines(
    lines: Sequence[Line],
    path: Path,
    configuration: Mapping[str, Any],
    *,
    progress: bool,
    say: Callable[[str], Any],
) -> None:
    """Compute every line that is not stored yet; the store is written again after each.

    Two at a time: most of a line is compilation, which keeps one core busy.

    Raises:
        Interrupted: Ctrl-C; the lines that are finished are kept.
        InUse: another driver is at work in the store's folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with only_driver(path.parent):
        _compute_lines(lines, path, configuration, progress=progress, say=say)


def _compute_lines(
    lines: Sequence[Line],
    path: Path,
    configuration: Mapping[str, Any],
    *,
    progress: bool,
    say: Callable[[str], Any],
) -> None:
    done = dict(load(path).datasets) if path.exists() else {}
    queue = [line for line in lines if line.group not in done]
    total = left = len(queue)
    running: dict[Future[Any], Line] = {}
    stopped = False
    bar = tqdm(total=total, unit=" lines", disable=not progress)
    pool = ThreadPoolExecutor(2)

    def submit_ready() -> None:
        for line in [line for line in queue if all(group in done for group in line.needs)]:
            queue.remove(line)
            running[pool.submit(line.compute, *(done[group] for group in line.needs))] = line

    try:
        with interruptible() as interrupted:
            submit_ready()
            while running:
                ended, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in ended:
                    line = running.pop(future)
                    if future.cancelled() or isinstance(future.exception(), KeyboardInterrupt):
                        interrupted.set()
                        continue
                    done[line.group] = future.result()
                    left -= 1
                    save(path, done, configuration, status="unfinished" if left else "complete", replace=True)
                    bar.set_description(line.text, refresh=False)
                    bar.update()
                    if not progress:
                        say(f"[{total - left}/{total}] {line.text}")
                if interrupted.is_set() and not stopped:
                    stopped = True
                    say("interrupted: the lines at work are finished and kept (again: stop at once)")
                    pool.shutdown(wait=False, cancel_futures=True)
                    for future in [future for future in running if future.cancelled()]:
                        del running[future]  # `wait` never reports them
                if not stopped:
                    submit_ready()
    finally:
        bar.close()
        pool.shutdown(wait=False, cancel_futures=True)
    if stopped:
        kept = f"{len(done)} lines are kept in {path}, the same command goes on" if done else "nothing is kept yet"
        raise Interrupted(f"interrupted: {kept}")
