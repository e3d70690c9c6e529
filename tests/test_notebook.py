"""The tutorial shows what it says it shows, and quotes only numbers that it printed.

That it runs at all is seen when the site is built, which executes it; so here it is only executed among the slow tests.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"
ROUNDING = 1e-5


@pytest.fixture
def notebook() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter warns about its own folders
        import nbformat

        return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_kept_without_outputs(notebook: Any):
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


def test_its_links_lead_somewhere(notebook: Any):
    targets = [target for cell in notebook.cells for target in re.findall(r"\]\(([^)#]+)\)", cell.source)]
    assert targets
    for target in targets:
        assert (NOTEBOOK.parent / target).exists(), target


@pytest.mark.slow
def test_it_shows_what_it_says(notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as all tests have
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbclient import NotebookClient

        resources = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    check_pictures(cells)
    check_numbers(notebook, cells)
    check_replacements(cells)
    check_special_tokens(cells)
    check_files(tmp_path)


def shown(cell: Any) -> dict[str, str]:
    """What a cell shows, by kind; what it prints counts as plain text."""
    kinds = {}
    printed = ""
    for output in cell.outputs:
        kinds |= output.get("data", {})
        if output.output_type == "stream":
            printed += output.text
    return kinds | {"text/plain": printed + kinds.get("text/plain", "")}


def check_pictures(cells: list[Any]) -> None:
    """Each cell shows something, and those that are tagged so a picture."""
    pictures = [cell for cell in cells if "picture" in cell.metadata.get("tags", [])]
    assert all(cell.outputs for cell in cells if "install" not in cell.metadata.get("tags", []))
    assert len(pictures) == 5 and all("image/png" in shown(cell) for cell in pictures)


def check_numbers(notebook: Any, cells: list[Any]) -> None:
    """Numbers of two digits or more, and all with a point, those of the example with three tokens too, were printed."""
    words = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    prose = re.sub(r"`[^`]*`|^    .*$|\]\([^)]*\)|et al\. \(\d+\)", "", words, flags=re.MULTILINE)
    quoted = set(re.findall(r"\d+\.\d+|\b\d{2,}\b", prose)) - {"3.11"}
    printed = re.findall(r"\d+\.?\d*", " ".join(shown(cell)["text/plain"] for cell in cells))
    assert len(quoted) > 10
    assert set(map(float, quoted)) <= set(map(float, printed))


def check_replacements(cells: list[Any]) -> None:
    """Neither replacement changes the output."""
    (text,) = [shown(cell)["text/plain"] for cell in cells if "alternative_attention" in cell.source]
    changes = [float(number) for number in re.findall(r"by ([\d.e-]+\d)", text)]
    assert len(changes) + text.count("bit-identical") == 2
    assert all(change < ROUNDING for change in changes)


def check_special_tokens(cells: list[Any]) -> None:
    """The least weight on special tokens is more than ten times the effective one in layers 1 to 4."""
    (table,) = [shown(cell)["text/html"] for cell in cells if "found = ik.explain" in cell.source]
    rows = [list(map(float, re.findall(r"<td>([\d.]+)</td>", row))) for row in table.split("<tr>")[1:]]
    for row in rows[1:5]:
        assert row[4] > 10 * row[6]  # least, effective


def check_files(folder: Path) -> None:
    """The figure and the page are written, the page with its numbers in it."""
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")
    page = (folder / "page.html").read_text()
    assert page.startswith("<!doctype html>") and len(page) > 1_000_000
