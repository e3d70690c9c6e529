import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from identikit.maths import linalg, prefix
from identikit.maths.prefix import prefix_solve
from tests.maths.test_linalg import DOUBLE, SINGLE, by_pseudo_inverse, random, weights
from tests.reference.prefix import prefix_solution


@pytest.mark.parametrize("resolution", [SINGLE, DOUBLE])
@pytest.mark.parametrize("case", ["plain", "repeats", "small_start", "constant_start", "zeros", "low_rank"])
def test_prefix_solve(case, resolution):
    """Rows before, at and after full rank; repeated keys; first keys that are tiny or constant beside what follows."""
    values = random(2, 70, 8)
    if case == "repeats":
        values = values[:, torch.randint(12, (70,), generator=torch.Generator().manual_seed(0))]
    elif case == "small_start":
        values[:, :11] *= 2e-4
    elif case == "constant_start":
        values[:, :20] = values[:, :1]
    elif case == "zeros":
        values[0, 3:30] = 0
    elif case == "low_rank":
        values = random(2, 70, 5) @ random(2, 5, 8, seed=3)
    stop = torch.cat([torch.arange(0, 71), torch.tensor([7, 30, 30])])
    seen = torch.arange(70) < stop[:, None]
    output = (random(2, 3, 74, 70, seed=1).softmax(-1) * seen) @ values[:, None]
    coefficients, rank = prefix_solve(values, output, stop, resolution)
    expected = by_pseudo_inverse(values, output, seen)
    torch.testing.assert_close(weights(coefficients, values, seen), weights(expected, values, seen), atol=2e-9, rtol=0)
    torch.testing.assert_close(coefficients, expected, atol=1e-7 * float(expected.abs().max()), rtol=0)
    exact = [
        [int(torch.linalg.matrix_rank(values[h, row], rtol=1e-9)) if row.any() else 0 for row in seen] for h in (0, 1)
    ]
    assert rank.tolist() == exact
    slow, slow_rank = linalg.rowwise_solve(values, output, seen, resolution)
    torch.testing.assert_close(weights(slow, values, seen), weights(expected, values, seen), atol=2e-9, rtol=0)
    assert torch.equal(slow_rank, rank)


def spectrum_values(keys: int, d: int, decay: float, kind: str, seed: int = 0) -> torch.Tensor:
    """Make values of two heads whose singular values fall like i to the −`decay`, rounded to float32.

    - `tokens`: drawn from few tokens, so that many keys are equal; `contexts`: these, each moved a little
    - `nearly`: keys equal to one another but for a millionth or so; `sink`: a first key that is small
    """
    X = random(2, keys, d, seed=seed)
    chosen = torch.randint(d, (keys,), generator=torch.Generator().manual_seed(seed))
    if kind in ("tokens", "contexts", "nearly"):
        moved = {"tokens": 0.0, "contexts": 0.1, "nearly": 1e-6}[kind]
        X = random(2, d, d, seed=seed)[:, chosen] + moved * random(2, keys, d, seed=seed + 1)
    if kind == "sink":
        X[:, 0] *= 1e-2
    rotation = torch.linalg.qr(random(2, d, d, seed=seed + 2)).Q
    return ((X * torch.arange(1, d + 1) ** -decay) @ rotation).float().double()


KINDS = ["plain", "tokens", "contexts", "nearly", "sink"]


@settings(max_examples=50)
@given(
    st.integers(0, 2**32),
    st.sampled_from(KINDS),
    st.sampled_from([3, 8, 16]),
    st.floats(0, 3),
    st.floats(-1, 2),
)
def test_agrees_with_the_definition_on_every_row(seed, kind, d, decay, length):
    """Ranks are those of the rule, and the output that is kept is the same to 1e-9, whatever the spectrum."""
    values = spectrum_values(max(1, int(d * 2**length)), d, decay, kind, seed)
    keys = values.shape[1]
    stop = torch.cat([torch.arange(keys + 1), torch.full((3,), keys // 2)])
    seen = torch.arange(keys) < stop[:, None]
    output = (random(2, 2, len(stop), keys, seed=seed + 3).softmax(-1) * seen) @ values[:, None]
    found, rank = prefix_solve(values, output, stop, SINGLE)
    slow, slow_rank = linalg.rowwise_solve(values, output, seen, SINGLE)
    for head in (0, 1):
        expected, exact, margin = prefix_solution(values[head], output[head], stop, SINGLE.eps)
        clear = margin > 0.01  # where a singular value lies on the cutoff, rounding decides
        assert rank[head, clear].tolist() == exact[clear].tolist() == slow_rank[head, clear].tolist()
        fast, by_row = (error(part[head], expected, values[head], seen)[:, clear] for part in (found, slow))
        size = output[head].norm(dim=-1)[:, clear]
        assert bool((fast <= (1e-9 * size).maximum(3 * by_row.amax())).all())


def error(coefficients, expected, values, seen):
    """How far the output of a solution is from the expected one's, per row."""
    return ((((coefficients - expected) @ values.T) * seen) @ values).norm(dim=-1)


@pytest.mark.parametrize("many", [1, 3])
def test_blocks_at_once_and_rows_in_any_order_give_the_same(many, monkeypatch):
    values = spectrum_values(100, 8, 0.5, "contexts")
    stop = torch.cat([torch.arange(101), torch.full((30,), 77)])
    seen = torch.arange(100) < stop[:, None]
    output = (random(2, 2, 131, 100, seed=1).softmax(-1) * seen) @ values[:, None]
    blocks = prefix._all_blocks
    monkeypatch.setattr(prefix, "_all_blocks", lambda values, start, _: blocks(values, start, many))
    expected, ranks = prefix_solve(values, output, stop, SINGLE)
    order = torch.randperm(131, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(linalg, "rowwise_solve", None)  # what a block loses would be solved row by row
    found, rank = prefix_solve(values, output[:, :, order], stop[order], SINGLE)
    torch.testing.assert_close(found, expected[:, :, order], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(weights(expected, values, seen) @ values[:, None], output, rtol=0, atol=1e-12)
    assert torch.equal(rank, ranks[:, order])


def test_a_tolerance_is_certified_from_eigenvalues(monkeypatch):
    """Bounds are too loose for a cutoff this high; the rows are still not solved one by one."""
    values = random(3, 256, 64)
    stop = torch.arange(193, 257)
    resolution = linalg.Resolution(SINGLE.eps, 0.1)
    monkeypatch.setattr(linalg, "rowwise_solve", None)
    monkeypatch.setattr(prefix, "_number_distinct", lambda values, limit: (torch.arange(160), 160))
    _, rank = prefix_solve(values, random(3, 1, 64, 64, seed=1), stop, resolution)
    assert rank.unique().tolist() == [64]


def test_a_block_far_larger_than_the_keys_before_it_is_refined():
    values = random(2, 16, 8)
    ends = torch.arange(9, 17)
    values[:, :11] *= 1e-3
    seen = torch.arange(16) < ends[:, None]
    output = (random(2, 1, 8, 16, seed=1).softmax(-1) * seen) @ values[:, None]
    solution, _ = prefix_solve(values, output, ends, SINGLE)
    expected = weights(by_pseudo_inverse(values, output, seen), values, seen)
    torch.testing.assert_close(weights(solution, values, seen), expected, atol=1e-11, rtol=0)
