"""The process that computes for the server: it analyses texts, and answers questions about them."""

import json
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from dataclasses import replace
from multiprocessing.connection import Connection

from identikit.attention.alternatives import alternative_of
from identikit.attention.effective import effective_attention
from identikit.attention.result import EffectiveAttention
from identikit.errors import IdentikitError, ModelError, TooLongError, for_page
from identikit.explanation.explain import explain
from identikit.explanation.readings import MEASURE_CHOICES
from identikit.explanation.words import verdict
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.results.files import plain
from identikit.runs.engines import end_with_parent
from identikit.texts.data import sample_text
from identikit.web import messages
from identikit.web.messages import CANCEL, CANCELLED, Answer, ModelSource, Problem, Ready, TextOrPair, WorkerTask
from identikit.web.payload import packed, packed_simplex
from identikit.web.rows import packed_rows

KEPT = 4  # texts whose attention is kept for the next question
PAUSE = 0.1  # seconds between reports of progress
_MEMORY = ("out of memory", "allocate memory", "not enough memory")
_CODES = {TooLongError: "too_long", ModelError: "model", IdentikitError: "input"}  # the first class that matches


class Cancelled(BaseException):
    """Raised to cancel an analysis; no error handler catches it."""


def work(connection: Connection, sources: tuple[ModelSource, ...]) -> None:
    """Load models and answer tasks until the server closes the pipe or ends."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        runner = TaskRunner(sources, connection)
    except Exception as error:
        connection.send(_problem(error))
        return
    connection.send(runner.ready())
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        if isinstance(message, WorkerTask):  # not a request to cancel that came too late
            connection.send(runner.answer(message))


class TaskRunner:
    """Computes tasks with its models, and keeps the attention of the last texts."""

    def __init__(self, sources: tuple[ModelSource, ...], connection: Connection):
        self.sources = sources
        self.connection = connection
        self.models: dict[str, Model] = {}
        self.read: OrderedDict[tuple[str, TextOrPair], EffectiveAttention] = OrderedDict()
        self._last_report = ("", 0.0)  # the step and the time
        for source in sources:
            model = load(source.model, device=source.device, dtype=source.dtype, revision=source.revision)
            if model.modality != "text":
                raise ModelError(
                    f"Serving {model.name}: it reads {model.modality}s, and visitors type texts. Use `identikit "
                    f"explain` with the path of the {model.modality}."
                )
            if source.fingerprint not in (None, model.fingerprint):
                raise ModelError(
                    f"Loading {model.name} again: its files are not those that the server was started with. Restart "
                    "the server."
                )
            if model.name in self.models:
                raise ModelError(
                    f"Serving two models called {model.name}: visitors could not tell them apart. Rename a folder."
                )
            self.models[model.name] = model

    def ready(self) -> Ready:
        """Return what this process has loaded."""
        sources: list[ModelSource] = []
        served: list[messages.ServedModel] = []
        for model, source in zip(self.models.values(), self.sources, strict=True):
            revision = None if model.recipe is None else model.recipe.revision
            sources.append(replace(source, revision=revision, fingerprint=model.fingerprint))
            served.append(
                messages.ServedModel(
                    name=model.name,
                    layers=model.n_layers,
                    heads=model.n_heads,
                    causal=model.causal,
                    modality=model.modality,
                    tokens=model.limit,
                )
            )
        first, second = map(str, sample_text())
        offered = (messages.OfferedMeasure(**measure._asdict()) for measure in MEASURE_CHOICES)
        return Ready(tuple(served), tuple(sources), (first, second), tuple(offered))

    def answer(self, task: WorkerTask) -> Answer:
        """Compute a task; whatever it raises becomes a sentence."""
        try:
            match task.question:
                case messages.Explain() as request:
                    return Answer(self._explain(self.models[task.model], task.text, request))
                case messages.CheckText():
                    self.models[task.model].encode(task.text)
                    return Answer()
                case messages.RowsRequest(rows=rows, epsilon=epsilon):
                    indices = [(layer, head, query) for layer, head, query in rows]
                    return Answer((packed_rows(self._attention(task), indices, epsilon=epsilon),))
                case messages.MoveRequest() as edge:
                    return Answer((_moved(self._attention(task), edge).model_dump_json().encode(),))
                case messages.SimplexRequest(layer=layer, head=head):
                    return Answer((packed_simplex(self._attention(task), layer, head),))
        except Cancelled:
            return CANCELLED
        except Exception as error:
            problem = _problem(error)
            return Answer(problem=problem.model_copy(update={"message": for_page(problem.message)}))

    def _explain(self, model: Model, text: TextOrPair, request: messages.Explain) -> tuple[bytes, bytes]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            explanation = explain(model, text, **request._asdict(), progress=self._report)
            view = packed(explanation, progress=self._report)
        words = {
            "verdict": f"{explanation!r}\n{verdict(explanation).spoken(for_page)}",
            "warnings": [for_page(str(warning.message)) for warning in caught],
        }
        content = plain(explanation.to_dict() | words)
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode(), view

    def _report(self, what: str, done: int, total: int) -> None:
        """Send the progress of a task now and then, and raise `Cancelled` if the server cancels the task."""
        if self.connection.poll() and self.connection.recv() == CANCEL:
            raise Cancelled
        last_step, last_time = self._last_report
        now = time.monotonic()
        if what != last_step or now - last_time > PAUSE:
            self._last_report = (what, now)
            self.connection.send(messages.ProgressReport(what=what, done=done, total=total))

    def _attention(self, task: WorkerTask) -> EffectiveAttention:
        """Return the attention of a text, captured now or for an earlier question."""
        key = (task.model, task.text)
        if key not in self.read:
            self.read[key] = effective_attention(self.models[task.model], task.text)
        self.read.move_to_end(key)
        while len(self.read) > KEPT:
            self.read.popitem(last=False)
        return self.read[key]


def _moved(attention: EffectiveAttention, edge: messages.MoveRequest) -> messages.MovedRow:
    """Move a weight to an end of its interval, put that row into the model, and measure what changes."""
    row = attention.sel(layer=edge.layer, head=edge.head, query=edge.query)
    alternative = alternative_of(row, toward=edge.key, end=edge.end)
    return messages.MovedRow(
        attention=alternative.attention.tolist(),
        raw=alternative.raw.tolist(),
        weight=float(alternative.sel(key=edge.key).attention),
        row_residual=alternative.row_residual,
        output_change=messages.OutputChange(**alternative.output_change._asdict()),
    )


def _problem(error: Exception) -> Problem:
    """Return an error as a sentence; an internal one is also printed in full for the server's operator."""
    words = " ".join(str(error).split())
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return Problem(code=code, message=words)
    if isinstance(error, MemoryError) or any(phrase in words.lower() for phrase in _MEMORY):
        return Problem(code="memory", message="This needs more memory than the server has. Pass a shorter text.")
    traceback.print_exception(error)
    return Problem(code="internal", message=f"An internal error: {type(error).__name__}: {words:.200}.")
