"""Token identifiability and inversion over a dataset, as tidy tables."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from identikit.models.continuation import check_continues
from identikit.models.model import Model
from identikit.models.reading import unread
from identikit.progress import Progress, silent
from identikit.runs.columns import INVERSION, TOKENS, texts_table
from identikit.runs.local import remaining, run_shards
from identikit.runs.store import Store, write_tables
from identikit.shapes import Tensor
from identikit.text import Encoded, Text
from identikit.tokens.identify import token_identifiability
from identikit.tokens.invert import Inversion, Options, judged, token_words
from identikit.tokens.protocol import FOLDS, Settings
from identikit.tokens.states import READING

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class IdentifiabilityOptions:
    """Which maps are fitted to a dataset, and how they are tested: see `token_identifiability`."""

    experiment: str = "same layer"
    maps: tuple[str, ...] = ("naive", "ridge")
    distances: tuple[str, ...] = ("cosine", "l2")
    folds: int = FOLDS
    seed: int = 0
    truncate: bool = False
    max_tokens: int | None = None


def identifiability_tables(
    model: Model, texts: Iterable[Text], store: Store, options: IdentifiabilityOptions, *, progress: Progress = silent
) -> dict[str, "DataFrame"]:
    """Run an experiment over a dataset into a store; `runs.columns.TOKENS` describes its tables.

    Layers, folds and texts count from 0.
    """

    def told(what: str, done: int, total: int) -> None:
        if what != READING:  # data and options are fine: now a folder that cannot be written to is refused
            store.start()
        progress(what, done, total)

    texts = list(texts)
    fit = token_identifiability(
        model,
        texts,
        maps=options.maps,
        distances=options.distances,
        experiment=options.experiment,
        settings=Settings(folds=options.folds, seed=options.seed, device=str(model.device)),
        truncate=options.truncate,
        max_tokens=options.max_tokens,
        progress=told,
    )
    read = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    tables = {"texts": texts_table(texts, [len(one) for one in read]), "rates": fit.rates, "summary": fit.summary}
    write_tables(store, tables, TOKENS)
    return tables


NOISES = (0.0, 0.01, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class InversionOptions(Options):
    """How a dataset is inverted: `Options`, and what becomes of long texts."""

    noises: tuple[float | int, ...] = NOISES
    truncate: bool = False
    max_tokens: int | None = None


def inversion_tables(
    model: Model, texts: Iterable[Text], store: Store, options: InversionOptions, *, progress: Progress = silent
) -> dict[str, "DataFrame"]:
    """Invert every token of a dataset, text by text, into a store; `runs.columns.INVERSION` describes the tables.

    All layers and noises share one pass over the vocabulary. Layers, positions and texts count from 0. `progress`
    counts tokens.
    """
    texts = list(texts)
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens)
    found = list(inverted(model, texts, store, options, progress=progress))
    tokens = _token_table(model, encoded, found, options.noises)
    tables = {
        "texts": texts_table(texts, [len(one) for one in encoded]),
        "inversion": summary_of(tokens, ["layer", "noise"]),
        "positions": summary_of(tokens, ["layer", "noise", "position"]),
        "tokens": tokens,
    }
    write_tables(store, tables, INVERSION)
    return tables


def inverted(
    model: Model, texts: list[Text], store: Store, options: InversionOptions, *, progress: Progress = silent
) -> Iterable[dict[str, Tensor]]:
    """Yield for each text what was found: arrays (aim, position), with the noises of a layer one after another."""
    check_continues(model)
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens)
    lengths, layers = [len(one) for one in encoded], tuple(range(model.n_layers))
    inversion = Inversion.of(model, options, steps=sum(remaining(lengths, store, size=1)), depth=model.n_layers)
    size = len(inversion.candidates.ids)

    def compute(shard: list[Text], told: Progress) -> dict[str, Tensor]:
        (reading,) = unread(model, shard, truncate=options.truncate, max_tokens=options.max_tokens)
        n, done = len(reading.tokens), 0.0

        def tick(count: float | int) -> None:
            nonlocal done
            done += count / size
            told("", int(done + 1e-6), n)

        sought, text = inversion.read(reading, layers, tuple(range(n)))
        return judged(sought, replace(inversion, tick=tick).find(sought, text), inversion.candidates)

    return run_shards(texts, compute, store, lengths=lengths, what="inversion, tokens", size=1, progress=progress)


def _token_table(
    model: Model, encoded: list[Encoded], found: list[dict[str, Tensor]], noises: tuple[float | int, ...]
) -> "DataFrame":
    from pandas import DataFrame, MultiIndex, concat

    parts = []
    for number, (one, arrays) in enumerate(zip(encoded, found, strict=True)):
        places = [[number], range(model.n_layers), [float(noise) for noise in noises], range(len(one))]
        index = MultiIndex.from_product(places, names=["text", "layer", "noise", "position"])
        columns: dict[str, Any] = {name: array.flatten().numpy() for name, array in arrays.items()}
        parts.append(DataFrame({"token": one.tokens * (len(index) // len(one)), **columns}, index).reset_index())
    table: Any = concat(parts, ignore_index=True)
    words = token_words(model, {*table["winner"].tolist(), *table["runner_up"].tolist()})
    for name in ("winner", "runner_up"):
        table[f"{name}_token"] = [words[str(one)] for one in table[name]]
    measured = table.select_dtypes("floating").columns
    return table.astype(dict.fromkeys(measured, float))[[*INVERSION["tokens"].columns]]


def summary_of(tokens: "DataFrame", by: list[str]) -> "DataFrame":
    """Return rates, margins and distances of a table of tokens by layer, noise or more."""
    grouped: Any = tokens.groupby(by, sort=True)
    return grouped.agg(
        tokens=("recovered", "size"),
        rate=("recovered", "mean"),
        margin_least=("margin", "min"),
        margin_median=("margin", "median"),
        own_distance_median=("own_distance", "median"),
        own_distance_greatest=("own_distance", "max"),
        runner_up_distance_least=("runner_up_distance", "min"),
        runner_up_distance_median=("runner_up_distance", "median"),
    ).reset_index()
