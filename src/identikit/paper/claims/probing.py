"""Claims on how token identity was probed: data, single layers, fine-tuning, neighbours (Appendix B)."""

from functools import partial

from identikit.paper.claims.identity import NOISE, POINTS, ahead, own_layer, rates_of, transfer
from identikit.paper.claims.judgements import (
    ONE_LAYER,
    Claim,
    Finding,
    NotApplicableError,
    Table,
    by_layer,
    falling,
    finding,
    halves,
    named_layers,
    percent,
    stand_in,
)
from identikit.paper.evidence import Evidence

SHARES = {0.5: 0.74, 0.8: 0.80, 0.9: 0.81, 1.0: 0.82}
SIDES = 0.05  # by how much left and right must differ at one layer; chance makes the largest of many larger than one
KINDS = tuple((map, distance) for map in ("linear", "mlp") for distance in ("cosine", "l2"))


def _by_share(evidence: Evidence) -> Table:
    (layer,) = named_layers(evidence, 11)
    frame = rates_of(evidence, "shares", map="mlp", distance="l2", layer=layer, data_share=None)
    rates = frame.groupby("data_share")["rate"].mean().reindex([*SHARES])
    if rates.isna().any():
        raise NotApplicableError("no maps fitted on shares of the data")
    return rates


def _data_shares(evidence: Evidence, _: str) -> Finding:
    rates = _by_share(evidence)
    holds = all(abs(rates[share] - paper) <= POINTS for share, paper in SHARES.items())
    return finding(holds, ", ".join(f"{rate:.2f}" for rate in rates), stand_in(evidence, 11))


def _more_data_gains_little(evidence: Evidence, _: str) -> Finding:
    rates = _by_share(evidence)
    gain = rates[1.0] - rates[0.9]
    return finding(gain <= POINTS, f"{100 * gain:.1f} points", stand_in(evidence, 11))


def _overfit_alike(evidence: Evidence, _: str) -> Finding:
    linear, mlp = (
        (own_layer(evidence, map, "l2", split="train") - own_layer(evidence, map, "l2")).mean()
        for map in ("linear", "mlp")
    )
    measured = f"linear {100 * linear:.1f} points, MLP {100 * mlp:.1f}"
    return finding(min(linear, mlp) > 0 and max(linear, mlp) <= 1.5 * min(linear, mlp), measured)


def _equal_under_cosine(evidence: Evidence, _: str) -> Finding:
    linear, mlp = (own_layer(evidence, map, "cosine") for map in ("linear", "mlp"))
    gap = (linear - mlp).abs()
    widest = gap.idxmax()
    told = f"linear {percent(linear[widest])}, MLP {percent(mlp[widest])}"
    return finding(gap[widest] <= POINTS, f"{100 * gap[widest]:.1f} points at layer {widest}, {told}")


def _elsewhere(evidence: Evidence, map: str, distance: str) -> tuple[float, float]:
    """The rate of maps on layers other than their own, and how far it is below that of those layers' own maps."""
    frame = rates_of(evidence, map=map, distance=distance)
    pairs = frame[frame["layer"] != frame["test_layer"]].groupby(["layer", "test_layer"])["rate"].mean()
    if pairs.empty:
        raise NotApplicableError(ONE_LAYER)
    own = own_layer(evidence, map, distance).reindex(pairs.index.get_level_values("test_layer"))
    return pairs.mean(), own.mean() - pairs.mean()


def _linear_generalises_better(evidence: Evidence, _: str) -> Finding:
    holds, rates, losses = True, [], []
    for distance, name in (("cosine", "cosine"), ("l2", "L2")):
        (linear, linear_lost), (mlp, mlp_lost) = (_elsewhere(evidence, map, distance) for map in ("linear", "mlp"))
        holds = holds and linear - mlp >= NOISE
        rates.append(f"{name} linear {percent(linear)}, MLP {percent(mlp)}")
        losses.append(f"{name} linear {100 * linear_lost:.1f}, MLP {100 * mlp_lost:.1f} points")
    return finding(holds, "; ".join(rates), f"below the tested layers' own maps by: {'; '.join(losses)}")


def _single_layers_easy(evidence: Evidence, _: str) -> Finding:
    cosine, l2 = (own_layer(evidence, "naive", distance, "previous").mean() for distance in ("cosine", "l2"))
    return finding(min(cosine, l2) >= 0.8, f"cosine {percent(cosine)}, L2 {percent(l2)}")


def _later_layers_harder(evidence: Evidence, _: str) -> Finding:
    first, second = halves(by_layer(rates_of(evidence, "previous"), "rate"), evidence.subject.n_layers)
    return finding(second < first, f"{percent(first)} in the first half, {percent(second)} in the second")


def _finetuning_losses(evidence: Evidence) -> tuple[float, float, str]:
    """What fine-tuning takes from the naive rate across the last layer: under cosine, under L2, and both in words."""
    (last,) = named_layers(evidence, 12)
    where = {"map": "naive", "layer": last}
    before, after = (
        [rates_of(evidence, name, distance=distance, **where)["rate"].mean() for distance in ("cosine", "l2")]
        for name in ("untuned", "finetuned")
    )
    words = f"L2 {percent(before[1])} → {percent(after[1])}, cosine {percent(before[0])} → {percent(after[0])}"
    return before[0] - after[0], before[1] - after[1], words


def _finetuning_hurts_l2(evidence: Evidence, _: str) -> Finding:
    l2, words = _finetuning_losses(evidence)[1:]
    return finding(l2 >= 0.1, words, f"compared with {evidence.subject.finetuned}")


def _finetuning_spares_cosine(evidence: Evidence, _: str) -> Finding:
    cosine, l2, words = _finetuning_losses(evidence)
    return finding(l2 > 0 and abs(cosine) < l2 / 2, words, f"compared with {evidence.subject.finetuned}")


def _neighbours(evidence: Evidence) -> Table:
    """The rates of neighbouring tokens, with `near`: how far away they are."""
    frame = rates_of(evidence, "neighbours", offset=None)
    return frame.assign(near=frame["offset"].abs())


def _neighbours_less(evidence: Evidence, _: str) -> Finding:
    neighbours = _neighbours(evidence)
    keys = ["map", "distance", "layer"]
    own = rates_of(evidence).query("layer == test_layer").groupby(keys)["rate"].mean()
    best = neighbours.groupby([*keys, "offset"])["rate"].mean().groupby(keys).max()
    own, mean = own.loc[best.index], neighbours["rate"].mean()
    holds = (best < own).all() and own.mean() - mean >= 0.2
    return finding(holds, f"{percent(mean)} on average against {percent(own.mean())}")


def _neighbours_fall_with_distance(evidence: Evidence, _: str) -> Finding:
    rates = _neighbours(evidence).groupby("near")["rate"].mean()
    return finding(rates.diff().max() < 0, ", ".join(f"{percent(rate)} at ±{k}" for k, rate in rates.items()))


def _left_and_right_differ(evidence: Evidence, _: str) -> Finding:
    if evidence.subject.causal:
        raise NotApplicableError("a causal model sees no neighbours to the right")
    frame = _neighbours(evidence)
    sides = frame.assign(left=frame["offset"] < 0).pivot_table(index="layer", columns="left", values="rate")
    gap = (sides[True] - sides[False]).abs()
    widest = gap.idxmax()
    left, right = sides.loc[widest, True], sides.loc[widest, False]
    measured = f"{100 * gap[widest]:.1f} points at layer {widest}, left {percent(left)}, right {percent(right)}"
    return finding(gap[widest] >= SIDES, measured)


_claim = partial(Claim, needs=("rates",), data="mrpc", only=False, by_norm=False)


def _finetuning(data: str, where: str, *, only: bool = False) -> tuple[Claim, Claim]:
    """The two claims on a model fine-tuned on a dataset; the second dataset's must not repeat those of the first."""
    claim = partial(Claim, where=where, needs=("untuned", "finetuned"), data=data, only=only, by_norm=False)
    return (
        claim(
            f"finetuning-hurts-l2-{data}",
            words="Fine-tuning hurts the L2 lookup across the last layer",
            paper="a remarkable decrease",
            rule="naive L2 rate at least 10 points lower than before",
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
        "Maps of late layers transfer to early ones, and not the reverse, also MLPs and under L2",
        "considerably worse to later layers",
        "as for late-maps-transfer, for linear and MLP maps under both distances",
        judge=transfer(KINDS),
    ),
    _claim(
        "linear-maps-generalise-better",
        "Appendix B.3, Fig. 8 to 10",
        "Linear maps generalise better across layers than MLPs",
        "better",
        "rate on layers other than their own, average over pairs of layers: half a point or more above MLPs, both "
        "distances",
        judge=_linear_generalises_better,
    ),
    _claim(
        "rate-by-data-share",
        "Appendix B.2",
        "MLP with L2 at layer 11, from 50, 80, 90 and 100 % of the training data",
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
        "train above test rate for both on average over layers, the larger gap at most 1.5 times the smaller",
        judge=_overfit_alike,
    ),
    _claim(
        "linear-and-mlp-equal-under-cosine",
        "Appendix B.2",
        "Under cosine distance linear maps and MLPs do almost equally well",
        "almost equally",
        "rates within 2 points of each other at every layer",
        judge=_equal_under_cosine,
    ),
    _claim(
        "single-layers-change-little",
        "Appendix B.4, Fig. 11",
        "Across a single layer even the naive lookup does well",
        "well",
        "at least 80 % on average over layers, both distances",
        needs=("previous",),
        judge=_single_layers_easy,
    ),
    _claim(
        "single-layers-keep-angle",
        "Appendix B.4, Fig. 11",
        "A single layer affects the angle less than the magnitude",
        "cosine above L2",
        "naive rate higher under cosine than under L2, on average over layers",
        needs=("previous",),
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
        "Neighbouring tokens are recovered far less than the token itself",
        "to a much lower degree",
        "less at every layer, map and distance, and by 20 points or more on average",
        needs=("rates", "neighbours"),
        judge=_neighbours_less,
    ),
    _claim(
        "neighbours-fall-with-distance",
        "Appendix B.5, Fig. 14 to 17",
        "The further a neighbour, the less it is recovered",
        "drops with k",
        "average over layers, sides, maps and distances falls from 1 to 2 to 3 places away",
        needs=("neighbours",),
        judge=_neighbours_fall_with_distance,
    ),
    _claim(
        "neighbours-fall-with-depth",
        "Appendix B.5, Fig. 14 to 17",
        "The deeper the layer, the less neighbours are recovered",
        "drops with depth",
        "average lower at the last than the first layer, and no layer half a point above the one before",
        needs=("neighbours",),
        judge=falling(lambda evidence, _: by_layer(_neighbours(evidence), "rate"), NOISE),
    ),
    _claim(
        "left-and-right-differ",
        "Appendix B.5, Fig. 14 to 17",
        "Left and right neighbours are recovered differently",
        "different behaviour",
        "average over places, maps and distances to the left at least 5 points from that to the right, at the layer "
        "where they differ most",
        needs=("neighbours",),
        judge=_left_and_right_differ,
    ),
)
