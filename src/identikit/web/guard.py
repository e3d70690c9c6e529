"""Checks that every request passes before the server handles it, and the headers of every answer.

A page elsewhere must neither read answers (no CORS; the Host header is checked, so that no other name leads here) nor
start work (a POST or DELETE with a foreign origin is refused). Starlette's TrustedHostMiddleware passes over the port
and answers in plain text. uvicorn waits for headers without end, and a few hundred half-sent requests would use up the
files that a process may open: here headers must arrive in time, and the number of open connections is limited.
"""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from identikit.web.messages import RefusedError, error_response

BODY_SECONDS = 20.0  # how long a body may take to arrive
HEADER_SECONDS = 20.0  # how long the headers of a request may take to arrive
MAX_CONNECTIONS = 100  # well below the files that a process may open, 256 on some systems
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Guard:
    """Wraps the application; `hosts` are what a Host header may say, with a port, or without one for any port."""

    app: ASGIApp
    hosts: frozenset[str]
    body: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        try:
            self._check(scope["method"], headers)
            body = await self._whole_body(headers, receive)
        except RefusedError as refusal:
            await error_response(refusal.problem)(scope, receive, send_with_headers)
            return

        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_again, send_with_headers)

    def _check(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        name, _, port = host.rpartition(":")
        if host not in self.hosts and not (name and port.isdecimal() and name in self.hosts):
            raise RefusedError(
                "wrong_host",
                "This server does not go by the name in the Host header. Open it under the address that it printed, or "
                "start it with --allow-host NAME.",
            )
        if method in ("GET", "HEAD"):
            return
        site = headers.get("sec-fetch-site", "same-origin")
        if not _is_own(headers.get("origin"), host) or site not in ("same-origin", "none"):
            raise RefusedError("foreign_origin", "Only this server's own pages may send this request.")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            raise RefusedError("not_json", "The body of a request is JSON: send it as application/json.")

    async def _whole_body(self, headers: Headers, receive: Receive) -> bytes:
        too_large = RefusedError("too_large", f"The request is too large: its body may have {self.body:,} bytes.")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.body:
            raise too_large
        body = b""
        is_incomplete = True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while is_incomplete:
                    message = await receive()
                    body += message.get("body", b"")
                    is_incomplete = message.get("more_body", False)
                    if len(body) > self.body:
                        raise too_large
        except TimeoutError:
            raise RefusedError("too_late", f"The body did not arrive within {BODY_SECONDS:g} seconds.") from None
        return body


def _is_own(origin: str | None, host: str) -> bool:
    """Return whether a page of this server may have sent a request with this Origin header."""
    try:
        return origin is None or urlsplit(origin).netloc.lower() == host
    except ValueError:  # not an address
        return False


def allowed_hosts(host: str, port: int, allowed: tuple[str, ...]) -> frozenset[str]:
    """Return what a Host header may say: local names and the server's own, with its port, and those allowed."""
    name = f"[{host}]" if ":" in host else host.lower()
    names = {"127.0.0.1", "localhost", "[::1]", name} - {"0.0.0.0", "[::]"}
    with_port = names if port == 80 else {f"{name}:{port}" for name in names}
    return frozenset({*with_port, *map(str.lower, allowed)})


class Connection(H11Protocol):
    """uvicorn's connection, closed if there are too many, or if a request's headers do not arrive in time."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Close the connection if there are too many, or else wait for headers."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._await_headers()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._await_headers()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for headers."""
        if self._due is not None:
            self._due.cancel()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        def close_without_headers() -> None:
            if self.conn.their_state is h11.IDLE:
                self.transport.abort()

        if self._due is not None:
            self._due.cancel()
        self._due = self.loop.call_later(HEADER_SECONDS, close_without_headers)
