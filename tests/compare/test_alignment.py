"""Permuted and flipped copies align exactly, and only symmetries of the prior are used."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import synthetic

from compare import align, sign_symmetries
from compare.alignment import check_shared
from theory import BayesSoftmax, GaussianMixture, Softmax, Softmax1, discrete, gaussian, one_hot, sign_flips


def split(seed, replicas=4, heads=4, copies=True):
    """One final state, in every replica with its heads and the sign of feature 1 shuffled."""
    rng = np.random.default_rng(seed)
    time = np.linspace(0, 5, 4)
    end = np.stack([np.full(heads, 2.0), np.where(np.arange(heads) % 2, 1.4, -1.4)], axis=-1)
    end = end + 0.1 * rng.normal(size=end.shape)
    m = np.stack([end * (t / 5) for t in time])
    runs = [m]
    for _ in range(replicas - 1):
        runs.append(m[:, rng.permutation(heads)] * np.array([1.0, rng.choice([1.0, -1.0])]))
    return synthetic.build(time, np.stack(runs), {"step_size": 0.5})


def test_copies_align_exactly():
    theory = split(0)
    run = synthetic.simulated(theory, 0, scale=0.0)
    done = align(theory, run)
    for side in (done.theory, done.simulation):
        m, r = np.asarray(side.order.m), np.asarray(side.order.r)
        np.testing.assert_array_equal(m, np.broadcast_to(m[:1], m.shape))
        np.testing.assert_allclose(r, np.broadcast_to(r[:1], r.shape), rtol=0, atol=1e-12)
    assert done.reference == 0
    assert "heads permuted in" in str(done)


def test_opposite_signs_do_not_average_to_zero():
    theory = split(1, replicas=32)
    plain = np.abs(np.asarray(theory.order.m)[:, -1, :, 1].mean(axis=0))
    done = align(theory, synthetic.simulated(theory, 1))
    aligned = np.abs(np.asarray(done.simulation.order.m)[:, -1, :, 1].mean(axis=0))
    assert plain.max() < 1.0
    assert aligned.min() > 1.2


def test_pairing_is_kept():
    theory = split(2)
    run = synthetic.simulated(theory, 2)
    done = align(theory, run)
    before = np.asarray(run.order.m) - np.asarray(theory.order.m)
    after = np.asarray(done.simulation.order.m) - np.asarray(done.theory.order.m)
    for replica in range(4):
        moved = before[replica][:, done.permutation[replica]] * done.signs[replica]
        np.testing.assert_allclose(after[replica], moved, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(done.simulation.risk, run.risk)


def test_heads_are_matched_in_m_and_r_alike():
    theory = split(3)
    done = align(theory, synthetic.simulated(theory, 3))
    m, r = np.asarray(done.theory.order.m), np.asarray(done.theory.order.r)
    np.testing.assert_allclose(r - m @ np.swapaxes(m, -1, -2), np.broadcast_to(np.eye(4), r.shape), atol=1e-12)


def test_heads_take_along_what_they_train():
    theory = split(2)
    theory, run = synthetic.trained(theory, synthetic.simulated(theory, 2), 2, own=True)
    done = align(theory, run)
    assert np.any(done.permutation != np.arange(4))
    for before, after in ((theory, done.theory), (run, done.simulation)):
        for name in ("bias", "scale"):
            values = np.asarray(getattr(before.activation, name))
            moved = np.stack([values[replica][:, done.permutation[replica]] for replica in range(len(values))])
            np.testing.assert_array_equal(getattr(after.activation, name), moved)
    assert done.to_xarray()["simulation_bias"].dims == ("replica", "time", "head")


def test_what_heads_share_is_left():
    theory = split(2)
    theory, run = synthetic.trained(theory, synthetic.simulated(theory, 2), 2)
    done = align(theory, run)
    np.testing.assert_array_equal(done.simulation.activation.scale, run.activation.scale)
    assert done.to_xarray()["theory_scale"].dims == ("replica", "time")


@pytest.mark.parametrize(
    ("activation", "what"),
    [
        (Softmax([1.0, 1.0, 1.0, 2.0]), "temperature"),
        (Softmax1(bias=[0.0, 1.0], trained="scale"), "bias"),
        (BayesSoftmax("norm", weights=[0.3, 0.7]), "weights"),
        (BayesSoftmax([0.0, 0.5]), "bias"),
    ],
)
def test_activations_that_tell_heads_apart(activation, what):
    with pytest.raises(ValueError, match=f"activation: expected one that all heads share, got {what} = "):
        check_shared(activation)


@pytest.mark.parametrize(
    "activation",
    [Softmax([2.0, 2.0]), Softmax1([0.0, 1.0], [1.0, 2.0], trained=True), BayesSoftmax("norm", weights=[0.5, 0.5])],
)
def test_activations_that_do_not(activation):
    check_shared(activation)


def test_failed_replicas_stay_and_are_no_reference():
    theory = split(4)
    broken = eqx.tree_at(lambda t: t.order.m, theory, theory.order.m.at[0, -1].set(jnp.nan))
    done = align(broken, synthetic.simulated(theory, 4))
    assert done.reference == 1
    np.testing.assert_array_equal(done.permutation[0], np.arange(4))


@pytest.mark.parametrize(
    ("prior", "free"),
    [
        (sign_flips(mean=[2.0, 0.0, 0.0], amplitude=[0.0, 2.5, 1.5]), {(1, 1, 1), (1, -1, 1), (1, 1, -1), (1, -1, -1)}),
        (sign_flips(mean=[0.1], amplitude=[1.0]), {(1,)}),
        (one_hot(2), {(1, 1)}),
        (gaussian(mean=[0.0, 1.0], variance=[1.0, 2.0]), {(1, 1), (-1, 1)}),
        (gaussian(mean=[0.0, 0.0], variance=[[1.0, 0.5], [0.5, 1.0]]), {(1, 1), (-1, -1)}),
        (discrete([[1.0, 1.0], [-1.0, -1.0]]), {(1, 1), (-1, -1)}),
        (discrete([[1.0], [-1.0]], weights=[0.6, 0.4]), {(1,)}),
        (discrete([[1.0], [-1.0], [1.0]], weights=[0.25, 0.5, 0.25]), {(1,), (-1,)}),
        (GaussianMixture([0.5, 0.5], [[1.0], [-1.0]], [[[1.0]], [[2.0]]]), {(1,)}),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_sign_symmetries(prior, free):
    found = sign_symmetries(prior)
    assert {tuple(row) for row in found.tolist()} == free
    assert np.all(found[0] == 1)


def test_refusals():
    theory = split(5)
    run = synthetic.simulated(theory, 5)
    with pytest.raises(ValueError, match=r"shape \(R, T, H, F\)"):
        align(theory[0], run[0])
    with pytest.raises(ValueError, match="m of one shape"):
        align(theory, synthetic.simulated(split(5, heads=3), 5))
    own = eqx.tree_at(lambda t: t.activation, theory, Softmax([1.0, 1.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match="activation: expected one that all heads share"):
        align(own, run)
    with pytest.raises(ValueError, match="at most 12 features"):
        sign_symmetries(one_hot(13))
