"""Priors and activations as text: canonical names come back, nothing is evaluated, and parts are replaced exactly."""

import numpy as np
import pytest

import theory
from theory import (
    Activation,
    BayesSoftmax,
    GaussianMixture,
    Softmax,
    Softmax1,
    discrete,
    gaussian,
    one_hot,
    sign_flips,
)
from theory.names import ACTIVATIONS, PRIORS, parse_activation, parse_prior, parts, rebuilt


@pytest.mark.parametrize(
    "prior",
    [
        sign_flips(mean=[2.0, 0.0, 0.0], amplitude=[0.0, 2.5, 1.5]),
        one_hot(3),
        one_hot(2, weights=[0.25, 0.75]),
        gaussian(mean=[0.1, 0.2], variance=[1.0, 1e-3]),
        gaussian(mean=[0.0, 0.0], variance=[[1.0, 0.5], [0.5, 1.0]]),
        discrete([[1.0, -1.0], [0.5, 0.25]]),
        GaussianMixture([0.5, 0.5], [[1.0], [-1.0]], [[[0.0]], [[2.0]]]),
    ],
    ids=lambda prior: prior.name.split("(")[0],
)
def test_every_canonical_name_is_read_back(prior):
    assert parse_prior(prior.name).name == prior.name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("one_hot(3)", one_hot(3).name),
        (" sign_flips([2, 0], amplitude=[0, 1.5]) ", sign_flips([2, 0], [0, 1.5]).name),
        ("gaussian(mean=[-1], variance=[2])", gaussian([-1.0], [2.0]).name),
    ],
)
def test_short_forms(text, name):
    assert parse_prior(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one_hott(3)", "expected one of sign_flips.* got 'one_hott'"),
        ("one_hot", "expected one of"),
        ("one_hot(3", "expected name"),
        ("one_hot(3); one_hot(2)", "expected name"),
        ("one_hot(features=3, wieghts=[1])", r"expected one_hot\(features, \[weights\]\).*wieghts"),
        ("sign_flips(mean=[1])", "missing a required argument: 'amplitude'"),
        ("one_hot(*[3])", "expected numbers"),
        ("one_hot(**{'features': 3})", "expected one_hot"),
        ("one_hot(__import__('os').getpid())", "expected numbers and lists of numbers"),
        ("one_hot(3).sample(1, 2)", "expected one of"),
        ("sign_flips(mean=[1, 2], amplitude=[1])", "amplitude: expected one entry per entry of mean"),
        ("one_hot(0)", "features: expected a whole number >= 1"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_prior(text)


def test_all_priors_of_the_theory_are_known():
    assert {"sign_flips", "one_hot", "gaussian", "discrete", "GaussianMixture"} == set(PRIORS)


@pytest.mark.parametrize(
    "activation",
    [
        Softmax(),
        Softmax([1.0, 0.1 + 0.2]),
        Softmax1(),
        Softmax1(scale=4.0, trained=True),
        Softmax1([-0.5, 1e-300], [2.0, 1 / 3], trained="scale"),
        BayesSoftmax("norm"),
        BayesSoftmax("norm", weights=[0.25, 0.75]),
        BayesSoftmax([0.0, 0.1 + 0.2], trained=True),
    ],
    ids=str,
)
def test_every_canonical_name_of_an_activation_is_read_back(activation):
    assert parse_activation(activation.name).name == activation.name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Softmax()", Softmax().name),
        (" Softmax(2) ", Softmax(2.0).name),
        ("Softmax1(scale=4, trained='bias')", Softmax1(0.0, 4.0, trained="bias").name),
        ("BayesSoftmax('norm')", BayesSoftmax("norm").name),
        ("BayesSoftmax([-1, 1], True)", BayesSoftmax([-1.0, 1.0], trained=True).name),
    ],
)
def test_short_forms_of_activations(text, name):
    assert parse_activation(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softmax()", r"activation: expected one of Softmax\(\[temperature\]\), Softmax1.* got 'softmax'"),
        ("Softmax", "activation: expected one of"),
        ("Softmax(1", "activation: expected name"),
        ("Softmax1(c=4)", r"activation: expected Softmax1\(\[bias\], \[scale\], \[trained\]\).*'c'"),
        ("Softmax(abs(1))", "activation: expected numbers, lists of numbers, True, False and 'names', got 'abs.1.'"),
        ("Softmax1(trained=yes)", "activation: expected numbers.* got 'yes'"),
        ("theory.Softmax()", "activation: expected one of"),
        ("Softmax(0)", "temperature: expected positive numbers"),
        ("Softmax('warm')", "temperature: expected an array of real numbers"),
        ("Softmax1(trained='all')", "trained: expected"),
        ("BayesSoftmax('normal')", "bias: expected numbers or 'norm'"),
        ("BayesSoftmax('norm', trained=True)", "trained: expected False with bias='norm'"),
    ],
)
def test_what_is_wrong_with_an_activation_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_activation(text)


def test_all_activations_of_the_theory_are_known():
    known = {name for name, kind in vars(theory).items() if isinstance(kind, type) and issubclass(kind, Activation)}
    assert known - {"Activation", "HeadNormalized"} == set(ACTIVATIONS)


@pytest.mark.slow
def test_weights_are_read_back_whatever_their_rounding():
    weights = np.random.default_rng(0).random((40, 6))
    for w in [*(weights / weights.sum(axis=1, keepdims=True)), *(np.full(n, 1 / n) for n in range(1, 12))]:
        for prior in (one_hot(len(w), w), discrete(np.arange(len(w))[:, None], w)):
            assert parse_prior(prior.name).name == prior.name
            assert abs(float(prior.weights.sum()) - 1) < 1e-14


EVERY = [
    (sign_flips([2.0, 0.1 + 0.2], [0.0, 2.5]), {"mean": [2.0, 0.1 + 0.2], "amplitude": [0.0, 2.5]}),
    (one_hot(2, [0.25, 0.75]), {"features": 2, "weights": [0.25, 0.75]}),
    (gaussian([0.1], [[1 / 3]]), {"mean": [0.1], "variance": [[1 / 3]]}),
    (discrete([[1.0, -1.0], [0.5, 0.25]]), {"points": [[1.0, -1.0], [0.5, 0.25]], "weights": [0.5, 0.5]}),
    (GaussianMixture([1.0], [[1.0]], [[[2.0]]]), {"weights": [1.0], "means": [[1.0]], "covariances": [[[2.0]]]}),
    (Softmax([1.0, 1e-300]), {"temperature": [1.0, 1e-300]}),
    (Softmax1(-0.5, 1 / 3, trained="scale"), {"bias": -0.5, "scale": 1 / 3, "trained": "scale"}),
    (BayesSoftmax("norm", weights=[0.25, 0.75]), {"bias": "norm", "weights": [0.25, 0.75]}),
    (BayesSoftmax([0.0, 1.5], trained=True), {"bias": [0.0, 1.5], "trained": True}),
]


@pytest.mark.parametrize(("value", "arguments"), EVERY, ids=lambda x: str(x).split("(")[0])
def test_parts_are_the_makers_arguments(value, arguments):
    name, found = parts(value)
    assert name == value.name.split("(")[0]
    assert found == arguments
    assert {**PRIORS, **ACTIVATIONS}[name](**found).name == value.name


@pytest.mark.parametrize(
    ("value", "path", "new", "expected"),
    [
        (sign_flips([0, 0], [0, 1]), "amplitude[0]", 0.1 + 0.2, sign_flips([0, 0], [0.1 + 0.2, 1])),
        (sign_flips([0, 0], [0, 1]), "amplitude", [1.0, 0.0], sign_flips([0, 0], [1, 0])),
        (discrete([[0, 1], [1, 2]]), "points[1,0]", 3.0, discrete([[0, 1], [3, 2]])),
        (discrete([[0, 1], [1, 2]]), "points[1][0]", 3.0, discrete([[0, 1], [3, 2]])),
        (discrete([[0, 1], [1, 2]]), " points [ 1, 0 ] ", np.float64(3.0), discrete([[0, 1], [3, 2]])),
        (discrete([[0, 1], [1, 2]]), "points[0]", np.array([3.0, 4.0]), discrete([[3, 4], [1, 2]])),
        (gaussian([0, 0], [1, 2]), "variance[1]", 1 / 3, gaussian([0, 0], [1, 1 / 3])),
        (one_hot(2), "weights", [0.25, 0.75], one_hot(2, [0.25, 0.75])),
        (GaussianMixture([1.0], [[1.0]], [[[2.0]]]), "covariances[0,0,0]", 5, GaussianMixture([1], [[1]], [[[5]]])),
        (Softmax(), "temperature", 2.0, Softmax(2.0)),
        (Softmax1(bias=0.0), "scale", 2.0, Softmax1(scale=2.0)),
        (Softmax1([0.0, 1.0]), "bias[1]", -1.0, Softmax1([0.0, -1.0])),
        (Softmax1(), "trained", True, Softmax1(trained=True)),
        (BayesSoftmax(1.0), "bias", "norm", BayesSoftmax("norm")),
        (BayesSoftmax("norm"), "weights", [0.5, 0.5], BayesSoftmax("norm", weights=[0.5, 0.5])),
    ],
    ids=str,
)
def test_a_part_is_replaced_and_all_else_follows(value, path, new, expected):
    made = rebuilt(value, path, new)
    assert type(made) is type(value)
    assert made.name == expected.name


def test_an_amplitude_that_was_zero_flips():
    assert rebuilt(sign_flips([0, 0], [0.0, 1.0]), "amplitude[0]", 0.5).means.tolist() == [
        [0.5, 1.0], [0.5, -1.0], [-0.5, 1.0], [-0.5, -1.0],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "path", "new", "message"),
    [
        (sign_flips([0], [1]), "amplitud", 1, r"prior.amplitud: expected an argument of sign_flips\(mean, amplitude\)"),
        (
            sign_flips([0], [1]),
            "amplitude[1]",
            1,
            r"prior.amplitude\[1\]: expected an index from 0 to 0 into \[1.0\], got 1",
        ),
        (sign_flips([0], [1]), "amplitude[-1]", 1, "expected an argument, or an entry of it as in name"),
        (sign_flips([0], [1]), "amplitude[0", 1, r"got 'amplitude\[0'"),
        (sign_flips([0], [1]), "amplitude.x", 1, "expected an argument, or an entry"),
        (sign_flips([0], [1]), "", 1, "expected an argument, or an entry"),
        (sign_flips([0], [1]), "amplitude[0,0]", 1, "expected no index into 1.0, which is no list"),
        (sign_flips([0], [1]), "amplitude[0]", "x", "amplitude: expected an array of real numbers"),
        (one_hot(2), "weights[0]", 0.75, "weights: expected a sum of 1"),
        (one_hot(2), "features", 3, r"weights: expected shape \(3,\)"),
        (Softmax1(), "bias[0]", 1.0, r"activation.bias\[0\]: expected no index into 0.0"),
        (BayesSoftmax(), "weights", [1.0], "weights: expected None unless bias='norm'"),
        (BayesSoftmax(), "temperature", 1.0, r"an argument of BayesSoftmax\(\[bias\], \[trained\], \[weights\]\)"),
    ],
)
def test_what_cannot_be_replaced_is_named(value, path, new, message):
    with pytest.raises(ValueError, match=message):
        rebuilt(value, path, new)
