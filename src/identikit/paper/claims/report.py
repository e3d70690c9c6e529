"""Judged claims: by section of the paper, counted, as rows for a file, and as a table for a terminal."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from identikit.maths.jacobian import NORMS
from identikit.paper.claims.catalogue import CLAIMS
from identikit.paper.claims.claim import BESIDE, NOTHING, Claim, Finding, Verdict

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
    BESIDE: "our own figures and claims",
}
COLUMNS = ("claim", "section", "where", "words", "paper", "rule", "norm", "verdict", "measured", "why", "data")


@dataclass(frozen=True)
class JudgedClaim:
    """A claim judged on one dataset: its findings by norm, under "" where it does not depend on one."""

    claim: Claim
    data: str
    findings: Mapping[str, Finding]

    @property
    def verdict(self) -> Verdict:
        """The verdict, or `MIXED` where norms disagree."""
        verdicts = {found.verdict for found in self.findings.values()}
        return verdicts.pop() if len(verdicts) == 1 else Verdict.MIXED

    @property
    def remark(self) -> str:
        """What several findings all say beside their numbers, to be said once; "" where they differ."""
        said = {found.why for found in self.findings.values()}
        return said.pop() if len(said) == 1 and len(self.findings) > 1 else ""


def by_section(judged: Iterable[JudgedClaim]) -> dict[str, list[JudgedClaim]]:
    """Gather claims into the sections of the paper, in its order."""
    sections: dict[str, list[JudgedClaim]] = {section: [] for section in SECTIONS}
    for one in judged:
        sections[one.claim.section].append(one)
    return {section: claims for section, claims in sections.items() if claims}


def counts(judged: Iterable[JudgedClaim]) -> dict[Verdict, int]:
    """How many claims have each verdict, where any has: each claim has one."""
    found = Counter(one.verdict for one in judged)
    return {verdict: found[verdict] for verdict in Verdict if found[verdict]}


def counted(judged: Sequence[JudgedClaim]) -> str:
    """Say how many claims there are and how they were judged; ours are counted apart from the paper's."""
    if not judged:
        return "No claim was judged."
    whose = {"": [one for one in judged if one.claim.section != BESIDE]}
    whose[" of ours"] = [one for one in judged if one.claim.section == BESIDE]
    return " ".join(_counted(claims, owner) for owner, claims in whose.items() if claims)


def _counted(judged: Sequence[JudgedClaim], owner: str) -> str:
    parts = ", ".join(f"{count} {verdict.counted[count > 1]}" for verdict, count in counts(judged).items())
    return f"{len(judged)} {'claims' if len(judged) > 1 else 'claim'}{owner}: {parts}."


def rows(judged: Iterable[JudgedClaim]) -> list[dict[str, str]]:
    """A row of words for each claim and norm, with the columns `COLUMNS`."""
    table = []
    for one in judged:
        claim = {"claim": one.claim.name, "data": one.data}
        claim |= {name: getattr(one.claim, name) for name in ("section", "where", "words", "paper", "rule")}
        for norm, found in one.findings.items():
            finding = {"norm": norm, "verdict": found.verdict.value, "measured": found.measured, "why": found.why}
            table.append(claim | finding)
    return table


def read_rows(table: "DataFrame") -> list[JudgedClaim]:
    """The judged claims of a table that was made from `rows`, as `claims.parquet` holds it."""
    findings: dict[tuple[str, str], dict[str, Finding]] = {}
    for row in table.to_dict("records"):
        found = Finding(Verdict(row["verdict"]), row["measured"], row["why"])
        findings.setdefault((row["claim"], row["data"]), {})[row["norm"]] = found
    return [JudgedClaim(CLAIMS[name], data, found) for (name, data), found in findings.items()]


# The terminal


def claims_table(judged: Sequence[JudgedClaim]) -> RenderableType:
    """The claims for a terminal of 100 columns: by section, what was measured beside the paper's number.

    A claim that was judged under each norm has its findings in one row.
    """
    parts: list[RenderableType] = []
    for section, claims in by_section(judged).items():
        parts.append(Text(f"\n{section}: {SECTIONS[section]}", style="bold underline"))
        plain, by_norm = ([one for one in claims if one.claim.by_norm == wanted] for wanted in (False, True))
        tables = [_table(plain, {"": "measured"})] if plain else []
        tables += [_table(by_norm, NORMS)] if by_norm else []
        parts += [part for table in tables for part in (Text(""), table)]
    return Group(*parts, Text(f"\n{counted(judged)}", style="bold"))


def _table(claims: list[JudgedClaim], columns: Mapping[str, str]) -> Table:
    """One row per claim; `columns` are norms with their headings."""
    table = Table(box=box.SIMPLE, show_edge=False, leading=1, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    table.border_style = "dim"
    wide, narrow = (36, 16) if len(columns) == 1 else (29, 14)
    rest = (96 - wide - narrow) // len(columns)
    for heading, width in (("claim", wide), ("paper", narrow), *((heading, rest) for heading in columns.values())):
        table.add_column(heading, ratio=width, overflow="fold")
    for one in claims:
        about = " · ".join(part for part in (one.claim.where, one.data, one.remark) if part)
        cells = (_cell(one.findings.get(norm), one.remark) for norm in columns)
        table.add_row(Text.assemble(one.claim.words, (f"\n{about}", "dim")), one.claim.paper, *cells)
    return table


def _cell(found: Finding | None, remark: str) -> Text:
    if found is None:
        return Text("not computed", style="dim")
    verdict = f"{found.verdict.symbol} {found.verdict}"
    measured = f"\n{found.measured}" if found.measured != NOTHING else ""
    why = (f"\n{found.why}", "dim") if found.why and not remark else ""
    return Text.assemble((verdict, found.verdict.style), measured, why)
