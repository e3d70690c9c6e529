"""Attention to and from types of tokens, as in the paper's Figures 1b, 1c and 5 (after Clark et al. 2019).

The attention to a type is summed over the keys of the type and divided by the number of queries, all or those of the
source; texts are then averaged. It is not a mean per edge: a text with many commas gives them more attention.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from identikit.attention.layer import Layer
from identikit.attention.result import EffectiveAttention
from identikit.results.table import tidy_frame
from identikit.shapes import Float, Tensor

if TYPE_CHECKING:
    from pandas import DataFrame

TYPES = ("cls", "sep", "punctuation", "other")
SOURCES = ("all", "rest", *TYPES)
"""Which queries look: all, all but [SEP] ("other" in Clark's figure and in Fig. 5), or those of a type."""

MAPS = ("raw", "effective", "null_space")
"""The parts of attention; null_space is raw − effective (a cell "null" would be read as missing)."""


def token_types(tokenizer: object, tokens: Sequence[str]) -> tuple[str, ...]:
    """Return the type of each token: what opens a text, what separates or closes it, period or comma, or other."""
    opening = {"[CLS]", getattr(tokenizer, "cls_token", None), getattr(tokenizer, "bos_token", None)}
    closing = {getattr(tokenizer, "sep_token", None), getattr(tokenizer, "eos_token", None)} - opening
    types = []
    for token in tokens:
        word = token.lstrip("Ġ▁").removeprefix("##").removesuffix("</w>")
        if token in opening:
            types.append("cls")
        elif token in closing:
            types.append("sep")
        else:
            types.append("punctuation" if word in {".", ","} else "other")
    return tuple(types)


def type_sums(result: EffectiveAttention) -> tuple[Float[Tensor, "map layer head source target"], Tensor]:
    """Return the attention from sources to types, divided by the number of source queries, and that number.

    The maps are raw and effective. A source without tokens in the text has number 0 and attention 0. Sums over texts,
    with the number of texts that have the source, merge exactly.
    """
    captured = result.captured()
    tokenizer = captured.text_run.model.tokenizer
    query_types, key_types = (
        torch.tensor([[token_type == name for name in TYPES] for token_type in token_types(tokenizer, tokens)]).double()
        for tokens in (result.tokens, result.keys)
    )
    everyone = torch.ones(len(query_types), 1, dtype=torch.float64)
    source = torch.cat([everyone, everyone - query_types[:, [TYPES.index("sep")]], query_types], dim=1)
    query_counts = source.sum(0)
    weights = source / query_counts.clamp(min=1)
    layers = [_attention_from_groups(layer, weights).cpu() @ key_types for layer in captured.layers]
    return torch.stack(layers, dim=1), query_counts


def _attention_from_groups(layer: Layer, groups: Float[Tensor, "query group"]) -> Float[Tensor, "map head group key"]:
    """Return the raw and the effective attention that each key receives from groups of queries."""
    groups = groups.to(layer.heads.device)
    heads = torch.arange(len(layer.heads), device=layer.heads.device)
    received = groups.new_zeros(2, len(heads), groups.shape[1], layer.call.key.shape[2])
    for rows in layer.row_chunks():
        received[0] += groups[rows].mT @ layer.raw(heads, rows).double()
        received[1] += groups[rows].mT @ layer.effective(heads, rows, slice(None)).double()
    return received


def types_table(
    sums: Float[Tensor, "map layer head source target"], texts: Float[Tensor, "source"], layers: Sequence[int]
) -> "DataFrame":
    """Return averages over texts as a tidy table: map (one of `MAPS`), layer, head, source, target, attention, texts.

    `sums` are those of `type_sums`, added up over texts, and `texts` the number of texts that have each source.
    """
    means = sums / texts.clamp(min=1)[:, None]
    means = torch.cat([means, means[:1] - means[1:2]])
    axes = {"map": MAPS, "layer": layers, "head": range(sums.shape[2]), "source": SOURCES, "target": TYPES}
    counts = texts[:, None].expand(means.shape).long()
    return tidy_frame(axes, {"attention": means, "texts": counts}).query("texts > 0").reset_index(drop=True)
