"""Hidden Token Attribution by its definition (Eq. 11): one backward pass for every number of every hidden vector."""

import math

import torch
from torch import Tensor


def jacobians(hidden: Tensor, inputs: Tensor) -> Tensor:
    """Return d hidden[j, f] / d inputs[i, g] as (input, output, f, g), for `hidden` (n, d) of `inputs` (n, d_x)."""
    rows = []
    for output in range(hidden.shape[0]):
        for feature in range(hidden.shape[1]):
            (gradient,) = torch.autograd.grad(hidden[output, feature], inputs, retain_graph=True)
            rows.append(gradient)
    return torch.stack(rows).unflatten(0, hidden.shape).permute(2, 0, 1, 3)


def block_norm(block: Tensor, norm: str) -> float:
    """Return the norm of one Jacobian block (feature of the output, feature of the input)."""
    if norm == "frobenius":
        return math.sqrt(sum(float(entry) ** 2 for entry in block.flatten()))
    if norm == "sum":
        column_sums = [sum(float(entry) for entry in column) for column in block.T]
        return math.sqrt(sum(entry**2 for entry in column_sums))
    return float(torch.linalg.svdvals(block)[0])


def contributions(blocks: Tensor, norm: str) -> Tensor:
    """Return c (input, output) of Eq. 11 from all Jacobian blocks (input, output, f, g); 0 where nothing moves e_j."""
    norms = torch.tensor([[block_norm(block, norm) for block in row] for row in blocks], dtype=torch.float64)
    shares = torch.zeros_like(norms)
    for output in range(norms.shape[1]):
        total = sum(float(norms[source, output]) for source in range(len(norms)))
        for source in range(len(norms)):
            shares[source, output] = norms[source, output] / total if total else 0.0
    return shares


def neighbour_group(contribution: Tensor, output: int, first: int, last: int, causal: bool) -> float | None:
    """Return the mean contribution of the inputs `first` to `last` places from `output`, or None if there are none."""
    found = []
    for source in range(len(contribution)):
        if first <= abs(source - output) <= last and not (causal and source > output):
            found.append(float(contribution[source, output]))
    return sum(found) / len(found) if found else None


def by_offset(contribution: Tensor, causal: bool) -> tuple[dict[int, float], dict[int, int]]:
    """Return the sum of contributions, and the number of pairs, at every offset input − output but 0."""
    sums: dict[int, float] = {}
    pairs: dict[int, int] = {}
    for source in range(len(contribution)):
        for output in range(len(contribution)):
            if source != output and not (causal and source > output):
                sums[source - output] = sums.get(source - output, 0.0) + float(contribution[source, output])
                pairs[source - output] = pairs.get(source - output, 0) + 1
    return sums, pairs


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, *, scaling: float, softcap, bias) -> Tensor:
    """Return O (head, query, d_v), head by head and query by query, in operations that autograd can follow."""
    groups = len(query) // len(key)
    heads = []
    for head in range(len(query)):
        rows = []
        for place in range(query.shape[1]):
            seen = visible[place].nonzero()[:, 0]
            if len(seen) == 0:
                rows.append(torch.zeros_like(value[0, 0]))
                continue
            scores = scaling * (key[head // groups, seen] @ query[head, place])
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores + bias[head, place, seen] if bias is not None else scores
            weights = torch.exp(scores) / torch.exp(scores).sum()
            rows.append(weights @ value[head // groups, seen])
        heads.append(torch.stack(rows))
    return torch.stack(heads)
