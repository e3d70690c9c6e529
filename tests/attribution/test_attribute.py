"""Hidden Token Attribution: every engine against plain autograd, what must not change it, estimates, readings."""

import dataclasses
import zlib
from collections.abc import Callable
from itertools import product

import pytest
import torch

from identikit.attribution import attribute as attribution
from identikit.attribution import passes, sweep
from identikit.attribution.attribute import token_attribution
from identikit.attribution.plan import AttributionPlan, _joint_plan
from identikit.attribution.request import AttributionOptions, Request
from identikit.errors import InputError
from identikit.maths import jacobian
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.models.text_run import TextRun
from identikit.texts.text import TokenBatch, single_text
from tests.models import tiny
from tests.models.test_contract import CASTING, SPLITTING, STRUCTURES, batch_of, slow_unless
from tests.reference import attribution as reference
from tests.reference.outputs import Plain

# Families whose norms or rotary tables compute in float32. Routers cast in a way that the test cannot widen.
ROUTED = {"deepseek_v3", "ernie4_5_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
CAST = [slow_unless(name, STRUCTURES) for name in sorted(CASTING - ROUTED) if tiny.family(name).splits]
TEXTS = ["w4 w9 w4 w17 w20", ("w8 w5 w21", "w40 w9"), "w11 w12"]


def asked(model: Model, *, layers=None, targets=None, **options) -> Request:
    return dataclasses.replace(AttributionOptions(**options).checked(model, layers), targets=targets)


def swept(model: Model, *batches: TokenBatch, chunk: int = 2, round_size: int = 4, **options) -> list[torch.Tensor]:
    """Sweep texts side by side in rounds of `round_size` inputs."""
    texts = [read(model, batch) for batch in batches]
    of_texts = [asked(model, **options)] * len(batches)
    return sweep.sweep(texts, of_texts, chunk=chunk, round_size=round_size, tick=lambda count: None)


def read(model: Model, batch: TokenBatch) -> TextRun:
    """A batch of one text, before the model has run."""
    return TextRun(model, batch, "", {}, {}, None)


def one_row(batch: TokenBatch, row: int) -> TokenBatch:
    """One text of a batch, its padding kept."""
    part = slice(row, row + 1)
    tensors = {name: getattr(batch, name) for name in ("ids", "keep", "special", "segments", "features")}
    cut = {name: tensor[part] for name, tensor in tensors.items() if tensor is not None}
    return dataclasses.replace(batch, tokens=batch.tokens[part], words=batch.words[part], order=(0,), **cut)


def reference_norms(model: Model, batch: TokenBatch, outputs: list[int], norms, *, after: bool = False) -> torch.Tensor:
    """Norms (norm, layer, input, output) of the Jacobian blocks, one backward pass for each number."""
    run = Plain(model, batch, after=after)
    blocks = [reference.jacobians(layer[outputs], run.inputs) for layer in run.layers]
    return torch.tensor(
        [[[[reference.block_norm(block, norm) for block in row] for row in one] for one in blocks] for norm in norms],
        dtype=torch.float64,
    )


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the largest entry of the layer."""
    return float(((found - expected).abs().amax((-2, -1)) / expected.amax((-2, -1))).max())


@pytest.fixture
def float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every cast to float32, as in the norms and rotary tables of several families, be one to float64."""
    to = torch.Tensor.to

    def wide(self, *args, **kwargs):
        wanted = args[0] if args else kwargs.get("dtype")
        return self.double() if wanted is torch.float32 else to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", wide)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def assert_sweep_is_autograd(name: str, tolerance: float, norms: tuple[str, ...] = ("frobenius",)) -> None:
    """On a padded text beside another: three outputs of all layers and inputs, and padding causes nothing."""
    model = tiny.loaded(name, dtype=torch.float64)
    batch = one_row(batch_of(model, (7, 6)), 1)
    keep = batch.keep[0]
    kept = keep.nonzero()[:, 0]
    outputs = [0, len(kept) // 2, -1]
    expected = reference_norms(model, batch, kept[outputs].tolist(), norms)
    assert expected[:, :, ~keep].count_nonzero() == 0
    for norm, one in zip(norms, expected[:, :, keep], strict=True):
        _, found = swept(model, single_text(batch_of(model, (7, 6)), 0), single_text(batch, 0), norm=norm, chunk=3)
        assert off(found[:, :, outputs], one) <= tolerance
        if name in ("gpt2", "llama"):
            assert found.tril(-1).count_nonzero() == 0  # an input moves nothing before it


@pytest.mark.parametrize("name", SPLITTING)
def test_sweep_agrees_with_autograd(name: str):
    norms = jacobian.NORMS if name in ("bert", "albert", "gemma2") else ("frobenius",)
    assert_sweep_is_autograd(name, 1e-6 if name in CASTING else 1e-9, norms)


@pytest.mark.parametrize("name", CAST)
def test_sweep_agrees_to_float64_once_the_norms_are(name: str, float64_norms: None):
    assert_sweep_is_autograd(name, 1e-9)


@pytest.mark.parametrize(("engine", "name"), [
    *((passes.generic, name) for name in ("xlnet", "gpt2", "llama", "deberta-v2", "deberta-v2-conv")),
    *((passes.reverse, name) for name in ("bert", "electra")),
])  # fmt: skip
def test_passes_agree_with_autograd(engine: Callable[..., torch.Tensor], name: str):
    """In every norm, for two targets of two layers, neither in order."""
    model = tiny.loaded(name, dtype=torch.float64)
    batch = one_row(batch_of(model, (6, 5)), 1)
    targets = (4, 1)
    expected = reference_norms(model, batch, list(targets), jacobian.NORMS)
    for norm, of_norm in zip(jacobian.NORMS, expected, strict=True):
        request = asked(model, norm=norm, targets=targets, layers=(2, 0))
        found = engine(read(model, batch), request, chunk=2, tick=lambda count: None)
        assert off(found, of_norm[[2, 0]]) <= (1e-6 if name in CASTING else 1e-9)


@pytest.mark.parametrize(("name", "source"), [
    ("bert", "after"), ("albert", "after"), *product(("deberta-v2-conv", "xlnet"), ("before", "after")),
])  # fmt: skip
def test_inputs_before_and_after_the_embeddings_norm(name: str, source: str):
    """By every engine that the model has; the two last models do not split."""
    model = tiny.loaded(name, dtype=torch.float64)
    batch = batch_of(model, (5,))
    (expected,) = reference_norms(model, batch, [1, 4], ["frobenius"], after=source == "after")
    request = asked(model, source=source, targets=(1, 4))
    answers = [passes.generic(read(model, batch), request, chunk=2, tick=lambda count: None)]
    if model.family.splits:
        answers.append(passes.reverse(read(model, batch), request, chunk=2, tick=lambda count: None))
        answers.append(swept(model, batch, source=source)[0][:, :, [1, 4]])
    for answer in answers:
        assert off(answer, expected) <= 1e-9


def test_chunks_and_rounds_change_nothing():
    for name in ("bert", "llama"):
        model = tiny.loaded(name, dtype=torch.float64)
        batch = batch_of(model, (9,))
        (whole,) = swept(model, batch, chunk=9, round_size=9)
        for chunk, round_size in ((1, 1), (2, 9), (3, 5)):
            assert off(swept(model, batch, chunk=chunk, round_size=round_size)[0], whole) <= 1e-13
        (some,) = swept(model, batch, chunk=4, layers=(1,), targets=(8, 0, 3))
        assert off(some, whole[1:2][:, :, [8, 0, 3]]) <= 1e-13


def test_causal_models_are_not_asked_about_the_past(monkeypatch: pytest.MonkeyPatch):
    model = tiny.loaded("gpt2")
    rows: list[int] = []
    push = jacobian.push

    def watched(tangents, block, **rest):
        rows.append(len(tangents))
        push(tangents, block, **rest)

    monkeypatch.setattr(jacobian, "push", watched)
    swept(model, batch_of(model, (6,)), chunk=2)
    assert rows == [6, 4, 6, 4, 2, 2]  # two layers behind the first, for each chunk of two rounds


# What the public function promises


@pytest.mark.parametrize("name", ["bert", "llama", "xlnet"])
def test_contributions_are_shares_of_one(name: str):
    for result in token_attribution(tiny.loaded(name), TEXTS):
        assert (result.contribution >= 0).all()
        assert torch.allclose(result.contribution.sum(1), torch.ones(3, len(result.tokens)), atol=1e-6)
        assert result.stderr is None


def test_texts_do_not_touch_each_other():
    model = tiny.loaded("bert")
    together = token_attribution(model, TEXTS)
    turned = token_attribution(model, TEXTS[::-1])
    alone = [token_attribution(model, text) for text in TEXTS]
    for first, second, third in zip(together, turned[::-1], alone, strict=True):
        assert first.tokens == second.tokens == third.tokens
        assert torch.equal(first.contribution, second.contribution)
        assert torch.equal(first.contribution, third.contribution)


@pytest.mark.parametrize("probes", ["exact", 3])
def test_groups_of_texts_do_not_matter(probes: object, monkeypatch: pytest.MonkeyPatch):
    model = tiny.loaded("bert", dtype=torch.float64)
    alone = token_attribution(model, TEXTS, probes=probes)

    def groups(model: Model, plans: list[AttributionPlan], *, padded: bool):
        yield [1, 0], _joint_plan([plans[1], plans[0]])
        yield [2], plans[2]

    monkeypatch.setattr(attribution, "side_by_side", groups)
    for one, other in zip(token_attribution(model, TEXTS, probes=probes), alone, strict=True):
        assert one.tokens == other.tokens and one.targets == other.targets
        assert off(one.contribution, other.contribution) <= 1e-12


SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gemma2", "vit")]


@pytest.mark.parametrize("name", ["bert", "t5", "mistral", *SLOWER])
def test_texts_side_by_side_are_as_alone(name: str):
    """Texts of three lengths, padded to the longest, in rounds that end within a text."""
    model = tiny.loaded(name, dtype=torch.float64)
    batch = batch_of(model, (9, 6, 8))
    texts = [single_text(batch, row) for row in range(3)]
    for round_size, probes in ((4, "exact"), (100, 5)):
        found = swept(model, *texts, round_size=round_size, probes=probes)
        for text, one in zip(texts, found, strict=True):
            (alone,) = swept(model, text, probes=probes)
            assert (one - alone).abs().max() <= (1e-6 if name in CASTING else 1e-12) * alone.max()


def test_renaming_hidden_units_changes_nothing():
    """Permute the features of the hidden vectors and of the feed-forward layers, everywhere they occur."""
    model = tiny.loaded("bert", dtype=torch.float64)
    before = token_attribution(model, TEXTS[0]).contribution
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randperm(24, generator=generator)
    inner = torch.randperm(40, generator=generator)
    with torch.no_grad():
        for name, parameter in model.hf.named_parameters():
            if "intermediate" in name:  # its outputs, and for the weight its inputs
                parameter.copy_(parameter[inner][:, hidden] if parameter.ndim == 2 else parameter[inner])
            elif name.endswith("output.dense.weight"):
                parameter.copy_(parameter[hidden] if "attention" in name else parameter[hidden][:, inner])
            elif "LayerNorm" in name or name.endswith("output.dense.bias"):
                parameter.copy_(parameter[hidden])
            elif parameter.ndim == 2 and "pooler" not in name:  # embeddings, queries, keys and values
                parameter.copy_(parameter[:, hidden])
    after = token_attribution(model, TEXTS[0]).contribution
    assert (after - before).abs().max() <= 1e-12


def test_a_target_that_only_some_texts_have_is_refused_with_the_text():
    model = tiny.loaded("bert")
    with pytest.raises(InputError, match=r"In texts\[1\], there is no target 'w4'\. The positions are 0 to 3: "):
        token_attribution(model, ["w3 w4", "w5 w6"], targets="w4")
    with pytest.raises(InputError, match=r"^There is no target 'w4'"):
        token_attribution(model, ["w5 w6"], targets="w4")


def test_what_a_result_holds():
    model = tiny.loaded("bert")
    result = token_attribution(model, TEXTS, layers=[2, 0], targets=[3, 1])[1]
    assert result.tokens == ("<s>", "w8", "w5", "w21", "</s>", "w40", "w9", "</s>")
    assert tuple(result.about["special"]) == (True, False, False, False, True, False, False, True)
    assert result.about["words"] == [[1, 2], [2, 3], [3, 4], [5, 6], [6, 7]]
    assert (result.layers, result.targets, result.norm, result.probes) == ((2, 0), (3, 1), "frobenius", None)
    whole = token_attribution(model, TEXTS)[1].contribution
    assert torch.allclose(result.contribution, whole[[2, 0]][:, :, [3, 1]], atol=1e-6)
    assert result.provenance.settings["norm"] == "frobenius"
    assert result.provenance.settings["engine"] == result.engine
    frame = result.to_frame()
    assert len(frame) == 2 * 8 * 2
    row = frame.set_index(["layer", "input", "output"]).loc[(0, 4, 1)]
    assert (row["input_token"], row["output_token"]) == ("</s>", "w8")
    assert row["contribution"] == pytest.approx(float(result.contribution[1, 4, 1]))


def test_special_tokens_are_found_by_the_tokenizers_own_names():
    model = load()
    result = token_attribution(model, ("one two", "three"), probes=2, layers=[0])
    assert (result.tokens[result.cls], result.tokens[result.separator], result.separator) == ("[CLS]", "[SEP]", 3)


def test_engines_are_chosen_and_reported():
    bert = tiny.loaded("bert")
    xlnet = tiny.loaded("xlnet")
    chosen = {
        "sweep": token_attribution(bert, TEXTS[0]),
        "generic": token_attribution(xlnet, TEXTS[0]),
        "reverse": token_attribution(bert, TEXTS[0], norm="sum"),
    }
    assert {name: result.engine for name, result in chosen.items()} == {name: name for name in chosen}
    assert token_attribution(bert, TEXTS[0], targets=[2], layers=[0]).engine == "reverse"


def test_images_are_attributed_by_patches():
    image = pytest.importorskip("PIL.Image")
    import transformers as hf

    model = tiny.loaded("vit")
    model.tokenizer = hf.ViTImageProcessor(size={"height": 16, "width": 16})
    result = token_attribution(model, image.new("RGB", (20, 20), "red"), layers=[1])
    assert result.tokens[:2] == ("[CLS]", "r0c0")
    assert result.cls == 0
    assert torch.allclose(result.contribution.sum(1), torch.ones(1, 17), atol=1e-6)
    red, blue = (image.new("RGB", (20, 20), colour) for colour in ("red", "blue"))
    named = [one.provenance.text for one in token_attribution(model, [red, blue, red], layers=[1], probes=2)]
    assert named[0] == named[2] == result.provenance.text != named[1]
    with pytest.raises(InputError, match="the list is empty"):
        token_attribution(model, [])


def test_more_directions_than_hidden_vectors_have_go_forward():
    """The inputs of this model are larger than its hidden vectors, whose directions are too few to go back from."""
    import transformers as hf

    stock = hf.AlbertModel(hf.AlbertConfig(**tiny._ENCODER, embedding_size=40, num_hidden_groups=1)).eval()
    model = load(stock, tiny.tokenizer())
    found = token_attribution(model, TEXTS[0], targets=[1], probes=30)
    assert found.engine != "reverse" and torch.allclose(found.contribution.sum(1), torch.ones(3, 1))


def test_progress_counts_tokens():
    seen: list[tuple[int, int]] = []
    token_attribution(tiny.loaded("bert"), TEXTS, progress=lambda what, done, total: seen.append((done, total)))
    lengths = 7 + 8 + 4
    assert {total for _, total in seen} == {lengths}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (lengths, lengths)


def test_low_precision_is_close():
    model = tiny.loaded("bert")
    exact = token_attribution(model, TEXTS[0]).contribution
    for precision, allowed in (("tf32", 1e-2), ("bfloat16", 3e-2)):
        found = token_attribution(model, TEXTS[0], precision=precision).contribution
        assert ((found - exact).abs() / exact).max() <= allowed
    assert torch.get_float32_matmul_precision() == "highest"


# Estimates


@pytest.mark.parametrize(
    ("name", "options"),
    [("bert", {}), ("albert", {}), ("xlnet", {}), ("bert", {"norm": "sum"}), ("albert", {"targets": [2]})],
)
def test_all_probes_are_exact(name: str, options: dict):
    model = tiny.loaded(name, dtype=torch.float64)
    exact = token_attribution(model, TEXTS[0], **options)
    found = token_attribution(model, TEXTS[0], probes=model.d_input, **options)
    assert (found.contribution - exact.contribution).abs().max() <= 1e-12
    assert found.stderr is not None
    assert found.stderr.count_nonzero() == 0


def test_probes_backward_estimate_the_same():
    model = tiny.loaded("bert", dtype=torch.float64)
    exact = token_attribution(model, TEXTS[0], targets=[2]).contribution
    results = [token_attribution(model, TEXTS[0], targets=[2], probes=6, seed=seed) for seed in range(12)]
    assert {result.engine for result in results} == {"reverse"}
    off_by = torch.stack([(result.contribution - exact).abs() / result.stderr for result in results])
    assert 0.8 <= (off_by <= 2).double().mean() <= 1.0
    assert off_by.mean() > 0.2  # and the errors are not merely wide


def test_probes_backward_are_drawn_from_the_hidden_vectors_directions():
    """ALBERT's inputs have 16 dimensions and its hidden vectors 24: the finite-population factor is that of 24."""
    model = tiny.loaded("albert", dtype=torch.float64)
    result = token_attribution(model, TEXTS[0], targets=[2], probes=12)
    seed = zlib.crc32(repr(result.tokens).encode())
    (batch,) = model.batches(model.encode(TEXTS[0]))
    squares = passes.reverse(
        read(model, batch), asked(model, targets=(2,), probes=12, seed=seed), chunk=1, tick=lambda n: None
    )
    expected = jacobian.estimated_contributions(squares, population=24)
    assert result.engine == "reverse"
    assert torch.equal(result.contribution, expected[0])
    assert result.stderr is not None
    assert torch.equal(result.stderr, expected[1])


def test_probes_follow_the_seed_and_not_the_place_in_a_list():
    model = tiny.loaded("bert")
    first, again, other = (token_attribution(model, TEXTS[0], probes=4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.contribution, again.contribution)
    assert not torch.equal(first.contribution, other.contribution)
    listed = token_attribution(model, [TEXTS[1], TEXTS[0]], probes=4, seed=1)[1]
    assert torch.equal(first.contribution, listed.contribution)


@pytest.fixture(scope="module")
def minilm() -> tuple[Model, str, torch.Tensor]:
    model = load()
    text = "The cat sat on the old mat ."
    return model, text, token_attribution(model, text).contribution


def test_sixteen_probes_on_minilm(minilm: tuple[Model, str, torch.Tensor]):
    model, text, exact = minilm
    estimates = [token_attribution(model, text, probes=16, seed=seed) for seed in range(2)]
    errors = torch.stack([(one.contribution - exact).abs() / exact for one in estimates])
    assert errors.median() <= 0.05
    covered = torch.stack([(one.contribution - exact).abs() <= 2 * one.stderr for one in estimates])
    assert 0.85 <= covered.double().mean() <= 0.99


# Readings


def test_mixing_reads_results():
    model = tiny.loaded("bert")
    results = token_attribution(model, TEXTS)
    found = attribution.mixing(results)
    assert found.offsets.pairs.sum() == 7 * 6 + 8 * 7 + 4 * 3 and len(found.group_sums) == 3
    parts = [attribution.mixing([one]) for one in results]
    assert torch.equal(parts[2].merge(parts[0]).merge(parts[1]).offsets.sums, found.offsets.sums)
    with pytest.raises(InputError, match="needs every input and output"):
        attribution.mixing([token_attribution(model, TEXTS[0], targets=[1])])
    with pytest.raises(InputError, match=r"different layers, \(0,\) and \(2,\)"):
        attribution.mixing([token_attribution(model, TEXTS[0], layers=[layer]) for layer in (0, 2)])
    with pytest.raises(InputError, match="no results"):
        attribution.mixing([])
