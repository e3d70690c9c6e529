"""Measures of attention and roles of heads over a dataset, as tidy tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from identikit.attention.effective import captured_attention
from identikit.attention.measure import MeasuredText
from identikit.attention.reading_result import Survival
from identikit.attention.readings import READINGS
from identikit.attention.scores import ROLES, over_texts, scored
from identikit.attention.tables import MEASURES
from identikit.checks import known_names
from identikit.models.model import Model
from identikit.models.text_run import run_texts
from identikit.progress import Progress
from identikit.results.table import texts_table
from identikit.results.words import Column, Paragraph, Table, mean_and_error, means_of, percent
from identikit.runs.run import Numbers, Run, Stored
from identikit.runs.store import write_tables
from identikit.shapes import Tensor
from identikit.texts.text import Text

if TYPE_CHECKING:
    from pandas import DataFrame

_UNDECIDED = ("undecided", "order_undecided")
_ENDS = ("raw", "effective", "lower", "upper")


@dataclass(frozen=True)
class MeasuresOptions:
    """Which measures and roles of heads are read over a dataset, and what becomes of long texts."""

    measures: tuple[str, ...] = ("attention", "value norm", "mean", "norm", "rollout")
    scores: tuple[str, ...] = tuple(name for name, role in ROLES.items() if role.above is None)
    truncate: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        known_names("measures", self.measures, tuple(READINGS))
        known_names("scores", self.scores, tuple(ROLES))


@dataclass(frozen=True)
class MeasuresJob:
    """Reads measures of texts, and the roles of their heads."""

    options: MeasuresOptions
    what = "attention measures, tokens"

    @property
    def stored(self) -> dict[str, Stored]:
        """What is kept of each text."""
        undefined = Stored("text", real=True, undefined=True)
        return {"tokens": Stored("text"), "measures": undefined, "scores": undefined}

    def cost(self, length: int) -> float:
        """Return about how many programs there are, each as long as the text."""
        return float(length) ** 3

    def compute(self, model: Model, task: list[Text], progress: Progress) -> dict[str, Tensor]:
        """Return what is read from each text."""
        options = self.options
        layers = model.attention_layers
        texts = run_texts(model, task, layers=layers, truncate=options.truncate, max_tokens=options.max_tokens)
        tokens = torch.tensor([len(text.tokens) for text in texts])
        measures = []
        scores = []
        for text, done in zip(texts, tokens.cumsum(0).tolist(), strict=True):
            captured = captured_attention(text).captured()
            measured = MeasuredText(captured)
            found = [measured.overall(READINGS[name]).survival() for name in options.measures]
            measures.append(torch.tensor(found, dtype=torch.float64))
            scores.append(scored(captured, [ROLES[name] for name in options.scores]))
            progress(self.what, done, int(tokens.sum()))
        return {"tokens": tokens, "measures": torch.stack(measures), "scores": torch.stack(scores)}

    def merged(self, parts: Sequence[Numbers]) -> Numbers:
        """Return what is summed over texts, which is nothing."""
        return {}


def measures_tables(model: Model, texts: Iterable[Text], run: Run, options: MeasuresOptions) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset into a run's folder; `tables.MEASURES` describes them."""
    from pandas import DataFrame, MultiIndex

    texts = list(texts)
    numbers = measures_statistics(model, texts, run, options)
    tokens = numbers["tokens"].numpy()
    places = [range(len(texts)), options.measures]
    measures = MultiIndex.from_product(places, names=["text", "measure"]).to_frame(index=False)
    measures.insert(1, "tokens", tokens[measures["text"]])
    columns = dict(zip(Survival._fields, numbers["measures"].flatten(0, 1).mT.numpy(), strict=True))
    counts = dict.fromkeys(("rows", *_UNDECIDED), "int64")
    measures = DataFrame(measures.assign(**columns)).astype(counts)
    places = [options.scores, model.attention_layers, range(model.n_heads)]
    roles = MultiIndex.from_product(places, names=["score", "layer", "head"]).to_frame(index=False)
    means = over_texts(numbers["scores"], [ROLES[name] for name in options.scores])
    roles["texts"] = means["scored_texts"].repeat_interleave(len(roles) // len(options.scores)).numpy()
    for name in _ENDS:
        roles[name] = means[name].flatten().numpy()
        unknown = torch.full_like(means[name], torch.nan)
        roles[f"{name}_error"] = means.get(f"{name}_stderr", unknown).flatten().numpy()
    tables = {"texts": texts_table(texts, tokens.tolist()), "measures": measures, "roles": roles}
    write_tables(run.store, tables, MEASURES)
    return tables


def measures_report(tables: Mapping[str, "DataFrame"]) -> tuple[str, dict[str, object]]:
    """Say how much of each measure is determined: means over texts with their standard errors; and as numbers."""
    columns = {"determined": "determined share", "strongest": "strongest determined", "order": "certain order"}
    by: Any = tables["measures"].groupby("measure", sort=False)
    means = by[[*columns]].mean()
    errors = by[[*columns]].sem()
    undecided = by[[*_UNDECIDED]].sum().div(by["rows"].sum(), axis=0)
    rows = [(name, *zip(means.loc[name], errors.loc[name], strict=True), *undecided.loc[name]) for name in means.index]
    forms = [Column(heading, mean_and_error(2)) for heading in columns.values()]
    forms += [Column(heading, percent) for heading in ("strongest undecided", "order undecided")]
    note = Paragraph("In an undecided row only what is known counts, so that at least so much is determined.")
    shown = Table((Column("measure"), *forms), tuple(rows), notes=(note,))
    words = (
        "How much of each measure is the same in all alternatives, that is, in any attention with the same head "
        f"outputs.\n{means_of(len(tables['texts']))}\n\n{shown.to_text()}\n"
    )
    return words, {"texts": len(tables["texts"]), "measures": means.reset_index().to_dict("records")}


def measures_statistics(model: Model, texts: list[Text], run: Run, options: MeasuresOptions) -> dict[str, Tensor]:
    """Gather what is read from each text; this needs no pandas."""
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    return run.texts(model, MeasuresJob(options), texts, encoded, most=1)
