"""Runs without their population risk, for tests that compare runs bit for bit."""

import contextlib
import importlib

import jax.numpy as jnp


@contextlib.contextmanager
def without_risk():
    """The population risk takes its time to compile, and is a function of what is compared."""
    module = importlib.import_module("sim.train")
    before = module.recorded_risk
    module.recorded_risk = lambda task, activation, order: jnp.zeros(order.m.shape[:-2])
    try:
        yield
    finally:
        module.recorded_risk = before
