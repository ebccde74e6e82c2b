"""Order parameters: m_hf = k_h·k*_f/D and r_hh' = k_h·k_h'/D."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from theory._checks import invalid, is_concrete, leading_index, positive, real_array, typed_key, whole
from theory._keys import drawn


class OrderParameters(eqx.Module):
    """Overlaps of the heads with the spikes and with each other, with any leading axes.

    Args:
        m: (..., H, F) overlaps with the spikes.
        r: (..., H, H) overlaps between heads, the full ones; ½(r + rᵀ) is stored. r − m mᵀ, the overlap of
            the heads' parts orthogonal to the spikes, must be positive semi-definite to −1e-10·tr r.

    Example:
        >>> import jax
        >>> OrderParameters.initial(jax.random.key(0), heads=4, features=3, dim=1000).r.shape
        (4, 4)
    """

    m: Float[Array, "*batch H F"]
    r: Float[Array, "*batch H H"]

    def __init__(self, m: Any, r: Any):
        m, r = real_array("m", m), real_array("r", r)
        if m.ndim < 2 or m.shape[-2] < 1 or m.shape[-1] < 1:
            raise invalid("m", "shape (..., H, F) with H, F >= 1", m.shape)
        if r.shape != (*m.shape[:-1], m.shape[-2]):
            raise invalid("r", f"shape {(*m.shape[:-1], m.shape[-2])} to match m {m.shape}", r.shape)
        self.m = m
        self.r = (r + jnp.swapaxes(r, -1, -2)) / 2
        if is_concrete(m, r):
            least = np.linalg.eigvalsh(np.asarray(self.r_perp))[..., 0]
            floor = -1e-10 * np.trace(np.asarray(self.r), axis1=-2, axis2=-1)
            if np.any(least < floor):
                raise invalid("r", "r - m mᵀ positive semi-definite", f"least eigenvalue {np.min(least):.3g}")

    @classmethod
    def initial(
        cls,
        key: Key[Array, ""],
        *,
        heads: int,
        features: int,
        dim: int | None,
        variance: Any = 1.0,
        replicas: int | None = None,
    ) -> "OrderParameters":
        """Order parameters of keys k_h ~ N(0, variance·I_D), drawn from their exact law without the keys.

        m ~ N(0, variance/D) and D·r_⊥/variance ~ Wishart_H(D − F). `dim=None` is the limit m = 0,
        r = variance·I. With `replicas`, replica i is drawn with `fold_in(key, i)` and a leading axis is added.
        """
        typed_key("key", key)
        heads, features = whole("heads", heads, 1), whole("features", features, 1)
        variance = positive("variance", variance, 0)
        if dim is None:
            m, r = jnp.zeros((heads, features)), variance * jnp.eye(heads)
            lead = () if replicas is None else (whole("replicas", replicas, 1),)
            return cls(jnp.broadcast_to(m, (*lead, *m.shape)), jnp.broadcast_to(r, (*lead, *r.shape)))
        dim = whole("dim", dim, features + heads)

        def draw(key: Array) -> tuple[Array, Array]:
            key_m, key_normal, key_gamma = jax.random.split(key, 3)
            m = jax.random.normal(key_m, (heads, features), jnp.float64)
            # Bartlett: a lower triangle of normals, chi variables on the diagonal
            freedom = dim - features - jnp.arange(heads, dtype=jnp.float64)
            chi = jnp.sqrt(2 * jax.random.gamma(key_gamma, freedom / 2, dtype=jnp.float64))
            factor = jnp.tril(jax.random.normal(key_normal, (heads, heads), jnp.float64), -1) + jnp.diag(chi)
            return m, m @ m.T + factor @ factor.T

        m, r = drawn(draw, key, replicas)
        return cls(jnp.sqrt(variance / dim) * m, variance / dim * r)

    @property
    def heads(self) -> int:
        """Number H of heads."""
        return self.m.shape[-2]

    @property
    def features(self) -> int:
        """Number F of spikes."""
        return self.m.shape[-1]

    @property
    def r_perp(self) -> Float[Array, "*batch H H"]:
        """r − m mᵀ: overlaps of the heads' parts orthogonal to all spikes."""
        return self.r - self.m @ jnp.swapaxes(self.m, -1, -2)

    def __getitem__(self, index: Any) -> "OrderParameters":
        """The entry (or slice) `index` of the leading axes."""
        if self.m.ndim == 2:
            raise IndexError("these are the order parameters of one state: there is no leading axis to index")
        index = leading_index(index, self.m.shape[0])
        return jax.tree.map(lambda leaf: leaf[index], self)
