"""Claims on how much of a token stays in its hidden vector: own contribution, and which tokens outweigh it (5.2)."""

from collections.abc import Callable
from functools import partial

from identikit.paper.claims.claim import (
    AVERAGED,
    LEARNED,
    RARE,
    Claims,
    Curve,
    Finding,
    decide,
    decide_fall,
    finding,
    measured_median,
    measured_share,
    percent,
    require,
)
from identikit.paper.claims.identity import linear_cosine
from identikit.paper.evidence import Evidence

WITHIN = "within 10 % of the paper's number"

claims = Claims()
_on_own = claims.on("own {norm}", texts=AVERAGED)


def _medians(evidence: Evidence) -> Curve:
    rows = evidence.under_norm("own").sort_values("layer").to_dict("records")
    return Curve({row["layer"]: measured_median(row, float(evidence.tokens)) for row in rows})


def _outweighed(evidence: Evidence) -> Curve:
    """P̃, the share of tokens that another token outweighs, by layer."""
    shares = evidence.under_norm("own").set_index("layer")["outweighed"].sort_index()
    return Curve({int(layer): measured_share(float(share), float(evidence.tokens)) for layer, share in shares.items()})


def _near_paper(
    evidence: Evidence, curve: Callable[[Evidence], Curve], layers: tuple[int, ...], paper: float
) -> Finding:
    """Judge whether a number agrees with the paper's at the corresponding layers."""
    model_layers = [evidence.subject.named_layers[layer] for layer in layers]
    require(len({*model_layers}) == len(layers))
    numbers = curve(evidence)
    margins = [numbers[layer].within(0.1 * paper, paper) for layer in model_layers]
    return decide(evidence, margins, numbers.in_words(*model_layers), evidence.subject.stand_in(*layers))


for _depth, _layer, _paper in (("first", 1, 0.306), ("middle", 6, 0.144), ("last", 12, 0.107)):
    _on_own(
        "Section 5.2, Fig. 3a",
        name=f"own-contribution-{_depth}-layer",
        words=f"Median contribution of a token to its own hidden vector after layer {_layer}",
        paper=percent(_paper),
        rule=WITHIN,
    )(partial(_near_paper, curve=_medians, layers=(_layer,), paper=_paper))


@_on_own("Section 5.2, Fig. 3a", paper="less than a third")
def own_contribution_below_a_third(evidence: Evidence) -> Finding:
    """After the first layer, the token itself contributes less than a third.

    Holds if: median at layer 1 below 1/3.
    """
    median = _medians(evidence).first
    return decide(evidence, [1 / 3 - median], str(median))


@_on_own("Section 5.2, Fig. 3a", paper="monotonically")
def own_contribution_falls(evidence: Evidence) -> Finding:
    """A token's contribution to its own hidden vector decreases monotonically with depth.

    Holds if: median lower at every layer than at the layer before.
    """
    return decide_fall(evidence, _medians(evidence))


def _early(evidence: Evidence) -> int:
    """The last layer of the first quarter, which stands for the paper's third of twelve."""
    return evidence.subject.layers_within(0.0, 1 / 4)[-1]


@_on_own("Section 5.2, Fig. 3b", paper="generally")
def own_token_largest(evidence: Evidence) -> Finding:
    """The token itself generally contributes most.

    Holds if: P̃, the share of tokens that another token outweighs, below one half at every layer.
    """
    shares = _outweighed(evidence).values()
    measured = f"P̃ at most {percent(max(share.value for share in shares))}"
    return decide(evidence, [0.5 - share for share in shares], measured)


@claims.on("own {norm}", texts=RARE)("Section 5.2, Fig. 3b", paper="P̃ = 0 up to layer 3")
def outweighed_never_early(evidence: Evidence) -> Finding:
    """In the first three layers, the token itself always contributes most.

    Holds if: P̃ exactly 0 in the layers that lie wholly within the first quarter of the depth (at least the first
    layer).
    """
    last = _early(evidence)
    greatest = max(share.value for share in _outweighed(evidence).between(last=last).values())
    why = "" if last == 3 else f"layer {last} of {evidence.subject.n_layers} stands for the paper's 3"
    measured = f"at most {100 * greatest:.2g} % up to layer {last}"
    return finding(greatest == 0, measured, why, certain=greatest > 0)


_on_own(
    "Section 5.2, Fig. 3b",
    name="outweighed-middle-layer",
    words="Share of tokens outweighed by another token at layer 6",
    paper="18 %",
    rule=WITHIN,
)(partial(_near_paper, curve=_outweighed, layers=(6,), paper=0.18))
_on_own(
    "Section 5.2, Fig. 3b",
    name="outweighed-last-two-layers",
    words="Share of tokens outweighed by another token at the last two layers",
    paper="30 %",
    rule=f"both {WITHIN}",
)(partial(_near_paper, curve=_outweighed, layers=(11, 12), paper=0.30))


@_on_own("Section 5.2, Fig. 3b", paper="monotonically")
def outweighed_rises(evidence: Evidence) -> Finding:
    """After the third layer, P̃ increases monotonically.

    Holds if: from the last layer that lies wholly within the first quarter of the depth (or the first layer) on, no
    layer is below the layer before, and the last is above the first of them.
    """
    shares = _outweighed(evidence).between(_early(evidence))
    require(len(shares) > 1, "too few layers")
    drops = {layer: rise for layer, rise in shares.rises().items() if rise.value < 0}
    measured = shares.in_words(shares.layers[0], shares.layers[-1])
    if drops:
        measured += f"; lower than before at {', '.join(map(str, drops))}"
    return decide(evidence, [shares.last - shares.first, *drops.values()], measured)


@claims.on("own {norm}", "rates", texts=LEARNED)("Section 5.2, Fig. 3b", paper="always")
def outweighed_above_identifiability_error(evidence: Evidence) -> Finding:
    """P̃ is always higher than the identifiability error.

    Holds if: P̃ above 1 − linear-cosine rate at every layer; layers where both are 0 do not count.
    """
    shares = _outweighed(evidence)
    rates = linear_cosine(evidence)
    layers = [layer for layer in shares if layer in rates]
    margins = {layer: shares[layer] - 1.0 + rates[layer] for layer in layers}
    both_zero = {layer for layer in layers if shares[layer].value == 0 and rates[layer].value == 1}
    above = sum(layer in both_zero or margins[layer].value > 0 for layer in layers)
    worst = min(layers, key=lambda layer: margins[layer].value)
    share = 100 * shares[worst].value
    error = 100 * (1 - rates[worst].value)
    measured = f"at {above} of {len(layers)} layers; layer {worst}: P̃ {share:.2g} %, error {error:.2g} %"
    return decide(evidence, [margins[layer] for layer in layers if layer not in both_zero], measured)
