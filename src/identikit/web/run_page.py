"""A page about a run: every number of its tables by head, by layer and by length, and the texts that stand out.

What is drawn follows from the data dictionary alone, so a column that a room declares has its picture here.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from typing import Any

from identikit.errors import InputError
from identikit.results.table import DataColumn
from identikit.runs.store import COLUMNS, Store
from identikit.runs.verify import unchanged_run
from identikit.web.report import checked_target, write_page

Frame = Any
"""A table of pandas, whose annotations know too little of what grouping returns."""

FILE = "report.html"
MOST_PICTURES = 12  # of one column
FEWEST_TEXTS = 8  # of which some are said to stand out
_SHOWN = 160  # letters of a text
_AVERAGED = frozenset(["text", "position", "fold"])  # keys that a picture has no place for
_PLACES = frozenset(["layer", "head"])


@dataclass(frozen=True)
class Cell:
    """A value at a place of a picture: `error` is a standard error over `texts`, None where there is none."""

    x: float
    y: float
    value: float
    error: float | None = None
    texts: int = 0


@dataclass(frozen=True)
class Chart:
    """One column of a table, drawn by head ("heads"), by layer ("layers") or by the length of texts ("lengths")."""

    kind: str
    table: str
    column: str
    about: DataColumn
    facet: str
    cells: tuple[Cell, ...]
    low: float
    high: float

    @property
    def named(self) -> str:
        """The column, and what else the picture is of."""
        return ", ".join(filter(None, (self.column, self.facet)))

    @property
    def flat(self) -> bool:
        """Whether all that is drawn is one number, in the digits that are shown."""
        return short(self.low) == short(self.high)

    def share(self, value: float) -> float:
        """Return where a value lies from the least to the greatest that is drawn, from 0 to 1."""
        return 0.5 if self.flat else (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class StandingOut:
    """The texts at both ends of a column: number, value and how the text begins."""

    table: str
    column: str
    about: DataColumn
    least: tuple[int, float, str]
    greatest: tuple[int, float, str]


def save_run_page(folder: str, file: str | None = None) -> Path:
    """Write the page of a complete run into its folder, unless `file` says where; return where it is.

    A run of which a file has changed is refused: its page would show numbers that nobody computed.
    """
    if file is None and "://" in folder:
        raise InputError(f"Drawing {folder}: the folder is not on this machine. Say where the page goes with --html.")
    target = checked_target(str(Path(folder) / FILE) if file is None else file)
    return write_page(target, page_of(unchanged_run(folder, f"Drawing {folder}")))


def page_of(store: Store) -> str:
    """Return the page of a run as HTML: one file, without scripts or other files."""
    from jinja2 import Environment, StrictUndefined

    described = {
        table: {name: DataColumn(**column) for name, column in columns.items()}
        for table, columns in json.loads(store.read(COLUMNS)).items()
    }
    tables = {name: _table(store, name) for name in described}
    drawn = [picture for name, columns in described.items() for picture in _pictures(name, tables[name], columns)]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["short"] = short
    template = environment.from_string(files("identikit.web").joinpath("run_page.html").read_text("utf-8"))
    return template.render(
        title=f"identikit {store.settings.get('command', 'run')}",
        about=_about(store, tables),
        drawn=drawn,
        others=sorted(tables.keys() - {picture.table for picture in drawn}),
        standing_out=list(_standing_out(tables, described)),
    )


def short(value: float) -> str:
    """Write a number in three digits."""
    return f"{value:.3g}"


def _table(store: Store, name: str) -> Frame:
    import pandas as pd

    return pd.read_parquet(BytesIO(store.read(f"{name}.parquet")))


def _about(store: Store, tables: Mapping[str, Frame]) -> dict[str, object]:
    recorded: dict[str, Any] = store.recorded
    texts = tables.get("texts")
    about = {
        "model": recorded.get("model", {}).get("name", ""),
        "data": recorded.get("data", {}).get("source", ""),
        "texts": "" if texts is None else len(texts),
        "tokens": "" if texts is None else int(texts["tokens"].sum()),
        "date": str(recorded.get("date", ""))[:10],
        "identikit": store.settings.get("versions", {}).get("identikit", ""),
    }
    return {name: value for name, value in about.items() if value not in ("", None)}


def _pictures(name: str, table: Frame, columns: Mapping[str, DataColumn]) -> Iterator[Chart]:
    """Yield the pictures of a table's real numbers, one for each combination of what is not averaged."""
    keys = [key for key, column in columns.items() if column.key]
    by = [key for key in ("layer", "head") if key in keys]
    facets = [key for key in keys if key not in _AVERAGED | _PLACES]
    groups = [("", table)]
    if facets:
        groups = [
            (", ".join(f"{key} {value}" for key, value in zip(facets, values, strict=True)), group)
            for values, group in table.groupby(facets, sort=False)
        ]
    if len(groups) > MOST_PICTURES or not (by or {"text", "tokens"} <= columns.keys()):
        return
    for column, about in columns.items():
        if about.type != "double" or about.key:
            continue
        drawn = [(facet, _cells(group, column, by, "text" in keys)) for facet, group in groups]
        values = [cell.value for _, cells in drawn for cell in cells]
        if not values:
            continue
        kind = {0: "lengths", 1: "layers", 2: "heads"}[len(by)]
        for facet, cells in drawn:
            if cells:
                yield Chart(kind, name, column, about, facet, cells, min(values), max(values))


def _cells(table: Frame, column: str, by: Sequence[str], of_texts: bool) -> tuple[Cell, ...]:
    """Return means of a column at the places of a picture, each over its texts and with their standard error."""
    table = table[table[column].notna()]
    if not by:
        each = table.groupby("text")[[column, "tokens"]].mean()
        return tuple(Cell(float(length), 0.0, float(value)) for value, length in each.itertuples(index=False))
    each = table.groupby([*by, "text"] if of_texts else [*by])[column].mean()
    cells = []
    for place, values in each.groupby(level=[*by]):
        numbers = values.to_numpy()
        places = [float(each) for each in place] if isinstance(place, tuple) else [float(place)]
        error = float(numbers.std(ddof=1) / math.sqrt(len(numbers))) if of_texts and len(numbers) > 1 else None
        x = places[1] if len(places) > 1 else 0.0
        cells.append(Cell(x, places[0], float(numbers.mean()), error, len(numbers) if of_texts else 0))
    return tuple(cells)


def _standing_out(
    tables: Mapping[str, Frame], described: Mapping[str, Mapping[str, DataColumn]]
) -> Iterator[StandingOut]:
    """Yield the texts at both ends of every column that has one number for each text, or a mean over its layers."""
    if "texts" not in tables or len(tables["texts"]) < FEWEST_TEXTS:
        return
    texts = tables["texts"].set_index("text").astype(object)
    texts = texts.where(texts.notna(), None)
    pairs = texts[["first", "second"]].itertuples(index=True, name=None)
    words = {
        at: shorten(first if second is None else f"{first} · {second}", _SHOWN, placeholder=" …")
        for at, first, second in pairs
    }
    seen = set()
    for name, columns in described.items():
        keys = {key for key, column in columns.items() if column.key}
        if "text" not in keys or not keys <= _AVERAGED | _PLACES:
            continue
        for column, about in columns.items():
            if about.type != "double" or about.key or column in seen:
                continue
            means = tables[name].groupby("text")[column].mean().dropna()
            if len(means) < FEWEST_TEXTS or means.min() == means.max():
                continue
            seen.add(column)
            least, greatest = (
                (int(text), float(means[text]), words[text]) for text in (means.idxmin(), means.idxmax())
            )
            yield StandingOut(name, column, about, least, greatest)
