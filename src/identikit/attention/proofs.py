"""Proofs of ends, written to a file that `identikit.proof` checks in rational arithmetic, with no other code of ours.

A Result that can be proven has a `Provable` source: its arrays, and the function that writes the proof of a selection.
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

from identikit import proof
from identikit.attention.captured import Captured, RowIndex
from identikit.attention.measure_kinds import MEASURE_KINDS
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


class RowStep(NamedTuple):
    """A step to prove: the ends of an objective over a row. With a name, it is a claim."""

    row: RowIndex
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
    """A proof that is being written; `identikit.proof` explains its parts."""

    values: list[list[list[float]]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    gap: float = -math.inf
    residual: float = 0.0
    _value_indices: dict[Hashable, int] = field(default_factory=dict)
    _row_indices: dict[Hashable, int] = field(default_factory=dict)
    _exact_values: list[list[list[Fraction]]] = field(default_factory=list)
    _exact_rows: list[Any] = field(default_factory=list)
    _ends: list[tuple[Fraction, Fraction]] = field(default_factory=list)

    def bound(self, captured: Captured, steps: Sequence[RowStep]) -> list[int]:
        """Prove steps about rows of a text, those of a layer and of a head together; return their numbers."""
        if not steps:
            return []
        rows = captured.rows([step.row for step in steps])
        values = [self._values(captured, step.row) for step in steps]
        ends = torch.zeros(2, *rows.attention.shape, dtype=torch.float64)
        for index, step in enumerate(steps):
            for key, factor, *earlier in step.objective:
                for side, name in enumerate(("lower", "upper")):
                    ends[side, index, key] += factor * (self.steps[earlier[0]][name] if earlier else 1.0)
        proposed = propose_ends(rows, [value for _, value in values], *ends)
        weights = rows.attention.cpu()
        visible = rows.visible.cpu()
        numbers = []
        for index, step in enumerate(steps):
            keys = visible[index].nonzero()[:, 0].tolist()
            row = self._row(captured, step.row, values[index][0], keys, weights[index, keys].tolist())
            visible_keys = set(keys)
            objective = [list(entry) for entry in step.objective if entry[0] in visible_keys]
            lower_dual, upper_dual = proposed[index].duals.tolist()
            proof_step = {"row": row, "objective": objective, "lower_dual": lower_dual, "upper_dual": upper_dual}
            numbers.append(self._add(proof_step, step.name))
            if step.name is not None:
                self._note_sharpness(self.steps[-1], ends[1, index], proposed[index])
        return numbers

    def add_up(self, terms: Sequence[tuple[Fraction, int | None]], name: str | None = None) -> int:
        """Add up earlier steps (None is 1), each with a weight of at least 0; return the step."""
        return self._add({"terms": [[weight.numerator, weight.denominator, step] for weight, step in terms]}, name)

    def mean(self, steps: Sequence[int], name: str | None = None) -> int:
        """Add up the mean of earlier steps; return the step."""
        return self.add_up([(Fraction(1, len(steps)), step) for step in steps], name)

    def content(self, about: dict[str, object]) -> bytes:
        """Return the proof as the content of a file."""
        content = {"format": proof.VERSION, "about": plain(about)}
        content |= {"values": self.values, "rows": self.rows, "steps": self.steps}
        return json.dumps(content | {"digest": proof.digest(content)}).encode()

    def _add(self, step: dict[str, Any], name: str | None) -> int:
        """Add a step with the tightest ends that are floats and proven."""
        low, high = proof.step_ends({**step, "lower": 0.0, "upper": 0.0}, self._exact_rows, self._ends)
        step |= {"lower": _rounded(low, -math.inf), "upper": _rounded(high, math.inf)}
        self._ends.append((Fraction(step["lower"]), Fraction(step["upper"])))
        self.steps.append(step if name is None else {"name": name, **step})
        return len(self.steps) - 1

    def _note_sharpness(self, step: dict[str, Any], objective: Float[Tensor, "key"], ends: Ends) -> None:
        """Note how far the ends of a step about one row are from what other attention attains."""
        keys, weights, values, total, output = self._exact_rows[step["row"]]
        float_values = torch.tensor([[float(number) for number in value] for value in values], dtype=torch.float64)
        float_output = torch.tensor([float(number) for number in output], dtype=torch.float64)
        for side, sign in enumerate((-1, 1)):
            vertex = ends.vertices[side, keys]
            if vertex.tolist() == [float(weight) for weight in weights]:
                attaining = dict(enumerate(weights))
            else:
                slack = (-sign * (objective[keys] - float_values @ ends.duals[side])).tolist()
                order = [
                    (weight <= _POSITIVE, distance) for weight, distance in zip(vertex.tolist(), slack, strict=True)
                ]
                likeliest_first = sorted(range(len(keys)), key=order.__getitem__)
                attaining = exact_vertex(values, total, output, likeliest_first)
            if attaining is None:
                miss = (vertex @ float_values - float_output).abs().max() / float_output.abs().max().clamp(min=1e-300)
                self.residual = max(self.residual, float(miss))
                attaining = dict(enumerate(map(Fraction, vertex.tolist())))
            terms = (Fraction(float(objective[keys[index]])) * weight for index, weight in attaining.items())
            self.gap = max(self.gap, float(sign * (self._ends[-1][side] - sum(terms, Fraction(0)))))

    def _values(self, captured: Captured, row: RowIndex) -> tuple[int, Tensor]:
        """Return the index of a row's values in the file, and the values themselves."""
        layer = captured.layers[row[0]]
        values = layer.values_with_sink(row[1])
        name = (id(captured), row[0], row[1] // layer.passed.group)
        if name not in self._value_indices:
            self._value_indices[name] = len(self.values)
            self.values.append(values.double().tolist())
            self._exact_values.append([proof.vector(value, values.shape[1], "a value") for value in self.values[-1]])
        return self._value_indices[name], values

    def _row(self, captured: Captured, row: RowIndex, values: int, keys: list[int], weights: list[float]) -> int:
        name = (id(captured), *row)
        if name not in self._row_indices:
            self._row_indices[name] = len(self.rows)
            self.rows.append({"values": values, "keys": keys, "attention": weights})
            self._exact_rows.append(proof.read_row(self.rows[-1], self._exact_values))
        return self._row_indices[name]


def _rounded(end: Fraction, outward: float) -> float:
    """Round an end to a float, outward if it is not one exactly."""
    nearest = float(end)
    inside = Fraction(nearest) < end if outward > 0 else Fraction(nearest) > end
    return math.nextafter(nearest, outward) if inside else nearest


Claims = Callable[[ProofDraft, Result], Iterator[int | None]]
"""Writes the steps for the selected entries of a Result; yields the step of each, None where nothing is claimed."""


@dataclass(frozen=True)
class Provable(StoredArrays):
    """Stored arrays, and the function that writes their proofs; it needs the model, and is not pickled."""

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
        kind = MEASURE_KINDS.get(self.about.get("measure", ""))
        if kind is not None and kind.joint is not None:
            raise InputError(
                f"{kind.name!r} puts all heads together, and a proof of that cannot be written. Measures of one "
                "head, their mean, and those through layers but GlobEnc and ALTI have proofs."
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
    """Return the file that proves the selected entries of a Result, and what it proves."""
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


def selected_entries(result: Result) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield the indices of each selected entry, on the axes and in the source."""
    for indices in product(*(range(len(axis)) for axis in result.axes)):
        yield indices, [axis.source_indices[index] for axis, index in zip(result.axes, indices, strict=True)]


def _claim_name(result: Result, indices: Sequence[int]) -> str:
    names = [f"{axis.name} {axis.name_of(index)}" for axis, index in zip(result.axes, indices, strict=True)]
    return f"{result.about['measure']}, {', '.join(names)}"


def edge_claims(captured: Captured, rows: Sequence[RowIndex], question: Question, epsilon: float) -> Claims:
    """Claim the ends of weights, or of other sums over a row, of these rows, in the order of a Result."""

    def claims(draft: ProofDraft, result: Result) -> Iterator[int | None]:
        if epsilon:
            raise InputError("Proofs are of attention with the same output. Leave out epsilon=.")
        layers, heads, queries, last = result.axes
        _, head_count, query_count = (len(set(column)) for column in zip(*rows, strict=True))
        steps = []
        for indices, (layer, head, query, quantity) in selected_entries(result):
            row = (layer * head_count + head) * query_count + query
            objective: list[Entry] = [(quantity, 1.0)]
            if question.objectives is not None:
                objectives = question.objectives
                if objectives.ndim == 3:  # the same for all rows, or one set for each
                    objectives = objectives[row if len(objectives) > 1 else 0]
                objective = nonzero_entries(objectives[quantity])
            elif question.keys is not None:
                objective = [(int(question.keys.nonzero()[quantity, 0]), 1.0)]
            head_name = f"L{layers.values[indices[0]]}H{heads.values[indices[1]]}"
            name = f"{head_name} {queries.name_of(indices[2])} → {last.name_of(indices[3])}"
            steps.append(RowStep(rows[row], objective, name))
        yield from draft.bound(captured, steps)

    return claims


def nonzero_entries(objective: Float[Tensor, "key"]) -> list[Entry]:
    """Return the keys and numbers of an objective where these are not 0."""
    return [(key, number) for key, number in enumerate(objective.tolist()) if number]


def scaled_claims(captured: Captured, factor: Float[Tensor, "layer head query key"], mean: bool) -> Claims:
    """Claim the ends of weights that are scaled, of each head or of the mean over heads."""

    def claims(draft: ProofDraft, result: Result) -> Iterator[int | None]:
        layer_indices = [captured.layer_numbers.index(layer) for layer in result.axes[0].values]
        for indices, source in selected_entries(result):
            heads = range(factor.shape[1]) if mean else [source[1]]
            layer = layer_indices[indices[0]]
            query, key = source[-2:]
            steps = [RowStep((layer, head, query), [(key, float(factor[layer, head, query, key]))]) for head in heads]
            yield draft.mean(draft.bound(captured, steps), _claim_name(result, indices))

    return claims


def chain_claims(captured: Captured, walk: Walk, chain: Chain) -> Claims:
    """Claim the ends of a measure through layers: the chain of proofs from the inputs up."""

    def claims(draft: ProofDraft, result: Result) -> Iterator[int | None]:
        ends = [walk.ends[captured.layer_numbers.index(layer)] for layer in result.axes[0].values]
        sources = result.axes[2].source_indices
        steps = {source: _chain_steps(draft, walk, chain, source, max(ends)) for source in sources}
        for indices, (_, output, source) in selected_entries(result):
            step = steps[source][ends[indices[0]]].get(output)
            yield draft.add_up([] if step is None else [(Fraction(1), step)], _claim_name(result, indices))

    return claims


def _chain_steps(draft: ProofDraft, walk: Walk, chain: Chain, source: int, last: int) -> list[dict[int, int | None]]:
    """Bound what tokens hold of one source after each layer; return their steps by layer.

    Tokens that hold nothing are left out, and the step of one that holds just the source itself, all of it, is None.
    """
    holdings: dict[int, int | None] = {source: None}
    layers: list[dict[int, int | None]] = []
    for number, (captured, index) in enumerate(walk.steps[: last + 1]):
        heads = range(len(captured.head_numbers))
        queries, keys = (range(walk.inputs)[span] for span in walk.spans[number])
        factor = chain.factor(number)
        row_steps = []
        for head, query in product(heads, range(len(queries))):
            scale = [1.0] * len(keys) if factor is None else factor[head, query].tolist()
            objective: list[Entry] = []
            for token, step in holdings.items():
                if token in keys and scale[token - keys.start]:
                    entry = (token - keys.start, scale[token - keys.start])
                    objective.append(entry if step is None else (*entry, step))
            row_steps.append(RowStep((index, head, query), objective))
        steps = draft.bound(captured, row_steps)
        after = {token: step for token, step in holdings.items() if token not in queries}
        for query, token in enumerate(queries):
            terms: list[tuple[Fraction, int | None]] = [
                (Fraction(chain.give) / len(heads), step)
                for step in steps[query :: len(queries)]
                if draft.steps[step]["objective"]
            ]
            if chain.keep and token in holdings:
                terms.append((Fraction(chain.keep), holdings[token]))
            if terms:
                after[token] = draft.add_up(terms)
        holdings = after
        layers.append(after)
    return layers
