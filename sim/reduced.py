"""One-pass SGD at any D: the exact chain of the order parameters."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from sim._chain import Setting, State, advance, factor, least_dim, measure
from sim._checkpoint import Files
from sim._driver import RecordGrid
from sim._lanes import Lane, repeated
from sim._mesh import check_mesh, placed
from sim.train import Options, check_task, check_trained, drawn_by_key, simulate
from theory import Activation, OrderParameters, SingleLocation, Trajectory
from theory._checks import instance, invalid, whole

MOST_DIM = 10**15  # n = D − F − H has to be exact in float64
BLOCK_SAMPLES = 10**5  # between two returns to Python unless `block` is given, some 0.2 s


def train_reduced(
    task: SingleLocation,
    activation: Activation,
    order: OrderParameters,
    *,
    dim: int,
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
    """Runs the Markov chain that (m, r) is under one-pass SGD of the layer in D dimensions: exact in law at any D.

    A run has the law of `train` from keys with these order parameters, and the same clock τ = η·steps/D, records and
    options, but its cost per sample depends on L, F and H only. The state is float64, draws and gradients per sample
    are float32: what that does to the law, some 1e-7 of a step, stays far below the scatter of runs (it is also what
    parts heads that start identical). r − m mᵀ is kept as a product W Wᵀ and so positive semi-definite. Memory grows by
    some 2 kB per replica and sample of a step at L = 10, H = 4. The compiled code is the same for every D, ν, η, prior
    strength, temperature, bias, scale and block length, and a run is the same in blocks of any length.

    Args:
        task: the task.
        activation: its trained numbers are the start. It must treat all tokens alike.
        order: (m, r) at the start. With one leading axis the replicas are independent runs, replica i with the samples
            of the single run of `order[i]` with key `fold_in(key, i)`; they start from the same biases and scales, and
            each trains its own.
        dim: D, at least F + H + 1 for the finite loss with batch = 1, F + 2H + 1 with larger batches, and F + H for
            the limit loss.
        learning_rate: η > 0.
        time: τ at the end; the number of steps is round(time·D/η).
        batch: samples B ≥ 1 per step.
        key: a typed threefry2x32 key, as `jax.random.key` makes them. Samples differ from those of `train` with it.
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
        mesh: devices of this process, a `jax.sharding.Mesh` with one axis "replica" whose size divides the number of
            replicas. Each compiles for itself and runs its own, and the result is bit for bit that of one device.
        checkpoint: path of a file (.npz) that keeps the state of the run; this and the next two are those of `train`.
        checkpoint_seconds: least time between two of them.
        resume: path of a checkpoint to go on from, on any `mesh`.

    Returns:
        A `Trajectory` as `train` returns it; its settings have source="reduced".

    Raises:
        ValueError: naming the argument that is wrong, what was expected and what came; for `resume` that includes a
            file that is damaged, newer than this version or of another run, and says what differs.
        OSError: a checkpoint cannot be written (the one before it is whole), or there is none to resume.
        RunFailed: see `throw`. A replica has diverged when |k_h|² leaves the range of float32, or a trained bias or
            scale or the loss is not finite.

    Example:
        >>> import jax
        >>> from theory import OrderParameters, SingleLocation, Softmax, sign_flips
        >>> task = SingleLocation(length=5, snr=4.0, prior=sign_flips([1.0], [1.0]))
        >>> order = OrderParameters.initial(jax.random.key(0), heads=2, features=1, dim=10**6)
        >>> options = {"dim": 10**6, "learning_rate": 1.0, "time": 2e-5, "batch": 2, "record": 3}
        >>> run = train_reduced(task, Softmax(), order, key=jax.random.key(1), **options)
        >>> (run.time * 10**6).round().tolist()
        [0.0, 10.0, 20.0]
    """
    check_order(task, activation, order)
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
    check_key("key", options.key)
    dim = checked_dim(dim, order, options)
    grid = RecordGrid.make(record, options.time, options.learning_rate, dim)
    replicas = None if order.m.ndim == 2 else order.m.shape[0]
    count = replicas or 1
    mesh = check_mesh(mesh, {"replica": {"the replicas": replicas}})
    if block is None:
        block = max(1, BLOCK_SAMPLES // (count * options.batch))

    heads = coordinates(order)
    heads = heads if replicas else heads[None]
    tasks, activations = repeated((task, activation), count)
    setting, state = order_lanes(options, dim, options.keys(replicas), tasks, activations, heads)
    return simulate(
        task,
        activation,
        options,
        grid,
        placed(state, mesh, "replica"),
        compiled=(advance, measure),
        setting=setting,
        mesh=mesh,
        settings=order_settings(order, dim),
        start=order,
        files=Files(checkpoint, checkpoint_seconds, resume),
        block=whole("block", block, 1),
        progress=progress,
        throw=throw,
    )


def order_settings(order: OrderParameters, dim: int) -> dict[str, Any]:
    """Of a run of `train_reduced`, what is not among the options."""
    return {
        "source": "reduced",
        "dim": dim,
        "dtype": "float64",
        "replicas": None if order.m.ndim == 2 else order.m.shape[0],
        "heads": order.heads,
        "features": order.features,
    }


def order_lanes(
    options: Options,
    dim: int,
    keys: Key[Array, " R"],
    tasks: SingleLocation,
    activations: Activation,
    heads: Float[np.ndarray, "R H K"],
) -> tuple[Setting, State]:
    """What `advance` takes, from tasks and activations of lanes and `coordinates`."""
    trained, rest = activations.split()
    rates = {"order": jnp.asarray(options.learning_rate / dim, jnp.float64), **options.rates(dim)}
    size = jnp.asarray(dim, jnp.float64)
    setting = Setting(Lane(keys, tasks, rest), size, rates, options.batch, options.loss)
    return setting, State(jnp.array(heads), trained)


def coordinates(order: OrderParameters) -> Float[np.ndarray, "*R H K"]:
    """The heads (m, W) of order parameters."""
    return np.concatenate([np.asarray(order.m), factor(np.asarray(order.r_perp))], axis=-1)


def check_order(task: Any, activation: Any, order: Any, at: str = "") -> None:
    """Refuses what `train_reduced` cannot start from; `at` ends the names, "s[1]" in sequences."""
    instance(f"task{at}", task, SingleLocation)
    instance(f"activation{at}", activation, Activation)
    instance(f"order{at}", order, OrderParameters)
    check_task(f"task{at}", task, order.features, f"order{at}.features")
    if order.m.ndim > 3 or order.m.shape[0] == 0:
        raise invalid(f"order{at}.m", "shape (H, F) or (replicas, H, F), none of them 0", order.m.shape)
    activation.check_heads(order.heads)
    check_trained(f"activation{at}", activation)


def check_key(name: str, key: Key[Array, ""]) -> None:
    """Refuses keys that draw nothing lane by lane."""
    if not drawn_by_key(key):
        raise invalid(name, "a threefry2x32 key: others give no random numbers replica by replica", key)


def checked_dim(dim: Any, order: OrderParameters, options: Options) -> int:
    """D, refused where the chain is not exact or has no room."""
    dim = whole("dim", dim, 1)
    if dim > MOST_DIM:
        raise invalid("dim", f"at most {MOST_DIM:.0e}", dim)
    least = least_dim(order.heads, order.features, options.batch, options.loss)
    if dim < least:
        shape = f"H = {order.heads}, F = {order.features}, batch = {options.batch} and the {options.loss} loss"
        raise invalid("dim", f"at least {least} for {shape}", dim)
    return dim
