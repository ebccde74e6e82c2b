"""The verdict: calibrated on residuals with known laws, and strict about what it compares."""

import dataclasses
import json

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import synthetic

from compare import agreement
from compare.agreement import SPLIT_FRACTION, WEAKEST
from theory import Softmax, Trajectory


def with_settings(trajectory, **changes):
    settings = {**dict(trajectory.settings), **changes}
    fields = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    return Trajectory(**{**fields, "settings": settings})


def test_agrees_and_prints_its_numbers():
    theory = synthetic.ideal(0)
    verdict = agreement(theory, synthetic.simulated(theory, 0))
    assert verdict.agrees is True
    assert verdict.reasons == ()
    assert verdict.replicas == 8
    assert verdict.beta == pytest.approx((6 + 1.0 * (2.0**2 + 1.5**2)) / 1000)
    text = str(verdict)
    assert "AGREES" in text
    assert "corrector (step size 0.5)" in text
    assert all(f"\n  {name:6}" in text for name in ("m", "r", "risk", "loss"))


def test_plain_flow_is_named_in_the_table():
    theory = synthetic.ideal(0, step_size=0.0)
    assert "plain gradient flow" in str(agreement(theory, synthetic.simulated(theory, 0)))


@pytest.mark.parametrize(
    ("runs", "setup"),
    [pytest.param(1000, {"times": 4}, marks=pytest.mark.slow), (300, {"times": 4, "replicas": 3})],
)
def test_false_alarm_rate_under_the_null(runs, setup):
    """No bias and no allowance to speak of (D = 10^9): the level is met, and not by being far too lax."""
    level, alarms = 0.1, 0
    for seed in range(runs):
        theory = synthetic.ideal(seed, **setup)
        alarms += agreement(theory, synthetic.simulated(theory, seed, dim=10**9), level=level).agrees is False
    spread = np.sqrt(level * (1 - level) / runs)
    assert level / 3 < alarms / runs < level + 3 * spread


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.01, 0.1])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["unbiased", "bias at the allowance"])
def test_false_alarm_rate_in_full(level, share):
    """2000 ensembles, also where the mean is off by all that the allowance grants (largest next to the noise)."""
    alarms, runs = 0, 2000
    for seed in range(runs):
        theory = synthetic.ideal(seed, times=4)
        path = agreement(theory, synthetic.simulated(theory, seed, scale=0.0, fresh=False))["m"].bias
        run = synthetic.simulated(theory, seed, scale=0.1, shift=share * path[None], fresh=False)
        alarms += agreement(theory, run, level=level).agrees is False
    assert alarms / runs < level + 3 * np.sqrt(level * (1 - level) / runs)


def test_a_drift_wrong_by_a_factor_two_is_found():
    theory, wrong = synthetic.ideal(1), synthetic.ideal(1, drift=2.0)
    verdict = agreement(wrong, synthetic.simulated(theory, 1))
    assert verdict.agrees is False
    assert any(reason.startswith("m[") and "allowed" in reason for reason in verdict.reasons)
    assert "DISAGREES" in str(verdict)


def test_a_shift_of_twice_the_allowance_is_found_and_its_place_named():
    theory = synthetic.ideal(2)
    shift = np.zeros(np.asarray(theory.order.m).shape)
    clean = agreement(theory, synthetic.simulated(theory, 2))
    shift[:, 5, 1, 1] = 2 * clean["m"].allowed[5, 1, 1]
    verdict = agreement(theory, synthetic.simulated(theory, 2, shift=shift))
    assert verdict.agrees is False
    assert any(reason.startswith("m[head 2, feature 2] at τ = 5:") for reason in verdict.reasons)


def test_single_replicas_give_no_verdict():
    theory = synthetic.ideal(3, replicas=1)
    run = synthetic.simulated(theory, 3)
    for pair in [(theory, run), (theory[0], run[0])]:
        verdict = agreement(*pair)
        assert verdict.agrees is None
        assert "no standard error" in verdict.reasons[0]
        assert np.all(np.isnan(verdict["m"].error))
        assert "NO VERDICT" in str(verdict)


def test_failed_replicas_are_left_out_and_counted():
    theory = synthetic.ideal(4)
    run = synthetic.simulated(theory, 4)
    ended = run.result.at[2].set(1), run.risk.at[2, 3:].set(np.nan)
    broken = eqx.tree_at(lambda t: (t.result, t.risk), run, ended)
    verdict = agreement(theory, broken)
    assert (verdict.replicas, verdict.excluded) == (7, 1)
    assert np.all(np.isfinite(verdict["risk"].mean))
    assert "1 failed and left out" in str(verdict)


@pytest.mark.filterwarnings("error")
def test_nothing_but_failures_is_no_verdict():
    theory = synthetic.ideal(4)
    run = synthetic.simulated(theory, 4)
    verdict = agreement(theory, eqx.tree_at(lambda t: t.result, run, run.result.at[:].set(3)))
    assert (verdict.agrees, verdict.replicas, verdict.excluded) == (None, 0, 8)
    assert "NO VERDICT" in str(verdict)


def test_until_defaults_to_the_first_predicted_split():
    theory = synthetic.ideal(5, growth=0.7, times=13)
    run = synthetic.simulated(theory, 5)
    verdict = agreement(theory, run)
    m = np.asarray(theory.order.m)
    amplitude = np.std(m[..., 1], axis=2)
    first = np.flatnonzero(np.any(amplitude > SPLIT_FRACTION * 1.5, axis=0))[0]
    expected = verdict.time[first - 1]
    assert (verdict.until, verdict.onset) == (expected, verdict.time[first])
    assert 0 < expected < 6
    later = np.zeros(m.shape)
    later[:, verdict.time > expected] = 5.0
    assert agreement(theory, synthetic.simulated(theory, 5, shift=later)).agrees is True
    assert agreement(theory, synthetic.simulated(theory, 5, shift=later), until=6.0).agrees is False


def test_resolution_is_the_least_visible_drift_error():
    theory = synthetic.ideal(0)
    verdict = agreement(theory, synthetic.simulated(theory, 0))
    m = np.asarray(theory.order.m).mean(axis=0)
    way = np.cumsum(np.abs(np.diff(m[..., 0], axis=0)), axis=0)  # along feature 2 the theory stands still
    expected = np.min(verdict["m"].allowed[1:, :, 0] / way)
    assert verdict["m"].resolution == pytest.approx(expected)
    assert 0 < expected < 0.5
    data = verdict.to_xarray()
    assert json.loads(data.attrs["resolution"])["m"] == verdict["m"].resolution
    assert data.attrs["judged"] == 6
    assert "judged 6 of 7 records" in str(verdict)
    assert "visible" in str(verdict)
    assert "corrector is not tested separately" in str(verdict)


def test_a_verdict_that_could_notice_nothing_is_none():
    """Two replicas: the critical value is in the hundreds."""
    theory = synthetic.ideal(0, replicas=2)
    verdict = agreement(theory, synthetic.simulated(theory, 0, scale=5.0))
    assert verdict["m"].within
    assert verdict["m"].resolution >= WEAKEST
    assert verdict.agrees is None
    assert verdict.reasons[0].startswith("too weak to tell: drift errors of m")
    assert verdict.reasons[0].endswith("Use more replicas, larger D or more records")
    assert "NO VERDICT" in str(verdict)


def test_few_judged_records_are_no_agreement_but_may_be_a_disagreement():
    theory, wrong = synthetic.ideal(0), synthetic.ideal(0, drift=2.0)
    run = synthetic.simulated(theory, 0)
    verdict = agreement(theory, run, until=2.0)
    assert verdict.agrees is None
    assert "only 2 records judged" in verdict.reasons[0]
    assert "only 1 record judged" in agreement(theory, run, until=1.0).reasons[0]
    assert agreement(theory, run, until=3.0).agrees is True
    assert agreement(wrong, run, until=2.0).agrees is False


@pytest.mark.parametrize("until", [0.0, -1.0, float("nan")])
def test_until_must_be_positive(until):
    theory = synthetic.ideal(0)
    with pytest.raises(ValueError, match="until: expected"):
        agreement(theory, synthetic.simulated(theory, 0), until=until)


def test_tables_without_a_verdict_name_no_worst_place():
    theory = synthetic.ideal(3, replicas=1)
    text = str(agreement(theory, synthetic.simulated(theory, 3)))
    assert "head 1" not in text
    assert "nan" not in text
    assert "1 replica," in text
    theory = synthetic.ideal(3)
    assert "worst at" not in str(agreement(theory, synthetic.simulated(theory, 3), until=0.5))


def test_nothing_judged_is_no_verdict():
    theory = synthetic.ideal(6)
    verdict = agreement(theory, synthetic.simulated(theory, 6), until=0.5)
    assert verdict.agrees is None
    assert "no record in 0 < τ ≤ 0.5" in verdict.reasons[0]


def test_dataset_carries_names_and_plain_attributes():
    theory = synthetic.ideal(7)
    verdict = agreement(theory, synthetic.simulated(theory, 7))
    data = verdict.to_xarray()
    assert data["m_residual"].dims == ("time", "head", "feature")
    assert data["r_allowed"].dims == ("time", "head", "head_")
    np.testing.assert_array_equal(data["risk_error"], verdict["risk"].error)
    assert json.loads(data.attrs["agrees"]) is True
    assert data.attrs["report"] == str(verdict)
    assert all(isinstance(value, str | int | float) for value in data.attrs.values())
    with pytest.raises(KeyError, match="expected one of m, r, risk, loss"):
        verdict["q"]


def test_r_is_symmetric_in_every_part():
    theory = synthetic.ideal(8, heads=3)
    residual = agreement(theory, synthetic.simulated(theory, 8))["r"]
    for part in (residual.mean, residual.error, residual.bias, residual.allowed):
        np.testing.assert_allclose(part, np.swapaxes(part, 1, 2), rtol=0, atol=1e-12)


def test_exact_match_agrees():
    theory = synthetic.ideal(9)
    run = synthetic.simulated(theory, 9, scale=0.0, fresh=False)
    assert agreement(theory, run).agrees is True


class TestTrained:
    """Biases and scales that are trained are judged like m and r."""

    def pair(self, seed=0, *, own=False, shift=0.0, size=1.0, **setup):
        theory = synthetic.ideal(seed, **setup)
        return synthetic.trained(theory, synthetic.simulated(theory, seed), seed, own=own, scale=size, shift=shift)

    @pytest.mark.parametrize("own", [False, True], ids=["shared", "per head"])
    def test_agreement_names_them(self, own):
        verdict = agreement(*self.pair(own=own))
        assert verdict.agrees is True, str(verdict)
        assert [r.name for r in verdict.residuals] == ["m", "r", "bias", "scale", "risk", "loss"]
        assert "signal's pull on the bias and the scale" in str(verdict)
        data = verdict.to_xarray()
        assert data["bias_residual"].dims == ("time", *(("head",) if own else ()))
        assert set(json.loads(data.attrs["critical"])) == {"m", "r", "bias", "scale", "risk", "loss"}
        assert data.attrs["report"] == str(verdict)

    @pytest.mark.parametrize("own", [False, True], ids=["shared", "per head"])
    def test_a_shift_beyond_what_is_allowed_is_found(self, own):
        theory, run = self.pair(own=own)
        allowed = agreement(theory, run)["bias"].allowed
        shift = np.zeros(allowed.shape)
        shift[(5, 1) if own else 5] = 3 * allowed[(5, 1) if own else 5]
        verdict = agreement(*self.pair(own=own, shift=shift))
        assert verdict.agrees is False
        assert verdict.reasons[0].startswith("bias[head 2] at τ = 5:" if own else "bias at τ = 5:")

    def test_errors_are_pooled_over_heads(self):
        verdict = agreement(*self.pair(own=True))
        error = verdict["bias"].error
        np.testing.assert_array_equal(error[:, 0], error[:, 1])
        theory, run = self.pair(own=True)
        residuals = np.asarray(run.activation.bias - theory.activation.bias)
        expected = np.sqrt(np.var(residuals, axis=0, ddof=1).mean(axis=1) / 8)
        np.testing.assert_allclose(error[:, 0], expected, rtol=1e-12)

    @pytest.mark.slow
    def test_false_alarm_rate_with_six_quantities(self):
        """Limit loss, so that nothing is allowed but scatter², here next to nothing."""
        level, runs, alarms = 0.1, 300, 0
        for seed in range(runs):
            theory, run = self.pair(seed, own=bool(seed % 2), size=1e-3, times=4)
            quiet = synthetic.simulated(theory, seed, dim=10**9, loss="limit").order
            run = eqx.tree_at(lambda t: (t.order, t.risk, t.loss), run, (quiet, theory.risk, theory.risk))
            run = with_settings(run, loss="limit")
            alarms += agreement(theory, run, level=level).agrees is False
        assert alarms / runs < level + 3 * np.sqrt(level * (1 - level) / runs)

    def test_bias_allowance(self):
        """β·path, scatter² of m and of both, and the signal's pull (docs/model.md §8)."""
        for own in (False, True):
            theory, run = self.pair(own=own)
            verdict = agreement(theory, run)
            signal, share, heads = (2.0**2 + 1.5**2) / 1000, lambda b: 1 / (1 + 6 * np.exp(-b)), 2 if own else 1
            expected = {"bias": 0.0, "scale": 0.0}
            for name in ("m", "bias", "scale"):
                known = [t.order.m if name == "m" else getattr(t.activation, name) for t in (theory, run)]
                variance = np.var(known[1] - known[0], axis=0, ddof=1)
                spread = variance.mean(1).sum(1) if name == "m" else variance.mean(1) if own else variance
                expected = {key: value + spread for key, value in expected.items()}
            b, c = (np.asarray(x)[0].reshape(7, -1) for x in (theory.activation.bias, theory.activation.scale))
            slope = share(b) / (2 * heads)
            rise = np.concatenate([np.zeros((1, b.shape[1])), np.cumsum((slope[1:] + slope[:-1]) / 2, axis=0)])
            for name, way, pull in (("bias", b - b[0], rise), ("scale", c[0] - c, c)):
                total = verdict.beta * way + signal * pull
                allowed = verdict[name].bias.reshape(7, -1) - expected[name].reshape(7, 1)
                np.testing.assert_allclose(allowed, np.broadcast_to(total.max(1, keepdims=True), b.shape), rtol=1e-9)
            limit = agreement(theory, with_settings(run, loss="limit"))
            np.testing.assert_allclose(limit["bias"].bias.reshape(7, -1)[:, 0], expected["bias"], rtol=1e-9)

    def test_one_that_hardly_moves_is_no_reason_against_a_verdict(self):
        theory, run = self.pair()
        still = jnp.zeros_like(theory.activation.bias)
        pair = (eqx.tree_at(lambda t: t.activation.bias, t, still) for t in (theory, run))
        verdict = agreement(*pair)
        assert verdict.agrees is True
        assert "the theory's bias does not move" in str(verdict)

    def test_failed_records_are_left_out(self):
        theory, run = self.pair(own=True)
        broken = eqx.tree_at(lambda t: t.activation.scale, run, run.activation.scale.at[3, -1, 0].set(jnp.nan))
        assert agreement(theory, broken).excluded == 1

    def test_pairs_that_do_not_belong_together(self):
        theory, run = self.pair()
        with pytest.raises(ValueError, match=r"bias_rate: expected the same, got 0.5 \(theory\), 1.0"):
            agreement(with_settings(theory, bias_rate=0.5), run)
        with pytest.raises(ValueError, match="activation: expected the same"):
            agreement(theory, synthetic.simulated(synthetic.ideal(0), 0))
        moved = eqx.tree_at(lambda t: t.activation.bias, run, run.activation.bias + 0.1)
        with pytest.raises(ValueError, match=r"bias at τ = 0 differs by 0\.1 in replica 0"):
            agreement(theory, moved)
        with pytest.raises(ValueError, match="activation: expected records of bias of one shape"):
            agreement(theory, eqx.tree_at(lambda t: t.activation.bias, run, run.activation.bias[..., None]))


class TestRefusals:
    theory = property(lambda self: synthetic.ideal(0))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda s: synthetic.simulated(synthetic.ideal(0, times=6), 0), "same length, got 7 .* 6"),
            (lambda s: eqx.tree_at(lambda t: t.time, s, s.time * 1.01), "record 1 is at"),
            (lambda s: synthetic.simulated(synthetic.ideal(0, replicas=5), 0), "replicas: .* 8 .* 5"),
            (lambda s: synthetic.simulated(synthetic.ideal(0, heads=3), 0), "same heads and features"),
            (lambda s: synthetic.simulated(synthetic.ideal(99), 0), "that replica's own order parameters"),
            (lambda s: with_settings(s, batch=20), "step_size: .* 0.25, or 0, got 0.5"),
            (lambda s: eqx.tree_at(lambda t: t.task.snr, s, s.task.snr * 2), "snr: expected the same, got 1.0"),
            (lambda s: eqx.tree_at(lambda t: t.activation, s, Softmax(2.0)), "activation: expected the same"),
            (lambda s: synthetic.ideal(0), "simulation: expected a run of `train`"),
        ],
    )
    def test_pairs_that_do_not_belong_together(self, change, message):
        run = synthetic.simulated(self.theory, 0)
        with pytest.raises(ValueError, match=message):
            agreement(self.theory, change(run))

    def test_swapped_replicas(self):
        run = synthetic.simulated(self.theory, 0)
        swapped = eqx.tree_at(lambda t: (t.order.m, t.order.r), run, (run.order.m[::-1], run.order.r[::-1]))
        with pytest.raises(ValueError, match=r"differs by .* in replica 0"):
            agreement(self.theory, swapped)

    def test_swapped_arguments(self):
        with pytest.raises(ValueError, match="simulation: expected a run of `train`"):
            agreement(synthetic.simulated(self.theory, 0), self.theory)

    def test_single_theory_against_an_ensemble(self):
        with pytest.raises(ValueError, match="each replica against the theory from its own start"):
            agreement(self.theory[0], synthetic.simulated(self.theory, 0))

    def test_late_first_record(self):
        run = synthetic.simulated(self.theory, 0)
        late = [eqx.tree_at(lambda t: t.time, x, x.time + 1) for x in (self.theory, run)]
        with pytest.raises(ValueError, match="first record at 0"):
            agreement(*late)

    @pytest.mark.parametrize("level", [0.0, 1.0, -1.0, float("nan")])
    def test_level(self, level):
        with pytest.raises(ValueError, match="level: expected"):
            agreement(self.theory, synthetic.simulated(self.theory, 0), level=level)
