"""What figures and claims share: each input is computed once for a model and a dataset, and kept.

An input gathers plain numbers into its own folder, part by part, so that a stopped run resumes where it left off;
`tables` makes them into the tables that `Evidence` holds. Gathering needs no pandas, so it runs on a bare GPU machine.
The library counts layers and heads from 0, the paper from 1: `from_one` is the one place that turns one into the other.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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

Gathered = TypeVar("Gathered")


@dataclass(frozen=True)
class Input(Generic[Gathered]):
    """One input: `gather` computes what its folder does not hold yet, `frames` makes it into the tables it `gives`.

    `reads` are the settings that it depends on; `unmet` says why a piece of work cannot have it, if it cannot.
    """

    name: str
    gives: tuple[str, ...]
    gather: Callable[[Work, Store], Gathered]
    frames: "Callable[[Gathered], dict[str, DataFrame]]"
    reads: tuple[str, ...] = ()
    unmet: Callable[[Work], str | None] = lambda work: None

    def store(self, work: Work, out: str) -> Store:
        """Return the input's folder under `out`."""
        name = re.sub("[^a-zA-Z0-9.-]+", "_", work.data.rpartition("/")[2])
        if name != work.data:  # a file, which may be moved
            name = f"{name}-{text_hash(work.texts)[:8]}"
        chosen = asdict(work.effort) | {"precision": work.precision, "seed": work.seed}
        settings = {
            "texts": text_hash(work.texts),
            "pieces": PIECES,
            "weights": work.model.fingerprint,
            "dtype": str(work.model.dtype),
            "threads": work.engine.threads,
            "version": __version__,
            **{name: chosen[name] for name in self.reads},
        }
        recorded = {"data": {"source": work.data}, "model": {"name": work.model.name}}
        return Store(f"{out}/inputs/{name}/{self.name}", settings, recorded)

    def gathered(self, work: Work, store: Store) -> Gathered:
        """Return the input's numbers; what its folder keeps is not computed again."""
        numbers = self.gather(work, store)
        if not store.has(COMPUTED):
            about = work.model.provenance("")
            kept = {"device": device_name(work.model.device), "versions": about.versions, "revision": about.revision}
            store.write(COMPUTED, json.dumps(kept, indent=1).encode())
        return numbers

    def tables(self, work: Work, store: Store) -> "dict[str, DataFrame]":
        """Return the input's tables, in which layers and heads count from 1."""
        return self.frames(self.gathered(work, store))


def from_one(frames: "Mapping[str, DataFrame]") -> "dict[str, DataFrame]":
    """Return tables that count layers and heads from 0 as the paper counts them, from 1."""
    return {
        name: frame.assign(**{column: frame[column] + 1 for column in COUNTED if column in frame})
        for name, frame in frames.items()
    }


# Attention and attribution


def _attention(work: Work, store: Store) -> dict[str, Tensor]:
    options = AttentionOptions(truncate=True, max_tokens=PIECES)
    return attention_statistics(work.model, work.texts, Run(store, work.engine, progress=work.progress), options)


def _intervals(work: Work, store: Store) -> dict[str, Tensor]:
    options = AttentionOptions(truncate=True, max_tokens=PIECES, intervals=work.effort.rows, seed=work.seed)
    run = Run(store, work.engine, progress=work.progress)
    return attention_statistics(work.model, work.texts, run, options, only_intervals=True)


Contributions = tuple[Mixing, PerToken, list[str] | None]  # with the tag of each token, where they are tagged


def _attribution(norm: str) -> Input:
    def gather(work: Work, store: Store) -> Contributions:
        options = AttributionOptions(
            probes="exact" if norm == "sum" else work.effort.probes,  # one direction per target: exact is cheap there
            norm=norm,
            precision=work.precision,
            seed=work.seed,
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

    def frames(gathered: Contributions) -> "dict[str, DataFrame]":
        tables = from_one(attribution_tables.frames(*gathered))
        return {f"{name} {norm}": frame for name, frame in tables.items()}

    def unmet(work: Work) -> str | None:
        sampled = norm == "spectral" and work.effort.probes != "exact"
        return "needs every direction: leave out --first" if sampled else None

    names = tuple(f"{name} {norm}" for name in ("own", "groups", "offsets", "tags"))
    return Input(f"attribution-{norm}", names, gather, frames, ("probes", "precision", "seed"), unmet)


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
    """Return an input of token identifiability, in at most so many folds; maps are of all layers, or of one."""

    def possible(work: Work) -> list[str]:
        naive = work.model.d_input == work.model.d_model  # such a map needs inputs as wide as hidden vectors
        return [kind for kind in kinds if naive or kind != "naive"]

    def gather(work: Work, store: Store) -> Rows:
        effort = work.effort
        settings = Settings(
            folds=min(folds, effort.folds), seed=work.seed, learning_rates=effort.learning_rates, epochs=effort.epochs
        )
        layers = (max(work.model.n_layers - 2, 0),) if last_but_one else None
        job = IdentifiabilityJob(work.states, experiment, distances, settings, work.precision, work.progress)
        parts = {kind: (kind, layers) for kind in possible(work)}
        rates = Run(store, work.engine).parts(work.model, job, parts, what=name)
        return [row | {"model": work.model.name} for rows in rates for row in rows]  # it may have been renamed since

    def unmet(work: Work) -> str | None:
        if len(work.texts) < BLOCKS:
            return f"needs at least {BLOCKS} texts"
        if not possible(work):
            return "not applicable: inputs and hidden vectors differ in size, so there is no naive map"
        return None

    reads = ("folds", "learning_rates", "epochs", "precision", "seed")
    return Input(name, (name,), gather, lambda rows: from_one({name: _frame(rows)}), reads, unmet)


# The paper's two examples, and the products of matrices


Noted = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and what is noted with them


def _kept_in(file: str, compute: Callable[[Work], Any]) -> Callable[[Work, Store], Any]:
    """Return a way to gather what one file holds, computed and written if it is not there or damaged."""

    def gather(work: Work, store: Store) -> Any:
        as_json = file.endswith(".json")
        read = store.read_json if as_json else store.read_tensors
        kept = store.usable(file, read)
        if kept is not None:
            return kept
        if as_json:
            store.write_json(file, compute(work))
        else:
            store.write_tensors(file, *compute(work))
        return read(file)

    return gather


def _unread(text: Text, work: Work) -> str | None:
    """Say why a model cannot read a text, if it cannot."""
    try:
        work.model.encode(text)
    except InputError as reason:
        return f"not applicable: {reason}"
    return None


def _passage(work: Work) -> Noted:
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


def _sentence(work: Work) -> Noted:
    """Compute where the hidden vectors of Appendix C.4's sentence come from."""
    attribution = token_attribution(
        work.model, SENTENCE, probes=work.effort.probes, precision=work.precision, seed=work.seed
    )
    return {"contribution": attribution.contribution}, {"tokens": attribution.tokens}


def _places(axes: dict[str, Sequence[int]], tokens: list[str]) -> "DataFrame":
    """Return a row for each combination of places, and the token at each place that is one of the text's."""
    from pandas import MultiIndex

    frame = MultiIndex.from_product(list(axes.values()), names=list(axes)).to_frame(index=False)
    words = {f"{name}_token": [tokens[place] for place in frame[name]] for name in axes if name not in COUNTED}
    return frame.assign(**words)


def _passage_frames(gathered: Noted) -> "dict[str, DataFrame]":
    tensors, about = gathered
    tokens = about["tokens"]
    axes = {"head": range(len(tensors["raw"])), "query": tensors["query"].tolist(), "key": range(len(tokens))}
    raw = tensors["raw"].double().flatten().numpy()
    effective = tensors["effective"].double().flatten().numpy()
    frame = _places(axes, tokens).assign(layer=about["layer"], raw=raw, effective=effective, null=raw - effective)
    columns = [*axes, "layer", "raw", "effective", "null", "query_token", "key_token"]
    return from_one({"passage": frame.filter(columns)})


def _sentence_frames(gathered: Noted) -> "dict[str, DataFrame]":
    tensors, about = gathered
    contribution = tensors["contribution"]
    places = range(len(about["tokens"]))
    frame = _places({"layer": range(len(contribution)), "input": places, "output": places}, about["tokens"])
    return from_one({"sentence": frame.assign(contribution=contribution.double().flatten().numpy())})


INPUTS: Mapping[str, Input[Any]] = {
    given.name: given
    for given in (
        Input(
            "attention",
            ("correlation", "correlation_by_layer", "correlation_by_head", "null_dimension", "types"),
            _attention,
            lambda gathered: from_one(attention_tables.frames(gathered)),
        ),
        Input(
            "intervals",
            ("intervals", "intervals_by_length", "groups"),
            _intervals,
            lambda gathered: from_one(certainty.frames(gathered)),
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
            unmet=partial(_unread, PASSAGE),
        ),
        Input(
            "sentence",
            ("sentence",),
            _kept_in("sentence.safetensors", _sentence),
            _sentence_frames,
            ("probes", "precision", "seed"),
            partial(_unread, SENTENCE),
        ),
        Input(
            "collapse",
            ("collapse",),
            _kept_in("collapse.json", lambda work: plain(collapse.measure(work.model, seed=work.seed))),
            lambda rows: {"collapse": _frame(rows)},  # which counts from 1 already
            ("seed",),
        ),
    )
}
GIVER: Mapping[str, Input[Any]] = {table: given for given in INPUTS.values() for table in given.gives}
"""The input that gives each table."""
