"""The server over real HTTP: every endpoint, every refusal, and what it guards against."""

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

import identikit as ik
from identikit.attention.measure_kinds import MEASURE_KINDS
from identikit.web.messages import Limits, ModelSource
from identikit.web.server import serve
from identikit.web.worker import TaskRunner
from tests.models import tiny
from tests.web.served import SHORT, Served

EDGE = {"layer": 1, "head": 2, "query": 3, "key": 4}
JSON = {"content-type": "application/json"}
CODES = {400: "invalid", 404: "not_found", 405: "wrong_method", 413: "too_large", 421: "wrong_host"}


@pytest.fixture(scope="module")
def result(server: Served) -> str:
    return server.result()


@pytest.fixture(scope="module")
def attention(folders: list[Path]) -> Any:
    return ik.effective_attention(ik.load(folders[0]), SHORT)


def refused(answer: httpx.Response, status: int, code: str | None = None) -> str:
    """Check that an answer is an error in the one shape; return its sentence."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"} and set(answer.json()["error"]) <= {"code", "message", "hint"}
    error = answer.json()["error"]
    assert error["code"] == (code or CODES[status])
    assert error["message"][0].isupper() and error["message"].endswith(".")
    return error["message"]


# What it answers


def test_it_says_what_it_has(server: Served):
    found = server.client.get("/api").json()
    assert found["version"] == ik.__version__
    bert, llama = found["models"]
    assert bert == {"name": "tiny-bert", "layers": 3, "heads": 4, "causal": False, "modality": "text", "tokens": 64}
    assert llama["name"] == "tiny-llama" and llama["causal"] and llama["tokens"] == 1024
    assert found["limits"]["characters"] == 4000 and found["limits"]["waiting"] == 2
    assert found["sample"]["text"] and found["sample"]["pair"]
    offered = {measure["name"]: measure for measure in found["measures"]}
    assert [*offered] == [*MEASURE_KINDS, "roles"] and offered["rollout"]["meaning"] == MEASURE_KINDS["rollout"].meaning
    assert [name for name, measure in offered.items() if measure["of_target"]] == ["gradient", "logit", "relevance"]
    assert server.health() | {"waiting": 0, "running": 0} == {
        "status": "ok", "version": ik.__version__, "waiting": 0, "running": 0, "workers": 2,
    }  # fmt: skip


def test_pages_are_sent_with_all_their_parts(server: Served, result: str):
    page = server.client.get("/")
    assert page.headers["content-type"].startswith("text/html") and page.text.startswith("<!doctype html>")
    assert server.client.get(f"/r/{result}").text == page.text
    script = server.client.get("/static/page.js")
    assert script.headers["content-type"].startswith("text/javascript") and "EventSource" in script.text
    assert server.client.get("/static/style.css").headers["content-type"].startswith("text/css")


def test_an_analysis_is_the_explanation_of_the_api(server: Served, result: str, folders: list[Path]):
    found = server.client.get(f"/api/results/{result}").json()
    assert found["state"] == "done" and found["model"] == "tiny-bert"
    assert (found["text"], found["pair"]) == (SHORT, None)
    own = ik.explain(ik.load(folders[0]), SHORT, seconds=60.0).to_dict()
    said = found["explanation"]
    assert said["verdict"] and said["warnings"] == []
    assert said["tokens"] == own["tokens"] and said["provenance"]["weights"] == own["provenance"]["weights"]
    for name in ("certain_mass", "pearson", "special_raw", "own"):
        assert torch.tensor(said[name]).allclose(torch.tensor(own[name]), atol=1e-6), name


def test_a_view_and_a_simplex_map_are_those_of_the_api(server: Served, result: str, attention: Any):
    view = server.client.get(f"/api/results/{result}/view")
    simplex = server.post(f"/api/results/{result}/simplex", {"layer": 1, "head": 2})
    for answer in (view, simplex):
        assert answer.headers["content-type"] == "application/octet-stream"
    assert load(view.content)["heads.pearson"].allclose(attention.pearson("head").float(), atol=1e-5)
    expected = attention.sel(layer=1, head=2).simplex.float()
    assert load(simplex.content)["simplex"].allclose(expected, atol=1e-6)


def test_rows_are_bounded_as_the_api_does(server: Served, result: str, attention: Any):
    arrays = load(server.post(f"/api/results/{result}/rows", {"rows": [[1, 2, 3], [0, 0, 5]]}).content)
    for place, lower, upper in zip(*(arrays[f"rows.{name}"] for name in ("place", "lower", "upper")), strict=True):
        layer, head, query = place.tolist()
        own = attention.sel(layer=layer, head=head).intervals(query=query)
        assert lower.allclose(own.lower.float().squeeze(), atol=1e-6)
        assert upper.allclose(own.upper.float().squeeze(), atol=1e-6)
    wide = load(server.post(f"/api/results/{result}/rows", {"rows": [[1, 2, 3]], "epsilon": 0.1}).content)
    own = attention.sel(layer=1, head=2).intervals(query=3)
    assert (wide["grid.upper"].flatten() >= own.upper.float().flatten() - 1e-6).all()


def test_a_moved_edge_leaves_the_output_as_it_was(server: Served, result: str, attention: Any):
    interval = attention.sel(layer=1, head=2).intervals(query=3, key=4)
    for end in ("lower", "upper"):
        moved = server.post(f"/api/results/{result}/move", EDGE | {"end": end}).json()
        assert moved["weight"] == moved["attention"][4] == pytest.approx(float(getattr(interval, end)), abs=1e-6)
        assert moved["raw"][4] == pytest.approx(float(interval.raw), abs=1e-6)
        assert sum(moved["attention"]) == pytest.approx(1) and moved["row_residual"] < 1e-6
        assert 0 <= moved["output_change"]["hidden"] < 1e-5 and 0 <= moved["output_change"]["logits"] < 1e-5


def test_a_pair_a_chosen_model_and_a_text_that_names_a_file(server: Served, folders: list[Path]):
    file = str(folders[0] / "config.json")
    id = server.result("w5 w6 w7", pair=file, model="tiny-llama")
    found = server.client.get(f"/api/results/{id}").json()
    assert (found["model"], found["text"], found["pair"]) == ("tiny-llama", "w5 w6 w7", file)
    assert "joined_by" in found["explanation"]


def test_measures_and_a_target_are_read_as_the_api_does(server: Served, folders: list[Path]):
    asked = {"measures": ["rollout", "gradient", "rollout"], "target": "w9", "model": "tiny-llama"}
    id = server.result(SHORT, **asked)
    found = server.client.get(f"/api/results/{id}").json()
    assert (found["measures"], found["target"]) == (["rollout", "gradient"], "w9")
    read = found["explanation"]["readings"]
    model = ik.load(folders[1])
    for name in found["measures"]:
        own = ik.attention_measure(model, SHORT, name, target="w9" if name == "gradient" else None)
        assert read[name]["determined"] == pytest.approx(own.survival().determined, abs=1e-5)
    assert "Which explanation can be trusted?" in found["explanation"]["verdict"]
    assert id != server.result(SHORT, model="tiny-llama") != server.result(SHORT, **asked | {"target": 10})
    failed = server.wait(server.submit(SHORT, **asked | {"target": "w5 w6"})["id"], "failed")
    assert failed["error"]["message"] == "target='w5 w6' is 2 tokens of tiny-llama. Give one token, or its id."


def test_events_tell_how_far_it_is_and_the_same_question_has_its_answer_at_once(server: Served):
    text = "w20 w21 w22 w23 w24 w25 w26 w27 w28 w29"
    job = server.submit(text)
    told = list(server.events(job["id"]))
    assert {name for name, _ in told} == {"state"}
    assert told[-1][1]["state"] == "done" and told[0][1]["state"] in ("waiting", "running")
    assert any(state["progress"] for _, state in told[:-1])
    assert list(server.events(job["id"])) == [told[-1]]
    own_page = {"Origin": server.address, "Sec-Fetch-Site": "same-origin"}
    again = server.post("/api/jobs", {"text": text, "model": "tiny-bert"}, headers=own_page)
    assert again.status_code == 200 and again.json()["id"] == job["id"] and again.json()["state"] == "done"


def test_the_description_names_every_route_and_its_errors(server: Served):
    paths = server.client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        "/", "/r/{id}", "/static/{name}", "/api", "/healthz", "/api/jobs", "/api/jobs/{id}", "/api/jobs/{id}/events",
        "/api/results/{id}", "/api/results/{id}/view", "/api/results/{id}/rows", "/api/results/{id}/simplex",
        "/api/results/{id}/move",
    }  # fmt: skip
    for path, methods in paths.items():
        for method, about in methods.items():
            assert about["summary"], (method, path)
            error = about["responses"]["404"]["content"]["application/json"]["schema"]["$ref"]
            assert error == "#/components/schemas/Error"
    for path in ("/docs", "/redoc"):  # they would load scripts from elsewhere
        refused(server.client.get(path), 404)


# What it refuses


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"text": " "}, "input", "is blank"),
        ({"text": "w5 \ud800"}, "input", "not valid Unicode"),
        ({"text": "w5 " * 2000}, "too_long", "has 6,000 characters, and this server reads at most 4,000"),
        ({"text": "w5 " * 70}, "too_long", "72 tokens and the model reads at most 64"),
        ({"text": "w5", "model": "../../etc"}, "unknown_model", "It has: tiny-bert, tiny-llama"),
        ({"text": 5}, "invalid", "text: Input should be a valid string"),
        ({"text": "w5", "probes": "exact"}, "invalid", "Extra inputs"),
        ({"text": "w5", "measures": ["zebra"]}, "input", "It has: attention, mean, rollout"),
        ({"text": "w5", "measures": "rollout"}, "invalid", "measures: Input should be a valid list"),
        (
            {"text": "w5", "measures": [*MEASURE_KINDS][:5]},
            "input",
            "names 5 measures, and this server reads at most 4",
        ),
        ({"text": "w5", "measures": ["mean"], "target": "w9"}, "input", "Ask for one too: gradient, logit, relevance"),
        ({"text": "w5", "measures": ["gradient"], "target": 1.5}, "invalid", "target"),
        ([], "invalid", "the body"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_at_once(server: Served, body: Any, code: str, words: str):
    answer = server.client.post("/api/jobs", content=json.dumps(body), headers=JSON)
    assert words in refused(answer, 422, code)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("rows", {"rows": []}, "at least 1"),
        ("rows", {"rows": [[0, 0, 0]] * 17}, "at most 16"),
        ("rows", {"rows": [[0, 0, -1]]}, "greater than or equal to 0"),
        ("rows", {"rows": [[0, 0, 99]]}, "There is no query 99"),
        ("rows", {"rows": [[0, 0, 1]], "epsilon": float("nan")}, "epsilon"),
        ("simplex", {"layer": 3, "head": 0}, "There is no layer 3"),
        ("move", EDGE | {"end": "farther"}, "'lower' or 'upper'"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(server: Served, result: str, path: str, body: Any, words: str):
    answer = server.client.post(f"/api/results/{result}/{path}", content=json.dumps(body), headers=JSON)
    assert words in refused(answer, 422, answer.json()["error"]["code"])


def test_bodies_that_are_no_json_or_too_large(server: Served):
    for content in (b"", b"{", b"\xff\xfe", b"null"):
        refused(server.client.post("/api/jobs", content=content, headers=JSON), 422, "invalid")
    nested = server.client.post("/api/jobs", content=b"[" * 20_000, headers=JSON)
    refused(nested, nested.status_code, "invalid")
    assert nested.status_code in (400, 422)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        refused(
            server.client.post("/api/jobs", content=b'{"text":"w5"}', headers={"content-type": kind}), 415, "not_json"
        )

    limit = server.client.get("/api").json()["limits"]["body"]
    large = json.dumps({"text": "w" * limit}).encode()
    refused(server.client.post("/api/jobs", content=large, headers=JSON), 413)
    pieces = (large[start : start + 1000] for start in range(0, len(large), 1000))
    refused(server.client.post("/api/jobs", content=pieces, headers=JSON), 413)  # which does not say its size


def test_what_is_not_there(server: Served, result: str):
    for path in ("/nothing", "/api/nothing", "/static/nothing.js", "/static/", "/api/jobs/0", "/api/results/0/view"):
        refused(server.client.get(path), 404)
    assert "no longer kept" in refused(server.client.delete("/api/jobs/0123"), 404)
    refused(server.post("/api/results/0/rows", {"rows": [[0, 0, 0]]}), 404)
    refused(server.client.put("/api"), 405)
    refused(server.client.post("/api", json={}), 405)
    refused(server.client.get(f"/api/results/{result}/move"), 405)


def test_no_path_of_a_request_reaches_a_file(server: Served):
    host = server.address.removeprefix("http://")
    paths = (
        "/static/../server.py /static/..%2fserver.py /static/%2e%2e/server.py /static//etc/passwd /../etc/passwd "
        "/static/..\\server.py /static/%00 /static/page.js%00.png /static/server.py //etc/passwd"
    )
    for path in paths.split():
        with socket.create_connection(host.split(":"), timeout=10) as connection:  # a client would clean the path
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 404") and b'"not_found"' in answer, path


# What it guards against


def test_every_answer_says_what_a_page_may_do(server: Served, result: str):
    wrong = {"Host": "evil.example"}
    answers = [server.client.get(path) for path in ("/", "/api", "/nothing", f"/api/results/{result}/view")]
    for answer in [*answers, server.client.get("/", headers=wrong), server.client.put("/api")]:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers and "server" not in answer.headers


def test_only_its_own_names_lead_to_it(server: Served):
    port = server.address.rpartition(":")[2]
    wrong = ("evil.example", f"evil.example:{port}", "localhost", "localhost:1", "127.0.0.1", f"127.0.0.1.evil:{port}")
    for host in (*wrong, ""):
        assert "Host header" in refused(server.client.get("/api", headers={"Host": host}), 421)
    for host in (f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}", "example.org", "example.org:443"):
        assert server.client.get("/api", headers={"Host": host}).status_code == 200, host


def test_a_page_elsewhere_starts_and_stops_nothing(server: Served, result: str):
    for header, values in {
        "Origin": ("https://evil.example", "null", "http://127.0.0.1:1", "http://["),
        "Sec-Fetch-Site": ("cross-site", "same-site"),
    }.items():
        for value in values:
            refused(server.post("/api/jobs", {"text": "w5 w6"}, headers={header: value}), 403, "foreign_origin")
            answer = server.client.delete(f"/api/jobs/{result}", headers={header: value})
            refused(answer, 403, "foreign_origin")


# How it starts and stops


def test_what_keeps_it_from_starting_is_a_sentence(server: Served, tmp_path: Path):
    taken = int(server.address.rpartition(":")[2])
    with ThreadPoolExecutor(1) as thread:  # a browser's loop may be running in this one
        for host, port, words in [
            ("127.0.0.1", taken, "the port is taken. Choose another with --port"),
            ("192.0.2.1", 0, "Serving on 192.0.2.1"),
            ("127.0.0.1", 0, "the folder has no .safetensors file"),
        ]:
            with pytest.raises(ik.IdentikitError, match=words):
                thread.submit(serve, (ModelSource(str(tmp_path)),), host, port, (), Limits()).result()


def test_models_that_are_not_served(tmp_path: Path, folders: list[Path]):
    tiny.build("vit").save_pretrained(tmp_path / "vit")
    tiny.reader("vit").save_pretrained(tmp_path / "vit")
    bert = ModelSource(str(folders[0]))
    changed = replace(bert, fingerprint="another")
    connection, _ = Pipe()
    for sources, words in [
        ((ModelSource(str(tmp_path / "vit")),), "it reads images, and visitors type texts"),
        ((bert, bert), "Serving two models called tiny-bert"),
        ((changed,), "its files are not those that the server was started with"),
    ]:
        with pytest.raises(ik.ModelError, match=words):
            TaskRunner(sources, connection)


def test_without_its_packages_it_says_which_is_missing():
    script = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv[1:] = ['serve']\n"
        "from identikit.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "needs the package uvicorn" in done.stderr and "pip install 'identikit[web]'" in done.stderr
