"""The commands over a dataset: attention, attribution and tokens."""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial, wraps
from itertools import islice
from typing import Annotated, Any

import typer

import identikit
from identikit.options import (
    ColumnOption,
    DataDirOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    OutOption,
    TowerOption,
    TruncateOption,
)


@dataclass(frozen=True)
class DatasetRun:
    """What the commands over a dataset share: their options, and the way from texts to a folder of tables."""

    data: Annotated[str, typer.Option("--data", help="A file, a name (mrpc, cola, mnli, wikitext) or datasets:NAME.")]
    out: OutOption
    data_dir: DataDirOption = None
    columns: ColumnOption = None
    split: Annotated[str | None, typer.Option("--split", help="Which split of the dataset to read.")] = None
    sample: Annotated[int | None, typer.Option("--sample", min=1, help="Read only the first N texts.")] = None
    model: ModelOption = None
    tower: TowerOption = None
    device: DeviceOption = None
    dtype: DtypeOption = "float32"
    truncate: TruncateOption = False
    as_json: JsonOption = False

    def tables(
        self, command: str, compute: Callable[..., dict[str, Any]], options: Any, also: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Compute the tables into the folder, with progress; `also` are settings that are not among the options."""
        from identikit.runs.manifest import manifest
        from identikit.runs.store import Store
        from identikit.terminal import step_progress

        data = {"source": self.data, "columns": self.columns, "split": self.split, "sample": self.sample}
        found = identikit.read_texts(self.data, columns=self.columns, data_dir=self.data_dir, split=self.split)
        texts = list(islice(found, self.sample))
        model = identikit.load(self.model, tower=self.tower, device=self.device, dtype=self.dtype)
        settings = asdict(options) | (also or {})
        store = Store(self.out, *manifest(command, model, texts, data=data, options=settings))
        with step_progress() as told:
            return compute(model, texts, store, options, progress=told)

    def report(self, words: str, numbers: dict[str, Any], tables: dict[str, Any]) -> None:
        """Print the main numbers, and where the tables are."""
        if self.as_json:
            typer.echo(json.dumps(numbers | {"tables": [f"{self.out}/{name}.parquet" for name in tables]}))
            return
        typer.echo(words)
        typer.echo(f"The tables are in {self.out}, as .parquet and .csv: {', '.join(tables)}.")
        typer.echo(f"{self.out}/columns.json says what their columns mean.")


def over_a_dataset(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `DatasetRun` before its own; it gets them as its first argument."""
    names = [field.name for field in fields(DatasetRun)]

    @wraps(command)
    def called(**given: Any) -> None:
        command(DatasetRun(**{name: given.pop(name) for name in names}), **given)

    shared, (_, *own) = (inspect.signature(one).parameters.values() for one in (DatasetRun, command))
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*shared, *own)]
    called.__dict__["__signature__"] = inspect.Signature(parameters)  # what typer reads the options from
    return called


@over_a_dataset
def attention(
    run: DatasetRun,
    bias: Annotated[
        bool, typer.Option("--bias/--no-bias", help="Keep the bias of the values, or leave it out as the paper does.")
    ] = True,
    mass: Annotated[bool, typer.Option("--mass", help="Let effective attention keep the sum of every row.")] = False,
    intervals: Annotated[
        str | None,
        typer.Option(
            "--intervals",
            help="Also compute intervals for N random rows of attention per text, or for 'all': the range of each "
            "weight over every attention with the same output.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed for the rows of --intervals.")] = 0,
) -> None:
    """Compute attention over a dataset: correlation by length, null dimensions, attention by token type, intervals."""
    from identikit.attention.certainty import length_words
    from identikit.attention.dataset import AttentionOptions, attention_tables

    rows: Any = count(intervals) or 0
    options = AttentionOptions(bias=bias, mass=mass, truncate=run.truncate, intervals=rows, seed=seed)
    tables = run.tables("attention", attention_tables, options)
    overall = tables["correlation"]["pearson"]
    null = tables["null_dimension"]
    numbers = {
        "texts": len(overall),
        "correlation": float(overall.mean()),
        "null_dim": int(null["greatest"].max()),
        "residual": float(null["residual"].max()),
    }
    texts = "1 text" if len(overall) == 1 else f"{len(overall)} texts"
    words = (
        f"In {texts}, raw and effective attention correlate at {numbers['correlation']:.3f} on "
        f"average. The largest null space has {numbers['null_dim']} dimensions. Effective attention gives the same "
        f"output to within {numbers['residual']:.1g}."
    )
    if options.intervals:
        by_length = tables["intervals_by_length"]
        numbers["intervals_by_length"] = json.loads(by_length.to_json(orient="records", double_precision=15))
        words += (
            f"\n\nIntervals of {by_length['rows'].sum() / len(overall):,.0f} rows per text: what each weight can be in "
            "any attention with the same output.\nFree rows see linearly dependent values; all others are certain. "
            "Means over texts ± standard errors:\n\n"
            f"{length_words(by_length)}\n"
        )
    run.report(words, numbers, tables)


@over_a_dataset
def attribution(
    run: DatasetRun,
    probes: Annotated[
        str, typer.Option("--probes", help="exact, or the number of random directions to estimate from.")
    ] = "exact",
    norm: Annotated[str, typer.Option("--norm", help="frobenius, sum or spectral.")] = "frobenius",
    precision: Annotated[str, typer.Option("--precision", help="full, or on a GPU tf32 or bfloat16.")] = "full",
    tags: Annotated[
        bool, typer.Option("--tags", help="Also give own contributions by part of speech (needs the extra [pos]).")
    ] = False,
) -> None:
    """Compute Hidden Token Attribution over a dataset: own contribution, neighbours, relative position."""
    from identikit.attribution.dataset import AttributionOptions, attribution_tables
    from identikit.tags import penn_tags

    asked = count(probes)
    options = AttributionOptions(probes=asked, norm=norm, precision=precision, truncate=run.truncate)
    compute = partial(attribution_tables, tagger=penn_tags if tags else None)
    tables = run.tables("attribution", compute, options, {"tags": tags})
    own = tables["own"]
    first, last = own.iloc[0], own.iloc[-1]
    how = "exact" if asked == "exact" else f"estimated from {asked} random directions"
    final = f"layer {len(own) - 1}"
    run.report(
        f"A token's own contribution is {first['median']:.2f} in layer 0 and {last['median']:.2f} in {final} "
        f"(medians; {norm} norm, {how}). In {final}, {last['outweighed']:.0%} of tokens are outweighed by another.",
        {"own": own["median"].tolist(), "outweighed": own["outweighed"].tolist(), "probes": asked, "norm": norm},
        tables,
    )


@over_a_dataset
def tokens(
    run: DatasetRun,
    experiment: Annotated[
        str,
        typer.Option(
            "--experiment",
            help="same layer, across layers, generalisation, previous layer or neighbours; or inversion, which learns "
            "no maps but tries the whole vocabulary (causal models).",
        ),
    ] = "same layer",
    maps: Annotated[
        list[str] | None, typer.Option("--map", help="naive, linear, mlp or ridge; repeat for several.")
    ] = None,
    distances: Annotated[list[str] | None, typer.Option("--distance", help="cosine or l2; repeat for both.")] = None,
    folds: Annotated[int, typer.Option("--folds", min=1, max=10, help="How many of the ten folds to run.")] = 10,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for folds, initialisation, batch order and noise.")
    ] = 0,
    noises: Annotated[
        list[float] | None,
        typer.Option(
            "--noise",
            min=0.0,
            help="Noise on the hidden vectors for the inversion, relative to their norm; repeat for several. Default: "
            "0, 0.1, 0.3, 1 and 3.",
        ),
    ] = None,
    prefix: Annotated[
        str,
        typer.Option(
            "--prefix",
            help="For inversion, which tokens come before each position: given (the true ones) or recovered (the "
            "winners).",
        ),
    ] = "given",
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Refuse texts of more than N tokens, or cut them with --truncate."),
    ] = None,
) -> None:
    """Learn to recover tokens from hidden vectors over a dataset, and say how often it works."""
    from identikit.tokens.dataset import IdentifiabilityOptions, identifiability_tables
    from identikit.tokens.experiments import EXPERIMENTS

    if experiment not in (*EXPERIMENTS, "inversion"):
        raise identikit.InputError(
            f"--experiment {experiment!r} is not known. Use one of: {', '.join((*EXPERIMENTS, 'inversion'))}."
        )
    if experiment == "inversion":
        _inversion(run, maps, distances or ["l2"], noises=noises, prefix=prefix, seed=seed, max_tokens=max_tokens)
        return
    if noises or prefix != "given":
        raise identikit.InputError("--noise and --prefix are for --experiment inversion. Leave them out.")
    options = IdentifiabilityOptions(
        experiment=experiment,
        maps=tuple(maps or ("naive", "ridge")),
        distances=tuple(distances or ("cosine", "l2")),
        folds=folds,
        seed=seed,
        truncate=run.truncate,
        max_tokens=max_tokens,
    )
    tables = run.tables("tokens", identifiability_tables, options)
    summary = tables["summary"]
    final = summary["layer"].max()
    last = summary[(summary["layer"] == final) & (summary["test_layer"] == final)]
    told = "; ".join(f"{row['map']} {row['distance']} {row['rate']:.3f}" for _, row in last.iterrows())
    rates = summary.to_json(orient="records", double_precision=15)  # with null for what is missing
    run.report(f"Recovered from layer {final}: {told}.", {"rates": json.loads(rates)}, tables)


def _inversion(run: DatasetRun, maps: list[str] | None, distances: list[str], **given: Any) -> None:
    from identikit.tokens.dataset import NOISES, InversionOptions, inversion_tables

    if maps or len(distances) > 1:
        raise identikit.InputError(
            "--experiment inversion uses no maps and one distance. Leave out --map, and give --distance once."
        )
    given["noises"] = tuple(given["noises"] or NOISES)
    options = InversionOptions(distance=distances[0], truncate=run.truncate, **given)
    tables = run.tables("tokens", inversion_tables, options, {"experiment": "inversion"})
    found = tables["inversion"]
    final = found[found["layer"] == found["layer"].max()]
    told = "; ".join(
        f"noise {row['noise']:g}: {row['rate']:.1%}, smallest margin {row['margin_least']:.2g}"
        for _, row in final.iterrows()
    )
    rows = json.loads(found.to_json(orient="records", double_precision=15))
    run.report(f"Recovered from layer {found['layer'].max()}: {told}.", {"inversion": rows}, tables)


def count(probes: str | None) -> int | str | None:
    """Return a number given as an option; a word stays a word."""
    return int(probes) if probes is not None and probes.isdecimal() else probes
