"""What computes for the server, in a process of its own: analyses of texts, and questions about texts already read.

The server talks to it through a pipe: a `Task` goes in, `Progressed` and one `Answer` come out. A `Cancel` that comes
in between ends the task at its next sign of progress.
"""

import json
import signal
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from identikit.errors import IdentikitError, ModelError, TooLongError

KEPT = 4  # texts whose attention is kept for the next question
PAUSE = 0.1  # seconds between signs of progress
_MEMORY = ("out of memory", "allocate memory", "not enough memory")


@dataclass(frozen=True)
class Source:
    """A model that the server was started with: a hub id, a folder, or None for the packaged one, and how to load it.

    `fingerprint` and `revision` are known once it was loaded: whoever loads it again must find the same.
    """

    model: str | None
    device: str | None = None
    dtype: str = "float32"
    revision: str | None = None
    fingerprint: str | None = None


class Facts(NamedTuple):
    """What a loaded model is; `tokens` is how many it reads at most (None: any number)."""

    name: str
    layers: int
    heads: int
    causal: bool
    modality: str
    tokens: int | None
    source: Source


class Ready(NamedTuple):
    """The first message: the models that were loaded, and the sample text that comes with the package."""

    models: tuple[Facts, ...]
    sample: str | tuple[str, str]


class Failure(NamedTuple):
    """Why something was not done: a code for programs, and a sentence for people."""

    code: str
    message: str


class Task(NamedTuple):
    """Something to compute: which function of this module, with which model, text and options."""

    number: int
    what: str
    model: str
    text: str | tuple[str, str]
    options: Mapping[str, Any]


class Cancel(NamedTuple):
    """A wish that a task be given up."""

    number: int


class Progressed(NamedTuple):
    """A sign of progress of a task."""

    number: int
    what: str
    done: int
    total: int


class Answer(NamedTuple):
    """The end of a task: what was found, or why nothing was."""

    number: int
    found: Any = None
    failure: Failure | None = None


class Cancelled(BaseException):
    """Raised through an analysis that nobody wants any more; no handler of errors stops it."""


def work(connection: Connection, sources: tuple[Source, ...]) -> None:
    """Load models and answer tasks until the server closes the pipe or ends; the server alone hears Ctrl-C."""
    from identikit.runs.engines import end_with_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        desk = Desk(connection, sources)
    except Exception as error:
        connection.send(_failure(error))
        return
    connection.send(desk.ready())
    while True:
        try:
            asked = connection.recv()
        except (EOFError, OSError):
            return
        if isinstance(asked, Task):  # a Cancel that came too late is passed over
            connection.send(desk.answer(asked))


@dataclass
class Desk:
    """The models, and the texts read last."""

    connection: Connection
    sources: tuple[Source, ...]
    models: dict[str, Any] = field(default_factory=dict)
    read: OrderedDict[tuple[Any, ...], Any] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        for source in self.sources:
            model = _loaded(source)
            if model.name in self.models:
                raise ModelError(
                    f"Serving two models called {model.name}: visitors could not tell them apart. Rename a folder."
                )
            self.models[model.name] = model

    def ready(self) -> Ready:
        """Say what is here."""
        from identikit.texts.data import sample_text

        text: Any = sample_text()
        return Ready(tuple(map(_facts, self.models.values(), self.sources)), text)

    def answer(self, task: Task) -> Answer:
        """Compute a task; whatever it raises becomes a sentence."""
        try:
            return Answer(task.number, ANSWERS[task.what](self, task))
        except Cancelled:
            return Answer(task.number, failure=Failure("cancelled", "This was cancelled."))
        except Exception as error:
            return Answer(task.number, failure=_failure(error))

    def attention(self, task: Task) -> Any:
        """Return the captured attention of a text, read now or a little while ago."""
        from identikit.attention.effective import effective_attention

        key = task.model, task.text
        if key not in self.read:
            self.read[key] = effective_attention(self.models[task.model], task.text)
        self.read.move_to_end(key)
        while len(self.read) > KEPT:
            self.read.popitem(last=False)
        return self.read[key]

    def progress(self, number: int) -> Callable[[str, int, int], None]:
        """Return what an analysis tells its progress to: it is sent on now and then, and cancels when that is asked."""
        last: list[Any] = ["", 0.0]

        def told(what: str, done: int, total: int) -> None:
            if self.connection.poll() and self.connection.recv() == Cancel(number):
                raise Cancelled
            now = time.monotonic()
            if what != last[0] or now - last[1] > PAUSE:
                last[:] = what, now
                self.connection.send(Progressed(number, what, done, total))

        return told


def _loaded(source: Source) -> Any:
    """Load a model that reads texts, the same as before if it was loaded before."""
    from identikit.models.load.load import load

    model = load(source.model, device=source.device, dtype=source.dtype, revision=source.revision)
    if model.modality != "text":
        raise ModelError(
            f"Serving {model.name}: it reads {model.modality}s, and visitors type texts. Use `identikit explain` with "
            f"the path of the {model.modality}."
        )
    if source.fingerprint not in (None, model.fingerprint):
        raise ModelError(
            f"Loading {model.name} again: its files are not those that the server was started with. Start it anew."
        )
    return model


def _facts(model: Any, source: Source) -> Facts:
    own = Source(source.model, source.device, source.dtype, model.recipe.revision, model.fingerprint)
    return Facts(model.name, model.n_layers, model.n_heads, model.causal, model.modality, model.limit, own)


def _failure(error: Exception) -> Failure:
    """Return an error as a sentence; one of ours is also printed in full where the server's operator sees it."""
    words = " ".join(str(error).split())
    if isinstance(error, IdentikitError):
        kinds = ((TooLongError, "too_long"), (ModelError, "model"))
        return Failure(next((code for kind, code in kinds if isinstance(error, kind)), "input"), words)
    if isinstance(error, MemoryError) or any(one in words.lower() for one in _MEMORY):
        return Failure("memory", "This needs more memory than the server has. Pass a shorter text.")
    traceback.print_exception(error)
    return Failure("internal", f"An internal error, which is not your fault: {type(error).__name__}: {words:.200}.")


# What can be asked


def _explain(desk: Desk, task: Task) -> tuple[bytes, bytes]:
    """Explain a text: as JSON, and packed for the views."""
    from identikit.explanation.explain import explain
    from identikit.results.files import plain
    from identikit.web.payload import packed

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        told = desk.progress(task.number)
        found = explain(desk.models[task.model], task.text, progress=told, **task.options)
        view = packed(found, progress=told)
    said = found.to_dict() | {"verdict": str(found), "warnings": [str(one.message) for one in warned]}
    return json.dumps(plain(said), ensure_ascii=False, allow_nan=False).encode(), view


def _check(desk: Desk, task: Task) -> int:
    """Return how many tokens a text has, if the model can read it."""
    (encoded,) = desk.models[task.model].encode(task.text)
    return len(encoded)


def _rows(desk: Desk, task: Task) -> bytes:
    """Bound some rows."""
    from identikit.web.rows import packed_rows

    rows = [(layer, head, query) for layer, head, query in task.options["rows"]]
    return packed_rows(desk.attention(task), rows, epsilon=task.options["epsilon"])


def _simplex(desk: Desk, task: Task) -> bytes:
    """Compute the simplex map of a head."""
    from identikit.web.payload import packed_simplex

    return packed_simplex(desk.attention(task), **task.options)


def _move(desk: Desk, task: Task) -> dict[str, Any]:
    """Take a weight to an end of its interval, put that row into the model, and measure what changes."""
    from identikit.attention.alternatives import alternative_of

    row = {name: task.options[name] for name in ("layer", "head", "query")}
    key, end = task.options["key"], task.options["end"]
    found = alternative_of(desk.attention(task).sel(**row), toward=key, end=end)
    return {
        "attention": found.attention.tolist(),
        "raw": found.raw.tolist(),
        "weight": float(found.sel(key=key).attention),
        "row_residual": found.row_residual,
        "output_change": found.output_change._asdict(),
    }


ANSWERS: Mapping[str, Callable[[Desk, Task], Any]] = {
    "explain": _explain,
    "check": _check,
    "rows": _rows,
    "simplex": _simplex,
    "move": _move,
}
