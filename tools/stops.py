"""Stop long runs after 1, 5, 20 and 60 seconds, resume them, and compare their tables: `make stops DATA=DIR`.

Each run of `identikit attention`, `attribution` and `tokens` over pairs of MRPC, on each engine, is stopped by one kind
of signal after each of these times, started again each time, and then left to end. What a stopped run says is compared
with what its folder holds, and its tables with those of a run that nobody stopped. Prints a table in Markdown.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runs.made import tables

SECONDS = (1.0, 5.0, 20.0, 60.0)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SIZES = {
    "attention": ["--first", "150", "--intervals", "20"],
    "attribution": ["--first", "20", "--probes", "2"],
    "tokens": ["--map", "naive", "--map", "ridge"],
}
COMMAND = [sys.executable, "-m", "identikit"]
ANSWER = 60.0  # seconds in which a signal must be answered


@dataclass(frozen=True)
class Stopping:
    """One run that is stopped again and again by one kind of signal."""

    place: Path
    data: list[str]
    engine: str
    name: str
    number: signal.Signals

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return self.place / f"{self.engine}-{self.name}-{self.number.name}"

    def line(self) -> list[str]:
        """Return the command line."""
        workers = [] if self.engine == "local" else ["--workers", "2"]
        return command(self.name, self.data, self.out, "--engine", self.engine, *workers)

    def stop(self, seconds: float) -> tuple[str, float]:
        """Stop the run after so many seconds; return what the folder then holds, and how long the answer took.

        A run that ends before is marked with an asterisk.
        """
        before = held(self.out)
        process = subprocess.Popen(
            self.line(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            started = time.monotonic()
            # Ctrl-C and a kill reach the whole group, SIGTERM one process
            target = process.pid if self.number == signal.SIGTERM else -process.pid
            os.kill(target, self.number)
        else:
            assert process.wait() == 0, process.communicate()[1]
            return f"{held(self.out)}*", 0.0
        _, errors = process.communicate(timeout=ANSWER)
        took = time.monotonic() - started
        kept = held(self.out)
        assert kept >= before, (self.out.name, seconds, before, kept)
        said = [line for line in errors.splitlines() if line.startswith(("identikit: Int", "identikit: Term"))]
        assert said == self.expected(kept, before), (self.out.name, seconds, errors)
        assert "Traceback" not in errors, errors
        return str(kept), took

    def expected(self, kept: int, before: int) -> list[str]:
        """Return what a stopped run says last."""
        if self.number == signal.SIGKILL:
            return []
        word = "Interrupted" if self.number == signal.SIGINT else "Terminated"
        if kept:
            return [f"identikit: {word}. What was computed is kept in {self.out}. Run the same command again to continue."]
        return [f"identikit: {word}. Nothing had been computed yet."]

    def row(self, whole: dict[str, str]) -> str:
        """Stop the run at all times, let it end, and return a row of the table."""
        found = [self.stop(seconds) for seconds in SECONDS]
        ended = subprocess.run(self.line(), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, (self.out.name, ended.stderr)
        assert tables(self.out) == whole != {}, f"{self.out.name}: the tables differ"
        longest = max(took for _, took in found)
        kept = ", ".join(kept for kept, _ in found)
        return f"| {self.engine} | {self.name} | {self.number.name} | {kept} of {held(self.out)} | {longest:.1f} s | yes |"


def command(name: str, data: list[str], out: Path, *more: str) -> list[str]:
    """Return the command line of a run."""
    return [*COMMAND, name, *data, *SIZES[name], "--threads", "1", "--out", str(out), *more]


def held(out: Path) -> int:
    """Return how many texts or parts a folder holds, by `identikit status`."""
    if not (out / "run.json").exists():
        return 0
    state = subprocess.run([*COMMAND, "status", str(out), "--json"], capture_output=True, text=True, check=True)
    return len(json.loads(state.stdout)["run"]["done"])


def undisturbed(name: str, data: list[str], out: Path) -> dict[str, str]:
    """Run a command that nobody stops, and return its tables."""
    started = time.monotonic()
    subprocess.run(command(name, data, out), stdout=subprocess.DEVNULL, check=True)
    print(f"{name} undisturbed: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return tables(out)


def main() -> None:
    """Stop everything, so many at a time, and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("data_dir", help="the folder with the files of MRPC")
    options.add_argument("--engine", action="append", help="local, processes or ray; repeat for more")
    options.add_argument("--command", action="append", help="attention, attribution or tokens; repeat for more")
    options.add_argument("--together", type=int, default=2, help="how many runs at a time")
    chosen = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    data = ["--data", "mrpc", "--data-dir", str(Path(chosen.data_dir).resolve())]
    names = chosen.command or list(SIZES)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.together) as threads:
        place = Path(folder)
        whole = dict(zip(names, threads.map(lambda name: undisturbed(name, data, place / name), names), strict=True))
        print("| engine | command | signal | kept after 1, 5, 20 and 60 s | longest answer | same bytes |")
        print("|---|---|---|---|---|---|", flush=True)
        every = product(chosen.engine or ["local", "processes", "ray"], names, SIGNALS)
        runs = [Stopping(place, data, *each) for each in every]
        for row in threads.map(lambda run: run.row(whole[run.name]), runs):
            print(row, flush=True)


if __name__ == "__main__":
    main()
