"""Unspecialized points and Hessian spectra: reference values, finite differences of the flow, sampled curvature."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import theory as th
from theory.flow import drift
from theory.saddle import moving_features, tied_minimum

WORKED = th.SingleLocation(length=10, snr=1.0, prior=th.sign_flips([2.0, 0.0, 0.0], [0.0, 2.5, 1.5]))
# docs/model.md §14: curvature, multiplicity, direction
SPECTRUM = [
    (-0.06393945, 3, "split, feature 2"),
    (-0.02301820, 3, "split, feature 3"),
    (0.0, 3, "split, feature 1"),
    (0.01758116, 1, "mean, feature 1"),
    (0.06630472, 1, "mean, feature 3"),
    (0.09982357, 1, "mean, feature 2"),
]
SMALL = th.SingleLocation(length=4, snr=2.0, prior=th.sign_flips([1.0, 0.0], [0.0, 1.5]))
ACTIVATIONS = {
    "softmax": th.Softmax(),
    "softmax-1": th.Softmax1(bias=0.5, scale=1.5),
    "softmax-1, trained": th.Softmax1(bias=jnp.array([0.5, 0.5]), scale=2.0, trained=True),
    "B-softmax": th.BayesSoftmax(),
    "B-softmax, norm": th.BayesSoftmax("norm"),
    "B-softmax, trained": th.BayesSoftmax(jnp.zeros(2), trained=True),
}


@pytest.fixture(scope="module")
def worked():
    point = th.unspecialized_point(WORKED, th.Softmax(), heads=4)
    return point, th.hessian_spectrum(WORKED, th.Softmax(), point)


def test_worked_case_has_the_reference_point(worked):
    point = worked[0]
    np.testing.assert_allclose(point.order.m, [[2.0, 0.0, 0.0]] * 4, atol=1e-7)
    np.testing.assert_allclose(point.order.r, 4.0, atol=1e-6)
    assert abs(float(point.risk) - 0.44687973) < 5e-9
    assert point.groups == (0, 0, 0, 0)
    assert float(point.gradient) < 1e-8


def test_worked_case_has_the_reference_spectrum(worked):
    found = worked[1].multiplets()
    assert [(number, label) for _, number, label in found] == [(number, label) for _, number, label in SPECTRUM]
    np.testing.assert_allclose([value for value, _, _ in found], [value for value, _, _ in SPECTRUM], atol=1e-7)
    np.testing.assert_allclose(worked[1].orthogonal, [0.0, 0.0, 0.0, 0.047450], atol=5e-7)
    assert worked[1].orthogonal_kinds == ("split", "split", "split", "mean")


def test_spectrum_prints_and_converts(worked, tmp_path):
    assert "-0.06393945      3  split, feature 2" in str(worked[1])
    dataset = worked[1].to_xarray()
    assert dataset.eigenvalue.shape == (12,)
    dataset.to_netcdf(tmp_path / "spectrum.nc")
    worked[0].to_xarray().to_netcdf(tmp_path / "point.nc")
    assert "4 heads in 1 group," in str(worked[0])


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("softmax", "B-softmax, norm") else pytest.param(name, marks=pytest.mark.slow)
        for name in ACTIVATIONS
    ],
)
def test_eigenvalues_are_those_of_the_finite_differenced_flow(name):
    """The flow of (m, trained leaves) at fixed r_⊥, κ = 1, has the Jacobian −Hessian: central differences."""
    point = th.unspecialized_point(SMALL, ACTIVATIONS[name], heads=2)
    spectrum = th.hessian_spectrum(SMALL, ACTIVATIONS[name], point)
    trained, rest = point.activation.split()
    flat, back = jax.flatten_util.ravel_pytree((trained, point.order.m))
    method = th.Quadrature(1e-8).fitted(SMALL, point.activation, point.order)

    @jax.jit
    def velocity(x):
        moved, m = back(x)
        state = th.OrderParameters(m, m @ m.T)
        slopes, change = drift(SMALL, eqx.combine(moved, rest), state, method=method)
        return jax.flatten_util.ravel_pytree((slopes, change.m))[0]

    step = 1e-4
    columns = [(velocity(flat + step * e) - velocity(flat - step * e)) / (2 * step) for e in jnp.eye(flat.size)]
    jacobian = np.stack([np.asarray(c) for c in columns], axis=1)
    np.testing.assert_allclose(
        np.sort(np.linalg.eigvals(-jacobian).real), np.sort(np.asarray(spectrum.eigenvalues)), atol=2e-5
    )


@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_curvature_is_the_sampled_average_of_the_docs(case):
    """κ_v = (2/H) ν Var(θ_v) E[S_εε], by sampling in NumPy. |z| < 5: false alarms 2e-6 for all three."""
    rng = np.random.default_rng(case)
    length, heads, snr = int(rng.integers(3, 9)), int(rng.integers(2, 5)), rng.uniform(0.5, 2)
    mean, amplitude = rng.uniform(0.5, 1.5), rng.uniform(0.5, 1.5)
    task = th.SingleLocation(length, snr, th.sign_flips([mean, 0.0], [0.0, amplitude]))
    point = th.unspecialized_point(task, th.Softmax(), heads)
    np.testing.assert_allclose(point.order.m[:, 0], np.sqrt(snr) * mean, atol=1e-6)  # calibrated
    values = [
        v for v, n, label in th.hessian_spectrum(task, th.Softmax(), point).multiplets() if "split, feature 2" in label
    ]

    samples, m = 400_000, np.sqrt(snr) * mean
    chi = m * rng.standard_normal((samples, length))
    chi[:, 0] += np.sqrt(snr) * m * mean  # the ± of feature 2 does not move scores at this point
    sigma = np.exp(chi - chi.max(1, keepdims=True))
    sigma /= sigma.sum(1, keepdims=True)
    own = sigma[:, 0]
    s = own * (1 - 2 * own) * ((1 - own) ** 2 + (sigma[:, 1:] ** 2).sum(1))
    factor = 2 / heads * snr * amplitude**2
    assert abs(-values[0] - factor * s.mean()) < 5 * factor * s.std() / samples**0.5
    assert values[0] < 0


def test_two_tokens_without_a_mean_have_no_split_rate():
    task = th.SingleLocation(2, 3.0, th.sign_flips([0.0], [1.0]))
    point = th.unspecialized_point(task, th.Softmax(), heads=2)
    assert float(jnp.max(jnp.abs(point.order.m))) == 0
    split = [v for v, _, label in th.hessian_spectrum(task, th.Softmax(), point).multiplets() if "split" in label]
    np.testing.assert_allclose(split, 0, atol=1e-8)


def test_zero_keys_have_the_rate_of_the_docs():
    """(2/H)(1/L)(1−1/L)(1−2/L) ν E θ² at k = 0."""
    task = th.SingleLocation(4, 4.0, th.sign_flips([0.0], [1.0]))
    point = th.unspecialized_point(task, th.Softmax(), heads=2)
    value, number, label = th.hessian_spectrum(task, th.Softmax(), point).multiplets()[0]
    assert (number, label) == (1, "split, feature 1")
    np.testing.assert_allclose(-value, 4 * (1 / 4) * (3 / 4) * (1 / 2), atol=1e-9)


@pytest.mark.slow
def test_equal_variances_are_one_multiplet_named_apart():
    task = th.SingleLocation(5, 1.0, th.sign_flips([1.0, 0.0, 0.0], [0.0, 1.0, 1.0]))
    point = th.unspecialized_point(task, th.Softmax(), heads=3)
    first, second = th.hessian_spectrum(task, th.Softmax(), point).multiplets()[:2]
    np.testing.assert_allclose(first[0], second[0], atol=1e-9)
    assert {first[1:], second[1:]} == {(2, "split, feature 2"), (2, "split, feature 3")}


def test_one_head_has_no_splits():
    point = th.unspecialized_point(SMALL, th.Softmax(), heads=1)
    spectrum = th.hessian_spectrum(SMALL, th.Softmax(), point)
    assert set(spectrum.kinds) == {"mean"}


@pytest.mark.slow
def test_one_hot_has_an_unspecialized_point_along_the_mean():
    task = th.SingleLocation(5, 2.0, th.one_hot(3))
    point = th.unspecialized_point(task, th.Softmax(), heads=3)
    m = np.asarray(point.order.m)
    np.testing.assert_allclose(m, m[0, 0], atol=1e-7)
    assert th.hessian_spectrum(task, th.Softmax(), point).unstable.sum() == 4  # (H − 1) × (F − 1)


@pytest.mark.parametrize(
    ("prior", "moving"),
    [
        (th.sign_flips([2.0, 0.0], [0.0, 1.0]), [True, False]),
        (th.discrete([[1.0, 1.0], [-1.0, -1.0]]), [False, False]),
        (th.discrete([[1.0, 1.0], [1.0, -1.0]]), [True, False]),
        (th.discrete([[1.0, 1.0], [1.0, -1.0]], [0.6, 0.4]), [True, True]),
        (th.gaussian([0.0, 1.0], [1.0, 1.0]), [False, True]),
        (th.gaussian([0.0, 1.0], [[1.0, 0.5], [0.5, 1.0]]), [True, True]),
        (th.one_hot(2), [True, True]),
    ],
)
def test_reflections_of_the_prior_hold_overlaps_at_zero(prior, moving):
    assert moving_features(prior).tolist() == moving


def test_tied_heads_stay_tied_and_held_entries_zero():
    """A minimum among equal heads without overlap on a feature that flips is stationary among all heads."""
    free = np.array([[True, False]] * 2)
    point = tied_minimum(SMALL, th.Softmax(), jnp.array([[1.0, 1.0], [1.2, -1.0]]), (3, 3), free)
    assert point.groups == (0, 0)
    np.testing.assert_array_equal(point.order.m[0], point.order.m[1])
    assert point.order.m[:, 1].tolist() == [0.0, 0.0]
    assert float(point.gradient) < 1e-7


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="heads"):
        th.unspecialized_point(SMALL, th.Softmax(), heads=0)
    point = th.unspecialized_point(SMALL, th.Softmax(), heads=2)
    with pytest.raises(ValueError, match="activation"):
        th.hessian_spectrum(SMALL, th.BayesSoftmax(), point)
    with pytest.raises(ValueError, match="point"):
        inspect.unwrap(th.hessian_spectrum)(SMALL, th.Softmax(), "here")
    with pytest.raises(ValueError, match="task"):
        inspect.unwrap(th.hessian_spectrum)(None, th.Softmax(), point)
    many = th.OrderParameters(jnp.zeros((3, 2, 2)), jnp.zeros((3, 2, 2)))
    with pytest.raises(ValueError, match="point"):
        th.hessian_spectrum(SMALL, th.Softmax(), many)
    with pytest.raises(ValueError, match="features"):
        moving_features(th.gaussian(np.zeros(13), np.ones(13)))
