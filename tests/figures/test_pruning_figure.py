"""The figure of pruned layers: layers rebuilt from what was trained, risks against heads left, and what is drawn."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

import theory as th
from compare import Store
from figures import pruning as picture
from figures.pruning import ORDERS, Configuration, trained_layer
from headsplit.figures import run
from sim import MultiHeadAttention

mpl.use("Agg")
TASK = th.SingleLocation(5, 8.0, th.one_hot(2))


@pytest.fixture
def store():
    """Three heads for two support points: one of them is not needed."""
    risk = np.array([[[0.2, 0.25, 0.5, 1.0], [0.2, 0.6, 0.9, 1.0]]] * 2) + np.array([0.0, 0.02])[:, None, None]
    data = xr.Dataset(
        {name: (("layer", "order", "heads_left"), risk + shift) for name, shift in (("risk", 0), ("loss", 0.01))},
        coords={"heads_left": [3, 2, 1, 0], "order": list(ORDERS)},
    )
    data["redundant"] = (("layer", "order"), [[0, 0], [1, 0]])
    data["loss_error"] = 0 * data["risk"] + 0.004
    found = {"pruned_0": data, "bayes": xr.Dataset({"bayes": 0.1, "points": 2})}

    configuration = {
        "prior": "one_hot(features=2)", "activations": ["softmax"], "shares": ["kept"], "heads": 3, "length": 5,
        "snr": 8.0, "dim": 100, "layers": 2,
    }  # fmt: skip
    return Store(Path("result.zarr"), found, configuration, {})


def test_a_layer_is_rebuilt_from_its_order_parameters():
    own = MultiHeadAttention.initial(jax.random.key(0), heads=3, features=2, dim=20).order()
    order = th.OrderParameters(np.stack([0 * own.m, own.m]), np.stack([0 * own.r, own.r]))
    activation = th.BayesSoftmax(np.zeros(3), trained=True)
    activation = eqx.tree_at(lambda a: a.bias, activation, jnp.arange(6.0).reshape(2, 3))
    run = th.Trajectory(jnp.arange(2.0), order, activation, jnp.zeros(2), None, None, jnp.array(0), TASK, {})
    again = trained_layer(run, 20)
    np.testing.assert_allclose(again.order().m, own.m, atol=1e-6)
    np.testing.assert_allclose(again.order().r, own.r, atol=1e-6)
    np.testing.assert_array_equal(again.activation.bias, [3.0, 4.0, 5.0])  # pyright: ignore
    assert again.dim == 20


def test_every_layer_and_order_is_drawn(store):
    (ax,) = picture.draw(store).axes
    bayes, points, *lines = ax.lines
    np.testing.assert_array_equal(bayes.get_ydata(), [0.1, 0.1])
    np.testing.assert_array_equal(points.get_xdata(), [2, 2])
    drawn = [line.get_ydata() for line in lines if line.get_linestyle() == "-"]
    np.testing.assert_array_equal(
        drawn, store["pruned_0"]["risk"].transpose("order", "layer", "heads_left").values.reshape(4, 4)
    )
    points = [bars[0].get_ydata() for bars in ax.containers]
    np.testing.assert_array_equal(points, np.array(drawn) + 0.01)
    assert ax.get_xlim()[0] > ax.get_xlim()[1]


def test_numbers_are_means_over_layers(store):
    found = picture.numbers(store)
    assert found["softmax: risk"] == pytest.approx(0.21)
    assert found["softmax: redundant heads"] == 0.5
    assert found["softmax: risk, 1 left, least useful first"] == pytest.approx(0.51)
    assert found["softmax: risk without the most useful head"] == pytest.approx(0.61)


@pytest.mark.slow
def test_a_tiny_one_end_to_end(tmp_path):
    c = Configuration(
        prior="one_hot(features=2)", activations=("softmax",), shares=("renormalized",), heads=2, dim=20, time=0.5,
        layers=1, samples=16, snr=8.0,
    )  # fmt: skip
    found = run("pruning", c, tmp_path, progress=False, say=lambda _: None)
    assert found["Bayes risk"] == pytest.approx(float(th.bayes_risk(TASK)))
    assert 0 < found["softmax: risk"] < 1


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="shares: expected one for each"):
        Configuration(shares=("kept",)).check()
    with pytest.raises(ValueError, match="activations: expected names among"):
        Configuration(activations=("relu",), shares=("kept",)).check()
