"""The numbers of a stored sweep: a zarr group with an axis `point` before each variable's own, a chunk for each point.

Points differ in their own sizes: rows are filled up with NaN (−1, false, "") and what belongs to a point is read back
with its sizes and checked against the digest that the manifest has.
"""

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from compare.store import digest_of

DATA = "data.zarr"
MOST_AT_ONCE = 2**28  # bytes of a variable
_FILL: dict[str, Any] = {"f": np.nan, "c": np.nan, "i": -1, "b": False, "O": ""}


class Damaged(ValueError):
    """A point whose numbers are missing or not those that were written."""


class Rows:
    """The group. One writer at a time."""

    def __init__(self, folder: Path, *, write: bool):
        self.path = folder / DATA
        self._group: zarr.Group | None = None
        if write:
            self._group = zarr.open_group(self.path, mode="a", zarr_format=3)
        elif self.path.exists():
            with contextlib.suppress(Exception):  # then every point says that it cannot be read
                self._group = zarr.open_group(self.path, mode="r", zarr_format=3)
        self._arrays: dict[str, zarr.Array] = {}
        self._attrs: dict[str, dict[str, Any]] = {}
        self._read: dict[str, np.ndarray | None] = {}

    def write(self, rows: Sequence[int], points: Sequence[xr.Dataset], total: int) -> list[dict[str, Any]]:
        """Writes points into their rows; returns what the manifest is to remember of each.

        Args:
            rows: of each point.
            points: their Datasets, in the few types of `results.plain`.
            total: rows that the arrays need to have.
        """
        for name in dict.fromkeys(str(name) for data in points for name in data.variables):
            own = {row: data.variables[name] for row, data in zip(rows, points, strict=True) if name in data.variables}
            shape = tuple(max(sizes) for sizes in zip(*(v.shape for v in own.values()), strict=True))
            array = self._array(name, next(iter(own.values())), shape, total)
            for start, block in _runs(own):
                array[(slice(start, start + len(block)), *(slice(0, n) for n in block.shape[1:]))] = block
        return [_description(data) for data in points]

    def label(self, points: Mapping[str, Any]) -> None:
        """Writes the swept values and the replica of each row, for whoever opens the group by itself."""
        assert self._group is not None
        for name, values in points.items():
            array = np.asarray(values)
            text = array.dtype.kind not in "fiub"
            made = self._group.create_array(
                name,
                shape=array.shape,
                chunks=(max(array.size, 1),),
                dtype=str if text else array.dtype,
                dimension_names=("point",),
                overwrite=True,
                attributes={"long_name": "swept value" if name != "replica" else "replica"},
            )
            made[...] = array.astype(object) if text else array

    def kinds(self, labels: Collection[str], total: int) -> dict[str, tuple[tuple[str, ...], str]]:
        """Dimensions and type of each variable that is there, as in `results.conflict`.

        Args:
            labels: names of arrays that are no variables.
            total: rows that they may have.

        Raises:
            Damaged: an array that cannot be read, or has rows that no point has.
        """
        found = {}
        names = {folder.name for folder in self.path.iterdir() if folder.is_dir()} if self.path.exists() else set()
        for name in sorted(names.difference(labels)):
            try:
                if self._group is not None and name not in self._group:
                    continue
                array = self._stored(name)
            except Exception as error:
                raise Damaged(f"{name} cannot be read ({type(error).__name__}: {error})") from error
            if array.shape[0] > total:
                raise Damaged(f"{name} has {array.shape[0]} rows, the manifest {total} points")
            dims, kind = tuple(map(str, (array.metadata.dimension_names or ())[1:])), np.dtype(array.dtype).kind  # pyright: ignore
            found[name] = dims, "object" if kind in "OUT" else str(array.dtype)
        return found

    def _array(self, name: str, like: xr.Variable, shape: tuple[int, ...], total: int) -> zarr.Array:
        """The array of a variable, made or grown to what is needed."""
        assert self._group is not None
        kind = like.dtype.kind
        if name not in self._arrays:
            if name in self._group:
                found = self._stored(name)
            else:
                found = self._group.create_array(
                    name,
                    shape=(total, *shape),
                    chunks=(1, *(max(n, 1) for n in shape)),
                    dtype=str if kind == "O" else like.dtype,
                    fill_value=_FILL[kind],
                    dimension_names=("point", *map(str, like.dims)),
                    attributes={key: _text(value) for key, value in like.attrs.items()},
                )
            self._arrays[name] = found
        array = self._arrays[name]
        needed = (max(total, array.shape[0]), *map(max, array.shape[1:], shape))
        if needed != array.shape:
            array.resize(needed)
        return array

    def _stored(self, name: str) -> zarr.Array:
        found: Any = None if self._group is None else self._group[name]
        if not isinstance(found, zarr.Array):
            raise ValueError(f"no array in {self.path}")
        return found

    def _values(self, name: str, row: int) -> np.ndarray:
        """What a row holds: all are read at once, much faster than one by one, unless damaged or large."""
        if name not in self._arrays:
            self._arrays[name] = self._stored(name)
            self._attrs[name] = dict(self._arrays[name].attrs)
        array = self._arrays[name]
        if name not in self._read:
            self._read[name] = None
            if array.nbytes <= MOST_AT_ONCE:
                with contextlib.suppress(Exception):  # then row by row, to see which
                    self._read[name] = np.asarray(array[...])
        found = self._read[name]
        return np.asarray(array[row] if found is None else found[row])

    def read(self, row: int, description: Mapping[str, Any], where: str) -> xr.Dataset:
        """The Dataset of a point.

        Raises:
            Damaged: arrays that are missing, cannot be decoded, or differ from what was written.
        """
        variables = {}
        for name, (dims, shape) in description["variables"].items():
            try:
                values = self._values(name, row)[(*(slice(0, n) for n in shape), ...)]
            except Exception as error:  # whatever zarr and its codecs make of bytes that are not what they were
                raise Damaged(f"{where}: {name} cannot be read ({type(error).__name__}: {error})") from error
            kind = values.dtype.kind
            variables[name] = (dims, values.astype(object) if kind in "OTU" else values, self._attrs[name])
        coords = {name: variables.pop(name) for name in description["coords"]}
        data = xr.Dataset(variables, coords, attrs=description["attrs"])
        found = _description(data)["digests"]
        for name, digest in description["digests"].items():
            if found[name] != digest:
                raise Damaged(f"{where}: {name} is missing or differs from what was written (a damaged chunk)")
        return data


def mend(folder: Path) -> None:
    """Takes away descriptions of arrays that cannot be read: what is written next makes them again."""
    if not (folder / DATA).exists():
        return
    for path in (folder / DATA).rglob("zarr.json"):
        try:
            zarr.open(path.parent, mode="r")
        except OSError:
            raise
        except Exception:
            path.unlink()
    zarr.open_group(folder / DATA, mode="a", zarr_format=3)


def _runs(values: Mapping[int, xr.Variable]) -> list[tuple[int, np.ndarray]]:
    """Values of rows that follow each other and have equal shapes, as one block each."""
    blocks: list[tuple[int, list[np.ndarray]]] = []
    for row in sorted(values):
        own = values[row].values
        if blocks and blocks[-1][0] + len(blocks[-1][1]) == row and blocks[-1][1][0].shape == own.shape:
            blocks[-1][1].append(own)
        else:
            blocks.append((row, [own]))
    return [(start, np.stack(block)) for start, block in blocks]


def _description(data: xr.Dataset) -> dict[str, Any]:
    """Names, dimensions, shapes and digests of the variables, names of coordinates, attributes."""
    return {
        "variables": {str(name): [list(map(str, v.dims)), list(v.shape)] for name, v in data.variables.items()},
        "digests": {str(name): digest_of(v)[:32] for name, v in data.variables.items()},
        "coords": [str(name) for name in data.coords],
        "attrs": {str(name): _text(value) for name, value in data.attrs.items()},
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
