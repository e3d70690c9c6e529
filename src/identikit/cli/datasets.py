"""The commands over a dataset: attention, measures, attribution and tokens.

To add one, a room brings the columns of its tables (`tables.py`) and a job (`dataset.py`). Here it needs only a
function with its own options that calls `DatasetRun.compute`; the decorator adds the shared options, and makes it
resumable.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import identikit
from identikit.cli import option
from identikit.results.words import percent

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Tables = dict[str, Any]  # data frames by name; pandas is imported when they are made
Report = Callable[[Tables], tuple[str, dict[str, object]]]  # summarises tables in words and as numbers
COMMANDS: dict[str, Callable[..., None]] = {}
"""The commands over a dataset, by name."""


@dataclass(frozen=True)
class DatasetRun:
    """The options that all commands over a dataset share, and the computation of a folder of tables."""

    data: Annotated[str, typer.Option("--data", help="A file, mrpc, cola, mnli, wikitext, or datasets:NAME.")]
    out: option.Out
    data_dir: option.DataDir = None
    columns: option.Column = None
    split: Annotated[str | None, typer.Option("--split", help="Which split of the dataset to read.")] = None
    first: option.First = None
    model: option.Model = None
    tower: option.Tower = None
    device: option.Device = None
    dtype: option.Dtype = "float32"
    truncate: option.Truncate = False
    skip_long: Annotated[
        bool, typer.Option("--skip-long", help="Leave out texts that are too long for the model, and list them.")
    ] = False
    engine: option.Engine = "local"
    workers: option.Workers = None
    threads: option.Threads = None
    address: option.Address = None
    gpus: option.Gpus = 0.0
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            help="For batch systems: compute only shard I of N, given as I/N and counted from 1; `identikit merge` "
            "merges all of them.",
        ),
    ] = None
    as_json: option.Json = False
    arguments: dict[str, object] = field(default_factory=dict)  # all of the command's, noted for `resume`

    def compute(
        self,
        command: str,
        options: "DataclassInstance",
        *,
        gather: Callable[..., Any],
        tables: Callable[..., Tables],
        report: Report,
        settings: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Compute a command's tables into the folder, and print what `report` makes of them.

        `tables` gathers numbers and makes tables; with --shard, `gather` only gathers numbers. `settings` identify the
        run together with the options.
        """
        from identikit.cli.terminal import answer, step_progress
        from identikit.runs.engines import make_engine
        from identikit.runs.manifest import manifest, note_command
        from identikit.runs.run import Run
        from identikit.runs.store import Store, portion_folder
        from identikit.runs.texts import encode_texts

        portion = self._portion()
        folder = self.out if portion is None else f"{self.out}/{portion_folder(*portion)}"
        engine = make_engine(folder, self.engine, self.workers, self.threads, self.address, self.gpus)
        texts = identikit.read_texts(self.data, columns=self.columns, data_dir=self.data_dir, split=self.split)
        texts = list(islice(texts, self.first))
        model = identikit.load(self.model, tower=self.tower, device=self.device, dtype=self.dtype)
        max_tokens = getattr(options, "max_tokens", None)
        encoded, skipped = encode_texts(
            model, texts, truncate=self.truncate, max_tokens=max_tokens, skip=self.skip_long
        )
        data = {"source": self.data, "columns": self.columns, "split": self.split, "first": self.first}
        if self.skip_long:
            data["skipped"] = skipped
        fitting = [text for index, text in enumerate(texts) if index not in skipped]
        identity, recorded = manifest(
            command, model, fitting, data=data, options={**asdict(options), **settings}, threads=engine.threads
        )
        if portion is not None:
            # Which texts share a computation, and so the last digits, differs between a CPU and a GPU.
            identity |= {"shard": self.shard, "device": model.device.type}
        store = Store(folder, identity, recorded)
        with step_progress() as progress, store.held():
            note_command(store, command, self.arguments)
            run = Run(store, engine, portion, progress)
            if portion is None:
                written = tables(model, encoded, run, options)
                store.finish()
                words, numbers = report(written)
                numbers["tables"] = [f"{self.out}/{name}.parquet" for name in written]
                words += (
                    f"\nThe tables are in {self.out}, as .parquet and .csv: {', '.join(written)}.\n"
                    f"{self.out}/columns.json explains their columns."
                )
            else:
                gather(model, encoded, run, options)
                merge = f"identikit merge {self.out}"
                words = f"Shard {self.shard} is complete. Once all shards are complete, run `{merge}`."
                numbers = {"shard": self.shard}
        answer(numbers, words, as_json=self.as_json)

    def _portion(self) -> tuple[int, int] | None:
        """Return --shard as index and count, if it was given."""
        if self.shard is None:
            return None
        index, _, count = self.shard.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise identikit.InputError(
                f"--shard {self.shard!r} cannot be used: expected I/N, such as 2/8, counted from 1."
            )
        return int(index), int(count)


def over_a_dataset(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `DatasetRun` before its own; it receives them as its first argument."""
    *shared, _ = inspect.signature(DatasetRun).parameters.values()  # all but `arguments`
    _, *special = inspect.signature(command).parameters.values()

    @wraps(command)
    def command_with_all_options(**arguments: Any) -> None:
        shared_arguments = {parameter.name: arguments[parameter.name] for parameter in shared}
        run = DatasetRun(**shared_arguments, arguments=arguments)
        if run.truncate and run.skip_long:
            raise identikit.InputError("--truncate and --skip-long cannot be used together. Give one of them.")
        command(run, **{parameter.name: _without_repeats(arguments[parameter.name]) for parameter in special})

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*shared, *special)]
    command_with_all_options.__dict__["__signature__"] = inspect.Signature(parameters)  # typer reads the options here
    COMMANDS[command.__name__] = command_with_all_options
    return command_with_all_options


def _without_repeats(value: object) -> Any:
    """Return the values of a repeated option, each once: a second one would count every text twice."""
    return list(dict.fromkeys(value)) if isinstance(value, list) else value


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
            help="Also compute intervals for N random rows per text, or 'all': ranges with the same output.",
        ),
    ] = None,
    proofs: Annotated[int, typer.Option("--proofs", min=0, help="Keep proofs of the edges of N rows per text.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed for these rows.")] = 0,
) -> None:
    """Compute attention over a dataset: correlation by length, null dimensions, attention by token type, intervals."""
    from identikit.attention.dataset import AttentionOptions, attention_statistics, attention_tables

    rows: Any = 0 if intervals is None else number_or_word(intervals)
    options = AttentionOptions(bias=bias, mass=mass, truncate=run.truncate, intervals=rows, proofs=proofs, seed=seed)
    run.compute("attention", options, gather=attention_statistics, tables=attention_tables, report=_attention_report)


def _attention_report(tables: Tables) -> tuple[str, dict[str, object]]:
    from identikit.attention.certainty import length_table

    correlation = tables["correlation"]["pearson"]
    null = tables["null_dimension"]
    numbers: dict[str, object] = {
        "texts": len(correlation),
        "correlation": float(correlation.mean()),
        "null_dim": int(null["greatest"].max()),
        "residual": float(null["residual"].max()),
    }
    texts = "1 text" if len(correlation) == 1 else f"{len(correlation)} texts"
    words = (
        f"In {texts}, raw and effective attention correlate at {numbers['correlation']:.3f} on "
        f"average. The largest null space has {numbers['null_dim']} dimensions. Effective attention gives the same "
        f"output to within {numbers['residual']:.1g}."
    )
    if "intervals_by_length" in tables:
        by_length = tables["intervals_by_length"]
        numbers["intervals_by_length"] = by_length.to_dict("records")
        words += (
            f"\n\nIntervals of {by_length['rows'].sum() / len(correlation):,.0f} rows per text: what each weight can "
            "be in any alternative, that is,\nin any attention with the same output. Free rows see linearly dependent "
            "values; all others are determined.\nMeans over texts ± standard errors:\n\n"
            f"{length_table(by_length).to_text()}\n"
        )
    return words, numbers


@over_a_dataset
def measures(
    run: DatasetRun,
    measures: Annotated[
        list[str] | None,
        typer.Option(
            "--measure",
            help="attention, value norm, mean, norm, rollout or another reading that needs no target; repeat for more. "
            "Default: these five.",
        ),
    ] = None,
    max_tokens: option.MaxTokens = None,
) -> None:
    """Read attention as people do over a dataset: how much of each measure is determined, and the roles of heads."""
    from identikit.attention import measures_dataset as job

    options = job.MeasuresOptions(truncate=run.truncate, max_tokens=max_tokens)
    if measures:
        options = replace(options, measures=tuple(measures))
    run.compute(
        "measures", options, gather=job.measures_statistics, tables=job.measures_tables, report=job.measures_report
    )


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
    from identikit.attribution.dataset import AttributionOptions, attribution_statistics, attribution_tables
    from identikit.texts.tags import penn_tags

    tagger = penn_tags if tags else None
    directions = number_or_word(probes)
    options = AttributionOptions(probes=directions, norm=norm, precision=precision, truncate=run.truncate)
    run.compute(
        "attribution",
        options,
        gather=attribution_statistics,
        tables=partial(attribution_tables, tagger=tagger),
        report=partial(_attribution_report, directions, norm),
        settings={"tags": tags},
    )


def _attribution_report(probes: int | str | None, norm: str, tables: Tables) -> tuple[str, dict[str, object]]:
    own = tables["own"]
    first = own.iloc[0]
    last = own.iloc[-1]
    method = "exact" if probes == "exact" else f"estimated from {probes} random directions"
    final = f"layer {len(own) - 1}"
    return (
        f"A token's own contribution is {first['median']:.2f} in layer 0 and {last['median']:.2f} in {final} "
        f"(medians; {norm} norm, {method}). In {final}, {percent(last['outweighed'])} of tokens are outweighed by "
        "another.",
        {"own": own["median"].tolist(), "outweighed": own["outweighed"].tolist(), "probes": probes, "norm": norm},
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
        list[str] | None,
        typer.Option("--map", help="naive, linear, mlp or ridge; repeat for more. Default: naive, ridge."),
    ] = None,
    distances: Annotated[
        list[str] | None,
        typer.Option("--distance", help="cosine or l2; repeat for both."),
    ] = None,
    folds: Annotated[int, typer.Option("--folds", min=1, max=10, help="How many of the ten folds to run.")] = 10,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for folds, initialisation, batch order and noise.")
    ] = 0,
    noises: Annotated[
        list[float] | None,
        typer.Option(
            "--noise",
            min=0.0,
            help="Noise on the hidden vectors for the inversion, relative to their norm; repeat for more. Default: "
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
    max_tokens: option.MaxTokens = None,
) -> None:
    """Learn to recover tokens from hidden vectors over a dataset, and report how often that works."""
    from identikit.tokens.dataset import (
        IdentifiabilityOptions,
        identifiability_rates,
        identifiability_tables,
        inversion_tables,
        inverted,
    )
    from identikit.tokens.experiments import EXPERIMENTS
    from identikit.tokens.invert import NOISES, InversionOptions

    if experiment not in (*EXPERIMENTS, "inversion"):
        raise identikit.InputError(
            f"--experiment {experiment!r} is not known. Use one of: {', '.join((*EXPERIMENTS, 'inversion'))}."
        )
    if experiment == "inversion":
        distances = distances or ["l2"]
        if maps or len(distances) > 1:
            raise identikit.InputError(
                "--experiment inversion uses no maps and one distance. Leave out --map, and give --distance once."
            )
        inversion = InversionOptions(
            noises=tuple(noises or NOISES),
            distance=distances[0],
            prefix=prefix,
            seed=seed,
            truncate=run.truncate,
            max_tokens=max_tokens,
        )
        run.compute(
            "tokens",
            inversion,
            gather=inverted,
            tables=inversion_tables,
            report=_inversion_report,
            settings={"experiment": "inversion"},
        )
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
    run.compute("tokens", options, gather=identifiability_rates, tables=identifiability_tables, report=_rates_report)


def _rates_report(tables: Tables) -> tuple[str, dict[str, object]]:
    summary = tables["summary"]
    final = summary["layer"].max()
    final_rates = summary[(summary["layer"] == final) & (summary["test_layer"] == final)]
    rates = "; ".join(f"{row['map']} {row['distance']} {row['rate']:.3f}" for _, row in final_rates.iterrows())
    return f"Recovered from layer {final}: {rates}.", {"rates": summary.to_dict("records")}


def _inversion_report(tables: Tables) -> tuple[str, dict[str, object]]:
    rates = tables["inversion"]
    final = rates["layer"].max()
    words = "; ".join(
        f"noise {row['noise']:g}: {row['rate']:.1%}, smallest margin {row['margin_least']:.2g}"
        for _, row in rates[rates["layer"] == final].iterrows()
    )
    return f"Recovered from layer {final}: {words}.", {"inversion": rates.to_dict("records")}


def number_or_word(value: str) -> int | str:
    """Return an option's value as a number if it is one."""
    return int(value) if value.isdecimal() and len(value) < 10 else value
