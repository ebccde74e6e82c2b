"""The population risk E(m, r) as D → ∞, and the methods that evaluate it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory import _laplace, _montecarlo
from theory._checks import instance, invalid, is_concrete, whole
from theory.activation import Activation, Softmax
from theory.order import OrderParameters
from theory.scores import Scores, score_law
from theory.task import SingleLocation

# Where values are traced the state cannot choose its nodes: enough for scores of variance up to about 20
_TRACED_NODES, _TRACED_FREQUENCIES = 64, 80
_MOST_NODES = 2048
_ROUNDING = 1e-15  # relative error of L times a table entry, seen up to L = 10^12


class Quadrature(eqx.Module):
    """The exact engine: one- and two-head integrals, cost independent of L, no noise.

    Windows always follow the state. So do node counts, when the state is known numbers; inside `jit`, `grad` or
    `vmap`, where it is not, they are fixed, and a state that needs far more is a run-time error. `fitted` fixes
    the counts a given state needs.

    Args:
        tolerance: absolute error aimed at, 1e-13 … 1e-2.
        nodes: nodes in the integration variable (default: as the state needs).
        frequencies: Fourier nodes (default: as the state needs).
    """

    tolerance: float = eqx.field(static=True, default=1e-8)
    nodes: int | None = eqx.field(static=True, default=None)
    frequencies: int | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        if not (isinstance(self.tolerance, (float, int)) and 1e-13 <= self.tolerance <= 1e-2):
            raise invalid("tolerance", "a number from 1e-13 (float64 reaches no further) to 1e-2", repr(self.tolerance))
        if (self.nodes is None) != (self.frequencies is None):
            raise invalid("nodes, frequencies", "both or neither", f"{self.nodes}, {self.frequencies}")
        if self.nodes is not None and self.frequencies is not None:
            whole("nodes", self.nodes, 4)
            whole("frequencies", self.frequencies, 4)

    @property
    def tail(self) -> float:
        """Mass left outside the windows: errors are up to about fifteen times that."""
        return self.tolerance / 20

    @property
    def counts(self) -> tuple[int | None, int | None]:
        """(nodes, frequencies)."""
        return self.nodes, self.frequencies

    def fitted(self, task: SingleLocation, activation: Activation, order: OrderParameters) -> "Quadrature":
        """This method with the node counts that the given state (or the hardest of several) needs.

        Wide scores need many nodes, zero or identical heads many frequencies: give both ends of what will be met.
        """
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[-2:]), order)
        grid = self._grid(flat, task, activation)
        return Quadrature(self.tolerance, grid.nodes, grid.frequencies)

    def _grid(self, states: OrderParameters, task: SingleLocation, activation: Activation) -> _laplace.Grid:
        """The grid for the hardest of the states (one leading axis)."""
        if is_concrete(task.length) and self.tolerance < _ROUNDING * int(task.length):
            raise invalid(
                "tolerance",
                f"at least {_ROUNDING * int(task.length):.0e} at L = {task.length}, the rounding of L terms in float64",
                self.tolerance,
            )
        if self.nodes is not None and self.frequencies is not None:
            return _laplace.Grid(self.tail, self.nodes, self.frequencies)
        if not is_concrete(states, task, activation):
            return _laplace.Grid(self.tail, _TRACED_NODES, _TRACED_FREQUENCIES)
        nodes, frequencies = _needed_each(task, activation, states, jnp.asarray(self.tail))
        grid = _laplace.Grid(self.tail, *_laplace.rounded_counts(float(nodes.max()), float(frequencies.max())))
        if max(grid.nodes, grid.frequencies) > _MOST_NODES:
            raise invalid(
                "tolerance",
                f"one that this state reaches with at most {_MOST_NODES} nodes (loosen it, or use MonteCarlo)",
                f"{self.tolerance}, which needs {max(grid.nodes, grid.frequencies)}",
            )
        return grid


class MonteCarlo(eqx.Module):
    """Independent samples with a fixed seed: any activation, error ∝ samples^{-1/2}, cost ∝ L.

    Derivatives are exact derivatives of the expectation (Price's theorem), estimated on the same draws; they need a
    twice differentiable activation.

    Args:
        samples: number of samples (of ε, θ and all tokens).
        seed: seed of the draws.
    """

    samples: int = eqx.field(static=True, default=100_000)
    seed: int = eqx.field(static=True, default=0)

    def __check_init__(self) -> None:
        whole("samples", self.samples, 2)
        whole("seed", self.seed, 0)


Method = Quadrature | MonteCarlo


def population_risk(
    task: SingleLocation,
    activation: Activation,
    order: OrderParameters,
    method: Method | None = None,
    with_error: bool = False,
) -> Any:
    """E Σ_ℓ (δ_ℓε − a_ℓ)², a = (1/H) Σ_h σ_h: the loss per dimension of the layer as D → ∞ (docs/model.md §2, §3, §7).

    Differentiable to any order in everything but L, at degenerate states (identical heads, zero heads, r = m mᵀ) too.
    r is read as ½(r + rᵀ), so the gradient in r is symmetric: ∂E/∂r_hh' of the independent entries.
    1 for an output of zero, 1 − 1/L for uniform attention.

    Args:
        task: the task.
        activation: the attention activation.
        order: one state (no leading axes; `jax.vmap` over more).
        method: `Quadrature` (default where the activation allows it) or `MonteCarlo`.
        with_error: also return an error estimate: for `Quadrature` the change under 1.5 times the nodes and a window
            with 100 times less outside, plus how far the weights' sum misses one; for `MonteCarlo` the standard error.

    Returns:
        The risk, or (risk, error).

    Example:
        >>> import theory as th
        >>> task = th.SingleLocation(length=10, snr=1.0, prior=th.sign_flips([2, 0, 0], [0, 2.5, 1.5]))
        >>> m = [[2, 0, 0]] * 4
        >>> order = th.OrderParameters(m, [[4.0] * 4] * 4)
        >>> print(f"{th.population_risk(task, th.Softmax(), order):.8f}")
        0.44687973
    """
    check_model(task, activation, order)
    if order.m.ndim != 2:
        raise invalid("order", "one state: m of shape (H, F); use jax.vmap over more", f"m of shape {order.m.shape}")
    method = default_method(activation) if method is None else method
    value, error = evaluate_risk(task, activation, order, method, with_error=with_error, guarded=True)
    return (value, error) if with_error else value


def check_model(task: Any, activation: Any, order: Any) -> None:
    """Types, and that the order parameters have the task's features."""
    instance("task", task, SingleLocation)
    instance("activation", activation, Activation)
    instance("order", order, OrderParameters)
    if order.features != task.features:
        raise invalid("order", f"m with F = {task.features} features as in the task's prior", f"F = {order.features}")


def default_method(activation: Activation, tolerance: float = 1e-8) -> Method:
    """The exact engine, where the activation allows it."""
    if not activation.pairwise:
        raise invalid("method", f"MonteCarlo(...), which {type(activation).__name__} needs", None)
    return Quadrature(tolerance)


def evaluate_risk(
    task: SingleLocation,
    activation: Activation,
    order: OrderParameters,
    method: Method,
    *,
    with_error: bool = False,
    guarded: bool = False,
) -> tuple[Array, Array | None]:
    """(risk, error) without checks of shapes; `guarded` makes traced states that need more nodes an error."""
    if isinstance(method, MonteCarlo):
        return _sampled(task, activation, order, method)
    if isinstance(method, Quadrature):
        return _integrated(task, activation, order, method, with_error, guarded)
    raise invalid("method", "Quadrature(...), MonteCarlo(...) or None", repr(method))


def recorded_risk(
    task: SingleLocation, activation: Activation, order: OrderParameters, method: Method | None = None
) -> Float[Array, "*batch"]:
    """The risk of many states at once (any leading axes), node counts fitted to the hardest of them.

    NaN where a state is not finite, or spreads so widely that no allowed number of nodes integrates it.
    """
    method = default_method(activation) if method is None else method
    lead = order.m.shape[:-2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[-2:]), order)
    usable = np.isfinite(np.asarray(flat.m)).all((-1, -2)) & np.isfinite(np.asarray(flat.r)).all((-1, -2))
    if isinstance(method, Quadrature) and method.nodes is None:
        zeroed = jax.tree.map(lambda leaf: jnp.where(jnp.asarray(usable)[:, None, None], leaf, 0.0), flat)
        needs = np.stack(_needed_each(task, activation, zeroed, jnp.asarray(method.tail)))
        usable = usable & (needs.max(0) <= 0.9 * _MOST_NODES)
        if usable.any():
            nodes, frequencies = needs[:, usable].max(1).tolist()
            method = Quadrature(method.tolerance, *_laplace.rounded_counts(nodes, frequencies))
    risk = _risk_each(task, activation, flat, jnp.asarray(usable), method)
    return risk.reshape(lead)


def loss_limit(activation: Activation, scores: Float[Array, "H L"], position: Any = 0) -> Float[Array, ""]:
    """Σ_ℓ (δ_ℓε − a_ℓ)² of one sample, ε = position."""
    attention = jnp.mean(activation(scores), axis=0)
    return jnp.sum((jax.nn.one_hot(position, scores.shape[-1], dtype=scores.dtype) - attention) ** 2)


def _scaled(activation: Activation, scores: Scores) -> Scores:
    """Scores divided by the heads' temperatures."""
    assert isinstance(activation, Softmax)  # the one pairwise activation so far
    inverse = activation.inverse_temperatures(scores.mean.shape[-1])
    matrix = inverse[:, None] * inverse[None, :]
    return scores._replace(
        mean=scores.mean * inverse[None], signal=scores.signal * matrix[None], noise=scores.noise * matrix
    )


@eqx.filter_jit
def _needed_each(
    task: SingleLocation, activation: Activation, states: OrderParameters, tail: Array
) -> tuple[Array, Array]:
    """Nodes and frequencies that each state (one leading axis) needs."""
    return jax.vmap(lambda o: _laplace.needed(_scaled(activation, score_law(task, o)), tail))(states)


@eqx.filter_jit
def _risk_each(
    task: SingleLocation, activation: Activation, states: OrderParameters, usable: Array, method: Method
) -> Array:
    def one(state: tuple[OrderParameters, Array]) -> Array:
        order, usable = state
        safe = jax.tree.map(lambda leaf: jnp.where(usable, leaf, 0.0), order)
        return jnp.where(usable, evaluate_risk(task, activation, safe, method)[0], jnp.nan)

    return jax.lax.map(one, (states, usable))


@eqx.filter_jit
def _assembled(scores: Scores, grid: _laplace.Grid) -> tuple[Array, Array]:
    """E = 1 − (2/H) Σ_h E σ_hε + (1/H²) Σ_hh' E Σ_ℓ σ_hℓ σ_h'ℓ, and the largest miss of Σ_ℓ σ_hℓ = 1."""
    moments = _laplace.softmax_moments(scores, grid)
    heads = moments.hit.shape[0]
    risk = 1 - 2 / heads * jnp.sum(moments.hit) + jnp.sum(moments.overlap) / heads**2
    return risk, jnp.max(jnp.abs(moments.total - 1))


def _integrated(
    task: SingleLocation,
    activation: Activation,
    order: OrderParameters,
    method: Quadrature,
    with_error: bool,
    guarded: bool,
) -> tuple[Array, Array | None]:
    if not activation.pairwise:
        raise invalid("method", f"MonteCarlo(...), the only one that {type(activation).__name__} supports", method)
    scores = _scaled(activation, score_law(task, order))
    grid = method._grid(jax.tree.map(lambda leaf: leaf[None], order), task, activation)
    value, _ = _assembled(scores, grid)
    if guarded and not is_concrete(scores):
        nodes, frequencies = _laplace.needed(scores, jnp.asarray(1e-3))
        value = eqx.error_if(
            value,
            (nodes > grid.nodes) | (frequencies > grid.frequencies),
            "method: this state's scores spread too widely for the fixed node counts used under jit, grad or vmap; "
            "pass method=Quadrature(...).fitted(task, activation, order) or larger nodes=, frequencies=",
        )
    if not with_error:
        return value, None
    finer = _laplace.Grid(grid.tail / 100, -(-3 * grid.nodes // 2), -(-3 * grid.frequencies // 2))
    refined, missing = _assembled(scores, finer)
    return value, jnp.abs(value - refined) + 2 * missing


def _sampled(
    task: SingleLocation, activation: Activation, order: OrderParameters, method: MonteCarlo
) -> tuple[Array, Array]:
    arrays, static = eqx.partition(activation, eqx.is_inexact_array)

    def integrand(arrays: Any, chi: Array, signs: tuple[Array, ...]) -> Array:
        del signs
        return loss_limit(eqx.combine(arrays, static), chi)

    key_data = jax.random.key_data(jax.random.key(method.seed))
    return _montecarlo.average(integrand, arrays, score_law(task, order), samples=method.samples, key_data=key_data)
