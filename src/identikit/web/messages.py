"""What goes over the wire as JSON, with the one shape of errors, and what the server and a worker process say.

Through a worker's pipe, `Ready` comes out first, or a `Problem` if the models cannot be loaded. Then tasks go in, one
at a time; for each, `ProgressReport`s and one `Answer` come out. `CANCEL` ends a task at its next report.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, computed_field

ROWS = 16  # the most rows per request

Place = Annotated[int, Field(ge=0, le=2**31 - 1, description="Counted from 0.")]
RowPlace = Annotated[list[Place], Field(min_length=3, max_length=3, description="Layer, head and query.")]
TextOrPair = str | tuple[str, str]
State = Literal["waiting", "running", "done", "failed", "cancelled"]


class _Request(BaseModel):
    """The body of a request: only these fields, of exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NewJob(_Request):
    """A text to analyse."""

    text: str = Field(description="The text.")
    pair: str | None = Field(None, description="A second text, read together with the first.")
    model: str | None = Field(None, description="One of the server's models, by its name; the first if left out.")
    measures: list[str] = Field([], description="Also read attention in these ways, of those that the server names.")
    target: str | int | None = Field(None, description="The target of measures that need one: a token, or a number.")


class RowsRequest(_Request):
    """Rows of attention to bound."""

    rows: list[RowPlace] = Field(min_length=1, max_length=ROWS)
    epsilon: float = Field(0.0, ge=0, lt=1, allow_inf_nan=False, description="Share of its norm the output may move.")


class SimplexRequest(_Request):
    """A head whose simplex map is wanted."""

    layer: Place
    head: Place


class MoveRequest(SimplexRequest):
    """An edge, and the end of its interval to move it to."""

    query: Place
    key: Place
    end: Literal["lower", "upper"]


class Problem(BaseModel):
    """What went wrong: a code for programs, a sentence for people, and what to do where that is known."""

    code: str
    message: str
    hint: str | None = None


class Error(BaseModel):
    """The one shape of errors."""

    error: Problem


class ProgressReport(BaseModel):
    """What an analysis is doing, how many parts of it are done, and of how many."""

    what: str
    done: int
    total: int


class JobStatus(BaseModel):
    """How far an analysis is; `ahead` is how many come first."""

    id: str
    state: State
    ahead: int
    progress: ProgressReport | None
    error: Problem | None


class ServedModel(BaseModel):
    """A model that texts can be analysed with; `tokens` is how many it reads at most, null for any number."""

    name: str
    layers: int
    heads: int
    causal: bool
    modality: str
    tokens: int | None


class OfferedMeasure(BaseModel):
    """A reading of attention that an analysis can include; `of_target`: it needs a target, such as a token."""

    name: str
    meaning: str
    of_target: bool


class Limits(BaseModel):
    """What the server takes."""

    model_config = ConfigDict(frozen=True)

    characters: int = Field(default=5000, description="Of a text, or of both halves of a pair together.")
    measures: int = Field(default=4, description="Measures that an analysis may read.")
    waiting: int = Field(default=8, description="Analyses that may wait.")
    seconds: float = Field(default=20.0, description="About how long rows of attention are bounded in an analysis.")
    analysis: float = Field(default=900.0, description="Seconds that an analysis may take.")
    question: float = Field(default=60.0, description="The most seconds a question may take.")
    questions: int = Field(default=16, description="Questions that may wait.")
    streams: int = Field(default=64, description="Streams of events that may be open.")
    results: int = Field(default=64, description="Ended analyses that are kept.")
    kept: int = Field(default=2**29, description="How many bytes of them are kept.")
    rows: int = Field(default=ROWS, description="The most rows per request.")

    @computed_field
    @property
    def body(self) -> int:
        """How many bytes a request may have: JSON may spell a character in twelve."""
        return 12 * self.characters + 4096


class ServerIndex(BaseModel):
    """What the server is and has."""

    version: str
    models: list[ServedModel]
    limits: Limits
    sample: NewJob
    measures: list[OfferedMeasure]


class Analysis(BaseModel):
    """An analysis: what it is about and, once it is done, the explanation that `Explanation.to_dict` gives."""

    id: str
    state: State
    model: str
    text: str
    pair: str | None
    measures: list[str]
    target: str | int | None
    error: Problem | None
    explanation: dict[str, object] | None


class OutputChange(BaseModel):
    """The largest change of the model's output, relative to its largest entry; `logits` is null if it makes none."""

    hidden: float
    logits: float | None


class MovedRow(BaseModel):
    """A row that was moved to an end of an edge's interval, and what that changed when it was put into the model."""

    attention: list[float]
    raw: list[float]
    weight: float = Field(description="The edge's weight in the moved row.")
    row_residual: float = Field(description="How far the head's own output moved, relative to what it adds up.")
    output_change: OutputChange


class Health(BaseModel):
    """Whether the server works."""

    status: Literal["ok", "starting"]
    version: str
    waiting: int
    running: int
    workers: int = Field(description="Worker processes that are alive, of two.")


# Errors


STATUS: Mapping[str, int] = {
    **dict.fromkeys(("input", "too_long", "unknown_model", "model", "invalid"), 422),
    **dict.fromkeys(("not_done", "cancelled"), 409),
    **dict.fromkeys(("too_slow", "worker", "closing"), 503),
    "foreign_origin": 403,
    "not_found": 404,
    "wrong_method": 405,
    "too_late": 408,
    "too_large": 413,
    "not_json": 415,
    "wrong_host": 421,
    "busy": 429,
    "internal": 500,
    "memory": 507,
}
_RETRY = {"busy": "5", "worker": "5", "closing": "30"}  # seconds


class RefusedError(Exception):
    """A request that is not answered as asked."""

    def __init__(self, code: str, message: str, hint: str | None = None):
        super().__init__(message)
        self.problem = Problem(code=code, message=message, hint=hint)


def error_response(problem: Problem) -> JSONResponse:
    """Return a problem in the one shape, and say when to try again where that helps."""
    headers = {"retry-after": _RETRY[problem.code]} if problem.code in _RETRY else None
    return JSONResponse(Error(error=problem).model_dump(exclude_none=True), STATUS[problem.code], headers)


# Between the server and a worker process

CANCEL = "cancel"


@dataclass(frozen=True)
class ModelSource:
    """A model that the server was started with: a hub id, a folder, or None for the packaged one, and how to load it.

    `fingerprint` and `revision` are known once the model has been loaded; loading it again must give the same.
    """

    model: str | None
    device: str | None = None
    dtype: str = "float32"
    revision: str | None = None
    fingerprint: str | None = None


class Ready(NamedTuple):
    """The models that were loaded, how to load the same again, the sample text that comes with the package, and the
    measures that can be read."""

    models: tuple[ServedModel, ...]
    sources: tuple[ModelSource, ...]
    sample: TextOrPair
    measures: tuple[OfferedMeasure, ...]


class Explain(NamedTuple):
    """Explain a text: as JSON, and packed for the views; `measures` and `target` as for `explain`."""

    seconds: float
    measures: tuple[str, ...] = ()
    target: str | int | None = None


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
