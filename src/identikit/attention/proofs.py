"""Proofs of ends, written to a file that `identikit.proof` checks in rational arithmetic, with no other code of ours.

A Result that can be proven holds a `Provable` source: what else it takes to write the proof of what is selected.
"""

import json
import math
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from identikit import proof
from identikit.attention.captured import Captured, Place
from identikit.attention.readings import READINGS
from identikit.attention.walk import Walk
from identikit.checks import is_path, shortened
from identikit.errors import InputError
from identikit.maths.chain import Chain
from identikit.maths.polytope.bounds import Question
from identikit.maths.polytope.duals import Ends, exact_vertex, propose_ends
from identikit.models.isolation import standard_torch_state
from identikit.results.files import plain, write_file
from identikit.results.result import Result
from identikit.results.source import StoredArrays
from identikit.shapes import Float, Tensor

_POSITIVE = 1e-12  # a weight of a vertex that is smaller is rounding
Entry = tuple[int, float] | tuple[int, float, int]
"""A key's number in an objective, or a factor and the step whose quantity it multiplies; see `identikit.proof`."""


class Asked(NamedTuple):
    """What is asked of a row: the row's place, the objective, and what the claim is called, if it is one."""

    place: Place
    objective: list[Entry]
    name: str | None = None


class SavedProof(NamedTuple):
    """What was proven, and how sharp it is.

    - `claims`, `steps`: how many claims there are, and in how many steps they are proven
    - `loss`: by how much a proven end is wider than the Result's, at most
    - `gap`: how far a proven end is from what other attention attains, at most; NaN for claims about several rows
    - `residual`: how far that attention misses the output, relative to its largest entry; 0 where all of it was solved
      in rational numbers, which needs python-flint (extra `[proof]`)
    """

    claims: int
    steps: int
    loss: float
    gap: float
    residual: float


@dataclass(eq=False)
class ProofDraft:
    """A proof that is being written; see `identikit.proof` for its parts."""

    values: list[list[list[float]]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    gap: float = -math.inf
    residual: float = 0.0
    _value_places: dict[Hashable, int] = field(default_factory=dict)
    _row_places: dict[Hashable, int] = field(default_factory=dict)
    _read: list[Any] = field(default_factory=list)
    _ends: list[tuple[Fraction, Fraction]] = field(default_factory=list)
    _matrices: list[list[list[Fraction]]] = field(default_factory=list)

    def bound(self, captured: Captured, asked: Sequence[Asked]) -> list[int]:
        """Bound what is asked of rows of a text, those of a layer and of a head together; return the steps."""
        if not asked:
            return []
        rows = captured.rows([wish.place for wish in asked])
        values = [self._values(captured, wish.place) for wish in asked]
        ends = torch.zeros(2, *rows.attention.shape, dtype=torch.float64)
        for at, wish in enumerate(asked):
            for key, factor, *step in wish.objective:
                for side, name in enumerate(("lower", "upper")):
                    ends[side, at, key] += factor * (self.steps[step[0]][name] if step else 1.0)
        proposed = propose_ends(rows, [value for _, value in values], *ends)
        weights = rows.attention.cpu()
        visible = rows.visible.cpu()
        steps = []
        for at, wish in enumerate(asked):
            keys = visible[at].nonzero()[:, 0].tolist()
            row = self._row(captured, wish.place, values[at][0], keys, weights[at, keys].tolist())
            seen = set(keys)
            step = {"row": row, "objective": [list(entry) for entry in wish.objective if entry[0] in seen]}
            step |= dict(zip(("lower_dual", "upper_dual"), proposed[at].duals.tolist(), strict=True))
            steps.append(self._add(step, wish.name))
            if wish.name is not None:
                self._attain(self.steps[-1], ends[1, at], proposed[at])
        return steps

    def add_up(self, terms: Sequence[tuple[Fraction, int | None]], name: str | None = None) -> int:
        """Add up earlier steps (None is 1), each with a weight of at least 0; return the step."""
        return self._add({"terms": [[weight.numerator, weight.denominator, step] for weight, step in terms]}, name)

    def mean(self, steps: Sequence[int], name: str | None = None) -> int:
        """Add up the mean of earlier steps; return the step."""
        return self.add_up([(Fraction(1, len(steps)), step) for step in steps], name)

    def content(self, about: dict[str, object]) -> bytes:
        """Return the file."""
        parts = {"values": self.values, "rows": self.rows, "steps": self.steps}
        whole = {"format": proof.VERSION, "about": plain(about), **parts}
        return json.dumps(whole | {"digest": proof.digest(whole)}).encode()

    def _add(self, step: dict[str, Any], name: str | None) -> int:
        """Add a step with the tightest ends that are floats and proven."""
        low, high = proof.step_ends({**step, "lower": 0.0, "upper": 0.0}, self._read, self._ends)
        step |= {"lower": _rounded(low, -math.inf), "upper": _rounded(high, math.inf)}
        self._ends.append((Fraction(step["lower"]), Fraction(step["upper"])))
        self.steps.append(step if name is None else {"name": name, **step})
        return len(self.steps) - 1

    def _attain(self, step: dict[str, Any], c: Float[Tensor, "key"], ends: Ends) -> None:
        """Note how far the ends of a step about one row are from what other attention attains."""
        keys, weights, values, total, output = self._read[step["row"]]
        exact = torch.tensor([[float(number) for number in value] for value in values], dtype=torch.float64)
        right = torch.tensor([float(number) for number in output], dtype=torch.float64)
        for side, sign in enumerate((-1, 1)):
            vertex = ends.vertices[side, keys]
            if vertex.tolist() == [float(weight) for weight in weights]:
                found = dict(enumerate(weights))
            else:
                slack = (-sign * (c[keys] - exact @ ends.duals[side])).tolist()
                likely = sorted(range(len(keys)), key=lambda at: (float(vertex[at]) <= _POSITIVE, slack[at]))
                found = exact_vertex(values, total, output, likely)
            if found is None:
                missed = (vertex @ exact - right).abs().max() / right.abs().max().clamp(min=1e-300)
                self.residual = max(self.residual, float(missed))
                found = dict(enumerate(map(Fraction, vertex.tolist())))
            attained = sum((Fraction(float(c[keys[at]])) * weight for at, weight in found.items()), Fraction(0))
            end = self._ends[-1][side]
            self.gap = max(self.gap, float(sign * (end - attained)))

    def _values(self, captured: Captured, place: Place) -> tuple[int, Tensor]:
        """Return where a row's values stand in the file, and these; a learned sink is one more key, of value 0."""
        layer = captured.layers[place[0]]
        head = place[1] // layer.passed.group
        polytopes = layer.polytopes
        values = F.pad(polytopes.values[head], (0, 0, 0, int(polytopes.sink)))
        name = (id(captured), place[0], head)
        if name not in self._value_places:
            self._value_places[name] = len(self.values)
            self.values.append(values.double().tolist())
            self._matrices.append([proof.vector(value, values.shape[1], "a value") for value in self.values[-1]])
        return self._value_places[name], values

    def _row(self, captured: Captured, place: Place, values: int, keys: list[int], weights: list[float]) -> int:
        name = (id(captured), *place)
        if name not in self._row_places:
            self._row_places[name] = len(self.rows)
            self.rows.append({"values": values, "keys": keys, "attention": weights})
            self._read.append(proof.read_row(self.rows[-1], self._matrices))
        return self._row_places[name]


def _rounded(end: Fraction, outward: float) -> float:
    """Return the float nearest to an end that is not inside of it."""
    nearest = float(end)
    inside = Fraction(nearest) < end if outward > 0 else Fraction(nearest) > end
    return math.nextafter(nearest, outward) if inside else nearest


Claims = Callable[[ProofDraft, Result], Iterator[int | None]]
"""Writes the steps of what a Result has selected; yields that of each entry, None where nothing is claimed."""


@dataclass(frozen=True)
class Provable(StoredArrays):
    """Arrays that are simply there, and what writes proofs of them, which needs the model and is not pickled."""

    claims: Claims

    def __reduce__(self) -> tuple[type[StoredArrays], tuple[object, ...]]:
        return StoredArrays, (self.arrays, self.dims)


class ProvableResult(Result):
    """A Result whose ends can be proven."""

    def save_proof(self, file: str | os.PathLike[str]) -> SavedProof:
        """Write a proof of all ends that are selected; `python -m identikit.proof FILE` checks it without identikit.

        The ends in the file are proven in rational arithmetic, about the weights and values as they were read. Returns
        how many claims there are and how sharp they are, as a `SavedProof`.
        """
        if not is_path(file) or Path(file).is_dir() or not Path(file).absolute().parent.is_dir():
            raise InputError(
                f"file={shortened(file)} cannot be used: expected a file to write in a folder that exists."
            )
        kind = READINGS.get(self.about.get("measure", ""))
        if kind is not None and kind.joint is not None:
            raise InputError(
                f"{kind.name!r} puts all heads together, and a proof of that cannot be written. Readings of one head, "
                "their mean, and those through layers but GlobEnc and ALTI have proofs."
            )
        if not isinstance(self.source, Provable):
            raise InputError(
                f"save_proof() needs the model, and this {self.kind} result holds only numbers: it was opened from a "
                "folder, pickled, gathered into words or subtracted. Compute it again."
            )
        content, saved = proof_of(self, self.source)
        write_file(Path(file), content)
        return saved


@standard_torch_state()
def proof_of(result: Result, source: Provable) -> tuple[bytes, SavedProof]:
    """Return the proof of what a Result has selected as a file, and what it proves."""
    draft = ProofDraft()
    loss = -math.inf
    claims = 0
    ends = (result.read(name).flatten().tolist() for name in ("lower", "upper"))
    for step, lower, upper in zip(source.claims(draft, result), *ends, strict=True):
        if step is None:
            continue
        claims += 1
        loss = max(loss, draft.steps[step]["upper"] - upper, lower - draft.steps[step]["lower"])
    content = draft.content({"result": result.kind, **asdict(result.provenance)})
    gap = draft.gap if math.isfinite(draft.gap) else math.nan
    return content, SavedProof(claims, len(draft.steps), loss, gap, draft.residual)


# What is claimed


def entries(result: Result) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield each entry that is selected: where it stands on the axes, and at which places of the source."""
    for at in product(*(range(len(axis)) for axis in result.axes)):
        yield at, [axis.source_indices[i] for axis, i in zip(result.axes, at, strict=True)]


def edge_claims(captured: Captured, places: Sequence[Place], wanted: Question, epsilon: float) -> Claims:
    """Claim the ends of weights, or of other sums over a row, of the rows at these places, in the order of a Result."""

    def claims(draft: ProofDraft, result: Result) -> Iterator[int | None]:
        if epsilon:
            raise InputError("Proofs are of attention with the same output. Leave out epsilon=.")
        layers, heads, queries, last = result.axes
        shape = [len(set(column)) for column in zip(*places, strict=True)]
        asked = []
        for at, (layer, head, query, quantity) in entries(result):
            row = (layer * shape[1] + head) * shape[2] + query
            objective: list[Entry] = [(quantity, 1.0)]
            if wanted.objectives is not None:
                given = wanted.objectives
                if given.ndim == 3:  # the same of all rows, or of each
                    given = given[row if len(given) > 1 else 0]
                objective = [(key, number) for key, number in enumerate(given[quantity].tolist()) if number]
            elif wanted.keys is not None:
                objective = [(int(wanted.keys.nonzero()[quantity, 0]), 1.0)]
            name = f"L{layers.values[at[0]]}H{heads.values[at[1]]} {queries.name_of(at[2])} → {last.name_of(at[3])}"
            asked.append(Asked(places[row], objective, name))
        yield from draft.bound(captured, asked)

    return claims


def reading_claims(captured: Captured, factor: Float[Tensor, "layer head query key"], mean: bool) -> Claims:
    """Claim the ends of weights that are scaled, of each head or of the mean over heads."""

    def claims(draft: ProofDraft, result: Result) -> Iterator[int | None]:
        shown = _captured_layers(captured, result)
        for at, places in entries(result):
            heads = range(factor.shape[1]) if mean else [places[1]]
            layer = shown[at[0]]
            query, key = places[-2:]
            asked = [Asked((layer, head, query), [(key, float(factor[layer, head, query, key]))]) for head in heads]
            yield draft.mean(draft.bound(captured, asked), _named(result, at))

    return claims


def chain_claims(captured: Captured, walk: Walk, chain: Chain) -> Claims:
    """Claim the ends of a reading through layers: the chain of proofs from the inputs up."""

    def claims(draft: ProofDraft, result: Result) -> Iterator[int | None]:
        shown = [walk.ends[place] for place in _captured_layers(captured, result)]
        nodes = {source: _chain(draft, walk, chain, source, max(shown)) for source in result.axes[2].source_indices}
        for at, (_, output, source) in entries(result):
            node = nodes[source][shown[at[0]]].get(output)
            yield draft.add_up([] if node is None else [(Fraction(1), node)], _named(result, at))

    return claims


def _chain(draft: ProofDraft, walk: Walk, chain: Chain, source: int, last: int) -> list[dict[int, int | None]]:
    """Bound what tokens hold of one source after each layer; return their steps by layer.

    Tokens that hold nothing are left out, and the step of one that holds just the source itself, all of it, is None.
    """
    held: dict[int, int | None] = {source: None}
    layers: list[dict[int, int | None]] = []
    for at, (captured, place) in enumerate(walk.places[: last + 1]):
        heads = range(len(captured.layers[place].heads))
        queries, keys = walk.span(at)
        factor = chain.factor(at)
        asked = []
        for head, row in product(heads, range(len(queries))):
            scale = [1.0] * len(keys) if factor is None else factor[head, row].tolist()
            objective: list[Entry] = []
            for token, step in held.items():
                number = scale[token - keys.start] if token in keys else 0.0
                if number:
                    entry = (token - keys.start, number)
                    objective.append(entry if step is None else (*entry, step))
            asked.append(Asked((place, head, row), objective))
        steps = draft.bound(captured, asked)
        after = {token: step for token, step in held.items() if token not in queries}
        for row, token in enumerate(queries):
            brought = [steps[head * len(queries) + row] for head in heads]
            terms: list[tuple[Fraction, int | None]] = [
                (Fraction(chain.give) / len(heads), step) for step in brought if draft.steps[step]["objective"]
            ]
            if chain.keep and token in held:
                terms.append((Fraction(chain.keep), held[token]))
            if terms:
                after[token] = draft.add_up(terms)
        held = after
        layers.append(after)
    return layers


def _captured_layers(captured: Captured, result: Result) -> list[int]:
    """Return where the layers of a Result stand among those that were captured."""
    numbers = [layer.call.layer for layer in captured.layers]
    return [numbers.index(layer) for layer in result.axes[0].values]


def _named(result: Result, at: Sequence[int]) -> str:
    names = [f"{axis.name} {axis.name_of(place)}" for axis, place in zip(result.axes, at, strict=True)]
    return f"{result.about['measure']}, {', '.join(names)}"
