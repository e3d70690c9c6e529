"""The claims of the paper with what was measured beside them: in the paper's order, and as a table for a terminal."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pandas import DataFrame

SECTIONS = {
    "Section 3": "Attention identifiability",
    "Section 4": "Token identifiability",
    "Section 5": "Attribution analysis",
    "Appendix A": "Identifiability of self-attention",
    "Appendix B": "Token identifiability experiments",
    "Appendix C": "Context contribution analysis",
    "Appendix D": "Other datasets",
}
BESIDE = "Beside the paper"
NORMS = {"frobenius": "Frobenius", "spectral": "spectral", "sum": "sum"}
SYMBOLS = {"holds": "✓", "does not hold": "✗", "not applicable": "–"}
MIXED = "depends on the norm"
NOTHING = "–"  # what stands for a measurement where there is none

_STYLES = {"holds": "bold green", "does not hold": "bold red", "not applicable": "bold yellow"}


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, what was measured, and a clause where it helps."""

    verdict: str
    measured: str
    why: str


@dataclass(frozen=True)
class JudgedClaim:
    """A claim on one dataset, with a judgement for each norm it was judged under; "" where it has none."""

    name: str
    where: str
    words: str
    paper: str
    rule: str
    data: str
    judgements: dict[str, Judgement] = field(default_factory=dict)

    @property
    def by_norm(self) -> bool:
        """Whether it was judged under each norm."""
        return "" not in self.judgements

    @property
    def verdict(self) -> str:
        """The verdict, or that it is not the same under all norms."""
        verdicts = {judgement.verdict for judgement in self.judgements.values()}
        return verdicts.pop() if len(verdicts) == 1 else MIXED

    @property
    def remark(self) -> str:
        """What all of several judgements say beside their numbers, to be said once; "" where they differ."""
        said = {judgement.why for judgement in self.judgements.values()}
        return said.pop() if len(said) == 1 and len(self.judgements) > 1 else ""


def section_title(section: str) -> str:
    """The heading of a section or appendix; anything else stands beside the paper."""
    return f"{section}: {SECTIONS[section]}" if section in SECTIONS else BESIDE


def by_section(findings: "DataFrame") -> dict[str, list[JudgedClaim]]:
    """Gather findings into claims, and claims into the sections of the paper, in its order.

    `findings` has the columns claim, where, words, paper, rule, norm ("" or one of `NORMS`), verdict, measured, why and
    data. A claim stands in the section that `where` names first.
    """
    claims: dict[tuple[str, str], JudgedClaim] = {}
    for row in findings.to_dict("records"):
        told = (row[name] for name in ("claim", "where", "words", "paper", "rule", "data"))
        claim = claims.setdefault((row["claim"], row["data"]), JudgedClaim(*told))
        claim.judgements[row["norm"]] = Judgement(row["verdict"], row["measured"], row["why"])
    sections: dict[str, list[JudgedClaim]] = {section: [] for section in (*SECTIONS, BESIDE)}
    for claim in claims.values():
        named = re.search(r"Section \d|Appendix [A-Z]", claim.where)
        sections[named[0] if named and named[0] in SECTIONS else BESIDE].append(claim)
    return {section: judged for section, judged in sections.items() if judged}


def counted(sections: Mapping[str, list[JudgedClaim]]) -> str:
    """Say how many claims there are and how they were judged."""
    counts = Counter(claim.verdict for claims in sections.values() for claim in claims)
    words = {
        "holds": ("holds", "hold"),
        "does not hold": ("does not hold", "do not hold"),
        MIXED: ("depends on the norm", "depend on the norm"),
        "not applicable": ("is not applicable to this model", "are not applicable to this model"),
    }
    parts = [f"{counts[verdict]} {told[counts[verdict] > 1]}" for verdict, told in words.items() if counts[verdict]]
    total = counts.total()
    return f"{total} {'claims' if total > 1 else 'claim'}: {', '.join(parts)}." if total else "No claim was judged."


def claims_table(findings: "DataFrame") -> RenderableType:
    """The claims for a terminal of 100 columns: by section, what was measured beside the paper's number.

    A claim that was judged under each norm has its three judgements in one row.
    """
    sections = by_section(findings)
    parts: list[RenderableType] = []
    for section, claims in sections.items():
        parts.append(Text(f"\n{section_title(section)}", style="bold underline"))
        plain, by_norm = ([claim for claim in claims if claim.by_norm == wanted] for wanted in (False, True))
        tables = [_table(plain, {"": "measured"})] if plain else []
        tables += [_table(by_norm, NORMS)] if by_norm else []
        parts += [part for table in tables for part in (Text(""), table)]
    return Group(*parts, Text(f"\n{counted(sections)}", style="bold"))


def _table(claims: list[JudgedClaim], columns: Mapping[str, str]) -> Table:
    """One row a claim; `columns` are norms with their headings."""
    table = Table(box=box.SIMPLE, show_edge=False, leading=1, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    table.border_style = "dim"
    wide, narrow = (36, 16) if len(columns) == 1 else (29, 14)
    rest = (96 - wide - narrow) // len(columns)
    for heading, width in (("claim", wide), ("paper", narrow), *((heading, rest) for heading in columns.values())):
        table.add_column(heading, ratio=width, overflow="fold")
    for claim in claims:
        about = " · ".join(part for part in (claim.where, claim.data, claim.remark) if part)
        cells = (_cell(claim.judgements.get(norm), claim.remark) for norm in columns)
        table.add_row(Text.assemble(claim.words, (f"\n{about}", "dim")), claim.paper, *cells)
    return table


def _cell(judgement: Judgement | None, remark: str) -> Text:
    if judgement is None:
        return Text("not computed", style="dim")
    verdict = f"{SYMBOLS.get(judgement.verdict, '?')} {judgement.verdict}"
    measured = f"\n{judgement.measured}" if judgement.measured not in ("", NOTHING) else ""
    why = (f"\n{judgement.why}", "dim") if judgement.why and not remark else ""
    return Text.assemble((verdict, _STYLES.get(judgement.verdict, "bold")), measured, why)
