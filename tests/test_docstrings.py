"""The examples in docstrings run, and give what they say."""

import doctest
import importlib
import pkgutil

import jax
import pytest

MODULES = [
    module.name
    for package in ("theory", "sim", "compare")
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
]


LONG = {"sim.many", "sim.reduced", "theory.fluctuation", "theory.many", "theory.saddle", "theory.staircase"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in MODULES])
def test_examples(name):
    module = importlib.import_module(name)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have them
        failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
