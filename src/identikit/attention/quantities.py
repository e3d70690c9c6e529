"""What rows are bounded in: the weights of keys, what groups of keys receive, or sums with weights of one's own."""

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

NAMED = ("special", "first", "words", "sentences", "images")
TOP = 5  # of how many of the strongest edges the order is found
_ENDS = (".", "!", "?", "。", "！", "？")


def edges_wanted(
    n: int, keys: Sequence[int] | None = None, *, objectives: Tensor | None = None, top: int = TOP
) -> Question:
    """Ask for the weights of n keys, or of some of them, and for other quantities."""
    asked = torch.zeros(n, dtype=torch.bool)
    asked[slice(None) if keys is None else list(keys)] = True
    return Question(asked, objectives, top)


def asked_of(
    attention: EffectiveAttention, key: Index, groups: object, weights: object
) -> tuple[Axis, Question, dict[str, list[int]]]:
    """Return what the selected rows are bounded in as an axis, what is asked of each row, and groups' members."""
    if sum(given is not None for given in (key, groups, weights)) > 1:
        raise InputError("attention_intervals takes one of key=, groups= and weights=.")
    n = len(attention.keys)
    if weights is not None:
        named = own_weights(attention, weights)
        heads = len(attention.axis("layer")) * len(attention.axis("head"))
        objectives = torch.stack(list(named.values()), dim=1)  # query, quantity, key
        if all(len(c) == 1 for c in named.values()):
            return Axis("quantity", tuple(named)), Question(objectives=objectives[0]), {}
        return Axis("quantity", tuple(named)), Question(objectives=objectives.repeat(heads, 1, 1)), {}
    if groups is not None:
        members = key_groups(attention, groups)
        return Axis("group", tuple(members)), Question(objectives=membership(list(members.values()), n)), members
    keys = attention.axis("key").sel(key)
    return keys, edges_wanted(n, keys.source_indices, top=TOP if len(keys) == n else 0), {}


# Sums with weights of one's own


def own_weights(attention: EffectiveAttention, weights: object) -> dict[str, Float[Tensor, "_ key"]]:
    """Return the numbers $c$ of each sum by name, one for each key or, in as many rows as are selected, per query.

    All are of one shape. See `weights` in `attention_intervals`.
    """
    queries = len(attention.axis("query"))
    if isinstance(weights, Mapping):
        named = {str(name): _row_weights(attention, given, weights) for name, given in weights.items()}
        if len(named) < len(weights):
            raise _unusable(weights, "two of its names are written alike")
    else:
        given = _as_numbers(weights, weights)
        if given.ndim == 2 and len(given) != queries:
            named = {str(at): _row_weights(attention, c, weights) for at, c in enumerate(given)}
        else:
            named = {"weights": _row_weights(attention, given, weights)}
    if not named:
        raise InputError(f"weights={shortened(weights)} names no sum. Give a number for each key.")
    most = max(len(c) for c in named.values())
    return {name: c.expand(most, -1) for name, c in named.items()}


def _row_weights(attention: EffectiveAttention, given: object, weights: object) -> Float[Tensor, "_ key"]:
    """Return the numbers of one sum: (1, key), or (query, key)."""
    n = len(attention.keys)
    if isinstance(given, Mapping):
        c = torch.zeros(1, n, dtype=torch.float64)
        for key, number in given.items():
            value = as_float(number)
            if value is None:
                raise _unusable(weights, f"{shortened(number)} is not a number")
            c[0, list(attention.axis("key").sel(key).source_indices)] += value
    else:
        c = torch.atleast_2d(_as_numbers(given, weights))
    queries = len(attention.axis("query"))
    if c.shape[1] != n or len(c) not in (1, queries):
        raise _unusable(weights, f"expected {n} numbers, one for each key, or these for each of {queries} queries")
    if not c.isfinite().all():
        raise _unusable(weights, "its numbers must be finite")
    return c


def _as_numbers(given: object, weights: object) -> Float[Tensor, "..."]:
    dtype = None if hasattr(given, "dtype") else torch.float64  # lists would be read in single precision
    try:
        numbers = torch.as_tensor(given, dtype=dtype).detach().to_dense().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        numbers = None
    if numbers is None or numbers.is_complex() or numbers.ndim not in (1, 2):
        raise _unusable(weights, "expected real numbers, (key,), (quantity, key) or (query, key), or a mapping to them")
    return numbers.double()


def _unusable(weights: object, why: str) -> InputError:
    return InputError(f"weights={shortened(weights)} cannot be used: {why}.")


# Groups of keys whose weight is bounded together


def membership(groups: Sequence[Sequence[int]], n: int) -> Float[Tensor, "group key"]:
    """Return which of n keys belong to each group: 1 or 0."""
    members = torch.zeros(len(groups), n, dtype=torch.float64)
    for at, places in enumerate(groups):
        members[at, list(places)] = 1.0
    return members


def key_groups(attention: EffectiveAttention, groups: object) -> dict[str, list[int]]:
    """Return the positions of each group, by name.

    `groups` is a mapping from names to keys (positions or tokens, one or several), or one or several of "special" (all
    special tokens), "first" (the first token), "words" (each word, all of its pieces), "sentences" and "images" (each
    image, all of its tokens).
    """
    members: dict[str, list[int]] = {}
    if isinstance(groups, Mapping):
        keys = attention.axis("key")
        members = {str(name): sorted(keys.sel(wanted).source_indices) for name, wanted in groups.items()}
        if len(members) < len(groups):
            raise InputError(f"groups={shortened(groups)} cannot be used: two of its names are written alike.")
    elif isinstance(groups, str | Iterable):
        for name in known_names("groups", groups, NAMED):
            members |= _named_groups(attention, name)
    else:
        raise InputError(
            f"groups={shortened(groups)} cannot be used: expected a mapping from names to keys, or {NAMED}."
        )
    if not members:
        raise InputError(f"groups={shortened(groups)} names no keys of this text.")
    return members


def _named_groups(attention: EffectiveAttention, name: str) -> dict[str, list[int]]:
    text = attention.text_of("key")
    tokens = text["tokens"]
    special = [place for place, is_special in enumerate(text["special"]) if is_special]
    if name == "special":
        return {"special": special} if special else {}
    if name == "first":
        return {"first": [0]}
    if name == "images":
        return image_regions(attention)
    if name == "words":
        spans = text["words"]
        if not spans:
            raise InputError("groups='words': the tokens are not aligned with words. Pass a text, not token ids.")
        return {
            f"{readable_token(join_pieces(tokens, word)).strip()}@{word[0]}": word
            for word in word_groups(len(tokens), spans)
        }
    sentences: list[list[int]] = []
    current: list[int] = []
    for place, token in enumerate(tokens):
        if place not in special:
            current.append(place)
        if current and (place in special or readable_token(token).strip() in _ENDS or place == len(tokens) - 1):
            sentences.append(current)
            current = []
    return {f"sentence {number}": places for number, places in enumerate(sentences)}
