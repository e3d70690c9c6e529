"""What the server and a worker process say to each other through their pipe.

First `Ready` comes out, or a `Problem` if the models cannot be loaded. Then tasks go in, one at a time; for each,
`ProgressReport`s and one `Answer` come out. `CANCEL` ends a task at its next report.
"""

from dataclasses import dataclass
from typing import NamedTuple

from identikit.web.messages import MoveRequest, Problem, RowsRequest, ServedModel, SimplexRequest

CANCEL = "cancel"

TextOrPair = str | tuple[str, str]


@dataclass(frozen=True)
class ModelSource:
    """A model that the server was started with: a hub id, a folder, or None for the packaged one, and how to load it.

    `fingerprint` and `revision` are known once it was loaded: whoever loads it again must find the same.
    """

    model: str | None
    device: str | None = None
    dtype: str = "float32"
    revision: str | None = None
    fingerprint: str | None = None


class Ready(NamedTuple):
    """The models that were loaded, how to load the same again, and the sample text that comes with the package."""

    models: tuple[ServedModel, ...]
    sources: tuple[ModelSource, ...]
    sample: TextOrPair


class Explain(NamedTuple):
    """Explain a text: as JSON, and packed for the views."""

    seconds: float


class CheckText(NamedTuple):
    """Check that the model can read a text."""


Question = RowsRequest | SimplexRequest | MoveRequest


class WorkerTask(NamedTuple):
    """Something to compute about a text."""

    model: str
    text: TextOrPair
    question: Explain | CheckText | Question


class Answer(NamedTuple):
    """The end of a task: what was computed, or why nothing was."""

    contents: tuple[bytes, ...] = ()
    problem: Problem | None = None


CANCELLED = Answer(problem=Problem(code="cancelled", message="This was cancelled."))
