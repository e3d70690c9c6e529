"""`result.show()` in a notebook that is executed, and elsewhere."""

import json
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from identikit.errors import InputError
from identikit.web import report as shows
from identikit.web.bundle import bundle
from identikit.web.widget import Widget, widget

CELLS = [
    "import sys; sys.path.insert(0, {root!r})\nimport identikit as ik\nfrom tests.models import tiny",
    "found = ik.effective_attention(tiny.loaded('bert'), 'w4 w5 w6 w7 w8')\nfound.show()",
    "shown = found.show()\nprint(type(shown).__name__, len(shown.data), '_esm' in shown.keys)",
]


def test_a_notebook_shows_the_widget():
    root = str(Path(__file__).parents[2])
    cells = [nbformat.v4.new_code_cell(cell.format(root=root)) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = notebook.cells[1].outputs[0].data
    state = shown["application/vnd.jupyter.widget-view+json"]
    assert state["model_id"]
    kind, size, script = notebook.cells[2].outputs[0].text.split()
    assert (kind, script) == ("Widget", "True")
    assert int(size) > 1000
    models = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert any("export default { render: renderWidget };" in one["state"].get("_esm", "") for one in models.values())


def test_the_widget_is_drawn_in_a_browser(page: Any, content: bytes):
    """Call the module as anywidget does: with a model that has the data, and an element."""
    module = f"{bundle('widget.js')}\nexport default {{ render: renderWidget }};\n"
    page.goto("about:blank")
    script = """async ([module, encoded]) => {
        const url = URL.createObjectURL(new Blob([module], { type: "text/javascript" }));
        const { default: made } = await import(url);
        const data = new DataView(Uint8Array.from(atob(encoded), (sign) => sign.charCodeAt(0)).buffer);
        const el = document.createElement("div");
        document.body.append(el);
        const leave = made.render({ model: { get: () => data }, el });
        await new Promise((done) => setTimeout(done, 500));
        const drawn = el.querySelectorAll("canvas").length;
        leave();
        return [drawn, el.querySelectorAll("canvas").length, location.hash];
    }"""
    drawn, left, address = page.evaluate(script, [module, b64encode(content).decode()])
    assert drawn >= 3
    assert left == 0
    assert address == ""  # a notebook's address is not ours


def test_the_widget_holds_what_a_file_holds(explanation: Any):
    made = widget(explanation.identity)
    assert isinstance(made, Widget)
    header = json.loads(made.data[8 : 8 + int.from_bytes(made.data[:8], "little")])
    assert "identity.margin" in header


def test_elsewhere_a_browser_opens_the_page(explanation: Any, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setattr(shows.webbrowser, "open", opened.append)
    monkeypatch.setattr(shows, "_in_notebook", lambda: False)
    path = explanation.identity.show()
    assert opened == [path.as_uri()]
    assert path.read_text().startswith("<!doctype html>")


def test_without_anywidget_it_says_what_to_install(explanation: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shows, "_in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "identikit.web.widget", raising=False)
    with pytest.raises(InputError, match=r"pip install 'identikit\[notebook\]'"):
        explanation.identity.show()
