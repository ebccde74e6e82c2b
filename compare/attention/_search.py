"""The critical N of a model's heads, gone through layer by layer so that memory stays that of one."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from compare.attention._sample import Sample
from theory._checks import invalid
from theory.limits import ks_p_value, ks_statistic, mean_distances
from theory.limits.critical import until_alike


class Search(NamedTuple):
    """Critical N of all heads and of each layer's; NaN where the test sees a difference at every N, or never can."""

    critical: float
    layers: Float[np.ndarray, " layers"]
    statistic: Float[np.ndarray, " K"]  # of all heads, at N = 1 … K
    p_value: Float[np.ndarray, " K"]


def search(sample: Sample, *, level: float, form: str, progress: bool) -> Search:
    """As `theory.limits.critical_count`, over all layers and over each."""
    if not (isinstance(level, (int, float)) and 0 < level < 1):
        raise invalid("level", "a number between 0 and 1", repr(level))
    with tqdm(desc="critical N", delay=2, unit=" layers", leave=False, disable=not progress) as bar:

        def curves(stop: int) -> list[np.ndarray]:
            parts = [np.empty((sample.layers, sample.heads, stop)) for _ in range(2)]
            for index in range(sample.layers):
                layer = sample.layer(index)
                options = {"upto": stop, "form": form, "where": layer.where, **sample.measures}
                found = mean_distances(layer.weights, layer.vectors, **options)
                for part, values in zip(parts, found[:2], strict=True):
                    part[index] = np.asarray(values)[:, :stop]
                bar.update()
            return [part.reshape(-1, stop) for part in parts]

        measured, expected, statistic, p_value = until_alike(curves, int(sample.lengths.max()) - 1, level)
    of_heads = (part.reshape(sample.layers, sample.heads, -1) for part in (measured, expected))
    own = ks_statistic(*(np.moveaxis(part, 1, 0) for part in of_heads))
    layers = [_first(ks_p_value(row, sample.heads, sample.heads), sample.heads, level) for row in own]
    return Search(_first(p_value, len(measured), level), np.array(layers), statistic, p_value)


def _testable(heads: int, level: float) -> bool:
    """Whether samples of so few heads can differ at all."""
    return float(ks_p_value(1.0, heads, heads)) < level


def _first(p_value: np.ndarray, heads: int, level: float) -> float:
    same = np.flatnonzero(p_value >= level)
    return float(same[0] + 1) if same.size and _testable(heads, level) else np.nan
