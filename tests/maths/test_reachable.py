import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from identikit.maths import linalg
from identikit.maths import reachable as reaching
from identikit.maths.reachable import reachable
from tests.reference import reachable as reference

EPS = torch.finfo(torch.float64).eps
SCALING = 0.4


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_mask(kind: str, n: int) -> Tensor:
    full = torch.ones(n, n, dtype=torch.bool)
    return {"full": full, "causal": full.tril(), "padded": full & (torch.arange(n) < n - n // 3)}[kind]


def attend(queries: Tensor, keys: Tensor, mask: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Attention of every head and query, and the slope of the soft-cap."""
    scores = SCALING * queries @ keys.mT
    if softcap is None:
        return scores.masked_fill(~mask, -math.inf).softmax(-1), None
    capped = softcap * torch.tanh(scores / softcap)
    return capped.masked_fill(~mask, -math.inf).softmax(-1), 1 - torch.tanh(scores / softcap).square()


def assert_definition(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, softcap: float | None = None):
    attention, slope = attend(queries, keys, mask, softcap)
    found = reachable(attention, keys[:, None], values, eps=EPS, slope=slope)
    for head in range(len(queries)):
        for row in range(queries.shape[1]):
            K = keys[head, mask[row]]
            T = values[head, mask[row]]

            def score(q: Tensor, K: Tensor = K) -> Tensor:
                scores = SCALING * K @ q
                return scores if softcap is None else softcap * torch.tanh(scores / softcap)

            query = queries[head, row]
            assert found.dim[head, row] == reference.reachable_dim(score, query, T)
            assert found.dim[head, row] <= reference.polytope_dim(T) <= reference.null_dim(T)
            expected = reference.condition(score, query, T)
            assert float(found.condition[head, row]) == pytest.approx(expected, rel=1e-6, nan_ok=True)
    return found


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mask", ["full", "causal", "padded"])
@pytest.mark.parametrize(("n", "d_k", "d_v"), [(10, 6, 3), (7, 3, 6), (5, 8, 8)])
def test_is_the_rank_of_the_attention_on_the_kernel_of_the_output(n, d_k, d_v, mask, softcap):
    queries = drawn(2, n, d_k, seed=1)
    keys = drawn(2, n, d_k, seed=2)
    values = drawn(2, n, d_v, seed=3)
    found = assert_definition(queries, keys, values, make_mask(mask, n), softcap)
    if mask == "full":
        assert found.dim.unique().tolist() == [max(0, min(n - 1, d_k) - d_v)]


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.sampled_from(["full", "causal"]), st.data())
def test_keys_and_values_that_repeat_or_lose_rank(n, d_k, d_v, mask, data):
    """Small whole numbers: equal tokens, dependent keys, heads whose output cannot move."""
    whole = st.integers(-1, 1)
    K = torch.tensor(data.draw(st.lists(st.lists(whole, min_size=d_k, max_size=d_k), min_size=n, max_size=n)))
    V = torch.tensor(data.draw(st.lists(st.lists(whole, min_size=d_v, max_size=d_v), min_size=n, max_size=n)))
    assert_definition(drawn(1, n, d_k, seed=n), K[None].double(), V[None].double(), make_mask(mask, n))


def test_equal_values_with_different_keys_are_reached():
    """A rotary model's repeated tokens: two share a value, not a key, so the query moves weight between them."""
    n = 6
    d = 8
    keys = drawn(1, n, d, seed=1)
    values = drawn(1, n, d, seed=2)
    values[0, 4] = values[0, 1]
    found = assert_definition(drawn(1, n, d, seed=3), keys, values, make_mask("full", n))
    assert found.dim.unique().tolist() == [1]
    keys[0, 4] = keys[0, 1]
    assert assert_definition(drawn(1, n, d, seed=3), keys, values, make_mask("full", n)).dim.unique().tolist() == [0]


def test_a_key_whose_weight_underflows_cannot_be_reached():
    keys = drawn(1, 8, 6, seed=1)
    values = drawn(1, 8, 2, seed=2)
    attention = torch.zeros(1, 1, 8, dtype=torch.float64)
    attention[0, 0, :4] = 0.25
    assert reachable(attention, keys[:, None], values, eps=EPS).dim.item() == 1  # 4 keys, 3 directions, 2 of them seen
    attention[0, 0, 4:] = 1e-300
    assert reachable(attention, keys[:, None], values, eps=EPS).dim.item() == 1
    assert reachable(torch.full_like(attention, 1 / 8), keys[:, None], values, eps=EPS).dim.item() == 4


@pytest.mark.parametrize(("d_v", "again"), [(6, 0), (2, 10)])
def test_where_the_output_fixes_all_that_keys_can_do_nothing_is_decomposed_again(d_v, again, monkeypatch):
    """Four keys leave three directions: if the output has as many, the rank of the attention is known."""
    decomposed = reaching.decompose
    sizes = []

    def counted(function, matrices):
        sizes.append(matrices.shape[:-2].numel())
        return decomposed(function, matrices)

    monkeypatch.setattr(reaching, "decompose", counted)
    attention = drawn(2, 5, 4, seed=1).softmax(-1)
    found = reachable(attention, drawn(2, 1, 4, 6, seed=2), drawn(2, 4, d_v, seed=3), eps=EPS)
    assert found.dim.unique().tolist() == [max(0, 3 - d_v)]
    assert sizes == [10, again]


def test_where_no_query_moves_the_output_there_is_no_condition():
    attention = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    found = reachable(attention, drawn(1, 1, 2, 3, seed=1), drawn(1, 2, 3, seed=2), eps=EPS)
    assert found.dim.item() == 0 and found.condition.isnan().all()
    constant = torch.ones(1, 2, 3, dtype=torch.float64)
    found = reachable(torch.full_like(attention, 0.5), drawn(1, 1, 2, 3, seed=1), constant, eps=EPS)
    assert found.dim.item() == 1 and found.condition.isnan().all()
    nothing = reachable(torch.zeros_like(attention), drawn(1, 1, 2, 3, seed=1), constant, eps=EPS)
    assert nothing.dim.item() == 0 and nothing.condition.isnan().all()


@pytest.mark.parametrize(("first", "size"), [(0.1, 1.0), (0.9, 1e-4), (0.9999, 1e4)])
def test_rounding_of_keys_and_values_adds_no_rank(first, size):
    """Values of rank 5 and keys of rank 9, rounded to float32: 4 dimensions, however much one key has of the weight."""
    n = 60
    d = 16
    keys = (size * drawn(2, n, 9, seed=1) @ drawn(2, 9, d, seed=2) / 3).float()
    values = (drawn(2, n, 5, seed=3) @ drawn(2, 5, d, seed=4) + 3).float()
    attention = (1 - first) * drawn(2, 30, n, seed=5).softmax(-1)
    attention[:, :, 0] += first
    found = reachable(attention, keys[:, None], values, eps=torch.finfo(torch.float32).eps)
    assert found.dim.unique().tolist() == [4]
    assert not (reachable(attention, keys[:, None], values, eps=EPS).dim == 4).any()  # rounding taken for real


def test_directions_that_hardly_move_the_output_count_and_show_in_the_condition():
    n = 20
    d = 4
    keys = drawn(1, n, d, seed=1)
    values = drawn(1, n, d, seed=2) * torch.tensor([1.0, 1.0, 1e-5, 1e-5], dtype=torch.float64)
    found = reachable(drawn(1, 3, n, seed=3).softmax(-1), keys[:, None], values, eps=EPS)
    assert found.dim.unique().tolist() == [0]
    assert (found.condition > 1e4).all()


def test_rows_may_have_keys_of_their_own_and_chunks_change_nothing(monkeypatch):
    attention = drawn(2, 7, 9, seed=1).softmax(-1)
    keys = drawn(2, 7, 9, 6, seed=2)
    values = drawn(2, 9, 3, seed=3)
    slope = drawn(2, 7, 9, seed=4).sigmoid()
    whole = reachable(attention, keys, values, eps=EPS, slope=slope)
    rows = [
        reachable(attention[:, [i]], keys[:, [i]], values, eps=EPS, slope=slope[:, [i]]).condition for i in range(7)
    ]
    torch.testing.assert_close(whole.condition, torch.cat(rows, dim=1))
    monkeypatch.setattr("identikit.maths.reachable.BYTES", linalg.BYTES // 2**20)
    for one, other in zip(whole, reachable(attention, keys, values, eps=EPS, slope=slope), strict=True):
        torch.testing.assert_close(one, other)
