"""The picture of sequential learning: medians and stage times as stored, growth rates against the exact Hessian."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

import theory as th
from figures import sequential as picture
from figures.style import COLOURS

METHOD = th.Quadrature(1e-8, nodes=64, frequencies=96)  # fixed, to compile once


class Fake(SimpleNamespace):
    def __getitem__(self, group):
        return self.groups[group]


@pytest.fixture
def store():
    """Amplitudes .01 e^{κτ} of two features times a factor for each run; the second is censored in one of them."""
    c = replace(picture.SMALL, heads=2, snr=8.0, replicas=4)
    time = np.linspace(0, 10, 11)
    rates = picture.growth_rates(4, 8.0, 2, np.array([1.0, 0.5]))
    grown = 0.01 * np.exp(rates * time[:, None]) * np.array([1.0, 1.2, 0.8, 1.1])[:, None, None]

    def dataset(amplitude, stage_time):
        return xr.Dataset(
            {
                "amplitude": (("replica", "time", "feature"), amplitude),
                "stage_time": (("replica", "feature"), np.array(stage_time)),
                "variance": ("feature", np.array([1.0, 0.5])),
            },
            coords={"time": time},
            attrs={"in_order_of_variance": 0.75},
        )

    runs = dataset(grown, [[4.0, 9.0], [4.5, np.inf], [5.0, 9.5], [3.0, 8.0]])
    flows = dataset(1.05 * grown, [[4.0, 8.0], [4.3, 9.0], [5.0, np.inf], [2.9, np.inf]])
    return Fake(configuration=asdict(c), groups={"runs": runs, "flows": flows})


def test_rates_are_those_of_the_saddles_of_the_documentation():
    np.testing.assert_allclose(picture.growth_rates(4, 4.0, 2, np.array([1.0, 0.64])), [0.375, 0.24])
    assert picture.growth_rates(2, 4.0, 2, np.array([1.0])) == 0  # L = 2: nothing splits


@pytest.mark.slow
def test_rates_are_those_of_the_risk():
    """Minus the curvature of m ↦ risk(m, m mᵀ) at 0 along a split, by differences."""
    task = th.SingleLocation(4, 8.0, th.gaussian([0.0, 0.0], [1.0, 0.5]))
    rates = picture.growth_rates(4, 8.0, 2, np.array([1.0, 0.5]))
    for f, rate in enumerate(rates):
        step, m = 0.02, np.zeros((2, 2, 2))
        m[1, :, f] = step, -step
        risks = [float(th.population_risk(task, th.Softmax(), th.OrderParameters(x, x @ x.T), METHOD)) for x in m]
        # along (1, −1)/√2: risk ≈ −½ κ · 2 step²
        np.testing.assert_allclose((risks[0] - risks[1]) / step**2, rate, rtol=5e-3)


def test_lines_are_medians_of_flows_and_points_of_runs(store):
    ax = Figure().subplots()
    picture.amplitudes(ax, store)
    for f in range(2):
        solid = next(x for x in ax.get_lines() if x.get_color() == COLOURS[f] and x.get_linestyle() == "-")
        np.testing.assert_allclose(solid.get_ydata(), np.median(store["flows"]["amplitude"][:, :, f], axis=0))
        point, _, (bars,) = ax.containers[f].lines
        values = store["runs"]["amplitude"].values[:, :, f]
        np.testing.assert_allclose(point.get_ydata(), np.median(values, axis=0)[1:])  # τ = 0 is not on the axis
        ends = np.array([segment[:, 1] for segment in bars.get_segments()])
        np.testing.assert_allclose(ends, np.quantile(values, [0.25, 0.75], axis=0).T[1:])


def test_times_are_against_those_of_the_own_flow(store):
    ax = Figure().subplots()
    picture.times(ax, store)
    for f in range(2):
        x, y = ax.containers[f].lines[0].get_data()
        np.testing.assert_array_equal(x, store["flows"]["stage_time"][:, f])
        np.testing.assert_array_equal(y, store["runs"]["stage_time"][:, f])
    assert ax.get_xlim() == ax.get_ylim() == (2.9 / 1.25, 9.5 * 1.25)  # inf is left out


def test_numbers_are_delays_after_the_own_flow(store):
    found = picture.numbers(store)
    late = np.array([0.0, 0.2, 0.0, 0.1])
    np.testing.assert_allclose(found["feature 1: mean delay of the chain"], late.mean())
    np.testing.assert_allclose(found["feature 1: its error"], late.std(ddof=1) / 2)
    assert "feature 2: mean delay of the chain" not in found  # one pair tells no error
    assert found["feature 2: median stage time, chain"] == 9.25
    assert found["runs in the order of variance"] == 0.75


def test_the_figure_is_drawn_also_where_a_feature_never_splits(store):
    store["flows"]["stage_time"][:, 1] = np.inf
    assert len(picture.draw(store).axes) == 2


def test_wrong_configurations_are_named():
    for name, wrong in (("replicas", {"replicas": 1}), ("first", {"first": 300.0}), ("records", {"records": 2})):
        with pytest.raises(ValueError, match=name):
            replace(picture.SMALL, **wrong).check()
    picture.SMALL.check()
    picture.FULL.check()
