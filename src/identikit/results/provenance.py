"""Where a result came from: enough to compute it again, and to see that two results are comparable."""

import hashlib
import importlib.metadata
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from identikit.texts.text import ReadText
from identikit.version import __version__

_PACKAGES = ("identikit", "torch", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True)
class Provenance:
    """What a result was computed from.

    - `model`, `revision`: its name, and its hub commit if it has one
    - `weights`: its fingerprint, over every weight, its configuration and its tokenizer
    - `tokenizer`, `tokenizer_sha256`: the tokenizer's class and a SHA-256 of its content; `text`: that of the text
    - `dtype`, `device`: the model's number format, and where it was computed
    - `settings`: the options of the analysis: tolerances, seed, norm, …
    - `versions`: of identikit and of the packages that it computes with
    - `packed`: how the weights are packed, such as '4-bit weights (bitsandbytes nf4)'; empty where they are plain
    - `code`: the SHA-256 of the file that has the model's class; empty if there is none, or if it was not recorded
    """

    model: str
    revision: str | None
    weights: str
    tokenizer: str
    tokenizer_sha256: str
    text: str
    dtype: str
    device: str
    settings: dict[str, object] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    code: str = ""
    packed: str = ""


def package_versions() -> dict[str, str]:
    """Return the versions of identikit and of the packages that it computes with."""
    return {name: _version(name) for name in _PACKAGES}


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return __version__ if package == "identikit" else "not installed"  # run from its source tree


@cache
def code_hash(defined: type) -> str:
    """Return the SHA-256 of the file that defines a class; empty if there is none."""
    try:
        return hashlib.sha256(Path(inspect.getfile(defined)).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return ""


def text_hash(text: ReadText | Sequence[ReadText]) -> str:
    """Return the SHA-256 of a text, a pair, or a list of either; a pair differs from its halves joined."""
    return hashlib.sha256(repr(text).encode()).hexdigest()
