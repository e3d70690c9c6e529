"""The facts of a Result: what is known of it beside its arrays."""

from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

from identikit.results.measure import ReadOnly

if TYPE_CHECKING:
    from identikit.results.result import Result


class Facts:
    """The attribute that holds all facts by name: a copy of what a Result is made with, which cannot be set."""

    @overload
    def __get__(self, result: None, owner: type) -> "Facts": ...
    @overload
    def __get__(self, result: "Result", owner: type | None = None) -> Mapping[str, Any]: ...
    def __get__(self, result: "Result | None", owner: type | None = None) -> "Facts | Mapping[str, Any]":
        """Return the facts to be read; on the class, what a Result has that is made without."""
        return self if result is None else MappingProxyType(vars(result)["about"])

    def __set__(self, result: "Result", given: "Facts | Mapping[str, Any]") -> None:
        """Keep a copy: a Result's fields are set once, when it is made."""
        vars(result)["about"] = {} if isinstance(given, Facts) else dict(given)


class Fact(ReadOnly):
    """An attribute of a Result that reads the fact of its own name, with the words that explain it."""

    def __init__(self, words: str):
        self.__doc__ = words

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:
        """Return the fact, a copy that may be changed; on the class, the attribute itself."""
        return self if result is None else deepcopy(result.about[self.name])
