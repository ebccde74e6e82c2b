"""How sensitive a transformer's attention is to its logits, against temperature."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Bool, Float
from tqdm import tqdm

from compare.attention._sample import Sample, labelled, places
from theory import Softmax
from theory._checks import instance, invalid, positive, typed_key
from theory.limits import (
    directional_gradient,
    jacobian_norm,
    softmax_difference_bound,
    softmax_jacobian_bound,
    softmax_jacobian_norm,
)

TEMPERATURES = tuple(float(f"{t:.3g}") for t in np.geomspace(0.01, 10, 7))
SIZES = (1e-3, 1e-1, 10.0)


def gradient_against_temperature(
    attention: Any,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    sizes: Sequence[float] = SIZES,
    key: Any = None,
    rows: Any = None,
    progress: Any = True,
) -> xr.Dataset:
    """‖α(l+εv) − α(l)‖/ε of softmax(l/T) at a model's logits l, and the spectral norm ‖J‖₂ (docs/limits.md §5, §6).

    v is a random unit direction, of a row the same at all T and ε. The logits are those of the model as it is (T = 1),
    in float64. ‖J‖₂ comes from the secular equation for every row; at the row where it is largest, of each head, power
    iteration finds it again.

    Args:
        attention: what a model returned with `logits=True`.
        temperatures: T > 0, increasing.
        sizes: ε > 0.
        key: typed key of the directions, `jax.random.key(0)` unless given.
        rows: query rows, as in `attention_report`; those that may attend one token only are left out.
        progress: a bar, if it takes longer than two seconds.

    Returns:
        Dimensions layer, head, temperature: norm (largest of the rows), norm_mean, power, power_converged; and size:
        gradient (largest of the rows), gradient_mean. Bounds: norm_bound and bound_printed (temperature),
        gradient_bound (temperature, size).

    Raises:
        ValueError: naming the option that is wrong, what was expected and what came.

    Example:
        >>> from compare import gradient_against_temperature
        >>> from sim.pretrained import load_pretrained
        >>> model = load_pretrained()
        >>> attention = model(model.tokenize("To be, or not to be."), logits=True)
        >>> found = gradient_against_temperature(attention, temperatures=[0.1, 1.0])
        >>> bool((found.gradient <= found.gradient_bound).all()), bool((found.norm <= found.norm_bound).all())
        (True, True)
    """
    instance("progress", progress, bool)
    sample = Sample.make(attention, rows=rows)
    if attention.logits is None:
        raise invalid("attention", "logits: call the model with logits=True", "none")
    t, e = np.asarray(positive("temperatures", temperatures, 1)), np.asarray(positive("sizes", sizes, 1))
    if not t.size or np.any(np.diff(t) <= 0):
        raise invalid("temperatures", "increasing numbers", t.tolist())
    if not e.size:
        raise invalid("sizes", "at least one number", e.tolist())
    key = jax.random.key(0) if key is None else typed_key("key", key)
    kept = sample.rows[sample.lengths > 1]
    if not kept.size:
        raise invalid("rows", "one that may attend two tokens", sample.rows.tolist())
    where = jnp.asarray(attention.mask)[kept]
    shape = (sample.layers, sample.heads, len(t))
    each = {name: np.empty(shape) for name in ("norm", "norm_mean", "power")}
    converged = np.empty(shape, bool)
    steps = {name: np.empty((*shape, len(e))) for name in ("gradient", "gradient_mean")}
    with tqdm(
        total=sample.layers * len(t), desc="gradients", delay=2, unit=" layers", leave=False, disable=not progress
    ) as bar:
        for layer in range(sample.layers):
            logits = attention.logits[layer][:, kept].astype(jnp.float64)
            own = jax.random.fold_in(key, layer)
            for i, temperature in enumerate(t):
                at = layer, slice(None), i
                norms = np.asarray(_norms(logits, where, temperature))
                each["norm"][at], each["norm_mean"][at] = norms.max(axis=-1), norms.mean(axis=-1)
                each["power"][at], converged[at] = _powers(logits, where, temperature, norms.argmax(axis=-1))
                for j, size in enumerate(e):
                    found = directional_gradient(Softmax(temperature), logits, size, key=own, where=where)
                    found = np.asarray(found)[0]
                    steps["gradient"][*at, j], steps["gradient_mean"][*at, j] = found.max(axis=-1), found.mean(axis=-1)
                bar.update()
    dims = ("layer", "head", "temperature")
    bounds = {
        "norm_bound": (dims[-1:], np.asarray(softmax_jacobian_bound(t))),
        "bound_printed": (dims[-1:], np.asarray(softmax_jacobian_bound(t, form="printed"))),
        "gradient_bound": (("temperature", "size"), np.asarray(softmax_difference_bound(t[:, None], e[None]))),
    }
    variables = {
        **{name: (dims, values) for name, values in each.items()},
        "power_converged": (dims, converged),
        **{name: ((*dims, "size"), values) for name, values in steps.items()},
        **bounds,
    }
    attrs = {name: value for name, value in sample.attrs.items() if name not in ("vectors", "normalize", "count")}
    attrs |= {"averaged_rows": len(kept), "key": np.asarray(jax.random.key_data(key)).tolist()}
    return labelled(variables, {**places(sample), "temperature": t, "size": e}, attrs)


def _norms(logits: Float[Array, "H Q L"], where: Bool[Array, "Q L"], temperature: float) -> Float[Array, "H Q"]:
    """‖J‖₂ of every row."""
    every = jnp.broadcast_to(where, logits.shape)
    return softmax_jacobian_norm(Softmax(temperature)(logits, every), temperature=temperature, where=every)


def _powers(
    logits: Float[Array, "H Q L"], where: Bool[Array, "Q L"], temperature: float, rows: np.ndarray
) -> tuple[Any, Any]:
    """‖J‖₂ of one row of each head by power iteration, and whether it converged."""
    found = jacobian_norm(Softmax(temperature), logits[np.arange(len(rows)), rows], where=where[rows])
    return np.asarray(found.value), np.asarray(found.converged)
