"""Claims on which token a hidden vector stands for, layer by layer and across layers (section 4)."""

from functools import partial
from itertools import combinations

import numpy as np

from identikit.paper.claims.claim import (
    AVERAGED,
    LEARNED,
    Claims,
    Curve,
    Finding,
    Measurement,
    average,
    decide,
    decide_fall,
    join_clauses,
    measured_share,
    percent,
    require,
)
from identikit.paper.evidence import Evidence, Table

POINTS = 0.02  # how far a rate may be from the paper's, and what counts as little between rates
NOISE = 0.005  # by how much folds and training may move a rate from one layer to the next

claims = Claims()
_on_rates = claims.on("rates", texts=LEARNED)


def rates_of(evidence: Evidence, name: str = "rates", /, **where: object) -> Table:
    """Select the rates of a table by column; by default on test sentences, of the token itself, from all data.

    A column that `where` maps to None may have any value.
    """
    frame = evidence.tables[name]
    for column, value in ({"offset": 0, "data_share": 1.0, "split": "test"} | where).items():
        if value is not None:
            frame = frame[frame[column] == value]
    selected = ", ".join(f"{column} {value}" for column, value in where.items() if value is not None)
    require(len(frame), f"the model has no rates of {selected or name}")
    return frame


def rate(frame: Table) -> Measurement:
    """The mean of all rates of a frame; within a fold they cover the same tokens."""
    _, fold, count = np.unique(frame["fold"].to_numpy(), return_inverse=True, return_counts=True)
    rates = np.bincount(fold, frame["rate"].to_numpy()) / count
    tokens = np.bincount(fold, frame["n_tokens"].to_numpy()) / count
    return Measurement(rates, measured_share(float(rates.mean()), float(tokens.sum())).variance)


def by_layer(frame: Table, column: str = "layer") -> Curve:
    """The mean rate at each layer."""
    return Curve({int(layer): rate(of_layer) for layer, of_layer in frame.groupby(column, sort=True)})


def own_layer(evidence: Evidence, map: str, distance: str, name: str = "rates", split: str = "test") -> Curve:
    """The rate at each layer of the map that is fitted and tested there."""
    frame = rates_of(evidence, name, map=map, distance=distance, split=split)
    return by_layer(frame[frame["layer"] == frame["test_layer"]])


def _last_rate(evidence: Evidence, paper: float, one_split: bool) -> Finding:
    last = evidence.subject.named_layers[12]
    frame = rates_of(evidence, map="linear", distance="cosine", layer=last, test_layer=last)
    if one_split:
        frame = frame[frame["fold"] == frame["fold"].min()]
    folds = "" if one_split or len(frame) == 10 else f"{len(frame)} folds"
    why = join_clauses(evidence.subject.stand_in(12), folds)
    return decide(evidence, [rate(frame).within(POINTS, paper)], f"{rate(frame)} at layer {last}", why)


_on_rates(
    "Section 4.2, Fig. 2a",
    name="linear-cosine-last-layer",
    words="A linear map recovers most tokens from the last layer under cosine distance",
    paper="93 %",
    rule="within 2 points of the paper's number, mean over folds",
)(partial(_last_rate, paper=0.93, one_split=False))
_on_rates(
    "Section 4.2, Fig. 2b",
    name="linear-cosine-last-layer-one-split",
    words="The same number in the experiment across layers, which uses one split",
    paper="94 %",
    rule="within 2 points of the paper's number, first fold",
)(partial(_last_rate, paper=0.94, one_split=True))


def _ahead(evidence: Evidence, better: tuple[str, str], worse: tuple[str, str]) -> Finding:
    """Judge that one map and distance recovers more than another, on average and at the last layer."""
    more = own_layer(evidence, *better)
    less = own_layer(evidence, *worse)
    measured = f"{more.mean} against {less.mean} on average; {more.last} against {less.last} at the last layer"
    why = other_maps_in_words(evidence, "rates", better[0]) if better[0] == worse[0] else ""
    return decide(evidence, [more.mean - less.mean, more.last - less.last], measured, why)


def other_maps_in_words(evidence: Evidence, name: str, judged: str) -> str:
    """Return the averages of the maps other than the one that is judged, in words."""
    same_layer = rates_of(evidence, name).query("layer == test_layer and map != @judged")
    averages = same_layer.groupby(["map", "distance"])["rate"].mean().unstack("distance")
    words = [f"{map} {percent(row['cosine'])} against {percent(row['l2'])}" for map, row in averages.iterrows()]
    return f"other maps: {', '.join(words)}"


_on_rates(
    "Section 4.2, Fig. 2a",
    name="linear-over-naive",
    words="A linear map recovers more tokens than the hidden vector itself",
    paper="more",
    rule="higher on average over layers and at the last layer, cosine distance",
)(partial(_ahead, better=("linear", "cosine"), worse=("naive", "cosine")))


@claims.on("rates", texts=AVERAGED)("Section 4.2, Fig. 2a", paper="close up to layer 4, then a linear decrease")
def naive_close_in_early_layers(evidence: Evidence) -> Finding:
    """Hidden vectors stay close to their inputs up to layer 4, then drift away.

    Holds if: naive rate at least 90 % in the layers that lie wholly within the first third of the depth (at least the
    first layer) and falling after them, both distances.
    """
    early = evidence.subject.layers_within(0.0, 1 / 3)[-1]
    require(early < evidence.subject.n_layers)
    close_margins = []
    drift_margins = []
    lowest_early = []
    at_last = []
    for distance in ("cosine", "l2"):
        curve = own_layer(evidence, "naive", distance)
        early_rates = curve.between(last=early).values()
        close_margins += [rate - 0.9 for rate in early_rates]
        drift_margins += curve.between(early).fall_margins(NOISE)
        lowest_early.append(f"{distance} {percent(min(rate.value for rate in early_rates))}")
        at_last.append(f"{distance} {curve.last}")
    measured = f"{', '.join(lowest_early)} up to layer {early}; {', '.join(at_last)} at the last"
    return decide(evidence, close_margins + drift_margins, measured)


def linear_cosine(evidence: Evidence) -> Curve:
    """The rate by layer of linear maps under cosine distance, the best in the paper."""
    return own_layer(evidence, "linear", "cosine")


@_on_rates("Section 4.2, Fig. 2a", paper="mostly, 93 % at the end")
def mostly_identifiable(evidence: Evidence) -> Finding:
    """Tokens remain mostly identifiable throughout.

    Holds if: linear-cosine rate above one half at every layer.
    """
    rates = linear_cosine(evidence).values()
    least = min(rate.value for rate in rates)
    return decide(evidence, [rate - 0.5 for rate in rates], f"{percent(least)} or more")


@_on_rates("Section 4.2, Fig. 2a", paper="decreases")
def rate_falls_with_depth(evidence: Evidence) -> Finding:
    """The identifiability rate decreases with depth.

    Holds if: linear-cosine rate lower at the last layer than at the first, and at no layer half a point above the layer
    before.
    """
    return decide_fall(evidence, linear_cosine(evidence), NOISE)


_on_rates(
    "Section 4.2, Fig. 2a",
    name="cosine-over-l2",
    words="Cosine distance recovers more tokens than L2 distance",
    paper="more",
    rule="linear maps: higher on average over layers and at the last layer",
)(partial(_ahead, better=("linear", "cosine"), worse=("linear", "l2")))


def across(evidence: Evidence, map: str = "linear", distance: str = "cosine") -> dict[int, Curve]:
    """The rates of the maps of each layer by the layer they are tested on."""
    frame = rates_of(evidence, map=map, distance=distance)
    return {int(layer): by_layer(of_layer, "test_layer") for layer, of_layer in frame.groupby("layer", sort=True)}


@_on_rates("Section 4.2, Fig. 2b", paper="drops to below 70 %")
def first_map_fails_late(evidence: Evidence) -> Finding:
    """The map fitted to layer 1 fails at the last two layers.

    Holds if: linear-cosine rate at least 70 % at layer 1 and below 70 % at the last two layers (in a model of two
    layers, at the last).
    """
    layer_for = evidence.subject.named_layers
    first = layer_for[1]
    papers = [paper for paper in (11, 12) if layer_for[paper] != first]  # not on its own layer
    require(papers)
    rates = across(evidence)[first]
    late = [layer_for[paper] for paper in papers]
    margins = [rates[first] - 0.7, *(0.7 - rates[layer] for layer in late)]
    return decide(evidence, margins, rates.in_words(first, *late), evidence.subject.stand_in(*papers))


@_on_rates("Section 4.2, Fig. 2b", paper="almost monotonically")
def last_map_serves_early_layers(evidence: Evidence) -> Finding:
    """The map fitted to the last layer does better the earlier the layer it is tested on.

    Holds if: linear-cosine rate higher at the first layer than at the last, and no layer more than a point above the
    layer before.
    """
    rates = across(evidence)[evidence.subject.named_layers[12]]
    return decide_fall(evidence, rates, 2 * NOISE, evidence.subject.stand_in(12))


def transfer(evidence: Evidence, kinds: tuple[tuple[str, str], ...]) -> Finding:
    """Judge that maps lose less on earlier layers than on later ones, against the maps of the layers tested."""
    margins = []
    losses = []
    for map, distance in kinds:
        rates = across(evidence, map, distance)
        pairs = list(combinations(rates, 2))
        require(pairs)
        earlier = average(rates[a][a] - rates[b][a] for a, b in pairs)
        later = average(rates[b][b] - rates[a][b] for a, b in pairs)
        margins += [later, 0.5 * later - earlier]
        name = f"{map} {distance} " if len(kinds) > 1 else ""
        losses.append(f"{name}{100 * earlier.value:.1f} against {100 * later.value:.1f}")
    return decide(evidence, margins, f"{', '.join(losses)} points lost, on earlier against later layers")


_on_rates(
    "Section 4.2, Fig. 2b",
    name="late-maps-transfer",
    words="Maps of late layers transfer to early layers, but not the reverse",
    paper="well, against badly",
    rule="average loss against the linear-cosine map of the tested layer: on earlier layers less than half of that on "
    "later layers",
)(partial(transfer, kinds=(("linear", "cosine"),)))


@_on_rates("Section 4.2, Fig. 2b", paper="a sudden drop")
def drop_to_last_layer(evidence: Evidence) -> Finding:
    """The map of the second to last layer drops suddenly at the last.

    Holds if: linear-cosine rate falls more there than between any other two neighbouring layers.
    """
    require(evidence.subject.n_layers > 2, "too few layers to tell one step from the others")
    before = evidence.subject.named_layers[11]
    last = evidence.subject.named_layers[12]
    rates = across(evidence)[before]
    *earlier_steps, drop = rates.rises().values()
    margins = [-1.0 * drop, *(step - drop for step in earlier_steps)]
    return decide(evidence, margins, rates.in_words(before, last), evidence.subject.stand_in(11, 12))
