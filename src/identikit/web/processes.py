"""A worker process and the tasks that wait for it: one at a time, and when the process dies it is started again.

All of this happens in the server's event loop; only receiving from the pipe waits in a thread. A pool of
concurrent.futures would break as a whole when its process dies, and cannot stop a task that runs.
"""

import asyncio
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from identikit.errors import ModelError
from identikit.web.messages import Problem, ProgressReport, RefusedError, State
from identikit.web.tasks import CANCEL, CANCELLED, Answer, ModelSource, Ready, WorkerTask

GRACE = 15.0  # seconds that a cancelled task has to end by itself before its process is killed: loading takes longer
AGAIN = 5.0  # seconds between attempts to start a process that ends before it is ready


@dataclass(eq=False)
class PendingTask:
    """A task that was handed in; `answer` is there when it ends."""

    task: WorkerTask
    answer: asyncio.Future[Answer]
    begun: bool = False
    progress: ProgressReport | None = None

    @property
    def problem(self) -> Problem | None:
        """Why it ended without contents."""
        return self.answer.result().problem if self.answer.done() else None

    @property
    def state(self) -> State:
        """How far it is."""
        if not self.answer.done():
            return "running" if self.begun else "waiting"
        if self.problem is None:
            return "done"
        return "cancelled" if self.problem.code == "cancelled" else "failed"

    @property
    def contents(self) -> tuple[bytes, ...]:
        """What it computed; nothing until it is done."""
        return self.answer.result().contents if self.answer.done() else ()

    def end(self, answer: Answer) -> None:
        """Give the answer, unless there is one already."""
        if not self.answer.done():
            self.answer.set_result(answer)


class WorkerProcess:
    """A process that computes tasks in the order in which they come.

    - `what`: what its tasks are called; `limit`: how many may wait
    - `longest`: how many seconds one may take before the process is killed
    - `changed`: called whenever a task waits, makes progress or ends
    """

    def __init__(self, sources: tuple[ModelSource, ...], what: str, *, limit: int, longest: float):
        self.sources = sources
        self.what = what
        self.limit = limit
        self.longest = longest
        self.waiting: deque[PendingTask] = deque()
        self.current: PendingTask | None = None
        self.alive = False
        self.changed: Callable[[], None] = lambda: None
        self._living: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> Ready:
        """Start the process and wait until its models are loaded; raises what keeps it from that."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._living = asyncio.create_task(self._live())
        ready = await self._ready
        self.sources = ready.sources
        return ready

    async def close(self) -> None:
        """End the process, and with it all its tasks."""
        if self._living is not None:
            self._living.cancel()
            await asyncio.wait([self._living])
        self._end_all(Problem(code="closing", message="The server is stopping."))

    def refuse_if_full(self) -> None:
        """Refuse one task more than may wait."""
        if len(self.waiting) >= self.limit:
            raise RefusedError(
                "busy", f"The queue is full: {self.limit} {self.what} are waiting.", "Try again in a while."
            )

    def submit(self, task: WorkerTask) -> PendingTask:
        """Hand in a task."""
        self.refuse_if_full()
        pending = PendingTask(task, self._loop.create_future())
        self.waiting.append(pending)
        self._next()
        return pending

    def cancel(self, pending: PendingTask) -> None:
        """End a task at once; its process is free when it heeds that or was killed."""
        if pending in self.waiting:
            self.waiting.remove(pending)
        elif pending is self.current and not pending.answer.done():
            self._send(CANCEL)
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
            self._set_timer(self.longest, self._late)
            self._send(self.current.task)
        self.changed()

    def _late(self) -> None:
        message = f"This took longer than {self.longest:g} seconds, the server's limit. Pass a shorter text."
        self._end_current(Answer(problem=Problem(code="too_slow", message=message)))
        self._process.kill()

    def _send(self, message: WorkerTask | str) -> None:
        with suppress(OSError, ValueError):  # the process has just died; receiving from it says so
            self._connection.send(message)

    def _set_timer(self, seconds: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, act)

    def _end_current(self, answer: Answer) -> None:
        """Give the answer; the process is free only when it says so itself, or is replaced."""
        if self.current is not None:
            self.current.end(answer)

    def _free(self) -> None:
        self.current = None
        if self._timer is not None:
            self._timer.cancel()

    def _end_all(self, problem: Problem) -> None:
        self._end_current(Answer(problem=problem))
        while self.waiting:
            self.waiting.popleft().end(Answer(problem=problem))

    # The process

    async def _live(self) -> None:
        while True:
            was_ready = await self._converse()
            if not was_ready:
                await asyncio.sleep(AGAIN)

    async def _converse(self) -> bool:
        """Start the process and receive what it sends until it ends; return whether its models were loaded."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self.sources), daemon=True)
        self._process.start()
        theirs.close()
        try:
            while True:
                self._received(await asyncio.to_thread(self._connection.recv))
        except (EOFError, OSError):
            await asyncio.to_thread(self._process.join)
            return self._died(self._process.exitcode)
        finally:
            self._process.kill()
            self._process.join()

    def _received(self, message: Ready | Problem | ProgressReport | Answer) -> None:
        match message:
            case Ready():
                self.alive = True
                if not self._ready.done():
                    self._ready.set_result(message)
            case Problem():
                self._not_loaded(message)
            case ProgressReport():
                if self.current is not None:
                    self.current.progress = message
            case Answer():
                self._end_current(message)
                self._free()
        self._next()

    def _not_loaded(self, problem: Problem) -> None:
        """End the server's start with an error, or everything that waits if it started long ago."""
        if self._ready.done():
            self._end_all(problem)
        else:
            self._ready.set_exception(ModelError(problem.message))

    def _died(self, status: int | None) -> bool:
        was_alive = self.alive
        self.alive = False
        how = f"signal {-status}" if status and status < 0 else f"status {status}"
        message = f"The process that computed this ended unexpectedly ({how}); it may have needed too much memory."
        if not self._ready.done():
            self._ready.set_exception(ModelError(f"Loading the models: {message}"))
        problem = Problem(code="worker", message=f"{message} Try again, or pass a shorter text.")
        self._end_current(Answer(problem=problem))
        self._free()
        self.changed()
        return was_alive


def _work(connection: Connection, sources: tuple[ModelSource, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server alone hears Ctrl-C
    from identikit.web.worker import work  # torch is loaded in the worker only

    work(connection, sources)
