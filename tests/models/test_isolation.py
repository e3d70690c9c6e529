"""Calls inside autocast, inference mode, other defaults and the like: the same numbers, or refused in one line.

Models in another state (gradient checkpointing, asked for tuples) are in `tests/hostile/test_models.py`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import identikit as ik
from identikit.errors import InputError, ModelError
from identikit.models import isolation
from identikit.models.machine import product_precision
from identikit.models.model import Model
from identikit.tokens.protocol import Settings
from tests.models import tiny
from tests.models.made import stock_attention
from tests.models.state import state_of
from tests.models.test_contract import slow_unless

TEXT = "w4 w9 w4 w11 w30 w5 w4"
TEXTS = [f"w{3 + i} w{4 + i} w9" for i in range(20)]


def answers(model: Model) -> dict[str, torch.Tensor]:
    """Ask a model each question: with no derivative, forward, backward, and with one that is trained."""
    attention = ik.effective_attention(model, TEXT)
    assert attention.verify().hidden < 1e-4
    settings = Settings(folds=2, epochs=1)
    identified = ik.token_identifiability(model, TEXTS, maps=("mlp",), distances="cosine", layers=1, settings=settings)
    return {
        "effective": attention.effective,
        "reachable": attention.sel(layer=0).reachable_dim,
        "intervals": attention.intervals(layer=0, head=0, query=3).upper,
        "exact": ik.token_attribution(model, TEXT).contribution,
        "backward": ik.token_attribution(model, TEXT, targets=2, layers=1).contribution,
        "inverted": ik.invert(model, TEXT, positions=[1, 2]).margin,
        "identified": identified.rate,
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return answers(tiny.shared("gpt2"))


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, array in expected.items():
        assert not found[name].requires_grad and not found[name].is_inference(), name
        torch.testing.assert_close(found[name], array, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


@contextmanager
def setting(change: Any, value: Any, back: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(back)


def halved(result: Any) -> Any:
    return result / 2 if isinstance(result, torch.Tensor) and result.is_floating_point() else result


class HalvingFunctions(TorchFunctionMode):
    """Halves what products of matrices make, as they are written."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return halved(found) if func in (torch.matmul, torch.Tensor.matmul) else found


class HalvingKernels(TorchDispatchMode):
    """Halves what products of matrices make, as they are computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return halved(found) if "mm" in func.__name__ else found


@contextmanager
def modes() -> Iterator[None]:
    with ExitStack() as stack:
        for mode in (FlopCounterMode(display=False), HalvingFunctions(), HalvingKernels()):
            stack.enter_context(mode)
        yield
        assert torch.equal(torch.eye(2) @ torch.eye(2), torch.eye(2) / 4)  # they are back


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "device": lambda: torch.device("meta"),
    "default device": lambda: setting(torch.set_default_device, "meta", None),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "rounded": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "saved tensors": lambda: saved_tensors_hooks(torch.zeros_like, torch.zeros_like),
    "kernel": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "modes": modes,
}


def test_products_and_convolutions_are_in_full_precision_inside_and_as_before_outside():
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    assert before[0]  # as torch has it, so that images on a GPU would be read with 10 bits
    for precision in ("full", "tf32"):
        with product_precision(precision):
            assert not torch.backends.cudnn.allow_tf32
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == before


# Several at once, as far as their own checks allow.
TOGETHER = [
    ("autocast", "float64", "saved tensors", "device"),
    ("inference", "deterministic", "kernel"),
    ("no grad", "rounded", "modes"),
    ("default device",),
]


@pytest.mark.parametrize("names", TOGETHER, ids=" ".join)
def test_surroundings_change_no_number(names: tuple[str, ...], expected: dict[str, torch.Tensor]):
    with torch.inference_mode("inference" in names):
        hf = tiny.build("gpt2").train()
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(SURROUNDINGS[name]())
        before = state_of(hf)
        model = ik.load(hf, tiny.tokenizer())
        found = answers(model)
        assert state_of(hf) == before
    check_same(found, expected)
    assert ik.effective_attention(model, TEXT).provenance.dtype == "float32"


def compiled_forward(hf: Any) -> Any:
    hf.forward = torch.compile(hf.forward, backend="eager")
    return hf


def compiled_in_place(hf: Any) -> Any:
    hf.transformer.h[1].compile(backend="eager")
    return hf


WRAPPERS = {
    "compiled": lambda hf: torch.compile(hf, backend="eager"),
    "compiled forward": compiled_forward,
    "compiled in place": compiled_in_place,
    "data parallel": nn.DataParallel,
}


@pytest.mark.parametrize("name", [slow_unless(name, {"compiled", "data parallel"}) for name in WRAPPERS])
def test_wrapped_and_compiled_models_are_read_as_they_are_written(name: str, expected: dict[str, torch.Tensor]):
    hf = tiny.build("gpt2")
    given = WRAPPERS[name](hf)
    if "compiled" in name:
        with torch.no_grad():
            given(input_ids=torch.tensor([[4, 5, 6]]))  # what was compiled knows no tap
    before = state_of(hf)
    check_same(answers(ik.load(given, tiny.tokenizer())), expected)
    assert state_of(hf) == before


def test_ctrl_c_while_setting_aside_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    """Whichever step is interrupted, gradients and hooks are as before, and the next call sets aside anew."""

    def interrupted(*_: Any) -> Any:
        torch.set_grad_enabled(False)  # what a context manager leaves that was entered, and not yet noted
        raise KeyboardInterrupt

    with saved_tensors_hooks(torch.zeros_like, torch.zeros_like):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(isolation, "product_precision", interrupted)
            ik.effective_attention(tiny.shared("gpt2"), TEXT)
        assert torch.is_grad_enabled()
        weight = torch.ones(1, requires_grad=True)
        assert (weight * weight).grad_fn._saved_self.item() == 0  # as the hooks say
        with isolation.standard_torch_state():
            assert not torch.is_grad_enabled()


def test_transforms_and_scripts_are_refused():
    model = tiny.shared("gpt2")
    with pytest.raises(InputError, match=r"inside a torch\.func transform"):
        vmap(lambda x: ik.effective_attention(model, TEXT).raw + x)(torch.zeros(2))
    known = ik.effective_attention(model, TEXT)
    for call in (lambda x: ik.effective_attention(model, TEXT).raw + x, lambda x: known.effective + x):
        with pytest.raises(InputError, match="inside make_fx"):
            make_fx(call)(torch.zeros(1))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(InputError, match="is running already"):
        ik.token_attribution(model, TEXT)
    with pytest.raises(ModelError, match="TorchScript"):
        ik.load(torch.jit.script(nn.Linear(2, 2)), tiny.tokenizer())


def test_hooks_are_part_of_the_model():
    """A hook that steers a block is read with it; one that breaks what was proved is refused, also after loading."""
    hf = tiny.build("gpt2")
    model = ik.load(hf, tiny.tokenizer())
    plain = ik.effective_attention(model, TEXT).raw
    steering = hf.transformer.h[0].register_forward_hook(lambda module, args, output: output + 0.5 * output.sin())
    before = state_of(hf)
    steered = ik.effective_attention(model, TEXT).raw
    assert state_of(hf) == before
    own = stock_attention(hf, input_ids=torch.tensor([model.encode(TEXT)[0].ids]))
    torch.testing.assert_close(steered, torch.cat(own), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(steered[1], plain[1])
    ablation = hf.transformer.h[1].attn.c_proj.register_forward_hook(lambda module, args, output: output * 0.5)
    for _ in range(2):
        with pytest.raises(ModelError, match="head outputs times H is the module's output"):
            ik.effective_attention(model, TEXT)
    ablation.remove()
    steering.remove()
    assert torch.equal(ik.effective_attention(model, TEXT).raw, plain)


def test_the_dtype_is_the_one_that_was_computed_in():
    """Norms and embeddings may be wider than the rest; a layer that differs from the others is refused."""
    hf = tiny.build("bert", dtype=torch.bfloat16)
    for module in hf.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    model = ik.load(hf, tiny.tokenizer())
    assert ik.effective_attention(model, TEXT).provenance.dtype == "bfloat16"
    hf.float()
    assert ik.effective_attention(model, TEXT).provenance.dtype == "float32"
    hf.to(torch.float64)
    assert ik.token_attribution(model, TEXT).provenance.dtype == "float64"
    hf.encoder.layer[1].float()
    with pytest.raises(ModelError, match="it failed on a made-up input"):
        ik.effective_attention(model, TEXT)


def test_the_first_parameter_does_not_decide_the_dtype():
    hf = tiny.build("gpt2", dtype=torch.bfloat16).transformer  # without its head, which shares the embedding
    hf.wte.float()
    hf.wpe.float()
    hf.drop.register_forward_hook(lambda module, args, output: output.bfloat16())
    assert hf.dtype == torch.float32
    model = ik.load(hf, tiny.tokenizer())
    assert ik.effective_attention(model, TEXT).provenance.dtype == "bfloat16"


def test_layers_of_different_dtypes_are_refused():
    hf = tiny.build("gpt2")
    hf.transformer.h[1].double()
    hf.transformer.h[1].register_forward_pre_hook(lambda module, args: (args[0].double(), *args[1:]))
    hf.transformer.h[1].register_forward_hook(lambda module, args, output: output.float())
    with pytest.raises(ModelError, match="differ in the number format"):
        ik.load(hf, tiny.tokenizer())
