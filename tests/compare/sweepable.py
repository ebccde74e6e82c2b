"""Functions that tests sweep: importable by workers, and they leave a trace of every call."""

import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import xarray as xr


def traced(x, y, log, pause=0.0, key=None):
    """Random numbers that depend on the key alone, and values that depend on x and y; one line in `log` a call."""
    with open(log, "a") as file:
        file.write(f"{x} {y} {np.asarray(jax.random.key_data(key)).tolist()}\n")
    time.sleep(pause)
    noise = np.asarray(jax.random.normal(key, (3,)))
    return {"total": x + 10 * y, "noise": noise, "name": f"{x}-{y}"}


def calls(log):
    """Lines of a log, in the order of the calls."""
    path = Path(log)
    return path.read_text().splitlines() if path.exists() else []


def deterministic(x, y=1.0):
    return x * y


def fails_on(x, bad, repaired=""):
    """Fails for one x, until the file `repaired` is there."""
    if x == bad and not (repaired and Path(repaired).exists()):
        raise ArithmeticError(f"no value at {x}")
    return {"square": x**2}


def dies_once(x, log, fuse):
    """Takes its whole process with it, once: the first that finds the file `fuse`."""
    try:
        os.unlink(fuse)
    except FileNotFoundError:
        pass
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    with open(log, "a") as file:
        file.write(f"{x}\n")
    return float(x) ** 2


def ragged(heads, features):
    return xr.Dataset(
        {"m": (("head", "feature"), np.arange(heads * features, dtype=float).reshape(heads, features)), "n": heads},
        coords={"head": np.arange(heads), "feature": np.arange(features)},
    )


def kinds(x):
    """Whole numbers for large x."""
    return {"v": np.array([x]) if x > 5 else np.array([0.5])}


def runs_of_its_own(x):
    return xr.Dataset({"v": ("replica", [x, 2.0 * x])}, coords={"replica": [0, 1]})


def pid(x, pause):
    time.sleep(pause)
    return {"pid": os.getpid(), "twice": 2 * x}
