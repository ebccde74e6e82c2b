"""How sensitive weights are to logits: the Jacobian's spectral norm, bounded and measured (docs/limits.md §5)."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from theory._checks import invalid, non_negative, positive, typed_key, whole
from theory.activation import BayesSoftmax
from theory.limits._rows import FORMS, floats, non_negative_rows, one_of, rows_of

_ROUNDINGS = 4  # times the largest rounding error seen: what lies below is taken for rounding


class JacobianNorm(eqx.Module):
    """Spectral norms by power iteration, one per row (per matrix of heads and tokens if joint)."""

    value: Float[Array, "..."]  # never above the norm, but for rounding; 0 where no larger than rounding seen
    residual: Float[Array, "..."]  # ‖JᵀJv − σ²v‖/σ² of the last direction v, σ the value; 0 where that is 0
    converged: Bool[Array, "..."]  # residual within the tolerance
    iterations: Int[Array, "..."]  # the most that any row took


def jacobian_bound(weights: Any, *, slope: Any = 1.0, where: Any = None) -> Float[Array, "..."]:
    """‖J‖₂ ≤ 2 max_i α_i(1−α_i) · max|F'/F| for weights F(l_i)/Σ_j F(l_j); no more than ½ max|F'/F|.

    Softmax at temperature T has |F'/F| = 1/T. Attained by two tokens of weight ½ with the same F'/F.

    Args:
        weights: α ≥ 0, (..., L), rows that sum to 1.
        slope: max|F'/F| over the row's logits, a number or (...).
        where: True where a token may be attended.

    Returns:
        The bound (...).

    Raises:
        ValueError: a weight or slope is negative or not finite, or a shape does not fit.

    >>> import jax.numpy as jnp
    >>> from theory.limits import jacobian_bound
    >>> jacobian_bound(jnp.array([[0.5, 0.5], [0.9, 0.1]])).tolist()
    [0.5, 0.18...]
    """
    rows = non_negative_rows(weights, where=where)
    w = rows.weights.reshape(*rows.lead, -1)
    slope = jnp.broadcast_to(non_negative("slope", slope), rows.lead).astype(w.dtype)
    top = jax.nn.one_hot(jnp.argmax(w, axis=-1), w.shape[-1], dtype=jnp.bool_)
    rest = jnp.sum(jnp.where(top, 0, w), axis=-1)  # 1 − α of the largest, which may have no digits left
    others = jnp.max(jnp.where(top, 0, w * (1 - w)), axis=-1)
    return 2 * jnp.maximum(jnp.max(w, axis=-1) * rest, others) * slope


def softmax_jacobian_bound(temperature: Any, *, form: str = "sharp") -> Float[Array, "..."]:
    """Bound on ‖J‖₂ of softmax at temperature T whatever the logits: 1/(2T), attained at weights (½, ½).

    The printed min{1/(4T), √2} is false: 1/(4T) bounds single entries of J, and √2 bounds a displacement of weights,
    no derivative; at (½, ½) the norm is twice the first and, for T < 1/(2√2), above the second.

    Args:
        temperature: T > 0, any shape.
        form: "sharp" or "printed".

    Raises:
        ValueError: T is not positive, or an unknown form.

    >>> from theory.limits import softmax_jacobian_bound
    >>> softmax_jacobian_bound([1.0, 0.1]).tolist(), softmax_jacobian_bound([1.0, 0.1], form="printed").tolist()
    ([0.5, 5.0], [0.25, 1.414...])
    """
    one_of("form", form, FORMS)
    temperature = positive("temperature", temperature)
    return 1 / (2 * temperature) if form == "sharp" else jnp.minimum(1 / (4 * temperature), jnp.sqrt(2.0))


def softmax_difference_bound(temperature: Any, size: Any, *, form: str = "sharp") -> Float[Array, "..."]:
    """Bound on ‖α(l+εv) − α(l)‖/ε of softmax, ‖v‖ = 1: min{1/(2T), √2/ε}; printed min{1/(4T), √2}, false.

    Args:
        temperature: T > 0, any shape.
        size: ε > 0, of a shape that broadcasts with it.
        form: "sharp" or "printed" (which does not depend on ε).

    Raises:
        ValueError: a number is not positive, or an unknown form.

    >>> from theory.limits import softmax_difference_bound
    >>> softmax_difference_bound(0.01, [1e-3, 0.1, 10.0]).tolist()
    [50.0, 14.14..., 0.1414...]
    """
    one_of("form", form, FORMS)
    temperature, size = positive("temperature", temperature), positive("size", size)
    axes = max(temperature.ndim, size.ndim)
    t, e = (part.reshape((1,) * (axes - part.ndim) + part.shape) for part in (temperature, size))
    if form == "printed":
        return softmax_jacobian_bound(t, form=form) + 0 * e
    return jnp.minimum(1 / (2 * t), jnp.sqrt(2.0) / e)


def softmax_jacobian_norm(
    weights: Any, *, temperature: Any = 1.0, where: Any = None, steps: int = 60
) -> Float[Array, "..."]:
    """‖(diag α − ααᵀ)/T‖₂ from its secular equation: the root λ of Σ_i α_i/(α_i−λ) = 0 between the two largest weights.

    The root is found by bisection of log λ; if the largest weight occurs twice it is the root itself.

    Args:
        weights: α ≥ 0, (..., L), rows that sum to 1.
        temperature: T > 0, a number or (...).
        where: True where a token may be attended.
        steps: halvings; 60 leave only rounding in float64.

    Returns:
        (...); 0 for rows of one token.

    Raises:
        ValueError: a weight is negative or not finite, T is not positive, or a shape does not fit.

    >>> import jax.numpy as jnp
    >>> from theory.limits import softmax_jacobian_norm
    >>> norms = softmax_jacobian_norm(jnp.array([[0.5, 0.5], [0.9, 0.1]]), temperature=0.5)
    >>> [round(float(norm), 6) for norm in norms]
    [1.0, 0.36]
    """
    rows = non_negative_rows(weights, where=where)
    w = rows.weights.reshape(*rows.lead, -1)
    temperature = jnp.broadcast_to(positive("temperature", temperature), rows.lead).astype(w.dtype)
    if w.shape[-1] == 1:
        return jnp.zeros(rows.lead, w.dtype)
    return _secular(w, whole("steps", steps, 1)) / temperature


def jacobian_norm(
    activation: Any,
    logits: Any,
    *,
    where: Any = None,
    joint: Any = None,
    tolerance: float | int = 1e-3,
    iterations: int = 2000,
    key: Any = None,
) -> JacobianNorm:
    """‖J‖₂ of any activation at the given logits, by power iteration on JᵀJ with products J·v and Jᵀ·u.

    All rows are iterated at once until each has ‖JᵀJv − σ²v‖ ≤ tolerance·σ². Some singular value then lies within
    tolerance/2 of the value, relatively; as the start is random it is the largest one, and where that is not
    nearly repeated the error is of the order of tolerance². Axes before the last two are gone through one by one.
    Derivatives of an activation have their own rounding besides: of softmax, some ε/T absolutely
    (`softmax_jacobian_norm` keeps all digits of small norms). It shows where Jᵀu·v and u·Jv part, u = Jv/‖Jv‖. A row
    ends as well, not converged, where rounding keeps its residual from falling; a norm that is no more than that is 0.

    Args:
        activation: a `theory.Activation`, or any function that maps logits (..., L) to weights of the same shape.
        logits: l, (..., L), or whatever axes the activation takes.
        where: True where a token may be attended; the others get logit −∞ and no derivative. A row without any has
            norm 0.
        joint: whether the last two axes (heads and tokens) share one normalizer: the Jacobian is then that of
            both together, and the answer has axes (...) without them. Unless given: True for `BayesSoftmax` only.
        tolerance: of the residual.
        iterations: after which it stops; `converged` says where that was too early.
        key: typed key of the starting directions, `jax.random.key(0)` unless given.

    Returns:
        `JacobianNorm`.

    Raises:
        ValueError: a number is not finite, an option out of range, or the activation changes the shape.

    >>> import jax.numpy as jnp
    >>> import theory as th
    >>> from theory.limits import jacobian_norm
    >>> found = jacobian_norm(th.Softmax(0.5), jnp.zeros((1, 2)))  # weights (1/2, 1/2): 1/(2T)
    >>> round(float(found.value[0]), 6), bool(found.converged[0])
    (1.0, True)
    """
    logits, where, axes = _prepared(activation, logits, where, joint)
    if not (isinstance(tolerance, (int, float)) and 0 < tolerance < 1):
        raise invalid("tolerance", "a number between 0 and 1", repr(tolerance))
    key = jax.random.key(0) if key is None else typed_key("key", key)
    limit = jnp.asarray(whole("iterations", iterations, 1))
    return _power(activation, logits, where, axes, tolerance, limit, key)


def directional_gradient(
    activation: Any,
    logits: Any,
    size: Any,
    *,
    key: Any,
    directions: int = 1,
    where: Any = None,
    joint: Any = None,
) -> Float[Array, "directions ..."]:
    """‖α(l+εv) − α(l)‖/ε in random unit directions v: up to a hundred times below ‖J‖₂ for long rows.

    In float32 the difference of weights is rounded: below ε = 1e-3 use float64.

    Args:
        activation, logits, where, joint: as in `jacobian_norm`.
        size: ε > 0, one number; new ones recompile nothing.
        key: typed key of the directions.
        directions: how many.

    Returns:
        (directions, ...).

    Raises:
        ValueError: as `jacobian_norm`.

    >>> import jax, jax.numpy as jnp
    >>> import theory as th
    >>> from theory.limits import directional_gradient, jacobian_norm
    >>> logits = jax.random.normal(jax.random.key(0), (4, 500))
    >>> found = directional_gradient(th.Softmax(), logits, 1e-3, key=jax.random.key(1), directions=3)
    >>> found.shape, bool(jnp.all(found < jacobian_norm(th.Softmax(), logits).value))
    ((3, 4), True)
    """
    logits, where, axes = _prepared(activation, logits, where, joint)
    size = positive("size", size, 0).astype(logits.dtype)
    keys = jax.random.split(typed_key("key", key), whole("directions", directions, 1))
    return _differences(activation, logits, where, axes, size, keys)


def _prepared(activation: Any, logits: Any, where: Any, joint: Any) -> tuple[Array, Array, tuple]:
    if not callable(activation):
        raise invalid("activation", "a theory.Activation or a function", repr(activation))
    joint = isinstance(activation, BayesSoftmax) if joint is None else joint
    if not isinstance(joint, bool):
        raise invalid("joint", "True, False or None", repr(joint))
    if where is None:
        (logits,) = floats("logits", logits, least_axes=2 if joint else 1)
        where = jnp.ones(logits.shape, bool)
    else:
        rows = rows_of(logits, where=where)  # what is masked may hold anything
        logits, where = (part.reshape(*rows.lead, -1) for part in (rows.weights, rows.present))
    axes = (-2, -1) if joint else (-1,)
    return logits, where, axes


def _map(activation: Callable[[Array], Array], where: Array, axes: tuple) -> Callable[[Array], Array]:
    """The activation on the row's own tokens; a row without any gets logits it can bear and gives 0."""
    bearable = where | ~jnp.any(where, axis=axes, keepdims=True)

    def weights(logits: Array) -> Array:
        given = jnp.where(bearable, logits, -jnp.inf)
        answer = activation(given[None])[0] if given.ndim == 1 else activation(given)
        if answer.shape != logits.shape:
            raise invalid("activation", f"a map that keeps the shape {logits.shape}", f"shape {answer.shape}")
        return jnp.where(where, answer.astype(logits.dtype), 0)

    return weights


def _length(vector: Array, axes: tuple) -> Array:
    largest = jnp.max(jnp.abs(vector), axis=axes, keepdims=True)  # squares of small numbers would be 0
    scale = jnp.where(largest > 0, largest, 1)
    return scale * jnp.sqrt(jnp.sum((vector / scale) ** 2, axis=axes, keepdims=True))


def _units(key: Array, where: Array, axes: tuple, dtype: Any) -> Array:
    """Random unit vectors on the tokens that may be attended."""
    vector = jnp.where(where, jax.random.normal(key, where.shape, dtype), 0)
    norm = _length(vector, axes)
    return vector / jnp.where(norm > 0, norm, 1)


def _by_block(function: Callable[[Array, Array, Array], Any], logits: Array, where: Array, key: Array) -> Any:
    """function(logits, where, key) for each (H, L) block of (..., H, L): the working arrays are those of one block."""
    if logits.ndim < 3:
        return function(logits, where, key)
    lead, block = logits.shape[:-2], logits.shape[-2:]
    blocks = [part.reshape(-1, *block) for part in (logits, where)]
    keys = jax.random.split(key, blocks[0].shape[0])
    answers = jax.lax.map(lambda args: function(*args), (*blocks, keys))
    return jax.tree.map(lambda answer: answer.reshape(*lead, *answer.shape[1:]), answers)


@eqx.filter_jit
def _power(activation, logits, where, axes, tolerance, iterations, key):
    def block(logits, where, key):
        return _power_of_block(activation, logits, where, axes, tolerance, iterations, key)

    found = _by_block(block, logits, where, key)
    return eqx.tree_at(lambda f: f.iterations, found, jnp.max(found.iterations))


def _power_of_block(activation, logits, where, axes, tolerance, iterations, key):
    weights = _map(activation, where, axes)
    _, forward = jax.linearize(weights, logits)
    backward = jax.linear_transpose(forward, logits)

    def settled(residual, value, rounding):
        return (residual <= tolerance) | (residual * value <= _ROUNDINGS * rounding)

    def go_on(state):
        return (state[0] < iterations) & ~jnp.all(settled(*state[2:]))

    def step(state):
        count, vector, *_, rounding = state
        image = forward(vector)
        value = _length(image, axes)
        usable = value > 0
        safe = jnp.where(usable, value, 1)
        back = jnp.where(where, backward(image / safe)[0], 0)  # JᵀJv/‖Jv‖, near ‖Jv‖ v
        residual = jnp.where(usable, _length(back - value * vector, axes) / safe, 0)
        size = _length(back, axes)
        apart = jnp.abs(jnp.sum(back * vector, axis=axes, keepdims=True) - value)  # 0 but for rounding
        rounding = jnp.maximum(rounding, apart)
        stay = settled(residual, value, rounding) | (size == 0)
        vector = jnp.where(stay, vector, back / jnp.where(size > 0, size, 1))
        return count + 1, vector, residual, value, rounding

    start = _units(key, where, axes, logits.dtype)
    ones = jnp.ones_like(_length(start, axes))
    state = (jnp.zeros((), jnp.int32), start, ones * jnp.inf, ones, 0 * ones)
    count, _, residual, value, rounding = jax.lax.while_loop(go_on, step, state)
    none = value <= _ROUNDINGS * rounding  # no digit of it is left
    value, residual = (jnp.squeeze(jnp.where(none, 0, part), axes) for part in (value, residual))
    return JacobianNorm(value, residual, residual <= tolerance, count)


@eqx.filter_jit
def _differences(activation, logits, where, axes, size, keys):
    def block(logits, where, key):
        weights = _map(activation, where, axes)
        moved = weights(logits + size * _units(key, where, axes, logits.dtype))
        return jnp.squeeze(_length(moved - weights(logits), axes), axes) / size

    return jax.lax.map(lambda key: _by_block(block, logits, where, key), keys)


@eqx.filter_jit
def _secular(weights, steps):
    two = jax.lax.top_k(weights, 2)[0]
    high, low = two[..., 0], two[..., 1]
    floor = jnp.maximum(low, jnp.finfo(weights.dtype).tiny)

    def halve(_, bracket):
        below, above = bracket
        middle = jnp.sqrt(below) * jnp.sqrt(above)
        gaps = weights - middle[..., None]
        # decreasing in λ times −1: positive while λ is below the root
        under = jnp.sum(weights / jnp.where(gaps == 0, 1, gaps), axis=-1) < 0
        return jnp.where(under, middle, below), jnp.where(under, above, middle)

    below, above = jax.lax.fori_loop(0, steps, halve, (floor, jnp.maximum(high, floor)))
    return jnp.where(low > 0, jnp.sqrt(below) * jnp.sqrt(above), 0)
