"""Ways to damage a file or what stands in its place."""

from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


STANDINS: dict[str, Damage] = {
    "gone": Path.unlink,
    "replaced by a folder": folder,
    "replaced by a link to itself": loop,
}
DAMAGES: dict[str, Damage] = STANDINS | {
    "with a bit flipped": flip_bit,
    "empty": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "of another kind": lambda path: path.write_bytes(b"not what was written"),
}
