"""The tutorial runs, shows what it says it shows, and quotes only numbers that it printed."""

import re
import warnings
from copy import deepcopy
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def notebook():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter warns about its own folders
        import nbformat

        return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(notebook, tmp_path_factory: pytest.TempPathFactory):
    """The notebook after a run in a kernel with one thread per process, as all tests have; `folder` is where."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        from nbclient import NotebookClient

        patch.setenv("OMP_NUM_THREADS", "1")
        folder = str(tmp_path_factory.mktemp("notebook"))
        where = {"metadata": {"path": folder}}
        done = NotebookClient(deepcopy(notebook), timeout=600, kernel_name="python3", resources=where).execute()
        done.metadata["folder"] = folder
        return done


def shown(cell) -> dict[str, str]:
    """What a cell shows, by kind; what it prints counts as plain text."""
    kinds = {kind: data for output in cell.outputs for kind, data in output.get("data", {}).items()}
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return kinds | {"text/plain": printed + kinds.get("text/plain", "")}


def prose(notebook) -> str:
    """The words of the notebook, without code and links."""
    words = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.sub(r"`[^`]*`|^    .*$|\]\([^)]*\)|et al\. \(\d+\)", "", words, flags=re.MULTILINE)


def test_it_is_kept_without_outputs(notebook):
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


def test_its_links_lead_somewhere(notebook):
    targets = [target for cell in notebook.cells for target in re.findall(r"\]\(([^)#]+)\)", cell.source)]
    assert targets and all((NOTEBOOK.parent / target).exists() for target in targets), targets


def test_each_cell_shows_something_and_what_is_tagged_a_picture(executed):
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    pictures = [cell for cell in cells if "picture" in cell.metadata.get("tags", [])]
    assert all(cell.outputs for cell in cells)
    assert len(pictures) == 5 and all("image/png" in shown(cell) for cell in pictures)


def test_numbers_in_the_prose_were_shown(executed):
    """Numbers of two digits or more, and all with a point, those of the example with three tokens too."""
    told = set(re.findall(r"\d+\.\d+|\b\d{2,}\b", prose(executed))) - {"3.11"}
    cells = " ".join(shown(cell)["text/plain"] for cell in executed.cells if cell.cell_type == "code")
    printed = {float(number) for number in re.findall(r"\d+\.?\d*", cells)}
    assert len(told) > 10
    assert not {number for number in told if float(number) not in printed}


def test_neither_replacement_changes_the_output(executed):
    (tried,) = [shown(cell)["text/plain"] for cell in executed.cells if "alternative_attention" in cell.source]
    changes = [float(number) for number in re.findall(r"by ([\d.e-]+\d)", tried)]
    assert len(changes) + tried.count("bit-identical") == 2
    assert all(change < ROUNDING for change in changes)


def test_the_least_weight_on_special_tokens_is_far_above_the_effective_one(executed):
    """More than ten times in layers 1 to 4, as the prose says."""
    (table,) = [shown(cell)["text/html"] for cell in executed.cells if "found = ik.explain" in cell.source]
    rows = [[float(cell) for cell in re.findall(r"<td>([\d.]+)</td>", row)] for row in table.split("<tr>")[1:]]
    least, effective = 4, 6  # columns, after the layer
    assert all(rows[layer][least] > 10 * rows[layer][effective] for layer in range(1, 5))


def test_the_figure_and_the_page_are_written(executed):
    folder = Path(executed.metadata["folder"])
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")
    page = (folder / "page.html").read_text()
    assert page.startswith("<!doctype html>") and len(page) > 1_000_000  # with the numbers in it
