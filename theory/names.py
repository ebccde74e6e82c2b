"""Priors and activations written as text: the canonical names of theory's own, read without evaluating anything."""

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from theory import (
    Activation,
    BayesSoftmax,
    GaussianMixture,
    Prior,
    Softmax,
    Softmax1,
    discrete,
    gaussian,
    one_hot,
    sign_flips,
)

Makers = Mapping[str, Callable[..., Any]]

PRIORS: Makers = {
    "sign_flips": sign_flips,
    "one_hot": one_hot,
    "gaussian": gaussian,
    "discrete": discrete,
    "GaussianMixture": GaussianMixture,
}
ACTIVATIONS: Makers = {"Softmax": Softmax, "Softmax1": Softmax1, "BayesSoftmax": BayesSoftmax}


def parse_prior(text: str) -> Prior:
    """The prior of a text such as "sign_flips(mean=[2, 0], amplitude=[0, 1.5])" or "one_hot(3)".

    Raises:
        ValueError: naming what is unknown and what is known, or what is wrong with the numbers.
    """
    return _parsed("prior", text, PRIORS, "numbers and lists of numbers")


def parse_activation(text: str) -> Activation:
    """The activation of a text such as "Softmax1(scale=4, trained=True)" or "BayesSoftmax('norm')".

    Raises:
        ValueError: naming what is unknown and what is known, or what is wrong with the arguments.
    """
    return _parsed("activation", text, ACTIVATIONS, "numbers, lists of numbers, True, False and 'names'")


def _parsed(field: str, text: str, known: Makers, plain: str) -> Any:
    """What the call in `text` makes; `plain` says which arguments there are."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{field}: expected name(arguments), got {text!r} ({error.msg})") from error
    all_known = ", ".join(_form(name, known) for name in known)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{field}: expected one of {all_known}, got {text!r}")
    name = call.func.id
    if name not in known:
        raise ValueError(f"{field}: expected one of {all_known}, got {name!r}")

    def literal(node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError) as error:
            raise ValueError(f"{field}: expected {plain}, got {ast.unparse(node)!r}") from error

    words = {word.arg: literal(word.value) for word in call.keywords if word.arg is not None}
    if len(words) != len(call.keywords):
        raise ValueError(f"{field}: expected {_form(name, known)}, got {text!r}")
    try:
        given = inspect.signature(known[name]).bind(*(literal(value) for value in call.args), **words)
    except TypeError as error:
        raise ValueError(f"{field}: expected {_form(name, known)}, got {text!r} ({error})") from error
    return known[name](*given.args, **given.kwargs)


def _form(name: str, known: Makers) -> str:
    parameters = inspect.signature(known[name]).parameters.values()
    names = (p.name if p.default is p.empty else f"[{p.name}]" for p in parameters)
    return f"{name}({', '.join(names)})"
