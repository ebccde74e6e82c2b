"""What a run may return, as the Dataset of one point."""

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import xarray as xr

from theory import Result, Trajectory
from theory._checks import invalid

_KINDS = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_, "c": np.complex128}
NUMBER = "value"  # the variable of a run that returns one number


class Interrupted(Exception):
    """The user stopped the run of a point; it counts as not run."""


def dataset_of(result: Any) -> tuple[xr.Dataset, str]:
    """The Dataset of a point, and why it counts as failed ("" if it does not).

    Args:
        result: a Trajectory or what has one as `trajectory`, a Dataset or what has `to_xarray`, a number, an array, or
            a dict of numbers and arrays.

    Raises:
        Interrupted: a trajectory that the user stopped.
        ValueError: anything else.
    """
    failure, run = "", getattr(result, "trajectory", result)
    if isinstance(run, Trajectory):
        codes = sorted({int(code) for code in np.asarray(run.result).ravel()} - {int(Result.successful)})
        if int(Result.interrupted) in codes:
            raise Interrupted
        failure = "; ".join(Result(code).message for code in codes)
    if not isinstance(result, xr.Dataset) and hasattr(result, "to_xarray"):
        result = result.to_xarray()
    if isinstance(result, xr.DataArray):
        result = result.to_dataset(name=result.name or NUMBER)
    if not isinstance(result, xr.Dataset):
        named = result if isinstance(result, Mapping) else {NUMBER: result}
        if named and all(type(value) is float for value in named.values()):
            numbers = {name: np.asarray(value) for name, value in named.items()}
            return _of_numbers(tuple(named)).copy(data=numbers), failure
        result = xr.Dataset({name: _variable(str(name), value) for name, value in named.items()})
    _check_names(result)
    return plain(result), failure


@lru_cache
def _of_numbers(names: tuple[Any, ...]) -> xr.Dataset:
    """A Dataset of numbers by these names: a copy of one takes an eighth of the time that a new one does."""
    data = xr.Dataset({name: ((), 0.0) for name in names})
    _check_names(data)
    return data


def _check_names(data: xr.Dataset) -> None:
    for name in (*data.variables, *data.dims):
        if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
            raise invalid("run", "names of variables that are text, without '/'", repr(name))


def plain(data: xr.Dataset) -> xr.Dataset:
    """Loaded, coordinates of the dimensions kept, in the few types that a store has: float64, int64, bool, text."""
    data, inner = data.load(), [name for name in data.coords if name not in data.dims]
    if not inner and all(variable.dtype in _KINDS.values() for variable in data.variables.values()):
        return data
    data = data.reset_coords(inner)
    return data.map(_typed, keep_attrs=True).assign_coords({dim: _typed(data[dim]) for dim in data.coords})


def conflict(known: dict[str, Any], data: xr.Dataset, taken: Collection[str]) -> str:
    """Why the Dataset of a point cannot stand beside those of others, "" if it can; `known` then knows it too.

    Args:
        known: dimensions and type of each variable so far.
        data: of the point.
        taken: names that are not the run's to use.
    """
    for name in (*data.variables, *data.dims):
        if name in taken:
            return f"the run returns {name!r}, a name that the sweep itself uses"
    kinds = {str(name): (variable.dims, str(variable.dtype)) for name, variable in data.variables.items()}
    for name, kind in kinds.items():
        if known.get(name, kind) != kind:
            (dims, dtype), (other_dims, other) = kind, known[name]
            return f"{name} is {dtype} with dimensions {dims}, at other points {other} with {other_dims}"
    known |= kinds
    return ""


def _typed(array: xr.DataArray) -> xr.DataArray:
    kind = array.dtype.kind
    if kind in _KINDS:
        return array.astype(_KINDS[kind])
    if kind in "OUST":
        return array.astype(str).astype(object)
    raise invalid(str(array.name), "numbers, booleans or text", array.dtype)


def _variable(name: str, value: Any) -> tuple[tuple[str, ...], np.ndarray]:
    """A number, or an array whose axes are called by the variable's name and their number."""
    if isinstance(value, bool | int):
        value = float(value)  # so that 1 beside .5 is no other type
    array = np.asarray(value)
    if array.dtype.kind not in (*_KINDS, "U"):
        expected = "a Trajectory, a Dataset, numbers, arrays or a dict of them"
        raise invalid("run", f"{expected} as what it returns", f"{type(value).__name__} for {name}")
    return tuple(f"{name}_{axis}" for axis in range(array.ndim)), array
