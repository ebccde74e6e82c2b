"""The main job: theory and simulation from the same starts, the verdict, a store and a figure."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# purposes of randomness, folded into key(seed): results that share a seed share nothing else by accident
_START, _TRAINING = 1, 2
FIGURE = "compare"
CHECKPOINT = "checkpoint.npz"  # of the simulation, until the result is stored
# older stores lack them: they hold what the defaults make, but for the bands, which are not missed
_ADDED = ("activation", "bias_rate", "scale_rate", "bands")


@dataclass(frozen=True)
class Configuration:
    """What makes a comparison; every field is in the store, exactly."""

    length: int = 10
    heads: int = 4
    snr: float = 1.0
    prior: str = "sign_flips(mean=[2.0, 0.0, 0.0], amplitude=[0.0, 2.5, 1.5])"  # the canonical name
    activation: str = "Softmax(temperature=1.0)"  # likewise, at the start
    dim: int = 1000
    variance: float = 1.0
    learning_rate: float = 5.0
    bias_rate: float = 1.0
    scale_rate: float = 1.0
    batch: int = 10
    replicas: int = 8
    time: float = 60.0
    records: int = 31
    loss: str = "finite"
    level: float = 0.01
    until: float | None = None
    bands: bool = True
    seed: int = 0

    def folder(self) -> str:
        """A name from what is usually varied, and from all else that differs from the defaults."""
        always = {"length": "L", "heads": "H", "snr": "snr", "dim": "D"}
        others = {
            "prior": "", "activation": "", "variance": "variance", "learning_rate": "eta", "bias_rate": "biasrate",
            "scale_rate": "scalerate", "batch": "B", "replicas": "R", "time": "tau", "records": "records",
            "loss": "loss", "level": "level", "until": "until", "bands": "bands",
        }  # fmt: skip
        changed = {name: short for name, short in others.items() if getattr(self, name) != getattr(_DEFAULT, name)}
        parts = (f"{short}{getattr(self, name)}".removesuffix(".0") for name, short in {**always, **changed}.items())
        plain = (re.sub(r"[^A-Za-z0-9.-]+", "_", part.replace(" ", "")).strip("_") for part in parts)
        return "-".join([*plain, f"seed{self.seed}"])

    def check(self) -> None:
        """Refuses wrong values by name, before anything is looked up, computed or written.

        Raises:
            ValueError: naming the field, what was expected and what came.
        """
        import jax.numpy as jnp

        from compare.alignment import check_shared
        from sim._driver import RecordGrid
        from sim.loss import check_loss
        from theory import SingleLocation
        from theory._checks import invalid, non_negative, positive, whole
        from theory.names import parse_activation, parse_prior

        task = SingleLocation(length=self.length, snr=self.snr, prior=parse_prior(self.prior))
        whole("dim", self.dim, task.features + whole("heads", self.heads, 1))
        for name in ("variance", "learning_rate", "time"):
            positive(name, getattr(self, name), 0)
        for name in ("batch", "replicas"):
            whole(name, getattr(self, name), 1)
        activation = parse_activation(self.activation)
        activation.resolved(jnp.zeros(self.heads))(jnp.zeros((self.heads, 1)))  # as many numbers as heads
        check_shared(activation)
        for name in ("bias", "scale"):
            rate = float(non_negative(f"{name}_rate", getattr(self, f"{name}_rate"), 0))
            if rate != getattr(_DEFAULT, f"{name}_rate") and name not in activation.trained:
                raise invalid(f"{name}_rate", f"an activation that trains its {name}", activation.name)
        RecordGrid.make(whole("records", self.records, 2), self.time, self.learning_rate, self.dim)
        check_loss(self.loss)
        if not 0.001 <= self.level < 1:
            raise invalid("level", "0.001 <= level < 1", self.level)
        if self.until is not None and not self.until > 0:
            raise invalid("until", "a time > 0", self.until)


_DEFAULT = Configuration()


def run(configuration: Configuration, folder: Path, *, progress: bool, say: Callable[[str], Any]) -> bool | None:
    """Compute (or load, if it is there), print, store and draw one comparison.

    Returns:
        Whether theory and simulation agree; None without a verdict.

    Raises:
        ValueError: options that are wrong, or a folder that holds another configuration.
        InUse: another driver is at work in the folder.
        Interrupted: Ctrl-C or SIGTERM; what the simulation had is kept, and the same command goes on.
    """
    from compare.driver import only_driver
    from compare.lines import STORE, is_complete

    configuration.check()
    path = folder / STORE
    added = {name: getattr(_DEFAULT, name) for name in _ADDED}
    unfinished = "it goes on" if (folder / CHECKPOINT).exists() else "computed again"
    if not is_complete(folder, asdict(configuration), say=say, unfinished=unfinished, added=added):
        folder.mkdir(parents=True, exist_ok=True)  # now, not after minutes of work
        with only_driver(folder):
            _compute(configuration, path, progress=progress, say=say)
    return show(path, say=say)


def show(path: Path, *, say: Callable[[str], Any]) -> bool | None:
    """Print the verdict of a stored comparison and draw its figure beside it."""
    from compare import load
    from compare.lines import stored_at
    from figures.compare import draw
    from figures.style import save_figure

    path = stored_at(path)
    store = load(path)
    if "simulation" not in store.datasets:
        raise ValueError(f"{path}: expected a result of `headsplit compare`, got one with {', '.join(store.datasets)}")
    if store.metadata["status"] != "complete":
        raise ValueError(
            f"{path}: expected a complete result, got one that is {store.metadata['status']}; "
            f"{_use_of_unfinished(path)}"
        )
    drawable = int(store["agreement"].attrs["replicas"]) > 0
    pictures = save_figure(draw(store), path.parent / FIGURE) if drawable else []
    say("")
    say(store["agreement"].attrs["report"])
    say(store["aligned"].attrs["report"] if drawable else "No figure: no replica reached its end")
    say("")
    for written in (path, *pictures):
        say(f"  {written}")
    return json.loads(store["agreement"].attrs["agrees"])


def _use_of_unfinished(path: Path) -> str:
    goes_on = "goes on" if path.with_name(CHECKPOINT).exists() else "computes again from the start"
    return (
        f"compare.load({str(path)!r})['simulation'] reads it in Python, "
        f"no verdict or figure is made of it, and the same command {goes_on}"
    )


def _compute(configuration: Configuration, path: Path, *, progress: bool, say: Callable[[str], Any]) -> None:
    import jax
    import numpy as np

    from compare import agreement, align, save
    from compare.lines import Interrupted
    from sim import MultiHeadAttention, train
    from theory import Result, SingleLocation
    from theory.names import parse_activation, parse_prior

    c = configuration
    task = SingleLocation(length=c.length, snr=c.snr, prior=parse_prior(c.prior))
    start, training = (jax.random.fold_in(jax.random.key(c.seed), purpose) for purpose in (_START, _TRAINING))
    layer = MultiHeadAttention.initial(
        start,
        heads=c.heads,
        features=task.features,
        dim=c.dim,
        variance=c.variance,
        activation=parse_activation(c.activation),
        replicas=c.replicas,
    )
    say(f"SGD: {c.replicas} replicas at D = {c.dim} to τ = {c.time:g}, {c.batch} samples a step")
    checkpoint = path.with_name(CHECKPOINT)
    try:
        simulation = train(
            task,
            layer,
            learning_rate=c.learning_rate,
            time=c.time,
            batch=c.batch,
            key=training,
            record=c.records,
            loss=c.loss,
            bias_rate=c.bias_rate,
            scale_rate=c.scale_rate,
            progress=progress,
            throw=False,
            checkpoint=checkpoint,
            resume=checkpoint if checkpoint.exists() else None,
        )
    except KeyboardInterrupt:
        if not checkpoint.exists():  # stopped before it was written
            raise
        raise Interrupted(f"interrupted: {checkpoint} is kept, and the same command goes on") from None
    except ValueError as error:  # the configuration was checked: it is what lies there
        raise ValueError(f"{error} (delete it to compute again, or give another --out)") from error

    def keep_unfinished() -> KeyboardInterrupt:
        reached = np.flatnonzero(np.isfinite(np.asarray(simulation.risk)).any(axis=0))
        until = float(simulation.time[reached[-1]]) if len(reached) else 0.0
        # what may lie there is an unfinished run of the same configuration
        save(path, {"simulation": simulation.to_xarray()}, asdict(c), status="interrupted", replace=True)
        return Interrupted(
            f"interrupted: the simulation up to τ = {until:.4g} is kept in {path}; {_use_of_unfinished(path)}"
        )

    if np.any(np.asarray(simulation.result) == Result.interrupted):
        raise keep_unfinished()
    ended = np.flatnonzero(np.asarray(simulation.result) == Result.successful)
    if len(ended) < c.replicas:
        say(_diverged(simulation))
    if len(ended):
        say(f"Theory: the flow with the finite-step corrector, from {_starts(len(ended), c.replicas)}")
    try:
        rates: dict[str, Any] = {
            "step_size": c.learning_rate / c.batch,
            "bias_rate": c.bias_rate,
            "scale_rate": c.scale_rate,
        }
        theory = _flow(simulation, layer.activation, layer.order(), ended, rates=rates, progress=progress)
        bands = _bands(theory, c.dim, say=say) if c.bands else None
    except KeyboardInterrupt:
        raise keep_unfinished() from None
    datasets = {
        "theory": theory.to_xarray(),
        "simulation": simulation.to_xarray(),
        "aligned": align(theory, simulation).to_xarray(),
        "agreement": agreement(theory, simulation, bands=bands, level=c.level, until=c.until).to_xarray(),
    }
    save(path, datasets, asdict(c), replace=True)
    checkpoint.unlink()


def _bands(theory: Any, dim: int, *, say: Callable[[str], Any]) -> Any:
    """Predicted bands along the mean of the replicas' flows, which before the first split all stay close to it."""
    import equinox as eqx
    import jax
    import numpy as np

    from theory import OrderParameters, Result, Trajectory, fluctuations

    solved = np.flatnonzero(np.asarray(theory.result) == Result.successful)
    if not len(solved) or len(theory.time) < 4:
        say("No bands: they need four records and a flow that reached its end")
        return None
    say("Bands: the covariance equation along the replicas' mean path")
    trained, rest = theory.activation.split()
    parts = (trained, theory.order.m, theory.order.r, theory.risk)
    trained, m, r, risk = jax.tree.map(lambda leaf: leaf[solved].mean(axis=0), parts)
    activation = eqx.combine(trained, rest)
    path = Trajectory(
        theory.time, OrderParameters(m, r), activation, risk, None, None, theory.result[solved[0]], theory.task,
        theory.settings,
    )  # fmt: skip
    return fluctuations(path, dim=dim)


def _starts(count: int, replicas: int) -> str:
    if count < replicas:
        return f"the {count} start{'' if count == 1 else 's'} whose SGD reached its end"
    return f"each of the {count} starts" if count > 1 else "its start"


def _diverged(simulation: Any) -> str:
    """Which replicas did not reach their end, and where they were last seen."""
    import numpy as np

    lost = np.flatnonzero(np.asarray(simulation.result) != 0)
    finite: np.ndarray = np.all(np.isfinite(np.asarray(simulation.order.m)), axis=(2, 3))
    last = [float(simulation.time[np.flatnonzero(row)[-1]]) if row.any() else 0.0 for row in finite[lost]]
    shown = ", ".join(f"replica {i} after τ = {tau:.4g}" for i, tau in zip(lost[:8], last, strict=False))
    more = f", and {len(lost) - 8} more" if len(lost) > 8 else ""
    return f"SGD diverged in {len(lost)} of {len(finite)} replicas ({shown}{more}); the theory is not solved for them"


def _flow(simulation: Any, activation: Any, start: Any, ended: Any, *, rates: dict[str, Any], progress: bool) -> Any:
    """The theory of the replicas `ended`; NaN, with the simulation's own result, for the others.

    `activation` and `start` are those that the simulation started from.
    """
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np

    from theory import Trajectory, gradient_flow

    def spread(values: Any, like: Any) -> Any:
        """`values` of the replicas that were solved, at their places among all."""
        full = np.full(like.shape, np.nan)
        if values is not None:
            full[ended] = np.asarray(values)
        return jnp.asarray(full)

    result, part = np.array(simulation.result), None
    settings = {"source": "not solved", "activation": activation.name, **rates}
    if len(ended):
        part = gradient_flow(
            simulation.task,
            activation,
            start[ended],
            simulation.time,
            **rates,
            progress=progress,
            throw=False,
        )
        if len(ended) == len(result):
            return part
        result[ended], settings = np.asarray(part.result), dict(part.settings)
    m, r = (spread(part and getattr(part.order, name), getattr(simulation.order, name)) for name in ("m", "r"))
    order = eqx.tree_at(lambda o: (o.m, o.r), simulation.order, (m, r))  # its constructor refuses NaN
    risk = spread(part and part.risk, simulation.risk)
    seen, rest = simulation.activation.split()
    found = (part.activation.split()[0],) if part else ()
    solved = eqx.combine(jax.tree.map(lambda like, *own: spread(own[0] if own else None, like), seen, *found), rest)
    return Trajectory(simulation.time, order, solved, risk, None, None, jnp.asarray(result), simulation.task, settings)
