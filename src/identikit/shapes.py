"""Names of axes, and shape annotations that cost nothing at run time.

Axis order is always ``batch layer head query key``. The names used in annotations:

===========  ================================================================
``batch``    texts in a batch
``layer``    blocks of the model, counted from 0
``head``     attention heads; ``kv_head`` where keys and values are shared
``query``    positions that attend; ``key`` positions attended to; ``n`` both
``d``        width of the hidden vectors; ``d_k`` of queries and keys;
             ``d_v`` of a head's values
===========  ================================================================

Masks are bool and True means *keep*. Without jaxtyping installed (bare GPU images) the annotations degrade to nothing.
"""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Unchecked:
            """Stands in for a jaxtyping dtype: ``Float[Tensor, "n d"]`` is then simply ``Tensor``."""

            def __class_getitem__(cls, item):
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int", "Tensor"]
