"""The results of several texts: a list with one table, from functions of one text or of a list."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload, runtime_checkable

from identikit.results.result import Result

if TYPE_CHECKING:
    from pandas import DataFrame

R = TypeVar("R", bound=Result)
_Options = ParamSpec("_Options")
_Reader = TypeVar("_Reader", contravariant=True)
_Found = TypeVar("_Found", bound=Result, covariant=True)


class Results(list[R]):
    """The results of a list of texts, in its order: a list that also makes one table of all of them."""

    def to_frame(self, *names: str) -> "DataFrame":
        """Return the tables of all results as one; `text` is the number of the text in the list, counted from 0."""
        from pandas import concat

        frames = [result.to_frame(*names) for result in self]
        return concat(frames, keys=range(len(frames)), names=["text"]).reset_index("text").reset_index(drop=True)


@runtime_checkable
class OfTexts(Protocol[_Reader, _Options, _Found]):
    """A function of a model and a text that gives one result, and of a list of texts a list of results."""

    # The kinds of text overlap on purpose: token ids are a list too, and are one text.
    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]
        self, model: _Reader, text: list[int], *args: _Options.args, **options: _Options.kwargs
    ) -> _Found: ...
    @overload
    def __call__(  # pyright: ignore[reportOverlappingOverload]
        self, model: _Reader, text: list[Any], *args: _Options.args, **options: _Options.kwargs
    ) -> Results[_Found]: ...
    @overload
    def __call__(
        self, model: _Reader, text: str | tuple[Any, ...], *args: _Options.args, **options: _Options.kwargs
    ) -> _Found: ...
    @overload
    def __call__(self, model: _Reader, text: Any, *args: _Options.args, **options: _Options.kwargs) -> Any: ...


def of_texts(function: Callable[Concatenate[_Reader, Any, _Options], R | Results[R]]) -> OfTexts[_Reader, _Options, R]:
    """Tell type checkers that a function returns a list for a list of texts, and one result otherwise."""
    return cast(Any, function)
