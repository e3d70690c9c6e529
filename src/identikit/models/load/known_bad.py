"""Versions of transformers that compute a family wrongly, which none of our checks of a model can see."""

from typing import NamedTuple

from packaging.version import Version

from identikit.errors import ModelError


class KnownBad(NamedTuple):
    """A `model_type` that transformers computes wrongly from version `since` until before `before`, and why."""

    model_type: str
    since: str
    before: str
    reason: str


KNOWN_BAD = (
    KnownBad(
        "olmo3",
        "5.0",
        "5.13",
        "layers with a sliding window, 24 of 32 in the 7B model, turn by the scaled rotary frequencies of the others "
        "(github.com/huggingface/transformers/pull/45945)",
    ),
)


def refuse_known_bad(model_type: str, name: str, version: str) -> None:
    """Refuse a family in a version of transformers that is known to compute it wrongly."""
    for bad in KNOWN_BAD:
        if model_type == bad.model_type and Version(bad.since) <= Version(version) < Version(bad.before):
            raise ModelError(
                f"Loading {name}: transformers {version} computes {model_type} wrongly: {bad.reason}. Install "
                f"transformers {bad.before} or later."
            )
