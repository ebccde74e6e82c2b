"""The risk as a linear functional of the law of the informative token's scores, for many tasks with the same noise.

Given the scores of the L−1 other tokens, whose law N(0, r) the task does not enter, the risk is the average of one
function of χ_ε. In Fourier space that function is a table, made once; a task's risk is its sum against the
characteristic function of χ_ε, a mixture of Gaussians (the integrals are those of theory/_heads.py):

    R = R_0 + Re Σ_h Σ_k t_h(k) E e^{ikχ_hε}
            + Re Σ_{h<h'} Σ_{k,k'} { T⁺(k,k') E e^{i(kχ_hε + k'χ_h'ε)} + T⁻(k,k') E e^{i(kχ_hε − k'χ_h'ε)} }.

Means only turn phases here, so tables must reach wherever a mean shifts their argument: windows are the union of the
tasks' windows and wider than for one task.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Complex, Float

from theory import _heads
from theory._each import each, row
from theory._heads import Grid, Window, integration_nodes, power, spectrum, wave_table
from theory.activation import HeadForm
from theory.fit import MOST_NEEDED, Law, Model, check_rounding, law_of
from theory.method import Quadrature
from theory.scores import Scores

_FEWEST = 8  # tasks of one noise, from which on tables are worth their making
_MOST_NUMBERS = 2**24  # in the tables


class Functional(NamedTuple):
    """Tables of the functional; those of the noise, e^{−½ kᵀrk}, are in them already."""

    frequencies: Float[Array, "H K"]
    constant: Float[Array, ""]
    line: Complex[Array, "H K"]
    total_constant: Float[Array, " H"]  # of the sum of weights, computed as the rest is: 1 up to the error
    total_line: Complex[Array, "H K"]
    plus: Complex[Array, "P K K"]  # pairs of heads h < h'
    minus: Complex[Array, "P K K"]


def common_window(windows: Any, means: Any) -> Window:
    """The window of several tasks, in which tables hold at every node shifted by any of the means.

    Args:
        windows: theirs, NumPy arrays (N, H).
        means: of their informative tokens' scores, (N, C, H).
    """
    shifts = means.reshape(-1, means.shape[-1])
    left, right = windows.left.min(0), windows.right.max(0)
    bend = np.maximum(np.minimum(windows.bend.min(0), right - 3.5), left)
    extent_left = np.maximum(windows.extent_left.max(0), -left - np.minimum(shifts.min(0), 0))
    extent_right = np.maximum(windows.extent_right.max(0), right + np.maximum(shifts.max(0), 0))
    return Window(left, bend, right, extent_left, extent_right)


def functional(noise: Float[Array, "H H"], length: Array, form: HeadForm, window: Window, grid: Grid) -> Functional:
    """The functional of heads normalized each on its own, whose scores of other tokens are N(0, noise)."""
    heads, others = noise.shape[-1], jnp.asarray(length, jnp.float64) - 1
    share, q = form.scale / heads, jnp.diagonal(noise)
    u, weight, drained = integration_nodes(window, form.sink, grid.nodes)
    k, amplitude, phase = spectrum(window, grid)
    wave = jax.lax.map(lambda head: wave_table(*head), (k, amplitude, phase, u))  # transform of G, (H, U, K)
    step = wave * _complex(0 * k, 1 / k)[:, None, :]  # of g − ½
    square = wave * _complex(1 + 0 * k, -k)[:, None, :]  # of G₂
    damping = _complex(jnp.exp(-0.5 * q[:, None] * k**2))

    def average(table: Array) -> Array:
        """Over another token."""
        return 2 * jnp.real(jnp.einsum("huk,hk->hu", table, damping))

    phi = 0.5 + average(step)
    all_others, others_but_one = weight * power(phi, others), weight * others * power(phi, others - 1)

    def line(on_own: Array, table: Array, on_step: Array) -> tuple[Array, Array]:
        """Coefficients and constant of Σ_u {on_own E F(u+χ_ε) + on_step E g(u+χ_ε)}, F by its transform."""
        sums = jnp.einsum("hu,huk->hk", _complex(2 * on_own), table)
        return sums + jnp.einsum("hu,huk->hk", _complex(2 * on_step), step), 0.5 * jnp.sum(on_step, -1)

    hit, _ = line(all_others, wave, jnp.zeros_like(phi))
    total, total_constant = line(all_others, wave, others_but_one * average(wave) + drained * all_others)
    own, own_constant = line(all_others, square, others_but_one * average(square))
    constant = 1 + share**2 @ own_constant
    lines = _complex(-2 * share)[:, None] * hit + _complex(share**2)[:, None] * own

    def pair(ij: tuple[Array, Array]) -> tuple[Array, ...]:
        i, j = ij
        variance = q[i] * k[i][:, None] ** 2 + q[j] * k[j][None, :] ** 2
        cross = 2 * noise[i, j] * k[i][:, None] * k[j][None, :]
        plus, minus = (_complex(jnp.exp(-0.5 * (variance + sign * cross))) for sign in (1, -1))

        def product(table: Array) -> Array:
            """E F F' over another token, on u × u'."""
            own, other = table[i], table[j]
            return 2 * jnp.real(own @ plus @ other.T + own @ minus @ jnp.conj(other).T)

        def transformed(values: Array, table: Array, *, conjugate: bool) -> Array:
            other = jnp.conj(table[j]) if conjugate else table[j]
            return table[i].T @ _complex(values) @ other

        both = product(step) + 0.5 * (phi[i][:, None] + phi[j][None, :]) - 0.25
        area = 4 * share[i] * share[j] * weight[i][:, None] * weight[j][None, :]  # 2 of h < h', 2 of the real part
        signal = area * power(both, others)
        missed = area * others * product(wave) * power(both, others - 1)
        tables = [
            (transformed(signal, wave, conjugate=c) + transformed(missed, step, conjugate=c)) * decay
            for c, decay in ((False, plus), (True, minus))
        ]
        halves = [_complex(0.5 * missed.sum(1)) @ step[i], _complex(0.5 * missed.sum(0)) @ step[j]]
        return *tables, *halves, missed.sum() / 8

    pairs = tuple(jnp.asarray(side) for side in np.triu_indices(heads, 1))
    plus, minus, first, second, constants = jax.lax.map(pair, pairs)
    lines = lines.at[pairs[0]].add(first).at[pairs[1]].add(second) * damping
    return Functional(k, constant + constants.sum(), lines, total_constant, total * damping, plus, minus)


def _complex(real: Array, imaginary: Array | None = None) -> Array:
    return jax.lax.complex(real, jnp.zeros_like(real) if imaginary is None else imaginary)


def risk_by(
    tables: Functional, scores: Scores, form: HeadForm, *, spread: bool
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The risk of one task, and the largest miss of a head's sum of weights; `spread`: whether signal ≠ noise."""
    k, share = tables.frequencies, form.scale / scores.noise.shape[-1]
    excess = scores.signal - scores.noise[None]
    angle = k[None] * scores.mean[..., None]
    turn = _complex(jnp.cos(angle), jnp.sin(angle))  # (C, H, K)
    along = turn
    if spread:
        variance = jnp.diagonal(excess, axis1=-2, axis2=-1)
        along = turn * _complex(jnp.exp(-0.5 * variance[..., None] * k[None] ** 2))
    mean = jnp.einsum("c,chk->hk", _complex(scores.weights), along)
    total = tables.total_constant + jnp.sum(jnp.real(tables.total_line * mean), -1)
    risk = tables.constant + jnp.sum(jnp.real(tables.line * mean))
    missing = jnp.max(jnp.abs(total - 1) * jnp.maximum(jnp.abs(share), share**2) * share.size)
    if share.size == 1:
        return risk, missing

    def pair(part: tuple[Array, ...]) -> Array:
        plus, minus, i, j = part
        if not spread:
            held = turn[:, i] @ plus, turn[:, i] @ minus
        else:
            first, second = k[i][None, :, None], k[j][None, None, :]
            own, other, both = (excess[:, a, b, None, None] for a, b in ((i, i), (j, j), (i, j)))
            variance, cross = own * first**2 + other * second**2, 2 * both * first * second
            held = tuple(
                jnp.einsum("ck,ckl->cl", turn[:, i], table[None] * _complex(jnp.exp(-0.5 * (variance + sign * cross))))
                for table, sign in ((plus, 1), (minus, -1))
            )
        return scores.weights @ jnp.sum(jnp.real(held[0] * turn[:, j] + held[1] * jnp.conj(turn[:, j])), -1)

    i, j = (jnp.asarray(side) for side in np.triu_indices(share.size, 1))
    return risk + jnp.sum(jax.lax.map(pair, (tables.plus, tables.minus, i, j))), missing


class _Prepared(NamedTuple):
    """What functionals need to know of a task."""

    law: Law
    windows: Window  # (2, H): at the tail of the value, and at that of its error
    bandwidths: Float[Array, "2"]
    needed: Float[Array, "2"]  # nodes and frequencies of the task alone


def each_risk_by_functionals(
    method: Quadrature, models: Model, chosen: Bool[np.ndarray, " N"]
) -> Float[np.ndarray, "2 N"]:
    """Risks and errors of those chosen models, of heads normalized each on its own, that share the noise with several.

    NaN for the others, and for all that need too many nodes. Counts are fitted to the hardest.
    """
    found = np.full((2, len(chosen)), np.nan)
    if np.count_nonzero(chosen) < _FEWEST:
        return found
    check_rounding(method, models[0], chosen)
    grids = (Grid(method.tail, 0, 0), Grid(method.tail / 100, 0, 0))
    prepared = each(_prepared_at, models, chosen, jnp.asarray([grid.tail for grid in grids]))
    groups = _of_one_noise(prepared.law, chosen & (prepared.needed.max(1) <= MOST_NEEDED))
    together = [_common(prepared, own) for own in groups]
    needed = np.array([_needed(one, grids[0].tail) for one in together]).reshape(-1, 2)
    heads = models[2].m.shape[-2]
    fits = (needed.max(1) <= MOST_NEEDED) & (heads * (heads - 1) * (1.5 * needed[:, 1]) ** 2 <= _MOST_NUMBERS)
    if not fits.any():
        return found
    value = Grid(method.tail, *_heads.rounded_counts(*needed[fits].max(0)))
    grids = (value, _heads.refined(value))
    for own, one in ((groups[i], together[i]) for i in np.flatnonzero(fits)):
        scores, form = one.law
        tables = tuple(_tables(scores.noise, scores.length, form, row(one.windows, i), g) for i, g in enumerate(grids))
        excess = prepared.law[0].signal[own] - prepared.law[0].noise[own][:, None]
        found = np.where(own, each(_risk_at, prepared.law, own, (tables, bool(np.any(excess)))), found)
    return found


def _of_one_noise(laws: Law, chosen: Bool[np.ndarray, " N"]) -> list[Bool[np.ndarray, " N"]]:
    """The chosen laws in groups that differ in the informative token only, without small groups."""
    if not chosen.any():
        return []
    scores, form = laws
    others = [leaf.reshape(len(chosen), -1) for leaf in (scores.noise, scores.length, *jax.tree.leaves(form))]
    _, group = np.unique(np.concatenate(others, axis=1)[chosen], axis=0, return_inverse=True)
    label = np.full(len(chosen), -1)
    label[chosen] = group.reshape(-1)
    return [label == one for one in range(label.max() + 1) if np.count_nonzero(label == one) >= _FEWEST]


def _common(prepared: _Prepared, own: Bool[np.ndarray, " N"]) -> _Prepared:
    """One noise, with the windows and the largest frequencies of all tasks that share it."""
    windows = [common_window(row(prepared.windows, (own, tail)), prepared.law[0].mean[own]) for tail in range(2)]
    whole = prepared._replace(
        law=row(prepared.law, np.flatnonzero(own)[0]),
        windows=jax.tree.map(lambda *same: np.stack(same), *windows),
        bandwidths=prepared.bandwidths[own].max(0),
        needed=prepared.needed[own].max(0),
    )
    return jax.tree.map(jnp.asarray, whole)


def _needed(one: _Prepared, tail: float) -> tuple[float, float]:
    scores, form = one.law
    found = _needed_in(row(one.windows, 0), one.bandwidths[0], scores, form.sink, jnp.asarray(tail))
    return float(found[0]), float(found[1])


_needed_in = eqx.filter_jit(_heads.needed_in)
_tables = eqx.filter_jit(functional)


def _prepared_at(model: Model, tails: Float[Array, "2"]) -> _Prepared:
    scores, form = law_of(*model)
    scores = scores._replace(length=jnp.asarray(scores.length, jnp.float64))  # NaN where there is no point
    windows = jax.vmap(lambda tail: _heads.window_of(scores, form.sink, tail))(tails)
    bandwidths = jax.vmap(lambda tail: _heads.bandwidth_of(scores, jnp.log(1 / tail)))(tails)
    needed = _heads.needed_in(row(windows, 0), bandwidths[0], scores, form.sink, tails[0])
    return _Prepared((scores, form), windows, bandwidths, jnp.stack(needed))


def _risk_at(law: Law, shared: tuple[tuple[Functional, ...], bool]) -> tuple[Array, Array]:
    (tables, finer), spread = shared
    risk, _ = risk_by(tables, *law, spread=spread)
    refined, missing = risk_by(finer, *law, spread=spread)
    return risk, jnp.abs(risk - refined) + 2 * missing
