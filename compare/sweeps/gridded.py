"""The points of a sweep as one Dataset: a dimension for each swept name, then replica, then the run's own.

*Ragged.* Points differ in their own sizes when H, F or the records are swept: entries that a point does not have are
NaN ("" for text), and `<dimension>_mask` is true where they exist, along the swept names that its size depends on.
Own coordinates that agree wherever they overlap label their dimension; others become a variable
`<dimension>_label`, and the dimension counts from 0. Whole numbers and booleans become float64 where something is
missing.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

MISSING, DONE, FAILED = 0, 1, 2
_STATES = {"done": DONE, "failed": FAILED}
OURS = {
    "status": "0 missing, 1 done, 2 failed",
    "failure": "why a point failed",
}


class Entry(NamedTuple):
    """What is known of a point that ended; `place` is its index along each swept name, and its replica."""

    place: tuple[int, ...]
    data: xr.Dataset | None
    state: str
    failure: str


def gridded(
    labels: Mapping[str, Sequence[Any]], replicas: int | None, entries: Sequence[Entry], attrs: Mapping[str, Any]
) -> xr.Dataset:
    """The Dataset of a grid; places without an entry are missing.

    Args:
        labels: values of each swept name.
        replicas: their number, None for no such dimension.
        entries: of the points that ended; `place` has the replica last, 0 if there is no such dimension.
        attrs: of the whole.
    """
    lead = tuple(labels) if replicas is None else (*labels, "replica")
    sizes = (*(len(values) for values in labels.values()), replicas or 1)[: len(lead)]
    entries = [entry._replace(place=entry.place[: len(lead)]) for entry in entries]
    found = [entry for entry in entries if entry.data is not None]
    out: dict[str, Any] = {
        "status": (lead, np.full(sizes, MISSING, np.int8)),
        "failure": (lead, np.full(sizes, "", object)),
    }
    for entry in entries:
        out["status"][1][entry.place] = _STATES[entry.state]
        out["failure"][1][entry.place] = entry.failure
    out = {name: (dims, values, {"long_name": OURS[name]}) for name, (dims, values) in out.items()}

    own_sizes: dict[str, int] = {}
    for entry in found:
        for dim, size in _data(entry).sizes.items():
            own_sizes[str(dim)] = max(size, own_sizes.get(str(dim), 0))
    coords: dict[str, Any] = {name: _coordinate(values) for name, values in labels.items()}
    for dim in own_sizes:
        label = _common_label(dim, own_sizes[dim], [_data(entry) for entry in found])
        if label is not None:
            coords[dim] = (dim, *label)
        else:
            coords[dim] = (dim, np.arange(own_sizes[dim]))
            values = [(e.place, _data(e)[dim].variable) for e in found if dim in _data(e).coords]
            out[f"{dim}_label"] = _filled(lead, sizes, own_sizes, values)
        out |= _mask(dim, lead, sizes, own_sizes[dim], found)
    for name in dict.fromkeys(str(name) for entry in found for name in _data(entry).data_vars):
        values = [(e.place, _data(e)[name].variable) for e in found if name in _data(e)]
        out[name] = _filled(lead, sizes, own_sizes, values)
    if replicas is not None:
        coords["replica"] = np.arange(replicas)
    return xr.Dataset(out, coords, attrs=dict(attrs))


def _data(entry: Entry) -> xr.Dataset:
    assert entry.data is not None
    return entry.data


def _coordinate(values: Sequence[Any]) -> np.ndarray:
    """Numbers as numbers; as text if there is any text among them, or if they were not all different as numbers."""
    if not any(isinstance(value, str) for value in values):
        numbers = np.array(values)
        if len({*numbers.tolist()}) == len(values):
            return numbers
    return np.array([str(value) for value in values], object)


def _common_label(dim: str, size: int, points: Sequence[xr.Dataset]) -> tuple[np.ndarray, dict[str, Any]] | None:
    """The longest of the coordinates if the others are its beginnings."""
    own = [data.coords[dim].variable for data in points if dim in data.sizes and dim in data.coords]
    if not own:
        return np.arange(size), {}
    longest = max(own, key=lambda variable: variable.size)
    if any(not np.array_equal(v.values, longest.values[: v.size]) for v in own):
        return None
    if longest.size < size or sum(dim in data.sizes for data in points) > len(own):
        return None  # some have none
    return longest.values, dict(longest.attrs)


def _mask(dim: str, lead: Sequence[str], sizes: Sequence[int], size: int, found: Sequence[Entry]) -> dict[str, Any]:
    """Where the entries of a dimension exist, if points differ in that."""
    counts = np.full(sizes, -1)
    for entry in found:
        counts[entry.place] = _data(entry).sizes.get(dim, 0)
    if set(counts[counts >= 0].tolist()) == {size}:
        return {}
    names, known = list(lead), np.where(counts < 0, np.nan, counts)
    for name in lead:  # along which it does not change
        axis = names.index(name)
        few, many = (np.where(np.isnan(known), fill, known) for fill in (np.inf, -np.inf))
        low, high = few.min(axis=axis), many.max(axis=axis)
        if np.all((low == high) | (low > high)):
            known = np.where(low > high, np.nan, high)
            names.remove(name)
    exists = np.arange(size) < np.where(np.isnan(known), 0, known)[..., None]
    return {f"{dim}_mask": ((*names, dim), exists, {"long_name": f"where {dim} exists"})}


def _filled(
    lead: Sequence[str],
    sizes: Sequence[int],
    own: Mapping[str, int],
    values: Sequence[tuple[tuple[int, ...], xr.Variable]],
) -> Any:
    """One variable over the grid."""
    dims = values[0][1].dims
    shape = tuple(own[str(dim)] for dim in dims)
    everywhere = len(values) == np.prod(sizes) and all(variable.shape == shape for _, variable in values)
    dtype = np.result_type(*(v.dtype for _, v in values))
    if not everywhere and dtype.kind in "iub":
        dtype = np.dtype(np.float64)
    full = np.full((*sizes, *shape), {"O": "", "f": np.nan, "c": np.nan}.get(dtype.kind, 0), dtype)
    for place, variable in values:
        full[(*place, *(slice(0, n) for n in variable.shape))] = variable.values
    return (*lead, *map(str, dims)), full, {k: v for k, v in values[0][1].attrs.items()}


def configuration_text(base: Mapping[str, Any], labels: Mapping[str, Sequence[Any]]) -> str:
    """What made a swept Dataset, as JSON."""
    return json.dumps({**base, "grid": {name: list(values) for name, values in labels.items()}})
