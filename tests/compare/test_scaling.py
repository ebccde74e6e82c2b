"""Slopes in log D of scatter and mean residual: known ones are found, and what is not resolved is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import synthetic

from compare import agreement, residual_scaling
from sim import train_reduced
from theory import OrderParameters, Quadrature, SingleLocation, Softmax, Trajectory, discrete, gradient_flow

DIMS = (250, 1000, 4000)


def made(dim, *, bias, replicas=60, seed=0, **setup):
    """Residuals of order D^-1/2 and a mean that grows in τ to bias/D."""
    theory = synthetic.ideal(seed, replicas=replicas, **setup)
    shift = bias / dim * np.linspace(0, 1, theory.time.shape[0])[:, None, None] * np.ones(theory.order.m.shape)
    return agreement(theory, synthetic.simulated(theory, dim + 10_000 * seed, dim=dim, shift=shift, fresh=False))


def test_known_slopes_are_found():
    """Four numbers within 4 of their standard errors: false-alarm rate 3·10⁻⁴, seeds fixed."""
    scaling = residual_scaling([made(dim, bias=20.0, replicas=400) for dim in DIMS[::-1]])
    np.testing.assert_array_equal(scaling.dims, DIMS)
    for q, name in enumerate(("m", "r")):
        assert abs(scaling.scatter_slope[q] + 0.5) < 4 * scaling.scatter_slope_error[q], name
        assert scaling.scatter_slope_error[q] < 0.02
    assert abs(scaling.mean_slope[0] + 1) < 4 * scaling.mean_slope_error[0]
    assert scaling.mean_slope_error[0] < 0.1
    assert scaling.resolved[0].all()
    rising = 20.0 / np.array(DIMS) * np.sqrt(np.mean(np.linspace(0, 1, 7)[1:] ** 2))
    assert np.all(np.abs(scaling.mean[0] - rising) < 4 * scaling.mean_error[0])
    assert "-0.5" in str(scaling)
    data = scaling.to_xarray()
    assert data["scatter"].dims == ("quantity", "dim")
    assert data["mean_slope"].sel(quantity="m") == scaling.mean_slope[0]
    assert data.attrs["report"] == str(scaling)


def test_no_mean_is_not_resolved():
    scaling = residual_scaling([made(dim, bias=0.0) for dim in DIMS])
    assert not scaling.resolved[0].any()
    assert np.isnan(scaling.mean_slope[0])
    assert "not resolved" in str(scaling)


def test_the_squared_mean_and_its_error_are_unbiased():
    """60 ensembles of 12 replicas: mean within 4 standard errors of the truth, the stated error right to a half."""
    found = [residual_scaling([made(dim, bias=bias, replicas=12, seed=seed) for dim in (500, 1000)])
             for bias, seed in [(10.0, seed) for seed in range(60)]]  # fmt: skip
    square = np.array([f.square[0, 1] for f in found])
    truth = (10.0 / 1000) ** 2 * np.mean(np.linspace(0, 1, 7)[1:] ** 2)
    assert abs(square.mean() - truth) < 4 * square.std() / 60**0.5
    stated = np.sqrt(np.mean([f.square_error[0, 1] ** 2 for f in found]))
    assert stated == pytest.approx(square.std(), rel=0.5)


def test_what_does_not_belong_together_is_refused():
    one = made(1000, bias=0.0)
    with pytest.raises(ValueError, match="two different D, got"):
        residual_scaling([one, one])
    with pytest.raises(ValueError, match="at least 3 replicas, got 2"):
        residual_scaling([one, made(500, bias=0.0, replicas=2)])
    with pytest.raises(ValueError, match="same heads, features and records"):
        residual_scaling([one, made(500, bias=0.0, times=8)])
    with pytest.raises(ValueError, match="step_size: expected the same"):
        residual_scaling([one, made(500, bias=0.0, step_size=0.0)])
    with pytest.raises(ValueError, match="until: expected records"):
        residual_scaling([one, made(500, bias=0.0)], until=0.1)


@pytest.mark.slow
def test_the_exact_chain_scales_as_it_should():
    """One head, finite loss, D = 250 … 4000 from one start: scatter like D^-1/2, mean like 1/D, both far from each
    other. Slopes within 4 standard errors plus what the next order does at D = 250 (β = 3 %): keys fixed."""
    task, start = SingleLocation(6, 1.0, discrete([[1.5]])), OrderParameters([[0.2]], [[0.8]])
    found = []
    sizes = {250: 2000, 500: 2000, 1000: 2000, 2000: 400, 4000: 400}  # the mean is resolved where it is cheap
    for number, (dim, replicas) in enumerate(sizes.items()):
        starts = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (replicas, *leaf.shape)), start)  # noqa: B023
        options = {"dim": dim, "learning_rate": 1.0, "time": 4.0, "batch": 1, "record": 9, "evaluation": 2}
        key = jax.random.fold_in(jax.random.key(9), number)
        run = train_reduced(task, Softmax(), starts, key=key, progress=False, **options)
        flow = gradient_flow(task, Softmax(), start, run.time, step_size=1.0, corrector_points=2**14,
                             method=Quadrature(1e-6, nodes=48, frequencies=64), progress=False)  # fmt: skip
        parts = (flow.order, flow.risk, flow.result)
        order, risk, result = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (replicas, *leaf.shape)), parts)  # noqa: B023
        theory = Trajectory(flow.time, order, flow.activation, risk, None, None, result, task, flow.settings)
        found.append(agreement(theory, run))
    scaling = residual_scaling(found)
    print(scaling)
    for q in range(3):
        assert abs(scaling.scatter_slope[q] + 0.5) < 4 * scaling.scatter_slope_error[q] + 0.02
        assert scaling.scatter_slope_error[q] < 0.03
    for q in range(2):
        assert np.all(scaling.resolved[q, :2])
        assert abs(scaling.mean_slope[q] + 1) < 4 * scaling.mean_slope_error[q] + 0.05
        assert scaling.mean_slope[q] + 2 * scaling.mean_slope_error[q] < scaling.scatter_slope[q]
