"""One way to name layers, heads, positions and tokens, and one error for what is not there.

A whole number counts from 0, as the model does; a negative one counts from the end. A string is a token as people
read it, with `@` and its position where it occurs more than once. The marks that tokenizers put in front of words (Ġ,
▁) need not be typed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from identikit.checks import as_real, as_whole, is_collection, shortened
from identikit.errors import InputError
from identikit.texts.text import shown

Index = Any
"""A number, a token or a name, a slice, several of them, or None for all; `Axis.find` checks what users pass."""

_MARKS = "Ġ▁ "
_CANDIDATES = 8
_LABEL = 40  # characters of a label, where several are said


@dataclass(frozen=True)
class Axis:
    """One axis of a Result.

    - `name`: what it ranges over: layer, head, query, …
    - `values`: what each place is called: numbers as the model counts them, or names
    - `tokens`: the token at each place, on an axis of positions
    - `selected`: where they stand in what the Result reads from; None: nothing was left out
    - `single`: one place was chosen by number or name, so arrays have no such dimension
    """

    name: str
    values: tuple[Any, ...]
    tokens: tuple[str, ...] | None = None
    selected: tuple[int, ...] | None = None
    single: bool = False

    def __len__(self) -> int:
        return len(self.values)

    @property
    def places(self) -> tuple[int, ...]:
        """Where the values stand in what the Result reads from."""
        return tuple(range(len(self))) if self.selected is None else self.selected

    @property
    def plural(self) -> str:
        """What several places of the axis are called."""
        return f"{self.name[:-1]}ies" if self.name in ("query", "quantity") else f"{self.name}s"

    @property
    def counted(self) -> str:
        """How many places there are, in words: `1 layer`, `43 queries`."""
        return f"{len(self)} {self.name if len(self) == 1 else self.plural}"

    @property
    def label(self) -> str:
        """How the one place of a single axis is written."""
        return self.name_of(0)

    @property
    def short_label(self) -> str:
        """The label, cut where it is long."""
        return self.label if len(self.label) <= _LABEL else f"{self.label[: _LABEL - 1]}…"

    def name_of(self, place: int) -> str:
        """Return a token, with its position where it repeats; or the number or name."""
        if self.tokens is None:
            return str(self.values[place])
        token = _bare(self.tokens[place])
        repeats = sum(_bare(other) == token for other in self.tokens) > 1
        return f"{token}@{self.values[place]}" if repeats else token

    def summary(self) -> str:
        """Say what is on the axis: tokens or numbers, the first and the last."""
        ends = dict.fromkeys((self.name_of(0), self.name_of(len(self) - 1)))
        return f"{self.counted}, {' to '.join(ends)}"

    def find(self, wanted: Index) -> list[int]:
        """Return where the asked-for places stand on this axis; None is all of them."""
        if wanted is None:
            return list(range(len(self)))
        if not _is_several(wanted):
            return [self._one(wanted)]
        if isinstance(wanted, slice):
            try:
                places = list(range(len(self))[wanted])
            except (TypeError, ValueError):
                raise InputError(f"Selecting {self.name} {shortened(wanted)}: a slice takes whole numbers.") from None
        else:
            places = list(dict.fromkeys(map(self._one, wanted)))
        if not places:
            raise InputError(f"Selecting {self.name} {shortened(wanted)}: nothing is selected. {self._there()}")
        return places

    def sel(self, wanted: Index) -> "Axis":
        """Return the axis with only the asked-for places; selecting one by itself makes the axis single."""
        places = self.find(wanted)
        return replace(
            self,
            values=tuple(self.values[place] for place in places),
            tokens=None if self.tokens is None else tuple(self.tokens[place] for place in places),
            selected=tuple(self.places[place] for place in places),
            single=self.single or not _is_several(wanted),
        )

    def _one(self, wanted: object) -> int:
        if isinstance(wanted, str):
            return self._named(wanted)
        number = as_real(wanted) if isinstance(self.values[0], float) else as_whole(wanted)
        if number is None:
            expected = "a number" if self.tokens is None else "a number or a token"
            raise InputError(
                f"Selecting {self.name} {shortened(wanted)}: expected {expected}, not {type(wanted).__name__}. "
                f"{self._there()}"
            )
        if number in self.values:
            return self.values.index(number)
        if number < 0 and -len(self) <= number and isinstance(self.values[0], int):
            return len(self) + int(number)
        raise InputError(f"There is no {self.name} {shortened(number)}. {self._there()}")

    def _named(self, name: str) -> int:
        if name in self.values:
            return self.values.index(name)
        tokens = self.tokens or ()
        read = shown if name[:1] in _MARKS else _bare  # a token typed with its mark is meant literally
        places = [place for place, token in enumerate(tokens) if name in (token, read(token))]
        if len(places) == 1:
            return places[0]
        if places:
            raise InputError(
                f"The {self.name} {shortened(name)} occurs {len(places)} times. Say which: "
                f"{_listed(map(self.name_of, places))}."
            )
        token, _, position = name.rpartition("@")
        numbers = [str(value) for value in self.values]
        if not tokens or not token or position not in numbers:
            raise InputError(f"There is no {self.name} {shortened(name)}. {self._there()}")
        place = numbers.index(position)
        there = _bare(tokens[place])
        if there != _bare(token):
            raise InputError(f"There is no {self.name} {shortened(name)}: position {position} is {there!r}.")
        return place

    def _there(self) -> str:
        if self.tokens is not None:
            return f"The positions are {self.values[0]} to {self.values[-1]}: {_listed(map(_bare, self.tokens))}."
        if self.values == tuple(range(len(self))):
            return f"The {self.plural} are 0 to {len(self) - 1}, counted from 0."
        return f"There {'are' if len(self) > 1 else 'is'} {_listed(map(str, self.values))}."


def _is_several(wanted: Index) -> bool:
    return wanted is None or isinstance(wanted, slice) or is_collection(wanted)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f", … ({len(names)} in all)" if len(names) > _CANDIDATES else ""
    return ", ".join(names[:_CANDIDATES]) + more


@lru_cache(1 << 16)
def _bare(token: str) -> str:
    """Return a token as people read it, without the spaces around it."""
    return shown(token).strip() or token


def chosen(name: str, wanted: Index, count: int) -> tuple[int, ...]:
    """Return the layers, heads or positions out of `count` that a caller asked for; None is all of them."""
    return tuple(Axis(name, tuple(range(count))).find(wanted))


def one_of(name: str, wanted: Index, count: int) -> int:
    """Return the one layer, head or position that a caller asked for."""
    if _is_several(wanted):
        raise InputError(f"Selecting {name} {shortened(wanted)}: expected one, a number from 0 to {count - 1}.")
    return chosen(name, wanted, count)[0]
