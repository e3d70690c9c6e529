"""The claims as a person reads them in a terminal of 100 columns, and as rows of a file."""

from dataclasses import replace
from io import StringIO

import pandas as pd
from rich.console import Console

from identikit.paper.claims.catalogue import CLAIMS
from identikit.paper.claims.claim import NOTHING, Finding, Verdict
from identikit.paper.claims.report import (
    COLUMNS,
    JudgedClaim,
    by_section,
    claims_table,
    counts_in_words,
    read_rows,
    rows,
)

HOLDS, FAILS, UNDECIDED, NOT_APPLICABLE = Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED, Verdict.NOT_APPLICABLE
LONG = "layer 6 of 6 stands for the paper's 12"


def one(name: str, *findings: Finding, data: str = "mrpc") -> JudgedClaim:
    claim = replace(CLAIMS[name], words=f"words of {name}", paper="93 %")
    norms = ("frobenius", "spectral", "sum") if claim.by_norm else ("",)
    return JudgedClaim(claim, data, dict(zip(norms, findings, strict=False)))


def made() -> list[JudgedClaim]:
    """Six claims; one is judged by three norms, with different verdicts."""
    return [
        one(
            "own-contribution-last-layer",
            Finding(HOLDS, "10.7 %", LONG),
            Finding(FAILS, "11.8 %", LONG),
            Finding(FAILS, "12.8 %", LONG),
        ),
        one("mostly-identifiable", Finding(HOLDS, "91.5 %", "3 folds")),
        one("finetuning-hurts-l2-mrpc", Finding(NOT_APPLICABLE, NOTHING, "the model is causal")),
        one("cola-size", Finding(FAILS, "12 texts"), data="cola"),
        one("mnli-size", Finding(HOLDS, "4,000 texts"), data="mnli"),
        one("cosine-over-l2", Finding(UNDECIDED, "80.1 % against 80.0 %", "24 texts: too few"), data=""),
    ]


def printed(judged: list[JudgedClaim], *, colour: bool = False) -> str:
    console = Console(width=100, record=True, file=StringIO(), color_system="standard")
    console.print(claims_table(judged))
    return console.export_text(styles=colour)


def test_claims_are_gathered_by_section_in_the_papers_order():
    sections = by_section(made())
    assert list(sections) == ["Section 4", "Section 5", "Appendix B", "Appendix D"]
    assert [judged.data for judged in sections["Appendix D"]] == ["cola", "mnli"]
    (own,) = sections["Section 5"]
    assert own.verdict == Verdict.MIXED and own.remark == LONG


def test_what_only_some_norms_say_is_no_common_remark_and_a_missing_norm_is_told():
    own = made()[0]
    other = replace(own, findings={**own.findings, "spectral": Finding(FAILS, "11.8 %", "another")})
    assert other.remark == ""
    text = printed([other])
    assert "another" in text and "stands for the" in text and "not computed" not in text
    assert "not computed" in printed([replace(own, findings={"frobenius": own.findings["frobenius"]})])


def test_rows_are_read_again_as_they_were():
    """Those of the registry: a row holds a claim's words, and is read by its name."""
    judged = [replace(found, claim=CLAIMS[found.claim.name]) for found in made()]
    table = pd.DataFrame(rows(judged), columns=COLUMNS)
    assert len(table) == 8 and not table.isna().any().any()
    assert read_rows(table) == judged
    assert rows(made())[1] == {
        "claim": "own-contribution-last-layer", "section": "Section 5", "where": "Section 5.2, Fig. 3a",
        "words": "words of own-contribution-last-layer", "paper": "93 %", "rule": "within 10 % of the paper's number",
        "norm": "spectral", "verdict": "does not hold", "measured": "11.8 %", "why": LONG, "data": "mrpc",
    }  # fmt: skip


def test_norms_stand_side_by_side_and_the_paper_beside_the_measured():
    lines = printed(made()).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert any(all(name in line for name in ("claim", "paper", "Frobenius", "spectral", "sum")) for line in lines)
    verdicts = [line for line in lines if line.count("does not hold") == 2]
    assert verdicts[0].index("93 %") < verdicts[0].index("✓ holds") < verdicts[0].index("✗ does not hold")
    assert any(line.index("10.7 %") < line.index("11.8 %") < line.index("12.8 %") for line in lines if "10.7 %" in line)


def test_everything_is_said_once():
    flat = " ".join(printed(made()).split())
    for words in ("Section 4: Token identifiability", "✓ holds", "91.5 %", "3 folds", "12 texts", "? undecided"):
        assert words in flat
    assert flat.count("stands for") == 1  # of three findings that say the same
    assert "– not applicable" in flat and "the model is causal" in flat and "– –" not in flat
    assert "Fig. 2a ·" in flat and "24 texts: too few" in flat


def test_our_own_claims_stand_apart_and_are_counted_apart():
    ours = replace(one("sep-peak-certain", Finding(FAILS, "0.1"), data="wikitext"), claim=CLAIMS["sep-peak-certain"])
    judged = [ours, *made()]
    assert list(by_section(judged))[-1] == "Beside the paper"
    assert counts_in_words(judged).endswith("to this model. 1 claim of ours: 1 does not hold.")
    text = printed(judged)
    assert text.index("Appendix D: Other") < text.index("Beside the paper: our own") < text.index("not in the paper")
    assert [row["section"] for row in rows(judged)][:2] == ["Beside the paper", "Section 5"]


def test_verdicts_are_coloured_and_markup_in_a_name_is_text():
    text = printed(made(), colour=True)
    for colour, words in ((32, "✓ holds"), (31, "✗ does not hold"), (33, "? undecided")):
        assert f"\x1b[1;{colour}m{words}" in text
    judged = made()[1]
    assert "[bold]x[/]" in printed([replace(judged, claim=replace(judged.claim, words="[bold]x[/]"))])


def test_counts():
    assert counts_in_words([]) == "No claim was judged."
    assert counts_in_words(made()[1:2]) == "1 claim: 1 holds."
    whole = (
        "6 claims: 2 hold, 1 does not hold, 1 depends on the norm, 1 is undecided, 1 is not applicable to this model."
    )
    assert counts_in_words(made()) == whole
    assert whole in " ".join(printed(made()).split())
