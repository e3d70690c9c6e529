"""Compare two runs: their settings, the versions they were computed with, and the numbers of their tables.

Numbers agree if they are no further apart than the tolerance times the largest of 1 and the two. Whole numbers and
words agree if they are equal, and a missing value agrees with a missing value.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any

from identikit.errors import InputError
from identikit.results.files import ABOUT, plain
from identikit.results.result import Result, saved_result
from identikit.runs.inspect import open_run
from identikit.runs.store import COLUMNS, MANIFEST, Store, differing, open_folder

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_Pairs = dict[str, tuple[object, object]]  # by name, the values of the two runs


@dataclass(frozen=True)
class Difference:
    """How a column of a table differs: in how many rows, by how much at most, and where that is.

    `by` is relative to the largest of 1 and the two numbers; None for words, or where one value is missing.
    """

    table: str
    column: str
    rows: int
    by: float | None
    where: str
    one: object
    other: object

    def words(self) -> str:
        """Return the difference in a line."""
        rows = "1 row differs" if self.rows == 1 else f"{self.rows:,} rows differ"
        largest = "" if self.by is None else f", at most by {self.by:.3g}"
        return f"{self.table}, {self.column}: {rows}{largest}; {self.where}: {self.one} and {self.other}."


@dataclass
class Comparison:
    """What differs between two runs; `other` lists, in words, tables, columns and rows that only one of them has."""

    tolerance: float
    settings: _Pairs = field(default_factory=dict)
    recorded: _Pairs = field(default_factory=dict)
    other: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    compared: int = 0
    largest: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether the results are equal; settings and versions may differ."""
        return not self.other and not self.differences

    def to_dict(self) -> dict[str, object]:
        """Return everything, as JSON can hold it."""
        return plain(asdict(self) | {"equal": self.equal})

    def words(self) -> list[str]:
        """Return what differs, in a line each."""
        lines = [f"Setting {name}: {one!r} and {other!r}." for name, (one, other) in self.settings.items()]
        lines += [f"Recorded {name}: {one!r} and {other!r}." for name, (one, other) in self.recorded.items()]
        lines += [f"{line}." for line in self.other]
        lines += [difference.words() for difference in self.differences]
        columns = "1 column" if self.compared == 1 else f"{self.compared:,} columns"
        if self.equal:
            lines.append(
                f"Equal: no number in {columns} differs by more than {self.tolerance:g} (the largest difference is "
                f"{self.largest:.3g}), relative to the larger of the two, or to 1."
            )
        else:
            lines.append(f"Different: compared {columns} with the tolerance {self.tolerance:g}.")
        return lines

    def add(self, table: str, column: str, pairs: "DataFrame", keys: Sequence[str]) -> None:
        """Compare a column of rows that were matched: `COLUMN one` with `COLUMN other`."""
        one = pairs.loc[:, f"{column} one"]
        other = pairs.loc[:, f"{column} other"]
        distance = _distance(one, other)
        self.compared += 1
        self.largest = max(self.largest, float(distance[distance < math.inf].max(initial=0.0)))
        rows = int((distance > self.tolerance).sum())
        if rows:
            row = int(distance.argmax())
            by = float(distance[row]) if distance[row] < math.inf else None
            values = (_cell_value(one.iloc[row]), _cell_value(other.iloc[row]))
            self.differences.append(Difference(table, column, rows, by, _row_label(pairs.iloc[row], keys), *values))


def compare(first: str, second: str, tolerance: float) -> Comparison:
    """Compare two folders, of runs or of saved results."""
    if not 0 <= tolerance < math.inf:
        raise InputError(f"--tolerance {tolerance} cannot be used: expected a number, 0 or more.")
    comparison = Comparison(tolerance)
    if all(_has_file(folder, ABOUT) and not _has_file(folder, MANIFEST) for folder in (first, second)):
        _compare_results(saved_result(first), saved_result(second), comparison)
    else:
        _compare_runs(open_run(first), open_run(second), comparison)
    return comparison


def _has_file(folder: str, name: str) -> bool:
    files, path = open_folder(folder)
    return files.exists(f"{path}/{name}")


# Tables of runs


def _compare_runs(first: Store, second: Store, comparison: Comparison) -> None:
    comparison.settings = differing(first.settings, second.settings)
    for name, values in differing(first.recorded, second.recorded).items():
        if name.startswith(("versions", "device", "data", "model")):
            comparison.recorded[name] = values
    tables = _table_names(first)
    other_tables = _table_names(second)
    for name in sorted(tables ^ other_tables):
        comparison.other.append(f"{name} is only in {first.folder if name in tables else second.folder}")
    marked = _marked_keys(second) | _marked_keys(first)
    for name in sorted(tables & other_tables):
        _compare_tables(name, _read_frame(first, name), _read_frame(second, name), marked.get(name, []), comparison)


def _table_names(store: Store) -> set[str]:
    """Return the names of a run's tables, those of a reproduction's figures too."""
    tables = set()
    for folder in ("", "figures/"):
        names = [f"{folder}{name}" for name in store.names(folder)]
        tables |= {name.removesuffix(".parquet") for name in names if name.endswith(".parquet")}
    if not tables:
        raise InputError(
            f"Cannot compare {store.folder}: it has no tables. Make them with `identikit resume {store.folder}`."
        )
    return tables


def _marked_keys(store: Store) -> dict[str, list[str]]:
    """Return the columns of each table that `columns.json` marks as keys; nothing where it cannot be read."""
    keys: dict[str, list[str]] = {}
    try:
        described = json.loads(store.read(COLUMNS)) if store.has(COLUMNS) else {}
        for table, columns in described.items():
            keys[table] = [column for column, about in columns.items() if about.get("key") is True]
    except (InputError, ValueError, AttributeError):
        return {}
    return keys


def _read_frame(store: Store, name: str) -> "DataFrame":
    import pandas as pd

    try:
        return pd.read_parquet(BytesIO(store.read(f"{name}.parquet")))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0][:80].rstrip(".")
        raise InputError(
            f"Cannot read {store.folder}/{name}.parquet: {reason}. `identikit verify {store.folder}` says more."
        ) from None


def _compare_tables(
    name: str, first: "DataFrame", second: "DataFrame", marked: Sequence[str], comparison: Comparison
) -> None:
    from pandas.api.types import is_numeric_dtype

    for column in sorted({*first} ^ {*second}):
        comparison.other.append(f"{name}: only one of the two has the column {column}")
    keys = _common_keys(first, second, marked)
    if not keys:  # rows that nothing identifies are matched in their order
        keys = ["row"]
        first = first.rename_axis("row").reset_index()
        second = second.rename_axis("row").reset_index()
    for key in keys:
        if is_numeric_dtype(first[key].dtype) != is_numeric_dtype(second[key].dtype):  # pandas does not match these
            first = first.astype({key: str})
            second = second.astype({key: str})
    pairs: Any = first.merge(second, on=keys, how="outer", suffixes=(" one", " other"), indicator=True)
    alone = pairs[pairs["_merge"] != "both"]
    if len(alone):
        rows = "1 row is" if len(alone) == 1 else f"{len(alone):,} rows are"
        comparison.other.append(f"{name}: {rows} only in one of the two, such as {_row_label(alone.iloc[0], keys)}")
    matched = pairs[pairs["_merge"] == "both"]
    for column in first:
        if column in second and column not in keys:
            comparison.add(name, str(column), matched, keys)


def _common_keys(first: "DataFrame", second: "DataFrame", marked: Sequence[str]) -> list[str]:
    """Return the columns that identify a row in both tables, or none.

    These are the columns that `columns.json` marks; without marks, the fewest of the first columns, up to the first
    that holds real numbers.
    """
    from pandas.api.types import is_float_dtype

    if marked:
        return list(marked) if _identifies_rows(marked, first, second) else []
    keys: list[str] = []
    for column in first:
        if column not in second or is_float_dtype(first[column].dtype):
            return []
        keys.append(str(column))
        if _identifies_rows(keys, first, second):
            return keys
    return []


def _identifies_rows(keys: Sequence[str], *frames: "DataFrame") -> bool:
    return all({*keys} <= {*frame} and not frame.duplicated([*keys]).any() for frame in frames)


def _distance(first: "Series", second: "Series") -> Any:
    """Return how far apart values are: 0 where both are missing, infinite where they differ and cannot be measured."""
    import numpy as np
    from pandas.api.types import is_float_dtype

    agrees = (first == second).fillna(False).astype(bool) | (first.isna() & second.isna())
    distance = np.full(len(first), math.inf)
    if is_float_dtype(first.dtype) and is_float_dtype(second.dtype):
        scale = np.fmax(1, np.fmax(first.abs(), second.abs()))
        distance = ((first - second).abs() / scale).fillna(math.inf).to_numpy(float)
    return np.where(agrees, 0.0, distance)


def _row_label(row: "Series", keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {_cell_value(row[key])}" for key in keys)


def _cell_value(cell: Any) -> str | int | float | None:
    """Return the value of a cell, or None if it is missing."""
    value = cell.item() if hasattr(cell, "item") else cell
    return value if isinstance(value, str | int | float) and value == value else None


# Arrays of saved results


def _compare_results(first: Result, second: Result, comparison: Comparison) -> None:
    from pandas import DataFrame, MultiIndex

    settings = asdict(first.provenance) | {"kind": first.kind}
    other_settings = asdict(second.provenance) | {"kind": second.kind}
    for name in ("versions", "device"):
        comparison.recorded |= differing({name: settings.pop(name)}, {name: other_settings.pop(name)})
    comparison.settings = differing(settings, other_settings)
    single = {axis.name for axis in first.axes if axis.single}  # arrays do not have these
    dims = first.source.dims
    other_dims = second.source.dims
    for name in sorted({*dims} ^ {*other_dims}):
        comparison.other.append(f"{name} is only in one of the two")
    for name in sorted({*dims} & {*other_dims}):
        array = first.array(name).double()
        other_array = second.array(name).double()
        if array.shape != other_array.shape:
            shapes = f"{list(array.shape)} in one and {list(other_array.shape)} in the other"
            comparison.other.append(f"{name} has the shape {shapes}")
            continue
        index = DataFrame({"place": [0]})
        if array.ndim:
            names = [dim for dim in dims[name] if dim not in single]
            index = MultiIndex.from_product([range(size) for size in array.shape], names=names).to_frame(index=False)
        values = {f"{name} one": array.flatten().numpy(), f"{name} other": other_array.flatten().numpy()}
        comparison.add("result", name, index.assign(**values), list(index))
