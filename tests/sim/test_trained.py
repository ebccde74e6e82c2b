"""Training of the activation's own numbers: which leaves move, by how much, and what is recorded of them."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import riskless

import sim
from sim import MultiHeadAttention, train
from sim._sgd import _TRAINING, loss_gradient, trained_leaves
from theory import BayesSoftmax, Result, RunFailed, SingleLocation, Softmax, Softmax1, population_risk, sign_flips

TASK = SingleLocation(4, 3.0, sign_flips([1.0, 0.0], [0.0, 1.5]))
KEY = jax.random.key(5)
RATES = {"bias": 0.7, "scale": 1.9}
OPTIONS = {
    "learning_rate": 2.0, "time": 3.0, "batch": 4, "key": KEY, "record": 3, "loss": "limit", "evaluation": 1000,
    "bias_rate": RATES["bias"], "scale_rate": RATES["scale"], "progress": False,
}  # fmt: skip
ACTIVATIONS = {
    "shared": Softmax1(-0.2, 1.7, trained=True),
    "per head": Softmax1([-0.2, 0.4], [1.7, 2.2], trained=True),
    "joint": BayesSoftmax([0.3, -0.2], trained=True),
    "norm": BayesSoftmax("norm", weights=[0.7, 0.3]),
}
OTHERS = {
    "bias alone": Softmax1([-0.2, 0.4], 1.7, trained="bias"),
    "scale alone": Softmax1(0.3, [1.7, 2.2], trained="scale"),
    "nothing": Softmax1([-0.2, 0.4], 1.7),
}


def _layer(activation, replicas=None, dtype=jnp.float32):
    return MultiHeadAttention.initial(
        jax.random.key(1), heads=2, features=2, dim=20, variance=0.5, activation=activation, replicas=replicas,
        dtype=dtype,
    )  # fmt: skip


def _trained(activation):
    return {name: getattr(activation, name) for name in activation.trained}


@pytest.fixture
def without_risk():
    with riskless.without_risk():
        yield


@pytest.fixture(scope="module", params=["per head", "joint", "norm"])
def ensemble(request):
    """Three replicas whose biases and scales move by 0.1 and more."""
    activation = ACTIVATIONS[request.param]
    run = train(TASK, _layer(activation, replicas=3), **OPTIONS | {"bias_rate": 20.0, "scale_rate": 20.0})
    for name, start in _trained(activation).items():
        assert np.abs(np.asarray(getattr(run.activation, name))[:, -1] - np.asarray(start)).max() > 0.1
    return run


def _written_out(numbers, activation, tokens, loss):
    """The mean loss, from the tokens themselves; `numbers` holds the keys, and biases and scales where there are."""
    x, keys = tokens.materialize(), numbers["keys"]
    heads, dim = keys.shape
    column = lambda value: jnp.broadcast_to(value, (heads,))[None, :, None]  # noqa: E731
    raised = jnp.exp(jnp.einsum("hd,bld->bhl", keys, x) / np.sqrt(dim))
    if isinstance(activation, Softmax1):
        normalizer = jnp.exp(column(numbers["bias"])) + jnp.sum(raised, axis=2, keepdims=True)
        weights = column(numbers["scale"]) * raised / normalizer
    else:
        bias = (
            numbers["bias"] if "bias" in numbers else jnp.sum(keys**2, axis=1) / (2 * dim) - jnp.log(activation.weights)
        )
        raised = raised * jnp.exp(-column(bias))
        weights = heads * raised / jnp.sum(raised, axis=(1, 2), keepdims=True)
    miss = jnp.mean(weights, axis=1) - jax.nn.one_hot(tokens.position, x.shape[1], dtype=x.dtype)
    if loss == "limit":
        return jnp.mean(jnp.sum(miss**2, axis=1))
    return jnp.mean(jnp.sum(jnp.einsum("bl,bld->bd", miss, x) ** 2, axis=1)) / dim


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("shared", "finite"), ("norm", "finite"))),
        ("per head", "limit"), ("joint", "finite"), ("norm", "limit"),
        ("bias alone", "limit"), ("scale alone", "finite"), ("nothing", "limit"),
    ],
)  # fmt: skip
def test_a_step_is_the_gradient_written_out(name, loss, without_risk):
    """k moves by η, b by κ_b η/D and c by κ_c η/D times the gradient of the mean loss on the tokens of the step.

    What is not trained stays, and has no axis of time.
    """
    activation = (ACTIVATIONS | OTHERS)[name]
    layer = _layer(activation, dtype=jnp.float64)
    run = train(TASK, layer, **OPTIONS | {"time": 0.1, "record": 2, "loss": loss})

    key = KEY
    for number in (_TRAINING, 0, 0, 0):  # high and low bits of the step, the chunk
        key = jax.random.fold_in(key, number)
    tokens = eqx.filter_jit(sim.draw_tokens)(TASK, key, 4, dim=20, dtype=jnp.float64)
    own = {leaf: getattr(activation, leaf, None) for leaf in RATES}
    numbers = {"keys": layer.keys} | {leaf: value for leaf, value in own.items() if value is not None}
    gradient = jax.jit(jax.grad(partial(_written_out, activation=activation, tokens=tokens, loss=loss)))(numbers)

    moved = MultiHeadAttention(layer.keys - 2.0 * gradient["keys"], features=2).order()
    np.testing.assert_allclose(run.order.m[1], moved.m, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(run.order.r[1], moved.r, rtol=1e-10, atol=1e-13)
    assert eqx.tree_equal(run.activation.split()[1], activation.split()[1])
    for leaf, start in _trained(activation).items():
        recorded = getattr(run.activation, leaf)
        assert recorded.shape == (2, *start.shape)
        np.testing.assert_array_equal(recorded[0], start)
        assert np.all(gradient[leaf] != 0)
        step = RATES[leaf] * 2.0 / 20 * gradient[leaf]
        np.testing.assert_allclose(recorded[1] - recorded[0], -step, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("shared", "norm")), "joint"])
def test_a_replica_is_the_run_of_its_layer_alone(name, without_risk):
    """From the start that all replicas share, in blocks of any length; bit for bit at this size.

    At others XLA may sum the float32 gradient of one replica and of several in another order.
    """
    activation = ACTIVATIONS[name]
    layers = _layer(activation, replicas=3)
    runs = train(TASK, layers, **OPTIONS)
    for name, start in _trained(activation).items():
        recorded = getattr(runs.activation, name)
        assert recorded.shape == (3, 3, *start.shape)
        assert recorded.dtype == jnp.float64
        np.testing.assert_array_equal(recorded[:, 0], jnp.broadcast_to(start, (3, *start.shape)))
        assert len(np.unique(recorded[:, -1], axis=0)) == 3
    for i in range(3):
        alone = train(TASK, layers[i], **OPTIONS | {"key": jax.random.fold_in(KEY, i), "block": 1 + 6 * i})
        ours, theirs = ((run.order, run.activation, run.loss, run.loss_error) for run in (runs[i], alone))
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_fresh_loss_is_the_risk_of_the_recorded_activation(ensemble):
    """In its limit form the loss has the mean `population_risk`; |z| < 5 fails once in 1.7 million keys a record."""
    z = (ensemble.loss - ensemble.risk) / ensemble.loss_error
    assert np.all(np.abs(z) < 5), z
    own = eqx.combine(jax.tree.map(lambda leaf: leaf[1, 2], ensemble.activation.split()[0]), ensemble.activation)
    np.testing.assert_allclose(ensemble.risk[1, 2], population_risk(TASK, own, ensemble.order[1][2]), atol=2e-6, rtol=0)


def test_the_configuration_names_the_start(ensemble):
    start = {a.trained: a for a in ACTIVATIONS.values() if type(a) is type(ensemble.activation)}
    name = str(start[ensemble.activation.trained])
    assert dict(ensemble.settings)["activation"] == name
    assert ensemble.configuration()["activation"] == ensemble[1].configuration()["activation"] == name


def test_the_dataset_has_what_was_trained(ensemble):
    data = ensemble.to_xarray()
    assert {"bias", "scale"} & set(data) == set(ensemble.activation.trained)
    for name, values in _trained(ensemble.activation).items():
        assert data[name].dims == ("replica", "time", "head")
        np.testing.assert_array_equal(data[name], values)


@pytest.mark.parametrize("name", ["per head", "joint"])
def test_rates_of_zero_keep_the_start(name, without_risk):
    activation = ACTIVATIONS[name]
    still = train(TASK, _layer(activation), **OPTIONS | {"bias_rate": 0.0, "scale_rate": 0})
    assert not np.array_equal(still.order.m[0], still.order.m[-1])
    for leaf, start in _trained(activation).items():
        np.testing.assert_array_equal(getattr(still.activation, leaf), jnp.broadcast_to(start, (3, *start.shape)))


def test_small_steps_are_not_lost_in_float32_runs(without_risk):
    """κ_b η/D ∂ℓ/∂b < 1e-8 beside b = 1: nothing in float32."""
    activation = Softmax1([1.0, 1.0], [2.0, 2.0], trained=True)
    run = train(TASK, _layer(activation), **OPTIONS | {"bias_rate": 1e-7})
    moved = np.abs(np.diff(run.activation.bias, axis=0))  # in 15 steps
    assert np.all(moved > 0)
    assert np.all(moved < 15 * 1e-8)


def test_a_bias_that_is_not_finite_has_diverged(without_risk):
    # the first step takes b to −∞, where softmax-1 is softmax and the loss is finite
    far = Softmax1([1.0, 1.0], [1e3, 1e3], trained=True)
    with pytest.raises(RunFailed, match=r"replica 0 diverged between τ = 0 and τ = 0\.1") as failure:
        train(TASK, _layer(far), **OPTIONS | {"record": [0.0, 0.1, 3.0], "bias_rate": 1e308, "scale_rate": 0.0})
    kept = failure.value.trajectory
    assert int(kept.result) == Result.diverged
    np.testing.assert_array_equal(np.isnan(kept.activation.bias).all(axis=1), [False, True, True])
    np.testing.assert_array_equal(np.isnan(kept.order.m).all(axis=(1, 2)), [False, True, True])


class _Warm(Softmax):
    """A softmax that would train its temperature."""

    def __init__(self):
        super().__init__()
        self.trained = ("temperature",)


def test_refuses():
    with pytest.raises(ValueError, match=r"layer\.activation\.trained: expected 'bias' and 'scale' at most, got"):
        train(TASK, _layer(_Warm()), **OPTIONS)
    with pytest.raises(ValueError, match="bias: expected one number or one per head"):
        train(TASK, _layer(Softmax1([0.0, 1.0, 2.0], trained=True)), **OPTIONS)
    with pytest.raises(ValueError, match="weights: expected one number or one per head"):
        train(TASK, _layer(BayesSoftmax("norm", weights=[0.2, 0.3, 0.5])), **OPTIONS)


def test_drift_of_zero_keys(without_risk):
    """At k = 0 attention is c/(e^b + L) whatever the tokens: db/dτ = −κ_b ∂E/∂b and dc/dτ come without noise."""
    activation = ACTIVATIONS["per head"]
    layer = MultiHeadAttention(jnp.zeros((2, 20)), features=2, activation=activation)
    end = train(TASK, layer, **OPTIONS | {"time": 0.1, "record": 2})
    risk = lambda numbers: population_risk(TASK, Softmax1(**numbers), layer.order())  # noqa: E731
    slope = jax.grad(risk)(_trained(activation))
    for name, rate in RATES.items():
        drift = np.diff(getattr(end.activation, name), axis=0)[0] / 0.1
        np.testing.assert_allclose(drift, -rate * slope[name], rtol=1e-6)


@pytest.mark.parametrize("name", ["per head", "joint", "norm"])
def test_mean_drift_of_given_keys(name):
    """dm/dτ = −∂E/∂m − 2(∂E/∂r)m, db/dτ = −κ_b ∂E/∂b and dc/dτ = −κ_c ∂E/∂c in the limit loss, at any D.

    From the gradients of 40,000 single samples, at κ = 1; the self-consistent b_h = r_hh/2 − log w_h enters through
    ∂E/∂r. |z| < 5 fails once in 1.7 million keys per number, of which there are 8, 6 and 4.
    """
    activation, count = ACTIVATIONS[name], 40_000
    layer = _layer(activation, dtype=jnp.float64)
    order = layer.order()
    trained, rest = activation.split()
    slope, at = jax.jit(jax.grad(lambda state: population_risk(TASK, eqx.combine(state[0], rest), state[1])))(
        (trained, order)
    )
    expected = [at.m + 2 * at.r @ order.m, *_trained(slope).values()]

    params, others = eqx.partition(layer, trained_leaves(layer, {"keys": 1, "bias": 1, "scale": 1}))
    tokens = eqx.filter_jit(sim.draw_tokens)(TASK, jax.random.key(9), count, dim=20, dtype=jnp.float64)
    each = jax.jit(jax.vmap(lambda one: loss_gradient(params, others, one, "limit")))(tokens)
    samples = [each.keys[..., :2] * np.sqrt(20), *_trained(each.activation).values()]
    for mean, sample in zip(expected, samples, strict=True):
        z = (np.mean(sample, axis=0) - mean) / (np.std(sample, axis=0) / np.sqrt(count))
        assert np.all(np.abs(z) < 5), z
