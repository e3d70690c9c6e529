"""How certain attention is over a dataset: rows drawn at random, bounded, and summed up by text, layer and head.

A row's interval is the range of a weight over all attention with the same output; see `intervals`. Sums over the drawn
rows of a text are kept by layer and head, so texts can be gathered in any order.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from identikit.attention.captured import Place
from identikit.attention.intervals import membership
from identikit.attention.layer import Layer
from identikit.attention.result import EffectiveAttention
from identikit.attention.sample import ALL, BoundedRows, bound_rows, drawn_places
from identikit.attention.token_types import token_types
from identikit.checks import shortened, whole_number
from identikit.errors import IdentikitError, InputError
from identikit.results.words import Column, Table, decimals, mean_and_error
from identikit.shapes import Float, Tensor

if TYPE_CHECKING:
    from pandas import DataFrame

GROUPS = ("special", "first", "cls", "sep", "punctuation")
"""The groups of keys: all special tokens; the first token; in models that are not causal, what opens a text and what
separates or closes it; period and comma."""

READ = ("rows", "free", "certain_mass", "strongest", "width", "certain", "undecided")
"""What is summed over rows; `tables` says what each is."""

WEIGHTS = ("raw", "effective", "lower", "upper")


def checked_rows(rows: Any) -> int | str:
    """Return how many rows per text are asked for, or raise."""
    with suppress(InputError):
        return ALL if isinstance(rows, str) and rows == ALL else whole_number("intervals", rows)
    raise InputError(f"intervals={shortened(rows)} cannot be used: expected a number of rows per text, or {ALL!r}.")


def certainty(result: EffectiveAttention, rows: int | str, seed: int) -> dict[str, Tensor]:
    """Bound rows of a text, and sum up what they say by layer and head.

    - `row_sums`: the quantities `READ`, (layer, head, quantity)
    - `group_sums`: weight of groups of keys, (layer, head, group, weight), in the order of `GROUPS` and `WEIGHTS`
    - `value_size`: how large a group's values are, see `value_sizes`, (layer, head, group)
    - `group_keys`: how many keys each group has
    """
    captured = result.captured()
    shape = len(result.layers), len(result.heads), len(result.tokens)
    places = drawn_places(result.provenance.text, shape, rows, seed)
    groups = token_groups(result)
    distinct = list(dict.fromkeys(tuple(keys) for keys in groups.values() if keys))  # equal groups are bounded once
    members = membership(distinct, len(result.tokens))
    bounded = bound_rows(result, places, members)
    if len(bounded.places) < len(places):
        raise IdentikitError(f"Bounding {len(places):,} rows: some have no bounds. Please report this text.")
    weights = _group_weights(bounded, members)
    absent = torch.zeros_like(weights[:, 0])
    by_group = [weights[:, distinct.index(tuple(keys))] if keys else absent for keys in groups.values()]
    return {
        "row_sums": _summed(_row_readings(bounded), places, shape),
        "group_sums": _summed(torch.stack(by_group, dim=1), places, shape),
        "value_size": torch.stack([value_sizes(layer, [*groups.values()]) for layer in captured.layers]).cpu(),
        "group_keys": torch.tensor([len(keys) for keys in groups.values()]),
    }


def _row_readings(bounded: BoundedRows) -> Float[Tensor, "row quantity"]:
    """Return the quantities `READ` of each row."""
    strongest = bounded.attention.argmax(-1, keepdim=True)
    weight = bounded.attention.gather(1, strongest)[:, 0]
    width = (bounded.upper - bounded.lower).gather(1, strongest)[:, 0]
    mass = bounded.lower.sum(-1).clamp(max=1.0)
    numbers = (torch.ones_like(mass), bounded.free, mass, weight, width, bounded.order > 0, bounded.order < 0)
    return torch.stack([number.double() for number in numbers], dim=-1)


def _group_weights(bounded: BoundedRows, members: Float[Tensor, "group key"]) -> Float[Tensor, "row group weight"]:
    """Return the `WEIGHTS` that each row gives to groups of keys."""
    raw, lower, upper = bounded.groups.clamp(max=1.0).unbind(1)
    return torch.stack([raw, bounded.effective @ members.mT, lower, upper], dim=-1)


def token_groups(result: EffectiveAttention) -> dict[str, list[int]]:
    """Return the positions of each of the `GROUPS`; a group that the text does not have has none."""
    captured = result.captured()
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
