"""GPT-2 and BERT as they are used, without dropout and prediction heads, keeping what their attention computed."""

import abc
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sim.pretrained.attention import Attention
from sim.pretrained.text import TextTokenizer, TokenizedText
from theory import Activation
from theory._checks import instance, invalid, is_concrete

NONLINEARITIES: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


class Linear(eqx.Module):
    """x W + b, of one layer or stacked along the layers."""

    weight: Float[Array, "*layers input output"]
    bias: Float[Array, "*layers output"]

    def __call__(self, x: Float[Array, "L input"]) -> Float[Array, "L output"]:
        return jnp.matmul(x, self.weight, precision="highest") + self.bias[None]


class Norm(eqx.Module):
    """Layer normalization over the coordinates of each token."""

    scale: Float[Array, "*layers d"]
    bias: Float[Array, "*layers d"]
    epsilon: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "L d"]) -> Float[Array, "L d"]:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(centred**2, axis=-1, keepdims=True)
        return centred / jnp.sqrt(variance + self.epsilon) * self.scale[None] + self.bias[None]


class Block(eqx.Module):
    """Parameters of one layer, or of all of them stacked along a leading axis."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    attention_norm: Norm
    expand: Linear
    contract: Linear
    mlp_norm: Norm
    logit_scale: Float[Array, "*layers"]


class Transformer(eqx.Module):
    """A stack of attention layers that returns its attention. Made by `load_pretrained`."""

    token_embedding: eqx.AbstractVar[Float[Array, "vocabulary d"]]
    position_embedding: eqx.AbstractVar[Float[Array, "window d"]]
    blocks: eqx.AbstractVar[Block]
    heads: eqx.AbstractVar[int]
    nonlinearity: eqx.AbstractVar[str]
    tokenizer: eqx.AbstractVar[TextTokenizer]

    @property
    @abc.abstractmethod
    def causal(self) -> bool:
        """Whether tokens look back only."""

    @abc.abstractmethod
    def embed(self, ids: Int[Array, " L"]) -> Float[Array, "L d"]:
        """What the first layer takes in."""

    @abc.abstractmethod
    def layer(
        self, block: Block, x: Float[Array, "L d"], activation: Activation | None
    ) -> tuple[Float[Array, "L d"], tuple[Array, Array, Array]]:
        """One layer: what the next takes in, and (logits, weights, values) of its heads."""

    @abc.abstractmethod
    def finish(self, x: Float[Array, "L d"]) -> Float[Array, "L d"]:
        """The output, from what the last layer gives."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.blocks.logit_scale.shape[0]

    @property
    def dim(self) -> int:
        """Number d of coordinates of a token."""
        return self.token_embedding.shape[1]

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return self.token_embedding.shape[0]

    @property
    def window(self) -> int:
        """Most tokens of a text."""
        return self.position_embedding.shape[0]

    def tokenize(self, text: Any, *, truncate: Any = False) -> TokenizedText:
        """Ids of the tokens of a text, marks of beginning and end included where the model has them, and their names.

        Args:
            text: what the model reads.
            truncate: whether to leave out what is beyond the model's window instead of refusing the text.

        Raises:
            ValueError: if the text has no tokens, or too many.

        Example:
            >>> from sim.pretrained import load_pretrained
            >>> load_pretrained().tokenize("Attention heads").strings
            ('[CLS]', 'attention', 'heads', '[SEP]')
        """
        return self.tokenizer.encode(text, window=self.window, truncate=truncate)

    def __call__(self, tokens: Any, *, activation: Any = None, logits: Any = False) -> Attention:
        """Attention on one text; compiled once for each length, so that no token is padding.

        Memory is that of the result: 4·layers·heads·L² bytes of weights in float32 (600 MB for the smallest GPT-2 at
        L = 1024), and as much for the logits.

        Args:
            tokens: what `tokenize` returned, or ids (L,).
            activation: an attention activation that takes the place of softmax in every layer, hence what later
                layers see changes too. Parameters per head are those of the heads of every layer.
            logits: whether to keep the logits.

        Raises:
            ValueError: naming the argument that is wrong, what was expected and what came.

        Example:
            >>> from sim.pretrained import load_pretrained
            >>> model = load_pretrained()
            >>> attention = model(model.tokenize("Attention heads"), logits=True)
            >>> print(attention)
            bidirectional attention of 6 layers of 12 heads on 4 tokens
            >>> attention.weights.shape, attention.hidden.shape
            ((6, 12, 4, 4), (7, 4, 384))
        """
        instance("logits", logits, bool)
        if activation is not None:
            instance("activation", activation, Activation)
            activation.check_heads(self.heads)
        return _run(self, self._ids(tokens), activation, logits)

    def _ids(self, tokens: Any) -> Int[Array, " L"]:
        """Checked ids: an index out of range would silently read another token."""
        if isinstance(tokens, str):
            raise invalid("tokens", "ids: call `tokenize` first", repr(tokens))
        given = tokens.ids if isinstance(tokens, TokenizedText) else tokens
        ids = given if isinstance(given, jax.Array) else np.asarray(given)
        if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.ndim != 1:
            raise invalid("tokens", "whole numbers (L,)", f"shape {ids.shape} of {ids.dtype}")
        if not 1 <= ids.shape[0] <= self.window:
            raise invalid("tokens", f"1 to {self.window} of them", f"{ids.shape[0]}")
        if is_concrete(ids) and not np.all((np.asarray(ids) >= 0) & (np.asarray(ids) < self.vocabulary)):
            raise invalid("tokens", f"ids from 0 to {self.vocabulary - 1}", np.asarray(ids).tolist())
        return jnp.asarray(ids, jnp.int32)


class GPT2(Transformer):
    """GPT-2: causal, normalized before attention and before the two-layer perceptron."""

    token_embedding: Float[Array, "vocabulary d"]
    position_embedding: Float[Array, "window d"]
    blocks: Block
    final_norm: Norm
    heads: int = eqx.field(static=True)
    nonlinearity: str = eqx.field(static=True)
    tokenizer: TextTokenizer = eqx.field(static=True)

    @property
    def causal(self) -> bool:
        """Yes."""
        return True

    def embed(self, ids: Int[Array, " L"]) -> Float[Array, "L d"]:
        """Token and position."""
        return self.token_embedding[ids] + self.position_embedding[: ids.shape[0]]

    def layer(
        self, block: Block, x: Float[Array, "L d"], activation: Activation | None
    ) -> tuple[Float[Array, "L d"], tuple[Array, Array, Array]]:
        """Adds attention, then the perceptron, each of normalized tokens."""
        mixed, kept = _attend(block, block.attention_norm(x), self.heads, self.causal, activation)
        x = x + mixed
        return x + _perceptron(block, block.mlp_norm(x), self.nonlinearity), kept

    def finish(self, x: Float[Array, "L d"]) -> Float[Array, "L d"]:
        """The final normalization."""
        return self.final_norm(x)


class Bert(Transformer):
    """BERT's encoder: bidirectional, normalized after attention and after the two-layer perceptron.

    A text is one segment: all tokens have type 0.
    """

    token_embedding: Float[Array, "vocabulary d"]
    position_embedding: Float[Array, "window d"]
    type_embedding: Float[Array, "types d"]
    embedding_norm: Norm
    blocks: Block
    heads: int = eqx.field(static=True)
    nonlinearity: str = eqx.field(static=True)
    tokenizer: TextTokenizer = eqx.field(static=True)

    @property
    def causal(self) -> bool:
        """No."""
        return False

    def embed(self, ids: Int[Array, " L"]) -> Float[Array, "L d"]:
        """Token, type and position, normalized."""
        summed = self.token_embedding[ids] + self.type_embedding[:1] + self.position_embedding[: ids.shape[0]]
        return self.embedding_norm(summed)

    def layer(
        self, block: Block, x: Float[Array, "L d"], activation: Activation | None
    ) -> tuple[Float[Array, "L d"], tuple[Array, Array, Array]]:
        """Adds attention and normalizes, then the same with the perceptron."""
        mixed, kept = _attend(block, x, self.heads, self.causal, activation)
        x = block.attention_norm(x + mixed)
        return block.mlp_norm(x + _perceptron(block, x, self.nonlinearity)), kept

    def finish(self, x: Float[Array, "L d"]) -> Float[Array, "L d"]:
        """Nothing follows the last layer."""
        return x


@eqx.filter_jit
def _run(model: Transformer, ids: Int[Array, " L"], activation: Activation | None, keep_logits: bool) -> Attention:
    """The layers as one scan: the time of compiling does not grow with their number."""

    def step(x: Array, block: Block) -> tuple[Array, tuple[Array, Array, Array, Array | None]]:
        following, (logits, weights, values) = model.layer(block, x, activation)
        return following, (x, weights, values, logits if keep_logits else None)

    last, (inputs, weights, values, logits) = jax.lax.scan(step, model.embed(ids), model.blocks)
    hidden = jnp.concatenate([inputs, model.finish(last)[None]])
    mask = _mask(ids.shape[0], model.causal)
    return Attention(ids, hidden, weights, values, logits, mask, model.causal)


def _mask(length: int, causal: bool) -> Bool[Array, "L L"]:
    """Where each query may look."""
    everywhere = jnp.ones((length, length), bool)
    return jnp.tril(everywhere) if causal else everywhere


def _attend(
    block: Block, x: Float[Array, "L d"], heads: int, causal: bool, activation: Activation | None
) -> tuple[Float[Array, "L d"], tuple[Array, Array, Array]]:
    """All heads of a layer: what they add up to, and (logits, weights, values)."""
    length = x.shape[0]
    query, key, value = (
        jnp.swapaxes(linear(x).reshape(length, heads, -1), 0, 1) for linear in (block.query, block.key, block.value)
    )
    scores = jnp.einsum("hqc,hkc->hqk", query, key, precision="highest") * block.logit_scale
    mask = _mask(length, causal)
    logits = jnp.where(mask[None], scores, -jnp.inf)
    if activation is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        rows = jnp.swapaxes(scores, 0, 1)  # an activation sees the heads of one query side by side
        where = {"where": jnp.broadcast_to(mask[:, None], rows.shape)} if causal else {}
        weights = jnp.swapaxes(activation(rows, **where), 0, 1)
    mixed = jnp.einsum("hqk,hkc->qhc", weights, value, precision="highest").reshape(length, -1)
    return block.output(mixed), (logits, weights, value)


def _perceptron(block: Block, x: Float[Array, "L d"], nonlinearity: str) -> Float[Array, "L d"]:
    """Two linear maps with a nonlinearity between them, token by token."""
    return block.contract(NONLINEARITIES[nonlinearity](block.expand(x)))
