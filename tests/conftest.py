"""Strict JAX for every test: 64-bit, no silent promotion of types or ranks, two CPU devices."""

import os
import signal
import subprocess
import sys

import jax
import pytest

DEVICES = "--xla_force_host_platform_device_count=2"
# most of the default tests' time is compilation: this way it takes a third of it, and the code it makes is as exact
QUICK = "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Default tests compile quickly; slow ones and benchmarks as everyone does. JAX has not begun to run yet."""
    if "XLA_FLAGS" in os.environ:  # chosen, or a worker, for which it has been chosen
        return
    quick = config.option.markexpr == "not slow and not benchmark"
    os.environ["XLA_FLAGS"] = f"{DEVICES} {QUICK}" if quick else DEVICES
    # an XLA that does not know one of them aborts
    if quick and subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], capture_output=True).returncode:
        os.environ["XLA_FLAGS"] = DEVICES


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests marked `optimized` compile as everyone does: quick code rounds a point by its company, and runs slowly."""
    if pyfuncitem.get_closest_marker("optimized") is None or QUICK not in os.environ["XLA_FLAGS"]:
        return None
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    environment = {**kept, "XLA_FLAGS": DEVICES}
    run = subprocess.run(command, cwd=pyfuncitem.config.rootpath, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    return True


@pytest.fixture(autouse=True, scope="module")
def _release_compiled_code():
    """JAX keeps compiled code in memory: let it go after each module."""
    yield
    jax.clear_caches()


# the shell lets jobs in the background ignore Ctrl-C, which runs then do too; tests press it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
