"""What `explain` returns: the answers to all three questions about one text, as numbers."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from identikit.attention.estimate import RowSample
from identikit.attention.measure_result import AttentionMeasure, HeadScores
from identikit.attention.result import EffectiveAttention
from identikit.attribution.result import TokenAttribution
from identikit.checks import known_name
from identikit.errors import InputError, Unavailable
from identikit.explanation import evaluation_result as evaluation_result  # a kind that `open_result` knows
from identikit.maths.mixing import first_middle_last
from identikit.results.files import Files
from identikit.results.measure import Measure, stored_array
from identikit.results.result import Result, result_of, saved_result
from identikit.tokens.result import IdentityMap

NEAR = 3  # how many places away a neighbour is near
SOURCES_NAMED = 3  # how many of a token's strongest sources are named
UNKNOWN = 0.1  # share of unknown tokens in the sample texts above which maps fitted to them say little
NOT_COMPUTED = Unavailable("It was not computed.")
COMING = Unavailable("It is being computed.")
ONLY_NUMBERS = Unavailable("An explanation by words, or a difference, holds only numbers.")
_BOUNDED = "bounded.safetensors"
_ANSWERS: Mapping[str, type[Result]] = {
    "attention": EffectiveAttention,
    "identity": IdentityMap,
    "attribution": TokenAttribution,
}
_UNDEFINED = EffectiveAttention.measures["pearson"].missing


def _by_layer(meaning: str, values: str = "0 to 1") -> Measure:
    """Declare a mean over the rows of each layer."""
    missing = "Too few rows of the layer were bounded in time."
    return stored_array("layer", f"{meaning}, on average over rows.", range=values, missing=missing, words={})


@dataclass(frozen=True, repr=False, eq=False)
class Explanation(Result):
    """The answers to all three questions about a model on one text.

    An alternative is other attention with the same head output. What all alternatives share is determined by the
    output, and the rest is free. Arrays by layer are means over rows; `special_…` is the weight on special tokens, or
    on the first token where there are none. What intervals give has a standard error (`…_stderr`), which is 0 where all
    free rows were bounded, and NaN where none was. `…_least` and `…_most` enclose it, also where no free row was
    bounded.

    `about` holds further facts: `certain` (how much is determined overall, and how many rows were bounded), how much
    would be with `shuffled` values, the `causes` of freedom, the `sinks`, what a `learned_sink` takes by layer, in what
    share of a layer's rows the rank is `unsure`, the edges that are `least_certain`, and those whose effective weight
    is `outside` the interval.

    `attention`, `identity` and `attribution` are the Results these were read from, or `Unavailable` with a reason;
    `bounded` has the rows of attention that were bounded, each with its intervals. `readings` has the results of
    `measures=` by name, and `about["readings"]` the facts about each.
    """

    attention: EffectiveAttention | Unavailable = NOT_COMPUTED
    identity: IdentityMap | Unavailable = NOT_COMPUTED
    attribution: TokenAttribution | Unavailable = NOT_COMPUTED
    bounded: RowSample | None = None
    readings: Mapping[str, AttentionMeasure | HeadScores | Unavailable] = field(default_factory=dict)

    kind = "explanation"
    missing_facts: ClassVar = {
        "pearson_overall": _UNDEFINED,
        "output_change": "There was no time to run the model again.",
    }

    certain_mass = _by_layer("Share of a row's weight that is determined by the output")
    certain_mass_stderr = _by_layer("Standard error of `certain_mass`", "0 or more")
    certain_mass_least = _by_layer("The least that `certain_mass` is: two standard errors below, or what is known")
    certain_mass_most = _by_layer("The most that `certain_mass` is: two standard errors above, or what is known")
    strongest_certain = _by_layer("Share of rows whose strongest edge is determined")
    strongest_certain_stderr = _by_layer("Standard error of `strongest_certain`", "0 or more")
    strongest_certain_least = _by_layer(
        "The least that `strongest_certain` is: two standard errors below, or what is known"
    )
    strongest_certain_most = _by_layer(
        "The most that `strongest_certain` is: two standard errors above, or what is known"
    )
    special_raw = _by_layer("Weight of all special tokens (or of the first token, if there are none)")
    special_lower = _by_layer("The least that they get in any alternative")
    special_lower_stderr = _by_layer("Standard error of `special_lower`", "0 or more")
    special_upper = _by_layer("The greatest that they get in any alternative")
    special_upper_stderr = _by_layer("Standard error of `special_upper`", "0 or more")
    special_effective = _by_layer("Effective attention to them", "any number")
    least_null_dim = _by_layer("Least null dimension of a row", "0 to tokens")
    greatest_null_dim = _by_layer("Greatest null dimension of a row", "0 to tokens")
    identifiable = _by_layer("Share of rows that are not free")
    reachable_dim = stored_array(
        "layer",
        "Dimension of the alternatives that queries can reach, on average over rows.",
        range="0 to tokens",
        missing="There was no time for it.",
        words={},
    )
    pearson = stored_array(
        "layer", "Correlation of raw and effective attention.", range="−1 to 1", missing=_UNDEFINED, words={}
    )
    main = tuple(name for name, declared in vars().items() if isinstance(declared, Measure))  # so far: by layer

    recovered = stored_array(
        "layer token",
        "Whether the token is still recovered from its hidden vector: 1 or 0.",
        range="0 or 1",
        missing="No map was fitted for the layer.",
        words={"token": "min"},
    )
    own = stored_array(
        "layer token",
        "What the token contributes to its own hidden vector.",
        range="0 to 1",
        words={"token": "mean"},
    )
    outweighed = stored_array(
        "layer token", "Whether another token contributes more to the hidden vector.", range="true or false"
    )

    def words(self) -> "Explanation":
        """Return the result by words: a word is recovered if all of its pieces are, and contributes their mean."""
        return super().words()._only_numbers()

    def __sub__(self, other: object) -> "Explanation":
        """Return the numbers of this explanation minus those of another."""
        return super().__sub__(other)._only_numbers()

    def _only_numbers(self) -> "Explanation":
        return replace(self, bounded=None, readings={}, **dict.fromkeys(_ANSWERS, ONLY_NUMBERS))

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings, with the strongest sources of every token."""
        plain = super().to_dict()
        for name in _ANSWERS:
            answer = getattr(self, name)
            if isinstance(answer, Unavailable):
                plain[f"{name}_unavailable"] = answer.reason
        if isinstance(self.attribution, TokenAttribution):
            plain["sources"] = [sources.to_dict() for sources in strongest_sources(self.attribution)]
        return plain

    def describe(self) -> str:
        """Return the verdict; of a selection, or of words, only the means of its numbers."""
        from identikit.explanation.words import verdict

        sizes = [0 if axis.single else len(axis) for axis in self.axes]
        if isinstance(self.attention, EffectiveAttention) and sizes == [len(self.attention.layers), len(self.tokens)]:
            return str(verdict(self))
        means = {name: float(self.array(name).double().nanmean()) for name in self.arrays}
        return f"Means: {', '.join(f'{name} {value:.3g}' for name, value in means.items() if value == value)}."

    def to_latex(self) -> str:
        """Return the verdict as LaTeX without a preamble; its tables need the package booktabs."""
        from identikit.explanation.words import verdict

        return verdict(self).to_latex()

    def plot(self, question: str = "attention", **options: Any) -> Any:
        """Draw the answer to one question: "attention" (heads), "identity" or "attribution" (the last layer)."""
        answer = getattr(self, known_name("question", question, tuple(_ANSWERS)))
        if isinstance(answer, Unavailable):
            raise InputError(f"Cannot draw {question}: {answer.reason}")
        return (answer.sel(layer=-1) if question == "attribution" else answer).plot(**options)

    def _files(self) -> Files:
        files = dict(super()._files())
        answers = {name: getattr(self, name) for name in _ANSWERS}
        for name, answer in answers.items():
            if isinstance(answer, Unavailable):
                files[f"{name}.txt"] = answer.reason.encode()
        for folder, result in (answers | {f"readings/{name}": each for name, each in self.readings.items()}).items():
            if not isinstance(result, Unavailable):
                files |= {f"{folder}/{file}": content for file, content in result._content().items()}
        if self.bounded is not None:
            files[_BOUNDED] = self.bounded.to_bytes()
        return files

    @classmethod
    def _from_files(cls, files: Files, about: Mapping[str, Any], where: str) -> "Explanation":
        numbers = super()._from_files(files, about, where)

        def result_in(folder: str) -> Result | None:
            start = f"{folder}/"
            contents = {file.removeprefix(start): files[file] for file in files if file.startswith(start)}
            return result_of(contents, f"{where}/{folder}") if contents else None

        opened: dict[str, Any] = {"readings": {}}
        for name, kind in _ANSWERS.items():
            opened[name] = answer = result_in(name) or Unavailable(files[f"{name}.txt"].decode())
            if not isinstance(answer, kind | Unavailable):
                raise InputError(f"Opening {where}: {name} is not {kind.kind} but {answer.kind}.")
        for name, facts in numbers.about.get("readings", {}).items():
            opened["readings"][name] = reading = result_in(f"readings/{name}") or Unavailable(facts["unavailable"])
            if not isinstance(reading, AttentionMeasure | HeadScores | Unavailable):
                raise InputError(f"Opening {where}: {name} is not a reading but {reading.kind}.")
        if _BOUNDED in files:
            opened["bounded"] = RowSample.from_bytes(files[_BOUNDED])
        return cls(numbers.axes, numbers.source, numbers.provenance, numbers.about, **opened)


def open_result(folder: str | os.PathLike[str]) -> Result:
    """Open a result that `Result.save` wrote. It has no model, so it cannot be verified or continued."""
    return saved_result(folder)  # this module has imported every kind


# Where tokens come from


class TokenSource(NamedTuple):
    """An input token, its position in the text, and what it contributes."""

    token: str
    position: int
    contribution: float


class Sources(NamedTuple):
    """Where the hidden vectors of the token at a position come from.

    - `sources`: the strongest at the first, middle and last layer, the largest first
    - `own`: what it contributes itself in the last layer; `outweighed`: whether another contributes more there
    """

    token: str
    position: int
    sources: tuple[tuple[TokenSource, ...], ...]
    own: float
    outweighed: bool

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return self._asdict() | {"sources": [[source._asdict() for source in layer] for layer in self.sources]}


def strongest_sources(attribution: TokenAttribution) -> list[Sources]:
    """Return the strongest sources of every token at the first, middle and last layer, without mere estimates of 0."""
    tokens = attribution.tokens
    layers = list(first_middle_last(len(attribution.layers)))
    contribution = attribution.contribution[layers]
    if attribution.stderr is not None:
        contribution = contribution.masked_fill(attribution.stderr[layers] >= contribution, 0.0)  # perhaps no source
    top = contribution.topk(min(SOURCES_NAMED, len(tokens)), dim=1)

    def strongest(layer: int, output: int) -> tuple[TokenSource, ...]:
        inputs = top.indices[layer, :, output].tolist()
        weights = top.values[layer, :, output].tolist()
        return tuple(TokenSource(tokens[i], i, weight) for i, weight in zip(inputs, weights, strict=True) if weight)

    own = attribution.own[-1].tolist()
    outweighed = attribution.outweighed[-1].tolist()
    sources = []
    for position, token in enumerate(tokens):
        by_layer = tuple(strongest(layer, position) for layer in range(len(layers)))
        sources.append(Sources(token, position, by_layer, own[position], outweighed[position]))
    return sources
