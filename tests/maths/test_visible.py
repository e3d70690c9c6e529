import torch
from hypothesis import given
from hypothesis import strategies as st

from identikit.maths.visible import Visible, visible_from_mask, visible_window


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32), st.floats(0, 1))
def test_visible_reads_any_mask(n_queries, n_keys, seed, share):
    mask = torch.rand(n_queries, n_keys, generator=torch.Generator().manual_seed(seed)) < share
    visible = visible_from_mask(mask, n_queries)
    assert torch.equal(visible.block(torch.arange(n_queries), torch.arange(n_keys)), mask)
    assert torch.equal(visible.count, mask.sum(-1))
    some = torch.tensor([n_queries - 1, 0]), torch.tensor([n_keys - 1, 0, n_keys // 2])
    assert torch.equal(visible.block(*some), mask[some[0]][:, some[1]])


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.none() | st.integers(0, 4), st.none() | st.integers(0, 4))
def test_window_is_its_mask(keep, before, after):
    n = len(keep)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    mask = torch.tensor(keep) & (distance <= (n if before is None else before))
    mask &= -distance <= (n if after is None else after)
    visible = visible_window(torch.tensor(keep), before, after)
    assert torch.equal(visible.block(torch.arange(n), torch.arange(n)), mask)
    assert torch.equal(visible.count, mask.sum(-1))


def test_structure_of_masks_is_seen():
    n = 12
    full = torch.ones(n, n, dtype=torch.bool)
    pad = torch.arange(n) < 7

    def structure(mask: torch.Tensor) -> tuple[bool, bool, bool]:
        visible = visible_from_mask(mask, n)
        return visible.shared, visible.nested, visible.mask is None

    assert structure(full) == structure(pad) == structure(pad[None, None]) == (True, True, True)
    assert structure(full & pad & pad[:, None]) == (True, True, True)
    assert structure(full.tril()) == structure(full.tril() & pad.flip(0)) == (False, True, True)
    assert structure(full.tril().expand(3, n, n)) == (False, True, True)
    assert structure(full.tril() & full.triu(-3)) == (False, False, True)
    assert structure(full.tril() & ~full.tril(-3) | full.tril(-6)) == (False, False, False)
    assert isinstance(visible_from_mask(torch.zeros(n, n, dtype=torch.bool), n), Visible)
