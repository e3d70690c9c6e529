"""Other attention with the same output, on the real model: put in, measured, and bounded."""

import pytest
import torch

import identikit as ik
from identikit.models.model import Model
from tests.attention.test_effective import LONG, TEXTS
from tests.models import tiny
from tests.reference import intervals as reference

WHERE = {"layer": 3, "head": 2}


@pytest.fixture(scope="module")
def minilm() -> Model:
    return ik.load()


def test_alternative_is_another_distribution_with_the_same_output(minilm: Model):
    found = ik.alternative_attention(minilm, LONG, **WHERE, query=60, seed=3)
    raw = ik.effective_attention(minilm, LONG, layers=[3], heads=[2])[0].at(layer=3, head=2, query=60).raw
    assert torch.allclose(found.raw, raw.double(), atol=1e-6)
    assert found.attention.min() == 0 and torch.isclose(found.attention.sum(), torch.ones(()).double())
    assert found.step > 0 and not torch.equal(found.attention, found.raw)
    assert torch.allclose(found.attention, found.raw + found.step * found.direction, atol=1e-12)
    assert found.output_change.hidden < 1e-5
    again = ik.alternative_attention(minilm, LONG, **WHERE, query=60, seed=3)
    assert torch.equal(again.attention, found.attention)


def test_a_given_direction_is_followed(minilm: Model):
    towards = torch.zeros(130, dtype=torch.float64)
    towards[0] = -1.0
    found = ik.alternative_attention(minilm, LONG, **WHERE, query=60, direction=towards)
    assert found.attention[0] < found.raw[0]
    assert found.output_change.hidden < 1e-5


def test_a_wrong_row_changes_the_output(minilm: Model, monkeypatch: pytest.MonkeyPatch):
    """`output_change` is measured, not assumed: a row that is no alternative must show."""
    from identikit.attention import intervals as alternatives

    monkeypatch.setattr(alternatives.polytope, "minimum_norm", lambda a, v: torch.full_like(a, 1 / len(a)))
    assert ik.minimum_norm_attention(minilm, LONG, **WHERE, query=60).output_change.hidden > 1e-4


def test_minimum_norm(minilm: Model):
    found = ik.minimum_norm_attention(minilm, LONG, **WHERE, query=60)
    assert found.attention.norm() < found.raw.norm()
    assert found.attention.min() >= 0 and found.output_change.hidden < 1e-5


def test_intervals_of_a_row(minilm: Model):
    found = ik.attention_intervals(minilm, LONG, **WHERE, query=60)
    assert found.lower.shape == found.upper.shape == found.raw.shape == (130,)
    assert (found.lower <= found.raw).all() and (found.raw <= found.upper).all()
    assert torch.isclose(found.certain_mass, found.lower.sum()) and 0 < found.certain_mass < 1
    part = ik.effective_attention(minilm, LONG, layers=[3], heads=[2])[0].parts[0]
    for key in (0, 17, 60):
        edge = ik.attention_intervals(minilm, LONG, **WHERE, query=60, key=key)
        assert torch.allclose(edge.lower[0], found.lower[key], atol=1e-7)
        assert torch.allclose(edge.upper[0], found.upper[key], atol=1e-7)
        cost = torch.zeros(130).double()
        cost[key] = 1.0
        values = part.call.value[0, 2].double().numpy()
        least = reference.optimum(cost.numpy(), found.raw.numpy(), values)
        greatest = reference.optimum(-cost.numpy(), found.raw.numpy(), values)
        assert abs(least[key] - float(found.lower[key])) < 1e-7
        assert abs(greatest[key] - float(found.upper[key])) < 1e-7


def test_intervals_of_a_causal_head():
    model = tiny.loaded("llama")
    progress = []
    found = ik.attention_intervals(
        model, TEXTS[0], layer=1, head=3, progress=lambda done, of: progress.append((done, of))
    )
    n = len(found.tokens)
    assert found.lower.shape == (n, n) and progress[-1] == (n, n)
    future = torch.ones(n, n).triu(1).bool()
    assert not found.upper[future].any()
    assert torch.allclose(found.certain_mass[:7], torch.ones(7).double())  # up to d_v + 1 keys there is one attention
    assert found.certain_mass[-1] < 1


def test_mistakes(minilm: Model):
    with pytest.raises(
        ik.InputError, match=r"would take about \d+ s, over the 0 s allowed. Ask for one row \(query=\)"
    ):
        ik.attention_intervals(minilm, LONG, **WHERE, max_seconds=0.001)
    with pytest.raises(ik.InputError, match="query 130 does not exist: the text has tokens 0 to 129"):
        ik.attention_intervals(minilm, LONG, **WHERE, query=130)
    with pytest.raises(ik.InputError, match="key 130 does not exist"):
        ik.attention_intervals(minilm, LONG, **WHERE, query=0, key=130)
    with pytest.raises(ik.InputError, match="layer 6 does not exist"):
        ik.alternative_attention(minilm, LONG, layer=6, head=0, query=0)
    with pytest.raises(ik.InputError, match="head 12 does not exist"):
        ik.alternative_attention(minilm, LONG, layer=0, head=12, query=0)
    with pytest.raises(ik.InputError, match="identifiable"):
        ik.alternative_attention(minilm, "A short text.", layer=0, head=0, query=0)
    with pytest.raises(
        ik.InputError, match=r"direction of shape \(3,\): it must have a number for each of the 130 tokens"
    ):
        ik.alternative_attention(minilm, LONG, **WHERE, query=0, direction=torch.ones(3))
    with pytest.raises(ik.InputError, match="one text at a time"):
        ik.alternative_attention(minilm, [LONG], layer=0, head=0, query=0)
