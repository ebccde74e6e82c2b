"""Increments of single SGD samples in (trained leaves, m, r), and these as flat vectors (docs/model.md §15)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory._montecarlo import root
from theory.activation import Activation
from theory.fit import State
from theory.order import OrderParameters
from theory.risk import loss_limit
from theory.task import SingleLocation


def increments(
    task: SingleLocation, rest: Activation, state: State, rates: dict[str, Array], points: Float[Array, "L K N"]
) -> tuple[Float[Array, "C N P"], Float[Array, " C"]]:
    """ξ of single samples on the given points (K = F + H) for every mixture component, and the components' weights.

    Flat coordinates of −κ ∂ℓ/∂b, −Σ_ℓ g_hℓ u_fℓ and −Σ_ℓ (g_hℓ χ_h'ℓ + χ_hℓ g_h'ℓ) + (η/B) Σ_ℓ g_hℓ g_h'ℓ, g = ∂ℓ/∂χ.
    A bias that follows the norm r_hh adds −2 (∂ℓ/∂r_hh) k_h to the step of k_h.
    """
    trained, order = state
    m, r, features = order.m, order.r, order.features
    norms = jnp.diagonal(r)

    def loss(trained: Activation, norms: Array, chi: Array) -> Array:
        return loss_limit(eqx.combine(trained, rest).resolved(norms), chi)

    def one(chi: Array, u: Array) -> Array:
        by_trained, by_norm, g = jax.grad(loss, argnums=(0, 1, 2))(trained, norms, chi)
        own = jax.tree.map_with_path(lambda path, leaf: -rates[f"{path[0].name}_rate"] * leaf, by_trained)
        along = -(g @ chi.T) - 2 * by_norm[:, None] * r
        return flat_of(
            (own, order_of(-(g @ u) - 2 * by_norm[:, None] * m, along + along.T + rates["step_size"] * g @ g.T))
        )

    def component(mean: Array, covariance: Array) -> Array:
        u = points[:, :features]
        spread = root(jnp.eye(features) + task.snr * covariance)
        u = u.at[0].set(jnp.sqrt(task.snr) * mean[:, None] + spread @ u[0])
        chi = jnp.einsum("hf,lfn->hln", m, u) + jnp.einsum("hk,lkn->hln", root(order.r_perp), points[:, features:])
        return jax.vmap(one, in_axes=-1)(chi, u)

    prior = task.prior
    return jax.lax.map(lambda c: component(*c), (prior.means, prior.covariances)), prior.weights


def flat_of(state: State) -> Float[Array, " N"]:
    """(Trained leaves, m, upper triangle of r) as one vector."""
    trained, order = state
    upper = np.triu_indices(order.heads)
    return jnp.concatenate(
        [*(leaf.reshape(-1) for leaf in jax.tree.leaves(trained)), order.m.reshape(-1), order.r[upper]]
    )


def order_of(m: Array, r: Array) -> OrderParameters:
    """Order parameters, or changes of them, without checks."""
    return eqx.tree_at(lambda o: (o.m, o.r), OrderParameters(jnp.zeros(m.shape), jnp.zeros(r.shape)), (m, r))


def shaped(flat: Array, like: State) -> State:
    """The inverse of `flat_of`."""
    trained, order = like
    start, leaves = 0, []
    for leaf in jax.tree.leaves(trained):
        leaves.append(flat[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    m = flat[start : start + order.m.size].reshape(order.m.shape)
    return jax.tree.unflatten(jax.tree.structure(trained), leaves), order_of(
        m, square(flat[start + m.size :], order.heads)
    )


def square(upper: Any, heads: int) -> Any:
    """Symmetric matrices (..., H, H) from their upper triangles (..., H(H+1)/2)."""
    index = np.zeros((heads, heads), int)
    index[np.triu_indices(heads)] = np.arange(heads * (heads + 1) // 2)
    return upper[..., np.maximum(index, index.T)]
