"""Analyses that visitors asked for: waiting, running or ended, known by what they are about; the last are kept."""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator

from identikit.version import __version__
from identikit.web.messages import JobStatus, Limits, RefusedError, ServedModel
from identikit.web.processes import PendingTask, WorkerProcess
from identikit.web.tasks import CheckText, Explain, ModelSource, Question, TextOrPair, WorkerTask

HEARTBEAT = 15.0  # seconds of silence after which a stream says that it is still there


class Service:
    """The two worker processes, their models, and all analyses.

    One process analyses texts; the other answers questions about them, so that these never wait for an analysis.
    """

    def __init__(self, sources: tuple[ModelSource, ...], limits: Limits):
        self.limits = limits
        self.analyst = WorkerProcess(sources, "analyses", limit=limits.waiting, longest=limits.analysis)
        self.reader = WorkerProcess(sources, "questions", limit=limits.questions, longest=limits.question)
        self.analyst.changed = self._wake
        self.jobs: OrderedDict[str, PendingTask] = OrderedDict()
        self.models: dict[str, ServedModel] = {}
        self.sample: TextOrPair = ""
        self.streams = 0
        self.closing = False
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Load the models in both processes; raises what keeps them from it."""
        ready, _ = await asyncio.gather(self.analyst.start(), self.reader.start())
        self.models = {model.name: model for model in ready.models}
        self.sample = ready.sample

    async def close(self) -> None:
        """End everything."""
        self.end_streams()
        await asyncio.gather(self.analyst.close(), self.reader.close())

    def end_streams(self) -> None:
        """Let everyone who follows an analysis go, so that the server can stop."""
        self.closing = True
        self._wake()

    # Analyses

    async def submit(self, model: str | None, text: TextOrPair) -> str:
        """Return the id of the analysis of a text, which may have ended long ago, or may just have been queued."""
        name = self._model_name(model)
        length = len(text) if isinstance(text, str) else sum(map(len, text))
        if length > self.limits.characters:
            raise RefusedError(
                "too_long",
                f"The text has {length:,} characters, and this server reads at most {self.limits.characters:,}.",
                "Shorten it, or start a server of your own, which can be told to read longer texts.",
            )
        id = self._id(name, text)
        if not self._is_useful(id):
            self.analyst.refuse_if_full()
            await self.ask(WorkerTask(name, text, CheckText()))
        if not self._is_useful(id):  # another visitor may have asked the same meanwhile
            self.jobs[id] = self.analyst.submit(WorkerTask(name, text, Explain(self.limits.seconds)))
            self.jobs[id].answer.add_done_callback(lambda _: self.forget())
        self.jobs.move_to_end(id)
        return id

    def find(self, id: str) -> PendingTask:
        """Return an analysis, ended or not."""
        if id not in self.jobs:
            raise RefusedError(
                "not_found",
                "There is no analysis with this id: it was never asked for, or is no longer kept.",
                "Send the text again.",
            )
        self.jobs.move_to_end(id)
        return self.jobs[id]

    def result(self, id: str) -> PendingTask:
        """Return an analysis that was done."""
        job = self.find(id)
        if job.state != "done":
            raise RefusedError("not_done", f"The analysis is {job.state}, so there is nothing to show.")
        return job

    def cancel(self, id: str) -> None:
        """Cancel an analysis; one that has ended stays as it is."""
        self.analyst.cancel(self.find(id))

    def status(self, id: str) -> JobStatus:
        """Return how far an analysis is."""
        return self._status(id, self.find(id))

    async def statuses(self, id: str) -> AsyncIterator[JobStatus | None]:
        """Yield how far an analysis is whenever that changes, until it ends; None after a while of silence."""
        job = self.find(id)
        self.streams += 1
        last = None
        try:
            while not self.closing:
                changed = self._changed
                status = self._status(id, job)
                if status != last:
                    yield status
                last = status
                if job.answer.done():
                    return
                try:
                    await asyncio.wait_for(changed.wait(), HEARTBEAT)
                except TimeoutError:
                    yield None
        finally:
            self.streams -= 1

    def refuse_stream(self) -> None:
        """Refuse one stream more than may be open."""
        if self.streams >= self.limits.streams:
            raise RefusedError("busy", f"Too many streams of events are open: {self.streams}.")

    def forget(self) -> None:
        """Let go of what was used longest ago, until what is kept is few and small enough."""
        ended = [id for id, job in self.jobs.items() if job.answer.done()]
        size = sum(_size(self.jobs[id]) for id in ended)
        while len(ended) > self.limits.results or (size > self.limits.kept and len(ended) > 1):
            size -= _size(self.jobs.pop(ended.pop(0)))

    def _status(self, id: str, job: PendingTask) -> JobStatus:
        ahead = self.analyst.ahead(job)
        return JobStatus(id=id, state=job.state, ahead=ahead, progress=job.progress, error=job.problem)

    def _model_name(self, name: str | None) -> str:
        if name is None:
            return next(iter(self.models))
        if name not in self.models:
            known = ", ".join(self.models)
            raise RefusedError("unknown_model", f"This server has no model of that name. It has: {known}.")
        return name

    def _id(self, model: str, text: TextOrPair) -> str:
        source = self.analyst.sources[list(self.models).index(model)]
        content = [__version__, model, source.fingerprint, text, self.limits.seconds]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]

    def _is_useful(self, id: str) -> bool:
        """Return whether an analysis need not be started again: it is under way, or was done."""
        return id in self.jobs and self.jobs[id].problem is None

    def _wake(self) -> None:
        """Wake everyone who follows an analysis."""
        self._changed.set()
        self._changed = asyncio.Event()

    # Questions

    async def question(self, id: str, question: Question) -> bytes:
        """Return the answer to a question about an analysis that was done."""
        (content,) = await self.ask(self.result(id).task._replace(question=question))
        return content

    async def ask(self, task: WorkerTask) -> tuple[bytes, ...]:
        """Return what a task computes."""
        answer = await self.reader.submit(task).answer
        if answer.problem is not None:
            raise RefusedError(**answer.problem.model_dump())
        return answer.contents


def _size(job: PendingTask) -> int:
    return sum(map(len, job.contents))
