"""One way to name layers, heads, positions and tokens, and one error for what is not there.

A whole number counts from 0, as the model does; a negative one counts from the end. A string is a token as people
read it, with `@` and its position where it occurs more than once. The marks that tokenizers put in front of words (Ġ,
▁) need not be typed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from identikit.checks import as_float, as_integer, is_collection, shortened
from identikit.errors import InputError
from identikit.texts.text import readable_token

Index = Any
"""A number, a token or a name, a slice, several of them, or None for all; `Axis.indices_of` checks what users pass."""

_MARKS = "Ġ▁ "
_MOST_CANDIDATES = 8  # that an error lists
_LABEL = 40  # characters of a short label


@dataclass(frozen=True)
class Axis:
    """One axis of a Result.

    - `name`: what it ranges over: layer, head, query, …
    - `values`: what each entry is called: numbers as the model counts them, or names
    - `tokens`: the token of each entry, on an axis of positions
    - `selected`: the index of each entry in the Result's source; None: nothing was left out
    - `single`: one entry was selected by number or name, so arrays have no such dimension
    """

    name: str
    values: tuple[Any, ...]
    tokens: tuple[str, ...] | None = None
    selected: tuple[int, ...] | None = None
    single: bool = False

    def __len__(self) -> int:
        return len(self.values)

    @property
    def source_indices(self) -> tuple[int, ...]:
        """The index of each entry in the Result's source."""
        return tuple(range(len(self))) if self.selected is None else self.selected

    @property
    def plural(self) -> str:
        """The plural of the name."""
        return f"{self.name[:-1]}ies" if self.name in ("query", "quantity") else f"{self.name}s"

    @property
    def counted(self) -> str:
        """How many entries there are, in words: `1 layer`, `43 queries`."""
        return f"{len(self)} {self.name if len(self) == 1 else self.plural}"

    @property
    def label(self) -> str:
        """The name of the only entry of a single axis."""
        return self.name_of(0)

    @property
    def short_label(self) -> str:
        """The label, cut where it is long."""
        return self.label if len(self.label) <= _LABEL else f"{self.label[: _LABEL - 1]}…"

    def name_of(self, index: int) -> str:
        """Return a token, with its position where it repeats; or the number or name."""
        if self.tokens is None:
            return str(self.values[index])
        token = _bare(self.tokens[index])
        repeats = sum(_bare(other) == token for other in self.tokens) > 1
        return f"{token}@{self.values[index]}" if repeats else token

    def summary(self) -> str:
        """Return what is on the axis: tokens or numbers, the first and the last."""
        ends = dict.fromkeys((self.name_of(0), self.name_of(len(self) - 1)))
        return f"{self.counted}, {' to '.join(ends)}"

    def indices_of(self, selection: Index) -> list[int]:
        """Return the indices of the selected entries on this axis; None selects all."""
        if selection is None:
            return list(range(len(self)))
        if not _is_several(selection):
            return [self._index_of(selection)]
        if isinstance(selection, slice):
            try:
                indices = list(range(len(self))[selection])
            except (TypeError, ValueError):
                raise InputError(
                    f"Selecting {self.name} {shortened(selection)}: a slice takes whole numbers."
                ) from None
        else:
            indices = list(dict.fromkeys(map(self._index_of, selection)))
        if not indices:
            raise InputError(f"Selecting {self.name} {shortened(selection)}: nothing is selected. {self._candidates()}")
        return indices

    def sel(self, selection: Index) -> "Axis":
        """Return the axis with only the selected entries; selecting one by itself makes the axis single."""
        indices = self.indices_of(selection)
        return replace(
            self,
            values=tuple(self.values[index] for index in indices),
            tokens=None if self.tokens is None else tuple(self.tokens[index] for index in indices),
            selected=tuple(self.source_indices[index] for index in indices),
            single=self.single or not _is_several(selection),
        )

    def _index_of(self, entry: object) -> int:
        if isinstance(entry, str):
            return self._index_of_name(entry)
        number = as_float(entry) if isinstance(self.values[0], float) else as_integer(entry)
        if number is None:
            expected = "a number" if self.tokens is None else "a number or a token"
            raise InputError(
                f"Selecting {self.name} {shortened(entry)}: expected {expected}, not {type(entry).__name__}. "
                f"{self._candidates()}"
            )
        if number in self.values:
            return self.values.index(number)
        if number < 0 and -len(self) <= number and isinstance(self.values[0], int):
            return len(self) + int(number)
        raise InputError(f"There is no {self.name} {shortened(number)}. {self._candidates()}")

    def _index_of_name(self, name: str) -> int:
        if name in self.values:
            return self.values.index(name)
        tokens = self.tokens or ()
        read = readable_token if name[:1] in _MARKS else _bare  # a token typed with its mark is meant literally
        matches = [index for index, token in enumerate(tokens) if name in (token, read(token))]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise InputError(
                f"The {self.name} {shortened(name)} occurs {len(matches)} times. Say which: "
                f"{_listed(map(self.name_of, matches))}."
            )
        token, _, position = name.rpartition("@")
        positions = [str(value) for value in self.values]
        if not tokens or not token or position not in positions:
            raise InputError(f"There is no {self.name} {shortened(name)}. {self._candidates()}")
        index = positions.index(position)
        actual = _bare(tokens[index])
        if actual != _bare(token):
            raise InputError(f"There is no {self.name} {shortened(name)}: position {position} is {actual!r}.")
        return index

    def _candidates(self) -> str:
        if self.tokens is not None:
            return f"The positions are {self.values[0]} to {self.values[-1]}: {_listed(map(_bare, self.tokens))}."
        if self.values == tuple(range(len(self))):
            return f"The {self.plural} are 0 to {len(self) - 1}, counted from 0."
        return f"There {'are' if len(self) > 1 else 'is'} {_listed(map(str, self.values))}."


def _is_several(selection: Index) -> bool:
    return selection is None or isinstance(selection, slice) or is_collection(selection)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    total = f", … ({len(names)} in all)" if len(names) > _MOST_CANDIDATES else ""
    return ", ".join(names[:_MOST_CANDIDATES]) + total


@lru_cache(1 << 16)
def _bare(token: str) -> str:
    """Return a token as people read it, without the spaces around it."""
    return readable_token(token).strip() or token


def selected_indices(name: str, selection: Index, count: int) -> tuple[int, ...]:
    """Return the selected layers, heads or positions out of `count`; None selects all."""
    return tuple(Axis(name, tuple(range(count))).indices_of(selection))


def selected_index(name: str, selection: Index, count: int) -> int:
    """Return the one selected layer, head or position."""
    if _is_several(selection):
        raise InputError(f"Selecting {name} {shortened(selection)}: expected one, a number from 0 to {count - 1}.")
    return selected_indices(name, selection, count)[0]
