"""The finite-step corrector: E Σ_ℓ g_hℓ g_h'ℓ, g = ∂ℓ/∂χ, which a step of η/D adds to dr/dτ (docs/model.md §4)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.special import ndtri
from scipy.stats import qmc

from theory._montecarlo import root
from theory.activation import Activation
from theory.risk import loss_limit
from theory.scores import Scores

_MOST_SOBOL = 21201  # dimensions SciPy has direction numbers for


def normal_points(samples: int, length: int, heads: int, seed: int) -> Float[np.ndarray, "L H N"]:
    """Standard normal points that fill space evenly: scrambled Sobol, plain draws beyond its dimensions."""
    if length * heads > _MOST_SOBOL:
        return np.random.default_rng(seed).standard_normal((length, heads, samples))
    sobol = qmc.Sobol(length * heads, scramble=True, rng=np.random.default_rng(seed))
    uniform = sobol.random_base2(int(np.ceil(np.log2(samples))))
    return ndtri(np.clip(uniform, 2.0**-53, 1 - 2.0**-53)).T.reshape(length, heads, -1)


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
