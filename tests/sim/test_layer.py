"""The layer against formulas written out, and the losses and their gradients against finite differences."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sim
from sim import MultiHeadAttention
from sim._sgd import loss_gradient, trained_leaves
from theory import BayesSoftmax, SingleLocation, Softmax, Softmax1, gaussian, sign_flips

draw_tokens, sample_losses = eqx.filter_jit(sim.draw_tokens), eqx.filter_jit(sim.sample_losses)
TASK = SingleLocation(5, 4.0, gaussian([1.0, -0.5], [[1.0, 0.3], [0.3, 2.0]]))


def _layer(dtype=jnp.float64, dim=12, activation=None):
    return MultiHeadAttention.initial(
        jax.random.key(1), heads=3, features=2, dim=dim, variance=1.5, activation=activation, dtype=dtype
    )


def _naive_losses(keys, tokens, temperature, loss):
    """Both losses sample by sample in NumPy, from the tokens themselves."""
    losses = []
    for x, position in zip(np.asarray(tokens.materialize()), np.asarray(tokens.position), strict=True):
        scores = keys @ x.T / np.sqrt(x.shape[1])
        weights = np.exp(scores / np.reshape(temperature, (-1, 1)))
        attention = np.mean(weights / weights.sum(axis=1, keepdims=True), axis=0)
        if loss == "finite":
            losses.append(np.sum((attention @ x - x[position]) ** 2) / x.shape[1])
        else:
            losses.append(np.sum((attention - np.eye(len(x))[position]) ** 2))
    return np.array(losses)


@pytest.mark.parametrize("temperature", [1.0, [0.5, 1.0, 2.0]])
@pytest.mark.parametrize("loss", ["finite", "limit"])
def test_losses_of_noise_and_signal_are_those_of_the_tokens(loss, temperature):
    layer = _layer(activation=Softmax(temperature))
    tokens = draw_tokens(TASK, jax.random.key(2), 40, dim=layer.dim, dtype=jnp.float64)
    naive = _naive_losses(np.asarray(layer.keys), tokens, temperature, loss)
    np.testing.assert_allclose(sample_losses(layer, tokens, loss), naive, rtol=1e-12)


def test_layer_is_the_same_on_noise_and_signal_and_on_tokens():
    layer = _layer()
    tokens = draw_tokens(TASK, jax.random.key(2), 6, dim=layer.dim, dtype=jnp.float64)
    x = tokens.materialize()
    apply = eqx.filter_jit(lambda tokens: (layer.scores(tokens), layer.attention(tokens), layer(tokens)))
    scores, attention, output = apply(x)
    for split, whole in zip(apply(tokens), (scores, attention, output), strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-12, atol=1e-13)
    x = np.asarray(x)
    np.testing.assert_allclose(scores, np.einsum("hd,bld->bhl", layer.keys, x) / np.sqrt(layer.dim), rtol=1e-12)
    np.testing.assert_allclose(output, np.einsum("bl,bld->bd", attention, x), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(layer(jnp.asarray(x[0])), output[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("loss", ["finite", "limit"])
def test_gradient_of_training_is_finite_differences_of_the_naive_loss(loss):
    layer = _layer(activation=Softmax([0.7, 1.0, 1.3]))
    tokens = draw_tokens(TASK, jax.random.key(3), 8, dim=layer.dim, dtype=jnp.float64)
    params, rest = eqx.partition(layer, trained_leaves(layer, {"keys": 1.0}))
    gradient = eqx.filter_jit(loss_gradient)(params, rest, tokens, loss)
    assert [leaf.shape for leaf in jax.tree.leaves(gradient)] == [layer.keys.shape]
    keys, step = np.asarray(layer.keys), 1e-5
    for index in np.ndindex(keys.shape):
        bump = np.zeros(keys.shape)
        bump[index] = step
        ends = [np.sum(_naive_losses(keys + s * bump, tokens, [0.7, 1.0, 1.3], loss)) for s in (1, -1)]
        np.testing.assert_allclose(gradient.keys[index], (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("length", [2, 10])
def test_zero_keys_attend_uniformly(length):
    task = SingleLocation(length, 4.0, sign_flips([1.0], [1.0]))
    layer = MultiHeadAttention(jnp.zeros((3, 20), jnp.float32), features=1)
    tokens = draw_tokens(task, jax.random.key(0), 50, dim=20)
    np.testing.assert_allclose(sample_losses(layer, tokens, "limit"), 1 - 1 / length, rtol=1e-6)


def test_forms_of_the_loss_approach_each_other_as_one_over_root_dim():
    def gap(dim):
        layer = _layer(dim=dim)
        tokens = draw_tokens(TASK, jax.random.key(4), 400, dim=dim, dtype=jnp.float64)
        return float(jnp.std(sample_losses(layer, tokens, "finite") - sample_losses(layer, tokens, "limit")))

    gaps = np.array([gap(100), gap(1600)])
    assert gaps[0] < 1.0
    # a ratio of 4, of spreads known from 400 samples each: within 1 ± 0.3 well beyond 4 standard errors
    assert 0.7 < gaps[0] / gaps[1] / 4 < 1.3


@pytest.mark.parametrize(
    "activation",
    [
        Softmax([0.5, 1.0, 2.0]),
        Softmax1([-0.3, 0.2, 1.0], 2.5, True),
        BayesSoftmax([0.5, 0.0, -1.0]),
        BayesSoftmax("norm"),
    ],
    ids=str,
)
def test_float32_and_float64_layers_agree(activation):
    layer = _layer(dim=500, activation=activation)
    tokens = draw_tokens(TASK, jax.random.key(5), 20, dim=500, dtype=jnp.float64)
    single = MultiHeadAttention(layer.keys.astype(jnp.float32), features=2, activation=activation)
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.float64 else x, tokens)
    assert sample_losses(single, rounded).dtype == jnp.float32
    np.testing.assert_allclose(sample_losses(single, rounded), sample_losses(layer, tokens), rtol=2e-5)


@pytest.mark.parametrize("replicas", [None, 3])
def test_order_parameters(replicas):
    layer = MultiHeadAttention.initial(jax.random.key(0), heads=4, features=3, dim=50, replicas=replicas)
    keys = np.asarray(layer.keys, np.float64)
    order = layer.order()
    assert order.m.dtype == order.r.dtype == jnp.float64
    spikes = np.sqrt(50) * np.eye(50)[:3]
    np.testing.assert_allclose(order.m, keys @ spikes.T / 50, rtol=1e-14)
    np.testing.assert_allclose(order.r, keys @ np.swapaxes(keys, -1, -2) / 50, rtol=1e-13, atol=1e-14)


def test_reference_start():
    keys = jax.random.normal(jax.random.PRNGKey(0), (4, 1000))
    layer = MultiHeadAttention(keys, features=3)
    assert layer.keys.dtype == jnp.float64
    np.testing.assert_array_equal(layer.order().m, keys[:, :3] / np.sqrt(1000))


def test_initial_replicas_are_drawn_with_folded_keys():
    options = {"heads": 2, "features": 1, "dim": 30, "variance": 4.0}
    key = jax.random.key(7)
    layers = MultiHeadAttention.initial(key, replicas=3, **options)
    assert layers.replicas == 3
    for i in range(3):
        alone = MultiHeadAttention.initial(jax.random.fold_in(key, i), **options)
        assert alone.replicas is None
        np.testing.assert_array_equal(layers.keys[i], alone.keys)
        np.testing.assert_array_equal(layers[i].keys, alone.keys)


def test_initial_variance():
    # the mean of 40,000 squares: relative standard error 0.0071, so 4 of them fail once in 16,000 keys
    layer = MultiHeadAttention.initial(jax.random.key(0), heads=4, features=1, dim=10_000, variance=2.5)
    assert abs(float(jnp.mean(jnp.square(layer.keys))) / 2.5 - 1) < 4 * np.sqrt(2 / 40_000)
    assert layer.keys.dtype == jnp.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads: expected a whole number >= 1, got 0"),
        ({"features": 0}, "features: expected a whole number >= 1, got 0"),
        ({"dim": 6}, "dim: expected a whole number >= 7, got 6"),
        ({"variance": 0.0}, "variance: expected positive numbers"),
        ({"variance": [1.0, 2.0]}, "variance: expected 0 axes"),
        ({"replicas": 0}, "replicas: expected a whole number >= 1, got 0"),
        ({"activation": "softmax"}, "activation: expected an attention activation"),
        ({"dtype": jnp.float16}, "keys: expected float32 or float64, got float16"),
    ],
)
def test_initial_refuses(change, message):
    options = {"heads": 4, "features": 3, "dim": 20, **change}
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.initial(jax.random.key(0), **options)


@pytest.mark.parametrize(
    ("keys", "features", "message"),
    [
        (np.zeros(10), 1, r"keys: expected shape \(..., H, D\) with H >= 1, got \(10,\)"),
        (np.zeros((0, 10)), 1, r"keys: expected shape \(..., H, D\)"),
        (np.zeros((2, 10), int), 1, "keys: expected float32 or float64, got int64"),
        (np.full((2, 10), np.nan), 1, "keys: expected finite numbers, got 20 that are not"),
        (np.zeros((2, 4)), 3, r"keys: expected at least F \+ H = 5 dimensions"),
        (np.zeros((2, 4)), None, "features: expected a whole number >= 1, got None"),
        ("keys", 1, "keys: expected an array of real numbers"),
    ],
)
def test_layer_refuses(keys, features, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(keys, features=features)


def test_layer_needs_features():
    with pytest.raises(TypeError, match="features"):
        MultiHeadAttention(np.zeros((2, 10)))


def test_calls_refuse_tokens_of_another_shape_or_type():
    layer = _layer()
    with pytest.raises(ValueError, match=r"tokens: expected float64 of shape \(..., L, 12\), got float64 \(5, 11\)"):
        layer(jnp.zeros((5, 11)))
    with pytest.raises(ValueError, match="tokens: expected float64"):
        layer(jnp.zeros((5, 12), jnp.float32))
    with pytest.raises(ValueError, match=r"loss: expected 'finite' or 'limit', got 'infinite'"):
        sample_losses(layer, draw_tokens(TASK, jax.random.key(0), 2, dim=12, dtype=jnp.float64), "infinite")
    replicas = MultiHeadAttention.initial(jax.random.key(0), heads=2, features=1, dim=20, replicas=2)
    with pytest.raises(ValueError, match="index the replica"):
        replicas(jnp.zeros((5, 20), jnp.float32))
    with pytest.raises(IndexError, match="no replica axis"):
        layer[0]
