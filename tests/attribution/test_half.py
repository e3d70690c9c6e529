"""Attribution in half precision: scaled tangents lose nothing, what underflows is counted, and how close it comes."""

import pytest
import torch

from identikit.attribution import passes, tangents
from identikit.attribution.attribute import token_attribution
from identikit.errors import InputError
from identikit.models.load.load import load
from identikit.models.model import Model
from tests.attribution.test_attribute import TEXTS, asked, read, swept
from tests.models import tiny
from tests.models.test_contract import batch_of


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("probes", ["exact", 3])
@pytest.mark.parametrize("highest", [5, -20])
def test_powers_of_two_change_no_bit(name, probes, highest, monkeypatch):
    """In float32 nothing overflows: scaling is switched on there only to show that it is exact."""
    model = tiny.loaded(name)
    batch = batch_of(model, (6,))

    def both() -> list[torch.Tensor]:
        forward = passes.generic(read(model, batch), asked(model, probes=probes), chunk=2, tick=lambda count: None)
        return [*swept(model, batch, probes=probes), forward]

    plain = both()
    monkeypatch.setattr(tangents, "SCALED", (torch.float32,))
    monkeypatch.setattr(tangents, "HIGHEST", highest)
    for one, other in zip(plain, both(), strict=True):
        assert torch.equal(one, other)


def test_each_inputs_largest_tangent_is_scaled_just_below_the_highest_power():
    before = torch.tensor([[1e-3], [1.0], [1e3], [0.0]]) * torch.linspace(-1, 1, 5)
    after = before.clone()
    exponent = tangents.rescale(after, dim=0)
    largest = after.abs().amax(1)
    assert (largest[:3] >= 2**4).all() and (largest < 2**5).all() and exponent[3] == 0
    assert torch.equal(torch.ldexp(after, exponent[:, None]), before)


def growing(dtype: torch.dtype) -> Model:
    """A model whose derivatives grow from layer to layer, past what float16 can hold; its weights are float16's."""
    stock = tiny.build("llama").half()
    stock.model.embed_tokens.weight.data *= 2.0**-5
    for layer in stock.model.layers:
        layer.mlp.down_proj.weight.data *= 2.0**8
        layer.self_attn.o_proj.weight.data *= 2.0**8
    return load(stock.to(dtype), tiny.tokenizer())


def test_float16_does_not_overflow_where_its_sizes_only_grow(monkeypatch):
    exact = token_attribution(growing(torch.float32), TEXTS[0]).contribution
    for probes in ("exact", 24):
        found = token_attribution(growing(torch.float16), TEXTS[0], probes=probes).contribution
        assert ((found - exact).abs() / exact)[exact > 1e-3].max() <= 0.005
    monkeypatch.setattr(tangents, "SCALED", ())
    with pytest.raises(InputError, match="overflow"):
        token_attribution(growing(torch.float16), TEXTS[0])


def test_what_underflows_is_counted_and_said():
    """Attention that moves next to nothing: in float16 it moves nothing at all, though no weight is 0."""
    found = {}
    for dtype in (torch.float16, torch.float32):
        stock = tiny.build("bert")
        for layer in stock.encoder.layer:
            layer.attention.output.dense.weight.data *= 2.0**-30
        found[dtype] = token_attribution(load(stock.to(dtype), tiny.tokenizer()), TEXTS[0])
    n = len(found[torch.float32].tokens)
    assert found[torch.float16].underflow == pytest.approx([1 - 1 / n] * 3)
    assert "contributions underflowed to 0" in found[torch.float16].describe()
    assert found[torch.float32].underflow == [0.0] * 3
    assert "underflow" not in found[torch.float32].describe()


def test_zeros_of_the_mask_are_no_underflow():
    result = token_attribution(tiny.loaded("mistral"), "w4 w9 w4 w17 w20 w8 w5", targets=[-1, 2])
    assert result.underflow == [0.0] * len(result.layers)
    assert (result.contribution == 0).any()
    assert token_attribution(tiny.loaded("xlnet"), TEXTS[0]).underflow is None


def test_bfloat16_is_close_to_float32():
    """Along the same random directions, as a CPU multiplies bfloat16 slowly; both estimates differ only by rounding."""
    packaged = load()
    text = "The cat sat on the mat ."
    exact = token_attribution(packaged, text, probes=8).contribution
    model = load(packaged.hf.to(torch.bfloat16), packaged.tokenizer)
    found = token_attribution(model, text, probes=8)
    errors = ((found.contribution - exact).abs() / exact)[exact > 1e-3]
    assert errors.median() <= 0.005
    assert errors.max() <= 0.03
    assert found.contribution.dtype is torch.float32
    assert torch.allclose(found.contribution.sum(1), torch.ones(6, len(found.tokens)), atol=1e-6)
