"""The documents: every block of Python runs and prints what is shown, every reference to a section resolves."""

import contextlib
import io
import re
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
PACKAGES = ("theory", "sim", "compare", "figures", "headsplit", "tests")
BUDGET = 180.0  # seconds a document; about 20 are needed where nothing else runs

# a block of Python and, where the next block is one, the output it shows
BLOCK = re.compile(r"^```python( slow)?\n(.*?)^```$(?:\n+^```output\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
CITATION = re.compile(r"docs/([\w-]+\.md)((?:[,\s]+(?:and\s+)?§\d+(?:\.\d+)*)*)")
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
    start = time.perf_counter()
    run(path, slow=False)
    assert time.perf_counter() - start < BUDGET


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
    own = set(SECTION.findall(re.sub(r"[\w-]+\.md §[\d.]+", "", text)))  # not those of another document
    assert own <= sections(text)
