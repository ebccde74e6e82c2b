"""Normalizers: recorded values, independent formulas, derivatives, masks, invariances, entry points, figures."""

import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import sim
import theory as th
from theory._largest import largest
from theory.names import parse_activation, parts, rebuilt

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "entmax.json").read_text(encoding="utf-8"))
NEW = [
    th.ScalableSoftmax(0.43),
    th.Sparsemax(),
    th.Entmax(1.5),
    th.Entmax(1.25, temperature=0.7),
    th.Entmax(1.05),
    th.Entmax(1.75),
    th.Entmax(1.95),
    th.Sigmoid(),
    th.SelfAdjustedSoftmax(),
    th.SelfAdjustedSoftmax(False),
    th.AdaptiveSoftmax(),
    th.TopK(3),
    th.TopK(power=0.5, temperature=2.0),
]
ROWS = [th.Softmax(0.8), th.Softmax1(0.3, 2.0), *NEW]
ALL = [*ROWS, th.BayesSoftmax(0.3)]
SUMMING = [a for a in ROWS if type(a) not in (th.Softmax1, th.Sigmoid, th.SelfAdjustedSoftmax)]
FURTHER = {a.name for a in NEW if isinstance(a, th.Entmax) and a.alpha != 1.5}
FURTHER |= {th.SelfAdjustedSoftmax(False).name, th.TopK(3).name}


def in_turn(activations):
    """Each activation; in the long run only, those that differ from another by their numbers."""
    marked = [pytest.param(a, marks=pytest.mark.slow) if a.name in FURTHER else a for a in activations]
    return pytest.mark.parametrize("activation", marked, ids=str)


by_name, rows_by_name = in_turn(ALL), in_turn(ROWS)
precisions = pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
long_precisions = pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.float64])

SCORES = np.array([[0.3, -1.2, 2.1, 0.9, 0.4], [1.4, 0.2, -0.3, 1.1, 0.8]])


_COMPILED = {}


def compiled(activation):
    """The activation's call as one compiled function of scores (and mask), kept."""
    return _COMPILED.setdefault(activation.name, jax.jit(lambda *args: activation(*args)))


def pulled(activation, scores, cotangent, *where):
    """Weights and the gradient of cotangent · weights."""
    weights, pull = jax.vjp(lambda x: compiled(activation)(x, *where), scores)
    return weights, pull(cotangent)[0]


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_values_and_gradients(case):
    known = {name: np.asarray(value) for name, value in RECORDED[case].items()}
    size = known["scores"].size
    filled = np.full(60, -np.inf)  # to one length by masked tokens, so that all share compiled code
    filled[:size] = known["scores"]
    cotangent = np.resize(known["cotangent"], 60)
    weights, gradient = _RECORDED[known["alpha"].item()](filled, cotangent)
    np.testing.assert_allclose(weights[:size], known["weights"], atol=1e-12)
    np.testing.assert_allclose(gradient[:size], known["gradient"], atol=1e-9)
    assert (weights[size:] == 0).all()
    # float32: the weights move by at most the rounding of the scores
    in_float32, _ = _RECORDED[known["alpha"].item()](filled.astype(np.float32), cotangent.astype(np.float32))
    assert in_float32.dtype == jnp.float32
    np.testing.assert_allclose(in_float32[:size], known["weights"], atol=4e-7 * max(1.0, np.abs(known["scores"]).max()))


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_short_rows_need_no_filling(alpha):
    known = RECORDED[f"entmax_bisect {alpha:g}, plain"]
    weights, gradient = pulled(th.Entmax(alpha), jnp.asarray(known["scores"]), jnp.asarray(known["cotangent"]))
    np.testing.assert_allclose(weights, known["weights"], atol=1e-12)
    np.testing.assert_allclose(gradient, known["gradient"], atol=1e-9)


def projected(z):
    """The point of the simplex nearest to z, by sorting."""
    sorted_z = np.sort(z)[::-1]
    k = np.arange(1, z.size + 1)
    tau = (np.cumsum(sorted_z) - 1) / k
    size = k[sorted_z > tau].max()
    return np.maximum(z - tau[size - 1], 0)


finite_rows = arrays(np.float64, st.just(9), elements=st.floats(-20, 20, width=32))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(finite_rows)
def test_sparsemax_is_the_projection(z):
    np.testing.assert_allclose(_SPARSEMAX(z), projected(z), atol=1e-13)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(finite_rows, st.sampled_from([1.05, 1.25, 1.5, 1.75, 1.95]))
def test_entmax_is_a_fixed_point(z, alpha):
    """p_i^{α−1} − (α−1)z_i is one number on the support, and no more than −(α−1)z_i off it."""
    p = np.asarray(_ENTMAX[alpha](z))
    assert abs(p.sum() - 1) < 1e-14
    level = p ** (alpha - 1) - (alpha - 1) * z
    inside = p > 1e-12  # below it p^{α−1} is rounding
    scale = 1e-13 * max(1, np.abs(z).max()) * 10
    np.testing.assert_allclose(level[inside], level[inside].mean(), atol=scale)
    assert (-(alpha - 1) * z[p == 0] >= level[inside].mean() - scale).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(finite_rows, st.floats(-10, 10, width=32), st.permutations(range(9)))
def test_sums_shifts_and_permutations(z, shift, order):
    for activation, call in _ALL_ROWS:
        weights = np.asarray(call(z))
        assert np.isfinite(weights).all()
        np.testing.assert_allclose(call(z[list(order)]), weights[list(order)], atol=1e-12, err_msg=activation.name)
        if activation in SUMMING:
            assert abs(weights.sum() - 1) < 1e-13
            assert (weights >= 0).all()
        if activation in SUMMING and not isinstance(activation, th.ScalableSoftmax | th.TopK):
            # near the edge of the support, and at ties, rounding of z + shift counts
            np.testing.assert_allclose(call(z + shift), weights, atol=1e-6, err_msg=activation.name)


_RECORDED = {
    alpha: jax.jit(lambda x, t, a=activation: pulled(a, x, t))
    for alpha, activation in {1.25: th.Entmax(1.25), 1.5: th.Entmax(1.5), 2.0: th.Sparsemax()}.items()
}
_SPARSEMAX = compiled(th.Sparsemax())
_ENTMAX = {alpha: compiled(th.Entmax(alpha)) for alpha in (1.05, 1.25, 1.5, 1.75, 1.95)}
_ALL_ROWS = [(activation, compiled(activation)) for activation in ROWS]


def test_other_values_by_their_formulas():
    x = SCORES[0]
    n = x.size
    softmax = lambda z: np.exp(z) / np.exp(z).sum()  # noqa: E731
    np.testing.assert_allclose(th.ScalableSoftmax(0.43)(jnp.asarray(x)), softmax(0.43 * np.log(n) * x), rtol=1e-14)
    np.testing.assert_allclose(th.Sigmoid()(jnp.asarray(x)), 1 / (1 + n * np.exp(-x)), rtol=1e-14)
    np.testing.assert_allclose(th.SelfAdjustedSoftmax(False)(jnp.asarray(x)), x * softmax(x), rtol=1e-14)
    low, high = min(x.min(), 0), max(0, x.max())
    np.testing.assert_allclose(
        th.SelfAdjustedSoftmax()(jnp.asarray(x)), (x - low) / (high - low) * softmax(x), rtol=1e-14
    )
    p = softmax(x)
    entropy = -(p * np.log(p)).sum()
    beta = np.polyval([-0.037, 0.481, -2.3, 4.917, -1.791], entropy)
    assert beta > 1 and entropy > 0.5  # noqa: PT018
    np.testing.assert_allclose(th.AdaptiveSoftmax()(jnp.asarray(x)), softmax(beta * x), rtol=1e-12)
    kept = np.sort(x)[-3]
    np.testing.assert_allclose(th.TopK(3)(jnp.asarray(x)), softmax(np.where(x >= kept, x, -np.inf)), rtol=1e-14)
    np.testing.assert_allclose(th.Entmax(1)(jnp.asarray(x)), softmax(x), rtol=1e-14)
    np.testing.assert_allclose(th.Entmax(1.0001)(jnp.asarray(x)), softmax(x), rtol=1e-3)


@precisions
@pytest.mark.parametrize("kind", [pytest.param("normal", marks=pytest.mark.slow), "ties", "scales", "equal", "zeros"])
def test_top_k_selects_by_order(dtype, kind):
    rng = np.random.default_rng(3)
    x = {
        "normal": rng.normal(size=(40, 200)),
        "ties": rng.integers(0, 12, size=(40, 200)),
        "scales": rng.normal(size=(40, 200)) * 10.0 ** rng.integers(-30, 4, size=(40, 200)),
        "equal": np.full((40, 200), -0.7),
        "zeros": np.maximum(rng.normal(size=(40, 200)) - 2, 0),
    }[kind].astype(dtype)
    for k in (1, 14, 1000):
        chosen = np.asarray(compiled(th.TopK(k, temperature=1e30 if kind == "scales" else 1.0))(x)) > 0
        least = np.sort(x, axis=-1)[:, -min(k, 200)]
        if kind in ("normal", "ties", "equal", "zeros"):
            assert (chosen == (x >= least[:, None])).all()
        else:
            assert (chosen >= (x >= least[:, None])).all()


@precisions
@pytest.mark.parametrize("kind", ["ties", "shifted", "large", "heavy"])
@pytest.mark.parametrize("k", [2, 32, 300])
def test_top_k_of_many_rows_with_masks(dtype, kind, k):
    """Rows enough that the last ones go on alone, and far from a normal distribution."""
    rng = np.random.default_rng(7)
    x = {
        "ties": rng.integers(0, 9, size=(80, 400)),
        "shifted": 1e4 + 1e-3 * rng.normal(size=(80, 400)),
        "large": 1e30 * rng.normal(size=(80, 400)),
        "heavy": rng.standard_cauchy(size=(80, 400)),
    }[kind].astype(dtype)
    keep = rng.random(x.shape) < 0.8
    keep[3], keep[4] = False, np.arange(400) == 5
    counts = np.minimum(np.maximum(keep.sum(-1, keepdims=True), 1), k).astype(dtype)
    chosen = _LARGEST(np.where(keep, x, 0), keep, counts)
    least = np.take_along_axis(-np.sort(-np.where(keep, x, -np.inf), axis=-1), counts.astype(int) - 1, axis=-1)
    np.testing.assert_array_equal(chosen, keep & (x >= least))


_LARGEST = jax.jit(largest)


@pytest.mark.parametrize("alpha", [1.01, 1.75, 1.95])
def test_entmax_of_many_rows(alpha):
    """Against halving the threshold 200 times."""
    scores = np.random.default_rng(8).normal(size=(80, 60))
    z = (scores - scores.max(-1, keepdims=True)) * (alpha - 1)
    low, high = np.full((80, 1), -1.0), np.zeros((80, 1))
    for _ in range(200):
        tau = (low + high) / 2
        above = (np.maximum(z - tau, 0) ** (1 / (alpha - 1))).sum(-1, keepdims=True) >= 1
        low, high = np.where(above, tau, low), np.where(above, high, tau)
    weights = np.maximum(z - low, 0) ** (1 / (alpha - 1))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(compiled(th.Entmax(alpha))(scores), weights, atol=1e-13)


@pytest.mark.parametrize(
    "activation",
    [th.Sparsemax(), th.Entmax(1.05), th.Entmax(1.3), th.Entmax(1.95), th.TopK(32)],
    ids=str,
)
def test_nan_is_seen_in_its_row_alone(activation):
    x = jnp.asarray(np.random.default_rng(9).normal(size=(80, 256)), jnp.float32).at[:50, 3].set(jnp.nan)
    weights = np.asarray(jax.jit(lambda x: activation(x))(x))
    assert np.isnan(weights[:50]).any(-1).all()
    np.testing.assert_allclose(weights[50:].sum(-1), 1, atol=1e-5)


def test_count_of_the_largest():
    assert [th.TopK(power=0.5).selected(n) for n in (1, 2, 4, 5, 1024, 1025)] == [1, 2, 2, 3, 32, 33]
    assert [th.TopK(power=1 / 3).selected(n) for n in (8, 27, 1000, 1001)] == [2, 3, 10, 11]
    assert th.TopK(power=0).selected(50) == 1
    assert th.TopK(power=1).selected(50) == 50
    assert th.TopK(7).selected(3) == 3


def test_adaptive_temperature_is_clamped_at_both_ends():
    beta = jax.jit(th.adaptive_inverse_temperature)
    inside = np.linspace(0.8487, 5.9444, 1001)
    outside = np.concatenate([np.linspace(0, 0.8485, 101), np.linspace(5.9446, 12, 101)])
    assert (np.asarray(beta(inside)) > 1).all()
    assert (np.asarray(beta(outside)) == 1).all()
    fine = np.linspace(4.3, 4.5, 200_001)
    values = np.asarray(beta(fine))
    assert values.max() == pytest.approx(2.4214, abs=5e-5)
    assert fine[values.argmax()] == pytest.approx(4.4124, abs=5e-5)


@pytest.mark.parametrize("scale", [0.2, 0.43, 1.0])
def test_one_token_above_equals_under_scalable_softmax(scale):
    for n in (2, 64, 4096):
        for gap in (0.5, 3.0):
            weight = th.ScalableSoftmax(scale)(jnp.zeros(n).at[0].set(gap))[0]
            assert weight == pytest.approx(1 / (1 + (n - 1) * n ** (-scale * gap)), rel=1e-12)


TOP_WEIGHTS = {
    "Softmax": (th.Softmax(), (0.80, 0.19, 0.015)),
    "Sparsemax": (th.Sparsemax(), (1, 1, 1)),
    "Entmax": (th.Entmax(1.5), (1, 1, 0.99)),
    "ScalableSoftmax": (th.ScalableSoftmax(0.43), (0.99, 1.0, 0.999)),
    "Sigmoid": (th.Sigmoid(), (0.86, 0.28, 0.024)),
}


@pytest.mark.parametrize("name", TOP_WEIGHTS)
def test_top_weight_of_one_large_score(name):
    """Means of 10 draws, as in the table; the fixed draws are far within ±0.02 of it."""
    activation, expected = TOP_WEIGHTS[name]
    for length, mean in zip((64, 1024, 16384), expected, strict=True):
        scores = jax.random.normal(jax.random.key(length), (10, length)).at[:, 0].set(6.0)
        assert float(compiled(activation)(scores)[:, 0].mean()) == pytest.approx(mean, abs=0.02)


# --- derivatives --------------------------------------------------------------------------------------------------


def test_derivative_at_a_tie_is_that_of_the_closed_form():
    jacobian = jax.jacrev(th.Entmax(1.5))(jnp.array([0.0, 0.0, 1.0]))
    np.testing.assert_allclose(jacobian[2], [-0.196, -0.196, 0.392], atol=5e-4)
    np.testing.assert_allclose(jax.jacfwd(th.Entmax(1.5))(jnp.array([0.0, 0.0, 1.0])), jacobian, atol=1e-15)


@by_name
def test_derivatives_equal_differences(activation):
    x, step = jnp.asarray(SCORES), 1e-5
    jacobian = jax.jit(jax.jacfwd(lambda x: activation(x)))(x)
    np.testing.assert_allclose(jax.jit(jax.jacrev(lambda x: activation(x)))(x), jacobian, atol=1e-14)
    call = compiled(activation)
    for h, l in np.ndindex(x.shape):
        moved = [call(x.at[h, l].add(sign * step)) for sign in (1, -1)]
        np.testing.assert_allclose(jacobian[..., h, l], (moved[0] - moved[1]) / (2 * step), atol=2e-9)


@by_name
def test_second_derivatives_equal_differences(activation):
    x, step = jnp.asarray(SCORES), 1e-5
    slope = jax.jit(jax.grad(lambda x: jnp.sum(activation(x) ** 2 * jnp.cos(x))))
    direction = jnp.asarray(np.random.default_rng(0).normal(size=x.shape))
    product = jax.jit(lambda x: jax.jvp(slope, (x,), (direction,))[1])(x)
    moved = [slope(x + sign * step * direction) for sign in (1, -1)]
    np.testing.assert_allclose(product, (moved[0] - moved[1]) / (2 * step), atol=1e-7)


@pytest.mark.parametrize("name", ["temperature", "scale"])
def test_derivatives_in_temperature_and_scale(name):
    for activation in (a for a in ALL if hasattr(a, name)):
        if activation.name in FURTHER:
            continue
        at = jax.jit(lambda t, a=activation: eqx.tree_at(lambda a: getattr(a, name), a, t)(jnp.asarray(SCORES)))
        value = jnp.asarray([0.93, 1.07])  # away from 0.9 and 0.95, where a token is just at the edge of a support
        step = 1e-6
        jacobian = jax.jacfwd(at)(value)
        np.testing.assert_allclose(jax.jacrev(at)(value), jacobian, atol=1e-14)
        for h in range(2):
            moved = [at(value.at[h].add(sign * step)) for sign in (1, -1)]
            np.testing.assert_allclose(jacobian[..., h], (moved[0] - moved[1]) / (2 * step), atol=1e-8)


@pytest.mark.parametrize("activation", [th.Sparsemax(), th.Entmax(1.5), th.Entmax(1.3), th.Entmax(1.95)], ids=str)
def test_the_rule_is_the_same_under_every_transformation(activation):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 2, 5)))
    t = jnp.asarray(np.random.default_rng(2).normal(size=x.shape))
    whole, pushed = jax.jvp(lambda x: activation(x), (x,), (t,))
    np.testing.assert_array_equal(whole, activation(x))
    mapped = lambda x: jax.vmap(lambda x: activation(x))(x)  # noqa: E731
    for value, change in (
        jax.jvp(mapped, (x,), (t,)),
        jax.vmap(lambda x, t: jax.jvp(lambda x: activation(x), (x,), (t,)))(x, t),
        jax.jit(lambda x, t: jax.jvp(mapped, (x,), (t,)))(x, t),
    ):
        np.testing.assert_allclose(value, whole, atol=1e-15)
        np.testing.assert_allclose(change, pushed, atol=1e-14)
    p = np.asarray(whole)
    alpha = getattr(activation, "alpha", 2.0)
    g = np.where(p > 0, np.where(p > 0, p, 1) ** (2 - alpha), 0)
    closed = g * (t - (g * t).sum(-1, keepdims=True) / g.sum(-1, keepdims=True))
    np.testing.assert_allclose(pushed, closed, atol=1e-13)


def test_a_token_at_the_edge_of_the_support_is_outside():
    """At z = (0, 1) the threshold of sparsemax is 0: from below, z_0 has no effect; from above it would have ½."""
    np.testing.assert_array_equal(jax.jacfwd(th.Sparsemax())(jnp.array([0.0, 1.0])), np.zeros((2, 2)))
    np.testing.assert_array_equal(jax.jacfwd(th.Entmax(1.5))(jnp.array([-1.0, 1.0])), np.zeros((2, 2)))


# --- masks, extremes, ranks -----------------------------------------------------------------------------------------


@long_precisions
@by_name
def test_masked_tokens_are_as_if_they_were_not_there(activation, dtype):
    x = jnp.asarray(SCORES, dtype)
    keep = jnp.array([[True, False, True, True, False]])
    kept = np.asarray(keep)[0]
    short = x[:, kept]
    t = jnp.asarray(np.random.default_rng(4).normal(size=x.shape), dtype)
    weights, gradient = pulled(activation, short, t[:, kept])
    tolerance = 1e-6 if dtype == jnp.float32 else 1e-14
    for whole, slope in (
        pulled(activation, x, t, keep),
        pulled(activation, jnp.where(keep, x, -jnp.inf), t),
        pulled(activation, jnp.where(keep, x, jnp.nan), t, keep),
    ):
        assert whole.dtype == dtype
        np.testing.assert_allclose(whole[:, kept], weights, atol=tolerance)
        np.testing.assert_allclose(slope[:, kept], gradient, atol=4 * tolerance)
        assert (whole[:, ~kept] == 0).all()
        assert (slope[:, ~kept] == 0).all()


@long_precisions
@rows_by_name
def test_rows_masked_as_a_whole(activation, dtype):
    x = jnp.asarray(SCORES, dtype)
    t = jnp.asarray(np.random.default_rng(5).normal(size=x.shape), dtype)
    alone, slope = pulled(activation, x[:1], t[:1])
    both = jnp.concatenate([x[:1], jnp.full((1, 5), -jnp.inf, dtype)])
    for weights, gradient in (
        pulled(activation, both, t),
        pulled(activation, x, t, jnp.array([[True], [False]])),
    ):
        assert (weights[1] == 0).all()
        assert (gradient[1] == 0).all()
        tolerance = 1e-6 if dtype == jnp.float32 else 1e-15
        np.testing.assert_allclose(weights[0], alone[0], atol=tolerance)
        np.testing.assert_allclose(gradient[0], slope[0], atol=tolerance)
    numbers = eqx.filter_grad(lambda a: jnp.sum(a(both) * t))(activation)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(numbers))


@pytest.mark.parametrize("activation", [th.Softmax(), *SUMMING[1:], th.BayesSoftmax(0.3)], ids=str)
def test_masked_tokens_stay_below_scores_however_low(activation):
    """Two equal tokens share their row's weight, whatever is masked beside them and in the other row."""
    keep = jnp.array([[True, True, False], [False, False, False]])
    for low in (-1e20, -1e37):
        weights, slope = pulled(
            activation, jnp.array([[low, low, 5.0], [1.0, 2.0, 3.0]], jnp.float32), keep.astype(jnp.float32), keep
        )
        share = 1.0 if isinstance(activation, th.BayesSoftmax) else 0.5
        np.testing.assert_allclose(weights, [[share, share, 0], [0, 0, 0]], rtol=1e-6)
        np.testing.assert_allclose(slope, 0, atol=1e-6)


def test_all_heads_masked_under_one_normalizer():
    weights, slope = pulled(th.BayesSoftmax(), jnp.full((2, 5), -jnp.inf), jnp.ones((2, 5)))
    assert (weights == 0).all()
    assert (slope == 0).all()


@precisions
@by_name
def test_large_scores_and_single_tokens(activation, dtype):
    rows = [
        [1e4, -1e4, 1e4, 0, -1e4],
        [-1e4, -1e4, -1e4, -1e4, -1e4],
        [1e4, 1e4, 1e4, 1e4, 1e4],
        [0, 0, 0, 0, 0],
        [1e-30, 0, -1e-30, 0, 0],
    ]
    square = lambda x: jnp.sum(activation(x) ** 2)  # noqa: E731
    twice = jax.jit(lambda x: jax.jvp(jax.grad(square), (x,), (jnp.cos(1 + jnp.arange(5, dtype=dtype))[None],)))
    for row in rows:
        x = jnp.asarray([row], dtype)
        weights, slope = pulled(activation, x, jnp.cos(jnp.arange(5, dtype=dtype))[None])
        pushed, curved = twice(x)
        assert all(np.isfinite(y).all() for y in (weights, slope, pushed))
        if not isinstance(activation, th.SelfAdjustedSoftmax):  # its second derivative at 1e-30 is 1e60
            assert np.isfinite(curved).all()
        if activation in SUMMING:
            assert weights.sum() == pytest.approx(1, abs=1e-5 if dtype == jnp.float32 else 1e-13)
    one = jnp.asarray([[1.7]], dtype)
    weights, slope = pulled(activation, one, jnp.ones_like(one))
    if activation in SUMMING or isinstance(activation, th.BayesSoftmax):
        assert weights == 1
        assert slope == 0
    assert np.isfinite(slope)


@pytest.mark.parametrize(
    "activation",
    [pytest.param(a, marks=() if isinstance(a, (th.Softmax, th.Entmax, th.TopK)) else pytest.mark.slow) for a in ROWS],
    ids=str,
)
def test_ranks_one_to_four(activation):
    x = jnp.asarray(np.random.default_rng(6).normal(size=(2, 3, 4, 7)))
    keep = jnp.asarray(np.random.default_rng(7).random((2, 3, 4, 7)) < 0.7)
    call = compiled(activation)
    whole, masked = call(x), call(x, keep)
    for index in ((1, 2, 3), (0, 1), (1,)):
        np.testing.assert_allclose(call(x[index], keep[index]), masked[index], atol=1e-15)
    np.testing.assert_allclose(call(x[1, 2, 3]), whole[1, 2, 3], atol=1e-15)
    np.testing.assert_allclose(call(x, keep[1, 2]), call(x, jnp.broadcast_to(keep[1, 2], x.shape)), atol=1e-15)


@pytest.mark.parametrize("activation", [th.Softmax(0.8), th.Softmax1(0.3, 2.0), th.BayesSoftmax([0.1, 0.2])], ids=str)
def test_finite_scores_have_the_weights_they_had(activation):
    x = jnp.asarray(SCORES)
    np.testing.assert_array_equal(activation(x), activation.finite(x))
    alone = jax.jit(lambda x: activation.finite(x))(x)
    np.testing.assert_allclose(compiled(activation)(x), alone, rtol=4e-16)  # products are fused differently


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: th.Entmax(0.9), "alpha: expected a Python number from 1 to 2"),
        (lambda: th.Entmax(2.5), "alpha: expected a Python number from 1 to 2"),
        (lambda: th.Entmax(jnp.asarray(1.5)), "alpha: expected a Python number"),
        (lambda: th.Entmax(float("nan")), "alpha: expected"),
        (lambda: th.Entmax(temperature=0.0), "temperature: expected positive numbers"),
        (lambda: th.Sparsemax([[1.0]]), "temperature: expected 0 or 1 axes"),
        (lambda: th.ScalableSoftmax(float("inf")), "scale: expected finite numbers"),
        (lambda: th.SelfAdjustedSoftmax(1), "normalized: expected a bool"),
        (lambda: th.TopK(), "count, power: expected one of them"),
        (lambda: th.TopK(2, 0.5), "count, power: expected one of them"),
        (lambda: th.TopK(0), "count: expected a whole number >= 1"),
        (lambda: th.TopK(power=1.5), "power: expected a Python number from 0 to 1"),
        (lambda: th.Softmax()(jnp.ones((2, 3)), jnp.ones((2, 4), bool)), r"where: expected booleans that broadcast to"),
        (lambda: th.Sigmoid()(jnp.ones(3), jnp.ones((2, 3), bool)), r"where: expected booleans"),
        (lambda: th.Sparsemax([1.0, 2.0])(jnp.ones(3)), "temperature: expected one number, for a single row"),
        (
            lambda: th.Sparsemax([1.0, 2.0])(jnp.ones((3, 4))),
            r"temperature: expected one number or one per head \(3,\)",
        ),
        (lambda: th.ScalableSoftmax([1.0, 2.0]).check_heads(3), r"scale: expected one number or one per head"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("activation", NEW, ids=str)
def test_names_are_read_back_and_rebuilt(activation):
    assert parse_activation(activation.name).name == activation.name
    name, arguments = parts(activation)
    assert name == type(activation).__name__
    for argument, value in arguments.items():
        assert rebuilt(activation, argument, value).name == activation.name


def test_one_number_per_head():
    x = jnp.asarray(SCORES)
    for maker in (th.ScalableSoftmax, th.Sparsemax, lambda t: th.Entmax(1.3, t), lambda t: th.TopK(2, temperature=t)):
        both = maker([0.5, 1.5])(x)
        for h, value in enumerate((0.5, 1.5)):
            np.testing.assert_allclose(both[h], maker(value)(x[h]), atol=1e-15)


# --- entry points ---------------------------------------------------------------------------------------------------

TASK = th.SingleLocation(length=4, snr=4.0, prior=th.sign_flips([1.0], [1.0]))
ORDER = th.OrderParameters([[1.0], [-0.5]], [[1.5, -0.3], [-0.3, 1.0]])
ENTRIES = [
    th.ScalableSoftmax([0.5, 1.0]), th.Sparsemax([0.8, 1.2]), th.Entmax(1.5), th.Entmax(1.3), th.Sigmoid(),
    th.SelfAdjustedSoftmax(), th.SelfAdjustedSoftmax(False), th.AdaptiveSoftmax(), th.TopK(2), th.TopK(power=0.5),
]  # fmt: skip


few_entries = pytest.mark.parametrize(  # each compiles for itself: the others in the long run
    "activation",
    [a if isinstance(a, th.Sparsemax) else pytest.param(a, marks=pytest.mark.slow) for a in ENTRIES],
    ids=str,
)


@few_entries
def test_the_sampled_risk_and_what_is_refused(activation):
    value, error = th.population_risk(TASK, activation, ORDER, with_error=True)  # MonteCarlo of 100,000 by default
    few, few_error = th.population_risk(TASK, activation, ORDER, th.MonteCarlo(20_000, seed=1), with_error=True)
    # 10 comparisons at |z| < 4.5: false-alarm rate 6.8e-5, seeds fixed
    assert abs(value - few) < 4.5 * jnp.hypot(error, few_error)
    # the same average drawn otherwise, 10 comparisons at |z| < 4.5
    rng = np.random.default_rng(11)
    chi = rng.normal(size=(20_000, 4, 2)) @ np.linalg.cholesky(np.asarray(ORDER.r)).T
    theta = 1 + rng.choice([-1.0, 1.0], size=20_000)
    chi[:, 0] += 2 * theta[:, None] * np.asarray(ORDER.m)[:, 0]
    attention = np.asarray(compiled(activation)(jnp.asarray(np.swapaxes(chi, 1, 2)))).mean(1)
    losses = ((attention - np.eye(4)[0]) ** 2).sum(-1)
    assert abs(losses.mean() - value) < 4.5 * np.hypot(losses.std() / np.sqrt(20_000), error)
    with pytest.raises(ValueError, match=r"method: expected MonteCarlo\(...\), the only one"):
        th.population_risk(TASK, activation, ORDER, th.Quadrature())
    with pytest.raises(ValueError, match="activation: expected softmax, softmax-1 or B-softmax"):
        th.head_costs(TASK, activation, ORDER)
    slope = lambda: jax.grad(lambda o: th.population_risk(TASK, activation, o, th.MonteCarlo(100)))(ORDER)  # noqa: E731
    if activation.twice_differentiable:
        assert np.isfinite(slope().m).all()
    else:
        with pytest.raises(ValueError, match="activation: expected a twice differentiable one"):
            slope()


def test_the_slope_of_the_sampled_risk_with_a_sparse_support():
    """Entmax-1.5 has bends, no kinks: ∂E by Price's theorem equals the slope along the draws, which needs none."""
    activation, samples = th.Entmax(1.5), 40_000
    slope = jax.grad(lambda o: th.population_risk(TASK, activation, o, th.MonteCarlo(samples)))(ORDER)
    rng = np.random.default_rng(12)
    normal, theta = rng.normal(size=(samples, 4, 2)), 1 + rng.choice([-1.0, 1.0], size=samples)

    def loss(r, normal, theta):
        chi = normal @ jnp.linalg.cholesky(r).T
        chi = chi.at[0].add(2 * theta * ORDER.m[:, 0])
        return jnp.sum((jnp.mean(activation(chi.T), axis=0) - jnp.eye(4)[0]) ** 2)

    # per-sample slopes; this ∂r is that of independent entries, as in the docstring, once symmetrized
    each = np.asarray(jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))(ORDER.r, normal, theta))
    each = (each + np.swapaxes(each, 1, 2)) / 2
    error = each.std(0) / np.sqrt(samples)
    # 3 numbers at |z| < 4.5, with twice the standard error for the other estimate's: false-alarm rate below 2e-5
    assert (np.abs(each.mean(0) - slope.r) < 9 * error).all()
    assert (error < 2e-3).all()


@few_entries
def test_both_simulators_train_with_it(activation, monkeypatch):
    recorded_by = th.MonteCarlo(1000)
    monkeypatch.setattr(th.risk, "default_method", lambda activation, tolerance: recorded_by)
    options = {
        "learning_rate": 2.0, "time": 0.4, "batch": 2, "record": 2, "key": jax.random.key(1), "evaluation": 20,
        "progress": False,
    }  # fmt: skip
    layer = sim.MultiHeadAttention.initial(
        jax.random.key(0), heads=2, features=1, dim=20, activation=activation, dtype=jnp.float64
    )
    for run in (
        sim.train(TASK, layer, **options),
        sim.train_reduced(TASK, activation, layer.order(), dim=20, **options),
    ):
        assert run.result == 0
        assert np.isfinite(run.loss).all()
        assert np.isfinite(run.risk).all()
        assert not np.allclose(run.order.m[0], run.order.m[-1], atol=1e-12)
        assert dict(run.settings)["activation"] == activation.name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("activation", [a for a in NEW if not isinstance(a, th.Sigmoid)], ids=str)
def test_a_number_that_is_none_is_not_hidden(activation, bad):
    rows = np.array([[0.0, 1.0, bad, 0.5], [0.0, 1.0, 2.0, 0.5]])
    found = np.asarray(activation(jnp.asarray(rows)))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()
