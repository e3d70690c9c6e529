"""A worker process and the tasks that wait for it: one at a time, and when the process dies it is started again.

All of this happens in the server's event loop, except that a thread per process starts it and listens to it.
"""

import asyncio
import itertools
import multiprocessing
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from identikit.errors import ModelError
from identikit.web.worker import Answer, Cancel, Failure, Progressed, Ready, Source, Task, work

GRACE = 3.0  # seconds that a cancelled task has to end by itself before its process is killed
AGAIN = 5.0  # seconds between attempts to start a process that ends before it is ready

_numbers = itertools.count(1)


@dataclass(eq=False)
class Pending:
    """A task that was handed in: `answer` is there when it ends, and `told` hears of everything before."""

    task: Task
    told: Callable[[Progressed | None], None]
    answer: asyncio.Future[Answer]
    ending: Failure | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def end(self, answer: Answer) -> None:
        """Give the answer, unless there is one already."""
        for timer in self.timers:
            timer.cancel()
        if not self.answer.done():
            self.answer.set_result(answer)


class FullError(Exception):
    """As many tasks wait as may."""


class Worker:
    """A process that computes tasks in the order in which they come.

    - `limit`: how many may wait; `longest`: how many seconds one may take before the process is killed
    - `changed`: called whenever tasks begin or end, so that others can see how they have moved up
    """

    def __init__(self, sources: tuple[Source, ...], *, limit: int, longest: float):
        self.sources, self.limit, self.longest = sources, limit, longest
        self.waiting: deque[Pending] = deque()
        self.current: Pending | None = None
        self.alive = False
        self.changed: Callable[[], None] = lambda: None
        self._closing = threading.Event()

    async def start(self) -> Ready:
        """Start the process and wait until its models are loaded; raises what keeps it from that."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()
        found = await self._ready
        self.sources = tuple(facts.source for facts in found.models)
        return found

    async def close(self) -> None:
        """End the process, and with it all its tasks."""
        self._closing.set()
        self._kill()
        await asyncio.to_thread(self._thread.join)
        while self.waiting:
            self._give_up(self.waiting.popleft(), Failure("closing", "The server is stopping."))

    def submit(
        self,
        what: str,
        model: str,
        text: str | tuple[str, str],
        options: Mapping[str, Any],
        told: Callable[[Progressed | None], None] = lambda _: None,
    ) -> Pending:
        """Hand in a task; `told` is called with None when it begins, and then with its progress."""
        if len(self.waiting) >= self.limit:
            raise FullError
        task = Task(next(_numbers), what, model, text, dict(options))
        pending = Pending(task, told, self._loop.create_future())
        self.waiting.append(pending)
        self._next()
        return pending

    def cancel(self, pending: Pending) -> None:
        """Give a task up: it ends at once, and its process is free when it heeds that or was killed."""
        failure = Failure("cancelled", "This was cancelled.")
        if pending in self.waiting:
            self.waiting.remove(pending)
            self._give_up(pending, failure)
            self.changed()
        elif pending is self.current and not pending.answer.done():
            self._give_up(pending, failure)
            self._send(Cancel(pending.task.number))
            pending.timers.append(self._loop.call_later(GRACE, self._kill_if, pending))

    def _give_up(self, pending: Pending, failure: Failure) -> None:
        pending.end(Answer(pending.task.number, failure=failure))

    def _next(self) -> None:
        """Send the next task, if the process is free."""
        if self.current is not None or not self.alive or not self.waiting:
            return
        pending = self.current = self.waiting.popleft()
        pending.timers.append(self._loop.call_later(self.longest, self._late, pending))
        pending.told(None)
        self._send(pending.task)
        self.changed()

    def _late(self, pending: Pending) -> None:
        words = f"This took longer than {self.longest:g} seconds, the most that the server allows. Pass a shorter text."
        pending.ending = Failure("too_slow", words)
        self._kill_if(pending)

    def _send(self, message: Task | Cancel) -> None:
        with suppress(OSError, ValueError):  # the process has just died, which its thread will tell
            self._connection.send(message)

    def _kill_if(self, pending: Pending) -> None:
        if self.current is pending:
            self._kill()

    def _kill(self) -> None:
        with suppress(AttributeError, ValueError):  # it was not started yet, or is closed already
            self._process.kill()

    # What the thread tells

    def _told(self, message: Ready | Failure | Progressed | Answer) -> None:
        current = self.current
        if isinstance(message, Ready):
            self.alive = True
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Failure):
            self._failed(message)
        elif current is not None and message.number == current.task.number:
            if isinstance(message, Answer):
                self.current = None
                current.end(message)
            elif not current.answer.done():
                current.told(message)
        self._next()
        self.changed()

    def _failed(self, failure: Failure) -> None:
        """Models could not be loaded: the first time that is an error, later it ends what waits."""
        if not self._ready.done():
            self._ready.set_exception(ModelError(failure.message))
        while self.waiting:
            self._give_up(self.waiting.popleft(), failure)

    def _died(self, status: int | None) -> None:
        self.alive = False
        how = f"signal {-status}" if status and status < 0 else f"status {status}"
        words = f"The process that computed this ended unexpectedly ({how}); it may have needed too much memory."
        if not self._ready.done():
            self._ready.set_exception(ModelError(f"Loading the models: {words}"))
        pending, self.current = self.current, None
        if pending is not None:
            self._give_up(pending, pending.ending or Failure("worker", f"{words} Try again, or pass a shorter text."))
        self.changed()

    # In the thread

    def _live(self) -> None:
        while not self._closing.is_set():
            was_ready = self._listen()
            if not was_ready:
                self._closing.wait(AGAIN)

    def _listen(self) -> bool:
        """Start the process, and pass on what it says until it ends; returns whether it was ever ready."""
        context, was_ready = multiprocessing.get_context("spawn"), False
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, self.sources), daemon=True)
        self._process.start()
        theirs.close()
        if self._closing.is_set():
            self._process.kill()
        with suppress(EOFError, OSError):
            while True:
                message = self._connection.recv()
                was_ready |= isinstance(message, Ready)
                self._post(self._told, message)
        self._process.join()
        self._post(self._died, self._process.exitcode)
        self._connection.close()
        return was_ready

    def _post(self, told: Callable[[Any], None], message: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(told, message)
