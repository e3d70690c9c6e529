"""What every supported family must show, on tiny random models with every parameter drawn anew."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from identikit.errors import ModelError
from identikit.models import blocks, families
from identikit.models import model as model_module
from identikit.models.families import FAMILIES
from identikit.models.load import check, load
from identikit.models.load.check import prove
from identikit.models.model import Model
from identikit.models.taps.switch import use_attention
from identikit.models.taps.tap import AttentionCall
from identikit.texts.text import EncodedText, TokenBatch, collate, single_text
from tests.models import tiny
from tests.models.state import state_of
from tests.reference import attention as reference

NAMES = list(tiny.BUILDERS)
CAUSAL = [name for name in NAMES if tiny.family(name).causal]
# Families that compute wholly in the model's dtype; the others compute norms, rotary tables or routers in float32.
EXACT = {
    "albert", "albert-groups", "bart", "bert", "bert-mlm", "biogpt", "camembert", "data2vec-text", "distilbert",
    "electra", "ernie", "esm-absolute", "gpt2", "gpt_bigcode", "gpt_neox", "m2m_100", "marian", "mbart", "nemotron",
    "nomic_bert", "bloom", "falcon-rw", "gptj", "mpnet", "opt", "pegasus", "phi", "phimoe", "roberta",
    "roberta-prelayernorm", "stablelm", "starcoder2", "vit", "xlm-roberta", "xlm-roberta-xl", "xlnet",
    "beit", "beit-shared", "clip-text", "clip-vision", "deit", "dinov2", "dinov2-registers", "dinov3", "hubert",
    "siglip-text", "siglip2-text", "siglip-vision", "wav2vec2", "wav2vec2-stable", "whisper",
}  # fmt: skip
# One family for each way in which blocks differ; the others are tried in the slow tests.
STRUCTURES = {
    "albert", "albert-groups", "bart", "bert", "cohere", "deepseek_v3", "distilbert", "electra", "esm", "exaone4",
    "gemma2", "gemma3", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granitemoe", "llama", "llama4-text",
    "mistral", "mixtral", "modernbert", "olmo2", "opt", "phi3", "qwen2_vl", "qwen3", "stablelm", "t5", "vit",
    "bloom", "falcon", "falcon-7b", "falcon-rw", "gptj", "mpnet",
    "beit", "clip-vision", "dinov3", "wav2vec2", "wav2vec2-stable",
}  # fmt: skip


def slow_unless(name: str, quick: set[str]) -> Any:
    return name if name in quick else pytest.param(name, marks=pytest.mark.slow)


SPLITTING = [slow_unless(name, STRUCTURES) for name in NAMES if tiny.family(name).splits]
CASTING = set(NAMES) - EXACT
# (layer: window) for the layers of each family that do not simply see everything, or everything before.
_ENDS = {0: 6, 2: 6}
_EVERY = {0: 6, 1: 6, 2: 6}
_ALTERNATING = (
    "cohere2", "exaone4", "gemma2", "gemma3", "gemma3-images", "gpt_oss", "granite_swa", "ministral", "olmo3",
    "vaultgemma",
)  # fmt: skip
WINDOWS = dict.fromkeys(_ALTERNATING, _ENDS) | dict.fromkeys(("mistral", "phi3", "starcoder2"), _EVERY)
WINDOWS |= {"modernbert": {1: 3}, "qwen2": {1: 6, 2: 6}}
CHUNKS = {"llama4": _ENDS, "llama4-text": _ENDS}
MASKED = {*WINDOWS, *CHUNKS}
WHOLE = {name for name in NAMES if not tiny.family(name).splits}  # blocks that do not come apart


def batch_of(model: Model, lengths: tuple[int, ...]) -> TokenBatch:
    if model.modality != "text":
        return model.sample(lengths)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, tiny.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    encoded = [EncodedText(tuple(ids), None, (False,) * len(ids), tuple(map(str, ids)), (), "made up") for ids in texts]
    return collate(encoded, pad_id=0)


def captured(model: Model, batch: TokenBatch) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    model.trace(batch, calls.append)
    return calls


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_what_differs_between_architectures_is_in_the_table():
    """The modules that load, run and prove models name no architecture: the table of families does."""
    names = "|".join({kind.split("_")[0] for kind in FAMILIES} - {"phi"})
    for module in (check, load, model_module, blocks):
        assert not re.findall(rf"\b(?i:{names})(?![a-z])", Path(module.__file__).read_text()), module.__name__


def test_every_family_has_a_tiny_model():
    assert {id(tiny.family(name)) for name in NAMES} == {id(row) for row in FAMILIES.values()}


@pytest.mark.parametrize("name", [slow_unless(name, STRUCTURES | MASKED | WHOLE) for name in NAMES])
def test_head_output_is_rebuilt_from_what_is_captured(name: str):
    """Softmax attention written out number by number, with masks written out from the family's rule."""
    model = tiny.shared(name, dtype=torch.float64)
    batch = batch_of(model, (9, 7))
    for call in captured(model, batch):
        kind = "causal" if name in CAUSAL else "both"
        width = None
        for spans, suffix in ((WINDOWS, " window"), (CHUNKS, " chunk")):
            if call.layer in spans.get(name, {}):
                kind += suffix
                width = spans[name][call.layer]
        for row, length in enumerate(batch.keep.sum(-1).tolist()):
            head = (call.layer + row) % model.n_heads
            shared = head // call.groups

            def sees(i: int, j: int, length: int = length, kind: str = kind, width: int | None = width) -> bool:
                return j < length and reference.visible(kind, i, j, width)

            seen = torch.tensor([[sees(i, j) for j in range(call.key.shape[2])] for i in range(length)])
            assert torch.equal(call.visible()[row, 0, :length], seen)
            expected = reference.head_output(
                call.query[row, head, :length], call.key[row, shared], call.value[row, shared],
                sees, call.scaling, call.softcap, None if call.bias is None else call.bias[row % len(call.bias), head],
                None if call.sink is None else float(call.sink[head]),
            )  # fmt: skip
            assert relative(call.output[row, head, :length], expected) < 1e-12
            assert relative(call.weights()[row, head, :length] @ call.value[row, shared], expected) < 1e-12


@pytest.mark.parametrize("name", [name for name in NAMES if name in STRUCTURES and tiny.family(name).positions])
def test_padded_batch_is_one_by_one(name: str):
    """On the other side than in the proof, which pads on the left where there are `position_ids`."""
    model = tiny.shared(name, dtype=torch.float64)
    batch = batch_of(model, (11, 4, 8))
    together = model.trace(batch)
    for row, kept in enumerate(batch.keep):
        alone = model.trace(single_text(batch, row))
        for layer in range(model.n_layers):
            assert relative(together.hidden[layer][row][kept], alone.hidden[layer][0]) < 1e-5
        assert torch.equal(together.inputs[row][kept], alone.inputs[0])


@pytest.mark.parametrize("name", ["bert", "t5", "mistral", "xlnet", "falcon-rw", "deberta-v2"])
def test_a_text_of_a_batch_is_the_text_alone(name: str):
    model = tiny.shared(name, dtype=torch.float64)
    batch = batch_of(model, (9, 6))
    together, alone = captured(model, batch), captured(model, batch_of(model, (9, 6)))
    positions = batch.keep[1].nonzero()[:, 0]
    for call, other in zip(together, alone, strict=True):
        text, expected = call.of_text(1, positions), other.of_text(1, torch.arange(6))
        heads, queries = torch.tensor([2, 0]), torch.tensor([5, 1])
        assert relative(text.output, expected.output) < 1e-6
        assert relative(text.weights(), expected.weights()) < 1e-6
        assert relative(text.weights(queries, heads=heads), text.weights()[:, heads][:, :, queries]) < 1e-12


@pytest.mark.parametrize(("name", "layers"), [("albert", 3), ("albert-groups", 4)])
def test_shared_layers_are_counted_by_call(name: str, layers: int):
    model = tiny.shared(name)
    calls = captured(model, batch_of(model, (6,)))
    assert model.n_layers == layers
    assert [call.layer for call in calls] == list(range(layers))
    assert not torch.equal(calls[0].query, calls[1].query)


@pytest.mark.parametrize("name", NAMES)
def test_proof_holds_and_the_model_leaves_as_it_came(name: str):
    model = tiny.shared(name, dtype=torch.float64).hf
    mixed = list(model.modules())[3]
    mixed.training = True  # restoring with train() or eval() would not do
    drawn = {"random": None}  # models of sounds draw which layers to drop, in evaluation mode too
    before = state_of(model) | drawn
    tapped = Model(model, tiny.tokenizer(), name=name)
    assert prove(tapped) == len(tapped.attention_layers)
    assert tapped.causal == tapped.family.causal

    def fail(call: AttentionCall) -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        tapped.trace(tapped.sample((5,)), fail)
    if tapped.family.splits:
        with pytest.raises(RuntimeError, match="inside"), tapped.split(tapped.sample((5,))):
            raise RuntimeError("inside")
    assert state_of(model) | drawn == before
    mixed.training = False


def test_a_block_that_does_not_attend_is_refused():
    class Bypass(nn.Module):
        def __init__(self, own: nn.Module):
            super().__init__()
            self.o_proj = own.o_proj
            self.v_proj = own.v_proj

        def forward(self, hidden_states, **kwargs):
            return hidden_states, None

    model = tiny.build("llama")
    model.base_model.layers[1].self_attn = Bypass(model.base_model.layers[1].self_attn)
    with pytest.raises(ModelError, match=r"block 1 .* called the tapped attention 0 times, not once"):
        Model(model, tiny.tokenizer(), name="bypassed")


def called_otherwise(model: hf.PreTrainedModel, change: Any) -> hf.PreTrainedModel:
    """Have `change` call the attention of block 1, which it is given, in its place."""
    attention = model.base_model.layers[1].self_attn
    own = attention.forward
    attention.forward = lambda *args, **kwargs: change(own, args, kwargs)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda own, args, kwargs: [own(*args, **kwargs), own(*args, **kwargs)][1],
            r"block 1 .* called the tapped attention 2 times",
        ),
        (
            lambda own, args, kwargs: own(*args, indices=torch.zeros(4), **kwargs),
            "passes indices, which identikit does not know",
        ),
    ],
)
def test_a_block_that_attends_otherwise_is_refused(change: Any, message: str):
    with pytest.raises(ModelError, match=message):
        Model(called_otherwise(tiny.build("llama"), change), tiny.tokenizer(), name="otherwise")


def small(name: str, **options: Any) -> hf.PreTrainedModel:
    """A model of a class that is not in the table."""
    model = getattr(hf, name)
    sizes = tiny._ENCODER | {"num_hidden_layers": 1} | options
    return model(model.config_class(**sizes))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: small("MambaModel"), "'mamba' has no softmax attention"),
        (lambda: small("RwkvModel", num_hidden_layers=2), "'rwkv' has no softmax attention"),
        (
            lambda: small("GPTNeoModel", num_hidden_layers=2, attention_types=[[["global", "local"], 1]]),
            "'gpt_neo' is not supported: it computes attention on its own, .*needs a tap of its own",
        ),
        (lambda: small("SplinterModel"), r"'splinter' is not supported: .*`identikit models`.*Add a family"),
        (
            lambda: small("DeepseekV32ForCausalLM", **tiny._LATENT, index_n_heads=2, index_head_dim=8),
            "'deepseek_v32' picks a few keys for each query",
        ),
        (
            lambda: small("Gemma4ForCausalLM", vocab_size_per_layer_input=60),
            "'gemma4_text' has layers that differ in their numbers",
        ),
        (lambda: small("BartForCausalLM", **tiny._TWO_STACKS), r"says blocks='layers\.\*', and \w+ has none"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(build, message: str):
    with pytest.raises(ModelError, match=message) as caught:
        Model(build(), tiny.tokenizer(), name="refused")
    assert "\n" not in str(caught.value)


# What makes a row wrong though the parts that it names are there.
WRONG: list[tuple[str, str, Any, str]] = [
    ("gpt_neox", "interleaved", False, "values are the value layer's, head by head"),
    ("gpt2", "interleaved", True, "values are the value layer's, head by head"),
    ("llama", "interleaved", True, r"says value='self_attn\.v_proj', but it makes 12 numbers"),
    ("llama", "value", "self_attn.k_proj", r"values are the value layer's.*`value='self_attn\.k_proj'`"),
    ("llama", "output", "self_attn.q_proj", r"output='self_attn\.q_proj'"),
    ("llama", "output", "mlp.down_proj", r"says output='mlp\.down_proj', but it takes 40 numbers to 24"),
    ("falcon_h1", "instead", "feed_forward", "called the tapped attention 1 times, not never"),
    ("llama", "blocks", "layers.0", "1 blocks called the tapped attention 3 times"),
    ("llama", "embedding", "norm", "`embedding` is the module whose input is the embedding sum"),
    (
        "bert",
        "embedding",
        "embeddings.word_embeddings",
        r"embedding='embeddings.word_embeddings', and there is a tensor",
    ),
    ("bert", "sequence_first", True, "sequence_first=True, and there is a tensor"),
    ("roberta", "positions", True, r"is the model's own, alone \(`positions=True`\)"),
    ("llama4-text", "positions", True, r"is the model's own, alone \(`positions=True`\)"),
    ("t5", "positions", True, "says positions=True, and its forward takes no position_ids"),
    ("t5", "stack", None, r"says blocks='block\.\*', and T5EncoderModel has none there"),
    ("xlnet", "sequence_first", False, "sequence_first=False, and there is a tensor"),
    ("xlnet", "splits", True, "cannot be taken apart: its row says sequence_first"),
    ("xlnet", "watch_output", None, r"output='rel_attn\.o'"),
    ("falcon_h1", "splits", True, "acts on each position alone"),
    ("qwen3_next", "splits", True, "blocks without softmax attention do not split"),
    ("qwen3_next", "instead", None, r"value='self_attn\.v_proj'|output='self_attn\.o_proj'"),
    ("qwen3_next", "tap", use_attention, "head outputs times H is the module's output"),
]


@pytest.mark.parametrize(("name", "field", "wrong", "message"), WRONG)
def test_a_wrong_row_says_which_promise_fails(
    name: str, field: str, wrong: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    kind = tiny.BUILDERS[name].config().model_type
    monkeypatch.setitem(FAMILIES, kind, replace(tiny.family(name), **{field: wrong}))
    with pytest.raises(ModelError, match=message):
        prove(tiny.loaded(name))


@settings(max_examples=25)
@given(data=st.data())
def test_a_row_that_names_another_part_is_refused(data: st.DataObject):
    """Any other module of the model in the place of a part, or a name that is not there: never anything but words."""
    name = data.draw(st.sampled_from(["bert", "gpt2", "gpt_neox", "llama", "phi3", "t5", "deepseek_v3", "qwen3_next"]))
    model, row = tiny.build(name), tiny.family(name)
    base = families.stack_of(row, model).base_model
    blocks = families.find_all(base, row.blocks)
    roots = {"blocks": base, "output": blocks[-1], "value": blocks[-1], "embedding": base}
    field = data.draw(st.sampled_from([field for field in roots if getattr(row, field) is not None]))
    paths = [path for path, _ in roots[field].named_modules() if path and path != getattr(row, field)]
    if field == "embedding":  # what runs before the first block and takes vectors may be called the embedding
        paths = [path for path in paths if "embeddings" not in path or "word" in path]
    wrong = data.draw(st.sampled_from([*paths, "no.such.part", f"{getattr(row, field)}.weight"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, model.config.model_type, replace(row, **{field: wrong}))
        with pytest.raises(ModelError):
            prove(Model(model, tiny.tokenizer(), name=name))


@pytest.mark.parametrize("name", SPLITTING)
def test_block_jacobian_from_the_two_halves(name: str):
    """d block = d post/dx + d post/do · d mix · d pre, against reverse-mode autograd of the whole block."""
    model = tiny.shared(name, dtype=torch.float64)
    batch = batch_of(model, (4,))
    with model.split(batch) as split, sdpa_kernel(SDPBackend.MATH):
        layer = min(1, model.n_layers - 1)
        block = split.blocks[layer]
        x = block.input

        def mix(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            call = block.call
            scores = query @ key.repeat_interleave(call.groups, 1).transpose(-1, -2) * call.scaling
            scores = call.softcap * torch.tanh(scores / call.softcap) if call.softcap else scores
            scores = scores if call.bias is None else scores + call.bias
            scores = scores.masked_fill(~call.visible(), -torch.inf)
            if call.sink is not None:
                scores = torch.cat([scores, call.sink[:, None, None].expand(*scores.shape[:-1], 1)], -1)
            weights = torch.softmax(scores, -1)[..., : key.shape[2]]
            return weights @ value.repeat_interleave(call.groups, 1)

        n = x.numel()
        parts = block.pre(x)
        output = mix(*parts)
        d_pre = torch.cat([j.reshape(-1, n) for j in jacrev(block.pre)(x)])
        d_mix = torch.cat([j.reshape(output.numel(), -1) for j in jacrev(mix, argnums=(0, 1, 2))(*parts)], dim=1)
        d_x, d_o = (j.reshape(n, -1) for j in jacrev(block.post, argnums=(0, 1))(x, output))
        whole = jacrev(lambda x: block.run(x, lambda call: None))(x).reshape(n, n)
        assert relative(d_x + d_o @ d_mix @ d_pre, whole) < (1e-6 if name in CASTING else 1e-10)
        assert relative(block.post(x, output), block.run(x, lambda call: None)) < 1e-12


def test_long_masks_are_kept_by_rule_and_agree(monkeypatch: pytest.MonkeyPatch):
    """The path for long texts, forced on short ones: plain causal, padded, windowed, soft-capped."""
    for name in ("llama", "mistral", "gemma2", "bert", "bloom", "falcon"):
        model = tiny.shared(name)
        for lengths in ((12,), (12, 7)):
            batch = batch_of(model, lengths)
            calls = captured(model, batch)
            materialised = model.trace(batch).hidden[-1]
            with monkeypatch.context() as patch:
                patch.setattr("identikit.models.taps.tap.LONGEST_MASK", 4)
                patch.setattr("identikit.models.taps.tap.ROW_BYTES", 4096)
                by_rule = captured(model, batch)
                assert relative(model.trace(batch).hidden[-1][batch.keep], materialised[batch.keep]) < 1e-5
                for long, short in zip(by_rule, calls, strict=True):
                    assert long.mask is not None and not isinstance(long.mask, torch.Tensor)
                    assert torch.equal(long.visible(slice(2, 9)), short.visible(slice(2, 9)))
                    plain = name in ("llama", "bloom", "falcon") or (name == "gemma2" and long.layer == 1)
                    assert long.mask.plain_causal == (plain and len(lengths) == 1)
