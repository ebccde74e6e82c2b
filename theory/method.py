"""How Gaussian averages are evaluated: the exact engines or sampling, with their accuracy."""

import equinox as eqx

from theory._checks import invalid, whole
from theory.activation import Activation, BayesSoftmax, HeadNormalized
from theory.order import OrderParameters
from theory.task import SingleLocation


class Quadrature(eqx.Module):
    """The exact engines: cost independent of L, no noise.

    Windows always follow the state. So do node counts, when the state is known numbers; inside `jit`, `grad` or
    `vmap`, where it is not, they are fixed, and a state that needs far more is a run-time error. `fitted` fixes
    the counts a given state needs.

    Heads normalized each on its own (softmax, softmax-1) take one- and two-head integrals: `nodes` in the
    integration variable and Fourier `frequencies`. A joint normalizer (B-softmax, the Bayes risk) takes `nodes` and an
    average over one token's Gaussian vector on `points`: a product of one rule per principal axis while that is small
    (a tuple of counts, narrow axes first), else scrambled Sobol points (their number), whose error the
    tolerance does not bound: ask for it with `with_error`.

    Args:
        tolerance: absolute error aimed at, 1e-13 … 1e-2.
        nodes: nodes in the integration variable (default: as the state needs).
        frequencies: Fourier nodes (default: as the state needs).
        points: points in a token's Gaussian vector (default: as the state needs).
    """

    tolerance: float = eqx.field(static=True, default=1e-8)
    nodes: int | None = eqx.field(static=True, default=None)
    frequencies: int | None = eqx.field(static=True, default=None)
    points: tuple[int, ...] | int | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        if not (isinstance(self.tolerance, (float, int)) and 1e-13 <= self.tolerance <= 1e-2):
            raise invalid("tolerance", "a number from 1e-13 (float64 reaches no further) to 1e-2", repr(self.tolerance))
        if (self.nodes is None) != (self.frequencies is None and self.points is None) or (
            self.frequencies is not None and self.points is not None
        ):
            got = f"{self.nodes}, {self.frequencies}, {self.points}"
            raise invalid("nodes, frequencies, points", "nodes with frequencies, nodes with points, or none", got)
        if self.nodes is not None:
            whole("nodes", self.nodes, 4)
        if self.frequencies is not None:
            whole("frequencies", self.frequencies, 4)
        if self.points is not None:
            for count in self.points if isinstance(self.points, tuple) else (self.points,):
                whole("points", count, 1 if isinstance(self.points, tuple) else 64)

    @property
    def tail(self) -> float:
        """Mass left outside the windows: errors are up to about fifteen times that."""
        return self.tolerance / 20

    def at_least(self, other: "Quadrature") -> "Quadrature":
        """This method with no fewer nodes of any kind than the other."""

        def most(a: int | None, b: int | None) -> int | None:
            return a if b is None else b if a is None else max(a, b)

        mine, theirs = self.points, other.points
        if isinstance(mine, tuple) and isinstance(theirs, tuple):
            points = tuple(max(a, b) for a, b in zip(mine, theirs, strict=True))
        else:  # Sobol points wherever one of them needs them
            several = [p for p in (mine, theirs) if isinstance(p, int)]
            points = max(several) if several else mine if theirs is None else theirs
        return Quadrature(
            self.tolerance, most(self.nodes, other.nodes), most(self.frequencies, other.frequencies), points
        )

    def coarsened(self) -> "Quadrature":
        """This method with counts rounded up to 1, 2, 3, 4, 6, 8, 12, …, for many states to share compiled code."""

        def up(count: int) -> int:
            power = 2 ** (int(count).bit_length() - 1)
            return next(n for n in (power, 3 * power // 2, 2 * power) if n >= count)

        points = tuple(up(count) for count in self.points) if isinstance(self.points, tuple) else self.points
        nodes, frequencies = (None if n is None else up(n) for n in (self.nodes, self.frequencies))
        return Quadrature(self.tolerance, nodes, frequencies, points)

    def fitted(self, task: SingleLocation, activation: Activation, order: OrderParameters) -> "Quadrature":
        """This method with the node counts that the given state (or the hardest of several) needs.

        Wide scores need many nodes, zero or identical heads many frequencies: give both ends of what will be met.
        Trained leaves of the activation have no leading axes, or those of the order parameters.
        """
        from theory.fit import fit, flat, repeated  # which needs this class

        trained, rest = activation.split()
        lead = order.m.shape[:-2]
        return fit(self, task, rest, flat((repeated(trained, lead), order), len(lead)))


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


def default_method(activation: Activation, tolerance: float | None = None) -> Method:
    """The exact engine that the activation allows: to 1e-8 head by head, to 1e-6 with a joint normalizer."""
    if isinstance(activation, HeadNormalized):
        return Quadrature(1e-8 if tolerance is None else tolerance)
    if isinstance(activation, BayesSoftmax):
        return Quadrature(1e-6 if tolerance is None else tolerance)
    return MonteCarlo()
