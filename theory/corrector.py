"""The finite-step corrector: E Σ_ℓ g_hℓ g_h'ℓ, g = ∂ℓ/∂χ, which a step of η/D adds to dr/dτ (docs/model.md §4)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from theory._montecarlo import root
from theory.activation import Activation
from theory.risk import loss_limit
from theory.scores import Scores


def gradient_covariance(activation: Activation, scores: Scores, points: Float[Array, "L H N"]) -> Float[Array, "H H"]:
    """E Σ_ℓ g_hℓ g_h'ℓ of the loss Σ_ℓ (δ_ℓε − a_ℓ)², on the given points for every mixture component.

    A product of up to six attention weights of four heads: no two-head formula exists. On fixed points the result
    is a continuous function of the state.
    """
    noise = jnp.einsum("hk,lkn->hln", root(scores.noise), points)

    def component(mean: Array, signal: Array) -> Array:
        chi = noise.at[:, 0].set(mean[:, None] + root(signal) @ points[0])
        gradient = jax.vmap(jax.grad(lambda x: loss_limit(activation, x)), in_axes=-1, out_axes=-1)(chi)
        return jnp.einsum("hln,kln->hk", gradient, gradient) / points.shape[-1]

    parts = jax.lax.map(lambda c: component(*c), (scores.mean, scores.signal))
    return jnp.einsum("c,chk->hk", scores.weights, parts)
