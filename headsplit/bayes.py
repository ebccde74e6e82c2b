"""The Bayes-risk plots: optima of the three activations against ν and H, the Bayes line, and trained layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command's help waits for nothing heavy
    from compare.lines import Line

# purposes of randomness, folded into key(seed)
_AGAINST_SNR, _AGAINST_HEADS, _TRAINING = 11, 12, 13
PRIORS = (
    "sign_flips(mean=[0.0], amplitude=[1.0])",
    "one_hot(features=2)",
    "gaussian(mean=[0.0, 0.0], variance=[1.0, 1.0])",
    "gaussian(mean=[0.0, 0.0], variance=[1.0, 0.25])",
)


@dataclass(frozen=True)
class Configuration:
    """What makes the plots; every field is in the store, exactly."""

    priors: tuple[str, ...] = PRIORS
    prior_heads: tuple[int, ...] = (2, 2, 3, 3)  # H against ν, for each prior
    length: int = 5
    snrs: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0)
    heads: tuple[int, ...] = (1, 2, 3)
    snr: float = 8.0  # against H
    starts: int = 2
    tolerance: float = 1e-4
    trained_snrs: tuple[float, ...] = (8.0,)
    dim: int = 400
    variance: float = 0.1
    learning_rate: float = 2.0
    batch: int = 10
    time: float = 40.0
    bias_rate: float = 5.0
    replicas: int = 4
    seed: int = 0

    def check(self) -> None:
        """Refuses wrong values by name, before anything is computed or written."""
        from theory import SingleLocation
        from theory._checks import invalid, positive, whole
        from theory.names import parse_prior

        if len(self.prior_heads) != len(self.priors):
            raise invalid("prior_heads", f"one number of heads per prior ({len(self.priors)})", self.prior_heads)
        for name in ("snrs", "heads", "trained_snrs"):
            values = getattr(self, name)
            if not values or any(b <= a for a, b in pairwise(values)):
                raise invalid(name, "at least one value, increasing", values)
        for snr in (*self.snrs, *self.trained_snrs, self.snr):
            positive("snr", snr, 0)
        for heads in (*self.heads, *self.prior_heads):
            whole("heads", heads, 1)
        for text, heads in zip(self.priors, self.prior_heads, strict=True):
            task = SingleLocation(self.length, self.snr, parse_prior(text))
            whole("dim", self.dim, task.features + heads)
        for name in ("variance", "learning_rate", "time", "bias_rate"):
            positive(name, getattr(self, name), 0)
        for name in ("starts", "batch", "replicas"):
            whole(name, getattr(self, name), 1)
        if not 1e-8 <= self.tolerance <= 1e-2:
            raise invalid("tolerance", "a number from 1e-8 to 1e-2", self.tolerance)


SMALL = Configuration(snrs=(2.0, 8.0, 16.0), replicas=2)
FULL = Configuration(
    snrs=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0), heads=(1, 2, 3, 4, 5), starts=4, tolerance=1e-5,
    trained_snrs=(2.0, 8.0, 16.0), dim=1000, time=100.0, replicas=8,
)  # fmt: skip


def lines(c: Configuration) -> "Iterator[Line]":
    """For each prior the Bayes risk, and for each activation its optima and trained layers."""
    import jax

    from compare.bayes import ACTIVATIONS, bayes_against_snr, optima_against_heads, optima_against_snr, trained_risk
    from compare.lines import Line
    from theory.names import parse_prior

    root = jax.random.key(c.seed)
    shared: dict[str, Any] = {"length": c.length, "progress": False}
    search: dict[str, Any] = {**shared, "starts": c.starts, "tolerance": c.tolerance}
    train: dict[str, Any] = {
        name: getattr(c, name)
        for name in ("dim", "variance", "learning_rate", "batch", "time", "bias_rate", "replicas")
    }
    for p, (text, heads) in enumerate(zip(c.priors, c.prior_heads, strict=True)):
        prior = parse_prior(text)
        every = sorted({*c.snrs, *c.trained_snrs, c.snr})
        yield Line(f"bayes_{p}", f"Bayes risk, {text}", partial(bayes_against_snr, prior, snrs=every, length=c.length))
        for a, name in enumerate(ACTIVATIONS):
            own = jax.random.fold_in(jax.random.fold_in(root, p), a)
            on_snr, on_heads, training = (
                jax.random.fold_in(own, purpose) for purpose in (_AGAINST_SNR, _AGAINST_HEADS, _TRAINING)
            )
            optima = partial(optima_against_snr, prior, name, heads=heads, snrs=c.snrs, key=on_snr, **search)
            yield Line(f"snr_{p}_{a}", f"{name}, {heads} heads: optima against ν", optima)
            for i, snr in enumerate(c.trained_snrs):
                key = jax.random.fold_in(training, i)
                run = partial(trained_risk, prior, name, heads=heads, snr=snr, key=key, **train, **shared)
                what = f"{name}, {heads} heads: SGD at D = {c.dim}, ν = {snr:g}"
                yield Line(f"trained_{p}_{a}_{i}", what, run)
            # last: beside the optima against ν it would compile the same code at the same time
            optima = partial(optima_against_heads, prior, name, heads=c.heads, snr=c.snr, key=on_heads, **search)
            yield Line(f"heads_{p}_{a}", f"{name}: optima against H at ν = {c.snr:g}", optima)
