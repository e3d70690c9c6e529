"""Token identifiability and inversion over a dataset, as tidy tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from identikit.checks import known_name
from identikit.models.machine import product_precision
from identikit.models.model import Model
from identikit.models.text_run import prepare_texts
from identikit.progress import Progress, silent
from identikit.results.files import plain
from identikit.results.table import texts_table
from identikit.runs.run import Numbers, Run, Stored, restored_row
from identikit.runs.store import write_tables
from identikit.shapes import Tensor
from identikit.texts.text import AnyText, EncodedText
from identikit.tokens.continuation import check_continues
from identikit.tokens.experiments import EXPERIMENTS, Experiment, Rate, run_experiment
from identikit.tokens.invert import Inversion, InversionOptions, token_words
from identikit.tokens.protocol import FOLDS, MapChoice, Settings
from identikit.tokens.result import identifiability_result
from identikit.tokens.states import HiddenStates, hidden_states
from identikit.tokens.tables import INVERSION, TOKENS

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

    def __post_init__(self) -> None:
        known_name("experiment", self.experiment, tuple(EXPERIMENTS))
        MapChoice(self.maps, self.distances)
        Settings(folds=self.folds, seed=self.seed)


@dataclass(frozen=True)
class TextStates:
    """The hidden vectors of texts, read once per process and model."""

    texts: tuple[AnyText, ...]
    truncate: bool = False
    max_tokens: int | None = None
    _read: dict[str, HiddenStates] = field(default_factory=dict, compare=False, repr=False)

    def of(self, model: Model, progress: Progress = silent) -> HiddenStates:
        """Return the hidden vectors of all texts."""
        if model.fingerprint not in self._read:
            self._read[model.fingerprint] = hidden_states(
                model, list(self.texts), truncate=self.truncate, max_tokens=self.max_tokens, progress=progress
            )
        return self._read[model.fingerprint]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_read": {}}  # not sent to other processes


@dataclass(frozen=True)
class IdentifiabilityJob:
    """Fits one kind of map to one layer, to several or to all (None), and tests it."""

    states: TextStates
    experiment: Experiment
    distances: tuple[str, ...]
    settings: Settings
    precision: str = "full"
    progress: Progress = field(default=silent, compare=False)

    def compute(
        self, model: Model, task: tuple[str, tuple[int, ...] | None], progress: Progress
    ) -> list[dict[str, Any]]:
        """Return the rates of a kind of map, as rows."""
        kind, layers = task
        choice = MapChoice((kind,), self.distances, layers)
        settings = replace(self.settings, device=str(model.device))
        with product_precision(self.precision):
            states = self.states.of(model, self.progress)
            rates, _ = run_experiment(self.experiment, states, choice, settings, self.progress)
        return plain([rate._asdict() for rate in rates])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"progress": silent}  # a bar stays in its process


def identifiability_rates(
    model: Model, texts: Sequence[AnyText], run: Run, options: IdentifiabilityOptions
) -> list[Rate]:
    """Run an experiment over a dataset, map by map and layer by layer, and return what was measured."""
    states = TextStates(tuple(texts), options.truncate, options.max_tokens)
    settings = Settings(folds=options.folds, seed=options.seed)
    job = IdentifiabilityJob(states, EXPERIMENTS[options.experiment], options.distances, settings)
    parts = {f"{kind}-{layer}": (kind, (layer,)) for kind in options.maps for layer in range(model.n_layers)}
    rows_by_part = run.parts(model, job, parts, what="maps", prepare=lambda: states.of(model, run.progress))
    rows = [restored_row(row) for rows in rows_by_part for row in rows]
    return [Rate(**row)._replace(model=model.name) for row in rows]  # it may have been renamed since a part was kept


def identifiability_tables(
    model: Model, texts: Iterable[AnyText], run: Run, options: IdentifiabilityOptions
) -> dict[str, "DataFrame"]:
    """Run an experiment over a dataset into a run's folder; `tables.TOKENS` describes its tables.

    Layers, folds and texts count from 0.
    """
    texts = list(texts)
    fit = identifiability_result(identifiability_rates(model, texts, run, options), model.provenance(""))
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    lengths = [len(text) for text in encoded]
    tables = {"texts": texts_table(texts, lengths), "rates": fit.rates, "summary": fit.summary}
    write_tables(run.store, tables, TOKENS)
    return tables


_STORED = {  # columns are layers and noises
    **dict.fromkeys(("recovered", "winner", "runner_up"), Stored("token")),
    **dict.fromkeys(("margin", "winner_distance", "runner_up_distance", "own_distance"), Stored("token", real=True)),
}


@dataclass(frozen=True)
class InversionJob:
    """Inverts every token of one text, in all layers and with all noises in one pass over the vocabulary."""

    options: InversionOptions
    what = "inversion, tokens"
    stored = _STORED
    _inversions: dict[str, Inversion] = field(default_factory=dict, compare=False, repr=False)

    def cost(self, length: int) -> float:
        """Return the number of tokens; each is searched for in the whole vocabulary."""
        return float(length)

    def merged(self, parts: Sequence[Numbers]) -> Numbers:
        """Return nothing: every array has a row per token."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_inversions": {}}  # not sent to other processes

    def compute(self, model: Model, task: list[AnyText], progress: Progress) -> dict[str, Tensor]:
        """Return arrays (position, aim), with the noises of a layer one after another."""
        if model.fingerprint not in self._inversions:
            self._inversions[model.fingerprint] = Inversion.of(model, self.options, steps=0, depth=model.n_layers)
        inversion = self._inversions[model.fingerprint]
        (reading,) = prepare_texts(model, task, truncate=self.options.truncate, max_tokens=self.options.max_tokens)
        n = len(reading.tokens)
        tokens = 0.0

        def tick(count: float | int) -> None:
            nonlocal tokens
            tokens += count / len(inversion.candidates.ids)
            progress("", int(tokens + 1e-6), n)

        sought = inversion.sought(reading, tuple(range(model.n_layers)), tuple(range(n)))
        arrays = replace(inversion, tick=tick).arrays(sought)
        return {name: array.mT for name, array in arrays.items()}


def inversion_tables(
    model: Model, texts: Iterable[AnyText], run: Run, options: InversionOptions
) -> dict[str, "DataFrame"]:
    """Invert every token of a dataset into a run's folder; `tables.INVERSION` describes the tables.

    Layers, positions and texts count from 0.
    """
    texts = list(texts)
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens)
    numbers = inverted(model, texts, run, options)
    tokens = _token_table(model, encoded, numbers, options.noises)
    tables = {
        "texts": texts_table(texts, [len(text) for text in encoded]),
        "inversion": _summary(tokens, ["layer", "noise"]),
        "positions": _summary(tokens, ["layer", "noise", "position"]),
        "tokens": tokens,
    }
    write_tables(run.store, tables, INVERSION)
    return tables


def inverted(model: Model, texts: Sequence[AnyText], run: Run, options: InversionOptions) -> Numbers:
    """Invert every token of all texts; return the numbers with a row per token."""
    check_continues(model)
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens)

    def warn_of_duration(lengths: list[int]) -> None:
        Inversion.of(model, options, steps=sum(lengths), depth=model.n_layers)  # it warns if that takes long

    return run.texts(model, InversionJob(options), texts, encoded, prepare=warn_of_duration)


def _token_table(
    model: Model, encoded: list[EncodedText], numbers: Numbers, noises: tuple[float | int, ...]
) -> "DataFrame":
    from pandas import DataFrame, MultiIndex, concat

    names = ["text", "layer", "noise", "position"]
    frames = []
    start = 0
    for number, text in enumerate(encoded):
        values = [[number], range(model.n_layers), [float(noise) for noise in noises], range(len(text))]
        index = MultiIndex.from_product(values, names=names)
        rows = slice(start, start + len(text))
        columns: dict[str, Any] = {name: array[rows].mT.flatten().numpy() for name, array in numbers.items()}
        tokens = text.tokens * (len(index) // len(text))
        frames.append(DataFrame({"token": tokens, **columns}, index).reset_index())
        start = rows.stop
    table: Any = concat(frames, ignore_index=True)
    words = token_words(model, {*table["winner"].tolist(), *table["runner_up"].tolist()})
    for name in ("winner", "runner_up"):
        table[f"{name}_token"] = [words[str(token)] for token in table[name]]
    reals = table.select_dtypes("floating").columns
    return table.astype(dict.fromkeys(reals, float))[[*INVERSION["tokens"].columns]]


def _summary(tokens: "DataFrame", by: list[str]) -> "DataFrame":
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
