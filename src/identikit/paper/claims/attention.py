"""Claims on attention: its null space, and effective attention beside raw attention (section 3, Appendix A)."""

from functools import partial

from scipy.stats import spearmanr

from identikit.paper.claims.estimates import percent
from identikit.paper.claims.judgements import (
    AVERAGED,
    EXACT,
    Claim,
    Finding,
    Judge,
    NotApplicableError,
    Table,
    Verdict,
    finding,
    layers_within,
    table,
)
from identikit.paper.evidence import Evidence
from identikit.paper.figures.attention import passage, passage_head

ROUNDING = 1e-6  # a correlation of 1 within floating point
PEAK = 1.5  # how many times the attention elsewhere counts as a peak
LIKELY, POWERFUL = 0.01, 100  # the p-value of a clear trend, and texts enough to see one if there is one
TYPES = {"cls": "[CLS]", "sep": "[SEP]", "punctuation": "period or comma"}
MIDDLE, DEEP = (1 / 4, 3 / 4), (3 / 4, 1.0)  # parts of the depth: middle half, last quarter


def _null_bound(evidence: Evidence, _: str) -> Finding:
    """Judge Eq. 3 and 6 row by row: under a mask, the T of a row has only the values of the keys that it sees."""
    null = table(evidence, "null_dimension")
    bounded = null["slack_least"] >= 0
    equal = bounded & (null["slack_greatest"] == 0)
    measured = f"{percent(bounded.mean())} of texts and layers, equality of every row in {percent(equal.mean())}"
    return finding(bounded.all(), measured)


def _overall(evidence: Evidence) -> Table:
    """The correlation of each text over all layers and heads."""
    return table(evidence, "correlation").dropna(subset="pearson")


def _one_where_short(evidence: Evidence, _: str) -> Finding:
    limit = evidence.subject.d_value
    short = _overall(evidence).query("tokens <= @limit")
    if short.empty:
        raise NotApplicableError(f"no text has {limit} tokens or fewer")
    least = short["pearson"].min()
    measured = f"at least {least:.6f} in {len(short)} texts of at most {limit} tokens"
    return finding(least >= 1 - ROUNDING, measured)


def _falls_where_long(evidence: Evidence, _: str) -> Finding:
    return falls_with_length(_overall(evidence), "pearson", evidence.subject.d_value)


def falls_with_length(texts: Table, column: str, limit: int) -> Finding:
    """Judge that a number of each text falls with the text's length beyond a limit."""
    long = texts.query("tokens > @limit")
    if long["tokens"].nunique() < 2:
        raise NotApplicableError(f"no two texts of different length have more than {limit} tokens")
    if long[column].nunique() < 2:
        rank, pvalue, measured = 0.0, 1.0, f"{long[column].iloc[0]:.2f} at every length"
    else:
        found: Table = spearmanr(long["tokens"], long[column])
        rank, pvalue = float(found.statistic), float(found.pvalue)
        chance = f"p = {pvalue:.1g}" if pvalue > 0 else "p < 1e-300"
        measured = f"rank correlation {rank:.2f}, {chance}, {len(long)} texts"
    if pvalue >= LIKELY and len(long) < POWERFUL:
        why = f"{len(long)} texts above {limit} tokens show no clear trend, and it takes {POWERFUL} to rule one out"
        return Finding(Verdict.UNDECIDED, measured, why)
    return finding(rank < 0 and pvalue < LIKELY, measured)


def _received(evidence: Evidence, *types: str) -> Table:
    """What token types receive from all tokens, averaged over heads: columns are map and type, rows layers."""
    limit = evidence.subject.d_value
    if (table(evidence, "correlation")["tokens"] <= limit).all():
        raise NotApplicableError(f"no text has more than {limit} tokens, so there is no null space")
    everyone = table(evidence, "types").query("source == 'all'")
    received = everyone.pivot_table(index="layer", columns=["map", "target"], values="attention")
    absent = [TYPES[name] for name in types if not received["raw", name].any()]
    if absent:
        raise NotApplicableError(f"these texts have no {' and no '.join(absent)}")
    return received


def layers_inside(layers: Table, n_layers: int, part: tuple[float, float]) -> Table:
    """Say which layers are in a part of the depth; some must be, and some must not."""
    inside = layers.isin(layers_within(n_layers, *part))
    if inside.all() or not inside.any():
        raise NotApplicableError("too few layers to tell this part of the depth from the rest")
    return inside


def _peak_disappears(target: str, part: tuple[float, float]) -> Judge:
    """Judge that raw attention to a type peaks in a part of the depth, and effective attention does not."""

    def judge(evidence: Evidence, _: str) -> Finding:
        received = _received(evidence, target)
        inside = layers_inside(received.index, evidence.subject.n_layers, part)
        there, elsewhere = received[inside].mean(), received[~inside].mean()
        peaks = there["raw", target] >= PEAK * elsewhere["raw", target]
        raw, effective = ((there - elsewhere)[name, target] for name in ("raw", "effective"))
        told = (
            f"{name} {there[name, target]:.3f} against {elsewhere[name, target]:.3f}" for name in ("raw", "effective")
        )
        why = "" if peaks else "raw attention has no peak there"
        return finding(peaks and effective <= raw / 10, ", ".join(told), why)

    return judge


def _mostly_null(target: str, part: tuple[float, float]) -> Judge:
    """Judge that most of the raw attention to a type, in a part of the depth, is in the null space."""

    def judge(evidence: Evidence, _: str) -> Finding:
        received = _received(evidence, target)
        inside = received[layers_inside(received.index, evidence.subject.n_layers, part)].sum()
        share = inside["null_space", target] / inside["raw", target]
        return finding(share > 0.5, percent(share))

    return judge


def _punctuation_ahead(evidence: Evidence, _: str) -> Finding:
    effective = _received(evidence, *TYPES)["effective"]
    ahead = effective["punctuation"] > effective[["cls", "sep"]].max(axis=1)
    means = ", ".join(f"{name} {effective[name].mean():.3f}" for name in TYPES)
    return finding(ahead.mean() > 0.5, f"at {ahead.sum()} of {len(ahead)} layers ({means})")


def _on_special(evidence: Evidence) -> Table:
    """The passage's attention to special tokens in the head that Fig. 6 shows."""
    chosen: Table = passage_head(evidence)
    if chosen["key"].nunique() <= evidence.subject.d_value:
        raise NotApplicableError(
            f"the passage has at most {evidence.subject.d_value} tokens, so there is no null space"
        )
    if not chosen["special"].any():
        raise NotApplicableError("the passage has no [CLS] and [SEP]")
    return chosen[chosen["special"]]


def _special_vanish(evidence: Evidence, _: str) -> Finding:
    special = _on_special(evidence)
    raw, effective = special.groupby("key")[["raw", "effective"]].mean().abs().sum()  # so that signs do not cancel
    return finding(effective < raw / 10, f"raw {raw:.2f}, effective {effective:.2f} in head {special['head'].iloc[0]}")


def _make_them(evidence: Evidence, _: str) -> Finding:
    _on_special(evidence)
    shown: Table = passage(evidence)
    queries, keys = (shown[f"{side}_token"].str.lstrip("Ġ▁") for side in ("query", "key"))
    if not (queries == "make").any() or not (keys == "them").any():
        raise NotApplicableError("the tokenizer has no pieces “make” and “them” in the passage")
    place = shown["highlighted"].idxmax()
    largest, query, key = shown.loc[place], queries[place], keys[place]
    measured = f"“{query}” to “{key}”, {abs(largest['query'] - largest['key'])} away, in head {largest['head']}"
    return finding((query, key) == ("make", "them"), measured)


RISE = (
    "raw attention in the layers that lie wholly within {} is at least 1.5 times that elsewhere, and the rise of "
    "effective attention there is at most a tenth of the rise of raw attention"
)
_claim = partial(Claim, section="Section 3", texts=EXACT, data="wikitext", only=False, by_norm=False)
_types = partial(_claim, needs=("types", "correlation"), texts=AVERAGED)
_passage = partial(_claim, section="Appendix A", needs=("passage",), data="")

ATTENTION = (
    _claim(
        "null-space-bound",
        "Section 3.2, Eq. 3 and 6",
        "T has rank at most min(n, d_v), so its null space has dimension at least n − d_v",
        "proved",
        "rank at most min(keys that the row sees, d_v) in every row, head, layer and text; without a mask a row sees n "
        "keys",
        needs=("null_dimension",),
        judge=_null_bound,
    ),
    _claim(
        "correlation-one-in-short-texts",
        "Section 3.5, Fig. 1a",
        "Up to d_v tokens, effective attention equals raw attention",
        "1 below 64 tokens",
        "Pearson correlation at least 1 − 1e-6 in every text of at most d_v tokens",
        needs=("correlation",),
        judge=_one_where_short,
    ),
    _claim(
        "correlation-falls-with-length",
        "Section 3.5, Fig. 1a",
        "Beyond d_v tokens, the correlation falls with length",
        "decreases with sequence length",
        "over texts of more than d_v tokens, the Spearman correlation of length with Pearson correlation is negative "
        "with p < 0.01",
        needs=("correlation",),
        texts=AVERAGED,
        judge=_falls_where_long,
    ),
    _types(
        "sep-peak-disappears",
        "Section 3.5, Fig. 1b and 1c",
        "Raw attention to [SEP] peaks in middle layers; effective attention does not",
        "the peak has disappeared",
        RISE.format("the middle half of the depth"),
        judge=_peak_disappears("sep", MIDDLE),
    ),
    _types(
        "sep-attention-in-null-space",
        "Section 3.5 and Appendix A.2, Fig. 5",
        "In middle layers, raw attention to [SEP] lies in the null space",
        "most of it",
        "more than half of the raw attention to [SEP], in the layers that lie wholly within the middle half of the "
        "depth",
        judge=_mostly_null("sep", MIDDLE),
    ),
    _types(
        "punctuation-peak-disappears",
        "Section 3.5, Fig. 1b and 1c",
        "Raw attention to periods and commas peaks in the deepest layers; effective attention does not",
        "a sharp peak in layers 10 to 12, in the null space",
        RISE.format("the last quarter of the depth (at least the last layer)"),
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
    _passage(
        "passage-special-tokens-vanish",
        "Appendix A.3, Fig. 6",
        "In the passage, effective attention to [CLS] and [SEP] has vanished",
        "vanished; the null space carries all of it",
        "less than a tenth of the raw attention to them, in the head that pays them most",
        judge=_special_vanish,
    ),
    _passage(
        "passage-make-to-them",
        "Appendix A.3, Fig. 6",
        "In the passage, the largest effective weight off the diagonal is from “make” to “them” in the first sentence",
        "“make” to “them”, 48 positions away",
        "in the head that looks most at special tokens, the largest effective weight at least 2 positions away and not "
        "on a special token is from “make” to “them” (which cannot be the “them” right after it)",
        judge=_make_them,
    ),
)
