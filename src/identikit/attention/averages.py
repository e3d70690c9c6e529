"""Averages of the tables that `identikit attention --intervals` writes: by text, by layer and by head."""

from collections.abc import Sequence

from pandas import DataFrame

from identikit.attention.certainty import WEIGHTS
from identikit.checks import known


def mean_over_rows(table: DataFrame, columns: Sequence[str], by: Sequence[str]) -> DataFrame:
    """Average columns that are means over `rows` again, by the columns `by`; NaN where no row was drawn."""
    weighted = table.filter([*by, "rows"]).assign(**{name: table[name] * table["rows"] for name in columns})
    sums = DataFrame(weighted.groupby(list(by)).sum()).reset_index()
    rows = sums["rows"].where(sums["rows"] > 0)
    return sums.assign(**{name: sums[name] / rows for name in columns})


def head_means(groups: DataFrame, group: str) -> DataFrame:
    """Return what a group of keys receives from each head, and the size of its values, averaged over texts."""
    known("group", group, tuple(dict.fromkeys(groups["group"])))
    rows = groups.loc[groups["group"] == group]
    sizes = rows.groupby(["layer", "head"])[["value_size"]].mean().reset_index()
    return mean_over_rows(rows, WEIGHTS, ["layer", "head"]).merge(sizes, on=["layer", "head"])
