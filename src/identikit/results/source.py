"""Where the arrays of a Result come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from identikit.shapes import Tensor


@runtime_checkable
class Source(Protocol):
    """Where a Result's arrays come from: `dims` names the axes of each, `read` returns one at selected indices."""

    @property
    def dims(self) -> Mapping[str, tuple[str, ...]]:
        """The axes of each array."""
        ...

    def read(self, name: str, indices: Mapping[str, Sequence[int]], /) -> Tensor:
        """Return an array at these indices of its axes, all of its dimensions kept; other axes may be named too.

        It is a copy: the caller may write to it without changing the source.
        """
        ...


@dataclass(frozen=True)
class StoredArrays:
    """Arrays in memory."""

    arrays: Mapping[str, Tensor]
    dims: Mapping[str, tuple[str, ...]]

    @torch.inference_mode(False)  # a copy that is made in inference mode could not be used outside of it
    def read(self, name: str, indices: Mapping[str, Sequence[int]], /) -> Tensor:
        """Return a copy of an array at these indices of its axes."""
        array = self.arrays[name].clone()
        for dim, axis in enumerate(self.dims[name]):
            selection = indices.get(axis)
            if selection is not None and list(selection) != list(range(array.shape[dim])):
                array = array.index_select(dim, torch.tensor(selection, dtype=torch.long, device=array.device))
        return array
