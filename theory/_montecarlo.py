"""Gaussian averages over the scores by sampling, with derivatives by Price's theorem.

∂/∂mean E f = E ∇f and ∂/∂cov E f = ½ E ∇²f hold at singular covariances too, where differentiating a factor of the
covariance would give NaN. The rule averages another integrand over the same draws, so it applies to any order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from theory.scores import Scores

# (args, scores (H, L), signs: one (L,) array per derivative already taken) -> scalar
Integrand = Callable[[Any, Array, tuple[Array, ...]], Array]


def average(
    integrand: Integrand, args: Any, scores: Scores, *, samples: int, key_data: Array
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """E integrand(args, χ) and its standard error; token 0 plays ε. Samples are shared equally by the components."""
    components = scores.weights.shape[0]
    each = -(-samples // components)

    def component(index: Array, mean: Array, signal: Array) -> tuple[Array, Array]:
        key = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key_data), index))
        shape = (int(scores.length), mean.shape[0])
        return _component(integrand, (each, shape), 0, args, mean, signal, scores.noise, key)

    means, variances = jax.lax.map(lambda c: component(*c), (jnp.arange(components), scores.mean, scores.signal))
    error = jnp.sqrt(jnp.sum(jax.lax.stop_gradient(scores.weights**2 * variances) / each))
    return scores.weights @ means, error


def root(covariance: Float[Array, "*batch H H"]) -> Float[Array, "*batch H H"]:
    """The symmetric square root, continuous also where the covariance is singular; not differentiable."""
    values, vectors = jnp.linalg.eigh(jax.lax.stop_gradient(covariance))
    scaled = vectors * jnp.sqrt(jnp.clip(values, 0))[..., None, :]
    return scaled @ jnp.swapaxes(vectors, -1, -2)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _component(
    integrand: Integrand,
    plan: tuple[int, tuple[int, int]],
    level: int,
    args: Any,
    mean: Array,
    signal: Array,
    noise: Array,
    key_data: Array,
) -> tuple[Array, Array]:
    """Mean and variance of the integrand over draws of one mixture component."""
    samples, (length, heads) = plan
    size = max(1, min(samples, 2**19 // (length * heads)))  # a few MB at a time
    root_noise, root_signal = root(noise), root(signal)

    @jax.checkpoint
    def chunk(args: Any, mean: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), index)
        normal = jax.random.normal(key, (size * length * heads,), jnp.float64).reshape(length, heads, size)
        chi = jnp.einsum("hk,lkn->nhl", root_noise, normal)
        chi = chi.at[:, :, 0].set(mean[None] + jnp.einsum("hk,kn->nh", root_signal, normal[0]))
        signs = tuple(
            jax.random.rademacher(jax.random.fold_in(key, 1 + lower), (size, length), jnp.float64)
            for lower in range(level)
        )
        return jax.vmap(lambda x, s: integrand(args, x, s))(chi, signs)

    chunks = -(-samples // size)
    weight = jnp.where(jnp.arange(chunks * size) < samples, 1 / samples, 0.0).reshape(chunks, size)

    def moments(carry: tuple[Array, Array], step: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        values = chunk(args, mean, step[0])
        first = carry[0] + step[1] @ values
        return (first, carry[1] + jax.lax.stop_gradient(step[1] @ values**2)), None

    start = (jnp.zeros(()), jnp.zeros(()))
    (first, second), _ = jax.lax.scan(moments, start, (jnp.arange(chunks), weight))
    return first, jnp.maximum(second - jax.lax.stop_gradient(first) ** 2, 0)


@_component.defjvp
def _component_jvp(integrand, plan, level, primals, tangents):
    args, mean, signal, noise, key_data = primals
    d_args, d_mean, d_signal, d_noise, _ = tangents

    def tangent(both: Any, chi: Array, signs: tuple[Array, ...]) -> Array:
        (args, d_args), d_mean, d_signal, d_noise = both
        inner = lambda a, x: integrand(a, x, signs[:-1])  # noqa: E731
        sign = signs[-1]  # random signs over tokens leave the blocks of the Hessian that belong to one token
        shift = jnp.zeros_like(chi).at[:, 0].set(d_mean)
        slope = jax.jvp(inner, (args, chi), (d_args, shift))[1]
        change = jnp.broadcast_to(d_noise[:, :, None], (*d_noise.shape, chi.shape[-1])).at[:, :, 0].set(d_signal)
        directions = jnp.eye(chi.shape[0])[:, :, None] * sign[None, None, :]
        gradient = jax.grad(inner, argnums=1)
        bend = jax.vmap(lambda d: jax.jvp(lambda x: gradient(args, x), (chi,), (d,))[1])(directions)
        return slope + 0.5 * jnp.sum(bend * change * sign[None, None, :])

    both = ((args, d_args), d_mean, d_signal, d_noise)
    value, variance = _component(integrand, plan, level, args, mean, signal, noise, key_data)
    slope, _ = _component(tangent, plan, level + 1, both, mean, signal, noise, key_data)
    return (value, variance), (slope, jnp.zeros_like(variance))
