"""Claims on attention: its null space, and effective beside raw attention (section 3, Appendix A); and our own."""

from functools import partial

import numpy as np

from identikit.attention.certainty import WEIGHTS, mean_over_rows
from identikit.paper.claims.claim import (
    AVERAGED,
    BESIDE,
    EXACT,
    Claims,
    Finding,
    Measurement,
    Verdict,
    decide,
    finding,
    percent,
    rank_trend,
    require,
)
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
ENOUGH = 0.1  # the least raw attention that can be lost
LOST = 0.1  # effective attention loses it where it is below this share of raw attention
MOSTLY = 0.5

NEW = "not in the paper"

claims = Claims()
ours = Claims()
_on_types = claims.on("types", "correlation", data="wikitext", texts=AVERAGED)
_on_passage = claims.on("passage", data="", texts=EXACT)
_on_groups = ours.on("groups", data="wikitext", texts=AVERAGED)
_on_intervals = ours.on("intervals", data="wikitext", texts=AVERAGED)


@claims.on("null_dimension", data="wikitext", texts=EXACT)("Section 3.2, Eq. 3 and 6", paper="proved")
def null_space_bound(evidence: Evidence) -> Finding:
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


def _all_one_in_short_texts(texts: Table, column: str, limit: int) -> Finding:
    """Judge that a number is 1 in every text of at most `limit` tokens."""
    short = texts.query("tokens <= @limit")
    require(len(short), f"no text has {limit} tokens or fewer")
    lowest = short[column].min()
    return finding(lowest >= 1 - ROUNDING, f"at least {lowest:.6f} in {len(short)} texts of at most {limit} tokens")


def _falls_with_length(texts: Table, column: str, limit: int) -> Finding:
    """Judge that a number of each text falls with the text's length beyond a limit."""
    long = texts.query("tokens > @limit")
    require(long["tokens"].nunique() > 1, f"no two texts of different length have more than {limit} tokens")
    if long[column].nunique() > 1:
        rank, pvalue = rank_trend(long["tokens"], long[column])
        chance = f"p = {pvalue:.1g}" if pvalue > 0 else "p < 1e-300"
        measured = f"rank correlation {rank:.2f}, {chance}, {len(long)} texts"
    else:
        rank = 0.0
        pvalue = 1.0
        measured = f"{long[column].iloc[0]:.2f} at every length"
    if pvalue >= LIKELY and len(long) < POWERFUL:
        why = f"{len(long)} texts above {limit} tokens show no clear trend, and it takes {POWERFUL} to rule one out"
        return Finding(Verdict.UNDECIDED, measured, why)
    return finding(rank < 0 and pvalue < LIKELY, measured)


def _correlation(evidence: Evidence) -> Table:
    """The correlation of each text over all layers and heads."""
    return evidence.tables["correlation"].dropna(subset="pearson")


@claims.on("correlation", data="wikitext", texts=EXACT)("Section 3.5, Fig. 1a", paper="1 below 64 tokens")
def correlation_one_in_short_texts(evidence: Evidence) -> Finding:
    """Up to d_v tokens, effective attention equals raw attention.

    Holds if: Pearson correlation at least 1 − 1e-6 in every text of at most d_v tokens.
    """
    return _all_one_in_short_texts(_correlation(evidence), "pearson", evidence.subject.d_value)


@claims.on("correlation", data="wikitext", texts=AVERAGED)(
    "Section 3.5, Fig. 1a", paper="decreases with sequence length"
)
def correlation_falls_with_length(evidence: Evidence) -> Finding:
    """Beyond d_v tokens, the correlation falls with length.

    Holds if: over texts of more than d_v tokens, the Spearman correlation of length with Pearson correlation is
    negative with p < 0.01.
    """
    return _falls_with_length(_correlation(evidence), "pearson", evidence.subject.d_value)


def _received(evidence: Evidence, *types: str) -> Table:
    """What token types receive from all tokens, averaged over heads: columns are map and type, rows layers."""
    limit = evidence.subject.d_value
    long = evidence.tables["correlation"]["tokens"] > limit
    require(long.any(), f"no text has more than {limit} tokens, so there is no null space")
    from_all = evidence.tables["types"].query("source == 'all'")
    received = from_all.pivot_table(index="layer", columns=["map", "target"], values="attention")
    absent = [TYPES[name] for name in types if not received["raw", name].any()]
    require(not absent, f"these texts have no {' and no '.join(absent)}")
    return received


def _inside(evidence: Evidence, layers: Table, part: tuple[float, float]) -> Table:
    """Return which layers are in a part of the depth; some must be, and some must not."""
    inside = layers.isin(evidence.subject.layers_within(*part))
    require(inside.any() and not inside.all(), "too few layers to tell this part of the depth from the rest")
    return inside


def _peak_disappears(evidence: Evidence, target: str, part: tuple[float, float]) -> Finding:
    """Judge that raw attention to a type peaks in a part of the depth, and effective attention does not."""
    received = _received(evidence, target)
    inside = _inside(evidence, received.index.to_series(), part)
    raw, effective = received[inside].mean()[[("raw", target), ("effective", target)]]
    raw_elsewhere, effective_elsewhere = received[~inside].mean()[[("raw", target), ("effective", target)]]
    peaks = raw >= PEAK * raw_elsewhere
    disappears = effective - effective_elsewhere <= (raw - raw_elsewhere) / 10
    measured = f"raw {raw:.3f} against {raw_elsewhere:.3f}, effective {effective:.3f} against {effective_elsewhere:.3f}"
    return finding(peaks and disappears, measured, "" if peaks else "raw attention has no peak there")


_on_types(
    "Section 3.5, Fig. 1b and 1c",
    name="sep-peak-disappears",
    words="Raw attention to [SEP] peaks in middle layers; effective attention does not",
    paper="the peak has disappeared",
    rule=RISE.format("the middle half of the depth"),
)(partial(_peak_disappears, target="sep", part=MIDDLE))


@_on_types("Section 3.5 and Appendix A.2, Fig. 5", paper="most of it")
def sep_attention_in_null_space(evidence: Evidence) -> Finding:
    """In middle layers, raw attention to [SEP] lies in the null space.

    Holds if: more than half of the raw attention to [SEP], in the layers that lie wholly within the middle half of the
    depth.
    """
    received = _received(evidence, "sep")
    inside = received[_inside(evidence, received.index.to_series(), MIDDLE)].sum()
    share = inside["null_space", "sep"] / inside["raw", "sep"]
    return finding(share > 0.5, percent(share))


_on_types(
    "Section 3.5, Fig. 1b and 1c",
    name="punctuation-peak-disappears",
    words="Raw attention to periods and commas peaks in the deepest layers; effective attention does not",
    paper="a sharp peak in layers 10 to 12, in the null space",
    rule=RISE.format("the last quarter of the depth (at least the last layer)"),
)(partial(_peak_disappears, target="punctuation", part=DEEP))


@_on_types("Section 3.5, Fig. 1c", paper="generally")
def punctuation_over_special_tokens(evidence: Evidence) -> Finding:
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
    require(head["key"].nunique() > limit, f"the passage has at most {limit} tokens, so there is no null space")
    require(head["special"].any(), "the passage has no [CLS] and [SEP]")
    return head[head["special"]]


@_on_passage("Appendix A.3, Fig. 6", paper="vanished; the null space carries all of it")
def passage_special_tokens_vanish(evidence: Evidence) -> Finding:
    """In the passage, effective attention to [CLS] and [SEP] has vanished.

    Holds if: less than a tenth of the raw attention to them, in the head that pays them most.
    """
    special = _on_special(evidence)
    raw, effective = special.groupby("key")[["raw", "effective"]].mean().abs().sum()  # so that signs do not cancel
    return finding(effective < raw / 10, f"raw {raw:.2f}, effective {effective:.2f} in head {special['head'].iloc[0]}")


@_on_passage("Appendix A.3, Fig. 6", paper="“make” to “them”, 48 positions away")
def passage_make_to_them(evidence: Evidence) -> Finding:
    """In the passage, the largest effective weight off the diagonal is from “make” to “them” in the first sentence.

    Holds if: in the head that looks most at special tokens, the largest effective weight at least 2 positions away and
    not on a special token is from “make” to “them” (which cannot be the “them” right after it).
    """
    _on_special(evidence)
    edges: Table = passage(evidence)
    edges = edges.assign(query_word=edges["query_token"].str.lstrip("Ġ▁"), key_word=edges["key_token"].str.lstrip("Ġ▁"))
    has_both = (edges["query_word"] == "make").any() and (edges["key_word"] == "them").any()
    require(has_both, "the tokenizer has no pieces “make” and “them” in the passage")
    largest = edges.loc[edges["highlighted"].idxmax()]
    away = abs(largest["query"] - largest["key"])
    measured = f"“{largest['query_word']}” to “{largest['key_word']}”, {away} away, in head {largest['head']}"
    return finding((largest["query_word"], largest["key_word"]) == ("make", "them"), measured)


# Claims of ours, beside the paper's: what of attention is determined where effective attention loses it. An alternative
# is any row of weights of at least 0 that sum to 1 and give the head's output. What all alternatives share is
# determined. Numbers are means over texts, each text by the rows that were drawn from it.


def _certain_mass(evidence: Evidence) -> Table:
    """The determined share of each text."""
    return mean_over_rows(evidence.tables["intervals"], ["certain_mass"], ["text", "tokens"])


@ours.on("intervals", data="wikitext", texts=EXACT)(f"{BESIDE}, next to Fig. 1a", paper=NEW)
def all_certain_in_short_texts(evidence: Evidence) -> Finding:
    """Up to d_v tokens, no other attention gives the same output.

    Holds if: determined share at least 1 − 1e-6 in every text of at most d_v tokens.
    """
    return _all_one_in_short_texts(_certain_mass(evidence), "certain_mass", evidence.subject.d_value)


@_on_intervals(f"{BESIDE}, next to Fig. 1a", paper=NEW)
def certain_mass_falls_with_length(evidence: Evidence) -> Finding:
    """Beyond d_v tokens, the determined share falls with length.

    Holds if: over texts of more than d_v tokens, the Spearman correlation of length with this share is negative with
    p < 0.01.
    """
    return _falls_with_length(_certain_mass(evidence), "certain_mass", evidence.subject.d_value)


def _long(evidence: Evidence, name: str) -> Table:
    """The rows of a table that were drawn from texts with a null space."""
    limit = evidence.subject.d_value
    long = evidence.tables[name].query("tokens > @limit and rows > 0")
    require(long["text"].nunique() > 1, f"no two texts have more than {limit} tokens, so there is no null space")
    return long


def _over_texts(numbers: Table, why: str = "") -> Measurement:
    """The mean of a number of each text, with its standard error; `why` is raised if no two texts have one."""
    values = numbers.dropna().to_numpy(float)
    require(len(values) > 1, why)
    return Measurement(np.array([values.mean()]), float(values.var(ddof=1)) / len(values))


@_on_groups(f"{BESIDE}, next to Fig. 1b and 1c", paper=NEW)
def special_mass_certain_where_effective_loses_it(evidence: Evidence) -> Finding:
    """Where effective attention loses special tokens' mass, all alternatives keep most of it.

    Holds if: in heads where special tokens (or else the first token) get at least 0.1 of raw and less than a tenth of
    that of effective attention, more than half of the raw mass is determined; texts of more than d_v tokens.
    """
    groups = _long(evidence, "groups")
    group = "special" if (groups["group"] == "special").any() else "first"
    weights = groups[(groups["group"] == group) & (groups["raw"] >= ENOUGH)]
    lost = weights[weights["effective"].abs() < LOST * weights["raw"]]
    texts: Table = mean_over_rows(lost, WEIGHTS, ["text"])
    never_lost = f"effective attention does not lose the {group} tokens' mass in two texts"
    share = _over_texts(texts["lower"] / texts["raw"], never_lost)
    raw, effective, lower, upper = (sum(lost[name] * lost["rows"]) / sum(lost["rows"]) for name in WEIGHTS)
    measured = (
        f"{share} ± {100 * share.error:.1f} is determined in the {lost['rows'].sum():,} of "
        f"{weights['rows'].sum():,} rows that lose it: raw {raw:.2f}, effective {effective:.3f}, possible {lower:.2f} "
        f"to {upper:.2f}"
    )
    return decide(evidence, [share - MOSTLY], measured)


@_on_groups(f"{BESIDE}, next to Fig. 1b and 1c", paper=NEW)
def sep_peak_certain(evidence: Evidence) -> Finding:
    """The peak of raw attention to [SEP] in middle layers is in all alternatives.

    Holds if: the least possible attention to [SEP] in the layers that lie wholly within the middle half of the depth is
    above the greatest possible elsewhere; not applicable where raw attention there is below 1.5 times that elsewhere.
    """
    groups = _long(evidence, "groups").query("group == 'sep'")
    require(len(groups), "these texts have no [SEP]")
    inside = _inside(evidence, groups["layer"], MIDDLE)
    middle: Table = mean_over_rows(groups[inside], WEIGHTS, ["text"]).set_index("text")
    elsewhere: Table = mean_over_rows(groups[~inside], WEIGHTS, ["text"]).set_index("text")
    require(middle["raw"].mean() >= PEAK * elsewhere["raw"].mean(), "raw attention to [SEP] has no peak there")
    margin = _over_texts(middle["lower"] - elsewhere["upper"], "no two texts have rows both there and elsewhere")
    measured = (
        f"at least {middle['lower'].mean():.3f} against at most {elsewhere['upper'].mean():.3f} "
        f"(effective {middle['effective'].mean():.3f})"
    )
    return decide(evidence, [margin], measured)


@_on_intervals(f"{BESIDE}, next to Section 3.5", paper=NEW)
def strongest_edge_certain(evidence: Evidence) -> Finding:
    """Beyond d_v tokens, the strongest edge of most rows is the strongest in all alternatives.

    Holds if: in more than half of the rows of texts of more than d_v tokens.

    Judge a share of rows, some of them undecided: count these first as free, then as determined.
    """
    heads = _long(evidence, "intervals")
    determined = heads["certain"].fillna(0.0) * (heads["rows"] - heads["undecided"])
    sums = heads.assign(determined=determined).groupby("text")[["determined", "undecided", "rows"]].sum()
    lower = _over_texts(sums["determined"] / sums["rows"])
    upper = _over_texts((sums["determined"] + sums["undecided"]) / sums["rows"])
    undecided = f" ({sums['undecided'].sum():,} undecided)" if sums["undecided"].any() else ""
    measured = f"{lower} ± {100 * lower.error:.1f} of {sums['rows'].sum():,} rows{undecided}"
    if_free = decide(evidence, [lower - MOSTLY], measured)
    if_determined = decide(evidence, [upper - MOSTLY], measured)
    if if_free.verdict == if_determined.verdict:
        return if_free
    return Finding(Verdict.UNDECIDED, measured, "the undecided rows could decide it")
