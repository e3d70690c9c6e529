"""Claims on how much of a token stays in its hidden vector: own contribution, and which tokens outweigh it (5.2)."""

from functools import partial

from identikit.paper.claims.estimates import Curve, median_of, near, percent, share_of
from identikit.paper.claims.identity import linear_cosine
from identikit.paper.claims.judgements import (
    AVERAGED,
    LEARNED,
    ONE_LAYER,
    RARE,
    Claim,
    Finding,
    Judge,
    NotApplicableError,
    decided,
    falling,
    finding,
    layers_within,
    named_layers,
    stand_in,
    table,
)
from identikit.paper.evidence import Evidence


def _medians(evidence: Evidence, norm: str) -> Curve:
    rows = table(evidence, f"own {norm}").sort_values("layer").to_dict("records")
    return Curve({row["layer"]: median_of(row, float(evidence.tokens)) for row in rows})


def _outweighed(evidence: Evidence, norm: str) -> Curve:
    shares = table(evidence, f"own {norm}").set_index("layer")["outweighed"].sort_index()
    return Curve({int(layer): share_of(float(share), float(evidence.tokens)) for layer, share in shares.items()})


def _median_at(layer: int, paper: float) -> Judge:
    def judge(evidence: Evidence, norm: str) -> Finding:
        (here,) = named_layers(evidence, layer)
        median = _medians(evidence, norm)[here]
        measured = f"{percent(median.value)} at layer {here}"
        return decided(evidence, [near(median, paper)], measured, stand_in(evidence, layer))

    return judge


def _below_third(evidence: Evidence, norm: str) -> Finding:
    median = _medians(evidence, norm).first
    return decided(evidence, [median.under(1 / 3)], percent(median.value))


def _early(evidence: Evidence) -> int:
    """The last layer of the first quarter, which stands for the paper's third of twelve."""
    return layers_within(evidence.subject.n_layers, 0.0, 1 / 4)[-1]


def _never_outweighed_early(evidence: Evidence, norm: str) -> Finding:
    last = _early(evidence)
    greatest = max(share.value for share in _outweighed(evidence, norm).part(last=last).values())
    why = "" if last == 3 else f"layer {last} of {evidence.subject.n_layers} stands for the paper's 3"
    measured = f"at most {100 * greatest:.2g} % up to layer {last}"
    return finding(greatest == 0, measured, why, certain=greatest > 0)


def _outweighed_at(layers: tuple[int, ...], paper: float) -> Judge:
    def judge(evidence: Evidence, norm: str) -> Finding:
        here = named_layers(evidence, *layers)
        if len({*here}) < len(layers):
            raise NotApplicableError(ONE_LAYER)
        curve = _outweighed(evidence, norm)
        measured = ", ".join(f"{percent(curve[layer].value)} at layer {layer}" for layer in here)
        return decided(evidence, [near(curve[layer], paper) for layer in here], measured, stand_in(evidence, *layers))

    return judge


def _outweighed_rises(evidence: Evidence, norm: str) -> Finding:
    shares = _outweighed(evidence, norm).part(_early(evidence))
    if len(shares) < 2:
        raise NotApplicableError("too few layers")
    rises = shares.rises()
    drops = ", ".join(str(layer) for layer, rise in rises.items() if rise.value < 0)
    ends = (f"{percent(shares[layer].value)} at layer {layer}" for layer in (shares.layers[0], shares.layers[-1]))
    measured = ", ".join(ends) + (f"; lower than before at {drops}" if drops else "")
    margins = [shares.last.over(shares.first), *(rise for rise in rises.values() if rise.value < 0)]
    return decided(evidence, margins, measured)


def _outweighed_below_half(evidence: Evidence, norm: str) -> Finding:
    shares = _outweighed(evidence, norm).values()
    measured = f"P̃ at most {percent(max(share.value for share in shares))}"
    return decided(evidence, [share.under(0.5) for share in shares], measured)


def _outweighed_above_error(evidence: Evidence, norm: str) -> Finding:
    shares, rates = _outweighed(evidence, norm), linear_cosine(evidence)
    layers = [layer for layer in shares if layer in rates]
    margins = {layer: shares[layer].over(1.0).plus(rates[layer]) for layer in layers}
    even = {layer for layer in layers if shares[layer].value == 0 and rates[layer].value == 1}
    above = sum(layer in even or margins[layer].value > 0 for layer in layers)
    worst = min(layers, key=lambda layer: margins[layer].value)
    share, error = shares[worst].value, 1 - rates[worst].value
    measured = f"at {above} of {len(layers)} layers; layer {worst}: P̃ {100 * share:.2g} %, error {100 * error:.2g} %"
    return decided(evidence, [margins[layer] for layer in layers if layer not in even], measured)


_claim = partial(
    Claim, where="Section 5.2, Fig. 3b", section="Section 5", texts=AVERAGED, data="mrpc", only=False, by_norm=True
)
_outweighed_claim = partial(_claim, needs=("own {norm}",))
_own_claim = partial(_outweighed_claim, where="Section 5.2, Fig. 3a")
WITHIN = "within 10 % of the paper's number"

ATTRIBUTION = (
    *(
        _own_claim(
            f"own-contribution-{place}-layer",
            words=f"Median contribution of a token to its own hidden vector after layer {layer}",
            paper=percent(paper),
            rule=WITHIN,
            judge=_median_at(layer, paper),
        )
        for place, layer, paper in (("first", 1, 0.306), ("middle", 6, 0.144), ("last", 12, 0.107))
    ),
    _own_claim(
        "own-contribution-below-a-third",
        words="After the first layer, the token itself contributes less than a third",
        paper="less than a third",
        rule="median at layer 1 below 1/3",
        judge=_below_third,
    ),
    _own_claim(
        "own-contribution-falls",
        words="A token's contribution to its own hidden vector decreases monotonically with depth",
        paper="monotonically",
        rule="median lower at every layer than at the layer before",
        judge=falling(_medians),
    ),
    _outweighed_claim(
        "own-token-largest",
        words="The token itself generally contributes most",
        paper="generally",
        rule="P̃, the share of tokens that another token outweighs, below one half at every layer",
        judge=_outweighed_below_half,
    ),
    _outweighed_claim(
        "outweighed-never-early",
        words="In the first three layers, the token itself always contributes most",
        paper="P̃ = 0 up to layer 3",
        rule="P̃ exactly 0 in the layers that lie wholly within the first quarter of the depth (at least the first "
        "layer)",
        texts=RARE,
        judge=_never_outweighed_early,
    ),
    _outweighed_claim(
        "outweighed-middle-layer",
        words="Share of tokens outweighed by another token at layer 6",
        paper="18 %",
        rule=WITHIN,
        judge=_outweighed_at((6,), 0.18),
    ),
    _outweighed_claim(
        "outweighed-last-two-layers",
        words="Share of tokens outweighed by another token at the last two layers",
        paper="30 %",
        rule=f"both {WITHIN}",
        judge=_outweighed_at((11, 12), 0.30),
    ),
    _outweighed_claim(
        "outweighed-rises",
        words="After the third layer, P̃ increases monotonically",
        paper="monotonically",
        rule="from the last layer that lies wholly within the first quarter of the depth (or the first layer) on, no "
        "layer is below the layer before, and the last is above the first of them",
        judge=_outweighed_rises,
    ),
    _claim(
        "outweighed-above-identifiability-error",
        words="P̃ is always higher than the identifiability error",
        paper="always",
        rule="P̃ above 1 − linear-cosine rate at every layer; layers where both are 0 do not count",
        needs=("own {norm}", "rates"),
        texts=LEARNED,
        judge=_outweighed_above_error,
    ),
)
