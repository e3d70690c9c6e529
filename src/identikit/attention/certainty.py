"""How certain attention is over a dataset: rows drawn at random, bounded, and summed up by text, layer and head.

A row's interval is the range of a weight over all attention with the same output; see `intervals`. Sums over the drawn
rows of a text are kept by layer and head, so texts can be gathered in any order.
"""

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from identikit.attention.effective import Layer
from identikit.attention.intervals import Bounding, bounds_of, membership
from identikit.attention.result import EffectiveAttention
from identikit.attention.token_types import token_types
from identikit.checks import shortened, whole_number
from identikit.errors import InputError
from identikit.maths.effective import effective_rows
from identikit.results.words import Column, Table, decimals, mean_and_error
from identikit.shapes import Float, Tensor

if TYPE_CHECKING:
    from pandas import DataFrame

ALL = "all"
GROUPS = ("special", "first", "cls", "sep", "punctuation")
"""The groups of keys: all special tokens; the first token; in models that are not causal, what opens a text and what
separates or closes it; period and comma."""

READ = ("rows", "free", "certain_mass", "strongest", "width", "certain", "undecided")
"""What is summed over rows; `runs.columns` says what each is."""

WEIGHTS = ("raw", "effective", "lower", "upper")

Place = tuple[int, int, int]
_UNLIMITED = Bounding("exact", seconds=math.inf)  # the caller has chosen how many rows


NUMBERS = ("row_sums", "group_sums", "value_size", "group_keys")
"""What `certainty` returns of each text."""


def checked_rows(rows: Any) -> int | str:
    """Return how many rows per text are asked for, or raise."""
    with suppress(InputError):
        return ALL if isinstance(rows, str) and rows == ALL else whole_number("intervals", rows)
    raise InputError(f"intervals={shortened(rows)} cannot be used: expected a number of rows per text, or {ALL!r}.")


def drawn_places(text: str, shape: tuple[int, int, int], rows: int | str, seed: int) -> list[Place]:
    """Draw rows of a text: layer, head and query, in order; the same for the same text (its hash) and seed."""
    total = math.prod(shape)
    if rows == ALL or int(rows) >= total:
        chosen: Sequence[int] = range(total)
    else:
        chosen = sorted(random.Random(f"{seed} {text}").sample(range(total), int(rows)))
    _, heads, queries = shape
    return [(place // (heads * queries), place // queries % heads, place % queries) for place in chosen]


def certainty(result: EffectiveAttention, rows: int | str, seed: int) -> dict[str, Tensor]:
    """Bound rows of a text, and sum up what they say by layer and head.

    - `row_sums`: the quantities `READ`, (layer, head, quantity)
    - `group_sums`: weight of groups of keys, (layer, head, group, weight), in the order of `GROUPS` and `WEIGHTS`
    - `value_size`: how large a group's values are, see `value_sizes`, (layer, head, group)
    - `group_keys`: how many keys each group has
    """
    captured: Any = result.source
    shape = len(result.layers), len(result.heads), len(result.tokens)
    places = drawn_places(result.provenance.text, shape, rows, seed)
    groups = token_groups(result)
    return {
        "row_sums": _summed(_of_rows(result, places), places, shape),
        "group_sums": _summed(_of_groups(result, places, [*groups.values()]), places, shape),
        "value_size": torch.stack([value_sizes(part, [*groups.values()]) for part in captured.parts]).cpu(),
        "group_keys": torch.tensor([len(keys) for keys in groups.values()]),
    }


def _of_rows(result: EffectiveAttention, places: Sequence[Place]) -> Float[Tensor, "row quantity"]:
    """Return the quantities `READ` of each row."""
    rows, ends = bounds_of(result, places, bounding=_UNLIMITED)
    strongest = rows.attention.argmax(-1, keepdim=True)
    weight, lower, upper = (part.gather(1, strongest)[:, 0] for part in (rows.attention, ends.lower, ends.upper))
    mass, certain, undecided = ends.lower.sum(-1).clamp(max=1.0), ends.order > 0, ends.order < 0
    numbers = (torch.ones_like(mass), rows.free, mass, weight, upper - lower, certain, undecided)
    return torch.stack([number.double() for number in numbers], dim=-1)


def _of_groups(
    result: EffectiveAttention, places: Sequence[Place], groups: Sequence[list[int]]
) -> Float[Tensor, "row group weight"]:
    """Return the `WEIGHTS` that each row gives to groups of keys; equal groups are bounded once."""
    distinct = list(dict.fromkeys(tuple(keys) for keys in groups if keys))
    members = membership(distinct, len(result.tokens))
    rows, ends = bounds_of(result, places, objectives=members, bounding=_UNLIMITED)
    members = members.to(rows.attention).mT
    raw, lower, upper = (part.clamp(max=1.0) for part in (rows.attention @ members, ends.lower, ends.upper))
    weights = torch.stack([raw, _effective(result, places) @ members, lower, upper], dim=-1)
    absent = torch.zeros_like(weights[:, 0])
    return torch.stack([weights[:, distinct.index(tuple(keys))] if keys else absent for keys in groups], dim=1)


def token_groups(result: EffectiveAttention) -> dict[str, list[int]]:
    """Return the positions of each of the `GROUPS`; a group that the text does not have has none."""
    captured: Any = result.source
    types = token_types(captured.reading.model.tokenizer, result.tokens)

    def of(kind: str) -> list[int]:
        return [place for place, found in enumerate(types) if found == kind]

    special = [place for place, is_special in enumerate(result.about["special"]) if is_special]
    ends = ([], []) if result.about["causal"] else (of("cls"), of("sep"))
    return dict(zip(GROUPS, (special, [0], *ends, of("punctuation")), strict=True))


def value_sizes(layer: Layer, groups: Sequence[Sequence[int]]) -> Float[Tensor, "head group"]:
    r"""Return the size of groups' values against that of the other keys, for each head of a layer.

    $$\mathrm{mean}_{m \in G} \|v_m H\| \,/\, \mathrm{median}_{m \notin G} \|v_m H\|$$

    $v_m$ are the head's values and $H$ is its slice of the output projection; $R^\top$ with $H^\top = QR$ has the same
    lengths. NaN where a group has no keys, or the others have none or are 0.
    """
    values = layer.plain.values.double()
    values = values.repeat_interleave(len(layer.projection) // len(values), 0)
    through = torch.linalg.qr(layer.projection.double().mT, mode="r").R.mT
    sizes = (values @ through).norm(dim=-1)
    found = sizes.new_full((len(sizes), len(groups)), torch.nan)
    for at, keys in enumerate(groups):
        others = sorted({*range(sizes.shape[1])} - {*keys})
        if keys and others:
            usual = sizes[:, others].quantile(0.5, dim=-1)
            found[:, at] = torch.where(usual > 0, sizes[:, list(keys)].mean(-1) / usual, torch.nan)
    return found


def _effective(result: EffectiveAttention, places: Sequence[Place]) -> Float[Tensor, "row key"]:
    captured: Any = result.source
    rows = []
    for (layer, head), some in groupby(places, key=lambda place: place[:2]):
        part: Layer = captured.parts[layer]
        at = {"device": part.heads.device, "dtype": torch.long}
        which = torch.tensor([head], **at), torch.tensor([query for _, _, query in some], **at)
        rows.append(effective_rows(part.factors, *which, raw=part.raw)[0].double())
    return torch.cat(rows)


def _summed(numbers: Tensor, places: Sequence[Place], shape: tuple[int, int, int]) -> Tensor:
    layers, heads, _ = shape
    sums = torch.zeros(layers * heads, *numbers.shape[1:], dtype=torch.float64)
    sums.index_add_(0, torch.tensor([layer * heads + head for layer, head, _ in places]), numbers.double().cpu())
    return sums.unflatten(0, (layers, heads))


# Tables


def frames(numbers: Mapping[str, Tensor]) -> dict[str, "DataFrame"]:
    """Return what `certainty` found in all texts as tables: `intervals`, `intervals_by_length` and `groups`."""
    return {"intervals": _intervals(numbers), "intervals_by_length": _by_length(numbers), "groups": _groups(numbers)}


def _intervals(numbers: Mapping[str, Tensor]) -> "DataFrame":
    sums = numbers["row_sums"]
    at = sums[..., 0].nonzero()
    means = _means(sums[tuple(at.mT)].mT)
    counts = {name: means.pop(name).long() for name in ("rows", "free", "undecided")}
    order = ("rows", "free", "certain_mass", "strongest", "width", "certain", "undecided")
    return _tidy(numbers, at, {name: (counts | means)[name] for name in order})


def _groups(numbers: Mapping[str, Tensor]) -> "DataFrame":
    rows = numbers["row_sums"][..., 0]
    layers, heads = rows.shape[1:]
    there = numbers["group_keys"][:, None, None] > 0
    at = there.expand(-1, layers, heads, -1).nonzero()
    count = rows[tuple(at[:, :3].mT)]
    weights = (numbers["group_sums"][tuple(at.mT)] / count[:, None]).mT  # NaN where no row was drawn
    columns = {"rows": count.long(), **dict(zip(WEIGHTS, weights, strict=True))}
    frame = _tidy(numbers, at[:, :3], columns | {"value_size": numbers["value_size"][tuple(at.mT)]})
    frame.insert(4, "group", [GROUPS[group] for group in at[:, 3].tolist()])
    return frame


def _tidy(numbers: Mapping[str, Tensor], at: Tensor, columns: Mapping[str, Tensor]) -> "DataFrame":
    from pandas import DataFrame

    text, layer, head = at.mT
    axes = {"text": text, "tokens": numbers["tokens"][text], "layer": layer, "head": head}
    return DataFrame({name: column.numpy() for name, column in (axes | dict(columns)).items()})


def _means(sums: Float[Tensor, "quantity place"]) -> dict[str, Tensor]:
    """Return sums over rows as means, but counts as they are; `certain` is a share of the rows that are decided."""
    found = dict(zip(READ, sums, strict=True))
    counts = {name: found.pop(name) for name in ("rows", "free", "undecided")}
    certain = found.pop("certain") / (counts["rows"] - counts["undecided"])  # NaN where there are none
    return counts | {name: total / counts["rows"] for name, total in found.items()} | {"certain": certain}


def _by_length(numbers: Mapping[str, Tensor]) -> "DataFrame":
    """Return means over texts by their number of tokens, each text by the mean of its rows, with standard errors."""
    from pandas import DataFrame

    means = _means(numbers["row_sums"].sum((1, 2)).mT)
    rows = means.pop("rows")
    first = numbers["group_sums"][:, :, :, GROUPS.index("first")].sum((1, 2)).mT / rows
    averaged = {"tokens": numbers["tokens"].double(), "free": means.pop("free") / rows}
    averaged |= {name: means[name] for name in ("certain_mass", "strongest", "width", "certain")}
    averaged |= {f"first_{name}": column for name, column in zip(WEIGHTS, first, strict=True)}
    counted = {"rows": rows.long(), "undecided": means["undecided"].long()}
    frame = DataFrame({name: column.numpy() for name, column in (averaged | counted).items()})
    bins = [_bin(int(tokens)) for tokens in numbers["tokens"]]
    frame = frame.assign(tokens_from=[least for least, _ in bins], tokens_to=[most for _, most in bins])
    by = frame.groupby(["tokens_from", "tokens_to"])
    found = by.size().to_frame("texts").assign(rows=by["rows"].sum())
    for name in averaged:
        found[name] = by[name].mean()
        if name != "tokens":
            found[f"{name}_error"] = by[name].sem()
        if name == "certain":
            found["undecided"] = by["undecided"].sum()
    return found.reset_index()


def _bin(tokens: int) -> tuple[int, int]:
    """Return the least and the greatest length that is counted with this one: up to 16, 24, 32, 48, 64, 96, 128, …."""
    edges = [16, 24]
    while edges[-1] < tokens:
        edges.append(2 * edges[-2])
    most = next(edge for edge in edges if edge >= tokens)
    return [1, *(edge + 1 for edge in edges)][edges.index(most)], most


_MEANS = {
    "certain mass": "certain_mass",
    "strongest raw": "strongest",
    "strongest width": "width",
    "strongest certain": "certain",
    "first raw": "first_raw",
    "first effective": "first_effective",
    "first least": "first_lower",
    "first greatest": "first_upper",
}


def length_table(frame: "DataFrame") -> Table:
    """Return the table by length in words: means over texts with their standard errors.

    `free` is the share of rows that see linearly dependent values; all others are certain. Below `strongest` stands
    what holds of a row's strongest edge, below `first` what the first token receives.
    """
    columns = [
        Column("tokens", lambda ends: f"{ends[0]}–{ends[1]}"),
        Column("texts", lambda count: f"{count:,}", "right"),
        Column("free rows", decimals(2), "right", "free\nrows"),
    ]
    for name in _MEANS:
        form = mean_and_error(3 if name == "first effective" else 2)
        columns.append(Column(name, form, heading=name.replace(" ", "\n")))
    rows = []
    for row in frame.to_dict("records"):
        means = [(row[name], row[f"{name}_error"]) for name in _MEANS.values()]
        rows.append(((row["tokens_from"], row["tokens_to"]), row["texts"], row["free"], *means))
    return Table(tuple(columns), tuple(rows))
