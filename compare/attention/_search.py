"""The critical N of a model's heads, gone through layer by layer so that memory stays that of one."""

from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from compare.attention._sample import Sample
from theory._checks import invalid
from theory.limits import mean_distances
from theory.limits.critical import least_heads, until_alike


class Search(NamedTuple):
    """Critical N of all heads and of each layer's; NaN where the test sees a difference at every N, or never can."""

    critical: float
    layers: Float[np.ndarray, " layers"]
    statistic: Float[np.ndarray, " K"]  # of all heads, at N = 1 … K
    p_value: Float[np.ndarray, " K"]
    least_heads: int  # fewer never differ


def search(sample: Sample, *, level: float, form: str, progress: bool) -> Search:
    """As `theory.limits.critical_count`, over all layers and over each, every one as far as it needs."""
    if not (isinstance(level, (int, float)) and 0 < level < 1):
        raise invalid("level", "a number between 0 and 1", repr(level))
    last, least = int(sample.lengths.max()) - 1, least_heads(level)
    longest: dict[int, list[np.ndarray]] = {}  # measured and expected (heads, K) of each layer, as far as looked at
    with tqdm(desc="critical N", delay=2, unit=" layers", leave=False, disable=not progress) as bar:

        def of_layer(index: int, stop: int) -> list[np.ndarray]:
            if index not in longest or longest[index][0].shape[-1] < stop:
                layer = sample.layer(index)
                options = {"upto": stop, "form": form, "where": layer.where, **sample.measures}
                found = mean_distances(layer.weights, layer.vectors, **options)
                longest[index] = [np.asarray(part)[:, :stop] for part in found[:2]]
                bar.update()
            return [part[:, :stop] for part in longest[index]]

        def of_all(stop: int) -> list[np.ndarray]:
            parts = zip(*(of_layer(index, stop) for index in range(sample.layers)), strict=True)
            return [np.concatenate(part) for part in parts]

        *_, statistic, p_value = until_alike(of_all, last, level)
        layers = np.full(sample.layers, np.nan)
        if sample.heads >= least:
            for index in range(sample.layers):
                layers[index] = _first(until_alike(partial(of_layer, index), last, level)[-1], level)
    every = _first(p_value, level) if sample.layers * sample.heads >= least else np.nan
    return Search(every, layers, statistic, p_value, least)


def _first(p_value: np.ndarray, level: float) -> float:
    same = np.flatnonzero(p_value >= level)
    return float(same[0] + 1) if same.size else np.nan
