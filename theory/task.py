"""The single-location task."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float

from theory._checks import invalid, non_negative, whole
from theory.prior import Prior


class SingleLocation(eqx.Module):
    """L tokens X_ℓ = ξ_ℓ + 1[ℓ=ε] √(ν/D) Σ_f θ_f k*_f, ξ_ℓ ~ N(0, I_D), ε uniform; the target is X_ε.

    Args:
        length: number L ≥ 2 of tokens.
        snr: signal-to-noise ratio ν ≥ 0.
        prior: law P_θ of the spikes' weights.
    """

    length: Any  # a Python int, or an array when the theory is swept over L
    snr: Float[Array, ""]
    prior: Prior

    def __init__(self, length: Any, snr: Any, prior: Prior):
        if not isinstance(prior, Prior):
            raise invalid("prior", "a prior (sign_flips, one_hot, gaussian, discrete, GaussianMixture)", repr(prior))
        self.length = length if isinstance(length, jax.Array) else whole("length", length, 2)
        self.snr = non_negative("snr", snr, 0)
        self.prior = prior

    @property
    def features(self) -> int:
        """Number F of spikes."""
        return self.prior.features

    def configuration(self) -> dict[str, Any]:
        """The task in plain numbers and canonical names, exact."""
        return {"length": int(self.length), "snr": self.snr.tolist(), "prior": self.prior.name}
