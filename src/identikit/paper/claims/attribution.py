"""Claims on how much of a token stays in its hidden vector: own contribution, and by whom it is outweighed (5.2)."""

from functools import partial

from identikit.paper.claims.identity import linear_cosine
from identikit.paper.claims.judgements import (
    ONE_LAYER,
    Claim,
    Finding,
    Judge,
    NotApplicableError,
    Table,
    by_layer,
    falling,
    finding,
    layers_within,
    named_layers,
    near,
    percent,
    stand_in,
    table,
)
from identikit.paper.evidence import Evidence


def _medians(evidence: Evidence, norm: str) -> Table:
    return by_layer(table(evidence, f"own {norm}"), "median")


def _outweighed(evidence: Evidence, norm: str) -> Table:
    return by_layer(table(evidence, f"own {norm}"), "outweighed")


def _median_at(layer: int, paper: float) -> Judge:
    def judge(evidence: Evidence, norm: str) -> Finding:
        (here,) = named_layers(evidence, layer)
        median = _medians(evidence, norm)[here]
        return finding(near(median, paper), f"{percent(median)} at layer {here}", stand_in(evidence, layer))

    return judge


def _below_third(evidence: Evidence, norm: str) -> Finding:
    median = _medians(evidence, norm).iloc[0]
    return finding(median < 1 / 3, percent(median))


def _early(evidence: Evidence) -> int:
    """The last layer of the first quarter, which stands for the paper's third of twelve."""
    return layers_within(evidence.subject.n_layers, 0.0, 1 / 4)[-1]


def _never_outweighed_early(evidence: Evidence, norm: str) -> Finding:
    last = _early(evidence)
    greatest = _outweighed(evidence, norm).loc[:last].max()
    why = "" if last == 3 else f"layer {last} of {evidence.subject.n_layers} stands for the paper's 3"
    return finding(greatest == 0, f"{100 * greatest:.2g} % or less up to layer {last}", why)


def _outweighed_at(layers: tuple[int, ...], paper: float) -> Judge:
    def judge(evidence: Evidence, norm: str) -> Finding:
        here = named_layers(evidence, *layers)
        if len({*here}) < len(layers):
            raise NotApplicableError(ONE_LAYER)
        shares = _outweighed(evidence, norm).loc[here]
        measured = ", ".join(f"{percent(share)} at layer {layer}" for layer, share in shares.items())
        return finding(all(near(share, paper) for share in shares), measured, stand_in(evidence, *layers))

    return judge


def _outweighed_rises(evidence: Evidence, norm: str) -> Finding:
    shares = _outweighed(evidence, norm).loc[_early(evidence) :]
    if len(shares) < 2:
        raise NotApplicableError("too few layers")
    drops = ", ".join(str(layer) for layer in shares.index[shares.diff() < 0])
    ends = (f"{percent(shares[layer])} at layer {layer}" for layer in (shares.index[0], shares.index[-1]))
    measured = ", ".join(ends) + (f"; lower than before at {drops}" if drops else "")
    return finding(shares.diff().min() >= 0 and shares.iloc[-1] > shares.iloc[0], measured)


def _outweighed_below_half(evidence: Evidence, norm: str) -> Finding:
    greatest = _outweighed(evidence, norm).max()
    return finding(greatest < 0.5, f"P̃ {percent(greatest)} or less")


def _outweighed_above_error(evidence: Evidence, norm: str) -> Finding:
    shares, errors = _outweighed(evidence, norm).align(1 - linear_cosine(evidence), join="inner")
    above = (shares > errors) | ((shares == 0) & (errors == 0))
    narrowest = (shares - errors).idxmin()
    measured = f"at {above.sum()} of {len(above)} layers; layer {narrowest}: P̃ {100 * shares[narrowest]:.2g} %"
    return finding(above.all(), f"{measured}, error {100 * errors[narrowest]:.2g} %")


_claim = partial(Claim, where="Section 5.2, Fig. 3b", data="mrpc", only=False, by_norm=True)
_outweighed_claim = partial(_claim, needs=("own {norm}",))
_own_claim = partial(_outweighed_claim, where="Section 5.2, Fig. 3a")
WITHIN = "within 10 % of the paper's number"

ATTRIBUTION = (
    *(
        _own_claim(
            f"own-contribution-{place}-layer",
            words=f"Median contribution of the own token after layer {layer}",
            paper=percent(paper),
            rule=WITHIN,
            judge=_median_at(layer, paper),
        )
        for place, layer, paper in (("first", 1, 0.306), ("middle", 6, 0.144), ("last", 12, 0.107))
    ),
    _own_claim(
        "own-contribution-below-a-third",
        words="After the first layer the own token contributes less than a third",
        paper="less than a third",
        rule="median at layer 1 below 1/3",
        judge=_below_third,
    ),
    _own_claim(
        "own-contribution-falls",
        words="The own contribution decreases monotonically with depth",
        paper="monotonically",
        rule="median lower at every layer than at the one before",
        judge=falling(_medians),
    ),
    _outweighed_claim(
        "own-token-largest",
        words="The own token generally has the largest contribution",
        paper="generally",
        rule="P̃, the share of tokens outweighed by another, below half at every layer",
        judge=_outweighed_below_half,
    ),
    _outweighed_claim(
        "outweighed-never-early",
        words="In the first three layers the own token always contributes most",
        paper="P̃ = 0 up to layer 3",
        rule="P̃ exactly 0 in the layers wholly within the first quarter of the depth (the first at least)",
        judge=_never_outweighed_early,
    ),
    _outweighed_claim(
        "outweighed-middle-layer",
        words="Share of tokens outweighed by another at layer 6",
        paper="18 %",
        rule=WITHIN,
        judge=_outweighed_at((6,), 0.18),
    ),
    _outweighed_claim(
        "outweighed-last-two-layers",
        words="Share of tokens outweighed by another at the last two layers",
        paper="30 %",
        rule=f"both {WITHIN}",
        judge=_outweighed_at((11, 12), 0.30),
    ),
    _outweighed_claim(
        "outweighed-rises",
        words="After the third layer P̃ increases monotonically",
        paper="monotonically",
        rule="from the last layer wholly within the first quarter of the depth (or the first layer) on none is below "
        "the one before, and the last is above that one",
        judge=_outweighed_rises,
    ),
    _claim(
        "outweighed-above-identifiability-error",
        words="P̃ is always higher than the identifiability error",
        paper="always",
        rule="P̃ above 1 − linear-cosine rate at every layer; a layer where both are 0 does not count against it",
        needs=("own {norm}", "rates"),
        judge=_outweighed_above_error,
    ),
)
