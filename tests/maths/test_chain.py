"""Readings through layers against all choices of vertices, and against random attention with the same outputs."""

import numpy as np
import pytest
import torch

from identikit.maths import chain as chaining
from identikit.maths.chain import Chain, greatest_over_boxes, greatest_through_layers, shares_of, through_layers
from identikit.maths.polytope.exact import maxima
from identikit.maths.polytope.rows import join_rows
from tests.maths.polytope.cases import rank_of, rows_of
from tests.reference import chain as reference

ROLLOUT = Chain(0.5, 0.5)
KINDS = ("plain", "causal", "repeated", "ties", "sink")


class Model:
    """Made-up attention of some layers and heads: maps, values, and the rows with their sets."""

    def __init__(self, n: int, d_v: int, heads: int, layers: int, seed: int = 0, kind: str = "plain"):
        generator = torch.Generator().manual_seed(seed)
        visible = torch.ones(n, n, dtype=torch.bool)
        if kind == "causal":
            visible = visible.tril()
        self.maps = []
        self.values = []
        self.layers = []
        for _ in range(layers):
            scores = torch.randn(heads, n, n, generator=generator, dtype=torch.float64)
            values = torch.randn(heads, n, d_v, generator=generator, dtype=torch.float64)
            if kind == "repeated":
                values = values[:, torch.arange(n) % 2]
            if kind == "ties":
                scores = scores.round()
                values = values.round()
            sink = kind == "sink"
            scores = torch.cat([scores.masked_fill(~visible, -torch.inf), torch.zeros(heads, n, int(sink))], dim=-1)
            maps = scores.softmax(-1)[..., :n]
            self.maps.append(maps)
            self.values.append(values)
            parts = [rows_of(a, v, visible, rank_of(v, visible), sink=sink) for a, v in zip(maps, values, strict=True)]
            self.layers.append(join_rows(parts))

    def vertices(self, layer: int, head: int, query: int) -> np.ndarray:
        """The vertices of a row's set, over all keys; what a learned sink takes goes to one more, of value 0."""
        weights = self.maps[layer][head, query].numpy()
        weights = np.append(weights, max(0.0, 1 - weights.sum()))
        seen = weights > 1e-12
        values = np.pad(self.values[layer][head].numpy(), ((0, 1), (0, 0)))
        found = reference.vertices(weights[seen], values[seen])
        whole = np.zeros((len(found), len(weights)))
        whole[:, seen] = found
        return whole[:, :-1]

    def sets(self) -> list[list[list[np.ndarray]]]:
        n = self.maps[0].shape[-1]
        return [
            [[self.vertices(layer, head, query) for query in range(n)] for head in range(len(maps))]
            for layer, maps in enumerate(self.maps)
        ]


def ends(model: Model, chain: Chain, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The least and the greatest after the last layer, and the largest gap."""
    *_, upper = greatest_through_layers(model.layers, chain, start)
    *_, lower = greatest_through_layers(model.layers, chain, -start)
    return -lower.value, upper.value, float(torch.maximum(upper.gap, lower.gap).max())


@pytest.mark.parametrize(("keep", "give"), [(0.5, 0.5), (0.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize(
    ("n", "d_v", "heads", "layers", "kind"),
    [
        (3, 1, 1, 2, "plain"),
        (3, 1, 2, 2, "plain"),
        (4, 2, 2, 3, "causal"),
        (5, 3, 2, 3, "causal"),
        (2, 1, 2, 2, "sink"),
        (3, 1, 2, 2, "repeated"),
    ],
)
def test_ends_are_those_of_all_choices_at_once(
    n: int, d_v: int, heads: int, layers: int, kind: str, keep: float, give: float
):
    model = Model(n, d_v, heads, layers, kind=kind)
    starts = torch.cat([torch.eye(n), torch.eye(n) - torch.eye(n).roll(1, 0)]).double()
    lower, upper, gap = ends(model, Chain(keep, give), starts)
    assert gap < 1e-12
    every = reference.all_products(model.sets(), keep, give) @ starts.numpy().T  # choice, output, start
    assert 64 <= len(every) <= 5000
    np.testing.assert_allclose(upper.mT, every.max(0), atol=1e-12)
    np.testing.assert_allclose(lower.mT, every.min(0), atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_random_attention_stays_inside_and_the_own_choice_attains(kind: str):
    n = 5
    model = Model(n, 2, 2, 3, seed=3, kind=kind)
    start = torch.cat([torch.eye(n), torch.eye(n) - torch.eye(n).roll(1, 0)]).double()
    lower, upper, gap = ends(model, ROLLOUT, start)
    assert gap < 1e-11
    generator = np.random.default_rng(0)
    sets = model.sets()
    held = start.numpy().T[None]  # choice, token, start
    best = start.numpy().copy()
    for layer in sets:
        drawn = [[row[generator.integers(len(row), size=20_000)] for row in head] for head in layer]
        held = 0.5 * held + 0.5 * np.einsum("hqck->cqk", np.array(drawn)) / 2 @ held
        chosen = [[row[(row @ best.T).argmax(0)] for row in head] for head in layer]  # the greatest of each start
        best = 0.5 * best + 0.5 * np.einsum("hqsk,sk->sq", np.array(chosen), best) / 2
    assert (held <= upper.mT.numpy() + 1e-11).all() and (held >= lower.mT.numpy() - 1e-11).all()
    np.testing.assert_allclose(best, upper, atol=1e-12)


def test_rows_in_boxes_give_what_is_left_to_what_holds_most():
    generator = torch.Generator().manual_seed(0)
    point = torch.rand(2, 5, 6, generator=generator, dtype=torch.float64)[..., :5].softmax(-1)
    reach = 0.1 * torch.rand(2, 5, 5, generator=generator, dtype=torch.float64)
    boxes = [(low, high) for low, high in zip((point - reach).clamp(min=0), point + reach, strict=True)]
    start = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    expected = start.numpy()
    for (low, high), found in zip(boxes, greatest_over_boxes(boxes, start), strict=True):
        rows = [
            [reference.greatest_in_box(*row, held) for row in zip(low.numpy(), high.numpy(), strict=True)]
            for held in expected
        ]
        expected = np.array(rows)
        np.testing.assert_allclose(found, expected, atol=1e-9)


def test_shares_of_a_row_in_a_box_have_ends_that_are_attained():
    generator = torch.Generator().manual_seed(1)
    lower = torch.rand(6, generator=generator, dtype=torch.float64)
    upper = lower + torch.rand(6, generator=generator, dtype=torch.float64)
    least, most = shares_of(lower, upper)
    points = lower + torch.rand(5000, 6, generator=generator, dtype=torch.float64) * (upper - lower)
    shares = points / points.sum(-1, keepdim=True)
    assert (shares >= least - 1e-12).all() and (shares <= most + 1e-12).all()
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 6).double()
    shares = lower + corners * (upper - lower)
    shares = shares / shares.sum(-1, keepdim=True)
    torch.testing.assert_close(shares.amin(0), least)
    torch.testing.assert_close(shares.amax(0), most)
    assert [float(end) for part in shares_of(torch.zeros(2), torch.zeros(2)) for end in part] == [0.0, 0.0, 1.0, 1.0]


def test_factors_multiply_the_weights_of_each_row():
    n = 4
    model = Model(n, 1, 2, 2, seed=5)
    factors = [torch.rand(2, n, n, generator=torch.Generator().manual_seed(layer)).double() for layer in range(2)]
    chain = Chain(1.0, 1.0, factors)
    start = torch.eye(n, dtype=torch.float64)
    *_, upper = greatest_through_layers(model.layers, chain, start)
    *_, raw = through_layers(model.maps, chain, start)
    assert (raw <= upper.value + 1e-12).all() and upper.gap.max() < 1e-11
    sets = model.sets()
    weights = start[2].numpy()
    for layer, factor in zip(sets, factors, strict=True):
        brought = np.zeros(n)
        for query in range(n):
            brought[query] = np.mean(
                [(head[query] @ (factor[at, query].numpy() * weights)).max() for at, head in enumerate(layer)]
            )
        weights = weights + brought
    np.testing.assert_allclose(upper.value[2], weights, atol=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
def test_gaps_cover_what_any_attention_makes_of_those_below(weighted: bool, monkeypatch: pytest.MonkeyPatch):
    """Rows are given gaps of their own: the worst attention puts all weight on the key where most is missed."""
    n = 3
    heads = 2
    model = Model(n, 1, heads, 2)
    generator = torch.Generator().manual_seed(0)
    missed = list(torch.rand(2, heads * n, n, generator=generator, dtype=torch.float64).pow(4))
    factors = torch.rand(2, heads, n, n, generator=generator, dtype=torch.float64).pow(4)
    left = iter(missed)
    monkeypatch.setattr(chaining, "maxima", lambda *given, until: (torch.zeros_like(missed[0]), next(left)))
    chain = Chain(0.5, 0.5, list(factors) if weighted else None)
    first, second = greatest_through_layers(model.layers, chain, torch.eye(n, dtype=torch.float64))
    factor = factors[1] if weighted else torch.ones_like(factors[1])
    worst = (factor[:, :, None] * first.gap).amax(-1)  # (head, query, source)
    own = missed[1].unflatten(0, (heads, n))
    assert (second.gap >= 0.5 * first.gap + 0.5 * (own + worst).mean(0).mT - 1e-12).all()
    assert (second.gap <= 0.5 * first.gap + 0.5 * (own.mean(0).mT + factor.max() * first.gap.max())).all()


def test_what_was_not_reached_in_time_is_still_a_bound():
    model = Model(6, 2, 2, 3, seed=1)
    start = torch.eye(6, dtype=torch.float64)
    *_, exact = greatest_through_layers(model.layers, ROLLOUT, start)
    *_, late = greatest_through_layers(model.layers, ROLLOUT, start, until=0.0)
    assert (late.value >= exact.value - 1e-12).all() and late.gap.isnan().all()


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_objectives_of_any_size_have_the_same_relative_gap(size: float):
    model = Model(8, 2, 1, 1, seed=2)
    c = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value, gap = maxima(model.layers[0], size * c)
    plain, _ = maxima(model.layers[0], c)
    assert gap.max() < 1e-11 * size
    torch.testing.assert_close(value / size, plain, atol=1e-11, rtol=0)
