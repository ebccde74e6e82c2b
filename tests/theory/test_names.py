"""Priors and activations as text: canonical names come back, and nothing is evaluated."""

import pytest

import theory
from headsplit.parse import ACTIVATIONS, PRIORS, parse_activation, parse_prior
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
