"""Normalizers in the single-location model: what limits attention there (docs/limits.md §7).

Bounded keys lose the informative token among many others (dilution), their gradients vanish, and what makes attention
sharp makes it sensitive, so that only small learning rates are stable.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, Key
from tqdm import tqdm

from sim import train_reduced
from sim.reduced import coordinates
from theory import Activation, MonteCarlo, OrderParameters, Prior, SingleLocation, bayes_risk
from theory._checks import instance, invalid, typed_key, whole
from theory.many import population_risks
from theory.method import Method, default_method
from theory.risk import loss_limit

_LEAST_SAMPLES = 1000
_BATCHES = 32  # of a mean gradient, whose scatter is its error


def risk_against_length(
    prior: Prior,
    activations: Sequence[Activation],
    order: OrderParameters,
    lengths: Sequence[int],
    *,
    snrs: Any,
    scales: Any = None,
    tokens: int = 2**22,
    seed: int = 0,
    progress: bool = True,
) -> xr.Dataset:
    """Risk of heads with bounded keys, and how far it is above the Bayes risk, against L.

    Each activation may shorten the keys: the risk is the least over `scales` of them. It is exact where the activation
    allows it; else sampled, and the least of the samples is evaluated again on others.

    Args:
        prior: law of θ.
        activations: which are compared.
        order: the longest keys that are allowed.
        lengths: values of L.
        snrs: ν, one number or one for each length (a risk below 1 at large L needs ν that grows like log L).
        scales: lengths of the keys relative to `order`, within (0, 1]; sixteenths unless given.
        tokens: scores that one sampled risk may take, L·samples.
        seed: of the samples.
        progress: a bar.

    Returns:
        Dataset (activation, length): `risk`, `error`, `scale`, `gap` (above the Bayes risk); (length): `bayes`, `snr`.

    Raises:
        ValueError: naming the argument that is wrong, what was expected and what came.

    Example:
        >>> import theory as th
        >>> order = th.OrderParameters([[2.0]], [[4.0]])
        >>> options = {"snrs": [2.0, 9.2], "progress": False}
        >>> data = risk_against_length(th.discrete([[1.0]]), [th.Softmax()], order, [4, 100], **options)
        >>> data.risk.values.round(3).tolist()
        [[0.438, 0.471]]
    """
    instance("prior", prior, Prior)
    activations, names = _named(activations)
    lengths = [whole("lengths", length, 2) for length in lengths]
    snrs = _each(snrs, "snrs", len(lengths))
    scales = np.arange(1, 17) / 16 if scales is None else np.asarray(scales, float)
    if scales.ndim != 1 or not scales.size or not np.all((scales > 0) & (scales <= 1)):
        raise invalid("scales", "numbers above 0, up to 1", scales.tolist())
    tokens = whole("tokens", tokens, 1)
    tasks = [SingleLocation(length, snr, prior) for length, snr in zip(lengths, snrs, strict=True)]
    orders = [_shortened(order, scale) for scale in scales]
    bayes = [float(bayes_risk(task)) for task in _shown(tasks, progress, "Bayes risk")]
    risk, error, best = np.zeros((3, len(activations), len(tasks)))
    places = [(i, j) for i in range(len(activations)) for j in range(len(tasks))]
    for i, j in _shown(places, progress, "risk"):
        samples = max(tokens // lengths[j], _LEAST_SAMPLES)
        method = _method(activations[i], samples, seed)
        found, errors = population_risks(
            [tasks[j]] * len(orders), [activations[i]] * len(orders), orders, method=method
        )
        least = int(np.argmin(np.asarray(found)))
        if isinstance(method, MonteCarlo):  # the least of several estimates is below the truth
            method = MonteCarlo(samples, seed + 1)
            found, errors = population_risks([tasks[j]], [activations[i]], [orders[least]], method=method)
            risk[i, j], error[i, j] = found[0], errors[0]
        else:
            risk[i, j], error[i, j] = found[least], errors[least]
        best[i, j] = scales[least]
    both = ("activation", "length")
    return xr.Dataset(
        {
            "risk": (both, risk, {"long_name": "risk with keys of the best length"}),
            "error": (both, error, {"long_name": "error of the risk (standard error where sampled)"}),
            "scale": (both, best, {"long_name": "length of the keys over the longest allowed"}),
            "gap": (both, risk - np.array(bayes), {"long_name": "risk above the Bayes risk"}),
            "bayes": ("length", bayes, {"long_name": "Bayes risk"}),
            "snr": ("length", snrs, {"long_name": "signal-to-noise ratio ν"}),
        },
        {"activation": names, "length": lengths},
        {"prior": prior.name, "m": str(order.m.tolist()), "r": str(order.r.tolist()), "seed": seed, "tokens": tokens},
    )


def gradient_against_length(
    prior: Prior,
    activations: Sequence[Activation],
    order: OrderParameters,
    lengths: Sequence[int],
    *,
    snrs: Any,
    tokens: int = 2**22,
    key: Key[Array, ""],
    progress: bool = True,
) -> xr.Dataset:
    """Gradient of the loss in the keys at the same keys for every L, hence at bounded logits.

    Keys are seen in F + H coordinates, (m, W) with r = m mᵀ + W Wᵀ; the loss is its D → ∞ form. The gradient is that of
    SGD, along which weights move: where they jump (top-k) it is not the derivative of the risk.

    Args:
        prior: law of θ.
        activations: which are compared.
        order: the keys.
        lengths: values of L.
        snrs: ν, one number or one for each length.
        tokens: scores that one average may take, L·samples.
        key: of the samples.
        progress: a bar.

    Returns:
        Dataset (activation, length): `gradient`, the norm of the mean gradient, free of the samples' bias (0 where that
        leaves nothing), its standard error `error`, and `single`, the root mean square of one sample's gradient.

    Raises:
        ValueError: naming the argument that is wrong, what was expected and what came.

    Example:
        >>> import theory as th
        >>> order = th.OrderParameters([[0.5]], [[0.25]])
        >>> options = {"snrs": 1.0, "key": jax.random.key(0), "progress": False}
        >>> data = gradient_against_length(th.discrete([[1.0]]), [th.Softmax()], order, [10, 1000], **options)
        >>> bool(data.gradient[0, 1] < data.gradient[0, 0] / 10)
        True
    """
    instance("prior", prior, Prior)
    activations, names = _named(activations)
    typed_key("key", key)
    lengths = [whole("lengths", length, 2) for length in lengths]
    snrs = _each(snrs, "snrs", len(lengths))
    keys = jnp.asarray(coordinates(order))
    mean, error, single = np.zeros((3, len(activations), len(lengths)))
    places = [(i, j) for i in range(len(activations)) for j in range(len(lengths))]
    for i, j in _shown(places, progress, "gradient"):
        count = max(tokens // lengths[j], _LEAST_SAMPLES) // _BATCHES
        own = jax.random.fold_in(key, j)  # the same tokens for all activations
        task = SingleLocation(lengths[j], snrs[j], prior)
        means, squares = _gradients(task, activations[i], keys, own, lengths[j], count)
        mean[i, j], error[i, j] = _norm(np.asarray(means).reshape(_BATCHES, -1))
        single[i, j] = np.sqrt(float(squares))
    both = ("activation", "length")
    return xr.Dataset(
        {
            "gradient": (both, mean, {"long_name": "norm of the mean gradient"}),
            "error": (both, error, {"long_name": "its standard error"}),
            "single": (both, single, {"long_name": "root mean square of one sample's gradient"}),
            "snr": ("length", snrs, {"long_name": "signal-to-noise ratio ν"}),
        },
        {"activation": names, "length": lengths},
        {"prior": prior.name, "m": str(order.m.tolist()), "r": str(order.r.tolist()), "tokens": tokens},
    )


def stability_against_rate(
    task: SingleLocation,
    activations: Sequence[Activation],
    orders: Sequence[OrderParameters],
    rates: Any,
    *,
    dim: int,
    batch: int,
    time: float,
    replicas: int,
    key: Key[Array, ""],
    evaluation: int = 20_000,
    progress: bool = True,
) -> xr.Dataset:
    """Whether SGD keeps what it starts with, against the learning rate: the exact chain in D dimensions.

    A rate is stable if after `time` the mean loss has not gone up by half of what uniform attention, 1 − 1/L, is above
    the loss at the start. Keys and temperature scaled by T are the same attention, whose rate scales by T²: the largest
    stable rate at temperature T is T² times that at 1.

    Args:
        task: the task.
        activations: which are compared.
        orders: where each starts, its optimum say.
        rates: learning rates η, increasing.
        dim: D.
        batch: B.
        time: τ of the end, not less than η/D.
        replicas: runs, at least 2.
        key: of start and samples.
        evaluation: fresh samples of a loss.
        progress: a bar.

    Returns:
        Dataset (activation, learning_rate): `loss` at the end, mean of the replicas, infinite where one has diverged,
        `error` its standard error, `stable`; (activation): `start`, the loss before, and `largest`, the largest rate up
        to which all are stable (0 if none is).

    Raises:
        ValueError: naming the argument that is wrong, what was expected and what came.
    """
    activations, names = _named(activations)
    rates = np.asarray(rates, float)
    if rates.ndim != 1 or not rates.size or np.any(np.diff(rates) <= 0):
        raise invalid("rates", "learning rates in increasing order", rates.tolist())
    if len(orders) != len(activations):
        raise invalid("orders", f"one for each of {len(activations)} activations", len(orders))
    whole("replicas", replicas, 2)
    loss, error = np.zeros((2, len(activations), rates.size))
    start = np.zeros(len(activations))
    for i, j in _shown([(i, j) for i in range(len(activations)) for j in range(rates.size)], progress, "SGD"):
        starts = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (replicas, *leaf.shape)), orders[i])
        run = train_reduced(
            task, activations[i], starts, dim=dim, learning_rate=rates[j], time=time, batch=batch, key=key,
            record=2, loss="limit", evaluation=evaluation, progress=False, throw=False,
        )  # fmt: skip
        assert run.loss is not None
        losses = np.asarray(run.loss)
        final = np.where(np.isfinite(losses[:, -1]) & (np.asarray(run.result) == 0), losses[:, -1], np.inf)
        whole_run = np.all(np.isfinite(final))
        loss[i, j] = final.mean()
        error[i, j] = final.std(ddof=1) / np.sqrt(replicas) if whole_run else np.nan
        start[i] = losses[:, 0].mean()
    stable = loss <= (start[:, None] + 1 - 1 / int(task.length)) / 2
    held = np.logical_and.accumulate(stable, axis=1)
    largest = np.where(held, rates, 0.0).max(axis=1)
    both = ("activation", "learning_rate")
    return xr.Dataset(
        {
            "loss": (both, loss, {"long_name": "loss at the end"}),
            "error": (both, error, {"long_name": "its standard error over replicas"}),
            "stable": (both, stable, {"long_name": "whether half of the start's advantage is kept"}),
            "start": ("activation", start, {"long_name": "loss at the start"}),
            "largest": ("activation", largest, {"long_name": "largest stable learning rate"}),
        },
        {"activation": names, "learning_rate": rates},
        {"prior": task.prior.name, "length": int(task.length), "snr": float(task.snr), "dim": dim, "batch": batch,
         "time": float(time), "replicas": replicas},
    )  # fmt: skip


def _named(activations: Sequence[Activation]) -> tuple[list[Activation], list[str]]:
    given = list(activations)
    for i, activation in enumerate(given):
        instance(f"activations[{i}]", activation, Activation)
    names = [activation.name for activation in given]
    if not names or len({*names}) < len(names):
        raise invalid("activations", "at least one, all different", names)
    return given, names


def _each(values: Any, name: str, count: int) -> list[float]:
    array = np.asarray(values, float)
    if array.shape not in ((), (count,)):
        raise invalid(name, f"one number or one for each of {count} lengths", array.shape)
    return np.broadcast_to(array, (count,)).tolist()


def _shortened(order: OrderParameters, scale: float) -> OrderParameters:
    return OrderParameters(scale * order.m, scale**2 * order.r)


def _method(activation: Activation, samples: int, seed: int) -> Method:
    method = default_method(activation)
    return MonteCarlo(samples, seed) if isinstance(method, MonteCarlo) else method


def _shown(things: Sequence[Any], progress: bool, what: str) -> Any:
    return tqdm(things, desc=what, disable=not progress, delay=2.0)


def _norm(batches: Float[np.ndarray, "batches n"]) -> tuple[float, float]:
    """‖mean‖ without the bias of its own scatter, and its standard error."""
    mean, covariance = batches.mean(0), np.atleast_2d(np.cov(batches.T)) / len(batches)
    size = np.linalg.norm(mean)
    along = mean / size if size > 0 else mean
    return float(np.sqrt(max(size**2 - np.trace(covariance), 0))), float(np.sqrt(along @ covariance @ along))


@eqx.filter_jit
def _gradients(
    task: SingleLocation,
    activation: Activation,
    keys: Float[Array, "H K"],
    key: Key[Array, ""],
    length: int,
    count: int,
) -> tuple[Float[Array, "batches H K"], Float[Array, ""]]:
    """Mean gradient of each batch, and the mean square of one sample's."""
    size = max(1, min(count, 2**18 // (length * keys.shape[1])))  # a few MB at a time
    chunks = -(-count // size)

    def loss(keys: Array, tokens: Array) -> Array:
        return loss_limit(activation.resolved(jnp.sum(keys**2, axis=-1)), jnp.matmul(keys, tokens.T))

    def chunk(key: Array) -> tuple[Array, Array]:
        noise, signal = jax.random.split(key)
        tokens = jax.random.normal(noise, (size, length, keys.shape[1]), jnp.float64)
        theta = task.prior.sample(signal, size)
        tokens = tokens.at[:, 0, : theta.shape[1]].add(jnp.sqrt(task.snr) * theta)
        gradients = jax.vmap(jax.grad(loss), (None, 0))(keys, tokens)
        return gradients.mean(0), jnp.mean(jnp.sum(gradients**2, axis=(1, 2)))

    def batch(key: Array) -> tuple[Array, Array]:
        found = jax.lax.map(chunk, jax.random.split(key, chunks))
        return jax.tree.map(lambda part: part.mean(0), found)

    means, squares = jax.lax.map(batch, jax.random.split(key, _BATCHES))
    return means, squares.mean()
