"""The file that views read: named arrays, and JSON about them in the metadata, as safetensors holds them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from identikit.attention.layer import Layer
from identikit.errors import InputError
from identikit.maths.effective import length_factor_of_head
from identikit.results.files import plain, tensor_file
from identikit.shapes import Bool, Float, Tensor

FORMAT = "identikit-view-1"
LARGEST = 96 << 20  # bytes of a file above which it is refused
SHORT = 128  # tokens up to which a text is short: its file holds simplex maps and all sources
CLOSE = 2e-6  # how far float32 factors may be from effective attention; beyond, they are sent in float64


@dataclass
class File:
    """The arrays and the JSON of a file that is being put together."""

    arrays: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def bytes(self) -> bytes:
        """Return the safetensors file, or refuse one that is too large for browsers."""
        size = sum(array.nbytes for array in self.arrays.values())
        if size > LARGEST:
            raise InputError(
                f"A page of this result would take {size / 2**20:,.0f} MiB, and browsers get slow above "
                f"{LARGEST / 2**20:,.0f}. Show fewer layers: `effective_attention(model, text, layers=…).save_html(…)`."
            )
        about = json.dumps(plain(self.about), ensure_ascii=False, allow_nan=False)
        return tensor_file(self.arrays, {"identikit": about})


def bits(mask: Bool[Tensor, "query key"]) -> Tensor:
    """Return a mask as bits, eight keys to a byte, the first key the highest bit."""
    padded = F.pad(mask, (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8)).long()
    return (padded << torch.arange(7, -1, -1)).sum(-1).to(torch.uint8)


def factors(layer: Layer, heads: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return a layer's heads as factors, and which of them use which keys and which basis."""
    call = layer.call
    head_numbers = layer.heads[list(heads)]
    key_heads = (head_numbers // call.groups).unique()
    groups = sorted({head // layer.factors.group for head in heads})
    values = layer.factors.values.double()
    passed = layer.passed.values.double()
    bases = {group: _basis(values[group], passed[group]) for group in groups}
    coefficients = []
    through = []
    for head in heads:
        group = head // layer.factors.group
        basis = bases[group]
        coefficients.append(layer.factors.coefficients[head].double() @ values[group].mT @ basis)
        lengths = passed[group]
        if layer.gate is None:  # a gate differs from query to query: there, the output before it is what is measured
            lengths = lengths @ length_factor_of_head(layer.passed, layer.projection, head).to(lengths)
        through.append(basis.mT @ lengths)
    width = max(basis.shape[1] for basis in bases.values())
    basis = torch.stack([F.pad(basis, (0, width - basis.shape[1])) for basis in bases.values()])
    solved = torch.stack([F.pad(rows, (0, width - rows.shape[1])) for rows in coefficients])
    basis_head = [groups.index(head // layer.factors.group) for head in heads]
    wide = torch.float32 if _close(solved, basis[basis_head]) else torch.float64
    sent = torch.float32 if call.query.dtype == torch.float64 else call.query.dtype
    arrays = {
        "query": call.query[0, head_numbers].to(sent),
        "key": call.key[0, key_heads].to(sent),
        "coefficients": solved.to(wide),
        "basis": basis.to(wide),
        "through": torch.stack([F.pad(lengths, (0, 0, 0, width - len(lengths))) for lengths in through]).float(),
        "identifiable": layer.factors.identifiable[list(heads)].to(torch.uint8),
    }
    facts = {
        "key_head": [key_heads.tolist().index(int(head) // call.groups) for head in head_numbers],
        "basis_head": basis_head,
        "scaling": float(call.scaling),
        "softcap": call.softcap,
        "sink": None if call.sink is None else call.sink[head_numbers].double().tolist(),
    }
    return arrays, facts


def _basis(values: Float[Tensor, "key d_v"], passed: Float[Tensor, "key d"]) -> Float[Tensor, "key rank"]:
    """Return an orthonormal basis of what effective attention was solved from, and of the values that are passed on."""
    basis = torch.linalg.qr(values).Q
    outside = passed - basis @ (basis.mT @ passed)
    return basis if outside.norm() <= 1e-6 * passed.norm() else torch.linalg.qr(torch.cat([values, passed], 1)).Q


def _close(coefficients: Float[Tensor, "head query rank"], basis: Float[Tensor, "head key rank"]) -> bool:
    """Return whether float32 factors give the same effective attention, to the digits that are shown."""
    for rows in coefficients.split(256, dim=1):
        rounded = rows.float().double() @ basis.float().double().mT
        if float((rows @ basis.mT - rounded).abs().max()) > CLOSE:
            return False
    return True
