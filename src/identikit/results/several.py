"""The results of several texts as one table."""

from typing import TYPE_CHECKING, TypeVar

from identikit.results.result import Result

if TYPE_CHECKING:
    from pandas import DataFrame

R = TypeVar("R", bound=Result)


class Results(list[R]):
    """The results of a list of texts, in its order: a list that also makes one table of all of them."""

    def to_frame(self, *names: str) -> "DataFrame":
        """Return the tables of all results as one; `text` is the number of the text in the list, counted from 0."""
        from pandas import concat

        frames = [result.to_frame(*names) for result in self]
        return concat(frames, keys=range(len(frames)), names=["text"]).reset_index("text").reset_index(drop=True)
