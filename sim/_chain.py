"""The compiled part of `train_reduced`: the Markov chain that one-pass SGD is for (m, r), blocks of its steps.

Each head is F coordinates m along the spikes and H coordinates W along an orthonormal basis of the heads' other parts,
all in units of √D, so that r = m mᵀ + W Wᵀ. Tokens are drawn on these F + H coordinates. Of their remaining part, the
matrix N (L × n) of standard normals with n = D − F − H, only what a step depends on is drawn:

- The finite loss of a sample sees N through N Nᵀμ, μ = a − δ_ε. With e = μ/|μ|, Nᵀe = |Nᵀe| q has independent normal
  entries, and so has what the tokens orthogonal to e have along q, a vector w. Given both, the rest of N is normal.
- The samples of a batch turn the keys in directions of their own. An H × H factor P of their common update is carried
  along; of each sample, Nᵀe and the rest of N are drawn on the H directions of P, on the new direction that Nᵀe adds,
  and beyond these, where only its Gram matrix matters, as a Wishart matrix.
- In the limit loss N does not enter the gradient g, so that the batch turns the keys by one Wishart_H(n, Σ gᵀg).

Arrays have the replicas last and the samples before them, so that small sums run over long rows. The state is float64,
what is drawn and the gradient of a sample float32: its rounding, 1e-7 of a step, is unbiased noise to all purposes.
Randomness: a replica's key is folded with a purpose and the step, as in `_sgd`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from sim._lanes import Lane, arrays_mapped
from sim._normals import normals
from sim._sgd import _fold_step, mean_loss
from theory import Activation, SingleLocation

_FRESH_AT_ONCE = 4096  # samples of a recorded loss
_TRAINING, _FRESH = 0x72656475, 0x66726564  # purposes folded into a replica's key, others than those of `_sgd`


class Setting(eqx.Module):
    """What stays the same during a run. Its numbers are traced: changing one never recompiles."""

    lanes: Lane  # of all replicas; `rest` is the activation without its trained leaves
    dim: Float[Array, ""]
    rates: dict[str, Float[Array, ""]]  # "order": η/D, "bias" and "scale": κ η/D
    batch: int = eqx.field(static=True)
    loss: str = eqx.field(static=True)


class State(eqx.Module):
    """Heads in F + H coordinates, (m, W), and what the activation trains, of each replica."""

    heads: Float[Array, "R H K"]
    trained: Activation


class Sampler(NamedTuple):
    """The tasks' signals √ν θ as means and roots of the covariances of their components."""

    edges: Float[Array, "R C"]  # cumulative weights
    means: Float[Array, "R C F"]
    roots: Float[Array, "R C F F"]

    @classmethod
    def of(cls, tasks: SingleLocation) -> "Sampler":
        """That of tasks of lanes."""
        arrays, shared = eqx.partition(tasks, eqx.is_array)

        def one(arrays: SingleLocation) -> Sampler:
            task = eqx.combine(arrays, shared)
            values, vectors = jnp.linalg.eigh(task.prior.covariances)
            roots = vectors * jnp.sqrt(jnp.clip(values, 0))[:, None, :]
            edges = jnp.cumsum(task.prior.weights)
            return cls(edges, *((jnp.sqrt(task.snr) * x).astype(jnp.float32) for x in (task.prior.means, roots)))

        return jax.vmap(one)(arrays)

    @property
    def features(self) -> int:
        return self.means.shape[-1]

    def signal(self, place: Float[Array, "B R"], normals: Float[Array, "F B R"]) -> Float[Array, "F B R"]:
        """From places in (0, 1), which choose the components, and normals."""
        lanes, components = self.edges.shape
        search = lambda edges, place: jnp.searchsorted(edges, place, side="right", method="scan_unrolled")  # noqa: E731
        component = jax.vmap(search, in_axes=(0, -1), out_axes=-1)(self.edges[:, :-1], place)
        # one table of all lanes: an index of one number is looked up faster
        row = component.astype(jnp.int32) + (jnp.arange(lanes, dtype=jnp.int32) * components)[None]
        means, roots = (x.reshape(-1, *x.shape[2:])[row] for x in (self.means, self.roots))
        return jnp.moveaxis(means, -1, 0) + jnp.einsum("brfg,gbr->fbr", roots, normals, precision="highest")


def least_dim(heads: int, features: int, batch: int, loss: str) -> int:
    """The smallest D of the chain: room for the directions that are followed one by one."""
    if loss == "limit":
        return features + heads
    return features + heads + _frame(heads, batch) + 1


def factor(gram: np.ndarray) -> np.ndarray:
    """W with W Wᵀ = gram (..., H, H) but for rounding errors, with identical rows where gram has.

    Cholesky with the largest pivot first, which stops where only rounding errors or negative parts are left.
    """
    least = 8 * np.finfo(gram.dtype).eps * np.max(np.diagonal(gram, axis1=-2, axis2=-1), axis=-1)
    columns = []
    for _ in range(gram.shape[-1]):
        diagonal = np.diagonal(gram, axis1=-2, axis2=-1)
        largest = np.argmax(diagonal, axis=-1)[..., None]
        pivot = np.take_along_axis(diagonal, largest, axis=-1)
        column = np.take_along_axis(gram, largest[..., None], axis=-1)[..., 0]
        column = np.where(pivot > least[..., None], column / np.sqrt(np.where(pivot > 0, pivot, 1)), 0)
        gram = gram - column[..., :, None] * column[..., None, :]
        columns.append(column)
    return np.stack(columns, axis=-1)


@eqx.filter_jit(donate="all-except-first")
def advance(block: tuple[Setting, Int[Array, ""], Int[Array, ""]], state: State) -> tuple[State, Bool[Array, " R"]]:
    """A block (setting, first step, number of steps) of SGD; takes over the buffers of `state`.

    Returns:
        The state of every replica after it, and whether it is finite, |k_h|² in float32.
    """
    setting, start, count = block
    lanes, replicas = setting.lanes, setting.lanes.key.size
    if replicas * setting.batch == 1:  # one number is rounded otherwise than several side by side
        lanes, state = arrays_mapped(lambda leaf: jnp.repeat(leaf, 2, axis=0), (lanes, state))
    sampler, rest = Sampler.of(lanes.task), _for_samples(lanes.rest, setting.batch)
    keys = jax.vmap(lambda key: jax.random.fold_in(key, _TRAINING))(lanes.key)
    one_step = lambda step, now: _step(setting, sampler, rest, now, _folded(keys, step), count > 0)  # noqa: E731
    last = jax.lax.fori_loop(start, start + count, one_step, jax.tree.map(_replicas_last, state))
    state = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, -1, 0)[:replicas], last)
    norms = jnp.sum(jnp.square(state.heads), axis=-1).astype(jnp.float32)
    finite = [jnp.isfinite(x).reshape(x.shape[0], -1).all(axis=-1) for x in (norms, *jax.tree.leaves(state))]
    return state, jnp.all(jnp.stack(finite), axis=0)


@eqx.filter_jit
def measure(setting: Setting, state: State, step: Int[Array, ""], count: int) -> dict[str, Float[Array, "R ..."]]:
    """Order parameters `m` and `r`, trained leaves by their names, `loss` on `count` fresh samples and `loss_error`."""
    lanes = setting.lanes

    def one(replica: tuple[Key[Array, ""], Sampler, Activation, State]) -> dict[str, Array]:
        key, *own, state = replica
        sampler, rest = jax.tree.map(lambda leaf: leaf[None], own)
        state = jax.tree.map(lambda leaf: leaf[..., None], state)

        def moments(key: Key[Array, ""], size: int) -> Float[Array, "2"]:
            losses = _fresh_losses(setting, sampler, _for_samples(rest, size), state, key[None], size)
            losses = losses.astype(jnp.float64)
            return jnp.stack([jnp.sum(losses), jnp.sum(jnp.square(losses))])

        fresh = _fold_step(jax.random.fold_in(key, _FRESH), step)
        return mean_loss(moments, fresh, count, min(count, _FRESH_AT_ONCE))

    sampler = Sampler.of(lanes.task)
    trained = {name: getattr(state.trained, name) for name in lanes.rest.trained}
    r = jnp.einsum("rhk,rgk->rhg", state.heads, state.heads, precision="highest")
    losses = jax.lax.map(one, (lanes.key, sampler, lanes.rest, state))
    return {"m": state.heads[..., : sampler.features], "r": r, **trained, **losses}


def _step(
    setting: Setting,
    sampler: Sampler,
    rest: Activation,
    state: State,
    keys: Key[Array, " R"],
    always: Bool[Array, ""],
) -> State:
    """One step of SGD, replicas last; `always` is true, which the compiler must not know.

    Branches keep XLA from fusing the end of the draw into each of its uses, and so repeating it, and g into the sums
    that follow: their rounding would depend on the number of replicas.
    """
    heads, batch = state.heads.shape[0], setting.batch
    draw = lambda keys: _draw(setting, sampler, keys, heads)  # noqa: E731
    blank = lambda keys: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(draw, keys))  # noqa: E731
    tokens, beyond = jax.lax.cond(always, draw, blank, keys)
    attention, pull = _attention(rest, state, tokens)
    miss = attention.at[0].add(-1)  # ε = 0: tokens are exchangeable
    if isinstance(beyond, _Beyond):
        hidden = _Hidden.seen_along(miss, beyond)
        slope = (_gram_times(tokens, miss) + hidden.gram_times_miss) / setting.dim.astype(miss.dtype)
        turned = hidden.turned
    else:
        slope = miss
        turned = lambda g: _times(_lower(g.reshape(heads, -1, g.shape[-1])), beyond)  # noqa: E731
    of_trained, of_norms, g = pull(2 / batch * slope)  # g: H, L, B, R
    g = jax.lax.cond(always, lambda g: g, jnp.zeros_like, g)

    step = setting.rates["order"]
    by_token = [g[:, l, None] * tokens[None, l] for l in range(tokens.shape[0])]
    moved = jnp.sum(_sum(by_token), axis=-2).astype(jnp.float64)
    moved = moved + 2 * of_norms.astype(jnp.float64)[:, None] * state.heads  # r_hh of a self-consistent bias
    moved = state.heads - step * moved

    m, w = jnp.split(moved, [sampler.features], axis=1)
    w = _lower(jnp.concatenate([w, step * turned(g).astype(jnp.float64)], axis=1))
    rate = lambda path: setting.rates[path[0].name]  # noqa: E731
    trained = jax.tree.map_with_path(lambda path, b, slope: b - rate(path) * slope, state.trained, of_trained)
    return State(jnp.concatenate([m, w], axis=1), trained)


def _attention(rest: Activation, state: State, tokens: Float[Array, "L K B R"]) -> tuple[Array, Callable[..., Any]]:
    """a (L, B, R), and its cotangent's pull to (trained leaves, r_hh, scores)."""

    def one(
        rest: Activation, trained: Activation, norms: Float[Array, " H"], scores: Float[Array, "H L"]
    ) -> Float[Array, " L"]:
        activation = eqx.combine(trained, rest).resolved(norms)
        return jnp.mean(activation.finite(scores), axis=0)

    heads = state.heads.astype(tokens.dtype)
    norms = jnp.sum(jnp.square(state.heads), axis=1).astype(tokens.dtype)
    scores = _sum(heads[:, None, k, None] * tokens[None, :, k] for k in range(heads.shape[1]))
    over_samples = jax.vmap(one, in_axes=(-1, None, None, -1), out_axes=-1)
    over_replicas = jax.vmap(over_samples, in_axes=-1, out_axes=-1)
    return jax.vjp(partial(over_replicas, rest), state.trained, norms, scores)


def _gram_times(tokens: Float[Array, "L K B R"], miss: Float[Array, "L B R"]) -> Float[Array, "L B R"]:
    """The part of X Xᵀμ that the followed coordinates make."""
    along = _sum(tokens[l] * miss[l, None] for l in range(miss.shape[0]))
    return _sum(tokens[:, k] * along[None, k] for k in range(along.shape[0]))


class _Beyond(NamedTuple):
    """What is drawn, for the finite loss, of a sample's tokens beyond the followed coordinates."""

    across: Float[Array, "L B R"]  # w, before its part along e is taken out
    frame: Float[Array, "J B R"]  # Nᵀe on the directions of P and its own
    noise: Float[Array, "H J B R"]  # what is orthogonal to e, on these directions, before that along q is taken out
    bartlett: Float[Array, "H H B R"]  # and beyond them


class _Hidden(NamedTuple):
    """A sample's tokens beyond the followed coordinates, once μ is known."""

    direction: Float[Array, "L B R"]  # e
    along: Float[Array, "L B R"]  # N q
    gram_times_miss: Float[Array, "L B R"]  # N Nᵀμ
    frame: Float[Array, "J B R"]  # q
    noise: Float[Array, "H J B R"]
    bartlett: Float[Array, "H H B R"]

    @classmethod
    def seen_along(cls, miss: Float[Array, "L B R"], beyond: _Beyond) -> "_Hidden":
        reach = jnp.sqrt(_sum(jnp.square(beyond.frame)))  # |Nᵀe|
        norm = jnp.sqrt(_sum(jnp.square(miss)))
        direction = miss / jnp.where(norm > 0, norm, 1)[None]
        along = beyond.across + direction * (reach - _sum(direction * beyond.across))[None]
        return cls(
            direction, along, (norm * reach)[None] * along, beyond.frame / reach[None], beyond.noise, beyond.bartlett
        )

    def turned(self, g: Float[Array, "H L B R"]) -> Float[Array, "H J R"]:
        """P of the whole batch: gᵀN summed over samples, up to a rotation."""
        own = _sum(g[:, l] * self.along[None, l] for l in range(g.shape[1]))
        on_direction = _sum(g[:, l] * self.direction[None, l] for l in range(g.shape[1]))
        across = _lower(g - on_direction[:, None] * self.direction[None])
        on_frame = _times(across, self.noise)
        excess = own - _sum(on_frame[:, j] * self.frame[None, j] for j in range(self.frame.shape[0]))
        on_frame = on_frame + excess[:, None] * self.frame[None]
        parts = jnp.concatenate([on_frame, _times(across, self.bartlett)], axis=1)
        heads, batch = g.shape[0], g.shape[2]
        if batch == 1:
            return parts[:, :, 0]

        def add(sample: Array, total: Array) -> Array:
            part = jax.lax.dynamic_index_in_dim(parts, sample, axis=2, keepdims=False)
            return _lower(part.at[:, :heads].add(total))

        return jax.lax.fori_loop(0, batch, add, jnp.zeros((heads, heads, g.shape[3]), g.dtype))


def _fresh_losses(
    setting: Setting, sampler: Sampler, rest: Activation, state: State, keys: Key[Array, " R"], count: int
) -> Float[Array, "B R"]:
    """Losses of fresh samples, replicas last."""
    heads = state.heads.shape[0]
    key_tokens, key_choice, key_chi = _split(keys, 3)
    length = int(setting.lanes.task.length)
    numbers = _normals(key_tokens, (_token_numbers(length, sampler.features, heads), count))
    tokens = _tokens(length, sampler, key_choice, numbers)
    attention, _ = _attention(rest, state, tokens)
    miss = attention.at[0].add(-1)
    square = _sum(jnp.square(miss))
    if setting.loss == "limit":
        return square
    key_proposal, key_chi = _split(key_chi, 2)
    reach = _chi(_normals(key_proposal, (1, count)), key_chi, (setting.dim - sampler.features - heads)[None])[0]
    along = _sum(tokens[l] * miss[l, None] for l in range(miss.shape[0]))
    return (_sum(jnp.square(along)) + jnp.square(reach) * square) / setting.dim.astype(miss.dtype)


def _draw(
    setting: Setting, sampler: Sampler, keys: Key[Array, " R"], heads: int
) -> tuple[Float[Array, "L K B R"], Any]:
    """All random numbers of a step: tokens on the followed coordinates, and the rest.

    The rest is `_Beyond` for the finite loss, a Bartlett factor (H, H, R) for the limit loss.
    """
    length, features, batch = int(setting.lanes.task.length), sampler.features, setting.batch
    key_normal, key_choice, key_chi, key_batch = _split(keys, 4)
    of_tokens = _token_numbers(length, features, heads)
    freedom = setting.dim - features - heads  # n
    if setting.loss == "limit":
        tokens = _tokens(length, sampler, key_choice, _normals(key_normal, (of_tokens, batch)))
        left = freedom - jnp.arange(heads, dtype=freedom.dtype)
        numbers = _normals(key_batch, (heads * (heads + 1) // 2, 1))
        diagonal = _chi(numbers[:heads], key_chi, left)
        return tokens, _bartlett(diagonal, numbers[heads:], left)[:, :, 0]
    size = _frame(heads, batch)
    cuts = np.cumsum([of_tokens, length, size, heads * (size + 1), 1 + heads])
    # one flat draw: each draw has a cost of its own
    numbers = _normals(key_normal, (int(cuts[-1]) + heads * (heads - 1) // 2, batch))
    of_tokens, across, frame, noise, proposals, below = jnp.split(numbers, cuts)
    left = freedom - size - jnp.arange(1 + heads, dtype=freedom.dtype)
    chi = _chi(proposals, key_chi, left)
    beyond = _Beyond(
        across,
        jnp.concatenate([frame, chi[:1]]),
        noise.reshape(heads, size + 1, *noise.shape[1:]),
        _bartlett(chi[1:], below, left[1:]),
    )
    return _tokens(length, sampler, key_choice, of_tokens), beyond


def _token_numbers(length: int, features: int, heads: int) -> int:
    """How many normals a sample's tokens take."""
    return features + length * (features + heads)


def _tokens(
    length: int, sampler: Sampler, keys: Key[Array, " R"], numbers: Float[Array, "N B R"]
) -> Float[Array, "L K B R"]:
    """Tokens on the followed coordinates from normals; the informative one is the first."""
    features, lanes = sampler.features, numbers.shape[1:]
    bits = jax.vmap(lambda key: jax.random.bits(key, lanes[:1], jnp.uint32), out_axes=-1)(keys)
    place = (bits.astype(jnp.float64) + 0.5) * 2.0**-32
    signal = sampler.signal(place, numbers[:features])
    return numbers[features:].reshape(length, -1, *lanes).at[0, :features].add(signal)


def _frame(heads: int, batch: int) -> int:
    """Directions that the samples before may have turned the keys in."""
    return heads if batch > 1 else 0


def _bartlett(
    diagonal: Float[Array, "H B R"], below: Float[Array, "N B R"], freedom: Float[Array, " H"]
) -> Float[Array, "H H B R"]:
    """T lower triangular with T Tᵀ ~ Wishart_H, from χ variables of the given freedom and normals.

    The freedom may run out: a column without is empty.
    """
    heads, blank = diagonal.shape[0], jnp.zeros_like(diagonal[0])
    rows = []
    for i in range(heads):
        start = i * (i - 1) // 2
        left = [jnp.where(freedom[j] > 0, below[start + j], blank) for j in range(i)]
        rows.append(jnp.stack([*left, diagonal[i], *[blank] * (heads - 1 - i)]))
    return jnp.stack(rows)


def _chi(normals: Float[Array, "J B R"], keys: Key[Array, " R"], freedom: Float[Array, " J"]) -> Float[Array, "J B R"]:
    """χ variables, zero where freedom is not positive; the normals are the first proposals.

    Marsaglia and Tsang's rejection (2000), which is exact for any shape above 1/3, hence from one degree of freedom on.
    The whole array is proposed again until each entry has accepted, which at high freedom is nearly always at once.
    """
    shape = normals.shape
    excess = jnp.where(freedom > 0, freedom / 2 - 1 / 3, 1).astype(jnp.float32)[:, None, None]
    width = 1 / (3 * jnp.sqrt(excess))

    def judge(normals: Array, keys: Array) -> tuple[Array, Array]:
        t = width * normals
        uniform = jax.vmap(lambda key: jax.random.uniform(key, shape[:2], jnp.float32), out_axes=-1)(keys)
        accepted = (t > -1) & (jnp.log(uniform) <= excess * _log_acceptance(t))
        base = jnp.where(t > -1, 1 + t, 0)
        return jnp.sqrt(2 * excess) * base * jnp.sqrt(base), accepted

    def again(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        trial, value, missing = carry
        key_normal, key_uniform = _split(jax.vmap(lambda key: jax.random.fold_in(key, trial))(keys), 2)
        proposed, accepted = judge(_normals(key_normal, shape[:2]), key_uniform)
        return trial + 1, jnp.where(missing & accepted, proposed, value), missing & ~accepted

    key_first, keys = _split(keys, 2)
    value, accepted = judge(normals, key_first)
    wanted = jnp.broadcast_to((freedom > 0)[:, None, None], shape)
    start = (jnp.asarray(0, jnp.uint32), jnp.where(wanted, value, 0), wanted & ~accepted)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[2]), again, start)[1]


def _log_acceptance(t: Float[Array, "..."]) -> Float[Array, "..."]:
    """3 log(1+t) − (1+t)³ + 1 + 9t²/2, by its series where the terms cancel."""
    safe = jnp.maximum(t, -1 + 1e-7)
    far = 3 * jnp.log1p(safe) - safe * safe * safe - 3 * safe + 1.5 * safe * safe
    series = 1 / 4 + t * (-1 / 5 + t * (1 / 6 + t * (-1 / 7 + t * (1 / 8 + t * (-1 / 9 + t / 10)))))
    square = t * t
    return jnp.where(jnp.abs(t) < 0.2, -3 * square * square * series, far)


def _lower(rows: Float[Array, "H N *lanes"]) -> Float[Array, "H H *lanes"]:
    """Lower triangular factor T of rows = T Q, Q Qᵀ = 1, for any rank.

    Modified Gram–Schmidt, whose T is as good as Householder's: T Tᵀ is the Gram matrix of rows that are off by a few
    rounding errors. A row that the rows before it make up to rounding errors adds no direction: identical heads would
    be driven apart by it.
    """
    heads = rows.shape[0]
    least = (8 * jnp.finfo(rows.dtype).eps) ** 2 * jnp.sum(jnp.square(rows), axis=1)
    columns = []
    for h in range(heads):
        dots = jnp.sum(rows * rows[:1], axis=1)
        alive = dots[0] > least[h]
        inverse = jnp.where(alive, 1 / jnp.sqrt(jnp.where(alive, dots[0], 1)), 0)
        column = dots * inverse[None]  # one formula for the diagonal and below, equal where rows are
        columns.append(jnp.concatenate([jnp.zeros((h, *inverse.shape), inverse.dtype), column]))
        rows = rows[1:] - column[1:, None] * (rows[0] * inverse[None])[None]
    return jnp.stack(columns, axis=1)


def _times(a: Float[Array, "H K *lanes"], b: Float[Array, "K N *lanes"]) -> Float[Array, "H N *lanes"]:
    return _sum(a[:, k, None] * b[None, k] for k in range(b.shape[0]))


def _sum(terms: Any) -> Array:
    """Sum of a sequence of arrays or over the leading axis of one, written out: faster than a reduction if short."""
    terms = list(terms)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _normals(keys: Key[Array, " R"], shape: tuple[int, ...]) -> Float[Array, "... R"]:
    """Each replica's own, drawn flat: a draw is several times slower along a short last axis."""
    flat = jax.vmap(lambda key: normals(key, (int(np.prod(shape)),)), out_axes=-1)(keys)
    return flat.reshape(*shape, keys.shape[0])


def _split(keys: Key[Array, " R"], count: int) -> Key[Array, "count R"]:
    return jax.vmap(lambda key: jax.random.split(key, count), out_axes=-1)(keys)


def _folded(keys: Key[Array, " R"], step: Int[Array, ""]) -> Key[Array, " R"]:
    return jax.vmap(lambda key: _fold_step(key, step))(keys)


def _for_samples(rest: Activation, count: int) -> Activation:
    """The numbers of an activation of lanes for each sample and lane, (..., B, R).

    XLA multiplies sums instead of terms by a number that is one for all, as it would be in a single run.
    """

    def spread(leaf: Float[Array, "R ..."]) -> Float[Array, "... B R"]:
        last = _replicas_last(leaf)[..., None, :]
        return jnp.broadcast_to(last, (*last.shape[:-2], count, last.shape[-1]))

    return jax.tree.map(spread, rest)


def _replicas_last(leaf: Array) -> Array:
    return jnp.moveaxis(leaf, 0, -1)
