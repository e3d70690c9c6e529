"""Places that cannot hold a result, and caches that are damaged or cannot be used.

Damaged results are in `tests/results/test_result.py`.
"""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import identikit as ik
from tests.hostile.damages import DAMAGES
from tests.hostile.judging import refused
from tests.hostile.made import content, same, workshop
from tests.models import tiny


@cache
def made() -> Any:
    """Return a result, computed once."""
    return ik.effective_attention(tiny.shared("bert"), "w5 w6 w7")


def foreign(place: Path) -> Path:
    (place / "folder").mkdir()
    (place / "folder" / "thesis.tex").write_text("precious")
    return place / "folder"


PLACES: dict[str, Callable[[Path], Any]] = {
    "a folder of something else": foreign,
    "a file": lambda place: foreign(place) / "thesis.tex",
    "a folder under a file": lambda place: foreign(place) / "thesis.tex" / "result",
    "a place where nothing can be made": lambda place: "/proc/identikit",
    "a device": lambda place: "/dev/full",
    "a name that is too long": lambda place: place / ("x" * 300),
    "a link to itself": lambda place: (place / "loop").symlink_to("loop") or place / "loop",
    "a number": lambda place: 5,
    "a result that is there": lambda place: made().save(place / "there") or place / "there",
}


@pytest.mark.parametrize("what", PLACES)
def test_a_place_that_cannot_hold_a_result_is_refused(what: str, tmp_path: Path):
    target = PLACES[what](tmp_path)
    before = content(tmp_path)
    with refused():
        made().save(target)
    assert content(tmp_path) == before


# Caches


def explained(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDENTIKIT_CACHE", str(folder))
        return ik.explain(tiny.shared("bert"), "w5 w6 w7")


@cache
def whole_cache() -> tuple[Path, Any]:
    """Return a cache that holds fitted maps, and what is explained with them."""
    folder = workshop() / "whole cache"
    return folder, explained(folder)


@pytest.mark.parametrize("what", ["with a bit flipped", "empty", "replaced by a folder"])
def test_damaged_maps_in_the_cache_are_fitted_again(what: str, tmp_path: Path):
    folder, expected = whole_cache()
    shutil.copytree(folder, tmp_path / "maps")
    DAMAGES[what](next(path for path in sorted((tmp_path / "maps").iterdir()) if "maps" in path.name))
    for _ in range(2):
        same(explained(tmp_path / "maps"), expected, within=1e-6)


CACHES: dict[str, Callable[[Path], Any]] = {
    "a file": lambda folder: folder.write_text("precious"),
    "a link to itself": lambda folder: folder.symlink_to(folder.name),
    "a device": lambda folder: folder.symlink_to("/dev/full"),
    "nowhere that can be written": lambda folder: folder.symlink_to("/proc/identikit"),
}


@pytest.mark.parametrize("what", CACHES)
def test_a_cache_that_cannot_be_used_is_done_without(what: str, tmp_path: Path):
    CACHES[what](tmp_path / "maps")
    before = content(tmp_path)
    same(explained(tmp_path / "maps"), whole_cache()[1], within=1e-6)
    assert before.items() <= content(tmp_path).items()
