"""How two runs differ: in their settings, in the versions they were computed with, and in the numbers of their tables.

Numbers agree if they are no further apart than the tolerance times the largest of 1 and the two. Whole numbers and
words agree if they are equal, and a missing value agrees with a missing value.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from identikit.errors import InputError
from identikit.results.folders import read_folder
from identikit.results.result import Result, result_of
from identikit.runs.inspect import is_run, open_run
from identikit.runs.store import leaves, opened

if TYPE_CHECKING:
    from pandas import DataFrame, Series

KEYS = {
    "text", "layer", "test_layer", "head", "position", "map", "source", "target", "tokens_from", "group", "distance",
    "view", "offset", "tag", "data_share", "fold", "split", "noise", "name",
}  # fmt: skip
"""Columns that say what a row is about, in whichever table they are."""


class Difference(NamedTuple):
    """How a column of a table differs: in how many rows, by how much at most, and where that is.

    `by` is relative to the largest of 1 and the two numbers; None for words, or where one value is missing.
    """

    table: str
    column: str
    rows: int
    by: float | None
    where: str
    one: Any
    other: Any

    def words(self) -> str:
        """Say it in a line."""
        rows = "1 row differs" if self.rows == 1 else f"{self.rows:,} rows differ"
        most = "" if self.by is None else f", at most by {self.by:.3g}"
        return f"{self.table}, {self.column}: {rows}{most}; {self.where}: {self.one} and {self.other}"


@dataclass
class Comparison:
    """What differs between two runs; `other` is about tables and rows that only one of them has."""

    tolerance: float
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    recorded: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    largest: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether the results are equal; settings and versions may differ."""
        return not self.other and not self.differences

    def to_dict(self) -> dict[str, Any]:
        """Return everything, as JSON can hold it."""
        return asdict(self) | {"equal": self.equal, "differences": [one._asdict() for one in self.differences]}

    def words(self) -> list[str]:
        """Say what differs, in a line each."""
        told = [f"Setting {name}: {one!r} and {other!r}." for name, (one, other) in self.settings.items()]
        told += [f"Recorded {name}: {one!r} and {other!r}." for name, (one, other) in self.recorded.items()]
        told += [f"{line}." for line in (*self.other, *(one.words() for one in self.differences))]
        counted = "1 column" if self.compared == 1 else f"{self.compared:,} columns"
        if self.equal:
            told.append(
                f"Equal: no number in {counted} differs by more than {self.tolerance:g} (the largest difference is "
                f"{self.largest:.3g}), relative to the largest of 1 and the two."
            )
        else:
            told.append(f"Different: compared {counted} with the tolerance {self.tolerance:g}.")
        return told


def compare(one: str, other: str, tolerance: float) -> Comparison:
    """Compare two folders, of runs or of saved results."""
    if not 0 <= tolerance < float("inf"):
        raise InputError(f"--tolerance {tolerance} cannot be used: expected a number, 0 or more.")
    kinds = [is_run(folder) for folder in (one, other)]
    if all(kinds):
        return _compare_runs(one, other, Comparison(tolerance))
    if not any(kinds) and all(_has(folder, "result.json") for folder in (one, other)):
        return _compare_results(result_of(read_folder(one), one), result_of(read_folder(other), other), Comparison(tolerance))
    open_run(other if kinds[0] else one)  # it says what is wrong with it
    raise InputError(f"Cannot compare {one} with {other}: one is a run, the other is not.")


def _has(folder: str, name: str) -> bool:
    files, path = opened(folder)
    return files.exists(f"{path}/{name}")


def _compare_runs(one: str, other: str, found: Comparison) -> Comparison:
    (store, recorded), (second, also) = open_run(one), open_run(other)
    found.settings = _unequal(store.settings, second.settings)
    found.recorded = {
        name: both for name, both in _unequal(recorded, also).items() if name.startswith(("versions", "device"))
    }
    tables = {folder: _tables(folder) for folder in dict.fromkeys((one, other))}
    for folder, names in tables.items():
        if not names:
            raise InputError(f"Cannot compare {folder}: it has no tables. `identikit resume {folder}` makes them.")
    for name in sorted(tables[one] ^ tables[other]):
        found.other.append(f"{name} is only in {one if name in tables[one] else other}")
    for name in sorted(tables[one] & tables[other]):
        _compare_tables(name, _frame(one, name), _frame(other, name), found)
    return found


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    first, second = dict(leaves(one)), dict(leaves(other))
    names = sorted(first.keys() | second.keys())
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def _tables(folder: str) -> set[str]:
    """Return the names of a run's tables, those of a reproduction's figures too."""
    found = {name.removesuffix(".parquet") for name in open_run(folder)[0].names() if name.endswith(".parquet")}
    figures = f"{folder.rstrip('/')}/figures"
    return found | ({f"figures/{name}" for name in _tables(figures)} if is_run(figures) else set())


def _frame(folder: str, name: str) -> "DataFrame":
    import pandas as pd

    files, path = opened(folder)
    try:
        return pd.read_parquet(BytesIO(files.cat_file(f"{path}/{name}.parquet")))
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0][:80].rstrip(".")
        raise InputError(
            f"Cannot read {folder}/{name}.parquet: {why}. `identikit verify {folder}` says more."
        ) from None


def _compare_tables(name: str, one: "DataFrame", other: "DataFrame", found: Comparison) -> None:
    for column in [*(set(one) - set(other)), *(set(other) - set(one))]:
        found.other.append(f"{name}: only one of the two has the column {column}")
    keys = [column for column in one if column in KEYS and column in other]
    if not keys or one.duplicated(keys).any() or other.duplicated(keys).any():
        keys = ["row"]  # rows that nothing names are matched in their order
        one, other = (frame.rename_axis("row").reset_index() for frame in (one, other))
    both: Any = one.merge(other, on=keys, how="outer", suffixes=(" one", " other"), indicator=True)
    alone = both[both["_merge"] != "both"]
    if len(alone):
        rows = "1 row is" if len(alone) == 1 else f"{len(alone):,} rows are"
        found.other.append(f"{name}: {rows} only in one of the two, such as {_place(alone.iloc[0], keys)}")
    both = both[both["_merge"] == "both"]
    for column in [column for column in one if column in other and column not in keys]:
        _compare_columns((name, str(column)), both, keys, found)


def _compare_columns(named: tuple[str, str], both: "DataFrame", keys: list[Any], found: Comparison) -> None:
    one, other = (both.loc[:, f"{named[1]} {side}"] for side in ("one", "other"))
    by = _distance(one, other)
    found.compared += 1
    differ = by > found.tolerance
    finite = by[by < float("inf")]
    found.largest = max(found.largest, float(finite.max()) if len(finite) else 0.0)
    if differ.any():
        row = int(by.to_numpy().argmax())
        most, where = float(by.iloc[row]), _place(both.iloc[row], keys)
        values = _plain(one.iloc[row]), _plain(other.iloc[row])
        found.differences.append(
            Difference(*named, int(differ.sum()), most if most < float("inf") else None, where, *values)
        )


def _distance(one: "Series", other: "Series") -> "Series":
    """Return how far apart values are: 0 where both are missing, infinite where they differ and cannot be measured."""
    import pandas as pd
    from pandas.api.types import is_float_dtype

    same = (one == other).fillna(False).astype(bool) | (one.isna() & other.isna())
    by = pd.Series(float("inf"), index=one.index)
    if is_float_dtype(one.dtype) and is_float_dtype(other.dtype):
        scale = pd.concat([one.abs(), other.abs()], axis=1).max(axis=1).clip(lower=1)
        by = ((one - other).abs() / scale).fillna(float("inf")).astype(float)
    return by.mask(same, 0.0)


def _place(row: "Series", keys: list[Any]) -> str:
    return ", ".join(f"{key} {_plain(row[key])}" for key in keys)


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, str | int | bool) or (isinstance(value, float) and value == value) else None


def _compare_results(one: Result, other: Result, found: Comparison) -> Comparison:
    """Compare the arrays of two saved results."""
    first, second = asdict(one.provenance), asdict(other.provenance)
    found.recorded = _unequal(
        *({"versions": about.pop("versions"), "device": about.pop("device")} for about in (first, second))
    )
    found.settings = _unequal(first | {"kind": one.kind}, second | {"kind": other.kind})
    for name in sorted({*one.source.dims} ^ {*other.source.dims}):
        found.other.append(f"{name} is only in one of the two")
    for name in sorted({*one.source.dims} & {*other.source.dims}):
        values, others = one.array(name).double(), other.array(name).double()
        if values.shape != others.shape:
            found.other.append(
                f"{name} has the shape {list(values.shape)} in one and {list(others.shape)} in the other"
            )
            continue
        _compare_arrays(name, values, others, (one.source.dims[name], found))
    return found


def _compare_arrays(name: str, one: torch.Tensor, other: torch.Tensor, about: tuple[Any, Comparison]) -> None:
    import pandas as pd

    dims, found = about
    places = pd.MultiIndex.from_product([range(size) for size in one.shape] or [[0]], names=list(dims) or ["place"])
    frame = places.to_frame(index=False)
    frame[f"{name} one"], frame[f"{name} other"] = one.flatten().numpy(), other.flatten().numpy()
    _compare_columns(("result", name), frame, list(frame.columns[:-2]), found)
