"""The figure of least risks against H: excesses over the Bayes risk, and what is drawn of them."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

import theory as th
from compare import Store
from figures import support as picture
from figures.support import Configuration
from headsplit.figures import run

mpl.use("Agg")


def optima(risks):
    return xr.Dataset({"risk": ("heads", risks)}, coords={"heads": np.arange(1, len(risks) + 1)})


@pytest.fixture
def store():
    """Two support points; softmax stays above, B-softmax comes down to the Bayes risk, and a bit below by its error."""
    found = {
        "bayes_0": xr.Dataset({"bayes": ("snr", [0.2]), "points": 2}),
        "optima_0_0": optima([0.5, 0.4, 0.35]),
        "optima_0_1": optima([0.5, 0.2 + 1e-6, 0.2 - 1e-6]),
    }

    configuration = {
        "priors": ["one_hot(features=2)"], "activations": ["softmax", "B-softmax"], "tolerance": 1e-4,
        "length": 5, "snr": 8.0,
    }  # fmt: skip
    return Store(Path("result.zarr"), found, configuration, {})


def test_lines_are_risks_and_their_excess(store):
    above, below = picture.draw(store).axes
    np.testing.assert_array_equal(above.lines[0].get_ydata(), [0.2, 0.2])
    np.testing.assert_array_equal(above.lines[1].get_xdata(), [2, 2])
    np.testing.assert_array_equal(above.lines[2].get_ydata(), [0.5, 0.4, 0.35])
    np.testing.assert_allclose(below.lines[1].get_ydata(), [0.3, 0.2, 0.15])
    # within the error it stands in the band, whatever its sign
    np.testing.assert_allclose(below.lines[2].get_ydata(), [0.3, 0.5e-4, 0.5e-4])


def test_numbers_are_those_about_the_number_of_points(store):
    found = picture.numbers(store)
    assert found["one-hot, F = 2: softmax − Bayes, H = 1"] == pytest.approx(0.3)
    assert found["one-hot, F = 2: B-softmax − Bayes, H = 2"] == pytest.approx(1e-6)
    assert len(found) == 4


@pytest.mark.slow
def test_one_support_point_needs_one_head(tmp_path):
    """Both activations are the posterior then: the known Bayes risk of one spike (docs/model.md §11)."""
    c = Configuration(priors=("discrete(points=[[1.0]])",), activations=("softmax",), more=0, starts=1)
    found = run("support", c, tmp_path, progress=False, say=lambda _: None)
    (excess,) = found.values()
    assert abs(excess) < 1e-4
    assert float(th.bayes_risk(th.SingleLocation(5, 8.0, th.discrete([[1.0]])))) == pytest.approx(0.10579, abs=1e-5)


def test_what_is_not_discrete_or_known_is_refused():
    with pytest.raises(ValueError, match="priors: expected discrete"):
        Configuration(priors=("gaussian(mean=[0.0], variance=[1.0])",)).check()
    with pytest.raises(ValueError, match="activations: expected names among softmax"):
        Configuration(activations=("relu",)).check()
