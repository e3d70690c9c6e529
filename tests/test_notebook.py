"""The notebook of first steps runs, and each step is short and shows something."""

import ast
import re
import warnings
from copy import deepcopy
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "first_steps.ipynb"
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def notebook():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter warns about its own folders
        import nbformat

        return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(notebook, tmp_path_factory: pytest.TempPathFactory):
    """The notebook after a run in a kernel with one thread per process, as all tests have."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        from nbclient import NotebookClient

        patch.setenv("OMP_NUM_THREADS", "1")
        where = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
        return NotebookClient(deepcopy(notebook), timeout=600, kernel_name="python3", resources=where).execute()


def steps(notebook):
    return [cell for cell in notebook.cells if "step" in cell.metadata.get("tags", [])]


def names(source: str, context: type[ast.expr_context]) -> set[str]:
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    return {node.id for node in found if isinstance(node.ctx, context)}


def test_each_step_takes_at_most_two_lines(notebook):
    """Lines of earlier steps that a step builds on count too; only the cell that loads the model is free."""
    made: dict[str, int] = {}
    for cell in steps(notebook):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        needed = sum(made.get(name, 0) for name in names(cell.source, ast.Load) - names(cell.source, ast.Store))
        assert len(lines) + needed <= 2, cell.source
        made |= {name: needed + 1 for line in lines for name in names(line, ast.Store)}
    assert len(steps(notebook)) == 7


def test_it_is_kept_without_outputs(notebook):
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


def test_each_step_shows_a_table_or_a_picture(executed):
    kinds = []
    for cell in steps(executed):
        shown = {kind: data for output in cell.outputs for kind, data in output.get("data", {}).items()}
        html = shown.get("text/html", "")
        kinds.append("picture" if "image/png" in shown or "<img" in html else "table" if "<table" in html else None)
    assert kinds == ["table", "picture", "table", "picture", "picture", "picture", "picture"]


def test_the_alternative_leaves_the_output_as_it_was(executed):
    html = steps(executed)[4].outputs[0].data["text/html"]
    changes = [float(number) for number in re.findall(r"by ([\d.e-]+\d)", html)]
    assert all(change < ROUNDING for change in changes)
    assert changes or "left the final hidden states bit-identical" in html
