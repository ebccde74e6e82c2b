"""Normalizers in the single-location model: risk and gradient against L, stable learning rates against temperature."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headsplit.stored import Line, completed

FIGURE = "normalizers"


@dataclass(frozen=True)
class Configuration:
    """What makes the figure; every field is in the store, exactly."""

    prior: str = "discrete(points=[[1.0]])"
    activations: tuple[str, ...] = (
        "Softmax()", "Softmax1()", "ScalableSoftmax(0.43)", "Sparsemax()", "Entmax(1.5)", "Sigmoid()",
        "SelfAdjustedSoftmax()", "AdaptiveSoftmax()", "TopK(power=0.5)",
    )  # fmt: skip
    key_length: float = 2.0  # the longest keys, |k|/√D
    lengths: tuple[int, ...] = (4, 16, 64, 256, 1024)
    snr_per_log: float = 4.0  # ν = this · log L, against L
    gradient_key_length: float = 1.0
    gradient_snr: float = 4.0  # the same at every L: logits are bounded
    tokens: int = 2**21
    temperatures: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    stable_length: int = 5
    stable_snr: float = 8.0
    least_rate: float = 4.0  # at temperature 1
    rates: int = 10  # each √2 times the one before
    dim: int = 200
    batch: int = 1
    time: float = 40.0  # at temperature 1
    replicas: int = 64
    seed: int = 0


def run(configuration: Configuration, folder: Path, *, progress: bool, say: Callable[[str], Any]) -> None:
    """Compute what is not there yet, store each panel as it is finished, and draw.

    Raises:
        ValueError: a folder that holds another configuration.
        Interrupted: Ctrl-C; the panels that are finished are kept, and the same command goes on.
    """
    lines = lambda: [Line(*job) for job in _jobs(configuration)]  # noqa: E731
    show(completed(configuration, folder, lines, progress=progress, say=say), say=say)


def show(path: Path, *, say: Callable[[str], Any]) -> None:
    """Print the numbers of a stored result and draw its figure beside it."""
    from compare import load
    from figures.normalizers import draw, table
    from figures.style import save_figure

    store = load(path)
    if store.metadata["status"] != "complete":
        raise ValueError(f"{path}: expected a complete result; the same command without a store goes on with it")
    say(table(store))
    for written in (path, *save_figure(draw(store), path.parent / FIGURE)):
        say(f"  {written}")


def _jobs(c: Configuration) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(group in the store, what it is, how to compute it)."""
    import jax
    import numpy as np

    from compare import gradient_against_length, risk_against_length
    from theory import OrderParameters
    from theory.names import parse_activation, parse_prior

    prior, activations = parse_prior(c.prior), [parse_activation(text) for text in c.activations]
    direction = np.asarray(prior.means[:1])
    direction = direction / np.linalg.norm(direction)
    keys = [OrderParameters(size * direction, [[size**2]]) for size in (c.key_length, c.gradient_key_length)]
    shared: dict[str, Any] = {"lengths": c.lengths, "tokens": c.tokens, "progress": False}
    snrs = [c.snr_per_log * float(np.log(length)) for length in c.lengths]
    scales = np.arange(1, 9) / 8
    for i, activation in enumerate(activations):
        risk = partial(
            risk_against_length, prior, [activation], keys[0], snrs=snrs, scales=scales, seed=c.seed, **shared
        )
        yield f"risk_{i}", f"risk against L, {activation.name}", risk
        gradient = partial(
            gradient_against_length,
            prior,
            [activation],
            keys[1],
            snrs=c.gradient_snr,
            key=jax.random.key(c.seed),
            **shared,
        )
        yield f"gradient_{i}", f"gradient against L, {activation.name}", gradient
    for i, temperature in enumerate(c.temperatures):
        yield f"stable_{i}", f"learning rates at T = {temperature:g}", partial(_stable, c, temperature)


def _stable(c: Configuration, temperature: float) -> Any:
    """Softmax at temperature T from its best keys, whose length is T times that at 1."""
    import jax
    import numpy as np

    from compare import stability_against_rate
    from theory import OrderParameters, SingleLocation, Softmax
    from theory.names import parse_prior

    prior = parse_prior(c.prior)
    size = temperature * c.key_length
    direction = np.asarray(prior.means[:1])
    order = OrderParameters(size * direction / np.linalg.norm(direction), [[size**2]])
    rates = c.least_rate * temperature**2 * 2 ** (np.arange(c.rates) / 2)
    # keys of their own for each temperature: equal ones would give the same numbers but for the scale
    key = jax.random.fold_in(jax.random.key(c.seed), round(1e6 * temperature))
    return stability_against_rate(
        SingleLocation(c.stable_length, c.stable_snr, prior), [Softmax(temperature)], [order], rates, dim=c.dim,
        batch=c.batch, time=c.time * temperature**2, replicas=c.replicas, key=key, progress=False,
    )  # fmt: skip
