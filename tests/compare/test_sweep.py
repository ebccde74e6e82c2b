"""Sweeps: names and paths, identities, keys, the Dataset, batches; stores are in test_sweep_store."""

import contextlib
import functools
import json

import jax
import numpy as np
import pytest
import sweepable
import xarray as xr

import sim
import theory as th
from compare import agreement, plan_sweep, sweep
from compare.sweeps.identity import canonical, digest, point_key
from compare.sweeps.points import grid_of
from compare.sweeps.runs import run_of

PRIOR = th.sign_flips([0.0, 0.0], [1.0, 0.5])
QUIET = {"say": None, "progress": False}
SGD = {"learning_rate": 1.0, "time": 0.4, "batch": 2, "record": 3, "evaluation": 20}


def names(run, grid, fixed, **options):
    return [
        point.name for point in grid_of(run_of(run), grid, fixed, **{"replicas": None, "seed": 0, **options}).points
    ]


class TestIdentity:
    def test_of_equal_values(self):
        a = canonical("x", {"b": 2, "a": [1.0, np.float64(0.1), np.arange(2)], "c": None})
        b = canonical("x", {"c": None, "a": (1, 0.1, [0.0, 1]), "b": np.int32(2)})
        assert json.dumps(a) == json.dumps(b)

    @pytest.mark.parametrize(
        ("a", "b"), [(0.3, 0.3 + 1e-12), (1, True), ("1", 1), ([1], 1), (1.0, -1.0), (1e16, 1e16 + 2)]
    )
    def test_of_others(self, a, b):
        assert digest(canonical("x", a)) != digest(canonical("x", b))

    @pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}, len, 1j])
    def test_refuses(self, value):
        with pytest.raises(ValueError, match=r"x\[0\]"):
            canonical("x", [value])

    def test_of_points(self):
        fixed = {"length": 5, "prior": PRIOR}
        (a,), (b,) = names(th.bayes_risk, {"snr": [2]}, fixed), names(th.bayes_risk, {}, {**fixed, "snr": 2.0})
        assert a == b
        (c,) = names(th.bayes_risk, {"snr": [2 + 1e-12]}, fixed)
        assert a != c
        (d,) = names(th.bayes_risk, {"prior": [PRIOR.name]}, {"snr": np.float64(2), "length": 5.0})
        assert a == d

    def test_of_a_path_and_the_whole(self):
        (a,) = names(th.bayes_risk, {"prior.amplitude[1]": [0.25]}, {"length": 5, "prior": PRIOR, "snr": 2.0})
        (b,) = names(th.bayes_risk, {}, {"length": 5, "prior": th.sign_flips([0, 0], [1, 0.25]), "snr": 2.0})
        assert a == b

    def test_seed_counts_only_where_there_is_chance(self):
        fixed = {"length": 5, "prior": PRIOR, "snr": 2.0}
        assert names(th.bayes_risk, {}, fixed, seed=0) == names(th.bayes_risk, {}, fixed, seed=1)
        assert names(sweepable.traced, {"x": [1]}, {"y": 1, "log": ""}, seed=0) != names(
            sweepable.traced, {"x": [1]}, {"y": 1, "log": ""}, seed=1
        )

    def test_of_functions(self):
        """Of their code, not of comments; a partial function is the one it is made of with other defaults."""
        a, b, c = (run_of(f) for f in (sweepable.deterministic, sweepable.ragged, sweepable.deterministic))
        assert a.source == c.source != b.source
        part = run_of(functools.partial(sweepable.deterministic, y=3.0))
        assert (part.name, part.source, part.parameters["y"]) == (a.name, a.source, 3.0)
        bound = [run_of(functools.partial(sweepable.deterministic, x)).source for x in (1.0, 2.0)]
        assert len({*bound, a.source}) == 3
        assert run_of(lambda x: x).source

    def test_keys(self):
        """Of seed, values and replica: all different, and nothing else."""
        keys = [point_key(s, w, r) for s in (0, 1) for w in (digest(1), digest(2)) for r in (0, 1)]
        data = {tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys}
        assert len(data) == 8


class TestNames:
    @pytest.mark.parametrize(
        ("grid", "fixed", "match"),
        [
            ({"sn": [1]}, {}, r"names of bayes_risk \(length, snr, prior, tolerance\)"),
            ({"snr": [1]}, {"prior.amplitude[0]": 2.0}, "names of bayes_risk"),
            ({"snr": [1]}, {"snr": 2}, "one place"),
            ({"snr": []}, {}, "at least one value"),
            ({"snr": 2.0}, {}, "a sequence of values"),
            ({"snr": [2, 2.0]}, {}, "different values, got 2 twice"),
            ({"snr": [2], "prior.amplitude[2]": [1]}, {}, r"prior.amplitude\[2\]"),
            ({"snr": [2], "prior.ampl[0]": [1]}, {}, "ampl"),
            ({"snr": [2], "prior.": [1]}, {}, "a name, or a path"),
            ({}, {}, "values for snr"),
            ({"snr": [2]}, {"tolerance": float("nan")}, "tolerance"),
            ([("snr", 2)], {}, "a dict"),
            ({"prior": ["sign_flop([1], [1])"], "snr": [1]}, {}, "prior"),
        ],
    )
    def test_refused(self, grid, fixed, match):
        given = {"length": 5} | ({} if "prior" in grid else {"prior": PRIOR})
        with pytest.raises(ValueError, match=match):
            sweep(th.bayes_risk, grid=grid, fixed={**given, **fixed}, **QUIET)

    def test_replicas_of_what_has_no_chance(self):
        with pytest.raises(ValueError, match="takes no key"):
            sweep(th.bayes_risk, grid={"snr": [1]}, fixed={"length": 5, "prior": PRIOR}, replicas=2, **QUIET)

    def test_names_of_the_results(self):
        """Refused before anything runs."""
        with pytest.raises(ValueError, match="names other than loss, time, which the Dataset of train has itself"):
            sweep(sim.train, grid={"time": [0.1, 0.2]}, fixed={}, **QUIET)
        with pytest.raises(ValueError, match="names other than status, failure, replica"):
            sweep(lambda status: 1.0, grid={"status": [1]}, **QUIET)

    def test_a_part_and_the_whole(self):
        """The part counts, in whatever order they are given; values that do not count are refused."""
        fixed = {"length": 5, "prior": PRIOR, "snr": 2.0}
        grid = {"prior.amplitude[0]": [1.0, 2.0], "prior.amplitude": [[1, 1], [1, 2]]}
        assert len(set(names(th.bayes_risk, grid, fixed))) == 4
        with pytest.raises(ValueError, match="grid: expected names whose values all count, got the same point as"):
            names(_of_options, {"options.steps[1]": [1, 2], "options.steps[-1]": [5]},
                  {"options": {"rate": 0.0, "steps": [1, 2]}})  # fmt: skip

    def test_seeds_beyond_64_bits(self):
        with pytest.raises(ValueError, match=r"seed: expected a whole number below 2\*\*63"):
            names(th.bayes_risk, {"snr": [1]}, {"length": 5, "prior": PRIOR}, seed=2**63)

    @pytest.mark.parametrize("name", ["", "a/b", 1])
    def test_names_that_a_run_returns(self, name):
        data = sweep(lambda x: {name: x}, grid={"x": [1.0]}, **QUIET)
        assert "names of variables that are text" in data.failure.item()

    def test_whole_numbers_beyond_64_bits(self, tmp_path):
        """Label the Dataset as text, which can be written."""
        data = sweep(lambda x: x % 7, grid={"x": [2**70, 2**63]}, store=tmp_path / "s", **QUIET)
        assert data.x.values.tolist() == [str(2**70), str(2**63)]
        data.to_netcdf(tmp_path / "data.nc")

    def test_functions_without_names(self):
        with pytest.raises(ValueError, match="parameters all have names"):
            sweep(lambda *x: 0, grid={}, **QUIET)

    def test_values_that_are_nested(self):
        found = sweep(_of_options, grid={"options.rate": [1.0, 2.0], "options.steps[1]": [5]},
                      fixed={"options": {"rate": 0.0, "steps": [1, 2]}}, **QUIET)  # fmt: skip
        assert found.value.values.tolist() == [[16.0], [26.0]]

    @pytest.mark.parametrize("name", ["x", "status"])
    def test_results_that_use_a_name_of_the_sweep(self, name):
        data = sweep(lambda x: {name: x}, grid={"x": [1]}, **QUIET)
        assert data.failure.item() == f"the run returns {name!r}, a name that the sweep itself uses"

    @pytest.mark.parametrize("other", [[1.0], "text"])
    def test_results_that_do_not_fit_together(self, other, tmp_path):
        def run(x):
            return {"v": 1.0 if x == 1 else other}

        for store in (None, tmp_path / "s"):
            data = sweep(run, grid={"x": [1, 2]}, store=store, **QUIET)
            assert data.status.values.tolist() == [1, 2]
            assert "v is" in data.failure.values[1]
            assert data.v.values[0] == 1


def _of_options(options):
    return 10 * options["rate"] + options["steps"][0] + options["steps"][1]


class TestDataset:
    def test_of_risks(self):
        data = sweep(th.bayes_risk, grid={"snr": [2.0, 4.0], "prior.amplitude[1]": [0.0, 0.7]},
                     fixed={"length": 5, "prior": PRIOR}, **QUIET)  # fmt: skip
        assert data.risk.dims == ("snr", "prior.amplitude[1]")
        for snr in (2.0, 4.0):
            for b in (0.0, 0.7):
                single = th.bayes_risk(th.SingleLocation(5, snr, th.sign_flips([0, 0], [1, b])), th.Quadrature(1e-6))
                own = data.sel({"snr": snr, "prior.amplitude[1]": b})
                assert abs(float(own.risk - single)) < float(own.error) + 1e-6
        assert (data.status == 1).all()
        assert (data.failure == "").all()

    def test_a_path_set_to_zero_and_back(self):
        """A sign that could not flip flips: what follows from a value is made again."""
        fixed = {"length": 5, "snr": 4.0, "prior": th.sign_flips([0.0, 1.0], [1.0, 0.0])}
        data = sweep(th.bayes_risk, grid={"prior.amplitude[1]": [0.0, 1.0]}, fixed=fixed, **QUIET)
        other = th.bayes_risk(th.SingleLocation(5, 4.0, th.sign_flips([0, 1], [1, 1])))
        assert abs(float(data.risk[1] - other)) < 2e-6
        assert abs(float(data.risk[0] - data.risk[1])) > 1e-2

    def test_ragged(self):
        data = sweep(sweepable.ragged, grid={"heads": [1, 3], "features": [2, 1]}, **QUIET)
        assert data.m.dims == ("heads", "features", "head", "feature")
        assert data.head_mask.dims == ("heads", "head")
        assert data.head_mask.values.tolist() == [[True, False, False], [True] * 3]
        assert data.feature_mask.values.tolist() == [[True, True], [True, False]]
        exists = data.head_mask & data.feature_mask
        assert np.array_equal(np.isfinite(data.m), exists.transpose(*data.m.dims))
        assert data.m.sel(heads=3, features=1).values[:, 0].tolist() == [0.0, 1.0, 2.0]
        assert data.n.dtype == np.int64
        assert data["head"].values.tolist() == [0, 1, 2]

    def test_of_numbers(self):
        data = sweep(sweepable.deterministic, grid={"x": [1, 2]}, fixed={"y": 3}, **QUIET)
        assert data.value.values.tolist() == [3.0, 6.0]
        assert json.loads(data.attrs["configuration"])["values"] == {"y": 3}

    def test_of_text(self):
        data = sweep(lambda a: {"upper": a.upper()}, grid={"a": ["x", "y"]}, **QUIET)
        assert data.upper.values.tolist() == ["X", "Y"]

    def test_own_coordinates_that_differ(self):
        def run(x):
            return xr.Dataset({"v": ("t", [x, x])}, coords={"t": [0.0, x]})

        data = sweep(run, grid={"x": [1.0, 2.0]}, **QUIET)
        assert data.t_label.values.tolist() == [[0.0, 1.0], [0.0, 2.0]]
        assert data.t.values.tolist() == [0, 1]

    def test_failures_stay_with_their_point(self):
        said = []
        data = sweep(sweepable.fails_on, grid={"x": [1, 2, 3]}, fixed={"bad": 2}, say=said.append, progress=False)
        assert data.status.values.tolist() == [1, 2, 1]
        assert np.array_equal(data.square, [1, np.nan, 9], equal_nan=True)
        assert "ArithmeticError: no value at 2" in data.failure.values[1]
        assert "1 point failed" in said[-1]

    def test_a_failure_among_points_of_one_call(self):
        """ν < 0 is refused when the tasks are made, before anything runs: the others run without it."""
        data = sweep(th.bayes_risk, grid={"snr": [1.0, -1.0, 2.0]}, fixed={"length": 5, "prior": PRIOR}, **QUIET)
        assert data.status.values.tolist() == [1, 2, 1]
        assert "snr" in data.failure.values[1]

    def test_divergence(self):
        fixed = {"length": 3, "heads": 1, "dim": 20, "snr": 1.0, "prior": th.sign_flips([0.0], [1.0]), **SGD}
        data = sweep(sim.train, grid={"variance": [1.0, 1e40]}, fixed=fixed, **QUIET)
        assert data.status.values.tolist() == [1, 2]
        assert "diverged" in data.failure.values[1]
        assert np.isfinite(data.m[0]).all()


FIXED = {"length": 3, "snr": 2.0, "heads": 2, "prior": th.sign_flips([0.0], [1.0]), **SGD}


class TestReplicas:
    @pytest.mark.slow
    @pytest.mark.parametrize("run", [sim.train, sim.train_reduced])
    def test_more_of_them(self, run):
        """Old replicas stay what they are, new ones are no copies."""
        few = sweep(run, grid={"dim": [20, 40]}, fixed=FIXED, replicas=2, **QUIET)
        more = sweep(run, grid={"dim": [40]}, fixed=FIXED, replicas=4, **QUIET)
        assert np.array_equal(few.m[1], more.m[0, :2])
        assert len(np.unique(more.m[0, :, 0, 0, 0])) == 4
        assert more.risk.dims == ("dim", "replica", "time")
        one = sweep(run, grid={"dim": [40]}, fixed=FIXED, **QUIET)
        assert np.array_equal(one.m[0], more.m[0, 0])

    def test_clocks(self):
        data = sweep(sim.train_reduced, grid={"dim": [20, 30]}, fixed={**FIXED, "record": [0.0, 0.21, 0.4]}, **QUIET)
        assert data.time.values.tolist() == [0.0, 0.21, 0.4]
        assert np.allclose(data.tau, [[0, 0.2, 0.4], [0, 0.2, 0.4]], atol=0.02)
        assert np.allclose(data.tau * data.dim, np.round(data.tau * data.dim), atol=1e-9)  # exact: whole steps

    @pytest.mark.slow
    def test_of_agreement(self):
        """They are judged together; what sweeps over η changes is both sides."""
        fixed = {**FIXED, "heads": 1, "dim": 60, "simulator": "train_reduced"}
        del fixed["learning_rate"]
        data = sweep(agreement, grid={"learning_rate": [1.0, 2.0]}, fixed=fixed, replicas=3, **QUIET)
        assert data.status.values.tolist() == [1, 1]
        assert data.m_shift.sizes["replica"] == 3
        steps = [data.m_allowed[i, -1].values for i in range(2)]
        assert not np.allclose(*steps)


class TestEveryRun:
    """Each of ours gives what it gives when called alone."""

    def test_population_risk(self):
        order = th.OrderParameters([[0.5, 0.1]], [[1.0]])
        grid = {"activation": [th.Softmax(), "Softmax1(bias=0.5)"], "length": [3, 6]}
        data = sweep(th.population_risk, grid=grid, fixed={"snr": 2.0, "prior": PRIOR, "order": order}, **QUIET)
        for a, activation in enumerate((th.Softmax(), th.Softmax1(bias=0.5))):
            for i, length in enumerate((3, 6)):
                single = th.population_risk(th.SingleLocation(length, 2.0, PRIOR), activation, order)
                assert abs(float(data.risk[a, i] - single)) < 1e-7
        assert data.activation.values.tolist()[1].startswith("Softmax1(bias=0.5")

    @pytest.mark.slow
    def test_gradient_flow(self):
        order = {"m": [[0.1, 0.05]], "r": [[1.0]]}
        fixed = {"length": 4, "snr": 2.0, "prior": PRIOR, "order": order, "times": [0.0, 1.0]}
        data = sweep(
            th.gradient_flow, grid={"snr": [1.0, 2.0]}, fixed={k: v for k, v in fixed.items() if k != "snr"}, **QUIET
        )
        start = th.OrderParameters(order["m"], order["r"])
        flow = th.gradient_flow(th.SingleLocation(4, 2.0, PRIOR), th.Softmax(), start, [0.0, 1.0])
        assert np.allclose(data.m[1], flow.order.m, atol=1e-5)

    @pytest.mark.slow
    def test_gradient_flow_from_drawn_starts(self):
        fixed = {"length": 4, "prior": PRIOR, "heads": 1, "times": [0.0, 0.5], "snr": 1.0}
        data = sweep(th.gradient_flow, grid={"dim": [50, 5000]}, fixed=fixed, replicas=2, **QUIET)
        assert abs(data.m[1, :, 0]).max() < abs(data.m[0, :, 0]).max()
        none = sweep(th.gradient_flow, grid={"dim": [50]}, fixed={**fixed, "heads": None}, **QUIET)
        assert "heads: expected a number" in none.failure.item()

    @pytest.mark.slow
    def test_optimal_risk(self):
        fixed = {"length": 5, "snr": 8.0, "prior": th.sign_flips([0.0], [1.0]), "starts": 1}
        data = sweep(th.optimal_risk, grid={"heads": [1, 2]}, fixed=fixed, **QUIET)
        assert (data.status == 1).all()
        assert float(data.risk[1]) < float(data.risk[0])
        assert data.m.dims == ("heads", "head", "feature")

    @pytest.mark.slow
    def test_predict_stages(self):
        fixed = {"length": 4, "snr": 4.0, "prior": th.sign_flips([0.0], [1.0]), "heads": 2, "samples": 4}
        data = sweep(th.predict_stages, grid={"dim": [500, 5000]}, fixed={**fixed, "variance": 0.1}, **QUIET)
        assert data.stage_time.dims == ("dim", "sample", "feature")
        assert (data.stage_time[1] > data.stage_time[0]).all()


class TestCalls:
    def test_plan(self):
        plan = plan_sweep(sim.train_reduced, grid={"snr": [1, 2], "heads": [1, 2]}, replicas=3,
                          fixed={"length": 3, "dim": 40, "prior": PRIOR, **SGD})  # fmt: skip
        assert (plan.todo, plan.shapes, len(plan.batches)) == (12, 2, 2)
        assert "12 points" in str(plan)
        assert "2 sets of shapes" in str(plan)
        assert "1 set of shapes" in str(plan._replace(shapes=1))

    def test_memory_cuts_calls(self):
        options = {"grid": {"snr": np.linspace(1, 2, 100)}, "fixed": {"length": 3, "prior": PRIOR}}
        whole, cut = plan_sweep(th.bayes_risk, **options), plan_sweep(th.bayes_risk, memory=10 * 2**12, **options)
        assert [len(batch) for batch in whole.batches] == [100]
        assert [len(batch) for batch in cut.batches] == [10] * 10
        assert cut.memory <= 10 * 2**12

    @pytest.mark.parametrize("run", [th.bayes_risk, th.population_risk])
    def test_a_thousand_points_compile_once(self, run):
        """Over ν and strengths: as few compilations as for twelve points, those of one call."""
        fixed = {"length": 5, "prior": th.sign_flips([0.0], [1.0])}
        if run is th.population_risk:
            fixed["order"] = th.OrderParameters([[1.0], [-1.0]], [[1.0, -1.0], [-1.0, 1.0]])

        def compilations(snrs, strengths):
            jax.clear_caches()
            grid = {"snr": np.linspace(0.5, 3, snrs), "prior.amplitude[0]": np.linspace(0.5, 1, strengths)}
            with _compilations() as seen:
                data = sweep(run, grid=grid, fixed=fixed, **QUIET)
            assert (data.status == 1).all()
            return len(seen)

        few = compilations(4, 3)
        assert few >= 1
        assert compilations(20, 50) == few


@contextlib.contextmanager
def _compilations():
    """An entry for each function that XLA compiles inside the block."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
