"""How plots read a Result: through its labelled dataset, with a clear word where axes are left to select."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from identikit.checks import shortened
from identikit.errors import InputError
from identikit.plots.forms import new_axes

if TYPE_CHECKING:
    from xarray import Dataset


@runtime_checkable
class Drawable(Protocol):
    """Any Result."""

    def to_xarray(self) -> "Dataset":
        """Return the numbers with named axes."""
        ...


def read(plot: str, result: Drawable, names: Sequence[str], *, axes: Sequence[str]) -> "Dataset":
    """Return the dataset of a result that has the variables `names`, with no axes left but `axes`."""
    if not isinstance(result, Drawable):
        raise InputError(f"Cannot draw {plot} of {shortened(result)}: expected a Result.")
    data = result.to_xarray()
    for name in names:
        if name not in data:
            kind, there = data.attrs.get("kind", "this result"), ", ".join(map(str, data.data_vars))
            raise InputError(f"Cannot draw {plot}: it needs {name!r}, and {kind} has only {there}.")
    left = [str(dim) for dim in data[list(names)].dims if dim not in axes]
    if left:
        ask = ", ".join(f"{dim}={_example(data, dim)!r}" for dim in left)
        axis = "axis" if len(left) == 1 else "axes"
        raise InputError(
            f"Cannot draw {plot}: the result still has the {axis} {' and '.join(left)}. "
            f"Select one of each first, for example result.sel({ask})."
        )
    return data


def _example(data: "Dataset", dim: str) -> Any:
    return data[dim].to_numpy()[data.sizes[dim] // 2].item()


def table(data: "Dataset", name: str, *dims: str) -> NDArray[Any]:
    """Return a variable as an array with these axes in this order; one that was selected away has length 1."""
    values = data[name]
    missing = [dim for dim in dims if dim not in values.dims]
    return values.expand_dims(missing).transpose(*dims).to_numpy()


def tokens_of(data: "Dataset", dim: str) -> list[str]:
    """Return the tokens along an axis, without the spaces around them."""
    return [str(token).strip() or "␣" for token in np.atleast_1d(data[f"{dim}_token"].to_numpy())]


def places_of(data: "Dataset", dim: str) -> list[int]:
    """Return the numbers along an axis: positions, layers or heads."""
    return [int(place) for place in np.atleast_1d(data[dim].to_numpy())]


def named(data: "Dataset", dim: str) -> list[str]:
    """Return the tokens along an axis; where one repeats, with its position, as `sel` takes it: `the@24`."""
    tokens = tokens_of(data, dim)
    count = Counter(tokens)
    places = zip(tokens, places_of(data, dim), strict=True)
    return [f"{token}@{place}" if count[token] > 1 else token for token, place in places]


def head_of(data: "Dataset") -> str:
    """Return the head that a result is of, as L4H5."""
    return f"L{int(data['layer'])}H{int(data['head'])}"


def axes_for(ax: Axes | None, width: float, height: float) -> Axes:
    """Return the axes that were given, or those of a new figure of this size in inches."""
    if ax is not None and not isinstance(ax, Axes):
        raise InputError(f"ax={shortened(ax)} cannot be used: expected axes of matplotlib.")
    return new_axes(width, height)[0] if ax is None else ax
