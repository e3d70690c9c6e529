"""Claims on which token a hidden vector stands for, layer by layer and across layers (section 4)."""

from functools import partial
from itertools import combinations

import numpy as np

from identikit.paper.claims.estimates import Curve, Estimate, average, percent, share_of
from identikit.paper.claims.judgements import (
    AVERAGED,
    LEARNED,
    ONE_LAYER,
    Claim,
    Finding,
    Judge,
    NotApplicableError,
    Table,
    decided,
    falling,
    layers_within,
    named_layers,
    stand_in,
    table,
)
from identikit.paper.evidence import Evidence

POINTS = 0.02  # how far a rate may be from the paper's, and what counts as little between rates
NOISE = 0.005  # by how much folds and training may move a rate from one layer to the next


def rates_of(evidence: Evidence, name: str = "rates", /, **where: object) -> Table:
    """The rates of a table on test sentences, of the token itself, from all data, unless `where` says so; None: any."""
    frame = table(evidence, name)
    for column, value in ({"offset": 0, "data_share": 1.0, "split": "test"} | where).items():
        frame = frame if value is None else frame[frame[column] == value]
    if frame.empty:
        wanted = ", ".join(f"{column} {value}" for column, value in where.items() if value is not None)
        raise NotApplicableError(f"the model has no rates of {wanted or name}")
    return frame


def rate(frame: Table) -> Estimate:
    """The mean of all rates of a frame; within a fold they are of the same tokens."""
    _, fold, count = np.unique(frame["fold"].to_numpy(), return_inverse=True, return_counts=True)
    rates, tokens = (np.bincount(fold, frame[column].to_numpy()) / count for column in ("rate", "n_tokens"))
    return Estimate(rates, share_of(float(rates.mean()), float(tokens.sum())).variance)


def by_layer(frame: Table, column: str = "layer") -> Curve:
    """The mean rate at each layer."""
    return Curve({int(layer): rate(part) for layer, part in frame.groupby(column, sort=True)})


def own_layer(evidence: Evidence, map: str, distance: str, name: str = "rates", **where: object) -> Curve:
    """The rate at each layer of a map that is fitted and tested there."""
    frame = rates_of(evidence, name, map=map, distance=distance, **where)
    return by_layer(frame[frame["layer"] == frame["test_layer"]])


def linear_cosine(evidence: Evidence, _: str = "") -> Curve:
    """The rate by layer of linear maps under cosine distance, the paper's best."""
    return own_layer(evidence, "linear", "cosine")


def _last_rate(paper: float, *, one_split: bool) -> Judge:
    def judge(evidence: Evidence, _: str) -> Finding:
        (last,) = named_layers(evidence, 12)
        frame = rates_of(evidence, map="linear", distance="cosine", layer=last, test_layer=last)
        frame = frame[frame["fold"] == frame["fold"].min()] if one_split else frame
        found = rate(frame)
        folds = f"{len(frame)} folds" if not one_split and len(frame) != 10 else ""
        why = "; ".join(clause for clause in (stand_in(evidence, 12), folds) if clause)
        return decided(evidence, [found.within(POINTS, paper)], f"{percent(found.value)} at layer {last}", why)

    return judge


def ahead(better: tuple[str, str], worse: tuple[str, str], *, also_last: bool, name: str = "rates") -> Judge:
    """Judge that one map and distance recovers more than another; the averages of other maps are given beside it."""

    def judge(evidence: Evidence, _: str) -> Finding:
        more, less = (own_layer(evidence, *kind, name) for kind in (better, worse))
        pairs = {"on average": (more.mean, less.mean)}
        pairs |= {"at the last layer": (more.last, less.last)} if also_last else {}
        told = (f"{percent(one.value)} against {percent(other.value)} {where}" for where, (one, other) in pairs.items())
        others = _other_maps(evidence, name, judged=better[0]) if better[0] == worse[0] else ""
        return decided(evidence, [one.over(other) for one, other in pairs.values()], "; ".join(told), others)

    return judge


def _other_maps(evidence: Evidence, name: str, *, judged: str) -> str:
    same = rates_of(evidence, name).query("layer == test_layer and map != @judged")
    averages = same.groupby(["map", "distance"])["rate"].mean().unstack("distance")
    told = (f"{map} {percent(row['cosine'])} against {percent(row['l2'])}" for map, row in averages.iterrows())
    return f"other maps: {', '.join(told)}"


def _naive_close_early(evidence: Evidence, _: str) -> Finding:
    early = layers_within(evidence.subject.n_layers, 0.0, 1 / 3)[-1]
    if early == evidence.subject.n_layers:
        raise NotApplicableError(ONE_LAYER)
    curves = {distance: own_layer(evidence, "naive", distance) for distance in ("cosine", "l2")}
    margins = [one.over(0.9) for curve in curves.values() for one in curve.part(last=early).values()]
    margins += [margin for curve in curves.values() for margin in curve.part(early).falling(NOISE)]
    least = {name: min(one.value for one in curve.part(last=early).values()) for name, curve in curves.items()}
    lowest = ", ".join(f"{name} {percent(value)}" for name, value in least.items())
    last = ", ".join(f"{name} {percent(curve.last.value)}" for name, curve in curves.items())
    return decided(evidence, margins, f"{lowest} up to layer {early}; {last} at the last")


def _above_half(evidence: Evidence, _: str) -> Finding:
    rates = linear_cosine(evidence).values()
    return decided(evidence, [one.over(0.5) for one in rates], f"{percent(min(one.value for one in rates))} or more")


def across(evidence: Evidence, map: str = "linear", distance: str = "cosine") -> dict[int, Curve]:
    """The rates of the maps of each layer by the layer they are tested on."""
    frame = rates_of(evidence, map=map, distance=distance)
    return {int(layer): by_layer(part, "test_layer") for layer, part in frame.groupby("layer", sort=True)}


def _first_map_fails_late(evidence: Evidence, _: str) -> Finding:
    (first,) = named_layers(evidence, 1)
    papers = [paper for paper in (11, 12) if named_layers(evidence, paper) != [first]]  # not on its own layer
    if not papers:
        raise NotApplicableError(ONE_LAYER)
    rates = across(evidence)[first]
    late = named_layers(evidence, *papers)
    margins = [rates[first].over(0.7), *(rates[layer].under(0.7) for layer in late)]
    measured = ", ".join(f"{percent(rates[layer].value)} at layer {layer}" for layer in (first, *late))
    return decided(evidence, margins, measured, stand_in(evidence, *papers))


def _last_map_serves_early(evidence: Evidence, _: str) -> Finding:
    (last,) = named_layers(evidence, 12)
    rates = across(evidence)[last]
    if len(rates) < 2:
        raise NotApplicableError(ONE_LAYER)
    slack = 2 * NOISE
    return decided(evidence, rates.falling(slack), rates.course(slack), stand_in(evidence, 12))


def transfer(kinds: tuple[tuple[str, str], ...]) -> Judge:
    """Judge that maps lose less on earlier layers than on later ones, against the maps of the layers tested."""

    def judge(evidence: Evidence, _: str) -> Finding:
        margins, told = [], []
        for kind in kinds:
            rates = across(evidence, *kind)
            pairs = list(combinations(rates, 2))
            if not pairs:
                raise NotApplicableError(ONE_LAYER)
            earlier = average(rates[a][a].over(rates[b][a]) for a, b in pairs)
            later = average(rates[b][b].over(rates[a][b]) for a, b in pairs)
            margins += [later, earlier.under(later.times(0.5))]
            name = f"{' '.join(kind)} " if len(kinds) > 1 else ""
            told.append(f"{name}{100 * earlier.value:.1f} against {100 * later.value:.1f}")
        return decided(evidence, margins, f"{', '.join(told)} points lost, on earlier against later layers")

    return judge


def _drop_to_last(evidence: Evidence, _: str) -> Finding:
    if evidence.subject.n_layers < 3:
        raise NotApplicableError("too few layers to tell one step from the others")
    before, last = named_layers(evidence, 11, 12)
    rates = across(evidence)[before]
    *others, drop = rates.rises().values()
    margins = [drop.under(0.0), *(drop.under(step) for step in others)]
    measured = f"{percent(rates[before].value)} at layer {before}, {percent(rates[last].value)} at layer {last}"
    return decided(evidence, margins, measured, stand_in(evidence, 11, 12))


_claim = partial(Claim, section="Section 4", needs=("rates",), texts=LEARNED, data="mrpc", only=False, by_norm=False)

IDENTITY = (
    _claim(
        "linear-cosine-last-layer",
        "Section 4.2, Fig. 2a",
        "A linear map recovers most tokens from the last layer under cosine distance",
        "93 %",
        "within 2 points of the paper's number, mean over folds",
        judge=_last_rate(0.93, one_split=False),
    ),
    _claim(
        "linear-cosine-last-layer-one-split",
        "Section 4.2, Fig. 2b",
        "The same number in the experiment across layers, which uses one split",
        "94 %",
        "within 2 points of the paper's number, first fold",
        judge=_last_rate(0.94, one_split=True),
    ),
    _claim(
        "linear-over-naive",
        "Section 4.2, Fig. 2a",
        "A linear map recovers more tokens than the hidden vector itself",
        "more",
        "higher on average over layers and at the last layer, cosine distance",
        judge=ahead(("linear", "cosine"), ("naive", "cosine"), also_last=True),
    ),
    _claim(
        "naive-close-in-early-layers",
        "Section 4.2, Fig. 2a",
        "Hidden vectors stay close to their inputs up to layer 4, then drift away",
        "close up to layer 4, then a linear decrease",
        "naive rate at least 90 % in the layers that lie wholly within the first third of the depth (at least the "
        "first layer) and falling after them, both distances",
        texts=AVERAGED,
        judge=_naive_close_early,
    ),
    _claim(
        "mostly-identifiable",
        "Section 4.2, Fig. 2a",
        "Tokens remain mostly identifiable throughout",
        "mostly, 93 % at the end",
        "linear-cosine rate above one half at every layer",
        judge=_above_half,
    ),
    _claim(
        "rate-falls-with-depth",
        "Section 4.2, Fig. 2a",
        "The identifiability rate decreases with depth",
        "decreases",
        "linear-cosine rate lower at the last layer than at the first, and at no layer half a point above the layer "
        "before",
        judge=falling(linear_cosine, NOISE),
    ),
    _claim(
        "cosine-over-l2",
        "Section 4.2, Fig. 2a",
        "Cosine distance recovers more tokens than L2 distance",
        "more",
        "linear maps: higher on average over layers and at the last layer",
        judge=ahead(("linear", "cosine"), ("linear", "l2"), also_last=True),
    ),
    _claim(
        "first-map-fails-late",
        "Section 4.2, Fig. 2b",
        "The map fitted to layer 1 fails at the last two layers",
        "drops to below 70 %",
        "linear-cosine rate at least 70 % at layer 1 and below 70 % at the last two layers (in a model of two layers, "
        "at the last)",
        judge=_first_map_fails_late,
    ),
    _claim(
        "last-map-serves-early-layers",
        "Section 4.2, Fig. 2b",
        "The map fitted to the last layer does better the earlier the layer it is tested on",
        "almost monotonically",
        "linear-cosine rate higher at the first layer than at the last, and no layer more than a point above the layer "
        "before",
        judge=_last_map_serves_early,
    ),
    _claim(
        "late-maps-transfer",
        "Section 4.2, Fig. 2b",
        "Maps of late layers transfer to early layers, but not the reverse",
        "well, against badly",
        "average loss against the linear-cosine map of the tested layer: on earlier layers less than half of that on "
        "later layers",
        judge=transfer((("linear", "cosine"),)),
    ),
    _claim(
        "drop-to-last-layer",
        "Section 4.2, Fig. 2b",
        "The map of the second to last layer drops suddenly at the last",
        "a sudden drop",
        "linear-cosine rate falls more there than between any other two neighbouring layers",
        judge=_drop_to_last,
    ),
)
