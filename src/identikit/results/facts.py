"""The facts of a Result: what is known of it beside its arrays."""

from copy import deepcopy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from identikit.results.measure import ReadOnly

if TYPE_CHECKING:
    from identikit.results.result import Result


class _ReadOnlyFacts:
    """The attribute that holds all facts by name: a copy of what a Result is made with, which cannot be set."""

    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:
        """Return the facts to be read; on the class, the attribute itself."""
        return self if result is None else MappingProxyType(vars(result)["about"])

    def __set__(self, result: "Result", given: Any) -> None:
        """Keep a copy: a Result's fields are set once, when it is made, to no facts if none are given."""
        vars(result)["about"] = {} if given is self else dict(given)


NO_FACTS: Any = _ReadOnlyFacts()
"""What a dataclass has in the place of a default: type checkers see a mapping."""


class Fact(ReadOnly):
    """An attribute of a Result that reads the fact of its own name, with the words that explain it."""

    def __init__(self, words: str):
        self.__doc__ = words

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:
        """Return the fact, a copy that may be changed; on the class, the attribute itself."""
        return self if result is None else deepcopy(result.about[self.name])
