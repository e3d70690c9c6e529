"""The server on the command line: `identikit serve`."""

from typing import Annotated

import typer

from identikit.cli.options import DeviceOption, DtypeOption


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="A hub id or a folder; repeat for more. Default: the packaged MiniLM."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="The address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 for any free one.")] = 8765,
    device: DeviceOption = None,
    dtype: DtypeOption = "float32",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="A name that visitors may reach the server under; repeat for more."),
    ] = None,
    longest: Annotated[
        int, typer.Option("--longest", min=1, max=1_000_000, help="How many characters a text may have.")
    ] = 5000,
    waiting: Annotated[int, typer.Option("--waiting", min=1, help="How many analyses may wait.")] = 8,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="About how long to bound rows of attention, drawn at random.")
    ] = 20.0,
) -> None:
    """Serve the explorer: type a text, see which attention is real, and drag its weights."""
    from identikit.web.server import Limits, ModelSource, Serving
    from identikit.web.server import serve as served

    sources = tuple(ModelSource(name, device, dtype) for name in model or [None])
    limits = Limits(characters=longest, waiting=waiting, seconds=seconds)
    served(Serving(sources, host, port, tuple(allow_host or ()), limits))
