"""How plots read a Result: only the arrays that they draw, with a clear message if an axis has to be selected."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from identikit.checks import shortened
from identikit.errors import InputError
from identikit.plots.forms import Panels, new_axes
from identikit.plots.style import house_style
from identikit.results.axis import Axis
from identikit.results.result import Result
from identikit.texts.text import readable_token


def check_drawable(plot: str, result: Result, names: Sequence[str], *, axes: Sequence[str]) -> None:
    """Refuse a result that lacks one of the arrays `names`, or one where they have axes left other than `axes`."""
    if not isinstance(result, Result):
        raise InputError(f"Cannot draw {plot} of {shortened(result)}: expected a Result.")
    for name in names:
        if name not in result.arrays:
            raise InputError(
                f"Cannot draw {plot}: it needs {name!r}, and {result.kind} has only {', '.join(result.arrays)}."
            )
    dims = {dim for name in names for dim in result.source.dims[name]}
    extra = [axis for axis in result.axes if axis.name in dims and not axis.single and axis.name not in axes]
    if extra:
        examples = ", ".join(f"{axis.name}={axis.values[len(axis) // 2]!r}" for axis in extra)
        raise InputError(
            f"Cannot draw {plot}: the result still has the {'axis' if len(extra) == 1 else 'axes'} "
            f"{' and '.join(axis.name for axis in extra)}. Select one of each first, for example "
            f"result.sel({examples})."
        )


def read_table(result: Result, name: str, *dims: str) -> NDArray[Any]:
    """Return one of a result's arrays with these axes in this order; all others must have been selected from."""
    result.refuse_large([name])
    values = result.read(name).detach().cpu()
    order = sorted(result.source.dims[name], key=lambda dim: dims.index(dim) if dim in dims else len(dims))
    values = values.permute([result.source.dims[name].index(dim) for dim in order])
    values = values.reshape(values.shape[: len(dims)])
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def tokens_of(axis: Axis) -> list[str]:
    """Return the tokens along an axis, without the spaces around them."""
    return [readable_token(token).strip() or "␣" for token in axis.tokens or ()]


def axis_labels(axis: Axis) -> list[str]:
    """Return the tokens along an axis, with its position where one repeats, as `sel` takes it: `the@24`; or names."""
    if axis.tokens is None:
        return list(map(str, axis.values))
    tokens = tokens_of(axis)
    count = Counter(tokens)
    positions = zip(tokens, axis.values, strict=True)
    return [f"{token}@{position}" if count[token] > 1 else token for token, position in positions]


def head_of(result: Result) -> str:
    """Return the name of a result's head, such as L4H5."""
    return f"L{result.axis('layer').label}H{result.axis('head').label}"


@contextmanager
def drawing(ax: Axes | None, width: float, height: float) -> Iterator[Axes]:
    """Draw in the house style on the user's axes, or on those of a new figure of this size in inches."""
    if ax is not None and not isinstance(ax, Axes):
        raise InputError(f"ax={shortened(ax)} cannot be used: expected axes of matplotlib.")
    with house_style():
        yield new_axes(width, height)[0] if ax is None else ax


def panels_of(plot: str, axes: Iterable[Axes], count: int) -> Panels:
    """Return the user's axes for a plot of so many panels, row after row."""
    panels = np.array([*axes], dtype=object).reshape(-1).view(Panels)
    if len(panels) != count:
        raise InputError(f"Cannot draw {plot}: axes= has {len(panels)} axes, and {count} are needed.")
    return panels
