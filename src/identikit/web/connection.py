"""One connection to the server. Its headers must arrive in time, and only so many connections are open at once.

uvicorn waits for headers without end: a few hundred half-sent requests would use up the files a process may open.
"""

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0  # how long the headers of a request may take to arrive
MOST = 256  # connections; fewer where a process may open few files


def most_connections() -> int:
    """Return how many connections may be open at once: half of the files that this process may open, at most."""
    if sys.platform == "win32":
        return MOST
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if files == resource.RLIM_INFINITY else max(1, min(MOST, files // 2))


class Connection(H11Protocol):
    """uvicorn's connection, which is closed if it is one too many or if a request's headers do not come."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Close one connection too many at once; wait for the headers of the others."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._await_headers()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._await_headers()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._stop_waiting()
        self._due = self.loop.call_later(HEADER_SECONDS, self._close_without_headers)

    def _stop_waiting(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _close_without_headers(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()
