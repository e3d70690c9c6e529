"""A layer's heads as factors, from which the browser builds their maps."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from identikit.attention.layer import Layer
from identikit.maths.effective import lengths_through
from identikit.shapes import Bool, Float, Tensor

CLOSE = 2e-6  # how far float32 factors may be from effective attention; beyond, they are sent in float64


def bits(mask: Bool[Tensor, "query key"]) -> Tensor:
    """Return a mask as bits, eight keys to a byte, the first key the highest bit."""
    padded = F.pad(mask, (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8)).long()
    return (padded << torch.arange(7, -1, -1)).sum(-1).to(torch.uint8)


def factors(part: Layer, heads: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a layer's heads as factors, and which of them use which keys and which basis."""
    call, chosen = part.call, part.heads[list(heads)]
    key_heads = (chosen // call.groups).unique()
    groups = sorted({place // part.factors.group for place in heads})
    values, passed = part.factors.values.double(), part.passed.values.double()
    bases = {group: _basis(values[group], passed[group]) for group in groups}
    coefficients, through = [], []
    for place in heads:
        group = place // part.factors.group
        basis = bases[group]
        coefficients.append(part.factors.coefficients[place].double() @ values[group].mT @ basis)
        lengths = passed[group]
        if part.gate is None:  # a gate differs from query to query: there, the output before it is what is measured
            lengths = lengths @ lengths_through(part.passed, part.projection, place).to(lengths)
        through.append(basis.mT @ lengths)
    width = max(basis.shape[1] for basis in bases.values())
    basis = torch.stack([F.pad(one, (0, width - one.shape[1])) for one in bases.values()])
    solved = torch.stack([F.pad(one, (0, width - one.shape[1])) for one in coefficients])
    basis_head = [groups.index(place // part.factors.group) for place in heads]
    wide = torch.float32 if _close(solved, basis[basis_head]) else torch.float64
    arrays = {
        "query": _narrow(call.query[0, chosen]),
        "key": _narrow(call.key[0, key_heads]),
        "coefficients": solved.to(wide),
        "basis": basis.to(wide),
        "through": torch.stack([F.pad(one, (0, 0, 0, width - len(one))) for one in through]).float(),
        "identifiable": part.factors.identifiable[list(heads)].to(torch.uint8),
    }
    facts = {
        "key_head": [key_heads.tolist().index(int(head) // call.groups) for head in chosen],
        "basis_head": basis_head,
        "scaling": float(call.scaling),
        "softcap": call.softcap,
        "sink": None if call.sink is None else call.sink[chosen].double().tolist(),
    }
    return arrays, facts


def _narrow(numbers: Tensor) -> Tensor:
    return numbers.float() if numbers.dtype == torch.float64 else numbers


def _basis(values: Float[Tensor, "key d_v"], passed: Float[Tensor, "key d"]) -> Float[Tensor, "key rank"]:
    """Return an orthonormal basis of what effective attention was solved from, and of the values that are passed on."""
    basis = torch.linalg.qr(values).Q
    outside = passed - basis @ (basis.mT @ passed)
    return basis if outside.norm() <= 1e-6 * passed.norm() else torch.linalg.qr(torch.cat([values, passed], 1)).Q


def _close(coefficients: Float[Tensor, "head query rank"], basis: Float[Tensor, "head key rank"]) -> bool:
    """Return whether float32 factors give the same effective attention, to the digits that are shown."""
    for rows in coefficients.split(256, dim=1):
        exact, rounded = rows @ basis.mT, rows.float().double() @ basis.float().double().mT
        if float((exact - rounded).abs().max()) > CLOSE:
            return False
    return True
