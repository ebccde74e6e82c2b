"""The two forms of the loss per sample (docs/model.md §2)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from sim.data import Tokens
from sim.layer import MultiHeadAttention, combine
from theory._checks import invalid

LOSSES = ("finite", "limit")


def check_loss(loss: str) -> None:
    """Refuses a name that is not a form of the loss."""
    if loss not in LOSSES:
        raise invalid("loss", " or ".join(map(repr, LOSSES)), repr(loss))


def sample_losses(layer: MultiHeadAttention, tokens: Tokens, loss: str = "finite") -> Float[Array, "*batch"]:
    """Loss of each sample: "finite" is ‖f(X) − X_ε‖²/D, "limit" its D → ∞ form Σ_ℓ (a_ℓ − δ_ℓε)².

    The two differ by O(D^-1/2) sample by sample and by O(1/D) in expectation.
    """
    check_loss(loss)
    miss = layer.attention(tokens) - tokens.indicator()
    if loss == "limit":
        return jnp.sum(jnp.square(miss), axis=-1)
    # |ξᵀμ + μ_ε s|², s on F coordinates
    noise = combine(miss, tokens.noise)
    signal = jnp.sum(miss * tokens.indicator(), axis=-1, keepdims=True) * tokens.signal
    cross = jnp.sum((2 * noise[..., : signal.shape[-1]] + signal) * signal, axis=-1)
    return (jnp.sum(jnp.square(noise), axis=-1) + cross) / tokens.dim
