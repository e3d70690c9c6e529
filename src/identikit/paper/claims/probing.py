"""Claims on how token identity was probed: data, single layers, fine-tuning, neighbours (Appendix B)."""

from functools import partial
from itertools import permutations

from identikit.paper.claims.claim import (
    AVERAGED,
    LEARNED,
    Claims,
    Finding,
    Measurement,
    average,
    decide,
    decide_fall,
    require,
)
from identikit.paper.claims.identity import (
    NOISE,
    POINTS,
    across,
    by_layer,
    other_maps_in_words,
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

claims = Claims()
_on_rates = claims.on("rates", texts=LEARNED)
_on_shares = claims.on("shares", texts=LEARNED)
_on_single_layers = claims.on("previous", texts=AVERAGED)
_on_neighbours = claims.on("neighbours", texts=LEARNED)

_on_rates(
    "Appendix B.3, Fig. 8 to 10",
    name="late-maps-transfer-in-all-maps",
    words="Maps of late layers transfer to early layers, but not the reverse, for MLPs and under L2 too",
    paper="considerably worse to later layers",
    rule="as for late-maps-transfer, for linear and MLP maps under both distances",
)(partial(transfer, kinds=KINDS))


def _elsewhere(evidence: Evidence, map: str, distance: str) -> tuple[Measurement, Measurement]:
    """The rate of maps on layers other than their own, and how far it is below the maps fitted to those layers."""
    rates = across(evidence, map, distance)
    pairs = list(permutations(rates, 2))
    require(pairs)
    mean = average(rates[fitted][tested] for fitted, tested in pairs)
    return mean, average(rates[tested][tested] for _, tested in pairs) - mean


@_on_rates("Appendix B.3, Fig. 8 to 10", paper="better")
def linear_maps_generalise_better(evidence: Evidence) -> Finding:
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
        margins.append(linear - mlp - NOISE)
        rates.append(f"{name} linear {linear}, MLP {mlp}")
        losses.append(f"{name} linear {100 * linear_lost.value:.1f}, MLP {100 * mlp_lost.value:.1f} points")
    return decide(evidence, margins, "; ".join(rates), f"below the maps of the tested layers by: {'; '.join(losses)}")


def _by_share(evidence: Evidence) -> dict[float, Measurement]:
    layer = evidence.subject.named_layers[11]
    frame = rates_of(evidence, "shares", map="mlp", distance="l2", layer=layer, data_share=None)
    rates = {float(share): rate(of_share) for share, of_share in frame.groupby("data_share")}
    require({*SHARES} <= {*rates}, "no maps were fitted on shares of the data")
    return rates


@_on_shares("Appendix B.2", paper="0.74, 0.80, 0.81, 0.82")
def rate_by_data_share(evidence: Evidence) -> Finding:
    """Rate of an MLP under L2 at layer 11, trained on 50, 80, 90 and 100 % of the training data.

    Holds if: each within 0.02 of the paper's number.
    """
    rates = _by_share(evidence)
    margins = [rates[share].within(POINTS, paper) for share, paper in PAPER_BY_SHARE.items()]
    measured = ", ".join(f"{rates[share].value:.2f}" for share in SHARES)
    return decide(evidence, margins, measured, evidence.subject.stand_in(11))


@_on_shares("Appendix B.2", paper="1 point from the last tenth")
def more_data_gains_little(evidence: Evidence) -> Finding:
    """The MLP would gain little from more data.

    Holds if: the last tenth of the data adds at most 2 points.
    """
    rates = _by_share(evidence)
    gain = rates[1.0] - rates[0.9]
    return decide(evidence, [POINTS - gain], f"{100 * gain.value:.1f} points", evidence.subject.stand_in(11))


@_on_rates("Appendix B.2, Fig. 7", paper="to the same degree")
def linear_and_mlp_overfit_alike(evidence: Evidence) -> Finding:
    """Linear maps and MLPs overfit to the same degree under L2.

    Holds if: for both, the training rate is above the test rate on average over layers, and the larger gap is at most
    1.5 times the smaller.
    """

    def gap(map: str) -> Measurement:
        return own_layer(evidence, map, "l2", split="train").mean - own_layer(evidence, map, "l2").mean

    linear = gap("linear")
    mlp = gap("mlp")
    measured = f"linear {100 * linear.value:.1f} points, MLP {100 * mlp.value:.1f}"
    margins = [linear, mlp, 1.5 * linear - mlp, 1.5 * mlp - linear]
    return decide(evidence, margins, measured)


@_on_rates("Appendix B.2", paper="almost equally")
def linear_and_mlp_equal_under_cosine(evidence: Evidence) -> Finding:
    """Under cosine distance, linear maps and MLPs do almost equally well.

    Holds if: rates within 2 points of each other at every layer.
    """
    linear = own_layer(evidence, "linear", "cosine")
    mlp = own_layer(evidence, "mlp", "cosine")
    gaps = linear - mlp
    widest = gaps.widest
    rates = f"linear {linear[widest]}, MLP {mlp[widest]}"
    measured = f"{100 * abs(gaps[widest].value):.1f} points at layer {widest}, {rates}"
    return decide(evidence, [gap.within(POINTS, 0.0) for gap in gaps.values()], measured)


def _naive_across_single(evidence: Evidence) -> tuple[Measurement, Measurement]:
    """The naive rates across single layers, averaged over layers: under cosine, and under L2."""
    cosine = own_layer(evidence, "naive", "cosine", "previous")
    l2 = own_layer(evidence, "naive", "l2", "previous")
    return cosine.mean, l2.mean


@_on_single_layers("Appendix B.4, Fig. 11", paper="well")
def single_layers_change_little(evidence: Evidence) -> Finding:
    """Across a single layer, even the naive lookup does well.

    Holds if: at least 80 % on average over layers, both distances.
    """
    cosine, l2 = _naive_across_single(evidence)
    measured = f"cosine {cosine}, L2 {l2}"
    return decide(evidence, [cosine - 0.8, l2 - 0.8], measured)


@_on_single_layers("Appendix B.4, Fig. 11", paper="cosine above L2")
def single_layers_keep_angle(evidence: Evidence) -> Finding:
    """A single layer changes the angle of a vector less than its length.

    Holds if: naive rate higher under cosine than under L2, on average over layers.
    """
    cosine, l2 = _naive_across_single(evidence)
    measured = f"{cosine} against {l2} on average"
    return decide(evidence, [cosine - l2], measured, other_maps_in_words(evidence, "previous", "naive"))


@claims.on("previous", texts=LEARNED)("Appendix B.4, Fig. 11", paper="on average")
def later_single_layers_harder(evidence: Evidence) -> Finding:
    """Tokens are harder to identify across later layers.

    Holds if: rate over all maps and distances lower in the second half of the layers than in the first.
    """
    half = evidence.subject.n_layers // 2
    require(half)
    rates = by_layer(rates_of(evidence, "previous"))
    first = rates.between(last=half).mean
    second = rates.between(half + 1).mean
    measured = f"{first} in the first half, {second} in the second"
    return decide(evidence, [first - second], measured)


def _finetuning_losses(evidence: Evidence) -> tuple[Measurement, Measurement, str]:
    """What fine-tuning takes from the naive rate across the last layer: under cosine, under L2, and both in words."""
    last = evidence.subject.named_layers[12]
    losses = {}
    words = {}
    for distance in ("cosine", "l2"):
        before = rate(rates_of(evidence, "untuned", distance=distance, map="naive", layer=last))
        after = rate(rates_of(evidence, "finetuned", distance=distance, map="naive", layer=last))
        losses[distance] = before - after
        words[distance] = f"{before} → {after}"
    return losses["cosine"], losses["l2"], f"L2 {words['l2']}, cosine {words['cosine']}"


def _finetuning_hurts_l2(evidence: Evidence) -> Finding:
    _, l2, words = _finetuning_losses(evidence)
    return decide(evidence, [l2 - 0.1], words, f"compared with {evidence.subject.finetuned}")


def _finetuning_spares_cosine(evidence: Evidence) -> Finding:
    cosine, l2, words = _finetuning_losses(evidence)
    margins = [l2, 0.5 * l2 - cosine, 0.5 * l2 + cosine]
    return decide(evidence, margins, words, f"compared with {evidence.subject.finetuned}")


for _data, _figure in (("mrpc", 12), ("cola", 13)):
    _on_tuned = claims.on(
        "untuned",
        "finetuned",
        texts=AVERAGED,
        data=_data,
        only=_data == "cola",  # which must not repeat MRPC
    )
    _on_tuned(
        f"Appendix B.4, Fig. {_figure}",
        name=f"finetuning-hurts-l2-{_data}",
        words="Fine-tuning hurts the L2 lookup across the last layer",
        paper="a remarkable decrease",
        rule="naive L2 rate at least 10 points lower than before fine-tuning",
    )(_finetuning_hurts_l2)
    _on_tuned(
        f"Appendix B.4, Fig. {_figure}",
        name=f"finetuning-spares-cosine-{_data}",
        words="Fine-tuning affects the cosine lookup across the last layer much less than the L2 lookup",
        paper="much less",
        rule="the naive L2 rate falls, and the cosine rate falls or rises by less than half as much",
    )(_finetuning_spares_cosine)


def _neighbours(evidence: Evidence) -> Table:
    """The rates of neighbouring tokens, with how many positions they are `away`."""
    frame = rates_of(evidence, "neighbours", offset=None)
    return frame.assign(away=frame["offset"].abs())


@claims.on("rates", "neighbours", texts=LEARNED)("Appendix B.5, Fig. 14 to 17", paper="to a much lower degree")
def neighbours_recovered_less(evidence: Evidence) -> Finding:
    """Neighbouring tokens are recovered far less often than the token itself.

    Holds if: less at every layer, map and distance, and by at least 20 points on average.
    """
    keys = ["map", "distance", "layer"]
    same_layer = rates_of(evidence).query("layer == test_layer")
    token_rates = {key: rate(frame) for key, frame in same_layer.groupby(keys)}
    neighbours = _neighbours(evidence)
    margins = []
    compared = {}
    for (*key, _), frame in neighbours.groupby([*keys, "offset"]):
        token_rate = token_rates[tuple(key)]
        compared[tuple(key)] = token_rate
        margins.append(token_rate - rate(frame))
    neighbour_mean = rate(neighbours)
    token_mean = average(compared.values())
    measured = f"{neighbour_mean} on average against {token_mean}"
    return decide(evidence, [*margins, token_mean - neighbour_mean - 0.2], measured)


@_on_neighbours("Appendix B.5, Fig. 14 to 17", paper="drops with k")
def neighbours_fall_with_distance(evidence: Evidence) -> Finding:
    """The further away a neighbour is, the less often it is recovered.

    Holds if: average over layers, sides, maps and distances falls from 1 to 2 to 3 positions away.
    """
    rates = by_layer(_neighbours(evidence), "away")
    measured = ", ".join(f"{mean} at ±{away}" for away, mean in rates.items())
    return decide(evidence, [-1.0 * rise for rise in rates.rises().values()], measured)


@_on_neighbours("Appendix B.5, Fig. 14 to 17", paper="drops with depth")
def neighbours_fall_with_depth(evidence: Evidence) -> Finding:
    """The deeper the layer, the less often neighbours are recovered.

    Holds if: average lower at the last layer than at the first, and at no layer half a point above the layer before.
    """
    return decide_fall(evidence, by_layer(_neighbours(evidence)), NOISE)


@_on_neighbours("Appendix B.5, Fig. 14 to 17", paper="different behaviour")
def left_and_right_differ(evidence: Evidence) -> Finding:
    """Left and right neighbours are recovered differently.

    Holds if: average over positions, maps and distances on the left at least 5 points away from that on the right, at
    the layer where they differ most.
    """
    require(not evidence.subject.causal, "a causal model sees no neighbours to the right")
    frame = _neighbours(evidence)
    left = by_layer(frame[frame["offset"] < 0])
    right = by_layer(frame[frame["offset"] > 0])
    gaps = left - right
    widest = gaps.widest
    gap = gaps[widest] if gaps[widest].value > 0 else -1.0 * gaps[widest]
    sides = f"left {left[widest]}, right {right[widest]}"
    return decide(evidence, [gap - SIDES], f"{100 * gap.value:.1f} points at layer {widest}, {sides}")
