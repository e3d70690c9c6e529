"""Collapsed attention: the definition number by number, whole models, and words where it does not apply."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bert.modeling_bert import BertSelfAttention

import identikit as ik
from identikit.paper import collapse
from identikit.paper.collapse import Affine
from tests.models import tiny
from tests.reference import collapse as reference

seeds = st.integers(0, 10_000)
small = st.integers(1, 5)
shared_heads = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)])  # heads, and key-value heads


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def affine(seed: int, heads: int, d: int, width: int) -> Affine:
    return Affine(drawn(seed, heads, d, width), drawn(seed + 1, heads, width))


def same(found: torch.Tensor, expected) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=0, atol=1e-12)


@given(st.integers(1, 4), small, st.integers(1, 6), shared_heads, seeds)
def test_scores_and_output_are_those_of_the_definition(n, d, width, heads, seed):
    tokens, weights = drawn(seed, n, d), drawn(seed + 1, heads[0], n, n).softmax(-1)
    query, key = affine(seed + 1, heads[0], d, width), affine(seed + 3, heads[1], d, width)
    expected = reference.scores(tokens.numpy(), [*map(torch.Tensor.numpy, query)], [*map(torch.Tensor.numpy, key)], 0.3)
    same(collapse.scores_of(collapse.by_head(tokens, query), collapse.by_head(tokens, key), 0.3), expected)
    same(collapse.collapsed_scores(tokens, collapse.collapse_scores(query, key, scaling=0.3)), expected)

    weights[:, 0] = 0  # a query that sees no key gets no bias either
    value, projection = affine(seed + 2, heads[1], d, width), drawn(seed + 4, heads[0], width, d)
    arrays = [*map(torch.Tensor.numpy, value)]
    expected = reference.output(weights.numpy(), tokens.numpy(), arrays, projection.numpy()).sum(0)
    same(collapse.factored_output(weights, tokens, value, projection), expected)
    same(collapse.collapsed_output(weights, tokens, collapse.collapse_values(value, projection)), expected)


def test_a_bias_in_the_keys_does_not_reach_attention():
    tokens, query, key = drawn(0, 6, 5), affine(1, 2, 5, 3), affine(3, 2, 5, 3)
    with_bias = collapse.collapsed_scores(tokens, collapse.collapse_scores(query, key, scaling=0.5))
    without = collapse.collapse_scores(query, key._replace(bias=torch.zeros_like(key.bias)), scaling=0.5)
    assert not torch.allclose(with_bias, collapse.collapsed_scores(tokens, without))
    torch.testing.assert_close(with_bias.softmax(-1), collapse.collapsed_scores(tokens, without).softmax(-1))


@given(small, small, shared_heads, small)
def test_operations_are_counted(d, width, heads, tokens):
    counted = collapse.costs(d, *heads, width, tokens)
    assert counted["operations_factored"] == reference.factored_operations(d, *heads, width, tokens)
    assert counted["operations_collapsed"] == reference.collapsed_operations(d, heads[0], tokens)


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([(1, 1), (8, 1), (8, 8)]), st.integers(1, 300))
def test_collapsing_pays_above_a_head_width(d, width, heads, n):
    """The bound of docs/collapse.md, with heads that share keys and values; heads that split the width pay alone."""
    counted = collapse.costs(d, *heads, width, n)
    wider = width * (d * sum(heads) + n * heads[0]) > heads[0] * d * (d + n)
    assert (counted["operations_collapsed"] < counted["operations_factored"]) == wider
    counted = collapse.costs(heads[0] * width, heads[0], heads[0], width, n)
    assert (counted["operations_collapsed"] < counted["operations_factored"]) == (heads[0] == 1)


# Models


BOTH = {"value", "query-key"}
APPLYING = {
    "bert": BOTH,
    "gpt2": BOTH,  # Conv1D, one for queries, keys and values
    "bart": BOTH,
    "llama": {"value"},
    "falcon": {"value"},  # fused, and rotary
    "qwen3": {"value"},  # normed, and rotary
    "gpt_oss": {"value"},  # sinks
    "deepseek_v3": set(),  # latent: keys and values are not linear in the vectors that queries read
    "xlnet": set(),  # terms of its own
}
COLUMNS = [
    "layer", "product", "tokens", "error_float32", "error_float64", "error_model", "operations_factored",
    "operations_collapsed", "parameters_factored", "parameters_collapsed", "time_ratio", "applies", "why",
]  # fmt: skip


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each form once."""
    monkeypatch.setattr(collapse, "ROUNDS", 1)


@pytest.mark.parametrize("name", APPLYING)
def test_a_family_is_exact_where_it_applies(name):
    rows = collapse.measure(tiny.loaded(name, dtype=torch.float64), lengths=(7,))
    assert {row["product"] for row in rows if row["applies"]} == APPLYING[name]
    reasons = {"xlnet": ["terms beyond"], "deepseek_v3": ["plain linear layers"]}.get(name, ["rotary", "normed"])
    for row in rows:
        if row["applies"]:
            assert row["error_float64"] < 1e-12 and row["error_model"] < 1e-12
            assert row["error_float32"] < 1e-5
            assert row["why"] == "" and row["time_ratio"] > 0
        else:
            assert any(reason in row["why"] for reason in reasons)
            assert all(row[number] is None for number in collapse.NUMBERS)
        if name == "llama" and row["applies"]:  # 4 heads of 6, 2 of them with values of their own
            assert row["parameters_factored"] == 24 * (4 + 2) * 6
            assert row["operations_factored"] == 7 * 24 * (4 + 2) * 6 + 7 * 7 * 4 * 6


def test_a_row_for_every_layer_product_and_length_and_nothing_left_on_the_model():
    model = tiny.loaded("gpt2")
    before = model.trace(model.sample((6,))).hidden[-1]
    rows = collapse.measure(model, lengths=(5, 12, 200), seed=1)  # 64 positions: 200 is cut
    assert [list(row) for row in rows] == [COLUMNS] * len(rows)
    found = [(row["tokens"], row["layer"], row["product"]) for row in rows]
    assert found == [(n, layer, p) for n in (5, 12, 64) for layer in (1, 2, 3) for p in ("query-key", "value")]
    for row in rows:
        n = row["tokens"]  # 4 heads of 6, width 24
        assert row["operations_factored"] == 4 * (2 * n * 24 * 6 + n * n * 6)
        assert row["operations_collapsed"] == 4 * (n * 24 * 24 + n * n * 24)
        assert (row["parameters_factored"], row["parameters_collapsed"]) == (2 * 24 * 24, 4 * 24 * 24)
        assert 0 < row["error_model"] < 1e-5 and row["error_float64"] < 1e-12
    errors = [row["error_model"] for row in rows if row["tokens"] == 5]
    for seed, equal in ((1, True), (2, False)):
        again = [row["error_model"] for row in collapse.measure(model, lengths=(5,), seed=seed)]
        assert (again == errors) == equal
    assert torch.equal(model.trace(model.sample((6,))).hidden[-1], before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.hf.modules())


def test_normed_queries_are_told_from_turned_ones():
    model = tiny.loaded("bert")
    with model.split(model.sample((7,))) as split:
        read = collapse.read_layer(model, 0, split.blocks[0])
        assert read is not None and read.why_not("query-key") == ""

        def normed(vectors):
            query, key, value = read.made_from(vectors)
            return query / query.norm(dim=-1, keepdim=True), key, value.tanh()

        other = collapse.LayerVectors(read.call, read.vectors, read.projection, normed)
        assert other.why_not("query-key") == collapse.NORMED
        assert other.why_not("value") == collapse.NOT_AFFINE


def test_projections_that_are_not_plain_layers_are_refused_in_words():
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, vectors):
            return self.inner(vectors * 1.0)

    model = tiny.loaded("bert")
    for module in model.hf.modules():
        if isinstance(module, BertSelfAttention):
            module.value = Wrapped(module.value)  # pyright: ignore[reportAttributeAccessIssue]
    rows = collapse.measure(model, lengths=(5,))
    assert {row["why"] for row in rows} == {collapse.OWN_LAYERS}


def test_a_head_that_was_taken_out_is_no_error():
    model = tiny.loaded("bert", dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.hf.named_parameters():
            if "attention.self" in name:
                parameter[:6] = 0  # queries, keys and values of the first head
    assert all(row["applies"] and row["error_float64"] < 1e-12 for row in collapse.measure(model, lengths=(5,)))


def test_minilm_is_exact():
    rows = collapse.measure(ik.load(), lengths=(16,))
    assert len(rows) == 12 and all(row["applies"] for row in rows)
    for row in rows:
        assert row["error_float64"] < 1e-13
        assert row["error_float32"] < 10 * row["error_model"] < 1e-5
        assert math.isclose(row["operations_collapsed"] / row["operations_factored"], 6.1224, rel_tol=1e-4)
