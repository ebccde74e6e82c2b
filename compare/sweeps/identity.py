"""What a point is: its configuration in canonical form, the name that follows from it, and its random key."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from theory import Prior
from theory._checks import invalid
from theory.activation import Activation

_WORDS = 4  # of 32 bits, of a digest, folded into a key


def canonical(name: str, value: Any) -> Any:
    """`value` in the terms of JSON: one spelling for equal values, another for all others.

    Numbers keep every digit; 2 and 2.0 are the same, also as NumPy or JAX numbers; arrays and tuples are lists; the
    order of keys does not matter; priors and activations are their canonical names.

    Raises:
        ValueError: a kind of value that has no such form, or NaN.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Prior | Activation):
        return value.name
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return canonical(name, value.tolist())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            raise invalid(name, "no NaN, which is not equal to itself", value)
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(key): canonical(f"{name}.{key}", value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple | range):
        return [canonical(f"{name}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **canonical(name, fields)}
    kinds = "numbers, text, None, lists, dicts, arrays, priors, activations and dataclasses"
    raise invalid(name, f"{kinds}, which have a canonical form", f"{type(value).__name__}: {value!r}")


def digest(configuration: Any) -> str:
    """The name of what has this canonical form: 64 hexadecimal digits of SHA-256."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()


def point_key(seed: int, words: str, replica: int) -> Key[Array, ""]:
    """The key of one replica of a point: its seed, the digest of its values, and the replica, folded in this order.

    It does not depend on the grid around the point, nor on the number of replicas.
    """
    key = jax.random.key(seed)
    for i in range(_WORDS):
        key = jax.random.fold_in(key, np.uint32(int(words[8 * i : 8 * i + 8], 16)))
    return jax.random.fold_in(key, replica)
