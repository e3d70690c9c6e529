"""Ways to damage a file or what stands in its place."""

from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]


def flipped(share: float) -> Damage:
    """Return what flips one bit, at a share of a file's length."""

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(share * len(content))] ^= 1
        path.write_bytes(content)

    return flip


def changed(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(target: str) -> Damage:
    """Return what puts a link there: to a target, or to itself."""

    def linked(path: Path) -> None:
        path.unlink()
        path.symlink_to(target or path.name)

    return linked


STANDINS: dict[str, Damage] = {
    "gone": Path.unlink,
    "replaced by a folder": folder,
    "replaced by a link to itself": link(""),
}
DAMAGES: dict[str, Damage] = STANDINS | {
    "with a bit flipped at the start": flipped(0.0),
    "with a bit flipped in the middle": flipped(0.5),
    "empty": changed(lambda _: b""),
    "cut in half": changed(lambda content: content[: len(content) // 2]),
    "with a byte too many": changed(lambda content: content + b"x"),
    "of another kind": changed(lambda _: b"not what was written"),
}
