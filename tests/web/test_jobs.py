"""The queue of a real server: full, cancelled, killed, and what is kept."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from identikit.web import messages
from identikit.web.jobs import PendingTask, Service
from identikit.web.worker import TaskRunner
from tests.web.served import LONG, SHORT, Served
from tests.web.test_server import refused
from tools.soak_server import soak

SLOW = {"model": "tiny-llama"}


@pytest.fixture
def server(server: Served) -> Iterator[Served]:
    """The one server; what a test leaves running is cancelled, and the workers are free for the next."""
    server.asked.clear()
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


def test_a_full_queue_refuses_what_waits_can_be_cancelled_and_questions_are_answered(server: Served):
    id = server.result(SHORT)
    running = slow(server, 0)
    server.wait(running, "running")
    waiting = [slow(server, 1), slow(server, 2)]
    assert [server.client.get(f"/api/jobs/{id}").json()["ahead"] for id in waiting] == [1, 2]
    answer = server.post("/api/jobs", {"text": "w5 w6 w7"})
    assert "2 analyses are waiting" in refused(answer, 429, "busy")
    assert int(answer.headers["retry-after"]) > 0
    assert server.submit(f"w4 {LONG}", **SLOW)["id"] == waiting[0]  # which waits already
    answer = server.client.delete(f"/api/jobs/{waiting[0]}")
    assert answer.status_code == 200 and answer.json()["state"] == "cancelled"
    assert "is cancelled" in refused(server.client.get(f"/api/results/{waiting[0]}/view"), 409, "not_done")
    assert server.client.get(f"/api/jobs/{waiting[1]}").json()["ahead"] == 1
    assert server.post(f"/api/results/{id}/rows", {"rows": [[0, 0, 3]]}).status_code == 200
    assert server.client.get(f"/api/jobs/{running}").json()["state"] == "running"


def test_a_running_analysis_can_be_cancelled_and_the_worker_goes_on(server: Served):
    id = slow(server, 5)
    for _, state in server.events(id):
        if (state["progress"] or {}).get("what", "").startswith("att"):
            break
    assert server.client.delete(f"/api/jobs/{id}").json()["state"] == "cancelled"
    assert [state["state"] for _, state in server.events(id)] == ["cancelled"]
    assert server.result("w30 w31 w32 w33 w34 w35 w36 w37 w38 w39")
    assert server.client.delete(f"/api/jobs/{id}").json()["state"] == "cancelled"


def test_a_task_heeds_a_request_to_cancel_it(folders: list[Path]):
    ours, theirs = Pipe()
    desk = TaskRunner((messages.ModelSource(str(folders[0])),), theirs)
    ours.send(messages.CANCEL)
    assert desk.answer(messages.WorkerTask("tiny-bert", SHORT, messages.Explain(1.0))) == messages.CANCELLED
    assert desk.answer(messages.WorkerTask("tiny-bert", SHORT, messages.CheckText())) == messages.Answer()


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


def alone(awaited: Coroutine[None, None, Any]) -> Any:
    """Run in a thread of its own: a browser's loop may be running in this one."""
    with ThreadPoolExecutor() as thread:
        return thread.submit(asyncio.run, awaited).result()


def job() -> PendingTask:
    """An analysis that nobody computes."""
    return PendingTask(
        messages.WorkerTask("model", "text", messages.Explain(1.0)), asyncio.get_running_loop().create_future()
    )


def test_streams_end_when_the_server_stops():
    async def follow() -> list[str]:
        service = Service((messages.ModelSource(None),), messages.Limits())
        service.jobs["a"] = job()
        asyncio.get_running_loop().call_later(0.05, service.end_streams)
        async with asyncio.timeout(5):
            return [event async for event in service.events("a")]

    (event,) = alone(follow())
    assert '"state":"waiting"' in event


# What is kept


async def kept(limits: messages.Limits, *sizes: int) -> list[str]:
    """End analyses of so many bytes, one after another; the first is looked at before the last."""
    service = Service((messages.ModelSource(None),), limits)
    for number, size in enumerate(sizes):
        service.jobs[str(number)] = job()
        if number == 2:
            service.find("0")
        service.jobs[str(number)].end(
            messages.Answer((b"", b"x" * size), messages.Problem(code="input", message="No."))
        )
        service.forget()
    return sorted(service.jobs)


def test_only_so_many_results_and_bytes_are_kept_and_what_was_looked_at_is_kept_longest():
    assert alone(kept(messages.Limits(results=2), 1, 1)) == ["0", "1"]
    assert alone(kept(messages.Limits(results=2), 1, 1, 1)) == ["0", "2"]
    assert alone(kept(messages.Limits(kept=10), 4, 4, 4)) == ["0", "2"]
    assert alone(kept(messages.Limits(kept=10), 4, 20)) == ["1"]


@pytest.mark.slow
def test_many_requests_at_once_leave_it_well():
    assert "60 requests" in soak(60)
