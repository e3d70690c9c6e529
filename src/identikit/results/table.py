"""Tables of a run and what their columns mean: the data dictionary.

Each room declares the tables that it writes. `columns.json` in the folder of a run and the tables of `docs/tables.md`
are made from these declarations.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from identikit.results.provenance import text_hash
from identikit.shapes import Tensor
from identikit.texts.text import AnyText, EncodedText

if TYPE_CHECKING:
    from pandas import DataFrame


class DataColumn(NamedTuple):
    """A column: its type in Parquet, what it means, its unit or range, and when a value is missing, if ever.

    A `key` says what a row is about; the keys of a table identify its rows.
    """

    type: str
    meaning: str
    range: str
    missing: str = "never"
    key: bool = False


class DataTable(NamedTuple):
    """A table: what it holds, one row per what, and its columns in order."""

    about: str
    rows: str
    columns: Mapping[str, DataColumn]

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        return tuple(name for name, column in self.columns.items() if column.key)


def number(meaning: str, range: str, missing: str = "never", *, key: bool = False) -> DataColumn:
    """Return a column of real numbers."""
    return DataColumn("double", meaning, range, missing, key)


def count(meaning: str, range: str = "0 or more", *, key: bool = False) -> DataColumn:
    """Return a column of whole numbers."""
    return DataColumn("int64", meaning, range, key=key)


def word(meaning: str, *values: str, key: bool = False) -> DataColumn:
    """Return a column of words: any, or one of `values`."""
    return DataColumn("string", meaning, ", ".join(values) or "any text", key=key)


TEXT = count("number of the text, in the order of the data; joins all tables with `texts`", key=True)
TOKENS = count("number of tokens of the text, special tokens included", "1 or more")
LAYER = count("layer, counted from 0", "0 to layers − 1", key=True)
HEAD = count("head, counted from 0", "0 to heads − 1", key=True)

TEXTS = DataTable(
    "The texts that were read.",
    "one row per text",
    {
        "text": TEXT,
        "first": word("the text, or the first text of a pair"),
        "second": DataColumn("string", "the second text of a pair", "any text", "single texts"),
        "tokens": TOKENS,
        "sha256": word("SHA-256 of the text, the same as in a result's provenance", "64 hexadecimal digits"),
    },
)
"""The table to join the others with; `texts_table` makes it."""


def texts_table(texts: Sequence[AnyText], lengths: Sequence[int]) -> "DataFrame":
    """Return the table `TEXTS` of texts and their lengths in tokens."""
    from pandas import DataFrame

    firsts = []
    seconds = []
    given: list[Any] = [text.text if isinstance(text, EncodedText) else text for text in texts]
    for text in given:
        is_pair = isinstance(text, tuple) and isinstance(text[0], str)
        first, second = text if is_pair else (text, None)
        firsts.append(first if isinstance(first, str) else repr(first))
        seconds.append(second)
    columns = {
        "text": range(len(texts)),
        "first": firsts,
        "second": seconds,
        "tokens": list(lengths),
        "sha256": [text_hash(text) for text in given],
    }
    return DataFrame(columns).astype({"second": "string"})


def tidy_frame(
    axes: Mapping[str, Iterable[object]], columns: Mapping[str, Tensor], tokens: Tensor | None = None
) -> "DataFrame":
    """Return arrays over these axes as a table; `tokens` are the lengths of the texts on the first axis."""
    from pandas import MultiIndex

    index = MultiIndex.from_product([list(values) for values in axes.values()], names=list(axes))
    frame = index.to_frame(index=False)
    if tokens is not None:
        frame.insert(1, "tokens", tokens.numpy()[frame["text"]])
    return frame.assign(**{name: column.flatten().numpy() for name, column in columns.items()})


def markdown(commands: Mapping[str, Mapping[str, DataTable]]) -> str:
    """Return the tables of each command as the Markdown that `docs/tables.md` ends with."""
    lines = []
    for command, tables in commands.items():
        lines.append(f"## identikit {command}\n")
        for name, table in tables.items():
            lines.append(f"### {name}\n\n{table.about} {table.rows.capitalize()}.\n")
            lines.append("| column | type | meaning | range | missing where |\n|---|---|---|---|---|")
            for column, about in table.columns.items():
                lines.append(f"| `{column}` | {about.type} | {about.meaning} | {about.range} | {about.missing} |")
            lines.append("")
    return "\n".join(lines)
