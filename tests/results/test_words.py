"""A document says the same on a terminal, as plain text, on a page and in LaTeX, whatever is in it."""

import json
import math

import pytest
from rich.console import Console

from identikit.results.words import (
    Column,
    Document,
    Heading,
    Paragraph,
    Table,
    counted,
    decimals,
    joined,
    latex,
    percent,
)

TABLE = Table(
    (Column("token"), Column("certain mass", decimals(2), "right", "certain\nmass"), Column("share", percent, "right")),
    (("[/b]", 0.256, 0.5), (":cat:", math.nan, math.nan), ("a_b", 1.0, 0.125)),
    "Some tokens:",
    (Paragraph("– is not known.", tone="note"),),
)
DOCUMENT = Document(
    (
        Heading("A model", 0),
        Paragraph("Before."),
        Heading("Which?"),
        Paragraph("This one, in 3 rows.", {"rows": 3}),
        TABLE,
        Heading("More", 2),
        Paragraph("And 4 more.", {"rows": 4, "more": 4}, "warning"),
        Heading("Where?"),
        Paragraph("Here [red]."),
    )
)


def test_plain_text_has_aligned_columns_and_what_looks_like_markup_stays():
    assert str(DOCUMENT).splitlines() == [
        "A model",
        "Before.",
        "",
        "Which?",
        "This one, in 3 rows.",
        "",
        "Some tokens:",
        "       certain",
        "token     mass  share",
        "[/b]      0.26    50%",
        ":cat:        –      –",
        "a_b       1.00    12%",
        "– is not known.",
        "",
        "More",
        "And 4 more.",
        "",
        "Where?",
        "Here [red].",
    ]


def test_a_terminal_shows_the_same_words_in_its_own_width():
    console = Console(width=12, color_system="standard", force_terminal=True, legacy_windows=False)
    with console.capture() as captured:
        console.print(Document((Heading("Which?"), Paragraph("one two three four"))))
    assert captured.get().splitlines() == ["", "\x1b[1mWhich?\x1b[0m", "one two ", "three four"]
    assert "\n" not in Document((Paragraph("word " * 100),)).to_text(None)
    assert max(map(len, Document((Paragraph("word " * 100),)).to_text().splitlines())) <= 100


def test_a_page_reads_sections_of_words_and_tables():
    page = DOCUMENT.to_dict()
    assert json.loads(json.dumps(page, allow_nan=False)) == page
    which, where = page["sections"]
    assert which["question"] == "Which?" and where == {"question": "Where?", "paragraphs": ["Here [red]."]}
    assert which["paragraphs"] == [
        "This one, in 3 rows.",
        "Some tokens:",
        {"columns": ["token", "certain mass", "share"], "rows": TABLE.cells()},
        "– is not known.",
        "More",
        "And 4 more.",
    ]


def test_latex_is_a_table_of_booktabs_with_everything_escaped():
    assert TABLE.to_latex().splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{Some tokens}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"token & certain mass & share \\",
        r"\midrule",
        r"{}[/b] & 0.26 & 50\% \\",
        r":cat: & -- & -- \\",
        r"a\_b & 1.00 & 12\% \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\par\smallskip{\footnotesize -- is not known.}",
        r"\end{table}",
    ]
    whole = DOCUMENT.to_latex()
    assert (
        whole.startswith("\\section*{A model}\n\nBefore.\n\n\\subsection*{Which?}")
        and "\\subsubsection*{More}" in whole
    )
    assert latex(r"#$%&_{}") == r"\#\$\%\&\_\{\}"
    assert latex(r"\^~<s>|--json") == (
        r"\textbackslash{}\textasciicircum{}\textasciitilde{}\textless{}s\textgreater{}\textbar{}-{}-json"
    )


def test_values_are_read_from_the_document():
    assert DOCUMENT.tables == [TABLE] and TABLE.column("certain mass")[0] == 0.256
    assert DOCUMENT.facts == {"rows": 3, "more": 4}
    assert DOCUMENT.under("More").facts == {"rows": 4, "more": 4}
    assert DOCUMENT.under("Which?").blocks == DOCUMENT.blocks[3:7] and DOCUMENT.under("Who?").blocks == ()
    assert [paragraph.words for paragraph in DOCUMENT.under("Which?").paragraphs][1] == "– is not known."


def test_sentences_of_a_paragraph_have_facts_of_their_own_names():
    sentences = [Paragraph("One.", {"one": 1}), Paragraph("Two.", {"two": 2})]
    assert joined(sentences, "note") == Paragraph("One. Two.", {"one": 1, "two": 2}, "note")
    with pytest.raises(AssertionError, match="facts of one name"):
        joined([*sentences, Paragraph("Again one.", {"one": 3})])


def test_counts():
    assert [counted(1, "row"), counted(2000, "row"), counted(2, "was", "were")] == ["1 row", "2,000 rows", "2 were"]
