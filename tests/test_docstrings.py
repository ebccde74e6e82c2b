"""The examples in docstrings run, and give what they say."""

import doctest
import importlib
import pkgutil

import jax
import pytest

MODULES = [
    f"{package}.{module.name}"
    for package in ("theory", "theory.limits", "sim", "compare")
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have them
        failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0
