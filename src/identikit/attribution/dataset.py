"""Hidden Token Attribution over a dataset, as tidy tables: what Figures 3, 4, 18 and 26 to 37 are drawn from."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from identikit.attribution.attribute import attribute, mixing
from identikit.attribution.plan import cost_warning
from identikit.attribution.request import AttributionOptions
from identikit.attribution.tables import ATTRIBUTION
from identikit.checks import known_name
from identikit.maths.jacobian import NORMS
from identikit.maths.mixing import (
    GROUPS,
    Mixing,
    Offsets,
    outweighed,
    own_boxes,
    own_contribution,
    tag_boxes,
)
from identikit.models.model import Model
from identikit.models.text_run import prepare_texts
from identikit.progress import Progress
from identikit.results.table import texts_table
from identikit.runs.run import Numbers, Run, Stored, texts_per_group
from identikit.runs.store import write_tables
from identikit.shapes import Bool, Float, Tensor
from identikit.texts.text import AnyText, EncodedText

if TYPE_CHECKING:
    from pandas import DataFrame

Tagger = Callable[[EncodedText], tuple[str, ...]]
_GROUPS = ("group_sums", "group_tokens")
_OFFSETS = ("offsets", "to_cls", "around_separator")


class PerToken(NamedTuple):
    """What is stored of each token of all texts, in order."""

    own: Float[Tensor, "token layer"]
    outweighed: Bool[Tensor, "token layer"]


_STORED = {
    **dict.fromkeys(_GROUPS, Stored()),
    **dict.fromkeys((f"{name} {kind}" for name in _OFFSETS for kind in ("sums", "pairs")), Stored()),
    "token own": Stored("token", real=True),
    "token outweighed": Stored("token"),
}


@dataclass(frozen=True)
class AttributionJob:
    """Attributes texts, each by itself."""

    options: AttributionOptions
    what = "attribution, tokens"
    stored = _STORED

    def cost(self, length: int) -> float:
        """Return a sum of products that grow with the square of the length and with its cube."""
        return length * length * (length + 256.0)

    def compute(self, model: Model, task: list[AnyText], progress: Progress) -> dict[str, Tensor]:
        """Return the statistics of the texts together, and the readings of each token."""
        options = self.options
        readings = prepare_texts(model, task, truncate=options.truncate, max_tokens=options.max_tokens)
        results = attribute(readings, options.checked(model), progress=progress)
        maps = [result.whole().cpu() for result in results]
        return pack(mixing(results)) | {
            "token own": torch.cat([own_contribution(contribution).mT for contribution in maps]),
            "token outweighed": torch.cat([outweighed(contribution).mT for contribution in maps]),
        }

    def merged(self, parts: Sequence[Numbers]) -> Numbers:
        """Return the statistics of all texts together."""
        return pack(reduce(Mixing.merge, map(unpack, parts)))


def encoded_texts(model: Model, texts: Sequence[AnyText], options: AttributionOptions) -> list[EncodedText]:
    """Return texts as tokens."""
    return model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)


def attribution_tables(
    model: Model, texts: Iterable[AnyText], run: Run, options: AttributionOptions, *, tagger: Tagger | None = None
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset into a run's folder; `tables.ATTRIBUTION` describes them.

    All layers and tokens are read; layers, positions and texts count from 0. With a `tagger`, own contributions are
    also given by tag.
    """
    texts = list(texts)
    encoded = encoded_texts(model, texts, options)
    if tagger is not None:
        tagger(encoded[0])  # a tagger that cannot work says so before anything is computed
    statistics = attribution_statistics(model, texts, run, options)
    tags = None if tagger is None else [tag for text in encoded for tag in tagger(text)]
    tables = {
        "texts": texts_table(texts, [len(text) for text in encoded]),
        "tokens": _token_table(encoded, statistics[1]),
        **frames(*statistics, tags),
    }
    write_tables(run.store, tables, ATTRIBUTION)
    return tables


def attribution_statistics(
    model: Model, texts: Sequence[AnyText], run: Run, options: AttributionOptions
) -> tuple[Mixing, PerToken]:
    """Gather the readings of a dataset, and those of each token; this needs no pandas."""
    known_name("norm", options.norm, tuple(NORMS))  # Fisher's is of the last layer alone
    encoded = encoded_texts(model, texts, options)

    def warn_of_duration(lengths: list[int]) -> None:
        if warning := cost_warning(model, lengths, options.checked(model)):
            warnings.warn(warning, stacklevel=5)

    job = AttributionJob(options)
    numbers = run.texts(model, job, texts, encoded, group_size=texts_per_group(model), prepare=warn_of_duration)
    return unpack(numbers), PerToken(*(numbers[f"token {name}"] for name in PerToken._fields))


def pack(statistics: Mixing) -> Numbers:
    """Return statistics as named tensors, for a file."""
    packed = {name: getattr(statistics, name) for name in _GROUPS}
    for name in _OFFSETS:
        offsets: Offsets = getattr(statistics, name)
        packed |= {f"{name} sums": offsets.sums, f"{name} pairs": offsets.pairs}
    return packed


def unpack(packed: Mapping[str, Tensor]) -> Mixing:
    """Return the statistics that `pack` turned into tensors."""
    fields: dict[str, Any] = {name: packed[name] for name in _GROUPS}
    fields |= {name: Offsets(packed[f"{name} sums"], packed[f"{name} pairs"]) for name in _OFFSETS}
    return Mixing(**fields)


def frames(statistics: Mixing, tokens: PerToken, tags: Sequence[str] | None = None) -> dict[str, "DataFrame"]:
    """Return statistics over all texts as tables; `tags`, if any, has one entry per token."""
    import pandas as pd

    layers = range(len(statistics.group_sums))
    own_contributions = tokens.own.mT

    def box(values: Tensor) -> dict[str, object]:
        return dict(zip(("low", "lower", "median", "upper", "high"), values.T.numpy(), strict=True))

    share = tokens.outweighed.double().mean(0).numpy()
    names = [str(first) if first == last else f"{first}-{last or ''}" for first, last in GROUPS]
    groups = pd.MultiIndex.from_product([layers, names], names=["layer", "distance"]).to_frame(index=False)
    tables = {
        "own": pd.DataFrame({"layer": layers, **box(own_boxes(own_contributions)), "outweighed": share}),
        "groups": groups.assign(share=statistics.group_shares().flatten().numpy()),
        "offsets": pd.concat([_offset_table(name, getattr(statistics, name)) for name in _OFFSETS], ignore_index=True),
    }
    if tags is not None:
        counts = Counter(tags)
        by_tag = [
            pd.DataFrame({"tag": tag, "tokens": counts[tag], "layer": layers, **box(values)})
            for tag, values in tag_boxes(own_contributions, tags).items()
        ]
        tables["tags"] = pd.concat(by_tag, ignore_index=True)
    return tables


def _offset_table(name: str, offsets: Offsets) -> "DataFrame":
    import pandas as pd

    share = offsets.share()
    shape = share.shape
    return pd.DataFrame(
        {
            "view": name,
            "layer": torch.arange(shape[0])[:, None].expand(shape).flatten().numpy(),
            "offset": offsets.positions.expand(shape).flatten().numpy(),
            "share": share.flatten().numpy(),
            "mean": offsets.mean().flatten().numpy(),
        }
    )


def _token_table(encoded: list[EncodedText], tokens: PerToken) -> "DataFrame":
    from pandas import DataFrame

    n_layers = tokens.own.shape[1]
    rows = [
        (index, position, token) for index, text in enumerate(encoded) for position, token in enumerate(text.tokens)
    ]
    frame = DataFrame(rows, columns=["text", "position", "token"])
    frame = frame.loc[frame.index.repeat(n_layers)].reset_index(drop=True)
    return frame.assign(
        layer=torch.arange(n_layers).repeat(len(rows)).numpy(),
        own_contribution=tokens.own.flatten().numpy(),
        outweighed=tokens.outweighed.flatten().numpy(),
    )
