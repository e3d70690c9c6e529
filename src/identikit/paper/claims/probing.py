"""Claims on how token identity was probed: data, single layers, fine-tuning, neighbours (Appendix B)."""

from functools import partial

from identikit.paper.claims.estimates import Curve, Estimate, average, percent
from identikit.paper.claims.identity import (
    NOISE,
    POINTS,
    across,
    ahead,
    by_layer,
    own_layer,
    rate,
    rates_of,
    transfer,
)
from identikit.paper.claims.judgements import (
    AVERAGED,
    LEARNED,
    ONE_LAYER,
    Claim,
    Finding,
    NotApplicableError,
    Table,
    decided,
    falling,
    halves,
    named_layers,
    stand_in,
)
from identikit.paper.evidence import SHARES, Evidence

PAPER_BY_SHARE = dict(zip(SHARES, (0.74, 0.80, 0.81, 0.82), strict=True))
SIDES = 0.05  # by how much left and right must differ at one layer: the largest of many differences exceeds chance
KINDS = tuple((map, distance) for map in ("linear", "mlp") for distance in ("cosine", "l2"))


def _by_share(evidence: Evidence) -> dict[float, Estimate]:
    (layer,) = named_layers(evidence, 11)
    frame = rates_of(evidence, "shares", map="mlp", distance="l2", layer=layer, data_share=None)
    rates = {float(share): rate(part) for share, part in frame.groupby("data_share")}
    if not {*SHARES} <= {*rates}:
        raise NotApplicableError("no maps were fitted on shares of the data")
    return rates


def _data_shares(evidence: Evidence, _: str) -> Finding:
    rates = _by_share(evidence)
    margins = [rates[share].within(POINTS, paper) for share, paper in PAPER_BY_SHARE.items()]
    return decided(
        evidence, margins, ", ".join(f"{rates[share].value:.2f}" for share in SHARES), stand_in(evidence, 11)
    )


def _more_data_gains_little(evidence: Evidence, _: str) -> Finding:
    rates = _by_share(evidence)
    gain = rates[1.0].over(rates[0.9])
    return decided(evidence, [gain.under(POINTS)], f"{100 * gain.value:.1f} points", stand_in(evidence, 11))


def _overfit_alike(evidence: Evidence, _: str) -> Finding:
    linear, mlp = (
        own_layer(evidence, map, "l2", split="train").mean.over(own_layer(evidence, map, "l2").mean)
        for map in ("linear", "mlp")
    )
    measured = f"linear {100 * linear.value:.1f} points, MLP {100 * mlp.value:.1f}"
    margins = [linear, mlp, linear.times(1.5).over(mlp), mlp.times(1.5).over(linear)]
    return decided(evidence, margins, measured)


def _equal_under_cosine(evidence: Evidence, _: str) -> Finding:
    linear, mlp = (own_layer(evidence, map, "cosine") for map in ("linear", "mlp"))
    gaps = {layer: linear[layer].over(mlp[layer]) for layer in linear.layers}
    widest = max(gaps, key=lambda layer: abs(gaps[layer].value))
    told = f"linear {percent(linear[widest].value)}, MLP {percent(mlp[widest].value)}"
    measured = f"{100 * abs(gaps[widest].value):.1f} points at layer {widest}, {told}"
    return decided(evidence, [gap.within(POINTS, 0.0) for gap in gaps.values()], measured)


def _elsewhere(evidence: Evidence, map: str, distance: str) -> tuple[Estimate, Estimate]:
    """The rate of maps on layers other than their own, and how far it is below that of the maps of those layers."""
    rates = across(evidence, map, distance)
    pairs = [(fitted, tested) for fitted in rates for tested in rates[fitted] if fitted != tested]
    if not pairs:
        raise NotApplicableError(ONE_LAYER)
    found = average(rates[fitted][tested] for fitted, tested in pairs)
    return found, average(rates[tested][tested] for _, tested in pairs).over(found)


def _linear_generalises_better(evidence: Evidence, _: str) -> Finding:
    margins, rates, losses = [], [], []
    for distance, name in (("cosine", "cosine"), ("l2", "L2")):
        (linear, linear_lost), (mlp, mlp_lost) = (_elsewhere(evidence, map, distance) for map in ("linear", "mlp"))
        margins.append(linear.over(mlp).over(NOISE))
        rates.append(f"{name} linear {percent(linear.value)}, MLP {percent(mlp.value)}")
        losses.append(f"{name} linear {100 * linear_lost.value:.1f}, MLP {100 * mlp_lost.value:.1f} points")
    return decided(evidence, margins, "; ".join(rates), f"below the maps of the tested layers by: {'; '.join(losses)}")


def _single_layers_easy(evidence: Evidence, _: str) -> Finding:
    cosine, l2 = (own_layer(evidence, "naive", distance, "previous").mean for distance in ("cosine", "l2"))
    measured = f"cosine {percent(cosine.value)}, L2 {percent(l2.value)}"
    return decided(evidence, [cosine.over(0.8), l2.over(0.8)], measured)


def _later_layers_harder(evidence: Evidence, _: str) -> Finding:
    first, second = halves(by_layer(rates_of(evidence, "previous")), evidence.subject.n_layers)
    measured = f"{percent(first.value)} in the first half, {percent(second.value)} in the second"
    return decided(evidence, [second.under(first)], measured)


def _finetuning_losses(evidence: Evidence) -> tuple[Estimate, Estimate, str]:
    """What fine-tuning takes from the naive rate across the last layer: under cosine, under L2, and both in words."""
    (last,) = named_layers(evidence, 12)
    before, after = (
        [rate(rates_of(evidence, name, distance=distance, map="naive", layer=last)) for distance in ("cosine", "l2")]
        for name in ("untuned", "finetuned")
    )
    steps = [f"{percent(old.value)} → {percent(new.value)}" for old, new in zip(before, after, strict=True)]
    return before[0].over(after[0]), before[1].over(after[1]), f"L2 {steps[1]}, cosine {steps[0]}"


def _finetuning_hurts_l2(evidence: Evidence, _: str) -> Finding:
    l2, words = _finetuning_losses(evidence)[1:]
    return decided(evidence, [l2.over(0.1)], words, f"compared with {evidence.subject.finetuned}")


def _finetuning_spares_cosine(evidence: Evidence, _: str) -> Finding:
    cosine, l2, words = _finetuning_losses(evidence)
    half = l2.times(0.5)
    margins = [l2, half.over(cosine), half.plus(cosine)]
    return decided(evidence, margins, words, f"compared with {evidence.subject.finetuned}")


def _neighbours(evidence: Evidence) -> Table:
    """The rates of neighbouring tokens, with `near`: how far away they are."""
    frame = rates_of(evidence, "neighbours", offset=None)
    return frame.assign(near=frame["offset"].abs())


def _neighbours_less(evidence: Evidence, _: str) -> Finding:
    neighbours = _neighbours(evidence)
    keys = ["map", "distance", "layer"]
    same = rates_of(evidence).query("layer == test_layer")
    own = {key: rate(part) for key, part in same.groupby(keys)}
    places = {key: rate(part) for key, part in neighbours.groupby([*keys, "offset"])}
    margins = [found.under(own[key[:3]]) for key, found in places.items()]
    mean, own_mean = rate(neighbours), average(own[key] for key in dict.fromkeys(key[:3] for key in places))
    measured = f"{percent(mean.value)} on average against {percent(own_mean.value)}"
    return decided(evidence, [*margins, own_mean.over(mean).over(0.2)], measured)


def _neighbours_fall_with_distance(evidence: Evidence, _: str) -> Finding:
    rates = by_layer(_neighbours(evidence), "near")
    measured = ", ".join(f"{percent(found.value)} at ±{k}" for k, found in rates.items())
    return decided(evidence, [rise.under(0.0) for rise in rates.rises().values()], measured)


def _neighbours_by_layer(evidence: Evidence, _: str) -> Curve:
    return by_layer(_neighbours(evidence))


def _left_and_right_differ(evidence: Evidence, _: str) -> Finding:
    if evidence.subject.causal:
        raise NotApplicableError("a causal model sees no neighbours to the right")
    frame = _neighbours(evidence)
    left, right = by_layer(frame[frame["offset"] < 0]), by_layer(frame[frame["offset"] > 0])
    gaps = {layer: left[layer].over(right[layer]) for layer in left.layers}
    widest = max(gaps, key=lambda layer: abs(gaps[layer].value))
    gap = gaps[widest] if gaps[widest].value > 0 else gaps[widest].times(-1.0)
    sides = f"left {percent(left[widest].value)}, right {percent(right[widest].value)}"
    return decided(evidence, [gap.over(SIDES)], f"{100 * gap.value:.1f} points at layer {widest}, {sides}")


_claim = partial(Claim, section="Appendix B", needs=("rates",), texts=LEARNED, data="mrpc", only=False, by_norm=False)


def _finetuning(data: str, where: str, *, only: bool = False) -> tuple[Claim, Claim]:
    """The two claims on a model fine-tuned on a dataset; those on CoLA must not repeat those on MRPC."""
    claim = partial(_claim, where=where, needs=("untuned", "finetuned"), texts=AVERAGED, data=data, only=only)
    return (
        claim(
            f"finetuning-hurts-l2-{data}",
            words="Fine-tuning hurts the L2 lookup across the last layer",
            paper="a remarkable decrease",
            rule="naive L2 rate at least 10 points lower than before fine-tuning",
            judge=_finetuning_hurts_l2,
        ),
        claim(
            f"finetuning-spares-cosine-{data}",
            words="Fine-tuning affects the cosine lookup across the last layer much less than the L2 lookup",
            paper="much less",
            rule="the naive L2 rate falls, and the cosine rate falls or rises by less than half as much",
            judge=_finetuning_spares_cosine,
        ),
    )


PROBING = (
    _claim(
        "late-maps-transfer-in-all-maps",
        "Appendix B.3, Fig. 8 to 10",
        "Maps of late layers transfer to early layers, but not the reverse, for MLPs and under L2 too",
        "considerably worse to later layers",
        "as for late-maps-transfer, for linear and MLP maps under both distances",
        judge=transfer(KINDS),
    ),
    _claim(
        "linear-maps-generalise-better",
        "Appendix B.3, Fig. 8 to 10",
        "Linear maps generalise better across layers than MLPs",
        "better",
        "rate on layers other than their own, averaged over pairs of layers: at least half a point above that of MLPs, "
        "both distances",
        judge=_linear_generalises_better,
    ),
    _claim(
        "rate-by-data-share",
        "Appendix B.2",
        "Rate of an MLP under L2 at layer 11, trained on 50, 80, 90 and 100 % of the training data",
        "0.74, 0.80, 0.81, 0.82",
        "each within 0.02 of the paper's number",
        needs=("shares",),
        judge=_data_shares,
    ),
    _claim(
        "more-data-gains-little",
        "Appendix B.2",
        "The MLP would gain little from more data",
        "1 point from the last tenth",
        "the last tenth of the data adds at most 2 points",
        needs=("shares",),
        judge=_more_data_gains_little,
    ),
    _claim(
        "linear-and-mlp-overfit-alike",
        "Appendix B.2, Fig. 7",
        "Linear maps and MLPs overfit to the same degree under L2",
        "to the same degree",
        "for both, the training rate is above the test rate on average over layers, and the larger gap is at most 1.5 "
        "times the smaller",
        judge=_overfit_alike,
    ),
    _claim(
        "linear-and-mlp-equal-under-cosine",
        "Appendix B.2",
        "Under cosine distance, linear maps and MLPs do almost equally well",
        "almost equally",
        "rates within 2 points of each other at every layer",
        judge=_equal_under_cosine,
    ),
    _claim(
        "single-layers-change-little",
        "Appendix B.4, Fig. 11",
        "Across a single layer, even the naive lookup does well",
        "well",
        "at least 80 % on average over layers, both distances",
        needs=("previous",),
        texts=AVERAGED,
        judge=_single_layers_easy,
    ),
    _claim(
        "single-layers-keep-angle",
        "Appendix B.4, Fig. 11",
        "A single layer changes the angle of a vector less than its length",
        "cosine above L2",
        "naive rate higher under cosine than under L2, on average over layers",
        needs=("previous",),
        texts=AVERAGED,
        judge=ahead(("naive", "cosine"), ("naive", "l2"), also_last=False, name="previous"),
    ),
    _claim(
        "later-single-layers-harder",
        "Appendix B.4, Fig. 11",
        "Tokens are harder to identify across later layers",
        "on average",
        "rate over all maps and distances lower in the second half of the layers than in the first",
        needs=("previous",),
        judge=_later_layers_harder,
    ),
    *_finetuning("mrpc", "Appendix B.4, Fig. 12"),
    *_finetuning("cola", "Appendix B.4, Fig. 13", only=True),
    _claim(
        "neighbours-recovered-less",
        "Appendix B.5, Fig. 14 to 17",
        "Neighbouring tokens are recovered far less often than the token itself",
        "to a much lower degree",
        "less at every layer, map and distance, and by at least 20 points on average",
        needs=("rates", "neighbours"),
        judge=_neighbours_less,
    ),
    _claim(
        "neighbours-fall-with-distance",
        "Appendix B.5, Fig. 14 to 17",
        "The further away a neighbour is, the less often it is recovered",
        "drops with k",
        "average over layers, sides, maps and distances falls from 1 to 2 to 3 positions away",
        needs=("neighbours",),
        judge=_neighbours_fall_with_distance,
    ),
    _claim(
        "neighbours-fall-with-depth",
        "Appendix B.5, Fig. 14 to 17",
        "The deeper the layer, the less often neighbours are recovered",
        "drops with depth",
        "average lower at the last layer than at the first, and at no layer half a point above the layer before",
        needs=("neighbours",),
        judge=falling(_neighbours_by_layer, NOISE),
    ),
    _claim(
        "left-and-right-differ",
        "Appendix B.5, Fig. 14 to 17",
        "Left and right neighbours are recovered differently",
        "different behaviour",
        "average over positions, maps and distances on the left at least 5 points away from that on the right, at the "
        "layer where they differ most",
        needs=("neighbours",),
        judge=_left_and_right_differ,
    ),
)
