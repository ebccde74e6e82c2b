"""The documents: every block of Python runs and prints what is shown, every section, link and public name is there."""

import contextlib
import importlib
import inspect
import io
import re
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
PACKAGES = ("theory", "sim", "compare", "figures", "headsplit", "tests")
BUDGET = 180.0  # seconds a document; about 20 are needed where nothing else runs

# a block of Python and, where the next block is one, the output it shows
BLOCK = re.compile(r"^```python( slow)?\n(.*?)^```$(?:\n+^```output\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
CITATION = re.compile(r"docs/([\w-]+\.md)((?:[,\s]+(?:and\s+)?§\d+(?:\.\d+)*)*)")
LINK = re.compile(r"!?\[([^\]]*)\]\(([^()\s]*)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
REFERENCE = re.compile(r"^\.\. (?:(currentmodule)|auto\w+):: ([\w.]+)$", re.MULTILINE)
PUBLIC = ("theory", "theory.limits", "sim", "sim.pretrained", "compare")
SECTION = re.compile(r"§(\d+(?:\.\d+)*)")


def sections(text: str) -> set[str]:
    """Numbers of the headings."""
    return set(re.findall(r"^#+ (\d+(?:\.\d+)*) ", text, re.MULTILINE))


def run(path: Path, *, slow: bool) -> None:
    """Runs a document's blocks in one namespace."""
    text = path.read_text(encoding="utf-8")
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        if block[1] and not slow:
            continue
        above = text.count("\n", 0, block.start(2))  # so that a traceback names the document's own line
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * above + block[2], str(path), "exec"), namespace)
        if block[3] is not None:
            assert printed.getvalue() == block[3], f"{path.name}, line {above + 1}: prints something else"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_of_documents_runs_and_prints_what_is_shown(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    start = time.process_time()
    run(path, slow=False)
    assert time.process_time() - start < BUDGET


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_slow_python_of_documents(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    run(path, slow=True)


def test_citations_of_documents_resolve():
    found = 0
    for source in (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))):
        for citation in CITATION.finditer(source.read_text(encoding="utf-8")):
            document = ROOT / "docs" / citation[1]
            assert document.exists(), f"{source}: {citation[0]}"
            missing = set(SECTION.findall(citation[2])) - sections(document.read_text(encoding="utf-8"))
            assert not missing, f"{source}: {citation[0]}"
            found += 1
    assert found >= 8  # the search still finds them


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.parent.name == "docs"], ids=lambda path: path.name)
def test_sections_named_within_a_document_exist(path):
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"\[[^\]]*\]\([\w/-]+\.md[^)]*\)|[\w-]+\.md §[\d.]+", "", text)  # not those of another document
    own = set(SECTION.findall(text))
    assert own <= sections(text)


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub and the built documentation make them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_somewhere(path):
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", path.read_text(encoding="utf-8")))
    for words, target in LINK.findall(text):
        parts = urlsplit(target)
        if parts.scheme:
            assert parts.scheme == "https", target
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), target
            continue
        other = (path.parent / parts.path).resolve() if parts.path else path
        assert other.is_relative_to(ROOT), target
        assert other.is_file() or (other.is_dir() and not parts.fragment), target
        if parts.fragment:
            assert parts.fragment in anchors(other), target
            number = SECTION.fullmatch(words)
            assert number is None or parts.fragment.startswith(number[1].replace(".", "") + "-"), f"{words}: {target}"


def public_names(package: str) -> set[str]:
    """What a package's `__init__` lists."""
    return {
        name
        for name, thing in vars(importlib.import_module(package)).items()
        if not name.startswith("_") and not inspect.ismodule(thing)
    }


def documented_names() -> list[str]:
    """What the pages of the reference hold."""
    found = []
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        module = ""
        for current, name in REFERENCE.findall(page.read_text(encoding="utf-8")):
            module, found = (name, found) if current else (module, [*found, f"{module}.{name}"])
    return found


def test_reference_has_every_public_name_once():
    names = documented_names()
    assert len(names) == len(set(names))
    public = {f"{package}.{name}" for package in PUBLIC for name in public_names(package)}
    assert len(public) > 100  # the search still finds them
    assert {name for name in names if name.rpartition(".")[0] in PUBLIC} == public


@pytest.mark.parametrize("name", documented_names())
def test_public_names_say_what_they_are(name):
    module, _, own = name.rpartition(".")
    thing = getattr(importlib.import_module(module), own)
    documented = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__  # not that of a base
    assert documented is not None
    assert not documented.startswith(f"{own}(")  # not the signature that dataclasses put there
