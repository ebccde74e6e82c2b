"""Exact Gaussian averages of attention weights normalized head by head: no sampling, a cost independent of L.

With 1/x = ∫ e^{u − x e^u} du the normalizer's sum over tokens becomes a product over tokens, hence a power. With
g(v) = exp(−e^v), G(v) = e^v g(v) and scores χ of one token,

    E σ_ε        = ∫ du  E[G(u+χ_ε)] φ(u)^{L−1},                                   φ(u) = E g(u+χ),
    E Σ_ℓ σ_ℓ²   = ∫ du { E[G₂(u+χ_ε)] φ^{L−1} + (L−1) E[G₂(u+χ)] φ_ε φ^{L−2} },   G₂(v) = e^{2v} g(v),
    E Σ_ℓ σ_ℓσ'_ℓ = ∬ du du' { E[G G']_ε φ^{L−1} + (L−1) E[G G'] φ_ε φ^{L−2} },    φ(u,u') = E g(u+χ) g(u'+χ').

A sink e^b in a head's normalizer (softmax-1) is one more factor, g(u+b).

The Gaussian averages are taken in Fourier space, where G is a Gamma function, ∫ G(v) e^{−ikv} dv = Γ(1−ik), and the
Gaussian is its characteristic function exp(ikM − ½kᵀqk): an entire function of means and covariances. So identical
heads, zero heads and singular overlaps are ordinary points, and automatic differentiation is right there to any order.
Frequencies sit on half-integers, k = (j+½)Δk, which makes every sum 2π/Δk-antiperiodic in u and removes the pole of
g − ½, whose transform is iΓ(1−ik)/k.

Windows follow the state: tails below ε by the bounds 1−g(v) ≤ e^{av} (0≤a≤1) and g(v) ≤ 1[v < log log 1/ε] + ε.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from theory._nodes import EDGE, bent_nodes, bent_span, half_again, rounded_count
from theory.activation import Activation, HeadForm, HeadNormalized
from theory.order import OrderParameters
from theory.scores import Scores, score_law
from theory.task import SingleLocation


class Moments(NamedTuple):
    """Averages that make up the risk, per head."""

    hit: Float[Array, " H"]  # E σ_hε
    overlap: Float[Array, "H H"]  # E Σ_ℓ σ_hℓ σ_h'ℓ
    total: Float[Array, " H"]  # E Σ_ℓ σ_hℓ plus the sink's share, computed as the rest is: 1 up to the error


class Grid(NamedTuple):
    """Nodes and accuracy of the integrals: tail mass ε, nodes in u, frequencies k > 0."""

    tail: float
    nodes: int
    frequencies: int


def refined(grid: Grid) -> Grid:
    """Half as many nodes again of both kinds, and less outside."""
    return Grid(grid.tail / 100, half_again(grid.nodes), half_again(grid.frequencies))


def law(task: SingleLocation, activation: Activation, order: OrderParameters) -> tuple[Scores, HeadForm]:
    """Law of the scores βχ, and the form of the heads."""
    assert isinstance(activation, HeadNormalized)
    scores, form = score_law(task, order), activation.head_form(order.heads)
    inverse = form.inverse_temperature
    matrix = inverse[:, None] * inverse[None, :]
    scaled = scores._replace(
        mean=scores.mean * inverse[None], signal=scores.signal * matrix[None], noise=scores.noise * matrix
    )
    return scaled, form


class Window(NamedTuple):
    """Where each head's integrands live (all (H,))."""

    left: Array  # first u
    bend: Array  # where the exponential left tail begins
    right: Array  # last u
    extent_left: Array  # support of the tables E G(x + √q z), left and right of 0
    extent_right: Array


def _left_extent(q: Array, log_tail: Array) -> Array:
    """x with E[1 − g(−x + √q z)] ≤ e^{−log_tail}: the best exponential bound."""
    return jnp.where(q <= 2 * log_tail, log_tail + q / 2, jnp.sqrt(2 * q * log_tail))


def window_of(scores: Scores, sink: Array | None, tail: float | Array) -> Window:
    scores, sink = jax.lax.stop_gradient((scores, sink))
    others = jnp.asarray(scores.length, jnp.float64) - 1
    noise = jnp.maximum(jnp.diagonal(scores.noise), 0)
    signal = jnp.maximum(jnp.diagonal(scores.signal, axis1=-2, axis2=-1), 0)
    log_tail = jnp.log(1 / tail)
    log_rare = log_tail + jnp.log(others)  # the L−1 other tokens add up
    left = -jnp.maximum((scores.mean + _left_extent(signal, log_tail)).max(0), _left_extent(noise, log_rare))
    log_edge = log_tail + EDGE
    edge = jnp.log(log_edge)
    right_signal = (edge - scores.mean + jnp.sqrt(2 * log_edge * signal)).max(0)
    right_noise = edge + jnp.sqrt(2 * log_edge * noise / others)
    # many tokens: (1 − ½(1−g(u)))^{L−1} ≤ ε, because half of the scores are positive
    share = 2 * log_edge / others
    right_many = jnp.where(share < 0.9, jnp.log(-jnp.log1p(-jnp.minimum(share, 0.9))), jnp.inf)
    right = jnp.minimum(jnp.minimum(right_signal, right_noise), right_many)
    bend = -jnp.maximum((scores.mean + signal).max(0), noise)
    if sink is not None:  # it cuts from the right, and its own share of the sum is around −b
        left, right = jnp.minimum(left, -sink - log_tail), jnp.minimum(right, edge - sink)
        bend = jnp.minimum(bend, -sink)
    bend = jnp.minimum(bend, right - 3.5)
    widest = jnp.maximum(signal.max(0), noise)
    extent_left = jnp.maximum(_left_extent(signal, log_tail).max(0), _left_extent(noise, log_rare))
    # G₂ = e^{2v} g is larger than g by a few powers of log 1/ε, and the other tokens multiply it by L−1
    extent_right = jnp.log(log_rare + EDGE) + jnp.sqrt(2 * log_rare * widest)
    return Window(left, jnp.maximum(bend, left), right, extent_left, extent_right)


def bandwidth_of(scores: Scores, log_tail: Array) -> Array:
    """Largest frequency that matters: |Γ(1−ik)| ~ e^{−πk/2}, damped by the variance a head keeps given another."""
    scores = jax.lax.stop_gradient(scores)
    # a derivative in a variance brings k², some e^6 where nothing else damps
    log_rare = log_tail + jnp.log(jnp.asarray(scores.length, jnp.float64) - 1) + 6
    covariance = jnp.concatenate([scores.noise[None], scores.signal])
    q = jnp.diagonal(covariance, axis1=-2, axis2=-1)
    heads = q.shape[-1]
    given = q[:, :, None] - covariance**2 / jnp.maximum(q, 1e-300)[:, None, :]
    given = jnp.where(jnp.eye(heads, dtype=bool), q[:, :, None], given)
    least = jnp.maximum(given.min(), 0)
    return 2 * log_rare / (jnp.sqrt(jnp.pi**2 / 4 + 2 * least * log_rare) + jnp.pi / 2)  # root of πk/2 + qk²/2


def needed(scores: Scores, sink: Array | None, tail: Array) -> tuple[Array, Array]:
    """Nodes in u and frequencies that hold the error near `tail`."""
    bandwidth = bandwidth_of(scores, jnp.log(1 / tail))
    return needed_in(window_of(scores, sink, tail), bandwidth, scores, sink, tail)


def needed_in(window: Window, bandwidth: Array, scores: Scores, sink: Array | None, tail: Array) -> tuple[Array, Array]:
    """`needed` where the window and the largest frequency are given; only the noise of the scores counts."""
    others = jnp.asarray(scores.length, jnp.float64) - 1
    log_rare = jnp.log(1 / tail) + jnp.log(others)
    span = bent_span(window.left, window.bend, window.right)
    # the trapezoid rule errs by the integrand's transform at 2π/Δt. φ^{L−1} is as sharp as the law of the largest of
    # L−1 scores, a Gumbel law of width √(q/2 log L), or one if that is less; its transform decays like Γ(1−ik)
    noise = jnp.maximum(jnp.diagonal(jax.lax.stop_gradient(scores.noise)), 0).min()
    width = jnp.sqrt(noise / (2 * jnp.log(others) + 1e-9))
    sharpest = 2 * log_rare / (jnp.pi * (jnp.maximum(width, 1) if sink is None else 1.0))  # g(u+b) is of width one
    # the bent left tail e^u, where it begins already small, has features of size one
    density = jnp.maximum(jnp.maximum(bandwidth, sharpest), (window.bend - window.left).max() / 2) / (2 * jnp.pi)
    period = window.extent_left + window.extent_right
    return span.max() * density * 1.2, period.max() * bandwidth / (2 * jnp.pi)


def rounded_counts(nodes: float, frequencies: float) -> tuple[int, int]:
    """What is needed as whole numbers, coarse enough for nearby states to share compiled code."""
    return rounded_count(nodes + 6), rounded_count(frequencies + 4)


def _gamma_phase(k: Array) -> Array:
    """arg Γ(1+ik), k > 0, by Stirling's series after shifting by 9."""
    shift = 9
    z = jax.lax.complex(jnp.full_like(k, 1.0 + shift), k)
    series = 1 / (12 * z) - 1 / (360 * z**3) + 1 / (1260 * z**5) - 1 / (1680 * z**7) + 1 / (1188 * z**9)
    phase = jnp.imag((z - 0.5) * jnp.log(z) - z + series)
    return phase - sum(jnp.arctan2(k, jnp.asarray(float(j))) for j in range(1, shift + 1))


def spectrum(window: Window, grid: Grid) -> tuple[Array, Array, Array]:
    """Frequencies of each head (H, K), and Γ(1−ik)Δk/2π in polar form: |Γ(1−ik)|² = πk/sinh πk."""
    spacing = 2 * jnp.pi / (window.extent_left + window.extent_right)
    k = jnp.arange(0.5, grid.frequencies)[None] * spacing[:, None]
    magnitude = jnp.sqrt(2 * jnp.pi * k) * jnp.exp(-jnp.pi * k / 2) / jnp.sqrt(-jnp.expm1(-2 * jnp.pi * k))
    return k, magnitude * spacing[:, None] / (2 * jnp.pi), _gamma_phase(k)


def wave_table(k: Array, amplitude: Array, phase: Array, x: Array) -> Array:
    """Γ(1−ik) e^{ikx} Δk/2π of one head, at any x: (..., K)."""
    lead = (None,) * x.ndim
    angle = k[lead] * x[..., None] - phase[lead]
    turn = jnp.exp(jax.lax.complex(jnp.zeros_like(angle), angle))
    return jax.lax.complex(amplitude, jnp.zeros_like(amplitude))[lead] * turn


def integration_nodes(window: Window, sink: Array | None, count: int) -> tuple[Array, Array, Array]:
    """Nodes u of each head (H, U), their weights, and e^{u+b} of the sink, by whose e^{−e^{u+b}} weights are less."""
    u, du = bent_nodes(window.left, window.bend, window.right, count)
    drained = jnp.zeros_like(u) if sink is None else jnp.exp(jnp.minimum(u + sink[:, None], 6.5))  # e^{−e^6.5} = 0
    return u, du * jnp.exp(-drained), drained


def power(phi: Array, exponent: Array) -> Array:
    """φ^exponent for a probability-like φ known up to rounding."""
    return jnp.exp(exponent * jnp.log(jnp.clip(phi, 1e-30, 1.0)))  # so that 1/φ³ is finite


def head_moments(scores: Scores, sink: Float[Array, " H"] | None, grid: Grid) -> Moments:
    """E σ_ε and E Σ_ℓ σ_hℓ σ_h'ℓ of σ = e^χ/(e^b + Σ e^χ), b = sink (−∞ if None); differentiable but for the length."""
    window = window_of(scores, sink, grid.tail)
    heads = scores.noise.shape[-1]
    others = jnp.asarray(scores.length, jnp.float64) - 1

    u, weight, drained = integration_nodes(window, sink, grid.nodes)
    k, amplitude, phase = spectrum(window, grid)
    # axes: head, component (0 is a token ℓ≠ε, 1 + c the token ε), u, k
    covariance = jnp.concatenate([scores.noise[None], scores.signal])
    q = jnp.diagonal(covariance, axis1=-2, axis2=-1).T
    mean = jnp.concatenate([jnp.zeros((1, heads)), scores.mean]).T
    low, high = -window.extent_left[:, None, None], window.extent_right[:, None, None]
    x = jnp.clip(u[:, None, :] + mean[:, :, None], low, high)  # beyond, the tables are constant to within the tail
    # a loop over heads, because its result is stored: as plain arithmetic XLA would repeat it in every use
    waves = jax.lax.map(lambda head: wave_table(*head), (k, amplitude, phase, x))
    cosine, sine = jnp.real(waves), jnp.imag(waves)
    wave = k[:, None, None, :]

    damping = 2 * jnp.exp(-0.5 * q[:, :, None] * k[:, None, :] ** 2)

    def average(table: Array) -> Array:
        return jnp.einsum("hcuk,hck->hcu", table, damping)

    big_g, big_g2, small_g = average(cosine), average(cosine + wave * sine), 0.5 - average(sine / wave)

    def integrand(signal: Array, noise: Array, signal_phi: Array, phi: Array) -> Array:
        """E[.]_ε φ^{L−1} + (L−1) E[.] φ_ε φ^{L−2}, the averages over components already taken."""
        return signal * power(phi, others) + others * noise * signal_phi * power(phi, others - 1)

    def mixed(table: Array) -> Array:
        return jnp.einsum("c,hcu->hu", scores.weights, table[:, 1:])

    phi, signal_phi = small_g[:, 0], mixed(small_g)
    hit = jnp.sum(weight * mixed(big_g) * power(phi, others), -1)
    total = jnp.sum(weight * integrand(mixed(big_g), big_g[:, 0], signal_phi, phi), -1)
    total = total + jnp.sum(weight * drained * signal_phi * power(phi, others), -1)
    square = jnp.sum(weight * integrand(mixed(big_g2), big_g2[:, 0], signal_phi, phi), -1)
    if heads == 1:
        return Moments(hit, square[:, None], total)

    def pair(ij: tuple[Array, Array]) -> Array:
        """E Σ_ℓ σ_iℓ σ_jℓ of one pair of heads."""
        i, j = ij
        variance = q[i][:, None, None] * k[i][None, :, None] ** 2 + q[j][:, None, None] * k[j][None, None, :] ** 2
        cross = covariance[:, i, j, None, None] * (k[i][:, None] * k[j][None, :])[None]
        same, opposite = jnp.exp(-0.5 * variance - cross), jnp.exp(-0.5 * variance + cross)
        even, odd = 2 * (opposite + same), 2 * (opposite - same)

        def product(a: Array, b: Array) -> tuple[Array, Array]:
            """Averages over token ε and over another, on u × u', of two functions with transforms a + ib."""
            left = jnp.concatenate([a[i] @ even, b[i] @ odd], axis=-1)
            right = jnp.concatenate([a[j], b[j]], axis=-1)
            signal = jnp.tensordot(left[1:] * scores.weights[:, None, None], right[1:], ((0, 2), (0, 2)))
            return signal, left[0] @ right[0].T

        def with_half(product: Array, one: Array) -> Array:
            """E g g' from E (g−½)(g'−½)."""
            return product + 0.5 * (one[i][:, None] + one[j][None, :]) - 0.25

        big = product(cosine, sine)
        small = product(-sine / wave, cosine / wave)
        area = weight[i][:, None] * weight[j][None, :]
        return jnp.sum(area * integrand(*big, with_half(small[0], signal_phi), with_half(small[1], phi)))

    i, j = np.triu_indices(heads, 1)
    # one pair after the other: a scan slices where a batch of pairs would gather, which is slow
    stored = i.size * covariance.shape[0] * (grid.nodes + grid.frequencies) ** 2
    off = jax.lax.map(jax.checkpoint(pair) if stored > 2e7 else pair, (jnp.asarray(i), jnp.asarray(j)))
    overlap = jnp.diag(square).at[i, j].set(off).at[j, i].set(off)
    return Moments(hit, overlap, total)
