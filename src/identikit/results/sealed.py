"""Files that notice when a single bit of them changes: each holds the SHA-256 of its own content.

The digest is taken with zeros in its own place, so a file needs no second one beside it and is whole or not at all.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from identikit.shapes import Tensor

_KEY = "sealed"
_BLANK = "0" * 64


class Damaged(Exception):  # noqa: N818 - says what a file is; whoever reads it decides what that means
    """A file is not what was written."""


class Sealed(NamedTuple):
    """The tensors of a file, and what was noted with them."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


def seal(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """Return tensors as a safetensors file; `about`, which JSON can hold, is noted with them."""
    # The format refuses tensors that share memory, so each is written from a copy of its own. One key of metadata: the
    # order of several is not fixed.
    copies = {key: tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    return _stamped(save(copies, {_KEY: _BLANK + json.dumps(about, sort_keys=True)}))


def unseal(content: bytes) -> Sealed:
    """Return what `seal` was given, or raise `Damaged`."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        noted = header["__metadata__"][_KEY]
        _check(content, noted[: len(_BLANK)])
        return Sealed(load(content), json.loads(noted[len(_BLANK) :]))
    except (ValueError, KeyError, TypeError, SafetensorError):
        raise Damaged("it is not a sealed safetensors file") from None


def seal_json(value: Any) -> bytes:
    """Return a value as a JSON file."""
    return seal_record({"content": value}, indent=None)


def unseal_json(content: bytes) -> Any:
    """Return what `seal_json` was given, or raise `Damaged`."""
    return unseal_record(content).get("content")


def seal_record(record: Mapping[str, Any], indent: int | None = 1) -> bytes:
    """Return named values as a JSON file that people read too."""
    stamped = {_KEY: _BLANK, **record}
    return _stamped(json.dumps(stamped, indent=indent, ensure_ascii=False, allow_nan=False).encode())


def unseal_record(content: bytes) -> dict[str, Any]:
    """Return what `seal_record` was given, or raise `Damaged`."""
    try:
        record = json.loads(content)
        _check(content, record.pop(_KEY))
        return record
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged("it is not a sealed JSON file") from None


def _stamped(blank: bytes) -> bytes:
    return blank.replace(_BLANK.encode(), hashlib.sha256(blank).hexdigest().encode(), 1)


def _check(content: bytes, digest: str) -> None:
    blank = content.replace(digest.encode(), _BLANK.encode(), 1)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise Damaged("its content does not have its SHA-256")
