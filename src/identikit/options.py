"""Options that several commands share."""

from typing import Annotated

import typer

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
    typer.Option(
        "--out", help="The folder for the results. A stopped run resumes there (tokens resumes only inversion)."
    ),
]
DataDirOption = Annotated[str | None, typer.Option("--data-dir", help="The folder of a dataset given by name.")]
ColumnOption = Annotated[list[str] | None, typer.Option("--column", help="The column to read; give two for pairs.")]
TruncateOption = Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long for the model.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")]
