"""Attribution of a decoder's hidden vectors and outputs to target and source, against one backward pass per number."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5LayerNorm

import identikit as ik
from identikit.models.decoder import model_for_attention
from identikit.texts.text import Translation
from tests.models import tiny
from tests.models.test_decoder import SOUND
from tests.reference import attribution as reference

SOURCE = "w5 w6 w7 w5"
TARGET = "w8 w9 w5"
EMBEDDINGS = {
    "t5-both": ("decoder.block.0", "encoder.block.0"),
    "bart": ("model.decoder.layernorm_embedding", "model.encoder.layernorm_embedding"),
    "marian": ("model.decoder.layers.0", "model.encoder.layers.0"),
}


def literal(model: Any, name: str) -> tuple[list[torch.Tensor], Any, tuple[torch.Tensor, torch.Tensor]]:
    """Run the stock model with leaves in the place of both embedding sums; return its decoder's hidden vectors."""
    whole = model.full_model
    leaves: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []
    with ExitStack() as stack:
        for path in EMBEDDINGS[name]:

            def enter(module: Any, args: Any) -> Any:
                leaves.append(args[0][0].detach().clone().requires_grad_())
                return (leaves[-1][None], *args[1:])

            stack.callback(whole.get_submodule(path).register_forward_pre_hook(enter).remove)
        blocks = whole.decoder.block if name == "t5-both" else whole.model.decoder.layers
        for block in blocks:
            keep = lambda *call: hidden.append(call[2][0] if isinstance(call[2], tuple) else call[2])  # noqa: E731
            stack.callback(block.register_forward_hook(keep).remove)
        (encoded,) = model_for_attention(model, "decoder").encode(Translation(SOURCE, TARGET))
        with torch.enable_grad():
            out = whole(
                input_ids=torch.tensor([encoded.source.ids]),
                decoder_input_ids=torch.tensor([encoded.ids]),  # pyright: ignore
            )
    source, target = leaves
    return [each[0] for each in hidden], out, (target, source)


def in_float64(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """T5's norm without its cast to float32, whose rounding reaches derivatives."""
    return (
        norm.weight * hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    )


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_contributions_are_those_of_autograd(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(T5LayerNorm, "forward", in_float64)
    model = tiny.two_stacks(name)
    found = ik.token_attribution(model, SOURCE, target_text=TARGET)
    hidden, _, (target, source) = literal(model, name)
    assert found.axis("input").tokens[:5] == found.tokens and len(found.axis("input")) == 11
    for layer in range(len(hidden)):
        blocks = [reference.jacobians(hidden[layer], leaf) for leaf in (target, source)]
        expected = reference.contributions(torch.cat(blocks), "frobenius")
        assert (found.contribution[layer] - expected).abs().max() < 1e-12
    torch.testing.assert_close(found.contribution.sum(1), torch.ones_like(found.contribution[:, 0]))
    torch.testing.assert_close(found.from_source, found.contribution[:, 5:].sum(1))
    assert not found.contribution[:, :5].tril(-1).any()  # no later target token
    assert found.own.shape == (len(hidden), 5) and found.outweighed.dtype == torch.bool
    some = ik.token_attribution(model, SOURCE, target_text=TARGET, targets=["w9"], layers=[1])
    torch.testing.assert_close(some.contribution[0, :, 0], found.contribution[1, :, 3])


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_an_output_is_attributed_to_both_texts(name: str):
    model = tiny.two_stacks(name)
    found = ik.token_attribution(model, SOURCE, target_text=TARGET, target="w7@2")
    _, out, leaves = literal(model, name)
    gradients = torch.autograd.grad(out.logits[0, 2, 7], leaves)
    lengths = torch.cat([gradient.norm(dim=-1) for gradient in gradients])
    assert (found.contribution - lengths / lengths.sum()).abs().max() < 1e-9
    assert found.value == [pytest.approx(out.logits[0, 2, 7].item())]
    assert len(found.tokens) == 11
    if name != "bart":  # where a norm follows the sum, the vectors are those behind it
        along = torch.cat([(g * leaf).sum(-1) for g, leaf in zip(gradients, leaves, strict=True)])
        assert (found.gradient_x_input - along).abs().max() < 1e-9


def test_source_and_target_are_told_apart():
    model = tiny.two_stacks("bart")
    found = ik.token_attribution(model, "w5, w6 w5", target_text="w8 w5")
    assert found.axis("input").tokens == ("<pad>", "<s>", "w8", "w5", "<s>", "w5", "w3", "w6", "w5", "</s>")
    words = found.words()
    assert words.axis("input").tokens == found.axis("input").tokens and words.axis("output").tokens == found.tokens
    torch.testing.assert_close(words.from_source, found.from_source)
    assert "The source contributes" in str(found)
    assert found.plot() is not None and found.sel(output="w8").plot()[1].get_xlabel() == "its own (%)"
    after = ik.token_attribution(model, "w5, w6 w5", target_text="w8 w5", source="after")
    assert (after.contribution - found.contribution).abs().max() > 1e-4


def test_estimates_generation_and_lists():
    model = tiny.two_stacks("marian")
    exact = ik.token_attribution(model, SOURCE, target_text=TARGET)
    every = ik.token_attribution(model, SOURCE, target_text=TARGET, probes=24)
    torch.testing.assert_close(every.contribution, exact.contribution)
    few = ik.token_attribution(model, SOURCE, target_text=TARGET, probes=8)
    assert ((few.contribution - exact.contribution).abs() <= 5 * few.stderr + 1e-12).all()
    several = ik.token_attribution(model, ["w5", SOURCE], target_text=["w6", TARGET])
    torch.testing.assert_close(several[1].contribution, exact.contribution)
    made = ik.token_attribution(model, SOURCE, generate=3)
    attention = ik.effective_attention(model, SOURCE, generate=3, attention="cross")
    assert made.tokens == attention.tokens
    with pytest.raises(ik.InputError, match="of a decoder that attends to an encoder"):
        ik.token_attribution(tiny.shared("bert"), SOURCE, target_text=TARGET)


def test_speech_is_attributed_to_stretches_of_sound():
    model = tiny.two_stacks("whisper")
    found = ik.token_attribution(model, SOUND, target_text="ab", probes=4, layers=[1])
    assert found.axis("input").tokens[:5] == ("<|startoftranscript|>", "<|notimestamps|>", "a", "b", "0.00s")
    torch.testing.assert_close(found.contribution.sum(1), torch.ones_like(found.contribution[:, 0]))
