"""Distances and separability of a transformer's heads against text length and number of selected tokens."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import xarray as xr
from tqdm import tqdm

from compare.attention._sample import Layer, Sample, distance_measures, labelled, places
from compare.attention._search import search
from sim.pretrained import Transformer
from theory._checks import instance, invalid, whole
from theory.limits import _vectors, separability, separability_bounds
from theory.limits._rows import MEMORY

SHORTEST = 32
SELECTED = (1, 5, 10, 20, 100)  # of distances
SEPARATED = (1, 2, 4, 8, 16, 32, 64, 128)  # of separability


def distance_against_length(
    model: Any,
    text: str,
    *,
    selected: Any = 5,
    lengths: Sequence[int] | None = None,
    truncate: Any = False,
    vectors: str = "inputs",
    normalize: Any = True,
    count: str = "own",
    rows: Any = None,
    memory: int = MEMORY,
    progress: Any = True,
) -> xr.Dataset:
    """d̃ of the N largest weights with its bounds and expectation, on the beginning of a text cut to L tokens.

    The model reads each cut anew, with its marks of beginning and end; averaged over query rows as in
    `attention_report` (docs/limits.md §3, §6).

    Args:
        model: a `Transformer`.
        text: what it reads.
        selected: N.
        lengths: L, increasing, all marks counted; powers of two from 32 on, and the whole text, unless given.
        truncate: whether a text beyond the model's window is cut to it.
        vectors, normalize, count, rows, memory, progress: as in `attention_report`.

    Returns:
        Dimensions layer, head, length: distance, distance_bound, distance_bound_printed, expected, expected_error,
        expected_printed, distance_per_token, context_norm, selected_weight.

    Raises:
        ValueError: naming the option that is wrong, what was expected and what came.

    Example:
        >>> from compare import distance_against_length
        >>> from sim.pretrained import load_pretrained
        >>> text = "To be, or not to be, that is the question."
        >>> found = distance_against_length(load_pretrained(), text, selected=2, lengths=[6, 12])
        >>> found.distance.dims, bool((found.distance <= found.distance_bound).all())
        (('layer', 'head', 'length'), True)
    """
    options = {"vectors": vectors, "normalize": normalize, "count": count, "rows": rows, "memory": memory}
    selected = whole("selected", selected, 1)
    found: list[dict[str, np.ndarray]] = []
    averaged: list[int] = []
    sizes, attrs = _lengths(model, text, lengths, truncate), {}
    coords: dict[str, Any] = {"length": sizes}
    for sample in _cut(model, text, sizes, options, progress=progress):
        counts = sample.below("selected", selected)
        parts = [distance_measures(sample, layer, counts) for _, layer in sample.over_layers(progress=False, text="")]
        found.append({name: np.stack([part[name][:, 0] for part in parts]) for name in parts[0]})
        averaged += sample.averaged(counts)
        coords, attrs = coords | places(sample), sample.attrs
    del attrs["length"], attrs["query_rows"]
    dims = ("layer", "head", "length")
    variables = {name: (dims, np.stack([one[name] for one in found], axis=-1)) for name in found[0]}
    attrs |= {"selected": selected, "truncate": truncate, "averaged_rows": averaged}
    return labelled(variables, coords, attrs)


def distance_against_selected(
    attention: Any,
    *,
    counts: Sequence[int] | None = None,
    vectors: str = "inputs",
    normalize: Any = True,
    count: str = "own",
    rows: Any = None,
    memory: int = MEMORY,
    progress: Any = True,
) -> xr.Dataset:
    """d̃ with its bounds and expectation against the number N of selected tokens (docs/limits.md §3, §6).

    Args:
        attention: what a model returned.
        counts: N; those of 1, 5, 10, 20, 100 that leave a token out, unless given.
        vectors, normalize, count, rows, memory, progress: as in `attention_report`.

    Returns:
        Dimensions layer, head, selected: as `distance_against_length`.

    Raises:
        ValueError: naming the option that is wrong, what was expected and what came.

    Example:
        >>> from compare import distance_against_selected
        >>> from sim.pretrained import load_pretrained
        >>> model = load_pretrained()
        >>> found = distance_against_selected(model(model.tokenize("To be, or not to be.")), counts=[1, 9])
        >>> found.distance.shape, bool((found.distance[..., 1] < found.distance[..., 0]).all())
        ((6, 12, 2), True)
    """
    options = {"vectors": vectors, "normalize": normalize, "count": count, "rows": rows, "memory": memory}
    sample = Sample.make(attention, **options)
    numbers = sample.below("counts", _usual(sample, SELECTED) if counts is None else counts)
    layers = sample.over_layers(progress=progress, text="distances")
    parts = [distance_measures(sample, layer, numbers) for _, layer in layers]
    dims = ("layer", "head", "selected")
    variables = {name: (dims, np.stack([part[name] for part in parts])) for name in parts[0]}
    attrs = {**sample.attrs, "averaged_rows": sample.averaged(numbers)}
    return labelled(variables, {**places(sample), "selected": numbers}, attrs)


def critical_against_length(
    model: Any,
    text: str,
    *,
    lengths: Sequence[int] | None = None,
    level: float = 0.01,
    form: str = "printed",
    truncate: Any = False,
    vectors: str = "inputs",
    normalize: Any = True,
    count: str = "own",
    rows: Any = None,
    memory: int = MEMORY,
    progress: Any = True,
) -> xr.Dataset:
    """The critical N at each text length L, and N/L: where measured and expected d̃ cease to differ over the heads.

    The first N at which a two-sample Kolmogorov–Smirnov test sees no difference, over all heads and over those of each
    layer (`theory.limits.critical_count`, docs/limits.md §3, §6).

    Args:
        model, text, lengths, truncate: as in `distance_against_length`.
        level: of the test. The samples are paired: it is a convention, no false-alarm rate.
        form: of the expectation, "printed" (the paper's) or "sharp".
        vectors, normalize, count, rows, memory, progress: as in `attention_report`.

    Returns:
        critical_count and ratio (length), layer_critical_count (length, layer), NaN where the test sees a difference at
        every N, or heads are so few that it never does (5 are the least at level 0.01); statistic and p_value (length,
        selected), NaN beyond the last N looked at.

    Raises:
        ValueError: naming the option that is wrong, what was expected and what came.

    Example:
        >>> from compare import critical_against_length
        >>> from sim.pretrained import load_pretrained
        >>> text = "To be, or not to be, that is the question."
        >>> found = critical_against_length(load_pretrained(), text, lengths=[6, 12])
        >>> found.critical_count.shape, found.layer_critical_count.shape
        ((2,), (2, 6))
    """
    instance("model", model, Transformer)
    options = {"vectors": vectors, "normalize": normalize, "count": count, "rows": rows, "memory": memory}
    sizes, attrs = _lengths(model, text, lengths, truncate), {}
    found = []
    for sample in _cut(model, text, sizes, options, progress=progress):
        found.append(search(sample, level=level, form=form, progress=progress))
        attrs = sample.attrs
    del attrs["length"], attrs["query_rows"]
    most = max(len(one.p_value) for one in found)
    curves = {name: np.stack([_filled(getattr(one, name), most) for one in found]) for name in ("statistic", "p_value")}
    counts = np.array([one.critical for one in found])
    variables = {
        "critical_count": ("length", counts),
        "ratio": ("length", counts / sizes),
        "layer_critical_count": (("length", "layer"), np.stack([one.layers for one in found])),
        **{name: (("length", "selected"), values) for name, values in curves.items()},
    }
    coords = {"layer": np.arange(model.layers), "length": sizes, "selected": np.arange(1, most + 1)}
    test = {"level": level, "form": form, "least_heads": found[0].least_heads}
    return labelled(variables, coords, {**attrs, **test, "truncate": truncate})


def separability_against_selected(
    attention: Any,
    *,
    counts: Sequence[int] | None = None,
    vectors: str = "inputs",
    normalize: Any = True,
    count: str = "own",
    rows: Any = None,
    memory: int = MEMORY,
    progress: Any = True,
) -> xr.Dataset:
    """N_s/N of every head against N, with the bounds that hold for x uniform on a sphere (docs/limits.md §4, §6).

    The bounds take the weights and the measured radius of each row, M = 1 (the root of the mean square of ‖x‖ unless
    normalized), d of the vectors, and for the printed form their least distance δ. Token vectors are not uniform on
    a sphere, and the radius depends on them: where measured and bounds part, that is what they show.

    Args:
        attention: what a model returned.
        counts: N; powers of two up to 128 that leave a token out, unless given.
        vectors, normalize, count, rows, memory, progress: as in `attention_report`.

    Returns:
        Dimensions layer, head, selected: distinguishable (N_s/N), radius, lower, upper, lower_printed, upper_printed.

    Raises:
        ValueError: naming the option that is wrong, what was expected and what came.

    Example:
        >>> from compare import separability_against_selected
        >>> from sim.pretrained import load_pretrained
        >>> model = load_pretrained()
        >>> found = separability_against_selected(model(model.tokenize("To be, or not to be.")), counts=[1, 4])
        >>> found.distinguishable.dims, float(found.distinguishable[..., 0].min())
        (('layer', 'head', 'selected'), 1.0)
    """
    options = {"vectors": vectors, "normalize": normalize, "count": count, "rows": rows, "memory": memory}
    sample = Sample.make(attention, **options)
    numbers = sample.below("counts", _usual(sample, SEPARATED) if counts is None else counts)
    layers = sample.over_layers(progress=progress, text="separability")
    parts = [_separability(sample, layer, numbers) for _, layer in layers]
    dims = ("layer", "head", "selected")
    variables = {name: (dims, np.stack([part[name] for part in parts])) for name in parts[0]}
    attrs = {**sample.attrs, "averaged_rows": sample.averaged(numbers), "dim": sample.vectors.shape[-1]}
    return labelled(variables, {**places(sample), "selected": numbers}, attrs)


def _separability(sample: Sample, layer: Layer, counts: np.ndarray) -> dict[str, np.ndarray]:
    found = separability(layer.weights, layer.vectors, counts, where=layer.where, **sample.measures)
    x = np.asarray(layer.vectors, float)
    norm = 1.0 if sample.options["normalize"] else float(np.sqrt(np.mean(np.sum(x**2, axis=-1))))
    options = {"norm": norm, "where": layer.where, "memory": sample.options["memory"]}
    radius = np.where(np.isfinite(found.radius), found.radius, 0)  # those of no token left out are not averaged
    given = (layer.weights, radius, counts)
    sharp = separability_bounds(*given, dim=x.shape[-1], **options)
    printed = separability_bounds(*given, separation=_least_distance(x), form="printed", **options)
    names = ("lower", "upper", "lower_printed", "upper_printed")
    bounds = {name: sample.mean(side, counts) for name, side in zip(names, (*sharp, *printed), strict=True)}
    measured = {"distinguishable": found.fraction, "radius": found.radius}
    return {**{name: sample.mean(values, counts) for name, values in measured.items()}, **bounds}


def _least_distance(x: np.ndarray) -> float:
    """Of two tokens' vectors, (..., L, d)."""
    between = np.stack([_vectors.pairwise(own) for own in jnp.asarray(x).reshape(-1, *x.shape[-2:])])
    return float(between[:, ~np.eye(x.shape[-2], dtype=bool)].min())


def _filled(values: np.ndarray, size: int) -> np.ndarray:
    return np.pad(values, (0, size - len(values)), constant_values=np.nan)


def _usual(sample: Sample, counts: Sequence[int]) -> list[int]:
    return [count for count in counts if count < sample.lengths.max()]


def _lengths(model: Any, text: str, lengths: Any, truncate: bool) -> list[int]:
    """Checked lengths of cut texts, marks counted."""
    instance("model", model, Transformer)
    whole_length = len(model.tokenize(text, truncate=truncate).ids)
    if lengths is None:
        powers = (SHORTEST << i for i in range(whole_length.bit_length()))
        return [*(length for length in powers if length < whole_length), whole_length]
    least = max(2, model.tokenizer.marks + 1)  # a token beside the marks
    listed = [whole("lengths", length, least) for length in lengths]
    if not listed or any(b <= a for a, b in pairwise(listed)) or listed[-1] > whole_length:
        raise invalid("lengths", f"increasing numbers up to the text's {whole_length} tokens", listed)
    return listed


def _cut(model: Any, text: str, lengths: list[int], options: dict[str, Any], *, progress: bool) -> Iterator[Sample]:
    """The attention on the text cut to each length."""
    instance("progress", progress, bool)
    for length in tqdm(lengths, "lengths", delay=2, unit=" texts", leave=False, disable=not progress):
        tokens = model.tokenizer.encode(text, window=length, truncate=True)
        yield Sample.make(model(tokens), **options)
