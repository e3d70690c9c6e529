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
_WAYS: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "mean": torch.mean, "all": torch.all, "min": torch.amin}


def by_words(result: R) -> R:
    """Return a result by words instead of pieces; see `Result.words`."""
    groups = {"": _word_groups(result, result.about)}
    ways: dict[str, Mapping[str, str]] = {}
    for name in result.arrays:
        if name in result.measures and (how := result.measures[name].words) is not None:
            ways[name] = how
    result.refuse_large(ways)
    gathered_axes = {name for how in ways.values() for name in how}
    axes = []
    for axis in result.axes:
        if axis.name in gathered_axes and not axis.single:
            text = result.text_of(axis.name)
            if list(axis.tokens or ()) != list(text["tokens"]):
                raise InputError(
                    f"Gathering {result.a_kind} into words: call words() before selecting some {axis.plural}."
                )
            groups[axis.name] = _word_groups(result, text)
            axis = Axis(axis.name, tuple(range(len(groups[axis.name]))), _words_of(text, groups[axis.name]))
        axes.append(replace(axis, selected=None))
    arrays = {}
    for name, how in ways.items():
        arrays[name] = result.read(name)
        for place, axis in enumerate(map(result.axis, result.source.dims[name])):
            if axis.name in how and not axis.single:
                pieces = [arrays[name].narrow(place, group[0], len(group)) for group in groups[axis.name]]
                arrays[name] = torch.stack([_WAYS[how[axis.name]](piece, place) for piece in pieces], place)
    dims = {name: result.source.dims[name] for name in arrays}
    about = {**result.about, "tokens": list(_words_of(result.about, groups[""])), "words": None}
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


def difference(one: R, other: R) -> R:
    """Return a result minus another of the same kind; see `Result.__sub__`."""
    for fact in one.same:
        if one.about.get(fact) != other.about.get(fact):
            raise InputError(
                f"Subtracting {one.kind} results: the {fact} of one is {one.about.get(fact)!r}, that of the other "
                f"{other.about.get(fact)!r}, and so they are different quantities. Subtract their arrays, as "
                f"a.{one.main[0]} - b.{one.main[0]}, if that is meant."
            )
    for mine, theirs in zip(one.axes, other.axes, strict=True):
        if (mine.values, mine.tokens, mine.single) != (theirs.values, theirs.tokens, theirs.single):
            raise InputError(
                f"Subtracting {one.kind} results: they differ on the {mine.name} axis ({mine.summary()} against "
                f"{theirs.summary()}). Select the same parts, of the same tokens."
            )
    names = [name for name in one.arrays if name in other.arrays]
    one.refuse_large(names)
    arrays = {}
    for name in names:
        first = one.read(name)
        second = other.read(name).to(first.device)
        dtype = torch.float64 if first.is_floating_point() else torch.long
        arrays[name] = first.to(dtype) - second.to(dtype)
    dims = {name: one.source.dims[name] for name in names}
    axes = tuple(replace(axis, selected=None) for axis in one.axes)
    return replace(one, axes=axes, source=StoredArrays(arrays, dims), about={**one.about, "minus": other.model_name})


def word_groups(n: int, spans: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the pieces of each word in order; a token that belongs to no word stands alone."""
    stops = {span[0]: span[1] for span in spans}
    groups = []
    place = 0
    while place < n:
        stop = stops.get(place, place + 1)
        groups.append(list(range(place, stop)))
        place = stop
    return groups


def join_pieces(tokens: Sequence[str], group: Sequence[int]) -> str:
    """Return a word out of its pieces."""
    first, *rest = (tokens[place] for place in group)
    return "".join([first, *(piece.removeprefix("##") for piece in rest)])


def largest_entries(
    result: Result, name: str, count: int, values: Tensor | None = None
) -> Iterator[tuple[float, dict[str, str]]]:
    """Yield the largest entries of an array by size, each with the label of its place on every axis that is left.

    `values` are other numbers over the axes of that array.
    """
    array = result.array(name) if values is None else values
    axes = [axis for dim in result.source.dims[name] if not (axis := result.axis(dim)).single]
    flat = array.flatten()
    for place in flat.abs().nan_to_num(-1).topk(min(count, flat.numel())).indices.tolist():
        where = torch.unravel_index(torch.tensor(place), array.shape)
        labels = {axis.name: axis.name_of(int(at)) for axis, at in zip(axes, where, strict=True)}
        yield float(flat[place]), labels
