"""Token identifiability over a dataset, as tidy tables: rates by fold, and their summary."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.runs.columns import TOKENS, texts_table
from identikit.runs.store import Store, write_tables
from identikit.text import Text
from identikit.tokens.identify import token_identifiability
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
