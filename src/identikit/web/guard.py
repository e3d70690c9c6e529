"""What every request passes before the server looks at it: its host, origin and size; and what every answer says.

A page elsewhere must neither read answers (no CORS; the Host header is checked, so that no other name leads here) nor
start work (a POST or DELETE with a foreign origin is refused). Starlette's TrustedHostMiddleware passes over the port
and answers in plain text.
"""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from identikit.web.messages import RefusedError, error_response

LOCAL = ("127.0.0.1", "localhost", "[::1]")
BODY_SECONDS = 20.0  # how long a body may take to arrive
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
            receive = await self._whole_body(headers, receive)
        except RefusedError as refusal:
            await error_response(refusal.problem)(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send_with_headers)

    def _check(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        if host not in self.hosts and _without_port(host) not in self.hosts:
            raise RefusedError(
                "wrong_host",
                "This server does not go by the name in the Host header. Open it under the address that it printed, or "
                "start it with --allow-host NAME.",
            )
        if method in ("GET", "HEAD"):
            return
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site", "same-origin")
        if (origin is not None and _named_in(origin) != host) or site not in ("same-origin", "none"):
            raise RefusedError("foreign_origin", "Only this server's own pages may send this request.")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            raise RefusedError("not_json", "The body of a request is JSON: send it as application/json.")

    async def _whole_body(self, headers: Headers, receive: Receive) -> Receive:
        """Receive the whole body, if it is not too large, and return what hands it on."""
        too_large = RefusedError("too_large", f"The request is too large: its body may have {self.body:,} bytes.")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.body:
            raise too_large
        body = b""
        more = True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self.body:
                        raise too_large
        except TimeoutError:
            raise RefusedError("too_late", f"The body did not arrive within {BODY_SECONDS:g} seconds.") from None
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        return receive_again


def allowed_hosts(host: str, port: int, others: tuple[str, ...]) -> frozenset[str]:
    """Return what a Host header may say: local names and the server's own, with its port, and those allowed."""
    name = f"[{host}]" if ":" in host else host.lower()
    names = {*LOCAL, name} - {"0.0.0.0", "[::]"}
    with_port = names if port == 80 else {f"{name}:{port}" for name in names}
    return frozenset({*with_port, *map(str.lower, others)})


def _named_in(origin: str) -> str | None:
    """Return the host and port of an origin; None if it is not an address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host
