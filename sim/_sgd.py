"""The compiled part of `train`: blocks of SGD steps and measurements, for all replicas.

Randomness: a replica's key is split by purpose into the stream of training samples, folded with the step and the
chunk, and the stream of fresh samples for the recorded loss, folded with the step. So a run depends neither on how
it is cut into blocks nor on the replicas beside it.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from sim._lanes import Lane
from sim._mesh import check_mesh, layout
from sim._normals import bytes_at_once
from sim.data import Tokens, draw_tokens
from sim.layer import MultiHeadAttention
from sim.loss import sample_losses
from theory import SingleLocation

_GROUP_NUMBERS, _MOST_GROUPED = 2**13, 32  # normals and replicas of a step beyond which its own cost is small
_TRAINING, _FRESH = 0x7261696E, 0x66726573  # purposes folded into a replica's key


class Plan(eqx.Module):
    """What compilation depends on, besides the shapes."""

    batch: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True)  # samples of one replica drawn at once
    group: int = eqx.field(static=True)  # replicas advanced side by side, filled up to that number
    loss: str = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)

    @classmethod
    def make(
        cls,
        task: SingleLocation,
        layer: MultiHeadAttention,
        *,
        batch: int,
        loss: str,
        mesh: Any = None,
        grouped: bool = True,
    ) -> "Plan":
        """Chunks of samples that fit in `bytes_at_once`, and groups of replicas whose steps are small.

        Neither looks at the number of replicas or devices: a replica draws the same samples and is rounded the same in
        any company and anywhere. Groups need random numbers that `vmap` leaves as they are, which not all keys give.
        """
        fit = samples_that_fit(task, layer)
        chunk = min(batch, fit)
        sizes = {
            "replica": {"the replicas": layer.replicas},
            "batch": {"the samples drawn at once": chunk, "the samples left at the end of a batch": batch % chunk},
            "dim": {"D": layer.dim},
        }
        group = min(_MOST_GROUPED, _GROUP_NUMBERS // (chunk * int(task.length) * layer.dim)) if grouped else 1
        return cls(batch, chunk, max(1, group), loss, check_mesh(mesh, sizes))


class Setting(eqx.Module):
    """What stays the same during a run. Its numbers are traced: changing one never recompiles."""

    lanes: Lane  # of all replicas; `rest` is the layer without its trained leaves
    rates: dict[str, Float[Array, ""]]  # step of each trained leaf, by its name
    plan: Plan


def trained_leaves(layer: MultiHeadAttention, rates: dict[str, Any]) -> PyTree:
    """Marks the keys and what the activation trains, as far as `rates` has a step for them."""
    trained = ("keys", *layer.activation.trained)
    return jax.tree.map(lambda name: name in trained and name in rates, _names(layer))


def loss_gradient(params: MultiHeadAttention, rest: MultiHeadAttention, tokens: Tokens, loss: str) -> PyTree:
    """∇ of the summed loss of the layer on `tokens`, in its trained leaves."""
    return jax.grad(lambda p: jnp.sum(sample_losses(eqx.combine(p, rest), tokens, loss)))(params)


@eqx.filter_jit(donate="all-except-first")
def advance(
    block: tuple[Setting, Int[Array, ""], Int[Array, ""]], params: MultiHeadAttention
) -> tuple[MultiHeadAttention, Bool[Array, " R"]]:
    """A block (setting, first step, number of steps) of SGD; takes over the buffers of `params`.

    Returns:
        The trained leaves of every replica after it, and whether they are finite, their |k_h|² in float32.
    """
    setting, start, count = block
    lanes, shared = eqx.partition(setting.lanes, eqx.is_array)

    def run(replica: tuple[MultiHeadAttention, Lane]) -> tuple[MultiHeadAttention, Bool[Array, ""]]:
        params, lane = replica[0], eqx.combine(replica[1], shared)
        key = jax.random.fold_in(lane.key, _TRAINING)
        one_step = lambda step, p: _step(setting, lane, p, _fold_step(key, step), count > 0)  # noqa: E731
        params = jax.lax.fori_loop(start, start + count, one_step, params)
        norms = jnp.sum(jnp.square(params.keys.astype(jnp.float32)), axis=-1)
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in (norms, *jax.tree.leaves(params.activation))]
        return params, jnp.all(jnp.stack(finite))

    group, replicas = setting.plan.group, setting.lanes.key.size
    if group == 1:  # in place

        def one(i: Int[Array, ""], ends: PyTree) -> PyTree:
            own = jax.tree.map(lambda leaf: leaf[i], (ends[0], lanes))
            return jax.tree.map(lambda leaf, end: leaf.at[i].set(end), ends, run(own))

        return jax.lax.fori_loop(0, replicas, one, (params, jnp.zeros(replicas, bool)))
    full = jnp.minimum(jnp.arange(-(-replicas // group) * group), replicas - 1)  # the last one fills the last group
    ends = jax.lax.map(run, jax.tree.map(lambda leaf: leaf[full], (params, lanes)), batch_size=group)
    return jax.tree.map(lambda leaf: leaf[:replicas], ends)


@eqx.filter_jit
def measure(
    setting: Setting, params: MultiHeadAttention, step: Int[Array, ""], count: int
) -> dict[str, Float[Array, "R ..."]]:
    """Order parameters `m` and `r`, the trained leaves of the activation by their names, `loss` on `count` fresh
    samples and `loss_error`, of each replica, in float64."""
    lanes, shared = eqx.partition(setting.lanes, eqx.is_array)

    def one(replica: tuple[MultiHeadAttention, Lane]) -> dict[str, Array]:
        params, lane = replica[0], eqx.combine(replica[1], shared)
        layer = eqx.combine(params, lane.rest)

        def moments(key: Key[Array, ""], size: int) -> Float[Array, "2"]:
            tokens = _draw(setting.plan, lane.task, layer, key, size, step >= 0)
            losses = sample_losses(layer, tokens, setting.plan.loss).astype(jnp.float64)
            return jnp.stack([jnp.sum(losses), jnp.sum(jnp.square(losses))])

        fresh = _fold_step(jax.random.fold_in(lane.key, _FRESH), step)
        losses = mean_loss(moments, fresh, count, min(count, samples_that_fit(lane.task, layer)))
        order = layer.order()
        trained = {name: getattr(layer.activation, name) for name in layer.activation.trained}
        return {"m": order.m, "r": order.r, **trained, **losses}

    return jax.lax.map(one, (params, lanes))


def mean_loss(
    moments: Callable[[Key[Array, ""], int], Float[Array, "2"]], key: Key[Array, ""], count: int, chunk: int
) -> dict[str, Float[Array, ""]]:
    """`loss` and `loss_error` of `count` samples from the sums of losses and of their squares in chunks."""
    total, squares = _over_chunks(moments, key, count, chunk)
    mean = total / count
    variance = jnp.maximum(squares / count - jnp.square(mean), 0)
    return {"loss": mean, "loss_error": jnp.sqrt(variance / (count - 1))}


def _step(
    setting: Setting, lane: Lane, params: MultiHeadAttention, key: Key[Array, ""], always: Bool[Array, ""]
) -> MultiHeadAttention:
    """One SGD step; for `always` see `_draw`."""
    plan = setting.plan

    def gradient(key: Key[Array, ""], size: int) -> PyTree:
        return loss_gradient(params, lane.rest, _draw(plan, lane.task, params, key, size, always), plan.loss)

    total = _over_chunks(gradient, key, plan.batch, plan.chunk)
    mean = jax.tree.map(lambda leaf: leaf / plan.batch, total)
    rates = setting.rates | {"keys": setting.rates["keys"].astype(params.keys.dtype)}
    optimizer = optax.partition({name: optax.sgd(rate) for name, rate in rates.items()}, _names)
    tree: Any = params  # optax's own type of a tree does not cover modules
    updates, _ = optimizer.update(mean, optimizer.init(tree), tree)  # plain SGD keeps no state
    tree = optax.apply_updates(tree, updates)
    split = layout(plan.mesh, params.keys.shape, None, "dim")
    if split is not None:
        tree = eqx.tree_at(lambda p: p.keys, tree, jax.lax.with_sharding_constraint(tree.keys, split))
    return tree


def samples_that_fit(task: SingleLocation, layer: MultiHeadAttention) -> int:
    """How many samples make `bytes_at_once`, one at least."""
    return max(1, bytes_at_once() // (task.length * layer.dim * layer.keys.dtype.itemsize))


def _names(layer: PyTree) -> PyTree:
    """The layer with each leaf replaced by the name of its field."""
    return jax.tree.map_with_path(lambda path, _: path[-1].name, layer)


def _draw(
    plan: Plan,
    task: SingleLocation,
    layer: MultiHeadAttention,
    key: Key[Array, ""],
    count: int,
    always: Bool[Array, ""],
) -> Tokens:
    """Tokens for the layer; `always` is true, which the compiler must not know.

    The branch keeps XLA from fusing the end of the draw into each of its uses, and so repeating it.
    """
    shape = (count, int(task.length), layer.dim)
    own = {"dtype": layer.keys.dtype, "sharding": layout(plan.mesh, shape, "batch", None, "dim")}
    draw = lambda key: draw_tokens(task, key, count, dim=layer.dim, **own)  # noqa: E731
    blank = lambda key: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draw, key))  # noqa: E731
    return jax.lax.cond(always, draw, blank, key)


def _over_chunks(function: Callable[[Key[Array, ""], int], PyTree], key: Key[Array, ""], count: int, chunk: int):
    """Sum of `function(key of the chunk, its size)` over chunks that make up `count` samples."""
    full, remainder = divmod(count, chunk)
    if full == 1:
        total = function(jax.random.fold_in(key, 0), chunk)
    else:
        add = lambda i, total: jax.tree.map(jnp.add, total, function(jax.random.fold_in(key, i), chunk))  # noqa: E731
        shapes = jax.eval_shape(lambda key: function(key, chunk), key)
        total = jax.lax.fori_loop(0, full, add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    if remainder:
        total = jax.tree.map(jnp.add, total, function(jax.random.fold_in(key, full), remainder))
    return total


def _fold_step(key: Key[Array, ""], step: Int[Array, ""]) -> Key[Array, ""]:
    """The key of a step, whose number may exceed the 32 bits that one `fold_in` reads."""
    high, low = (step >> 32).astype(jnp.uint32), (step & 0xFFFFFFFF).astype(jnp.uint32)
    return jax.random.fold_in(jax.random.fold_in(key, high), low)
