"""Stage times against log D: predicted for several tasks, measured on replicas of the exact chain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command's help waits for nothing heavy
    from compare.lines import Line

_RUNS = 21  # purpose of randomness, folded into key(seed)


def usual_replicas(dims: Sequence[int]) -> tuple[int, ...]:
    """Runs at each D unless given: 200, fewer where they cost more, at least 50."""
    return tuple(min(200, max(50, round(316_228 / max(dim, 1)))) for dim in dims)


def usual_shown(dims: Sequence[int]) -> int:
    """The D whose distribution is drawn unless given: the middle one, of two the smaller."""
    return dims[(len(dims) - 1) // 2]


DIMS = (316, 1000, 3162, 10000)


@dataclass(frozen=True)
class Configuration:
    """What makes the figure and the table; every field is in the store, exactly."""

    priors: tuple[str, ...] = (
        "sign_flips(mean=[0.0], amplitude=[1.0])",
        "sign_flips(mean=[0.0], amplitude=[0.8])",
    )
    heads: tuple[int, ...] = (2, 2)  # for each prior
    activation: str = "Softmax(temperature=1.0)"
    length: int = 4
    snr: float = 4.0
    dims: tuple[int, ...] = DIMS
    replicas: tuple[int, ...] = usual_replicas(DIMS)  # for each D
    shown: int = usual_shown(DIMS)  # D of the distribution
    variance: float = 0.1
    learning_rate: float = 2.0
    batch: int = 4
    loss: str = "limit"
    threshold: float = 0.25
    samples: int = 128
    coverage: float = 0.99
    records: int = 121
    seed: int = 0

    def check(self) -> None:
        """Refuses wrong values by name, before anything is computed or written."""
        from sim._chain import least_dim
        from theory import SingleLocation
        from theory._checks import invalid, positive, whole
        from theory.names import parse_activation, parse_prior

        if not self.priors or len(self.heads) != len(self.priors):
            raise invalid("heads", f"one number of heads per prior ({len(self.priors)})", self.heads)
        if not self.dims or any(b <= a for a, b in pairwise(self.dims)):
            raise invalid("dims", "at least one D, increasing", self.dims)
        if len(self.replicas) != len(self.dims):
            raise invalid("replicas", f"one number per D ({len(self.dims)})", self.replicas)
        if self.shown not in self.dims:
            raise invalid("shown", f"one of the D ({', '.join(map(str, self.dims))})", self.shown)
        if self.loss not in ("finite", "limit"):
            raise invalid("loss", "'finite' or 'limit'", repr(self.loss))
        for replicas in self.replicas:
            whole("replicas", replicas, 2)
        whole("samples", self.samples, 2)
        whole("batch", self.batch, 1)
        whole("records", self.records, 3)
        for name in ("snr", "variance", "learning_rate", "threshold"):
            positive(name, getattr(self, name), 0)
        if not 0.5 <= self.coverage < 1:
            raise invalid("coverage", "a share from 0.5 to less than 1", self.coverage)
        activation = parse_activation(self.activation)
        for text, heads in zip(self.priors, self.heads, strict=True):
            task = SingleLocation(self.length, self.snr, parse_prior(text))
            activation.check_heads(whole("heads", heads, 2))
            whole("dims", self.dims[0], least_dim(heads, task.features, self.batch, self.loss))


_FEW, _MANY = (100, 316, 1000, 3162), (316, 1000, 3162, 10_000, 31_623)
SMALL = Configuration(dims=_FEW, replicas=(100, 100, 100, 50), shown=316)
FULL = Configuration(dims=_MANY, replicas=(1000,) * 4 + (200,), shown=usual_shown(_MANY), samples=512)


def lines(c: Configuration) -> "Iterator[Line]":
    """For each prior the prediction, the runs at each D (which end when the prediction says), and the comparison."""
    import jax

    from compare.lines import Line
    from compare.staircase import compared, measured_stages, predicted_stages
    from theory.names import parse_activation, parse_prior

    root = jax.random.fold_in(jax.random.key(c.seed), _RUNS)
    for p, (text, heads) in enumerate(zip(c.priors, c.heads, strict=True)):
        task: dict[str, Any] = {
            "prior": parse_prior(text), "activation": parse_activation(c.activation), "heads": heads,
            "progress": False, **{name: getattr(c, name) for name in ("length", "snr", "variance", "threshold")},
        }  # fmt: skip
        predict = partial(
            predicted_stages, dims=c.dims, step_size=c.learning_rate / c.batch, samples=c.samples, coverage=c.coverage,
            **task,
        )  # fmt: skip
        own, prediction = jax.random.fold_in(root, p), f"prediction_{p}"
        yield Line(prediction, f"prediction, {text}, {heads} heads", predict)
        for i, (dim, replicas) in enumerate(zip(c.dims, c.replicas, strict=True)):
            measure = partial(
                measured_stages, dim=dim, replicas=replicas, learning_rate=c.learning_rate, batch=c.batch, loss=c.loss,
                records=c.records, key=jax.random.fold_in(own, i), **task,
            )  # fmt: skip
            yield Line(f"runs_{p}_{i}", f"{replicas} runs at D = {dim}, {text}", measure, (prediction,))
        runs = tuple(f"runs_{p}_{i}" for i in range(len(c.dims)))
        yield Line(f"comparison_{p}", f"comparison, {text}", compared, (prediction, *runs))
