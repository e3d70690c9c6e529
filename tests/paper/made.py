"""Evidence made up, not measured: small tables of every kind, in which each claim of the paper holds."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from identikit.maths.jacobian import NORMS
from identikit.paper.evidence import Evidence, Subject

FOLDS = 3
HEADS = 12
LENGTHS = (9, 14, 26, 31, 32, 33, 40, 48, 57, 58, 64, 65, 71, 92, 110, 128)
SPECIAL = ("[CLS]", "[SEP]")
GROUPS = ("1", "2", "3", "4-5", "6-10", "11-")
PASSAGE = (
    "[CLS] research into military brat ##s has consistently shown them to be better behaved than their civilian "
    "counterparts . [SEP] h ##yp ##oth ##eses as to why brat ##s are better behaved : firstly , military parents have "
    "a lower threshold for mis ##be ##ha ##vio ##r in their children ; secondly , the mobility of teenagers might make "
    "them less likely to attract attention to themselves , as many want to fit in and are less secure with their "
    "surroundings ; and third ##ly , norma ##tive constraints are greater , with brat ##s knowing that their behavior "
    "is under scrutiny and can affect the military member ' s career . teenage years are typically a period when "
    "people establish independence by taking some risks away from their [SEP]"
)
SENTENCE = (
    "[CLS] he said the foods ##er ##vic ##e pie business doesn ' t fit the company ' s long - term growth strategy . "
    '[SEP] " the foods ##er ##vic ##e pie business does not fit our long - term growth strategy . [SEP]'
)
TAGS = {"[CLS]": 1.6, "NNP": 1.3, "NNS": 1.2, "NN": 1.15, "VBD": 1.12, "VB": 1.1, "JJ": 1.08, "RB": 1.0}
TAGS |= {"CD": 0.95, "[SEP]": 0.9, "MD": 0.88, "PRP": 0.85, ",": 0.8, "IN": 0.75, "CC": 0.72, "TO": 0.7, "DT": 0.65}

Curve = Callable[[float], float]


def evidence(n_layers: int = 6, *, tables: Mapping[str, pd.DataFrame | None] | None = None, **changes: Any) -> Evidence:
    """Make evidence of a model with `n_layers`; `changes` are fields of `Subject` or `Evidence` that shall differ.

    `tables` replaces tables by others, and leaves those out that it maps to None.
    """
    about = {"model": "MiniLM", "n_layers": n_layers, "d_value": 32, "causal": False}
    about |= {"finetuned": "MiniLM-MRPC", "data": "mrpc", "texts": len(LENGTHS), "tokens": sum(LENGTHS), "seed": 0}
    about |= changes
    subject = Subject(**{field.name: about.pop(field.name) for field in fields(Subject)})
    random = np.random.default_rng(about["seed"])
    made: dict[str, pd.DataFrame | None] = {
        "correlation": _correlation(subject, random),
        "null_dimension": _null(subject),
        "types": _types(subject, random),
        **_certainty(subject, random),
        "lengths": pd.DataFrame({"text": range(len(LENGTHS)), "tokens": LENGTHS}),
        **_rates(subject, random),
        "passage": _passage(subject, random),
        "sentence": _sentence(subject, random),
        "collapse": _collapse(subject),
    }
    for norm, scale in zip(NORMS, (1.0, 1.1, 1.2), strict=True):
        made[f"own {norm}"] = _own(subject, scale)
        made[f"groups {norm}"] = _groups(subject)
        made[f"offsets {norm}"] = _offsets(subject, random)
        made[f"tags {norm}"] = _tags(subject, scale)
    if subject.finetuned:
        made["finetuned"] = _finetuned(subject, random)
    made |= tables or {}
    return Evidence(subject, tables={name: table for name, table in made.items() if table is not None}, **about)


def curve(subject: Subject, early: float, middle: float, late: float, last: float) -> Curve:
    """A line by layer: flat up to a quarter of the depth, then through values at the named layers."""
    _, centre, before, end = subject.named_layers.values()
    points = {float(subject.n_layers // 4): early, 1.0: early, float(centre): middle, float(before): late}
    points = dict(sorted((points | {float(max(subject.n_layers // 4, 1)): early, float(end): last}).items()))
    return lambda layer: float(np.interp(layer, [*points], [*points.values()]))


def tokens_of(subject: Subject, text: str) -> list[str]:
    """The pieces of a text; a causal model adds no [CLS] and [SEP]."""
    return [token for token in text.split() if not (subject.causal and token in SPECIAL)]


def layers_of(subject: Subject) -> range:
    return range(1, subject.n_layers + 1)


def _correlation(subject: Subject, random: np.random.Generator) -> pd.DataFrame:
    rows = []
    for text, tokens in enumerate(LENGTHS):
        excess = max(tokens - subject.d_value, 0) / 96
        rows.append((text, tokens, 1 - excess * random.uniform(0.55, 0.75)))
    return pd.DataFrame(rows, columns=["text", "tokens", "pearson"])


def _null(subject: Subject) -> pd.DataFrame:
    """Values of full rank: every row's rank is its bound."""
    rows = [(text, tokens, layer, 0, 0) for (text, tokens), layer in product(enumerate(LENGTHS), layers_of(subject))]
    return pd.DataFrame(rows, columns=["text", "tokens", "layer", "slack_least", "slack_greatest"])


def _types(subject: Subject, random: np.random.Generator) -> pd.DataFrame:
    """Raw attention goes to [CLS] early, [SEP] in the middle, punctuation late; the null space takes the first two."""
    peaks = {"cls": 0.0, "sep": 0.5, "punctuation": 1.0}
    sources = ["all", "cls", "punctuation", "other"] + ([] if subject.causal else ["sep"])
    rows = []
    for layer, head, source in product(layers_of(subject), range(1, HEADS + 1), sources):
        depth = (layer - 1) / max(subject.n_layers - 1, 1)
        raw = {kind: 0.3 * np.exp(-8 * (depth - peak) ** 2) * random.uniform(0.4, 1.6) for kind, peak in peaks.items()}
        if subject.causal:
            raw["sep"] = 0.0
        raw["other"] = max(1 - sum(raw.values()), 0.05)
        kept = {"cls": 0.1, "sep": 0.05, "punctuation": 0.6, "other": 0.8}
        for target, weight in raw.items():
            effective = weight * kept[target]
            values = {"raw": weight, "effective": effective, "null_space": weight - effective}
            rows += [(name, layer, head, source, target, value, len(LENGTHS)) for name, value in values.items()]
    made = pd.DataFrame(rows, columns=["map", "layer", "head", "source", "target", "attention", "texts"])
    everyone = made.query("source == 'all'")
    return pd.concat([made, everyone.assign(source="rest", attention=0.9 * everyone["attention"])], ignore_index=True)


def _certainty(subject: Subject, random: np.random.Generator) -> dict[str, pd.DataFrame]:
    """All is certain up to d_v tokens, and less in longer texts; sinks are, although effective attention loses them."""
    peaks = {"special": 0.5, "first": 0.0, "cls": 0.0, "sep": 0.5, "punctuation": 1.0}
    names = [name for name in peaks if name in ("first", "punctuation") or not subject.causal]
    heads, groups = [], []
    for (text, tokens), layer in product(enumerate(LENGTHS), layers_of(subject)):
        excess = max(tokens - subject.d_value, 0) / 128
        depth = (layer - 1) / max(subject.n_layers - 1, 1)
        for head in range(1, HEADS + 1):
            rows = int(random.integers(0, 3))
            place = {"text": text, "tokens": tokens, "layer": layer, "head": head}
            if rows:
                mass = 1.0 if excess == 0 else 0.9 - 0.6 * excess
                certain = {"certain_mass": mass, "strongest": 0.5, "width": 0.3 * excess, "certain": 1 - 0.4 * excess}
                heads.append(place | {"rows": rows, "free": rows * (excess > 0)} | certain | {"undecided": 0})
            for group in names:
                raw = 0.12 + 0.4 * np.exp(-12 * (depth - peaks[group]) ** 2) * random.uniform(0.8, 1.2)
                ends = {"lower": raw * (1 - 0.1 * excess), "upper": raw * (1 + 0.1 * excess)}
                weights = {"raw": raw, "effective": raw if excess == 0 else 0.02 * raw} | ends
                weights = weights if rows else dict.fromkeys(weights, np.nan)
                groups.append(place | {"group": group, "rows": rows} | weights | {"value_size": 0.2 + 0.1 * depth})
    return {"intervals": pd.DataFrame(heads), "groups": pd.DataFrame(groups)}


def _quartiles(median: float) -> tuple[float, ...]:
    """Whisker, quartile, median, quartile, whisker around a median."""
    return tuple(median * factor for factor in (0.5, 0.8, 1.0, 1.25, 1.8))


def _own(subject: Subject, scale: float) -> pd.DataFrame:
    first, centre, _, last = subject.named_layers.values()
    points = dict(sorted({last: 0.107, centre: 0.144, first: 0.306}.items()))
    outweighed = curve(subject, 0.0, 0.18, 0.3, 0.303)
    rows = [
        (layer, *_quartiles(scale * np.interp(layer, [*points], [*points.values()])), outweighed(layer))
        for layer in layers_of(subject)
    ]
    return pd.DataFrame(rows, columns=["layer", "low", "lower", "median", "upper", "high", "outweighed"])


def _groups(subject: Subject) -> pd.DataFrame:
    """The nearest neighbours give most in the first layer, the furthest in the last."""
    depth = np.linspace(-1, 1, subject.n_layers)
    parts = []
    for distance, slope in zip(GROUPS, (-0.7, -0.45, -0.2, 0.1, 0.4, 0.7), strict=True):
        share = (1 + slope * depth) / (1 + slope * depth).sum()
        parts.append(pd.DataFrame({"layer": layers_of(subject), "distance": distance, "share": share}))
    return pd.concat(parts, ignore_index=True)


def _offsets(subject: Subject, random: np.random.Generator) -> pd.DataFrame:
    reach, separator = max(LENGTHS) - 1, 29
    offset = np.arange(-reach, reach + 1)
    pairs = {
        "offsets": sum(np.clip(length - abs(offset), 0, None) for length in LENGTHS) * (offset != 0),
        "to_cls": sum((offset > 0) & (offset < length) for length in LENGTHS),
        "around_separator": sum((offset > -separator) & (offset < length - separator) for length in LENGTHS),
    }
    if subject.causal:
        pairs["offsets"] = pairs["offsets"] * (offset < 0)
    parts = []
    for view, layer in product(pairs, layers_of(subject)):
        width = 3 + 4 * layer / subject.n_layers
        centre = separator if view == "to_cls" else 0
        mean = 0.002 + 0.05 * np.exp(-abs(offset - centre) / width) * random.uniform(0.98, 1.02, len(offset))
        if view != "offsets":
            mean *= np.where(offset > centre, 1.2, 1.0) * np.where(offset == centre, 0.5, 1.0)
        there = {"offset": offset, "pairs": pairs[view], "mean": mean}
        if subject.causal and view != "offsets":
            there = {"offset": [0], "pairs": np.zeros(1, dtype=int), "mean": np.zeros(1)}
        parts.append(_view(view, layer, **there))
    return pd.concat(parts, ignore_index=True)


def _view(view: str, layer: int, *, offset: Any, pairs: NDArray[Any], mean: NDArray[Any]) -> pd.DataFrame:
    total = mean * pairs
    share = total / total.sum() if total.any() else 0.0 * total
    return pd.DataFrame(
        {"view": view, "layer": layer, "offset": offset, "share": share, "mean": np.where(pairs > 0, mean, np.nan)}
    )


def _tags(subject: Subject, scale: float) -> pd.DataFrame:
    """Words with meaning keep more of themselves; [CLS] keeps most, and over 40 % in the first layer."""
    medians = _own(subject, scale).set_index("layer")["median"]
    factors = {tag: factor for tag, factor in TAGS.items() if not (subject.causal and tag in SPECIAL)}
    rows = [
        (tag, 40 + 10 * place, layer, *_quartiles(min(factor * float(medians.loc[layer]), 0.5)))
        for (place, (tag, factor)), layer in product(enumerate(factors.items()), layers_of(subject))
    ]
    return pd.DataFrame(rows, columns=["tag", "tokens", "layer", "low", "lower", "median", "upper", "high"])


def _rates(subject: Subject, random: np.random.Generator) -> dict[str, pd.DataFrame]:
    curves = {
        ("naive", "cosine"): curve(subject, 0.97, 0.8, 0.55, 0.45),
        ("naive", "l2"): curve(subject, 0.95, 0.7, 0.4, 0.3),
        ("linear", "cosine"): curve(subject, 1.0, 0.985, 0.95, 0.93),
        ("linear", "l2"): curve(subject, 0.995, 0.94, 0.82, 0.78),
        ("mlp", "cosine"): curve(subject, 1.0, 0.983, 0.948, 0.925),
        ("mlp", "l2"): curve(subject, 0.995, 0.94, 0.82, 0.79),
    }
    rows, shares, previous, untuned, neighbours = [], [], [], [], []
    layers = layers_of(subject)
    for (name, distance), rate in curves.items():
        row = _Row(subject, random, name, distance)
        for layer, fold in product(layers, range(FOLDS)):
            rows += [row(layer, layer, 1 - 0.4 * (1 - rate(layer)), fold=fold, split="train")]
            rows += [row(layer, layer, rate(layer), fold=fold)]
            others = [other for other in layers if other != layer and name != "naive"]
            rows += [row(layer, other, _across(subject, rate, layer, other), fold=fold) for other in others]
        single = [row(layer, layer, 1 - 0.2 * (1 - rate(layer)), target="previous") for layer in layers]
        previous += single
        if name == "naive":
            untuned += [one | {"fold": fold} for one in single for fold in range(FOLDS)]
        for layer, offset in product(layers if name != "naive" else (), (-3, -2, -1, 1, 2, 3)):
            near = (0.75 if offset < 0 else 0.65) / abs(offset)
            neighbours += [row(layer, layer, near * rate(layer) ** 3, offset=offset)]
    late, mlp = subject.named_layers[11], _Row(subject, random, "mlp", "l2")
    for share, rate in ((0.5, 0.74), (0.8, 0.8), (0.9, 0.81), (1.0, 0.82)):
        shares += [mlp(late, late, rate, data_share=share)]
    parts = {"rates": rows, "shares": shares, "previous": previous, "untuned": untuned, "neighbours": neighbours}
    return {name: pd.DataFrame(part) for name, part in parts.items()}


def _across(subject: Subject, rate: Curve, layer: int, tested: int) -> float:
    """A map of a late layer serves early ones; a map of an early layer fails in late ones, most of all in the last."""
    if tested < layer:
        return 1 - (1 - rate(layer)) * (1 - 0.6 * (layer - tested) / subject.n_layers)
    return rate(tested) - 0.3 * (tested - layer) / subject.n_layers - 0.12 * (tested == subject.n_layers)


class _Row:
    """Makes rows of the table of rates for one map and distance; perfect rates carry no noise."""

    def __init__(self, subject: Subject, random: np.random.Generator, name: str, distance: str):
        self.subject, self.random = subject, random
        self.start = {"model": subject.model, "map": name, "distance": distance}

    def __call__(self, layer: int, tested: int, rate: float, **changes: Any) -> dict[str, Any]:
        rate = rate + 0.02 * (1 - rate) * self.random.uniform(-1, 1)
        row = {"layer": layer, "test_layer": tested, "target": "input", "offset": 0, "data_share": 1.0, "fold": 0}
        rest = {"split": "test", "rate": rate, "unique_rate": rate, "duplicates": 0.0, "n_tokens": 150}
        return self.start | row | rest | changes


def _finetuned(subject: Subject, random: np.random.Generator) -> pd.DataFrame:
    """As before fine-tuning, but for L2 across the last layer."""
    rows = []
    for distance, last in (("cosine", 0.85), ("l2", 0.35)):
        row = _Row(subject, random, "naive", distance)
        row.start["model"] = subject.finetuned or ""
        rate = curve(subject, 0.99, 0.95, 0.9, last)
        places = product(layers_of(subject), range(FOLDS))
        rows += [row(layer, layer, rate(layer), target="previous", fold=fold) for layer, fold in places]
    return pd.DataFrame(rows)


def _passage(subject: Subject, random: np.random.Generator) -> pd.DataFrame:
    """Attention near the diagonal and, in head 5 most of all, to [CLS] and [SEP]; there `make` looks at `them`."""
    tokens = tokens_of(subject, PASSAGE)
    special = np.array([token in SPECIAL for token in tokens])
    queries = np.arange(tokens.index("mobility") - 1, tokens.index("surroundings") + 1)
    keys = np.arange(len(tokens))
    near = np.exp(-abs(queries[:, None] - keys) / 2.0) + 0.01
    parts = []
    for head in range(1, HEADS + 1):
        raw = near * random.uniform(0.5, 1.5, near.shape) + special * (4.0 if head == 5 else 1.0)
        if subject.causal:
            raw = raw * (keys <= queries[:, None])
        if head == 5:
            raw[tokens.index("make") - queries[0], tokens.index("them")] = 1.4
        raw = raw / raw.sum(1, keepdims=True)
        effective = np.where(special, 0.02, 0.5) * raw
        index = pd.MultiIndex.from_product([[max(1, round(subject.n_layers / 3))], [head], queries, keys])
        frame = index.set_names(["layer", "head", "query", "key"]).to_frame(index=False)
        frame["query_token"] = [tokens[place] for place in frame["query"]]
        frame["key_token"] = [tokens[place] for place in frame["key"]]
        values = {"raw": raw.ravel(), "effective": effective.ravel(), "null": (raw - effective).ravel()}
        parts.append(frame.assign(**values))
    return pd.concat(parts, ignore_index=True)


def _sentence(subject: Subject, random: np.random.Generator) -> pd.DataFrame:
    tokens = tokens_of(subject, SENTENCE)
    n = len(tokens)
    places = np.arange(n)
    distance = abs(places[:, None] - places)
    own = _own(subject, 1.0).set_index("layer")["median"]
    parts = []
    for layer in layers_of(subject):
        others = (np.exp(-distance / (2 + layer)) + 0.02) * random.uniform(0.5, 1.5, (n, n)) * (distance > 0)
        if subject.causal:
            others = others * (places[:, None] < places)
        others = others / np.maximum(others.sum(0), 1e-12) * (1 - own[layer])
        contribution = np.where(distance == 0, 1 - others.sum(0), others)
        index = pd.MultiIndex.from_product([[layer], places, places], names=["layer", "input", "output"])
        frame = index.to_frame(index=False)
        frame["input_token"] = [tokens[place] for place in frame["input"]]
        frame["output_token"] = [tokens[place] for place in frame["output"]]
        parts.append(frame.assign(contribution=contribution.ravel()))
    return pd.concat(parts, ignore_index=True)


def _collapse(subject: Subject) -> pd.DataFrame:
    """Exact, and dearer than the factors."""
    d, heads, n = HEADS * subject.d_value, HEADS, 64
    row = {"error_float64": 2e-15, "error_float32": 4e-7, "error_model": 3e-7, "time_ratio": 3.0}
    row |= {"operations_factored": 2 * n * d * d + n * n * d, "operations_collapsed": heads * (n * d * d + n * n * d)}
    row |= {"parameters_factored": 2 * d * d, "parameters_collapsed": heads * d * d, "applies": True, "why": ""}
    places = product(layers_of(subject), ("query-key", "value"))
    return pd.DataFrame([{"layer": layer, "product": which, "tokens": n} | row for layer, which in places])
