"""A real server in a process of its own, for tests: two tiny models on a free port, and a client that talks to it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import transformers as hf

from tests.models import tiny

SHORT = "w5 w6 w7 w8 w9 w10 w11 w12 w13 w14"
LONG = " ".join(f"w{3 + place * 7 % 57}" for place in range(220))  # half a minute, if nobody cancels it
ENDED = ("done", "failed", "cancelled")


def save_models(folder: Path) -> list[Path]:
    """Save a tiny encoder, and a tiny decoder that reads long texts."""
    long = hf.LlamaConfig(**tiny._GROUPED | {"max_position_embeddings": 1024})
    models = {"tiny-bert": tiny.build("bert-mlm"), "tiny-llama": tiny.drawn(hf.LlamaForCausalLM(long).eval())}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    return [folder / name for name in models]


@dataclass
class Served:
    """A server that runs: its process, where it is, and what it printed as errors."""

    process: subprocess.Popen[str]
    address: str
    client: httpx.Client
    errors: list[str]
    asked: list[str]

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def submit(self, text: str, **more: Any) -> dict[str, Any]:
        """Ask for an analysis, and return how far it is."""
        answer = self.post("/api/jobs", {"text": text, **more})
        assert answer.status_code in (200, 202), answer.text
        self.asked.append(answer.json()["id"])
        return answer.json()

    def wait(self, id: str, *states: str, seconds: float = 120) -> dict[str, Any]:
        """Wait until an analysis is in one of some states; by default, until it has ended."""
        until = time.monotonic() + seconds
        while (now := self.client.get(f"/api/jobs/{id}").json())["state"] not in (states or ENDED):
            assert time.monotonic() < until, now
            time.sleep(0.05)
        return now

    def result(self, text: str = SHORT, **more: Any) -> str:
        """Return the id of an analysis that is done."""
        job = self.submit(text, **more)
        assert self.wait(job["id"])["state"] == "done"
        return job["id"]

    def health(self) -> dict[str, Any]:
        return self.client.get("/healthz").json()

    def workers(self) -> list[psutil.Process]:
        """The worker processes, the oldest first."""
        children = psutil.Process(self.process.pid).children()
        found = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
        return sorted(found, key=lambda one: one.create_time())

    def healthy(self, seconds: float = 60) -> None:
        """Wait until both workers are there."""
        until = time.monotonic() + seconds
        while self.health()["status"] != "ok":
            assert time.monotonic() < until
            time.sleep(0.1)

    def events(self, id: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Follow an analysis."""
        with self.client.stream("GET", f"/api/jobs/{id}/events", timeout=60) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))


@contextmanager
def served(*options: str) -> Iterator[Served]:
    """Serve until the block ends; then the server must end well, and leave no process behind."""
    command = [sys.executable, "-m", "identikit", "serve", "--port", "0", *options]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    listening = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    listening.start()
    started = re.search(r"http://\S+:\d+", process.stdout.readline())
    assert started is not None, process.wait(10) or errors
    family: list[psutil.Process] = []
    try:
        with httpx.Client(base_url=started[0], timeout=30, trust_env=False) as client:
            yield Served(process, started[0], client, errors, [])
        family = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            status = process.wait(15)
        finally:
            process.kill()
        listening.join()
        process.stdout.close()
        process.stderr.close()
    assert status == 0, errors
    assert psutil.wait_procs(family, timeout=5)[1] == []
