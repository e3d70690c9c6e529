r"""Attention with the two matrices on either side of it collapsed into one, and what that costs.

A head is :math:`\mathrm{softmax}(s\,E W^Q {W^K}^\top E^\top)\,E W^V H` (Eq. 1 and 2, with the scaling s in place of
:math:`1/\sqrt{d_q}`). Between the tokens' vectors E stand two products of weights, and each can be made in advance:

.. math:: M_{QK} = s\,W^Q {W^K}^\top, \qquad M_V = W^V H, \qquad
    \mathrm{softmax}(E M_{QK} E^\top)\,E M_V

Letters: E a text's vectors as attention reads them, Q, K, V queries, keys and values, A attention, H a head's slice of
the output projection; h heads of which g have keys and values of their own; d the width of E, d_k that of a head.
"""

from typing import NamedTuple

import torch

from identikit.shapes import Float, Tensor


class Affine(NamedTuple):
    """What makes the queries, the keys or the values of every head from a token's vector e: e·weight + bias."""

    weight: Float[Tensor, "head d d_head"]
    bias: Float[Tensor, "head d_head"]

    def to(self, dtype: torch.dtype) -> "Affine":
        """The same in another dtype, laid out so that all heads are one product."""
        return Affine(_joined(self.weight.to(dtype)), self.bias.to(dtype))


class CollapsedScores(NamedTuple):
    """The scores of every head as a bilinear form of two tokens' vectors: see `collapse_scores`."""

    matrix: Float[Tensor, "head d d"]
    of_query: Float[Tensor, "head d"]
    of_key: Float[Tensor, "head d"]
    constant: Float[Tensor, "head"]

    def to(self, dtype: torch.dtype) -> "CollapsedScores":
        """The same in another dtype, laid out so that all heads are one product."""
        matrix, *others = (part.to(dtype) for part in self)
        return CollapsedScores(_joined(matrix), *others)


class CollapsedValues(NamedTuple):
    """What every head writes for a token's vector, values and output projection in one: see `collapse_values`."""

    matrix: Float[Tensor, "head d d"]
    bias: Float[Tensor, "head d"]

    def to(self, dtype: torch.dtype) -> "CollapsedValues":
        """The same in another dtype."""
        return CollapsedValues(*(part.to(dtype) for part in self))


def collapse_scores(query: Affine, key: Affine, *, scaling: float) -> CollapsedScores:
    r"""Collapse what stands between two tokens' vectors in the scores, biases included.

    .. math:: s\,(e_i W^Q + b^Q)(e_j W^K + b^K)^\top = e_i M_{QK} e_j^\top + e_i u + e_j w + c

    `matrix` is :math:`M_{QK} = s\,W^Q {W^K}^\top`, `of_query` :math:`u = s\,W^Q b^K`, `of_key` :math:`w = s\,W^K b^Q`
    and `constant` :math:`c = s\,b^Q \cdot b^K`; s is `scaling`. The paper writes no biases. u and c move all scores of
    a query alike and softmax takes them out again, so a bias in the keys never has an effect; they are kept so that
    scores, too, are the same. Heads may share keys.
    """
    groups = len(query.weight) // len(key.weight)
    key_weight, key_bias = (part.repeat_interleave(groups, 0) for part in key)
    query_weight, query_bias = query.weight * scaling, query.bias * scaling
    return CollapsedScores(
        matrix=query_weight @ key_weight.mT,
        of_query=(query_weight @ key_bias[..., None]).squeeze(-1),
        of_key=(key_weight @ query_bias[..., None]).squeeze(-1),
        constant=(query_bias * key_bias).sum(-1),
    )


def collapse_values(value: Affine, projection: Float[Tensor, "head d_v d"]) -> CollapsedValues:
    r"""Collapse what stands behind the attention weights: values and output projection, bias included.

    `matrix` is :math:`M_V = W^V H` of Eq. 2 (T = E·M_V) and `bias` :math:`b^V H`, which the paper leaves out;
    `projection` is H. Heads may share values.
    """
    weight, bias = (part.repeat_interleave(len(projection) // len(part), 0) for part in value)
    return CollapsedValues(weight @ projection, (bias[:, None] @ projection).squeeze(1))


def factored_scores(
    tokens: Float[Tensor, "n d"], query: Affine, key: Affine, *, scaling: float
) -> Float[Tensor, "head n n"]:
    r"""The scores as models compute them, :math:`s\,Q K^\top` (Eq. 1, before softmax); `tokens` is E."""
    groups = len(query.weight) // len(key.weight)
    Q, K = _by_head(tokens, query), _by_head(tokens, key).repeat_interleave(groups, 0)
    return Q @ K.mT * scaling


def collapsed_scores(tokens: Float[Tensor, "n d"], collapsed: CollapsedScores) -> Float[Tensor, "head n n"]:
    r"""The scores from the collapsed matrix, :math:`E M_{QK} E^\top` and its bias terms; `tokens` is E."""
    left = _by_head(tokens, Affine(collapsed.matrix, collapsed.of_key))
    row = (tokens @ collapsed.of_query.mT + collapsed.constant).mT
    return left @ tokens.mT + row[..., None]


def factored_output(
    weights: Float[Tensor, "head query n"],
    tokens: Float[Tensor, "n d"],
    value: Affine,
    projection: Float[Tensor, "head d_v d"],
) -> Float[Tensor, "query d"]:
    r"""What the heads given write together as models compute it, :math:`\sum_h A_h V_h H_h` (Eq. 2).

    `weights` is A, `tokens` E, `projection` H.
    """
    V = _by_head(tokens, value).repeat_interleave(len(weights) // len(value.weight), 0)
    return (weights @ V).transpose(0, 1).flatten(1) @ projection.flatten(0, 1)


def collapsed_output(
    weights: Float[Tensor, "head query n"], tokens: Float[Tensor, "n d"], collapsed: CollapsedValues
) -> Float[Tensor, "query d"]:
    r"""What the heads given write together from the collapsed matrix, :math:`\sum_h (A_h E) M_V + (A_h 1)\,b^V H`.

    `weights` is A, `tokens` E. E is mixed first: it is the same for all heads, and all that need be kept of a text.
    """
    mixed = (weights @ tokens).transpose(0, 1).flatten(1) @ collapsed.matrix.flatten(0, 1)
    return mixed + weights.sum(-1).mT @ collapsed.bias


def _by_head(tokens: Float[Tensor, "n d"], affine: Affine) -> Float[Tensor, "head n d_head"]:
    """The affine maps of all heads in one product; without a copy where `_joined` has laid them out."""
    heads, _, width = affine.weight.shape
    joined = affine.weight.transpose(0, 1).flatten(1)
    return (tokens @ joined + affine.bias.flatten()).unflatten(1, (heads, width)).transpose(0, 1)


def _joined(matrices: Float[Tensor, "head d columns"]) -> Float[Tensor, "head d columns"]:
    """The same matrices, side by side in memory."""
    return matrices.transpose(0, 1).contiguous().transpose(0, 1)


class Sizes(NamedTuple):
    """The sizes that decide one of the two products: `width` is d, `head_width` d_k of scores or d_v of values."""

    width: int
    heads: int
    kv_heads: int
    head_width: int


class Cost(NamedTuple):
    """What one product costs a layer, biases left out.

    `operations`: multiply-adds; `weights`: numbers in its matrices; `cache`: numbers kept of each token while a text
    grows. The collapsed forms keep the token's vector itself, once for both products.
    """

    operations: int
    weights: int
    cache: int

    def bytes_read(self, tokens: int, *, bytes_each: int = 2) -> int:
        """Bytes that one new token must read, weights and what is kept of all `tokens`; 2 bytes a number: bfloat16."""
        return bytes_each * (self.weights + self.cache * tokens)


def factored_cost(sizes: Sizes, *, new: int, tokens: int) -> Cost:
    r"""The cost of a product as models compute it, for the `new` last of `tokens` tokens.

    Scores: :math:`n' d (h+g) d_k` for Q and K and :math:`n' n\,h d_k` for :math:`Q K^\top`, with n' new of n tokens;
    values and output, with d_v: V and H in the place of Q and K, A·V in that of QKᵀ, and the same count.
    """
    d, heads, kv_heads, width = sizes
    weights = d * (heads + kv_heads) * width
    return Cost(new * weights + new * tokens * heads * width, weights, kv_heads * width)


def collapsed_cost(sizes: Sizes, *, new: int, tokens: int) -> Cost:
    r"""The cost with one d×d matrix a head: :math:`n' h d^2 + n' n\,h d`, for the scores and for the output alike."""
    d, heads, _, _ = sizes
    weights = heads * d * d
    return Cost(new * weights + new * tokens * heads * d, weights, d)


def reordered_cost(sizes: Sizes, *, new: int, tokens: int) -> Cost:
    r"""The cost with the factors kept and only the order of the products changed.

    Scores are :math:`(e W^Q {W^K}^\top) E^\top` and the output is :math:`(A E) W^V H`, each from left to right:
    :math:`2 n' h d\,d_k + n' n\,h d`. As with collapsed matrices the tokens' vectors are all that is kept, but the
    matrices stay as small as they were.
    """
    d, heads, kv_heads, width = sizes
    return Cost(2 * new * heads * d * width + new * tokens * heads * d, d * (heads + kv_heads) * width, d)


def least_head_width(sizes: Sizes, tokens: int) -> float:
    r"""The head width above which the collapsed form of a whole text takes fewer multiply-adds than the factored one.

    From :math:`n h d^2 + n^2 h d < n d (h+g) d_k + n^2 h d_k`:

    .. math:: d_k > \frac{h\,d\,(d+n)}{d\,(h+g) + n\,h},

    which grows from d/2 for short texts to d for long ones where no heads share keys (g = h).
    """
    d, heads, kv_heads, _ = sizes
    return heads * d * (d + tokens) / (d * (heads + kv_heads) + tokens * heads)
