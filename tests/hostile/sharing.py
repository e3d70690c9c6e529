"""Runs that meet another process in their folder, or a disk that is full or read-only."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile.cases import Case, Refused, kept, proved
from tests.hostile.made import Done, checked, command, content, environment, process, saved, texts_file

MANY = [f"w{3 + i % 50} w{4 + i % 47} w{5 + i % 41} w{6 + i % 7}" for i in range(400)]


def cases() -> Iterator[Case]:
    """Yield the cases with other processes and full disks."""
    yield Case("two processes into one folder", "stores", _two, "right", slow=True)
    for size in (1_000, 30_000):
        yield Case(f"files of at most {size} bytes", "stores", _limited(size), "right", slow=True)
    if shutil.which("unshare") and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        for size in ("16k", "64k"):
            yield Case(f"a disk of {size}", "stores", _disk_full(size), "right", slow=True)
        yield Case("a read-only disk", "stores", _read_only, "refused")


def _words(place: Path, out: Path, texts: list[str] | None = None) -> list[str | Path]:
    data = place / "texts.txt" if (place / "texts.txt").exists() else texts_file(place, texts)
    return ["attention", "--model", saved("bert"), "--data", data, "--out", out]


def _tables(folder: Path) -> dict[str, bytes]:
    return {name: held for name, held in content(folder).items() if name.endswith((".parquet", ".csv"))}


def _two(place: Path) -> None:
    """While one process works, another is told which one; when that is killed, the other can start."""
    words = [str(word) for word in _words(place, place / "out", MANY)]
    first = subprocess.Popen([sys.executable, "-m", "identikit", *words], env=environment(), stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (place / "out" / "run.json").exists() and time.monotonic() < until and first.poll() is None:
            time.sleep(0.05)
        proved(first.poll() is None, "the first process ended before the second came")
        try:
            command(*words)
            proved(False, "both wrote into one folder")
        except Refused as told:
            proved(str(first.pid) in str(told), f"it does not say which process holds the folder: {told}")
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    command(*words)
    command(*_words(place, place / "alone"))
    proved(_tables(place / "out") == _tables(place / "alone"), "the tables differ from those of an undisturbed run")


def _limited(size: int) -> Callable[[Path], None]:
    """Every file beyond a size fails, as on a full disk: said in a line; then the same command completes the run."""

    def run(place: Path) -> None:
        first = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
        done = process(*_words(place, place / "out"), first=first)
        _completed(place, done)

    return run


def _completed(place: Path, done: object) -> None:
    try:
        checked(done)  # pyright: ignore[reportArgumentType]
        proved(False, "it went through, so nothing was full")
    except Refused as told:
        proved("Cannot write" in str(told), f"it does not say what could not be written: {told}")
    left = content(place / "out") if (place / "out").exists() else {}
    shards = {name: held for name, held in left.items() if name.startswith("shard-")}
    command(*_words(place, place / "out"))
    command(*_words(place, place / "alone"))
    proved(_tables(place / "out") == _tables(place / "alone"), "the tables differ from those of an undisturbed run")
    kept(shards.items() <= content(place / "out").items(), "a finished shard was computed again")


def _disk_full(size: str) -> Callable[[Path], None]:
    """A real file system of that size, in a name space of its own; what is on it is copied out before it goes."""

    def run(place: Path) -> None:
        (place / "disk").mkdir()
        (place / "out").mkdir()
        call = [sys.executable, "-m", "identikit", *map(str, _words(place, place / "disk" / "run"))]
        script = (
            f'mount -t tmpfs -o size={size} tmpfs disk || exit 99; "$@"; status=$?; '
            "cp -r disk/run/. out/ 2>/dev/null; exit $status"
        )
        shell = ["unshare", "-m", "sh", "-c", script, "sh", *call]
        found = subprocess.run(shell, capture_output=True, text=True, env=environment(), cwd=place)

        _completed(place, Done(found.returncode, found.stdout, found.stderr))

    return run


def _read_only(place: Path) -> None:
    (place / "disk").mkdir()
    call = [sys.executable, "-m", "identikit", *map(str, _words(place, place / "disk" / "run"))]
    script = 'mount -t tmpfs -o ro tmpfs disk || exit 99; "$@"'
    shell = ["unshare", "-m", "sh", "-c", script, "sh", *call]
    found = subprocess.run(shell, capture_output=True, text=True, env=environment(), cwd=place)

    checked(Done(found.returncode, found.stdout, found.stderr))
