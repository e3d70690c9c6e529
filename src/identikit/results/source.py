"""Where the arrays of a Result come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from identikit.shapes import Tensor


@runtime_checkable
class Source(Protocol):
    """Where a Result's arrays come from: `dims` names the axes of each, `read` makes one at the places asked for."""

    @property
    def dims(self) -> Mapping[str, tuple[str, ...]]:
        """The axes of each array."""
        ...

    def read(self, name: str, places: Mapping[str, Sequence[int]]) -> Tensor:
        """Return an array at these places of its axes, all of its dimensions kept; others may be named too.

        It is a copy: the caller may write to it without changing the source.
        """
        ...


@dataclass(frozen=True)
class StoredArrays:
    """Arrays that are simply there."""

    arrays: Mapping[str, Tensor]
    dims: Mapping[str, tuple[str, ...]]

    @torch.inference_mode(False)  # a copy that is made in inference mode could not be used outside of it
    def read(self, name: str, places: Mapping[str, Sequence[int]]) -> Tensor:
        """Return a copy of an array at these places of its axes."""
        found = self.arrays[name].clone()
        for axis, dim in enumerate(self.dims[name]):
            wanted = places.get(dim)
            if wanted is not None and list(wanted) != list(range(found.shape[axis])):
                found = found.index_select(axis, torch.tensor(wanted, dtype=torch.long, device=found.device))
        return found
