"""Options that several commands share."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from typer import Context as Context
else:
    Context = typer.Context.__base__  # what typer really hands over, where types are checked at run time

ModelOption = Annotated[str | None, typer.Option("--model", help="A hub id or a folder. Default: the packaged MiniLM.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Where to compute: cpu, cuda, ….")]
TowerOption = Annotated[
    str | None,
    typer.Option("--tower", help="Which tower to read of a model that has two, such as CLIP: text or vision."),
]
DtypeOption = Annotated[
    str,
    typer.Option("--dtype", help="float32, float64, bfloat16, float16, or auto: the one that the checkpoint names."),
]
OutOption = Annotated[
    str,
    typer.Option("--out", help="The folder for the results. A stopped run resumes there."),
]
DataDirOption = Annotated[str | None, typer.Option("--data-dir", help="The folder of a dataset given by name.")]
ColumnOption = Annotated[list[str] | None, typer.Option("--column", help="The column to read; give two for pairs.")]
TruncateOption = Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long for the model.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine", help="Where to compute: local, processes (of this machine), or ray. The results are equal."
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="How many workers. Default: as many as there are cores for.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="CPU threads per worker; they affect the last digits. Default: all cores."),
]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="The address of a Ray cluster. Default: one is started here.")
]
GpusOption = Annotated[float, typer.Option("--gpus-per-worker", min=0.0, help="GPUs per Ray worker.")]
