"""The server: pages and their JSON twins over HTTP, and how it is started and stopped."""

import asyncio
import errno
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from identikit.errors import InputError
from identikit.version import __version__
from identikit.web import messages
from identikit.web.bundle import static
from identikit.web.guard import Guard, allowed_hosts
from identikit.web.jobs import Job, Limits, RefusedError, Service
from identikit.web.messages import STATUS, error_body, error_headers
from identikit.web.worker import Source

_PAGE = "index.html"
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "png": "image/png"}
_HTML: dict[int | str, Any] = {200: {"content": {"text/html": {}}, "description": "A page."}}
_BYTES: dict[int | str, Any] = {
    200: {"content": {"application/octet-stream": {}}, "description": "A safetensors file."}
}
_EVENTS: dict[int | str, Any] = {
    200: {"content": {"text/event-stream": {}}, "description": "An event `state` for each JobStatus."}
}
_SAID = {
    400: "The body cannot be read.",
    404: "There is nothing at this address.",
    405: "This address does not answer to this method.",
}


@dataclass(frozen=True)
class Serving:
    """Where to serve what: the models, the address, more names to answer to, and the limits."""

    sources: tuple[Source, ...]
    host: str = "127.0.0.1"
    port: int = 8765
    names: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


def serve(serving: Serving) -> None:
    """Load the models, serve until Ctrl-C or SIGTERM, and leave nothing behind."""
    with _bound(serving.host, serving.port) as listening:
        asyncio.run(_serve(serving, listening))


async def _serve(serving: Serving, listening: socket.socket) -> None:
    port, service = listening.getsockname()[1], Service(serving.sources, serving.limits)
    hosts = allowed_hosts(serving.host, port, serving.names)
    guarded = Guard(application(service, static_files()), hosts, serving.limits.body)
    config = uvicorn.Config(
        guarded, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False,
        timeout_graceful_shutdown=3,
    )  # fmt: skip
    try:
        await service.start()
        listening.listen()  # before anyone is told: who connects now waits a moment, and is not refused
        shown = f"[{serving.host}]" if ":" in serving.host else serving.host
        print(f"Serving {', '.join(service.models)} on http://{shown}:{port}. Press Ctrl-C to stop.", flush=True)
        await _Server(config, service.end_streams).serve(sockets=[listening])
    finally:
        await service.close()


class _Server(uvicorn.Server):
    """Ends in order on Ctrl-C and SIGTERM, which is how a server is meant to end; open streams are ended first."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]):
        super().__init__(config)
        self._end_streams = end_streams

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Hear these signals while serving."""
        loop, kinds = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

        def end() -> None:
            self.should_exit = True
            self._end_streams()

        before = {kind: signal.signal(kind, lambda *_: loop.call_soon_threadsafe(end)) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket at the address, which does not listen yet."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        taken = "the port is taken" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise InputError(f"Serving on {host}, port {port}: {taken}. Choose another with --port or --host.") from None
    return found


def static_files() -> Mapping[str, tuple[bytes, str]]:
    """Return every file of the page with its type; requests choose from this table, and never name a file."""
    found = [(one, _TYPES.get(one.name.rpartition(".")[2])) for one in static().iterdir()]
    return {one.name: (one.read_bytes(), kind) for one, kind in found if kind is not None}


def application(service: Service, parts: Mapping[str, tuple[bytes, str]]) -> FastAPI:
    """Return the application over a service that was started."""
    app = FastAPI(
        title="identikit", version=__version__, docs_url=None, redoc_url=None,
        description="What a transformer's attention and hidden vectors really say about a text.",
        responses={code: {"model": messages.Error} for code in (*sorted(set(STATUS.values())), 400, 405)},
    )  # fmt: skip
    _add_errors(app)
    _add_pages(app, service, parts)
    _add_jobs(app, service)
    _add_results(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    """Give every error the one shape."""

    @app.exception_handler(RefusedError)
    def refused(_: Request, refusal: RefusedError) -> Response:
        return _error(refusal.code, refusal.message, refusal.hint)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return _error("invalid", "The request cannot be used: its body is not JSON.")
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error("invalid", f"The request cannot be used: {where or 'the body'}: {first['msg']}.")

    @app.exception_handler(HTTPException)
    def other(_: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "wrong_method"}.get(error.status_code, "invalid")
        body = error_body(code, _SAID.get(error.status_code, "The request cannot be used."))
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    def internal(_: Request, error: Exception) -> Response:
        return _error("internal", f"An internal error, which is not your fault: {type(error).__name__}.")


def _error(code: str, message: str, hint: str | None = None) -> Response:
    return JSONResponse(error_body(code, message, hint), STATUS[code], error_headers(code))


def _add_pages(app: FastAPI, service: Service, parts: Mapping[str, tuple[bytes, str]]) -> None:
    @app.get("/", response_class=Response, responses=_HTML, summary="The page")
    @app.get("/r/{id}", response_class=Response, responses=_HTML, summary="The page, with an analysis")
    async def page() -> Response:
        return HTMLResponse(parts[_PAGE][0], headers={"cache-control": "no-cache"})

    @app.get("/static/{name}", response_class=Response, summary="A part of the page")
    async def part(name: str) -> Response:
        if name not in parts:
            raise HTTPException(404)
        content, kind = parts[name]
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    @app.get("/api", summary="What the server has")
    async def index() -> messages.Index:
        limits, (text, pair) = service.limits, _parts(service.sample)
        return messages.Index(
            version=__version__,
            models=[messages.ServedModel(**facts._asdict()) for facts in service.models.values()],
            limits=messages.ServedLimits(
                **{name: getattr(limits, name) for name in messages.ServedLimits.model_fields}
            ),
            sample=messages.NewJob(text=text, pair=pair, model=None),
        )

    @app.get("/healthz", summary="Whether the server works")
    async def health() -> messages.Health:
        workers = service.analyst.alive + service.reader.alive
        return messages.Health(
            status="ok" if workers == 2 else "starting",
            version=__version__,
            waiting=len(service.analyst.waiting),
            running=int(service.analyst.current is not None),
            workers=workers,
        )


def _add_jobs(app: FastAPI, service: Service) -> None:
    shape: dict[str, Any] = {"response_model": messages.JobStatus, "response_model_exclude_unset": True}

    @app.post("/api/jobs", status_code=202, **shape, summary="Analyse a text; 200 if that was done before")
    async def submit(asked: messages.NewJob, response: Response) -> dict[str, Any]:
        job = await service.submit(asked.model, asked.text if asked.pair is None else (asked.text, asked.pair))
        response.status_code = 200 if job.state == "done" else 202
        return service.status(job)

    @app.get("/api/jobs/{id}", **shape, summary="How far an analysis is")
    async def status(id: str) -> dict[str, Any]:
        return service.status(service.find(id))

    @app.delete("/api/jobs/{id}", **shape, summary="Cancel an analysis")
    async def cancel(id: str) -> dict[str, Any]:
        return service.status(service.cancel(id))

    @app.get("/api/jobs/{id}/events", response_class=Response, responses=_EVENTS, summary="Follow an analysis")
    async def events(id: str) -> Response:
        return StreamingResponse(_events(service, service.watched(id)), media_type="text/event-stream")


async def _events(service: Service, job: Job) -> AsyncIterator[str]:
    async for status in service.statuses(job):
        yield ": still here\n\n" if status is None else f"event: state\ndata: {json.dumps(status)}\n\n"


def _add_results(app: FastAPI, service: Service) -> None:
    async def asked(id: str, what: str, options: dict[str, Any]) -> Any:
        job = service.result(id)
        return await service.ask(what, job.model, job.text, options)

    @app.get("/api/results/{id}", response_model=messages.Analysis, summary="An analysis")
    async def result(id: str) -> Response:
        job = service.find(id)
        text, pair = _parts(job.text)
        about = {"id": job.id, "state": job.state, "model": job.model, "text": text, "pair": pair}
        if job.failure is not None:
            about["error"] = job.failure._asdict()
        body = json.dumps(about, ensure_ascii=False).encode()
        return Response(body[:-1] + b', "explanation": ' + (job.said or b"null") + b"}", media_type="application/json")

    @app.get("/api/results/{id}/view", response_class=Response, responses=_BYTES, summary="What the views show")
    async def view(id: str) -> Response:
        return _binary(service.result(id).view)

    @app.post("/api/results/{id}/rows", response_class=Response, responses=_BYTES, summary="Bound some rows")
    async def rows(id: str, body: messages.Rows) -> Response:
        return _binary(await asked(id, "rows", body.model_dump()))

    @app.post("/api/results/{id}/simplex", response_class=Response, responses=_BYTES, summary="A head's simplex map")
    async def simplex(id: str, body: messages.Head) -> Response:
        return _binary(await asked(id, "simplex", body.model_dump()))

    @app.post("/api/results/{id}/move", summary="Move an edge to an end of its interval, and measure what changes")
    async def move(id: str, body: messages.Move) -> messages.Moved:
        return messages.Moved(**await asked(id, "move", body.model_dump()))


def _binary(content: bytes) -> Response:
    return Response(content, media_type="application/octet-stream")


def _parts(text: str | tuple[str, str]) -> tuple[str, str | None]:
    return (text, None) if isinstance(text, str) else text
