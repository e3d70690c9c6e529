"""What is bounded in each row: the weights of keys, what groups of keys receive, or sums with weights of one's own."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from identikit.attention.result import EffectiveAttention
from identikit.checks import as_float, known_names, shortened
from identikit.errors import InputError
from identikit.maths.polytope.bounds import Question
from identikit.results.axis import Axis, Index
from identikit.results.gathered import join_pieces, word_groups
from identikit.results.pictures import image_regions
from identikit.shapes import Float, Tensor
from identikit.texts.text import readable_token

GROUP_NAMES = ("special", "first", "words", "sentences", "images")
TOP = 5  # how many of the strongest edges are put in order
_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")


def key_weights(
    n: int, keys: Sequence[int] | None = None, *, objectives: Tensor | None = None, top: int = TOP
) -> Question:
    """Return the question for the weights of n keys, or of some of them, and for other objectives."""
    selected = torch.zeros(n, dtype=torch.bool)
    selected[slice(None) if keys is None else list(keys)] = True
    return Question(selected, objectives, top)


def requested_quantities(
    attention: EffectiveAttention, key: Index, groups: object, weights: object
) -> tuple[Axis, Question, dict[str, list[int]]]:
    """Return the axis of quantities, the question that asks for them in each selected row, and the groups' members."""
    if sum(argument is not None for argument in (key, groups, weights)) > 1:
        raise InputError("attention_intervals takes one of key=, groups= and weights=.")
    n = len(attention.keys)
    if weights is not None:
        sums = named_sums(attention, weights)
        objectives = torch.stack(list(sums.values()), dim=1)  # query, quantity, key
        heads = len(attention.axis("layer")) * len(attention.axis("head"))
        objectives = objectives[0] if len(objectives) == 1 else objectives.repeat(heads, 1, 1)
        return Axis("quantity", tuple(sums)), Question(objectives=objectives), {}
    if groups is not None:
        members = key_groups(attention, groups)
        return Axis("group", tuple(members)), Question(objectives=membership(list(members.values()), n)), members
    keys = attention.axis("key").sel(key)
    return keys, key_weights(n, keys.source_indices, top=TOP if len(keys) == n else 0), {}


# Sums with a caller's own weights


def named_sums(attention: EffectiveAttention, weights: object) -> dict[str, Float[Tensor, "_ key"]]:
    """Return the numbers $c$ of each sum by name, in one row for all queries or in one for each.

    All have the same shape. See `weights` in `attention_intervals`.
    """
    queries = len(attention.axis("query"))
    if isinstance(weights, Mapping):
        sums = {str(name): _sum_weights(attention, numbers, weights) for name, numbers in weights.items()}
        if len(sums) < len(weights):
            raise _unusable(weights, "two of its names are written alike")
    else:
        numbers = _as_numbers(weights, weights)
        if numbers.ndim == 2 and len(numbers) != queries:
            sums = {str(index): _sum_weights(attention, row, weights) for index, row in enumerate(numbers)}
        else:
            sums = {"weights": _sum_weights(attention, numbers, weights)}
    if not sums:
        raise InputError(f"weights={shortened(weights)} names no sum. Give a number for each key.")
    rows = max(map(len, sums.values()))
    return {name: c.expand(rows, -1) for name, c in sums.items()}


def _sum_weights(attention: EffectiveAttention, numbers: object, weights: object) -> Float[Tensor, "_ key"]:
    """Return the numbers of one sum: (1, key), or (query, key)."""
    n = len(attention.keys)
    if isinstance(numbers, Mapping):
        c = torch.zeros(1, n, dtype=torch.float64)
        for key, number in numbers.items():
            value = as_float(number)
            if value is None:
                raise _unusable(weights, f"{shortened(number)} is not a number")
            c[0, list(attention.axis("key").sel(key).source_indices)] += value
    else:
        c = torch.atleast_2d(_as_numbers(numbers, weights))
    queries = len(attention.axis("query"))
    if c.shape[1] != n or len(c) not in (1, queries):
        raise _unusable(weights, f"expected {n} numbers, one for each key, or these for each of {queries} queries")
    if not c.isfinite().all():
        raise _unusable(weights, "its numbers must be finite")
    return c


def _as_numbers(value: object, weights: object) -> Float[Tensor, "..."]:
    dtype = None if hasattr(value, "dtype") else torch.float64  # lists would be read in single precision
    try:
        numbers = torch.as_tensor(value, dtype=dtype).detach().to_dense().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        numbers = None
    if numbers is None or numbers.is_complex() or numbers.ndim not in (1, 2):
        raise _unusable(weights, "expected real numbers, (key,), (quantity, key) or (query, key), or a mapping to them")
    return numbers.double()


def _unusable(weights: object, reason: str) -> InputError:
    return InputError(f"weights={shortened(weights)} cannot be used: {reason}.")


# Groups of keys whose weight is bounded together


def membership(groups: Sequence[Sequence[int]], n: int) -> Float[Tensor, "group key"]:
    """Return which of n keys belong to each group: 1 or 0."""
    members = torch.zeros(len(groups), n, dtype=torch.float64)
    for row, keys in zip(members, groups, strict=True):
        row[list(keys)] = 1.0
    return members


def key_groups(attention: EffectiveAttention, groups: object) -> dict[str, list[int]]:
    """Return the positions of each group, by name.

    `groups` is a mapping from names to keys (positions or tokens, one or several), or one or several of "special" (all
    special tokens), "first" (the first token), "words" (each word, all of its pieces), "sentences" and "images" (each
    image, all of its tokens).
    """
    members: dict[str, list[int]] = {}
    if isinstance(groups, Mapping):
        axis = attention.axis("key")
        members = {str(name): sorted(axis.sel(keys).source_indices) for name, keys in groups.items()}
        if len(members) < len(groups):
            raise InputError(f"groups={shortened(groups)} cannot be used: two of its names are written alike.")
    elif isinstance(groups, str | Iterable):
        for name in known_names("groups", groups, GROUP_NAMES):
            members |= _named_groups(attention, name)
    else:
        raise InputError(
            f"groups={shortened(groups)} cannot be used: expected a mapping from names to keys, or {GROUP_NAMES}."
        )
    if not members:
        raise InputError(f"groups={shortened(groups)} names no keys of this text.")
    return members


def _named_groups(attention: EffectiveAttention, name: str) -> dict[str, list[int]]:
    text = attention.text_of("key")
    tokens = text["tokens"]
    if name == "special":
        special = [position for position, is_special in enumerate(text["special"]) if is_special]
        return {"special": special} if special else {}
    if name == "first":
        return {"first": [0]}
    if name == "images":
        return image_regions(attention)
    if name == "words":
        spans = text["words"]
        if not spans:
            raise InputError("groups='words': the tokens are not aligned with words. Pass a text, not token ids.")
        words = word_groups(len(tokens), spans)
        return {f"{readable_token(join_pieces(tokens, word)).strip()}@{word[0]}": word for word in words}
    return _sentences(tokens, text["special"])


def _sentences(tokens: Sequence[str], special: Sequence[bool]) -> dict[str, list[int]]:
    """Return the tokens of each sentence; special tokens end one, and belong to none."""
    sentences: list[list[int]] = [[]]
    for position, token in enumerate(tokens):
        if not special[position]:
            sentences[-1].append(position)
        if special[position] or readable_token(token).strip() in _SENTENCE_ENDS:
            sentences.append([])
    return {f"sentence {number}": positions for number, positions in enumerate(filter(None, sentences))}
