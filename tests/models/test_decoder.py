"""Decoders that attend to an encoder, against the modules' own attention, and the encoder as it was without them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import identikit as ik
from identikit.models import families
from identikit.models.decoder import DecoderModel, model_for_attention
from identikit.models.model import Model
from tests.hostile.judging import refused
from tests.models import tiny
from tests.models.state import state_of

NAMES = ["t5-both", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper"]
SOUND = np.sin(np.arange(6000) / 9).astype(np.float32)
SOURCE = "w5 w6 w7 w5 w9 w10 w11 w12 w13 w14 w15 w16 w17"
SOURCES = ["w5 w6 w7 w8 w9", "w4", "w5 w9 w11"]
TARGETS = ["w7", "w6 w5 w9 w10", "w4 w4"]


def ends(name: str) -> tuple[Any, str]:
    """Return a source and a target."""
    return (SOUND, "abca") if name == "whisper" else (SOURCE, "w8 w9 w5 w8")


def read(model: Model, name: str, attention: str, **options: Any) -> Any:
    source, target = ends(name)
    return ik.effective_attention(model, source, attention=attention, **({"target": target} | options))


@pytest.mark.parametrize("attention", ["decoder", "cross"])
@pytest.mark.parametrize("name", NAMES)
def test_raw_attention_is_the_modules_own(name: str, attention: str):
    model = tiny.two_stacks(name)
    whole: Any = model.full_model
    before = state_of(whole)
    found = read(model, name, attention)
    assert found.verify().hidden < 1e-12
    assert state_of(whole) == before
    batch = found.captured().text_run.batch
    arguments = model_for_attention(model, attention).arguments(batch)
    whole.set_attn_implementation("eager")
    with torch.no_grad():
        own = whole(**arguments, output_attentions=True)
    stock = own.cross_attentions if attention == "cross" else own.decoder_attentions
    assert len(stock) == whole.config.num_hidden_layers if name == "t5-both" else len(stock) == 2
    assert (found.raw - torch.stack(stock)[:, 0]).abs().max() < 1e-12
    assert found.raw.shape[2:] == (len(found.tokens), len(found.keys))
    if attention == "cross":
        assert found.keys != found.tokens and (found.raw.sum(-1) - 1).abs().max() < 1e-12
    else:
        assert found.keys == found.tokens and not found.raw.triu(1).any()


@pytest.mark.parametrize("attention", ["decoder", "cross"])
@pytest.mark.parametrize("name", ["t5-both", "bart", "m2m_100"])
def test_padded_sources_and_targets_are_as_one_by_one(name: str, attention: str):
    model = tiny.two_stacks(name)
    several = ik.effective_attention(model, SOURCES, target=TARGETS, attention=attention)
    for found, source, target in zip(several, SOURCES, TARGETS, strict=True):
        alone = ik.effective_attention(model, source, target=target, attention=attention)
        assert (found.tokens, found.keys) == (alone.tokens, alone.keys)
        assert (found.raw - alone.raw).abs().max() < 1e-12
        assert (found.effective - alone.effective).abs().max() < 1e-9
        assert torch.equal(found.null_dim, alone.null_dim)


def test_the_encoder_is_what_it_is_without_a_decoder():
    both = tiny.build("t5-both")
    model = ik.load(both, tiny.tokenizer())
    alone = hf.T5EncoderModel(hf.T5Config(**tiny._T5)).eval()
    alone.load_state_dict(both.state_dict(), strict=False)
    encoder = ik.load(alone, tiny.tokenizer())
    assert encoder.full_model is None and encoder.fingerprint == model.fingerprint
    read = [ik.effective_attention(each, SOURCE) for each in (model, encoder)]
    assert torch.equal(read[0].raw, read[1].raw) and "source" not in read[0].about
    named = ik.effective_attention(model, SOURCE, attention="encoder")
    assert torch.equal(named.raw, read[0].raw) and named.provenance == read[0].provenance
    with pytest.raises(ik.InputError, match=r"of a decoder that attends to an encoder, and T5EncoderModel has none"):
        ik.effective_attention(encoder, SOURCE, attention="cross", target="w5")


def test_a_fingerprint_is_of_what_is_read():
    model = tiny.two_stacks("bart")
    encoder = ik.effective_attention(model, SOURCE)
    found = read(model, "bart", "cross")
    settings = found.provenance.settings
    assert found.provenance.weights != encoder.provenance.weights and settings["attention"] == "cross"
    with torch.no_grad():
        model.full_model.model.decoder.layers[1].fc1.weight[0, 0] += 1  # pyright: ignore
    assert encoder.verify().hidden < 1e-12
    with pytest.raises(ik.ModelError, match="changed after it was first read"):
        found.verify()
    assert read(model, "bart", "cross").provenance.weights != found.provenance.weights


@pytest.mark.parametrize(
    ("name", "attention", "field", "path", "message"),
    [
        ("bart", "cross", "value", "encoder_attn.k_proj", "values are the value layer's"),
        ("bart", "cross", "output", "self_attn.out_proj", "head outputs times H is the module's output"),
        ("t5-both", "decoder", "output", "layer.1.EncDecAttention.o", "head outputs times H"),
        (
            "marian",
            "cross",
            "blocks",
            "decoder.layers.0",
            "1 blocks called the tapped attention 4 times, not once each",
        ),
        ("marian", "cross", "blocks", "encoder.layers.*", r"block 0 \(MarianEncoderLayer\) called .* 1 times"),
    ],
)
def test_a_wrong_row_is_refused(monkeypatch, name: str, attention: str, field: str, path: str, message: str):
    row = tiny.family(name)
    assert row.decoder is not None
    wrong = replace(row, decoder={**row.decoder, attention: replace(row.decoder[attention], **{field: path})})
    monkeypatch.setitem(families.FAMILIES, tiny.BUILDERS[name].config().model_type, wrong)
    model = tiny.two_stacks(name)
    with pytest.raises(ik.ModelError, match=message):
        read(model, name, attention)


# Targets


@pytest.mark.parametrize(
    ("name", "start", "expected"),
    [
        ("t5-both", 0, ("<pad>", "<s>", "w8", "w9")),
        ("marian", 2, ("</s>", "<s>", "w8", "w9")),
        ("bart", 1, ("<s>", "w8", "w9")),  # the tokenizer has put it there
        ("mbart", None, ("</s>", "<s>", "w8", "w9")),  # the last token, a language's, goes first
    ],
)
def test_a_target_is_shifted_as_in_training(name: str, start: int | None, expected: tuple[str, ...]):
    model = tiny.two_stacks(name)
    whole: Any = model.full_model
    whole.config.decoder_start_token_id = start
    whole.generation_config.decoder_start_token_id = start
    found = ik.effective_attention(model, SOURCE, target="w8 w9", attention="cross")
    assert found.tokens == expected
    if start is not None and name != "bart":
        labels = torch.tensor([tiny.tokenizer()("w8 w9").input_ids])
        shifted = model.full_model.prepare_decoder_input_ids_from_labels(labels)  # pyright: ignore
        assert found.captured().text_run.batch.ids.tolist() == shifted.tolist()  # pyright: ignore
    ids = found.captured().text_run.batch.ids[0].tolist()  # pyright: ignore[reportOptionalSubscript]
    again = ik.effective_attention(model, SOURCE, target=ids, attention="cross")
    assert torch.equal(again.raw, found.raw) and again.tokens == found.tokens


def test_speech_is_read_from_its_start_token():
    found = read(tiny.two_stacks("whisper"), "whisper", "cross")
    assert found.tokens == ("<|startoftranscript|>", "<|notimestamps|>", "a", "b", "c", "a")
    assert found.keys[:2] == ("0.00s", "0.02s") and sum(found.about["source"]["special"]) == 31
    assert found.about["source"]["words"] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_model_continues_greedily(name: str):
    model = tiny.two_stacks(name)
    whole: Any = model.full_model
    generation = whole.generation_config
    generation.forced_eos_token_id = None
    before = state_of(whole)
    source, _ = ends(name)
    found = ik.effective_attention(model, source, generate=12, attention="cross")
    assert state_of(whole) == before
    side = model_for_attention(model, "cross")
    assert isinstance(side, DecoderModel)
    batch = found.captured().text_run.batch
    assert batch.ids is not None
    (given,) = model.encode(source)
    ids = [58, 59] if name == "whisper" else [whole.config.decoder_start_token_id]
    started = len(ids)
    while len(ids) < started + 12:
        with torch.no_grad():
            arguments = side.arguments(batch) | {
                "decoder_input_ids": torch.tensor([ids]),
                "decoder_attention_mask": None,
            }
            logits = whole(**arguments).logits[0, -1]
        logits[generation.suppress_tokens or []] = -torch.inf
        token = int(logits.argmax())
        if token == generation.eos_token_id:
            break
        ids.append(token)
    assert batch.ids[0].tolist() == ids and len(given) == len(found.keys)
    assert len(ids) > started


def test_a_model_without_a_head_makes_no_tokens():
    model = ik.load(hf.BartModel(hf.BartConfig(**tiny._TWO_STACKS)).eval(), tiny.tokenizer())
    assert ik.effective_attention(model, SOURCE, target="w5", attention="cross").raw.shape == (2, 4, 3, 15)
    with pytest.raises(ik.InputError, match="needs a model that predicts tokens, and BartModel does not"):
        ik.effective_attention(model, SOURCE, generate=3, attention="cross")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no target": ({"attention": "cross"}, "reads a target: pass target="),
    "two targets": ({"attention": "decoder", "target": "w5", "generate": 3}, "reads a target: pass target="),
    "a target of the encoder": ({"target": "w5"}, "the encoder reads no target"),
    "tokens of the encoder": ({"generate": 3, "attention": "encoder"}, "the encoder reads no target"),
    "an attention": ({"attention": "zebra"}, "use 'encoder', 'decoder', 'cross'"),
    "a blank target": ({"attention": "cross", "target": " "}, "Reading the target: ' ' is blank"),
    "a number": ({"attention": "cross", "target": 3}, "is neither a text nor token ids"),
    "several": ({"attention": "cross", "target": ["w5", "w6"]}, "is neither a text nor token ids"),
    "a pair": ({"attention": "cross", "target": ("w5", "w6")}, "is neither a text nor token ids"),
    "an id": ({"attention": "cross", "target": [1, 99]}, "Reading the target: the token id at position 1 is 99"),
    "a long target": ({"attention": "cross", "target": "w5 " * 80}, "Reading the target: it has 82 tokens"),
    "no tokens": ({"attention": "cross", "generate": 0}, "expected a whole number from 1 to 63"),
    "many tokens": ({"attention": "cross", "generate": 64}, "expected a whole number from 1 to 63"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused_in_one_line(what: str):
    options, message = REFUSED[what]
    with pytest.raises(ik.InputError, match=message) as caught:
        ik.effective_attention(tiny.two_stacks("bart"), "w5 w6", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", ["w5", ["w5"], ["w5", "w6", "w7"], None, 5])
def test_a_list_of_sources_needs_a_target_each(target: Any):
    with refused():
        ik.effective_attention(tiny.two_stacks("bart"), SOURCES[:2], target=target, attention="cross")


def test_models_without_a_decoder_are_refused():
    for name in ("bert", "gpt2"):
        with pytest.raises(ik.InputError, match=r"that attends to an encoder, and tiny \w+ has none"):
            ik.effective_attention(tiny.shared(name), "w5 w6", attention="cross", target="w5")


def test_speech_needs_a_processor():
    model = ik.load(tiny.build("whisper"), tiny.reader("whisper"))
    with pytest.raises(ik.InputError, match=r"was loaded without one. Load it with its processor"):
        ik.effective_attention(model, SOUND, target="abc", attention="cross")


def test_a_folder_gives_the_whole_model(tmp_path):
    for name in ("t5-both", "whisper"):
        model = tiny.two_stacks(name, dtype=torch.float32)
        folder = tmp_path / name
        model.full_model.save_pretrained(folder)  # pyright: ignore[reportOptionalMemberAccess]
        (tiny.speech_processor() if name == "whisper" else tiny.tokenizer()).save_pretrained(folder)
        again = ik.load(folder)
        assert torch.equal(read(again, name, "cross").raw, read(model, name, "cross").raw)
        assert again.fingerprint == model.fingerprint
