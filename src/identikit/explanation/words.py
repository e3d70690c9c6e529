"""An explanation in words: one document for a terminal, for `print`, for a page and for LaTeX."""

from collections.abc import Iterator, Sequence

from identikit.attribution.result import TokenAttribution
from identikit.errors import Unavailable
from identikit.explanation.attention_words import attention_blocks
from identikit.explanation.readings import reading_blocks
from identikit.explanation.result import NEAR, UNKNOWN, Explanation, Sources, TokenSource, strongest_sources
from identikit.results.axis import Axis
from identikit.results.words import Block, Column, Document, Heading, Paragraph, Table, counted, joined, percent
from identikit.texts.text import readable_token
from identikit.tokens.result import IdentityMap

NAMED = 6  # how many lost tokens are named
LONGEST_TEXT = 120  # tokens of a text that is shown whole; of a longer one, half as many from each end
MOST_LAYERS = 10  # columns of the table of tokens that are recovered
LONGEST_LISTED = 24  # at most how many tokens' sources are listed
ALL_SOURCES = "`to_dict()` has all"


def verdict(explanation: Explanation) -> Document:
    """Return all of an explanation: model and text, the three questions, readings, and an output."""
    return Document(opening(explanation).blocks + rest(explanation).blocks)


def opening(explanation: Explanation) -> Document:
    """Return what is known before attribution: model, text, attention, and which token is which."""
    return Document((*_header(explanation), *attention_blocks(explanation), *_identity(explanation)))


def rest(explanation: Explanation) -> Document:
    """Return what comes after the opening."""
    return Document((*_origin(explanation), *reading_blocks(explanation), *_outputs(explanation)))


def _header(explanation: Explanation) -> Iterator[Block]:
    about = explanation.about
    layers = explanation.axes[0].values
    facts = {"n_layers": about["n_layers"], "n_heads": about["n_heads"], "d_value": about["d_value"]}
    attending = ""  # which layers have softmax attention, where not all have, and of which there was time to read it
    numbers = ", ".join(map(str, layers))
    if about["layers_left_out"]:
        limit = about["certain"]["seconds"]
        facts |= {"layers_read": layers, "limit": limit}
        attention = f"attention was read in {numbers}, and everything below refers to these"
        attending = f" (within the limit of {limit:g} s, {attention})"
    elif len(layers) < about["n_layers"]:
        attending = f" (softmax attention in {numbers}, and only these are read below)"
    yield Heading(explanation.model_name, 0)
    yield Paragraph(
        f"{counted(about['n_layers'], 'layer')}{attending}, {counted(about['n_heads'], 'head')} per layer, values of "
        f"{about['d_value']} dimensions per head, {'causal' if about['causal'] else 'bidirectional'}. Layers and heads "
        "count from 0.",
        facts,
    )
    tokens = len(explanation.tokens)
    text = _opening_and_end(explanation.tokens)
    yield Paragraph(f"{counted(tokens, 'token')}: {text}", {"tokens": tokens, "text": text}, "note")
    if about["joined_by"] is not None and about["causal"]:
        added = " ".join(readable_token(token) for token in about["joined_by"])
        words = "The two texts are joined as they are."
        if added:
            words = f"The tokenizer puts {added} between the two texts."
        yield Paragraph(words, {"joined_by": about["joined_by"]}, "note")


def _opening_and_end(tokens: Sequence[str]) -> str:
    """Return the text as its tokens read, with spaces except within words; of a long one its opening and its end."""
    words = []
    for token in map(readable_token, tokens):
        words.append(token if token[:1] == " " or not token.strip() else f" {token}")
    if len(words) <= LONGEST_TEXT:
        return "".join(words).strip()
    half = LONGEST_TEXT // 2
    return f"{''.join(words[:half]).strip()} … {''.join(words[-half:]).strip()}"


def _identity(explanation: Explanation) -> Iterator[Block]:
    yield Heading("Which token is this?")
    identity = explanation.identity
    if isinstance(identity, Unavailable):
        yield Paragraph(f"Not answered: {identity.reason}", {"unavailable": identity.reason}, offers=True)
        return
    shares = identity.recovered.double().mean(-1).tolist()
    layers = identity.axes[0].values
    yield joined(_recovered(identity, shares))
    if len(layers) > 2:  # a table of some layers, the first and the last among them
        steps = range(MOST_LAYERS)
        indices = sorted({round((len(layers) - 1) * step / (MOST_LAYERS - 1)) for step in steps})
        columns = [Column(str(layers[index]), percent, "right") for index in indices]
        yield Table((Column("after layer"), *columns), (("recovered", *(shares[index] for index in indices)),))
    unknown = identity.about.get("unknown", 0.0)
    if unknown > UNKNOWN:
        yield Paragraph(
            f"Careful: the tokenizer does not know {percent(unknown)} of the tokens in the sample texts that the maps "
            "were fitted to. Fit maps to texts of your own: `explain(model, text, "
            "maps=token_identifiability(model, texts))`.",
            {"unknown": unknown},
            "warning",
            offers=True,
        )


def _recovered(identity: IdentityMap, shares: list[float]) -> Iterator[Paragraph]:
    """Yield which share of the tokens is recovered after each layer, and which are lost after the last."""
    layers, positions = identity.axes
    ends = (layers.values[0], layers.values[-1])
    last = f" and from {percent(shares[-1])} after layer {ends[1]}" if len(layers) > 1 else ""
    yield Paragraph(
        f"The token is recovered from {percent(shares[0])} of the hidden vectors after layer {ends[0]}{last}: mapped "
        f"back, they are nearest to their own token ({identity.map} maps fitted to "
        f"{identity.about.get('fitted_to', 'texts')}, {identity.distance} distance).",
        {"recovered": shares, "recovered_after_layers": ends, "distance": identity.distance},
    )
    if identity.repeated:
        yield Paragraph(
            f"{identity.repeated} tokens share their input with another, and any of these counts as right.",
            {"repeated": identity.repeated},
        )
    lost = []
    for position, recovered in enumerate(identity.recovered[-1].tolist()):
        if not recovered:
            lost.append((positions.name_of(position), positions.name_of(int(identity.winner[-1, position]))))
    if not lost:
        yield Paragraph("After the last layer, no token is lost.", {"lost": ()})
        return
    names = ", ".join(f"{token} (nearer to {winner})" for token, winner in lost[:NAMED])
    if len(lost) > NAMED:
        names += f" and {len(lost) - NAMED} more"
    facts = {"lost": lost, "lost_not_named": max(0, len(lost) - NAMED)}
    yield Paragraph(f"Lost after the last layer: {names}.", facts)


def _origin(explanation: Explanation) -> Iterator[Block]:
    yield Heading("Where did it come from?")
    attribution = explanation.attribution
    if isinstance(attribution, Unavailable):
        yield Paragraph(f"Not answered: {attribution.reason}", {"unavailable": attribution.reason}, offers=True)
        return
    yield joined(_mixing(explanation, attribution))
    yield sources_table(strongest_sources(attribution))


def _mixing(explanation: Explanation, attribution: TokenAttribution) -> Iterator[Paragraph]:
    """Yield how far tokens are mixed after the first and the last layer."""
    about = explanation.about
    first = attribution.layers[0]
    last = attribution.layers[-1]
    medians = attribution.own.median(1).values
    ends = (float(medians[0]), float(medians[-1]))
    facts = {"own": ends, "own_after_layers": (first, last), "probes": attribution.probes}
    exactness = "exact"
    if attribution.probes is not None:
        error = about["largest_stderr"]
        exactness = f"estimated from {attribution.probes} random directions, standard error up to {error:.1g}"
        facts["largest_stderr"] = error
    yield Paragraph(
        f"A token contributes {percent(ends[0])} to its own hidden vector after layer {first} and "
        f"{percent(ends[1])} after layer {last} (medians of Hidden Token Attribution, {exactness}).",
        facts,
    )
    lost = float(attribution.outweighed[-1].double().mean())
    unmoved = int((attribution.contribution[-1].sum(0) == 0).sum())
    facts = {"outweighed": lost, "unmoved": unmoved, "tokens": len(explanation.tokens)}
    yield Paragraph(attribution.largest_words(), facts)
    if about["near"] is not None:
        near = (about["near"][0], about["near"][-1])
        yield Paragraph(
            f"Of what the other tokens contribute, {percent(near[0])} comes from within {NEAR} positions after layer "
            f"{first}, and {percent(near[1])} after layer {last}.",
            {"near": near, "near_within": NEAR},
        )


def sources_table(tokens: Sequence[Sources]) -> Table:
    """Return the strongest sources of the listed tokens, under words that say which tokens these are."""
    description, listed = _listed(tokens)
    positions = Axis("token", tuple(range(len(tokens))), tuple(token.token for token in tokens))

    def name(token: TokenSource | Sources) -> str:
        return positions.name_of(token.position)

    def written(sources: Sequence[tuple[str, float]]) -> str:
        return ", ".join(f"{source} {contribution:.2f}" for source, contribution in sources)

    repeats = any("@" in name(token) and name(token) != token.token for token in listed)
    marks = "; @ gives the position of a token that occurs more than once" if repeats else ""
    rows = []
    for token in listed:
        row: list[str | list[tuple[str, float]]] = [f"{name(token)} *" if token.outweighed else name(token)]
        for sources in token.sources:
            row.append([(name(source), source.contribution) for source in sources])
        rows.append(tuple(row))
    layers = [Column(f"{layer} layer", written, wraps=True) for layer in ("first", "middle", "last")]
    note = Paragraph("* Another token is its largest source after the last layer.", tone="note")
    notes = (note,) if any(token.outweighed for token in listed) else ()
    return Table((Column("token"), *layers), tuple(rows), f"Strongest sources of {description}{marks}:", notes)


def _listed(tokens: Sequence[Sources]) -> tuple[str, Sequence[Sources]]:
    """Return which tokens' sources are listed, in words and in the order of the text.

    Of a long text these are the tokens that others outweigh, or those that contribute least to themselves.
    """
    if len(tokens) <= LONGEST_LISTED:
        return "each token", tokens
    lost = [token for token in tokens if token.outweighed]
    if 0 < len(lost) <= LONGEST_LISTED:
        share = f"{len(lost)} of {len(tokens)}; {ALL_SOURCES}"
        return f"each token that is no longer its own largest contributor ({share})", lost
    least = sorted(lost or tokens, key=lambda token: token.own)[:LONGEST_LISTED]
    candidates = f"of {len(lost)} that are no longer" if lost else f"all {len(tokens)} are still"
    words = f"own contribution after the last layer ({candidates} their own largest contributor; {ALL_SOURCES})"
    in_order = sorted(least, key=lambda token: token.position)
    return f"the {LONGEST_LISTED} tokens with the smallest {words}", in_order


def _outputs(explanation: Explanation) -> Iterator[Block]:
    """Yield where each output comes from; nothing if no target was given."""
    outputs = explanation.about.get("output", ())
    if outputs:
        yield Heading("Where does the output come from?")
    for facts in outputs:
        chance = "" if facts["probability"] is None else f", probability {percent(facts['probability'])}"
        words = f"The {facts['target']}: {facts['value']:.4g}{chance}. Its derivative is exact."
        yield Paragraph(words, {"target": facts["target"], "value": facts["value"]})
        columns = (
            Column("token"),
            Column("contribution", percent, "right"),
            Column("gradient × input", "{:+.3g}".format, "right"),
        )
        caption = "The tokens that move it most: shares of the derivative, and its value along the token with its sign:"
        yield Table(columns, tuple(tuple(row) for row in facts["sources"]), caption)
