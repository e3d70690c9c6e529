"""Targets: every kind against plain autograd in float64, contrasts as differences, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import identikit as ik
from identikit.attribution.outputs import attribute_output
from identikit.models.model import Model
from identikit.models.target import checked_target
from identikit.models.text_run import TextRun
from tests.models import tiny
from tests.models.test_contract import EXACT, NAMES, batch_of, slow_unless
from tests.reference import outputs as reference
from tests.reference.outputs import Plain

QUICK = {
    "albert-groups", "bart", "bert-mlm", "distilbert", "gemma2", "gpt2", "gpt_oss", "llama", "mixtral", "modernbert",
    "opt", "t5", "vit", "bloom", "mpnet", "xlnet", "wav2vec2", "qwen2_vl", "deberta-v2",
}  # fmt: skip
WEIGHTS = torch.linspace(-1.0, 2.0, 24, dtype=torch.float64)
TEXT = "w4 w9 w4 w17 w20"
PAIR = ("w8 w5 w21", "w40 w9")


def a_sum(logits: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    return (hidden[0, 1] * WEIGHTS.repeat(2)[: hidden.shape[2]].to(hidden)).sum()


def read(model: Model) -> TextRun:
    return TextRun(model, batch_of(model, (7,)), "made up", {}, {}, None)


def off(found: Any, expected: Any) -> float:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", [slow_unless(name, QUICK) for name in NAMES])
def test_every_family_agrees_with_autograd(name: str):
    model = tiny.shared(name, dtype=torch.float64)
    reading = read(model)
    plain = Plain(model, reading.batch)
    targets: dict[Any, Any] = {a_sum: lambda run: a_sum(None, run.hidden[None])}
    if plain.logits is not None:
        targets["w9@3" if model.modality == "text" else "9@3"] = lambda run: run.logits[0, 3, 9]
    for target, number in targets.items():
        found = attribute_output(reading, target)
        gradient = plain.gradient(number)
        assert off(found.contribution, reference.shares(gradient)) < 1e-9
        entering = Plain(model, reading.batch, after=True)
        signed = (entering.gradient(number) * entering.inputs).sum(-1).detach()
        assert off(found.gradient_x_input, signed) < 1e-9
        assert found.value == pytest.approx([float(number(plain).detach())], rel=1e-9)


HEADS = {
    "BertForSequenceClassification": tiny._ENCODER,
    "LlamaForSequenceClassification": tiny._GROUPED,
    "GPT2ForSequenceClassification": tiny.BUILDERS["gpt2"].sizes,
    "DistilBertForSequenceClassification": tiny.BUILDERS["distilbert"].sizes,
    "BertForTokenClassification": tiny._ENCODER,
}


def with_head(name: str) -> Model:
    torch.manual_seed(0)
    labels = {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
    made = tiny.TinyModel(name, HEADS[name] | labels)()
    return Model(tiny.drawn(made.eval(), dtype=torch.float64), tiny.tokenizer(), name=name)


@pytest.mark.parametrize("name", HEADS)
def test_a_class_by_name_number_and_prediction(name: str):
    model = with_head(name)
    by_token = name.endswith("TokenClassification")
    at = "@3" if by_token else ""
    found = ik.token_attribution(model, TEXT, target=[f"yes{at}", (f"yes{at}", f"no{at}")])
    plain = Plain(model, batch(model, TEXT))
    logits = plain.logits[0, 3] if by_token else plain.logits[0]
    gradient = plain.gradient(lambda run: logits[2])
    assert off(found.contribution[0], reference.shares(gradient)) < 1e-9
    contrast = plain.gradient(lambda run: logits[2] - logits[0])
    # A contrast goes back through the head twice, and Llama's norm rounds each to float32.
    assert off(found.contribution[1], reference.shares(contrast)) < (1e-6 if "Llama" in name else 1e-9)
    assert found.probability[0] == pytest.approx(float(logits.detach().softmax(-1)[2]), rel=1e-9)
    best = ik.token_attribution(model, TEXT, target=at or "prediction")
    assert ["no", "maybe", "yes"][int(logits.argmax())] in best.target[0]
    numbered = ik.token_attribution(model, TEXT, target=f"2{at}" if by_token else 2)
    assert torch.equal(numbered.contribution, found.contribution[0])


def batch(model: Model, text: Any):
    return next(iter(model.batches(model.encode(text))))


def test_next_tokens_by_spelling_and_id_and_their_contrast():
    model = tiny.shared("gpt2", dtype=torch.float64)
    found = ik.token_attribution(model, TEXT, target=["w9", "w12", ("w9", "w12")])
    one, other, contrast = found.gradient_x_input
    assert off(contrast, one - other) < 1e-12
    assert found.value[2] == pytest.approx(found.value[0] - found.value[1], rel=1e-12)
    assert found.probability[2] is None and 0 < found.probability[0] < 1
    assert torch.equal(ik.token_attribution(model, TEXT, target=9).contribution, found.contribution[0])
    own = ik.token_attribution(model, TEXT, target="prediction")
    logits = Plain(model, batch(model, TEXT)).logits[0, -1]
    assert own.value == pytest.approx([float(logits.detach().max())]) and f"w{int(logits.argmax())}" in own.target[0]
    assert torch.allclose(found.contribution.sum(-1), torch.ones(3, dtype=torch.float64))
    assert "next token 'w9'" in str(found) and found.words().contribution.shape == (3, 7)


def test_inputs_after_the_embeddings_norm():
    model = tiny.shared("bert-mlm", dtype=torch.float64)
    found = ik.token_attribution(model, TEXT, target="w9@2", source="after")
    plain = Plain(model, batch(model, TEXT), after=True)
    assert off(found.contribution, reference.shares(plain.gradient(lambda run: run.logits[0, 2, 9]))) < 1e-9


def masked_model(name: str = "bert-mlm") -> Model:
    tokenizer = tiny.tokenizer()
    tokenizer.mask_token = "w59"
    return Model(tiny.build(name, dtype=torch.float64), tokenizer, name="masked")


def test_a_masked_model_is_asked_at_its_mask():
    model = masked_model()
    found = ik.token_attribution(model, "w4 w9 w59 w17", target="w5")
    assert "position 3" in found.target[0]
    there = ik.token_attribution(model, "w4 w9 w59 w17", target="w5@3")
    assert torch.equal(found.contribution, there.contribution)
    with pytest.raises(ik.InputError, match="2 masked tokens here"):
        ik.token_attribution(model, "w4 w59 w59 w17", target="w5")


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "llama"])
def test_similarity_goes_through_the_pooling(name: str):
    model = tiny.shared(name, dtype=torch.float64)
    found = ik.token_attribution(model, PAIR, target="similarity")
    first, second = (Plain(model, batch(model, half)) for half in PAIR)
    means = [run.final[0].mean(0) for run in (first, second)]
    cosine = F.cosine_similarity(*means, dim=0)
    gradients = torch.autograd.grad(cosine, [first.inputs, second.inputs])
    assert found.value == pytest.approx([float(cosine.detach())], rel=1e-9)
    assert off(found.contribution, reference.shares(torch.cat(gradients))) < 1e-9
    assert found.tokens == tuple(first_and_second(model))
    assert len(found.words().tokens) == len(found.tokens)


def first_and_second(model: Model) -> list[str]:
    return [token for half in PAIR for token in model.encode(half)[0].tokens]


def test_the_sweeps_jacobian_gives_the_same():
    """A target's gradient is its gradient by the last hidden vectors, times their Jacobian by the inputs."""
    model = tiny.shared("bert-mlm", dtype=torch.float64)
    target = checked_target(model, TEXT, "w9@2")
    states = target.states().requires_grad_()
    with torch.enable_grad():
        (by_states,) = torch.autograd.grad(target.number(states[None])[0], states)
    plain = Plain(model, batch(model, TEXT))
    gradient = plain.gradient(lambda run: (run.hidden * by_states).sum())
    found = ik.token_attribution(model, TEXT, target="w9@2")
    assert off(found.contribution, reference.shares(gradient)) < 1e-9


def test_targets_are_of_many_states_at_once():
    model = tiny.shared("llama", dtype=torch.float64)
    target = checked_target(model, TEXT, "w9")
    states = target.states()
    both = target.number(torch.stack([states, 2 * states]))
    assert float(both[0]) == pytest.approx(float(target.number(states[None])), rel=1e-12) and both[0] != both[1]
    assert target.probability is not None and 0 < float(target.probability(states[None])[0]) < 1


BAD = {
    "two tokens": ("llama", "w5 w6", "is 2 tokens of"),
    "no such id": ("llama", 999, "expected a token, a number from 0 to 59, or in Python a function"),
    "a float": ("llama", 1.5, "expected a token"),
    "truth": ("llama", True, "expected a token"),
    "no position": ("llama", "w5@99", "is at position 99, and the text has 7 tokens"),
    "an empty list": ("llama", [], "the list is empty"),
    "twice": ("llama", ["w9", 9], "two targets that are called"),
    "three": ("llama", ("w5", "w6", "w7"), "a pair is one target against another"),
    "itself": ("llama", ("w9", 9), "against itself"),
    "a set": ("llama", {"w5"}, "expected one target"),
    "no logits": ("bert", "w5", "makes none"),
    "no pair": ("bert", "similarity", "is of a pair of texts"),
    "a word that the tokenizer does not know": ("llama", "Paris", "is not a token of tiny llama"),
    "a function without arguments": ("llama", lambda: 1.0, r"its arguments are \(\)"),
    "a function that fails": ("llama", lambda hidden: hidden["last"], "failed on the text"),
    "no finite number": ("llama", lambda hidden: hidden.sum() / 0, "must return one finite number"),
    "a function of nothing": ("llama", lambda logits, hidden: 5.0, "must return one finite number"),
    "not a number": ("llama", lambda logits, hidden: hidden, "must return one finite number"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_target_is_refused(what: str):
    name, target, message = BAD[what]
    with pytest.raises(ik.InputError, match=message):
        ik.token_attribution(tiny.shared(name), TEXT, target=target)


@pytest.mark.parametrize("option", [{"probes": 4}, {"norm": "sum"}, {"layers": [0]}, {"targets": [1]}, {"seed": 5}])
def test_an_option_of_hidden_vectors_has_no_effect(option: dict[str, Any]):
    with pytest.raises(ik.InputError, match="has no effect here"):
        ik.token_attribution(tiny.shared("llama"), TEXT, target="w5", **option)


def test_a_function_may_take_the_hidden_vectors_alone():
    model = tiny.shared("llama")
    both = ik.token_attribution(model, TEXT, target=lambda logits, hidden: hidden[0, -1, 3])
    alone = ik.token_attribution(model, TEXT, target=lambda hidden: hidden[0, -1, 3])
    assert torch.equal(alone.contribution, both.contribution)
    builtin = ik.token_attribution(model, TEXT, target=torch.sum)
    assert torch.equal(builtin.contribution, ik.token_attribution(model, TEXT, target=lambda h: h.sum()).contribution)


def test_similarity_stands_alone():
    model = tiny.shared("bert-mlm")
    for target in (["similarity", "w5@1"], ("similarity", "w5@1")):
        with pytest.raises(ik.InputError, match="halves of a pair apart"):
            ik.token_attribution(model, PAIR, target=target)


def test_several_texts_and_the_model_stays_as_it_was():
    model = tiny.shared("llama")
    training = model.hf.training
    both = ik.token_attribution(model, [TEXT, "w5 w6"], target="prediction")
    assert [len(each.tokens) for each in both] == [7, 4] and len(both.to_frame()) == 11
    assert model.hf.training is training and all(p.grad is None for p in model.hf.parameters())


FISHER = [
    slow_unless(name, {"bert-mlm", "gemma2", "gpt2", "llama"})
    for name in NAMES
    if "mlm" in name or (tiny.family(name).causal and name != "clip-text")
]


@pytest.mark.parametrize("name", FISHER)
def test_fishers_norm_is_the_literal_trace(name: str):
    model = tiny.shared(name, dtype=torch.float64)
    plain = Plain(model, batch(model, TEXT))
    found = ik.token_attribution(model, TEXT, norm="fisher")
    few = ik.token_attribution(model, TEXT, norm="fisher", targets=[5, 2])
    assert found.layers == (model.n_layers - 1,) and found.norm == "fisher"
    for output in (2, 5):
        expected = reference.fisher_shares(plain, output)
        tolerance = 1e-9 if name in EXACT else 1e-5
        assert off(found.contribution[0, :, output], expected) < tolerance
        assert off(few.sel(output=output).contribution[0], expected) < tolerance


def test_fishers_norm_from_probes_is_near():
    model = tiny.shared("gpt2", dtype=torch.float64)
    exact = ik.token_attribution(model, TEXT, norm="fisher").contribution
    near = ik.token_attribution(model, TEXT, norm="fisher", probes=16)
    assert near.stderr is not None and ((near.contribution - exact).abs() <= 5 * near.stderr + 1e-12).all()
    whole = ik.token_attribution(model, TEXT, norm="fisher", probes=24)
    assert torch.allclose(whole.contribution, exact, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("bert", {}, "gives none"), ("vit", {}, "gives none"), ("gpt2", {"layers": [0, 2]}, "is of the last layer, 2")],
)
def test_fishers_norm_needs_a_vocabulary_and_the_last_layer(name: str, options: dict[str, Any], message: str):
    with pytest.raises(ik.InputError, match=message):
        ik.token_attribution(tiny.shared(name), TEXT, norm="fisher", **options)


def test_a_long_target_is_cut_where_it_shows():
    named = "next token 'w19' against next token 'w18'"
    contrast = ik.token_attribution(tiny.shared("llama"), TEXT, target=[("w19", "w18"), "w7"]).sel(target=named)
    assert f'target "{named[:39]}…"' in repr(contrast)


def test_fishers_norm_is_of_probabilities():
    found = ik.token_attribution(tiny.shared("llama"), TEXT, norm="fisher")
    assert "to the probabilities at its own place" in str(found)
