"""The predicted staircase: saddles of the worked case, stage times against flows from random starts and the chain."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import theory as th
from compare import log_dim_slope, stage_times
from sim import train_reduced
from theory.passage import first_passage, full_split, head_deviation, rank_cdf, rank_quantile
from theory.risk import recorded_risk
from theory.saddle import tied_minimum
from theory.stages import even_normals

PAIR = th.SingleLocation(length=4, snr=4.0, prior=th.sign_flips([0.0], [1.0]))
STEP_SIZE, VARIANCE = 0.5, 0.1


@pytest.fixture(scope="module")
def pair():
    return th.predict_stages(
        PAIR, th.Softmax(), 2, [1000, 100_000], variance=VARIANCE, step_size=STEP_SIZE, samples=16, progress=False
    )


@pytest.mark.slow
def test_the_pair_has_two_saddles(pair):
    first, last = pair.stages
    assert (first.feature, first.multiplicity, first.signs) == (0, 1, (1, -1))
    np.testing.assert_allclose([first.rate, first.slope], [0.375, 4 / 3], rtol=1e-8)
    assert last.feature == -1
    assert last.ending.startswith("stable")
    assert pair.order == (0,)


@pytest.mark.slow
def test_times_grow_with_log_dim_at_the_path_slope(pair):
    """Between D and 100 D by log 100 × 1/(2κ), κ of the path at the stage time: its own medians say so within 1 %."""
    medians = pair.quantile(0.5)[:, 0]
    assert abs(np.diff(medians)[0] / np.log(100) / pair.path_slope.mean() - 1) < 0.01
    assert np.all(np.abs(pair.path_slope * 2 * 0.375 - 1) < 0.15)  # near the saddle's limit
    assert pair.band.error < 1e-3


@pytest.mark.slow
def test_quantiles_and_distribution_belong_together(pair):
    for level in (0.1, 0.5, 0.9):
        time = pair.quantile(level)[0, 0]
        np.testing.assert_allclose(pair.cdf(time, feature=0, dim=1000), level, atol=1e-9)
    assert pair.cdf(np.array([0.0, 1e9]), feature=0, dim=1000).tolist() == [0.0, 1 - 0.5 / 16]


@pytest.mark.slow
def test_prediction_prints_and_converts(pair, tmp_path):
    assert "0.375     ×1" in str(pair)
    assert "quantiles are good to 6.2 % in level" in str(pair)
    pair.to_xarray().to_netcdf(tmp_path / "stages.nc")


@pytest.mark.slow
def test_the_tail_is_that_of_a_normal_split(pair):
    """Two heads: the time is a constant − log|ξ|/κ, ξ normal. 99 % quantile from the median, to 5 % of the level 1 %.

    16 starts: their last two lie at levels 91 and 97 %, so it is the 90 % quantile that is read off.
    """
    normal = stats.norm.ppf(0.5 + 0.5 * (1 - np.array([0.5, 0.9])))
    wait = np.log(normal[0] / normal[1]) * 2 * pair.path_slope
    found = pair.quantile(0.9)[:, 0] - pair.quantile(0.5)[:, 0]
    np.testing.assert_allclose(found, wait, rtol=0.05)


@pytest.mark.slow
def test_the_mean_risk_is_that_of_random_starts_and_then_of_the_flows(pair):
    """At τ = 0 against states of random weights, within 5 errors of 400 of them (false alarms 6e-7).

    Afterwards the mean of the flows at their own records, and no jump where they begin.
    """
    flow, matched = pair.ensembles[0], pair.match[0]
    later = np.asarray(flow.time)[[1, 40, -1]]
    mean, error = pair.mean_risk([0.0, *later, *(matched + np.array([-1e-6, 1e-6]))])
    assert mean.shape == error.shape == (2, 6)
    order = th.OrderParameters.initial(
        jax.random.key(3), heads=2, features=1, dim=1000, variance=VARIANCE, replicas=400
    )
    risks = np.asarray(recorded_risk(PAIR, th.Softmax(), order))
    assert abs(mean[0, 0] - risks.mean()) < 5 * risks.std(ddof=1) / np.sqrt(400) + 1e-6
    np.testing.assert_allclose(mean[0, 1:4], np.asarray(flow.risk).mean(axis=0)[[1, 40, -1]], rtol=1e-12)
    np.testing.assert_allclose(mean[0, 5], mean[0, 4], atol=1e-5)
    assert np.all(error[0] < 0.01)
    assert mean[0, 0] > mean[0, 4] > mean[0, 3]
    with pytest.raises(ValueError, match="times: expected up to"):
        pair.mean_risk([1e6])


@pytest.mark.parametrize("samples", [1, 8, 33, 128])
def test_splits_are_drawn_evenly(samples):
    """|z| of every coordinate exactly at the levels (j + ½)/S, whether S is odd or even."""
    for column in even_normals(3, samples).T:
        level = 2 * stats.norm.cdf(np.sort(np.abs(column))) - 1
        np.testing.assert_allclose(level, (np.arange(samples) + 0.5) / samples, rtol=1e-9)


def test_quantiles_with_runs_that_never_split():
    """Between finite and inf it is inf; NaN is for features without a stage alone."""
    times = np.stack([[1.0, 2.0, 3.0, np.inf, np.inf], [np.inf] * 5, [np.nan] * 5], axis=1)[None]
    levels = np.array([0.1, 0.2, 0.5, 0.6, 0.7, 0.75, 1.0])
    found = rank_quantile(times, levels)[:, 0]
    np.testing.assert_allclose(found[:, 0], [1.0, 1.5, 3.0, np.inf, np.inf, np.inf, np.inf])
    assert np.all(np.isposinf(found[:, 1]))
    assert np.all(np.isnan(found[:, 2]))
    np.testing.assert_allclose(rank_quantile(times, 0.3)[0, 0], 2.0)
    np.testing.assert_allclose(rank_cdf(times[0, :, 0], [0.0, 2.0, 9.0]), [0.0, 0.3, 0.5])
    assert rank_cdf(times[0, :, 1], [0.0, 9.0]).tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_stage_times_are_distributed_as_predicted():
    """200 runs of the exact chain (limit loss) at D = 1000; Kolmogorov–Smirnov at 1 %, which is the false-alarm rate.

    Runs that have not split by τ = 40 (0.5 % predicted) are compared conditionally on having split.
    """
    dim, end = 1000, 40.0
    order = th.OrderParameters.initial(jax.random.key(1), heads=2, features=1, dim=dim, variance=VARIANCE, replicas=200)
    run = train_reduced(
        PAIR, th.Softmax(), order, dim=dim, learning_rate=2.0, batch=4, time=end, key=jax.random.key(2),
        record=121, loss="limit", evaluation=2, progress=False,
    )  # fmt: skip
    times = stage_times(run).stage_time[:, 0]
    seen = times[np.isfinite(times)]
    predicted = th.predict_stages(
        PAIR, th.Softmax(), 2, dim, variance=VARIANCE, step_size=STEP_SIZE, samples=64, progress=False
    )
    level = predicted.cdf(seen, feature=0) / predicted.cdf(np.array(end), feature=0)
    assert len(seen) >= 195
    assert stats.kstest(np.clip(level, 0, 1), "uniform").pvalue > 0.01
    # a prediction late by half of the scatter of log|ξ| would be seen
    assert stats.kstest(np.clip(predicted.cdf(seen + 1.5, feature=0), 0, 1), "uniform").pvalue < 0.01


@pytest.mark.slow
def test_measured_slopes_are_the_predicted_ones():
    """Stage times of the chain, D = 10^2.5 … 10^4.5, own starts taken out: within 5 % of the path and of 1/(2κ).

    r_0 = 0.01 and η/B = 0.1; the standard error is required to be below 2.5 %, so that a false alarm needs two of them.
    """
    dims, replicas, runs = (316, 3162, 31623), (400, 120, 72), []
    for dim, count in zip(dims, replicas, strict=True):
        order = th.OrderParameters.initial(
            jax.random.key(3), heads=2, features=1, dim=dim, variance=0.01, replicas=count
        )
        end = 28.0 + 1.5 * np.log(dim / 316)
        run = train_reduced(
            PAIR, th.Softmax(), order, dim=dim, learning_rate=1.0, batch=10, time=end, key=jax.random.key(dim),
            record=181, loss="limit", evaluation=2, progress=False,
        )  # fmt: skip
        runs.append(stage_times(run))
    fit = log_dim_slope(dims, runs, own_start=True, drop_censored=True)
    path = th.predict_stages(
        PAIR, th.Softmax(), 2, list(dims), variance=0.01, step_size=0.1, samples=16, progress=False
    )
    predicted = np.polyfit(np.log(dims), path.quantile(0.5)[:, 0], 1)[0]
    print(fit, f"path {predicted:.4f}, limit {path.stages[0].slope:.4f}", sep="\n")
    assert fit.dropped[0] < 0.02 * sum(replicas)
    assert fit.error[0] / fit.slope[0] < 0.025
    assert abs(fit.slope[0] / predicted - 1) < 0.05
    assert abs(fit.slope[0] / path.stages[0].slope - 1) < 0.05


@pytest.mark.slow
def test_staircase_of_the_worked_case_ends_where_the_flow_does():
    """Feature 2, then the pairs within; feature 3, unstable up to there, no longer is. Flows from two starts agree."""
    task = th.SingleLocation(length=10, snr=1.0, prior=th.sign_flips([2.0, 0.0, 0.0], [0.0, 2.5, 1.5]))
    stages = th.saddle_path(task, th.Softmax(), 4)
    assert [stage.feature for stage in stages] == [1, -1, -1]
    np.testing.assert_allclose(stages[0].rate, 0.06393945, atol=1e-7)
    assert [len(set(stage.point.groups)) for stage in stages] == [1, 2, 4]
    assert [bool(stage.ending) for stage in stages] == [False, False, True]
    risks = [float(stage.point.risk) for stage in stages]
    assert risks[0] > risks[1] > risks[2]
    assert risks[2] < 0.376651  # the flow at τ = 400, docs/model.md §9
    for stage in stages:
        assert float(stage.point.gradient) < 1e-7
    for stage in stages[:2]:  # feature 3 grows there, but never fastest
        grows = [float(v) for v, f in zip(stage.spectrum.eigenvalues, stage.spectrum.features, strict=True) if f == 2]
        assert -stage.rate < min(grows) < -0.005

    start = th.OrderParameters.initial(jax.random.key(0), heads=4, features=3, dim=1000, replicas=2)
    flow = th.gradient_flow(
        task, th.Softmax(), start, [0.0, 400.0, 3200.0], tolerance=1e-5, method=th.Quadrature(1e-5), progress=False
    )
    np.testing.assert_allclose(flow.risk[:, -1], risks[-1], atol=2e-4)  # it falls like a power of τ
    ours = np.sort(np.abs(np.asarray(stages[-1].point.order.m)), axis=0)
    for m in np.asarray(flow.order.m[:, -1]):
        assert np.max(np.abs(m[:, 2])) < 1e-3
        np.testing.assert_allclose(np.sort(np.abs(m), axis=0), ours, atol=0.2)


@pytest.mark.slow
def test_uneven_splits_are_as_rare_as_the_flow_says():
    """64 random starts, H = 4: how often the split is not 2|2, in the flow and in the chain from the same starts.

    Fisher's exact test of the two counts at 1 %, which is the false-alarm rate. Sides drawn at random would not be 2|2
    with probability 5/8: that it is so much rarer has to show at the level 1e-6.
    """
    dim, end = 1000, 60.0
    start = th.OrderParameters.initial(jax.random.key(1), heads=4, features=1, dim=dim, variance=VARIANCE, replicas=64)
    chain = train_reduced(
        PAIR, th.Softmax(), start, dim=dim, learning_rate=2.0, batch=4, time=end, key=jax.random.key(2), record=13,
        loss="limit", evaluation=2, progress=False,
    )  # fmt: skip
    flow = th.gradient_flow(
        PAIR, th.Softmax(), start, chain.time, step_size=STEP_SIZE, tolerance=1e-4, method=th.Quadrature(1e-5),
        corrector_points=256, progress=False,
    )  # fmt: skip
    uneven = [int(np.sum(np.any(stage_times(run).last_groups[:, 0] != [2, 2, 0], axis=-1))) for run in (flow, chain)]
    print(f"not 2|2 of 64: flow {uneven[0]}, chain {uneven[1]}")
    assert all(stats.binom.cdf(count, 64, 5 / 8) < 1e-6 for count in uneven)
    assert stats.fisher_exact([[uneven[0], 64 - uneven[0]], [uneven[1], 64 - uneven[1]]]).pvalue > 0.01


@pytest.mark.slow
def test_features_come_in_the_order_of_their_variance():
    """A Gaussian signal, Var θ = 1 and .6: the saddle's rates say so, and so do flows and chains from random starts.

    Each of 8 chains is in order, and each of 2 flows.
    """
    task, dim, times = th.SingleLocation(4, 8.0, th.gaussian([0.0, 0.0], [1.0, 0.6])), 1000, np.linspace(0, 160, 33)
    spectrum = th.hessian_spectrum(task, th.Softmax(), th.unspecialized_point(task, th.Softmax(), 4))
    rates = [max(-v for v, f in zip(spectrum.eigenvalues, spectrum.features, strict=True) if f == k) for k in (0, 1)]
    assert rates[0] > rates[1] > 0
    start = th.OrderParameters.initial(jax.random.key(0), heads=4, features=2, dim=dim, variance=VARIANCE, replicas=8)
    chain = train_reduced(
        task, th.Softmax(), start, dim=dim, learning_rate=2.0, batch=10, time=160.0, key=jax.random.key(5),
        record=times, loss="limit", evaluation=2, progress=False,
    )  # fmt: skip
    two = jax.tree.map(lambda leaf: leaf[:2], start)
    flow = th.gradient_flow(
        task, th.Softmax(), two, times, step_size=0.2, tolerance=1e-4, method=th.Quadrature(1e-4),
        corrector_points=256, progress=False,
    )  # fmt: skip
    for run in (chain, flow):
        found = stage_times(run)
        print(found)
        assert found.in_order_of_variance == 1.0
        assert np.all(np.isfinite(found.stage_time[:, 0]))
        assert np.all(found.stage_time[:, 0] < 0.7 * found.stage_time[:, 1])


@pytest.mark.slow
def test_an_uneven_split_is_repaired_by_an_excursion():
    """From the 3+/1− saddle one of the three heads turns back, crosses 0 and joins the other, in theory and chain.

    8 replicas each, starts scattered as at D = 200; the chain from the same starts (limit loss, η/B = 0.5). The
    mean times of crossing agree within 4 standard errors: a false alarm has 6e-5.
    """
    free, groups = np.ones((4, 1), bool), (0, 0, 0, 1)
    saddle = tied_minimum(PAIR, th.Softmax(), jnp.array([[1.0], [1.0], [1.0], [-4.5]]), groups, free)
    spectrum = th.hessian_spectrum(PAIR, th.Softmax(), saddle)
    assert spectrum.multiplets()[0][1:] == (2, "split, feature 1")
    assert -0.0081 < float(spectrum.eigenvalues[0]) < -0.0080

    dim, end = 200, 900.0
    m = saddle.order.m[None] + jnp.sqrt(VARIANCE / dim) * jax.random.normal(jax.random.key(4), (8, 4, 1))
    start = th.OrderParameters(m, m @ jnp.swapaxes(m, 1, 2) + 0.01 * jnp.eye(4)[None])
    flow = th.gradient_flow(
        PAIR, th.Softmax(), start, np.linspace(0, end, 301), step_size=STEP_SIZE, tolerance=1e-4,
        method=th.Quadrature(1e-5), corrector_points=256, progress=False,
    )  # fmt: skip
    chain = train_reduced(
        PAIR, th.Softmax(), start, dim=dim, learning_rate=2.0, batch=4, time=end, key=jax.random.key(5), record=301,
        loss="limit", evaluation=2, progress=False,
    )  # fmt: skip
    crossed = []
    for run in (flow, chain):
        found = stage_times(run)
        assert np.all(found.groups[:, 0, 0] == [3, 1, 0])
        assert np.sum(np.all(found.last_groups[:, 0] == [2, 2, 0], axis=-1)) >= 7
        crossed.append(found.excursions.zero[np.isfinite(found.excursions.arrived)])
        assert len(crossed[-1]) >= 7
    means, errors = zip(*((x.mean(), x.std(ddof=1) / len(x) ** 0.5) for x in crossed), strict=True)
    assert abs(means[0] - means[1]) < 4 * np.hypot(*errors)


@pytest.mark.parametrize(
    ("task", "heads"),
    [
        (PAIR, 1),  # one head has nothing to split from
        (th.SingleLocation(2, 3.0, th.sign_flips([0.0], [1.0])), 2),  # L = 2: no split rate
        (th.SingleLocation(4, 2.0, th.discrete([[1.0]])), 2),  # Var θ = 0
    ],
)
@pytest.mark.parametrize("samples", [32, 33])
def test_no_stage_is_a_clear_result(task, heads, samples):
    found = th.predict_stages(task, th.Softmax(), heads, 1000, samples=samples, progress=False)
    assert found.order == ()
    assert not np.isfinite(found.times).any()
    varies = np.asarray(task.prior.variance()) > 0
    never = found.quantile(np.array([0.025, 0.5, 0.99]))
    assert np.all(np.isposinf(never) == varies)
    assert ("inf: never" in str(found)) == varies.any()
    assert np.array_equal(found.to_xarray()["quantile"].isnull().any(("dim", "level")), ~varies)
    if varies.any():
        assert found.cdf([1.0, 1e9], feature=0).tolist() == [0.0, 0.0]
    else:
        with pytest.raises(ValueError, match=r"feature: expected one with a stage \(there is none\), got 0"):
            found.cdf(1.0, feature=0)
    assert "nothing grows" in str(found) or heads == 1


def test_wrong_arguments_are_named():
    for name, options in (("variance", {"variance": 0}), ("threshold", {"threshold": -1}), ("samples", {"samples": 0})):
        with pytest.raises(ValueError, match=name):
            th.predict_stages(PAIR, th.Softmax(), 2, 1000, **options)
    with pytest.raises(ValueError, match="dim"):
        th.predict_stages(PAIR, th.Softmax(), 2, 1)
    with pytest.raises(ValueError, match="heads"):
        th.saddle_path(PAIR, th.Softmax(), 13)
    predict, follow = (inspect.unwrap(f) for f in (th.predict_stages, th.saddle_path))  # as users call them
    for name, wrong in (
        ("dim: expected at least one D", lambda: predict(PAIR, th.Softmax(), 2, [])),
        ("heads", lambda: predict(PAIR, th.Softmax(), "2", 1000)),
        ("activation", lambda: predict(PAIR, None, 2, 1000)),
        ("activation", lambda: follow(PAIR, None, 2)),
        ("task", lambda: follow(None, th.Softmax(), 2)),
        *(("until", lambda u=u: predict(PAIR, th.Softmax(), 2, 1000, until=u)) for u in ("x", np.nan, -1.0)),
    ):
        with pytest.raises(ValueError, match=name):
            wrong()


@pytest.mark.slow
def test_wrong_questions_are_named(pair):
    for name, wrong in (
        ("dim: expected one of 1000, 100000, got 7", lambda: pair.cdf(1.0, feature=0, dim=7)),
        ("dim: expected one of 1000, 100000, got None", lambda: pair.cdf(1.0, feature=0)),
        ("feature", lambda: pair.cdf(1.0, feature=1, dim=1000)),
        ("level: expected shares", lambda: pair.quantile(1.1)),
    ):
        with pytest.raises(ValueError, match=name):
            wrong()


@pytest.mark.slow
def test_flows_that_would_end_before_they_start_are_refused():
    with pytest.raises(ValueError, match=r"until: expected a time after τ = .*, got 3\.0"):
        th.predict_stages(PAIR, th.Softmax(), 2, 1000, variance=VARIANCE, until=3.0, samples=4, progress=False)


def test_first_passage_is_defined_everywhere():
    time = np.array([0.0, 1.0, 2.0, 3.0])
    assert first_passage(time, np.array([0.3, 0.1, 0.1, 0.1]), 0.25) == 0.0  # at the start
    assert first_passage(time, np.array([0.1, 0.25, 0.2, 0.1]), 0.25) == 1.0  # exactly at the threshold
    assert first_passage(time, np.array([0.0, 0.0, 0.0, 0.0]), 0.25) == np.inf  # never
    np.testing.assert_allclose(first_passage(time, np.array([0.1, 0.1, 0.4, 1.0]), 0.2), 1.5)  # log-linear
    np.testing.assert_allclose(first_passage(time, np.array([0.0, 0.5, 1.0, 1.0]), 0.25), 0.5)  # linear from zero


def test_units_of_a_split():
    task = th.SingleLocation(4, 4.0, th.sign_flips([1.0, 2.0], [0.5, 0.0]))
    assert full_split(task).tolist() == [1.0, 0.0]
    np.testing.assert_allclose(head_deviation(np.array([[1.0, 0.2], [-1.0, 0.2]])), [1.0, 0.0])
