"""Lanes: the runs that one compiled call advances, replicas of one task or points of a sweep.

They share shapes and what is static; every array may differ. A tree "of lanes" is one in which each array has them as
its leading axis, and what is no array (the length of a task) is the same for all.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from theory import SingleLocation
from theory._checks import invalid


class Lane(eqx.Module):
    """What a run has for itself and no step changes."""

    key: Key[Array, "*lanes"]
    task: SingleLocation
    rest: Any  # the layer or the activation without its trained leaves


def repeated(tree: Any, count: int) -> Any:
    """The tree of so many lanes that are equal."""
    return arrays_mapped(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)


def stacked(trees: Sequence[Any]) -> Any:
    """The tree of lanes that are `alike`."""
    return arrays_mapped(lambda *leaves: _stack(leaves), *trees)


def _stack(leaves: Sequence[Array]) -> Array:
    """In NumPy: compiled, a stack of many takes long."""
    if jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
        data = _stack([jax.random.key_data(key) for key in leaves])
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaves[0]))
    return jnp.array(np.stack([np.asarray(leaf) for leaf in leaves]))


def arrays_mapped(function: Any, *trees: Any) -> Any:
    """`jax.tree.map` over the arrays; what is none stays as the first tree has it."""
    return jax.tree.map(lambda *leaves: function(*leaves) if eqx.is_array(leaves[0]) else leaves[0], *trees)


def check_alike(name: str, values: Sequence[Any]) -> None:
    """Refuses values that differ in more than the numbers of their arrays."""
    shapes = [arrays_mapped(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), value) for value in values]
    for i, shape in enumerate(shapes):
        if not eqx.tree_equal(shape, shapes[0]):
            first, own = (eqx.tree_pformat(value, width=10**4) for value in (values[0], values[i]))
            raise invalid(f"{name}[{i}]", f"the structure of {name}[0], {first}", own)
