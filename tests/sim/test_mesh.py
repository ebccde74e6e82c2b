"""Several devices give what one gives: bit for bit where each has its own replicas, to rounding where they share steps.

Run as a script, this file is the process with eight devices.
"""

import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from riskless import without_risk

from sim import MultiHeadAttention, draw_tokens, train, train_reduced
from sim._lanes import Lane, repeated
from sim._mesh import check_mesh, layout, placed
from sim._sgd import Plan, Setting, advance, trained_leaves
from theory import SingleLocation, Softmax, Softmax1, sign_flips

TASK = SingleLocation(3, 3.0, sign_flips([1.0], [1.0]))
KEY = jax.random.key(5)
OPTIONS = {"learning_rate": 1.0, "time": 100 / 16, "batch": 8, "key": KEY, "record": 3, "evaluation": 16}
OPTIONS |= {"bias_rate": 0.7, "progress": False}


def mesh_of(*sizes, axes, back=False):
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, axes, devices=devices[::-1] if back else devices)


def layer_of(replicas=8):
    activation = Softmax1([0.1, -0.2], 2.0, trained="bias")
    return MultiHeadAttention.initial(
        jax.random.key(1), heads=2, features=1, dim=16, variance=0.5, activation=activation, replicas=replicas
    )


def sgd(replicas=8, **options):
    """100 steps."""
    return train(TASK, layer_of(replicas), **OPTIONS | options)


def reduced(**options):
    layer = layer_of()
    return train_reduced(TASK, layer.activation, layer.order(), dim=layer.dim, **OPTIONS | options)


def numbers(run):
    return [np.asarray(x) for x in (run.order.m, run.order.r, run.activation.bias, run.loss, run.loss_error)]


def same(a, b):
    for x, y in zip(numbers(a), numbers(b), strict=True):
        np.testing.assert_array_equal(x, y)


def close(a, b):
    for x, y in zip(numbers(a), numbers(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.fixture(scope="module", autouse=True)
def _without_risk():
    with without_risk():
        yield


@pytest.fixture(scope="module")
def alone():
    return sgd()


pytestmark = pytest.mark.filterwarnings("error")  # of donated buffers that are not used


@pytest.mark.parametrize(("size", "back"), [pytest.param(1, False, marks=pytest.mark.slow), (2, True)])
def test_replicas_are_spread_bit_for_bit(size, back, alone):
    same(sgd(mesh=mesh_of(size, axes=("replica",), back=back)), alone)


@pytest.mark.slow
def test_replicas_of_the_chain_are_spread_bit_for_bit():
    one = reduced()
    same(reduced(mesh=mesh_of(2, axes=("replica",))), one)


@pytest.mark.parametrize(
    ("dim", "batch", "heads"),
    [
        pytest.param(37, 100, 3, marks=pytest.mark.slow),
        pytest.param(8, 3, 2, marks=pytest.mark.slow),
        (200, 2, 1),
    ],
)
def test_replicas_are_rounded_the_same_in_any_company(dim, batch, heads):
    """Where several small ones advance side by side (the last two), and where one does."""
    task = SingleLocation(5, 2.0, sign_flips([1.0], [1.0]))
    layer = MultiHeadAttention.initial(jax.random.key(0), heads=heads, features=1, dim=dim, replicas=40)
    options = OPTIONS | {"learning_rate": 2.0, "time": 24 / dim, "batch": batch, "record": 2}
    run = train(task, layer, **options)
    fewer = train(task, MultiHeadAttention(layer.keys[:18], features=1), mesh=mesh_of(2, axes=("replica",)), **options)
    alone = train(task, layer[39], **options | {"key": jax.random.fold_in(KEY, 39)})
    np.testing.assert_array_equal(fewer.order.r, run.order.r[:18])
    np.testing.assert_array_equal(alone.order.r, run.order.r[39])
    np.testing.assert_array_equal(alone.loss, run.loss[39])


def test_other_generators():
    """Their draws are not those of each key where keys are batched."""
    key = jax.random.key(7, impl="rbg")
    layer = layer_of(7)
    run = train(TASK, layer, **OPTIONS | {"key": key})
    alone = train(TASK, layer[6], **OPTIONS | {"key": jax.random.fold_in(key, 6)})
    np.testing.assert_array_equal(alone.order.r, run.order.r[6])
    with pytest.raises(ValueError, match="key: expected a threefry2x32 key"):
        reduced(key=key)


@pytest.mark.parametrize("axis", ["batch", "dim"])
def test_a_step_is_split(axis):
    close(sgd(None, mesh=mesh_of(2, axes=(axis,))), sgd(None))


@pytest.mark.slow
def test_a_run_goes_on_on_other_devices(alone, monkeypatch, tmp_path):
    replace, saves = os.replace, []

    def stop(aside, path):
        replace(aside, path)
        saves.append(path)
        if len(saves) == 3:
            raise KeyboardInterrupt

    path = tmp_path / "run.npz"
    every = {"block": 10, "checkpoint_seconds": 0}
    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        sgd(checkpoint=path, mesh=mesh_of(2, axes=("replica",), back=True), **every)
    assert len(saves) == 3
    copy = tmp_path / "copy.npz"
    copy.write_bytes(path.read_bytes())
    same(sgd(resume=path), alone)
    same(sgd(resume=copy, mesh=mesh_of(1, axes=("replica",))), alone)


@pytest.mark.parametrize("axis", ["batch", "dim"])
def test_each_device_draws_its_part(axis):
    """The memory of a step halves, and the keys stay where they were."""
    layer = MultiHeadAttention(jnp.ones((1, 2, 4096), jnp.float32), features=1)
    rates = {"keys": jnp.asarray(1.0)}
    params, rest = eqx.partition(layer, trained_leaves(layer, rates))
    memory = []
    for mesh in (None, mesh_of(2, axes=(axis,))):
        plan = Plan.make(TASK, layer, batch=8, loss="finite", mesh=mesh)
        setting = placed(Setting(Lane(KEY[None], *repeated((TASK, rest), 1)), rates, plan), plan.mesh)
        own = eqx.tree_at(lambda p: p.keys, params, placed(params.keys, plan.mesh, "replica", None, "dim"))
        analysis = advance.lower((setting, jnp.asarray(0), jnp.asarray(1)), own).compile().compiled.memory_analysis()
        memory.append(analysis.temp_size_in_bytes)
        size = own.keys.sharding.shard_shape(own.keys.shape)
        assert analysis.alias_size_in_bytes == 4 * np.prod(size)  # given buffers are taken over
    assert memory[1] < 0.6 * memory[0]


@pytest.mark.parametrize("axes", [("batch",), ("dim",)])
def test_tokens_are_the_same_however_they_are_laid_out(axes):
    sharding = layout(check_mesh(mesh_of(2, axes=axes), {"batch": {}, "dim": {}}), (4, 3, 10), "batch", None, "dim")
    one, split = draw_tokens(TASK, KEY, 4, dim=10), draw_tokens(TASK, KEY, 4, dim=10, sharding=sharding)
    assert len(split.noise.addressable_shards) == 2
    jax.tree.map(np.testing.assert_array_equal, one, split)


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        (("replicas",), {}, r"expected one axis 'replica', or axes among 'batch' and 'dim', got axes \('replicas',\)"),
        (("replica", "dim"), {}, r"expected one axis 'replica', or .* got axes \('replica', 'dim'\)"),
        (("replica",), {"replicas": 3}, "expected an axis 'replica' whose size divides the replicas, 3, got 2"),
        (("replica",), {"replicas": None}, "expected no axis 'replica' for a start without the replicas"),
        (("batch",), {"batch": 3}, "expected an axis 'batch' whose size divides the samples drawn at once, 3, got 2"),
    ],
)
def test_what_cannot_be_spread_is_refused(axes, options, message):
    sizes = (2, 1)[: len(axes)]
    with pytest.raises(ValueError, match=f"mesh: {message}"):
        sgd(mesh=mesh_of(*sizes, axes=axes), **options)


def test_other_refusals():
    with pytest.raises(ValueError, match="mesh: expected a Mesh, got 2"):
        sgd(mesh=2)
    odd = MultiHeadAttention.initial(KEY, heads=2, features=1, dim=15)
    with pytest.raises(ValueError, match="mesh: expected an axis 'dim' whose size divides D, 15, got 2"):
        train(TASK, odd, mesh=mesh_of(2, axes=("dim",)), **OPTIONS)
    large = MultiHeadAttention(jnp.zeros((2, 15_000), jnp.float32), features=1, activation=Softmax())
    with pytest.raises(ValueError, match="whose size divides the samples drawn at once, 5, got 2"):
        train(TASK, large, mesh=mesh_of(2, axes=("batch",)), **OPTIONS)
    with pytest.raises(ValueError, match=r"mesh: expected one axis 'replica', got axes \('dim',\)"):
        reduced(mesh=mesh_of(2, axes=("dim",)))
    with jax.threefry_partitionable(False), pytest.raises(ValueError, match=r"mesh: .*jax_threefry_partitionable"):
        sgd(mesh=mesh_of(2, axes=("batch",)))


# each of eight devices compiles for itself
@pytest.mark.slow
@pytest.mark.parametrize("how", ["spread", "split"])
def test_eight_devices(how):
    root = Path(__file__).parents[2]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, __file__, how], env=os.environ | flags, cwd=root, check=True, timeout=300)


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    with without_risk():
        run = sgd(loss="limit")  # it compiles faster
        if sys.argv[1] == "spread":
            same(sgd(loss="limit", mesh=mesh_of(8, axes=("replica",))), run)
            same(reduced(batch=1, mesh=mesh_of(8, axes=("replica",))), reduced(batch=1))
        else:
            for sizes, axes in (((8,), ("batch",)), ((8,), ("dim",)), ((2, 4), ("batch", "dim"))):
                close(sgd(loss="limit", mesh=mesh_of(*sizes, axes=axes)), run)
