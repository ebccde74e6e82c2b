"""Points of a sweep side by side: each is bit for bit the single run, wherever it stands and whatever is beside it."""

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
from riskless import without_risk

import sim.many
from sim import MultiHeadAttention, train, train_reduced
from sim.many import train_many, train_reduced_many
from theory import (
    BayesSoftmax,
    OrderParameters,
    Result,
    SingleLocation,
    Softmax,
    Softmax1,
    discrete,
    gaussian,
    sign_flips,
)

POINTS = 5
NUMBERS = [0.5, 3.0, 8.0, 1.7, 20.0]
TASKS = [SingleLocation(4, x, sign_flips([1 + 0.1 * x, 0.0], [0.0, 1.5 - 0.05 * x])) for x in NUMBERS]
ACTIVATIONS = {
    "softmax": [Softmax(1 + 0.1 * x) for x in NUMBERS],
    "softmax-1": [Softmax1([0.1 * x, -0.2], 1 + 0.1 * x, trained=True) for x in NUMBERS],
    "bias alone": [Softmax1([-0.1 * x, 0.3], 1 + 0.1 * x, trained="bias") for x in NUMBERS],
    "norm": [BayesSoftmax("norm", weights=[0.2 + 0.03 * x, 0.3]) for x in NUMBERS],
}
KEYS = [jax.random.key(i) for i in (3, 2**31, 1, 0, 77)]
OPTIONS = {
    "learning_rate": 2.0, "time": 1.5, "batch": 3, "record": 3, "evaluation": 20, "bias_rate": 0.7, "scale_rate": 1.9,
    "progress": False,
}  # fmt: skip
KINDS = ("sgd", "reduced")
MODULES = {"sgd": sim.many._sgd, "reduced": sim.many._chain}


RISK = importlib.import_module("sim.train").recorded_risk


@pytest.fixture(scope="module", autouse=True)
def _without_risk():
    with without_risk():
        yield


def points(name="softmax", tasks=TASKS, dim=20):
    """Tasks, layers and keys."""
    layers = [
        MultiHeadAttention.initial(key, heads=2, features=2, dim=dim, variance=0.5, activation=activation)
        for key, activation in zip(KEYS, ACTIVATIONS[name], strict=True)
    ]
    return list(zip(tasks, layers, KEYS, strict=True))


def single(kind, point, **options):
    task, layer, key = point
    options = OPTIONS | options | {"key": key, "throw": False}
    if kind == "sgd":
        return train(task, layer, **options)
    return train_reduced(task, layer.activation, layer.order(), dim=layer.dim, **options)


def many(kind, points, **options):
    tasks, layers, keys = zip(*points, strict=True)
    options = OPTIONS | options
    if kind == "sgd":
        return train_many(tasks, layers, keys, **options)
    orders = [layer.order() for layer in layers]
    return train_reduced_many(tasks, [layer.activation for layer in layers], orders, keys, dim=layers[0].dim, **options)


def assert_same(a, b):
    """All of two trajectories, bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert a.settings == b.settings
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


CASES = [
    ("sgd", "softmax", "finite", 3, 20), ("sgd", "softmax-1", "limit", 1, 3000),
    ("reduced", "softmax-1", "limit", 1, 20),
    ("reduced", "bias alone", "finite", 3, 20),  # one scale for all heads, which a single run may take out of a sum
]  # fmt: skip
MORE = [
    (kind, name, loss, batch, dim)
    for kind, dim in (("sgd", 20), ("sgd", 3000), ("reduced", 20))
    for name in ACTIVATIONS
    for loss in ("finite", "limit")
    for batch in (1, 3)
    if (kind, name, loss, batch, dim) not in CASES
]


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("kind", "name", "loss", "batch", "dim"),
    [*CASES[::2], *(pytest.param(*case, marks=pytest.mark.slow) for case in (*CASES[1::2], *MORE))],
)
def test_each_point_is_its_single_run_in_any_company(kind, name, loss, batch, dim):
    """At D = 20 `train` advances replicas in groups, at D = 3000 one by one."""
    options = {"loss": loss, "batch": batch, "time": 15 * 2.0 / dim}
    every = points(name, dim=dim)
    alone = [single(kind, point, **options) for point in every]
    assert len({np.asarray(run.order.m).tobytes() for run in alone}) == POINTS
    for chosen in ([0], [4, 3, 2, 1, 0], [2, 1]):
        runs = many(kind, [every[i] for i in chosen], **options)
        for i, run in zip(chosen, runs, strict=True):
            assert_same(run, alone[i])


@pytest.mark.parametrize(
    ("kind", "prior"),
    [
        ("sgd", lambda x: gaussian([0.1 * x, 0.0], [[1.0 + x, 0.6], [0.6, 0.9]])),
        ("reduced", lambda x: discrete([[x, 0.0], [0.0, 1.0], [0.3, 0.2]], np.array([1.0, x, 3.0]) / (4 + x))),
    ],
    ids=KINDS,
)
@pytest.mark.slow
def test_other_priors(kind, prior):
    every = points(tasks=[SingleLocation(4, x, prior(x)) for x in NUMBERS])
    for point, run in zip(every, many(kind, every, block=4), strict=True):
        assert_same(run, single(kind, point))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_points_are_replicas_of_one_task(kind):
    """`train` with replicas is the same program."""
    key, replicas = KEYS[0], 3
    layers = MultiHeadAttention.initial(key, heads=2, features=2, dim=20, variance=0.5, replicas=replicas)
    whole = single(kind, (TASKS[0], layers, key))
    runs = many(kind, [(TASKS[0], layers[i], jax.random.fold_in(key, i)) for i in range(replicas)])
    for i, run in enumerate(runs):
        np.testing.assert_array_equal(run.order.r, whole[i].order.r)
        np.testing.assert_array_equal(run.loss, whole[i].loss)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_point_has_its_own_risk(kind, monkeypatch):
    monkeypatch.setattr(importlib.import_module("sim.train"), "recorded_risk", RISK)
    chosen = points("softmax-1")[:2]
    runs = many(kind, chosen, record=2)
    for point, run in zip(chosen, runs, strict=True):
        assert np.all(np.isfinite(run.risk))
        assert_same(run, single(kind, point, record=2))
    assert dict(runs[1].settings)["key"] == tuple(jax.random.key_data(KEYS[1]).tolist())
    assert dict(runs[1].settings)["replicas"] is None
    assert "Softmax1(bias=[0.3" in dict(runs[1].settings)["activation"]


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("sgd", "snr"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("sgd", "start"), ("reduced", "start"), ("reduced", "snr"))
        ),
    ],
)
def test_a_point_that_diverges_leaves_the_others(kind, how):
    every = points()
    task, layer, key = every[1]
    if how == "start":
        every[1] = task, eqx.tree_at(lambda layer: layer.keys, layer, layer.keys * jnp.float32(1e23)), key
    else:
        every[1] = SingleLocation(4, 1e60, task.prior), layer, key
    runs = many(kind, every)
    assert [int(run.result) for run in runs] == [Result.successful, Result.diverged] + [Result.successful] * 3
    assert np.isnan(runs[1].order.m[1:]).all()
    for point, run in zip(every, runs, strict=True):
        assert_same(run, single(kind, point))


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_is_the_same_for_all_numbers(kind, monkeypatch):
    """One compilation of steps and one of measurements: tasks, activations, starts, keys and rates are numbers."""
    module = MODULES[kind]
    for name, options in (("advance", {"donate": "all-except-first"}), ("measure", {})):
        once = eqx.debug.assert_max_traces(getattr(module, name).__wrapped__, max_traces=1)
        monkeypatch.setattr(module, name, eqx.filter_jit(once, **options))
    every = points("softmax-1")
    for chosen in ([0, 1, 2], [4, 3, 2], [1, 1, 1]):
        numbers = {"learning_rate": 1.0 + chosen[0], "block": 1 + chosen[1], "bias_rate": 0.1 * chosen[0]}
        many(kind, [every[i] for i in chosen], **numbers)
    with pytest.raises(RuntimeError, match="can only be traced 1 times"):
        many(kind, every)


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_ends_all(kind):
    before = signal.getsignal(signal.SIGINT)

    def press() -> None:
        while signal.getsignal(signal.SIGINT) is before:  # until the run looks after it
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    runs = many(kind, points()[:2], time=1e8, record=[0.0, 1e8], block=100)
    presser.join()
    assert signal.getsignal(signal.SIGINT) is before
    for run in runs:
        assert int(run.result) == Result.interrupted
        np.testing.assert_array_equal(np.isnan(run.loss), [False, True])


OTHER = SingleLocation(4, 1.0, sign_flips([1.0, 1.0], [1.0, 1.0]))  # both amplitudes flip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": OTHER}, r"tasks\[1\]: .* tasks\[0\], .*SignFlips.*flipped=\(1,\).* got .*flipped=\(0, 1\)"),
        ({"task": SingleLocation(5, 3.0, TASKS[0].prior)}, r"tasks\[1\]: .*length=4.* got .*length=5"),
        (
            {"task": SingleLocation(4, 3.0, gaussian([1.0, 0.0], [1.0, 1.0]))},
            r"tasks\[1\]: expected the structure of tasks\[0\], .*SignFlips.* got .*Gaussian",
        ),
        ({"task": SingleLocation(4, 3.0, gaussian([1.0], [1.0]))}, r"\[1\].features: expected 1, .* got 2"),
        ({"key": 3}, r"keys\[1\]: expected one typed key"),
        ({"key": jax.random.key(0, impl="rbg")}, r"keys\[1\]: .*keys\[0\], key<fry>\[\], got key<rbg>\[\]"),
    ],
)
def test_refuses_points_of_another_kind(kind, change, message):
    first, (task, layer, key) = points()[:2]
    with pytest.raises(ValueError, match=message):
        many(kind, [first, (change.get("task", task), layer, change.get("key", key))])


def test_refuses_layers_of_another_kind():
    (first, second), layer = points()[:2], points()[1][1]
    others = {
        r"layers\[1\]: .*Softmax\(temperature.* got .*Softmax1": MultiHeadAttention(
            layer.keys, features=2, activation=Softmax1()
        ),
        r"layers\[1\]: .*f64\[\].* got .*f64\[2\]": MultiHeadAttention(
            layer.keys, features=2, activation=Softmax([1.0, 2.0])
        ),
        r"layers\[1\]: .*f32\[2,20\].* got .*f64\[2,20\]": MultiHeadAttention(
            layer.keys.astype(jnp.float64), features=2
        ),
        r"layers\[1\]: .*f32\[2,20\].* got .*f32\[3,20\]": MultiHeadAttention(jnp.ones((3, 20), "float32"), features=2),
        r"layers\[1\]: expected a single layer.* got keys \(1, 2, 20\)": MultiHeadAttention(
            layer.keys[None], features=2
        ),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            many("sgd", [first, (second[0], other, second[2])])


def test_refuses_chains_of_another_kind():
    orders = [layer.order() for _, layer, _ in points()[:2]]
    softmax = [Softmax(), Softmax()]

    def run(activations=softmax, orders=orders, keys=KEYS[:2], **options):
        return train_reduced_many(TASKS[:2], activations, orders, keys, **OPTIONS | {"dim": 20} | options)

    trained, fixed = Softmax1(trained=True), Softmax1()
    with pytest.raises(ValueError, match=r"activations\[1\]: .*trained=\('bias', 'scale'\).* got .*trained=\(\)"):
        run([trained, fixed])
    with pytest.raises(ValueError, match=r"orders\[1\]: expected the structure of orders\[0\], .*f64\[2,2\].* got .*3"):
        run(orders=[orders[0], OrderParameters(np.zeros((3, 2)), np.eye(3))])
    with pytest.raises(ValueError, match=r"orders\[0\]: expected one state: m of shape \(H, F\), got"):
        run(orders=[OrderParameters(np.zeros((1, 2, 2)), np.eye(2)[None])] * 2)
    with pytest.raises(ValueError, match=r"keys\[0\]: expected a threefry2x32 key"):
        run(keys=[jax.random.key(0, impl="rbg")] * 2)
    with pytest.raises(ValueError, match="dim: expected at least 7 for H = 2"):
        run(dim=6)


def test_refuses_sequences_of_other_lengths():
    tasks, layers, keys = zip(*points(), strict=True)
    with pytest.raises(ValueError, match="layers: expected as many as tasks, 5, got 1"):
        train_many(tasks, layers[:1], keys, **OPTIONS)
    with pytest.raises(ValueError, match="keys: expected as many as tasks, 5, got 4"):
        train_reduced_many(tasks, [Softmax()] * 5, [layers[0].order()] * 5, keys[:4], dim=20, **OPTIONS)
    with pytest.raises(ValueError, match="tasks: expected at least one, got none"):
        train_many([], [], [], **OPTIONS)
    with pytest.raises(ValueError, match="batch: expected a whole number >= 1, got 0"):
        train_many(tasks, layers, keys, **OPTIONS | {"batch": 0})
    with pytest.raises(TypeError, match="resume"):
        train_many(tasks, layers, keys, resume="run.npz", **OPTIONS)


def test_the_starts_given_are_left_as_they_were():
    every = points()
    before = [np.array(layer.keys) for _, layer, _ in every]
    many("sgd", every)
    for keys, (_, layer, _) in zip(before, every, strict=True):
        np.testing.assert_array_equal(layer.keys, keys)
