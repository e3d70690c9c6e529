"""Claims on which token a hidden vector stands for, layer by layer and across layers (section 4)."""

from functools import partial
from itertools import combinations

import numpy as np

from identikit.paper.claims.claim import (
    AVERAGED,
    LEARNED,
    Basis,
    Claims,
    Curve,
    Finding,
    Measurement,
    average,
    clauses,
    decided,
    falls,
    percent,
    require,
    share_of,
)
from identikit.paper.evidence import Evidence, Table

POINTS = 0.02  # how far a rate may be from the paper's, and what counts as little between rates
NOISE = 0.005  # by how much folds and training may move a rate from one layer to the next
_RATES = Basis(("rates",), "mrpc", LEARNED)

claim = Claims()


def rates_of(evidence: Evidence, name: str = "rates", /, **where: object) -> Table:
    """The rates of a table on test sentences, of the token itself, from all data, unless `where` says so; None: any."""
    frame = evidence.tables[name]
    for column, value in ({"offset": 0, "data_share": 1.0, "split": "test"} | where).items():
        if value is not None:
            frame = frame[frame[column] == value]
    wanted = ", ".join(f"{column} {value}" for column, value in where.items() if value is not None)
    require(len(frame), f"the model has no rates of {wanted or name}")
    return frame


def rate(frame: Table) -> Measurement:
    """The mean of all rates of a frame; within a fold they cover the same tokens."""
    _, fold, count = np.unique(frame["fold"].to_numpy(), return_inverse=True, return_counts=True)
    rates = np.bincount(fold, frame["rate"].to_numpy()) / count
    tokens = np.bincount(fold, frame["n_tokens"].to_numpy()) / count
    return Measurement(rates, share_of(float(rates.mean()), float(tokens.sum())).variance)


def by_layer(frame: Table, column: str = "layer") -> Curve:
    """The mean rate at each layer."""
    return Curve({int(layer): rate(part) for layer, part in frame.groupby(column, sort=True)})


def own_layer(evidence: Evidence, map: str, distance: str, name: str = "rates", split: str = "test") -> Curve:
    """The rate at each layer of a map that is fitted and tested there."""
    frame = rates_of(evidence, name, map=map, distance=distance, split=split)
    return by_layer(frame[frame["layer"] == frame["test_layer"]])


def _last_rate(evidence: Evidence, paper: float, one_split: bool) -> Finding:
    last = evidence.subject.named_layers[12]
    frame = rates_of(evidence, map="linear", distance="cosine", layer=last, test_layer=last)
    if one_split:
        frame = frame[frame["fold"] == frame["fold"].min()]
    folds = "" if one_split or len(frame) == 10 else f"{len(frame)} folds"
    why = clauses(evidence.subject.stand_in(12), folds)
    return decided(evidence, [rate(frame).within(POINTS, paper)], f"{rate(frame)} at layer {last}", why)


claim(
    "linear-cosine-last-layer",
    "Section 4.2, Fig. 2a",
    _RATES,
    words="A linear map recovers most tokens from the last layer under cosine distance",
    paper="93 %",
    rule="within 2 points of the paper's number, mean over folds",
)(partial(_last_rate, paper=0.93, one_split=False))
claim(
    "linear-cosine-last-layer-one-split",
    "Section 4.2, Fig. 2b",
    _RATES,
    words="The same number in the experiment across layers, which uses one split",
    paper="94 %",
    rule="within 2 points of the paper's number, first fold",
)(partial(_last_rate, paper=0.94, one_split=True))


def _ahead(evidence: Evidence, better: tuple[str, str], worse: tuple[str, str]) -> Finding:
    """Judge that one map and distance recovers more than another, on average and at the last layer."""
    more = own_layer(evidence, *better)
    less = own_layer(evidence, *worse)
    measured = f"{more.mean} against {less.mean} on average; {more.last} against {less.last} at the last layer"
    others = other_maps(evidence, "rates", better[0]) if better[0] == worse[0] else ""
    return decided(evidence, [more.mean.over(less.mean), more.last.over(less.last)], measured, others)


def other_maps(evidence: Evidence, name: str, judged: str) -> str:
    """The averages of the other maps, beside those of the map that was judged."""
    same = rates_of(evidence, name).query("layer == test_layer and map != @judged")
    averages = same.groupby(["map", "distance"])["rate"].mean().unstack("distance")
    others = (f"{map} {percent(row['cosine'])} against {percent(row['l2'])}" for map, row in averages.iterrows())
    return f"other maps: {', '.join(others)}"


claim(
    "linear-over-naive",
    "Section 4.2, Fig. 2a",
    _RATES,
    words="A linear map recovers more tokens than the hidden vector itself",
    paper="more",
    rule="higher on average over layers and at the last layer, cosine distance",
)(partial(_ahead, better=("linear", "cosine"), worse=("naive", "cosine")))


@claim(
    "naive-close-in-early-layers",
    "Section 4.2, Fig. 2a",
    Basis(("rates",), "mrpc", AVERAGED),
    paper="close up to layer 4, then a linear decrease",
)
def _naive_close_early(evidence: Evidence) -> Finding:
    """Hidden vectors stay close to their inputs up to layer 4, then drift away.

    Holds if: naive rate at least 90 % in the layers that lie wholly within the first third of the depth (at least the
    first layer) and falling after them, both distances.
    """
    early = evidence.subject.layers_within(0.0, 1 / 3)[-1]
    require(early < evidence.subject.n_layers)
    close = []
    drift = []
    least = []
    last = []
    for distance in ("cosine", "l2"):
        curve = own_layer(evidence, "naive", distance)
        start = curve.part(last=early).values()
        close += [rate.over(0.9) for rate in start]
        drift += curve.part(early).falling(NOISE)
        least.append(f"{distance} {percent(min(rate.value for rate in start))}")
        last.append(f"{distance} {curve.last}")
    measured = f"{', '.join(least)} up to layer {early}; {', '.join(last)} at the last"
    return decided(evidence, close + drift, measured)


def linear_cosine(evidence: Evidence) -> Curve:
    """The rate by layer of linear maps under cosine distance, the paper's best."""
    return own_layer(evidence, "linear", "cosine")


@claim("mostly-identifiable", "Section 4.2, Fig. 2a", _RATES, paper="mostly, 93 % at the end")
def _above_half(evidence: Evidence) -> Finding:
    """Tokens remain mostly identifiable throughout.

    Holds if: linear-cosine rate above one half at every layer.
    """
    rates = linear_cosine(evidence).values()
    least = min(rate.value for rate in rates)
    return decided(evidence, [rate.over(0.5) for rate in rates], f"{percent(least)} or more")


@claim("rate-falls-with-depth", "Section 4.2, Fig. 2a", _RATES, paper="decreases")
def _rate_falls(evidence: Evidence) -> Finding:
    """The identifiability rate decreases with depth.

    Holds if: linear-cosine rate lower at the last layer than at the first, and at no layer half a point above the layer
    before.
    """
    return falls(evidence, linear_cosine(evidence), NOISE)


claim(
    "cosine-over-l2",
    "Section 4.2, Fig. 2a",
    _RATES,
    words="Cosine distance recovers more tokens than L2 distance",
    paper="more",
    rule="linear maps: higher on average over layers and at the last layer",
)(partial(_ahead, better=("linear", "cosine"), worse=("linear", "l2")))


def across(evidence: Evidence, map: str = "linear", distance: str = "cosine") -> dict[int, Curve]:
    """The rates of the maps of each layer by the layer they are tested on."""
    frame = rates_of(evidence, map=map, distance=distance)
    return {int(layer): by_layer(part, "test_layer") for layer, part in frame.groupby("layer", sort=True)}


@claim("first-map-fails-late", "Section 4.2, Fig. 2b", _RATES, paper="drops to below 70 %")
def _first_map_fails_late(evidence: Evidence) -> Finding:
    """The map fitted to layer 1 fails at the last two layers.

    Holds if: linear-cosine rate at least 70 % at layer 1 and below 70 % at the last two layers (in a model of two
    layers, at the last).
    """
    standing = evidence.subject.named_layers
    first = standing[1]
    papers = [paper for paper in (11, 12) if standing[paper] != first]  # not on its own layer
    require(papers)
    rates = across(evidence)[first]
    late = [standing[paper] for paper in papers]
    margins = [rates[first].over(0.7), *(rates[layer].under(0.7) for layer in late)]
    return decided(evidence, margins, rates.at(first, *late), evidence.subject.stand_in(*papers))


@claim("last-map-serves-early-layers", "Section 4.2, Fig. 2b", _RATES, paper="almost monotonically")
def _last_map_serves_early(evidence: Evidence) -> Finding:
    """The map fitted to the last layer does better the earlier the layer it is tested on.

    Holds if: linear-cosine rate higher at the first layer than at the last, and no layer more than a point above the
    layer before.
    """
    rates = across(evidence)[evidence.subject.named_layers[12]]
    return falls(evidence, rates, 2 * NOISE, evidence.subject.stand_in(12))


def transfer(evidence: Evidence, kinds: tuple[tuple[str, str], ...]) -> Finding:
    """Judge that maps lose less on earlier layers than on later ones, against the maps of the layers tested."""
    margins = []
    losses = []
    for map, distance in kinds:
        rates = across(evidence, map, distance)
        pairs = list(combinations(rates, 2))
        require(pairs)
        earlier = average(rates[a][a].over(rates[b][a]) for a, b in pairs)
        later = average(rates[b][b].over(rates[a][b]) for a, b in pairs)
        margins += [later, earlier.under(later.times(0.5))]
        name = f"{map} {distance} " if len(kinds) > 1 else ""
        losses.append(f"{name}{100 * earlier.value:.1f} against {100 * later.value:.1f}")
    return decided(evidence, margins, f"{', '.join(losses)} points lost, on earlier against later layers")


claim(
    "late-maps-transfer",
    "Section 4.2, Fig. 2b",
    _RATES,
    words="Maps of late layers transfer to early layers, but not the reverse",
    paper="well, against badly",
    rule="average loss against the linear-cosine map of the tested layer: on earlier layers less than half of that on "
    "later layers",
)(partial(transfer, kinds=(("linear", "cosine"),)))


@claim("drop-to-last-layer", "Section 4.2, Fig. 2b", _RATES, paper="a sudden drop")
def _drop_to_last(evidence: Evidence) -> Finding:
    """The map of the second to last layer drops suddenly at the last.

    Holds if: linear-cosine rate falls more there than between any other two neighbouring layers.
    """
    require(evidence.subject.n_layers > 2, "too few layers to tell one step from the others")
    before = evidence.subject.named_layers[11]
    last = evidence.subject.named_layers[12]
    rates = across(evidence)[before]
    *others, drop = rates.rises().values()
    margins = [drop.under(0.0), *(drop.under(step) for step in others)]
    return decided(evidence, margins, rates.at(before, last), evidence.subject.stand_in(11, 12))
