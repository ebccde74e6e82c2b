"""Priors and activations written as text: the canonical names of theory's own, read without evaluating anything.

Through their names they can be taken apart, and built again with one argument replaced.
"""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from theory._checks import invalid
from theory.activation import Activation, BayesSoftmax, Softmax, Softmax1
from theory.normalizer import (
    AdaptiveSoftmax,
    Entmax,
    ScalableSoftmax,
    SelfAdjustedSoftmax,
    Sigmoid,
    Sparsemax,
    TopK,
)
from theory.prior import GaussianMixture, Prior, discrete, gaussian, one_hot, sign_flips

Named = TypeVar("Named", Prior, Activation)

Makers = Mapping[str, Callable[..., Any]]

PRIORS: Makers = {
    "sign_flips": sign_flips,
    "one_hot": one_hot,
    "gaussian": gaussian,
    "discrete": discrete,
    "GaussianMixture": GaussianMixture,
}
ACTIVATIONS: Makers = {
    "Softmax": Softmax,
    "Softmax1": Softmax1,
    "BayesSoftmax": BayesSoftmax,
    "ScalableSoftmax": ScalableSoftmax,
    "Sparsemax": Sparsemax,
    "Entmax": Entmax,
    "Sigmoid": Sigmoid,
    "SelfAdjustedSoftmax": SelfAdjustedSoftmax,
    "AdaptiveSoftmax": AdaptiveSoftmax,
    "TopK": TopK,
}


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


def parts(value: Prior | Activation) -> tuple[str, dict[str, Any]]:
    """The maker of a prior or activation and its keyword arguments, as plain numbers and lists, exact.

    Example:
        >>> parts(sign_flips([0, 0], [0, 1.5]))
        ('sign_flips', {'mean': [0.0, 0.0], 'amplitude': [0.0, 1.5]})
    """
    call = ast.parse(value.name, mode="eval").body
    assert isinstance(call, ast.Call)
    return ast.unparse(call.func), {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}


def rebuilt(value: Named, path: str, new: Any) -> Named:
    """`value` made again by its maker with one argument, or one entry of it, replaced.

    Args:
        value: a prior or an activation.
        path: an argument of its maker, with indices from 0 for an entry: "scale", "amplitude[0]", "points[1, 0]".
        new: what comes there.

    Raises:
        ValueError: no such argument or entry, naming what there is, or what the maker refuses.

    Example:
        >>> rebuilt(sign_flips([0, 0], [0, 1]), "amplitude[0]", 0.5).components
        4
    """
    field, known = ("prior", PRIORS) if isinstance(value, Prior) else ("activation", ACTIVATIONS)
    name, arguments = parts(value)
    found = re.fullmatch(r"\s*(\w+)\s*((?:\[\s*\d+\s*(?:,\s*\d+\s*)*\]\s*)*)", path)
    if found is None:
        raise invalid(f"{field}.{path}", "an argument, or an entry of it as in name[0] or name[1, 0]", repr(path))
    argument, places = found[1], [int(digits) for digits in re.findall(r"\d+", found[2])]
    if argument not in inspect.signature(known[name]).parameters:
        raise invalid(f"{field}.{path}", f"an argument of {_form(name, known)}", repr(argument))
    changed = {**arguments, argument: _replaced(f"{field}.{path}", arguments.get(argument), places, new)}
    return known[name](**changed)


def _replaced(field: str, old: Any, places: list[int], new: Any) -> Any:
    """Nested lists with the entry at `places` replaced; without places `new` itself."""
    if not places:
        return np.asarray(new).tolist() if isinstance(new, np.generic | np.ndarray) else new
    if not isinstance(old, list):
        raise invalid(field, f"no index into {old!r}, which is no list", f"[{places[0]}]")
    place, *inner = places
    if place >= len(old):
        raise invalid(field, f"an index from 0 to {len(old) - 1} into {old!r}", place)
    return [*old[:place], _replaced(field, old[place], inner, new), *old[place + 1 :]]


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
