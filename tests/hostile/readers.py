"""Commands that read the folder of a run, on folders that hold none or a damaged one."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile.cases import Case, crossed, kept, proved
from tests.hostile.damages import DAMAGES, STANDINS, Damage
from tests.hostile.made import command, content, ended
from tests.hostile.stores import ROLES, finished, made_file, made_folder


def cases() -> Iterator[Case]:
    """Yield each command that reads runs, on folders that hold none or a damaged one."""
    for word, (what, make), slow in crossed(("status", "resume", "verify", "merge", "diff"), NO_RUNS.items()):
        yield Case(f"identikit {word} {what}", "stores", _reader(word, make), "refused", slow=slow)
    for (what, damage), role, slow in crossed((DAMAGES | STANDINS).items(), ("the first shard", "a table as CSV")):
        yield Case(f"identikit verify, {role} {what}", "stores", _verified(role, damage), "right", slow=slow)


def _bad_manifest(place: Path) -> Path:
    out = Path(shutil.copytree(finished("attention"), place / "out"))
    (out / "run.json").write_text("{")
    return out


NO_RUNS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda place: place / "nothing",
    "an empty folder": lambda place: made_folder(place / "empty"),
    "a file": lambda place: made_file(place / "file"),
    "a folder of something else": lambda place: made_file(made_folder(place / "folder") / "thesis.tex").parent,
    "a folder whose manifest is damaged": _bad_manifest,
    "memory": lambda place: "memory://run",
    "an empty name": lambda place: "",
}


def _reader(word: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        given = make(place)
        before = content(place)
        try:
            command(word, str(given), *([str(finished("attention"))] if word == "diff" else []))
        finally:
            kept(content(place) == before, "a command that reads changed something")

    return run


def _verified(role: str, damage: Damage) -> Callable[[Path], None]:
    """`identikit verify` finds every damage, names the file, and changes nothing."""

    def run(place: Path) -> None:
        out = Path(shutil.copytree(finished("attention"), place / "out"))
        pattern, which = ROLES[role]
        file = sorted(out.glob(pattern))[which]
        damage(file)
        there = sorted(out.iterdir())
        done = ended("verify", out)
        proved(done.status == 1, f"status {done.status}: {done.stdout[-300:]} {done.stderr[-300:]}")
        told = [
            line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("Wrong: ", "identikit: "))
        ]
        proved(any(file.name in line for line in told), f"it does not name the file: {told}")
        kept(sorted(out.iterdir()) == there, "a command that reads changed something")

    return run
