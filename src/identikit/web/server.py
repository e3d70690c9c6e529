"""The server: pages and their JSON twins over HTTP, and how it is started and stopped."""

import asyncio
import errno
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from identikit.errors import InputError
from identikit.version import __version__
from identikit.web import messages
from identikit.web.bundle import static
from identikit.web.connection import Connection
from identikit.web.guard import Guard, allowed_hosts
from identikit.web.jobs import Service
from identikit.web.messages import STATUS, JobStatus, Limits, Problem, RefusedError, error_response
from identikit.web.tasks import ModelSource, TextOrPair

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


@dataclass(frozen=True)
class Serving:
    """Where to serve what: the models, the address, more names to answer to, and the limits."""

    sources: tuple[ModelSource, ...]
    host: str
    port: int
    names: tuple[str, ...]
    limits: Limits


class StaticFile(NamedTuple):
    """A file of the page, and its type."""

    content: bytes
    kind: str


def serve(serving: Serving) -> None:
    """Load the models, serve until Ctrl-C or SIGTERM, and leave nothing behind."""
    with _bound(serving.host, serving.port) as listening:
        asyncio.run(_serve(serving, listening))


async def _serve(serving: Serving, listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    service = Service(serving.sources, serving.limits)
    hosts = allowed_hosts(serving.host, port, serving.names)
    guarded = Guard(application(service, static_files()), hosts, serving.limits.body)
    config = uvicorn.Config(
        guarded,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=3,
        http=Connection,
    )
    try:
        await service.start()
        listening.listen()  # before printing the address: whoever connects now waits a moment, and is not refused
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
        loop = asyncio.get_running_loop()
        kinds = (signal.SIGINT, signal.SIGTERM)

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
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        wrong = "the port is taken" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise InputError(f"Serving on {host}, port {port}: {wrong}. Choose another with --port or --host.") from None
    return bound


def static_files() -> Mapping[str, StaticFile]:
    """Return every file of the page; requests choose from this table, and never name a file."""
    files: dict[str, StaticFile] = {}
    for file in static().iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            files[file.name] = StaticFile(file.read_bytes(), kind)
    return files


def application(service: Service, files: Mapping[str, StaticFile]) -> FastAPI:
    """Return the application over a service that was started."""
    app = FastAPI(
        title="identikit",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        description="What a transformer's attention and hidden vectors really say about a text.",
        responses={status: {"model": messages.Error} for status in (400, *sorted(set(STATUS.values())))},
    )
    _add_errors(app)
    _add_pages(app, files)
    _add_facts(app, service)
    _add_jobs(app, service)
    _add_results(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    """Give every error the one shape."""

    @app.exception_handler(RefusedError)
    def refused(_: Request, refusal: RefusedError) -> Response:
        return error_response(refusal.problem)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body") or "the body"
        wrong = "its body is not JSON" if first["type"] == "json_invalid" else f"{where}: {first['msg']}"
        return error_response(Problem(code="invalid", message=f"The request cannot be used: {wrong}."))

    @app.exception_handler(HTTPException)
    def other(_: Request, error: HTTPException) -> Response:
        problem = {
            404: Problem(code="not_found", message="There is nothing at this address."),
            405: Problem(code="wrong_method", message="This address does not answer to this method."),
        }.get(error.status_code, Problem(code="invalid", message="The body cannot be read."))
        response = error_response(problem)
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    def internal(_: Request, error: Exception) -> Response:
        return error_response(Problem(code="internal", message=f"An internal error: {type(error).__name__}."))


def _sends(kind: str, words: str) -> dict[int | str, dict[str, Any]]:
    """Describe an answer that is not JSON."""
    return {200: {"content": {kind: {}}, "description": words}}


_HTML = _sends("text/html", "A page.")
_SAFETENSORS = _sends("application/octet-stream", "A safetensors file.")
_EVENTS = _sends("text/event-stream", "An event `state` for each JobStatus.")


def _page(file: StaticFile) -> Response:
    """Send a page, or a part of one; browsers keep it, and ask each time whether it has changed."""
    return Response(file.content, media_type=file.kind, headers={"cache-control": "no-cache"})


def _safetensors(content: bytes) -> Response:
    return Response(content, media_type="application/octet-stream")


def _add_pages(app: FastAPI, files: Mapping[str, StaticFile]) -> None:
    @app.get("/", response_class=Response, responses=_HTML, summary="The page")
    @app.get("/r/{id}", response_class=Response, responses=_HTML, summary="The page, with an analysis")
    async def page() -> Response:
        return _page(files["index.html"])

    @app.get("/static/{name}", response_class=Response, summary="A part of the page")
    async def part(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return _page(files[name])


def _add_facts(app: FastAPI, service: Service) -> None:
    @app.get("/api", summary="What the server has")
    async def index() -> messages.ServerIndex:
        text, pair = _halves(service.sample)
        return messages.ServerIndex(
            version=__version__,
            models=list(service.models.values()),
            limits=service.limits,
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
    @app.post("/api/jobs", status_code=202, summary="Analyse a text; 200 if that was done before")
    async def submit(wanted: messages.NewJob, response: Response) -> JobStatus:
        text = wanted.text if wanted.pair is None else (wanted.text, wanted.pair)
        status = service.status(await service.submit(wanted.model, text))
        response.status_code = 200 if status.state == "done" else 202
        return status

    @app.get("/api/jobs/{id}", summary="How far an analysis is")
    async def status(id: str) -> JobStatus:
        return service.status(id)

    @app.delete("/api/jobs/{id}", summary="Cancel an analysis")
    async def cancel(id: str) -> JobStatus:
        service.cancel(id)
        return service.status(id)

    @app.get("/api/jobs/{id}/events", response_class=Response, responses=_EVENTS, summary="Follow an analysis")
    async def events(id: str) -> Response:
        service.find(id)
        service.refuse_stream()
        return StreamingResponse(_events(service, id), media_type="text/event-stream")


async def _events(service: Service, id: str) -> AsyncIterator[str]:
    async for status in service.statuses(id):
        yield ": still here\n\n" if status is None else f"event: state\ndata: {status.model_dump_json()}\n\n"


def _add_results(app: FastAPI, service: Service) -> None:
    @app.get("/api/results/{id}", response_model=messages.Analysis, summary="An analysis")
    async def result(id: str) -> Response:
        job = service.find(id)
        text, pair = _halves(job.task.text)
        about = messages.Analysis(
            id=id, state=job.state, model=job.task.model, text=text, pair=pair, error=job.problem, explanation=None
        )
        content = about.model_dump_json(exclude={"explanation"}).encode()
        explanation = job.contents[0] if job.contents else b"null"
        return Response(content[:-1] + b',"explanation":' + explanation + b"}", media_type="application/json")

    @app.get("/api/results/{id}/view", response_class=Response, responses=_SAFETENSORS, summary="What the views show")
    async def view(id: str) -> Response:
        return _safetensors(service.result(id).contents[1])

    @app.post("/api/results/{id}/rows", response_class=Response, responses=_SAFETENSORS, summary="Bound some rows")
    async def rows(id: str, wanted: messages.RowsRequest) -> Response:
        return _safetensors(await service.question(id, wanted))

    @app.post(
        "/api/results/{id}/simplex", response_class=Response, responses=_SAFETENSORS, summary="A head's simplex map"
    )
    async def simplex(id: str, wanted: messages.SimplexRequest) -> Response:
        return _safetensors(await service.question(id, wanted))

    @app.post(
        "/api/results/{id}/move",
        response_model=messages.MovedRow,
        summary="Move an edge to an end of its interval, and measure what changes",
    )
    async def move(id: str, wanted: messages.MoveRequest) -> Response:
        return Response(await service.question(id, wanted), media_type="application/json")


def _halves(text: TextOrPair) -> tuple[str, str | None]:
    return (text, None) if isinstance(text, str) else text
