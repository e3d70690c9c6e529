"""Analyses that visitors asked for: waiting, running or ended, known by what they are about; the last are kept."""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from identikit.version import __version__
from identikit.web.processes import FullError, Pending, Worker
from identikit.web.worker import Answer, Facts, Failure, Progressed, Source

ENDED = ("done", "failed", "cancelled")
HEARTBEAT = 15.0  # seconds of silence after which a stream says that it is still there
_MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    - `characters`: of a text, or of both halves of a pair together; `waiting`: analyses that may wait
    - `seconds`: about how long rows of attention are bounded; `analysis`, `question`: seconds that one may take
    - `questions`, `streams`: questions that may wait, and streams of events that may be open
    - `results`, `kept`: ended analyses that are kept, and how many bytes of them; `rows`: rows in one question
    """

    characters: int = 5000
    waiting: int = 8
    seconds: float = 20.0
    analysis: float = 900.0
    question: float = 60.0
    questions: int = 16
    streams: int = 64
    results: int = 64
    kept: int = 512 * _MIB
    rows: int = 16

    @property
    def body(self) -> int:
        """How many bytes a request may have: JSON may spell a character in twelve."""
        return 12 * self.characters + 4096


class RefusedError(Exception):
    """A request that is not answered as asked: the code that programs read, and sentences for people."""

    def __init__(self, code: str, message: str, hint: str | None = None):
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


@dataclass(eq=False)
class Job:
    """One analysis: what it is about, how far it is, and what came out, as JSON and packed for the views."""

    id: str
    model: str
    text: str | tuple[str, str]
    state: str = "waiting"
    progress: Progressed | None = None
    failure: Failure | None = None
    said: bytes = b""
    view: bytes = b""
    pending: Pending | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ENDED

    def tell(self) -> None:
        """Wake everyone who watches."""
        self.changed.set()
        self.changed = asyncio.Event()


class Service:
    """The two worker processes, what is known of their models, and all analyses.

    One process analyses texts; the other answers questions about them, so that these never wait for an analysis.
    """

    def __init__(self, sources: tuple[Source, ...], limits: Limits):
        self.limits = limits
        self.analyst = Worker(sources, limit=limits.waiting, longest=limits.analysis)
        self.reader = Worker(sources, limit=limits.questions, longest=limits.question)
        self.analyst.changed = self._moved
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self.models: dict[str, Facts] = {}
        self.sample: str | tuple[str, str] = ""
        self.streams = 0
        self.closing = False

    async def start(self) -> None:
        """Load the models in both processes; raises what keeps them from it."""
        ready, _ = await asyncio.gather(self.analyst.start(), self.reader.start())
        self.models = {facts.name: facts for facts in ready.models}
        self.sample = ready.sample

    async def close(self) -> None:
        """End everything."""
        self.end_streams()
        await asyncio.gather(self.analyst.close(), self.reader.close())

    def end_streams(self) -> None:
        """Let everyone who follows an analysis go, so that the server can stop."""
        self.closing = True
        for job in self.jobs.values():
            job.tell()

    # Analyses

    async def submit(self, model: str | None, text: str | tuple[str, str]) -> Job:
        """Return the analysis of a text, which may have ended long ago, or may just have been put in the queue."""
        facts = self._model(model)
        length = sum(map(len, [text] if isinstance(text, str) else text))
        if length > self.limits.characters:
            raise RefusedError(
                "too_long",
                f"The text has {length:,} characters, and this server reads at most {self.limits.characters:,}.",
                "Shorten it, or start a server of your own with a larger --longest.",
            )
        id = self._id(facts, text)
        if self._going(id) is None:
            self._refuse_if_full()
            await self.ask("check", facts.name, text, {})
        found = self._going(id)  # another visitor may have asked the same meanwhile
        return self._begin(id, facts.name, text) if found is None else found

    def find(self, id: str) -> Job:
        """Return an analysis, ended or not."""
        if id not in self.jobs:
            raise RefusedError(
                "not_found",
                "There is no analysis with this id: it was never asked for, or is no longer kept.",
                "Send the text again.",
            )
        self.jobs.move_to_end(id)
        return self.jobs[id]

    def result(self, id: str) -> Job:
        """Return an analysis that was done."""
        job = self.find(id)
        if job.state != "done":
            raise RefusedError("not_done", f"The analysis is {job.state}, so there is nothing to show.")
        return job

    def watched(self, id: str) -> Job:
        """Return an analysis that is about to be followed, if there is room for one who does."""
        if self.streams >= self.limits.streams:
            raise RefusedError("busy", f"Too many streams of events are open: {self.streams}.")
        return self.find(id)

    def cancel(self, id: str) -> Job:
        """Cancel an analysis; one that has ended stays as it is."""
        job = self.find(id)
        if job.pending is not None and not job.ended:
            self.analyst.cancel(job.pending)
            self._ended(job, job.pending.answer.result())
        return job

    def status(self, job: Job) -> dict[str, Any]:
        """Say how far an analysis is."""
        told = job.progress
        progress = None if told is None else {"what": told.what, "done": told.done, "total": told.total}
        failure = None if job.failure is None else job.failure._asdict()
        told = {"id": job.id, "state": job.state, "ahead": self._ahead(job), "progress": progress, "error": failure}
        return {name: value for name, value in told.items() if name != "error" or value is not None}

    async def statuses(self, job: Job) -> AsyncIterator[dict[str, Any] | None]:
        """Yield how far an analysis is whenever that changes, until it ends; None after a while of silence."""
        self.streams += 1
        try:
            last = None
            while not self.closing:
                changed, status = job.changed, self.status(job)
                if status != last:
                    yield status
                last = status
                if job.ended:
                    return
                try:
                    await asyncio.wait_for(changed.wait(), HEARTBEAT)
                except TimeoutError:
                    yield None
        finally:
            self.streams -= 1

    def _model(self, name: str | None) -> Facts:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise RefusedError(
                "unknown_model", f"This server has no model of that name. It has: {', '.join(self.models)}."
            )
        return self.models[name]

    def _id(self, facts: Facts, text: str | tuple[str, str]) -> str:
        content = [__version__, facts.name, facts.source.fingerprint, text, self.limits.seconds]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]

    def _going(self, id: str) -> Job | None:
        """Return an analysis that need not be started again."""
        found = self.jobs.get(id)
        return None if found is None or found.state in ("failed", "cancelled") else self.find(id)

    def _refuse_if_full(self) -> None:
        if len(self.analyst.waiting) >= self.limits.waiting:
            raise RefusedError(
                "busy", f"The queue is full: {self.limits.waiting} analyses are waiting.", "Try again in a while."
            )

    def _begin(self, id: str, model: str, text: str | tuple[str, str]) -> Job:
        self._refuse_if_full()
        job = Job(id, model, text)

        def told(progress: Progressed | None) -> None:
            job.state, job.progress = "running", progress
            job.tell()

        self.jobs[id] = job
        self.jobs.move_to_end(id)
        job.pending = self.analyst.submit("explain", model, text, {"seconds": self.limits.seconds}, told)
        job.pending.answer.add_done_callback(lambda answer: self._ended(job, answer.result()))
        return job

    def _ended(self, job: Job, answer: Answer) -> None:
        if job.ended:
            return
        job.pending, job.failure = None, answer.failure
        if answer.failure is None:
            job.said, job.view = answer.found
        job.state = {None: "done", "cancelled": "cancelled"}.get(answer.failure and answer.failure.code, "failed")
        job.tell()
        self._forget()

    def _forget(self) -> None:
        """Let go of what was used longest ago, until what is kept is few and small enough."""
        ended = [job for job in self.jobs.values() if job.ended]
        size = sum(len(job.said) + len(job.view) for job in ended)
        while len(ended) > self.limits.results or (size > self.limits.kept and len(ended) > 1):
            oldest = ended.pop(0)
            size -= len(oldest.said) + len(oldest.view)
            del self.jobs[oldest.id]

    def _ahead(self, job: Job) -> int:
        """Return how many analyses come first."""
        if job.pending is None or job.pending not in self.analyst.waiting:
            return 0
        return self.analyst.waiting.index(job.pending) + (self.analyst.current is not None)

    def _moved(self) -> None:
        for pending in self.analyst.waiting:
            for job in self.jobs.values():
                if job.pending is pending:
                    job.tell()

    # Questions

    async def ask(self, what: str, model: str, text: str | tuple[str, str], options: dict[str, Any]) -> Any:
        """Return the answer to a question about a text."""
        try:
            pending = self.reader.submit(what, model, text, options)
        except FullError:
            raise RefusedError(
                "busy", f"The queue is full: {self.limits.questions} questions are waiting.", "Try again in a while."
            ) from None
        answer = await pending.answer
        if answer.failure is not None:
            raise RefusedError(*answer.failure)
        return answer.found
