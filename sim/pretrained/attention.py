"""What a transformer computed on one text: attention of every head, and the vectors it averages."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Bool, Float, Int

from theory._checks import instance, invalid

KINDS = ("inputs", "embeddings", "values")


class Attention(eqx.Module):
    """Hidden states and attention of all layers and heads on one text of L tokens.

    The output of head h of a layer at token i is Σ_j weights[layer, h, i, j] values[layer, h, j].

    Attributes:
        tokens: ids (L,).
        hidden: (layers + 1, L, d). hidden[0] are the embeddings, positions included; hidden[n] is what layer n takes
            in. The last one is the model's output, after the final normalization where the model has one.
        weights: attention weights (layers, heads, query, key).
        values: the value vector of each token (layers, heads, L, d/heads).
        logits: q·k/√(d/heads) before the normalizer, −∞ where the query may not look; None unless asked for.
        mask: (query, key), where the query may look.
        causal: whether tokens look back only.
    """

    tokens: Int[Array, " L"]
    hidden: Float[Array, "depth L d"]
    weights: Float[Array, "layers heads L L"]
    values: Float[Array, "layers heads L width"]
    logits: Float[Array, "layers heads L L"] | None
    mask: Bool[Array, "L L"]
    causal: bool = eqx.field(static=True)

    def to_xarray(self) -> xr.Dataset:
        """Labelled arrays: dimensions layer, head, query, key, depth (0 … layers), component."""
        variables = {
            "token": ("key", self.tokens),
            "hidden": (("depth", "key", "coordinate"), self.hidden),
            "weights": (("layer", "head", "query", "key"), self.weights),
            "values": (("layer", "head", "key", "component"), self.values),
            "mask": (("query", "key"), self.mask),
        }
        if self.logits is not None:
            variables["logits"] = (("layer", "head", "query", "key"), self.logits)
        arrays = {name: (dims, np.asarray(data)) for name, (dims, data) in variables.items()}
        return xr.Dataset(arrays, attrs={"causal": int(self.causal)})

    def __str__(self) -> str:
        layers, heads, length, _ = self.weights.shape
        kind = "causal" if self.causal else "bidirectional"
        return f"{kind} attention of {layers} layers of {heads} heads on {length} tokens"


def vectors(
    attention: Attention, kind: Any = "inputs", *, normalize: Any = False
) -> Float[Array, "layers_or_1 heads_or_1 L components"]:
    """The vectors x_i that attention averages (docs/limits.md §3), with axes that go with those of the weights.

    Args:
        attention: what the model returned.
        kind: "inputs", what each layer takes in, (layers, 1, L, d); "embeddings", what the first layer takes in,
            (1, 1, L, d); "values", the value vectors of each head, (layers, heads, L, d/heads).
        normalize: whether to divide each by its Euclidean norm; a zero vector stays zero.

    Raises:
        ValueError: naming the argument that is wrong, what was expected and what came.

    Example:
        >>> from sim.pretrained import load_pretrained, vectors
        >>> model = load_pretrained()
        >>> attention = model(model.tokenize("To be, or not to be."))
        >>> vectors(attention, "values", normalize=True).shape
        (6, 12, 10, 32)
    """
    instance("attention", attention, Attention)
    instance("normalize", normalize, bool)
    if not isinstance(kind, str) or kind not in KINDS:
        raise invalid("kind", " or ".join(map(repr, KINDS)), repr(kind))
    if kind == "values":
        chosen = attention.values
    else:
        chosen = attention.hidden[:-1, None] if kind == "inputs" else attention.hidden[:1, None]
    if not normalize:
        return chosen
    square = jnp.sum(chosen**2, axis=-1, keepdims=True)
    # the inner choice keeps the derivative of the root finite at zero
    return jnp.where(square > 0, chosen / jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
