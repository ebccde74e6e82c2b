"""From a grid to points: values set by name or path, identities, replicas."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from compare.sweeps.gridded import OURS
from compare.sweeps.identity import canonical, digest
from compare.sweeps.runs import REQUIRED, Run
from theory import Prior
from theory._checks import invalid, whole
from theory.activation import Activation
from theory.names import parse_activation, parse_prior, rebuilt

_PARSED = {"prior": parse_prior, "activation": parse_activation}  # given as text, among the names of our runs
_WHOLE = {"length", "heads", "dim", "batch", "record", "starts", "samples", "evaluation", "replicas"}
_MOST_POINTS = 10**6


class Point(NamedTuple):
    """One set of values, and one replica of it.

    Attributes:
        name: its identity.
        words: digest of the values and the seed, without the replica: what its key is made of.
        place: index along each swept name.
        replica: its number.
        labels: value of each swept name as it labels the Dataset: a number, boolean or text.
        values: of every parameter of the run.
        configuration: all of it, canonical.
    """

    name: str
    words: str
    place: tuple[int, ...]
    replica: int
    labels: dict[str, Any]
    values: dict[str, Any]
    configuration: dict[str, Any]


class Grid(NamedTuple):
    """What is swept, what is not, and the points in order, replicas innermost.

    Attributes:
        run: the run.
        labels: the values of each swept name, as labels.
        replicas: their number; None for one, without a dimension of its own.
        base: canonical values of what is not swept, with the run, its source and the seed.
        points: all of them.
    """

    run: Run
    labels: dict[str, list[Any]]
    replicas: int | None
    base: dict[str, Any]
    points: list[Point]


def grid_of(run: Run, grid: Any, fixed: Any, *, replicas: Any, seed: Any) -> Grid:
    """The points of a sweep.

    Raises:
        ValueError: naming what is unknown, missing, given twice or out of place.
    """
    for name, given in (("grid", grid), ("fixed", fixed)):
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise invalid(name, "a dict from names to values", repr(given))
    seed = whole("seed", seed, 0)
    if seed >= 2**63:
        raise invalid("seed", "a whole number below 2**63", seed)
    fixed, swept = dict(fixed), dict(grid)
    if replicas is not None:
        replicas = whole("replicas", replicas, 1)
        if "replicas" in run.parameters:  # its own matter: it judges them together
            _not_twice("replicas", {**fixed, **swept})
            fixed["replicas"], replicas = replicas, None
        elif not run.random:
            raise invalid("replicas", f"none: {run.name} takes no key, they would all be the same", replicas)
    for name in fixed:
        _known("fixed", name, run)
    for name in swept:
        _known("grid", _root(name), run)
    for name in swept:
        _not_twice(name, fixed)
        if name in (*OURS, "replica"):
            raise invalid("grid", f"names other than {', '.join(OURS)}, replica, which the Dataset has itself", name)
        if name in run.returned:
            raise invalid("grid", f"names other than {', '.join(sorted(run.returned))}, which the Dataset of "
                          f"{run.name} has itself (one sweep for each value, by `fixed`)", name)  # fmt: skip
    values = {name: _in_grid(name, given) for name, given in swept.items()}
    start = {name: default for name, default in run.parameters.items() if default is not REQUIRED}
    start |= {name: _parsed(name, value, run) for name, value in fixed.items()}
    missing = [name for name in run.parameters if name not in start and name not in swept]
    if missing:
        raise invalid("fixed", f"values for {', '.join(missing)}, which {run.name} needs", sorted(fixed))
    values = {name: [_parsed(name, value, run) for value in given] for name, given in values.items()}
    labels = {name: [_label(name, value) for value in given] for name, given in values.items()}
    for name, given in labels.items():
        spelled = [str(canonical(name, label)) for label in given]
        twice = sorted({text for text in spelled if spelled.count(text) > 1})
        if twice:
            raise invalid(f"grid[{name!r}]", "different values", f"{twice[0]} twice")
    count = int(np.prod([len(given) for given in values.values()], dtype=object)) * (replicas or 1)
    if count > _MOST_POINTS:
        raise invalid("grid", f"at most {_MOST_POINTS:,} points", f"{count:,}")

    paths = sorted((name for name in values if name not in run.parameters), key=len)  # larger parts before theirs
    base = {"run": run.name, "values": {}}
    if run.source:
        base["source"] = run.source
    if run.random:
        base["seed"] = seed
    base["values"] = {name: canonical(name, value) for name, value in sorted(start.items()) if name not in swept}
    names = sorted({*start, *map(_root, values)})
    parts = {name: [path for path in paths if _root(path) == name] for name in names}
    # each parameter is made once for each choice of what it is made of
    made: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    points, first = [], {}
    for place in itertools.product(*(range(len(given)) for given in values.values())):
        chosen = dict(zip(values, place, strict=True))
        own, spelled = {}, {}
        for name in names:
            choice = (name, chosen.get(name), *(chosen[path] for path in parts[name]))
            if choice not in made:
                value = values[name][chosen[name]] if name in chosen else start[name]
                for path in parts[name]:
                    value = _with_part(value, path, values[path][chosen[path]])
                made[choice] = value, canonical(name, value)
            own[name], spelled[name] = made[choice]
        configuration = base | {"values": spelled}
        words = digest(configuration)
        label = {name: labels[name][index] for name, index in chosen.items()}
        if words in first:
            raise invalid("grid", "names whose values all count", f"the same point as {first[words]} and {label}")
        first[words] = label
        for replica in range(replicas or 1):
            full = configuration | {"replica": replica}
            points.append(Point(digest(full), words, place, replica, label, own, full))
    return Grid(run, labels, replicas, base, points)


def _known(where: str, name: str, run: Run) -> None:
    if name not in run.parameters:
        paths = " or paths into them" if where == "grid" else ""
        raise invalid(where, f"names of {run.name} ({', '.join(run.parameters)}){paths}", name)


def _not_twice(name: str, given: Mapping[str, Any]) -> None:
    if name in given:
        raise invalid(name, "one place where it is given", "two")


def _in_grid(name: str, given: Any) -> list[Any]:
    """The values of one name: any sequence of them."""
    if isinstance(given, str | Mapping) or not hasattr(given, "__len__"):
        raise invalid(f"grid[{name!r}]", "a sequence of values", repr(given))
    values = given.tolist() if isinstance(given, np.ndarray) or hasattr(given, "aval") else list(given)
    if not values:
        raise invalid(f"grid[{name!r}]", "at least one value", "none")
    return values


def _parsed(name: str, value: Any, run: Run) -> Any:
    """For our runs: priors and activations may be given by their canonical names, whole numbers as 1000.0."""
    known = {"prior": Prior, "activation": Activation}
    if not run.ours:
        return value
    if name in _WHOLE and isinstance(value, float) and value.is_integer():
        return int(value)
    if name not in known:
        return value
    if isinstance(value, str):
        return _PARSED[name](value)
    if not isinstance(value, known[name]):
        raise invalid(name, f"a {name} or the text of one", repr(value))
    return value


def _label(name: str, value: Any) -> Any:
    """How a value labels the Dataset: itself if a number, boolean or text, else its canonical form as text."""
    if isinstance(value, np.generic | np.ndarray) and np.ndim(value) == 0:
        value = value.item()
    plain = canonical(name, value)
    if isinstance(plain, str):
        return plain
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)  # no number of a Dataset
    return value if isinstance(value, int | float) else str(plain)


def _root(path: str) -> str:
    """The parameter that a name or path belongs to."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _with_part(value: Any, path: str, new: Any) -> Any:
    """A parameter's value with the part replaced that the path names."""
    rest = path[len(_root(path)) :].removeprefix(".")
    if not rest:
        raise invalid("grid", "a name, or a path such as 'prior.amplitude[1]'", repr(path))
    return _replaced(value, rest, new, path)


def _replaced(value: Any, rest: str, new: Any, path: str) -> Any:
    if isinstance(value, Prior):
        return rebuilt(value, rest, new)
    if isinstance(value, Activation):
        return rebuilt(value, rest, new)
    step = re.match(r"\.?([^.\[]+)|\[(-?\d+)\]", rest)
    if step is None:
        raise invalid("grid", "a path of .names and [numbers]", repr(path))
    after = rest[step.end() :]
    key: Any = step[1] if step[1] is not None else int(step[2])
    if isinstance(value, Mapping) and key in value:
        return {**value, key: _replaced(value[key], after, new, path) if after else new}
    entries = isinstance(value, Sequence) and not isinstance(value, str) and isinstance(key, int)
    if entries and -len(value) <= key < len(value):
        items: list[Any] = list(value)
        items[key] = _replaced(items[key], after, new, path) if after else new
        return items
    inside = f"one of {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"an entry of {value!r}"
    raise invalid("grid", f"{inside} in the path {path!r}", repr(key))
