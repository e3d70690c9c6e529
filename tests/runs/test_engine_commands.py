"""Every command over a dataset on every engine: the same tables, and a clean end on Ctrl-C. Real processes, so slow."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.runs.made import COMMANDS, ended, forked, save_model, save_texts, shards, tables, wait_for
from tools.soak import wait_until_gone

pytestmark = pytest.mark.slow

ENGINES = ("processes", "ray")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("engines")
    for name in ("bert", "llama"):
        save_model(place / name, name)
    save_texts(place / "texts.txt", 30)
    save_texts(place / "many.txt", 300)
    return place


def run(place: Path, name: str, out: Path, *given: str, data: str = "texts.txt") -> int:
    model = place / ("llama" if name == "inversion" else "bert")
    shared = {"--model": model, "--data": place / data, "--out": out, "--threads": 1}
    words = [str(part) for pair in shared.items() for part in pair]
    return forked([*COMMANDS[name], *words, *given], place / "errors")


@pytest.fixture(scope="module")
def local(place: Path) -> dict[str, dict[str, str]]:
    found = {}
    for name in COMMANDS:
        assert ended(run(place, name, place / "local" / name)) == 0, (place / "errors").read_text()
        found[name] = tables(place / "local" / name)
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_tables(place: Path, local: dict[str, dict[str, str]], tmp_path: Path, engine: str, name: str):
    if engine == "ray":
        pytest.importorskip("ray")
    process = run(place, name, tmp_path / "out", "--engine", engine, "--workers", "2")
    assert ended(process) == 0, (place / "errors").read_text()
    assert tables(tmp_path / "out") == local[name] != {}


@pytest.mark.parametrize("engine", ENGINES)
def test_ctrl_c_leaves_nothing_behind(place: Path, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IDENTIKIT_SOAK", str(tmp_path))
    (place / "errors").write_text("")
    out = tmp_path / "out"
    process = run(place, "attention", out, "--engine", engine, "--workers", "2", data="many.txt")
    wait_for(lambda: len(shards(out)) > 2, 240)
    os.killpg(process, signal.SIGINT)
    assert ended(process) == 130
    said = (place / "errors").read_text().splitlines()
    assert len(said) == 1 and said[0].startswith(f"identikit: Interrupted. What was computed is kept in {out}."), said
    wait_until_gone(tmp_path)
    assert len(shards(out)) > 2


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray cluster of two CPUs that somebody else has started."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # a token of its own, for the cluster and for us
    monkeypatch.setenv("RAY_AUTH_TOKEN", uuid4().hex + uuid4().hex)
    ray = Path(sys.executable).with_name("ray")
    command = [ray, "start", "--head", "--port=6399", "--num-cpus=2", "--include-dashboard=false", "--block"]
    head = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield "127.0.0.1:6399"
    finally:
        head.terminate()
        head.wait(60)


def test_an_existing_cluster(place: Path, local: dict[str, dict[str, str]], tmp_path: Path, cluster: str):
    def done() -> bool:
        return ended(run(place, "attention", tmp_path / "out", "--engine", "ray", "--address", cluster)) == 0

    wait_for(done, 240)
    assert tables(tmp_path / "out") == local["attention"]
