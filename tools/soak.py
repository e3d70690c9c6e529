"""Stop one run at random moments, again and again, resume it each time, and compare its tables: `make soak`.

A run of `identikit attention` is stopped at random moments by SIGKILL, SIGINT or SIGTERM (on engines with workers, one
of these is killed too), started again each time, and in the end compared byte for byte with a run that nobody
disturbed. Prints what happened.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runs.made import ended, forked, save_model, save_texts, shards, tables


@dataclass
class Soak:
    """One run that is stopped until it was stopped often enough, and then left to end."""

    engine: str
    kills: int
    place: Path
    chance: random.Random
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("SIGKILL", "SIGINT", "SIGTERM", "worker kills", "starts"), 0)
    )

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return self.place / self.engine

    def start(self) -> int:
        """Start or resume the run."""
        line = [*command(self.place, self.out), "--engine", self.engine]
        if self.engine != "local":
            line += ["--workers", "2"]
        self.counts["starts"] += 1
        return forked(line, self.place / f"{self.engine}.log")

    def round(self, longest: float) -> bool:
        """Start the run and stop it after a while, and kill workers before; say whether it ended by itself."""
        process = self.start()
        until = time.monotonic() + self.chance.uniform(0, longest)
        while time.monotonic() < until:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0, (self.place / f"{self.engine}.log").read_text()[-2000:]
                return True
            if self.engine != "local" and self.chance.random() < 0.02:
                self.kill_a_worker(process)
            time.sleep(0.05)
        self.stop(process)
        return False

    def stop(self, process: int) -> None:
        """Send a signal; after one that can be caught, a clean end is expected."""
        number = self.chance.choice((signal.SIGKILL, signal.SIGINT, signal.SIGTERM))
        os.kill(process, number)
        status = ended(process)
        if status == -number or status == 128 + number:
            self.counts[number.name] += 1
        else:
            assert status == 0, (status, (self.place / f"{self.engine}.log").read_text()[-2000:])

    def kill_a_worker(self, process: int) -> None:
        """Kill one of the processes that compute."""
        workers = [child for child in under(process) if is_worker(child)]
        if workers:
            os.kill(self.chance.choice(workers), signal.SIGKILL)
            self.counts["worker kills"] += 1

    def run(self, longest: float) -> str:
        """Stop it until it was often enough; return what happened."""
        started = time.monotonic()
        removed = 0
        while sum(self.counts.values()) - self.counts["starts"] < self.kills:
            if self.round(longest):  # it ended too early: it loses half of what it had, and goes on
                for path in shards(self.out)[::2]:
                    path.unlink()
                    removed += 1
        assert ended(self.start()) == 0, (self.place / f"{self.engine}.log").read_text()[-2000:]
        assert tables(self.out) == tables(self.place / "whole"), "the tables differ"
        wait_until_gone(self.place)
        counts = ", ".join(f"{number} {name}" for name, number in self.counts.items())
        seconds = time.monotonic() - started
        return f"{self.engine}: {counts}, {removed} shards removed and computed again, equal tables, {seconds:.0f} s"


def command(place: Path, out: Path) -> list[str]:
    """Return the command line of the run."""
    given = {"--model": place / "model", "--data": place / "texts.txt", "--out": out, "--threads": 1}
    return ["attention", *(str(part) for pair in given.items() for part in pair)]


def processes() -> Iterator[tuple[int, int]]:
    """Yield every process with its parent."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            yield int(path.name), int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue


def under(process: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    parents = dict(processes())
    family = [process]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]


def is_worker(process: int) -> bool:
    """Say whether a process computes: an actor of Ray, or one of a pool."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
    return words.startswith(b"ray::RunWorker") or b"multiprocessing.spawn" in words


def wait_until_gone(place: Path, seconds: float = 180.0) -> None:
    """Make sure that no process is left that was started for a run."""
    mark = f"IDENTIKIT_SOAK={place}".encode()
    until = time.monotonic() + seconds
    while left := [process for process, _ in processes() if process != os.getpid() and mark in environment(process)]:
        assert time.monotonic() < until, f"processes are left: {left}"
        time.sleep(0.5)


def environment(process: int) -> bytes:
    """Return the environment that a process was started with."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""


def main() -> None:
    """Soak each engine."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=50, help="how often each engine's run is stopped")
    options.add_argument("--engine", action="append", help="local, processes or ray; repeat for more")
    options.add_argument("--texts", type=int, default=400)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["IDENTIKIT_SOAK"] = str(place)  # what is started for a run inherits it
        save_model(place / "model")
        save_texts(place / "texts.txt", chosen.texts)
        started = time.monotonic()
        assert ended(forked(command(place, place / "whole"), place / "whole.log")) == 0
        whole = time.monotonic() - started
        print(f"undisturbed: {len(shards(place / 'whole'))} shards in {whole:.1f} s", flush=True)
        for engine in chosen.engine or ["local", "processes", "ray"]:
            longest = whole / 4 if engine == "local" else max(whole / 4, 30.0)  # workers take a while to start
            print(Soak(engine, chosen.kills, place, random.Random(chosen.seed)).run(longest), flush=True)


if __name__ == "__main__":
    main()
