"""Results in words, as a document: headings, paragraphs and tables.

A document is made once and shown in several ways: on a terminal, as plain text, on a page and in LaTeX. Beside its
words it holds the numbers in them as values, so that they can be checked whatever the wording is.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 100  # columns of plain text
ROUNDING = 1e-6  # how far the tolerance of linear programs may put a share from 0 or 1
LARGE = 0.1  # from this standard error on a share is written as a range
NOTHING_SAID = 0.98  # a range of a share that is wider says nothing
UNKNOWN_SHARE = "unknown"  # is written instead
_UNBROKEN = 100_000  # columns: no line is longer

Value = int | float | str | None | Sequence[object]
"""A number or a name in a text or in a cell, or several of them."""

Tone = Literal["plain", "note", "warning"]
_STYLES: Mapping[Tone, str] = {"plain": "", "note": "dim", "warning": "bold"}


@dataclass(frozen=True)
class Heading:
    """A heading: level 0 is the title, level 1 a section, level 2 a part of it."""

    words: str
    level: int = 1


@dataclass(frozen=True)
class Paragraph:
    """Sentences, with the numbers and names in them as `facts`; `offers`: they mention options or calls of Python."""

    words: str
    facts: Mapping[str, Value] = field(default_factory=dict)
    tone: Tone = "plain"
    offers: bool = False


@dataclass(frozen=True)
class Column:
    """A column of a table: its name, and how its values are written.

    `heading` is shown on a terminal instead of the name, where it is given: it may have several lines.
    """

    name: str
    form: Callable[[Any], str] = str
    align: Literal["left", "right"] = "left"
    heading: str = ""
    wraps: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of values, with words above them (`caption`) and below (`notes`)."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str = ""
    notes: tuple[Paragraph, ...] = ()

    def cells(self) -> list[list[str]]:
        """Return the rows as they are written."""
        cells = []
        for row in self.rows:
            cells.append([column.form(value) for column, value in zip(self.columns, row, strict=True)])
        return cells

    def column(self, name: str) -> list[Value]:
        """Return the values of one column."""
        index = [column.name for column in self.columns].index(name)
        return [row[index] for row in self.rows]

    def to_text(self, width: int | None = None) -> str:
        """Return the table as plain text; without a width no line is broken."""
        return Document((self,)).to_text(width)

    def to_latex(self) -> str:
        """Return the table as LaTeX; it needs the package booktabs."""
        aligned = "".join(column.align[0] for column in self.columns)
        lines = [r"\begin{table}", r"\centering"]
        if self.caption:
            lines.append(rf"\caption{{{latex(self.caption.removesuffix(':'))}}}")
        lines += [rf"\begin{{tabular}}{{{aligned}}}", r"\toprule", _latex_row(column.name for column in self.columns)]
        lines += [r"\midrule", *map(_latex_row, self.cells()), r"\bottomrule", r"\end{tabular}"]
        lines += [rf"\par\smallskip{{\footnotesize {latex(note.words)}}}" for note in self.notes]
        return "\n".join([*lines, r"\end{table}"])


Block = Heading | Paragraph | Table


@dataclass(frozen=True)
class Document:
    """Headings, paragraphs and tables in the order in which they are read."""

    blocks: tuple[Block, ...]

    @property
    def paragraphs(self) -> list[Paragraph]:
        """All paragraphs, and the notes of tables."""
        paragraphs = []
        for block in self.blocks:
            if isinstance(block, Paragraph):
                paragraphs.append(block)
            elif isinstance(block, Table):
                paragraphs += block.notes
        return paragraphs

    @property
    def tables(self) -> list[Table]:
        """All tables."""
        return [block for block in self.blocks if isinstance(block, Table)]

    @property
    def facts(self) -> dict[str, Value]:
        """The facts of all paragraphs; of those with one name, the first."""
        merged: dict[str, Value] = {}
        for paragraph in self.paragraphs:
            merged = {**paragraph.facts, **merged}
        return merged

    def under(self, words: str) -> "Document":
        """Return the blocks below a heading, up to the next of its level or above; none if there is no such heading."""
        blocks: list[Block] = []
        level = None
        for block in self.blocks:
            heading = isinstance(block, Heading)
            if heading and level is not None and block.level <= level:
                break
            if level is not None:
                blocks.append(block)
            elif heading and block.words == words:
                level = block.level
        return Document(tuple(blocks))

    def spoken(self, speak: Callable[[str], str]) -> "Document":
        """Return the document in the words of the command line or the page (see `errors.py`); tokens stay."""
        blocks: list[Block] = []
        for block in self.blocks:
            if isinstance(block, Paragraph) and block.offers:
                block = replace(block, words=speak(block.words))
            elif isinstance(block, Table):
                block = replace(block, caption=speak(block.caption))
            blocks.append(block)
        return Document(tuple(blocks))

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = WIDTH) -> str:
        """Return plain text of so many columns; with None no line is broken."""
        from rich.console import Console

        page = StringIO()
        Console(file=page, width=width or _UNBROKEN, color_system=None, legacy_windows=False).print(self)
        lines = [line.rstrip() for line in page.getvalue().splitlines()]
        return "\n".join(lines).strip("\n")

    def __rich__(self) -> "RenderableType":
        """Return what a console of rich prints."""
        from rich.console import Group
        from rich.text import Text

        rendered: list[RenderableType] = []
        before = None
        for block in self.blocks:
            if isinstance(block, Heading):
                rendered.append(Text(f"\n{block.words}", style="bold"))
            elif isinstance(block, Paragraph):
                rendered.append(Text(block.words, style=_STYLES[block.tone]))
            else:
                if isinstance(before, Paragraph):
                    rendered.append("")
                if block.caption:
                    rendered.append(Text(block.caption))
                rendered.append(_rich_table(block))
                rendered += [Text(note.words, style=_STYLES[note.tone]) for note in block.notes]
            before = block
        return Group(*rendered)

    def to_dict(self) -> dict[str, object]:
        """Return the sections as a page reads them: each with its heading, as the `question`, and its paragraphs.

        A paragraph is a string, or a table as its columns and rows. What stands before the first section is left out.
        """
        sections: list[dict[str, Any]] = []
        for block in self.blocks:
            if isinstance(block, Heading) and block.level == 1:
                sections.append({"question": block.words, "paragraphs": []})
            elif not sections:
                continue
            elif isinstance(block, Table):
                table = {"columns": [column.name for column in block.columns], "rows": block.cells()}
                caption = [block.caption] if block.caption else []
                sections[-1]["paragraphs"] += [*caption, table, *(note.words for note in block.notes)]
            else:
                sections[-1]["paragraphs"].append(block.words)
        return {"sections": sections}

    def to_latex(self) -> str:
        """Return the document as LaTeX without a preamble; tables need the package booktabs."""
        blocks = []
        for block in self.blocks:
            if isinstance(block, Heading):
                command = ("section", "subsection", "subsubsection")[block.level]
                blocks.append(rf"\{command}*{{{latex(block.words)}}}")
            else:
                blocks.append(latex(block.words) if isinstance(block, Paragraph) else block.to_latex())
        return "\n\n".join(blocks)


def joined(sentences: Iterable[Paragraph], tone: Tone = "plain") -> Paragraph:
    """Return one paragraph out of several sentences; each fact must have a name of its own."""
    words = []
    facts: dict[str, Value] = {}
    for sentence in sentences:
        assert not facts.keys() & sentence.facts.keys(), f"facts of one name: {[*facts, *sentence.facts]}"
        words.append(sentence.words)
        facts |= sentence.facts
    return Paragraph(" ".join(words), facts, tone)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with what it counts."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def decimals(digits: int) -> Callable[[float], str]:
    """Return a function that writes numbers with so many decimals; NaN is a dash."""
    return lambda number: "–" if number != number else f"{number:.{digits}f}"


def mean_and_error(digits: int) -> Callable[[tuple[float, float]], str]:
    """Return a function that writes a mean and its standard error; as a range where the error is as large."""
    form = decimals(digits)

    def written(values: tuple[float, float]) -> str:
        mean, error = values
        if error != error:
            return form(mean)
        if error >= max(abs(mean), 0.5 * 10**-digits):  # both look like 0 where they are smaller
            return f"{form(mean - 2 * error)} to {form(mean + 2 * error)}"
        return f"{form(mean)}±{form(error)}"

    return written


def means_of(texts: int) -> str:
    """Return the caption of a table of means over texts, as `mean_and_error` writes them."""
    if texts == 1:
        return "Of one text, so without standard errors:"
    return "Means over texts ± standard errors; where an error is as large as its mean, two errors to either side:"


def percent(share: float) -> str:
    """Return a share as a percentage: 0 or 100 only where it is, but for rounding; NaN is a dash."""
    if share != share:
        return "–"
    if 0.9995 <= share < 1 - ROUNDING:
        return ">99.9%"
    if ROUNDING < share < 0.0005:
        return "<0.1%"
    near = 0.995 <= share < 1 - ROUNDING or ROUNDING < share < 0.005
    return f"{share:.1%}" if near else f"{share:.0%}"


def weight(share: float) -> str:
    """Return a share of 1 with two decimals: 0 or 1 only where it is, but for rounding; NaN is a dash."""
    if 0.995 <= share < 1 - ROUNDING:
        return ">0.99"
    return "<0.01" if ROUNDING < share < 0.005 else decimals(2)(share)


class ShareEstimate(NamedTuple):
    """A share that may be estimated: its standard error, 0 where it is known, and the ends that it lies between."""

    share: float
    stderr: float
    least: float
    most: float


def estimate(form: Callable[[float], str]) -> Callable[[ShareEstimate], str]:
    """Return a function that writes estimates: with their error, as a range where that is large, or as unknown."""

    def written(estimated: ShareEstimate) -> str:
        share, stderr, least, greatest = estimated
        if stderr == 0:
            return form(share)
        if stderr < min(share, LARGE):  # not where it is NaN
            return f"{form(share)}±{form(stderr)}"
        if greatest - least > NOTHING_SAID:
            return UNKNOWN_SHARE
        return f"{form(least)} to {form(greatest)}"

    return written


def _rich_table(block: Table) -> "RenderableType":
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    lines = max((column.heading or column.name).count("\n") for column in block.columns)
    for column in block.columns:
        heading = column.heading or column.name
        above = "\n" * (lines - heading.count("\n"))
        table.add_column(Text(above + heading), justify=column.align, no_wrap=not column.wraps)
    for row in block.cells():
        table.add_row(*map(Text, row))  # a token may look like markup
    return table


_LATEX = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "--": "-{}-",  # otherwise it becomes a dash
    "–": "--",
    "…": r"\ldots{}",
    "→": r"$\rightarrow$",
    "±": r"$\pm$",
    **{sign: f"\\{sign}" for sign in "#$%&_{}"},
}


def latex(words: str) -> str:
    """Return words with what LaTeX would take as commands escaped."""
    return re.sub("|".join(map(re.escape, _LATEX)), lambda sign: _LATEX[sign[0]], words)


def _latex_row(cells: Iterable[str]) -> str:
    row = " & ".join(map(latex, cells))
    start = "{}" if row.startswith("[") else ""  # otherwise it is read as an option of the row before
    return rf"{start}{row} \\"
