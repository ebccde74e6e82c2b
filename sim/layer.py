"""The actual multi-head attention layer of docs/model.md §2: keys only, heads averaged, nothing else predicts."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from sim.data import Tokens
from theory import Activation, OrderParameters, Softmax
from theory._checks import invalid, is_concrete, leading_index, positive, typed_key, whole
from theory._keys import drawn


class MultiHeadAttention(eqx.Module):
    """f(X) = Σ_ℓ a_ℓ X_ℓ with a_ℓ = (1/H) Σ_h activation(χ)_hℓ and χ_hℓ = k_h·X_ℓ/√D.

    The spikes are k*_f = √D e_f, along the first F coordinates: no loss of generality, because the noise of the
    tokens is isotropic. Hence m_hf = k_hf/√D.

    Args:
        keys: (..., H, D), float32 or float64, which is also the type of the tokens it is trained on. A leading
            axis holds independent replicas.
        features: number F of spikes.
        activation: an `Activation`, softmax unless given; its numbers are shared by all replicas.

    Raises:
        ValueError: naming the argument that is wrong, what was expected and what came.

    Example:
        >>> import jax
        >>> layer = MultiHeadAttention.initial(jax.random.key(0), heads=4, features=3, dim=1000)
        >>> layer.order().m.shape
        (4, 3)
    """

    keys: Float[Array, "*replicas H D"]
    activation: Activation
    features: int = eqx.field(static=True)

    def __init__(self, keys: Any, *, features: Any, activation: Any = None):
        self.features = whole("features", features, 1)
        self.activation = Softmax() if activation is None else activation
        if not isinstance(self.activation, Activation):
            raise invalid("activation", "an attention activation such as Softmax()", repr(activation))
        try:
            self.keys = jnp.asarray(keys)
        except (TypeError, ValueError) as error:
            raise invalid("keys", "an array of real numbers (..., H, D)", f"{keys!r} ({error})") from error
        if self.keys.ndim < 2 or self.keys.shape[-2] < 1:
            raise invalid("keys", "shape (..., H, D) with H >= 1", self.keys.shape)
        if self.keys.dtype not in (jnp.float32, jnp.float64):
            raise invalid("keys", "float32 or float64", self.keys.dtype)
        self.activation.check_heads(self.heads)
        if self.dim < self.features + self.heads:
            least = f"at least F + H = {self.features + self.heads} dimensions"
            raise invalid("keys", f"{least} for {self.features} features", f"shape {self.keys.shape}")
        if is_concrete(self.keys) and not np.all(np.isfinite(np.asarray(self.keys))):
            raise invalid("keys", "finite numbers", f"{np.sum(~np.isfinite(np.asarray(self.keys)))} that are not")

    @classmethod
    def initial(
        cls,
        key: Key[Array, ""],
        *,
        heads: int,
        features: int,
        dim: int,
        variance: Any = 1.0,
        activation: Any = None,
        replicas: int | None = None,
        dtype: Any = jnp.float32,
    ) -> "MultiHeadAttention":
        """Keys k_h ~ N(0, variance·I_D).

        With `replicas`, replica i is drawn with `fold_in(key, i)` and a leading axis is added: it is the layer
        that `initial(fold_in(key, i), ...)` draws alone.
        """
        typed_key("key", key)
        heads, features = whole("heads", heads, 1), whole("features", features, 1)
        dim = whole("dim", dim, features + heads)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise invalid("dtype", "a floating-point type", dtype)
        scale = jnp.sqrt(positive("variance", variance, 0)).astype(dtype)
        keys = drawn(lambda own: jax.random.normal(own, (heads, dim), dtype), key, replicas)
        return cls(scale * keys, features=features, activation=activation)

    @property
    def heads(self) -> int:
        """Number H of heads."""
        return self.keys.shape[-2]

    @property
    def dim(self) -> int:
        """Number D of dimensions."""
        return self.keys.shape[-1]

    @property
    def replicas(self) -> int | None:
        """Number of replicas, None for a single layer."""
        return None if self.keys.ndim == 2 else self.keys.shape[0]

    def __getitem__(self, replica: int) -> "MultiHeadAttention":
        """One replica as a single layer."""
        if self.replicas is None:
            raise IndexError("this layer is a single one: it has no replica axis to index")
        replica = leading_index(replica, self.replicas)
        return MultiHeadAttention(self.keys[replica], features=self.features, activation=self.activation)

    def scores(self, tokens: Tokens | Float[Array, "*batch L D"]) -> Float[Array, "*batch H L"]:
        """χ_hℓ = k_h·X_ℓ/√D."""
        noise = tokens.noise if isinstance(tokens, Tokens) else tokens
        self._check(noise)
        *batch, length, dim = noise.shape
        # one flat product, highest precision because accelerators would round float32 to fewer digits
        flat = jnp.matmul(noise.reshape(-1, dim), self.keys.T, precision="highest")
        scores = jnp.swapaxes(flat.reshape(*batch, length, self.heads), -1, -2)
        if isinstance(tokens, Tokens):
            reach = jnp.matmul(tokens.signal, self.keys[:, : tokens.signal.shape[-1]].T, precision="highest")
            scores = scores + reach[..., None] * tokens.indicator()[..., None, :]
        return scores / jnp.sqrt(jnp.asarray(dim, scores.dtype))

    def attention(self, tokens: Tokens | Float[Array, "*batch L D"]) -> Float[Array, "*batch L"]:
        """a_ℓ, the weights averaged over heads."""
        scores = self.scores(tokens)
        return jnp.mean(self.resolved_activation().finite(scores), axis=-2)

    def resolved_activation(self) -> Activation:
        """The activation for the norms r_hh of these keys, where it depends on them."""
        return self.activation.resolved(jnp.sum(jnp.square(self.keys), axis=-1) / self.dim)

    def __call__(self, tokens: Tokens | Float[Array, "*batch L D"]) -> Float[Array, "*batch D"]:
        """f(X) = Σ_ℓ a_ℓ X_ℓ."""
        return combine(self.attention(tokens), tokens)

    def order(self) -> OrderParameters:
        """m_hf = k_h·k*_f/D and r_hh' = k_h·k_h'/D, in float64 whatever the keys' type."""
        keys = self.keys.astype(jnp.float64)
        m = keys[..., : self.features] / jnp.sqrt(jnp.asarray(self.dim, jnp.float64))
        return OrderParameters(m, keys @ jnp.swapaxes(keys, -1, -2) / self.dim)

    def _check(self, noise: Array) -> None:
        if self.keys.ndim != 2:
            raise invalid("keys", "one layer (H, D) to apply: index the replica, layer[i]", self.keys.shape)
        if noise.ndim < 2 or noise.shape[-1] != self.dim or noise.dtype != self.keys.dtype:
            raise invalid("tokens", f"{self.keys.dtype} of shape (..., L, {self.dim})", f"{noise.dtype} {noise.shape}")


def combine(weights: Float[Array, "*batch L"], tokens: Tokens | Float[Array, "*batch L D"]) -> Float[Array, "*batch D"]:
    """Σ_ℓ w_ℓ X_ℓ."""
    if not isinstance(tokens, Tokens):
        return jnp.einsum("...l,...ld->...d", weights, tokens, precision="highest")
    noise = jnp.einsum("...l,...ld->...d", weights, tokens.noise, precision="highest")
    on_signal = jnp.sum(weights * tokens.indicator(), axis=-1, keepdims=True)
    return noise + on_signal * tokens.padded_signal()
