"""Connections that send no request: they are closed in time, and there are never too many."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvicorn

from identikit.web import guard


async def answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def during(work: Callable) -> None:
    """Call `work` in a thread, with the port of a server."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(answer, log_level="warning", lifespan="off", http=guard.Connection))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await asyncio.wait_for(asyncio.to_thread(work, listening.getsockname()[1]), 60)
    finally:
        server.should_exit = True
        await serving


def served(work: Callable) -> None:
    """Do the same from a thread of its own: a browser of other tests may keep an event loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(during(work))).result()


def connected(opened: list[socket.socket], port: int, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    opened.append(client)
    client.sendall(sent)
    return client


def is_answered(client: socket.socket) -> bool:
    """Whether an answer comes, which may be in several pieces, before the connection is closed."""
    read = b""
    try:
        while piece := client.recv(1000):
            read += piece
            if read.endswith(b"ok"):
                return True
    except ConnectionResetError:
        pass
    return False


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1000) == b""
    except ConnectionResetError:
        return True


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
        assert is_closed(connected(opened, port, b"GET / HTTP/1.1\r\nHost: a\r\n"))
        kept = connected(opened, port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert is_answered(kept)
        kept.sendall(b"GET / HTTP/1.1\r\n")  # half of a second request
        assert is_closed(kept)

    served(work)


def test_one_connection_too_many_is_closed(monkeypatch: pytest.MonkeyPatch, opened: list[socket.socket]):
    monkeypatch.setattr(guard, "MOST", 3)

    def work(port: int) -> None:
        waiting = [connected(opened, port, b"GET / ") for _ in range(3)]
        assert is_closed(connected(opened, port, b"GET / "))
        waiting.pop().close()
        for _ in range(100):  # until the server has noticed
            if is_answered(connected(opened, port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")):
                return
        raise AssertionError("no connection became free")

    served(work)
