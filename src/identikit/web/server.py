"""The server: pages and their JSON twins over HTTP, and how it is started and stopped."""

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from fastapi.utils import generate_unique_id
from starlette.exceptions import HTTPException

from identikit.errors import InputError
from identikit.version import __version__
from identikit.web import messages
from identikit.web.bundle import static
from identikit.web.guard import Connection, Guard, allowed_hosts
from identikit.web.jobs import Service
from identikit.web.messages import STATUS, JobStatus, Limits, ModelSource, RefusedError, TextOrPair, error_response

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


def serve(sources: tuple[ModelSource, ...], host: str, port: int, names: tuple[str, ...], limits: Limits) -> None:
    """Load the models, and serve until Ctrl-C or SIGTERM; `names` are further names that the server answers to."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
        except OSError as error:
            reason = "the port is taken" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            raise InputError(
                f"Serving on {host}, port {port}: {reason}. Choose another with --port or --host."
            ) from None
        port = listening.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        asyncio.run(_serve(Service(sources, limits), listening, address, allowed_hosts(host, port, names)))


async def _serve(service: Service, listening: socket.socket, address: str, hosts: frozenset[str]) -> None:
    config = uvicorn.Config(
        Guard(application(service), hosts, service.limits.body),
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
        listening.listen()  # before the address is printed: a client that connects now waits, and is not refused
        print(f"Serving {', '.join(service.models)} on http://{address}. Press Ctrl-C to stop.", flush=True)
        await _Server(config, service.end_streams).serve(sockets=[listening])
    finally:
        await service.close()


class _Server(uvicorn.Server):
    """Ends normally on Ctrl-C and SIGTERM, after ending the open streams."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]):
        super().__init__(config)
        self._end_streams = end_streams

    def handle_exit(self, sig: int, frame: object) -> None:
        """Stop serving; uvicorn would raise the signal again afterwards."""
        self.should_exit = True
        asyncio.get_running_loop().call_soon_threadsafe(self._end_streams)


# Errors


async def _refused(_: Request, refusal: Any) -> Response:
    return error_response(refusal.problem)


async def _invalid(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    field = ".".join(str(name) for name in first["loc"] if name != "body") or "the body"
    reason = "its body is not JSON" if first["type"] == "json_invalid" else f"{field}: {first['msg']}"
    return error_response(messages.Problem(code="invalid", message=f"The request cannot be used: {reason}."))


async def _http(_: Request, error: Any) -> Response:
    code, message = {
        404: ("not_found", "There is nothing at this address."),
        405: ("wrong_method", "This address does not answer to this method."),
    }.get(error.status_code, ("invalid", "The body cannot be read."))
    response = error_response(messages.Problem(code=code, message=message))
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _internal(_: Request, error: Any) -> Response:
    return error_response(messages.Problem(code="internal", message=f"An internal error: {type(error).__name__}."))


def application(service: Service) -> FastAPI:
    """Return the application over a service. Requests choose among the page's files, read here, and never name one."""
    app = FastAPI(
        title="identikit",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        description="What a transformer's attention and hidden vectors really say about a text.",
        responses={status: {"model": messages.Error} for status in (400, *sorted(set(STATUS.values())))},
        exception_handlers={
            RefusedError: _refused,
            RequestValidationError: _invalid,
            HTTPException: _http,
            Exception: _internal,
        },
    )
    app.state.service = service
    app.state.files = {}
    for file in static().iterdir():
        if file.name.rpartition(".")[2] in _TYPES:
            app.state.files[file.name] = file.read_bytes()
    app.include_router(_routes)
    return app


# Pages


def _sends(kind: str, words: str) -> dict[str, Any]:
    """Describe a route whose answer is not JSON."""
    return {"response_class": Response, "responses": {200: {"content": {kind: {}}, "description": words}}}


_HTML = _sends("text/html", "A page.")
_SAFETENSORS = _sends("application/octet-stream", "A safetensors file.")
_EVENTS = _sends("text/event-stream", "An event `state` for each JobStatus.")

_routes = APIRouter(generate_unique_id_function=lambda route: generate_unique_id(route).removeprefix("_"))


def _service(request: Request) -> Service:
    return request.app.state.service


Served = Annotated[Service, Depends(_service)]


@_routes.get("/", summary="The page", **_HTML)
@_routes.get("/r/{id}", summary="The page, with an analysis", **_HTML)
async def _page(request: Request) -> Response:
    return await _file("index.html", request)


@_routes.get("/static/{name}", response_class=Response, summary="A part of the page")
async def _file(name: str, request: Request) -> Response:
    if name not in request.app.state.files:
        raise HTTPException(404)
    kind = _TYPES[name.rpartition(".")[2]]
    # Browsers keep it, and ask each time whether it has changed.
    return Response(request.app.state.files[name], media_type=kind, headers={"cache-control": "no-cache"})


# What the server is


@_routes.get("/api", summary="What the server has")
async def _index(service: Served) -> messages.ServerIndex:
    text, pair = _halves(service.sample)
    return messages.ServerIndex(
        version=__version__,
        models=list(service.models.values()),
        limits=service.limits,
        sample=messages.NewJob(text=text, pair=pair, model=None, measures=[], target=None),
        measures=list(service.measures),
    )


@_routes.get("/healthz", summary="Whether the server works")
async def _health(service: Served) -> messages.Health:
    workers = service.analyst.alive + service.reader.alive
    return messages.Health(
        status="ok" if workers == 2 else "starting",
        version=__version__,
        waiting=len(service.analyst.waiting),
        running=int(service.analyst.current is not None),
        workers=workers,
    )


# Analyses


@_routes.post("/api/jobs", status_code=202, summary="Analyse a text; 200 if that was done before")
async def _submit(body: messages.NewJob, response: Response, service: Served) -> JobStatus:
    status = service.status(await service.submit(body))
    response.status_code = 200 if status.state == "done" else 202
    return status


@_routes.get("/api/jobs/{id}", summary="How far an analysis is")
async def _status(id: str, service: Served) -> JobStatus:
    return service.status(id)


@_routes.delete("/api/jobs/{id}", summary="Cancel an analysis")
async def _cancel(id: str, service: Served) -> JobStatus:
    service.analyst.cancel(service.find(id))  # a task that has ended does not change
    return service.status(id)


@_routes.get("/api/jobs/{id}/events", summary="Follow an analysis", **_EVENTS)
async def _events(id: str, service: Served) -> Response:
    service.find(id)
    if service.streams >= service.limits.streams:
        raise RefusedError("busy", f"Too many streams of events are open: {service.streams}.")
    return StreamingResponse(service.events(id), media_type="text/event-stream")


# Results


def _safetensors(content: bytes) -> Response:
    return Response(content, media_type="application/octet-stream")


def _halves(text: TextOrPair) -> tuple[str, str | None]:
    return (text, None) if isinstance(text, str) else text


@_routes.get("/api/results/{id}", response_model=messages.Analysis, summary="An analysis")
async def _result(id: str, service: Served) -> Response:
    job = service.find(id)
    text, pair = _halves(job.task.text)
    question = job.task.question
    assert isinstance(question, messages.Explain)
    about = messages.Analysis(
        id=id,
        state=job.state,
        model=job.task.model,
        text=text,
        pair=pair,
        measures=list(question.measures),
        target=question.target,
        error=job.problem,
        explanation=None,
    )
    content = about.model_dump_json(exclude={"explanation"}).encode()
    explanation = job.contents[0] if job.contents else b"null"
    return Response(content[:-1] + b',"explanation":' + explanation + b"}", media_type="application/json")


@_routes.get("/api/results/{id}/view", summary="What the views show", **_SAFETENSORS)
async def _view(id: str, service: Served) -> Response:
    return _safetensors(service.result(id).contents[1])


@_routes.post("/api/results/{id}/rows", summary="Bound some rows", **_SAFETENSORS)
async def _rows(id: str, body: messages.RowsRequest, service: Served) -> Response:
    return _safetensors(await service.question(id, body))


@_routes.post("/api/results/{id}/simplex", summary="A head's simplex map", **_SAFETENSORS)
async def _simplex(id: str, body: messages.SimplexRequest, service: Served) -> Response:
    return _safetensors(await service.question(id, body))


@_routes.post(
    "/api/results/{id}/move",
    response_model=messages.MovedRow,
    summary="Move an edge to an end of its interval, and measure what changes",
)
async def _move(id: str, body: messages.MoveRequest, service: Served) -> Response:
    return Response(await service.question(id, body), media_type="application/json")
