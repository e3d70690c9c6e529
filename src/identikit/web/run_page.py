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
OPEN_PICTURES = 3  # per section; the others are folded
VISIBLE_SPREAD = 5e-4  # below, all numbers are about the same
FEWEST_TEXTS = 8  # of which some are said to stand out
_TEXT_LETTERS = 160
_AVERAGED_KEYS = frozenset(["text", "position", "fold"])
_DRAWN_KEYS = frozenset(["layer", "head"])


@dataclass(frozen=True)
class Cell:
    """A number in a picture: `error` is a standard error over `texts`, None where there is none."""

    x: float
    y: float
    value: float
    error: float | None = None
    texts: int = 0


@dataclass(frozen=True)
class Chart:
    """One column of a table, drawn by head ("heads"), by layer ("layers") or by the length of texts ("lengths").

    `facet` says which rows it is about where the column has several pictures; `low` and `high` are the ends of the
    scale that these share.
    """

    kind: str
    table: str
    column: str
    about: DataColumn
    facet: str
    cells: tuple[Cell, ...]
    low: float
    high: float

    @property
    def title(self) -> str:
        """The column, and which rows of it."""
        return ", ".join(filter(None, (self.column, self.facet)))

    @property
    def flat(self) -> bool:
        """Whether all numbers are the same in the digits that are shown."""
        return short(self.low) == short(self.high)

    def share(self, value: float) -> float:
        """Return where a value lies on the scale, from 0 to 1."""
        return 0.5 if self.flat else (value - self.low) / (self.high - self.low)

    @property
    def spread(self) -> float:
        """How far the numbers are apart beyond chance, relative to the largest of them and 1.

        This is their standard deviation, less that of their errors; by length, only what follows the length counts.
        """
        import numpy as np

        values = np.array([cell.value for cell in self.cells])
        scale = max(1.0, float(np.abs(values).max()))
        if self.kind == "lengths":
            lengths = np.array([cell.x for cell in self.cells])
            if lengths.min() == lengths.max():
                return 0.0
            return abs(float(np.cov(lengths, values, ddof=0)[0, 1])) / float(lengths.std()) / scale
        noise = np.mean([(cell.error or 0.0) ** 2 for cell in self.cells])
        return math.sqrt(max(0.0, float(values.var() - noise))) / scale


@dataclass(frozen=True)
class Section:
    """The pictures of one subject: those that tell most come first, and the rest is `folded`."""

    title: str
    charts: list[Chart]
    folded: list[Chart]

    @property
    def summary(self) -> str:
        """How many pictures are folded, and the columns that they are of."""
        return f"{len(self.folded)} more: {', '.join(sorted({chart.column for chart in self.folded}))}"


@dataclass(frozen=True)
class StandingOut:
    """The texts at both ends of a column: number, value and how the text begins."""

    table: str
    column: str
    about: DataColumn
    least: tuple[int, float, str]
    greatest: tuple[int, float, str]


def save_run_page(folder: str, file: str | None = None) -> Path:
    """Write the page of a complete run into its folder, or to `file`, and return its path.

    A run of which a file has changed is refused: its page would show numbers that nobody computed.
    """
    if file is None and "://" in folder:
        raise InputError(f"Drawing {folder}: the folder is not on this machine. Say where the page goes with --html.")
    target = checked_target(str(Path(folder) / FILE) if file is None else file)
    return write_page(target, page_of(unchanged_run(folder, f"Drawing {folder}")))


def page_of(store: Store) -> str:
    """Return the page of a run as HTML: one file, without scripts or other files."""
    from jinja2 import Environment, StrictUndefined

    columns_of = {}
    for table, columns in json.loads(store.read(COLUMNS)).items():
        columns_of[table] = {name: DataColumn(**column) for name, column in columns.items()}
    tables = {name: _read_table(store, name) for name in columns_of}
    charts: list[Chart] = []
    for name, columns in columns_of.items():
        charts += _charts(name, tables[name], columns)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["short"] = short
    template = environment.from_string(files("identikit.web").joinpath("run_page.html").read_text("utf-8"))
    return template.render(
        title=f"identikit {store.settings.get('command', 'run')}",
        about=_run_facts(store, tables),
        sections=_sections(charts),
        undrawn=sorted(tables.keys() - {chart.table for chart in charts}),
        standing_out=list(_standing_out(tables, columns_of)),
    )


def short(value: float) -> str:
    """Write a number in three digits."""
    return f"{value:.3g}"


def _read_table(store: Store, name: str) -> Frame:
    import pandas as pd

    return pd.read_parquet(BytesIO(store.read(f"{name}.parquet")))


def _run_facts(store: Store, tables: Mapping[str, Frame]) -> dict[str, object]:
    recorded: dict[str, Any] = store.recorded
    texts = tables.get("texts")
    facts = {
        "model": recorded.get("model", {}).get("name", ""),
        "data": recorded.get("data", {}).get("source", ""),
        "texts": "" if texts is None else len(texts),
        "tokens": "" if texts is None else int(texts["tokens"].sum()),
        "date": str(recorded.get("date", ""))[:10],
        "identikit": store.settings.get("versions", {}).get("identikit", ""),
    }
    return {name: value for name, value in facts.items() if value not in ("", None)}


def _sections(charts: Sequence[Chart]) -> list[Section]:
    """Group pictures by subject, that of `correlation_by_head` being `correlation`, and rank them by their spread.

    No two open pictures are about the same rows, as raw and effective attention to one group are.
    """
    by_subject: dict[str, list[Chart]] = {}
    for chart in charts:
        by_subject.setdefault(chart.table.partition("_by_")[0], []).append(chart)
    sections = []
    for subject, members in by_subject.items():
        ranked = sorted(members, key=lambda chart: chart.spread, reverse=True)
        opened: list[Chart] = []
        for chart in ranked:
            is_new = not chart.facet or chart.facet not in {other.facet for other in opened}
            if len(opened) < OPEN_PICTURES and is_new and (chart.spread >= VISIBLE_SPREAD or not opened):
                opened.append(chart)
        folded = [chart for chart in ranked if chart not in opened]
        sections.append(Section(subject.replace("_", " ").capitalize(), opened, folded))
    return sorted(sections, key=lambda section: section.charts[0].spread, reverse=True)


def _charts(name: str, table: Frame, columns: Mapping[str, DataColumn]) -> Iterator[Chart]:
    """Yield the pictures of a table's real numbers, one for each combination of what is not averaged.

    The standard errors of a column, in `COLUMN_error`, are drawn with it.
    """
    keys = [key for key, column in columns.items() if column.key]
    axes = [key for key in ("layer", "head") if key in keys]
    facet_keys = [key for key in keys if key not in _AVERAGED_KEYS | _DRAWN_KEYS]
    facets = [("", table)]
    if facet_keys:
        facets = []
        for values, rows in table.groupby(facet_keys, sort=False):
            facets.append((", ".join(f"{key} {value}" for key, value in zip(facet_keys, values, strict=True)), rows))
    if len(facets) > MOST_PICTURES or not (axes or {"text", "tokens"} <= columns.keys()):
        return
    for column, about in columns.items():
        if about.type != "double" or about.key or column.removesuffix("_error") in columns.keys() - {column}:
            continue
        cells = {facet: _cells(rows, column, axes, "text" in keys) for facet, rows in facets}
        values = [cell.value for facet_cells in cells.values() for cell in facet_cells]
        kind = ("lengths", "layers", "heads")[len(axes)]
        for facet, facet_cells in cells.items():
            if facet_cells:
                yield Chart(kind, name, column, about, facet, facet_cells, min(values), max(values))


def _cells(table: Frame, column: str, axes: Sequence[str], of_texts: bool) -> tuple[Cell, ...]:
    """Return means of a column at each layer and head, each over its texts and with their standard error."""
    table = table[table[column].notna()]
    if not axes:
        texts = table.groupby("text")[[column, "tokens"]].mean()
        return tuple(Cell(float(length), 0.0, float(value)) for value, length in texts.itertuples(index=False))
    means = table.groupby([*axes, "text"] if of_texts else [*axes])[column].mean()
    errors = None if of_texts or f"{column}_error" not in table else table.groupby([*axes])[f"{column}_error"].mean()
    cells = []
    for index, values in means.groupby(level=[*axes]):
        layer, head = (*index, 0)[:2] if isinstance(index, tuple) else (index, 0)
        count = len(values) if of_texts else 0
        error = None if errors is None else float(errors[index])
        if count > 1:
            error = float(values.std() / math.sqrt(count))
        known_error = None if error is None or math.isnan(error) else error
        cells.append(Cell(float(head), float(layer), float(values.mean()), known_error, count))
    return tuple(cells)


def _standing_out(
    tables: Mapping[str, Frame], columns_of: Mapping[str, Mapping[str, DataColumn]]
) -> Iterator[StandingOut]:
    """Yield the texts at both ends of every column that has one number for each text, or a mean over its layers."""
    if "texts" not in tables or len(tables["texts"]) < FEWEST_TEXTS:
        return
    beginnings = _beginnings(tables["texts"])
    ranked = set()
    for name, columns in columns_of.items():
        keys = {key for key, column in columns.items() if column.key}
        if "text" not in keys or not keys <= _AVERAGED_KEYS | _DRAWN_KEYS:
            continue
        for column, about in columns.items():
            if about.type != "double" or about.key or column in ranked:
                continue
            means = tables[name].groupby("text")[column].mean().dropna()
            if len(means) < FEWEST_TEXTS or means.min() == means.max():
                continue
            ranked.add(column)
            ends = [(int(text), float(means[text]), beginnings[text]) for text in (means.idxmin(), means.idxmax())]
            yield StandingOut(name, column, about, *ends)


def _beginnings(texts: Frame) -> dict[int, str]:
    """Return how each text begins, a pair with both of its texts."""
    beginnings = {}
    for text, first, second in texts[["text", "first", "second"]].itertuples(index=False):
        words = f"{first} · {second}" if isinstance(second, str) else first
        beginnings[text] = shorten(words, _TEXT_LETTERS, placeholder=" …")
    return beginnings
