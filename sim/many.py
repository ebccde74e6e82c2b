"""Many runs that differ in their numbers only, as the lanes of one compiled call."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Key

from sim import _chain, _sgd
from sim._checkpoint import Checkpoints, Files
from sim._driver import RecordGrid
from sim._lanes import check_alike, stacked
from sim.layer import MultiHeadAttention
from sim.reduced import BLOCK_SAMPLES, check_key, check_order, checked_dim, coordinates, order_lanes, order_settings
from sim.train import (
    BLOCK_NORMALS,
    Compiled,
    Options,
    check_layer,
    drawn_by_key,
    layer_lanes,
    layer_settings,
    run_lanes,
    trajectory_of,
)
from theory import Activation, OrderParameters, SingleLocation, Trajectory
from theory._checks import invalid, typed_key, whole


def train_many(
    tasks: Sequence[SingleLocation],
    layers: Sequence[MultiHeadAttention],
    keys: Any,
    *,
    learning_rate: Any,
    time: Any,
    batch: int,
    record: Any = None,
    loss: str = "finite",
    bias_rate: Any = 1.0,
    scale_rate: Any = 1.0,
    evaluation: int = 1000,
    block: int | None = None,
    progress: bool = True,
) -> list[Trajectory]:
    """Trains each layer on its task with its key: bit for bit `train(task, layer, key=key, ..., throw=False)`.

    All are advanced by one compiled call, whose code depends on their number but not on theirs. A run that diverges
    leaves the others as they are, Ctrl-C ends all; the `result` of each says how it ended.

    Args:
        tasks: they differ in ν and in the numbers of the prior; L, prior and which amplitudes flip are the same.
        layers: one for each task, without replicas: they differ in keys and in the numbers of the activation.
        keys: one typed key for each task, all of one kind.
        learning_rate: this and what follows are the options of `train`, the same for all.
        time: τ at the end.
        batch: samples B ≥ 1 per step.
        record: times τ to record, or their number.
        loss: "finite" or "limit".
        bias_rate: κ_b ≥ 0 of a trained bias.
        scale_rate: κ_c ≥ 0 of a trained scale.
        evaluation: fresh samples ≥ 2 per recorded loss.
        block: steps between two returns to Python.
        progress: a bar on standard error.

    Raises:
        ValueError: naming the argument that is wrong, what was expected and what came.

    Example:
        >>> import jax
        >>> from theory import sign_flips
        >>> tasks = [SingleLocation(length=5, snr=snr, prior=sign_flips([1.0], [1.0])) for snr in (1.0, 4.0)]
        >>> layer = MultiHeadAttention.initial(jax.random.key(0), heads=2, features=1, dim=100)
        >>> keys = jax.random.split(jax.random.key(1), 2)
        >>> runs = train_many(tasks, [layer] * 2, keys, learning_rate=1.0, time=0.5, batch=2, record=3)
        >>> [float(run.task.snr) for run in runs]
        [1.0, 4.0]
    """
    tasks, layers, keys = _points(tasks=tasks, layers=layers, keys=keys)
    for i, (task, layer) in enumerate(zip(tasks, layers, strict=True)):
        check_layer(task, layer, at=f"s[{i}]")
        if layer.replicas is not None:
            raise invalid(f"layers[{i}]", "a single layer: index the replica, layer[i]", f"keys {layer.keys.shape}")
    check_alike("tasks", tasks)
    check_alike("layers", layers)
    options = Options.checked(
        learning_rate=learning_rate,
        time=time,
        batch=batch,
        key=keys[0],
        loss=loss,
        bias_rate=bias_rate,
        scale_rate=scale_rate,
        evaluation=evaluation,
    )
    one = layers[0]
    grid = RecordGrid.make(record, options.time, options.learning_rate, one.dim)
    if block is None:
        block = max(1, BLOCK_NORMALS // (len(tasks) * options.batch * tasks[0].length * one.dim))
    plan = _sgd.Plan.make(tasks[0], one, batch=options.batch, loss=loss, grouped=drawn_by_key(options.key))
    return _run(
        tasks,
        [layer.activation for layer in layers],
        keys,
        options,
        grid,
        *layer_lanes(options, plan, stacked(keys), stacked(tasks), stacked(layers)),
        compiled=(_sgd.advance, _sgd.measure),
        settings=layer_settings(one),
        block=whole("block", block, 1),
        progress=progress,
    )


def train_reduced_many(
    tasks: Sequence[SingleLocation],
    activations: Sequence[Activation],
    orders: Sequence[OrderParameters],
    keys: Any,
    *,
    dim: int,
    learning_rate: Any,
    time: Any,
    batch: int,
    record: Any = None,
    loss: str = "finite",
    bias_rate: Any = 1.0,
    scale_rate: Any = 1.0,
    evaluation: int = 1000,
    block: int | None = None,
    progress: bool = True,
) -> list[Trajectory]:
    """Runs the chain of each point: bit for bit `train_reduced(task, activation, order, key=key, ..., throw=False)`.

    All are advanced by one compiled call, whose code depends on their number but not on theirs. A run that diverges
    leaves the others as they are, Ctrl-C ends all; the `result` of each says how it ended.

    Args:
        tasks: they differ in ν and in the numbers of the prior; L, prior and which amplitudes flip are the same.
        activations: one for each task: they differ in their numbers.
        orders: one state (m, r) for each task.
        keys: one typed threefry2x32 key for each task.
        dim: D; this and what follows are the options of `train_reduced`, the same for all.
        learning_rate: η > 0.
        time: τ at the end.
        batch: samples B ≥ 1 per step.
        record: times τ to record, or their number.
        loss: "finite" or "limit".
        bias_rate: κ_b ≥ 0 of a trained bias.
        scale_rate: κ_c ≥ 0 of a trained scale.
        evaluation: fresh samples ≥ 2 per recorded loss.
        block: steps between two returns to Python.
        progress: a bar on standard error.

    Raises:
        ValueError: naming the argument that is wrong, what was expected and what came.

    Example:
        >>> import jax
        >>> from theory import Softmax, sign_flips
        >>> tasks = [SingleLocation(length=5, snr=snr, prior=sign_flips([1.0], [1.0])) for snr in (1.0, 4.0)]
        >>> orders = OrderParameters.initial(jax.random.key(0), heads=2, features=1, dim=10**6, replicas=2)
        >>> keys = jax.random.split(jax.random.key(1), 2)
        >>> options = {"dim": 10**6, "learning_rate": 1.0, "time": 2e-5, "batch": 2, "record": 3}
        >>> runs = train_reduced_many(tasks, [Softmax()] * 2, [orders[0], orders[1]], keys, **options)
        >>> [float(run.task.snr) for run in runs]
        [1.0, 4.0]
    """
    tasks, activations, orders, keys = _points(tasks=tasks, activations=activations, orders=orders, keys=keys)
    for i, (task, activation, order, key) in enumerate(zip(tasks, activations, orders, keys, strict=True)):
        check_order(task, activation, order, at=f"s[{i}]")
        check_key(f"keys[{i}]", key)
        if order.m.ndim != 2:
            raise invalid(f"orders[{i}]", "one state: m of shape (H, F)", f"m of shape {order.m.shape}")
    check_alike("tasks", tasks)
    check_alike("activations", activations)
    check_alike("orders", orders)
    options = Options.checked(
        learning_rate=learning_rate,
        time=time,
        batch=batch,
        key=keys[0],
        loss=loss,
        bias_rate=bias_rate,
        scale_rate=scale_rate,
        evaluation=evaluation,
    )
    dim = checked_dim(dim, orders[0], options)
    grid = RecordGrid.make(record, options.time, options.learning_rate, dim)
    if block is None:
        block = max(1, BLOCK_SAMPLES // (len(tasks) * options.batch))
    heads = np.stack([coordinates(order) for order in orders])
    return _run(
        tasks,
        activations,
        keys,
        options,
        grid,
        *order_lanes(options, dim, stacked(keys), stacked(tasks), stacked(activations), heads),
        compiled=(_chain.advance, _chain.measure),
        settings=order_settings(orders[0], dim),
        block=whole("block", block, 1),
        progress=progress,
    )


def _points(**sequences: Any) -> list[list[Any]]:
    """The sequences as lists, as long as the first and not empty, with keys of one kind."""
    lists = {name: list(values) for name, values in sequences.items()}
    first, count = next((name, len(values)) for name, values in lists.items())
    if count == 0:
        raise invalid(first, "at least one", "none")
    for name, values in lists.items():
        if len(values) != count:
            raise invalid(name, f"as many as {first}, {count}", len(values))
    for i, key in enumerate(lists["keys"]):
        typed_key(f"keys[{i}]", key)
    check_alike("keys", lists["keys"])
    return list(lists.values())


def _run(
    tasks: list[SingleLocation],
    activations: list[Activation],
    keys: list[Key[Array, ""]],
    options: Options,
    grid: RecordGrid,
    setting: Any,
    state: Any,
    *,
    compiled: Compiled,
    settings: dict[str, Any],
    block: int,
    progress: bool,
) -> list[Trajectory]:
    """Runs the lanes and makes a trajectory of each; for the arguments see `sim.train.simulate`."""
    log = run_lanes(
        activations[0],
        options,
        grid,
        state,
        compiled=compiled,
        setting=setting,
        mesh=None,
        settings=settings,
        checkpoints=Checkpoints(Files(None, 60.0, None), dict),
        block=block,
        progress=progress,
    )
    return [
        trajectory_of(task, activation, options._replace(key=key), grid, settings, *log.of_lane(i))
        for i, (task, activation, key) in enumerate(zip(tasks, activations, keys, strict=True))
    ]
