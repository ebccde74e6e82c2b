"""What is measured of one text's attention: its query rows, its vectors, and means over the rows."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
import xarray as xr
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from sim.pretrained.attention import KINDS, Attention
from sim.pretrained.attention import vectors as vectors_of
from theory._checks import instance, invalid, whole
from theory.limits import distance_bound, distances, expected_distance
from theory.limits._rows import MEMORY, one_of

LABELS = {
    "entropy": ("entropy of the attention weights", "nat"),
    "effective_support": ("effective support, exp(entropy)", "tokens"),
    "participation": ("effective support, 1/Σ α²", "tokens"),
    "distance": ("cumulative distance d̃ of the N largest weights", "norm of x"),
    "distance_bound": ("sharp upper bound on d̃", "norm of x"),
    "distance_bound_printed": ("printed bound on d̃ (false)", "norm of x"),
    "expected": ("expectation of d̃ over random sets", "norm of x"),
    "expected_error": ("bound on the error of the expectation", "norm of x"),
    "expected_printed": ("printed expectation of d̃", "norm of x"),
    "distance_per_token": ("d̃/(L−N)", "norm of x"),
    "context_norm": ("norm ‖s‖ of the selected context", "norm of x"),
    "selected_weight": ("sum A of the N largest weights", "1"),
    "top_weight": ("largest weight", "1"),
    "distinguishable": ("fraction N_s/N of distinguishable tokens", "1"),
    "radius": ("radius r, distance of the nearest token left out", "norm of x"),
    "lower": ("sharp lower bound on E N_s/N, x uniform on a sphere", "1"),
    "upper": ("sharp upper bound on E N_s/N, x uniform on a sphere", "1"),
    "lower_printed": ("printed lower bound on E N_s/N", "1"),
    "upper_printed": ("printed upper bound on E N_s/N (false)", "1"),
    "saturated": ("N_s/N at 0.7 or above, with N at 16 or above", "1"),
    "jacobian_norm": ("spectral norm of the softmax Jacobian", "1"),
    "jacobian_bound": ("bound 2 max α(1−α) on the spectral norm", "1"),
    "critical_count": ("critical N, all heads together", "tokens"),
    "layer_critical_count": ("critical N, heads of one layer", "tokens"),
    "ratio": ("critical N over L", "1"),
    "statistic": ("Kolmogorov–Smirnov statistic", "1"),
    "p_value": ("its p-value", "1"),
    "gradient": ("‖α(l+εv)−α(l)‖/ε, random direction, largest of the rows", "1"),
    "gradient_mean": ("‖α(l+εv)−α(l)‖/ε, random direction, mean of the rows", "1"),
    "norm": ("spectral norm of the softmax Jacobian, largest of the rows", "1"),
    "norm_mean": ("spectral norm of the softmax Jacobian, mean of the rows", "1"),
    "power": ("spectral norm by power iteration, at the row where it is largest", "1"),
    "power_converged": ("whether the power iteration converged", "1"),
    "norm_bound": ("bound 1/(2T) on the spectral norm", "1"),
    "gradient_bound": ("bound min{1/(2T), √2/ε} on the difference", "1"),
    "bound_printed": ("printed bound min{1/(4T), √2} (false)", "1"),
    "layer": ("layer", "1"),
    "head": ("head", "1"),
    "length": ("text length L", "tokens"),
    "selected": ("selected tokens N", "tokens"),
    "temperature": ("temperature T", "1"),
    "size": ("size ε of the step", "1"),
}


class Layer(NamedTuple):
    """One layer as the measures take it."""

    weights: Float[Array, "H Q L"]
    vectors: Float[Array, "... L d"]  # (L, d) if all heads share them, else (H, L, d)
    where: Bool[Array, "Q L"] | None


class Sample(eqx.Module):
    """Query rows of one text's attention, with the vectors it averages."""

    attention: Attention
    vectors: Float[Array, "layers_or_1 heads_or_1 L d"]
    rows: Int[np.ndarray, " Q"]
    lengths: Int[np.ndarray, " Q"]  # tokens that a row counts
    options: dict[str, Any] = eqx.field(static=True)

    @classmethod
    def make(
        cls,
        attention: Any,
        *,
        vectors: Any = "inputs",
        normalize: Any = True,
        count: Any = "own",
        rows: Any = None,
        memory: Any = MEMORY,
    ) -> "Sample":
        """Checked.

        Args:
            attention: what a model returned.
            vectors: the x_i: "inputs", "embeddings" or "values".
            normalize: whether each is divided by its norm.
            count: whether a row has its "own" length, the tokens it may attend, or "all".
            rows: query rows: None for all, a number of equally spaced ones, the last among them, or their indices.
            memory: bytes of working arrays.

        Raises:
            ValueError: naming the option that is wrong, what was expected and what came.
        """
        instance("attention", attention, Attention)
        one_of("count", count, ("own", "all"))
        one_of("vectors", vectors, KINDS)
        found = vectors_of(attention, vectors, normalize=normalize)
        length = attention.weights.shape[-1]
        chosen = _rows(rows, length)
        own = np.asarray(attention.mask)[chosen].sum(axis=-1)
        lengths = own if count == "own" else np.full(len(chosen), length)
        options = {
            "vectors": vectors, "normalize": normalize, "count": count,
            "rows": None if rows is None else np.asarray(rows).tolist(),
            "memory": whole("memory", memory, 1),
        }  # fmt: skip
        return cls(attention, found, chosen, lengths, options)

    @property
    def layers(self) -> int:
        """How many."""
        return self.attention.weights.shape[0]

    @property
    def heads(self) -> int:
        """How many, in a layer."""
        return self.attention.weights.shape[1]

    @property
    def length(self) -> int:
        """Tokens L of the text."""
        return self.attention.weights.shape[-1]

    @property
    def measures(self) -> dict[str, Any]:
        """What all measures of vectors take."""
        return {"count": self.options["count"], "memory": self.options["memory"]}

    @property
    def attrs(self) -> dict[str, Any]:
        """What was measured, for the labels of a result."""
        chosen = {name: value for name, value in self.options.items() if name != "memory"}
        return {"length": self.length, "causal": self.attention.causal, "query_rows": len(self.rows), **chosen}

    def layer(self, index: int) -> Layer:
        """Weights, vectors and mask of one layer."""
        weights = self.attention.weights[index]
        if len(self.rows) < self.length:
            weights = weights[:, self.rows]
        own = self.vectors[min(index, len(self.vectors) - 1)]
        where = self.attention.mask[self.rows] if self.attention.causal else None
        return Layer(weights, own[0] if len(own) == 1 else own, where)

    def over_layers(self, *, progress: Any, text: str) -> Iterator[tuple[int, Layer]]:
        """All layers, with a bar once two seconds have passed."""
        instance("progress", progress, bool)
        bar = tqdm(range(self.layers), text, delay=2, unit=" layers", leave=False, disable=not progress)
        for index in bar:
            yield index, self.layer(index)

    def below(self, name: str, counts: Any) -> np.ndarray:
        """Numbers of selected tokens, each leaving a token out in some row."""
        listed = [whole(name, count, 1) for count in np.atleast_1d(np.asarray(counts)).tolist()]
        most = int(self.lengths.max()) - 1
        if not listed or max(listed) > most or len(set(listed)) < len(listed):
            raise invalid(name, f"different numbers up to {most}, that leave a token out", listed)
        return np.asarray(listed)

    def mean(self, values: Any, counts: np.ndarray) -> Float[np.ndarray, "H K"]:
        """Means of (H, Q, K) over the rows that leave a token out at each count."""
        kept = (self.lengths[:, None] > counts)[None]
        return np.where(kept, np.asarray(values, float), 0).sum(axis=1) / kept.sum(axis=1)

    def averaged(self, counts: np.ndarray) -> list[int]:
        """How many rows those are."""
        return (self.lengths[:, None] > counts).sum(axis=0).tolist()


def _rows(rows: Any, length: int) -> np.ndarray:
    if rows is None:
        return np.arange(length)
    if isinstance(rows, (int, np.integer)) and not isinstance(rows, bool):
        number = min(whole("rows", rows, 1), length)
        return (np.arange(1, number + 1) * length) // number - 1
    indices = np.asarray(rows)
    if indices.ndim != 1 or not indices.size or not np.issubdtype(indices.dtype, np.integer):
        raise invalid("rows", "None, a number, or indices of query tokens", repr(rows))
    if indices.min() < 0 or indices.max() >= length or len(np.unique(indices)) < len(indices):
        raise invalid("rows", f"different indices from 0 to {length - 1}", indices.tolist())
    return indices


def distance_measures(sample: Sample, layer: Layer, counts: np.ndarray) -> dict[str, Float[np.ndarray, "H K"]]:
    """Distances, bounds and expectations of one layer's heads, averaged over rows."""
    given = (layer.weights, layer.vectors, counts)
    options = {"where": layer.where, **sample.measures}
    found = distances(*given, **options)
    sharp = expected_distance(*given, **options)
    measures = {
        "distance": found.sum_of_norms,
        "distance_bound": distance_bound(*given, **options),
        "distance_bound_printed": distance_bound(*given, form="printed", **options),
        "expected": sharp.value,
        "expected_error": sharp.error,
        "expected_printed": expected_distance(*given, form="printed", **options).value,
        "distance_per_token": found.per_token,
        "context_norm": found.context_norm,
        "selected_weight": found.weight,
    }
    return {name: sample.mean(values, counts) for name, values in measures.items()}


def labelled(variables: Mapping[str, Any], coords: Mapping[str, Any], attrs: Mapping[str, Any]) -> xr.Dataset:
    """A Dataset of (dims, values) with names and units on every variable."""
    data = xr.Dataset(dict(variables), coords=dict(coords), attrs=dict(attrs))
    for name, variable in data.variables.items():
        variable.attrs["long_name"], variable.attrs["units"] = LABELS[str(name)]
    return data


def places(sample: Sample) -> dict[str, np.ndarray]:
    """Labels of layers and heads, from 0."""
    return {"layer": np.arange(sample.layers), "head": np.arange(sample.heads)}
