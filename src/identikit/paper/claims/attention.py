"""Claims on attention: its null space, and effective attention beside raw attention (section 3, Appendix A)."""

from functools import partial

from identikit.paper.claims.claim import (
    AVERAGED,
    EXACT,
    Basis,
    Claims,
    Finding,
    NotApplicableError,
    Verdict,
    finding,
    layers_within,
)
from identikit.paper.claims.estimates import percent, rank_trend
from identikit.paper.evidence import Evidence, Table
from identikit.paper.figures.attention import passage, passage_head

ROUNDING = 1e-6  # a correlation of 1 within floating point
PEAK = 1.5  # how many times the attention elsewhere counts as a peak
LIKELY = 0.01  # the p-value of a clear trend
POWERFUL = 100  # texts enough to see a trend if there is one
TYPES = {"cls": "[CLS]", "sep": "[SEP]", "punctuation": "period or comma"}
MIDDLE = (1 / 4, 3 / 4)  # parts of the depth
DEEP = (3 / 4, 1.0)
RISE = (
    "raw attention in the layers that lie wholly within {} is at least 1.5 times that elsewhere, and the rise of "
    "effective attention there is at most a tenth of the rise of raw attention"
)
_TYPES = Basis(("types", "correlation"), "wikitext", AVERAGED)
_PASSAGE = Basis(("passage",), "", EXACT)

claim = Claims()


@claim("null-space-bound", "Section 3.2, Eq. 3 and 6", Basis(("null_dimension",), "wikitext", EXACT), paper="proved")
def _null_bound(evidence: Evidence) -> Finding:
    """T has rank at most min(n, d_v), so its null space has dimension at least n − d_v.

    Holds if: rank at most min(keys that the row sees, d_v) in every row, head, layer and text; without a mask a row
    sees n keys.

    Judge Eq. 3 and 6 row by row: under a mask, the T of a row has only the values of the keys that it sees.
    """
    null = evidence.tables["null_dimension"]
    bounded = null["slack_least"] >= 0
    equal = bounded & (null["slack_greatest"] == 0)
    measured = f"{percent(bounded.mean())} of texts and layers, equality of every row in {percent(equal.mean())}"
    return finding(bounded.all(), measured)


def all_one_in_short_texts(texts: Table, column: str, limit: int) -> Finding:
    """Judge that a number is 1 in every text of at most `limit` tokens."""
    short = texts.query("tokens <= @limit")
    if short.empty:
        raise NotApplicableError(f"no text has {limit} tokens or fewer")
    least = short[column].min()
    return finding(least >= 1 - ROUNDING, f"at least {least:.6f} in {len(short)} texts of at most {limit} tokens")


def falls_with_length(texts: Table, column: str, limit: int) -> Finding:
    """Judge that a number of each text falls with the text's length beyond a limit."""
    long = texts.query("tokens > @limit")
    if long["tokens"].nunique() < 2:
        raise NotApplicableError(f"no two texts of different length have more than {limit} tokens")
    rank = 0.0
    pvalue = 1.0
    measured = f"{long[column].iloc[0]:.2f} at every length"
    if long[column].nunique() > 1:
        rank, pvalue = rank_trend(long["tokens"], long[column])
        chance = f"p = {pvalue:.1g}" if pvalue > 0 else "p < 1e-300"
        measured = f"rank correlation {rank:.2f}, {chance}, {len(long)} texts"
    if pvalue >= LIKELY and len(long) < POWERFUL:
        why = f"{len(long)} texts above {limit} tokens show no clear trend, and it takes {POWERFUL} to rule one out"
        return Finding(Verdict.UNDECIDED, measured, why)
    return finding(rank < 0 and pvalue < LIKELY, measured)


def _correlation(evidence: Evidence) -> Table:
    """The correlation of each text over all layers and heads."""
    return evidence.tables["correlation"].dropna(subset="pearson")


@claim(
    "correlation-one-in-short-texts",
    "Section 3.5, Fig. 1a",
    Basis(("correlation",), "wikitext", EXACT),
    paper="1 below 64 tokens",
)
def _one_where_short(evidence: Evidence) -> Finding:
    """Up to d_v tokens, effective attention equals raw attention.

    Holds if: Pearson correlation at least 1 − 1e-6 in every text of at most d_v tokens.
    """
    return all_one_in_short_texts(_correlation(evidence), "pearson", evidence.subject.d_value)


@claim(
    "correlation-falls-with-length",
    "Section 3.5, Fig. 1a",
    Basis(("correlation",), "wikitext", AVERAGED),
    paper="decreases with sequence length",
)
def _falls_where_long(evidence: Evidence) -> Finding:
    """Beyond d_v tokens, the correlation falls with length.

    Holds if: over texts of more than d_v tokens, the Spearman correlation of length with Pearson correlation is
    negative with p < 0.01.
    """
    return falls_with_length(_correlation(evidence), "pearson", evidence.subject.d_value)


def _received(evidence: Evidence, *types: str) -> Table:
    """What token types receive from all tokens, averaged over heads: columns are map and type, rows layers."""
    limit = evidence.subject.d_value
    if (evidence.tables["correlation"]["tokens"] <= limit).all():
        raise NotApplicableError(f"no text has more than {limit} tokens, so there is no null space")
    everyone = evidence.tables["types"].query("source == 'all'")
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


def _peak_disappears(evidence: Evidence, target: str, part: tuple[float, float]) -> Finding:
    """Judge that raw attention to a type peaks in a part of the depth, and effective attention does not."""
    received = _received(evidence, target)
    inside = layers_inside(received.index.to_series(), evidence.subject.n_layers, part)
    there = received[inside].mean()
    elsewhere = received[~inside].mean()
    rise = there - elsewhere
    peaks = there["raw", target] >= PEAK * elsewhere["raw", target]
    measured = ", ".join(
        f"{name} {there[name, target]:.3f} against {elsewhere[name, target]:.3f}" for name in ("raw", "effective")
    )
    why = "" if peaks else "raw attention has no peak there"
    return finding(peaks and rise["effective", target] <= rise["raw", target] / 10, measured, why)


claim(
    "sep-peak-disappears",
    "Section 3.5, Fig. 1b and 1c",
    _TYPES,
    words="Raw attention to [SEP] peaks in middle layers; effective attention does not",
    paper="the peak has disappeared",
    rule=RISE.format("the middle half of the depth"),
)(partial(_peak_disappears, target="sep", part=MIDDLE))


@claim("sep-attention-in-null-space", "Section 3.5 and Appendix A.2, Fig. 5", _TYPES, paper="most of it")
def _mostly_null(evidence: Evidence) -> Finding:
    """In middle layers, raw attention to [SEP] lies in the null space.

    Holds if: more than half of the raw attention to [SEP], in the layers that lie wholly within the middle half of the
    depth.
    """
    received = _received(evidence, "sep")
    inside = received[layers_inside(received.index.to_series(), evidence.subject.n_layers, MIDDLE)].sum()
    share = inside["null_space", "sep"] / inside["raw", "sep"]
    return finding(share > 0.5, percent(share))


claim(
    "punctuation-peak-disappears",
    "Section 3.5, Fig. 1b and 1c",
    _TYPES,
    words="Raw attention to periods and commas peaks in the deepest layers; effective attention does not",
    paper="a sharp peak in layers 10 to 12, in the null space",
    rule=RISE.format("the last quarter of the depth (at least the last layer)"),
)(partial(_peak_disappears, target="punctuation", part=DEEP))


@claim("punctuation-over-special-tokens", "Section 3.5, Fig. 1c", _TYPES, paper="generally")
def _punctuation_ahead(evidence: Evidence) -> Finding:
    """Periods and commas get more effective attention than [CLS] and [SEP].

    Holds if: more than [CLS] and more than [SEP] in more than half of the layers.
    """
    effective = _received(evidence, *TYPES)["effective"]
    ahead = effective["punctuation"] > effective[["cls", "sep"]].max(axis=1)
    means = ", ".join(f"{name} {effective[name].mean():.3f}" for name in TYPES)
    return finding(ahead.mean() > 0.5, f"at {ahead.sum()} of {len(ahead)} layers ({means})")


def _on_special(evidence: Evidence) -> Table:
    """The passage's attention to special tokens in the head that Fig. 6 shows."""
    head: Table = passage_head(evidence)
    limit = evidence.subject.d_value
    if head["key"].nunique() <= limit:
        raise NotApplicableError(f"the passage has at most {limit} tokens, so there is no null space")
    if not head["special"].any():
        raise NotApplicableError("the passage has no [CLS] and [SEP]")
    return head[head["special"]]


@claim(
    "passage-special-tokens-vanish",
    "Appendix A.3, Fig. 6",
    _PASSAGE,
    paper="vanished; the null space carries all of it",
)
def _special_vanish(evidence: Evidence) -> Finding:
    """In the passage, effective attention to [CLS] and [SEP] has vanished.

    Holds if: less than a tenth of the raw attention to them, in the head that pays them most.
    """
    special = _on_special(evidence)
    raw, effective = special.groupby("key")[["raw", "effective"]].mean().abs().sum()  # so that signs do not cancel
    return finding(effective < raw / 10, f"raw {raw:.2f}, effective {effective:.2f} in head {special['head'].iloc[0]}")


@claim("passage-make-to-them", "Appendix A.3, Fig. 6", _PASSAGE, paper="“make” to “them”, 48 positions away")
def _make_them(evidence: Evidence) -> Finding:
    """In the passage, the largest effective weight off the diagonal is from “make” to “them” in the first sentence.

    Holds if: in the head that looks most at special tokens, the largest effective weight at least 2 positions away and
    not on a special token is from “make” to “them” (which cannot be the “them” right after it).
    """
    _on_special(evidence)
    shown: Table = passage(evidence)
    queries = shown["query_token"].str.lstrip("Ġ▁")
    keys = shown["key_token"].str.lstrip("Ġ▁")
    if not (queries == "make").any() or not (keys == "them").any():
        raise NotApplicableError("the tokenizer has no pieces “make” and “them” in the passage")
    place = shown["highlighted"].idxmax()
    away = abs(shown["query"][place] - shown["key"][place])
    measured = f"“{queries[place]}” to “{keys[place]}”, {away} away, in head {shown['head'][place]}"
    return finding((queries[place], keys[place]) == ("make", "them"), measured)
