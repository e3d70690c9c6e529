"""What goes over the wire as JSON: the bodies of requests and answers, and the one shape of errors."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from identikit.web.jobs import Limits

Place = Annotated[int, Field(ge=0, le=2**31 - 1, description="Counted from 0.")]
Row = Annotated[list[Place], Field(min_length=3, max_length=3, description="Layer, head and query.")]


class _Asked(BaseModel):
    """A body that a visitor sends: only what is named here, of just these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NewJob(_Asked):
    """A text to analyse."""

    text: str = Field(description="The text.")
    pair: str | None = Field(None, description="A second text, read together with the first.")
    model: str | None = Field(None, description="One of the server's models, by its name; the first if left out.")


class Rows(_Asked):
    """Rows of attention to bound."""

    rows: list[Row] = Field(min_length=1, max_length=Limits.rows)
    epsilon: float = Field(0.0, ge=0, lt=1, allow_inf_nan=False, description="Share of its norm the output may move.")


class Head(_Asked):
    """A head."""

    layer: Place
    head: Place


class Move(Head):
    """An end of an edge's interval."""

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


class Progress(BaseModel):
    """What an analysis is doing, how many parts of it are done, and of how many."""

    what: str
    done: int
    total: int


class JobStatus(BaseModel):
    """How far an analysis is; `ahead` is how many come first."""

    id: str
    state: Literal["waiting", "running", "done", "failed", "cancelled"]
    ahead: int
    progress: Progress | None = None
    error: Problem | None = None


class ServedModel(BaseModel):
    """A model that texts can be analysed with; `tokens` is how many it reads at most, null for any number."""

    name: str
    layers: int
    heads: int
    causal: bool
    modality: str
    tokens: int | None


class ServedLimits(BaseModel):
    """What the server takes."""

    characters: int
    body: int
    waiting: int
    questions: int
    rows: int
    seconds: float


class Index(BaseModel):
    """What the server is and has."""

    version: str
    models: list[ServedModel]
    limits: ServedLimits
    sample: NewJob


class Analysis(BaseModel):
    """An analysis: what it is about and, once it is done, the explanation that `Explanation.to_dict` gives."""

    id: str
    state: str
    model: str
    text: str
    pair: str | None
    error: Problem | None = None
    explanation: dict[str, Any] | None = None


class Change(BaseModel):
    """The largest change of the model's output, relative to its largest entry; `logits` is null if it makes none."""

    hidden: float
    logits: float | None


class Moved(BaseModel):
    """A row that was moved to an end of an edge's interval, and what that changed when it was put into the model."""

    attention: list[float]
    raw: list[float]
    weight: float = Field(description="The edge's weight in the moved row.")
    row_residual: float = Field(description="How far the head's own output moved, relative to what it adds up.")
    output_change: Change


class Health(BaseModel):
    """Whether the server works."""

    status: Literal["ok", "starting"]
    version: str
    waiting: int
    running: int
    workers: int = Field(description="Worker processes that are alive, of two.")


STATUS: Mapping[str, int] = {
    "input": 422,
    "too_long": 422,
    "unknown_model": 422,
    "model": 422,
    "invalid": 422,
    "not_found": 404,
    "not_done": 409,
    "cancelled": 409,
    "busy": 429,
    "memory": 507,
    "too_slow": 503,
    "worker": 503,
    "closing": 503,
    "internal": 500,
    "wrong_host": 421,
    "foreign_origin": 403,
    "too_large": 413,
    "not_json": 415,
    "too_late": 408,
}
_RETRY = {"busy": "5", "worker": "5", "closing": "30"}


def error_body(code: str, message: str, hint: str | None = None) -> dict[str, Any]:
    """Return an error in the one shape."""
    return Error(error=Problem(code=code, message=message, hint=hint)).model_dump(exclude_none=True)


def error_headers(code: str) -> dict[str, str]:
    """Return the headers that go with an error: when to try again."""
    return {"retry-after": _RETRY[code]} if code in _RETRY else {}
