"""Claims on which token a hidden vector stands for, layer by layer and across layers (section 4)."""

from functools import partial
from itertools import combinations

from identikit.paper.claims.judgements import (
    ONE_LAYER,
    Claim,
    Finding,
    Judge,
    NotApplicableError,
    Table,
    by_layer,
    course,
    falling,
    falls,
    finding,
    layers_within,
    named_layers,
    percent,
    stand_in,
    table,
)
from identikit.paper.evidence import Evidence

POINTS = 0.02  # how far a rate may be from the paper's, and what counts as little between rates
NOISE = 0.005  # what folds and training may move a rate by from one layer to the next


def rates_of(evidence: Evidence, name: str = "rates", /, **where: object) -> Table:
    """The rates of a table on test sentences, of the token itself, from all data, unless `where` says so; None: any."""
    frame = table(evidence, name)
    for column, value in ({"offset": 0, "data_share": 1.0, "split": "test"} | where).items():
        frame = frame if value is None else frame[frame[column] == value]
    if frame.empty:
        wanted = ", ".join(f"{column} {value}" for column, value in where.items() if value is not None)
        raise NotApplicableError(f"the model has no rates of {wanted or name}")
    return frame


def own_layer(evidence: Evidence, map: str, distance: str, name: str = "rates", **where: object) -> Table:
    """The rate at each layer of a map that is fitted and tested there, averaged over folds."""
    frame = rates_of(evidence, name, map=map, distance=distance, **where)
    return by_layer(frame[frame["layer"] == frame["test_layer"]], "rate")


def linear_cosine(evidence: Evidence, _: str = "") -> Table:
    """The rate by layer of linear maps under the cosine distance, the paper's best."""
    return own_layer(evidence, "linear", "cosine")


def _last_rate(paper: float, *, one_split: bool) -> Judge:
    def judge(evidence: Evidence, _: str) -> Finding:
        (last,) = named_layers(evidence, 12)
        frame = rates_of(evidence, map="linear", distance="cosine", layer=last, test_layer=last)
        frame = frame[frame["fold"] == frame["fold"].min()] if one_split else frame
        rate = frame["rate"].mean()
        folds = f"{len(frame)} folds" if not one_split and len(frame) != 10 else ""
        why = "; ".join(clause for clause in (stand_in(evidence, 12), folds) if clause)
        return finding(abs(rate - paper) <= POINTS, f"{percent(rate)} at layer {last}", why)

    return judge


def ahead(better: tuple[str, str], worse: tuple[str, str], *, also_last: bool, name: str = "rates") -> Judge:
    """Judge that one map and distance recovers more than another; the other maps' averages are told beside it."""

    def judge(evidence: Evidence, _: str) -> Finding:
        more, less = (own_layer(evidence, *kind, name) for kind in (better, worse))
        holds = more.mean() > less.mean() and (not also_last or more.iloc[-1] > less.iloc[-1])
        measured = f"{percent(more.mean())} against {percent(less.mean())} on average"
        last = f"; {percent(more.iloc[-1])} against {percent(less.iloc[-1])} at the last layer" if also_last else ""
        others = _other_maps(evidence, name, judged=better[0]) if better[0] == worse[0] else ""
        return finding(holds, measured + last, others)

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
    close = all((curve.loc[:early] >= 0.9).all() for curve in curves.values())
    after = all(falls(curve.loc[early:], NOISE) for curve in curves.values())
    lowest = ", ".join(f"{name} {percent(c.loc[:early].min())}" for name, c in curves.items())
    last = ", ".join(f"{name} {percent(c.iloc[-1])}" for name, c in curves.items())
    return finding(close and after, f"{lowest} up to layer {early}; {last} at the last")


def _above_half(evidence: Evidence, _: str) -> Finding:
    curve = linear_cosine(evidence)
    return finding(curve.min() > 0.5, f"{percent(curve.min())} or more")


def _across(evidence: Evidence, map: str = "linear", distance: str = "cosine") -> Table:
    """The rates of maps fitted on one layer (rows) and tested on another (columns)."""
    frame = rates_of(evidence, map=map, distance=distance)
    return frame.pivot_table(index="layer", columns="test_layer", values="rate")


def _first_map_fails_late(evidence: Evidence, _: str) -> Finding:
    (first,) = named_layers(evidence, 1)
    papers = [paper for paper in (11, 12) if named_layers(evidence, paper) != [first]]  # not on its own layer
    if not papers:
        raise NotApplicableError(ONE_LAYER)
    rates = _across(evidence).loc[first, [first, *named_layers(evidence, *papers)]]
    measured = ", ".join(f"{percent(rate)} at layer {layer}" for layer, rate in rates.items())
    return finding(rates[first] >= 0.7 and (rates.drop(first) < 0.7).all(), measured, stand_in(evidence, *papers))


def _last_map_serves_early(evidence: Evidence, _: str) -> Finding:
    (last,) = named_layers(evidence, 12)
    rates = _across(evidence).loc[last]
    if len(rates) < 2:
        raise NotApplicableError(ONE_LAYER)
    return finding(falls(rates, 2 * NOISE), course(rates, 2 * NOISE), stand_in(evidence, 12))


def transfer(kinds: tuple[tuple[str, str], ...]) -> Judge:
    """Judge that maps lose less on earlier layers than on later ones, against the maps of the layers tested."""

    def judge(evidence: Evidence, _: str) -> Finding:
        holds, told = True, []
        for kind in kinds:
            rates = _across(evidence, *kind)
            pairs = list(combinations(rates.index.intersection(rates.columns), 2))
            if not pairs:
                raise NotApplicableError(ONE_LAYER)
            earlier = sum(rates.loc[a, a] - rates.loc[b, a] for a, b in pairs) / len(pairs)
            later = sum(rates.loc[b, b] - rates.loc[a, b] for a, b in pairs) / len(pairs)
            holds = holds and later > 0 and earlier < later / 2
            name = f"{' '.join(kind)} " if len(kinds) > 1 else ""
            told.append(f"{name}{100 * earlier:.1f} against {100 * later:.1f}")
        return finding(holds, f"{', '.join(told)} points lost, on earlier against later layers")

    return judge


def _drop_to_last(evidence: Evidence, _: str) -> Finding:
    if evidence.subject.n_layers < 3:
        raise NotApplicableError("too few layers to tell one step from the others")
    before, last = named_layers(evidence, 11, 12)
    rates = _across(evidence).loc[before]
    steps = rates.diff()
    sudden = steps.iloc[-1] < min(steps.iloc[:-1].min(), 0)
    measured = f"{percent(rates.loc[before])} at layer {before}, {percent(rates.loc[last])} at layer {last}"
    return finding(sudden, measured, stand_in(evidence, 11, 12))


_claim = partial(Claim, needs=("rates",), data="mrpc", only=False, by_norm=False)

IDENTITY = (
    _claim(
        "linear-cosine-last-layer",
        "Section 4.2, Fig. 2a",
        "A linear map recovers most tokens from the last layer, cosine distance",
        "93 %",
        "within 2 points of the paper's number, mean over folds",
        judge=_last_rate(0.93, one_split=False),
    ),
    _claim(
        "linear-cosine-last-layer-one-split",
        "Section 4.2, Fig. 2b",
        "The same number in the experiment across layers, which has one split",
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
        "Hidden vectors stay close to their inputs up to layer 4, then ever less so",
        "close up to layer 4, then a linear decrease",
        "naive rate at least 90 % in the layers wholly within the first third of the depth (the first at least) and "
        "falling after them, both distances",
        judge=_naive_close_early,
    ),
    _claim(
        "mostly-identifiable",
        "Section 4.2, Fig. 2a",
        "Tokens remain mostly identifiable throughout",
        "mostly, 93 % at the end",
        "linear-cosine rate above half at every layer",
        judge=_above_half,
    ),
    _claim(
        "rate-falls-with-depth",
        "Section 4.2, Fig. 2a",
        "The identifiability rate decreases with depth",
        "decreases",
        "linear-cosine rate lower at the last than the first layer, and no layer half a point above the one before",
        judge=falling(linear_cosine, NOISE),
    ),
    _claim(
        "cosine-over-l2",
        "Section 4.2, Fig. 2a",
        "Cosine distance recovers more than L2 distance",
        "more",
        "linear maps: higher on average over layers and at the last layer",
        judge=ahead(("linear", "cosine"), ("linear", "l2"), also_last=True),
    ),
    _claim(
        "first-map-fails-late",
        "Section 4.2, Fig. 2b",
        "The map of layer 1 fails at the last two layers",
        "drops to below 70 %",
        "linear-cosine rate at least 70 % at layer 1 and below 70 % at the last two, of two layers at the last alone",
        judge=_first_map_fails_late,
    ),
    _claim(
        "last-map-serves-early-layers",
        "Section 4.2, Fig. 2b",
        "The map of the last layer does better the earlier the layer it is tested on",
        "almost monotonically",
        "linear-cosine rate higher at the first than at the last layer, no earlier layer lower by more than a point",
        judge=_last_map_serves_early,
    ),
    _claim(
        "late-maps-transfer",
        "Section 4.2, Fig. 2b",
        "Maps of late layers transfer to early ones, and not the reverse",
        "well, against badly",
        "average loss against the tested layer's own linear-cosine map: on earlier layers less than half that on later",
        judge=transfer((("linear", "cosine"),)),
    ),
    _claim(
        "drop-to-last-layer",
        "Section 4.2, Fig. 2b",
        "The map of the last layer but one drops suddenly at the last",
        "a sudden drop",
        "linear-cosine rate falls there by more than between any other neighbouring layers",
        judge=_drop_to_last,
    ),
)
