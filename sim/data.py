"""Tokens of the single-location task: independent normals plus a rank-one signal, never a D×D object.

The noise is isotropic, so nothing depends on the orientation of the spikes: they are taken along the first F
coordinates, k*_f = √D e_f, and √(ν/D) Σ_f θ_f k*_f = √ν θ on those coordinates. The signal is therefore kept as
F numbers beside the noise, and the large array is written once.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int, Key

from sim._normals import normals
from theory import SingleLocation
from theory._checks import instance, invalid, typed_key, whole


class Tokens(eqx.Module):
    """Samples X_ℓ = ξ_ℓ + 1[ℓ=ε] s, s on the first F coordinates (docs/model.md §1).

    Attributes:
        noise: ξ, (..., L, D).
        position: ε, (...).
        signal: s = √ν θ, (..., F).
    """

    noise: Float[Array, "*batch L D"]
    position: Int[Array, "*batch"]
    signal: Float[Array, "*batch F"]

    @property
    def length(self) -> int:
        """Number L of tokens."""
        return self.noise.shape[-2]

    @property
    def dim(self) -> int:
        """Number D of dimensions."""
        return self.noise.shape[-1]

    def indicator(self) -> Float[Array, "*batch L"]:
        """δ_ℓε."""
        return jax.nn.one_hot(self.position, self.length, dtype=self.noise.dtype)

    def padded_signal(self) -> Float[Array, "*batch D"]:
        """s as a vector of R^D."""
        blank = [(0, 0)] * (self.signal.ndim - 1)
        return jnp.pad(self.signal, [*blank, (0, self.dim - self.signal.shape[-1])])

    def materialize(self) -> Float[Array, "*batch L D"]:
        """The tokens X themselves, a second array as large as the noise."""
        return self.noise + self.indicator()[..., None] * self.padded_signal()[..., None, :]


def draw_tokens(
    task: SingleLocation,
    key: Key[Array, ""],
    count: int,
    *,
    dim: int,
    dtype: Any = jnp.float32,
    sharding: Sharding | None = None,
) -> Tokens:
    """Independent samples of the task.

    Args:
        task: the task.
        key: a typed key.
        count: number of samples, the leading axis.
        dim: number D of dimensions, at least F.
        dtype: of noise and signal.
        sharding: of the noise (count, L, D), each device drawing its own part; the numbers are the same without.

    Raises:
        ValueError: naming the argument that is out of range.

    Example:
        >>> import jax
        >>> from theory import SingleLocation, sign_flips
        >>> task = SingleLocation(length=5, snr=4.0, prior=sign_flips([1.0], [1.0]))
        >>> draw_tokens(task, jax.random.key(0), 3, dim=100).materialize().shape
        (3, 5, 100)
    """
    instance("task", task, SingleLocation)
    typed_key("key", key)
    count, dim = whole("count", count, 1), whole("dim", dim, task.features)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise invalid("dtype", "a floating-point type", dtype)
    key_noise, key_position, key_prior = jax.random.split(key, 3)
    shape = (count, task.length, dim)
    noise = normals(key_noise, shape, dtype, axis=1, sharding=sharding)
    position = jax.random.randint(key_position, (count,), 0, task.length)
    signal = jnp.sqrt(task.snr).astype(dtype) * task.prior.sample(key_prior, count, dtype)
    return Tokens(noise, position, signal)
