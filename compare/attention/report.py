"""Every head of a transformer on one text: how many tokens it attends to, and how well it keeps them apart."""

from typing import Any

import numpy as np
import xarray as xr

from compare.attention._sample import Sample, distance_measures, labelled, places
from compare.attention._search import search
from theory._checks import instance, whole
from theory.limits import (
    effective_support,
    entropy,
    jacobian_bound,
    separability,
    softmax_jacobian_norm,
)
from theory.limits._rows import MEMORY

SATURATED, LEAST = 0.7, 16  # of N_s/N, and the N from which on it says something


def attention_report(
    attention: Any,
    *,
    selected: Any = 20,
    vectors: str = "inputs",
    normalize: Any = True,
    count: str = "own",
    level: float = 0.01,
    form: str = "printed",
    critical: Any = True,
    rows: Any = None,
    memory: int = MEMORY,
    progress: Any = True,
) -> xr.Dataset:
    """Measures of each layer and head, averaged over query rows (docs/limits.md §6).

    Averaged are the rows that leave a token out: of a causal model with count="own" those of more than N tokens, else
    all (attribute `averaged_rows`). All measures are of the same rows. Jacobian norms are those of softmax at
    temperature 1, with respect to its logits.

    Args:
        attention: what a model returned on a text of L tokens.
        selected: N, below L; the N largest weights of a row are selected.
        vectors: the x_i, "inputs" of each layer, "embeddings" or "values".
        normalize: whether each x_i is divided by its norm. All distances have the unit of ‖x‖.
        count: whether a row has its "own" length, the tokens it may attend, or "all" L.
        level: of the test that gives the critical N.
        form: of the expectation it compares with, "printed" or "sharp".
        critical: whether to search for the critical N, which takes longer than all else.
        rows: query rows: None for all, a number of equally spaced ones, or indices.
        memory: bytes of working arrays.
        progress: a bar, if it takes longer than two seconds.

    Returns:
        Dimensions layer, head: entropy, effective_support, participation, top_weight, distance (d̃), distance_bound,
        distance_bound_printed, expected, expected_error, expected_printed, distance_per_token, context_norm,
        selected_weight, distinguishable (N_s/N), radius, saturated (N_s/N ≥ 0.7; False for N < 16, where that is
        common), jacobian_norm, jacobian_bound. With `critical`: critical_count of all heads, layer_critical_count
        (layer); NaN where the test sees a difference at every N, or heads are fewer than the attribute `least_heads`,
        which never differ (5 are the least at level 0.01).

    Raises:
        ValueError: naming the option that is wrong, what was expected and what came.

    Example:
        >>> from compare import attention_report
        >>> from sim.pretrained import load_pretrained
        >>> model = load_pretrained()
        >>> report = attention_report(model(model.tokenize("To be, or not to be.")), selected=3)
        >>> dict(report.sizes), report.entropy.units
        ({'layer': 6, 'head': 12}, 'nat')
        >>> bool((report.distance <= report.distance_bound).all())
        True
    """
    instance("critical", critical, bool)
    selected = whole("selected", selected, 1)
    options = {"vectors": vectors, "normalize": normalize, "count": count, "rows": rows, "memory": memory}
    sample = Sample.make(attention, **options)
    counts = sample.below("selected", selected)
    found = [_layer(sample, layer, counts) for _, layer in sample.over_layers(progress=progress, text="heads")]
    both = ("layer", "head")
    variables = {name: (both, np.stack([part[name][:, 0] for part in found])) for name in found[0]}
    saturated = (variables["distinguishable"][1] >= SATURATED) & (selected >= LEAST)
    variables["saturated"] = (both, saturated)
    attrs = {**sample.attrs, "selected": selected, "averaged_rows": sample.averaged(counts)[0]}
    if critical:
        curve = search(sample, level=level, form=form, progress=progress)
        attrs |= {"level": level, "form": form, "least_heads": curve.least_heads}
        variables |= {"critical_count": ((), curve.critical), "layer_critical_count": (both[:1], curve.layers)}
    return labelled(variables, places(sample), attrs)


def _layer(sample: Sample, layer: Any, counts: np.ndarray) -> dict[str, np.ndarray]:
    weights, where = layer.weights, layer.where
    apart = separability(weights, layer.vectors, counts, where=where, **sample.measures)
    of_rows = {
        "entropy": entropy(weights, where=where),
        "effective_support": effective_support(weights, where=where),
        "participation": effective_support(weights, kind="participation", where=where),
        "top_weight": weights.max(axis=-1),
        "jacobian_norm": softmax_jacobian_norm(weights, where=where),
        "jacobian_bound": jacobian_bound(weights, where=where),
    }
    return {
        **{name: sample.mean(values[..., None], counts) for name, values in of_rows.items()},
        **distance_measures(sample, layer, counts),
        "distinguishable": sample.mean(apart.fraction, counts),
        "radius": sample.mean(apart.radius, counts),
    }
