"""An explanation in words, for a terminal."""

from collections import Counter

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from identikit.verdict.numbers import NEAR, Explanation, IdentityVerdict, MixingVerdict, Source, Sources

NAMED = 6  # how many lost tokens are named
LONGEST_LISTED = 24  # at most how many tokens' sources are listed


def print_verdict(explanation: Explanation, console: Console) -> None:
    """Print an explanation as a verdict that can be read."""
    console.print(Group(*_parts(explanation)))


def _parts(explanation: Explanation) -> list[RenderableType]:
    parts: list[RenderableType] = [
        Text(f"\n{explanation.model}", style="bold"),
        Text(
            f"{explanation.n_layers} layers, {explanation.n_heads} heads, values of {explanation.d_value} dimensions a "
            f"head, {'causal' if explanation.causal else 'bidirectional'}"
        ),
        Text(f"\n{len(explanation.tokens)} tokens: {' '.join(explanation.tokens)}", style="dim"),
        Text("\nWhich attention is real?", style="bold"),
        Text(_headline(explanation)),
        _table(explanation),
        Text(LEGEND, style="dim"),
    ]
    if explanation.heads:
        parts.append(Text("\nWhere the picture misleads most (raw and effective attention disagree):", style="bold"))
        parts += [
            Text(
                f"  layer {head.layer} head {head.head} (correlation {head.pearson:.2f}): {head.query!r} seems to look "
                f"at {head.key!r} with {head.raw:.3f}; effective is {head.effective:.3f}"
            )
            for head in explanation.heads
        ]
    parts.append(Text(f"\n{_certificate(explanation)}", style="dim"))
    if explanation.identity is not None:
        parts += [Text("\nWhich token is this?", style="bold"), Text(_identity(explanation.identity))]
    parts.append(Text("\nWhere did it come from?", style="bold"))
    if explanation.mixing is None:
        return [*parts, Text(f"Left out: {explanation.mixing_omitted}")]
    return [*parts, Text(_mixing(explanation.mixing)), *_sources(explanation.mixing)]


def _headline(explanation: Explanation) -> str:
    n, d_v = len(explanation.tokens), explanation.d_value
    largest = max(layer.null_dim[1] for layer in explanation.layers)
    if largest == 0:
        return (
            f"All of it. The text has {n} tokens, and each head's values span as many dimensions as a row sees keys "
            f"(up to {d_v}): every weight can be worked back from the output. Raw attention is effective attention."
        )
    rows = "A row of attention" if not explanation.causal else "The last rows of attention"
    return (
        f"Not all of it. The text has {n} tokens and a head's values only {d_v} dimensions. {rows} can change in up to "
        f"{largest} independent directions without changing anything the model computes. Over all layers, raw and "
        f"effective attention correlate at {explanation.pearson:.2f}; what is left out is in the null space, and no "
        "conclusion can rest on it."
    )


def _table(explanation: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("layer", "null dim", "joint", "identifiable", "kept", "correlation"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("on special tokens", no_wrap=True)
    for layer in explanation.layers:
        table.add_row(
            str(layer.layer),
            _range(layer.null_dim),
            _range(layer.joint_null_dim),
            f"{layer.identifiable:.0%}",
            f"{layer.kept:.0%}",
            f"{layer.pearson:.2f}",
            f"{layer.special_raw:.2f} → {layer.special_effective:.2f}",
        )
    return table


LEGEND = (
    "null dim: directions in which a row of one head is free; joint: of all heads of the layer together; identifiable: "
    "rows that are not free; kept: share of the map (squared weight) that is effective; correlation: raw with "
    "effective; on special tokens: a row's weight on them, raw → effective."
)


def _range(bounds: tuple[int, int]) -> str:
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]}–{bounds[1]}"


def _identity(identity: IdentityVerdict) -> str:
    shares = ", ".join(f"{share:.0%}" for share in identity.recovered)
    told = (
        f"From the hidden vectors of layers 1 to {len(identity.recovered)}, {shares} of the tokens can be told "
        f"({identity.map} maps fitted to the embedded sample texts, {identity.distance} distance)."
    )
    if not identity.lost:
        return f"{told} Every token is still itself in the last layer."
    named = ", ".join(
        f"{token!r} (nearer to {'another ' if winner == token else ''}{winner!r})"
        for token, winner in identity.lost[:NAMED]
    )
    more = f" and {len(identity.lost) - NAMED} more" if len(identity.lost) > NAMED else ""
    return f"{told} Lost in the last layer: {named}{more}."


def _mixing(mixing: MixingVerdict) -> str:
    first, last = mixing.own[0], mixing.own[-1]
    how = "exact" if mixing.probes is None else f"{mixing.probes} probes, standard error up to {mixing.error:.1g}"
    told = (
        f"A token's own input is {first:.0%} of its hidden vector in layer 1 and {last:.0%} in the last (medians of "
        f"Hidden Token Attribution, {how}). In the last layer {mixing.outweighed[-1]:.0%} of the tokens are no longer "
        "their own largest contributor."
    )
    if mixing.near is None:
        return told
    return (
        f"{told} Of what other tokens give, {mixing.near[0]:.0%} comes from within {NEAR} places in layer 1 and "
        f"{mixing.near[-1]:.0%} in the last."
    )


def _sources(mixing: MixingVerdict) -> list[RenderableType]:
    """The strongest sources of the listed tokens, under words that say which tokens these are."""
    which, listed = _listed(mixing.tokens)
    counts = Counter(one.token for one in mixing.tokens)
    marks = "; @ gives the position, counted from 0, of a token that occurs more than once"

    def name(one: Source | Sources) -> str:
        return one.token if counts[one.token] == 1 else f"{one.token}@{one.position}"

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("token", "first layer", "middle layer", "last layer"):
        table.add_column(column)
    for one in listed:
        cells = [", ".join(f"{name(source)} {source.contribution:.2f}" for source in layer) for layer in one.sources]
        first = f"{name(one)}{' *' if one.outweighed else ''}"
        table.add_row(*map(Text, (first, *cells)))  # plain: a token may look like markup
    heading = Text(f"\nStrongest sources of {which}{marks if len(counts) < len(mixing.tokens) else ''}:")
    if not any(one.outweighed for one in listed):
        return [heading, table]
    return [heading, table, Text("* another token is its largest source in the last layer", style="dim")]


def _listed(tokens: tuple[Sources, ...]) -> tuple[str, list[Sources]]:
    """Which tokens' sources are listed, in words and in the order of the text: of a long text, the most mixed ones."""
    if len(tokens) <= LONGEST_LISTED:
        return "each token", list(tokens)
    lost = [one for one in tokens if one.outweighed]
    if 0 < len(lost) <= LONGEST_LISTED:
        share = f"{len(lost)} of {len(tokens)}; --json lists all"
        return f"each token that is no longer its own largest contributor ({share})", lost
    least = sorted(lost or tokens, key=lambda one: one.own)[:LONGEST_LISTED]
    those = f"of {len(lost)} that are no longer" if lost else f"all {len(tokens)} are still"
    words = f"own contribution in the last layer ({those} their own largest contributor; --json lists all)"
    return f"the {LONGEST_LISTED} tokens with the smallest {words}", sorted(least, key=lambda one: one.position)


def _certificate(explanation: Explanation) -> str:
    changed = f"hidden states by {explanation.change.hidden:.1g}"
    if explanation.change.logits is not None:
        changed += f" and logits by {explanation.change.logits:.1g}"
    return (
        f"Certificate: effective attention gives each head's output to {explanation.residual:.1g}; put in the place of "
        f"raw attention it changed the final {changed}, of the largest entry ({explanation.provenance.dtype})."
    )
