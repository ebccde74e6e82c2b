"""Stage times of hand-made trajectories with known crossings, and slopes planted in them."""

import inspect
import warnings

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from compare import load, log_dim_slope, save, stage_times
from theory import MonteCarlo, OrderParameters, SingleLocation, Softmax, Trajectory, discrete, gradient_flow, sign_flips
from theory.passage import SPLIT_FRACTION

FLIP = sign_flips([0.0], [1.0])
METHOD = MonteCarlo(2000)  # compiles sooner than the exact engine
ANY = OrderParameters([[0.0]], [[1.0]])


@pytest.fixture(autouse=True)
def _no_warnings():
    """NaN and inf are results here, not accidents."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def made(time, m, *, prior=FLIP, snr=1.0, risk=None):
    """A trajectory with the given m (..., T, H, F); records that are NaN in m are NaN everywhere."""
    time, m = np.asarray(time, dtype=float), np.asarray(m, dtype=float)
    finite = np.all(np.isfinite(m), axis=(-1, -2))
    r = m @ np.swapaxes(m, -1, -2) + np.eye(m.shape[-2])
    order = eqx.tree_at(lambda o: (o.m, o.r), ANY, (jnp.asarray(m), jnp.asarray(r)))  # not checked: NaN are refused
    risk = np.where(finite, 0.8, np.nan) if risk is None else np.asarray(risk)
    result = jnp.asarray(np.where(finite.all(axis=-1), 0, 1))
    task = SingleLocation(4, snr, prior)
    return Trajectory(jnp.asarray(time), order, Softmax(), jnp.asarray(risk), None, None, result, task, {})


def pair(amplitudes):
    """Two heads at ± the amplitudes (..., T): m (..., T, 2, 1)."""
    return np.asarray(amplitudes, dtype=float)[..., None, None] * np.array([[1.0], [-1.0]])


def growing(starts, rate, time):
    """Amplitudes (R, T) that grow exponentially up to 1."""
    return np.minimum(np.asarray(starts)[:, None] * np.exp(rate * np.asarray(time)), 1.0)


def test_passage_is_log_linear_and_exact_for_exponential_growth():
    time = np.linspace(0, 20, 9)
    stages = stage_times(made(time, pair(growing([0.003, 0.01], 0.4, time))))
    np.testing.assert_allclose(stages.stage_time[:, 0], np.log(0.25 / np.array([0.003, 0.01])) / 0.4, rtol=1e-12)
    assert not stages.at_start.any()
    assert not stages.censored.any()
    assert stages.threshold == SPLIT_FRACTION == 0.25


def test_amplitude_is_in_units_of_the_full_split():
    prior = sign_flips([2.0, 0.5], [0.0, 1.5])
    m = np.array([[[5.0, 1.0], [6.0, 1.0], [7.0, 4.0], [8.0, 4.0]]])
    stages = stage_times(made([0.0], m, prior=prior, snr=4.0))
    assert np.isnan(stages.amplitude[0, 0, 0])
    assert stages.amplitude[0, 0, 1] == pytest.approx(np.std([1, 1, 4, 4]) / (2 * 1.5))


@pytest.mark.parametrize(
    ("amplitudes", "time", "at_start", "censored"),
    [
        pytest.param([0.3, 0.5, 1.0], 1.0, True, False, id="first record"),
        pytest.param([0.25, 0.1, 0.1], 1.0, True, False, id="exactly there at the first record"),
        pytest.param([0.1, 0.2, 0.24], np.inf, False, True, id="never"),
        pytest.param([0.1, 0.25, 0.5], 2.0, False, False, id="exactly at a record"),
        pytest.param([0.1, 0.2, 0.25], 4.0, False, False, id="exactly at the last record"),
        pytest.param([0.0, 0.0, 1.0], 2.5, False, False, id="from zero: linear"),
        pytest.param([0.0, 0.0, 0.0], np.inf, False, True, id="zero throughout"),
        pytest.param([0.125, 0.5, 0.1], 1.5, False, False, id="falls below again"),
        pytest.param([1e-150, 0.5, 1.0], 2 - np.log(2) / np.log(0.5e150), False, False, id="from far below"),
        pytest.param([0.3, np.nan, np.nan], 1.0, True, False, id="fails after it"),
        pytest.param([0.1, np.nan, 1.0], np.inf, False, True, id="fails before it, whatever comes then"),
        pytest.param([np.nan, np.nan, np.nan], np.inf, False, True, id="fails at once"),
    ],
)
def test_defined_results_at_the_edges(amplitudes, time, at_start, censored):
    stages = stage_times(made([1.0, 2.0, 4.0], pair(amplitudes)))
    assert stages.stage_time[0, 0] == pytest.approx(time, abs=1e-12)
    assert bool(stages.at_start[0, 0]) is at_start
    assert bool(stages.censored[0, 0]) is censored
    failed = bool(np.isnan(amplitudes).any())
    assert bool(stages.failed[0]) is failed
    end = [1.0, 2.0, 4.0][int(np.argmax(np.isnan(amplitudes))) - 1] if failed else 4.0
    np.testing.assert_equal(stages.end[0], np.nan if np.isnan(amplitudes[0]) else end)
    assert "Stage times" in str(stages)


def test_replicas_and_single_runs_are_read_alike():
    time = np.linspace(0, 20, 41)
    run = made(time, pair(growing([0.003, 0.01, 0.02], 0.4, time)))
    together = stage_times(run)
    for replica in range(3):
        alone = stage_times(run[replica])
        assert alone.stage_time.shape == (1, 1)
        assert alone.stage_time[0, 0] == together.stage_time[replica, 0]


def test_features_without_variance_and_one_head():
    prior = sign_flips([2.0, 0.0], [0.0, 1.0])
    stages = stage_times(made([0.0, 1.0], np.arange(8.0).reshape(2, 2, 2), prior=prior))
    assert np.isnan(stages.stage_time[0, 0])
    assert not stages.censored[0, 0]
    assert stages.order.tolist() == [[1, -1]]
    assert stages.last_groups[0, 0].tolist() == [-1, -1, -1]
    assert "no stage" in str(stages)
    third = discrete([[0.1], [0.1], [0.1]])  # its variance is rounding
    assert np.isnan(stage_times(made([0.0], pair([1.0]), prior=third)).stage_time[0, 0])
    assert "there are no stages" in str(stage_times(made([0.0], pair([1.0]), snr=0.0)))
    single = stage_times(made([0.0, 1.0], np.full((2, 1, 1), 3.0)))
    assert single.stage_time[0, 0] == np.inf
    assert single.censored[0, 0]
    assert np.isnan(single.in_order_of_variance)
    assert "one head has nothing to split from" in str(single)
    assert single.summary["median"].item() == np.inf


def test_order_of_variance():
    """Three features with Var 4, 1, 1; heads at ± the amplitudes."""
    prior = sign_flips([0.0, 0.0, 0.0], [2.0, 1.0, 1.0])
    amplitudes = np.zeros((5, 3, 3))  # replica, time, feature; jumps at record 1 or 2
    amplitudes[0] = [[0, 0, 0], [2, 0, 0], [2, 1, 1]]
    amplitudes[1] = [[0, 0, 0], [0.1, 0.1, 1], [2, 0.5, 1]]  # feature 3 before feature 1
    amplitudes[2] = [[0, 0, 0], [2, 0, 1], [2, 0, 1]]  # 1 and 3 at one time: 3 came before its equal, 1 before 2
    amplitudes[3] = [[2, 1, 1], [2, 1, 1], [2, 1, 1]]  # all at the start: cannot tell
    m = amplitudes[:, :, None, :] * np.array([1.0, -1.0])[:, None]
    stages = stage_times(made([0.0, 1.0, 2.0], m, prior=prior))
    assert stages.order[0, 0] == 0
    assert stages.order[1].tolist() == [2, 0, 1]
    assert stages.order[2, -1] == -1
    np.testing.assert_array_equal(stages.in_order, [1, 0, 1, np.nan, np.nan])
    assert stages.in_order_of_variance == pytest.approx(2 / 3)


def test_groups_and_excursions():
    """Four heads; one goes from + to −, one is on its way, one dips and comes back, one stays."""
    time = np.arange(6.0)
    m = np.array(
        [
            [0.0, 0.0, 0.0, 0.0],
            [1.0, 1.0, 1.0, -1.0],
            [1.0, 1.0, 0.1, -1.0],
            [0.1, 1.0, -0.1, -1.0],
            [-0.1, 1.0, 0.25, -1.0],  # exactly on the + side
            [-0.25, -0.2, 1.0, -1.0],
        ]
    )[:, :, None]
    stages = stage_times(made(time, m))
    assert stages.groups[0, :, 0].tolist() == [[0, 0, 4], [3, 1, 0], [2, 1, 1], [1, 1, 2], [2, 1, 1], [1, 2, 1]]
    assert stages.last_groups.tolist() == [[[1, 2, 1]]]
    found = stages.excursions
    assert found.head.tolist() == [0, 1]
    assert found.side.tolist() == [1, 1]
    assert found.left.tolist() == [2.0, 4.0]
    np.testing.assert_allclose(found.zero, [3.5, 4 + 1 / 1.2])
    np.testing.assert_array_equal(found.arrived, [5.0, np.nan])
    assert found.count((1, 1)).tolist() == [[1]]
    assert found.count((1, 1), unfinished=True).tolist() == [[1]]
    assert "1 (+1)" in str(stages)
    assert "2|1+1? (1)" in str(stages)


def test_sides_are_about_the_mean_direction_and_excursions_only_after_the_split():
    prior = sign_flips([1.0], [1.0])
    m = 2.0 + np.array([[0.75, -0.5], [-0.75, 0.5], [-0.5, 0.75], [-2.0, 2.0], [-1.0, 0.25]])[:, :, None]
    run = made(np.arange(5.0), m, prior=prior, snr=4.0)
    early, late = stage_times(run, threshold=0.25), stage_times(run, threshold=0.5)
    assert early.at_start[0, 0]
    assert early.excursions.count((1, 1)).tolist() == [[2]]
    assert late.stage_time[0, 0] == pytest.approx(2.0 + np.log(0.5 / 0.3125) / np.log(1.0 / 0.3125))
    assert late.excursions.count((1, 1)).tolist() == [[0]]
    assert late.excursions.count((1, 1), unfinished=True).tolist() == [[1]]
    assert np.isnan(late.excursions.zero[0])


def test_excursions_end_with_the_finite_records():
    m = pair([0.0, 1.0, 0.1, np.nan, -1.0])
    found = stage_times(made(np.arange(5.0), m)).excursions
    np.testing.assert_array_equal(found.left, [1.0, 1.0])
    assert np.isnan(found.zero).all()
    assert np.isnan(found.arrived).all()


def test_plateaus():
    """A staircase in the risk: flat at 4 and at 14, splits at 8 and 20 (by the exponentials)."""
    time = np.linspace(0, 30, 301)
    amplitude = np.minimum(0.25 * np.exp(0.5 * (time[:, None] - [8.0, 20.0])), 1.0)
    m = amplitude[:, None, :] * np.array([1.0, -1.0])[:, None]
    risk = np.where(time < 8, (time - 4) ** 3, np.where(time < 20, 70 - (time - 8) - (time - 14) ** 2, 50.0)) * 1e-3
    stages = stage_times(made(time, m, prior=sign_flips([0.0, 0.0], [1.0, 1.0]), risk=risk))
    np.testing.assert_allclose(stages.stage_time[0], [8.0, 20.0])
    np.testing.assert_allclose(stages.plateau_time[0], [4.0, 13.5, 22.5])
    np.testing.assert_allclose(stages.plateau_risk[0], [0.0, 0.06425, 0.05], atol=1e-12)
    np.testing.assert_allclose(stages.plateau_slope[0], [0.0, 0.0, 0.0], atol=1e-4)
    few = stage_times(made([0.0, 1.0], pair([0.0, 1.0])))
    assert np.isnan(few.plateau_time).all()
    none = stage_times(made(time, 0 * m, prior=sign_flips([0.0, 0.0], [1.0, 1.0]), risk=risk))
    assert np.isfinite(none.plateau_time[0]).tolist() == [True, False, False]


def test_summary():
    time = [0.0, 1.0, 2.0, 4.0]
    amplitudes = [[0.1, 0.25, 1, 1], [0.1, 0.2, 0.25, 1], [0.1, 0.2, 0.2, 0.25], [0.3, 1, 1, 1], [0, 0, 0, 0]]
    summary = stage_times(made(time, pair(amplitudes))).summary
    assert [summary[f"count_{name}"].item() for name in ("reached", "at_start", "censored")] == [3, 1, 1]
    assert summary["median"].item() == 2.0
    assert summary["mean"].item() == pytest.approx(7 / 3)
    assert summary["mean_error"].item() == pytest.approx(np.std([1, 2, 4], ddof=1) / np.sqrt(3))
    assert summary["log_mean"].item() == pytest.approx(np.log(2))
    assert summary["log_mean_error"].item() == pytest.approx(np.log(2) / np.sqrt(3))


@pytest.mark.parametrize("amplitudes", [[[0.1, 0.5, -0.5], [0.1, 0.1, np.nan]], [[0.1, 0.1, 0.1]]])
def test_datasets_can_be_stored(tmp_path, amplitudes):
    stages = stage_times(made([0.0, 1.0, 2.0], pair(amplitudes)))
    data = stages.to_xarray()
    assert dict(data.sizes) | {"replica": len(amplitudes), "feature": 1, "head": 2, "time": 3} == dict(data.sizes)
    save(tmp_path / "a.zarr", {"stages": data}, {})
    assert load(tmp_path / "a.zarr")["stages"].equals(data)
    data.to_zarr(tmp_path / "b.zarr", consolidated=False)
    data.to_netcdf(tmp_path / "c.nc")
    assert all(isinstance(value, (str, int, float)) for value in data.attrs.values())
    assert not any(isinstance(value, bool) for value in data.attrs.values())


@pytest.mark.slow
def test_flow_of_a_small_case():
    """The ± feature splits, and the growth before it is that of MODEL: 2ν(1/H)(1/L)(1−1/L)(1−2/L) at zero keys."""
    task = SingleLocation(4, 4.0, FLIP)
    start = OrderParameters([[0.02], [-0.01]], [[0.01, 0.0], [0.0, 0.01]])
    flow = gradient_flow(task, Softmax(), start, np.linspace(0, 20, 41), method=METHOD, progress=False)
    stages = stage_times(flow)
    rate = 4.0 * (1 / 4) * (3 / 4) * (1 / 2)
    assert 0.7 < stages.stage_time[0, 0] * rate / np.log(0.25 * 2 / 0.015) < 1.3
    assert stages.last_groups.tolist() == [[[1, 1, 0]]]
    assert stages.excursions.head.size == 0


def planted(rng, dim, replicas, rate, *, end=80.0, spread=True):
    """Amplitudes |ξ|/√D that grow at `rate`: stage times are linear in log D with slope 1/(2·rate)."""
    time = np.linspace(0, end, 41)
    starts = np.exp(rng.normal(size=replicas) * 0.3 * spread) / np.sqrt(dim)
    return stage_times(made(time, pair(growing(starts, rate, time))))


def test_slope_is_recovered_within_its_error():
    """False-alarm rate 1e-6 for the first; over 100 fits 5 % intervals miss as binomial(100, .05) does, ± 3 sd."""
    dims, rate, alarms, runs = (300, 3000, 30000), 0.2, 0, 100
    rng = np.random.default_rng(0)
    for run in range(runs):
        fit = log_dim_slope(dims, [planted(rng, dim, 8, rate) for dim in dims])
        z = (fit.slope[0] - 1 / (2 * rate)) / fit.error[0]
        freedom = fit.used[0] - 2
        if run == 0:
            assert freedom == 22
            assert abs(z) < stats.t.isf(0.5e-6, freedom)
            assert "Stage times against log D; D = 300, 3000, 30000" in str(fit)
            assert fit.to_xarray()["slope"].dims == ("feature",)
        alarms += abs(z) > stats.t.isf(0.025, freedom)
    assert abs(alarms - 5) <= 3 * np.sqrt(100 * 0.05 * 0.95)


def test_own_start_removes_the_scatter():
    rng = np.random.default_rng(1)
    dims = (300, 3000)
    runs = [planted(rng, dim, 4, 0.2) for dim in dims]
    fit = log_dim_slope(dims, runs, own_start=True)
    assert fit.slope[0] == pytest.approx(2.5)
    assert fit.error[0] < 1e-9
    assert log_dim_slope(dims, runs).error[0] > 0.1
    same = [planted(rng, dim, 4, 0.2, spread=False) for dim in dims]
    assert np.isnan(log_dim_slope(dims, same, own_start=True).slope[0])  # nothing to take out


def test_censored_runs_are_refused_or_dropped_and_counted():
    rng = np.random.default_rng(2)
    dims = (300, 3000, 10**9)
    runs = [planted(rng, dim, 4, 0.2, end=30.0) for dim in dims]
    assert runs[2].censored.all()
    with pytest.raises(ValueError, match=r"got 4 stage times censored and 0 at the first record \(D = 1000000000\)"):
        log_dim_slope(dims, runs)
    fit = log_dim_slope(dims, runs, drop_censored=True)
    assert (fit.used[0], fit.dropped[0]) == (8, 4)
    assert "dropped" in str(fit)
    early = stage_times(made([0.0, 1.0], pair(np.full((3, 2), 0.5))))
    with pytest.raises(ValueError, match="0 stage times censored and 6 at the first record"):
        log_dim_slope([300, 301], [early, early])
    fit = log_dim_slope([300, 301], [early, early], drop_censored=True)
    assert np.isnan(fit.slope[0])
    assert "–" in str(fit)


def test_refusals():
    run = made([0.0, 1.0], pair([0.1, 0.5]))
    unchecked = inspect.unwrap(stage_times)  # as users call it, without the tests' check of annotations
    with pytest.raises(ValueError, match="trajectory: expected a Trajectory, got 'x'"):
        unchecked("x")
    with pytest.raises(ValueError, match="stages: expected a StageTimes, got 'x'"):
        inspect.unwrap(log_dim_slope)([10, 20], ["x", "y"])
    for threshold in (0.0, -1.0, float("nan"), float("inf"), True, "a", np.array([0.1, 0.2])):
        with pytest.raises(ValueError, match="threshold: expected a number > 0"):
            unchecked(run, threshold=threshold)
    with pytest.raises(ValueError, match="expected m of shape"):
        stage_times(made([0.0, 1.0], pair(np.full((2, 2, 2), 0.5))))
    one = stage_times(run)
    with pytest.raises(ValueError, match="dims: expected one D"):
        log_dim_slope([10], [one, one])
    with pytest.raises(ValueError, match="at least two different D"):
        log_dim_slope([10, 10], [one, one])
    with pytest.raises(ValueError, match=r"threshold: expected the same in all stages, got 0\.25 and 0\.3"):
        log_dim_slope([10, 20], [one, stage_times(run, threshold=0.3)])
    with pytest.raises(ValueError, match="snr: expected the same"):
        log_dim_slope([10, 20], [one, stage_times(made([0.0, 1.0], pair([0.1, 0.5]), snr=1.1))])
    late = stage_times(made([0.5, 1.0], pair([0.1, 0.5])))
    with pytest.raises(ValueError, match="a first record at τ = 0"):
        log_dim_slope([10, 20], [late, late], own_start=True)
    zero = stage_times(made([0.0, 1.0], pair([0.0, 0.5])))
    with pytest.raises(ValueError, match="amplitude of exactly 0"):
        log_dim_slope([10, 20], [zero, zero], own_start=True)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.integers(1, 5),
    coarse=st.booleans(),
    signs=st.tuples(*[st.sampled_from([1.0, -1.0])] * 2),
)
def test_times_do_not_depend_on_numbers_of_heads_or_signs(seed, heads, coarse, signs):
    """To the last digit; on a coarse grid of values, ties and exact hits of the threshold are frequent."""
    rng = np.random.default_rng(seed)
    m = rng.normal(size=(3, 6, heads, 2)) * np.linspace(0.05, 1.0, 6)[:, None, None]
    if coarse:
        m = np.round(4 * m) / 8
    prior = sign_flips([0.0, 0.0], [2.0, 1.0])
    moved = m[:, :, rng.permutation(heads)] * np.array(signs)
    ours, theirs = (stage_times(made(np.arange(6.0), values, prior=prior)) for values in (m, moved))
    for name in ("stage_time", "at_start", "censored", "plateau_time", "in_order"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    for feature, sign in enumerate(signs):
        order = [0, 1, 2] if sign > 0 else [1, 0, 2]
        np.testing.assert_array_equal(ours.groups[:, :, feature], theirs.groups[:, :, feature][..., order])
    for unfinished in (False, True):
        counts = [one.excursions.count((3, 2), unfinished=unfinished) for one in (ours, theirs)]
        np.testing.assert_array_equal(*counts)
