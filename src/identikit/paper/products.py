r"""Attention with the two matrices on either side of it collapsed into one, and what that costs.

A head is $\mathrm{softmax}(s\,E W^Q {W^K}^\top E^\top)\,E W^V H$ (Eq. 1 and 2, with the scaling $s$ instead of
$1/\sqrt{d_q}$). Two products of weights stand between the tokens' vectors $E$. Both can be computed in advance:

$$M_{QK} = s\,W^Q {W^K}^\top, \qquad M_V = W^V H, \qquad \mathrm{softmax}(E M_{QK} E^\top)\,E M_V$$

$E$ holds a text's vectors as attention reads them; $Q$, $K$, $V$ are queries, keys and values; $A$ is attention; $H$ is
a head's slice of the output projection. Of $h$ heads, $g$ have keys and values of their own. $E$ has width $d$, a
head's keys $d_k$ and its values $d_v$.
"""

from typing import NamedTuple

import torch

from identikit.shapes import Float, Tensor


class Affine(NamedTuple):
    """The map from a token's vector $e$ to the queries, keys or values of every head: $e$·`weight` + `bias`."""

    weight: Float[Tensor, "head d d_head"]
    bias: Float[Tensor, "head d_head"]

    def to(self, dtype: torch.dtype) -> "Affine":
        """Convert to another dtype, laid out so that all heads are one product."""
        return Affine(_joined(self.weight.to(dtype)), self.bias.to(dtype))


class CollapsedScores(NamedTuple):
    """The scores of every head as a bilinear form of two tokens' vectors; see `collapse_scores`."""

    matrix: Float[Tensor, "head d d"]
    of_query: Float[Tensor, "head d"]
    of_key: Float[Tensor, "head d"]
    constant: Float[Tensor, "head"]

    def to(self, dtype: torch.dtype) -> "CollapsedScores":
        """Convert to another dtype, laid out so that all heads are one product."""
        matrix, *others = (part.to(dtype) for part in self)
        return CollapsedScores(_joined(matrix), *others)


class CollapsedValues(NamedTuple):
    """What every head writes for a token's vector: values and output projection in one; see `collapse_values`."""

    matrix: Float[Tensor, "head d d"]
    bias: Float[Tensor, "head d"]

    def to(self, dtype: torch.dtype) -> "CollapsedValues":
        """Convert to another dtype."""
        return CollapsedValues(*(part.to(dtype) for part in self))


def collapse_scores(query: Affine, key: Affine, *, scaling: float) -> CollapsedScores:
    r"""Collapse what stands between two tokens' vectors in the scores, biases included.

    $$s\,(e_i W^Q + b^Q)(e_j W^K + b^K)^\top = e_i M_{QK} e_j^\top + e_i u + e_j w + c$$

    `matrix` is $M_{QK} = s\,W^Q {W^K}^\top$, `of_query` is $u = s\,W^Q b^K$, `of_key` is $w = s\,W^K b^Q$ and
    `constant` is $c = s\,b^Q \cdot b^K$; $s$ is `scaling`. The paper has no biases. $u$ and $c$ move all scores of a
    query equally and softmax cancels them, so a bias in the keys never has an effect; they are kept so that the scores
    are the same too. Heads may share keys.
    """
    groups = len(query.weight) // len(key.weight)
    key_weight, key_bias = (part.repeat_interleave(groups, 0) for part in key)
    query_weight = query.weight * scaling
    query_bias = query.bias * scaling
    return CollapsedScores(
        matrix=query_weight @ key_weight.mT,
        of_query=(query_weight @ key_bias[..., None]).squeeze(-1),
        of_key=(key_weight @ query_bias[..., None]).squeeze(-1),
        constant=(query_bias * key_bias).sum(-1),
    )


def collapse_values(value: Affine, projection: Float[Tensor, "head d_v d"]) -> CollapsedValues:
    r"""Collapse what follows the attention weights: values and output projection, bias included.

    `matrix` is $M_V = W^V H$ of Eq. 2 ($T = E M_V$) and `bias` is $b^V H$, which the paper leaves out; `projection` is
    $H$. Heads may share values.
    """
    weight, bias = (part.repeat_interleave(len(projection) // len(part), 0) for part in value)
    return CollapsedValues(weight @ projection, (bias[:, None] @ projection).squeeze(1))


def factored_scores(
    tokens: Float[Tensor, "n d"], query: Affine, key: Affine, *, scaling: float
) -> Float[Tensor, "head n n"]:
    r"""Compute the scores as models do, $s\,Q K^\top$ (Eq. 1, before softmax); `tokens` is $E$."""
    groups = len(query.weight) // len(key.weight)
    Q = _by_head(tokens, query)
    K = _by_head(tokens, key).repeat_interleave(groups, 0)
    return Q @ K.mT * scaling


def collapsed_scores(tokens: Float[Tensor, "n d"], collapsed: CollapsedScores) -> Float[Tensor, "head n n"]:
    r"""Compute the scores from the collapsed matrix, $E M_{QK} E^\top$ and its bias terms; `tokens` is $E$."""
    left = _by_head(tokens, Affine(collapsed.matrix, collapsed.of_key))
    row = (tokens @ collapsed.of_query.mT + collapsed.constant).mT
    return left @ tokens.mT + row[..., None]


def factored_output(
    weights: Float[Tensor, "head query n"],
    tokens: Float[Tensor, "n d"],
    value: Affine,
    projection: Float[Tensor, "head d_v d"],
) -> Float[Tensor, "query d"]:
    r"""Compute what the given heads write together, as models do: $\sum_h A_h V_h H_h$ (Eq. 2).

    `weights` is $A$, `tokens` is $E$, `projection` is $H$.
    """
    V = _by_head(tokens, value).repeat_interleave(len(weights) // len(value.weight), 0)
    return (weights @ V).transpose(0, 1).flatten(1) @ projection.flatten(0, 1)


def collapsed_output(
    weights: Float[Tensor, "head query n"], tokens: Float[Tensor, "n d"], collapsed: CollapsedValues
) -> Float[Tensor, "query d"]:
    r"""Compute what the given heads write together from the collapsed matrix: $\sum_h (A_h E) M_V + (A_h 1)\,b^V H$.

    `weights` is $A$, `tokens` is $E$. $E$ is mixed first: it is the same for all heads.
    """
    mixed = (weights @ tokens).transpose(0, 1).flatten(1) @ collapsed.matrix.flatten(0, 1)
    return mixed + weights.sum(-1).mT @ collapsed.bias


def _by_head(tokens: Float[Tensor, "n d"], affine: Affine) -> Float[Tensor, "head n d_head"]:
    """Apply the affine maps of all heads in one product; no copy is made where `_joined` has laid them out."""
    heads, _, width = affine.weight.shape
    joined = affine.weight.transpose(0, 1).flatten(1)
    return (tokens @ joined + affine.bias.flatten()).unflatten(1, (heads, width)).transpose(0, 1)


def _joined(matrices: Float[Tensor, "head d columns"]) -> Float[Tensor, "head d columns"]:
    """Lay the matrices side by side in memory."""
    return matrices.transpose(0, 1).contiguous().transpose(0, 1)


class Sizes(NamedTuple):
    """The sizes that decide what one of the two products costs.

    `width` is $d$; `heads` is $h$, of which `kv_heads`, $g$, have keys and values of their own; `head_width` is $d_k$
    for the scores and $d_v$ for the values.
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int


class ProductCost(NamedTuple):
    """What one product costs per layer, without biases: multiply-adds, and numbers in its matrices."""

    operations: int
    weights: int


def factored_cost(sizes: Sizes, tokens: int) -> ProductCost:
    r"""Count what a product costs over a text of `tokens` tokens, as models compute it.

    Scores take $n d (h+g) d_k$ for $Q$ and $K$, and $n^2 h d_k$ for $Q K^\top$. Values and output take as much with
    $d_v$: $V$ and $H$ replace $Q$ and $K$, and $A V$ replaces $Q K^\top$.
    """
    d, heads, kv_heads, width = sizes
    weights = d * (heads + kv_heads) * width
    return ProductCost(tokens * weights + tokens * tokens * heads * width, weights)


def collapsed_cost(sizes: Sizes, tokens: int) -> ProductCost:
    """Count what a product costs with one $d×d$ matrix per head: $n h d^2 + n^2 h d$, for scores and output alike."""
    d, heads, _, _ = sizes
    weights = heads * d * d
    return ProductCost(tokens * weights + tokens * tokens * heads * d, weights)
