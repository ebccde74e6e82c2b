"""The main job: theory and simulation from the same starts, the verdict, a store and a figure."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# purposes of randomness, folded into key(seed): results that share a seed share nothing else by accident
_START, _TRAINING = 1, 2
STORE, FIGURE = "result.zarr", "compare"


@dataclass(frozen=True)
class Configuration:
    """What makes a comparison; every field is in the store, exactly."""

    length: int = 10
    heads: int = 4
    snr: float = 1.0
    prior: str = "sign_flips(mean=[2.0, 0.0, 0.0], amplitude=[0.0, 2.5, 1.5])"  # the canonical name
    dim: int = 1000
    variance: float = 1.0
    learning_rate: float = 5.0
    batch: int = 10
    replicas: int = 8
    time: float = 60.0
    records: int = 31
    loss: str = "finite"
    level: float = 0.01
    until: float | None = None
    seed: int = 0

    def folder(self) -> str:
        """A name from what is usually varied, and from all else that differs from the defaults."""
        always = {"L": "length", "H": "heads", "snr": "snr", "D": "dim"}
        others = {
            "": "prior", "variance": "variance", "eta": "learning_rate", "B": "batch", "R": "replicas", "tau": "time",
            "records": "records", "loss": "loss", "level": "level", "until": "until",
        }  # fmt: skip
        changed = {
            short: name for short, name in others.items() if getattr(self, name) != getattr(Configuration(), name)
        }
        parts = (f"{short}{getattr(self, name)}".removesuffix(".0") for short, name in {**always, **changed}.items())
        plain = (re.sub(r"[^A-Za-z0-9.-]+", "_", part.replace(" ", "")).strip("_") for part in parts)
        return "-".join([*plain, f"seed{self.seed}"])


class Interrupted(Exception):
    """Stopped by the user; the message says what is kept."""


def run(configuration: Configuration, folder: Path, *, progress: bool, say: Callable[[str], Any]) -> bool | None:
    """Compute (or load, if it is there), print, store and draw one comparison.

    Returns:
        Whether theory and simulation agree; None without a verdict.

    Raises:
        ValueError: options that are wrong, or a folder that holds another configuration.
        Interrupted: Ctrl-C; what the simulation had is stored, unless it was hit twice.
    """
    from compare import load
    from compare.store import differences

    path = folder / STORE
    wanted = asdict(configuration)
    if path.exists():
        stored = load(path)
        other = differences(wanted, stored.configuration)
        if other:
            raise ValueError(f"out: {folder} holds another configuration ({'; '.join(other)})")
        if stored.metadata["status"] == "complete":
            say(f"{path} holds this result already (computed {stored.metadata['created']}): loaded, not recomputed")
            return show(path, say=say)
        say(f"{path} holds an unfinished run of this configuration: computed again")
    _compute(configuration, path, progress=progress, say=say)
    return show(path, say=say)


def show(path: Path, *, say: Callable[[str], Any]) -> bool | None:
    """Print the verdict of a stored comparison and draw its figure beside it."""
    from compare import load
    from figures.compare import draw
    from figures.style import save_figure

    store = load(path)
    if store.metadata["status"] != "complete":
        raise ValueError(f"{path}: expected a complete result, got status {store.metadata['status']!r}")
    pictures = save_figure(draw(store), path.parent / FIGURE)
    say("")
    say(store["agreement"].attrs["report"])
    say(store["aligned"].attrs["report"])
    say("")
    for written in (path, *pictures):
        say(f"  {written}")
    return json.loads(store["agreement"].attrs["agrees"])


def _compute(configuration: Configuration, path: Path, *, progress: bool, say: Callable[[str], Any]) -> None:
    import jax
    import numpy as np

    from compare import agreement, align, save
    from headsplit.parse import parse_prior
    from sim import MultiHeadAttention, train
    from theory import Result, SingleLocation, Softmax, gradient_flow

    c = configuration
    task = SingleLocation(length=c.length, snr=c.snr, prior=parse_prior(c.prior))
    start, training = (jax.random.fold_in(jax.random.key(c.seed), purpose) for purpose in (_START, _TRAINING))
    layer = MultiHeadAttention.initial(
        start,
        heads=c.heads,
        features=task.features,
        dim=c.dim,
        variance=c.variance,
        activation=Softmax(),
        replicas=c.replicas,
    )
    path.parent.mkdir(parents=True, exist_ok=True)  # now, not after minutes of work
    say(f"SGD: {c.replicas} replicas at D = {c.dim} to τ = {c.time:g}, {c.batch} samples a step")
    simulation = train(
        task,
        layer,
        learning_rate=c.learning_rate,
        time=c.time,
        batch=c.batch,
        key=training,
        record=c.records,
        loss=c.loss,  # type: ignore[arg-type]  # checked there
        progress=progress,
        throw=False,
    )

    def keep_unfinished() -> Interrupted:
        reached = np.flatnonzero(np.isfinite(np.asarray(simulation.risk)).any(axis=0))
        until = float(simulation.time[reached[-1]]) if len(reached) else 0.0
        # what may lie there is an unfinished run of the same configuration
        save(path, {"simulation": simulation.to_xarray()}, asdict(c), status="interrupted", replace=True)
        return Interrupted(f"interrupted: the simulation up to τ = {until:.4g} is kept in {path}")

    if np.any(np.asarray(simulation.result) == Result.interrupted):
        raise keep_unfinished()
    say(f"Theory: the flow with the finite-step corrector, from each of the {c.replicas} starts")
    try:
        theory = gradient_flow(
            task,
            layer.activation,
            layer.order(),
            simulation.time,
            step_size=c.learning_rate / c.batch,
            progress=progress,
            throw=False,
        )
    except KeyboardInterrupt:
        raise keep_unfinished() from None
    datasets = {
        "theory": theory.to_xarray(),
        "simulation": simulation.to_xarray(),
        "aligned": align(theory, simulation).to_xarray(),
        "agreement": agreement(theory, simulation, level=c.level, until=c.until).to_xarray(),
    }
    save(path, datasets, asdict(c), replace=True)
