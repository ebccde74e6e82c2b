"""Optima against tables, closed-form limits and the Bayes risk."""

import equinox as eqx
import jax
import numpy as np
import pytest

import theory as th
from tests.theory.states import PRIORS, random_state
from theory.fit import law_of
from theory.optimum import _value_and_slope
from theory.risk import evaluate_risk

FLIP = th.sign_flips([0.0], [1.0])
TWO = {
    "softmax": th.Softmax(),
    "softmax-1": th.Softmax1(trained=True),
    "B-softmax": th.BayesSoftmax([0.0, 0.0], trained=True),
}
REFERENCE = {
    ("softmax", 8.0): 0.48995,
    ("softmax-1", 8.0): 0.24857,
    ("B-softmax", 8.0): 0.17254,
    ("softmax", 16.0): 0.40862,
    ("softmax-1", 16.0): 0.07009,
    ("B-softmax", 16.0): 0.02346,
}


@pytest.mark.parametrize(
    ("name", "snr"), [case if case[1] == 8.0 else pytest.param(*case, marks=pytest.mark.slow) for case in REFERENCE]
)
def test_sign_flip_with_two_heads(name, snr):
    task = th.SingleLocation(5, snr, FLIP)
    method = th.Quadrature(1e-5, **({"points": (1, 64)} if name == "B-softmax" else {"frequencies": 64}), nodes=96)
    best = th.optimal_risk(task, TWO[name], 2, starts=2, method=method)
    assert abs(float(best.risk) - REFERENCE[name, snr]) < 1.5e-5
    assert best.error < 1e-5
    assert best.gradient < 1e-4
    assert best.orthogonal > 0  # no part orthogonal to the spikes would help
    assert abs(float(best.order.m.sum())) < 2e-2  # the even split
    assert best.to_xarray()["risk"] == best.risk
    assert f"{float(best.risk):.6f}" in str(best)


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 5, 10])
def test_floor_of_softmax(length):
    """L/(4(L−1)) as ν → ∞: approached from above, to 1e-3 at the last ν."""
    floor = length / (4 * (length - 1))
    gaps, first = [], None
    for snr in (100.0, 1000.0, 10_000.0):
        best = th.optimal_risk(th.SingleLocation(length, snr, FLIP), TWO["softmax"], 2, starts=2, first=first)
        gaps.append(float(best.risk) - floor)
        first = (th.OrderParameters(best.order.m / 2, best.order.r / 4), best.activation)
    assert np.all(np.diff(gaps) < 0)
    assert 0 < gaps[-1] < 1e-3


@pytest.mark.slow
def test_gaussian_gap_closes_with_heads():
    """B-softmax on an isotropic Gaussian: the gap to the Bayes risk falls with every head."""
    task = th.SingleLocation(5, 4.0, th.gaussian([0.0, 0.0], [1.0, 1.0]))
    bayes = float(th.bayes_risk(task))
    gaps = []
    for heads in (2, 3, 4, 6, 8):
        best = th.optimal_risk(task, th.BayesSoftmax(np.zeros(heads), trained=True), heads, starts=4)
        gaps.append(float(best.risk) - bayes)
    assert np.all(np.diff(gaps) < 0)
    assert gaps[-1] > 0
    assert gaps[-1] < gaps[0] / 5


@pytest.mark.parametrize(
    ("activation", "method"),
    [
        (th.Softmax1([0.5, -0.5], 2.0, trained=True), th.Quadrature(1e-4, 32, 48)),
        (th.BayesSoftmax("norm"), th.Quadrature(1e-4, 24, points=(8, 16))),
    ],
)
def test_slopes_by_way_of_the_law_are_those_of_the_risk(activation, method):
    task, order = th.SingleLocation(5, 2.0, PRIORS["mixture"]), random_state(1, heads=2)
    trained, rest = activation.split()
    value, slope = _value_and_slope(task, rest, (trained, order), method)

    def risk(state):
        return evaluate_risk(task, eqx.combine(state[0], rest), state[1], method)[0]

    expected = jax.jit(jax.value_and_grad(risk))((trained, order))
    for ours, theirs in zip(jax.tree.leaves((value, slope)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_priors_of_as_many_components_share_compiled_code():
    laws = [law_of(th.SingleLocation(5, 8.0, p), th.Softmax(), random_state(1, heads=2, features=p.features))
            for p in (FLIP, th.one_hot(2))]  # fmt: skip
    kinds = [[(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(eqx.filter(law, eqx.is_array))] for law in laws]
    assert kinds[0] == kinds[1]


def test_many_tokens():
    """The error's refinement needs no tolerance below what L terms round to."""
    best = th.optimal_risk(th.SingleLocation(10**9, 4.0, FLIP), th.Softmax(), 1, starts=1)
    assert 0 < float(best.error) < 1e-4
    assert float(best.risk) == pytest.approx(1.0, abs=1e-4)  # one token among so many is not found


def test_wrong_input_is_named():
    task = th.SingleLocation(5, 4.0, FLIP)
    order = th.OrderParameters([[2.0], [-2.0]], [[4.0, -4.0], [-4.0, 4.0]])
    for message, call in {
        "heads: expected a whole number >= 1": lambda: th.optimal_risk(task, th.Softmax(), 0),
        "starts: expected a whole number >= 1": lambda: th.optimal_risk(task, th.Softmax(), 2, starts=0),
        r"bias: expected one number or one per head \(2,\)": lambda: th.optimal_risk(
            task, th.BayesSoftmax([0.0, 1.0, 2.0], trained=True), 2
        ),
        "first: expected m of shape": lambda: th.optimal_risk(task, th.Softmax(), 3, first=(order, th.Softmax())),
        "first: expected an activation with the trained leaves": lambda: th.optimal_risk(
            task, th.Softmax1(trained=True), 2, first=(order, th.BayesSoftmax())
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
