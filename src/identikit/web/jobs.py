"""Analyses and questions of visitors: two worker processes, their queues, and the results that are kept.

All of this runs in the server's event loop; only receiving from a worker's pipe waits in a thread. A pool of
concurrent.futures would break as a whole when its process dies, and cannot stop a running task.
"""

import asyncio
import hashlib
import json
import multiprocessing
import signal
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from identikit.errors import ModelError
from identikit.version import __version__
from identikit.web import messages
from identikit.web.messages import CANCELLED, Answer, ModelSource, Problem, RefusedError, TextOrPair, WorkerTask

GRACE = 15.0  # seconds a cancelled task has to stop before its process is killed: loading takes longer
AGAIN = 5.0  # seconds between attempts to start a process that ends before it is ready
HEARTBEAT = 15.0  # seconds of silence after which a stream sends a sign of life


@dataclass(eq=False)
class PendingTask:
    """A task that was handed in; `answer` is there when it ends."""

    task: WorkerTask
    answer: asyncio.Future[Answer]
    begun: bool = False
    progress: messages.ProgressReport | None = None

    @property
    def problem(self) -> Problem | None:
        """Why it failed; None if it did not, or is not done."""
        return self.answer.result().problem if self.answer.done() else None

    @property
    def contents(self) -> tuple[bytes, ...]:
        """The results; nothing until it is done."""
        return self.answer.result().contents if self.answer.done() else ()

    @property
    def state(self) -> messages.State:
        """How far it is."""
        if not self.answer.done():
            return "running" if self.begun else "waiting"
        if self.problem is None:
            return "done"
        return "cancelled" if self.problem.code == "cancelled" else "failed"

    def end(self, answer: Answer) -> None:
        """Give the answer, unless there is one already."""
        if not self.answer.done():
            self.answer.set_result(answer)


class WorkerProcess:
    """A process that computes tasks one after another; when it dies it is started again.

    - `task_name`: what its tasks are called; `limit`: how many may wait
    - `seconds`: how long one may take before the process is killed
    - `changed`: called whenever a task waits, makes progress or ends
    """

    def __init__(self, sources: tuple[ModelSource, ...], task_name: str, *, limit: int, seconds: float):
        self.sources = sources
        self.task_name = task_name
        self.limit = limit
        self.seconds = seconds
        self.waiting: deque[PendingTask] = deque()
        self.current: PendingTask | None = None
        self.alive = False
        self.changed: Callable[[], None] = lambda: None
        self._process_loop: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> messages.Ready:
        """Start the process, and wait until its models are loaded or fail to load."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[messages.Ready] = self._loop.create_future()
        self._process_loop = asyncio.create_task(self._keep_alive())
        ready = await self._ready
        self.sources = ready.sources
        return ready

    async def close(self) -> None:
        """End the process, and with it all its tasks."""
        if self._process_loop is not None:
            self._process_loop.cancel()
            await asyncio.wait([self._process_loop])
        self._end_all(Problem(code="closing", message="The server is stopping."))

    def refuse_if_full(self) -> None:
        """Refuse a task if as many are waiting as may."""
        if len(self.waiting) >= self.limit:
            raise RefusedError(
                "busy", f"The queue is full: {self.limit} {self.task_name} are waiting.", "Try again in a while."
            )

    def submit(self, task: WorkerTask) -> PendingTask:
        """Add a task to the queue."""
        self.refuse_if_full()
        pending = PendingTask(task, self._loop.create_future())
        self.waiting.append(pending)
        self._next()
        return pending

    def cancel(self, pending: PendingTask) -> None:
        """End a task at once; its process is free again when it has stopped or was killed."""
        if pending in self.waiting:
            self.waiting.remove(pending)
        elif pending is self.current and not pending.answer.done():
            self._send(messages.CANCEL)
            self._set_timer(GRACE, self._process.kill)
        pending.end(CANCELLED)
        self.changed()

    def ahead(self, pending: PendingTask) -> int:
        """Return how many tasks come before one."""
        if pending not in self.waiting:
            return 0
        return self.waiting.index(pending) + (self.current is not None)

    def _next(self) -> None:
        """Send the next task, if the process is free."""
        if self.current is None and self.alive and self.waiting:
            self.current = self.waiting.popleft()
            self.current.begun = True
            self._set_timer(self.seconds, self._time_out)
            self._send(self.current.task)
        self.changed()

    def _time_out(self) -> None:
        message = f"This took longer than {self.seconds:g} seconds, the server's limit. Pass a shorter text."
        self._end_current(Problem(code="too_slow", message=message))
        self._process.kill()

    def _send(self, message: WorkerTask | str) -> None:
        with suppress(OSError, ValueError):  # the process has just died; receiving from it says so
            self._connection.send(message)

    def _set_timer(self, seconds: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, act)

    def _end_current(self, problem: Problem) -> None:
        """End the running task with a problem; the process is free only when it answers, or is replaced."""
        if self.current is not None:
            self.current.end(Answer(problem=problem))

    def _end_all(self, problem: Problem) -> None:
        self._end_current(problem)
        while self.waiting:
            self.waiting.popleft().end(Answer(problem=problem))

    def _free(self) -> None:
        self.current = None
        if self._timer is not None:
            self._timer.cancel()

    async def _keep_alive(self) -> None:
        """Start the process, receive what it sends until it ends, and start it again."""
        context = multiprocessing.get_context("spawn")
        while True:
            self._connection, worker_end = context.Pipe()
            self._process = context.Process(target=_work, args=(worker_end, self.sources), daemon=True)
            self._process.start()
            worker_end.close()
            try:
                while True:
                    self._handle(await asyncio.to_thread(self._connection.recv))
            except (EOFError, OSError):
                await asyncio.to_thread(self._process.join)
            finally:
                self._process.kill()
                self._process.join()
            was_alive = self.alive
            self._handle_death(self._process.exitcode)
            if not was_alive:
                await asyncio.sleep(AGAIN)

    def _handle(self, message: messages.Ready | Problem | messages.ProgressReport | Answer) -> None:
        match message:
            case messages.Ready():
                self.alive = True
                if not self._ready.done():
                    self._ready.set_result(message)
            case Problem() if self._ready.done():  # the server started long ago
                self._end_all(message)
            case Problem():
                self._ready.set_exception(ModelError(message.message))
            case messages.ProgressReport():
                if self.current is not None:
                    self.current.progress = message
            case Answer():
                if self.current is not None:
                    self.current.end(message)
                self._free()
        self._next()

    def _handle_death(self, status: int | None) -> None:
        self.alive = False
        cause = f"signal {-status}" if status and status < 0 else f"status {status}"
        message = f"The process that computed this ended unexpectedly ({cause}); it may have needed too much memory."
        if not self._ready.done():
            self._ready.set_exception(ModelError(f"Loading the models: {message}"))
        self._end_current(Problem(code="worker", message=f"{message} Try again, or pass a shorter text."))
        self._free()
        self.changed()


def _work(connection: Connection, sources: tuple[ModelSource, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server alone hears Ctrl-C
    from identikit.web.worker import work  # torch is loaded in the worker only

    work(connection, sources)


class Service:
    """The two worker processes, their models, and the latest analyses, by a hash of what they are about.

    One process analyses texts; the other answers questions about them, so that these never wait for an analysis.
    """

    def __init__(self, sources: tuple[ModelSource, ...], limits: messages.Limits):
        self.limits = limits
        self.analyst = WorkerProcess(sources, "analyses", limit=limits.waiting, seconds=limits.analysis)
        self.reader = WorkerProcess(sources, "questions", limit=limits.questions, seconds=limits.question)
        self.analyst.changed = self._wake
        self.jobs: OrderedDict[str, PendingTask] = OrderedDict()
        self.models: dict[str, messages.ServedModel] = {}
        self.sample: TextOrPair = ""
        self.measures: tuple[messages.OfferedMeasure, ...] = ()
        self.streams = 0
        self.closing = False
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start both processes, and wait until their models are loaded or fail to load."""
        ready, _ = await asyncio.gather(self.analyst.start(), self.reader.start())
        self.models = {model.name: model for model in ready.models}
        self.sample = ready.sample
        self.measures = ready.measures

    async def close(self) -> None:
        """End everything."""
        self.end_streams()
        await asyncio.gather(self.analyst.close(), self.reader.close())

    def end_streams(self) -> None:
        """End the streams of everyone who follows an analysis, so that the server can stop."""
        self.closing = True
        self._wake()

    async def submit(self, request: messages.NewJob) -> str:
        """Return the id of the analysis of a text, which may be done already, or is queued now."""
        text = request.text if request.pair is None else (request.text, request.pair)
        names = list(self.models)
        name = names[0] if request.model is None else request.model
        if name not in names:
            raise RefusedError("unknown_model", f"This server has no model of that name. It has: {', '.join(names)}.")
        length = len(text) if isinstance(text, str) else sum(map(len, text))
        if length > self.limits.characters:
            raise RefusedError(
                "too_long",
                f"The text has {length:,} characters, and this server reads at most {self.limits.characters:,}.",
                "Shorten it, or start a server of your own, which can be told to read longer texts.",
            )
        question = self._checked_question(request)
        weights = self.analyst.sources[names.index(name)].fingerprint
        content = json.dumps([__version__, name, weights, text, *question])
        id = hashlib.sha256(content.encode()).hexdigest()[:32]
        if not self._is_useful(id):
            self.analyst.refuse_if_full()
            await self._ask(WorkerTask(name, text, messages.CheckText()))
        if not self._is_useful(id):  # another visitor may have asked the same meanwhile
            self.jobs[id] = self.analyst.submit(WorkerTask(name, text, question))
            self.jobs[id].answer.add_done_callback(lambda _: self.forget())
        self.jobs.move_to_end(id)
        return id

    def _checked_question(self, request: messages.NewJob) -> messages.Explain:
        """Return what to explain: measures that this server has, not too many, and without repeats."""
        measures = tuple(dict.fromkeys(request.measures))
        offered = {measure.name: measure for measure in self.measures}
        if not set(measures) <= set(offered):
            raise RefusedError("input", f"This server has no measure of that name. It has: {', '.join(offered)}.")
        if len(measures) > self.limits.measures:
            raise RefusedError(
                "input",
                f"The request names {len(measures)} measures, and this server reads at most {self.limits.measures}.",
                "Ask for the others in another analysis.",
            )
        if request.target is not None and not any(offered[name].of_target for name in measures):
            of_target = ", ".join(name for name, measure in offered.items() if measure.of_target)
            raise RefusedError("input", f"A target is only for measures of a target. Ask for one too: {of_target}.")
        return messages.Explain(self.limits.seconds, measures, request.target)

    def _is_useful(self, id: str) -> bool:
        """Whether an analysis need not be started again: it is under way, or done."""
        return id in self.jobs and self.jobs[id].problem is None

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
        """Return an analysis that is done."""
        job = self.find(id)
        if job.state != "done":
            raise RefusedError("not_done", f"The analysis is {job.state}, so there is nothing to show.")
        return job

    def status(self, id: str, job: PendingTask | None = None) -> messages.JobStatus:
        """Return how far an analysis is."""
        job = job or self.find(id)
        ahead = self.analyst.ahead(job)
        return messages.JobStatus(id=id, state=job.state, ahead=ahead, progress=job.progress, error=job.problem)

    async def events(self, id: str) -> AsyncIterator[str]:
        """Yield the status of an analysis as server-sent events, whenever it changes, until it ends."""
        job = self.find(id)
        self.streams += 1
        last = None
        try:
            while not self.closing:
                changed = self._changed
                status = self.status(id, job)
                if status != last:
                    yield f"event: state\ndata: {status.model_dump_json()}\n\n"
                last = status
                if job.answer.done():
                    return
                try:
                    await asyncio.wait_for(changed.wait(), HEARTBEAT)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self.streams -= 1

    def _wake(self) -> None:
        """Wake everyone who follows an analysis."""
        self._changed.set()
        self._changed = asyncio.Event()

    def forget(self) -> None:
        """Drop the least recently used results until the others are few and small enough."""
        sizes = {id: sum(map(len, job.contents)) for id, job in self.jobs.items() if job.answer.done()}
        while len(sizes) > self.limits.results or (sum(sizes.values()) > self.limits.kept and len(sizes) > 1):
            oldest = next(iter(sizes))
            del sizes[oldest], self.jobs[oldest]

    async def question(self, id: str, question: messages.Question) -> bytes:
        """Return the answer to a question about an analysis that is done."""
        (content,) = await self._ask(self.result(id).task._replace(question=question))
        return content

    async def _ask(self, task: WorkerTask) -> tuple[bytes, ...]:
        answer = await self.reader.submit(task).answer
        if answer.problem is not None:
            raise RefusedError(**answer.problem.model_dump())
        return answer.contents
