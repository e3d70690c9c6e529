"""A measure is declared once: its axes, its range, its words, and the function that computes it.

    class EffectiveAttention(Result):

        @measure("layer head query", range="0 to d_v", over_texts="mean")
        @staticmethod
        def rank(layer: Layer, at: At) -> Int[Tensor, "head query"]:
            \"\"\"Rank of the values that each row sees.\"\"\"

Everything else follows from the declaration: the attribute of the Result and its documentation, what tables, plots and
pages call it, how pieces are gathered into words, what a missing number means, and its column in the tables of a
dataset. It is computed when its name is read, and only at the selected indices.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from identikit.shapes import Tensor

if TYPE_CHECKING:
    from identikit.results.result import Result

NOT_FINITE = "It is not a finite number."


class ReadOnly:
    """An attribute of a Result that cannot be set, since results do not change."""

    def __set__(self, result: "Result", value: object) -> None:
        raise AttributeError(f"The attributes of a {result.kind} result cannot be set.")


@dataclass(eq=False)
class Measure(ReadOnly):
    """An array of a Result, declared in its class: its axes, its meaning, and how it is computed.

    On the class the attribute is the declaration; on a Result it reads the array.

    - `axes`: the names of its axes; one that the Result does not have is read whole
    - `meaning`: what it is, in words; `label`: the same in two or three, for axes and menus
    - `compute`: makes it from a part of the Result's source; None: it is stored
    - `name`: what the attribute, tables and columns call it
    - `range`: what values it can have, in words; `missing`: why entries can be missing (NaN)
    - `words`: how pieces are gathered into words along axes of tokens: "sum", "mean", "all" or "min"; None: it exists
      only for pieces
    - `over_texts`: how a dataset's table of heads gathers it over a head's rows, "mean"; None: it has no column
    - `on_request`: it is costly, and made only when it is read by name
    - `owner`: the class that declares it; a pickle holds only that and the name
    """

    axes: tuple[str, ...]
    meaning: str
    compute: Callable[..., Tensor] | None = None
    name: str = ""
    label: str = ""
    range: str = "any number"
    missing: str = NOT_FINITE
    words: Mapping[str, str] | None = None
    over_texts: str | None = None
    on_request: bool = False
    owner: type | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner
        self.name = self.name or name
        self.label = self.label or name.strip("_").replace("_", " ")
        self.__doc__ = f"{self.meaning.rstrip('.')}: ({', '.join(self.axes)})."

    @overload
    def __get__(self, result: None, owner: type) -> "Measure": ...
    @overload
    def __get__(self, result: "Result", owner: type) -> Tensor: ...
    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:
        """Return the array; on the class, the declaration."""
        return self if result is None else result.array(self.name)

    def __reduce__(self) -> tuple[Callable[..., "Measure"], tuple[type | None, str]]:
        """Let a pickle find the measure again where it is declared: its function is not found by its own name."""
        return _declared, (self.owner, self.name)

    @property
    def limits(self) -> tuple[float, float] | None:
        """The least and the greatest value, where the range names both as numbers."""
        least, to, greatest = self.range.replace("−", "-").partition(" to ")
        try:
            return (float(least), float(greatest)) if to else None
        except ValueError:
            return None


Attribute = Measure


class OptionalAttribute(Measure):
    """A measure that some Results of a class do not have; the attribute is then None."""

    @overload
    def __get__(self, result: None, owner: type) -> "OptionalAttribute": ...
    @overload
    def __get__(self, result: "Result", owner: type) -> Tensor | None: ...
    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:  # pyright: ignore
        """Return the array, or None; on the class, the declaration."""
        if result is not None and self.name not in result.source.dims:
            return None
        return super().__get__(result, owner or type(result))  # pyright: ignore


class Declared(TypedDict, total=False):
    """The options of a declaration; see `Measure`."""

    name: str
    label: str
    range: str
    missing: str
    words: Mapping[str, str]
    over_texts: str
    on_request: bool


def measure(axes: str, **declared: Unpack[Declared]) -> Callable[[Callable[..., Tensor]], Measure]:
    """Declare a measure by the function that computes it, whose docstring says what it is; see `Measure`."""

    def declare(compute: Callable[..., Tensor]) -> Measure:
        function = compute.__func__ if isinstance(compute, staticmethod) else compute
        return Measure(tuple(axes.split()), inspect.cleandoc(function.__doc__ or ""), function, **declared)

    return declare


def stored_array(axes: str, meaning: str, **declared: Unpack[Declared]) -> Measure:
    """Declare an array that a Result is given when it is made."""
    return Measure(tuple(axes.split()), meaning, **declared)


def optional_array(axes: str, meaning: str, **declared: Unpack[Declared]) -> OptionalAttribute:
    """Declare an array that only some Results of a class have; of others it is None."""
    return OptionalAttribute(tuple(axes.split()), meaning, **declared)


def _declared(owner: type, name: str) -> Measure:
    return declared_in(owner)[name]


def declared_in(owner: type) -> dict[str, Measure]:
    """Return the measures that a class and its bases declare, by name."""
    declared: dict[str, Measure] = {}
    for base in reversed(owner.__mro__):
        declared |= {value.name: value for value in vars(base).values() if isinstance(value, Measure)}
    return declared
