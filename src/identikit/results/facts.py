"""The facts of a Result: what is known of it beside its arrays."""

from copy import deepcopy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from identikit.results.measure import ReadOnly

if TYPE_CHECKING:
    from identikit.results.result import Result


class _ReadOnlyFacts:
    """The attribute `about` of a Result: a copy of the facts that it was made with, which cannot be changed."""

    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:
        """Return a view of the facts; on the class, the attribute itself."""
        return self if result is None else MappingProxyType(vars(result)["about"])

    def __set__(self, result: "Result", facts: Any) -> None:
        """Keep a copy; a Result sets its fields once, when it is made, and passes this object if it has no facts."""
        vars(result)["about"] = {} if facts is self else dict(facts)


NO_FACTS: Any = _ReadOnlyFacts()
"""The default of `about`: type checkers see a mapping."""


class Fact(ReadOnly):
    """An attribute of a Result that reads the fact of its own name, with the words that explain it."""

    def __init__(self, words: str):
        self.__doc__ = words

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, result: "Result | None", owner: type | None = None) -> Any:
        """Return the fact, a copy that may be changed; on the class, the attribute itself."""
        return self if result is None else deepcopy(result.about[self.name])
