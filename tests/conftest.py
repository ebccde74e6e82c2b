"""Strict JAX for every test: 64-bit, no silent promotion of types or ranks, two CPU devices."""

import os
import signal

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def _release_compiled_code():
    """JAX keeps compiled code in memory: let it go after each module."""
    yield
    jax.clear_caches()


# the shell lets jobs in the background ignore Ctrl-C, which runs then do too; tests press it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
