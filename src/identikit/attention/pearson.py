"""The correlation of raw and effective attention, as a callable."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from identikit.checks import known_name
from identikit.errors import InputError
from identikit.maths import measures
from identikit.models.isolation import standard_torch_state
from identikit.shapes import Tensor

if TYPE_CHECKING:
    from identikit.attention.result import EffectiveAttention

_POOLS = ("layer", "head", "visible")
_CALL = 'call it: pearson() for one number, or pearson(by="layer"), "head" or "visible"'


@dataclass(frozen=True, repr=False)
class Pearson:
    """The correlation of raw and effective attention over the visible entries of the selected rows, when called.

    `attention` is what it is computed from. As it stands among arrays, using it uncalled says how to call it.
    """

    attention: "EffectiveAttention"

    @standard_torch_state()
    def __call__(self, by: str | None = None) -> Tensor:
        """Return the correlation: overall one number over all layers and heads.

        `by="layer"` and `by="head"` give one for each layer or head; `by="visible"` gives entry c over the rows that
        see c keys, NaN where no row does (rows without a null space correlate perfectly, and inflate the pool).
        """
        if by is not None:
            known_name("pearson(by", by, _POOLS)
        attention = self.attention
        if "_pearson_sums" not in attention.source.dims:
            raise InputError("The correlation exists for pieces, not for words or differences: use the whole result.")
        sums = measures.PearsonSums(*attention.read("_pearson_sums").unbind(-1))
        if by is None:
            return measures.pearson(sums.pooled())
        if by == "visible":
            correlations = []
            for n in range(len(attention.keys) + 1):
                group = measures.PearsonSums(*(array[sums.entries.long() == n] for array in sums))
                correlations.append(measures.pearson(group.pooled()))
            return torch.stack(correlations)
        heads = sums.pooled(-1)
        pooled = heads if by == "head" else heads.pooled(-1)
        single = [attention.axis(name).single for name in ("layer", "head")[: pooled.entries.ndim]]
        return measures.pearson(pooled)[tuple(0 if alone else slice(None) for alone in single)]

    def __repr__(self) -> str:
        return f"<correlation of raw and effective attention; {_CALL}>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"pearson has no {name!r} before it is called; {_CALL}.")
