"""Claims on the datasets themselves: how many texts and tokens they have (section 4.1, Appendix D)."""

from functools import partial

from identikit.paper.claims.claim import WHOLE, Claims, Finding, finding, percent
from identikit.paper.evidence import Evidence

claims = Claims()


def _size(evidence: Evidence, texts: int, tokens: int | None) -> Finding:
    holds = evidence.texts == texts and tokens in (None, evidence.tokens)
    return finding(holds, f"{evidence.texts:,} texts, {evidence.tokens:,} tokens")


for _data, _where, _texts, _tokens in (
    ("mrpc", "Section 4.1", 408, 21_723),
    ("cola", "Appendix D", 1043, None),
    ("mnli", "Appendix D", 4000, 155_964),
    ("mnli-500", "Appendix D.1", 500, 19_839),
):
    claims.on(texts=WHOLE, data=_data, only=True)(
        _where,
        name=f"{_data}-size",
        words="The dataset has this size",
        paper=f"{_texts:,} texts" + (f", {_tokens:,} tokens" if _tokens else ""),
        rule="the same numbers",
    )(partial(_size, texts=_texts, tokens=_tokens))


def _lengths(evidence: Evidence, shortest: int, longest: int, mean: int) -> Finding:
    tokens = evidence.tables["lengths"]["tokens"]
    measured = f"{tokens.min()} to {tokens.max()}, {tokens.mean():.1f} on average"
    return finding((tokens.min(), tokens.max(), round(tokens.mean())) == (shortest, longest, mean), measured)


for _data, _where, _shortest, _longest, _mean in (
    ("mrpc", "Section 4.1", 26, 92, 58),
    ("cola", "Appendix D", 5, 35, 11),
    ("mnli", "Appendix D", 6, 128, 39),
):
    claims.on("lengths", texts=WHOLE, data=_data, only=True)(
        _where,
        name=f"{_data}-lengths",
        words="Its texts have this many tokens",
        paper=f"{_shortest} to {_longest}, {_mean} on average",
        rule="the same numbers",
    )(partial(_lengths, shortest=_shortest, longest=_longest, mean=_mean))


def _chance(evidence: Evidence, paper: str) -> Finding:
    """Judge the rate of guessing at random, rounded as the paper rounds it."""
    chance = 100 * evidence.texts / evidence.tokens
    digits = len(paper.partition(".")[2])
    return finding(round(chance, digits) == float(paper), percent(chance / 100, 2))


for _data, _paper in (("mrpc", "1.7"), ("cola", "9"), ("mnli", "2.6")):
    claims.on(texts=WHOLE, data=_data, only=True)(
        "Appendix D.1",
        name=f"{_data}-chance",
        words="Guessing at random recovers 1 over the average length",
        paper=f"{_paper} %",
        rule="the same number when rounded like the paper's",
    )(partial(_chance, paper=_paper))
