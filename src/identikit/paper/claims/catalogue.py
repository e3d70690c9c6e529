"""The claims of the paper, with its numbers, and how each is judged on another model; and then our own."""

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
    clauses,
)
from identikit.paper.evidence import Evidence

CLAIMS: Mapping[str, Claim] = {
    **datasets.claim,
    **attention.claim,
    **identity.claim,
    **probing.claim,
    **attribution.claim,
    **context.claim,
    **attention.ours,
}


def judge(claim: Claim, evidence: Evidence, norm: str = "") -> Finding:
    """Judge a claim on the evidence, which must hold the tables that the claim needs."""
    if claim.by_norm and norm not in NORMS:
        raise InputError(f"Judging {claim.name}: norm={shortened(norm)} is not known. Use {', '.join(NORMS)}.")
    missing = [name for need in claim.needs if (name := need.format(norm=norm)) not in evidence.tables]
    if missing:
        raise InputError(
            f"Judging {claim.name} on {evidence.data}: the table {', '.join(missing)} is missing. Compute it first."
        )
    try:
        judged = claim.judge(replace(evidence, norm=norm))
    except NotApplicableError as reason:
        return Finding(Verdict.NOT_APPLICABLE, NOTHING, str(reason))
    if evidence.texts >= claim.texts or judged.certain:
        return judged
    few = f"only {evidence.texts} {'text' if evidence.texts == 1 else 'texts'}; it takes {claim.texts}"
    return Finding(Verdict.UNDECIDED, judged.measured, clauses(judged.why, few))


def sample_sizes() -> list[str]:
    """Say which claims need how many texts, a line each."""
    counts = {texts: sum(claim.texts == texts for claim in CLAIMS.values()) for texts in TEXTS}
    return [f"{needed(texts)}: {what} ({counts[texts]} claims)" for texts, what in TEXTS.items()]


def needed(texts: int) -> str:
    """How many texts a claim needs, in words."""
    if texts == WHOLE:
        return "the whole dataset"
    return "1 text" if texts == 1 else f"{texts} texts"
