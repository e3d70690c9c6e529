"""The gallery in the docs: made from folders of runs, and honest about pictures that are older than they are."""

import json
from pathlib import Path

import pytest
from gallery import make
from pandas import DataFrame

from identikit.paper.claims.catalogue import CLAIMS
from identikit.paper.claims.report import COLUMNS, rows
from identikit.paper.inputs import COMPUTED
from identikit.runs.store import Store, write_tables
from tests.paper.test_report import made


def a_run(folder: Path, figures: dict[str, bytes], n_claims: int, **given: object) -> Path:
    """A folder as `reproduce` leaves it."""
    store = Store(folder, {"weights": "ab12" * 16, "version": "1.0"}, {"model": {"name": "MiniLM"}})
    write_tables(store, {"claims": DataFrame(rows(made()[:n_claims]), columns=list(COLUMNS))})
    (folder / "command.json").write_text(json.dumps({"arguments": given}))
    (folder / "figures").mkdir()
    for name, picture in figures.items():
        (folder / "figures" / f"{name}.png").write_bytes(picture)
    return folder


def test_the_page_shows_new_and_kept_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = a_run(tmp_path / "run", {"fig1a": b"new"}, 1, model=None, first=None)
    more = a_run(tmp_path / "more", {"fig1a": b"sampled", "fig3a": b"sampled"}, 9, model="a/hub-id", first=40)
    computed = run / "inputs" / "mrpc" / "rates" / COMPUTED
    computed.parent.mkdir(parents=True)
    computed.write_text(json.dumps({"device": "a GPU", "versions": {"torch": "2.0"}}))
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "about.md").write_text("What was run.\n")
    (docs / "fig1a.png").write_bytes(b"old")
    (docs / "fig38.png").write_bytes(b"old")
    monkeypatch.setattr("sys.argv", ["make.py", str(docs), str(run), str(more)])
    make.main()

    page = (docs / "README.md").read_text()
    captions = {line[2:].split(".")[0]: line for line in page.splitlines() if line.startswith("**")}
    assert page.startswith("# The paper on MiniLM\n\nWhat was run.\n")
    rows_of = {line[2:].split(" (")[0]: line for line in page.splitlines() if line.startswith("| ")}
    first, *others = [rows_of[CLAIMS[one.claim.name].words] for one in made()]
    assert "40 texts" not in first and all(", 40 texts |" in line for line in others)
    assert "- a GPU (torch 2.0): mrpc/rates." in page
    assert captions.keys() == {"fig1a", "fig3a", "fig38"}  # no picture is promised that is not there
    assert not captions["fig1a"].endswith(make.KEPT) and captions["fig38"].endswith(make.KEPT)
    assert (docs / "fig1a.png").read_bytes() == b"new" and (docs / "fig38.png").read_bytes() == b"old"
    assert "identikit reproduce fig1a --data wikitext --data-dir GLUE --out out\n" in page
    assert "identikit reproduce fig3a --data mrpc --data-dir GLUE --model a/hub-id --first 40 --out out\n" in page
