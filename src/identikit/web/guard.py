"""What every request passes before the server looks at it: its host, origin and size; and what every answer says.

A page elsewhere must neither read answers (no CORS; the Host header is checked, so that no other name leads here) nor
start work (a POST or DELETE with a foreign origin is refused).
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from identikit.web.messages import STATUS, error_body, error_headers

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

LOCAL = ("127.0.0.1", "localhost", "[::1]")
BODY_SECONDS = 20.0  # how long a body may take to arrive
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_CACHE = "no-store"


class _RefusedError(Exception):
    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True)
class Guard:
    """Wraps the application; `hosts` are what a Host header may say, with a port, or without one for any port."""

    app: Any
    hosts: frozenset[str]
    body: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        sending = _with_headers(send)
        try:
            self._check(scope["method"], headers)
            receive = await self._whole(headers, receive)
        except _RefusedError as refusal:
            await _refuse(refusal, sending)
            return
        await self.app(scope, receive, sending)

    def _check(self, method: str, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "").lower()
        if host not in self.hosts and _without_port(host) not in self.hosts:
            raise _RefusedError(
                "wrong_host",
                "This server does not go by the name in the Host header. Open it under the address that it printed, or "
                "start it with --allow-host NAME.",
            )
        if method in ("GET", "HEAD"):
            return
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site", "same-origin")
        if (origin is not None and urlsplit(origin).netloc.lower() != host) or site not in ("same-origin", "none"):
            raise _RefusedError("foreign_origin", "Only this server's own pages may send this request.")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            raise _RefusedError("not_json", "The body of a request is JSON: send it as application/json.")

    async def _whole(self, headers: Mapping[str, str], receive: Receive) -> Receive:
        """Receive the whole body, if it is not too large, and return what hands it on."""
        too_large = _RefusedError("too_large", f"The request is too large: its body may have {self.body:,} bytes.")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.body:
            raise too_large
        body, first = b"", {}
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while first.get("more_body", True) and first.get("type") != "http.disconnect":
                    first = await receive()
                    body += first.get("body", b"")
                    if len(body) > self.body:
                        raise too_large
        except TimeoutError:
            raise _RefusedError("too_late", f"The body did not arrive within {BODY_SECONDS:g} seconds.") from None
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return waiting.pop() if waiting else await receive()

        return again


def allowed_hosts(host: str, port: int, others: tuple[str, ...]) -> frozenset[str]:
    """Return what a Host header may say: local names and the server's own, with its port, and those allowed."""
    own = f"[{host}]" if ":" in host else host.lower()
    names = {*LOCAL, own} - {"0.0.0.0", "[::]"}
    here = names if port == 80 else {f"{name}:{port}" for name in names}
    return frozenset({*here, *map(str.lower, others)})


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _with_headers(send: Send) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message.get("headers", ())}
            more = _HEADERS | ({} if b"cache-control" in given else {"cache-control": _CACHE})
            added = [(name.encode(), value.encode()) for name, value in more.items()]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return sending


async def _refuse(refusal: _RefusedError, send: Send) -> None:
    body = json.dumps(error_body(refusal.code, refusal.message)).encode()
    headers = error_headers(refusal.code) | {"content-type": "application/json", "content-length": str(len(body))}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": STATUS[refusal.code], "headers": encoded})
    await send({"type": "http.response.body", "body": body})
