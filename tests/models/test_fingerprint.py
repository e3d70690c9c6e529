"""The fingerprint: it tells apart what computes differently, and nothing else, and a changed model is noticed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf

import identikit as ik
from identikit.models.load import fingerprint
from identikit.models.load.fingerprint import identity_of
from tests.models import tiny

TEXT = "w5 w6 w7 w8"


def of(model: hf.PreTrainedModel, reader=None) -> str:
    return identity_of(model, reader or tiny.tokenizer()).model


def test_the_same_model_is_the_same_wherever_it_comes_from(tmp_path: Path):
    model = tiny.build("llama")
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    own = ik.load(model, tiny.tokenizer()).fingerprint
    assert ik.load(tmp_path).fingerprint == ik.load(tmp_path).fingerprint == own
    tiny.build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors").unlink()
    assert ik.load(tmp_path).fingerprint == own
    assert ik.load(tmp_path, dtype="float64").fingerprint != own


def sums_of(tensor: torch.Tensor, rows: int = 1) -> torch.Tensor:
    return fingerprint._sums(tensor, torch.empty(rows, fingerprint._ROW, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_entry_counts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fingerprint, "_ROW", 64)  # several rows and a rest, in a tensor that is quick to go through
    fingerprint._factors.cache_clear()
    weight = torch.randn(23, 19, dtype=torch.float64).to(dtype)
    sums = {tuple(sums_of(weight).tolist())}
    for place in range(weight.numel()):
        changed = weight.clone()
        changed.view(-1)[place] = -changed.view(-1)[place]
        sums.add(tuple(sums_of(changed).tolist()))
    for changed in (-weight, weight.flip(0), weight.roll(1, 1), weight * 2, weight.T.contiguous()):
        sums.add(tuple(sums_of(changed).tolist()))
    for first in range(0, 60, 2):  # two changes of the highest bit at once
        changed = weight.clone()
        changed.view(-1)[[first, first + 1]] *= -1
        sums.add(tuple(sums_of(changed).tolist()))
    assert len(sums) == 1 + weight.numel() + 5 + 30
    fingerprint._factors.cache_clear()


def test_memory_has_no_say():
    weight = torch.randn(7, 9).bfloat16()
    held = torch.cat([torch.zeros(1).bfloat16(), weight.flatten()])[1:].view(7, 9)  # begins in the middle of a word
    strided = weight.T.contiguous().T
    assert torch.equal(sums_of(weight), sums_of(held))
    assert torch.equal(sums_of(weight), sums_of(strided))


def test_rows_that_are_multiplied_at_once_have_no_say():
    """On a GPU several rows are, so that its fingerprint is the one of the CPU."""
    words = torch.randn(5 * fingerprint._ROW + 3)
    assert torch.equal(sums_of(words), sums_of(words, rows=3)) and len(sums_of(words)) == 6


def _lower(reader) -> None:
    from tokenizers import normalizers

    reader.backend_tokenizer.normalizer = normalizers.Lowercase()


@pytest.mark.parametrize(
    "change",
    [
        lambda model, reader: setattr(model.config, "rope_parameters", {"rope_type": "default", "rope_theta": 1e6}),
        lambda model, reader: setattr(model.config, "hidden_act", "relu"),
        lambda model, reader: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.ReLU()),
        lambda model, reader: setattr(model.model.layers[1].self_attn, "o_proj", torch.nn.Identity()),
        lambda model, reader: reader.add_tokens(["a new word"]),
        lambda model, reader: _lower(reader),
        lambda model, reader: model.model.norm.weight.data.view(-1)[3].add_(1e-6),
        lambda model, reader: model.lm_head.weight.data.neg_(),
        lambda model, reader: model.register_buffer("saved", torch.ones(2)),
    ],
    ids=["rope", "act", "act module", "module", "tokens", "normaliser", "one entry", "negated", "buffer"],
)
def test_what_computes_differently_is_another(change: Callable):
    model = tiny.build("llama")
    reader = tiny.tokenizer()
    before = of(model, reader)
    change(model, reader)
    assert of(model, reader) != before


def test_what_computes_the_same_is_the_same():
    model = tiny.build("llama")
    reader = tiny.tokenizer()
    before = of(model, reader)
    model.config.update({"name_or_path": "elsewhere", "transformers_version": "0", "use_cache": False})
    reader(["w5", "w6 w7"], padding=True, truncation=True, max_length=3)  # leaves its settings in the backend
    model.train().eval().requires_grad_(False)
    assert of(model, reader) == before


def test_readers_of_every_kind_have_a_content():
    bert = tiny.build("bert")
    slow, other = hf.ByT5Tokenizer(), hf.ByT5Tokenizer(extra_ids=10)
    assert of(bert, slow) != of(bert, other) and of(bert, slow) == of(bert, hf.ByT5Tokenizer())
    small, large = (hf.ViTImageProcessorPil(size={"height": n, "width": n}) for n in (16, 32))
    assert identity_of(bert, small).reader != identity_of(bert, large).reader
    assert identity_of(bert, None).reader != identity_of(bert, small).reader


def test_a_random_pooler_is_no_part_of_a_model(tmp_path: Path):
    model = tiny.build("bert-mlm")
    config = model.config.to_dict() | {"architectures": ["BertModel"]}
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, second = ik.load(tmp_path), ik.load(tmp_path)
    assert first.fingerprint == second.fingerprint and first.hf.pooler is None
    without = hf.BertModel(model.config, add_pooling_layer=False)
    without.load_state_dict(model.bert.state_dict())
    assert ik.load(without.eval(), tiny.tokenizer()).fingerprint == first.fingerprint


@pytest.mark.parametrize("call", [ik.effective_attention, ik.token_attribution, ik.invert])
def test_a_result_has_the_fingerprint_of_what_it_was_computed_with(call: Callable):
    hidden = tiny.build("llama")
    model = ik.load(hidden, tiny.tokenizer())
    before = call(model, TEXT).provenance
    hidden.model.layers[1].mlp.up_proj.weight.data.add_(0.1)  # which torch does not count as a change
    after = call(model, TEXT).provenance
    assert before.weights != after.weights == identity_of(hidden, model.tokenizer).model
    assert before.tokenizer_sha256 == after.tokenizer_sha256
    model.tokenizer.add_tokens(["a new word"])
    assert call(model, TEXT).provenance.tokenizer_sha256 != after.tokenizer_sha256


def test_a_model_that_changed_is_refused_where_numbers_would_be_of_two():
    hidden = tiny.build("llama")
    model = ik.load(hidden, tiny.tokenizer())
    result = ik.effective_attention(model, TEXT)
    since = model.fingerprint
    model.check_unchanged()
    result.verify()
    hidden.lm_head.weight.data[0, 0] += 1
    for check in (model.check_unchanged, result.verify):
        with pytest.raises(ik.ModelError, match=r"its weights, configuration or tokenizer changed after .*again"):
            check()
    ik.effective_attention(model, TEXT)  # a new call, a new fingerprint
    model.check_unchanged()
    with pytest.raises(ik.ModelError, match="changed after"):
        model.check_unchanged(since)
    with pytest.raises(ik.ModelError, match="changed after"):
        result.verify()


@pytest.mark.parametrize("name", ["bert", "gpt_oss", "deberta-v2", "xlnet"])
def test_what_a_result_computes_later_is_of_the_weights_it_was_made_with(name: str):
    """Numbers that are computed when they are asked for, from what was captured, do not follow a changed model."""
    hidden = tiny.build(name)
    model = ik.load(hidden, tiny.tokenizer())
    first, later = (ik.effective_attention(model, TEXT, bias=False) for _ in range(2))
    names = [one for one in first.arrays if one != "visible"]
    expected = {one: first.array(one).clone() for one in names}
    for weight in hidden.parameters():
        weight.data.mul_(1.5).add_(0.01)
    for one in names:
        assert torch.equal(later.array(one), expected[one]) or torch.allclose(
            later.array(one), expected[one], equal_nan=True
        ), one
