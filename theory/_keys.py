"""Randomness of replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from theory._checks import whole


def drawn(draw: Callable[[jax.Array], Any], key: jax.Array, replicas: int | None) -> Any:
    """`draw(key)`, or `replicas` of it with a leading axis: replica i is `draw(fold_in(key, i))`."""
    if replicas is None:
        return draw(key)
    return jax.vmap(lambda i: draw(jax.random.fold_in(key, i)))(jnp.arange(whole("replicas", replicas, 1)))
