"""Each value dimension is read in its own unit, and what is about as small as rounding is said."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import identikit as ik
from identikit.maths.effective import attention_heads, row_ranks
from identikit.maths.linalg import UNEVEN, column_scales
from identikit.maths.polytope.exact import exact_bounds
from identikit.maths.polytope.rows import Rows
from tests.maths.polytope.cases import every_key, rows_of
from tests.models import tiny
from tests.reference import intervals as reference

TEXT = " ".join(f"w{3 + place * 7 % 40}" for place in range(14))
PARTS = {
    "bert": ("encoder.layer.1.attention.self.value", "encoder.layer.1.attention.output.dense"),
    "llama": ("model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.o_proj"),
    "qwen3": ("model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.o_proj"),
}


def rescaled(family: str, power: int, *, deficient: bool) -> ik.Model:
    """A tiny model, with a value dimension of a head times 2^power and the projection of it divided by as much."""
    made: Any = tiny.build(family)
    value, output = map(made.get_submodule, PARTS[family])
    width = made.config.hidden_size // made.config.num_attention_heads
    width = getattr(made.config, "head_dim", None) or width
    groups = made.config.num_attention_heads * width // value.weight.shape[0]
    heads = [width * head for head in range(groups)]  # the columns of the query heads that share the first values
    with torch.no_grad():
        for column in heads if deficient else ():
            output.weight[:, column + 3] = output.weight[:, column + 1]
        value.weight[1] *= 2.0**power
        if value.bias is not None:
            value.bias[1] *= 2.0**power
        for column in heads:
            output.weight[:, column + 1] *= 2.0**-power
    return ik.load(made, tiny.tokenizer())


@pytest.mark.parametrize("deficient", [False, True])
@pytest.mark.parametrize("family", PARTS)
def test_the_unit_of_a_value_dimension_changes_nothing(family: str, deficient: bool):
    """A model whose values are in other units, powers of 2 apart, is the same model to the bit."""
    plain = ik.effective_attention(rescaled(family, 0, deficient=deficient), TEXT)
    known = plain.intervals(layer=1)
    assert (plain.null_dim[1] > 0).any()
    for power in (20, 40, -40):
        found = ik.effective_attention(rescaled(family, power, deficient=deficient), TEXT)
        assert torch.equal(found.raw, plain.raw)
        for name in ("rank", "null_dim", "polytope_dim", "joint_null_dim", "reachable_dim"):
            assert torch.equal(found.array(name), plain.array(name)), (name, power)
        torch.testing.assert_close(found.effective, plain.effective, rtol=0, atol=1e-6)
        ends = found.intervals(layer=1)
        for name in ("raw", "lower", "upper"):
            torch.testing.assert_close(ends.array(name), known.array(name), rtol=0, atol=1e-6)
        assert found.verify().hidden < 1e-5


def test_columns_of_like_size_stay_as_they_are_to_the_bit():
    values = torch.randn(9, 4, dtype=torch.float64)
    assert torch.equal(column_scales(values), torch.ones(1, 4, dtype=torch.float64))
    values[:, 2] = 0
    assert torch.equal(column_scales(values), torch.ones(1, 4, dtype=torch.float64))
    values[:, 1] *= 4 * UNEVEN
    scaled = values * column_scales(values)
    size = scaled.norm(dim=0)
    assert size[2] == 0 and size[[0, 1, 3]].max() < 2.5 * size[[0, 1, 3]].min()
    assert torch.equal(scaled / column_scales(values), values)


def row_of(spectrum: torch.Tensor, seed: int, n: int = 130) -> tuple[Rows, torch.Tensor]:
    """A row over values in float32 that have this spectrum."""
    generator = torch.Generator().manual_seed(seed)
    d_v = len(spectrum)
    left, right = (
        torch.linalg.qr(torch.randn(size, d_v, dtype=torch.float64, generator=generator)).Q for size in (n, d_v)
    )
    values = (10 * left * spectrum @ right.mT).float()
    attention = torch.softmax(2 * torch.randn(1, n, dtype=torch.float64, generator=generator), -1)
    rank = row_ranks(attention_heads(values[None], (attention @ values.double())[None]))[0]
    return rows_of(attention, values, torch.ones(1, n, dtype=torch.bool), rank), values


def proven_upper(rows: Rows, values: torch.Tensor, key: int) -> tuple[float, float]:
    """The greatest weight with the same output, of all digits of the values: as found, and as proven in fractions."""
    matrix = reference.augmented(values.double().numpy())
    Q, R = np.linalg.qr(matrix)
    cost = -np.eye(len(matrix))[key]
    tolerances = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    weights = rows.attention[0].numpy()
    found = linprog(cost, A_eq=Q.T, b_eq=Q.T @ weights, bounds=(0, None), options=tolerances)
    dual = [Fraction(float(entry)) for entry in np.linalg.solve(R, found.eqlin.marginals)]
    exact = [[Fraction(float(entry)) for entry in line] for line in matrix]
    reduced = [sum(z * entry for z, entry in zip(dual, line, strict=True)) for line in exact]
    output = sum(Fraction(float(weight)) * entry for weight, entry in zip(weights, reduced, strict=True))
    slack = min(Fraction(int(cost[at])) - entry for at, entry in enumerate(reduced))
    bound = output + slack * sum(Fraction(float(weight)) for weight in weights)
    return -found.fun, -float(bound)


@pytest.mark.parametrize("smallest", [-5.0, -6.0])
def test_ends_of_nearly_dependent_values_are_those_of_all_digits_down_to_rounding(smallest: float):
    """d_v = 32 and 130 keys, singular values from 1 to 1e-5 or 1e-6: ours and the proven end agree."""
    rows, values = row_of(torch.logspace(0, smallest, 32, dtype=torch.float64), seed=1)
    found = exact_bounds(rows, every_key(rows))
    for key in rows.attention[0].topk(2).indices.tolist():
        solved, proven = proven_upper(rows, values, key)
        assert proven == pytest.approx(solved, abs=1e-6)
        assert float(found.upper[0, key]) == pytest.approx(proven, abs=1e-6)


def test_below_rounding_ends_hold_and_are_wider_and_this_is_known():
    """Singular values down to 1e-7: a program on all digits takes rounding for structure, and is narrower by 1e-3."""
    rows, values = row_of(torch.logspace(0, -7, 32, dtype=torch.float64), seed=1)
    assert bool(rows.free.all()) and not bool(rows.resolved.any())
    found = exact_bounds(rows, every_key(rows))
    wider = []
    for key in rows.attention[0].topk(2).indices.tolist():
        _, proven = proven_upper(rows, values, key)
        wider.append(float(found.upper[0, key]) - proven)
    assert min(wider) > -1e-9 and max(wider) > 1e-3
    assert bool(row_of(torch.logspace(0, -3, 32, dtype=torch.float64), seed=1)[0].resolved.all())


def test_intervals_say_where_rounding_decides():
    made: Any = tiny.build("bert")
    value = made.encoder.layer[0].attention.self.value
    with torch.no_grad():  # the last dimension of each head is another one, but for 1e-6 of its own
        for head in range(4):
            value.weight[6 * head + 5] = value.weight[6 * head + 4] + 1e-6 * value.weight[6 * head + 5]
            value.bias[6 * head + 5] = value.bias[6 * head + 4]
    attention = ik.effective_attention(ik.load(made, tiny.tokenizer()), TEXT)
    near = attention.intervals(layer=0)
    assert near.about["unresolved"] == 4 * len(attention.tokens)
    assert "about as small as the rounding of float32" in str(near)
    far = attention.intervals(layer=2)
    assert far.about["unresolved"] == 0 and "rounding" not in str(far)


@settings(max_examples=20, deadline=None)
@given(
    family=st.sampled_from(["bert", "llama", "mistral", "gptj"]),
    sharpness=st.sampled_from([1.0, 30.0, 1000.0]),
    words=st.lists(st.integers(3, 40), min_size=2, max_size=12),
)
def test_raw_lies_in_its_own_interval(family: str, sharpness: float, words: list[int]):
    """Also where logits are large: the row that is bounded is shown, in float64, and not the model's rounded one."""
    made: Any = tiny.build(family)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if any(part in name for part in ("query.weight", "q_proj.weight")):
                weight *= sharpness
    found = ik.effective_attention(ik.load(made, tiny.tokenizer()), " ".join(f"w{word}" for word in words)).intervals()
    slack = found.gap.nan_to_num(0.0) + 1e-9
    assert (found.lower <= found.raw + slack).all() and (found.raw <= found.upper + slack).all()
