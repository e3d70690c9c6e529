"""Saved results and caches that were damaged: opened as what was saved, computed again, or refused."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import identikit as ik
from tests.hostile.cases import Case, crossed, kept, proved
from tests.hostile.damages import DAMAGES, Damage
from tests.hostile.made import TEXT, content, same, strict_json, workshop
from tests.models import tiny

MAKERS: dict[str, Callable[[], Any]] = {
    "attention": lambda: ik.effective_attention(tiny.shared("bert"), "w5 w6 w7"),
    "attribution": lambda: ik.token_attribution(tiny.shared("bert"), "w5 w6 w7"),
    "intervals": lambda: ik.attention_intervals(tiny.shared("bert"), TEXT, layer=0, head=0),
    "inversion": lambda: ik.invert(tiny.shared("llama"), "w5 w6"),
    "explanation": lambda: ik.explain(tiny.shared("bert"), "w5 w6 w7"),
}


@cache
def made(name: str) -> Any:
    """Return a result, computed once."""
    return MAKERS[name]()


@cache
def kept_result(name: str) -> Path:
    """Return the folder of a saved result."""
    folder = workshop() / f"saved-{name}"
    made(name).save(folder)
    return folder


def cases() -> Iterator[Case]:
    """Yield the cases with saved results and caches."""
    files = [(name, file) for name in MAKERS for file in ("result.json", "arrays.safetensors")]
    for (name, file), (what, damage), slow in crossed(files, DAMAGES.items()):
        yield Case(f"a saved {name}, {file} {what}", "stores", _opened(name, file, damage), "either", slow=slow)
    for name in MAKERS:
        yield Case(f"a saved {name} as JSON", "stores", _as_json(name), "right")
    for what, place in PLACES.items():
        yield Case(f"saving to {what}", "stores", _saved(place), "refused")
    for place, (what, damage) in enumerate(DAMAGES.items()):
        yield Case(f"cached maps {what}", "stores", _cached(damage), "right", slow=place % 9 != 0)
    for what, change in CACHES.items():
        yield Case(f"a cache that is {what}", "stores", _cache_place(change), "right")


def _opened(name: str, file: str, damage: Damage) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        folder = Path(shutil.copytree(kept_result(name), place / "result"))
        damage(folder / file)
        found = ik.open_result(folder)
        same(found, made(name), within=0)
        proved(asdict(found.provenance) == asdict(made(name).provenance), "the provenance differs")
        proved(str(found) == str(ik.open_result(kept_result(name))), "it says something else")

    return run


def _as_json(name: str) -> Callable[[Path], None]:
    import json

    def run(_: Path) -> None:
        strict_json(json.dumps(made(name).to_dict()))
        same(ik.open_result(kept_result(name)), made(name), within=0)
        strict_json((kept_result(name) / "result.json").read_text())

    return run


def _foreign(place: Path) -> Path:
    (place / "folder").mkdir()
    (place / "folder" / "thesis.tex").write_text("precious")
    return place / "folder"


PLACES: dict[str, Callable[[Path], Any]] = {
    "a folder of something else": _foreign,
    "a file": lambda place: (place / "file").write_text("precious") and place / "file",
    "a folder under a file": lambda place: (place / "file").write_text("precious") and place / "file" / "result",
    "a place where nothing can be made": lambda place: "/proc/identikit",
    "a device": lambda place: "/dev/full",
    "a name that is too long": lambda place: place / ("x" * 300),
    "a name with a NUL byte": lambda place: f"{place}/a\0b",
    "a link to itself": lambda place: (place / "loop").symlink_to("loop") or place / "loop",
    "an empty name": lambda place: "",
    "a result that is there": lambda place: made("attention").save(place / "there") or place / "there",
}


def _saved(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        target = make(place)
        before = content(place)
        try:
            made("attention").save(target)
        finally:
            kept(content(place) == before, "what was there before has changed")

    return run


# Caches


def _explained(cache: Path) -> Any:
    with mock.patch.dict(os.environ, {"IDENTIKIT_CACHE": str(cache)}):
        return ik.explain(tiny.shared("bert"), "w5 w6 w7")


@cache
def whole_cache() -> tuple[Path, Any]:
    """Return a cache that holds fitted maps, and what is explained with them."""
    folder = workshop() / "whole cache"
    return folder, _explained(folder)


def _cached(damage: Damage) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        folder, expected = whole_cache()
        shutil.copytree(folder, place / "cache")
        damage(next(path for path in sorted((place / "cache").iterdir()) if "maps" in path.name))
        same(_explained(place / "cache"), expected, within=1e-6)
        same(_explained(place / "cache"), expected, within=1e-6)

    return run


CACHES: dict[str, Callable[[Path], Any]] = {
    "a file": lambda cache: cache.write_text("precious"),
    "a link to itself": lambda cache: cache.symlink_to(cache.name),
    "a link to nowhere": lambda cache: cache.symlink_to("nowhere/at/all"),
    "a device": lambda cache: cache.symlink_to("/dev/full"),
    "nowhere that can be written": lambda cache: cache.symlink_to("/proc/identikit"),
    "empty": lambda cache: cache.mkdir(),
}


def _cache_place(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        change(place / "cache")
        before = content(place)
        same(_explained(place / "cache"), whole_cache()[1], within=1e-6)
        kept(before.items() <= content(place).items(), "a file of the user's has changed")

    return run
