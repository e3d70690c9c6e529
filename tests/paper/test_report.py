"""The claims as a person reads them in a terminal of 100 columns."""

from io import StringIO

import pandas as pd
import pytest
from rich.console import Console

from identikit.paper.claims.report import MIXED, by_section, claims_table, counted

COLUMNS = ["claim", "where", "words", "paper", "rule", "norm", "verdict", "measured", "why", "data"]
LONG = "layer 6 of 6 stands for the paper's 12"


def row(claim: str, where: str, **others: str) -> dict[str, str]:
    told = {"words": f"words of {claim}", "paper": "93 %", "rule": "within 2 points", "norm": "", "data": "mrpc"}
    found = {"verdict": "holds", "measured": "91.5 %", "why": ""}
    return {"claim": claim, "where": where, **told, **found, **others}


def made() -> pd.DataFrame:
    own = {"claim": "own", "where": "Section 5.2, Fig. 3a", "why": LONG}
    return pd.DataFrame(
        [
            row(**own, norm="frobenius", measured="10.7 %"),
            row(**own, norm="spectral", measured="11.8 %", verdict="does not hold"),
            row(**own, norm="sum", measured="12.8 %", verdict="does not hold"),
            row("rate", "Section 4.2, Fig. 2a", why="3 folds"),
            row("peak", "Appendix C.3", verdict="not applicable", measured="–", why="the model is causal"),
            row("size", "Appendix D", data="cola", verdict="does not hold", measured="12 texts"),
            row("size", "Appendix D", data="mnli", measured="4,000 texts"),
            row("collapse", "notes on the paper", data=""),
        ],
        columns=COLUMNS,
    )


def printed(findings: pd.DataFrame, *, colour: bool = False) -> str:
    console = Console(width=100, record=True, file=StringIO(), color_system="standard")
    console.print(claims_table(findings))
    return console.export_text(styles=colour)


def test_claims_are_gathered_by_section_in_the_papers_order():
    sections = by_section(made())
    assert list(sections) == ["Section 4", "Section 5", "Appendix C", "Appendix D", "Beside the paper"]
    assert [claim.data for claim in sections["Appendix D"]] == ["cola", "mnli"]
    (own,) = sections["Section 5"]
    assert own.by_norm and own.verdict == MIXED and own.remark == LONG
    assert [judgement.measured for judgement in own.judgements.values()] == ["10.7 %", "11.8 %", "12.8 %"]


def test_what_only_some_norms_say_is_no_common_remark():
    findings = made()
    findings.loc[1, "why"] = "another"
    (own,) = by_section(findings)["Section 5"]
    assert own.remark == ""
    text = printed(findings)
    assert "another" in text and "stands for the" in text


def test_the_first_section_named_counts():
    findings = made().iloc[3:4].assign(where="Section 3.5 and Appendix A.2, Fig. 5")
    assert list(by_section(findings)) == ["Section 3"]


def test_norms_stand_side_by_side_and_the_paper_beside_the_measured():
    lines = printed(made()).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert any(all(name in line for name in ("claim", "paper", "Frobenius", "spectral", "sum")) for line in lines)
    verdicts = [line for line in lines if "words of own" in line]
    assert verdicts[0].index("93 %") < verdicts[0].index("✓ holds") < verdicts[0].index("✗ does not hold")
    assert verdicts[0].count("✗ does not hold") == 2
    assert any(line.index("10.7 %") < line.index("11.8 %") < line.index("12.8 %") for line in lines if "10.7 %" in line)


def test_everything_is_said_once():
    text = printed(made())
    flat = " ".join(text.split())
    for words in ("Section 4: Token identifiability", "Beside the paper", "✓ holds", "91.5 %", "3 folds", "12 texts"):
        assert words in flat
    assert flat.count("stands for") == 1  # of three judgements that say the same
    assert "– not applicable" in flat and "the model is causal" in flat
    assert "notes on the paper ·" not in flat  # no dataset, no empty mark for it


def test_verdicts_are_coloured():
    text = printed(made(), colour=True)
    assert "\x1b[1;32m✓ holds" in text and "\x1b[1;31m✗ does not hold" in text


def test_markup_in_a_name_is_text():
    assert "[bold]x[/]" in printed(made().iloc[3:4].assign(words="[bold]x[/]"))


def test_a_norm_that_is_missing_is_said():
    assert "not computed" in printed(made().iloc[:2])


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (slice(0, 0), "No claim was judged."),
        (slice(3, 4), "1 claim: 1 holds."),
        (
            slice(None),
            "6 claims: 3 hold, 1 does not hold, 1 depends on the norm, 1 is not applicable to this model.",
        ),
    ],
)
def test_counts(rows, told):
    findings = made().iloc[rows]
    assert counted(by_section(findings)) == told
    assert told in " ".join(printed(findings).split())
