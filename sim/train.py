"""One-pass SGD of the actual layer at large D."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

from sim._checkpoint import Checkpoints, Files, Log, digest
from sim._driver import RecordGrid, drive
from sim._lanes import Lane, repeated
from sim._mesh import per_device, placed
from sim._sgd import Plan, Setting, advance, measure, trained_leaves
from sim.layer import MultiHeadAttention
from sim.loss import check_loss
from theory import Activation, OrderParameters, RunFailed, SingleLocation, Trajectory
from theory._checks import instance, invalid, non_negative, positive, typed_key, whole
from theory.risk import recorded_risk

Compiled = tuple[Callable[..., Any], Callable[..., Any]]  # `advance` and `measure`
BLOCK_NORMALS = 2**26  # numbers drawn between two returns to Python unless `block` is given, some 0.2 s


def train(
    task: SingleLocation,
    layer: MultiHeadAttention,
    *,
    learning_rate: Any,
    time: Any,
    batch: int,
    key: Any,
    record: Any = None,
    loss: str = "finite",
    bias_rate: Any = 1.0,
    scale_rate: Any = 1.0,
    evaluation: int = 1000,
    block: int | None = None,
    progress: bool = True,
    throw: bool = True,
    mesh: Any = None,
    checkpoint: Any = None,
    checkpoint_seconds: Any = 60.0,
    resume: Any = None,
) -> Trajectory:
    """Trains the layer by one-pass SGD, k_h ← k_h − η ∇_{k_h} (batch mean of the loss), on the clock τ = η·steps/D.

    What the activation trains moves along, b ← b − κ_b (η/D) ∂_b (batch mean of the loss) and c likewise, in float64.
    Tokens have the type of the keys. Memory stays at two chunks of tokens and two gradients beside the keys, whatever
    the batch; a chunk makes 1 MiB, or is one sample if that is larger. The compiled code is the same for every ν, η,
    prior strength, temperature, bias, scale and block length, and a run is bit for bit the same in blocks of any
    length. Each record costs an exact risk at the end, some 4 ms a replica for two heads on one feature, 0.1 s for six
    on three.

    Args:
        task: the task.
        layer: its keys and its activation's trained numbers are the start, and are left as they are. With a leading
            replica axis the replicas are independent runs, replica i with the samples of the single run of `layer[i]`
            with key `fold_in(key, i)`; they start from the same biases and scales, and each trains its own.
        learning_rate: η > 0.
        time: τ at the end; the number of steps is round(time·D/η).
        batch: samples B ≥ 1 per step.
        key: a typed key.
        record: times τ to record, strictly increasing within [0, time], or a number of equally spaced ones
            including 0 and the end; unless given, 31 or every step if there are fewer. Each is moved to the nearest
            step, and the time stored is exactly step·η/D. Nothing is run beyond the last one.
        loss: "finite" for ‖X_ε − f(X)‖²/D or "limit" for its D → ∞ form Σ_ℓ (δ_ℓε − a_ℓ)²; trained and recorded.
        bias_rate: κ_b ≥ 0 of a trained bias, stepped with κ_b·η/D; it has no effect unless the activation trains one.
        scale_rate: κ_c ≥ 0 of a trained scale, likewise.
        evaluation: fresh samples ≥ 2 per recorded loss.
        block: steps between two returns to Python, where progress, checkpoints, Ctrl-C, SIGTERM and divergence are
            looked after.
        progress: a bar on standard error when the run takes more than two seconds.
        throw: raise `RunFailed`, which keeps the records made, when a replica diverged or the user interrupted;
            otherwise the trajectory is returned and its `result` says so.
        mesh: devices of this process to share the run, a `jax.sharding.Mesh` with one axis "replica", or with "batch",
            "dim" or both. "replica": each device compiles for itself and runs its own replicas, and the result is bit
            for bit that of one device. "batch" and "dim": the samples drawn at once (those that make 1 MiB on a CPU,
            or the batch) and the D dimensions are split; what is drawn is the same, sums differ by rounding. Sizes
            have to divide what they split. "replica" beside another axis is not there yet.
        checkpoint: path of a file (.npz) that keeps the state of the run, written at its start, then between blocks,
            when it is stopped, and at its end. It is whole at any time, whatever kills the run. What lies there already
            is refused.
        checkpoint_seconds: least time between two of them; 0 writes one after every block.
        resume: path of a checkpoint to go on from, and to write on unless `checkpoint` is given. All other arguments
            are those of the run that wrote it, but for `block`, `progress`, `throw` and `mesh`; the result is bit for
            bit that of a run that never stopped, to rounding if "batch" or "dim" splits it otherwise. A finished run
            is returned at once.

    Returns:
        A `Trajectory` whose entry t holds, for the parameters at `time[t]`: order parameters, trained biases and
        scales, the population risk of both (D → ∞, to 1e-6; NaN if the scores are too large for its integrals), and
        the loss on fresh samples with its standard error.

    Raises:
        ValueError: naming the argument that is wrong, what was expected and what came; for `resume` that includes a
            file that is damaged, newer than this version or of another run, and says what differs.
        OSError: a checkpoint cannot be written (the one before it is whole), or there is none to resume.
        RunFailed: see `throw`. A replica has diverged when |k_h|² leaves the range of float32, or a trained bias or
            scale or the loss is not finite.

    Example:
        >>> import jax
        >>> from theory import SingleLocation, sign_flips
        >>> task = SingleLocation(length=5, snr=4.0, prior=sign_flips([1.0], [1.0]))
        >>> layer = MultiHeadAttention.initial(jax.random.key(0), heads=2, features=1, dim=100)
        >>> run = train(task, layer, learning_rate=1.0, time=0.5, batch=2, key=jax.random.key(1), record=3)
        >>> run.time.tolist()
        [0.0, 0.25, 0.5]
    """
    check_layer(task, layer)
    options = Options.checked(
        learning_rate=learning_rate,
        time=time,
        batch=batch,
        key=key,
        loss=loss,
        bias_rate=bias_rate,
        scale_rate=scale_rate,
        evaluation=evaluation,
    )
    replicas, dim = layer.replicas or 1, layer.dim
    grid = RecordGrid.make(record, options.time, options.learning_rate, dim)
    if block is None:
        block = max(1, BLOCK_NORMALS // (replicas * options.batch * task.length * dim))

    grouped = drawn_by_key(options.key)
    plan = Plan.make(task, layer, batch=options.batch, loss=loss, mesh=mesh, grouped=grouped)
    # a copy: `advance` takes over its buffers
    start = jnp.array(layer.keys, copy=True).reshape(replicas, *layer.keys.shape[-2:])
    layers = eqx.tree_at(
        lambda lane: (lane.keys, lane.activation), layer, (start, repeated(layer.activation, replicas))
    )
    setting, params = layer_lanes(options, plan, options.keys(layer.replicas), repeated(task, replicas), layers)
    params = placed(params, plan.mesh, "replica")
    params = eqx.tree_at(lambda p: p.keys, params, placed(params.keys, plan.mesh, "replica", None, "dim"))
    return simulate(
        task,
        layer.activation,
        options,
        grid,
        params,
        compiled=(advance, measure),
        setting=setting,
        mesh=plan.mesh,
        settings=layer_settings(layer),
        start=layer,
        files=Files(checkpoint, checkpoint_seconds, resume),
        block=whole("block", block, 1),
        progress=progress,
        throw=throw,
    )


def layer_settings(layer: MultiHeadAttention) -> dict[str, Any]:
    """Of a run of `train`, what is not among the options."""
    return {
        "source": "sgd",
        "dim": layer.dim,
        "dtype": str(layer.keys.dtype),
        "replicas": layer.replicas,
        "heads": layer.heads,
        "features": layer.features,
    }


def layer_lanes(
    options: "Options", plan: Plan, keys: Key[Array, " R"], tasks: SingleLocation, layers: MultiHeadAttention
) -> tuple[Setting, MultiHeadAttention]:
    """What `advance` takes: the setting and the trained leaves, from tasks and layers of lanes."""
    rates = {"keys": jnp.asarray(options.learning_rate, jnp.float64), **options.rates(layers.dim)}
    params, rest = eqx.partition(layers, trained_leaves(layers, rates))
    return Setting(Lane(keys, tasks, rest), rates, plan), params


class Options(NamedTuple):
    """What every run of SGD is given, checked."""

    learning_rate: float
    time: float
    batch: int
    key: Key[Array, ""]
    loss: str
    bias_rate: float
    scale_rate: float
    evaluation: int

    @classmethod
    def checked(
        cls,
        *,
        learning_rate: Any,
        time: Any,
        batch: Any,
        key: Any,
        loss: Any,
        bias_rate: Any,
        scale_rate: Any,
        evaluation: Any,
    ) -> "Options":
        """Refuses what is out of range, by name."""
        check_loss(loss)
        return cls(
            learning_rate=float(positive("learning_rate", learning_rate, 0)),
            time=float(positive("time", time, 0)),
            batch=whole("batch", batch, 1),
            key=typed_key("key", key),
            loss=loss,
            bias_rate=float(non_negative("bias_rate", bias_rate, 0)),
            scale_rate=float(non_negative("scale_rate", scale_rate, 0)),
            evaluation=whole("evaluation", evaluation, 2),
        )

    def rates(self, dim: int) -> dict[str, Array]:
        """Steps of biases and scales: order parameters, they move on the clock τ, by κ η/D a step."""
        step = self.learning_rate / dim
        rates = {"bias": self.bias_rate * step, "scale": self.scale_rate * step}
        return {name: jnp.asarray(rate, jnp.float64) for name, rate in rates.items()}

    def keys(self, replicas: int | None) -> Key[Array, " R"]:
        """The key of each replica: the key itself for a single run."""
        if replicas is None:
            return self.key[None]
        return jax.vmap(lambda i: jax.random.fold_in(self.key, i))(jnp.arange(replicas))


def drawn_by_key(key: Key[Array, ""]) -> bool:
    """Whether batched keys of this kind draw what each draws alone: under `vmap`, rbg looks at the first only."""
    return str(jax.random.key_impl(key)) == "threefry2x32"


def check_task(name: str, task: SingleLocation, features: int, of: str) -> None:
    """Refuses a task that is not one of fixed length with as many features as `of` has."""
    whole(f"{name}.length", task.length, 2)
    if task.snr.ndim:
        raise invalid(f"{name}.snr", "one number", f"shape {task.snr.shape}")
    if task.features != features:
        raise invalid(of, f"{task.features}, the features of the task", features)


def check_trained(name: str, activation: Activation) -> None:
    """Refuses an activation that trains what SGD has no rate for."""
    if not set(activation.trained) <= {"bias", "scale"}:
        raise invalid(f"{name}.trained", "'bias' and 'scale' at most", activation.trained)


def simulate(
    task: SingleLocation,
    activation: Activation,
    options: Options,
    grid: RecordGrid,
    state: Any,
    *,
    compiled: Compiled,
    setting: Any,
    mesh: Mesh | None,
    settings: dict[str, Any],
    start: Any,
    files: Files,
    block: int,
    progress: bool,
    throw: bool,
) -> Trajectory:
    """Runs `run_lanes` for replicas of one task and returns their trajectory.

    Args:
        task: the task.
        activation: at the start.
        options: of the run.
        grid: what is recorded.
        state: the start, as `advance` takes it.
        compiled: `advance` and `measure` of the simulator.
        setting: what they are given beside the state.
        mesh: the devices, None for one.
        settings: what is not among the options: source, dim, dtype, replicas, heads, features.
        start: the start as the user gave it; a checkpoint holds a digest of its numbers.
        files: checkpoints.
        block: the most steps in one call of `advance`.
        progress: whether to show it.
        throw: whether to raise `RunFailed` if a replica did not reach its end.
    """

    def configuration() -> dict[str, Any]:
        steps = f"{grid.steps.size} steps from {grid.steps[0]} to {grid.steps[-1]}"
        return {
            **task.configuration(),
            **_all_settings(activation, options, settings),
            "record": f"{steps} ({digest(grid.steps)[:16]})",
            "start": digest(*jax.tree.leaves((start, activation, task)))[:16],
            "state": [f"{leaf.dtype}{leaf.shape}" for leaf in jax.tree.leaves(state)],
        }

    log = run_lanes(
        activation,
        options,
        grid,
        state,
        compiled=compiled,
        setting=setting,
        mesh=mesh,
        settings=settings,
        checkpoints=Checkpoints(files, configuration),
        block=block,
        progress=progress,
    )
    single = settings["replicas"] is None
    records, result = log.of_lane(0) if single else (log.records, log.result)
    trajectory = trajectory_of(task, activation, options, grid, settings, records, result)
    if log.failures and throw:
        raise RunFailed(f"SGD: {'; '.join(log.failures)}; the records made before that are kept", trajectory)
    return trajectory


def run_lanes(
    activation: Activation,
    options: Options,
    grid: RecordGrid,
    state: Any,
    *,
    compiled: Compiled,
    setting: Any,
    mesh: Mesh | None,
    settings: dict[str, Any],
    checkpoints: Checkpoints,
    block: int,
    progress: bool,
) -> Log:
    """Runs `drive` for all lanes of the setting.

    Args:
        activation: at the start of any of them, for the shapes of what is trained.
        options: as in `simulate`, like all others but `checkpoints`.
        checkpoints: what `drive` takes.
    """
    heads, features = settings["heads"], settings["features"]
    trained = {name: getattr(activation, name).shape for name in activation.trained}
    advance, measure = compiled
    return drive(
        grid,
        state,
        advance=per_device(
            mesh, lambda own, state, step, count: advance((own, jnp.asarray(step), jnp.asarray(count)), state), setting
        ),
        measure=per_device(
            mesh, lambda own, state, step: measure(own, state, jnp.asarray(step), options.evaluation), setting
        ),
        shapes={"m": (heads, features), "r": (heads, heads), **trained, "loss": (), "loss_error": ()},
        replicas=setting.lanes.key.size,
        block=block,
        batch=options.batch,
        progress=progress,
        checkpoints=checkpoints,
    )


def trajectory_of(
    task: SingleLocation,
    activation: Activation,
    options: Options,
    grid: RecordGrid,
    settings: dict[str, Any],
    records: dict[str, np.ndarray],
    result: Any,
) -> Trajectory:
    """What was recorded, with its risk: of a single run, or of all replicas with a leading axis."""
    values = {name: jnp.asarray(value) for name, value in records.items()}
    order = _unchecked_order(values["m"], values["r"])
    recorded = _recorded(activation, values)
    return Trajectory(
        time=jnp.asarray(grid.times),
        order=order,
        activation=recorded,
        risk=recorded_risk(task, recorded, order),
        loss=values["loss"],
        loss_error=values["loss_error"],
        result=jnp.asarray(result, jnp.int32),
        task=task,
        settings=_all_settings(activation, options, settings),
    )


def _all_settings(activation: Activation, options: Options, settings: dict[str, Any]) -> dict[str, Any]:
    chosen = options._asdict()
    key = chosen.pop("key")
    return {
        **settings,
        **chosen,
        "activation": activation.name,
        "key": tuple(np.asarray(jax.random.key_data(key)).tolist()),
        "key_impl": str(jax.random.key_impl(key)),
    }


def check_layer(task: Any, layer: Any, at: str = "") -> None:
    """Refuses what `train` cannot start from; `at` ends the names, "s[1]" in sequences."""
    instance(f"task{at}", task, SingleLocation)
    instance(f"layer{at}", layer, MultiHeadAttention)
    check_task(f"task{at}", task, layer.features, f"layer{at}.features")
    if layer.keys.ndim > 3 or layer.keys.shape[0] == 0:
        raise invalid(f"layer{at}.keys", "shape (H, D) or (replicas, H, D), none of them 0", layer.keys.shape)
    check_trained(f"layer{at}.activation", layer.activation)


def _recorded(activation: Activation, records: dict[str, Array]) -> Activation:
    """The activation with the records in place of its trained leaves."""
    trained, rest = activation.split()
    records_of = jax.tree.map_with_path(lambda path, _: records[path[0].name], trained)
    return eqx.combine(records_of, rest)


def _unchecked_order(m: Array, r: Array) -> OrderParameters:
    """Order parameters that may be NaN, which the constructor refuses."""
    blank = OrderParameters(jnp.zeros(m.shape), jnp.zeros(r.shape))
    return eqx.tree_at(lambda order: (order.m, order.r), blank, (m, r))
