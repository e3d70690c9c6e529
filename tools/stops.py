"""Stop long runs after 1, 5, 20 and 60 seconds, resume them, and compare their tables: `make stops DATA=DIR`.

Each run of `identikit attention`, `attribution` and `tokens` over pairs of MRPC, on each engine, is stopped by one kind
of signal after each of these times, started again each time, and then left to end. What a stopped run says is compared
with what its folder holds, and its tables with those of a run that nobody stopped. Prints a table in Markdown.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from identikit.runs.inspect import state
from tests.runs.made import tables

SECONDS = (1.0, 5.0, 20.0, 60.0)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
SIZES = {
    "attention": ["--first", "100", "--intervals", "20"],
    "attribution": ["--first", "12", "--probes", "2"],
    "tokens": ["--first", "250", "--map", "naive", "--map", "ridge", "--folds", "5"],
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
        assert said in self.told(kept, before), (self.out.name, seconds, errors)
        assert "Traceback" not in errors, errors
        return str(kept), took

    def told(self, kept: int, before: int) -> list[list[str]]:
        """Return what a stopped run may say last: all of it, or one word if it came before the folder was taken."""
        if self.number == signal.SIGKILL:
            return [[]]
        word = f"identikit: {'Interrupted' if self.number == signal.SIGINT else 'Terminated'}."
        full = f"{word} Nothing had been computed yet."
        if kept:
            full = f"{word} What was computed is kept in {self.out}. Run the same command again to continue."
        return [[full], [word]] if kept == before else [[full]]

    def row(self, whole: Future[dict[str, str]]) -> str:
        """Stop the run at all times, let it end, and return a row of the table; `whole` will be the right tables."""
        stops = [self.stop(seconds) for seconds in SECONDS]
        ended = subprocess.run(self.line(), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, (self.out.name, ended.stderr)
        right = whole.result()
        found = tables(self.out)
        differing = [name for name in found.keys() | right.keys() if found.get(name) != right.get(name)]
        assert right and not differing, f"{self.out.name}: {', '.join(sorted(differing))} differ"
        longest = max(took for _, took in stops)
        kept = ", ".join(kept for kept, _ in stops)
        return (
            f"| {self.engine} | {self.name} | {self.number.name} | {kept} of {held(self.out)} | {longest:.1f} s | yes |"
        )


def command(name: str, data: list[str], out: Path, *more: str) -> list[str]:
    """Return the command line of a run."""
    return [*COMMAND, name, *data, *SIZES[name], "--threads", "1", "--out", str(out), *more]


def held(out: Path) -> int:
    """Return how many texts or parts a folder holds."""
    return len(state(str(out)).done) if (out / "run.json").exists() else 0


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
        whole = {name: threads.submit(undisturbed, name, data, place / name) for name in names}
        every = product(chosen.engine or ["local", "processes", "ray"], names, SIGNALS)
        runs = [Stopping(place, data, *each) for each in every]
        rows = [threads.submit(run.row, whole[run.name]) for run in runs]
        print("| engine | command | signal | kept after 1, 5, 20 and 60 s | longest answer | same bytes |")
        print("|---|---|---|---|---|---|", flush=True)
        for row in as_completed(rows):
            wrong = row.exception()
            print(f"Wrong: {wrong!r}" if wrong else row.result(), flush=True)
    sys.exit(any(row.exception() for row in rows))


if __name__ == "__main__":
    main()
