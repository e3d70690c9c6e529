"""The claims of the paper, with its numbers, and how each is judged on another model; and then our own."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from identikit.checks import shortened
from identikit.errors import InputError
from identikit.maths.jacobian import NORMS
from identikit.paper.claims import attention, attribution, context, datasets, identity, probing
from identikit.paper.claims.claim import (
    NOTHING,
    TEXTS,
    WHOLE,
    Claim,
    Finding,
    NotApplicableError,
    Verdict,
    join_clauses,
)
from identikit.paper.evidence import Evidence

CLAIMS: Mapping[str, Claim] = {
    **datasets.claims,
    **attention.claims,
    **identity.claims,
    **probing.claims,
    **attribution.claims,
    **context.claims,
    **attention.ours,
}


def judge(claim: Claim, evidence: Evidence, norm: str = "") -> Finding:
    """Judge a claim on the evidence, which must hold the tables that the claim needs."""
    if claim.by_norm and norm not in NORMS:
        raise InputError(f"Judging {claim.name}: norm={shortened(norm)} is not known. Use {', '.join(NORMS)}.")
    needed = [need.format(norm=norm) for need in claim.needs]
    missing = [name for name in needed if name not in evidence.tables]
    if missing:
        raise InputError(
            f"Judging {claim.name} on {evidence.data}: the table {', '.join(missing)} is missing. Compute it first."
        )
    try:
        finding = claim.judge(replace(evidence, norm=norm))
    except NotApplicableError as reason:
        return Finding(Verdict.NOT_APPLICABLE, NOTHING, str(reason))
    if evidence.texts >= claim.texts or finding.certain:
        return finding
    few = f"only {evidence.texts} {'text' if evidence.texts == 1 else 'texts'}; it takes {claim.texts}"
    return Finding(Verdict.UNDECIDED, finding.measured, join_clauses(finding.why, few))


def sample_sizes() -> list[str]:
    """Return a line for each number of texts with the kind of claims that need it."""
    counts = Counter(claim.texts for claim in CLAIMS.values())
    return [f"{texts_in_words(texts)}: {kind} ({counts[texts]} claims)" for texts, kind in TEXTS.items()]


def texts_in_words(texts: int) -> str:
    """Return how many texts a claim needs, in words."""
    if texts == WHOLE:
        return "the whole dataset"
    return "1 text" if texts == 1 else f"{texts} texts"
