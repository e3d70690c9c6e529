"""How certain attention is over a dataset: rows are drawn at random, bounded, and summed by text, layer and head.

A row's interval is the range of a weight over all alternatives; see `intervals`. Sums over the drawn rows of a text are
kept by layer and head, so texts can be gathered in any order.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from identikit.attention.captured import RowIndex
from identikit.attention.layer import Layer
from identikit.attention.quantities import membership
from identikit.attention.result import EffectiveAttention
from identikit.attention.sample import ALL, bound_rows, drawn_rows
from identikit.attention.token_types import token_types
from identikit.checks import known_name, shortened, whole_number
from identikit.errors import IdentikitError, InputError
from identikit.results.words import Column, Table, decimals, mean_and_error
from identikit.shapes import Float, Tensor

if TYPE_CHECKING:
    from pandas import DataFrame

GROUPS = ("special", "first", "cls", "sep", "punctuation")
"""The groups of keys: all special tokens; the first token; in models that are not causal, what opens a text and what
separates or closes it; period and comma."""

ROW_NUMBERS = ("rows", "free", "certain_mass", "strongest", "width", "certain", "undecided")
"""What is summed over rows; `tables` says what each is."""

WEIGHTS = ("raw", "effective", "lower", "upper")


def checked_rows(rows: object) -> int | str:
    """Return the number of rows per text, or `ALL`; refuse anything else."""
    with suppress(InputError):
        return ALL if isinstance(rows, str) and rows == ALL else whole_number("intervals", rows)
    raise InputError(f"intervals={shortened(rows)} cannot be used: expected a number of rows per text, or {ALL!r}.")


def certainty(attention: EffectiveAttention, rows: int | str, seed: int) -> dict[str, Tensor]:
    """Bound rows of a text, and sum their numbers by layer and head.

    - `row_sums`: the numbers `ROW_NUMBERS`, (layer, head, number)
    - `group_sums`: weight of groups of keys, (layer, head, group, weight), in the order of `GROUPS` and `WEIGHTS`
    - `value_size`: how large a group's values are, see `value_sizes`, (layer, head, group)
    - `group_keys`: how many keys each group has
    """
    shape = (len(attention.layers), len(attention.heads), len(attention.tokens))
    row_indices = drawn_rows(attention.provenance.text, shape, rows, seed)
    groups = list(token_groups(attention).values())
    distinct = list(dict.fromkeys(tuple(keys) for keys in groups if keys))  # equal groups are bounded once
    bounded = bound_rows(attention, row_indices, distinct)
    if len(bounded.places) < len(row_indices):
        raise IdentikitError(f"Bounding {len(row_indices):,} rows: some have no bounds. Please report this text.")
    raw, lower, upper = bounded.groups.unbind(1)
    effective = bounded.effective @ membership(distinct, len(attention.keys)).mT
    weights = torch.stack([raw, effective, lower, upper], dim=-1)  # row, group, weight
    absent = torch.zeros_like(weights[:, 0])
    by_group = [weights[:, distinct.index(tuple(keys))] if keys else absent for keys in groups]
    strongest, key = bounded.attention.max(-1)
    width = (bounded.upper - bounded.lower).gather(1, key[:, None])[:, 0]
    mass = bounded.lower.sum(-1).clamp(max=1.0)
    numbers = (torch.ones_like(mass), bounded.free, mass, strongest, width, bounded.order > 0, bounded.order < 0)
    sizes = [value_sizes(layer, groups) for layer in attention.captured().layers]
    return {
        "row_sums": _sum_by_head(torch.stack([number.double() for number in numbers], dim=-1), row_indices, shape),
        "group_sums": _sum_by_head(torch.stack(by_group, dim=1), row_indices, shape),
        "value_size": torch.stack(sizes).cpu(),
        "group_keys": torch.tensor(list(map(len, groups))),
    }


def token_groups(attention: EffectiveAttention) -> dict[str, list[int]]:
    """Return the positions of each of the `GROUPS`; a group that the text does not have has none."""
    types = token_types(attention.captured().text_run.model.tokenizer, attention.keys)
    groups: dict[str, list[int]] = {name: [] for name in GROUPS}
    groups["first"] = [0]
    for position, (kind, special) in enumerate(zip(types, attention.text_of("key")["special"], strict=True)):
        if special:
            groups["special"].append(position)
        if kind == "punctuation" or (kind in GROUPS and not attention.about["causal"]):
            groups[kind].append(position)
    return groups


def value_sizes(layer: Layer, groups: Sequence[Sequence[int]]) -> Float[Tensor, "head group"]:
    r"""Return the size of groups' values against that of the other keys, for each head of a layer.

    $$\mathrm{mean}_{m \in G} \|v_m H\| \,/\, \mathrm{median}_{m \notin G} \|v_m H\|$$

    $v_m$ are the head's values and $H$ is its slice of the output projection; $R^\top$ with $H^\top = QR$ has the same
    lengths. NaN where a group has no keys, or the others have none or are 0.
    """
    values = layer.plain.values.double()
    values = values.repeat_interleave(len(layer.projection) // len(values), 0)
    through = torch.linalg.qr(layer.projection.double().mT, mode="r").R.mT
    lengths = (values @ through).norm(dim=-1)
    sizes = lengths.new_full((len(lengths), len(groups)), torch.nan)
    for group, keys in enumerate(groups):
        other_keys = sorted({*range(lengths.shape[1])} - {*keys})
        if keys and other_keys:
            usual = lengths[:, other_keys].quantile(0.5, dim=-1)
            sizes[:, group] = torch.where(usual > 0, lengths[:, list(keys)].mean(-1) / usual, torch.nan)
    return sizes


def _sum_by_head(numbers: Tensor, row_indices: Sequence[RowIndex], shape: tuple[int, int, int]) -> Tensor:
    layers, heads, _ = shape
    sums = torch.zeros(layers * heads, *numbers.shape[1:], dtype=torch.float64)
    sums.index_add_(0, torch.tensor([layer * heads + head for layer, head, _ in row_indices]), numbers.double().cpu())
    return sums.unflatten(0, (layers, heads))


# Tables


def frames(numbers: Mapping[str, Tensor]) -> dict[str, "DataFrame"]:
    """Return what `certainty` found in all texts as tables: `intervals`, `intervals_by_length` and `groups`."""
    return {"intervals": _intervals(numbers), "intervals_by_length": _by_length(numbers), "groups": _groups(numbers)}


def _intervals(numbers: Mapping[str, Tensor]) -> "DataFrame":
    sums = numbers["row_sums"]
    heads = sums[..., 0].nonzero()  # text, layer, head: those that rows were drawn from
    columns = _means(sums[tuple(heads.mT)].mT)
    for count in ("rows", "free", "undecided"):
        columns[count] = columns[count].long()
    return _tidy(numbers, heads, columns)


def _groups(numbers: Mapping[str, Tensor]) -> "DataFrame":
    rows = numbers["row_sums"][..., 0]
    has_keys = (numbers["group_keys"] > 0)[:, None, None]
    indices = has_keys.expand(-1, *rows.shape[1:], -1).nonzero()  # text, layer, head, group
    count = rows[tuple(indices[:, :3].mT)]
    weights = (numbers["group_sums"][tuple(indices.mT)] / count[:, None]).mT  # NaN where no row was drawn
    columns = {"rows": count.long(), **dict(zip(WEIGHTS, weights, strict=True))}
    frame = _tidy(numbers, indices[:, :3], columns | {"value_size": numbers["value_size"][tuple(indices.mT)]})
    frame.insert(4, "group", [GROUPS[group] for group in indices[:, 3].tolist()])
    return frame


def _tidy(numbers: Mapping[str, Tensor], heads: Tensor, columns: Mapping[str, Tensor]) -> "DataFrame":
    from pandas import DataFrame

    text, layer, head = heads.mT
    axes = {"text": text, "tokens": numbers["tokens"][text], "layer": numbers["layers"][layer], "head": head}
    return DataFrame({name: column.numpy() for name, column in (axes | dict(columns)).items()})


def _means(sums: Float[Tensor, "number place"]) -> dict[str, Tensor]:
    """Return sums over rows as means, but counts as they are; `certain` is a share of the rows that are decided."""
    means: dict[str, Tensor] = dict(zip(ROW_NUMBERS, sums, strict=True))
    for name in ("certain_mass", "strongest", "width"):
        means[name] = means[name] / means["rows"]
    means["certain"] = means["certain"] / (means["rows"] - means["undecided"])  # NaN where there are none
    return means


def _by_length(numbers: Mapping[str, Tensor]) -> "DataFrame":
    """Return means over texts by their number of tokens, each text by the mean of its rows, with standard errors."""
    from pandas import DataFrame

    means = _means(numbers["row_sums"].sum((1, 2)).mT)
    rows = means["rows"]
    first = numbers["group_sums"][:, :, :, GROUPS.index("first")].sum((1, 2)).mT / rows
    columns = {"tokens": numbers["tokens"].double(), **means, "free": means["free"] / rows}
    columns |= {name: means[name].long() for name in ("rows", "undecided")}
    columns |= {f"first_{name}": column for name, column in zip(WEIGHTS, first, strict=True)}
    frame = DataFrame({name: column.numpy() for name, column in columns.items()})
    ranges = [_length_range(int(tokens)) for tokens in numbers["tokens"]]
    frame = frame.assign(tokens_from=[least for least, _ in ranges], tokens_to=[greatest for _, greatest in ranges])
    by_length = frame.groupby(["tokens_from", "tokens_to"])
    table = by_length.size().to_frame("texts").assign(rows=by_length["rows"].sum(), tokens=by_length["tokens"].mean())
    for name in columns:
        if name == "undecided":
            table[name] = by_length[name].sum()
        elif name not in ("rows", "tokens"):
            table[name] = by_length[name].mean()
            table[f"{name}_error"] = by_length[name].sem()
    return table.reset_index()


def _length_range(tokens: int) -> tuple[int, int]:
    """Return the range of lengths that a length falls into; ranges end at 16, 24, 32, 48, 64, 96, 128, …."""
    edges = [0, 16, 24]
    while edges[-1] < tokens:
        edges.append(2 * edges[-2])
    upper = next(index for index, edge in enumerate(edges) if edge >= tokens)
    return edges[upper - 1] + 1, edges[upper]


_MEANS = {
    "determined share": "certain_mass",
    "strongest raw": "strongest",
    "strongest width": "width",
    "strongest determined": "certain",
    "first raw": "first_raw",
    "first effective": "first_effective",
    "first least": "first_lower",
    "first greatest": "first_upper",
}


def length_table(frame: "DataFrame") -> Table:
    """Return the table by length in words: means over texts with their standard errors.

    `free` is the share of rows that see linearly dependent values; all others are determined. Below `strongest` stands
    what holds of a row's strongest edge, below `first` what the first token receives.
    """
    columns = [
        Column("tokens", lambda ends: f"{ends[0]}–{ends[1]}"),
        Column("texts", lambda count: f"{count:,}", "right"),
        Column("free rows", decimals(2), "right", "free\nrows"),
    ]
    for name in _MEANS:
        digits = 3 if name == "first effective" else 2
        columns.append(Column(name, mean_and_error(digits), heading=name.replace(" ", "\n")))
    rows = []
    for row in frame.to_dict("records"):
        means = [(row[name], row[f"{name}_error"]) for name in _MEANS.values()]
        rows.append(((row["tokens_from"], row["tokens_to"]), row["texts"], row["free"], *means))
    return Table(tuple(columns), tuple(rows))


def mean_over_rows(table: "DataFrame", columns: Sequence[str], by: Sequence[str]) -> "DataFrame":
    """Average columns that are means over `rows` again, by the columns `by`; NaN where no row was drawn."""
    from pandas import DataFrame

    weighted = table.filter([*by, "rows"]).assign(**{name: table[name] * table["rows"] for name in columns})
    sums = DataFrame(weighted.groupby(list(by)).sum()).reset_index()
    rows = sums["rows"].where(sums["rows"] > 0)
    return sums.assign(**{name: sums[name] / rows for name in columns})


def head_means(groups: "DataFrame", group: str) -> "DataFrame":
    """Return what a group of keys receives from each head, and the size of its values, averaged over texts."""
    known_name("group", group, tuple(dict.fromkeys(groups["group"])))
    rows = groups.loc[groups["group"] == group]
    sizes = rows.groupby(["layer", "head"])[["value_size"]].mean().reset_index()
    return mean_over_rows(rows, WEIGHTS, ["layer", "head"]).merge(sizes, on=["layer", "head"])
