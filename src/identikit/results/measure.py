"""A measure is declared once: its axes, its range, its words, and the function that computes it.

    class EffectiveAttention(Result):

        @measure("layer head query", range="0 to d_v", over_texts="mean")
        @staticmethod
        def rank(layer: Layer, at: At) -> Int[Tensor, "head query"]:
            \"\"\"Rank of the values that each row sees.\"\"\"

Everything else follows from the declaration: the attribute of the Result and its documentation, what tables, plots and
pages call it, how pieces are gathered into words, what a missing number means, and its column in the tables of a
dataset. It is computed when it is asked for by name, and only at the places that are selected.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from identikit.shapes import Tensor

if TYPE_CHECKING:
    from identikit.results.result import Result

NOT_FINITE = "It is not a finite number."


@dataclass(frozen=True)
class Measure:
    """An array of a Result: what it is over, what it means, and how it comes about.

    - `name`: what the attribute, tables and columns call it
    - `axes`: the names of its axes; one that the Result does not have is read whole
    - `meaning`: what it is, in words; `label`: the same in two or three, for axes and menus
    - `range`: what values it can have, in words; `missing`: why entries can be missing (NaN)
    - `words`: how pieces are gathered into words along axes of tokens: "sum", "mean", "all" or "min"; None: it exists
      only for pieces
    - `over_texts`: how a dataset's table of heads gathers it over a head's rows, "mean"; None: it has no column
    - `on_request`: it is costly, and made only where it is asked for by name
    - `compute`: makes it from a part of the Result's source; None: it is held
    - `owner`: the class that declares it; a pickle holds only that and the name
    """

    name: str
    axes: tuple[str, ...]
    meaning: str
    label: str
    range: str = "any number"
    missing: str = NOT_FINITE
    words: Mapping[str, str] | None = None
    over_texts: str | None = None
    on_request: bool = False
    compute: Callable[..., Tensor] | None = None
    owner: type | None = None

    def __reduce__(self) -> tuple[Callable[..., "Measure"], tuple[type | None, str]]:
        """Let a pickle find the measure again where it is declared: its function is not found by its own name."""
        return _declared, (self.owner, self.name)

    @property
    def limits(self) -> tuple[float, float] | None:
        """The least and the greatest value, where the range names both as numbers."""
        least, to, most = self.range.replace("−", "-").partition(" to ")
        try:
            return (float(least), float(most)) if to else None
        except ValueError:
            return None


class Declared(TypedDict, total=False):
    """What a declaration can say beside axes and meaning; see `Measure`."""

    name: str
    label: str
    range: str
    missing: str
    words: Mapping[str, str]
    over_texts: str
    on_request: bool


class ReadOnly:
    """An attribute of a Result that cannot be set: what a result says stays as it is."""

    def __set__(self, result: "Result", value: object) -> None:
        raise AttributeError(f"The attributes of a {result.kind} result cannot be set.")


class Attribute(ReadOnly):
    """Where a Result class declares a measure; on a Result, the attribute reads the array."""

    def __init__(self, axes: str, compute: Callable[..., Tensor] | None, meaning: str, declared: Declared):
        self.axes = tuple(axes.split())
        self.compute = compute
        self.meaning = meaning
        self.declared = declared
        self.__doc__ = f"{meaning.rstrip('.')}: ({', '.join(self.axes)})."

    def __set_name__(self, owner: type, name: str) -> None:
        label = name.strip("_").replace("_", " ")
        declared: dict[str, Any] = {"name": name, "label": label, **self.declared}
        self.measure = Measure(axes=self.axes, meaning=self.meaning, compute=self.compute, owner=owner, **declared)

    @overload
    def __get__(self, result: None, owner: type) -> "Attribute": ...
    @overload
    def __get__(self, result: "Result", owner: type) -> Tensor: ...
    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:
        """Return the array; on the class, the attribute itself."""
        return self if result is None else result.array(self.measure.name)


class OptionalAttribute(Attribute):
    """The same for an array that some Results of a class do not have; the attribute is then None."""

    @overload
    def __get__(self, result: None, owner: type) -> "OptionalAttribute": ...
    @overload
    def __get__(self, result: "Result", owner: type) -> Tensor | None: ...
    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:  # pyright: ignore
        """Return the array, or None; on the class, the attribute itself."""
        if result is not None and self.measure.name not in result.source.dims:
            return None
        return super().__get__(result, owner or type(result))  # pyright: ignore


def measure(axes: str, **declared: Unpack[Declared]) -> Callable[[Callable[..., Tensor]], Attribute]:
    """Declare a measure by the function that computes it, whose docstring says what it is; see `Measure`."""

    def declare(compute: Callable[..., Tensor]) -> Attribute:
        function = compute.__func__ if isinstance(compute, staticmethod) else compute
        return Attribute(axes, function, inspect.cleandoc(function.__doc__ or ""), declared)

    return declare


def held(axes: str, meaning: str, **declared: Unpack[Declared]) -> Attribute:
    """Declare an array that a Result simply holds."""
    return Attribute(axes, None, meaning, declared)


def sometimes_held(axes: str, meaning: str, **declared: Unpack[Declared]) -> OptionalAttribute:
    """Declare an array that some Results of a class hold."""
    return OptionalAttribute(axes, None, meaning, declared)


def _declared(owner: type, name: str) -> Measure:
    return declared_in(owner)[name]


def declared_in(owner: type) -> dict[str, Measure]:
    """Return the measures that a class and its bases declare, by name."""
    found: dict[str, Measure] = {}
    for base in reversed(owner.__mro__):
        for value in vars(base).values():
            if isinstance(value, Attribute):
                found[value.measure.name] = value.measure
    return found
