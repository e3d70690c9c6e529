"""What is true of a text's attention, to hold a verdict against: nothing here reads the verdict's own numbers.

`check` takes the printed answer to the first question apart, sentence by sentence. Every number in it must belong to a
sentence that is known here and must be right; a sentence with a number that nobody checks fails too.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from io import StringIO
from typing import Any

import numpy as np
import torch
from rich.console import Console

import identikit as ik
from identikit.explanation.result import Explanation
from identikit.explanation.words import print_verdict
from tests.reference import intervals as reference

NUMBER = r"(-?[\d,]*\d(?:\.\d+)?)"
EDGE = re.compile(
    rf"  L(\d+)H(\d+) (.+) → (.+): raw {NUMBER}, (?:effective {NUMBER}, )?interval \[{NUMBER}, {NUMBER}\]"
)
LEAST, OUTSIDE = "The least certain edges:", "Where effective attention is outside the interval:"
SINK = re.compile(
    rf"(.+?)(?: \((\d+) of them\))? is a sink in (.+?): on average it gets {NUMBER} of a row's weight there, and "
    rf"between {NUMBER} and {NUMBER} in any attention with the same output \(effective: {NUMBER}\)\. Its value is "
    rf"{NUMBER} times as long as the median of the others\."
)


def answer(explanation: Explanation) -> list[str]:
    """Return the lines of the printed answer to the first question, on a page so wide that no line is broken."""
    page = Console(file=StringIO(), width=5000, color_system=None)
    print_verdict(explanation, page)
    told: str = page.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    part = told.split("Which attention is real?\n")[1].split("\nWhich token is this?")[0]
    return [line.rstrip() for line in part.splitlines() if line.strip()]


def number(told: str) -> float:
    return float(told.replace(",", ""))


def near(told: str, true: float, places: int) -> bool:
    return abs(number(told) - true) <= 0.5 * 10**-places + 1e-6


def share_is(told: str, true: float) -> bool:
    if told.lower() == "more than 99%":
        return 0.99 < true < 1
    if told.lower() == "less than 1%":
        return 0 < true < 0.01
    return near(told.removesuffix("%"), 100 * true, 0)


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
        call = self.attention.source.parts[layer].call
        V = call.value[0, head // call.groups].double().numpy()
        return V @ np.linalg.qr(self.projection(layer, head).T, mode="r").T

    def projection(self, layer: int, head: int) -> np.ndarray:
        return self.model.projection(layer)[head].double().numpy()

    def edge(self, layer: int, head: int, query: int, key: int) -> tuple[float, float, float]:
        """Raw weight, lower and upper end of an edge, by one literal program per end."""
        seen = self.visible[layer, query].nonzero()[:, 0].tolist()
        row = self.attention.raw[layer, head, query, seen].double().numpy()
        row, values, unit = row / row.sum(), self.values(layer, head)[seen], np.eye(len(seen))[seen.index(key)]
        lower, upper = (float(reference.optimum(sign * unit, row, values) @ unit) for sign in (1, -1))
        return float(row @ unit), lower, upper

    def equal(self, layer: int, first: int, second: int) -> bool:
        """Whether two positions hold one token, with equal values in all heads."""
        V = self.attention.source.parts[layer].call.value[0].double()
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


def layers_of(told: str, n_layers: int) -> list[int]:
    if told == "every layer":
        return list(range(n_layers))
    if ends := re.fullmatch(r"layers (\d+) to (\d+)", told):
        return list(range(int(ends[1]), int(ends[2]) + 1))
    assert re.fullmatch(r"layers? \d+(, \d+)*( and \d+)?", told), told
    return [int(found) for found in re.findall(r"\d+", told)]


def check(model: ik.Model, text: Any, explanation: Explanation) -> dict[str, int]:
    """Check every number of the printed answer; return how many sentences of each kind there were."""
    truth, counts, heading = Truth(model, text), {}, ""
    for line in answer(explanation):
        if line in (LEAST, OUTSIDE):
            heading = line
        elif EDGE.fullmatch(line):
            _edge(truth, EDGE.fullmatch(line), heading)
            counts[heading] = counts.get(heading, 0) + 1
        elif re.match(r"\s+\d+  ", line):
            _layer(truth, line, "special tokens" if any(explanation.about["special"]) else "first token")
            counts["layer"] = counts.get("layer", 0) + 1
        else:
            rest = line
            for name, pattern, checked in _sentences():
                for match in re.finditer(pattern, rest):
                    checked(truth, match)
                    counts[name] = counts.get(name, 0) + 1
                rest = re.sub(pattern, "", rest)
            assert not re.search(r"\d", rest), f"a number that nobody checked: {rest}"
    _order(truth, [line for line in answer(explanation) if EDGE.fullmatch(line)], counts.get(LEAST, 0))
    return counts


def _sentences() -> Iterator[tuple[str, str, Callable[[Truth, Any], None]]]:
    """Yield every sentence that may hold a number, and what checks it."""
    yield "all", rf"All of it\..*: {NUMBER} tokens?, values of {NUMBER} dimensions\.", _all
    certain = rf"(\S+|\w+ than \S+) of it is certain: .* In (.+?) of the rows, .* such attention\. All {NUMBER} rows "
    yield "certain", rf"{certain}with a null space were bounded(?:; in the other {NUMBER}, [^.]*)?\.", _certain
    keys = rf"Rows have a null space because a query sees up to {NUMBER} keys, and a head's values have only {NUMBER} "
    yield "keys", rf"{keys}dimensions \((.+?)\)\.", _keys
    repeated = r"In (layers? .+?|every layer), repeated tokens have equal values and can exchange their weight "
    yield "repeated", rf"{repeated}\({NUMBER} repetitions? in layer (\d+), such as (.+?) of (.+?)\)\.", _repeated
    yield "projection", r"The output projection passes on fewer than (\d+) dimensions of (.+?), so", _projection
    dependent = r"Some values depend linearly on others(?: for other reasons)?"
    yield "dependent", rf"{dependent} in (layer.+?|every layer)\.", _dependent
    yield "shared", r"Intervals take .* as given; in (.+?), heads could also trade outputs with each other\.", _shared
    yield "sink", SINK.pattern, _sink
    yield "widest", rf"These are the widest of {NUMBER} intervals", _widest
    yield "certificate", r"Certificate: effective attention reproduces every head's output to within .*", _certificate
    yield "definition", r"can be negative and need not sum to 1", lambda *_: None


def _all(truth: Truth, match: re.Match) -> None:
    assert number(match[1]) == len(truth.attention.tokens) and number(match[2]) == truth.model.d_value
    assert not truth.attention.null_dim.any()
    assert torch.equal(truth.intervals.lower, truth.intervals.upper)


def _certain(truth: Truth, match: re.Match) -> None:
    assert share_is(match[1], float(truth.intervals.certain_mass.mean())), match[0]
    assert share_is(match[2], float(truth.intervals.strongest_is_certain.mean())), match[0]
    free = truth.attention.null_dim > 0
    assert number(match[3]) == int(free.sum()) > 0
    assert (0 if match[4] is None else number(match[4])) == int((~free).sum())


def _layer(truth: Truth, line: str, group: str) -> None:
    layer, mass, strongest, raw, lower, upper, effective, null, reachable, pearson = re.findall(
        r"-?[\d.]+%?(?:–\d+)?", line
    )
    at = int(layer)
    special = [place for place, found in enumerate(truth.attention.about["special"]) if found]
    assert (group == "special tokens") == bool(special)
    assert near(mass, float(truth.intervals.certain_mass[at].mean()), 2), line
    assert near(strongest.removesuffix("%"), 100 * float(truth.intervals.strongest_is_certain[at].mean()), 0), line
    for told, true in zip((raw, lower, upper, effective), truth.ends(tuple(special or [0])), strict=True):
        assert near(told, float(true[at]), 2), (line, told, true)
    assert number(lower) <= number(raw) <= number(upper)
    dims = truth.attention.null_dim[at]
    expected = {str(int(dims.min())), str(int(dims.max()))}
    assert near(reachable, float(truth.attention.reachable_dim[at].double().mean()), 1)
    assert set(null.split("–")) == expected and near(pearson, float(truth.attention.pearson("layer")[at]), 2)


def _edge(truth: Truth, match: Any, heading: str) -> None:
    layer, head = int(match[1]), int(match[2])
    query, key = (truth.attention._axis(name).find(match[place])[0] for name, place in (("query", 3), ("key", 4)))
    true = truth.edge(layer, head, query, key)
    for told, expected in zip((match[5], match[7], match[8]), true, strict=True):
        assert near(told, expected, 3), (match[0], true)
    if heading == OUTSIDE:
        effective = float(truth.attention.effective[layer, head, query, key])
        assert near(match[6], effective, 3) and float(truth.attention.pearson("head")[layer, head]) < 0.995
        assert not true[1] - 1e-4 <= effective <= true[2] + 1e-4, match[0]
    else:
        assert heading == LEAST and true[2] - true[1] > 9e-4


def _order(truth: Truth, edges: list[str], least: int) -> None:
    """The least certain edges are the widest of their heads, the widest first, and none is missing."""
    width = (truth.intervals.upper - truth.intervals.lower).amax((2, 3))
    heads = [tuple(map(int, re.findall(r"\d+", line)[:2])) for line in edges[:least]]
    widest = width.flatten().sort(descending=True).values
    assert len(set(heads)) == len(heads) == min(5, int((widest >= 1e-3).sum()))
    assert torch.allclose(torch.stack([width[head] for head in heads]) if heads else widest[:0], widest[: len(heads)])
    named = [tuple(map(int, re.findall(r"\d+", line)[:2])) for line in edges[least:]]
    assert len(set(named)) == len(named) <= 5


def _keys(truth: Truth, match: re.Match) -> None:
    seen = truth.visible.sum(-1).amax(-1)
    assert number(match[1]) == int(seen.max()) and number(match[2]) == truth.model.d_value
    expected = (seen > truth.model.d_value).nonzero()[:, 0].tolist()
    assert layers_of(match[3], truth.model.n_layers) == expected


def _repeated(truth: Truth, match: re.Match) -> None:
    repeats = [truth.repeats(layer) for layer in range(truth.model.n_layers)]
    assert layers_of(match[1], truth.model.n_layers) == [layer for layer, found in enumerate(repeats) if found]
    assert number(match[2]) == len(repeats[int(match[3])])
    later, earlier = (truth.attention._axis("key").find(match[place])[0] for place in (4, 5))
    assert (earlier, later) in repeats[int(match[3])]


def _projection(truth: Truth, match: re.Match) -> None:
    assert int(match[1]) == truth.model.d_value
    found = re.findall(r"L(\d+)H(\d+) \((\d+)\)", match[2])
    assert found and "more" not in match[2]
    ranks = {
        (layer, head): int(np.linalg.matrix_rank(truth.projection(layer, head)))
        for layer in range(truth.model.n_layers)
        for head in range(truth.model.n_heads)
    }
    expected = {place: rank for place, rank in ranks.items() if rank < truth.model.d_value}
    assert {(int(layer), int(head)): int(rank) for layer, head, rank in found} == expected


def _dependent(truth: Truth, match: re.Match) -> None:
    for layer in layers_of(match[1], truth.model.n_layers):
        repeated = {later for _, later in truth.repeats(layer)}
        unexplained = []
        for query, row in enumerate(truth.visible[layer]):
            seen = row.nonzero()[:, 0].tolist()
            distinct = len([place for place in seen if place not in repeated])
            ranks = truth.attention.rank[layer, :, query].tolist()
            projected = [np.linalg.matrix_rank(truth.projection(layer, head)) for head in range(len(ranks))]
            unexplained += [rank < min(distinct, limit) for rank, limit in zip(ranks, projected, strict=True)]
        assert any(unexplained)


def _shared(truth: Truth, match: re.Match) -> None:
    for layer in layers_of(match[1], truth.model.n_layers):
        whole = truth.model.projection(layer).double().flatten(0, 1)
        assert int(torch.linalg.matrix_rank(whole)) < len(whole)


def _sink(truth: Truth, match: re.Match) -> None:
    tokens, layers = truth.attention.tokens, layers_of(match[3], truth.model.n_layers)
    if match[2]:
        keys = [place for place, token in enumerate(tokens) if token == match[1]]
        assert len(keys) == int(match[2])
    else:
        keys = truth.attention._axis("key").find(match[1])
    ends = truth.ends(tuple(keys))
    for told, true in zip((match[4], match[5], match[6], match[7]), ends, strict=True):
        assert near(told, float(true[layers].mean()), 2), match[0]
    assert all(float(ends[0][layer]) > 0.3 for layer in layers)
    others = [place for place in range(len(tokens)) if place not in keys]
    sizes = []
    for layer in layers:
        part = truth.attention.source.parts[layer]
        values = part.call.value[0].double().repeat_interleave(part.call.groups, 0)
        lengths = (values @ part.projection.double()).norm(dim=-1)
        sizes.append(float((lengths[:, keys].mean(1) / lengths[:, others].quantile(0.5, dim=1)).mean()))
    assert near(match[8], sum(sizes) / len(sizes), 2)


def _widest(truth: Truth, match: re.Match) -> None:
    free = truth.attention.null_dim > 0
    assert number(match[1]) == int((truth.visible.sum(-1)[:, None] * free).sum())


def _certificate(truth: Truth, match: re.Match) -> None:
    assert float(match[0].split("to within ")[1].split()[0]) < 1e-3
