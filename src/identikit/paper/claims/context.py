"""Claims on which other tokens a hidden vector comes from: neighbours, [CLS], parts of speech (5.3, Appendix C)."""

from functools import partial, reduce

from identikit.paper.claims.estimates import Estimate, median_of, percent
from identikit.paper.claims.judgements import (
    AVERAGED,
    EXACT,
    ONE_LAYER,
    RARE,
    Claim,
    Finding,
    Judge,
    NotApplicableError,
    Table,
    decided,
    finding,
    named_layers,
    stand_in,
    table,
)
from identikit.paper.evidence import Evidence

OPENING = ("[CLS]", "<s>", "<cls>")
FEWEST = 20  # tokens that a part of speech must have
# Margins that a model which mixes everything evenly does not reach: there, per pair, offsets differ only because texts
# differ in length, and of two equal sentences the second is ahead only by its closing [SEP], one token of n
FACTOR, AHEAD = 1.5, 0.05
HALF_AHEAD = 1.1  # by what factor the mean over one half of the layers must exceed that over the other
# Penn tags of the words that, by the captions of Fig. 29 and 37, keep more of themselves, and less
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
        shares = groups[groups["distance"] == distance].set_index("layer")["share"].dropna()
        if not shares.any():
            raise NotApplicableError("no text is long enough to have such neighbours")
        if len(shares) < 2:
            raise NotApplicableError(ONE_LAYER)
        half = evidence.subject.n_layers / 2
        first, second = shares[shares.index <= half].mean(), shares[shares.index > half].mean()
        peak = shares.idxmax()
        more, less, there = (first, second, peak <= half) if early else (second, first, peak > half)
        measured = (
            f"largest at layer {peak}; {percent(first)} per layer in the first half, {percent(second)} in the second"
        )
        return finding(there and more >= HALF_AHEAD * less, measured)

    return judge


def _view(evidence: Evidence, norm: str, view: str, column: str = "share") -> Table:
    """Contributions by layer (rows) and offset (columns)."""
    offsets = table(evidence, f"offsets {norm}")
    offsets = offsets[offsets["view"] == view]
    if not offsets["share"].any():
        causal = "the first token of a causal model sees no other"
        raise NotApplicableError(causal if evidence.subject.causal else "these texts have no [CLS] and [SEP]")
    return offsets.pivot(index="layer", columns="offset", values=column)


def _by_distance(values: Table) -> tuple[Table, Table]:
    """Values by layer, averaged over both sides: those of the nearest neighbours, and of all others by distance."""
    values = values.T.groupby(abs(values.columns)).mean().T
    others = values.drop(columns=[0, 1], errors="ignore").dropna(axis=1, how="all")
    if others.empty:
        raise NotApplicableError("no text is long enough to have further neighbours")
    return values[1], others


def _behind(evidence: Evidence, values: Table) -> str:
    """Say at which layers the lesser side of the nearest neighbours is below another offset, if at any."""
    if evidence.subject.causal:
        return ""
    sides, others = values[[-1, 1]], values.drop(columns=[-1, 0, 1], errors="ignore")
    lesser, largest = sides.min(axis=1), others.max(axis=1)
    layers = lesser.index[lesser < largest]
    if layers.empty:
        return ""
    first, *rest = layers
    told = f"; {sides.loc[first].idxmin():+} by itself {percent(lesser[first])}, below {others.loc[first].idxmax():+} "
    also = f"; one side is also below at {', '.join(map(str, rest))}" if rest else ""
    return f"{told}with {percent(largest[first])} at layer {first}{also}"


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
    frequent one are left out. Share over mean is proportional to the number of pairs.
    """
    means = _view(evidence, norm, "offsets", "mean")
    pairs = _view(evidence, norm, "offsets") / means
    means = means.where(pairs.ge(pairs.max(axis=1) / 10, axis=0))
    nearest, others = _by_distance(means)
    times = (nearest / others.loc[:, others.columns <= 10].mean(axis=1)).fillna(0.0)
    least = f"; at least {times.min():.2f} times the mean of those 2 to 10 away"
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
    """Contributions to [CLS] around the first [SEP], at the first, middle and last layer; the texts must be pairs."""
    shares = _view(evidence, norm, "around_separator")
    if not shares.loc[:, shares.columns > 0].to_numpy().any():
        raise NotApplicableError("nothing follows the first [SEP]: the texts are not pairs")
    return shares.loc[_shown(evidence)]


def _beside_separator(evidence: Evidence, norm: str) -> Finding:
    shares = _pairs_only(evidence, norm)
    largest = {layer: sorted(row.nlargest(2).index) for layer, row in shares.iterrows()}
    measured = "; ".join(f"{left:+} and {right:+} at layer {layer}" for layer, (left, right) in largest.items())
    return finding(all(pair == [-1, 1] for pair in largest.values()), measured, stand_in(evidence, 6, 12))


def _second_sentence(evidence: Evidence, norm: str) -> Finding:
    """Judge that the second sentence gives more in total and per token: a longer one gives more by count."""
    shares = _pairs_only(evidence, norm)
    counts = (
        shares / _view(evidence, norm, "around_separator", "mean").loc[shares.index]
    )  # of pairs, up to a constant factor
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


def _tags_at(evidence: Evidence, norm: str, layer: int, fewest: int = FEWEST) -> dict[str, tuple[Estimate, int]]:
    """The median at a layer of each part of speech that has enough tokens, and how many it has."""
    tags = table(evidence, f"tags {norm}").query("layer == @layer and tokens >= @fewest")
    return {row["tag"]: (median_of(row, float(row["tokens"])), int(row["tokens"])) for row in tags.to_dict("records")}


def _cls_keeps(evidence: Evidence, norm: str) -> Finding:
    opening = [median for tag, (median, _) in _tags_at(evidence, norm, 1, fewest=1).items() if tag in OPENING]
    if evidence.subject.causal or not opening:
        raise NotApplicableError("the model has no [CLS]")
    return decided(evidence, [opening[0].over(0.4)], percent(opening[0].value))


def _others_keep_less(evidence: Evidence, norm: str) -> Finding:
    medians = {tag: median for tag, (median, _) in _tags_at(evidence, norm, 1).items() if tag not in OPENING}
    if not medians:
        raise NotApplicableError(f"no part of speech has {FEWEST} tokens")
    over = [tag for tag, median in medians.items() if median.value >= 0.35]
    most = max(medians, key=lambda tag: medians[tag].value)
    why = f"35 % or more: {', '.join(over)}" if over else ""
    measured = f"at most {percent(medians[most].value)} ({most})"
    return decided(evidence, [median.under(0.35) for median in medians.values()], measured, why)


def _content_over_function(evidence: Evidence, norm: str) -> Finding:
    tags = _tags_at(evidence, norm, evidence.subject.n_layers)

    def kept(names: tuple[str, ...]) -> Estimate | None:
        parts = [tags[name] for name in names if name in tags]
        total = sum(tokens for _, tokens in parts)
        shares = [median.times(tokens / total) for median, tokens in parts]
        return reduce(Estimate.plus, shares) if shares else None

    classes = {name: found for name, names in CONTENT.items() if (found := kept(names)) is not None}
    function = kept(FUNCTION)
    if not classes or function is None:
        raise NotApplicableError(f"no content words or no function words of which there are {FEWEST}")
    measured = ", ".join(f"{name} {percent(value.value)}" for name, value in classes.items())
    margins = [value.over(function.times(1 + AHEAD)) for value in classes.values()]
    return decided(evidence, margins, f"{measured}, function words {percent(function.value)}")


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
            raise NotApplicableError(f"no {wanted} stands before “{word}”, and a causal model sees nothing after it")
        largest = inputs[context.groupby("layer")["contribution"].idxmax()]
        right = largest.isin(sources)
        measured = f"at {right.sum()} of {len(right)} layers; “{largest.iloc[-1]}” at the last"
        return finding(right.mean() > 0.5, measured)

    return judge


_claim = partial(Claim, section="Section 5", texts=AVERAGED, data="mrpc", only=False, by_norm=True)
_offsets = partial(_claim, needs=("offsets {norm}",))
_to_cls = partial(_offsets, section="Appendix C", texts=RARE)
_tags = partial(_claim, where="Appendix C.5", section="Appendix C", needs=("tags {norm}",))

CONTEXT = (
    _claim(
        "nearest-neighbours-early",
        "Section 5.3, Fig. 4a",
        "The nearest neighbours contribute more in the first layers than in later ones",
        "significantly more",
        "the largest share is in the first half of the layers, and the average there is at least 1.1 times that in the "
        "second half",
        needs=("groups {norm}",),
        judge=_group_peaks("1", early=True),
    ),
    _claim(
        "distant-neighbours-deep",
        "Section 5.3, Fig. 4a",
        "Neighbours from the 11th on contribute most in deeper layers",
        "most",
        "the largest share is in the second half of the layers, and the average there is at least 1.1 times that in "
        "the first half",
        needs=("groups {norm}",),
        judge=_group_peaks("11-", early=False),
    ),
    _offsets(
        "nearest-contribute-most-in-total",
        "Section 5.3, Fig. 4b",
        "The nearest neighbours contribute most regardless of depth",
        "consistently",
        "in total over tokens (column share), left and right together, tokens 1 away contribute more than those at any "
        "other distance, at every layer",
        judge=_nearest_in_total,
    ),
    _offsets(
        "nearest-contribute-most-per-pair",
        "Section 5.3, Fig. 4b",
        "Per pair too, the nearest neighbours contribute most regardless of depth (totals also fall because there are "
        "fewer distant pairs)",
        "not reported",
        "per pair (column mean), averaged over left and right, tokens 1 away contribute more than those at any other "
        "distance, at every layer, and at least 1.5 times the mean of those 2 to 10 away, which even mixing does not "
        "reach; offsets with less than a tenth of the pairs of the most frequent offset are left out",
        judge=_nearest_per_pair,
    ),
    _offsets(
        "distant-contributions-grow",
        "Section 5.3, Fig. 4b",
        "Distant contributions increase at later layers",
        "an increase",
        "the share of offsets beyond 10 rises from the first to the middle to the last layer",
        judge=_distant_grow,
    ),
    _to_cls(
        "cls-gathers-beside-separator",
        "Appendix C.3, Fig. 18b",
        "The tokens right before and after the first [SEP] contribute most to [CLS]",
        "offsets −1 and +1",
        "they are the two largest at the first, middle and last layer",
        judge=_beside_separator,
    ),
    _to_cls(
        "cls-gathers-from-second-sentence",
        "Appendix C.3, Fig. 18b",
        "The second sentence contributes more to [CLS] than the first",
        "more",
        "after the first [SEP], including the closing one, at least 5 points more in total than before it, and at "
        "least 1.05 times as much per token, at the first, middle and last layer",
        judge=_second_sentence,
    ),
    _to_cls(
        "cls-gathers-from-position-30",
        "Appendix C.3, Fig. 18a",
        "[CLS] gathers mainly from around position 30, the middle of the texts",
        "around 30",
        "the largest total is at a position from 20 to 40 at the first, middle and last layer",
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
        rule=f"median below 35 % for every tag but [CLS] that has at least {FEWEST} tokens",
        judge=_others_keep_less,
    ),
    _tags(
        "content-words-keep-more",
        words="At the last layer, nouns, verbs, adjectives and adverbs keep more of themselves than function words",
        paper="more",
        rule="each of the four at least 1.05 times function words; medians of Penn tags with at least "
        f"{FEWEST} tokens, weighted by their numbers of tokens",
        judge=_content_over_function,
    ),
    *(
        _claim(
            f"context-of-{word}",
            f"Appendix C.4, Fig. {figure}",
            f"In the example, “{word}” takes most of its context from “{'” or “'.join(sources)}”",
            "most",
            "it is the largest contributor besides the word itself at more than half of the layers",
            section="Appendix C",
            needs=("sentence",),
            texts=EXACT,
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
