"""A theory and a simulation that belong together, and their values side by side."""

import numpy as np

from theory import Result, Trajectory

RATES = {"bias": "bias_rate", "scale": "scale_rate"}  # settings with the κ of what may be trained beside the keys


def check_pair(theory: Trajectory, simulation: Trajectory) -> int:
    """D; an error if the two do not belong together."""
    t, s = np.asarray(theory.time), np.asarray(simulation.time)
    if t.shape != s.shape:
        raise ValueError(f"time: expected grids of the same length, got {len(t)} (theory) and {len(s)} (simulation)")
    apart = np.abs(t - s) > 1e-9 * max(1.0, float(t[-1]))
    if np.any(apart):
        k = int(np.argmax(apart))
        raise ValueError(f"time: expected the same clock, record {k} is at {t[k]!r} (theory), {s[k]!r} (simulation)")
    if t[0] != 0:
        raise ValueError(f"time: expected a first record at 0, where the starts are compared, got {t[0]!r}")
    ours, theirs = theory.configuration(), simulation.configuration()
    for field in ("length", "snr", "prior", "activation"):
        if ours[field] != theirs[field]:
            raise ValueError(f"{field}: expected the same, got {ours[field]} (theory), {theirs[field]} (simulation)")
    if theory.replicas != simulation.replicas:
        raise ValueError(
            f"replicas: expected each replica against the theory from its own start, got {theory.replicas} (theory) "
            f"and {simulation.replicas} (simulation)"
        )
    if theory.order.m.shape != simulation.order.m.shape:
        raise ValueError(
            f"order: expected the same heads and features, got m of shape {theory.order.m.shape} (theory), "
            f"{simulation.order.m.shape} (simulation)"
        )
    trained = theory.activation.trained
    for name in trained:
        if name not in RATES:
            raise ValueError(f"activation: expected {' and '.join(RATES)} at most to be trained, got {name}")
        if values_of(theory, name).shape != values_of(simulation, name).shape:
            raise ValueError(
                f"activation: expected records of {name} of one shape, got {values_of(theory, name).shape} (theory), "
                f"{values_of(simulation, name).shape} (simulation)"
            )
        rate, other = (dict(side.settings).get(RATES[name], 1.0) for side in (theory, simulation))
        if rate != other:
            raise ValueError(f"{RATES[name]}: expected the same, got {rate} (theory), {other} (simulation)")
    for name in ("m", "r", *trained):
        start, other = values_of(theory, name)[:, 0], values_of(simulation, name)[:, 0]
        far = np.abs(start - other) > 1e-6 * max(1.0, float(np.nanmax(np.abs(other))))
        if np.any(far):
            raise ValueError(
                f"order: expected each replica's theory to start from that replica's own order parameters, "
                f"{name} at τ = 0 differs by {np.max(np.abs(start - other)):.3g} in replica {np.argwhere(far)[0][0]}"
            )
    settings = dict(simulation.settings)
    missing = [key for key in ("dim", "learning_rate", "batch", "loss") if key not in settings]
    if missing:
        raise ValueError(f"simulation: expected a run of `train`, its settings lack {', '.join(missing)}")
    step, own = dict(theory.settings).get("step_size"), settings["learning_rate"] / settings["batch"]
    if step is None:
        raise ValueError("theory: expected a result of `gradient_flow`, its settings lack step_size")
    if step != 0 and abs(step - own) > 1e-12 * own:
        raise ValueError(f"step_size: expected the simulation's learning_rate/batch = {own!r}, or 0, got {step!r}")
    return int(settings["dim"])


def values_of(trajectory: Trajectory, name: str) -> np.ndarray:
    """(R, T, ...) values of a quantity, with a replica axis of one for a single run."""
    owner = trajectory if name == "risk" else trajectory.activation if name in RATES else trajectory.order
    value = np.asarray(getattr(owner, name), dtype=np.float64)
    return value if trajectory.replicas is not None else value[None]


def successful(trajectory: Trajectory) -> np.ndarray:
    return np.atleast_1d(np.asarray(trajectory.result) == Result.successful)
