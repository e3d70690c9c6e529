"""Rows of attention that the tests of polytopes share."""

import torch
from hypothesis import strategies as st

from identikit.maths.polytope.bounds import Bounds, Question
from identikit.maths.polytope.exact import exact_bounds
from identikit.maths.polytope.rows import Lengths, Polytopes, Rows, decompose_values
from identikit.maths.visible import visible_from_mask


def random_row(n, d_v, seed=0, sharpness=1.5):
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(n, generator=generator, dtype=torch.float64)
    return scores.softmax(dim=0), torch.randn(n, d_v, generator=generator, dtype=torch.float64)


def decaying_values(n, d_v, rank=None, seed=0):
    """Values of a trained head in miniature: singular values from 1 to 1e-3, a large mean, 0 past the rank."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(n, d_v, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(d_v, d_v, generator=generator, dtype=torch.float64)).Q
    spectrum = torch.logspace(0, -3, d_v, dtype=torch.float64)
    spectrum[rank if rank is not None else d_v :] = 0
    return (left * spectrum) @ right + 0.1 * right[0]


def one_hot(n, key):
    return torch.nn.functional.one_hot(torch.tensor(key), n).double()


@st.composite
def hard_row(draw):
    """A row with ties, zeros or one-hot weights, and values that repeat or lose rank."""
    n = draw(st.integers(1, 8))
    d_v = draw(st.integers(1, 4))
    whole = st.integers(-2, 2)
    values = torch.tensor(draw(st.lists(st.lists(whole, min_size=d_v, max_size=d_v), min_size=n, max_size=n)))
    weights = torch.tensor(draw(st.lists(st.integers(0, 5), min_size=n, max_size=n).filter(any))).double()
    return weights / weights.sum(), values.double()


def rank_of(values, visible):
    """The rank of each row's visible values, as exact arithmetic has it for the cases here."""
    return torch.tensor([int(torch.linalg.matrix_rank(values[seen].double(), rtol=1e-6)) for seen in visible])


def rows_of(attention, values, visible, rank, through=None, *, sink=False) -> Rows:
    """Rows of one head, given the keys that each sees and the rank of the values there; see `Lengths`, `Polytopes`."""
    polytopes = Polytopes.of(values[None], visible_from_mask(visible, len(visible)), rank[None], sink=sink)
    lengths = None if through is None else Lengths(through[None], [0] * len(attention))
    return polytopes.rows([0] * len(attention), torch.arange(len(attention)), attention, lengths)


def one_row(attention, values) -> Rows:
    """One row that sees all keys; the precision of its values decides their rank."""
    visible = torch.ones(1, len(values), dtype=torch.bool)
    return rows_of(attention[None].double(), values, visible, decompose_values(values[None]).rank)


def every_key(rows: Rows, **others) -> Question:
    return Question(torch.ones(rows.attention.shape[1], dtype=torch.bool), **others)


def intervals(attention, values) -> Bounds:
    """The exact ends of each key of one row."""
    rows = one_row(attention, values)
    bounds = exact_bounds(rows, every_key(rows))
    return Bounds(*(part[0] for part in bounds))
