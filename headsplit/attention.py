"""The limits of normalized attention in a real transformer on a text: a table of heads, and the five experiments."""

import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command's help waits for nothing heavy
    from compare.lines import Line

FIGURE, HEADS, TABLE = "attention", "attention_heads", "heads.csv"
PACKAGED = "minilm"
REPORT = "report"
EXPERIMENTS = {  # groups of the store
    "distance_against_length": "distances against text length",
    "distance_against_selected": "distances against selected tokens",
    "critical_against_length": "critical N against text length",
    "separability_against_selected": "separability against selected tokens",
    "gradient_against_temperature": "gradients against temperature",
}


@dataclass(frozen=True)
class Configuration:
    """What makes a result; every field is in the store, exactly."""

    model: str = PACKAGED
    weights: str = ""  # SHA-256 of the model's files
    text: str = ""  # SHA-256 of the text
    selected: int = 20
    selected_against_length: int = 5
    vectors: str = "inputs"
    normalize: bool = True
    count: str = "own"
    truncate: bool = False
    rows: int | None = None
    level: float = 0.01
    form: str = "printed"
    seed: int = 0

    def check(self) -> None:
        """Refuses wrong values by name, before anything is read, computed or written."""
        from sim.pretrained.attention import KINDS
        from theory._checks import invalid, whole

        whole("selected", self.selected, 1)
        if self.rows is not None:
            whole("rows", self.rows, 1)
        for name, choices in (("vectors", KINDS), ("count", ("own", "all"))):
            if getattr(self, name) not in choices:
                raise invalid(name, " or ".join(map(repr, choices)), repr(getattr(self, name)))

    def folder(self, text: str) -> str:
        """A name from model and text, and from all else that differs from the defaults."""
        others = {"selected": "N", "vectors": "", "normalize": "", "count": "count", "truncate": "", "rows": "rows"}
        words = {"normalize": "raw", "truncate": "truncated"}
        changed = [name for name in others if getattr(self, name) != getattr(_DEFAULT, name)]
        parts = [self.model, text, *(words.get(name, f"{others[name]}{getattr(self, name)}") for name in changed)]
        return "-".join(re.sub(r"[^A-Za-z0-9.-]+", "_", part).strip("_.") for part in parts)


_DEFAULT = Configuration()


@dataclass(frozen=True)
class Text:
    """What a model reads, and what it is called."""

    name: str
    content: str

    @classmethod
    def read(cls, source: str | None) -> "Text":
        """A file, standard input for "-", or the text that comes with headsplit if none is named.

        Raises:
            ValueError: no file, not a text, or an empty one.
        """
        if source is None:
            from sim.pretrained.text import SAMPLE, sample_text

            return cls(SAMPLE, sample_text())
        try:
            content = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"text: expected a file of text in UTF-8, got {source} ({error})") from error
        except OSError as error:
            raise ValueError(f"text: expected a file, got {source!r} ({error.strerror})") from error
        if not content.strip():
            raise ValueError(f"text: expected a text that is not empty, got {source}")
        return cls("stdin" if source == "-" else Path(source).name, content)


def model_files(name: str, download: bool) -> tuple[str, Path | None, str]:
    """(what a model is called, its source for `load_pretrained`, SHA-256 of its files).

    Raises:
        ValueError: a folder or name that is not there.
        ImportError: the packaged model is missing.
    """
    from sim.pretrained.files import DOWNLOADED, find_folder

    try:
        folder = find_folder(None if name == PACKAGED else name, download)
    except ValueError as error:
        raise ValueError(str(error).replace("download=True", "--download")) from error
    digest = hashlib.sha256()
    for path in sorted({path for pattern in DOWNLOADED for path in folder.glob(pattern)}):
        with path.open("rb") as opened:
            digest.update(path.name.encode() + hashlib.file_digest(opened, "sha256").digest())
    called = name if name == PACKAGED or not Path(name).is_dir() else Path(name).resolve().name
    return called, None if name == PACKAGED else folder, digest.hexdigest()


def run(
    model: str,
    text: Text,
    *,
    folder: Path | None,
    results: Path,
    experiments: bool,
    download: bool,
    progress: bool,
    say: Callable[[str], Any],
    **options: Any,
) -> None:
    """Compute what is not there yet, store each experiment as it is finished, print the table, and draw.

    Args:
        model: "minilm", a folder, or a name on the hub.
        text: what it reads.
        folder: where results go; one of `results`, named by what varies, unless given.
        results: see there.
        experiments: whether the five experiments are made beside the report.
        download: whether the hub may be asked for the model.
        progress: bars.
        say: where messages go.
        options: other fields of `Configuration`.

    Raises:
        ValueError: options, files or a text that are wrong, or a folder that holds another configuration.
        ImportError: a package that is missing.
        Interrupted: Ctrl-C; the experiments that are finished are kept, and the same command goes on.
    """
    from compare import load
    from compare.lines import STORE, compute_lines, is_complete

    Configuration(**options).check()
    called, source, weights = model_files(model, download)
    digest = hashlib.sha256(text.content.encode()).hexdigest()
    configuration = Configuration(called, weights, digest, **options)
    folder = results / configuration.folder(Path(text.name).stem) if folder is None else folder
    path = folder / STORE
    is_complete(folder, asdict(configuration), say=lambda _: None, unfinished="")  # refuses another configuration
    store = load(path) if path.exists() else None
    there = set(store.datasets) if store else set()
    missing = [group for group in (REPORT, *(EXPERIMENTS if experiments else ())) if group not in there]
    if missing:
        if there:
            say(f"{path} holds a part of this result: going on with what is missing")
        lines = [line for line in _lines(configuration, source, text, experiments) if line.group in missing]
        compute_lines(lines, path, asdict(configuration), progress=progress, say=say)
    elif store:
        say(f"{path} holds this result already (computed {store.metadata['created']}): loaded, not recomputed")
    show(path, say=say)


def show(path: Path, *, say: Callable[[str], Any]) -> None:
    """Print the table of a stored result, and write its figures and the table of all heads beside it."""
    from compare import load
    from compare.attention._sample import LABELS
    from compare.lines import stored_at
    from figures.attention import draw, draw_heads, table
    from figures.style import save_figure

    path = stored_at(path)
    store = load(path)
    report = store.datasets.get(REPORT)
    if report is None or "distinguishable" not in report:
        there = ", ".join(store.datasets)
        raise ValueError(f"{path}: expected a report of `headsplit attention`, got a result with {there}")
    say(table(store))
    written = [path, path.parent / TABLE, *save_figure(draw_heads(report), path.parent / HEADS)]
    heads = report.drop_vars(["critical_count", "layer_critical_count"])
    columns = [name for name in LABELS if name in heads.data_vars]  # the store has them in no order
    heads[columns].to_dataframe()[columns].to_csv(written[1], encoding="utf-8")
    experiments = [group for group in EXPERIMENTS if group in store.datasets]
    if len(experiments) == len(EXPERIMENTS):
        written += save_figure(draw(store), path.parent / FIGURE)
    elif experiments:
        say(f"{len(experiments)} of {len(EXPERIMENTS)} experiments are there: `headsplit attention` goes on with them")
    for place in written:
        say(f"  {place}")


def _lines(c: Configuration, source: Path | None, text: Text, experiments: bool) -> "list[Line]":
    """The report and the experiments. The model is read here: what is wrong with it is said before any is computed."""
    import jax

    import compare
    from compare.lines import Line
    from sim.pretrained import load_pretrained

    model = load_pretrained(source)
    try:
        tokens = model.tokenize(text.content, truncate=c.truncate).ids
    except ValueError as error:
        raise ValueError(str(error).replace("truncate=True", "--truncate")) from error
    if c.selected >= len(tokens):
        raise ValueError(f"selected: expected less than the {len(tokens)} tokens of the text, got {c.selected}")
    if experiments and c.selected_against_length >= len(tokens):
        least = f"more than {c.selected_against_length} tokens for the experiments (or --no-experiments)"
        raise ValueError(f"text: expected {least}, got {len(tokens)}")
    attention = model(tokens)
    names = ("vectors", "normalize", "count", "rows")
    shared: dict[str, Any] = {**{name: getattr(c, name) for name in names}, "progress": False}
    test: dict[str, Any] = {"level": c.level, "form": c.form}
    cut: dict[str, Any] = {"model": model, "text": text.content, "truncate": c.truncate, **shared}

    def gradients() -> Any:
        options = {"rows": c.rows, "key": jax.random.key(c.seed), "progress": False}
        return compare.gradient_against_temperature(model(tokens, logits=True), **options)

    jobs: dict[str, Callable[[], Any]] = {
        REPORT: partial(compare.attention_report, attention, selected=c.selected, **test, **shared),
        "gradient_against_temperature": gradients,
        "critical_against_length": partial(compare.critical_against_length, **test, **cut),
        "distance_against_length": partial(compare.distance_against_length, selected=c.selected_against_length, **cut),
        "separability_against_selected": partial(compare.separability_against_selected, attention, **shared),
        "distance_against_selected": partial(compare.distance_against_selected, attention, **shared),
    }

    def named(compute: Callable[[], Any]) -> Any:
        return compute().assign_attrs(text=text.name, model=c.model)

    return [Line(group, EXPERIMENTS.get(group, "report of heads"), partial(named, job)) for group, job in jobs.items()]
