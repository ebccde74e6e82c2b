"""Gaussian averages over the scores by sampling, with derivatives by Price's theorem.

∂/∂mean E f = E ∇f and ∂/∂cov E f = ½ E ∇²f hold at singular covariances too, where differentiating a factor of the
covariance would give NaN. The rule averages another integrand over the same draws, so it applies to any order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from theory.scores import Scores

# (args, scores (H, L), signs: one (L,) array per derivative already taken) -> scalar, of derivatives (M,)
Integrand = Callable[[Any, Array, tuple[Array, ...]], Array]
_NULL = 1e-7  # of the largest standard deviation: what is below counts as 0 in derivatives of a root


def average(
    integrand: Integrand, args: Any, scores: Scores, *, samples: int, key_data: Array
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """E integrand(args, χ) and its standard error; token 0 plays ε. Samples are shared equally by the components."""
    components = scores.weights.shape[0]
    each = -(-samples // components)

    shape = (int(scores.length), scores.mean.shape[-1])
    arrays = (args, scores.mean, scores.signal, scores.noise)
    means, variances = _averages(integrand, (each, shape), 0, *arrays, key_data)
    error = jnp.sqrt(jnp.sum(jax.lax.stop_gradient(scores.weights**2 * variances) / each))
    return scores.weights @ means, error


@jax.custom_jvp
def root(covariance: Float[Array, "*batch H H"]) -> Float[Array, "*batch H H"]:
    """The symmetric square root, continuous also where the covariance is singular.

    Its derivative is that of the Sylvester equation R dR + dR R = dC; zero within the null space, where there is none.
    """
    values, vectors = jnp.linalg.eigh(covariance)
    return (vectors * jnp.sqrt(jnp.clip(values, 0))[..., None, :]) @ jnp.swapaxes(vectors, -1, -2)


@root.defjvp
def _root_jvp(primals, tangents):
    values, vectors = jnp.linalg.eigh(primals[0])
    back = jnp.swapaxes(vectors, -1, -2)
    scale = jnp.sqrt(jnp.clip(values, 0))
    both = scale[..., :, None] + scale[..., None, :]
    null = both <= _NULL * jnp.max(both, axis=(-2, -1), keepdims=True)
    change = jnp.where(null, 0.0, back @ tangents[0] @ vectors / jnp.where(null, 1.0, both))
    return root(primals[0]), vectors @ change @ back


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _averages(
    integrand: Integrand,
    plan: tuple[int, tuple[int, int]],
    level: int,
    args: Any,
    mean: Float[Array, "C H"],
    signal: Float[Array, "C H H"],
    noise: Float[Array, "H H"],
    key_data: Array,
) -> tuple[Array, Array]:
    """Mean and variance (C, ...) of the integrand over draws of each mixture component."""

    def one(component: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        index, mean, signal = component
        key = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key_data), index))
        return _component(integrand, plan, level, args, mean, signal, noise, key)

    return jax.lax.map(one, (jnp.arange(mean.shape[0]), mean, signal))


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

    shape = jax.eval_shape(chunk, args, mean, jnp.zeros((), jnp.int32)).shape[1:]

    def moments(carry: tuple[Array, Array], step: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        values = chunk(args, mean, step[0])
        first = carry[0] + step[1] @ values
        return (first, carry[1] + jax.lax.stop_gradient(step[1] @ values**2)), None

    start = (jnp.zeros(shape), jnp.zeros(shape))
    (first, second), _ = jax.lax.scan(moments, start, (jnp.arange(chunks), weight))
    return first, jnp.maximum(second - jax.lax.stop_gradient(first) ** 2, 0)


@_averages.defjvp
def _averages_jvp(integrand, plan, level, primals, tangents):
    args, mean, signal, noise, key_data = primals

    def slopes(args: Any, chi: Array, signs: tuple[Array, ...]) -> Array:
        """∂ in the arguments, the mean, and ½∇² of token 0 and of the others, for every output of the integrand."""
        inner = lambda a, x: jnp.atleast_1d(integrand(a, x, signs[:-1]))  # noqa: E731
        sign = signs[-1]  # random signs over tokens leave the blocks of the Hessian that belong to one token
        by_args, by_chi = jax.jacrev(inner, argnums=(0, 1))(args, chi)
        directions = jnp.eye(chi.shape[0])[:, :, None] * sign[None, None, :]
        along = lambda d: jax.jvp(lambda x: jax.jacrev(inner, argnums=1)(args, x), (chi,), (d,))[1]  # noqa: E731
        bend = jax.vmap(along, out_axes=1)(directions) * sign[None, None, None] / 2  # (M, H, H, L)
        parts = (by_args, by_chi[..., 0], bend[..., 0], jnp.sum(bend[..., 1:], -1))
        return jax.vmap(lambda part: ravel_pytree(part)[0])(parts).reshape(-1)

    value, variance = _averages(integrand, plan, level, args, mean, signal, noise, key_data)
    slope, _ = _averages(slopes, plan, level + 1, args, mean, signal, noise, key_data)
    d_args, d_mean, d_signal, d_noise, _ = tangents
    direction = jax.vmap(lambda m, s: ravel_pytree((d_args, m, s, d_noise))[0])(d_mean, d_signal)
    change = jnp.sum(
        slope.reshape(*value.shape, -1) * direction.reshape(-1, *[1] * (value.ndim - 1), direction.shape[-1]), -1
    )
    return (value, variance), (change, jnp.zeros_like(variance))
