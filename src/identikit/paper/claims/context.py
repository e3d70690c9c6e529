"""Claims on which other tokens a hidden vector comes from: neighbours, [CLS], parts of speech (5.3, Appendix C)."""

from functools import partial, reduce
from operator import add

from identikit.paper.claims.claim import (
    AVERAGED,
    EXACT,
    RARE,
    Claims,
    Finding,
    Measurement,
    NotApplicableError,
    decide,
    finding,
    measured_median,
    percent,
    require,
)
from identikit.paper.evidence import Evidence, Table

OPENING = ("[CLS]", "<s>", "<cls>")
FEWEST = 20  # tokens that a part of speech must have
# Margins that a model which mixes everything evenly does not reach: there, per pair, offsets differ only because texts
# differ in length, and of two equal sentences the second is ahead only by its closing [SEP], one token of n
FACTOR = 1.5
AHEAD = 0.05
HALF_AHEAD = 1.1  # by what factor the mean over one half of the layers must exceed that over the other
# Penn tags of the words that, by the captions of Fig. 29 and 37, keep more of themselves, and less
CONTENT = {
    "nouns": ("NN", "NNS", "NNP", "NNPS"),
    "verbs": ("VB", "VBD", "VBG", "VBN", "VBP", "VBZ"),
    "adjectives": ("JJ", "JJR", "JJS"),
    "adverbs": ("RB", "RBR", "RBS"),
}
FUNCTION = ("DT", "PDT", "WDT", "IN", "CC", "PRP", "PRP$", "WP", "WP$", "POS", "TO", "SYM")

claims = Claims()
_on_groups = claims.on("groups {norm}", texts=AVERAGED)
_on_offsets = claims.on("offsets {norm}", texts=AVERAGED)
_to_cls = claims.on("offsets {norm}", texts=RARE)
_on_tags = claims.on("tags {norm}", texts=AVERAGED)


def _group_peaks(evidence: Evidence, distance: str, early: bool) -> Finding:
    """Judge that a group of neighbours contributes more in the first, or in the second half of the layers."""
    groups = evidence.under_norm("groups")
    shares = groups[groups["distance"] == distance].set_index("layer")["share"].dropna()
    require(shares.any(), "no text is long enough to have such neighbours")
    require(len(shares) > 1)
    in_first = shares.index <= evidence.subject.n_layers / 2
    first = shares[in_first].mean()
    second = shares[~in_first].mean()
    peak = shares.idxmax()
    measured = f"largest at layer {peak}; {percent(first)} per layer in the first half, {percent(second)} in the second"
    more, less = (first, second) if early else (second, first)
    peaks_in_half = (peak <= evidence.subject.n_layers / 2) == early
    return finding(peaks_in_half and more >= HALF_AHEAD * less, measured)


_on_groups(
    "Section 5.3, Fig. 4a",
    name="nearest-neighbours-early",
    words="The nearest neighbours contribute more in the first layers than in later ones",
    paper="significantly more",
    rule="the largest share is in the first half of the layers, and the average there is at least 1.1 times that in "
    "the second half",
)(partial(_group_peaks, distance="1", early=True))
_on_groups(
    "Section 5.3, Fig. 4a",
    name="distant-neighbours-deep",
    words="Neighbours from the 11th on contribute most in deeper layers",
    paper="most",
    rule="the largest share is in the second half of the layers, and the average there is at least 1.1 times that in "
    "the first half",
)(partial(_group_peaks, distance="11-", early=False))


def _view(evidence: Evidence, view: str, column: str = "share") -> Table:
    """Contributions by layer (rows) and offset (columns)."""
    offsets = evidence.under_norm("offsets").query("view == @view")
    causal = "the first token of a causal model sees no other"
    require(offsets["share"].any(), causal if evidence.subject.causal else "these texts have no [CLS] and [SEP]")
    return offsets.pivot(index="layer", columns="offset", values=column)


def _by_distance(values: Table) -> tuple[Table, Table]:
    """Values by layer, averaged over both sides: those of the nearest neighbours, and of all further ones."""
    values = values.T.groupby(abs(values.columns)).mean().T
    further = values.drop(columns=[0, 1], errors="ignore").dropna(axis=1, how="all")
    require(not further.empty, "no text is long enough to have further neighbours")
    return values[1], further


def _weaker_side_in_words(evidence: Evidence, values: Table) -> str:
    """Return a clause on the layers where one of the two nearest neighbours is below another offset, if there are any.

    A neighbour to the left or right may be weak by itself although both together are ahead.
    """
    if evidence.subject.causal:
        return ""
    sides = values[[-1, 1]]
    further = values.drop(columns=[-1, 0, 1], errors="ignore")
    weaker = sides.min(axis=1)
    largest = further.max(axis=1)
    layers = weaker.index[weaker < largest]
    if layers.empty:
        return ""
    first, *later = layers
    also = f"; one side is also below at {', '.join(map(str, later))}" if later else ""
    return (
        f"; {sides.loc[first].idxmin():+} by itself {percent(weaker[first])}, below {further.loc[first].idxmax():+} "
        f"with {percent(largest[first])} at layer {first}{also}"
    )


def _at_every_layer(ahead: Table, remark: str) -> Finding:
    behind = ", ".join(str(layer) for layer in ahead.index[~ahead])
    measured = f"at {ahead.sum()} of {len(ahead)} layers" + (f", not at {behind}" if behind else "")
    return finding(ahead.all(), measured + remark)


@_on_offsets("Section 5.3, Fig. 4b", paper="consistently")
def nearest_contribute_most_in_total(evidence: Evidence) -> Finding:
    """The nearest neighbours contribute most regardless of depth.

    Holds if: in total over tokens (column share), left and right together, tokens 1 away contribute more than those at
    any other distance, at every layer.
    """
    shares = _view(evidence, "offsets")
    nearest, further = _by_distance(shares)
    return _at_every_layer(nearest > further.max(axis=1), _weaker_side_in_words(evidence, shares))


@_on_offsets("Section 5.3, Fig. 4b", paper="not reported")
def nearest_contribute_most_per_pair(evidence: Evidence) -> Finding:
    """Per pair too, the nearest neighbours contribute most regardless of depth (totals also fall because there are
    fewer distant pairs).

    Holds if: per pair (column mean), averaged over left and right, tokens 1 away contribute more than those at any
    other distance, at every layer, and at least 1.5 times the mean of those 2 to 10 away, which even mixing does not
    reach; offsets with less than a tenth of the pairs of the most frequent offset are left out.

    Leave out the far ends, where a mean rests on a handful of pairs.

    Share over mean is proportional to the number of pairs.
    """
    means = _view(evidence, "offsets", "mean")
    pairs = _view(evidence, "offsets") / means
    means = means.where(pairs.ge(pairs.max(axis=1) / 10, axis=0))
    nearest, further = _by_distance(means)
    times = (nearest / further.loc[:, further.columns <= 10].mean(axis=1)).fillna(0.0)
    ahead = (nearest > further.max(axis=1)) & (times >= FACTOR)
    least = f"; at least {times.min():.2f} times the mean of those 2 to 10 away"
    return _at_every_layer(ahead, least + _weaker_side_in_words(evidence, means))


def _shown_layers(evidence: Evidence) -> list[int]:
    """The layers that Fig. 4b and 18 show: first, middle and last."""
    return sorted({evidence.subject.named_layers[layer] for layer in (1, 6, 12)})


@_on_offsets("Section 5.3, Fig. 4b", paper="an increase")
def distant_contributions_grow(evidence: Evidence) -> Finding:
    """Distant contributions increase at later layers.

    Holds if: the share of offsets beyond 10 rises from the first to the middle to the last layer.
    """
    shares = _view(evidence, "offsets")
    distant = shares.loc[_shown_layers(evidence), abs(shares.columns) > 10].sum(axis=1)
    require(len(distant) > 1)
    measured = ", ".join(percent(share) for share in distant)
    return finding(distant.diff().min() > 0, measured, evidence.subject.stand_in(6, 12))


def _around_separator(evidence: Evidence) -> Table:
    """Contributions to [CLS] around the first [SEP], at the first, middle and last layer; the texts must be pairs."""
    shares = _view(evidence, "around_separator")
    follows = shares.loc[:, shares.columns > 0].to_numpy().any()
    require(follows, "nothing follows the first [SEP]: the texts are not pairs")
    return shares.loc[_shown_layers(evidence)]


@_to_cls("Appendix C.3, Fig. 18b", paper="offsets −1 and +1")
def cls_gathers_beside_separator(evidence: Evidence) -> Finding:
    """The tokens right before and after the first [SEP] contribute most to [CLS].

    Holds if: they are the two largest at the first, middle and last layer.
    """
    shares = _around_separator(evidence)
    largest = {layer: sorted(row.nlargest(2).index) for layer, row in shares.iterrows()}
    measured = "; ".join(f"{left:+} and {right:+} at layer {layer}" for layer, (left, right) in largest.items())
    return finding(all(pair == [-1, 1] for pair in largest.values()), measured, evidence.subject.stand_in(6, 12))


@_to_cls("Appendix C.3, Fig. 18b", paper="more")
def cls_gathers_from_second_sentence(evidence: Evidence) -> Finding:
    """The second sentence contributes more to [CLS] than the first.

    Holds if: after the first [SEP], including the closing one, at least 5 points more in total than before it, and at
    least 1.05 times as much per token, at the first, middle and last layer.

    Judge that the second sentence gives more in total and per token: a longer one gives more by count.
    """
    shares = _around_separator(evidence)
    pairs = shares / _view(evidence, "around_separator", "mean").loc[shares.index]  # up to a constant factor
    before = shares.columns < 0
    after = shares.columns > 0
    first = shares.loc[:, before].sum(axis=1)
    second = shares.loc[:, after].sum(axis=1)
    times = (second / pairs.loc[:, after].sum(axis=1)) / (first / pairs.loc[:, before].sum(axis=1))
    measured = "; ".join(
        f"{percent(second[layer])} against {percent(first[layer])}, per token {times[layer]:.2f} times at layer {layer}"
        for layer in shares.index
    )
    ahead = (second - first >= AHEAD) & (times >= 1 + AHEAD)
    return finding(ahead.all(), measured, evidence.subject.stand_in(6, 12))


@claims.on("offsets {norm}", texts=RARE, only=True)("Appendix C.3, Fig. 18a", paper="around 30")
def cls_gathers_from_position_30(evidence: Evidence) -> Finding:
    """[CLS] gathers mainly from around position 30, the middle of the texts.

    Holds if: the largest total is at a position from 20 to 40 at the first, middle and last layer.
    """
    shares = _view(evidence, "to_cls").loc[_shown_layers(evidence)]
    peaks = shares.idxmax(axis=1)
    measured = ", ".join(f"position {peak} at layer {layer}" for layer, peak in peaks.items())
    return finding(peaks.between(20, 40).all(), measured, evidence.subject.stand_in(6, 12))


def _medians_by_tag(evidence: Evidence, layer: int, fewest: int = FEWEST) -> dict[str, tuple[Measurement, int]]:
    """The median at a layer of each part of speech that has enough tokens, and how many it has."""
    rows = evidence.under_norm("tags").query("layer == @layer and tokens >= @fewest").to_dict("records")
    return {row["tag"]: (measured_median(row, float(row["tokens"])), int(row["tokens"])) for row in rows}


@_on_tags("Appendix C.5", paper="over 40 %")
def cls_keeps_itself_first_layer(evidence: Evidence) -> Finding:
    """After layer 1, [CLS] keeps over 40 % of itself.

    Holds if: median above 40 %.
    """
    medians = _medians_by_tag(evidence, 1, fewest=1)
    opening = [tag for tag in medians if tag in OPENING]
    require(opening and not evidence.subject.causal, "the model has no [CLS]")
    median, _ = medians[opening[0]]
    return decide(evidence, [median - 0.4], str(median))


@_on_tags(
    "Appendix C.5",
    paper="less than 35 %",
    rule=f"median below 35 % for every tag but [CLS] that has at least {FEWEST} tokens",
)
def other_tags_keep_less_first_layer(evidence: Evidence) -> Finding:
    """After layer 1, every other part of speech keeps less than 35 %."""
    medians = {tag: median for tag, (median, _) in _medians_by_tag(evidence, 1).items() if tag not in OPENING}
    require(medians, f"no part of speech has {FEWEST} tokens")
    over = [tag for tag, median in medians.items() if median.value >= 0.35]
    highest = max(medians, key=lambda tag: medians[tag].value)
    why = f"35 % or more: {', '.join(over)}" if over else ""
    measured = f"at most {medians[highest]} ({highest})"
    return decide(evidence, [0.35 - median for median in medians.values()], measured, why)


@_on_tags(
    "Appendix C.5",
    paper="more",
    rule=f"each of the four at least 1.05 times function words; medians of Penn tags with at least {FEWEST} tokens, "
    "weighted by their numbers of tokens",
)
def content_words_keep_more(evidence: Evidence) -> Finding:
    """At the last layer, nouns, verbs, adjectives and adverbs keep more of themselves than function words."""
    tags = _medians_by_tag(evidence, evidence.subject.n_layers)

    def weighted_mean(names: tuple[str, ...]) -> Measurement | None:
        medians = [tags[name] for name in names if name in tags]
        total = sum(tokens for _, tokens in medians)
        weighted = [median * (tokens / total) for median, tokens in medians]
        return reduce(add, weighted) if weighted else None

    means = {name: weighted_mean(tag_names) for name, tag_names in CONTENT.items()}
    content = {name: mean for name, mean in means.items() if mean is not None}
    function = weighted_mean(FUNCTION)
    if not content or function is None:
        raise NotApplicableError(f"no content words, or no function words, whose tag has {FEWEST} tokens")
    measured = ", ".join(f"{name} {mean}" for name, mean in content.items())
    margins = [mean - (1 + AHEAD) * function for mean in content.values()]
    return decide(evidence, margins, f"{measured}, function words {function}")


def _context_of(evidence: Evidence, word: str, sources: tuple[str, ...]) -> Finding:
    """Judge from which tokens a word of the example sentence takes most of its context."""
    sentence = evidence.tables["sentence"]
    outputs = sentence["output_token"].str.lstrip("Ġ▁").str.lower()
    inputs = sentence["input_token"].str.lstrip("Ġ▁").str.lower()
    require((outputs == word).any(), f"the tokenizer has no piece “{word}” in the sentence")
    position = sentence.loc[outputs == word, "output"].min()
    context = sentence[(sentence["output"] == position) & (sentence["input"] != position)]
    source_words = " or ".join(f"“{source}”" for source in sources)
    source_positions = context.loc[inputs[context.index].isin(sources), "input"]
    require(len(source_positions), f"the tokenizer has no piece {source_words} in the sentence")
    unseen = f"no {source_words} stands before “{word}”, and a causal model sees nothing after it"
    require(source_positions.min() < position or not evidence.subject.causal, unseen)
    largest = inputs[context.groupby("layer")["contribution"].idxmax()]
    from_source = largest.isin(sources)
    measured = f"at {from_source.sum()} of {len(from_source)} layers; “{largest.iloc[-1]}” at the last"
    return finding(from_source.mean() > 0.5, measured)


_on_sentence = claims.on("sentence", data="", texts=EXACT)
for _word, _figure, _sources in (("he", 20, ("said",)), ("long", 23, ("term", "long")), ("strategy", 24, ("growth",))):
    _on_sentence(
        f"Appendix C.4, Fig. {_figure}",
        name=f"context-of-{_word}",
        words=f"In the example, “{_word}” takes most of its context from “{'” or “'.join(_sources)}”",
        paper="most",
        rule="it is the largest contributor besides the word itself at more than half of the layers",
    )(partial(_context_of, word=_word, sources=_sources))
