"""Results by words instead of pieces, the difference of two results, and the strongest entries of one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from identikit.errors import InputError
from identikit.results.axis import Axis
from identikit.results.result import Result
from identikit.results.source import StoredArrays
from identikit.shapes import Tensor
from identikit.texts.text import SOURCE

R = TypeVar("R", bound=Result)
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "all": torch.all,
    "min": torch.amin,
}


def by_words(result: R) -> R:
    """Return a result by words instead of pieces; see `Result.words`."""
    text_groups = _word_groups(result, result.about)
    rules: dict[str, Mapping[str, str]] = {}  # how each array is gathered, by axis
    for name in result.arrays:
        if name in result.measures and (rule := result.measures[name].words) is not None:
            rules[name] = rule
    result.refuse_large(rules)
    groups: dict[str, list[list[int]]] = {}
    axes = []
    for axis in result.axes:
        if not axis.single and any(axis.name in rule for rule in rules.values()):
            text = result.text_of(axis.name)
            if list(axis.tokens or ()) != list(text["tokens"]):
                raise InputError(
                    f"Gathering {result.a_kind} into words: call words() before selecting some {axis.plural}."
                )
            groups[axis.name] = _word_groups(result, text)
            axis = Axis(axis.name, tuple(range(len(groups[axis.name]))), _words_of(text, groups[axis.name]))
        axes.append(replace(axis, selected=None))
    arrays = {}
    for name, rule in rules.items():
        array = result.read(name)
        for dim, axis_name in enumerate(result.source.dims[name]):
            if axis_name in rule and axis_name in groups:
                reduction = _REDUCTIONS[rule[axis_name]]
                pieces = [array.narrow(dim, group[0], len(group)) for group in groups[axis_name]]
                array = torch.stack([reduction(piece, dim) for piece in pieces], dim)
        arrays[name] = array
    dims = {name: result.source.dims[name] for name in arrays}
    about = {**result.about, "tokens": list(_words_of(result.about, text_groups)), "words": None}
    if SOURCE in about:
        source = about[SOURCE]
        about[SOURCE] = {"tokens": list(_words_of(source, _word_groups(result, source))), "words": None}
    return replace(result, axes=tuple(axes), source=StoredArrays(arrays, dims), about=about)


def _words_of(text: Mapping[str, Any], groups: list[list[int]]) -> tuple[str, ...]:
    return tuple(join_pieces(text["tokens"], group) for group in groups)


def _word_groups(result: Result, text: Mapping[str, Any]) -> list[list[int]]:
    """Return the pieces of each word of a result's text, or say why there are none."""
    if all(declared.words is None for declared in result.measures.values()):
        raise InputError(f"{result.a_kind.capitalize()} has no tokens to gather into words.")
    if text.get("words", ()) is None:
        raise InputError(f"This {result.kind} result is already by words.")
    if not text.get("words"):
        raise InputError(
            f"Gathering {result.a_kind} into words: its tokens are not aligned with words. Pass a text instead of "
            "token ids, and use a tokenizer that keeps offsets (a fast one)."
        )
    return word_groups(len(text["tokens"]), text["words"])


def difference(result: R, other: R) -> R:
    """Return a result minus another of the same kind; see `Result.__sub__`."""
    for fact in result.same:
        if result.about.get(fact) != other.about.get(fact):
            raise InputError(
                f"Subtracting {result.kind} results: the {fact} of one is {result.about.get(fact)!r}, that of the "
                f"other {other.about.get(fact)!r}, and so they are different quantities. Subtract their arrays, as "
                f"a.{result.main[0]} - b.{result.main[0]}, if that is meant."
            )
    shapes = [" × ".join(axis.counted for axis in each.axes) for each in (result, other)]
    if [axis.name for axis in result.axes] != [axis.name for axis in other.axes]:
        raise InputError(f"Subtracting {result.kind} results: one is {shapes[0]}, the other {shapes[1]}.")
    for axis, other_axis in zip(result.axes, other.axes, strict=True):
        if (axis.values, axis.tokens, axis.single) != (other_axis.values, other_axis.tokens, other_axis.single):
            summaries = (axis.summary(), other_axis.summary())
            if summaries[0] == summaries[1]:  # the ends are the same, and something between them is not
                pairs = ((axis.name_of(index), other_axis.name_of(index)) for index in range(len(axis)))
                summaries = next((pair for pair in pairs if pair[0] != pair[1]), summaries)
            raise InputError(
                f"Subtracting {result.kind} results: they differ on the {axis.name} axis ({summaries[0]} against "
                f"{summaries[1]}). Select the same parts, of the same tokens."
            )
    names = [name for name in result.arrays if name in other.arrays]
    result.refuse_large(names)
    arrays = {}
    for name in names:
        array = result.read(name)
        dtype = torch.float64 if array.is_floating_point() else torch.long
        arrays[name] = array.to(dtype) - other.read(name).to(array.device, dtype)
    dims = {name: result.source.dims[name] for name in names}
    axes = tuple(replace(axis, selected=None) for axis in result.axes)
    return replace(
        result, axes=axes, source=StoredArrays(arrays, dims), about={**result.about, "minus": other.model_name}
    )


def word_groups(n: int, spans: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the positions of each word's pieces, in order; a token that belongs to no word stands alone."""
    stops = {span[0]: span[1] for span in spans}
    groups = []
    start = 0
    while start < n:
        stop = stops.get(start, start + 1)
        groups.append(list(range(start, stop)))
        start = stop
    return groups


def join_pieces(tokens: Sequence[str], group: Sequence[int]) -> str:
    """Return a word out of its pieces."""
    return "".join([tokens[group[0]], *(tokens[position].removeprefix("##") for position in group[1:])])


def largest_entries(
    result: Result, name: str, count: int, values: Tensor | None = None
) -> Iterator[tuple[float, dict[str, str]]]:
    """Yield the largest entries of an array by size, each with its label on every axis that is left.

    `values` are other numbers over the axes of that array.
    """
    array = result.array(name) if values is None else values
    axes = [axis for axis in map(result.axis, result.source.dims[name]) if not axis.single]
    entries = array.flatten()
    for entry in entries.abs().nan_to_num(-1).topk(min(count, entries.numel())).indices:
        indices = torch.unravel_index(entry, array.shape)
        labels = {axis.name: axis.name_of(int(index)) for axis, index in zip(axes, indices, strict=True)}
        yield float(entries[entry]), labels
