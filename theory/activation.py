"""Attention activations: scores of all heads and tokens to attention weights."""

import abc
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory._checks import invalid, positive


class Activation(eqx.Module):
    """σ_hℓ from the scores χ_hℓ; a call takes (..., H, L) and returns the same shape.

    `pairwise` says whether the exact engine applies: heads normalized each on its own, so that the risk is a sum over
    pairs of heads.
    """

    pairwise: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, scores: Float[Array, "*batch H L"]) -> Float[Array, "*batch H L"]:
        """Attention weights."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Canonical name: the call that makes this activation, with every digit."""

    def __str__(self) -> str:
        return self.name


class Softmax(Activation):
    """σ_hℓ = e^{χ_hℓ/T} / Σ_ℓ' e^{χ_hℓ'/T}.

    Args:
        temperature: T > 0, one number or one per head (H,).
    """

    temperature: Float[Array, "..."]
    pairwise: ClassVar[bool] = True

    def __init__(self, temperature: Any = 1.0):
        self.temperature = positive("temperature", temperature, (0, 1))

    def __call__(self, scores: Float[Array, "*batch H L"]) -> Float[Array, "*batch H L"]:
        inverse = self.inverse_temperatures(scores.shape[-2]).astype(scores.dtype)
        return jax.nn.softmax(scores * inverse.reshape((1,) * (scores.ndim - 2) + (-1, 1)), axis=-1)

    def inverse_temperatures(self, heads: int) -> Float[Array, " H"]:
        """1/T of each head."""
        if self.temperature.ndim == 1 and self.temperature.shape != (heads,):
            raise invalid("temperature", f"one number or one per head ({heads},)", self.temperature.shape)
        return jnp.broadcast_to(1 / self.temperature, (heads,))

    @property
    def name(self) -> str:
        return f"Softmax(temperature={np.asarray(self.temperature).tolist()!r})"
