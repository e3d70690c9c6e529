"""Terminals, variables, limits, signals and missing packages that the command line meets, each in a real process."""

import math
import operator
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import identikit as ik
from tests.hostile.cases import Case, Refused, Unclear, Wrong, proved
from tests.hostile.made import Done, checked, command, environment, process, saved, strict_json, texts_file

EXPLAIN = ("explain", "w5 w6 w7 w8", "--model", "bert")
MODELS = ("models",)  # prints many lines, and loads no model

VARIABLES: dict[str, dict[str, str | None]] = {
    "an ASCII terminal": {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"},
    "a Latin-1 terminal": {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
    "no locale": {"LC_ALL": None, "LANG": None, "LC_CTYPE": None},
    "a locale that is not there": {"LC_ALL": "xx_YY.nonsense"},
    "a dumb terminal": {"TERM": "dumb"},
    "no terminal type": {"TERM": None},
    "a width of one column": {"COLUMNS": "1"},
    "a width of no columns": {"COLUMNS": "0"},
    "a width that is a word": {"COLUMNS": "wide"},
    "a negative width": {"COLUMNS": "-5"},
    "a huge width": {"COLUMNS": "1000000"},
    "forced colours": {"FORCE_COLOR": "1"},
    "no colours": {"NO_COLOR": "1"},
    "no home": {"HOME": None},
    "a home that is not there": {"HOME": "/proc/nobody", "XDG_CACHE_HOME": None, "IDENTIKIT_CACHE": None},
    "a cache that cannot be written": {"IDENTIKIT_CACHE": "/proc/identikit"},
    "a cache that is a device": {"IDENTIKIT_CACHE": "/dev/full"},
    "an empty cache": {"IDENTIKIT_CACHE": ""},
    "a hub cache that cannot be written": {"HF_HOME": "/proc/hub"},
    "no temporary folder": {"TMPDIR": "/proc/nothing"},
    "optimised Python": {"PYTHONOPTIMIZE": "2"},
    "development mode": {"PYTHONDEVMODE": "1"},
    "warnings as errors": {"PYTHONWARNINGS": "error"},
    "warnings turned off": {"PYTHONWARNINGS": "ignore"},
    "another order of sets": {"PYTHONHASHSEED": "12345"},
    "a strange time zone": {"TZ": "Nowhere/Nothing"},
    "no path": {"PATH": ""},
    "no threads": {"OMP_NUM_THREADS": "0"},
    "no GPU": {"CUDA_VISIBLE_DEVICES": "nonsense"},
    "shape checks switched off": {"JAXTYPING_DISABLE": "1"},
    "a loud transformers": {"TRANSFORMERS_VERBOSITY": "debug"},
    "a wrong verbosity": {"TRANSFORMERS_VERBOSITY": "nonsense"},
}
QUICK = {"an ASCII terminal"}  # processes take seconds, so `make test` starts only a few

NEEDED = {  # packages that a command cannot do without; the others it must
    "pandas": ("attention",),
    "pyarrow": ("attention",),
    "highspy": ("explain",),
    "scipy": ("explain",),
    "numba": (),
    "matplotlib": (),
    "xarray": (),
    "peft": (),
    "datasets": (),
    "PIL": (),
    "soundfile": (),
    "spacy": (),
    "accelerate": (),
    "ray": (),
    "sentencepiece": (),
}


def cases() -> Iterator[Case]:
    """Yield the cases with environments."""
    for what, variables in VARIABLES.items():
        expect = "refused" if what == "optimised Python" else "right"  # transformers cannot do without docstrings
        yield Case(f"explain with {what}", "environments", _variables(variables), expect, slow=what not in QUICK)
    for what, ending in STREAMS.items():
        yield Case(what, "environments", ending, "right", slow=what not in ("a broken pipe", "a full standard output"))
    for package, commands in NEEDED.items():
        for name in ("explain", "attention"):
            expect = "either" if name in commands else "right"
            run = _without(package, name)
            yield Case(f"{name} without {package}", "environments", run, expect, (package,), slow=True)
    for what, (first, names) in LIMITS.items():
        yield Case(f"explain with {what}", "environments", _limited(first), "either", names, slow=True)
    for error in (ZeroDivisionError, KeyError, AssertionError, RuntimeError, RecursionError, LookupError):
        yield Case(f"a {error.__name__} of our own", "environments", _unexpected(error("within")), "right")
    for error in (MemoryError(), OSError(24, "Too many open files"), OSError(28, "No space left on device")):
        yield Case(f"{type(error).__name__}: {error}", "environments", _raised(error), "refused")
    for what, device in {
        "no GPU": "cuda",
        "a GPU too many": "cuda:99",
        "Apple's GPU": "mps",
        "no device": "meta",
    }.items():
        yield Case(f"a device for which there is {what}", "environments", _device(device), "refused", (device,))
    yield Case("a JSON whose numbers are undefined", "environments", _undefined, "right")


@cache
def undisturbed(*words: str) -> Any:
    """Return what a command prints as JSON in a plain process."""
    return _numbers(checked(process(*_words(words), "--json")))


def _words(words: tuple[str, ...]) -> list[str | Path]:
    return [saved(word) if before == "--model" else word for before, word in zip(("", *words), words, strict=False)]


def _numbers(done: Done) -> Any:
    told = strict_json(done.stdout)
    told["provenance"].pop("versions", None)
    return told


def _variables(variables: dict[str, str | None]) -> Callable[[Path], None]:
    """The numbers are those of a plain process, and the words are all there."""

    def run(_: Path) -> None:
        if "PYTHONIOENCODING" in variables or "COLUMNS" in variables:
            told = checked(process(*_words(EXPLAIN), env=variables))
            proved("isreal" in "".join(told.stdout.split()), "the verdict is not there")
            return
        found = _numbers(checked(process(*_words(EXPLAIN), "--json", env=variables)))
        same = _near if "OMP_NUM_THREADS" in variables else operator.eq  # the last digits depend on the threads
        proved(same(found, undisturbed(*EXPLAIN)), "the numbers differ from those of a plain process")

    return run


def _near(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal but for rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5)
    return one == other


# Streams and signals


def _broken_pipe(_: Path) -> None:
    """As `identikit models | head -1`."""
    _quiet(f"{sys.executable} -m identikit models | head -n 1", {0, 1, 141})


def _broken_pipe_json(_: Path) -> None:
    _quiet(f"{sys.executable} -m identikit explain 'w5 w6' --model '{saved('bert')}' --json | true", {0, 1, 141})


def _full_stdout(_: Path) -> None:
    _quiet(f"{sys.executable} -m identikit models > /dev/full", {1, 74}, "space")


def _closed_stdout(_: Path) -> None:
    _quiet(f"{sys.executable} -m identikit models >&-", {0, 1, 74})


def _closed_stderr(_: Path) -> None:
    _quiet(f"{sys.executable} -m identikit explain '' 2>&-", {1})


def _full_stderr(_: Path) -> None:
    _quiet(f"{sys.executable} -m identikit explain '' 2>/dev/full", {1})


def _closed_stdin(_: Path) -> None:
    _quiet(f"{sys.executable} -m identikit explain 'w5 w6' --model '{saved('bert')}' --json <&-", {0})


def _quiet(shell: str, allowed: set[int], names: str = "") -> None:
    """Run a line of shell; it ends with an allowed status, without a traceback, in at most one line."""
    done = subprocess.run(["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True, env=environment())
    proved(
        "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, f"a traceback: {done.stderr[-300:]}"
    )
    proved(
        done.returncode in allowed, f"status {done.returncode}, expected one of {sorted(allowed)}: {done.stderr[-200:]}"
    )
    proved(done.stderr.count("\n") <= 1 and names in done.stderr.lower(), f"it says {done.stderr[-300:]!r}")


def _stopped(number: signal.Signals) -> Callable[[Path], None]:
    """A signal in the middle of a run: one line, the shell's status for it, and a folder that resumes."""

    def run(place: Path) -> None:
        many = [f"w{3 + i % 50} w{4 + i % 47} w{5 + i % 41}" for i in range(600)]
        words = ["attention", "--model", saved("bert"), "--data", texts_file(place, many), "--out", place / "out"]
        call = [sys.executable, "-m", "identikit", *map(str, words)]
        child = subprocess.Popen(call, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            until = time.monotonic() + 60
            while not (place / "out" / "run.json").exists() and time.monotonic() < until and child.poll() is None:
                time.sleep(0.05)
            time.sleep(0.5)
            child.send_signal(number)
            out, err = child.communicate(timeout=60)
        finally:
            child.kill()
        proved(
            child.returncode == 128 + number, f"status {child.returncode}, not {128 + number}: {err.decode()[-200:]}"
        )
        proved(not out and err.count(b"\n") == 1 and b"Traceback" not in err, f"it says {err.decode()[-300:]!r}")
        left = [path.name for path in (place / "out").glob("*.partial")]  # a run that kept nothing leaves no folder
        proved(not left, f"half-written files are left: {left}")
        command(*words)
        command(*words[:-1], place / "alone")
        for table in sorted((place / "alone").glob("*.csv")):
            proved((place / "out" / table.name).read_bytes() == table.read_bytes(), f"{table.name} differs")

    return run


STREAMS: dict[str, Callable[[Path], None]] = {
    "a broken pipe": _broken_pipe,
    "a broken pipe for JSON": _broken_pipe_json,
    "a full standard output": _full_stdout,
    "a closed standard output": _closed_stdout,
    "a closed error stream": _closed_stderr,
    "a full error stream": _full_stderr,
    "a closed standard input": _closed_stdin,
    "Ctrl-C in the middle of a run": _stopped(signal.SIGINT),
    "the end of a batch job in the middle of a run": _stopped(signal.SIGTERM),
}


# Packages and limits


def _without(package: str, name: str) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        words = _words(EXPLAIN)
        if name == "attention":
            words = ["attention", "--model", saved("bert"), "--data", texts_file(place, ["w5 w6", "w7 w8"])]
            words += ["--out", place / "out"]
        done = checked(process(*words, "--json", first=f"import sys; sys.modules[{package!r}] = None"))
        if name == "explain":
            proved(_numbers(done) == undisturbed(*EXPLAIN), "the numbers differ from those of a plain process")
        else:
            proved((place / "out" / "texts.csv").exists(), "the tables are not there")
            proved(strict_json(done.stdout)["texts"] == 2, "not all texts were read")

    return run


LIMITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "few open files": ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))", ()),
    "little memory": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (9 << 29, 9 << 29))", ()),
    "a shallow stack": ("import sys; import identikit.cli.main; sys.setrecursionlimit(120)", ()),
    "no working folder": ("import os, tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)", ()),
    "a strange default encoding": ("import locale; locale.setlocale(locale.LC_ALL, 'C')", ()),
}


def _limited(first: str) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        done = process(*_words(EXPLAIN), "--json", first=first)
        if done.status == 70:  # said to be unexpected, in one line
            raise Refused(done.stderr.strip().removeprefix("identikit: "))
        proved(_numbers(checked(done)) == undisturbed(*EXPLAIN), "the numbers differ from those of a plain process")

    return run


def _unexpected(error: Exception) -> Callable[[Path], None]:
    """An error that nobody thought of: one line that says where to report it, and status 70."""

    def run(_: Path) -> None:
        with mock.patch.object(ik, "load", side_effect=error):
            try:
                command("explain", "w5 w6")
            except Unclear as told:
                said = str(told)
                proved(said.startswith("status 70, stdout ''"), said)
                proved("report" in said and said.count("\\n") == 1, said)
                return
            except BaseException as escaped:
                raise Wrong(f"{type(escaped).__name__} came through: {escaped}") from None
        raise Wrong("it went through")

    return run


def _raised(error: Exception) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        with mock.patch.object(ik, "load", side_effect=error):
            command("explain", "w5 w6")

    return run


def _device(device: str) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        import torch

        if device == "cuda" and torch.cuda.is_available():
            raise Refused("cuda is there.")
        command("explain", "w5 w6", "--model", saved("bert"), "--device", device)

    return run


def _undefined(place: Path) -> None:
    """With one fold and one text there are numbers that do not exist; JSON says null and why, never NaN."""
    out = place / "out"
    words = ["tokens", "--model", saved("bert"), "--data", texts_file(place), "--out", out, "--folds", "1", "--json"]
    told = strict_json(command(*words, "--map", "ridge").stdout)
    proved(told["rates"][0]["low"] is None, "an interval from one fold")
    one = place / "one"
    one.mkdir()
    words = ["attention", "--model", saved("bert"), "--data", texts_file(one, ["w5"]), "--out", place / "two", "--json"]
    strict_json(command(*words).stdout)
