"""Collapsed attention of whole models: exact where it applies, refused in words where it does not."""

import math

import pytest
import torch
from transformers.models.bert.modeling_bert import BertSelfAttention

import identikit as ik
from identikit.errors import InputError
from identikit.paper import collapse
from tests.models import tiny

BOTH = {"value", "query-key"}
APPLYING = {
    "bert": BOTH,
    "gpt2": BOTH,  # Conv1D, one for queries, keys and values
    "bart": BOTH,
    "vit": BOTH,
    "llama": {"value"},
    "falcon": {"value"},  # fused, and rotary
    "qwen3": {"value"},  # normed, and rotary
    "gpt_oss": {"value"},  # sinks
    "deepseek_v3": set(),  # latent: keys and values are not linear in the vectors that queries read
}
COLUMNS = [
    "layer", "product", "tokens", "error_float32", "error_float64", "error_model", "operations_factored",
    "operations_collapsed", "parameters_factored", "parameters_collapsed", "time_ratio", "applies", "why",
]  # fmt: skip


def measured(name: str, *, dtype: torch.dtype = torch.float64, lengths: tuple[int, ...] = (7,)) -> list[dict]:
    return collapse.measure(tiny.loaded(name, dtype=dtype), lengths=lengths)


@pytest.mark.parametrize("name", APPLYING)
def test_a_family_is_exact_where_it_applies(name):
    rows = measured(name)
    assert {row["product"] for row in rows if row["applies"]} == APPLYING[name]
    for row in rows:
        if row["applies"]:
            assert row["error_float64"] < 1e-12 and row["error_model"] < 1e-12
            assert row["error_float32"] < 1e-5
            assert row["why"] == "" and row["time_ratio"] > 0
        else:
            reasons = ["rotary", "normed"] if APPLYING[name] else ["plain linear layers"]
            assert any(reason in row["why"] for reason in reasons)
            assert all(row[number] is None for number in collapse.NUMBERS)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_row_for_every_layer_product_and_length(name):
    rows = measured(name, dtype=torch.float32, lengths=(5, 12, 200))  # 64 positions: 200 is cut
    assert [list(row) for row in rows] == [COLUMNS] * len(rows)
    found = [(row["tokens"], row["layer"], row["product"]) for row in rows]
    assert found == [(n, layer, p) for n in (5, 12, 64) for layer in (1, 2, 3) for p in ("query-key", "value")]
    for row in rows:
        n = row["tokens"]  # 4 heads of 6, width 24
        assert row["operations_factored"] == 4 * (2 * n * 24 * 6 + n * n * 6)
        assert row["operations_collapsed"] == 4 * (n * 24 * 24 + n * n * 24)
        assert (row["parameters_factored"], row["parameters_collapsed"]) == (2 * 24 * 24, 4 * 24 * 24)
        assert 0 < row["error_model"] < 1e-5 and row["error_float64"] < 1e-12


def test_a_seed_is_a_text():
    model = tiny.loaded("bert")
    one, same, other = (
        [row["error_model"] for row in collapse.measure(model, lengths=(6,), seed=seed)] for seed in (1, 1, 2)
    )
    assert one == same != other


def test_shared_keys_and_values_count_once():
    row = next(row for row in measured("llama") if row["product"] == "value")  # 4 heads of 6, 2 of them with values
    assert row["parameters_factored"] == 24 * (4 + 2) * 6
    assert row["operations_factored"] == 7 * 24 * (4 + 2) * 6 + 7 * 7 * 4 * 6


def test_attention_with_terms_of_its_own_is_refused_in_words():
    rows = measured("xlnet")
    assert len(rows) == 6 and not any(row["applies"] for row in rows)
    assert "terms beyond" in rows[0]["why"]


def test_normed_queries_are_told_from_turned_ones():
    model = tiny.loaded("bert")
    with model.split(model.sample((7,))) as split:
        reading = collapse._read(model, 0, split.blocks[0])
        assert reading is not None and reading.why_not("query-key") == ""
        made_from = reading.made_from

        def normed(vectors):
            query, key, value = made_from(vectors)
            return query / query.norm(dim=-1, keepdim=True), key, value.tanh()

        normed_reading = collapse._Reading(reading.call, reading.vectors, reading.projection, normed)
        assert normed_reading.why_not("query-key") == collapse.NORMED
        assert normed_reading.why_not("value") == collapse.NOT_AFFINE


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


def test_nothing_is_left_on_the_model():
    model = tiny.loaded("gpt2")
    before = model.trace(model.sample((6,))).hidden[-1]
    collapse.measure(model, lengths=(6,))
    assert torch.equal(model.trace(model.sample((6,))).hidden[-1], before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.hf.modules())


@pytest.mark.parametrize("lengths", [(), (1, 16)])
def test_too_short_texts_are_refused(lengths):
    with pytest.raises(InputError, match="at least 2"):
        collapse.measure(tiny.loaded("bert"), lengths=lengths)


def test_minilm_is_exact():
    rows = collapse.measure(ik.load(), lengths=(16,))
    assert len(rows) == 12 and all(row["applies"] for row in rows)
    for row in rows:
        assert row["error_float64"] < 1e-13
        assert row["error_float32"] < 10 * row["error_model"] < 1e-5
        assert math.isclose(row["operations_collapsed"] / row["operations_factored"], 6.1224, rel_tol=1e-4)
