"""Options that several commands share: `option.Model` is the type of `--model`."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from typer import Context as Context
else:
    Context = typer.Context.__base__  # what typer really hands over, where types are checked at run time

Model = Annotated[
    str | None,
    typer.Option("--model", help="A hub id or a folder. Default: the packaged model, all-MiniLM-L6-v2."),
]
Device = Annotated[str | None, typer.Option("--device", help="Where to compute: cpu, cuda, ….")]
Tower = Annotated[
    str | None,
    typer.Option("--tower", help="Which tower to read of a model that has two, such as CLIP: text or vision."),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="float32, float64, bfloat16, float16, or auto: as in the checkpoint."),
]
Out = Annotated[
    str,
    typer.Option("--out", help="The folder for the results. If it holds a stopped run, that run is resumed."),
]
DataDir = Annotated[str | None, typer.Option("--data-dir", help="The folder that holds a dataset given by name.")]
Column = Annotated[list[str] | None, typer.Option("--column", help="The column to read; give two for pairs.")]
First = Annotated[
    int | None,
    typer.Option("--first", "--sample", min=1, help="Read only the first N texts."),
]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long for the model.")]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Refuse texts of more than N tokens, or cut them with --truncate."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")]
Engine = Annotated[
    str,
    typer.Option(
        "--engine", help="Where to compute: local, processes (on this machine) or ray. The results are the same."
    ),
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Number of workers. Default: as many as there are cores for.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="CPU threads per worker, which affect the last digits. Default: all cores."),
]
Address = Annotated[
    str | None, typer.Option("--address", help="The address of a Ray cluster. Default: start one here.")
]
Gpus = Annotated[float, typer.Option("--gpus-per-worker", min=0.0, help="GPUs per Ray worker.")]
