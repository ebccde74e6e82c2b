"""Parameter sweeps from a file: what is run, over what, where, and which figures are drawn of it."""

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headsplit.executors import KINDS, executor_for

STORE = "store"
FIGURES = "figures.json"  # beside the store: what is drawn again
RUNS = {
    "gradient_flow": "theory",
    "bayes_risk": "theory",
    "population_risk": "theory",
    "optimal_risk": "theory",
    "predict_stages": "theory",
    "train": "sim",
    "train_reduced": "sim",
    "agreement": "compare",
}
_KEYS = ("run", "replicas", "seed", "memory", "fixed", "grid", "executor", "figure")
_RANGE = ("from", "to", "count", "spacing", "whole")
_FIGURES = {"curves": ("quantity", "x", "hue", "at", "band"), "heat_map": ("quantity", "x", "y", "at", "reduce")}
_NEEDED = {"curves": ("quantity", "x"), "heat_map": ("quantity", "x", "y")}
_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_MEMORY = 2**28


@dataclass(frozen=True)
class Configuration:
    """What a file says.

    Attributes:
        run: one of ours, or "package.module:function".
        grid: values of each swept name.
        fixed: values of other parameters.
        replicas: independent repetitions, None for one without a dimension.
        seed: of all keys.
        memory: bytes that one call may take.
        executor: kind and options of `executor_for`.
        figures: kind, quantity and options of `figures.sweep.draw`.
    """

    run: str
    grid: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any]
    replicas: int | None
    seed: int
    memory: int
    executor: Mapping[str, Any]
    figures: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> "Configuration":
        """The configuration in a TOML file.

        Raises:
            ValueError: naming the key that is unknown, missing or wrong, and what was expected.
            OSError: a file that cannot be read.
        """
        try:
            given = tomllib.loads(path.read_text(encoding="utf-8"))
            return _configuration(given)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def on(self, kind: str | None, workers: int | None) -> "Configuration":
        """With another executor: of its options those that this kind has stay."""
        kind = str(self.executor["kind"]) if kind is None else kind
        own = {name: value for name, value in self.executor.items() if name in KINDS.get(kind, ())}
        own |= {} if workers is None else {"workers": workers}
        return replace(self, executor=_executor({"kind": kind, **own}))

    def function(self) -> Callable[..., Any]:
        """What is run.

        Raises:
            ValueError: a module or a function that is not there.
        """
        if self.run in RUNS:
            return getattr(importlib.import_module(RUNS[self.run]), self.run)
        module, _, name = self.run.partition(":")
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)  # the user's own module; workers get the same path
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"run: expected package.module:function, got {self.run!r} ({error})") from error
        if not callable(found):
            raise ValueError(f"run: expected a function, {self.run!r} is {found!r}")
        return found

    def options(self) -> dict[str, Any]:
        """Of `plan_sweep` and `sweep`."""
        return {name: getattr(self, name) for name in ("grid", "fixed", "replicas", "seed", "memory")}


def run(
    configuration: Configuration,
    folder: Path,
    *,
    resume: bool = False,
    retry: bool = False,
    progress: bool = True,
    say: Callable[[str], Any],
) -> bool:
    """Compute the points that are not stored yet, and draw the figures; whether no point failed.

    Args:
        configuration: what is swept.
        folder: where store and figures go.
        resume: whether a store that lacks some of the points is gone on with.
        retry: whether points that failed run again.
        progress: a bar.
        say: where messages go.

    Raises:
        ValueError: what is wrong with the configuration; a store that lacks points, without `resume` or `retry`.
        Interrupted: Ctrl-C; what had ended is stored.
    """
    from compare import SweepInterrupted, plan_sweep, sweep
    from compare.lines import Interrupted

    function, path = configuration.function(), folder / STORE
    plan = plan_sweep(function, **configuration.options(), store=path, retry=retry)
    if path.exists() and plan.todo and not (resume or retry):
        total = len(plan.grid.points)
        failed = f", {plan.failed} failed" if plan.failed else ""
        raise ValueError(
            f"out: {path} holds {plan.done} of {total} points of this configuration{failed}; --resume computes the "
            f"other {plan.todo}, another --out leaves it alone"
        )
    executor = configuration.executor if plan.todo else {"kind": "none"}
    try:
        with executor_for(**executor) as pool:
            options = {"store": path, "executor": pool, "retry": retry, "progress": progress, "say": say}
            data = sweep(function, **configuration.options(), **options)
    except SweepInterrupted as error:
        raise Interrupted(f"{error}" + (" with --resume" if path.exists() else "")) from error
    (folder / FIGURES).write_text(json.dumps(list(configuration.figures), indent=1), encoding="utf-8")
    say(f"  {path}")
    whole = not bool((data["status"] == 2).any())
    try:
        _draw(data, configuration.figures, folder, say)
    except ValueError as error:
        if whole:
            raise
        say(f"  {error}")  # there is nothing to draw of points that failed
    return whole


def planned(configuration: Configuration, folder: Path, *, retry: bool) -> str:
    """What `run` would do, as text; nothing is written."""
    from compare import plan_sweep

    kind = configuration.executor["kind"]
    options = {"store": folder / STORE, "retry": retry, "executor": None if kind == "none" else kind}
    return str(plan_sweep(configuration.function(), **configuration.options(), **options))


def status(folder: Path) -> str:
    """What is stored, as text."""
    from compare import open_sweep

    return str(open_sweep(folder / STORE))


def show(folder: Path, *, say: Callable[[str], Any]) -> None:
    """Draw the figures of a stored sweep again, over all that is stored.

    Raises:
        FileNotFoundError: no stored sweep, or none that `headsplit sweep` has finished.
        ValueError: a sweep without figures, or figures that cannot be drawn.
    """
    from compare import open_sweep

    data = open_sweep(folder / STORE).dataset()
    if not (folder / FIGURES).exists():
        raise FileNotFoundError(f"{folder / FIGURES}: expected the figures of a finished `headsplit sweep`, none there")
    figures = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    if not figures:
        raise ValueError(f"{folder}: expected figures, its configuration had no [[figure]]")
    _draw(data, figures, folder, say)


def _draw(data: Any, figures: Sequence[Mapping[str, Any]], folder: Path, say: Callable[[str], Any]) -> None:
    """Every figure that can be drawn; then what is wrong with the others."""
    from figures.style import save_figure
    from figures.sweep import draw

    wrong, used = [], []
    for number, figure in enumerate(figures, 1):
        base = re.sub(r"[^\w.-]+", "_", f"{figure['kind']}_{figure['quantity']}")
        used.append(base)
        try:
            picture = draw(data, **figure)
        except ValueError as error:
            wrong.append(f"figure {number}: {error}")
            continue
        name = base if used.count(base) == 1 else f"{base}_{used.count(base)}"
        for written in save_figure(picture, folder / name):
            say(f"  {written}")
    if wrong:
        raise ValueError(f"{'; '.join(wrong)} (the points are stored, the same command draws again)")


def _configuration(given: Mapping[str, Any]) -> Configuration:
    _known("", given, _KEYS)
    for name, kind, text in (("run", str, "the name of a run"), ("grid", dict, "a table [grid]")):
        if not isinstance(given.get(name), kind):
            raise ValueError(f"{name}: expected {text}, got {given.get(name, 'none')!r}")
    ours = given["run"] in RUNS
    if not ours and not re.fullmatch(r"[\w.]+:\w+", given["run"]):
        raise ValueError(f"run: expected one of {', '.join(RUNS)} or package.module:function, got {given['run']!r}")
    for name in ("fixed", "executor"):
        if not isinstance(given.get(name, {}), dict):
            raise ValueError(f"{name}: expected a table [{name}], got {given[name]!r}")
    figures = given.get("figure", [])
    if not isinstance(figures, list) or not all(isinstance(figure, dict) for figure in figures):
        raise ValueError("figure: expected tables [[figure]], with two brackets")
    return Configuration(
        run=given["run"],
        grid={name: _values(f"grid.{name}", value) for name, value in given["grid"].items()},
        fixed=given.get("fixed", {}),
        replicas=None if "replicas" not in given else _whole("replicas", given["replicas"], 1),
        seed=_whole("seed", given.get("seed", 0), 0),
        memory=_bytes("memory", given.get("memory", _MEMORY)),
        executor=_executor(given.get("executor", {})),
        figures=tuple(_figure(f"figure {i}", figure, ours) for i, figure in enumerate(figures, 1)),
    )


def _known(field: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{field}{': ' if field else ''}expected keys among {', '.join(known)}, got {name!r}")


def _whole(field: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{field}: expected a whole number >= {least}, got {value!r}")
    return value


def _bytes(field: str, value: Any) -> int:
    """Bytes, or text with a unit."""
    if isinstance(value, str):
        found = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*", value)
        if found is None:
            raise ValueError(f"{field}: expected bytes or text such as '256 MiB' ({', '.join(_UNITS)}), got {value!r}")
        return _whole(field, round(float(found[1]) * _UNITS[found[2]]), 1)
    return _whole(field, value, 1)


def _values(field: str, value: Any) -> list[Any]:
    """A list as it is, or the values of a range; these are rounded to 12 digits, so that 0.3 is 0.3."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"{field}: expected a list of values or a range {{from, to, count}}, got {value!r}")
    import numpy as np

    _known(field, value, _RANGE)
    for name in ("from", "to"):
        if isinstance(value.get(name), bool) or not isinstance(value.get(name), int | float):
            raise ValueError(f"{field}.{name}: expected a number, got {value.get(name, 'none')!r}")
    low, high, count = value["from"], value["to"], _whole(f"{field}.count", value.get("count", "none"), 2)
    spacing, whole = value.get("spacing", "linear"), value.get("whole", False)
    if spacing not in ("linear", "log"):
        raise ValueError(f"{field}.spacing: expected 'linear' or 'log', got {spacing!r}")
    if not isinstance(whole, bool):
        raise ValueError(f"{field}.whole: expected true or false, got {whole!r}")
    if spacing == "log" and not (low > 0 and high > 0):
        raise ValueError(f"{field}: expected positive ends with spacing 'log', got {low!r} and {high!r}")
    made = (np.geomspace if spacing == "log" else np.linspace)(low, high, count)
    values = [round(x) for x in made.tolist()] if whole else [float(f"{x:.12g}") for x in made.tolist()]
    if len(set(values)) < count:
        raise ValueError(f"{field}: expected {count} different values, got {values}")
    return values


def _executor(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("kind", "none")
    if kind not in KINDS:
        raise ValueError(f"executor.kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    _known(f"executor of kind {kind!r}", given, ("kind", *KINDS[kind]))
    if "workers" in given:
        _whole("executor.workers", given["workers"], 1)
    for name, wanted in (("address", str), ("folder", str), ("cluster", str), ("parameters", dict)):
        if not isinstance(given.get(name, wanted()), wanted):
            raise ValueError(f"executor.{name}: expected {'text' if wanted is str else 'a table'}, got {given[name]!r}")
    return {**given, "kind": kind}


def _figure(field: str, given: Mapping[str, Any], ours: bool) -> dict[str, Any]:
    kind = given.get("kind")
    if kind not in _FIGURES:
        raise ValueError(f"{field}: kind: expected one of {', '.join(_FIGURES)}, got {given.get('kind', 'none')!r}")
    _known(field, given, ("kind", *_FIGURES[kind]))
    for name in _FIGURES[kind]:
        wanted = dict if name == "at" else str
        if (name in _NEEDED[kind] and name not in given) or not isinstance(given.get(name, wanted()), wanted):
            text = "text" if wanted is str else "a table of values"
            raise ValueError(f"{field}: {name}: expected {text}, got {given.get(name, 'none')!r}")
    at = {name: _as_labelled(name, value) if ours else value for name, value in given.get("at", {}).items()}
    return {**given, **({"at": at} if at else {})}


def _as_labelled(name: str, value: Any) -> Any:
    """Priors and activations by the canonical names that label the Dataset."""
    from theory.names import parse_activation, parse_prior

    parsers = {"prior": parse_prior, "activation": parse_activation}
    return parsers[name](value).name if name in parsers and isinstance(value, str) else value
