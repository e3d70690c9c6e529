"""Hidden Token Attribution over a dataset, as tidy tables: what Figures 3, 4, 18 and 26 to 37 are drawn from."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from identikit.attribution.attribute import CostWarning, foresee, mixing, token_attribution
from identikit.maths.mixing import BINS, GROUPS, Mixing, Offsets, boxes
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.runs.local import Count, remaining, run_shards
from identikit.runs.store import Store, write_tables
from identikit.shapes import Tensor
from identikit.text import Encoded, Text

if TYPE_CHECKING:
    from pandas import DataFrame

Tagger = Callable[[Encoded], tuple[str, ...]]
_PLAIN = ("outweighed", "group_sums", "group_tokens")
_OFFSETS = ("offsets", "to_cls", "around_separator")


@dataclass(frozen=True)
class AttributionOptions:
    """How a dataset is attributed: see `token_attribution`."""

    probes: int | str = "exact"
    norm: str = "frobenius"
    source: str = "before"
    precision: str = "full"
    seed: int = 0
    truncate: bool = False
    max_tokens: int | None = None


def attribution_tables(
    model: Model,
    texts: Iterable[Text],
    store: Store,
    options: AttributionOptions = AttributionOptions(),  # noqa: B008 - frozen
    *,
    tagger: Tagger | None = None,
    progress: Progress = silent,
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset, shard by shard, into a store; layers count from 0."""
    whole, _ = attribution_statistics(model, list(texts), store, options, tagger=tagger, progress=progress)
    tables = frames(whole)
    write_tables(store, tables)
    return tables


def attribution_statistics(
    model: Model,
    texts: list[Text],
    store: Store,
    options: AttributionOptions,
    *,
    tagger: Tagger | None = None,
    progress: Progress = silent,
) -> tuple[Mixing, None]:
    """Gather the readings of a dataset, shard by shard, each kept in a store; this needs no pandas."""
    cut: dict[str, Any] = {"truncate": options.truncate, "max_tokens": options.max_tokens}
    asked = {name: value for name, value in asdict(options).items() if name not in cut}
    encoded = model.encode(texts, **cut)
    lengths = [len(one) for one in encoded]
    if ahead := remaining(lengths, store):
        foresee(model, ahead, **asked)
        if tagger is not None:
            tagger(encoded[0])  # a tagger that cannot work says so before anything is computed

    def compute(shard: list[Text], told: Count) -> dict[str, Tensor]:
        tags = None if tagger is None else [tagger(one) for one in model.encode(shard, **cut)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CostWarning)  # the cost of the whole was foreseen above
            results = token_attribution(model, shard, **cut, progress=told, **asked)
        return pack(mixing(results, tags))

    counted = partial(progress, "attribution, tokens")
    shards = run_shards(texts, compute, store, lengths=lengths, progress=counted)
    return merged(unpack(shard) for shard in shards), None


def merged(parts: Iterable[Mixing]) -> Mixing:
    """Return the statistics of all texts together."""
    parts = iter(parts)
    whole = next(parts)
    for part in parts:
        whole = whole.merge(part)
    return whole


def pack(statistics: Mixing) -> dict[str, Tensor]:
    """Return statistics as named tensors, for a file; of the bins, which are mostly empty, those that are not."""
    packed = {name: getattr(statistics, name) for name in _PLAIN} | {"tokens": torch.tensor(statistics.tokens)}
    for name in _OFFSETS:
        part: Offsets = getattr(statistics, name)
        packed |= {f"{name} sums": part.sums, f"{name} pairs": part.pairs}
    binned = {"own": statistics.own} | {f"tag {tag}": counts for tag, counts in statistics.by_tag.items()}
    for name, counts in binned.items():
        filled = counts.flatten().nonzero().squeeze(1)
        packed |= {f"{name} bins": filled, f"{name} counts": counts.flatten()[filled]}
    return packed


def unpack(packed: Mapping[str, Tensor]) -> Mixing:
    """Return statistics from what `pack` made of them."""
    fields: dict[str, Any] = {name: packed[name] for name in _PLAIN}
    fields |= {name: Offsets(packed[f"{name} sums"], packed[f"{name} pairs"]) for name in _OFFSETS}
    empty = torch.zeros(len(fields["outweighed"]), BINS, dtype=torch.long)

    def counts(name: str) -> Tensor:
        flat = empty.flatten().index_put((packed[f"{name} bins"],), packed[f"{name} counts"])
        return flat.view_as(empty)

    tags = (name.removesuffix(" bins") for name in packed if name.startswith("tag ") and name.endswith(" bins"))
    by_tag = {name.removeprefix("tag "): counts(name) for name in tags}
    return Mixing(tokens=int(packed["tokens"]), own=counts("own"), by_tag=by_tag, **fields)


def frames(whole: Mixing) -> dict[str, "DataFrame"]:
    """Return statistics as the tables of `attribution_tables`."""
    import pandas as pd

    layers = range(len(whole.own))

    def box(values: Tensor) -> dict[str, Any]:
        return dict(zip(("low", "lower", "median", "upper", "high"), values.T.numpy(), strict=True))

    own = {"layer": layers, **box(boxes(whole.own)), "outweighed": whole.outweighed_share().numpy()}
    names = [str(first) if first == last else f"{first}-{last or ''}" for first, last in GROUPS]
    groups = pd.DataFrame(whole.group_shares().numpy(), columns=names, index=pd.Index(layers, name="layer"))
    tables = {
        "own": pd.DataFrame(own),
        "groups": groups.reset_index().melt("layer", var_name="distance", value_name="share"),
        "offsets": pd.concat([_offset_table(name, getattr(whole, name)) for name in _OFFSETS], ignore_index=True),
    }
    if whole.by_tag:
        found = [
            pd.DataFrame({"tag": tag, "tokens": int(whole.by_tag[tag][0].sum()), "layer": layers, **box(values)})
            for tag, values in whole.tag_boxes().items()
        ]
        tables["tags"] = pd.concat(found, ignore_index=True)
    return tables


def _offset_table(name: str, part: Offsets) -> "DataFrame":
    import pandas as pd

    share, mean = part.share(), part.mean()
    shape = share.shape
    return pd.DataFrame(
        {
            "view": name,
            "layer": torch.arange(shape[0])[:, None].expand(shape).flatten().numpy(),
            "offset": part.positions.expand(shape).flatten().numpy(),
            "share": share.flatten().numpy(),
            "mean": mean.flatten().numpy(),
        }
    )
