"""The documentation: `sphinx-build -n -W --keep-going docs FOLDER` (extra `docs`)."""

import importlib
import re
import sys
import typing
from pathlib import Path

from docutils.nodes import make_id

typing.GENERATING_DOCUMENTATION = True  # jaxtyping then has short names

sys.path.insert(0, str(Path(__file__).parent.parent))  # this tree, whatever is installed

project = "headsplit"
author = "headsplit"
html_title = "headsplit"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_show_copyright = False
exclude_patterns = ["_build"]

myst_heading_anchors = 3  # as the links between documents take them

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what an override does not say anew is said at its base
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False

# `name` in a docstring is a link where it is a name of the reference, and code elsewhere
default_role = "py:obj"
OURS = r"(theory|sim|compare|figures|headsplit)\."
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:class", f"(?!{OURS}).*"),  # shapes, and types of other packages
    ("py:class", r"theory\.(prior|activation)\.\w+|sim\.pretrained\.(models|text)\.\w+"),  # types made by a function
    ("py:class", r"compare\.(stages\.Excursions|sweeps\.plan\.Plan)"),
]

PACKAGES = ("theory", "theory.limits", "sim", "sim.pretrained", "compare")


def public_names() -> dict[str, str]:
    """Where a public thing is defined: where it is public."""
    found = {}
    for package in PACKAGES:
        for name, thing in vars(importlib.import_module(package)).items():
            defined = getattr(thing, "__module__", "")
            if defined.startswith(package + "."):
                found[f"{defined}.{name}"] = f"{package}.{name}"
    return found


def anchors(document: str) -> dict[str, str]:
    """Of the numbered sections of a document."""
    text = (Path(__file__).parent / document).read_text(encoding="utf-8")
    return {number: make_id(title) for title, number in re.findall(r"^#+ ((\d[\d.]*) .*)$", text, re.MULTILINE)}


ANCHORS = {name: anchors(f"{name}.md") for name in ("model", "limits")}


def cited(citation: re.Match[str]) -> str:
    """`docs/model.md §4` as a link to that section."""
    page, number = citation[1], citation[2]
    return f"`docs/{page}.md §{number} <../{page}.html#{ANCHORS[page][number]}>`__"


def resolve(app, env, node, contnode):
    """A reference to where a thing is defined leads to where it is public."""
    public = app.config._public.get(node.get("reftarget", ""))
    if public is None or node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)


def plain(app, what, name, obj, options, lines):
    """Docstrings are plain text with `code`: bars, stars, trailing underscores and single letters are themselves.

    Names that share an entry get one each, citations of the mathematics are links.
    """

    def each(entry):
        return "\n".join(f"{entry[1]}{own}: {entry[3]}" for own in entry[2].split(", "))

    def kept(mark):
        return mark[0] if mark[0][1:] else f"\\{mark[0]}"  # *Heads of paragraphs.* stay

    text = re.sub(r"^( +)((?:\w+, )+\w+): (.*(?:\n\1 +.*)*)", each, "\n".join(lines), flags=re.MULTILINE)
    parts = re.split(r"(^ *>>>.*?(?:\n *\n|\Z)|`[^`]*`)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(r"(?<!\w)\*[A-Z][^*]*\*(?!\w)|[|*]|_(?!\w)|(?<=: \w)\.", kept, part) for part in parts[::2]]
    parts[::2] = [re.sub(r"docs/(model|limits)\.md §(\d+(?:\.\d+)*)", cited, part) for part in parts[::2]]
    lines[:] = "".join(parts).split("\n")
    if what in ("property", "attribute"):
        lines[0] = f": {lines[0]}"  # or napoleon takes the words before a colon for a type


def setup(app):
    app.config._public = public_names()
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", plain, priority=400)  # before napoleon
