"""Send mixed requests to a server, several at a time, and watch that it stays well: `python tools/soak_server.py`.

Among them are analyses old and new, cancels, questions, streams that are followed or left, and bad bodies. There must
be no error 500, the queue must keep to its limit, and the memory of the server and its workers must stay flat.
"""

import argparse
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.web.served import Served, save_models, served

WAITING = 3  # analyses that may wait
AT_ONCE = 8  # requests
GROWTH = 96.0  # MiB that a process may grow after it is warm: what it keeps, and what its allocator does not give back
JSON = {"content-type": "application/json"}
BAD = (
    b"", b"{", b"[]", b'{"text": 5}', b'{"text": " "}', b'{"text": "\\ud800"}', b'{"rows": [[0, 0]]}', b"\xff",
    b"x" * 10**6,
)  # fmt: skip


@dataclass
class Soak:
    """A server under many requests, and what came of them."""

    server: Served
    chance: random.Random
    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    done: list[str] = field(default_factory=list)
    most_waiting: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def one(self, number: int) -> None:
        """Send a request of a kind that is drawn, and what belongs to it."""
        kind = self.chance.choice(tuple(KINDS))
        for answer in KINDS[kind](self, f"w{number % 57 + 3}"):
            with self.lock:
                self.statuses[answer.status_code] += 1
            assert answer.status_code < 500, (kind, answer.status_code, answer.text[:300])
            if answer.status_code >= 400:
                assert answer.json()["error"]["message"].endswith("."), answer.text
        waiting = self.server.health()["waiting"]
        with self.lock:
            self.kinds[kind] += 1
            self.most_waiting = max(self.most_waiting, waiting)

    def submit(self, word: str) -> httpx.Response:
        """Ask for an analysis of a text that begins with a word."""
        return self.server.post("/api/jobs", {"text": f"{word} w5 w6 w7 w8 w9 w10 w11 w12"})

    def finished(self, word: str) -> list[httpx.Response]:
        """Ask for an analysis, and look at it when it has ended."""
        first = self.submit(word)
        if first.status_code == 429:
            return [first]
        id = first.json()["id"]
        ended = self.server.wait(id, seconds=120)["state"]
        if ended == "done":
            self.done.append(id)
        paths = (f"/api/results/{id}", f"/api/results/{id}/view", f"/r/{id}")
        return [first, *(self.server.client.get(path) for path in paths)]

    def cancelled(self, word: str) -> list[httpx.Response]:
        """Ask for an analysis and cancel it, sooner or later."""
        first = self.submit(word)
        if first.status_code == 429:
            return [first]
        threading.Event().wait(self.chance.random())
        return [first, self.server.client.delete(f"/api/jobs/{first.json()['id']}")]

    def left(self, word: str) -> list[httpx.Response]:
        """Follow an analysis, and leave after the first event."""
        first = self.submit(word)
        if first.status_code != 429:
            next(self.server.events(first.json()["id"]), None)
        return [first]

    def asked(self, _: str) -> list[httpx.Response]:
        """Ask questions about an analysis that was done, or about none."""
        id = self.chance.choice(self.done or ["0"])
        layer, head, query = (self.chance.randrange(size) for size in (4, 4, 11))  # there are only three layers
        bodies = {
            "rows": {"rows": [[layer, head, query]], "epsilon": self.chance.choice([0.0, 0.01])},
            "simplex": {"layer": layer, "head": head},
            "move": {"layer": layer, "head": head, "query": query, "key": 3, "end": "upper"},
        }
        return [self.server.post(f"/api/results/{id}/{path}", body) for path, body in bodies.items()]

    def bad(self, _: str) -> list[httpx.Response]:
        """Send what is no request, to several addresses."""
        done = self.chance.choice(self.done or ["0"])
        paths = ("/api/jobs", "/api/results/0/rows", f"/api/results/{done}/move", "/api")
        content = self.chance.choice(BAD)
        return [self.server.client.post(path, content=content, headers=JSON) for path in paths]

    def looked(self, _: str) -> list[httpx.Response]:
        """Load the page as a browser does."""
        paths = ("/", "/static/page.js", "/static/style.css", "/api", "/nothing")
        return [self.server.client.get(path) for path in paths]


KINDS: dict[str, Callable[[Soak, str], list[httpx.Response]]] = {
    "finished": Soak.finished, "cancelled": Soak.cancelled, "left": Soak.left, "asked": Soak.asked, "bad": Soak.bad,
    "looked": Soak.looked,
}  # fmt: skip


def memory(server: Served) -> dict[str, float]:
    """The resident MiB of the server and of its workers."""
    workers = {f"worker {number}": one for number, one in enumerate(server.workers())}
    processes = {"server": psutil.Process(server.process.pid), **workers}
    return {name: one.memory_info().rss / 2**20 for name, one in processes.items()}


def soak(requests: int, seed: int = 0) -> str:
    """Send so many requests; return what happened, or raise what should not have."""
    with tempfile.TemporaryDirectory() as folder:
        models = save_models(Path(folder))
        with served("--model", str(models[0]), "--waiting", str(WAITING), "--seconds", "1") as server:
            soaking = Soak(server, random.Random(seed))
            for number in range(6):  # until compiled code, caches and allocators are there
                soaking.finished(f"w{number + 3}")
                soaking.asked("")
            workers, first = [one.pid for one in server.workers()], memory(server)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(soaking.one, range(requests)))
            server.healthy()
            last, same = memory(server), [one.pid for one in server.workers()] == workers
    assert soaking.most_waiting <= WAITING, soaking.most_waiting
    grown = {name: last[name] - first[name] for name in (first if same else ["server"])}
    assert max(grown.values()) < GROWTH, grown
    used = ", ".join(f"{name} {first[name]:.0f} to {last[name]:.0f} MiB" for name in first)
    workers_said = "same workers" if same else "a worker was started again"
    statuses = dict(sorted(soaking.statuses.items()))
    return (
        f"{requests} requests, {AT_ONCE} at a time: {dict(soaking.kinds)}; statuses {statuses}; "
        f"at most {soaking.most_waiting} of {WAITING} waiting; {used}; {workers_said}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(soak(given.requests, given.seed))
