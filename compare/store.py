"""Results on disk: one zarr store per result, labelled, complete or absent, and checked when read.

A store is an `xarray.DataTree` whose groups (theory, simulation, agreement, …) are Datasets. Its root carries what
made it: the configuration with exact numbers, package versions, JAX's flags, the commit of this code, the date, the
status, and the shape, type and SHA-256 of every array, so that a damaged store is noticed instead of read as NaN.
"""

import datetime
import hashlib
import json
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import xarray as xr
import zarr

from theory._versions import installed

SCHEMA = "headsplit-store-1"
FLAGS = ("jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl")  # what random numbers depend on
PACKAGES = ("headsplit", "jax", "equinox", "diffrax", "optax", "numpy", "xarray", "zarr")


class Store(eqx.Module):
    """What `load` gives back.

    Attributes:
        path: where it lies.
        datasets: the Datasets by group name.
        configuration: what made the result, as given to `save`.
        metadata: schema, status, created, commit, versions of packages, flags of JAX.
    """

    path: Path = eqx.field(static=True)
    datasets: dict[str, xr.Dataset]
    configuration: dict[str, Any] = eqx.field(static=True)
    metadata: dict[str, Any] = eqx.field(static=True)

    def __getitem__(self, group: str) -> xr.Dataset:
        """The Dataset of one group."""
        if group not in self.datasets:
            raise KeyError(f"{self.path}: no group {group!r}, it holds {', '.join(self.datasets)}")
        return self.datasets[group]

    def __str__(self) -> str:
        made = f"{self.metadata['created']}, commit {self.metadata['commit'] or 'unknown'}"
        lines = [f"Store {self.path} ({self.metadata['status']}, {made})"]
        lines += [f"  {name} = {value}" for name, value in self.configuration.items()]
        lines += [f"  {group}: {', '.join(map(str, data.data_vars))}" for group, data in self.datasets.items()]
        return "\n".join(lines)


class _OtherSchema(ValueError):
    """Written by another version, or by someone else."""


def save(
    path: str | Path,
    datasets: Mapping[str, xr.Dataset],
    configuration: Mapping[str, Any],
    *,
    status: str = "complete",
    replace: bool = False,
) -> Path:
    """Write Datasets as the groups of one store: aside first, then renamed, so that it is there whole or not at all.

    Args:
        path: a directory that does not exist yet, by custom ending in `.zarr`.
        datasets: by group name. Their attributes may be strings, numbers, None, booleans, lists and dicts; all but
            strings are written as JSON text.
        configuration: what made the result, in the same kinds of values.
        status: "complete", or how far it came.
        replace: whether a store at `path` is replaced (itself whole until the new one is).

    Returns:
        The path.

    Raises:
        FileExistsError: something is at `path` and `replace` is False.
        TypeError: an attribute or configuration value that JSON does not know, by name.
    """
    path = Path(path)
    if path.exists() and not replace:
        raise FileExistsError(f"{path}: exists already, and results are not overwritten")
    groups = {f"/{name}": _plain(name, data) for name, data in datasets.items()}
    root = xr.Dataset(
        attrs={
            "schema": SCHEMA,
            "status": status,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "flags": json.dumps({name: getattr(jax.config, name) for name in FLAGS}),
            "versions": json.dumps({name: installed(name) for name in PACKAGES}),
            "configuration": _json("configuration", dict(configuration)),
            "contents": json.dumps({group[1:]: _contents(data) for group, data in groups.items()}),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        xr.DataTree.from_dict({"/": root, **groups}).to_zarr(aside, zarr_format=3, consolidated=False)
        if replace and path.exists():
            old = path.rename(aside.with_name(f"{aside.name}.old"))
            try:
                aside.rename(path)
            except BaseException:
                old.rename(path)
                raise
            shutil.rmtree(old)
        else:
            try:
                aside.rename(path)
            except OSError as error:  # written by someone else in the meantime
                raise FileExistsError(f"{path}: exists already, and results are not overwritten") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return path


def load(path: str | Path) -> Store:
    """Read a store, all of it into memory, and check that it is what was written.

    What an interrupted run left is read like any other; `metadata["status"]` says which it is.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: not a store, another schema, or arrays that are missing or differ from what was written.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no store here")
    try:
        with xr.open_datatree(path, engine="zarr", consolidated=False) as tree:
            attrs = dict(tree.attrs)
            if attrs.get("schema") != SCHEMA:
                raise _OtherSchema(f"{path}: expected schema {SCHEMA}, got {attrs.get('schema', 'none')}")
            contents = json.loads(attrs["contents"])
            datasets = {group: tree.children[group].to_dataset().load() for group in contents if group in tree.children}
    except _OtherSchema:
        raise
    except Exception as error:  # whatever zarr, its codecs and JSON make of bytes that are not what they were
        where = _unreadable(path)
        what = f"{', '.join(where)} cannot be decoded (damaged or cut off)" if where else "not a readable store"
        raise ValueError(f"{path}: {what} ({type(error).__name__}: {error})") from error
    for group, arrays in contents.items():
        if group not in datasets:
            raise ValueError(f"{path}: group {group} is missing")
        found = _contents(datasets[group])
        for name, expected in arrays.items():
            if found.get(name) != expected:
                state = "differs from what was written (damaged or cut off)" if name in found else "is missing"
                raise ValueError(f"{path}: {group}/{name} {state}")
    metadata = {name: attrs[name] for name in ("schema", "status", "created", "commit")}
    metadata.update({name: json.loads(attrs[name]) for name in ("flags", "versions")})
    return Store(path, datasets, json.loads(attrs["configuration"]), metadata)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Where two configurations differ, one line per name; empty when they are the same."""
    a, b = (json.loads(_json("configuration", dict(x))) for x in (ours, theirs))
    return [
        f"{name}: {a.get(name, 'absent')!r} here, {b.get(name, 'absent')!r} there"
        for name in sorted({*a, *b})
        if name not in a or name not in b or a[name] != b[name]
    ]


def _plain(group: str, data: xr.Dataset) -> xr.Dataset:
    """A copy whose attributes are all strings, and text of the kind that zarr 3 specifies."""
    data = data.copy()
    data.encoding = {}
    for name in [name for name, variable in data.variables.items() if variable.dtype.kind == "U"]:
        data[name] = data[name].astype(object)
    for variable in (data, *(data[name] for name in data.variables)):
        where = f"{group}/{variable.name}" if isinstance(variable, xr.DataArray) else group
        variable.attrs = {
            key: value if isinstance(value, str) else _json(f"{where}: attribute {key}", value)
            for key, value in variable.attrs.items()
        }
        variable.encoding = {}
    return data


def _json(name: str, value: Any) -> str:
    """JSON text with every digit; NumPy numbers and arrays as plain ones."""

    def plain(item: Any) -> Any:
        if isinstance(item, np.generic | np.ndarray):
            return item.tolist()
        kind = type(item).__name__
        raise TypeError(f"{name}: expected strings, numbers, None, booleans, lists and dicts, got {kind}")

    return json.dumps(value, default=plain)


def _contents(data: xr.Dataset) -> dict[str, list[Any]]:
    """Shape, type and digest of every variable."""
    found = {}
    for name, variable in data.variables.items():
        kind = str(variable.dtype) if variable.dtype.kind in "biufc" else "text"
        found[str(name)] = [list(variable.shape), kind, digest_of(variable)]
    return found


def digest_of(variable: xr.Variable) -> str:
    """SHA-256 of the values, of text as JSON."""
    values = np.ascontiguousarray(variable.values)
    raw = values.tobytes() if values.dtype.kind in "biufc" else json.dumps(values.tolist(), default=str).encode()
    return hashlib.sha256(raw).hexdigest()


def _unreadable(path: Path) -> list[str]:
    """The arrays of a store whose bytes cannot be decoded."""
    found = []
    for description in sorted(path.glob("*/*/zarr.json")):
        try:
            zarr.open_array(description.parent, mode="r")[...]
        except Exception:  # of any kind: the question is only which array
            found.append(description.parent.relative_to(path).as_posix())
    return found


def commit() -> str:
    """The commit of this code (with "+changes" if files differ from it); empty outside a repository of ours."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # a copy inside someone else's repository has no commit
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
