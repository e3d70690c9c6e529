"""Claims on attention: its null space, and effective attention beside raw attention (section 3, Appendix A)."""

from functools import partial

from scipy.stats import spearmanr

from identikit.paper.evidence import Evidence
from identikit.paper.judgements import Claim, Finding, Judge, NotApplicableError, Table, finding, percent, table

ROUNDING = 1e-6  # a correlation of 1 within floating point
SPECIAL = ("[CLS]", "[SEP]", "<s>", "</s>", "<cls>", "<sep>")
TYPES = {"cls": "[CLS]", "sep": "[SEP]", "punctuation": "period or comma"}
MIDDLE, DEEP = (1 / 4, 3 / 4), (3 / 4, 1.0)  # parts of the depth: middle half, deepest quarter


def _null_bound(evidence: Evidence, _: str) -> Finding:
    """Judge Eq. 3 and 6 row by row: a mask takes keys from a row, and its T has only the values of those it sees."""
    null = table(evidence, "null")
    bounded = null["slack_least"] >= 0
    equal = bounded & (null["slack_greatest"] == 0)
    measured = f"{percent(bounded.mean())} of texts and layers, equality of every row in {percent(equal.mean())}"
    return finding(bounded.all(), measured)


def _overall(evidence: Evidence) -> Table:
    """The correlation of each text over all layers and heads."""
    return table(evidence, "correlation").query("layer == 0 and head == 0").dropna(subset="pearson")


def _one_where_short(evidence: Evidence, _: str) -> Finding:
    limit = evidence.subject.d_value
    short = _overall(evidence).query("tokens <= @limit")
    if short.empty:
        raise NotApplicableError(f"no text of at most {limit} tokens")
    least = short["pearson"].min()
    measured = f"{least:.6f} or more in {len(short)} texts of at most {limit} tokens"
    return finding(least >= 1 - ROUNDING, measured)


def _falls_where_long(evidence: Evidence, _: str) -> Finding:
    limit = evidence.subject.d_value
    long = _overall(evidence).query("tokens > @limit")
    if len(long) < 5 or long["tokens"].nunique() < 2:
        raise NotApplicableError(f"{len(long)} texts above {limit} tokens, too few to rank by length")
    if long["pearson"].nunique() < 2:
        return finding(False, f"{long['pearson'].iloc[0]:.2f} at every length")
    rank: Table = spearmanr(long["tokens"], long["pearson"])
    chance = f"p = {rank.pvalue:.1g}" if rank.pvalue > 0 else "p < 1e-300"
    measured = f"rank correlation {rank.statistic:.2f}, {chance}, {len(long)} texts"
    return finding(rank.statistic < 0 and rank.pvalue < 0.01, measured)


def _received(evidence: Evidence, *types: str) -> Table:
    """What token types receive from all tokens, the mean over heads: columns are map and type, rows layers."""
    limit = evidence.subject.d_value
    if (table(evidence, "correlation")["tokens"] <= limit).all():
        raise NotApplicableError(f"no text above {limit} tokens, so no null space")
    everyone = table(evidence, "types").query("source == 'all'")
    received = everyone.pivot_table(index="layer", columns=["map", "target"], values="attention")
    absent = [TYPES[name] for name in types if not received["raw", name].any()]
    if absent:
        raise NotApplicableError(f"no {' and no '.join(absent)} in these texts")
    return received


def _within(received: Table, part: tuple[float, float]) -> Table:
    """Which layers are in a part of the depth; there must be such, and others."""
    depth = received.index / received.index.max()
    inside = (depth > part[0]) & (depth <= part[1])
    if inside.all() or not inside.any():
        raise NotApplicableError("too few layers to tell a part of the depth from the rest")
    return inside


def _peak_disappears(target: str, part: tuple[float, float]) -> Judge:
    """Judge that raw attention to a type is higher in a part of the depth than elsewhere, and effective is not."""

    def judge(evidence: Evidence, _: str) -> Finding:
        received = _received(evidence, target)
        inside = _within(received, part)
        there, elsewhere = received[inside].mean(), received[~inside].mean()
        raw, effective = ((there - elsewhere)[name, target] for name in ("raw", "effective"))
        told = (
            f"{name} {there[name, target]:.3f} against {elsewhere[name, target]:.3f}" for name in ("raw", "effective")
        )
        why = "" if raw > 0 else "raw attention has no peak there"
        return finding(raw > 0 and effective <= raw / 10, ", ".join(told), why)

    return judge


def _mostly_null(target: str, part: tuple[float, float]) -> Judge:
    """Judge that most of the raw attention to a type, in a part of the depth, is in the null space."""

    def judge(evidence: Evidence, _: str) -> Finding:
        received = _received(evidence, target)
        inside = received[_within(received, part)].sum()
        share = inside["null", target] / inside["raw", target]
        return finding(share > 0.5, percent(share))

    return judge


def _punctuation_ahead(evidence: Evidence, _: str) -> Finding:
    effective = _received(evidence, *TYPES)["effective"]
    ahead = effective["punctuation"] > effective[["cls", "sep"]].max(axis=1)
    means = ", ".join(f"{name} {effective[name].mean():.3f}" for name in TYPES)
    return finding(ahead.mean() > 0.5, f"at {ahead.sum()} of {len(ahead)} layers ({means})")


def _special_vanish(evidence: Evidence, _: str) -> Finding:
    passage = table(evidence, "passage")
    if passage["key"].nunique() <= evidence.subject.d_value:
        raise NotApplicableError(f"the passage is no longer than {evidence.subject.d_value} tokens, so no null space")
    special = passage[passage["key_token"].isin(SPECIAL)]
    if special.empty:
        raise NotApplicableError("the passage has no [CLS] and [SEP]")
    keys = special.groupby(["head", "key"])[["raw", "effective"]].mean().abs()  # so that signs do not cancel
    heads = keys.groupby("head").sum()
    head = heads["raw"].idxmax()
    raw, effective = heads.loc[head]
    return finding(effective < raw / 10, f"raw {raw:.2f}, effective {effective:.2f} in head {head}")


_claim = partial(Claim, data="wikitext", only=False, by_norm=False)
_types = partial(_claim, needs=("types", "correlation"))

ATTENTION = (
    _claim(
        "null-space-bound",
        "Section 3.2, Eq. 3 and 6",
        "T has rank at most min(n, d_v), so its null space has dimension at least n − d_v",
        "proved",
        "rank at most min(keys that the row sees, d_v) in every row, head, layer and text; without a mask a row sees n",
        needs=("null",),
        judge=_null_bound,
    ),
    _claim(
        "correlation-one-in-short-texts",
        "Section 3.5, Fig. 1a",
        "Up to d_v tokens effective attention is raw attention",
        "1 below 64 tokens",
        "Pearson correlation at least 1 − 1e-6 in every text of at most d_v tokens",
        needs=("correlation",),
        judge=_one_where_short,
    ),
    _claim(
        "correlation-falls-with-length",
        "Section 3.5, Fig. 1a",
        "Beyond d_v tokens the correlation falls with length",
        "decreases with sequence length",
        "Spearman correlation of length and Pearson correlation negative with p < 0.01, texts above d_v tokens",
        needs=("correlation",),
        judge=_falls_where_long,
    ),
    _types(
        "sep-peak-disappears",
        "Section 3.5, Fig. 1b and 1c",
        "Raw attention to [SEP] peaks in middle layers; effective attention does not",
        "the peak has disappeared",
        "raw attention is higher in the middle half of the layers than elsewhere, effective by at most a tenth of that",
        judge=_peak_disappears("sep", MIDDLE),
    ),
    _types(
        "sep-attention-in-null-space",
        "Section 3.5 and Appendix A.2, Fig. 5",
        "In middle layers raw attention to [SEP] lies in the null space",
        "most of it",
        "more than half of the raw attention to [SEP] in the middle half of the layers",
        judge=_mostly_null("sep", MIDDLE),
    ),
    _types(
        "punctuation-peak-disappears",
        "Section 3.5, Fig. 1b and 1c",
        "Raw attention to periods and commas peaks in the deepest layers; effective attention does not",
        "a sharp peak in layers 10 to 12, in the null space",
        "raw attention is higher in the deepest quarter of layers than elsewhere, effective by at most a tenth of that",
        judge=_peak_disappears("punctuation", DEEP),
    ),
    _types(
        "punctuation-over-special-tokens",
        "Section 3.5, Fig. 1c",
        "Periods and commas get more effective attention than [CLS] and [SEP]",
        "generally",
        "more than [CLS] and more than [SEP] in more than half of the layers",
        judge=_punctuation_ahead,
    ),
    _claim(
        "passage-special-tokens-vanish",
        "Appendix A.3, Fig. 6",
        "In the passage, effective attention to [CLS] and [SEP] has vanished",
        "vanished; the null space carries all of it",
        "less than a tenth of the raw attention to them, in the head that has most of it",
        needs=("passage",),
        data="",
        judge=_special_vanish,
    ),
)
