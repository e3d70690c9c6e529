"""Claims on which other tokens a hidden vector comes from: neighbours, [CLS], parts of speech (5.3, Appendix C)."""

from functools import partial

from identikit.paper.claims.judgements import (
    ONE_LAYER,
    Claim,
    Finding,
    Judge,
    NotApplicableError,
    Table,
    by_layer,
    finding,
    halves,
    named_layers,
    percent,
    stand_in,
    table,
)
from identikit.paper.evidence import Evidence

OPENING = ("[CLS]", "<s>", "<cls>")
# Margins that a model which mixes everything evenly does not reach: there, per pair, offsets differ only by how long
# the texts are that have them, and of equal sentences the second is ahead by its closing [SEP], one token of n
FACTOR, AHEAD = 1.5, 0.05
HALF_AHEAD = 1.1  # how many times the mean over one half of the layers that over the other must be
# Penn tags, by what the captions of Fig. 29 and 37 say keeps more, and less
CONTENT = {
    "nouns": ("NN", "NNS", "NNP", "NNPS"),
    "verbs": ("VB", "VBD", "VBG", "VBN", "VBP", "VBZ"),
    "adjectives": ("JJ", "JJR", "JJS"),
    "adverbs": ("RB", "RBR", "RBS"),
}
FUNCTION = ("DT", "PDT", "WDT", "IN", "CC", "PRP", "PRP$", "WP", "WP$", "POS", "TO", "SYM")


def _group_peaks(distance: str, *, early: bool) -> Judge:
    """Judge that a group of neighbours contributes more in the first, or in the second half of the layers."""

    def judge(evidence: Evidence, norm: str) -> Finding:
        groups = table(evidence, f"groups {norm}")
        shares = by_layer(groups[groups["distance"] == distance], "share").dropna()
        if not shares.any():
            raise NotApplicableError("no text is long enough to have such neighbours")
        first, second = halves(shares, evidence.subject.n_layers)
        peak, half = shares.idxmax(), evidence.subject.n_layers / 2
        more, less, there = (first, second, peak <= half) if early else (second, first, peak > half)
        measured = (
            f"largest at layer {peak}; {percent(first)} a layer in the first half, {percent(second)} in the second"
        )
        return finding(there and more >= HALF_AHEAD * less, measured)

    return judge


def _view(evidence: Evidence, norm: str, view: str, column: str = "share") -> Table:
    """Contributions by layer (rows) and offset (columns)."""
    offsets = table(evidence, f"offsets {norm}")
    offsets = offsets[offsets["view"] == view]
    if not offsets["share"].any():
        causal = "the first token of a causal model sees no other"
        raise NotApplicableError(causal if evidence.subject.causal else "no [CLS] and [SEP] in these texts")
    return offsets.pivot(index="layer", columns="offset", values=column)


def _by_distance(values: Table) -> tuple[Table, Table]:
    """By layer, of values by offset: those of the nearest neighbours, and of all others by distance; means of sides."""
    values = values.T.groupby(abs(values.columns)).mean().T
    others = values.drop(columns=[0, 1], errors="ignore").dropna(axis=1, how="all")
    if others.empty:
        raise NotApplicableError("no text is long enough to have further neighbours")
    return values[1], others


def _behind(evidence: Evidence, values: Table) -> str:
    """Where the lesser side of the nearest neighbours is below another offset, in words; nothing if nowhere."""
    if evidence.subject.causal:
        return ""
    sides, others = values[[-1, 1]], values.drop(columns=[-1, 0, 1], errors="ignore")
    lesser, largest = sides.min(axis=1), others.max(axis=1)
    layers = lesser.index[lesser < largest]
    if layers.empty:
        return ""
    first, *rest = layers
    told = f"; {sides.loc[first].idxmin():+} alone {percent(lesser[first])}, below {others.loc[first].idxmax():+} with "
    also = f", one side also at {', '.join(map(str, rest))}" if rest else ""
    return f"{told}{percent(largest[first])}, at layer {first}{also}"


def _at_every(ahead: Table, more: str = "") -> Finding:
    behind = ", ".join(str(layer) for layer in ahead.index[~ahead])
    measured = f"at {ahead.sum()} of {len(ahead)} layers" + (f", not at {behind}" if behind else "")
    return finding(ahead.all(), measured + more)


def _nearest_in_total(evidence: Evidence, norm: str) -> Finding:
    shares = _view(evidence, norm, "offsets")
    nearest, others = _by_distance(shares)
    return _at_every(nearest > others.max(axis=1), _behind(evidence, shares))


def _nearest_per_pair(evidence: Evidence, norm: str) -> Finding:
    """Judge that the nearest neighbours contribute most per pair at every layer, by a margin.

    At the far ends a mean rests on a handful of pairs, so offsets with less than a tenth of the pairs of the most
    frequent one are left out; share over mean is proportional to the number of pairs.
    """
    means = _view(evidence, norm, "offsets", "mean")
    pairs = _view(evidence, norm, "offsets") / means
    means = means.where(pairs.ge(pairs.max(axis=1) / 10, axis=0))
    nearest, others = _by_distance(means)
    times = (nearest / others.loc[:, others.columns <= 10].mean(axis=1)).fillna(0.0)
    least = f"; {times.min():.2f} times the mean of 2 to 10 away, or more"
    return _at_every((nearest > others.max(axis=1)) & (times >= FACTOR), least + _behind(evidence, means))


def _shown(evidence: Evidence) -> list[int]:
    """The layers that Fig. 4b and 18 show: first, middle and last."""
    return sorted({*named_layers(evidence, 1, 6, 12)})


def _distant_grow(evidence: Evidence, norm: str) -> Finding:
    shares = _view(evidence, norm, "offsets")
    distant = shares.loc[_shown(evidence), abs(shares.columns) > 10].sum(axis=1)
    if len(distant) < 2:
        raise NotApplicableError(ONE_LAYER)
    measured = ", ".join(percent(share) for share in distant)
    return finding(distant.diff().min() > 0, measured, stand_in(evidence, 6, 12))


def _pairs_only(evidence: Evidence, norm: str) -> Table:
    """Contributions to [CLS] around the first [SEP], first, middle and last layer, of texts that have a second part."""
    shares = _view(evidence, norm, "around_separator")
    if not shares.loc[:, shares.columns > 0].to_numpy().any():
        raise NotApplicableError("nothing follows the first [SEP]: the texts are no pairs")
    return shares.loc[_shown(evidence)]


def _beside_separator(evidence: Evidence, norm: str) -> Finding:
    shares = _pairs_only(evidence, norm)
    largest = {layer: sorted(row.nlargest(2).index) for layer, row in shares.iterrows()}
    measured = "; ".join(f"{left:+} and {right:+} at layer {layer}" for layer, (left, right) in largest.items())
    return finding(all(pair == [-1, 1] for pair in largest.values()), measured, stand_in(evidence, 6, 12))


def _second_sentence(evidence: Evidence, norm: str) -> Finding:
    """Judge that the second sentence gives more, in total and per token: a longer one gives more by count alone."""
    shares = _pairs_only(evidence, norm)
    counts = shares / _view(evidence, norm, "around_separator", "mean").loc[shares.index]  # of pairs, up to a factor
    sides = shares.columns < 0, shares.columns > 0
    first, second = (shares.loc[:, side].sum(axis=1) for side in sides)
    before, after = (counts.loc[:, side].sum(axis=1) for side in sides)
    times = (second / after) / (first / before)
    told = (
        f"{percent(second[layer])} against {percent(first[layer])}, per token {times[layer]:.2f} times at layer {layer}"
        for layer in shares.index
    )
    ahead = (second - first >= AHEAD) & (times >= 1 + AHEAD)
    return finding(ahead.all(), "; ".join(told), stand_in(evidence, 6, 12))


def _cls_from_afar(evidence: Evidence, norm: str) -> Finding:
    shares = _view(evidence, norm, "to_cls").loc[_shown(evidence)]
    peaks = shares.idxmax(axis=1)
    measured = ", ".join(f"position {peak} at layer {layer}" for layer, peak in peaks.items())
    return finding(peaks.between(20, 40).all(), measured, stand_in(evidence, 6, 12))


def _tags_at(evidence: Evidence, norm: str, layer: int) -> Table:
    tags = table(evidence, f"tags {norm}")
    return tags[tags["layer"] == layer].set_index("tag")[["tokens", "median"]]


def _cls_keeps(evidence: Evidence, norm: str) -> Finding:
    medians = _tags_at(evidence, norm, 1)["median"]
    opening = medians[medians.index.isin(OPENING)]
    if evidence.subject.causal or opening.empty:
        raise NotApplicableError("the model has no [CLS]")
    return finding(opening.iloc[0] > 0.4, percent(opening.iloc[0]))


def _others_keep_less(evidence: Evidence, norm: str) -> Finding:
    medians = _tags_at(evidence, norm, 1)["median"].drop([*OPENING], errors="ignore")
    over = medians[medians >= 0.35]
    why = f"35 % or more: {', '.join(over.index)}" if len(over) else ""
    return finding(over.empty, f"{medians.idxmax()} {percent(medians.max())} or less", why)


def _content_over_function(evidence: Evidence, norm: str) -> Finding:
    tags = _tags_at(evidence, norm, evidence.subject.n_layers)

    def kept(names: tuple[str, ...]) -> float:
        part = tags[tags.index.isin(names)]
        return float((part["median"] * part["tokens"]).sum() / part["tokens"].sum())

    classes = {name: kept(names) for name, names in CONTENT.items() if tags.index.isin(names).any()}
    if not classes or not tags.index.isin(FUNCTION).any():
        raise NotApplicableError("the texts have no words of one of the kinds")
    function = kept(FUNCTION)
    measured = ", ".join(f"{name} {percent(value)}" for name, value in classes.items())
    ahead = min(classes.values()) >= (1 + AHEAD) * function
    return finding(ahead, f"{measured}, function words {percent(function)}")


def _context_of(word: str, sources: tuple[str, ...]) -> Judge:
    """Judge from which tokens a word of the example sentence takes most of its context."""

    def judge(evidence: Evidence, _: str) -> Finding:
        sentence = table(evidence, "sentence")
        outputs, inputs = (sentence[f"{side}_token"].str.lstrip("Ġ▁").str.lower() for side in ("output", "input"))
        if not (outputs == word).any():
            raise NotApplicableError(f"the tokenizer has no piece “{word}” in the sentence")
        place = sentence.loc[outputs == word, "output"].min()
        context = sentence[(sentence["output"] == place) & (sentence["input"] != place)]
        wanted = " or ".join(f"“{source}”" for source in sources)
        there = context.loc[inputs[context.index].isin(sources), "input"]
        if there.empty:
            raise NotApplicableError(f"the tokenizer has no piece {wanted} in the sentence")
        if evidence.subject.causal and there.min() > place:
            raise NotApplicableError(f"no {wanted} stands before “{word}”, and a causal model sees no other")
        largest = inputs[context.groupby("layer")["contribution"].idxmax()]
        right = largest.isin(sources)
        measured = f"at {right.sum()} of {len(right)} layers; “{largest.iloc[-1]}” at the last"
        return finding(right.mean() > 0.5, measured)

    return judge


_claim = partial(Claim, data="mrpc", only=False, by_norm=True)
_offsets = partial(_claim, needs=("offsets {norm}",))
_tags = partial(_claim, where="Appendix C.5", needs=("tags {norm}",))

CONTEXT = (
    _claim(
        "nearest-neighbours-early",
        "Section 5.3, Fig. 4a",
        "The nearest neighbours contribute more in the first layers than in later ones",
        "significantly more",
        "largest share in the first half of the layers, and an average there at least 1.1 times that in the second",
        needs=("groups {norm}",),
        judge=_group_peaks("1", early=True),
    ),
    _claim(
        "distant-neighbours-deep",
        "Section 5.3, Fig. 4a",
        "Neighbours from the 11th on contribute most in deeper layers",
        "most",
        "largest share in the second half of the layers, and an average there at least 1.1 times that in the first",
        needs=("groups {norm}",),
        judge=_group_peaks("11-", early=False),
    ),
    _offsets(
        "nearest-contribute-most-in-total",
        "Section 5.3, Fig. 4b",
        "The nearest neighbours contribute the most regardless of depth",
        "consistently",
        "in total over tokens (column share), left and right together, those 1 away above those at any other distance "
        "at every layer",
        judge=_nearest_in_total,
    ),
    _offsets(
        "nearest-contribute-most-per-pair",
        "Section 5.3, Fig. 4b",
        "Per pair too, the nearest neighbours contribute the most regardless of depth (totals fall by count alone)",
        "not reported",
        "per pair (column mean), the mean of left and right, those 1 away at every layer above those at any other "
        "distance, offsets with less than a tenth of the most frequent one's pairs left out, and at least 1.5 times "
        "the mean over 2 to 10 away, which even mixing does not reach",
        judge=_nearest_per_pair,
    ),
    _offsets(
        "distant-contributions-grow",
        "Section 5.3, Fig. 4b",
        "Distant contributions increase at later layers",
        "an increase",
        "share of offsets beyond 10 rises from the first to the middle to the last layer",
        judge=_distant_grow,
    ),
    _offsets(
        "cls-gathers-beside-separator",
        "Appendix C.3, Fig. 18b",
        "The tokens right before and after the first [SEP] contribute most to [CLS]",
        "offsets −1 and +1",
        "they are the two largest at the first, the middle and the last layer",
        judge=_beside_separator,
    ),
    _offsets(
        "cls-gathers-from-second-sentence",
        "Appendix C.3, Fig. 18b",
        "The second sentence contributes more to [CLS] than the first",
        "more",
        "after the first [SEP], the closing one included, at least 5 points more in total than before it, and 1.05 "
        "times as much per token, at the first, the middle and the last layer",
        judge=_second_sentence,
    ),
    _offsets(
        "cls-gathers-from-position-30",
        "Appendix C.3, Fig. 18a",
        "[CLS] gathers mainly from around position 30, the middle of the texts",
        "around 30",
        "largest total at a position from 20 to 40 at the first, the middle and the last layer",
        only=True,
        judge=_cls_from_afar,
    ),
    _tags(
        "cls-keeps-itself-first-layer",
        words="After layer 1, [CLS] keeps over 40 % of itself",
        paper="over 40 %",
        rule="median above 40 %",
        judge=_cls_keeps,
    ),
    _tags(
        "other-tags-keep-less-first-layer",
        words="After layer 1, every other part of speech keeps less than 35 %",
        paper="less than 35 %",
        rule="median of every tag but [CLS] below 35 %",
        judge=_others_keep_less,
    ),
    _tags(
        "content-words-keep-more",
        words="At the last layer nouns, verbs, adjectives and adverbs keep more of themselves than function words",
        paper="more",
        rule="each of the four at least 1.05 times function words; medians of Penn tags averaged with their numbers of "
        "tokens",
        judge=_content_over_function,
    ),
    *(
        _claim(
            f"context-of-{word}",
            f"Appendix C.4, Fig. {figure}",
            f"In the example, “{word}” takes most of its context from “{'” or “'.join(sources)}”",
            "most",
            "the largest contributor besides itself, at more than half of the layers",
            needs=("sentence",),
            data="",
            by_norm=False,
            judge=_context_of(word, sources),
        )
        for word, figure, sources in (
            ("he", 20, ("said",)),
            ("long", 23, ("term", "long")),
            ("strategy", 24, ("growth",)),
        )
    ),
)
