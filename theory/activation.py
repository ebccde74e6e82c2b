"""Attention activations: scores of all heads and tokens to attention weights."""

import abc
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from theory._checks import instance, invalid, is_concrete, positive, real_array
from theory._rows import Mask, beside, lowered, per_head, unmasked, zeroed


class HeadForm(NamedTuple):
    """What the exact engine needs of heads that are normalized each on its own: σ = c e^{βχ}/(e^b + Σ e^{βχ})."""

    inverse_temperature: Float[Array, " H"]
    sink: Float[Array, " H"] | None  # b; None where no e^b stands in the normalizer
    scale: Float[Array, " H"]


class Activation(eqx.Module):
    """σ_hℓ from the scores χ_hℓ; a call takes (..., H, L) and returns the same shape.

    `trained` names the leaves that are trained: they are order parameters like m and r.

    Tokens that `where` (booleans that broadcast to the scores) excludes, or whose score is −∞, are masked: their weight
    and its derivatives are 0, and they do not count in the length of their row. A row that is all masked is zeros.
    Where rows are normalized each on its own and the numbers are shared by all heads, (L,) is a row as well.
    """

    trained: eqx.AbstractVar[tuple[str, ...]]

    @abc.abstractmethod
    def __call__(self, scores: Float[Array, "*batch L"], where: Mask = None) -> Float[Array, "*batch L"]:
        """Attention weights, 0 where masked."""

    def finite(self, scores: Float[Array, "*batch L"]) -> Float[Array, "*batch L"]:
        """Attention weights of scores known to be finite, none masked: the same, with nothing spent on masks."""
        return self(scores)

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Canonical name: the call that makes this activation, with every digit."""

    @property
    def twice_differentiable(self) -> bool:
        """Whether second derivatives at almost all scores say all: no kinks, no jumps (docs/limits.md §1)."""
        return True

    def resolved(self, norms: Float[Array, " H"]) -> "Activation":
        """This activation for heads with r_hh = norms, where it depends on them."""
        del norms
        return self

    def check_heads(self, heads: int) -> None:
        """Refuses parameters that are neither one number nor one per head."""
        for path, leaf in jax.tree.leaves_with_path(self):
            if leaf.ndim > 1 or (leaf.ndim == 1 and leaf.shape != (heads,)):
                raise invalid(path[0].name, f"one number or one per head ({heads},)", f"shape {leaf.shape}")

    def split(self) -> tuple["Activation", "Activation"]:
        """(trained leaves, the rest), to be put together by `eqx.combine`."""
        marked: PyTree = jax.tree.map_with_path(lambda path, _: path[0].name in self.trained, self)
        return eqx.partition(self, marked)

    def __str__(self) -> str:
        return self.name


class HeadNormalized(Activation):
    """Heads normalized each on its own: the exact risk is then a sum over pairs of heads."""

    @abc.abstractmethod
    def head_form(self, heads: int) -> HeadForm:
        """The numbers of each head."""


class Softmax(HeadNormalized):
    """σ_hℓ = e^{χ_hℓ/T} / Σ_ℓ' e^{χ_hℓ'/T}.

    Args:
        temperature: T > 0, one number or one per head (H,).
    """

    temperature: Float[Array, "..."]
    trained: tuple[str, ...] = eqx.field(static=True, default=())

    def __init__(self, temperature: Any = 1.0):
        self.temperature = positive("temperature", temperature, (0, 1))
        self.trained = ()

    def __call__(self, scores: Float[Array, "*batch L"], where: Mask = None) -> Float[Array, "*batch L"]:
        keep = unmasked(scores, where)
        return zeroed(self.finite(lowered(scores, keep)), keep)

    def finite(self, scores: Float[Array, "*batch L"]) -> Float[Array, "*batch L"]:
        """Softmax alone."""
        return jax.nn.softmax(scores / beside("temperature", self.temperature, scores), axis=-1)

    def head_form(self, heads: int) -> HeadForm:
        """β = 1/T, no sink."""
        temperature = per_head("temperature", self.temperature, heads)
        return HeadForm(1 / temperature, None, jnp.ones(heads))

    @property
    def name(self) -> str:
        return f"Softmax(temperature={numbers(self.temperature)})"


class Softmax1(HeadNormalized):
    """σ_hℓ = c_h e^{χ_hℓ} / (e^{b_h} + Σ_ℓ' e^{χ_hℓ'}): a head whose scores stay far below b_h falls silent.

    b = 0, c = 1 is the "off by one" softmax. Because heads are averaged, the useful scale is c ≈ H.

    Args:
        bias: b, one number shared by all heads or one per head (H,).
        scale: c, likewise.
        trained: True if bias and scale are trained, or "bias" or "scale" if one of them is.
    """

    bias: Float[Array, "..."]
    scale: Float[Array, "..."]
    trained: tuple[str, ...] = eqx.field(static=True)

    def __init__(self, bias: Any = 0.0, scale: Any = 1.0, trained: bool | str = False):
        self.bias, self.scale = real_array("bias", bias, (0, 1)), real_array("scale", scale, (0, 1))
        choices = {False: (), True: ("bias", "scale"), "bias": ("bias",), "scale": ("scale",)}
        if not isinstance(trained, (bool, str)) or trained not in choices:
            raise invalid("trained", "True, False, 'bias' or 'scale'", repr(trained))
        self.trained = choices[trained]

    def __call__(self, scores: Float[Array, "*batch L"], where: Mask = None) -> Float[Array, "*batch L"]:
        keep = unmasked(scores, where)
        return zeroed(self.finite(lowered(scores, keep)), keep)

    def finite(self, scores: Float[Array, "*batch L"]) -> Float[Array, "*batch L"]:
        """Softmax with a sink alone."""
        sink = jnp.broadcast_to(beside("bias", self.bias, scores), (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([sink, scores], axis=-1), axis=-1)[..., 1:]
        return weights * beside("scale", self.scale, scores)

    def head_form(self, heads: int) -> HeadForm:
        """β = 1, sink b, scale c."""
        return HeadForm(jnp.ones(heads), per_head("bias", self.bias, heads), per_head("scale", self.scale, heads))

    @property
    def name(self) -> str:
        trained = {(): "False", ("bias", "scale"): "True"}.get(self.trained, repr("".join(self.trained)))
        return f"Softmax1(bias={numbers(self.bias)}, scale={numbers(self.scale)}, trained={trained})"


class BayesSoftmax(Activation):
    """σ_hℓ = H e^{χ_hℓ − b_h} / Σ_h'ℓ' e^{χ_h'ℓ' − b_h'}: one normalizer, so the others' scores can silence a head.

    With one head per support point of a discrete prior and the right biases it is the posterior of the informative
    token (docs/model.md §10).

    Args:
        bias: b, one number shared by all heads (it then cancels) or one per head (H,); or "norm" for the
            self-consistent b_h = r_hh/2 − log w_h, which follows the keys, gradients included.
        trained: whether the bias is trained.
        weights: w_h > 0 of "norm", one per head; 1/H unless given.
    """

    bias: Float[Array, "..."] | None  # None is "norm"
    weights: Float[Array, " H"] | None
    trained: tuple[str, ...] = eqx.field(static=True)

    def __init__(self, bias: Any = 0.0, trained: bool = False, weights: Any = None):
        instance("trained", trained, bool)
        if isinstance(bias, str):
            if bias != "norm":
                raise invalid("bias", "numbers or 'norm'", repr(bias))
            if trained:
                raise invalid("trained", "False with bias='norm', which follows the keys", trained)
            self.bias = None
            self.weights = None if weights is None else positive("weights", weights, 1)
        else:
            if weights is not None:
                raise invalid("weights", "None unless bias='norm'", weights)
            self.bias, self.weights = real_array("bias", bias, (0, 1)), None
        self.trained = ("bias",) if trained else ()

    def __call__(self, scores: Float[Array, "*batch H L"], where: Mask = None) -> Float[Array, "*batch H L"]:
        keep = unmasked(scores, where)
        return zeroed(self.finite(lowered(scores, keep, (-2, -1))), keep)

    def finite(self, scores: Float[Array, "*batch H L"]) -> Float[Array, "*batch H L"]:
        """Softmax over heads and tokens alone."""
        if self.bias is None:
            raise invalid("bias", "numbers: bias='norm' needs the norms of the heads, see `resolved`", "'norm'")
        shifted = scores - beside("bias", self.bias, scores)
        return jax.nn.softmax(shifted, axis=(-2, -1)) * scores.shape[-2]

    def resolved(self, norms: Float[Array, " H"]) -> "BayesSoftmax":
        """b_h = r_hh/2 − log w_h for bias="norm"; unchanged otherwise."""
        if self.bias is not None:
            return self
        heads = norms.shape[-1]
        weights = jnp.full(heads, 1 / heads) if self.weights is None else per_head("weights", self.weights, heads)
        return BayesSoftmax(norms / 2 - jnp.log(weights).astype(norms.dtype))

    def biases(self, heads: int) -> Float[Array, " H"]:
        """b of each head, once it is resolved."""
        assert self.bias is not None
        return per_head("bias", self.bias, heads)

    @property
    def name(self) -> str:
        if self.bias is None:
            weights = "None" if self.weights is None else numbers(self.weights)
            return f"BayesSoftmax(bias='norm', weights={weights})"
        return f"BayesSoftmax(bias={numbers(self.bias)}, trained={bool(self.trained)})"


def numbers(value: Any) -> str:
    """One number or nested lists, with every digit."""
    return repr(np.asarray(value).tolist()) if is_concrete(value) else "traced"
