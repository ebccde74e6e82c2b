"""What the figures of the limits look at: rows and vectors drawn at random, and the heads of the packaged encoder."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float

from sim.pretrained import Attention, Transformer, load_pretrained, sample_text
from theory._checks import invalid

ISOTROPIC, SHIFTED, ENCODER = "isotropic", "shifted", "encoder"
SYNTHETIC = (ISOTROPIC, SHIFTED)
KINDS = (*SYNTHETIC, ENCODER)
TITLES = {ISOTROPIC: "isotropic x", SHIFTED: "x with a common mean", ENCODER: "MiniLM's heads"}


class Encoder(NamedTuple):
    """The packaged encoder, and its attention on the beginning of the sample text."""

    model: Transformer
    text: str
    attention: Attention

    @classmethod
    def load(cls, length: int) -> "Encoder":
        """Reads it and runs it on L tokens.

        Raises:
            ImportError: saying what to install.
            ValueError: more tokens than it can take.
        """
        model, text = load_pretrained(), sample_text()
        if length > model.window:
            raise invalid("length", f"at most the {model.window} tokens of the encoder", length)
        tokens = model.tokenizer.encode(text, window=length, truncate=True)
        return cls(model, text, model(tokens, logits=True))


def unit_vectors(key: Any, shape: tuple[int, ...], shift: float) -> Float[Array, "..."]:
    """Normal vectors (..., d), `shift` added to each component, then normalized (docs/limits.md §4, the plateau)."""
    x = jax.random.normal(key, shape, jnp.float64) + shift
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def normal_logits(key: Any, shape: tuple[int, ...], spread: Any) -> Float[Array, "..."]:
    """Logits N(0, spread²), rows last; `spread` broadcasts."""
    return spread * jax.random.normal(key, shape, jnp.float64)


def mean_and_error(values: xr.DataArray, dim: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean over a dimension, and its standard error."""
    error = values.std(dim, ddof=1) / np.sqrt(values.sizes[dim])
    return values.mean(dim).values, error.values


def described(text: str, units: str = "1") -> dict[str, str]:
    """Attributes of a labelled variable."""
    return {"long_name": text, "units": units}
