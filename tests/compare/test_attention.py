"""Reports and experiments on attention, against plain loops in NumPy, by what must hold, and on a real encoder."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import ks_2samp

import theory as th
from compare import (
    attention_report,
    critical_against_length,
    distance_against_length,
    distance_against_selected,
    gradient_against_temperature,
    separability_against_selected,
)
from sim.pretrained import load_pretrained, sample_text, vectors
from sim.pretrained.attention import Attention
from theory.limits import critical_count

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "sim" / "fixtures"
BOOK = sample_text()
QUIET = {"progress": False}


def attention_of(*, causal: bool, layers=2, heads=3, length=24, dim=5, width=4) -> Attention:
    """Softmax of random logits, and random vectors of unequal norms."""
    rng = np.random.default_rng(5)
    mask = np.tril(np.ones((length, length), bool)) if causal else np.ones((length, length), bool)
    logits = np.where(mask, 2 * rng.normal(size=(layers, heads, length, length)), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return Attention(
        jnp.arange(length, dtype=jnp.int32),
        jnp.asarray(1 + rng.normal(size=(layers + 1, length, dim))),
        jnp.asarray(weights / weights.sum(-1, keepdims=True)),
        jnp.asarray(rng.normal(size=(layers, heads, length, width))),
        jnp.asarray(logits),
        jnp.asarray(mask),
        causal,
    )


def loops(attention: Attention, kind: str, normalize: bool, count: str, n: int, rows) -> dict[str, np.ndarray]:
    """Every quantity of the report from its definition, head by head, row by row, token by token."""
    weights = np.asarray(attention.weights)
    layers, heads, length, _ = weights.shape
    names = ("entropy", "effective_support", "participation", "top_weight", "distance", "distance_bound",
             "distance_bound_printed", "expected", "expected_printed", "distance_per_token", "context_norm",
             "selected_weight", "distinguishable", "radius", "jacobian_norm", "jacobian_bound")  # fmt: skip
    found = {name: np.zeros((layers, heads)) for name in names}
    number = 0
    for layer in range(layers):
        for head in range(heads):
            x = {
                "inputs": attention.hidden[layer], "embeddings": attention.hidden[0],
                "values": attention.values[layer, head],
            }[kind]  # fmt: skip
            x = np.asarray(x)
            x = x / np.linalg.norm(x, axis=-1, keepdims=True) if normalize else x
            number = 0
            for row in rows:
                own = np.flatnonzero(np.asarray(attention.mask)[row]) if count == "own" else np.arange(length)
                if len(own) <= n:
                    continue
                number += 1
                alpha = weights[layer, head, row]
                top = set(sorted(own, key=lambda i: -alpha[i])[:n])
                out = [i for i in own if i not in top]
                s = sum(alpha[i] * x[i] for i in top)
                far = {i: np.linalg.norm(s - alpha[i] * x[i]) for i in own}
                total = sum(alpha[i] for i in top)
                reach = max(np.linalg.norm(x[i] - x[j]) for i in out for j in top)
                gaps = sum(abs(total - alpha[i]) for i in out)
                largest = max(np.linalg.norm(x[j]) for j in top)
                size, p = len(own), n / (len(own) - 1)
                y = {i: alpha[i] * x[i] for i in own}
                every = sum(y.values())
                radius = min(far[i] for i in out)
                a = alpha[alpha > 0]
                values = (
                    -np.sum(a * np.log(a)), np.exp(-np.sum(a * np.log(a))), 1 / np.sum(a**2), a.max(),
                    sum(far[i] for i in out), (1 - total) * reach + largest * gaps,
                    (1 - total) * reach + largest * np.sqrt(gaps),
                    (size - n) / size * sum(np.linalg.norm(y[i] - p * (every - y[i])) for i in own),
                    (size - n) / size * sum(np.linalg.norm(y[i] - (every - y[i])) for i in own),
                    sum(far[i] for i in out) / len(out), np.linalg.norm(s), total,
                    sum(far[i] < radius for i in top) / n, radius,
                    np.linalg.norm(np.diag(alpha) - np.outer(alpha, alpha), 2), 2 * np.max(alpha * (1 - alpha)),
                )  # fmt: skip
                for name, value in zip(names, values, strict=True):
                    found[name][layer, head] += value
    return {name: values / number for name, values in found.items()} | {"number": np.array(number)}


@pytest.mark.parametrize(
    ("kind", "causal", "count", "normalize", "rows"),
    [
        ("inputs", False, "own", True, None),
        ("values", True, "own", False, None),
        ("embeddings", True, "all", True, np.int64(7)),
    ],
)
def test_report_is_what_plain_loops_give(kind, causal, count, normalize, rows):
    attention = attention_of(causal=causal)
    options = {"vectors": kind, "count": count, "normalize": normalize, "rows": rows}
    report = attention_report(attention, selected=np.int64(6), **options, **QUIET)
    chosen = range(24) if rows is None else [2, 5, 9, 12, 16, 19, 23]  # the last row is always among them
    expected = loops(attention, kind, normalize, count, 6, chosen)
    assert report.attrs["averaged_rows"] == expected.pop("number")
    assert report.attrs["query_rows"] == len(chosen)
    for name, values in expected.items():
        np.testing.assert_allclose(report[name], values, rtol=1e-9, err_msg=name)
    assert not report["saturated"].any()  # N = 6 says nothing
    assert np.isfinite(report["critical_count"])  # 6 heads are enough for the test
    assert np.isnan(report["layer_critical_count"]).all()  # the 3 of a layer are not


def test_experiments_are_reports_of_their_points():
    attention = attention_of(causal=True)
    against = distance_against_selected(attention, counts=[3, 11], **QUIET)
    apart = separability_against_selected(attention, counts=[3, 11], **QUIET)
    for n in (3, 11):
        report = attention_report(attention, selected=n, critical=False, **QUIET)
        for data in (against, apart):
            shared = set(data) & set(report)
            assert len(shared) >= 2
            for name in shared:
                np.testing.assert_allclose(data[name].sel(selected=n), report[name], rtol=1e-9, err_msg=str(name))
    assert against.attrs["averaged_rows"] == [21, 13]  # causal rows of more than N tokens
    assert (against.distance <= against.distance_bound).all()


def test_bounds_of_separability_by_loops():
    """M, d and δ as they are meant: the sharp and printed forms written out for each row."""
    attention = attention_of(causal=False, layers=1, heads=2)
    found = separability_against_selected(attention, counts=[4], normalize=False, **QUIET)
    x = np.asarray(attention.hidden[0])
    between = np.linalg.norm(x[:, None] - x[None], axis=-1)
    delta, norm2 = np.min(between[~np.eye(24, dtype=bool)]), np.mean(np.sum(x**2, axis=-1))
    for head in range(2):
        sums = np.zeros(4)
        for alpha in np.asarray(attention.weights)[0, head]:
            top = np.argsort(-alpha)[:4]
            s = alpha[top] @ x[top]
            r = min(np.linalg.norm(s - alpha[i] * x[i]) for i in range(24) if i not in top)
            for i in top:
                rest = np.array([alpha[j] for j in top if j != i])
                v2 = norm2 * np.sum(rest**2)
                kappa = 2 / 5 * v2**2 / ((r**2 - v2) ** 2 + 2 / 5 * v2**2)
                xi2 = norm2 * rest.sum() ** 2 - delta**2 / 2 * (rest.sum() ** 2 - np.sum(rest**2))
                xi = np.sqrt(max(xi2, 0))
                inside = r**2 > v2
                terms = (1 - kappa if inside else 0, 1 if inside else kappa, 1 - xi / r,
                         np.exp(-((xi - r) ** 2) / (2 * norm2)))  # fmt: skip
                sums += np.array(terms) / 4 / 24
        for name, value in zip(("lower", "upper", "lower_printed", "upper_printed"), sums, strict=True):
            np.testing.assert_allclose(found[name][0, head, 0], value, rtol=1e-9, err_msg=name)


def test_gradients_stay_below_the_spectral_norm_found_three_ways():
    attention = attention_of(causal=True)
    found = gradient_against_temperature(attention, temperatures=[0.1, 1.0], key=jax.random.key(1), **QUIET)
    assert found.power_converged.all()
    np.testing.assert_allclose(found.power, found.norm, rtol=1e-3)
    logits = np.asarray(attention.logits)
    for i, t in enumerate((0.1, 1.0)):
        alpha = np.exp((logits - logits.max(-1, keepdims=True)) / t)
        alpha /= alpha.sum(-1, keepdims=True)
        jacobian = (alpha[..., None] * np.eye(24) - alpha[..., None] * alpha[..., None, :]) / t
        norms = np.linalg.norm(jacobian[:, :, 1:], 2, axis=(-2, -1))  # the first row has one token
        np.testing.assert_allclose(found.norm[..., i], norms.max(-1), rtol=1e-9)
        np.testing.assert_allclose(found.norm_mean[..., i], norms.mean(-1), rtol=1e-9)
        assert (found.gradient[..., i, 0] <= found.norm[..., i] * 1.01).all()  # ε = 0.001, of first order in ε/T
    assert (found.gradient <= found.gradient_bound * (1 + 1e-9)).all()
    assert (found.gradient_mean <= found.gradient).all()
    assert found.attrs["averaged_rows"] == 23
    again = gradient_against_temperature(attention, temperatures=[1.0], key=jax.random.key(1), **QUIET)
    np.testing.assert_allclose(again.gradient[:, :, 0], found.gradient[:, :, 1], rtol=1e-12)  # the same directions


@pytest.fixture(scope="module")
def small():
    return {name: load_pretrained(FIXTURES / name, dtype=jnp.float64) for name in ("gpt2", "bert")}


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_texts_are_cut_and_read_anew(small, name):
    model = small[name]
    text = str(np.load(FIXTURES / name / "expected.npz")["text"])
    tokens = model.tokenize(text)
    length = len(tokens.ids)
    short = length - 4
    found = distance_against_length(model, text, selected=2, lengths=[short, length], **QUIET)
    whole = attention_report(model(tokens), selected=2, critical=False, **QUIET)
    np.testing.assert_allclose(found.distance.sel(length=length), whole.distance, rtol=1e-9)
    ids = tokens.ids[:short].copy()
    if name == "bert":
        ids[-1] = tokens.ids[-1]  # the mark of the end stays
    cut = attention_report(model(ids), selected=2, critical=False, **QUIET)
    np.testing.assert_allclose(found.distance.sel(length=short), cut.distance, rtol=1e-9)
    if name == "gpt2":  # of a causal model the beginning is the same whatever follows
        before, after = model(ids), model(tokens)
        np.testing.assert_allclose(before.weights, after.weights[..., :short, :short], rtol=1e-9)


def test_own_length_and_all_tokens_differ_by_the_masked_ones(small):
    """A masked token lies at distance ‖s‖: with all tokens counted d̃ grows by (L − own length)‖s‖ in every row."""
    model = small["gpt2"]
    attention = model(model.tokenize(str(np.load(FIXTURES / "gpt2" / "expected.npz")["text"])))
    length = attention.weights.shape[-1]
    options = {"selected": 3, "critical": False, **QUIET}
    for row in (3, length - 2):  # of one row alone the mean is its value
        own, every = (attention_report(attention, count=count, rows=[row], **options) for count in ("own", "all"))
        grown = own.distance + (length - row - 1) * own.context_norm
        np.testing.assert_allclose(every.distance, grown, rtol=1e-9)
        np.testing.assert_allclose(every.entropy, own.entropy, rtol=1e-12)


def test_critical_counts_by_the_test_of_scipy(small):
    model = small["gpt2"]
    text = str(np.load(FIXTURES / "gpt2" / "expected.npz")["text"])
    length = len(model.tokenize(text).ids)
    found = critical_against_length(model, text, lengths=[length], level=0.05, **QUIET)
    data = distance_against_selected(model(model.tokenize(text)), counts=range(1, length), **QUIET)
    samples = (data[name].values.reshape(-1, length - 1).T for name in ("distance", "expected_printed"))
    p = [ks_2samp(*pair, method="exact").pvalue for pair in zip(*samples, strict=True)]
    np.testing.assert_allclose(found.p_value[0], p[: found.sizes["selected"]], rtol=1e-6)
    assert found.critical_count[0] == 1 + next(i for i, value in enumerate(p) if value >= 0.05)
    assert found.ratio[0] == found.critical_count[0] / length


def test_critical_counts_of_layers_are_sought_beyond_that_of_all_heads():
    """Of all heads the test is settled at N = 2; the last layer, of broad attention, at 117."""
    attention = attention_of(causal=False, layers=3, heads=6, length=132)
    logits = attention.logits * jnp.array([3.0, 3.0, 0.3])[:, None, None, None]
    attention = eqx.tree_at(lambda a: a.weights, attention, jax.nn.softmax(logits))
    report = attention_report(attention, selected=4, rows=[50, 131], **QUIET)
    x = vectors(attention, "inputs", normalize=True)
    own = [critical_count(attention.weights[layer][:, [50, 131]], x[layer, 0]).count for layer in range(3)]
    assert report.layer_critical_count.values.tolist() == own
    assert report.critical_count < 64 < own[-1]
    assert report.attrs["least_heads"] == 5


def test_models_of_few_heads_have_no_critical_count(small):
    model = small["bert"]  # 4 heads
    text = str(np.load(FIXTURES / "bert" / "expected.npz")["text"])
    found = critical_against_length(model, text, **QUIET)
    assert np.isnan(found.critical_count).all()
    assert found.attrs["least_heads"] > model.layers * model.heads


# --- a real encoder ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoded():
    model = load_pretrained()
    return model(model.tokenize(BOOK, truncate=True), logits=True)


@pytest.fixture(scope="module")
def report(encoded):
    return attention_report(encoded, rows=32, **QUIET)


def test_report_of_the_sentence_encoder(encoded, report):
    """32 of the 512 rows; where a number is recorded, its tolerance covers rounding of float32 alone."""
    np.testing.assert_allclose(np.asarray(encoded.weights).sum(-1), 1, rtol=0, atol=1e-5)
    assert dict(report.sizes) == {"layer": 6, "head": 12}
    rows = (np.arange(1, 33) * 512) // 32 - 1
    weights = np.asarray(encoded.weights, float)[:, :, rows]
    np.testing.assert_allclose(report.top_weight, weights.max(-1).mean(-1), rtol=1e-5)
    ranked = -np.sort(-weights, axis=-1)
    np.testing.assert_allclose(report.selected_weight, ranked[..., :20].sum(-1).mean(-1), rtol=1e-5)
    np.testing.assert_allclose(report.participation, (1 / (weights**2).sum(-1)).mean(-1), rtol=1e-5)
    layer, head = 2, 7
    x = np.asarray(vectors(encoded, "inputs", normalize=True), float)[layer, 0]
    measured = []
    for alpha in weights[layer, head]:
        top = np.argsort(-alpha, kind="stable")[:20]
        out = np.setdiff1d(np.arange(512), top)
        measured.append(np.linalg.norm(alpha[top] @ x[top] - alpha[out, None] * x[out], axis=-1).sum())
    np.testing.assert_allclose(report.distance[layer, head], np.mean(measured), rtol=1e-4)
    assert (report.distance <= report.distance_bound).all()
    assert (report.distance > report.distance_bound_printed).any()  # which is false
    assert (report.jacobian_norm <= report.jacobian_bound).all()
    assert (report.saturated == (report.distinguishable >= 0.7)).all()
    np.testing.assert_allclose(
        report.distance_per_token, report.context_norm, rtol=0.15
    )  # what the two-sided bound says


def test_critical_count_of_the_sentence_encoder(report):
    """Far above 0.06 L: heads attend to a quarter of the text and more, and d̃ ≈ (L−N)‖s‖ meets the printed
    expectation, (L−N) times the norm of the whole context, only where A is near 1. Between the median effective
    support and the largest it does for most heads.
    """
    critical = float(report.critical_count)
    assert float(report.effective_support.median()) < critical < float(report.effective_support.max())
    assert 0.2 < critical / 512 < 0.4


@pytest.mark.slow
def test_memory_and_rows_do_not_change_what_is_measured():
    attention = attention_of(causal=False)
    options = {"selected": 6, "rows": [5, 10, 23], "critical": False, **QUIET}
    one, two = (attention_report(attention, memory=memory, **options) for memory in (1, 2**26))
    for name in two:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-9, err_msg=str(name))
    assert two.attrs["rows"] == [5, 10, 23]


@pytest.mark.slow
def test_experiments_on_the_sentence_encoder(encoded):
    """What the paper says of GPT-2, where it holds here and where it does not."""
    model = load_pretrained()
    options = {"rows": 128, **QUIET}
    length = distance_against_length(model, BOOK, truncate=True, **options)
    assert length.length.values.tolist() == [32, 64, 128, 256, 512]
    middle = length.distance.median(("layer", "head")).values
    assert np.all(np.diff(middle) > 0)  # grows with L
    assert (length.distance <= length.distance_bound).all()
    critical = critical_against_length(model, BOOK, truncate=True, **options)
    assert np.all((critical.ratio > 0.15) & (critical.ratio < 0.4))
    apart = separability_against_selected(encoded, **options)
    plateau = apart.distinguishable.median(("layer", "head")).sel(selected=[16, 32, 64, 128])
    assert np.all((plateau > 0.7) & (plateau < 0.85))  # as reported
    gradient = gradient_against_temperature(encoded, **options)
    assert (gradient.gradient <= gradient.gradient_bound).all()
    assert gradient.power_converged.all()
    np.testing.assert_allclose(gradient.power, gradient.norm, rtol=1e-3)


# --- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selected": 24}, "selected: expected different numbers up to 23, that leave a token out, got"),
        ({"selected": 0}, "selected: expected a whole number >= 1"),
        ({"selected": [3, 4]}, r"selected: expected a whole number >= 1, got \[3, 4\]"),
        ({"vectors": "keys"}, "vectors: expected 'inputs' or 'embeddings' or 'values', got 'keys'"),
        ({"count": "some"}, "count: expected 'own' or 'all'"),
        ({"normalize": 1}, "normalize: expected a bool"),
        ({"rows": 0}, "rows: expected a whole number >= 1"),
        ({"rows": [1, 24]}, "rows: expected different indices from 0 to 23"),
        ({"rows": "all"}, "rows: expected None, a number, or indices"),
        ({"rows": [0, 1, 2]}, "selected: expected different numbers up to 2"),
        ({"level": 1.0}, "level: expected a number between 0 and 1"),
        ({"form": "exact"}, "form: expected 'sharp' or 'printed'"),
        ({"memory": 0}, "memory: expected a whole number >= 1"),
        ({"progress": "yes"}, "progress: expected a bool"),
    ],
)
def test_wrong_options_of_the_report(options, message):
    with pytest.raises(ValueError, match=message):
        attention_report(attention_of(causal=True), **{"selected": 5, **QUIET, **options})


def test_wrong_arguments_of_experiments(small):
    attention, model = attention_of(causal=False), small["gpt2"]
    with pytest.raises(ValueError, match="attention: expected an Attention"):
        attention_report("gpt2")
    with pytest.raises(ValueError, match="counts: expected different numbers up to 23"):
        distance_against_selected(attention, counts=[3, 3], **QUIET)
    with pytest.raises(ValueError, match="temperatures: expected increasing numbers"):
        gradient_against_temperature(attention, temperatures=[1.0, 0.1], **QUIET)
    with pytest.raises(ValueError, match="sizes: expected positive numbers"):
        gradient_against_temperature(attention, sizes=[-1.0], **QUIET)
    with pytest.raises(ValueError, match="attention: expected logits: call the model with logits=True"):
        gradient_against_temperature(model(jnp.arange(5, dtype=jnp.int32)), **QUIET)
    with pytest.raises(ValueError, match="rows: expected one that may attend two tokens"):
        gradient_against_temperature(attention_of(causal=True), rows=[0], **QUIET)
    text = str(np.load(FIXTURES / "gpt2" / "expected.npz")["text"])
    with pytest.raises(ValueError, match=r"lengths: expected increasing numbers up to the text's \d+ tokens"):
        distance_against_length(model, text, lengths=[12, 8], **QUIET)
    with pytest.raises(ValueError, match=r"selected: expected a whole number >= 1, got \[3, 4\]"):
        distance_against_length(model, text, selected=[3, 4], **QUIET)
    with pytest.raises(ValueError, match="model: expected a Transformer"):
        critical_against_length("gpt2", "text", **QUIET)


def test_another_activation_is_measured_as_it_is(small):
    """Weights, not logits, are what a report is of: warmer heads attend to more tokens."""
    model = small["bert"]
    tokens = model.tokenize(str(np.load(FIXTURES / "bert" / "expected.npz")["text"]))
    options = {"selected": 2, "critical": False, **QUIET}
    usual = attention_report(model(tokens), **options)
    warm = attention_report(model(tokens, activation=th.Softmax(temperature=10.0)), **options)
    assert (warm.effective_support[0] > usual.effective_support[0]).all()
