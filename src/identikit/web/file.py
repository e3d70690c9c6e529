"""The file that views read: named arrays, and JSON about them in the metadata, as safetensors holds them."""

import json
from dataclasses import dataclass, field
from typing import Any

from identikit.errors import InputError
from identikit.results.files import plain, tensor_file
from identikit.shapes import Tensor

FORMAT = "identikit-view-1"
LARGEST = 96 << 20  # bytes of a file above which it is refused
SHORT = 128  # tokens up to which a text is short: its file holds simplex maps and all sources


@dataclass
class File:
    """The arrays and the JSON that are gathered for a file."""

    arrays: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def bytes(self) -> bytes:
        """Return the safetensors file, or refuse one that no browser would like."""
        size = sum(array.nbytes for array in self.arrays.values())
        if size > LARGEST:
            raise InputError(
                f"A page of this result would take {size / 2**20:,.0f} MiB, and browsers get slow above "
                f"{LARGEST / 2**20:,.0f}. Show fewer layers: `effective_attention(model, text, layers=…).save_html(…)`."
            )
        about = json.dumps(plain(self.about), ensure_ascii=False, allow_nan=False)
        return tensor_file(self.arrays, {"identikit": about})
