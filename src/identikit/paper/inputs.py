"""The numbers that figures and claims share: each input is computed once per model and dataset, and kept.

An input computes plain numbers into its own folder, part by part, so that a stopped run resumes where it left off;
`Input.read` makes them into the tables that `Evidence` holds. Computing needs no pandas, so it runs on a bare GPU
machine. The library counts layers and heads from 0, the paper from 1: only `from_one` converts between them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from identikit.attention import certainty
from identikit.attention import dataset as attention_tables
from identikit.attention.dataset import AttentionOptions, attention_statistics
from identikit.attention.effective import effective_attention
from identikit.attribution import dataset as attribution_tables
from identikit.attribution.attribute import token_attribution
from identikit.attribution.dataset import AttributionOptions, PerToken, attribution_statistics
from identikit.errors import InputError
from identikit.maths.jacobian import NORMS
from identikit.maths.mixing import Mixing
from identikit.maths.neighbours import DISTANCES
from identikit.models.machine import device_name
from identikit.paper import collapse
from identikit.paper.texts import PASSAGE, PASSAGE_ROWS, PIECES, SENTENCE
from identikit.paper.work import Work
from identikit.results.files import plain
from identikit.results.provenance import text_hash
from identikit.runs.run import Run, restored_row
from identikit.runs.store import COMPUTED, Store
from identikit.shapes import Tensor
from identikit.texts.text import Text
from identikit.tokens.dataset import IdentifiabilityJob
from identikit.tokens.experiments import EXPERIMENTS, Experiment
from identikit.tokens.protocol import BLOCKS, FOLDS, Settings
from identikit.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame

LEARNED = ("linear", "mlp")
TAGS = "tags.json"  # kept beside contributions, so that figures by tag can be drawn where there is no tagger
COUNTED = ("layer", "test_layer", "head")  # columns that count layers and heads

Numbers = TypeVar("Numbers")


@dataclass(frozen=True)
class Input(Generic[Numbers]):
    """Numbers that are computed once per model and dataset, and kept in a folder.

    - `tables`: the names of the tables that they make
    - `compute`: computes what the folder does not hold yet; `frames`: makes the tables from the numbers
    - `options`: the names of the `PaperOptions` that they depend on
    - `why_not`: returns why a model or its texts cannot have them; None if they can
    """

    name: str
    tables: tuple[str, ...]
    compute: Callable[[Work, Store], Numbers]
    frames: "Callable[[Numbers], dict[str, DataFrame]]"
    options: tuple[str, ...] = ()
    why_not: Callable[[Work], str | None] = lambda work: None

    def store(self, work: Work) -> Store:
        """Return the input's folder."""
        name = re.sub("[^a-zA-Z0-9.-]+", "_", work.data.rpartition("/")[2])
        if name != work.data:  # a file, which may be moved
            name = f"{name}-{text_hash(work.texts)[:8]}"
        settings = {
            "texts": text_hash(work.texts),
            "pieces": PIECES,
            "weights": work.model.fingerprint,
            "dtype": str(work.model.dtype),
            "threads": work.engine.threads,
            "version": __version__,
            **{option: getattr(work.options, option) for option in self.options},
        }
        recorded = {"data": {"source": work.data}, "model": {"name": work.model.name}}
        return Store(f"{work.out}/inputs/{name}/{self.name}", settings, recorded)

    def numbers(self, work: Work) -> Numbers:
        """Return the input's numbers; what its folder keeps is not computed again."""
        store = self.store(work)
        numbers = self.compute(work, store)
        if not store.has(COMPUTED):
            origin = work.model.provenance("")
            record = {
                "device": device_name(work.model.device),
                "versions": origin.versions,
                "revision": origin.revision,
            }
            store.write(COMPUTED, json.dumps(record, indent=1).encode())
        return numbers

    def read(self, work: Work) -> "dict[str, DataFrame]":
        """Return the input's tables, in which layers and heads count from 1."""
        return self.frames(self.numbers(work))


def from_one(frames: "Mapping[str, DataFrame]") -> "dict[str, DataFrame]":
    """Convert tables that count layers and heads from 0 to the paper's counting from 1."""
    converted = {}
    for name, frame in frames.items():
        columns = [column for column in COUNTED if column in frame]
        converted[name] = frame.assign(**{column: frame[column] + 1 for column in columns})
    return converted


# Attention and attribution


def _attention(work: Work, store: Store) -> dict[str, Tensor]:
    options = AttentionOptions(truncate=True, max_tokens=PIECES)
    return attention_statistics(work.model, work.texts, Run(store, work.engine, progress=work.progress), options)


def _intervals(work: Work, store: Store) -> dict[str, Tensor]:
    options = AttentionOptions(truncate=True, max_tokens=PIECES, intervals=work.options.rows, seed=work.options.seed)
    run = Run(store, work.engine, progress=work.progress)
    return attention_statistics(work.model, work.texts, run, options, only_intervals=True)


Contributions = tuple[Mixing, PerToken, list[str] | None]  # with the tag of each token, where they are tagged


def _attribution(norm: str) -> Input:
    """Return the input of contributions under a norm."""

    def compute(work: Work, store: Store) -> Contributions:
        options = AttributionOptions(
            probes="exact" if norm == "sum" else work.options.probes,  # one direction per target: exact is cheap there
            norm=norm,
            precision=work.options.precision,
            seed=work.options.seed,
            truncate=True,
            max_tokens=PIECES,
        )
        run = Run(store, work.engine, progress=lambda what, done, total: work.progress(f"{norm} {what}", done, total))
        statistics = attribution_statistics(work.model, work.texts, run, options)
        tags = store.usable(TAGS, store.read_json)
        if tags is None and work.tags is not None:
            tags = work.tags
            store.write_json(TAGS, tags)
        return *statistics, tags

    def frames(contributions: Contributions) -> "dict[str, DataFrame]":
        tables = from_one(attribution_tables.frames(*contributions))
        return {f"{name} {norm}": frame for name, frame in tables.items()}

    def why_not(work: Work) -> str | None:
        sampled = norm == "spectral" and work.options.probes != "exact"
        return "needs every direction: leave out --first" if sampled else None

    names = tuple(f"{name} {norm}" for name in ("own", "groups", "offsets", "tags"))
    return Input(f"attribution-{norm}", names, compute, frames, ("probes", "precision", "seed"), why_not)


# Token identifiability: each kind of map is a file of rows

Rows = list[dict[str, Any]]
_BY_SHARE = EXPERIMENTS["generalisation"]._replace(splits=("test",))
_PREVIOUS = EXPERIMENTS["previous layer"]


def _frame(rows: Rows) -> "DataFrame":
    from pandas import DataFrame

    return DataFrame([restored_row(row) for row in rows])


def _identity(
    name: str,
    kinds: tuple[str, ...],
    experiment: Experiment,
    *,
    folds: int = FOLDS,
    distances: tuple[str, ...] = DISTANCES,
    last_but_one: bool = False,
) -> Input:
    """Return an input of token identifiability, in at most `folds` folds; maps are of all layers, or of one."""

    def possible_kinds(work: Work) -> list[str]:
        has_naive = work.model.d_input == work.model.d_model  # such a map needs inputs as wide as hidden vectors
        return [kind for kind in kinds if has_naive or kind != "naive"]

    def compute(work: Work, store: Store) -> Rows:
        options = work.options
        settings = Settings(
            folds=min(folds, options.folds),
            seed=options.seed,
            learning_rates=options.learning_rates,
            epochs=options.epochs,
        )
        layers = (max(work.model.n_layers - 2, 0),) if last_but_one else None
        job = IdentifiabilityJob(work.states, experiment, distances, settings, options.precision, work.progress)
        parts = {kind: (kind, layers) for kind in possible_kinds(work)}
        rates = Run(store, work.engine).parts(work.model, job, parts, what=name)
        return [row | {"model": work.model.name} for rows in rates for row in rows]  # it may have been renamed since

    def why_not(work: Work) -> str | None:
        if len(work.texts) < BLOCKS:
            return f"needs at least {BLOCKS} texts"
        if not possible_kinds(work):
            return "not applicable: inputs and hidden vectors differ in size, so there is no naive map"
        return None

    options = ("folds", "learning_rates", "epochs", "precision", "seed")
    return Input(name, (name,), compute, lambda rows: from_one({name: _frame(rows)}), options, why_not)


# The paper's two examples, and the products of matrices


Example = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and what is noted with them


def _kept_in(file: str, compute: Callable[[Work], Example]) -> Callable[[Work, Store], Example]:
    """Return a function that reads a file of tensors; one that is missing or damaged is computed and written first."""

    def read_or_compute(work: Work, store: Store) -> Example:
        kept = store.usable(file, store.read_tensors)
        if kept is None:
            store.write_tensors(file, *compute(work))
            kept = store.read_tensors(file)
        return kept

    return read_or_compute


def _unreadable(text: Text, work: Work) -> str | None:
    """Return why a model cannot read a text; None if it can."""
    try:
        work.model.encode(text)
    except InputError as reason:
        return f"not applicable: {reason}"
    return None


def _passage(work: Work) -> Example:
    """Compute raw and effective attention of the passage in Appendix A.3, in the layer like the paper's fourth."""
    layer = max(round(work.model.n_layers * 4 / 12), 1) - 1
    (encoded,) = work.model.encode(PASSAGE)
    start = PASSAGE[1].index(PASSAGE_ROWS)
    queries: list[int] = []  # the pieces of the words that lie in that part of the second text
    for (first, last), (half, begin, end) in zip(encoded.words, encoded.characters, strict=True):
        if half == 1 and start <= begin and end <= start + len(PASSAGE_ROWS):
            queries += range(first, last)
    edges = effective_attention(work.model, PASSAGE, layers=[layer]).sel(layer=layer, query=queries)
    about = {"layer": layer, "tokens": encoded.tokens}
    return {"raw": edges.raw, "effective": edges.effective, "query": torch.tensor(queries)}, about


def _sentence(work: Work) -> Example:
    """Compute where the hidden vectors of Appendix C.4's sentence come from."""
    options = work.options
    attribution = token_attribution(
        work.model, SENTENCE, probes=options.probes, precision=options.precision, seed=options.seed
    )
    return {"contribution": attribution.contribution}, {"tokens": attribution.tokens}


def _collapse(work: Work, store: Store) -> Rows:
    """Read the measurements of collapsed products, computed first if there are none."""
    file = "collapse.json"
    rows = store.usable(file, store.read_json)
    if rows is None:
        rows = plain(collapse.measure(work.model, seed=work.options.seed))
        store.write_json(file, rows)
    return rows


def _grid(axes: dict[str, Sequence[int]], tokens: list[str]) -> "DataFrame":
    """Return a row for each combination of indices, and the token at each index of a token axis."""
    from pandas import MultiIndex

    frame = MultiIndex.from_product(list(axes.values()), names=list(axes)).to_frame(index=False)
    token_axes = [name for name in axes if name not in COUNTED]
    return frame.assign(**{f"{name}_token": [tokens[index] for index in frame[name]] for name in token_axes})


def _passage_frames(example: Example) -> "dict[str, DataFrame]":
    tensors, about = example
    tokens = about["tokens"]
    axes = {"head": range(len(tensors["raw"])), "query": tensors["query"].tolist(), "key": range(len(tokens))}
    raw = tensors["raw"].double().flatten().numpy()
    effective = tensors["effective"].double().flatten().numpy()
    frame = _grid(axes, tokens).assign(layer=about["layer"], raw=raw, effective=effective, null=raw - effective)
    columns = [*axes, "layer", "raw", "effective", "null", "query_token", "key_token"]
    return from_one({"passage": frame.filter(columns)})


def _sentence_frames(example: Example) -> "dict[str, DataFrame]":
    tensors, about = example
    contribution = tensors["contribution"]
    positions = range(len(about["tokens"]))
    frame = _grid({"layer": range(len(contribution)), "input": positions, "output": positions}, about["tokens"])
    return from_one({"sentence": frame.assign(contribution=contribution.double().flatten().numpy())})


_ALL: tuple[Input[Any], ...] = (
    Input(
        "attention",
        ("correlation", "correlation_by_layer", "correlation_by_head", "null_dimension", "types"),
        _attention,
        lambda numbers: from_one(attention_tables.frames(numbers)),
    ),
    Input(
        "intervals",
        ("intervals", "intervals_by_length", "groups"),
        _intervals,
        lambda numbers: from_one(certainty.frames(numbers)),
        ("rows", "seed"),
    ),
    *(_attribution(norm) for norm in NORMS),
    _identity("rates", ("naive", *LEARNED), Experiment(on_all_layers=True, splits=("test", "train"))),
    _identity("shares", ("mlp",), _BY_SHARE, folds=1, distances=("l2",), last_but_one=True),
    _identity("previous", ("naive", *LEARNED), _PREVIOUS, folds=1),
    _identity("untuned", ("naive",), _PREVIOUS),  # no map is trained, so all folds cost nothing
    _identity("finetuned", ("naive",), _PREVIOUS),
    _identity("neighbours", LEARNED, EXPERIMENTS["neighbours"], folds=1),
    Input(
        "passage",
        ("passage",),
        _kept_in("passage.safetensors", _passage),
        _passage_frames,
        why_not=partial(_unreadable, PASSAGE),
    ),
    Input(
        "sentence",
        ("sentence",),
        _kept_in("sentence.safetensors", _sentence),
        _sentence_frames,
        ("probes", "precision", "seed"),
        partial(_unreadable, SENTENCE),
    ),
    Input("collapse", ("collapse",), _collapse, lambda rows: {"collapse": _frame(rows)}, ("seed",)),  # counts from 1
)
INPUTS: Mapping[str, Input[Any]] = {entry.name: entry for entry in _ALL}
INPUT_OF: Mapping[str, Input[Any]] = {table: entry for entry in _ALL for table in entry.tables}
"""The input that each table is made from."""
