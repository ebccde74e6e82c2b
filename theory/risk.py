"""The population risk E(m, r) as D → ∞."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory import _heads, _joint, _montecarlo
from theory._checks import instance, invalid, is_concrete
from theory._each import copied, each, finite
from theory._functional import each_risk_by_functionals
from theory.activation import Activation, HeadNormalized
from theory.fit import (
    Grid,
    Law,
    Model,
    State,
    apart,
    fit_each,
    flat,
    grid_at,
    grid_for,
    laid_out,
    laid_out_alone,
    law_of,
)
from theory.method import Method, MonteCarlo, Quadrature, default_method
from theory.order import OrderParameters
from theory.scores import score_law
from theory.task import SingleLocation

SCRAMBLES = 4  # further ones, for the error of Sobol points
_RECORDED = 1e-6  # accuracy of a simulation's recorded risks, far below its fluctuations
GUARD = 1e-3  # a state that the fixed nodes under jit do not integrate to this is an error


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
    1 for an output of zero, 1 − 1/L for uniform attention. An activation with kinks or jumps (`twice_differentiable`
    is False) has a sampled risk, but no derivatives of it: they are refused.

    Args:
        task: the task.
        activation: the attention activation.
        order: one state (no leading axes; `jax.vmap` over more).
        method: `Quadrature` (default where the activation allows it: softmax and softmax-1 to 1e-8, B-softmax to 1e-6)
            or `MonteCarlo` (default otherwise).
        with_error: also return an error estimate: for `Quadrature` the change under 1.5 times the nodes and a window
            with 100 times less outside, plus how far the weights' sum misses one; on Sobol points the
            standard deviation over scrambles; for `MonteCarlo` the standard error.

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


def evaluate_risk(
    task: SingleLocation,
    activation: Activation,
    order: OrderParameters,
    method: Method | Grid,
    *,
    with_error: bool = False,
    guarded: bool = False,
) -> tuple[Array, Array | None]:
    """(risk, error) without checks of shapes; `guarded` makes traced states that need more nodes an error."""
    if isinstance(method, MonteCarlo):
        return _sampled(task, activation, order, method)
    grid, known = _grid(task, activation, order, method)
    law = law_of(task, activation, order)
    value, _ = _integrated(law, laid_out_alone(grid, law))
    if guarded and not known:
        value = refused_if(value, _exceeds(law, grid))
    return value, _refinement(law, _checking(grid), value) if with_error else None


def risk_error(
    task: SingleLocation, activation: Activation, order: OrderParameters, method: Method, value: Array
) -> Float[Array, ""]:
    """The error of `value`, the risk by this method, which is not evaluated again."""
    if isinstance(method, MonteCarlo):
        return _sampled(task, activation, order, method)[1]
    grid, _ = _grid(task, activation, order, method)
    return _refinement(law_of(task, activation, order), _checking(grid), value)


def recorded_risk(
    task: SingleLocation, activation: Activation, order: OrderParameters, method: Method | None = None
) -> Float[Array, "*batch"]:
    """The risk of many states at once (any leading axes), node counts fitted to the hardest of them.

    To 1e-6 where the activation has an exact engine, unless a method is given. Trained leaves of the activation have
    the leading axes too. NaN where a state is not finite, or spreads so widely that no allowed number of nodes
    integrates it.
    """
    method = default_method(activation, _RECORDED) if method is None else method
    lead = order.m.shape[:-2]
    trained, rest = activation.split()
    states: State = flat((trained, order), len(lead))
    trained, order = jax.tree.map(np.asarray, states)
    task, rest = copied((task, rest), order.m.shape[0])
    risks, _ = each_risk((task, eqx.combine(trained, rest), order), method)
    return jnp.asarray(risks.reshape(lead))


def each_risk(
    models: Model, method: Method | None = None, *, with_error: bool = False
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"] | None]:
    """Risks and errors of many models (NumPy arrays with a leading axis), counts fitted to the hardest of them.

    NaN where a number is not finite, or scores spread so widely that no allowed number of nodes integrates them.
    """
    method = default_method(models[1]) if method is None else method
    left, found = finite(models), np.full((2, len(models[0].snr)), np.nan)
    by_head = with_error and isinstance(models[1], HeadNormalized)  # records of flows, without, have their own noise
    if by_head and isinstance(method, Quadrature) and method.nodes is None:
        found = each_risk_by_functionals(method, models, left)
        left = left & np.isnan(found[0])
    for fitted, own in fit_each(method, models, left) if left.any() else ():
        for chosen in apart(fitted, models, own):
            if isinstance(fitted, MonteCarlo):
                evaluate, shared = _sampled_at, (int(models[0].length[chosen][0]), fitted)
            else:
                grid = grid_at(fitted, models, chosen)
                grids = (grid, *_checking(grid)) if with_error else (grid,)
                evaluate, shared = _risk_on, tuple(laid_out(grid, models) for grid in grids)
            found = np.where(chosen, each(evaluate, models, chosen, shared), found)
    return found[0], found[1] if with_error else None


def _risk_on(model: Model, grids: tuple[Grid, ...]) -> tuple[Array, Array]:
    """The risk on the first grid, and its error by the others if there are any."""
    law = law_of(*model)
    value, _ = _integrated(law, grids[0])
    return value, _refinement(law, grids[1:], value) if grids[1:] else jnp.zeros(())


def _sampled_at(model: Model, shared: tuple[int, MonteCarlo]) -> tuple[Array, Array]:
    """As many tokens are drawn as the length says, which must be known."""
    task, activation, order = model
    return _sampled(eqx.tree_at(lambda task: task.length, task, shared[0]), activation, order, shared[1])


def loss_limit(activation: Activation, scores: Float[Array, "H L"], position: Any = 0) -> Float[Array, ""]:
    """Σ_ℓ (δ_ℓε − a_ℓ)² of one sample, ε = position."""
    attention = jnp.mean(activation.finite(scores), axis=0)
    return jnp.sum((jax.nn.one_hot(position, scores.shape[-1], dtype=scores.dtype) - attention) ** 2)


def _grid(
    task: SingleLocation, activation: Activation, order: OrderParameters, method: Method | Grid
) -> tuple[Grid, bool]:
    """The grid for one state, and whether the state is known."""
    if isinstance(method, (_heads.Grid, _joint.Grid)):
        return method, True
    if not isinstance(method, Quadrature):
        raise invalid("method", "Quadrature(...), MonteCarlo(...) or None", repr(method))
    trained, rest = activation.split()
    states: State = jax.tree.map(lambda leaf: leaf[None], (trained, order))
    return grid_for(method, task, rest, states), is_concrete(states, rest, task)


@eqx.filter_jit
def _integrated(law: Law, grid: Grid) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The risk, and for heads normalized each on its own the largest miss of a sum of weights:
    1 − (2/H) Σ_h c_h E σ_hε + (1/H²) Σ_hh' c_h c_h' E Σ_ℓ σ_hℓ σ_h'ℓ."""
    scores, form = law
    if isinstance(grid, _joint.Grid):
        return _joint.joint_risk(scores, form, grid), jnp.zeros(())
    moments = _heads.head_moments(scores, form.sink, grid)
    heads = scores.noise.shape[-1]
    share = form.scale / heads
    risk = 1 - 2 * share @ moments.hit + share @ moments.overlap @ share
    return risk, jnp.max(jnp.abs(moments.total - 1) * jnp.maximum(jnp.abs(share), share**2) * heads)


@eqx.filter_jit
def risk_and_slope(law: Law, grid: Grid) -> tuple[Float[Array, ""], Law]:
    """The risk, and its derivatives in what is `varied` of the law."""
    return eqx.filter_value_and_grad(lambda part: _integrated(eqx.combine(part, law), grid)[0])(varied(law))


def varied(law: Law) -> Law:
    """The law without what does not depend on the state: weights of components and length."""
    return eqx.filter(eqx.tree_at(lambda law: law[0].weights, law, None), eqx.is_inexact_array)


def _exceeds(law: Law, grid: Grid) -> Array:
    """Whether the state needs more than the grid for even the tolerance `GUARD`."""
    scores, form = law
    if isinstance(grid, _joint.Grid):
        return _joint.exceeds(scores, form, grid, GUARD)
    nodes, frequencies = _heads.needed(scores, form.sink, jnp.asarray(GUARD))
    return (nodes > grid.nodes) | (frequencies > grid.frequencies)


def _checking(grid: Grid) -> tuple[Grid, ...]:
    """Grids that tell how far the risk on this one may be off: a finer one that leaves less outside, scrambles."""
    if isinstance(grid, _heads.Grid):
        return (_heads.refined(grid),)
    return (_joint.refined(grid), *_joint.rescrambled(grid, SCRAMBLES, 2))


def _refinement(law: Law, checking: tuple[Grid, ...], value: Array) -> Array:
    """How far `value` may be off, by the grids that check its own."""
    finer, *scrambles = [laid_out_alone(grid, law) for grid in checking]
    refined, missing = _integrated(law, finer)
    if isinstance(finer, _heads.Grid):
        return jnp.abs(value - refined) + 2 * missing
    error = 1.1 * jnp.abs(value - refined)  # the refined value is not exact either
    if scrambles:
        others = [_integrated(law, grid)[0] for grid in scrambles]
        error = error + jnp.std(jnp.stack([value, *others]), ddof=1)
    return error


def refused_if(value: Array, beyond: Array) -> Array:
    """`value`, or a run-time error where a traced state needs more than the fixed nodes."""
    return eqx.error_if(
        value,
        beyond,
        "method: this state's scores spread too widely for the fixed node counts used under jit, grad or vmap; "
        "pass method=Quadrature(...).fitted(task, activation, order) or larger counts",
    )


def _sampled(
    task: SingleLocation, activation: Activation, order: OrderParameters, method: MonteCarlo
) -> tuple[Array, Array]:
    arrays, static = eqx.partition(activation.resolved(jnp.diagonal(order.r)), eqx.is_inexact_array)

    def integrand(arrays: Any, chi: Array, signs: tuple[Array, ...]) -> Array:
        del signs
        return loss_limit(eqx.combine(arrays, static), chi)

    law = score_law(task, order)
    if not activation.twice_differentiable:
        numbers, rest = eqx.partition(law, eqx.is_inexact_array)
        arrays, numbers = _underivable((arrays, numbers), type(activation).__name__)
        law = eqx.combine(numbers, rest)
    key_data = jax.random.key_data(jax.random.key(method.seed))
    return _montecarlo.average(integrand, arrays, law, samples=method.samples, key_data=key_data)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _underivable(values: Any, name: str) -> Any:
    """`values`, whose derivatives are refused: at kinks and jumps of the activation they are not those drawn."""
    del name
    return values


@_underivable.defjvp
def _underivable_jvp(name: str, primals: tuple[Any], tangents: tuple[Any]) -> Any:
    del primals, tangents
    expected = "a twice differentiable one, for derivatives of the sampled risk (its value, and SGD, work with any)"
    raise invalid("activation", expected, name)
