"""Which keys each query sees, without an n × n mask wherever runs of keys can say it."""

from dataclasses import dataclass

import torch

from identikit.errors import InputError
from identikit.shapes import Bool, Int, Tensor


@dataclass(frozen=True)
class Visible:
    """Which keys each query sees: a run `keys[start:stop]` of the keys that any query sees, or else a mask over them.

    Runs hold bidirectional, causal, padded, windowed and packed attention in O(n) memory.
    """

    n_keys: int
    keys: Int[Tensor, "seen"]
    start: Int[Tensor, "query"]
    stop: Int[Tensor, "query"]
    mask: Bool[Tensor, "query seen"] | None = None

    @property
    def count(self) -> Int[Tensor, "query"]:
        """How many keys each query sees."""
        return self.stop - self.start if self.mask is None else self.mask.sum(-1)

    @property
    def nested(self) -> bool:
        """Whether every query sees the first keys up to some point, as in causal and bidirectional attention."""
        return self.mask is None and not bool(self.start.any())

    @property
    def shared(self) -> bool:
        """Whether every query that sees anything sees the same keys."""
        return self.nested and bool(((self.stop == 0) | (self.stop == len(self.keys))).all())

    def block(self, queries: Int[Tensor, "query_"], keys: Int[Tensor, "key_"]) -> Bool[Tensor, "query_ key_"]:
        """Return the mask for these queries and keys."""
        index = torch.full((self.n_keys,), -1, device=self.keys.device)  # of each key among those that any query sees
        index[self.keys] = torch.arange(len(self.keys), device=index.device)
        index = index[keys]
        if self.mask is not None:
            return self.mask[queries][:, index.clamp(min=0)] & (index >= 0)
        return (index >= self.start[queries, None]) & (index < self.stop[queries, None])


def visible_from_mask(mask: Bool[Tensor, "..."], n_queries: int) -> Visible:
    """Read a mask (True = visible, broadcastable to head, query, key), as runs of keys where possible."""
    n_keys = mask.shape[-1]
    if mask.ndim > 2:
        by_head = mask.flatten(0, -3)
        mask = by_head[0]
        if not bool((by_head == mask).all()):
            raise InputError("Reading a mask: masks differ between heads. Pass only heads with equal masks together.")
    mask = mask.reshape(-1, n_keys)
    keys = mask.any(0).nonzero()[:, 0]
    if len(keys) < n_keys:
        mask = mask[:, keys]
    count = mask.sum(-1)
    start = mask.byte().argmax(-1) if len(keys) else count
    stop = start + count
    index = torch.arange(len(keys), device=mask.device)
    runs = (index >= start[:, None]) & (index < stop[:, None])
    remaining_mask = None if torch.equal(mask, runs) else mask.expand(n_queries, -1)
    return Visible(n_keys, keys, start.expand(n_queries), stop.expand(n_queries), remaining_mask)


def visible_window(keep: Bool[Tensor, "n"], before: int | None = None, after: int | None = None) -> Visible:
    """Let each position see the kept positions from `before` back to `after` ahead (None: no limit).

    Causal attention is `after=0`; a sliding window of w tokens is `before=w-1, after=0`. No n × n mask is made.
    """
    n = len(keep)
    position = torch.arange(n, device=keep.device)
    kept_before = torch.nn.functional.pad(keep.long().cumsum(0), (1, 0))
    start = kept_before[(position - (n if before is None else before)).clamp(min=0)]
    stop = kept_before[(position + 1 + (n if after is None else after)).clamp(max=n)]
    sees_any = stop > start
    return Visible(n, keep.nonzero()[:, 0], torch.where(sees_any, start, 0), torch.where(sees_any, stop, 0))
