"""Results on the hub: a stand-in for it on this machine takes what would be uploaded."""

import json
from base64 import b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub.constants as hub
import pytest

import identikit as ik
from identikit.errors import InputError
from tests.cli.made import run
from tests.models import tiny

TEXT = "w5 w6 w7 w8 w9 w10"


class Hub(BaseHTTPRequestHandler):
    """What a client asks of the hub for one commit."""

    datasets: dict[str, dict[str, Any]]
    files: dict[str, bytes]

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers["Authorization"] != "Bearer right":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            wanted = json.loads(asked)  # older clients say `private`
            self.datasets["me/rows"] = {"private": wanted.get("private", wanted.get("visibility") == "private")}
            self.answer({"url": "me/rows"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(asked)["files"]]
            self.answer({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif "/commit/" in self.path:
            for line in map(json.loads, asked.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"http://{self.headers['Host']}/datasets/me/rows/commit/1", "commitOid": "1"})
        else:
            self.answer({})

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """The stand-in: its datasets, and the files that it was given."""
    handler = type("Handler", (Hub,), {"datasets": {}, "files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "right")
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_result_is_pushed_whole_with_a_card(pushed: type[Hub], tmp_path: Path):
    result = ik.attention_intervals(tiny.shared("llama"), TEXT, layer=1, head=0)
    assert result.push_to_hub("me/rows") == f"{hub.ENDPOINT}/datasets/me/rows"
    assert pushed.datasets["me/rows"]["private"] is True
    for name, content in pushed.files.items():
        (tmp_path / name).write_bytes(content)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\ntags:") and str(result) in card and result.provenance.weights in card
    assert 'snapshot_download("me/rows", repo_type="dataset")' in card
    assert ik.open_result(tmp_path).lower.equal(result.lower)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_run_is_pushed_with_its_columns_explained(pushed: type[Hub], tmp_path: Path):
    (tmp_path / "texts.txt").write_text("The dog ran.\nThe cat slept.\n")
    folder = tmp_path / "run"
    assert run("attention", "--data", tmp_path / "texts.txt", "--out", folder).status == 0
    done = run("push", folder, "me/rows", "--public")
    assert done.status == 0 and done.stdout == f"The results are at {hub.ENDPOINT}/datasets/me/rows.\n"
    assert pushed.datasets["me/rows"]["private"] is False
    shown = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert {*pushed.files} == shown | {"README.md"}
    assert all(pushed.files[name] == (folder / name).read_bytes() for name in shown)
    card = pushed.files["README.md"].decode()
    assert "- config_name: heads\n  data_files: heads.parquet\n" in card
    columns = json.loads((folder / "columns.json").read_text())
    for table, described in columns.items():
        assert f"## {table}\n" in card
        assert all(f"| `{name}` | {about['meaning']} |" in card for name, about in described.items())
    (folder / "heads.csv").write_text("another")
    assert run("push", folder, "me/rows").refused("heads.csv is not as it was written")
    (folder / "SHA256SUMS").unlink()
    assert run("push", folder, "me/rows").refused("the run is not complete")


def test_what_cannot_be_pushed_is_refused(pushed: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result = ik.attention_intervals(tiny.shared("llama"), TEXT, layer=1, head=0)
    for wrong in ("a b/c", "", "\ud800", None, 5):
        with pytest.raises(InputError, match=r"^Pushing to .* not the id of a dataset"):
            result.push_to_hub(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="public="):
        result.push_to_hub("me/rows", public="yes")  # pyright: ignore[reportArgumentType]
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(InputError, match=r"the hub refused it.*hf auth login"):
        result.push_to_hub("me/rows")
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match="the hub does not answer"):
        result.push_to_hub("me/rows")
    assert run("push", tmp_path / "nowhere", "me/rows").refused("there is no such folder")
    assert not pushed.files
