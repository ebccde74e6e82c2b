"""Head pruning: heads are removed from a layer one after the other, without training it again."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Bool, Float, Int, Key

from sim._sgd import samples_that_fit
from sim.data import draw_tokens
from sim.layer import MultiHeadAttention
from theory import Activation, BayesSoftmax, OrderParameters, SingleLocation
from theory._checks import instance, invalid, typed_key, whole
from theory.costs import SHARES, SubsetRisks
from theory.method import Method

STRATEGIES = ("greedy", "worst", "random")
_ORDERS, _TOKENS = 0, 1  # what the key is folded with


class Pruning(eqx.Module):
    """Risk and loss against the number of heads left.

    Entry n belongs to H − n heads; the last one, without heads, has an output of zero. With the strategy "random"
    there is a leading axis of orders.

    Attributes:
        heads_left: (H+1,) H, H−1, …, 0.
        removed: (..., H) heads in the order of their removal, counted from 0: removed[n] leaves heads_left[n+1].
        risk: (..., H+1) population risk, D → ∞; 1 without heads.
        loss: (..., H+1) finite-D loss ‖X_ε − f(X)‖²/D on fresh samples, None unless measured.
        loss_error: (..., H+1) its standard error. All entries share their samples, so differences are more certain.
        share: what becomes of the factor 1/H.
        strategy: how the next head is chosen.
        samples: number of samples of the loss.
        activation: the activation.
        task: the task.
    """

    heads_left: Int[Array, " N"]
    removed: Int[Array, "*orders H"]
    risk: Float[Array, "*orders N"]
    loss: Float[Array, "*orders N"] | None
    loss_error: Float[Array, "*orders N"] | None
    share: str = eqx.field(static=True)
    strategy: str = eqx.field(static=True)
    samples: int | None = eqx.field(static=True)
    activation: Activation
    task: SingleLocation

    def redundant(self, tolerance: float = 0.01, *, lasting: bool = True) -> Any:
        """How many heads can go before the risk first exceeds that of all heads by more than `tolerance`.

        An int, or one per order. With lasting=False the risk may be higher in between: removals that must come
        together, such as one of two heads for every feature, then count (they leave the features uneven until all
        are done).
        """
        above = np.asarray(self.risk) > np.asarray(self.risk)[..., :1] + tolerance
        if lasting:
            count = np.where(above.any(-1), above.argmax(-1), above.shape[-1]) - 1
        else:
            count = above.shape[-1] - 1 - np.argmin(above[..., ::-1], axis=-1)
        return count if count.ndim else int(count)

    def to_xarray(self) -> xr.Dataset:
        """Dimensions (order,) heads_left, removal; the loss where it was measured."""
        lead = () if self.risk.ndim == 1 else ("order",)
        data: dict[str, Any] = {
            "removed": ((*lead, "removal"), self.removed, "head removed, from 0"),
            "risk": ((*lead, "heads_left"), self.risk, "population risk"),
        }
        if self.loss is not None:
            data["loss"] = ((*lead, "heads_left"), self.loss, "finite-D loss on fresh samples")
            data["loss_error"] = ((*lead, "heads_left"), self.loss_error, "standard error of loss")
        attrs = {"activation": self.activation.name, "share": self.share, "strategy": self.strategy}
        return xr.Dataset(
            {name: (dims, np.asarray(values), {"long_name": text}) for name, (dims, values, text) in data.items()},
            coords={"heads_left": np.asarray(self.heads_left)},
            attrs={**self.task.configuration(), **attrs, **({} if self.samples is None else {"samples": self.samples})},
        )

    def __str__(self) -> str:
        heads, single = self.removed.shape[-1], self.risk.ndim == 1
        orders = "" if single else f", {self.risk.shape[0]} orders"
        columns = {"risk": self.risk, **({} if self.loss is None else {"loss": self.loss})}
        header = f"{'heads left':>12}" + (f"{'removed':>9}" if single else "")
        for name in columns:
            header += f"{name:>11}" + ("" if single and name == "risk" else f"{'error' if single else 'spread':>11}")
        lines = [
            f"Pruning of {heads} heads, {type(self.activation).__name__}, {self.strategy}{orders}, 1/H {self.share}",
            header,
        ]
        for n, left in enumerate(np.asarray(self.heads_left)):
            line = f"{left:>12}" + ("" if not single else f"{'-' if n == 0 else int(self.removed[n - 1]) + 1:>9}")
            for name, values in columns.items():
                column = np.asarray(values)[..., n]
                line += f"{column.mean():>11.6f}"
                if not single:
                    line += f"{column.std():>11.6f}"
                elif name == "loss" and self.loss_error is not None:
                    line += f"{float(self.loss_error[n]):>11.6f}"
            lines.append(line)
        return "\n".join(lines)


def prune_heads(
    task: SingleLocation,
    layer: MultiHeadAttention | OrderParameters,
    *,
    activation: Activation | None = None,
    strategy: str = "greedy",
    share: str = "kept",
    orders: int | None = None,
    key: Key[Array, ""] | None = None,
    samples: int | None = None,
    method: Method | None = None,
) -> Pruning:
    """Removes heads one after the other, and says what the others reach; nothing is trained again.

    What a head's removal means:

    - softmax and softmax-1: its weights σ_hℓ are taken out of a_ℓ. With share="kept" the factor 1/H stays, H the
      number of heads before pruning; with "renormalized" it becomes 1/(heads left). Scales c_h stay as they are.
    - B-softmax: it also leaves the normalizer, as with a bias b_h → ∞. The weights left sum to one, whatever the
      share; so a single head is a softmax.

    Args:
        task: the task.
        layer: a single trained layer, or order parameters with their `activation`.
        activation: of order parameters; a layer has its own.
        strategy: "greedy" removes the head whose removal leaves the lowest population risk, "worst" the highest,
            "random" draws the orders from `key`.
        share: "kept" or "renormalized".
        orders: number of orders of "random", 20 unless given.
        key: a typed key, for random orders and for samples.
        samples: fresh samples ≥ 2 on which the finite-D loss of a layer is measured, the same ones for every subset of
            heads; none unless given.
        method: `Quadrature`, as for `population_risk`. Many heads of B-softmax are averaged on Sobol points, where
            risks are uncertain by some 1e-5.

    Raises:
        ValueError: naming the argument that is wrong, what was expected and what came.

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=5, snr=16.0, prior=th.one_hot(2))
        >>> order = th.OrderParameters([[4.0, 0], [0, 4], [4, 0]], [[16.0, 0, 16], [0, 16, 0], [16, 0, 16]])
        >>> pruning = prune_heads(task, order, activation=th.Softmax1(8.0, 2.0), share="renormalized")
        >>> pruning.redundant()
        1
    """
    instance("task", task, SingleLocation)
    for name, value, known in (("strategy", strategy, STRATEGIES), ("share", share, SHARES)):
        if value not in known:
            raise invalid(name, " or ".join(map(repr, known)), repr(value))
    if orders is not None and strategy != "random":
        raise invalid("orders", f"None with strategy={strategy!r}, which has one order", orders)
    if key is None and (strategy == "random" or samples is not None):
        raise invalid("key", "a typed key for random orders and for samples", None)
    key = None if key is None else typed_key("key", key)
    if isinstance(layer, MultiHeadAttention):
        if activation is not None:
            raise invalid("activation", "None with a layer, which has its own", activation)
        if layer.replicas is not None:
            raise invalid("layer", "a single layer: index the replica, layer[i]", layer.keys.shape)
        order, activation = layer.order(), layer.activation
    else:
        instance("layer", layer, OrderParameters)
        instance("activation", activation, Activation)
        if samples is not None:
            raise invalid("samples", "None with order parameters: they have no finite-D loss", samples)
        order = layer
    assert activation is not None
    samples = None if samples is None else whole("samples", samples, 2)
    risks, heads = SubsetRisks(task, activation, order, method), order.heads
    if strategy == "random":
        assert key is not None
        own, count = jax.random.fold_in(key, _ORDERS), whole("orders", 20 if orders is None else orders, 1)
        draw = jax.vmap(lambda i: jax.random.permutation(jax.random.fold_in(own, i), heads))
        removed = np.asarray(draw(jnp.arange(count)))
    else:
        removed = _searched(risks, heads, strategy, share)
    # (..., H+1, H): which heads are left
    position = np.argsort(removed, axis=-1)
    left = position[..., None, :] >= np.arange(heads + 1)[:, None]
    risk = np.apply_along_axis(lambda kept: risks.overall(kept, share), -1, left)
    loss = loss_error = None
    if isinstance(layer, MultiHeadAttention) and samples is not None:
        assert key is not None
        subsets, index = np.unique(left.reshape(-1, heads), axis=0, return_inverse=True)
        found = _losses(task, layer, jnp.asarray(subsets), jax.random.fold_in(key, _TOKENS), samples, share)
        loss, loss_error = (each[jnp.asarray(index.reshape(left.shape[:-1]))] for each in found)
    return Pruning(
        jnp.arange(heads, -1, -1),
        jnp.asarray(removed),
        jnp.asarray(risk),
        loss,
        loss_error,
        share,
        strategy,
        samples,
        activation,
        task,
    )


def _searched(risks: SubsetRisks, heads: int, strategy: str, share: str) -> Int[np.ndarray, " H"]:
    """The heads in the order of their removal."""
    kept, removed = np.ones(heads, bool), []
    sign = 1 if strategy == "greedy" else -1
    while kept.any():
        candidates = np.flatnonzero(kept)
        after = [sign * risks.overall(kept & (np.arange(heads) != h), share) for h in candidates]
        removed.append(candidates[int(np.argmin(after))])
        kept[removed[-1]] = False
    return np.asarray(removed)


def attention_of(
    activation: Activation, scores: Float[Array, "*batch H L"], kept: Bool[Array, " H"], share: str
) -> Float[Array, "*batch L"]:
    """a_ℓ of the heads kept; zero without heads. `activation` is resolved."""
    some = jnp.any(kept)
    if isinstance(activation, BayesSoftmax):
        kept = kept | ~some  # so that the normalizer is finite
        return jnp.where(some, jnp.mean(activation(jnp.where(kept[:, None], scores, -jnp.inf)), axis=-2), 0.0)
    kept = kept.astype(scores.dtype)
    count = kept.size if share == "kept" else jnp.maximum(jnp.sum(kept), 1)
    return jnp.einsum("h,...hl->...l", kept / count, activation.finite(scores), precision="highest")


@eqx.filter_jit
def _losses(
    task: SingleLocation,
    layer: MultiHeadAttention,
    subsets: Bool[Array, "S H"],
    key: Key[Array, ""],
    samples: int,
    share: str,
) -> tuple[Float[Array, " S"], Float[Array, " S"]]:
    """Mean finite-D loss of each subset of heads and its standard error, all on the same samples."""
    size = min(samples, samples_that_fit(task, layer))
    activation = layer.resolved_activation()

    def chunk(i: Array) -> Float[Array, "2 S"]:
        tokens = draw_tokens(task, jax.random.fold_in(key, i), size, dim=layer.dim, dtype=layer.keys.dtype)
        scores, x = layer.scores(tokens), tokens.materialize()
        gram = jnp.einsum("nld,nkd->nlk", x, x, precision="highest") / layer.dim
        counted = i * size + jnp.arange(size) < samples

        def one(kept: Array) -> Array:
            miss = attention_of(activation, scores, kept, share) - tokens.indicator()
            losses = jnp.einsum("nl,nlk,nk->n", miss, gram, miss, precision="highest").astype(jnp.float64)
            losses = jnp.where(counted, losses, 0.0)
            return jnp.stack([jnp.sum(losses), jnp.sum(jnp.square(losses))])

        return jax.lax.map(one, subsets).T

    sums = jnp.sum(jax.lax.map(chunk, jnp.arange(-(-samples // size))), axis=0)
    mean = sums[0] / samples
    return mean, jnp.sqrt(jnp.maximum(sums[1] / samples - mean**2, 0) / (samples - 1))
