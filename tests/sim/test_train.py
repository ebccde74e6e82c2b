"""Training: the same run however it is cut, records that belong to their time, failures that keep what they had."""

import importlib
import os
import signal
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sim
from sim import MultiHeadAttention, train
from sim._driver import RecordGrid
from sim._lanes import Lane, repeated
from sim._sgd import (
    _FRESH,
    _TRAINING,
    Plan,
    Setting,
    _fold_step,
    _over_chunks,
    advance,
    loss_gradient,
    measure,
    trained_leaves,
)
from theory import (
    Activation,
    Result,
    RunFailed,
    SingleLocation,
    Softmax,
    Softmax1,
    gaussian,
    population_risk,
    sign_flips,
)

TASK = SingleLocation(4, 3.0, sign_flips([1.0, 0.0], [0.0, 1.5]))
KEY = jax.random.key(5)
OPTIONS = {"learning_rate": 2.0, "time": 3.0, "batch": 2, "key": KEY, "record": 4, "evaluation": 20, "progress": False}


def _layer(replicas=None, dim=20, dtype=jnp.float32):
    return MultiHeadAttention.initial(
        jax.random.key(1), heads=2, features=2, dim=dim, variance=0.5, replicas=replicas, dtype=dtype
    )


def _assert_same(a, b):
    for name in ("loss", "loss_error"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    np.testing.assert_array_equal(a.order.m, b.order.m)
    np.testing.assert_array_equal(a.order.r, b.order.r)
    # derived from m and r with nodes fitted to the hardest record there is: equal to the risk's own tolerance
    np.testing.assert_allclose(a.risk, b.risk, atol=1e-8, rtol=0)


@pytest.fixture(scope="module")
def run():
    return train(TASK, _layer(), **OPTIONS)


@pytest.fixture(scope="module")
def ensemble():
    return train(TASK, _layer(replicas=3), **OPTIONS)


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_a_run_is_the_same_in_blocks_of_any_length(block, run):
    _assert_same(train(TASK, _layer(), block=block, **OPTIONS), run)


def test_a_replica_is_the_run_of_its_layer_alone(ensemble):
    layers = _layer(replicas=3)
    for i in range(3):
        _assert_same(train(TASK, layers[i], **OPTIONS | {"key": jax.random.fold_in(KEY, i)}), ensemble[i])


def test_a_record_belongs_to_its_time(run):
    # 30 steps of τ = 0.1; the same run ended earlier
    np.testing.assert_array_equal(run.time, np.array([0, 10, 20, 30]) * 2.0 / 20)
    for t in (1, 2, 3):
        shorter = train(TASK, _layer(), **OPTIONS | {"time": float(run.time[t]), "record": [float(run.time[t])]})
        np.testing.assert_array_equal(shorter.time[0], run.time[t])
        np.testing.assert_array_equal(shorter.order.m[0], run.order.m[t])
        np.testing.assert_array_equal(shorter.order.r[0], run.order.r[t])
        assert shorter.loss[0] == run.loss[t]


@pytest.mark.parametrize(
    ("dim", "batch", "chunks"), [(20, 3, [3]), pytest.param(15_000, 9, [4, 4, 1], marks=pytest.mark.slow)]
)
def test_steps_are_those_written_out(dim, batch, chunks):
    """Three steps by hand, with the keys folded as documented; the larger D splits the batch into chunks."""
    layer = _layer(dim=dim)
    record = np.arange(4) * 2.0 / dim
    run = train(TASK, layer, **OPTIONS | {"batch": batch, "time": record[-1], "record": record, "loss": "limit"})
    np.testing.assert_array_equal(run.time, record)
    draw, gradient = eqx.filter_jit(sim.draw_tokens), eqx.filter_jit(jax.grad(_limit_loss))
    fold = jax.random.fold_in
    keys = layer.keys
    for step in range(4):
        at = MultiHeadAttention(keys, features=2).order()
        np.testing.assert_allclose(run.order.m[step], at.m, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(run.order.r[step], at.r, rtol=1e-5, atol=1e-8)
        own = fold(fold(fold(KEY, _TRAINING), 0), step)
        total = jnp.zeros_like(keys)
        for c, size in enumerate(chunks):
            tokens = draw(TASK, fold(own, c), size, dim=dim)
            total = total + gradient(keys, (tokens.materialize(), tokens.position))
        keys = keys - jnp.float32(2.0 / batch) * total


def _limit_loss(keys, tokens):
    x, position = tokens
    scores = jnp.einsum("hd,bld->bhl", keys, x) / jnp.sqrt(jnp.float32(x.shape[-1]))
    attention = jnp.mean(jax.nn.softmax(scores), axis=1)
    return jnp.sum(jnp.square(attention - jax.nn.one_hot(position, x.shape[1], dtype=jnp.float32)))


def test_streams_do_not_overlap():
    keys = [jax.random.fold_in(KEY, purpose) for purpose in (_TRAINING, _FRESH)]
    steps = [0, 1, 2**32, 2**32 + 1, 2**33]
    data = [tuple(jax.random.key_data(_fold_step(k, jnp.asarray(s))).tolist()) for k in keys for s in steps]
    assert len(set(data)) == len(data)


def test_chunks_make_up_the_count():
    for count, chunk in ((1, 1), (5, 5), (7, 3), (6, 3), (2, 1)):
        assert _over_chunks(lambda key, size: jnp.asarray(size), KEY, count, chunk) == count


@pytest.mark.slow
def test_fresh_loss_is_the_population_risk():
    """In its limit form the loss of given keys has the mean `population_risk` at any D; |z| < 5."""
    options = OPTIONS | {"record": 8, "evaluation": 4000, "loss": "limit"}
    trajectory = train(TASK, _layer(), **options)
    z = (trajectory.loss - trajectory.risk) / trajectory.loss_error
    assert np.all(np.abs(z) < 5), z
    for t in (0, 7):
        np.testing.assert_allclose(
            trajectory.risk[t], population_risk(TASK, Softmax(), trajectory.order[t]), rtol=1e-8, atol=0
        )


def test_zero_keys_have_the_loss_of_uniform_attention():
    layer = MultiHeadAttention(jnp.zeros((2, 20), jnp.float32), features=2)
    start = train(TASK, layer, **OPTIONS | {"record": [0.0], "loss": "limit"})
    np.testing.assert_allclose(start.loss, 1 - 1 / 4, rtol=1e-6)
    np.testing.assert_allclose(start.risk, 1 - 1 / 4, rtol=1e-6)
    np.testing.assert_allclose(start.loss_error, 0, atol=1e-7)


def test_risk_beyond_the_reach_of_its_integrals_is_missing_alone():
    layer = MultiHeadAttention(_layer().keys.at[:, 0].set(1e4), features=2)
    steep = train(TASK, layer, **OPTIONS | {"record": 2})
    assert int(steep.result) == Result.successful
    assert np.isnan(steep.risk).all()
    assert np.isfinite(steep.loss).all()


class _Sigmoid(Activation):
    """An activation that the exact engine does not know."""

    name = "sigmoid"
    trained = ()

    def __call__(self, scores):
        return jax.nn.sigmoid(scores)


@pytest.mark.slow
def test_activations_without_exact_risk_have_a_sampled_one():
    layer = MultiHeadAttention(_layer().keys, features=2, activation=_Sigmoid())
    trajectory = train(TASK, layer, **OPTIONS | {"record": 2, "evaluation": 4000, "loss": "limit"})
    z = (trajectory.loss - trajectory.risk) / trajectory.loss_error
    assert np.all(np.abs(z) < 5), z


def test_fields(run, ensemble):
    assert run.replicas is None
    assert ensemble.replicas == 3
    assert run.risk.shape == run.loss.shape == run.loss_error.shape == (4,)
    assert ensemble.order.r.shape == (3, 4, 2, 2)
    assert ensemble.result.dtype == jnp.int32
    assert ensemble.result.tolist() == [Result.successful] * 3
    hash(run.settings)
    assert dict(run.settings) == {
        "source": "sgd", "activation": "Softmax(temperature=1.0)", "heads": 2, "features": 2, "dim": 20,
        "dtype": "float32", "learning_rate": 2.0, "batch": 2, "time": 3.0, "loss": "finite", "bias_rate": 1.0,
        "scale_rate": 1.0, "evaluation": 20, "replicas": None, "key": (0, 5), "key_impl": "threefry2x32",
    }  # fmt: skip
    assert dict(ensemble.to_xarray().sizes) == {"replica": 3, "time": 4, "head": 2, "feature": 2, "head_": 2}
    assert "reached its end" in str(run)


def test_the_layer_given_is_left_as_it_was(run):
    layer = _layer()
    before = np.array(layer.keys)
    first = train(TASK, layer, **OPTIONS)
    np.testing.assert_array_equal(layer.keys, before)
    _assert_same(first, run)


@pytest.mark.parametrize("activation", [Softmax, lambda x: Softmax1(x, x, trained=True)])
def test_numbers_never_recompile(monkeypatch, activation):
    module = importlib.import_module("sim.train")
    once = eqx.debug.assert_max_traces(advance.__wrapped__, max_traces=1)
    monkeypatch.setattr(module, "advance", eqx.filter_jit(once, donate="all-except-first"))
    monkeypatch.setattr(
        module, "measure", eqx.filter_jit(eqx.debug.assert_max_traces(measure.__wrapped__, max_traces=1))
    )
    for change in range(2):
        task = SingleLocation(4, 1.0 + change, sign_flips([1.0 + change, 0.0], [0.0, 1.5 + change]))
        layer = MultiHeadAttention(_layer().keys, features=2, activation=activation(1.0 + change))
        options = {"learning_rate": 1.0 + change, "block": 1 + 3 * change, "key": jax.random.key(change)}
        options |= {"record": [0.5 + change], "bias_rate": 1.0 + change, "scale_rate": 1.0 + change}
        train(task, layer, **OPTIONS | options)
    with pytest.raises(RuntimeError, match="can only be traced 1 times"):
        train(TASK, layer, **OPTIONS | {"batch": 3})


@pytest.mark.parametrize(("batch", "replicas"), [(1, 1), (10, 1), (10, 2), (1, 16)])
def test_memory_is_a_chunk_of_tokens(batch, replicas):
    """At D = 10^5 one sample of 10 tokens is the chunk, 4 MB: within 1.5 times of that and the keys."""
    task = SingleLocation(10, 1.0, sign_flips([2.0], [1.0]))
    layer = MultiHeadAttention(jnp.zeros((replicas, 4, 10**5), jnp.float32), features=1)
    rates = {"keys": jnp.asarray(1.0)}
    params, rest = eqx.partition(layer, trained_leaves(layer, rates))
    plan = Plan.make(task, layer, batch=batch, loss="finite")
    setting = Setting(Lane(jax.random.split(KEY, replicas), *repeated((task, rest), replicas)), rates, plan)
    compiled = advance.lower((setting, jnp.asarray(0), jnp.asarray(1)), params).compile().compiled
    chunk, keys = 4 * 10**6, layer.keys.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * (chunk + keys)


def test_mean_drift_of_zero_keys():
    """dm_hf/dτ = (2/H)(1/L)(1−1/L) √ν E θ_f at k = 0 (docs/model.md §5), from one step of 39,318 samples.

    There Σ_ℓ g_hℓ u_fℓ = −(2/(HL)) Σ_ℓ (δ_ℓε − 1/L) u_fℓ has the variance below; |z| < 5, once in 1.7 million keys.
    """
    length, heads, snr, dim, batch = 4, 2, 3.0, 20, 6 * 6553  # whole chunks
    layer = MultiHeadAttention(jnp.zeros((heads, dim), jnp.float64), features=2)
    end = train(TASK, layer, **OPTIONS | {"batch": batch, "time": 0.1, "record": [0.1], "loss": "limit"})
    assert dict(end.settings)["dtype"] == "float64"
    keep = 1 - 1 / length
    mean = 2 / heads / length * keep * np.sqrt(snr) * np.array([1.0, 0.0])
    variance = (2 / heads / length) ** 2 * (keep + keep**2 * snr * np.array([0.0, 1.5]) ** 2)
    z = (np.asarray(end.order.m[0]) / 0.1 - mean) / np.sqrt(variance / batch)
    assert np.all(np.abs(z) < 5), z
    np.testing.assert_allclose(end.order.m[0, 0], end.order.m[0, 1], rtol=1e-12)


def test_split_rate_of_zero_keys():
    """A split along a feature with E θ_f = 0 grows at (2/H)(1/L)(1−1/L)(1−2/L) ν E θ_f² (docs/model.md §5).

    The derivative of the SGD gradient along the split, from 40 batches of 1,000 samples; |z| < 5.
    """
    length, heads, snr, dim = 4, 2, 3.0, 20
    layer = MultiHeadAttention(jnp.zeros((heads, dim), jnp.float64), features=2)
    params, rest = eqx.partition(layer, trained_leaves(layer, {"keys": 1.0}))
    split = eqx.tree_at(lambda p: p.keys, params, jnp.zeros((heads, dim)).at[:, 1].set(jnp.array([1.0, -1.0])))

    @jax.jit
    @jax.vmap
    def rates(key):
        tokens = sim.draw_tokens(TASK, key, 1000, dim=dim, dtype=jnp.float64)
        _, change = jax.jvp(lambda p: loss_gradient(p, rest, tokens, "limit"), (params,), (split,))
        return -change.keys[:, 1] / 1000 * dim

    sampled = np.asarray(rates(jax.random.split(jax.random.key(3), 40)))
    expected = 2 / heads / length * (1 - 1 / length) * (1 - 2 / length) * snr * 1.5**2 * np.array([1, -1])
    z = (sampled.mean(axis=0) - expected) / (sampled.std(axis=0, ddof=1) / np.sqrt(40))
    assert np.all(np.abs(z) < 5), z


def test_divergence_is_reported_and_keeps_the_records():
    options = OPTIONS | {"learning_rate": 1e30, "time": 5e29, "record": [0, 1e29, 5e29], "block": 2}
    with pytest.raises(
        RunFailed, match=r"SGD: replica 0 diverged between τ = 0 and τ = 1e\+29; the records"
    ) as failure:
        train(TASK, _layer(), **options)
    kept = failure.value.trajectory
    assert int(kept.result) == Result.diverged
    np.testing.assert_array_equal(np.isnan(kept.risk), [False, True, True])
    np.testing.assert_array_equal(np.isnan(kept.order.m).all(axis=(1, 2)), [False, True, True])
    np.testing.assert_array_equal(np.isnan(kept.loss), [False, True, True])
    returned = train(TASK, _layer(), throw=False, **options)
    assert int(returned.result) == Result.diverged
    _assert_same(returned, kept)
    assert "diverged" in str(returned)
    assert "risk" in returned.to_xarray()


def test_a_replica_that_diverges_leaves_the_others(ensemble):
    layers = _layer(replicas=3)
    bad = eqx.tree_at(lambda layer: layer.keys, layers, layers.keys.at[1].mul(1e25))
    with pytest.raises(RunFailed, match="replica 1 diverged"):
        train(TASK, bad, **OPTIONS)
    mixed = train(TASK, bad, throw=False, **OPTIONS)
    assert mixed.result.tolist() == [Result.successful, Result.diverged, Result.successful]
    assert np.isnan(mixed.order.m[1, 1:]).all()
    for i in (0, 2):
        _assert_same(mixed[i], ensemble[i])


def test_interrupt_keeps_the_records():
    options = OPTIONS | {"time": 1e8, "record": [0.0, 1e8], "block": 100}
    before = signal.getsignal(signal.SIGINT)

    def press() -> None:
        while signal.getsignal(signal.SIGINT) is before:  # until the run looks after it
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    with pytest.raises(
        RunFailed, match=r"SGD: interrupted at τ = [\d.e+]+; the records made before that are kept"
    ) as stop:
        train(TASK, _layer(replicas=2), **options)
    presser.join()
    assert signal.getsignal(signal.SIGINT) is before
    kept = stop.value.trajectory
    assert kept.result.tolist() == [Result.interrupted] * 2
    np.testing.assert_array_equal(np.isnan(kept.risk), [[False, True]] * 2)


@pytest.mark.parametrize(
    ("record", "time", "steps"),
    [
        (None, 3.0, np.arange(31)),
        (None, 0.5, np.arange(6)),
        (None, 60.0, np.arange(0, 601, 20)),
        (3, 3.0, [0, 15, 30]),
        (2, 0.1, [0, 1]),
        ([0.0], 3.0, [0]),
        ([3.0], 3.0, [30]),
        ([0.04, 0.16, 2.99], 3.0, [0, 2, 30]),
        (np.array([1, 2]), 3.0, [10, 20]),
        ([3.04], 3.04, [30]),
    ],
)
def test_recorded_steps(record, time, steps):
    grid = RecordGrid.make(record, time, 2.0, 20)
    np.testing.assert_array_equal(grid.steps, steps)
    assert grid.steps.dtype == np.int64
    assert grid.times.tolist() == [s * 2.0 / 20 for s in np.asarray(steps).tolist()]


def test_long_runs_have_exact_steps():
    grid = RecordGrid.make([1e5], 1e5, 1e-3, 10**6)
    assert grid.steps.tolist() == [10**14]
    assert grid.times.tolist() == [1e5]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([0.0, 0.51, 0.52], "record: expected times on different steps .* got 0.51 and 0.52, both nearest to step 5"),
        (50, "record: expected times on different steps"),
        ([0.0, 3.2], "record: expected times up to time = 3, got 3.2"),
        ([1.0, 0.5], "record: expected strictly increasing times >= 0"),
        ([1.0, 1.0], "record: expected strictly increasing times >= 0"),
        ([-1.0, 1.0], "record: expected strictly increasing times >= 0"),
        ([], "record: expected strictly increasing times >= 0"),
        ([0.0, np.nan], "record: expected finite numbers"),
        ([[0.0, 1.0]], "record: expected 1 axes"),
        (1, "record: expected a whole number >= 2, got 1"),
        (2.5, "record: expected a whole number >= 2, got 2.5"),
        (True, "record: expected a whole number >= 2, got True"),
    ],
)
def test_refuses_records(record, message):
    with pytest.raises(ValueError, match=message):
        train(TASK, _layer(), **OPTIONS | {"record": record})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate: expected positive numbers"),
        ({"learning_rate": -1.0}, "learning_rate: expected positive numbers"),
        ({"learning_rate": [1.0, 2.0]}, "learning_rate: expected 0 axes"),
        ({"learning_rate": np.nan}, "learning_rate: expected finite numbers"),
        ({"time": 0.0}, "time: expected positive numbers"),
        ({"time": np.inf}, "time: expected finite numbers"),
        ({"time": 0.01}, "time: expected at least one step, η/D = 0.1, got 0.01"),
        ({"batch": 0}, "batch: expected a whole number >= 1, got 0"),
        ({"evaluation": 1}, "evaluation: expected a whole number >= 2, got 1"),
        ({"block": 0}, "block: expected a whole number >= 1, got 0"),
        ({"loss": "infinite"}, "loss: expected 'finite' or 'limit', got 'infinite'"),
        ({"bias_rate": -1.0}, "bias_rate: expected no negative entry"),
        ({"scale_rate": [1.0]}, "scale_rate: expected 0 axes"),
        ({"key": jax.random.PRNGKey(0)}, "key: expected one typed key"),
        ({"key": jax.random.split(KEY)}, "key: expected one typed key"),
        ({"key": 0}, "key: expected one typed key"),
    ],
)
def test_refuses_options(change, message):
    with pytest.raises(ValueError, match=message):
        train(TASK, _layer(), **OPTIONS | change)


def test_refuses_unknown_options():
    with pytest.raises(TypeError, match="step_size"):
        train(TASK, _layer(), step_size=1.0, **OPTIONS)


def test_refuses_models_that_do_not_fit():
    with pytest.raises(ValueError, match=r"layer\.features: expected 1, the features of the task, got 2"):
        train(SingleLocation(4, 1.0, gaussian([1.0], [1.0])), _layer(), **OPTIONS)
    stacked = MultiHeadAttention(jnp.zeros((2, 2, 2, 20), jnp.float32), features=2)
    with pytest.raises(ValueError, match=r"layer.keys: expected shape \(H, D\) or \(replicas, H, D\)"):
        train(TASK, stacked, **OPTIONS)
    with pytest.raises(ValueError, match="temperature: expected one number or one per head"):
        MultiHeadAttention(_layer().keys, features=2, activation=Softmax([1.0, 2.0, 3.0]))


@pytest.mark.slow
def test_reference_run():
    """docs/model.md §9: heads' m_·1 at τ = 20 from the reference start; runs scatter by 0.013, 0.06 is 4.5 of that."""
    task = SingleLocation(10, 1.0, sign_flips([2.0, 0, 0], [0, 2.5, 1.5]))
    keys = jax.random.normal(jax.random.PRNGKey(0), (4, 1000)).astype(jnp.float32)
    layer = MultiHeadAttention(jnp.stack([keys] * 4), features=3)
    end = train(task, layer, learning_rate=5.0, time=20.0, batch=10, key=KEY, record=[20.0])
    np.testing.assert_allclose(end.order.m[:, 0, :, 0], np.tile([1.345, 1.403, 1.362, 1.195], (4, 1)), atol=0.06)
