"""The result type: trained leaves of the activation beside the order parameters they belong to."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from theory import BayesSoftmax, OrderParameters, SingleLocation, Softmax, Softmax1, Trajectory, sign_flips

TASK = SingleLocation(4, 3.0, sign_flips([1.0, 0.0], [0.0, 1.5]))
REPLICAS, TIMES, HEADS = 5, 4, 3


def _trajectory(activation, replicas=REPLICAS, settings=()):
    """A trajectory whose trained leaves are their start plus the replica's number plus time/10."""
    lead = (TIMES,) if replicas is None else (replicas, TIMES)
    shift = np.arange(TIMES) / 10 + (0 if replicas is None else np.arange(replicas)[:, None])
    order = OrderParameters(jnp.zeros((*lead, HEADS, 2)), jnp.broadcast_to(jnp.eye(HEADS), (*lead, HEADS, HEADS)))
    trained, rest = activation.split()
    moved = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) + shift.reshape(*lead, *[1] * leaf.ndim)), trained)
    recorded = eqx.combine(moved, rest)
    codes = jnp.zeros(lead[:-1], jnp.int32)
    return Trajectory(jnp.arange(TIMES) / 10, order, recorded, jnp.zeros(lead), None, None, codes, TASK, settings)


def test_a_replica_has_its_own_trained_leaves():
    activation = Softmax1([0.0, 0.5, 1.0], 2.0, trained=True)
    one = _trajectory(activation)[-2]
    assert one.replicas is None
    np.testing.assert_allclose(one.activation.bias, 3 + np.arange(4)[:, None] / 10 + np.array([[0.0, 0.5, 1.0]]))
    np.testing.assert_allclose(one.activation.scale, 5 + np.arange(4) / 10)
    partly = _trajectory(Softmax1([0.0, 0.5, 1.0], 2.0, trained="scale"))[0]
    np.testing.assert_array_equal(partly.activation.bias, [0.0, 0.5, 1.0])
    assert partly.activation.scale.shape == (4,)
    fixed = Softmax([1.0, 2.0, 3.0])
    assert eqx.tree_equal(_trajectory(fixed)[0].activation, fixed)


@pytest.mark.parametrize("replicas", [None, REPLICAS])
def test_dataset_has_what_is_trained(replicas):
    lead = ("time",) if replicas is None else ("replica", "time")
    trajectory = _trajectory(Softmax1([0.0, 0.5, 1.0], 2.0, trained=True), replicas)
    data = trajectory.to_xarray()
    assert data.bias.dims == (*lead, "head")
    assert data.scale.dims == lead
    assert data.bias.attrs["long_name"] == "trained bias of the activation"
    np.testing.assert_array_equal(data.bias, trajectory.activation.bias)
    np.testing.assert_array_equal(data.scale, trajectory.activation.scale)
    assert set(_trajectory(Softmax1([0.0, 0.5, 1.0], trained="scale"), replicas).to_xarray()) == {
        "m", "r", "risk", "result", "scale",
    }  # fmt: skip
    assert set(_trajectory(BayesSoftmax("norm"), replicas).to_xarray()) == {"m", "r", "risk", "result"}


def test_dataset_comes_back_from_a_file(tmp_path):
    data = _trajectory(Softmax1([0.0, 0.5, 1.0], 2.0, trained=True)).to_xarray()
    data.to_zarr(tmp_path / "run.zarr", consolidated=False)
    assert xr.open_zarr(tmp_path / "run.zarr", consolidated=False).load().identical(data)


def test_configuration_names_the_activation_at_the_start():
    start = Softmax1([0.0, 0.5, 1.0], 2.0, trained=True)
    trajectory = _trajectory(start, settings={"activation": start.name, "source": "test"})
    for run in (trajectory, trajectory[1]):
        assert run.configuration()["activation"] == start.name
        assert json.loads(run.to_xarray().attrs["configuration"])["activation"] == start.name
    assert _trajectory(Softmax(2.0)).configuration()["activation"] == "Softmax(temperature=2.0)"


def test_print_has_a_column_of_what_is_trained():
    lines = str(_trajectory(Softmax1([0.0, 0.5, 1.0], 2.0, trained=True))).splitlines()
    assert lines[3] == "       τ      risk      bias     scale   (means over replicas and heads)"
    assert lines[-1] == "   0.300   0.00000   2.80000   4.30000"
    single = str(_trajectory(BayesSoftmax(0.25, trained=True), None)).splitlines()
    assert single[3] == "       τ      risk      bias"
    assert single[-1] == "   0.300   0.00000   0.55000"
    assert str(_trajectory(Softmax())).splitlines()[3] == "       τ      risk   (means over replicas)"
