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
        verdicts = {finding.verdict for finding in self.findings.values()}
        return verdicts.pop() if len(verdicts) == 1 else Verdict.MIXED

    @property
    def remark(self) -> str:
        """The clause that several findings share, to be shown once; "" where they differ."""
        clauses = {finding.why for finding in self.findings.values()}
        return clauses.pop() if len(clauses) == 1 and len(self.findings) > 1 else ""


def by_section(judged: Iterable[JudgedClaim]) -> dict[str, list[JudgedClaim]]:
    """Group claims by the sections of the paper, in its order."""
    sections: dict[str, list[JudgedClaim]] = {section: [] for section in SECTIONS}
    for result in judged:
        sections[result.claim.section].append(result)
    return {section: results for section, results in sections.items() if results}


def verdict_counts(judged: Iterable[JudgedClaim]) -> dict[Verdict, int]:
    """Count the claims with each verdict that occurs."""
    counts = Counter(result.verdict for result in judged)
    return {verdict: counts[verdict] for verdict in Verdict if counts[verdict]}


def counts_in_words(judged: Sequence[JudgedClaim]) -> str:
    """Return how many claims came out how, in words; ours are counted separately from the paper's."""
    if not judged:
        return "No claim was judged."
    sentences = []
    for owner, is_ours in (("", False), (" of ours", True)):
        results = [result for result in judged if (result.claim.section == BESIDE) == is_ours]
        if results:
            counts = verdict_counts(results).items()
            parts = ", ".join(f"{count} {verdict.counted[count > 1]}" for verdict, count in counts)
            sentences.append(f"{len(results)} {'claims' if len(results) > 1 else 'claim'}{owner}: {parts}.")
    return " ".join(sentences)


def rows(judged: Iterable[JudgedClaim]) -> list[dict[str, str]]:
    """Return a row of words for each claim and norm, with the columns `COLUMNS`."""
    table = []
    for result in judged:
        claim = {"claim": result.claim.name, "data": result.data}
        claim |= {name: getattr(result.claim, name) for name in ("section", "where", "words", "paper", "rule")}
        for norm, finding in result.findings.items():
            verdict = finding.verdict.value
            table.append(claim | {"norm": norm, "verdict": verdict, "measured": finding.measured, "why": finding.why})
    return table


def read_rows(table: "DataFrame") -> list[JudgedClaim]:
    """Read judged claims back from a table that was made from `rows`, such as `claims.parquet`."""
    findings: dict[tuple[str, str], dict[str, Finding]] = {}
    for row in table.to_dict("records"):
        finding = Finding(Verdict(row["verdict"]), row["measured"], row["why"])
        findings.setdefault((row["claim"], row["data"]), {})[row["norm"]] = finding
    return [JudgedClaim(CLAIMS[name], data, by_norm) for (name, data), by_norm in findings.items()]


# The terminal


def claims_table(judged: Sequence[JudgedClaim]) -> RenderableType:
    """Lay out claims by section for a terminal of 100 columns, with what was measured beside the paper's number.

    A claim that was judged under each norm has its findings in one row.
    """
    blocks: list[RenderableType] = []
    for section, results in by_section(judged).items():
        blocks.append(Text(f"\n{section}: {SECTIONS[section]}", style="bold underline"))
        for columns, by_norm in (({"": "measured"}, False), (NORMS, True)):
            alike = [result for result in results if result.claim.by_norm == by_norm]
            if alike:
                blocks += [Text(""), _table(alike, columns)]
    return Group(*blocks, Text(f"\n{counts_in_words(judged)}", style="bold"))


def _table(judged: list[JudgedClaim], columns: Mapping[str, str]) -> Table:
    """Return a table with a row per claim; `columns` are norms with their headings."""
    table = Table(box=box.SIMPLE, show_edge=False, leading=1, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    table.border_style = "dim"
    claim_width, paper_width = (36, 16) if len(columns) == 1 else (29, 14)
    table.add_column("claim", ratio=claim_width, overflow="fold")
    table.add_column("paper", ratio=paper_width, overflow="fold")
    for heading in columns.values():
        table.add_column(heading, ratio=(96 - claim_width - paper_width) // len(columns), overflow="fold")
    for result in judged:
        about = " · ".join(filter(None, (result.claim.where, result.data, result.remark)))
        cells = [_cell(result.findings.get(norm), result.remark) for norm in columns]
        table.add_row(Text.assemble(result.claim.words, (f"\n{about}", "dim")), result.claim.paper, *cells)
    return table


def _cell(finding: Finding | None, remark: str) -> Text:
    if finding is None:
        return Text("not computed", style="dim")
    verdict = f"{finding.verdict.symbol} {finding.verdict}"
    measured = f"\n{finding.measured}" if finding.measured != NOTHING else ""
    why = (f"\n{finding.why}", "dim") if finding.why and not remark else ""
    return Text.assemble((verdict, finding.verdict.style), measured, why)
