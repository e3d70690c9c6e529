"""The gallery in the docs: made from a run's folder, and honest about pictures that are older than the run."""

import importlib.util
import json
from pathlib import Path

from pandas import DataFrame

from identikit.paper.claims.catalogue import CLAIMS
from identikit.paper.claims.report import COLUMNS, rows
from identikit.paper.inputs import COMPUTED
from identikit.runs.store import Store, write_tables
from tests.paper.test_report import made

SCRIPT = Path(__file__).parents[2] / "docs" / "gallery" / "make.py"


def test_the_page_shows_new_and_kept_pictures(tmp_path, monkeypatch):
    run, docs = tmp_path / "run", tmp_path / "docs"
    store = Store(run, {"model": "MiniLM", "weights": "ab12" * 16, "version": "1.0"})
    write_tables(store, {"claims": DataFrame(rows(made()), columns=list(COLUMNS))})
    (run / "figures").mkdir()
    (run / "figures" / "fig1a.png").write_bytes(b"new")
    computed = run / "inputs" / "mrpc" / "rates" / COMPUTED
    computed.parent.mkdir(parents=True)
    computed.write_text(json.dumps({"device": "a GPU", "versions": {"torch": "2.0"}}))
    docs.mkdir()
    (docs / "about.md").write_text("What was run.\n")
    (docs / "fig1a.png").write_bytes(b"old")
    (docs / "fig38.png").write_bytes(b"old")

    spec = importlib.util.spec_from_file_location("make_gallery", SCRIPT)
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    monkeypatch.setattr(make, "HERE", docs)
    monkeypatch.setattr("sys.argv", ["make.py", str(run)])
    make.main()

    page = (docs / "README.md").read_text()
    captions = {line[2:].split(".")[0]: line for line in page.splitlines() if line.startswith("**")}
    assert page.startswith("# The paper on MiniLM\n\nWhat was run.\n")
    assert all(CLAIMS[one.claim.name].words in page for one in made())
    assert "- a GPU (torch 2.0): mrpc/rates." in page
    assert captions.keys() == {"fig1a", "fig38"}  # no picture is promised that is not there
    assert not captions["fig1a"].endswith(make.KEPT) and captions["fig38"].endswith(make.KEPT)
    assert (docs / "fig1a.png").read_bytes() == b"new" and (docs / "fig38.png").read_bytes() == b"old"
