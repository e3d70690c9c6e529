"""A command that is killed at any moment and run again ends with the same tables, byte for byte."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from identikit.attention.dataset import AttentionJob
from identikit.attention.measures_dataset import MeasuresJob
from identikit.attribution.dataset import AttributionJob
from identikit.explanation.evaluation_dataset import EvaluationJob
from identikit.results.files import unseal
from identikit.tokens.dataset import IdentifiabilityJob, InversionJob
from tests.runs.made import COMMANDS, ended, forked, killed, save_model, save_texts, shards, tables, wait_for

KILLS = 3
SECONDS = 0.2  # that a text takes at least
SLOW = 6  # texts or parts that take so long, after each start
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
JOBS: dict[str, Any] = {
    "attention": AttentionJob,
    "attribution": AttributionJob,
    "tokens": IdentifiabilityJob,
    "inversion": InversionJob,
    "measures": MeasuresJob,
    "evaluate": EvaluationJob,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kill")
    for name in ("bert", "llama"):
        save_model(place / name, name)
    save_texts(place / "texts.txt", 30)
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, str]:
    """The tables of attention that nobody stopped; `place / "whole"` is the folder."""
    assert ended(forked(command(place, place / "whole"))) == 0
    return tables(place / "whole")


def command(place: Path, out: Path, name: str = "attention") -> list[str]:
    model = place / ("llama" if name == "inversion" else "bert")
    given = {"--model": model, "--data": place / "texts.txt", "--out": out, "--threads": 1}
    return [*COMMANDS[name], *(str(part) for pair in given.items() for part in pair)]


def test_killed_at_random_moments(place: Path, whole: dict[str, str], tmp_path: Path):
    chance = random.Random(0)
    out = tmp_path / "out"
    kills = 0
    for _ in range(KILLS):
        done = len(shards(out))
        process = forked(command(place, out))
        wait_for(lambda done=done: len(shards(out)) > done)
        time.sleep(chance.uniform(0, 0.05))
        kills += killed(process)
    assert kills == KILLS and not (out / "SHA256SUMS").exists()
    before = {path.name: path.stat().st_mtime_ns for path in shards(out)}
    assert len(before) >= KILLS
    assert ended(forked(command(place, out))) == 0
    assert tables(out) == whole and (out / "SHA256SUMS").exists()
    assert {path.name: path.stat().st_mtime_ns for path in shards(out)}.items() >= before.items()  # not computed again
    assert not [path for path in out.iterdir() if path.name.endswith(".partial")]


class Stops:
    """A command whose first texts or parts take a while each, stopped and resumed; `log` has a line for each."""

    def __init__(self, place: Path, folder: Path, name: str, patch: pytest.MonkeyPatch):
        self.out = folder / "out"
        self.arguments = command(place, self.out, name)
        self.log = folder / "log"
        self.errors = folder / "errors"
        job = JOBS[name]
        compute = job.compute

        def slow(*given: object) -> object:
            computed = compute(*given)
            if self.computed() < SLOW:
                time.sleep(SECONDS)
            with self.log.open("a") as log:
                log.write("done\n")
            return computed

        patch.setattr(job, "compute", slow)

    def computed(self) -> int:
        """Return how many texts or parts were computed."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def kept(self) -> int:
        """Return how many texts or parts the folder holds."""
        numbers = [number for path in shards(self.out) for number in unseal(path.read_bytes()).about["texts"]]
        assert len(numbers) == len(set(numbers))
        return len(numbers) + len(list(self.out.glob("part-*")))

    def stop(self, number: int, after: int) -> None:
        """Stop the command when so many more texts are computed; what was computed is there, and the words are true."""
        self.errors.write_text("")
        already = self.kept()
        self.log.unlink(missing_ok=True)
        process = forked(self.arguments, self.errors, seconds=20.0)
        wait_for(lambda: (self.out / "plan.json").exists() and self.computed() >= after)
        os.killpg(process, number)
        status = ended(process)
        if number == signal.SIGKILL:
            assert status == -number and self.errors.read_text() == ""
            assert self.kept() >= already + self.computed() - 1.5 / SECONDS  # it is written every second
            return
        assert status == 128 + number
        assert self.kept() >= already + self.computed() - 1  # a signal may come before the last is handed over
        word = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated"}[signal.Signals(number)]
        words = f"What was computed is kept in {self.out}. Run the same command again to continue."
        if not self.kept():
            assert not self.out.exists()
            words = "Nothing had been computed yet."
        assert self.errors.read_text() == f"identikit: {word}. {words}\n"

    def end(self) -> dict[str, str]:
        """Resume the command, let it end, and return its tables; nothing that was kept is computed again."""
        kept = self.kept()
        self.log.unlink(missing_ok=True)
        assert ended(forked(["resume", str(self.out)], self.errors)) == 0, self.errors.read_text()
        assert self.kept() == kept + self.computed()
        return tables(self.out)


def check_stops(place: Path, folder: Path, name: str, number: int) -> dict[str, str]:
    """Stop a command before its first result, soon after it, and later; then let it end, and return its tables."""
    with pytest.MonkeyPatch.context() as patch:
        stops = Stops(place, folder, name, patch)
        for after in (0, 1, 3):
            stops.stop(number, after)
        return stops.end()


@pytest.mark.parametrize("number", STOPS)
def test_a_run_can_be_stopped_from_its_first_second_on(place: Path, whole: dict[str, str], tmp_path: Path, number: int):
    assert check_stops(place, tmp_path, "attention", number) == whole != {}


@pytest.mark.slow
@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("name", [name for name in JOBS if name != "attention"])
def test_every_command_can_be_stopped(place: Path, tmp_path: Path, name: str, number: int):
    found = check_stops(place, tmp_path, name, number)
    assert ended(forked(command(place, tmp_path / "whole", name))) == 0
    assert found == tables(tmp_path / "whole") != {}


def test_another_process_is_told_who_writes(place: Path, tmp_path: Path):
    out = tmp_path / "out"
    errors = tmp_path / "errors"
    first = forked(command(place, out))
    wait_for(lambda: shards(out))
    os.kill(first, signal.SIGSTOP)  # it lives, and does not end meanwhile
    assert ended(forked(command(place, out), errors)) == 1
    said = errors.read_text()
    assert said.startswith(f"identikit: Cannot write to {out}: process {first} on ") and said.count("\n") == 1
    assert not (out / "error.json").exists()  # the one that works has not failed
    assert killed(first)
    assert ended(forked(command(place, out), errors)) == 0
    assert errors.read_text() == said


def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(place: Path, whole: dict[str, str], tmp_path: Path):
    resource = pytest.importorskip("resource")
    out = tmp_path / "out"
    errors = tmp_path / "errors"
    sizes = sorted(path.stat().st_size for path in shards(place / "whole"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[len(sizes) // 2], before[1]))  # half of the shards fit
    try:
        process = forked(command(place, out), errors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert ended(process) == 1
    said = errors.read_text()
    assert f" to {out}: File too large. Make room there" in said and said.count("\n") == 1, said
    assert json.loads((out / "error.json").read_text())["error"] in said
    assert not [path for path in out.iterdir() if path.name.endswith(".partial")]
    assert ended(forked(command(place, out), errors)) == 0 and errors.read_text() == said
    assert tables(out) == whole and not (out / "error.json").exists()
