"""The joint law of the heads' scores: Gaussian per token once ε and the mixture component of θ are given."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from theory.order import OrderParameters
from theory.task import SingleLocation


class Scores(NamedTuple):
    """Scores χ_hℓ, independent over tokens: N(0, noise) for ℓ≠ε, Σ_c w_c N(mean_c, signal_c) for ℓ=ε."""

    weights: Float[Array, " C"]
    mean: Float[Array, "C H"]
    signal: Float[Array, "C H H"]
    noise: Float[Array, "H H"]
    length: Any  # L, which only enters formulas: it may be traced


def score_law(task: SingleLocation, order: OrderParameters) -> Scores:
    """mean_c = √ν m μ_c, signal_c = r + ν m Σ_c mᵀ, noise = r (docs/model.md §3)."""
    prior, m = task.prior, order.m
    r = (order.r + order.r.T) / 2
    # √ν has no derivative at ν = 0, where the risk is even in √ν only if the prior is: leave that to the caller
    mean = jnp.sqrt(task.snr) * prior.means @ m.T
    signal = r[None] + task.snr * jnp.einsum("hf,cfg,kg->chk", m, prior.covariances, m)
    return Scores(prior.weights, mean, signal, r, task.length)
