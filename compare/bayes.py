"""How close each activation comes to the Bayes risk: optima against ν and against H, and trained layers at finite D."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Key

from sim import MultiHeadAttention, train
from theory import (
    Activation,
    BayesSoftmax,
    Optimum,
    OrderParameters,
    Prior,
    Quadrature,
    SingleLocation,
    Softmax,
    Softmax1,
    bayes_risk,
    optimal_risk,
)
from theory.bayes import fitted_to_bayes

# with H heads: what is trained or optimized besides the keys is written in the call
ACTIVATIONS: dict[str, Callable[[int], Activation]] = {
    "softmax": lambda heads: Softmax(),
    "softmax-1": lambda heads: Softmax1(scale=float(heads), trained=True),
    "B-softmax": lambda heads: BayesSoftmax(bias=np.zeros(heads), trained=True),
}
QUANTITIES = {
    "risk": "lowest population risk found",
    "error": "error of its evaluation",
    "gradient": "largest entry of its gradient",
    "spread": "highest less lowest risk reached from the starts",
}


def optima_against_snr(
    prior: Prior, activation: str, *, heads: int, snrs: Sequence[float], length: int, starts: int, key: Key[Array, ""],
    tolerance: float = 1e-4, progress: bool = True,
) -> xr.Dataset:  # fmt: skip
    """`QUANTITIES` of the best H heads at each ν; each optimum is one start of the next, from the largest ν down.

    Args:
        prior: law of θ.
        activation: a name in `ACTIVATIONS`.
        heads: H.
        snrs: increasing ν.
        length: L.
        starts: of `optimal_risk`.
        key: a typed key.
        tolerance: of the evaluation.
        progress: bars.
    """
    found: list[Optimum] = []
    downward = list(snrs)[::-1]
    for index, snr in enumerate(downward):
        first = _scaled(found[-1], snr / downward[index - 1]) if found else None
        found.append(
            optimal_risk(
                SingleLocation(length, snr, prior), ACTIVATIONS[activation](heads), heads, starts=starts, first=first,
                key=jax.random.fold_in(key, index), progress=progress,
                method=_method(activation, heads, prior.features, tolerance),
            )
        )  # fmt: skip
    return _line(found[::-1], "snr", snrs)


def optima_against_heads(
    prior: Prior, activation: str, *, heads: Sequence[int], snr: float, length: int, starts: int, key: Key[Array, ""],
    tolerance: float = 1e-4, progress: bool = True,
) -> xr.Dataset:  # fmt: skip
    """`QUANTITIES` of the best heads for each H; each optimum, with new heads beside it, is one start of the next."""
    task = SingleLocation(length, snr, prior)
    found: list[Optimum] = []
    for index, count in enumerate(heads):
        own = jax.random.fold_in(key, index)
        first = _more_heads(found[-1], count, ACTIVATIONS[activation](count), own) if found else None
        found.append(
            optimal_risk(
                task, ACTIVATIONS[activation](count), count, starts=starts, key=own,
                method=_method(activation, count, prior.features, tolerance), first=first, progress=progress,
            )
        )  # fmt: skip
    return _line(found, "heads", heads)


def trained_risk(
    prior: Prior, activation: str, *, heads: int, snr: float, length: int, dim: int, variance: float,
    learning_rate: float, batch: int, time: float, bias_rate: float, replicas: int, key: Key[Array, ""],
    progress: bool = True,
) -> xr.Dataset:  # fmt: skip
    """SGD of the layer on its finite-D loss, recorded at start and end: `risk` is that of what it learned."""
    start, data = jax.random.split(key)
    layer = MultiHeadAttention.initial(
        start, heads=heads, features=prior.features, dim=dim, variance=variance,
        activation=ACTIVATIONS[activation](heads), replicas=replicas,
    )  # fmt: skip
    trajectory = train(
        SingleLocation(length, snr, prior), layer, learning_rate=learning_rate, time=time, batch=batch, key=data,
        bias_rate=bias_rate, record=2, evaluation=500, progress=progress, throw=False,
    )  # fmt: skip
    return trajectory.to_xarray()


def bayes_against_snr(prior: Prior, *, snrs: Sequence[float], length: int) -> xr.Dataset:
    """`bayes` and `bayes_error` at each ν."""
    hardest = fitted_to_bayes(SingleLocation(length, snrs[-1], prior), 1e-5)
    pairs = [bayes_risk(SingleLocation(length, snr, prior), hardest, with_error=True) for snr in snrs]
    values, errors = (np.array([float(pair[i]) for pair in pairs]) for i in (0, 1))
    return xr.Dataset(
        {
            "bayes": ("snr", values, {"long_name": "Bayes risk"}),
            "bayes_error": ("snr", errors, {"long_name": "error of the Bayes risk"}),
        },
        coords={"snr": list(map(float, snrs))},
    )


def _method(activation: str, heads: int, features: int, tolerance: float) -> Quadrature:
    """Counts that most optima do with, for the lines of a figure to share compiled code; they grow where needed."""
    if activation != "B-softmax":
        return Quadrature(tolerance, nodes=64, frequencies=64 if activation == "softmax" else 96)
    wide = min(heads, features)
    return Quadrature(tolerance, nodes=64, points=(1,) * (heads - wide) + (48 if wide < 3 else 32,) * wide)


def _line(found: Sequence[Optimum], name: str, values: Sequence[Any]) -> xr.Dataset:
    data = {
        quantity: (name, np.array([float(getattr(optimum, quantity)) for optimum in found]), {"long_name": text})
        for quantity, text in QUANTITIES.items()
    }
    return xr.Dataset(data, coords={name: list(values)})


def _scaled(optimum: Optimum, factor: float) -> tuple[OrderParameters, Activation]:
    """A guess at ν·factor: Bayes-optimal heads are ∝ √ν, their biases ∝ ν."""
    m = jnp.sqrt(factor) * optimum.order.m
    activation = optimum.activation
    if "bias" in activation.trained:
        activation = eqx.tree_at(lambda a: a.bias, activation, factor * activation.bias)  # pyright: ignore
    return OrderParameters(m, m @ m.T), activation


def _more_heads(
    optimum: Optimum, heads: int, activation: Activation, key: Key[Array, ""]
) -> tuple[OrderParameters, Activation]:
    """The optimum with small new heads beside it."""
    old = optimum.order.heads
    new = 0.3 * jax.random.normal(key, (heads - old, optimum.order.features), jnp.float64)
    m = jnp.concatenate([optimum.order.m, new])
    for name in activation.trained:
        value = getattr(optimum.activation, name)
        if value.ndim:
            value = jnp.concatenate([value, jnp.full(heads - old, jnp.mean(value))])
        elif name == "scale":
            value = value * heads / old
        activation = eqx.tree_at(lambda a, name=name: getattr(a, name), activation, value)
    return OrderParameters(m, m @ m.T), activation
