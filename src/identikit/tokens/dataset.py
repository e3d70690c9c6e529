"""Token identifiability over a dataset, as tidy tables."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.runs.store import Store, write_tables
from identikit.text import Text
from identikit.tokens.identify import token_identifiability
from identikit.tokens.protocol import Settings
from identikit.tokens.states import READING

if TYPE_CHECKING:
    from pandas import DataFrame


def identifiability_tables(
    model: Model,
    texts: Iterable[Text],
    store: Store,
    *,
    folds: int = 10,
    seed: int = 0,
    truncate: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, "DataFrame"]:
    """Run an experiment of `token_identifiability` over a dataset into a store: its rates, their summary, its maps."""
    settings = Settings(folds=folds, seed=seed, device=str(model.device))

    def told(what: str, done: int, total: int) -> None:
        if what != READING:  # the data and the options have been checked: a place that cannot be written to is told now
            store.start()
        progress(what, done, total)

    fit = token_identifiability(model, list(texts), settings=settings, truncate=truncate, progress=told, **options)
    tables = {
        name: frame.assign(layer=frame["layer"] + 1, test_layer=frame["test_layer"] + 1)
        for name, frame in (("rates", fit.rates), ("summary", fit.summary))
    }
    write_tables(store, tables)
    return tables
