"""Priors written as text: the canonical names of theory's priors, read without evaluating anything."""

import ast
import inspect
from typing import Any

from theory import GaussianMixture, Prior, discrete, gaussian, one_hot, sign_flips

PRIORS = {
    "sign_flips": sign_flips,
    "one_hot": one_hot,
    "gaussian": gaussian,
    "discrete": discrete,
    "GaussianMixture": GaussianMixture,
}


def parse_prior(text: str) -> Prior:
    """The prior of a text such as "sign_flips(mean=[2, 0], amplitude=[0, 1.5])" or "one_hot(3)".

    Raises:
        ValueError: naming what is unknown and what is known, or what is wrong with the numbers.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"prior: expected name(arguments), got {text!r} ({error.msg})") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"prior: expected one of {_known()}, got {text!r}")
    name = call.func.id
    if name not in PRIORS:
        raise ValueError(f"prior: expected one of {_known()}, got {name!r}")
    make = PRIORS[name]
    words = {word.arg: _numbers(word.value) for word in call.keywords if word.arg is not None}
    if len(words) != len(call.keywords):
        raise ValueError(f"prior: expected {_form(name)}, got {text!r}")
    try:
        given = inspect.signature(make).bind(*(_numbers(value) for value in call.args), **words)
    except TypeError as error:
        raise ValueError(f"prior: expected {_form(name)}, got {text!r} ({error})") from error
    return make(*given.args, **given.kwargs)


def _numbers(node: ast.expr) -> Any:
    """A number, a list of numbers, a list of lists…, or None."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError) as error:
        raise ValueError(f"prior: expected numbers and lists of numbers, got {ast.unparse(node)!r}") from error


def _form(name: str) -> str:
    parameters = inspect.signature(PRIORS[name]).parameters.values()
    names = (p.name if p.default is p.empty else f"[{p.name}]" for p in parameters)
    return f"{name}({', '.join(names)})"


def _known() -> str:
    return ", ".join(_form(name) for name in PRIORS)
