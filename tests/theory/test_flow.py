"""The flow: the worked case and reference trajectory, early rates, the corrector, failures and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from tests.theory.states import FLIPS, WORKED, random_state, worked_fixed_point
from theory import flow as flow_module
from theory._nodes import normal_points
from theory.corrector import gradient_covariance
from theory.flow import drift
from theory.scores import score_law

SOFTMAX = th.Softmax()


def test_worked_case_fixed_point_and_spectrum():
    order = worked_fixed_point()
    method = th.Quadrature(1e-11).fitted(WORKED, SOFTMAX, order)
    risk = lambda m: th.population_risk(WORKED, SOFTMAX, th.OrderParameters(m, m @ m.T), method)  # noqa: E731
    assert f"{float(risk(order.m)):.8f}" == "0.44687973"
    np.testing.assert_allclose(jax.grad(risk)(order.m), 0, atol=1e-10)
    eigenvalues = np.linalg.eigvalsh(jax.jit(jax.hessian(risk))(order.m).reshape(12, 12))
    expected = [-0.06393945] * 3 + [-0.02301820] * 3 + [0.0] * 3 + [0.01758116, 0.06630472, 0.09982357]
    np.testing.assert_allclose(eigenvalues, expected, atol=1e-8)


def test_worked_case_common_move_along_an_orthogonal_direction():
    order = worked_fixed_point()
    method = th.Quadrature(1e-11).fitted(WORKED, SOFTMAX, order)

    def risk(w):  # one orthogonal coordinate per head
        return th.population_risk(WORKED, SOFTMAX, th.OrderParameters(order.m, order.r + jnp.outer(w, w)), method)

    eigenvalues = np.linalg.eigvalsh(jax.jit(jax.hessian(risk))(jnp.zeros(4)))
    np.testing.assert_allclose(eigenvalues, [0, 0, 0, 0.047450], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("records", [2, 4])
def test_reference_trajectory(records):
    keys = jax.random.normal(jax.random.PRNGKey(0), (4, 1000), jnp.float64)
    start = th.OrderParameters(keys[:, :3] / np.sqrt(1000), keys @ keys.T / 1000)
    run = th.gradient_flow(WORKED, SOFTMAX, start, [0.0, 20.0, 100.0, 400.0][:records], progress=False)
    np.testing.assert_allclose(run.risk, [0.9277, 0.4869, 0.398945, 0.376651][:records], atol=5e-5)
    np.testing.assert_allclose(run.risk[2:], [0.398945, 0.376651][: records - 2], atol=5e-7)
    np.testing.assert_allclose(run.order.m[1, :, 0], [1.338, 1.390, 1.347, 1.201], atol=5e-4)
    assert np.all(np.diff(run.risk) < 0)
    assert int(run.result) == th.Result.successful


@pytest.mark.slow
def test_tolerances_tighten_the_trajectory():
    start = random_state(3, m=0.2, w=0.5)
    runs = [
        th.gradient_flow(WORKED, SOFTMAX, start, [5.0, 30.0], method=method, tolerance=tolerance, progress=False)
        for method, tolerance in [
            (th.Quadrature(1e-7, 48, 56), 1e-4),
            (th.Quadrature(1e-7, 48, 56), 1e-7),
            (th.Quadrature(1e-10, 72, 88), 1e-10),
        ]
    ]
    errors = [float(jnp.abs(run.order.m - runs[-1].order.m).max()) for run in runs[:-1]]
    assert errors[1] < 2e-5
    assert errors[1] < errors[0] < 2e-3


@pytest.mark.slow
def test_early_rates_at_zero_keys():
    # dm_hf/dτ = (2/H)(1/L)(1−1/L)√ν E θ_f; a split along a feature with E θ_f = 0 grows at
    # (2/H)(1/L)(1−1/L)(1−2/L) ν E θ_f²
    for length, snr in [(10, 1.0), (3, 2.0), (2, 1.0)]:
        task = th.SingleLocation(length, snr, FLIPS)
        zero = th.OrderParameters(np.zeros((4, 3)), np.zeros((4, 4)))
        method = th.Quadrature(1e-11).fitted(task, SOFTMAX, zero)
        base = 2 / 4 / length * (1 - 1 / length)
        np.testing.assert_allclose(
            drift(task, SOFTMAX, zero, method=method)[1].m, np.tile([base * np.sqrt(snr) * 2, 0, 0], (4, 1)), atol=1e-9
        )
        split = np.array([1.0, -1.0, 0.5, -0.5])

        def feature_drift(size, f, task=task, method=method, split=split):
            m = jnp.zeros((4, 3)).at[:, f].set(size * split)
            return drift(task, SOFTMAX, th.OrderParameters(m, m @ m.T), method=method)[1].m[:, f]

        for f, strength in [(1, 2.5**2), (2, 1.5**2)]:
            rate = jax.jit(jax.jacfwd(feature_drift), static_argnums=1)(0.0, f) / split
            np.testing.assert_allclose(rate, base * (1 - 2 / length) * snr * strength, atol=1e-8)


def test_drift_equals_moments_of_the_gradient():
    # dm/dτ = −E Σ g u, dr/dτ = −E Σ (g χ' + χ g') + (η/B) E Σ g g', sampled; 12 + 16 entries at |z| < 5
    order, task, samples = random_state(8, m=0.8, w=0.6), WORKED, 100_000
    rng = np.random.default_rng(4)
    theta = np.asarray(task.prior.means)[rng.integers(4, size=samples)]
    u = rng.standard_normal((samples, 10, 3))
    u[:, 0] += theta
    m, w = np.asarray(order.m), np.linalg.cholesky(np.asarray(order.r_perp))
    chi = u @ m.T + rng.standard_normal((samples, 10, 4)) @ w.T
    sigma = np.exp(chi - chi.max(1, keepdims=True))
    sigma /= sigma.sum(1, keepdims=True)
    miss = -sigma.mean(2)
    miss[:, 0] += 1
    g = -(2 / 4) * sigma * (miss[:, :, None] - (sigma * miss[:, :, None]).sum(1, keepdims=True))
    step = 0.5
    cross = np.einsum("nlh,nlk->nhk", g, chi)
    noise = np.einsum("nlh,nlk->nhk", g, g)
    sampled = {
        "m": -np.einsum("nlh,nlf->nhf", g, u),
        "r": -(cross + np.swapaxes(cross, 1, 2)) + step * noise,
    }
    points = jnp.asarray(normal_points(2**14, 10, 4, seed=1))
    _, exact = drift(task, SOFTMAX, order, step_size=step, points=points)
    for name, draws in sampled.items():
        error = draws.std(0) / np.sqrt(samples)
        assert np.all(np.abs(draws.mean(0) - np.asarray(getattr(exact, name))) < 5 * error)


def test_corrector_points_converge_and_seeds_agree():
    scores = score_law(WORKED, random_state(9))
    values = [
        np.asarray(gradient_covariance(SOFTMAX, scores, jnp.asarray(normal_points(2**11, 10, 4, seed=s))))
        for s in range(6)
    ]
    best = np.asarray(gradient_covariance(SOFTMAX, scores, jnp.asarray(normal_points(2**15, 10, 4, seed=99))))
    spread = np.std(values, axis=0, ddof=1)
    assert spread.max() < 0.03 * best.max()  # about 1 % is what the documentation promises
    assert np.all(np.abs(np.mean(values, axis=0) - best) < 8 * spread / np.sqrt(6) + 2e-3 * best.max())
    np.testing.assert_allclose(best, best.T, atol=1e-15)
    assert np.linalg.eigvalsh(best).min() > 0
    plain = normal_points(10, 30_000, 1, seed=0)  # more dimensions than Sobol numbers exist for
    assert plain.shape == (30_000, 1, 10)


@pytest.mark.slow
def test_finite_steps_of_sgd_feed_r():
    # L=5, H=2, ν=4, θ=(1,±1), η/B=8, τ=6 from m=0, r=.09 I. Independent Monte Carlo integration of the flow
    # (midpoint rule, 4·10^5 samples a step): r_11 = 1.1276 without the corrector, 2.2590 with it (± .001)
    task = th.SingleLocation(5, 4.0, th.sign_flips([1.0, 0.0], [0.0, 1.0]))
    start = th.OrderParameters(np.zeros((2, 2)), 0.09 * np.eye(2))
    plain = th.gradient_flow(task, SOFTMAX, start, [6.0], progress=False)
    np.testing.assert_allclose(jnp.diagonal(plain.order.r[0]), 1.12776, atol=1e-4)
    stepped = th.gradient_flow(task, SOFTMAX, start, [6.0], step_size=8.0, corrector_points=2**13, progress=False)
    np.testing.assert_allclose(jnp.diagonal(stepped.order.r[0]), 2.259, atol=6e-3)
    np.testing.assert_allclose(stepped.order.m[0, :, 1], 0, atol=1e-6)  # the ±1 feature never splits here


@pytest.mark.slow
def test_replicas_are_their_single_runs_and_stay_on_the_cone():
    starts = th.OrderParameters.initial(jax.random.key(2), heads=2, features=3, dim=300, replicas=9)
    method = th.Quadrature(1e-7, 32, 40)
    for step_size in (0.0, 0.5):
        options = {"step_size": step_size, "corrector_points": 256, "method": method, "progress": False}
        together = th.gradient_flow(WORKED, SOFTMAX, starts, [0.0, 3.0, 6.0], **options)
        alone = th.gradient_flow(WORKED, SOFTMAX, starts[8], [0.0, 3.0, 6.0], **options)
        np.testing.assert_allclose(together.order.r[8], alone.order.r, atol=2e-6)
        np.testing.assert_allclose(together.risk[8], alone.risk, atol=1e-7)
        np.testing.assert_allclose(together.order.m[:, 0], starts.m, atol=1e-15)
        assert np.linalg.eigvalsh(np.asarray(together.order.r_perp)).min() > -1e-12
    assert together.to_xarray().sizes == {"replica": 9, "time": 3, "head": 2, "head_": 2, "feature": 3}


def test_identical_heads_stay_identical():
    m = np.tile([[0.1, 0.02, 0.01]], (3, 1))
    start = th.OrderParameters(m, m @ m.T + 0.2)
    run = th.gradient_flow(WORKED, SOFTMAX, start, [10.0], method=th.Quadrature(1e-7, 32, 64), progress=False)
    np.testing.assert_allclose(run.order.m[0], np.tile(run.order.m[0, :1], (3, 1)), atol=1e-9)


def test_a_solve_that_cannot_finish_says_when_and_keeps_what_it_had(monkeypatch):
    monkeypatch.setattr(flow_module, "_MAX_STEPS", 12)
    jax.clear_caches()
    task = th.SingleLocation(5, 4.0, th.sign_flips([0.0], [1.0]))
    start = th.OrderParameters([[0.2], [-0.1]], [[0.3, 0.0], [0.0, 0.3]])
    with pytest.raises(th.RunFailed, match=r"ran out of steps after τ = 0\.5") as failure:
        th.gradient_flow(task, SOFTMAX, start, [0.0, 0.5, 300.0], tolerance=1e-9, progress=False)
    kept = failure.value.trajectory
    assert np.isfinite(kept.risk[:2]).all()
    assert np.isnan(kept.risk[2])
    assert np.isnan(kept.order.m[2]).all()
    quiet = th.gradient_flow(task, SOFTMAX, start, [0.0, 0.5, 300.0], tolerance=1e-9, progress=False, throw=False)
    assert int(quiet.result) == th.Result.stalled
    jax.clear_caches()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"times": [0.0, 2.0, 1.0]}, "times: expected strictly increasing times"),
        ({"times": [-1.0, 2.0]}, "times: expected strictly increasing times"),
        ({"times": []}, "times: expected strictly increasing times"),
        ({"times": [0.0, np.nan]}, "times: expected finite numbers"),
        ({"step_size": -0.1}, "step_size: expected no negative entry, got -0.1"),
        ({"tolerance": 1e-16}, "tolerance: expected a number from 1e-13"),
        ({"corrector_points": 0}, "corrector_points: expected a whole number >= 2, got 0"),
        ({"order": random_state(0, features=2)}, "order: expected m with F = 3"),
    ],
)
def test_wrong_input_is_named(change, message):
    call = {"order": random_state(0), "times": [0.0, 1.0], **change}
    with pytest.raises(ValueError, match=message):
        th.gradient_flow(WORKED, SOFTMAX, call.pop("order"), call.pop("times"), **call)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="stepsize"):
        th.gradient_flow(WORKED, SOFTMAX, random_state(0), [0.0, 1.0], stepsize=0.5)
