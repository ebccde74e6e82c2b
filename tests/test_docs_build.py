"""The documentation builds without a warning, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """In a process of its own: it sets what other tests must not see."""
    folder = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", str(ROOT / "docs"), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return folder


def test_every_document_is_a_page(built):
    documents = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    pages = {path.relative_to(built).with_suffix("") for path in built.rglob("*.html")}
    assert documents <= pages


def test_links_between_pages_lead_somewhere(built):
    own = {path: set(re.findall(r' id="([^"]+)"', path.read_text(encoding="utf-8"))) for path in built.rglob("*.html")}
    found = 0
    for path in own:
        for target in re.findall(r'href="([^"]+)"', path.read_text(encoding="utf-8")):
            file, _, anchor = target.partition("#")
            other = (path.parent / file).resolve() if file else path
            if "//" in target or (other.suffix != ".html") or not anchor:
                continue
            assert anchor in own[other], f"{path.name}: {target}"
            found += 1
    assert found > 500  # the search still finds them
