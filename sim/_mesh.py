"""Runs on several devices: what `mesh` may be, and how its axes lay out the arrays of a run.

Along "replica" each device runs its own replicas, and none speaks to another. Along "batch" and "dim" the compiler
splits the samples and the dimensions of each replica, and adds the sums over devices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

from sim._lanes import arrays_mapped
from theory._checks import instance, invalid


def check_mesh(mesh: Any, sizes: Mapping[str, Mapping[str, int | None]]) -> Mesh | None:
    """The mesh as it is used, or None without one.

    Args:
        mesh: what the user gave.
        sizes: for each axis that there can be, what it splits: numbers by their names, None for what is not there.

    Raises:
        ValueError: it is no mesh, or an axis is unknown, has no place beside another, splits what is not there, or
            does not divide what it splits.
    """
    if mesh is None:
        return None
    instance("mesh", mesh, Mesh)
    names = mesh.axis_names
    inner = set(names) - {"replica"}
    if not names or not set(names) <= set(sizes) or (inner and "replica" in names):
        others = " and ".join(repr(axis) for axis in sizes if axis != "replica")
        raise invalid("mesh", "one axis 'replica'" + (f", or axes among {others}" if others else ""), f"axes {names}")
    for axis in names:
        for what, size in sizes[axis].items():
            if size is None:
                raise invalid("mesh", f"no axis {axis!r} for a start without {what}", f"axes {names}")
            if size % mesh.shape[axis]:
                raise invalid("mesh", f"an axis {axis!r} whose size divides {what}, {size}", mesh.shape[axis])
    if inner and not getattr(jax.config, "jax_threefry_partitionable"):  # noqa: B009  # unknown to type checkers
        needed = "jax.config.update('jax_threefry_partitionable', True) for axes other than 'replica'"
        raise invalid("mesh", f"{needed}: each device draws its part of the random numbers", "False")
    # whatever the user's own code does with the axes, here the compiler completes the layouts
    return Mesh(mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))


def per_device(mesh: Mesh | None, function: Callable[..., Any], setting: Any) -> Callable[..., Any]:
    """`function(setting, state, ...)` as a function of the state and the rest, with all that is fixed in its place.

    Along "replica" each device is called for its own replicas, the leading axis of `setting.lanes`, of the state and of
    the result. It runs the program that one device runs: the one that the compiler makes for several at once differs in
    the last digit. Calls return before they are done, so that devices work side by side.
    """
    if mesh is None or "replica" not in mesh.axis_names:
        setting = placed(setting, mesh)
        return lambda state, *rest: function(setting, state, *rest)
    whole = NamedSharding(mesh, PartitionSpec("replica"))
    share = setting.lanes.key.size // mesh.size

    def own(i: int, device: Any) -> Any:
        lanes = arrays_mapped(lambda leaf: leaf[i * share : (i + 1) * share], setting.lanes)
        return eqx.filter_shard(eqx.tree_at(lambda s: s.lanes, setting, lanes), SingleDeviceSharding(device))

    settings = [own(i, device) for i, device in enumerate(mesh.devices.flat)]

    def together(*parts: Array) -> Array:
        shape = (mesh.size * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, whole, list(parts))

    def call(state: Any, *rest: Any) -> Any:
        shares = [jax.tree.map(lambda leaf: leaf.addressable_shards[i].data, state) for i in range(mesh.size)]  # noqa: B023
        return jax.tree.map(
            together, *(function(own, share, *rest) for own, share in zip(settings, shares, strict=True))
        )

    return call


def placed(tree: Any, mesh: Mesh | None, *axes: str | None) -> Any:
    """The arrays of a tree on the devices of the mesh, their leading axes split along those of `axes` that it has."""
    return tree if mesh is None else eqx.filter_shard(tree, NamedSharding(mesh, _spec(mesh, axes)))


def layout(mesh: Mesh | None, shape: tuple[int, ...], *axes: str | None) -> NamedSharding | None:
    """How an array inside a step is split, None where devices share none; what an axis does not divide stays whole."""
    if mesh is None or "replica" in mesh.axis_names:
        return None
    fits = [axis if n % mesh.shape.get(axis, 1) == 0 else None for axis, n in zip(axes, shape, strict=True)]
    return NamedSharding(mesh, _spec(mesh, fits))


def _spec(mesh: Mesh, axes: Sequence[str | None]) -> PartitionSpec:
    return PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in axes))
