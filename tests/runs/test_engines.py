"""Engines give the same numbers as this process does, survive workers that die, and tell what workers say."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import identikit
from identikit.attention.dataset import AttentionOptions, attention_tables
from identikit.errors import InputError, ModelError
from identikit.maths import threads
from identikit.models.model import Model
from identikit.runs import run as runs
from identikit.runs.cluster import Cluster
from identikit.runs.engines import (
    AHEAD,
    Engine,
    Local,
    Processes,
    RunTask,
    RunWorker,
    by_cost,
    make_engine,
    run_on_workers,
)
from identikit.runs.run import Run
from identikit.runs.store import Store
from tests.models import tiny
from tests.runs.made import Squares, made_texts, save_model, shards, tables

WORKERS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return identikit.load(save_model(tmp_path_factory.mktemp("model")))


def squares(engine: Engine, model: Model, job: Squares, number: int = 8) -> Iterator[tuple[int, dict[str, int]]]:
    tasks = [RunTask(place, place) for place in range(number)]
    for task, found in engine.run(model, job, tasks, lambda task, done: None):
        yield task.number, found


def whole(engine: Engine, model: Model, folder: Path) -> dict[str, str]:
    attention_tables(model, made_texts(12), Run(Store(folder, {}), engine), AttentionOptions())
    return tables(folder)


def check(engine: Processes | Cluster, model: Model, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare two workers with this process; let one worker die, warn, and refuse its last task."""
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)
    here = whole(Local(1), model, place / "local")
    assert whole(engine, model, place / "engine") == here and len(here) == 14
    assert len(shards(place / "engine")) == len(shards(place / "local")) > 3

    job = Squares(str(place / "died"), deadly=2, warns=5, refused=8)
    found: dict[int, dict[str, int]] = {}
    with pytest.warns(UserWarning, match=r"5 is odd\."), pytest.raises(InputError) as caught:
        found.update(squares(replace(engine, workers=1), model, job, 9))
    assert type(caught.value) is InputError and str(caught.value) == "Computing 8: it is refused."
    assert Path(job.marker).exists()
    assert {number: one["square"] for number, one in found.items()} == {number: number**2 for number in range(8)}
    assert os.getpid() not in {one["process"] for one in found.values()}
    assert {one["threads"] for one in found.values()} == {1}


def test_processes(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check(Processes(1, WORKERS), model, tmp_path, monkeypatch)


@pytest.mark.slow
def test_ray(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    ray = pytest.importorskip("ray")
    engine = Cluster(1, WORKERS)
    with engine._connection(ray):  # one cluster for all that follows
        check(engine, model, tmp_path, monkeypatch)
        with pytest.raises(InputError, match=r"has 2 CPUs and 0 GPUs, and a worker needs 3 and 0\. Ask for fewer"):
            dict(squares(replace(engine, threads=3), model, Squares()))
    assert not ray.is_initialized()
    said = capfd.readouterr()
    printed = [line for line in (said.out + said.err).splitlines() if line.strip()]
    assert all("(raylet)" in line or "log-dedup" in line for line in printed), said  # what workers died of


SIGTERM_WATCHED = """
import signal, threading, ray
from identikit.runs.cluster import Cluster
seen = [signal.getsignal(signal.SIGTERM)]
is_there = threading.Event()
def watch():
    while not is_there.wait(0.001):
        seen.append(signal.getsignal(signal.SIGTERM))
watching = threading.Thread(target=watch)
watching.start()
with Cluster(1, 2)._connection(ray):
    seen.append(signal.getsignal(signal.SIGTERM))
is_there.set()
watching.join()
assert {*seen} == {seen[0]} and len(seen) > 100, (len(seen), {*seen})
"""


def test_sigterm_stays_ours_while_ray_starts():
    """In a process of its own: what is forked from one that started Ray crashes."""
    pytest.importorskip("ray")
    done = subprocess.run([sys.executable, "-c", SIGTERM_WATCHED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_was_computed_beside_an_error_is_not_lost():
    good: Future[Any] = Future()
    good.set_result(("kept", []))
    bad: Future[Any] = Future()
    bad.set_exception(InputError("refused"))
    for futures in ([good, bad], [bad, good]):
        given = iter(futures)
        found = []
        with pytest.raises(InputError, match="refused"):
            for _, result in run_on_workers(
                [0], lambda worker, task, given=given: next(given), [RunTask(0, 0), RunTask(1, 1)]
            ):
                found.append(result)
        assert found == ["kept"]


def test_long_tasks_are_first():
    tasks = [RunTask(number, "", cost) for number, cost in enumerate((3.0, 9.0, 3.0, 4.0))]
    assert [task.number for task in by_cost(tasks)] == [1, 3, 0, 2]


def test_results_are_not_computed_far_ahead_of_who_takes_them():
    given = 0
    taken = 0

    def submit(worker: int, task: RunTask) -> "Future[Any]":
        nonlocal given
        given += 1
        future: Future[Any] = Future()
        future.set_result((task.content, []))
        return future

    for _ in run_on_workers(range(WORKERS), submit, [RunTask(place, place) for place in range(50)]):
        taken += 1
        assert given - taken < AHEAD * WORKERS
    assert taken == given == 50


def test_a_model_in_memory_cannot_be_sent_and_another_one_is_noticed(model: Model):
    for engine in (Processes(1, 1), Cluster(1, 1)):
        with pytest.raises(InputError, match=r"a model in memory cannot be loaded again\. Save it with"):
            dict(squares(engine, tiny.shared("bert"), Squares()))
    assert model.recipe is not None
    with pytest.raises(ModelError, match=r"in another process: its weights, .* Start it again, with the same files"):
        RunWorker(model.recipe, "another", Squares(), 1).compute(RunTask(0, 0))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "ray://127.0.0.1:1"])
def test_a_wrong_address_is_said_within_seconds(model: Model, address: str, capfd: pytest.CaptureFixture[str]):
    pytest.importorskip("ray")
    started = time.monotonic()
    with pytest.raises(
        InputError, match=rf"^Cannot reach the Ray cluster at {address}: .*\. Check --address"
    ) as caught:
        dict(squares(Cluster(1, address=address), model, Squares()))
    assert time.monotonic() - started < 30 and "\n" not in str(caught.value)
    assert not capfd.readouterr().err


def test_without_ray(model: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"needs the package ray\. Run `pip install 'identikit\[ray\]'`"):
        dict(squares(Cluster(1), model, Squares()))


def test_options_of_engines_that_do_not_fit():
    for wrong in ({"engine": "slurm"}, {"workers": 2}, {"engine": "processes", "address": "a:1"}, {"threads": 0}):
        with pytest.raises(InputError):
            make_engine("nowhere", **wrong)
    assert make_engine("nowhere", "processes", 3, 2) == Processes(2, 3)
    assert make_engine("nowhere", "ray", 3, 2, "auto", 0.5) == Cluster(2, 3, "auto", 0.5)


def test_a_run_takes_one_thread_where_threads_fight_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """How many threads compute decides the last digits, so a run that is resumed on free cores keeps its number."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for fight, each in ((True, 1), (False, 2)):
            monkeypatch.setattr(threads, "_threads_contend", lambda number, fight=fight: fight)
            assert make_engine(str(tmp_path / "new")) == Local(each)
        with Store(str(tmp_path / "started"), {"command": "attention", "threads": 1}).held():
            pass
        assert make_engine(str(tmp_path / "started")) == Local(1)
        assert make_engine(str(tmp_path / "started"), threads=2) == Local(2)
    finally:
        torch.set_num_threads(before)
