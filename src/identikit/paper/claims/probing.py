"""Claims on how token identity was probed: data, single layers, fine-tuning, neighbours (Appendix B)."""

from functools import partial

from identikit.paper.claims.claim import (
    AVERAGED,
    LEARNED,
    Basis,
    Claims,
    Finding,
    Measurement,
    average,
    decided,
    falls,
    require,
)
from identikit.paper.claims.identity import (
    NOISE,
    POINTS,
    across,
    by_layer,
    other_maps,
    own_layer,
    rate,
    rates_of,
    transfer,
)
from identikit.paper.evidence import Evidence, Table
from identikit.tokens.experiments import SHARES

PAPER_BY_SHARE = dict(zip(SHARES, (0.74, 0.80, 0.81, 0.82), strict=True))
SIDES = 0.05  # by how much left and right must differ at one layer: the largest of many differences exceeds chance
KINDS = tuple((map, distance) for map in ("linear", "mlp") for distance in ("cosine", "l2"))
_RATES = Basis(("rates",), "mrpc", LEARNED)
_SHARES = Basis(("shares",), "mrpc", LEARNED)
_SINGLE = Basis(("previous",), "mrpc", AVERAGED)
_NEIGHBOURS = Basis(("neighbours",), "mrpc", LEARNED)

claim = Claims()

claim(
    "late-maps-transfer-in-all-maps",
    "Appendix B.3, Fig. 8 to 10",
    _RATES,
    words="Maps of late layers transfer to early layers, but not the reverse, for MLPs and under L2 too",
    paper="considerably worse to later layers",
    rule="as for late-maps-transfer, for linear and MLP maps under both distances",
)(partial(transfer, kinds=KINDS))


def _elsewhere(evidence: Evidence, map: str, distance: str) -> tuple[Measurement, Measurement]:
    """The rate of maps on layers other than their own, and how far it is below the maps fitted to those layers."""
    rates = across(evidence, map, distance)
    pairs = [(fitted, tested) for fitted in rates for tested in rates[fitted] if fitted != tested]
    require(pairs)
    mean = average(rates[fitted][tested] for fitted, tested in pairs)
    return mean, average(rates[tested][tested] for _, tested in pairs).over(mean)


@claim("linear-maps-generalise-better", "Appendix B.3, Fig. 8 to 10", _RATES, paper="better")
def _linear_generalises_better(evidence: Evidence) -> Finding:
    """Linear maps generalise better across layers than MLPs.

    Holds if: rate on layers other than their own, averaged over pairs of layers: at least half a point above that of
    MLPs, both distances.
    """
    margins = []
    rates = []
    losses = []
    for distance, name in (("cosine", "cosine"), ("l2", "L2")):
        linear, linear_lost = _elsewhere(evidence, "linear", distance)
        mlp, mlp_lost = _elsewhere(evidence, "mlp", distance)
        margins.append(linear.over(mlp).over(NOISE))
        rates.append(f"{name} linear {linear}, MLP {mlp}")
        losses.append(f"{name} linear {100 * linear_lost.value:.1f}, MLP {100 * mlp_lost.value:.1f} points")
    return decided(evidence, margins, "; ".join(rates), f"below the maps of the tested layers by: {'; '.join(losses)}")


def _by_share(evidence: Evidence) -> dict[float, Measurement]:
    layer = evidence.subject.named_layers[11]
    frame = rates_of(evidence, "shares", map="mlp", distance="l2", layer=layer, data_share=None)
    rates = {float(share): rate(part) for share, part in frame.groupby("data_share")}
    require({*SHARES} <= {*rates}, "no maps were fitted on shares of the data")
    return rates


@claim("rate-by-data-share", "Appendix B.2", _SHARES, paper="0.74, 0.80, 0.81, 0.82")
def _data_shares(evidence: Evidence) -> Finding:
    """Rate of an MLP under L2 at layer 11, trained on 50, 80, 90 and 100 % of the training data.

    Holds if: each within 0.02 of the paper's number.
    """
    rates = _by_share(evidence)
    margins = [rates[share].within(POINTS, paper) for share, paper in PAPER_BY_SHARE.items()]
    measured = ", ".join(f"{rates[share].value:.2f}" for share in SHARES)
    return decided(evidence, margins, measured, evidence.subject.stand_in(11))


@claim("more-data-gains-little", "Appendix B.2", _SHARES, paper="1 point from the last tenth")
def _more_data_gains_little(evidence: Evidence) -> Finding:
    """The MLP would gain little from more data.

    Holds if: the last tenth of the data adds at most 2 points.
    """
    rates = _by_share(evidence)
    gain = rates[1.0].over(rates[0.9])
    return decided(evidence, [gain.under(POINTS)], f"{100 * gain.value:.1f} points", evidence.subject.stand_in(11))


@claim("linear-and-mlp-overfit-alike", "Appendix B.2, Fig. 7", _RATES, paper="to the same degree")
def _overfit_alike(evidence: Evidence) -> Finding:
    """Linear maps and MLPs overfit to the same degree under L2.

    Holds if: for both, the training rate is above the test rate on average over layers, and the larger gap is at most
    1.5 times the smaller.
    """
    linear, mlp = (
        own_layer(evidence, map, "l2", split="train").mean.over(own_layer(evidence, map, "l2").mean)
        for map in ("linear", "mlp")
    )
    measured = f"linear {100 * linear.value:.1f} points, MLP {100 * mlp.value:.1f}"
    margins = [linear, mlp, linear.times(1.5).over(mlp), mlp.times(1.5).over(linear)]
    return decided(evidence, margins, measured)


@claim("linear-and-mlp-equal-under-cosine", "Appendix B.2", _RATES, paper="almost equally")
def _equal_under_cosine(evidence: Evidence) -> Finding:
    """Under cosine distance, linear maps and MLPs do almost equally well.

    Holds if: rates within 2 points of each other at every layer.
    """
    linear, mlp = (own_layer(evidence, map, "cosine") for map in ("linear", "mlp"))
    gaps = linear.over(mlp)
    widest = gaps.widest
    rates = f"linear {linear[widest]}, MLP {mlp[widest]}"
    measured = f"{100 * abs(gaps[widest].value):.1f} points at layer {widest}, {rates}"
    return decided(evidence, [gap.within(POINTS, 0.0) for gap in gaps.values()], measured)


def _naive_across_single(evidence: Evidence) -> tuple[Measurement, Measurement]:
    """The naive rates across single layers, averaged over layers: under cosine, and under L2."""
    cosine, l2 = (own_layer(evidence, "naive", distance, "previous").mean for distance in ("cosine", "l2"))
    return cosine, l2


@claim("single-layers-change-little", "Appendix B.4, Fig. 11", _SINGLE, paper="well")
def _single_layers_easy(evidence: Evidence) -> Finding:
    """Across a single layer, even the naive lookup does well.

    Holds if: at least 80 % on average over layers, both distances.
    """
    cosine, l2 = _naive_across_single(evidence)
    measured = f"cosine {cosine}, L2 {l2}"
    return decided(evidence, [cosine.over(0.8), l2.over(0.8)], measured)


@claim("single-layers-keep-angle", "Appendix B.4, Fig. 11", _SINGLE, paper="cosine above L2")
def _single_layers_keep_angle(evidence: Evidence) -> Finding:
    """A single layer changes the angle of a vector less than its length.

    Holds if: naive rate higher under cosine than under L2, on average over layers.
    """
    cosine, l2 = _naive_across_single(evidence)
    measured = f"{cosine} against {l2} on average"
    return decided(evidence, [cosine.over(l2)], measured, other_maps(evidence, "previous", "naive"))


@claim("later-single-layers-harder", "Appendix B.4, Fig. 11", Basis(("previous",), "mrpc", LEARNED), paper="on average")
def _later_layers_harder(evidence: Evidence) -> Finding:
    """Tokens are harder to identify across later layers.

    Holds if: rate over all maps and distances lower in the second half of the layers than in the first.
    """
    half = evidence.subject.n_layers // 2
    require(half)
    rates = by_layer(rates_of(evidence, "previous"))
    first = rates.part(last=half).mean
    second = rates.part(half + 1).mean
    measured = f"{first} in the first half, {second} in the second"
    return decided(evidence, [second.under(first)], measured)


def _finetuning_losses(evidence: Evidence) -> tuple[Measurement, Measurement, str]:
    """What fine-tuning takes from the naive rate across the last layer: under cosine, under L2, and both in words."""
    last = evidence.subject.named_layers[12]
    losses = []
    steps = []
    for distance in ("cosine", "l2"):
        before = rate(rates_of(evidence, "untuned", distance=distance, map="naive", layer=last))
        after = rate(rates_of(evidence, "finetuned", distance=distance, map="naive", layer=last))
        losses.append(before.over(after))
        steps.append(f"{before} → {after}")
    return losses[0], losses[1], f"L2 {steps[1]}, cosine {steps[0]}"


def _finetuning_hurts_l2(evidence: Evidence) -> Finding:
    _, l2, words = _finetuning_losses(evidence)
    return decided(evidence, [l2.over(0.1)], words, f"compared with {evidence.subject.finetuned}")


def _finetuning_spares_cosine(evidence: Evidence) -> Finding:
    cosine, l2, words = _finetuning_losses(evidence)
    half = l2.times(0.5)
    margins = [l2, half.over(cosine), half.plus(cosine)]
    return decided(evidence, margins, words, f"compared with {evidence.subject.finetuned}")


for _data, _figure in (("mrpc", 12), ("cola", 13)):
    _tuned = Basis(("untuned", "finetuned"), _data, AVERAGED, only=_data == "cola")  # which must not repeat MRPC
    claim(
        f"finetuning-hurts-l2-{_data}",
        f"Appendix B.4, Fig. {_figure}",
        _tuned,
        words="Fine-tuning hurts the L2 lookup across the last layer",
        paper="a remarkable decrease",
        rule="naive L2 rate at least 10 points lower than before fine-tuning",
    )(_finetuning_hurts_l2)
    claim(
        f"finetuning-spares-cosine-{_data}",
        f"Appendix B.4, Fig. {_figure}",
        _tuned,
        words="Fine-tuning affects the cosine lookup across the last layer much less than the L2 lookup",
        paper="much less",
        rule="the naive L2 rate falls, and the cosine rate falls or rises by less than half as much",
    )(_finetuning_spares_cosine)


def _neighbours(evidence: Evidence) -> Table:
    """The rates of neighbouring tokens, with `near`: how far away they are."""
    frame = rates_of(evidence, "neighbours", offset=None)
    return frame.assign(near=frame["offset"].abs())


@claim(
    "neighbours-recovered-less",
    "Appendix B.5, Fig. 14 to 17",
    Basis(("rates", "neighbours"), "mrpc", LEARNED),
    paper="to a much lower degree",
)
def _neighbours_less(evidence: Evidence) -> Finding:
    """Neighbouring tokens are recovered far less often than the token itself.

    Holds if: less at every layer, map and distance, and by at least 20 points on average.
    """
    keys = ["map", "distance", "layer"]
    same = rates_of(evidence).query("layer == test_layer")
    own = {key: rate(part) for key, part in same.groupby(keys)}
    neighbours = _neighbours(evidence)
    margins = []
    compared = {}
    for (*kind, _), part in neighbours.groupby([*keys, "offset"]):
        compared[tuple(kind)] = own[tuple(kind)]
        margins.append(rate(part).under(own[tuple(kind)]))
    mean = rate(neighbours)
    own_mean = average(compared.values())
    measured = f"{mean} on average against {own_mean}"
    return decided(evidence, [*margins, own_mean.over(mean).over(0.2)], measured)


@claim("neighbours-fall-with-distance", "Appendix B.5, Fig. 14 to 17", _NEIGHBOURS, paper="drops with k")
def _neighbours_fall_with_distance(evidence: Evidence) -> Finding:
    """The further away a neighbour is, the less often it is recovered.

    Holds if: average over layers, sides, maps and distances falls from 1 to 2 to 3 positions away.
    """
    rates = by_layer(_neighbours(evidence), "near")
    measured = ", ".join(f"{mean} at ±{away}" for away, mean in rates.items())
    return decided(evidence, [rise.under(0.0) for rise in rates.rises().values()], measured)


@claim("neighbours-fall-with-depth", "Appendix B.5, Fig. 14 to 17", _NEIGHBOURS, paper="drops with depth")
def _neighbours_fall_with_depth(evidence: Evidence) -> Finding:
    """The deeper the layer, the less often neighbours are recovered.

    Holds if: average lower at the last layer than at the first, and at no layer half a point above the layer before.
    """
    return falls(evidence, by_layer(_neighbours(evidence)), NOISE)


@claim("left-and-right-differ", "Appendix B.5, Fig. 14 to 17", _NEIGHBOURS, paper="different behaviour")
def _left_and_right_differ(evidence: Evidence) -> Finding:
    """Left and right neighbours are recovered differently.

    Holds if: average over positions, maps and distances on the left at least 5 points away from that on the right, at
    the layer where they differ most.
    """
    require(not evidence.subject.causal, "a causal model sees no neighbours to the right")
    frame = _neighbours(evidence)
    left = by_layer(frame[frame["offset"] < 0])
    right = by_layer(frame[frame["offset"] > 0])
    gaps = left.over(right)
    widest = gaps.widest
    gap = gaps[widest] if gaps[widest].value > 0 else gaps[widest].times(-1.0)
    sides = f"left {left[widest]}, right {right[widest]}"
    return decided(evidence, [gap.over(SIDES)], f"{100 * gap.value:.1f} points at layer {widest}, {sides}")
