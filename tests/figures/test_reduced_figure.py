"""The figure of the exact chain: its comparisons with the layer and the flow, and what is drawn of them."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

from compare import Store
from figures import reduced as picture
from figures.reduced import CHAIN, LAYER, Configuration

mpl.use("Agg")
TINY = Configuration(dims=(40,), replicas=(3,), learning_rate=2.0, batch=1, time=0.5, records=3)


def runs(splits, risk=0.5):
    """Two heads at ± each of these splits, growing from 0."""
    splits = np.asarray(splits, float)
    m = splits[:, None, None, None] * np.linspace(0, 1, 3)[:, None, None] * np.array([1.0, -1.0])[:, None]
    return xr.Dataset(
        {
            "m": (("replica", "time", "head", "feature"), m),
            "r": (("replica", "time", "head", "head_"), np.einsum("rthf,rtgf->rthg", m, m)),
            "risk": (("replica", "time"), risk - m[:, :, 0, 0] ** 2),
        },
        coords={"time": [0.0, 1.0, 2.0]},
        attrs={"dim": 100},
    )


@pytest.fixture
def store():
    time, m, r = [0.0, 1.0, 2.0], np.ones((3, 2, 1)), np.ones((3, 2, 2))
    off = np.array([0.0, 0.001, 0.003])[:, None, None]
    dims = {"m": ("time", "head", "feature"), "r": ("time", "head", "head_")}
    large = xr.Dataset(
        {
            **{f"flow_{name}": (dims[name], own) for name, own in (("m", m), ("r", r))},
            **{f"chain_{name}": (dims[name], own + off) for name, own in (("m", m), ("r", r))},
            **{f"{name}_deviation": (dims[name], 0.001 * own) for name, own in (("m", m), ("r", r))},
            "chain_risk": ("time", [0.5, 0.4, 0.3]),
            "flow_risk": ("time", [0.5, 0.4, 0.302]),
        },
        coords={"time": time},
        attrs={"dim": 10**6},
    )

    configuration = {
        "dims": [100], "length": 4, "heads": 2, "snr": 4.0, "learning_rate": 4.0, "batch": 4, "time": 2.0,
        "replicas": [4], "large_dim": 10**6, "large_learning_rate": 8.0, "large_batch": 1,
    }  # fmt: skip
    return Store(
        Path("result.zarr"),
        {"layer_0": runs([1.0, 2.0, 3.0]), "chain_0": runs([1.0, 2.0, 3.0, 4.0]), "large": large},
        configuration,
        {},
    )


def test_means_and_distributions_are_those_of_the_runs(store):
    means, law, *_ = picture.draw(store).axes
    np.testing.assert_allclose(means.lines[0].get_ydata(), [0, 1.25, 2.5])
    (bars,) = means.containers
    np.testing.assert_allclose(bars[0].get_ydata(), [0, 1, 2])
    heights = bars[2][0].get_segments()[2][:, 1]
    np.testing.assert_allclose(np.ptp(heights) / 2, 1 / np.sqrt(3))
    np.testing.assert_allclose(law.lines[0].get_xdata(), [1, 1, 2, 3, 4])
    np.testing.assert_allclose(law.lines[1].get_ydata(), [0, 1 / 3, 2 / 3, 1])


def test_large_run_is_drawn_beside_the_flow_and_in_deviations(store):
    *_, path, residual = picture.draw(store).axes
    assert [bars[0].get_ydata().tolist() for bars in path.containers] == [[1.0, 1.001, 1.003]] * 4
    assert [line.get_ydata().tolist() for line in path.lines if line.get_linestyle() != "None"] == [[1.0] * 3] * 4
    for bars in residual.containers:
        np.testing.assert_allclose(bars[0].get_ydata(), [1, 3])


def test_numbers_by_hand(store):
    found = picture.numbers(store)
    assert found["D = 100: mean split of the chain at the end"] == pytest.approx(2.5)
    z = 0.5 / np.hypot(np.sqrt(5 / 3) / 2, 1 / np.sqrt(3))
    assert picture.deviations(store["layer_0"], store["chain_0"])[0, -1] == pytest.approx(z)
    assert found["D large: share of records in the 95 % band"] == pytest.approx(0.5)
    assert found["D large: largest |chain − flow| of the risk"] == pytest.approx(0.002)


@pytest.mark.slow
def test_both_kinds_start_from_the_same_keys():
    layer, chain = (picture.runs(TINY, 0, kind) for kind in (LAYER, CHAIN))
    for name in ("m", "r"):
        start = layer[name].isel(time=0)
        np.testing.assert_allclose(start, chain[name].isel(time=0), atol=1e-6)
        np.testing.assert_array_equal(start, start.isel(replica=[0] * 3))
    assert float(abs(layer["m"] - chain["m"]).isel(time=-1).min()) > 0  # samples of their own


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="replicas: expected one number for each D"):
        Configuration(replicas=(3,)).check()
    with pytest.raises(ValueError, match="large_start: expected one row"):
        Configuration(heads=3).check()
