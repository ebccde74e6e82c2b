"""The notebooks: committed with their outputs, and every cell runs."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
PERSONAL = re.compile(r"(?<![\w.])/(home|Users|root|tmp|var|work|opt|mnt)/|[A-Z]:\\{1,2}Users|file://")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_committed_with_outputs_and_no_trace_of_a_machine(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 500_000
    assert not PERSONAL.search(re.sub(r'"image/png": ".*?"', "", text))
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))  # run once, from top to bottom
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)


# about a minute each, where the others take half of it or less
LONG = {"3_stages.ipynb", "4_activations_and_bayes_risk.ipynb"}
each_run = [pytest.param(path, marks=pytest.mark.slow if path.name in LONG else ()) for path in NOTEBOOKS]


@pytest.mark.optimized
@pytest.mark.parametrize("path", each_run, ids=lambda path: path.name)
def test_every_cell_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
