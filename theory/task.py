"""The single-location task."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from theory._checks import invalid, is_concrete, non_negative, whole
from theory.prior import Prior


class SingleLocation(eqx.Module):
    """L tokens X_ℓ = ξ_ℓ + 1[ℓ=ε] √(ν/D) Σ_f θ_f k*_f, ξ_ℓ ~ N(0, I_D), ε uniform; the target is X_ε.

    Args:
        length: number L ≥ 2 of tokens.
        snr: signal-to-noise ratio ν ≥ 0.
        prior: law P_θ of the spikes' weights.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=10, snr=1.0, prior=th.sign_flips([2, 0], [0, 2.5]))
        >>> task.features
        2
    """

    length: Any  # a Python int, or an array when the theory is swept over L
    snr: Float[Array, ""]
    prior: Prior

    def __init__(self, length: Any, snr: Any, prior: Prior):
        if not isinstance(prior, Prior):
            raise invalid("prior", "a prior (sign_flips, one_hot, gaussian, discrete, GaussianMixture)", repr(prior))
        if not isinstance(length, jax.Array):
            length = whole("length", length, 2)
        elif length.shape != () or not jnp.issubdtype(length.dtype, jnp.integer):
            raise invalid("length", "one whole number >= 2", f"{length.dtype} of shape {length.shape}")
        elif is_concrete(length):
            whole("length", int(length), 2)
        self.length = length
        self.snr = non_negative("snr", snr, 0)
        self.prior = prior

    @property
    def features(self) -> int:
        """Number F of spikes."""
        return self.prior.features

    def configuration(self) -> dict[str, Any]:
        """The task in plain numbers and canonical names, exact."""
        return {"length": int(self.length), "snr": self.snr.tolist(), "prior": self.prior.name}
