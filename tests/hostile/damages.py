"""Ways to damage a file or what stands in its place."""

from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]


def _flipped(share: float) -> Damage:
    """Return what flips one bit, at a share of a file's length."""

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(share * len(content)), len(content) - 1)] ^= 1
        path.write_bytes(content)

    return flip


def _changed(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(target: str) -> Damage:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(target or path.name)

    return link


FLIPS: dict[str, Damage] = {
    f"with a bit flipped {where}": _flipped(share)
    for where, share in {
        "at the start": 0.0, "after a hundredth": 0.01, "after a tenth": 0.1, "after a third": 0.33,
        "in the middle": 0.5, "after two thirds": 0.66, "near the end": 0.97, "at the end": 1.0,
    }.items()
}  # fmt: skip
CUTS: dict[str, Damage] = {
    "empty": _changed(lambda _: b""),
    "of 7 bytes": _changed(lambda whole: whole[:7]),
    "cut in half": _changed(lambda whole: whole[: len(whole) // 2]),
    "without its last byte": _changed(lambda whole: whole[:-1]),
    "with a byte too many": _changed(lambda whole: whole + b"x"),
    "of NUL bytes": _changed(lambda whole: bytes(len(whole))),
    "of another kind": _changed(lambda _: b"not what was written"),
    "twice in a row": _changed(lambda whole: whole * 2),
}
STANDINS: dict[str, Damage] = {
    "gone": Path.unlink,
    "replaced by a folder": _folder,
    "replaced by a link to itself": _link(""),
    "replaced by a link to nowhere": _link("nowhere"),
    "replaced by an endless device": _link("/dev/zero"),
}
DAMAGES = FLIPS | CUTS | {name: made for name, made in STANDINS.items() if "endless" not in name}
