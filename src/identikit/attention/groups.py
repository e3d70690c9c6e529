"""Groups of keys whose weight is bounded together: special tokens, words, sentences, or any list."""

from collections.abc import Iterable, Mapping
from typing import Any

from identikit.attention.result import EffectiveAttention
from identikit.checks import known_names, shortened
from identikit.errors import InputError
from identikit.results.gathered import joined, word_groups
from identikit.texts.text import shown

NAMED = ("special", "first", "words", "sentences")
_ENDS = (".", "!", "?", "。", "！", "？")


def key_groups(attention: EffectiveAttention, groups: Any) -> dict[str, list[int]]:
    """Return the positions of each group, by name.

    `groups` is a mapping from names to keys (positions or tokens, one or several), or one or several of "special" (all
    special tokens), "first" (the first token), "words" (each word, all of its pieces) and "sentences".
    """
    tokens, about = attention.tokens, attention.about
    if isinstance(groups, Mapping):
        keys = attention.axis("key")
        found = {str(name): sorted(keys.sel(wanted).places) for name, wanted in groups.items()}
    elif isinstance(groups, str | Iterable):
        found = {}
        for name in known_names("groups", groups, NAMED):
            found |= _named(name, tokens, about)
    else:
        raise InputError(
            f"groups={shortened(groups)} cannot be used: expected a mapping from names to keys, or {NAMED}."
        )
    if not found:
        raise InputError(f"groups={shortened(groups)} names no keys of this text.")
    return found


def _named(name: str, tokens: tuple[str, ...], about: Mapping[str, Any]) -> dict[str, list[int]]:
    special = [place for place, is_special in enumerate(about["special"]) if is_special]
    if name == "special":
        return {"special": special} if special else {}
    if name == "first":
        return {"first": [0]}
    if name == "words":
        words = word_groups(len(tokens), about["words"] or ())
        if not about["words"]:
            raise InputError("groups='words': the tokens are not aligned with words. Pass a text, not token ids.")
        return {f"{shown(joined(tokens, word)).strip()}@{word[0]}": word for word in words}
    sentences, current = [], []
    for place, token in enumerate(tokens):
        if place not in special:
            current.append(place)
        if current and (place in special or shown(token).strip() in _ENDS or place == len(tokens) - 1):
            sentences.append(current)
            current = []
    return {f"sentence {number}": places for number, places in enumerate(sentences)}
