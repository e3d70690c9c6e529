"""The claims of the paper, with its numbers, and how each is judged on another model; and then our own."""

from collections.abc import Mapping
from functools import partial

from identikit.checks import shortened
from identikit.errors import InputError
from identikit.maths.jacobian import NORMS
from identikit.paper.claims.attention import ATTENTION
from identikit.paper.claims.attribution import ATTRIBUTION
from identikit.paper.claims.certainty import CERTAINTY
from identikit.paper.claims.context import CONTEXT
from identikit.paper.claims.estimates import percent
from identikit.paper.claims.identity import IDENTITY
from identikit.paper.claims.judgements import (
    NOTHING,
    TEXTS,
    WHOLE,
    Claim,
    Finding,
    Judge,
    NotApplicableError,
    Verdict,
    finding,
    table,
)
from identikit.paper.claims.probing import PROBING
from identikit.paper.evidence import Evidence


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
        found = claim.judge(evidence, norm)
    except NotApplicableError as reason:
        return Finding(Verdict.NOT_APPLICABLE, NOTHING, str(reason))
    if evidence.texts >= claim.texts or found.certain:
        return found
    few = f"only {evidence.texts} {'text' if evidence.texts == 1 else 'texts'}; it takes {claim.texts}"
    return Finding(Verdict.UNDECIDED, found.measured, "; ".join(clause for clause in (found.why, few) if clause))


def _size(texts: int, tokens: int | None = None) -> Judge:
    def judged(evidence: Evidence, _: str) -> Finding:
        holds = evidence.texts == texts and tokens in (None, evidence.tokens)
        return finding(holds, f"{evidence.texts:,} texts, {evidence.tokens:,} tokens")

    return judged


def _lengths(least: int, greatest: int, mean: int) -> Judge:
    def judged(evidence: Evidence, _: str) -> Finding:
        tokens = table(evidence, "lengths")["tokens"]
        measured = f"{tokens.min()} to {tokens.max()}, {tokens.mean():.1f} on average"
        return finding((tokens.min(), tokens.max(), round(tokens.mean())) == (least, greatest, mean), measured)

    return judged


def _chance(paper: float, digits: int) -> Judge:
    """Judge the rate of guessing: 1 over the average length."""

    def judged(evidence: Evidence, _: str) -> Finding:
        chance = 100 * evidence.texts / evidence.tokens
        return finding(round(chance, digits) == paper, percent(chance / 100, 2))

    return judged


_claim = partial(Claim, section="Appendix D", texts=WHOLE, only=True, by_norm=False)
_sized = partial(_claim, words="The dataset has this size", rule="the same numbers", needs=())
_long = partial(_claim, words="Its texts have this many tokens", rule="the same numbers", needs=("lengths",))
_guessed = partial(
    _claim,
    where="Appendix D.1",
    words="Guessing at random recovers 1 over the average length",
    rule="the same number when rounded like the paper's",
    needs=(),
)

DATASETS = (
    _sized(
        "mrpc-size",
        "Section 4.1",
        section="Section 4",
        paper="408 texts, 21,723 tokens",
        data="mrpc",
        judge=_size(408, 21_723),
    ),
    _sized("cola-size", "Appendix D", paper="1,043 texts", data="cola", judge=_size(1043)),
    _sized("mnli-size", "Appendix D", paper="4,000 texts, 155,964 tokens", data="mnli", judge=_size(4000, 155_964)),
    _sized(
        "mnli-500-size", "Appendix D.1", paper="500 texts, 19,839 tokens", data="mnli-500", judge=_size(500, 19_839)
    ),
    _long(
        "mrpc-lengths",
        "Section 4.1",
        section="Section 4",
        paper="26 to 92, 58 on average",
        data="mrpc",
        judge=_lengths(26, 92, 58),
    ),
    _long("cola-lengths", "Appendix D", paper="5 to 35, 11 on average", data="cola", judge=_lengths(5, 35, 11)),
    _long("mnli-lengths", "Appendix D", paper="6 to 128, 39 on average", data="mnli", judge=_lengths(6, 128, 39)),
    _guessed("mrpc-chance", paper="1.7 %", data="mrpc", judge=_chance(1.7, 1)),
    _guessed("cola-chance", paper="9 %", data="cola", judge=_chance(9.0, 0)),
    _guessed("mnli-chance", paper="2.6 %", data="mnli", judge=_chance(2.6, 1)),
)

CLAIMS: Mapping[str, Claim] = {
    claim.name: claim for claim in (*DATASETS, *ATTENTION, *IDENTITY, *PROBING, *ATTRIBUTION, *CONTEXT, *CERTAINTY)
}


def sample_sizes() -> list[str]:
    """Say which claims need how many texts, a line each."""
    counts = {texts: sum(claim.texts == texts for claim in CLAIMS.values()) for texts in TEXTS}
    return [f"{needed(texts)}: {what} ({counts[texts]} claims)" for texts, what in TEXTS.items()]


def needed(texts: int) -> str:
    """How many texts a claim needs, in words."""
    return "the whole dataset" if texts == WHOLE else "1 text" if texts == 1 else f"{texts} texts"
