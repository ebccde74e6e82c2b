"""The picture of splitting: flows and runs as stored, sides and crossings by hand, and a tiny case computed."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from figures import splitting as picture


class Fake(SimpleNamespace):
    def __getitem__(self, group):
        return self.groups[group]


def dataset(time, m, zeros, arrived, stage_time):
    lead = ("replica",) * (m.ndim - 3)
    return xr.Dataset(
        {
            "m": ((*lead, "time", "head", "feature"), m),
            "excursion_zero": ("excursion", np.array(zeros, float)),
            "excursion_arrived": ("excursion", np.array(arrived, float)),
            "stage_time": ((*lead, "feature"), np.asarray(stage_time, float)),
        },
        coords={"time": time},
    )


@pytest.fixture
def store():
    """Four heads that end on all combinations of two signs; in one of the runs two heads stay together."""
    time = np.linspace(0, 10, 6)
    signs = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1.0]])
    m = 0.1 * time[:, None, None] * signs
    other = m.copy()
    other[:, 1] = m[:, 0]
    one = time[:, None, None] * np.array([[0.1], [0.1], [-0.1]])
    c = replace(picture.SMALL, replicas=2, excursion_start=(1.0, 0.5, -1.5))
    return Fake(
        configuration=asdict(c),
        groups={
            "tree_flow": dataset(time, m, [], [], [3.0, 5.0]),
            "tree_runs": dataset(time, np.stack([m, other]), [], [], [[3.0, 5.0], [4.0, np.inf]]),
            "excursion_flow": dataset(time, one, [6.0], [7.0], [2.0]),
            "excursion_runs": dataset(
                time, np.stack([one, 1.1 * one]), [5.0, 8.0, 9.0], [6.0, 9.0, np.nan], [[2.0]] * 2
            ),
        },
    )  # fmt: skip


@pytest.mark.parametrize(("part", "feature"), [("tree", 0), ("tree", 1), ("excursion", 0)])
def test_every_head_has_its_flow_and_its_runs(store, part, feature):
    ax = Figure().subplots()
    picture.overlaps(ax, store, part, feature)
    for h in range(store[f"{part}_flow"].sizes["head"]):
        *runs, flow = (line for line in ax.get_lines() if line.get_color() == picture.look(h)["color"])
        np.testing.assert_array_equal(flow.get_ydata(), store[f"{part}_flow"]["m"][:, h, feature])
        assert len(runs) == 2
        for own, line in enumerate(runs):
            np.testing.assert_array_equal(line.get_ydata(), store[f"{part}_runs"]["m"][own, :, h, feature])


def test_crossings_are_those_of_finished_excursions(store):
    assert picture.zeros(store["excursion_runs"]).tolist() == [5.0, 8.0]
    ax = Figure().subplots()
    picture.crossings(ax, store)
    assert ax.get_lines()[1].get_xdata().tolist() == [5.0, 8.0]


def test_no_excursion_is_drawn_and_counted_too(store):
    for group in ("excursion_runs", "excursion_flow"):
        store.groups[group] = store[group].isel(excursion=slice(0, 0))
    assert picture.numbers(store)["excursions of settled heads in the runs"] == 0
    picture.draw(store)


def test_last_crossings_are_those_of_any_head():
    """By hand: heads that go through 0 at 1.25 and 2.5, and none; without replicas and with them."""
    time = np.arange(4.0)
    m = np.array([[-1.0, 1.0], [-1.0, 1.0], [3.0, 1.0], [3.0, -1.0]])[..., None]
    np.testing.assert_allclose(picture.last_crossings(dataset(time, m, [], [], [0.0])), [2.5])
    some = dataset(time, np.stack([m[:, :1], np.abs(m[:, :1])]), [], [], [[0.0]] * 2)
    np.testing.assert_allclose(picture.last_crossings(some), [1.25, np.nan])


def test_sides_are_read_as_numbers():
    assert picture.patterns(np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])).tolist() == [3, 1, 2, 0]


def test_numbers_count_groups_and_crossings(store):
    found = picture.numbers(store)
    assert found["groups of heads at the end, flow"] == 4
    assert found["the same, mean of the runs"] == 3.5
    assert found["stage time, feature 1, median of the runs"] == 3.5
    names = ("excursions of settled heads in the runs", "runs that end even")
    assert [found[name] for name in names] == [2, 0]
    names = ("last crossing of 0, flow", "the same, median of the runs", "its scatter")
    assert np.isnan([found[name] for name in names]).all()  # no head of these goes through 0


def test_the_start_of_the_excursion_is_as_given():
    order = picture._order(picture.SMALL, "excursion")
    np.testing.assert_allclose(order.m[:, 0], np.sqrt(0.25 / 500) * np.array(picture.SMALL.excursion_start))
    np.testing.assert_allclose(order.r_perp, 0.25 * np.eye(4), atol=1e-15)


def test_wrong_configurations_are_named():
    for name, wrong in (("replicas", {"replicas": 1}), ("excursion_start", {"excursion_start": (1.0, -1.0)})):
        with pytest.raises(ValueError, match=name):
            replace(picture.SMALL, **wrong).check()
    picture.SMALL.check()
    picture.FULL.check()
