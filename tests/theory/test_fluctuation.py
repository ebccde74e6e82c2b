"""The covariance equation and its parts: increments, Jacobian, the check case, and the stochastic flow."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from theory import _montecarlo
from theory._increments import flat_of, increments, shaped
from theory._nodes import normal_points
from theory.flow import drift
from theory.fluctuation import _CORRECTOR_POINTS

TASK = th.SingleLocation(4, 2.0, th.sign_flips([0.5], [1.0]))
ORDER = th.OrderParameters([[0.4], [0.1]], [[0.6, 0.15], [0.15, 0.4]])
RATES = {"step_size": jnp.array(0.7), "bias_rate": jnp.array(0.5), "scale_rate": jnp.array(2.0)}
FIXED = th.Quadrature(1e-6, nodes=32, frequencies=48)
JOINT = th.Quadrature(1e-6, nodes=32, points=(24, 24))


@pytest.mark.parametrize(
    ("activation", "method"),
    [
        (th.Softmax(), FIXED),
        (th.Softmax1(bias=[0.3, -0.2], scale=1.5, trained=True), FIXED),
        (th.BayesSoftmax(bias=[0.2, -0.1], trained=True), JOINT),
        (th.BayesSoftmax("norm"), JOINT),
    ],
    ids=["softmax", "softmax-1 trained", "B-softmax trained", "B-softmax norm"],
)
def test_increments_have_the_drift_as_their_mean(activation, method):
    """On 2^14 Sobol points per component, which err by less than .003 here."""
    points = jnp.asarray(normal_points(2**14, 4, 3, seed=0))
    trained, rest = activation.split()
    samples, weights = increments(TASK, rest, (trained, ORDER), RATES, points)
    mean = weights @ samples.mean(axis=1)
    expected = flat_of(drift(TASK, activation, ORDER, **RATES, method=method, points=points[:, :2]))
    np.testing.assert_allclose(mean, expected, rtol=0, atol=3e-3)
    assert np.max(np.abs(expected)) > 0.05


@pytest.mark.parametrize(
    "activation",
    [th.Softmax(), pytest.param(th.Softmax1(scale=1.5, trained=True), marks=pytest.mark.slow)],
    ids=["plain", "trained"],
)
def test_rates_are_the_jacobian_of_the_drift(activation):
    options = {"step_size": 0.7, "bias_rate": 0.5, "scale_rate": 2.0, "method": FIXED, "progress": False}
    flow = th.gradient_flow(TASK, activation, ORDER, [0.0, 0.3, 0.6, 0.9], **options)
    found = th.fluctuations(flow, dim=1000, points=2048, method=FIXED).rates[2]
    trained, rest = flow.activation.split()
    state = (jax.tree.map(lambda leaf: leaf[2], trained), flow.order[2])
    points = jnp.asarray(normal_points(2048, 4, 3, seed=0))[:, :2, :_CORRECTOR_POINTS]

    @jax.jit
    def slope(x):
        own, order = shaped(x, state)
        return flat_of(drift(TASK, eqx.combine(own, rest), order, **RATES, method=FIXED, points=points))

    x, h = flat_of(state), 1e-5
    columns = [(slope(x + h * e) - slope(x - h * e)) / (2 * h) for e in jnp.eye(x.size)]
    np.testing.assert_allclose(found, np.stack(columns, axis=1), rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def check_case():
    task, start = th.SingleLocation(6, 1.0, th.discrete([[1.5]])), th.OrderParameters([[0.2]], [[0.8]])
    method = th.Quadrature(1e-6, nodes=32, frequencies=48)
    return th.gradient_flow(
        task, th.Softmax(), start, np.linspace(0, 10, 21), step_size=1.0, method=method, progress=False
    )


def thinned(flow, some):
    """Some of the 21 records."""
    return jax.tree.map(lambda leaf: leaf[some] if np.shape(leaf)[:1] == (21,) else leaf, flow)


def test_the_check_case(check_case):
    """docs/model.md §15; both Σ and the corrector err by up to 1 % by their points."""
    band = th.fluctuations(check_case, dim=1000)
    np.testing.assert_allclose(
        [check_case.order.m[-1, 0, 0], check_case.order.r[-1, 0, 0]], [1.4259, 2.3403], rtol=2e-3
    )
    np.testing.assert_allclose(1000 * band.covariance[-1][np.triu_indices(2)], [0.2057, 0.5628, 1.7208], rtol=0.015)
    assert band.error < 0.01
    np.testing.assert_allclose(band.m[-1, 0, 0] ** 2, band.covariance[-1, 0, 0])
    assert "Fluctuations at D = 1000" in str(band)
    data = band.to_xarray()
    assert data["m_deviation"].dims == ("time", "head", "feature")
    coarse = thinned(check_case, slice(None, None, 5))
    assert th.fluctuations(coarse, dim=1000).error > 2 * band.error


@pytest.mark.slow
def test_covariances_are_positive_semi_definite_and_symmetric():
    start = th.OrderParameters(jnp.zeros((2, 3, 1)), jnp.tile(jnp.eye(3) * 0.3, (2, 1, 1)))
    flow = th.gradient_flow(
        TASK, th.Softmax(), start, np.linspace(0, 3, 7), step_size=1.0, method=FIXED, progress=False
    )
    band = th.fluctuations(flow, dim=500, points=512, method=FIXED)
    assert band.covariance.shape == (2, 7, 9, 9)
    for matrices in (band.covariance, band.noise):
        np.testing.assert_allclose(matrices, np.swapaxes(matrices, -1, -2), atol=1e-12)
        scale = np.trace(matrices, axis1=-2, axis2=-1)[..., None]
        assert np.all(np.linalg.eigvalsh(matrices) >= -1e-12 * np.maximum(scale, 1e-300))
    np.testing.assert_allclose(band.r, np.swapaxes(band.r, -1, -2))
    np.testing.assert_allclose(band.covariance[0], band.covariance[1])


def test_an_ensemble_starts_with_the_scatter_of_its_keys():
    """S(0) against drawn starts: 4000 draws, 6 variances within 5 standard errors (false-alarm rate 10⁻⁵)."""
    dim, variance = 400, 0.7
    start = th.OrderParameters.initial(jax.random.key(0), heads=2, features=1, dim=None, variance=variance)
    flow = th.gradient_flow(
        TASK, th.Softmax(), start, np.linspace(0, 1, 4), step_size=1.0, method=FIXED, progress=False
    )
    band = th.fluctuations(flow, dim=dim, variance=variance, points=64, method=FIXED)
    drawn = th.OrderParameters.initial(
        jax.random.key(1), heads=2, features=1, dim=dim, variance=variance, replicas=4000
    )
    for own, seen in ((band.m[0], drawn.m), (band.r[0], drawn.r)):
        ratio = np.var(np.asarray(seen), axis=0) / own**2
        assert np.all(np.abs(ratio - 1) < 5 * np.sqrt(2.5 / 4000))


def test_draws_have_the_law_of_the_path(check_case):
    """20,000 draws: covariances at and between records within 5 standard errors."""
    band = th.fluctuations(check_case, dim=1000)
    x = band.draw(20_000, seed=3)
    for a, b in ((20, 20), (8, 8), (8, 20)):
        step = np.eye(2)
        for k in range(a, b):
            step = band.propagators[k] @ step
        expected = band.covariance[a] @ step.T
        seen = x[:, a].T @ x[:, b] / len(x)
        scale = np.sqrt(np.outer(np.diagonal(band.covariance[a]), np.diagonal(band.covariance[b])))
        assert np.all(np.abs(seen - expected) < 5 * 1.5 * scale / len(x) ** 0.5)
    np.testing.assert_array_equal(x, band.draw(20_000, seed=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 1}, "dim: expected"),
        ({"variance": -1.0}, "variance: expected"),
        ({"points": 1}, "points: expected"),
        ({"flow": "late"}, "flow: expected at least 4 records, the first at τ = 0"),
        ({"flow": "short"}, "flow: expected at least 4 records"),
        ({"flow": "lost"}, "flow: expected a flow that reached its end"),
        ({"flow": "other"}, "flow: expected a result of gradient_flow"),
    ],
)
def test_errors_name_what_is_wrong(check_case, change, message):
    flows = {
        "late": lambda f: eqx.tree_at(lambda t: t.time, f, f.time + 1),
        "short": lambda f: thinned(f, slice(3)),
        "lost": lambda f: eqx.tree_at(lambda t: t.order.r, f, f.order.r.at[-1].set(jnp.nan)),
        "other": lambda f: th.Trajectory(
            f.time, f.order, f.activation, f.risk, None, None, f.result, f.task, {"source": "reduced"}
        ),
    }
    flow = flows[change["flow"]](check_case) if "flow" in change else check_case
    options = {"dim": 1000, **{name: value for name, value in change.items() if name != "flow"}}
    with pytest.raises(ValueError, match=message):
        th.fluctuations(flow, **options)


def test_unknown_coordinates_are_named(check_case):
    band = th.fluctuations(check_case, dim=1000, points=64)
    with pytest.raises(KeyError, match="bias: expected one of none"):
        band.leaf("bias")
    with pytest.raises(KeyError, match="q: expected m, r"):
        band.columns("q")


@pytest.mark.slow
def test_stochastic_flow_has_the_mean_and_covariance_of_the_equation():
    """400 runs at D = 2000 to τ = 2: 2 means and 3 covariances within 4 standard errors and 4 % (steps and points)."""
    task, dim, count = th.SingleLocation(6, 1.0, th.discrete([[1.5]])), 2000, 400
    start = th.OrderParameters([[0.2]], [[0.8]])
    method = th.Quadrature(1e-4, nodes=24, frequencies=24)
    options = {"step_size": 1.0, "method": method, "progress": False}
    flow = th.gradient_flow(task, th.Softmax(), start, np.linspace(0, 2, 5), **options)
    expected = th.fluctuations(flow, dim=dim, method=method).covariance[-1]
    starts = jax.tree.map(lambda leaf: jnp.tile(leaf, (count, 1, 1)), start)
    run = th.stochastic_flow(task, th.Softmax(), starts, [2.0], dim=dim, key=jax.random.key(0), points=256, **options)
    x = np.stack([np.asarray(run.order.m)[:, 0, 0, 0], np.asarray(run.order.r)[:, 0, 0, 0]])
    mean = np.array([flow.order.m[-1, 0, 0], flow.order.r[-1, 0, 0]])
    assert np.all(np.abs(x.mean(1) - mean) < 4 * x.std(1) / count**0.5 + 0.002 * mean)
    centred = x - x.mean(1, keepdims=True)
    products = centred[[0, 0, 1]] * centred[[0, 1, 1]]
    upper = expected[np.triu_indices(2)]
    assert np.all(np.abs(products.mean(1) - upper) < 4 * products.std(1) / count**0.5 + 0.04 * upper)


def test_the_derivative_of_the_root():
    """Against differences inside the cone, and along directions within the range of a singular matrix."""
    rng = np.random.default_rng(0)
    full, change = (x @ x.T for x in rng.normal(size=(2, 3, 3)))
    thin = rng.normal(size=(3, 2))
    within = thin @ np.array([[0.3, 0.1], [0.1, -0.2]]) @ thin.T
    # rounding lifts an eigenvalue 0 to some 10⁻¹⁶, its root to 10⁻⁸: longer steps there
    for matrix, direction, h in ((full, change, 1e-5), (thin @ thin.T, within, 1e-3)):
        matrix, direction = jnp.asarray(matrix), jnp.asarray(direction)
        value, slope = jax.jvp(_montecarlo.root, (matrix,), (direction,))
        np.testing.assert_allclose(value @ value, matrix, atol=1e-12)
        moved = partial(lambda t, m, d: _montecarlo.root(m + t * d), m=matrix, d=direction)
        np.testing.assert_allclose(slope, (moved(h) - moved(-h)) / (2 * h), rtol=1e-4, atol=5e-5)
    value, slope = jax.jvp(_montecarlo.root, (jnp.zeros((2, 2)),), (jnp.eye(2),))
    assert np.all(value == 0)
    assert np.all(slope == 0)
