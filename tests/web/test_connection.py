"""Connections that send no request: they are closed in time, and there are never too many."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import uvicorn

from identikit.web import guard


async def answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def served(work: Callable[[int], None]) -> None:
    """Call `work` with the port of a server, which runs in a thread: a browser may keep an event loop in this one."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        server = uvicorn.Server(uvicorn.Config(answer, log_level="warning", lifespan="off", http=guard.Connection))
        serving = pool.submit(server.run, sockets=[listening])
        try:
            work(listening.getsockname()[1])
        finally:
            server.should_exit = True
            serving.result()


def connected(opened: list[socket.socket], port: int, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    opened.append(client)
    client.sendall(sent)
    return client


def received(client: socket.socket) -> bytes:
    """Return what comes before the connection is closed or the answer is complete."""
    read = b""
    with suppress(ConnectionResetError):
        while not read.endswith(b"ok") and (piece := client.recv(1000)):
            read += piece
    return read


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    """Sockets of the clients, closed at the end."""
    clients: list[socket.socket] = []
    yield clients
    for client in clients:
        client.close()


def test_half_sent_headers_are_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch, opened: list[socket.socket]):
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.5)

    def work(port: int) -> None:
        assert not received(connected(opened, port, b"GET / HTTP/1.1\r\nHost: a\r\n"))
        kept = connected(opened, port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert received(kept)
        kept.sendall(b"GET / HTTP/1.1\r\n")  # half of a second request
        assert not received(kept)

    served(work)


def test_one_connection_too_many_is_closed(monkeypatch: pytest.MonkeyPatch, opened: list[socket.socket]):
    monkeypatch.setattr(guard, "MAX_CONNECTIONS", 3)

    def work(port: int) -> None:
        waiting = [connected(opened, port, b"GET / ") for _ in range(3)]
        assert not received(connected(opened, port, b"GET / "))
        waiting.pop().close()
        for _ in range(100):  # until the server has noticed
            if received(connected(opened, port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")):
                return
        raise AssertionError("no connection became free")

    served(work)
