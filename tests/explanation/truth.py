"""What is true of a text's attention, to hold a verdict against: nothing here reads the verdict's own numbers.

`check` takes the answer to the first question apart. Every number in its words must be one of the facts that they come
with, and every fact and every row of a table must be right; a fact that nobody checks fails too.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

import identikit as ik
from identikit.explanation.attention_words import FREEST, OUTSIDE, QUESTION
from identikit.explanation.result import Explanation
from identikit.explanation.words import verdict
from identikit.results.words import Document, Paragraph, Table, Value
from tests.reference import intervals as reference

NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?%?|(?<=[LH])\d+")
CONSTANTS = ("need not sum to 1", "count from 0")


def leaves(fact: Value) -> Iterator[Any]:
    """Yield the numbers and names of a fact."""
    if isinstance(fact, list | tuple):
        for part in fact:
            yield from leaves(part)
    else:
        yield fact


def is_written(written: str, value: float) -> bool:
    """Whether a number is a value, rounded to the digits that are written."""
    digits = written.replace(",", "").removesuffix("%")
    mantissa, _, exponent = digits.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    scaled = 100 * value if written.endswith("%") else value
    return abs(float(digits) - scaled) <= (0.5 + 1e-6) * unit + 1e-12


def unfounded(paragraph: Paragraph) -> list[str]:
    """Return the numbers in a paragraph's words that are none of its facts."""
    words = paragraph.words
    told = [leaf for fact in paragraph.facts.values() for leaf in leaves(fact)]
    names = [leaf for leaf in told if isinstance(leaf, str)]
    values = [float(leaf) for leaf in told if isinstance(leaf, int | float)]
    for name in (*CONSTANTS, *sorted(names, key=len, reverse=True)):
        words = words.replace(name, "")
    for vague, least, most in ((">99.9%", 0.999, 1.0), ("<0.1%", 0.0, 0.001), (">0.99", 0.99, 1.0),
                               ("<0.01", 0.0, 0.01)):  # fmt: skip
        if re.search(vague, words, re.IGNORECASE) and any(least < value < most for value in values):
            words = re.sub(vague, "", words, flags=re.IGNORECASE)
    return [found for found in NUMBER.findall(words) if not any(is_written(found, value) for value in values)]


@dataclass(frozen=True, eq=False)
class Truth:
    """The attention of a text, every row bounded."""

    model: ik.Model
    text: Any

    @cached_property
    def attention(self) -> Any:
        return ik.effective_attention(self.model, self.text)

    @cached_property
    def intervals(self) -> Any:
        return self.attention.intervals(method="exact")

    @cached_property
    def visible(self) -> torch.Tensor:
        return self.attention.array("visible")

    @cache  # noqa: B019
    def ends(self, keys: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mean weight of a group by layer: raw, lower, upper, effective."""
        found = self.attention.intervals(groups={"group": list(keys)}, method="exact")
        effective = self.attention.effective[..., list(keys)].sum(-1)
        parts = (*(part[..., 0] for part in (found.raw, found.lower, found.upper)), effective)
        return tuple(part.double().mean((1, 2)) for part in parts)  # pyright: ignore[reportReturnType]

    def values(self, layer: int, head: int) -> np.ndarray:
        """V·H of a head, in the coordinates of H's column space."""
        call = self.attention.source.layers[layer].call
        V = call.value[0, head // call.groups].double().numpy()
        return V @ np.linalg.qr(self.projection(layer, head).T, mode="r").T

    def projection(self, layer: int, head: int) -> np.ndarray:
        return self.model.projection(layer)[head].double().numpy()

    def edge(self, layer: int, head: int, query: int, key: int) -> tuple[float, float, float]:
        """Raw weight, lower and upper end of an edge, by one literal program per end."""
        seen = self.visible[layer, query].nonzero()[:, 0].tolist()
        row = self.attention.raw[layer, head, query, seen].double().numpy()
        values = self.values(layer, head)[seen]
        if sink := float(self.attention.sink[layer, head, query]):  # one more key, whose value is 0
            row = np.append(row, sink)
            values = np.vstack([values, 0 * values[:1]])
        row = row / row.sum()
        unit = np.eye(len(row))[seen.index(key)]
        lower, upper = (float(reference.optimum(sign * unit, row, values) @ unit) for sign in (1, -1))
        return float(row @ unit), lower, upper

    def equal(self, layer: int, first: int, second: int) -> bool:
        """Whether two positions hold one token, with equal values in all heads."""
        V = self.attention.source.layers[layer].call.value[0].double()
        same = float((V[:, first] - V[:, second]).abs().max()) <= 1e-6 * float(V.abs().max())
        return same and self.attention.tokens[first] == self.attention.tokens[second]

    def repeats(self, layer: int) -> list[tuple[int, int]]:
        """Positions whose value equals that of an earlier one, some query seeing both; with the first such one."""
        found = []
        for place in range(len(self.attention.tokens)):
            equal = [other for other in range(place) if self.equal(layer, other, place)]
            if equal and bool((self.visible[layer][:, equal[0]] & self.visible[layer][:, place]).any()):
                found.append((equal[0], place))
        return found


def check(model: ik.Model, text: Any, explanation: Explanation) -> Counter[str]:
    """Check every fact of the answer to the first question; return how many sentences of each kind there were."""
    truth = Truth(model, text)
    document = verdict(explanation).under(QUESTION)
    counts: Counter[str] = Counter()
    for paragraph in document.paragraphs:
        assert not unfounded(paragraph), paragraph
        unchecked = set(paragraph.facts)
        for sentence in SENTENCES:
            if sentence.facts.split()[0] in paragraph.facts:
                sentence.check(truth, paragraph.facts)
                unchecked -= set(sentence.facts.split())
                counts[sentence.kind] += 1
        assert not unchecked, f"facts that nobody checked: {unchecked}"
    group = "special tokens" if any(explanation.about["special"]) else "first token"
    layers = document.tables[0] if truth.attention.null_dim.any() else Table((), ())
    for row, cells in zip(layers.rows, layers.cells(), strict=True):
        _layer(truth, dict(zip([column.name for column in layers.columns], row, strict=True)), group)
        counts["layer"] += 1
        for value, cell in zip(row, cells, strict=True):
            assert not unfounded(Paragraph(cell, {"value": value})), (value, cell)
    for heading in (FREEST, OUTSIDE):
        heads = _edges(truth, document.under(heading), heading)
        counts[heading] = len(heads)
        if heading == FREEST:
            _widest_of_their_heads(truth, heads)
    return counts


def near(value: Any, true: float, tolerance: float = 1e-6) -> bool:
    return abs(value - true) <= tolerance


def _all(truth: Truth, facts: Mapping[str, Any]) -> None:
    assert facts["tokens"] == len(truth.attention.tokens) and facts["d_value"] == truth.model.d_value
    assert facts["free_rows"] == 0 and not truth.attention.null_dim.any()
    assert torch.equal(truth.intervals.lower, truth.intervals.upper)


def _certain(truth: Truth, facts: Mapping[str, Any]) -> None:
    assert near(facts["certain_mass"], float(truth.intervals.certain_mass.mean()))
    assert near(facts["strongest_certain"], float(truth.intervals.strongest_is_certain.mean()))
    free = truth.attention.null_dim > 0
    assert facts["free_rows"] == facts["bounded_rows"] == int(free.sum()) > 0
    assert facts["rows"] == free.numel() and facts["fixed_rows"] == int((~free).sum())
    for name in ("certain_mass", "strongest_certain"):
        assert facts[f"{name}_stderr"] == 0
        assert all(near(end, facts[name], 1e-12) for end in facts[f"{name}_range"])


def _yardstick(truth: Truth, facts: Mapping[str, Any]) -> None:
    """The drawn rows are like all free ones, and what shuffled ones would have is a share with its error."""
    free = truth.intervals.certain_mass[truth.attention.null_dim > 0]
    reach = 5 * float(free.std()) / facts["yardstick_rows"] ** 0.5
    assert 8 <= facts["yardstick_rows"] <= len(free) / 20 and near(facts["yardstick_mass"], float(free.mean()), reach)
    assert 0 <= facts["yardstick_shuffled"] <= 1 and facts["yardstick_shuffled_stderr"] < 0.2


def _layer(truth: Truth, row: Mapping[str, Any], group: str) -> None:
    at = row["layer"]
    special = [place for place, is_special in enumerate(truth.attention.about["special"]) if is_special]
    assert (group == "special tokens") == bool(special)
    assert row["determined"].stderr == row["strongest determined"].stderr == 0
    assert near(row["determined"].share, float(truth.intervals.certain_mass[at].mean()))
    assert near(row["strongest determined"].share, float(truth.intervals.strongest_is_certain[at].mean()))
    weights = (*row[f"{group} raw [min, max]"], row["effective"])
    for value, true in zip(weights, truth.ends(tuple(special or [0])), strict=True):
        assert near(value, float(true[at])), (row, true)
    assert weights[1] <= weights[0] + 1e-9 and weights[0] <= weights[2] + 1e-9
    dims = truth.attention.null_dim[at]
    assert row["null dim"] == (int(dims.min()), int(dims.max()))
    assert near(row["reachable"], float(truth.attention.reachable_dim[at].double().mean()))
    assert near(row["correlation"], float(truth.attention.pearson("layer")[at]))


def _edges(truth: Truth, part: Document, heading: str) -> list[tuple[int, int]]:
    """Check a table of edges; return their heads."""
    heads = []
    for table in part.tables:
        for row in table.rows:
            edge: dict[str, Any] = dict(zip([column.name for column in table.columns], row, strict=True))
            heads.append(edge["head"])
            _edge(truth, edge, outside=heading == OUTSIDE)
    assert len(set(heads)) == len(heads) <= 5
    return heads


def _edge(truth: Truth, edge: Mapping[str, Any], *, outside: bool) -> None:
    layer, head = edge["head"]
    query, key = (truth.attention.axis(name).indices_of(edge[name])[0] for name in ("query", "key"))
    raw, lower, upper = truth.edge(layer, head, query, key)
    for value, true in zip((edge["raw"], *edge["interval"]), (raw, lower, upper), strict=True):
        assert near(value, true, 1e-5), (edge, true)
    if not outside:
        assert upper - lower > 9e-4
        return
    effective = float(truth.attention.effective[layer, head, query, key])
    assert near(edge["effective"], effective) and float(truth.attention.pearson("head")[layer, head]) < 0.995
    assert not lower - 1e-4 <= effective <= upper + 1e-4, edge


def _widest_of_their_heads(truth: Truth, heads: list[tuple[int, int]]) -> None:
    """The least certain edges are the widest of their heads, the widest first, and none is missing."""
    width = (truth.intervals.upper - truth.intervals.lower).amax((2, 3))
    widest = width.flatten().sort(descending=True).values
    assert len(heads) == min(5, int((widest >= 1e-3).sum()))
    assert torch.allclose(torch.stack([width[head] for head in heads]) if heads else widest[:0], widest[: len(heads)])


def _keys(truth: Truth, facts: Mapping[str, Any]) -> None:
    seen = truth.visible.sum(-1).amax(-1)
    assert facts["most_keys"] == int(seen.max()) and facts["d_value"] == truth.model.d_value
    assert facts["keys_in_layers"] == (seen > truth.model.d_value).nonzero()[:, 0].tolist()


def _repeated(truth: Truth, facts: Mapping[str, Any]) -> None:
    repeats = {layer: truth.repeats(layer) for layer in range(truth.model.n_layers)}
    assert facts["repeated_in_layers"] == [layer for layer, pairs in repeats.items() if pairs]
    first = repeats[facts["repeated_in_layers"][0]]
    assert facts["repetitions"] == len(first)
    later, earlier = (truth.attention.axis("key").indices_of(token)[0] for token in facts["repetition"])
    assert (earlier, later) in first


def _projection(truth: Truth, facts: Mapping[str, Any]) -> None:
    assert facts["full_projection"] == truth.model.d_value and facts["heads_not_named"] == 0
    deficient = set()
    for layer in range(truth.model.n_layers):
        for head in range(truth.model.n_heads):
            rank = int(np.linalg.matrix_rank(truth.projection(layer, head)))
            if rank < truth.model.d_value:
                deficient.add((layer, head, rank))
    assert set(facts["deficient_heads"]) == deficient != set()


def _dependent(truth: Truth, facts: Mapping[str, Any]) -> None:
    for layer in facts["dependent_in_layers"]:
        repeated = {later for _, later in truth.repeats(layer)}
        unexplained = []
        for query, row in enumerate(truth.visible[layer]):
            seen = row.nonzero()[:, 0].tolist()
            distinct = len([place for place in seen if place not in repeated])
            ranks = truth.attention.rank[layer, :, query].tolist()
            projected = [np.linalg.matrix_rank(truth.projection(layer, head)) for head in range(len(ranks))]
            unexplained += [rank < min(distinct, limit) for rank, limit in zip(ranks, projected, strict=True)]
        assert any(unexplained)


def _shared(truth: Truth, facts: Mapping[str, Any]) -> None:
    for layer in facts["shared_in_layers"]:
        whole = truth.model.projection(layer).double().flatten(0, 1)
        assert int(torch.linalg.matrix_rank(whole)) < len(whole)


def _sink(truth: Truth, facts: Mapping[str, Any]) -> None:
    tokens = truth.attention.tokens
    layers = facts["layers"]
    if facts["keys"] > 1:
        keys = [place for place, token in enumerate(tokens) if token == facts["sink"]]
    else:
        keys = truth.attention.axis("key").indices_of(facts["sink"])
    assert len(keys) == facts["keys"]
    ends = truth.ends(tuple(keys))
    for name, true in zip(("raw", "lower", "upper", "effective"), ends, strict=True):
        assert near(facts[name], float(true[layers].mean())), (name, facts)
    assert all(float(ends[0][layer]) > 0.3 for layer in layers)
    others = [place for place in range(len(tokens)) if place not in keys]
    sizes = []
    for layer in layers:
        part = truth.attention.source.layers[layer]
        values = part.call.value[0].double().repeat_interleave(part.call.groups, 0)
        lengths = (values @ part.projection.double()).norm(dim=-1)
        sizes.append(float((lengths[:, keys].mean(1) / lengths[:, others].quantile(0.5, dim=1)).mean()))
    assert near(facts["value_size"], sum(sizes) / len(sizes), 1e-4)


def _widest(truth: Truth, facts: Mapping[str, Any]) -> None:
    free = truth.attention.null_dim > 0
    assert facts["bounded_edges"] == int((truth.visible.sum(-1)[:, None] * free).sum())


def _learned_sink(truth: Truth, facts: Mapping[str, Any]) -> None:
    by_layer = truth.attention.sink.double().mean((1, 2))
    assert near(facts["learned_sink"], float(by_layer.mean()))
    assert facts["learned_sink_by_layer"] == by_layer.tolist()


def _unsure(truth: Truth, facts: Mapping[str, Any]) -> None:
    assert near(facts["unsure"], float((~truth.attention.rank_is_sure).double().mean()))
    assert facts["rounded_duplicates"] == int(truth.attention.rounded_duplicates.sum())


def _certificate(truth: Truth, facts: Mapping[str, Any]) -> None:
    assert facts["residual"] == float(truth.attention.residual.max()) < 1e-3
    change = truth.attention.verify()
    assert facts["hidden_change"] == change.hidden and facts["logits_change"] == change.logits


class Sentence(NamedTuple):
    """A kind of sentence: the facts that it holds, the first of which no other has, and what checks them."""

    kind: str
    facts: str
    check: Callable[[Truth, Mapping[str, Any]], None]


_CERTAIN = "certain_mass strongest_certain free_rows rows bounded_rows fixed_rows certain_mass_stderr"
_RANGES = "strongest_certain_stderr certain_mass_range strongest_certain_range"
_SHUFFLED = "yardstick_rows yardstick_mass yardstick_shuffled yardstick_shuffled_stderr"
SENTENCES = (
    Sentence("yardstick", _SHUFFLED, _yardstick),
    Sentence("all", "tokens d_value free_rows", _all),
    Sentence("certain", f"{_CERTAIN} {_RANGES}", _certain),
    Sentence("keys", "most_keys d_value keys_in_layers", _keys),
    Sentence("repeated", "repetitions repeated_in_layers repetition", _repeated),
    Sentence("projection", "deficient_heads full_projection heads_not_named", _projection),
    Sentence("dependent", "dependent_in_layers", _dependent),
    Sentence("shared", "shared_in_layers", _shared),
    Sentence("learned sink", "learned_sink learned_sink_by_layer", _learned_sink),
    Sentence("unsure", "unsure rounded_duplicates", _unsure),
    Sentence("sink", "sink keys layers raw lower upper effective value_size", _sink),
    Sentence("widest", "bounded_edges", _widest),
    Sentence("certificate", "residual hidden_change logits_change", _certificate),
)
