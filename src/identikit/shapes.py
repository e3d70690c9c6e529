"""Names of axes, and shape annotations that cost nothing at run time.

Axis order is always `batch layer head query key`. The names used in annotations:

| name | axis |
|---|---|
| `batch` | texts in a batch |
| `layer` | blocks of the model, counted from 0 |
| `head`, `kv_head` | attention heads; key-value heads, which several heads may share |
| `query`, `key`, `n` | positions that attend; positions attended to; both |
| `d`, `d_k`, `d_v` | width of the hidden vectors; of queries and keys; of a head's values |

Masks are bool and True means *keep*. Without jaxtyping (bare GPU images) the annotations mean nothing.
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
            """Stands in for a jaxtyping dtype: `Float[Tensor, "n d"]` is then simply `Tensor`."""

            def __class_getitem__(cls, item):
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int", "Tensor"]
