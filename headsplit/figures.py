"""The figures by name: what each shows, computed into a folder where it is not there yet, and drawn from its store."""

import json
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm

NUMBERS = "numbers.json"
COMMAND = (sys.executable, "-m", "headsplit", "figure")  # makes one


class Entry(NamedTuple):
    """One figure.

    Attributes:
        title: what it shows.
        computed: module with `SMALL` and `FULL` (configurations, dataclasses) and `lines(configuration)`.
        drawn: module with `draw(store)`, `numbers(store)` and perhaps `table(store)`.
    """

    title: str
    computed: str
    drawn: str


_TITLES = {  # in the order of the papers
    "order_parameters": "order parameters against τ, flow and SGD at several D",
    "staircase": "risk against τ, with the predicted marks of the stages",
    "sequential": "a Gaussian prior with unequal variances is learned one direction after the other",
    "splitting": "groups of heads that split in two again and again, and an excursion",
    "spectrum": "growth rates at the unspecialized point against Var θ, predicted and measured",
    "stages": "stage times against log D, predicted and measured",
    "bayes": "risk of three activations against ν and H, with the Bayes risk",
    "support": "least risk against H for priors with several numbers of support points",
    "pruning": "risk after heads are removed from a trained layer",
    "bands": "predicted bands of single runs at finite D, and how they narrow",
    "reduced": "the exact chain of the order parameters against SGD on the layer, and at D = 10^6",
    "dilution": "the largest weights that L bounded logits allow",
    "distance": "distance of tokens left out against L and N, with its bounds",
    "critical": "the N from which selected tokens are like any others, against L",
    "distinguishable": "the fraction of selected tokens that can be told apart, against N",
    "gradient": "gradient of a row against temperature, with its bounds",
    "normalizers": "risk, gradient and stable rate of normalizers in the single-location model",
}
_COMMANDS_TOO = ("stages", "bayes")  # computed by the module of their command


FIGURES: dict[str, Entry] = {
    name: Entry(title, f"{'headsplit' if name in _COMMANDS_TOO else 'figures'}.{name}", f"figures.{name}")
    for name, title in _TITLES.items()
}
# made by commands of their own names
COMMANDS = {
    "attention": "the five experiments on a real transformer (`headsplit attention`)",
    "compare": "theory against SGD on the layer, with the verdict (`headsplit compare`)",
    "sweep": "the figures of a sweep, from its folder (`headsplit sweep`)",
}


NAMES = (*FIGURES, *(name for name in COMMANDS if name != "sweep"))


def title(name: str) -> str:
    """What a figure shows."""
    return COMMANDS[name] if name in COMMANDS else entry(name).title


def listed() -> str:
    """Names and titles."""
    return "\n".join(f"{name:<18}{title(name)}" for name in (*FIGURES, *COMMANDS))


def make(
    name: str, folder: Path, *, full: bool, changes: Sequence[str], progress: bool, say: Callable[[str], Any]
) -> None:
    """Compute a figure by its name unless the folder holds it, and draw it.

    Raises:
        ValueError: no such figure or field, or a folder that holds another configuration.
        Interrupted: Ctrl-C; what is finished is kept, and the same command goes on.
    """
    if name not in COMMANDS:
        run(name, configured(name, full=full, changes=changes), folder, progress=progress, say=say)
        return
    if changes:
        raise ValueError(f"set: {name} takes the options of `headsplit {name}` instead")
    if name == "sweep":
        raise ValueError("store: expected a folder written by `headsplit sweep`")
    if name == "compare":
        from headsplit.compare import Configuration
        from headsplit.compare import run as compare

        compare(Configuration(replicas=32) if full else Configuration(), folder, progress=progress, say=say)
    else:
        from headsplit.attention import PACKAGED, Text
        from headsplit.attention import run as attend

        options = {"experiments": True, "download": False, "truncate": True, "rows": None if full else 64}
        attend(PACKAGED, Text.read(None), folder=folder, results=folder, progress=progress, say=say, **options)


def make_all(root: Path, *, full: bool, progress: bool, say: Callable[[str], Any]) -> None:
    """Every figure, each in its folder below `root` and by a process of its own, two at a time.

    A process for all would not do: it may map so many pieces of memory, and compiled code takes some each.

    Raises:
        ValueError: names the figures that could not be made, and why; the others are.
        Interrupted: Ctrl-C; what is finished is kept, and the same command goes on.
    """
    from compare.lines import Interrupted
    from sim._driver import interruptible

    queue = list(NAMES)
    running: dict[str, _Process] = {}
    missing: dict[str, str] = {}
    bar = tqdm(total=len(queue), unit=" figures", disable=not progress)
    signalled = False
    try:
        with interruptible() as interrupted:
            while running or (queue and not signalled):
                while queue and len(running) < 2 and not signalled:
                    name = queue.pop(0)
                    running[name] = _Process.begun(name, root / folder_name(name, full=full), full=full)
                bar.set_description(", ".join(running))  # shows the time that has passed as well
                time.sleep(0.2)
                for name in [name for name, process in running.items() if process.has_ended]:
                    output, why = running.pop(name).result()
                    bar.clear()
                    say(f"\n{name}: {title(name)}\n{output}")
                    bar.update()
                    if why:
                        missing[name] = why
                if interrupted.is_set() and not signalled:
                    signalled = True
                    say("interrupted: the lines at work are finished and kept (again: stop at once)")
                    for process in running.values():
                        process.interrupt()
    finally:
        bar.close()
        for process in running.values():  # after a second Ctrl-C
            process.interrupt()
    if signalled:
        raise Interrupted(f"interrupted: what is finished is kept in {root}, and the same command goes on")
    if missing:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in missing.items()))


class _Process(NamedTuple):
    """A figure being made by a process of its own, and what it says."""

    process: subprocess.Popen
    output: IO[str]
    errors: IO[str]

    @classmethod
    def begun(cls, name: str, folder: Path, *, full: bool) -> "_Process":
        command = [*COMMAND, name, "--out", str(folder), "--no-progress", *(["--full"] if full else [])]
        output, errors = (tempfile.TemporaryFile("w+", encoding="utf-8") for _ in range(2))  # noqa: SIM115
        # Ctrl-C reaches the driver, which passes it on: once, not twice
        process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        return cls(process, output, errors)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def result(self) -> tuple[str, str]:
        """What it printed, and why it failed, empty if it did not."""
        texts = []
        for file in (self.output, self.errors):
            file.seek(0)
            texts.append(file.read().strip())
            file.close()
        output, errors = texts
        if self.process.returncode == 0:
            return output, ""
        last = errors.splitlines()[-1] if errors else f"exit code {self.process.returncode}"
        return f"{output}\n{errors}".strip(), last.removeprefix("headsplit figure: ")


def folder_name(name: str, *, full: bool) -> str:
    """Folder of a figure's store among those of the others."""
    return f"{name}-full" if full else name


def redraw(name: str, store: Path, *, say: Callable[[str], Any]) -> None:
    """Draw a stored result again, beside it."""
    if name in COMMANDS:
        import_module(f"headsplit.{name}").show(store, say=say)
    else:
        show(name, store, say=say)


def entry(name: str) -> Entry:
    """The figure of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in FIGURES:
        raise ValueError(f"name: expected one of {', '.join([*FIGURES, *COMMANDS])}, got {name!r}")
    return FIGURES[name]


def configured(name: str, *, full: bool = False, changes: Sequence[str] = ()) -> Any:
    """The configuration of a figure at its small or its full size, with changes `field=value` in TOML's spelling.

    Raises:
        ValueError: naming a field that the figure has not, or a value that is none of its kind.
    """
    module = import_module(entry(name).computed)
    configuration = module.FULL if full else module.SMALL
    own = {field.name: getattr(configuration, field.name) for field in fields(configuration)}
    changed = dict(_change(name, text, own) for text in changes)
    return replace(configuration, **changed)


def _change(name: str, text: str, own: dict[str, Any]) -> tuple[str, Any]:
    field, _, value = (part.strip() for part in text.partition("="))
    if field not in own:
        raise ValueError(f"set: expected a field of {name} ({', '.join(own)}), got {text!r}")
    kind = type(own[field])
    try:
        found = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        found = value
    if isinstance(found, list):
        found = _tuples(found)
    if kind is float and type(found) is int:
        found = float(found)
    if own[field] is not None and not isinstance(found, kind):
        raise ValueError(f"set: expected {field} to be like {own[field]!r}, got {value}")
    return field, found


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def run(name: str, configuration: Any, folder: Path, *, progress: bool, say: Callable[[str], Any]) -> dict[str, float]:
    """Compute what is not there yet, store each line as it is finished, print the numbers, and draw.

    Returns:
        The key numbers.

    Raises:
        ValueError: options that are wrong, or a folder that holds another configuration.
        Interrupted: Ctrl-C; the lines that are finished are kept, and the same command goes on.
    """
    from compare.lines import completed

    if hasattr(configuration, "check"):
        configuration.check()
    module = import_module(entry(name).computed)
    lines = lambda: list(module.lines(configuration))  # noqa: E731
    return show(name, completed(configuration, folder, lines, progress=progress, say=say), say=say)


def show(name: str, path: Path, *, say: Callable[[str], Any]) -> dict[str, float]:
    """Print the numbers of a stored result, and draw its figure beside it."""
    from compare import load
    from compare.lines import stored_at
    from figures.style import save_figure

    found = entry(name)
    module = import_module(found.drawn)
    path = stored_at(path)
    store = load(path)
    expected = set(asdict(import_module(found.computed).SMALL))
    if set(store.configuration) != expected:
        groups = ", ".join(store.datasets)
        raise ValueError(f"{path}: expected a result of the figure {name!r}, got one with {groups}")
    if store.metadata["status"] != "complete":
        raise ValueError(f"{path}: expected a complete result; the command that began it goes on with it")
    values = module.numbers(store)
    say(module.table(store) if hasattr(module, "table") else table(values))
    (path.parent / NUMBERS).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for written in (path, path.parent / NUMBERS, *save_figure(module.draw(store), path.parent / name)):
        say(f"  {written}")
    return values


def table(values: dict[str, float]) -> str:
    """Key numbers, one a line."""
    width = max(map(len, values), default=0) + 2
    return "\n".join(f"{name:<{width}}{value:.6g}" for name, value in values.items())
