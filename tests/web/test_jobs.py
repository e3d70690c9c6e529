"""The queue of a real server: full, cancelled, killed, and what is kept."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from identikit.web.jobs import Job, Limits, Service
from identikit.web.worker import Answer, Failure, Source
from tests.web.served import LONG, SHORT, Served, save_models, served
from tests.web.soak_server import soak
from tests.web.test_server import refused

SLOW = {"model": "tiny-llama"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folders = save_models(tmp_path_factory.mktemp("models"))
    models = [one for folder in folders for one in ("--model", str(folder))]
    with served(*models, "--waiting", "2", "--seconds", "60") as one:
        yield one


@pytest.fixture
def server(started: Served) -> Iterator[Served]:
    """The one server; what a test leaves running is cancelled, and the workers are free for the next."""
    server = started
    yield server
    for id in server.asked:
        server.client.delete(f"/api/jobs/{id}")
    until = time.monotonic() + 30
    while (now := server.health())["running"] or now["waiting"]:
        assert time.monotonic() < until, now
        time.sleep(0.05)
    server.healthy()


def slow(server: Served, number: int) -> str:
    """Start an analysis that would take half a minute."""
    return server.submit(f"w{number + 3} {LONG}", **SLOW)["id"]


def test_a_full_queue_refuses_and_says_when_to_come_back(server: Served):
    running = slow(server, 0)
    server.wait(running, "running")
    waiting = [slow(server, 1), slow(server, 2)]
    assert [server.client.get(f"/api/jobs/{id}").json()["ahead"] for id in waiting] == [1, 2]
    answer = server.post("/api/jobs", {"text": "w5 w6 w7"})
    assert "2 analyses are waiting" in refused(answer, 429, "busy")
    assert int(answer.headers["retry-after"]) > 0
    assert server.submit(f"w4 {LONG}", **SLOW)["id"] == waiting[0]  # which waits already
    server.client.delete(f"/api/jobs/{waiting[0]}")
    assert server.client.get(f"/api/jobs/{waiting[1]}").json()["ahead"] == 1


def test_a_waiting_analysis_can_be_cancelled(server: Served):
    running = slow(server, 3)
    waiting = slow(server, 4)
    answer = server.client.delete(f"/api/jobs/{waiting}")
    assert answer.status_code == 200 and answer.json()["state"] == "cancelled"
    assert server.client.get(f"/api/jobs/{running}").json()["state"] == "running"
    assert "is cancelled" in refused(server.client.get(f"/api/results/{waiting}/view"), 409, "not_done")


def test_a_running_analysis_can_be_cancelled_and_the_worker_goes_on(server: Served):
    before = [one.pid for one in server.workers()]
    id = slow(server, 5)
    for _, state in server.events(id):
        if (state["progress"] or {}).get("what", "").startswith("att"):
            break
    started = time.monotonic()
    assert server.client.delete(f"/api/jobs/{id}").json()["state"] == "cancelled"
    assert [state["state"] for _, state in server.events(id)] == ["cancelled"]
    assert server.result("w30 w31 w32 w33 w34 w35 w36 w37 w38 w39")
    assert time.monotonic() - started < 20
    assert server.client.delete(f"/api/jobs/{id}").json()["state"] == "cancelled"
    assert [one.pid for one in server.workers()] == before  # it heeded: nobody was killed


def test_questions_do_not_wait_for_an_analysis(server: Served):
    id = server.result(SHORT)
    running = slow(server, 6)
    server.wait(running, "running")
    assert server.post(f"/api/results/{id}/rows", {"rows": [[0, 0, 3]]}).status_code == 200
    assert server.client.get(f"/api/jobs/{running}").json()["state"] == "running"


def test_a_killed_worker_is_started_again_and_its_analysis_failed(server: Served):
    running, waiting = slow(server, 7), server.submit("w40 w41 w42 w43 w44")["id"]
    server.wait(running, "running")
    analyst = max(server.workers(), key=lambda one: one.cpu_times().user)
    followed = server.events(running)
    assert next(followed)[1]["state"] == "running"
    analyst.kill()
    *_, (_, last) = followed
    assert last["state"] == "failed" and last["error"]["code"] == "worker" and "signal 9" in last["error"]["message"]
    assert server.wait(waiting)["state"] == "done"
    server.healthy()
    assert server.client.get(f"/api/results/{running}").json()["error"]["code"] == "worker"
    assert slow(server, 7) == running  # what failed can be asked for again


@pytest.mark.slow
def test_idle_workers_that_are_killed_come_back(server: Served):
    id = server.result(SHORT)
    for worker in server.workers():
        worker.kill()
    until = time.monotonic() + 10
    while server.health()["status"] == "ok":
        assert time.monotonic() < until
        time.sleep(0.01)
    assert server.post(f"/api/results/{id}/rows", {"rows": [[0, 0, 3]]}, timeout=60).status_code == 200
    server.healthy()
    assert server.result("w50 w51 w52 w53")


def test_streams_end_when_the_server_stops():
    async def follow() -> list[str]:
        service = Service((Source(None),), Limits())
        job = service.jobs["a"] = Job("a", "model", "text")
        asyncio.get_running_loop().call_later(0.05, service.end_streams)
        async with asyncio.timeout(5):
            return [status["state"] async for status in service.statuses(job) if status is not None]

    with ThreadPoolExecutor() as thread:  # a browser's loop may be running in this one
        assert thread.submit(lambda: asyncio.run(follow())).result() == ["waiting"]


# What is kept


def kept(limits: Limits, *sizes: int) -> list[str]:
    service = Service((Source(None),), limits)
    for number, size in enumerate(sizes):
        job = service.jobs[str(number)] = Job(str(number), "model", "text")
        service._ended(job, Answer(0, (b"", b"x" * size)))
    return list(service.jobs)


def test_only_the_last_results_are_kept_and_only_so_many_bytes():
    assert kept(Limits(results=2), 1, 1, 1) == ["1", "2"]
    assert kept(Limits(kept=10), 4, 4, 4) == ["1", "2"]
    assert kept(Limits(kept=10), 4, 20) == ["1"]


def test_what_was_looked_at_is_kept_longest():
    service = Service((Source(None),), Limits(results=2))
    for name in ("a", "b", "c"):
        service.jobs[name] = Job(name, "model", "text")
        if name == "c":
            service.find("a")
        service._ended(service.jobs[name], Answer(0, failure=Failure("input", "No.")))
    assert set(service.jobs) == {"a", "c"}


@pytest.mark.slow
def test_many_requests_at_once_leave_it_well():
    assert "60 requests" in soak(60)
