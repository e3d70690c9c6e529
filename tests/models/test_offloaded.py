"""Models that accelerate offloads or spreads over devices: the same numbers, and hooks and weights as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import identikit as ik
from identikit.models import families
from identikit.models.load.weights import device_of
from tests.models import tiny
from tests.models.made import TEXT, answers, saved

WAYS = ("cpu", "disk", "some")


def offloaded(model: PreTrainedModel, how: str, folder: Path) -> Any:
    model = deepcopy(model)
    if how == "cpu":
        return accelerate.cpu_offload(model, torch.device("cpu"))
    if how == "disk":
        accelerate.disk_offload(model, str(folder), torch.device("cpu"))
        return model
    names = [name for name, _ in model.base_model.named_children()]
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    places: dict[str, Any] = {f"{prefix}{name}": "disk" if place == 1 else "cpu" for place, name in enumerate(names)}
    if prefix:
        others = [name for name, _ in model.named_children() if f"{name}." != prefix]
        places |= dict.fromkeys(others, "cpu")
    return accelerate.dispatch_model(
        model, places, main_device=torch.device("cpu"), offload_dir=str(folder), force_hooks=True
    )


def places(model: nn.Module) -> list[tuple[object, ...]]:
    hooks = [
        (id(vars(each).get("_hf_hook")), id(getattr(vars(each).get("_hf_hook"), "weights_map", None)))
        for each in model.modules()
    ]
    forwards = [id(vars(each).get("forward")) for each in model.modules()]
    return [*hooks, (*forwards, ""), *((name, weight.device.type) for name, weight in model.named_parameters())]


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    before = places(model)
    assert "meta" in [place[-1] for place in before]
    yield
    assert places(model) == before


def check_same_answers(read: ik.Model, plain: ik.Model) -> None:
    assert ik.effective_attention(read, TEXT).verify().hidden < 1e-4
    ours, theirs = answers(read), answers(plain)
    for what, expected in theirs.items():
        relative = 1e-5 if what == "inverted" else 0
        torch.testing.assert_close(ours[what], expected, rtol=relative, atol=1e-5, msg=what)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_offloaded_models_give_the_same_numbers(name: str, how: str, tmp_path: Path):
    model = tiny.build(name)
    away = offloaded(model, how, tmp_path)
    with left_as_it_was(away):
        plain = ik.load(model, tiny.tokenizer())
        read = ik.load(away, tiny.tokenizer())
        assert read.fingerprint == plain.fingerprint
        assert read.device == plain.device
        check_same_answers(read, plain)


def spread(model: PreTrainedModel, main: str, rest: int | str) -> Any:
    """Return the model with every other block on the GPU, and what is no block on the device `rest`.

    What is on the CPU computes there if `main` is the CPU, and is else offloaded to it.
    """
    model = deepcopy(model)
    family = families.family_of(model)
    blocks = families.find_all(families.stack_of(family, model).base_model, family.blocks)
    names = {id(module): name for name, module in model.named_modules()}
    parts: dict[str, Any] = {names[id(block)]: 0 if at % 2 else "cpu" for at, block in enumerate(blocks)}
    within = tuple(f"{name}." for name in parts)
    for name, module in model.named_modules():
        leaf = next(module.children(), None) is None
        if leaf and name not in parts and not name.startswith(within):
            parts[name] = rest
    for name, _ in model.named_parameters():  # of modules that hold weights beside other modules
        if not name.startswith((*within, *(f"{part}." for part in parts))):
            parts[name] = rest
    device = torch.device(main)
    return accelerate.dispatch_model(model, parts, main_device=device, force_hooks=True)


def test_a_model_begins_where_its_first_weight_is_and_not_a_buffer_that_was_left_behind():
    embeddings = nn.Module()
    embeddings.register_buffer("positions", torch.zeros(3, device="meta"))
    embeddings.words = nn.Embedding(3, 2)
    assert device_of(embeddings) == torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("main", "rest"), [("cpu", "cpu"), ("cpu", 0), ("cuda:0", "cpu")])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "gpt_oss", "gemma2", "t5"])
def test_models_on_several_devices_give_the_same_numbers(name: str, main: str, rest: int | str):
    model = tiny.build(name)
    away = spread(model, main, rest)
    plain = ik.load(model, tiny.tokenizer())
    before = places(away)
    read = ik.load(away, tiny.tokenizer())
    assert read.fingerprint == plain.fingerprint
    assert (read.gather_device is None) == (main != "cpu")  # offloaded parts compute on the GPU
    check_same_answers(read, plain)
    dims = [ik.effective_attention(each, TEXT).reachable_dim.cpu() for each in (read, plain)]
    torch.testing.assert_close(dims[0], dims[1])
    rollouts = [ik.attention_measure(each, TEXT, "rollout").upper.cpu() for each in (read, plain)]
    torch.testing.assert_close(rollouts[0], rollouts[1], rtol=0, atol=1e-5)
    assert places(away) == before


def test_a_folder_is_loaded_with_a_device_map(tmp_path: Path):
    saved(tmp_path)
    names = ["model.embed_tokens", "model.layers.0", "model.layers.2", "model.norm", "model.rotary_emb", "lm_head"]
    parts = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    read = ik.load(tmp_path, device_map=parts)
    assert "meta" in {weight.device.type for weight in read.hf.parameters()}
    for other in (ik.load(tmp_path), ik.load(tmp_path, device_map="auto")):
        assert other.fingerprint == read.fingerprint
        ours, theirs = (ik.effective_attention(each, TEXT).effective.cpu() for each in (read, other))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert read.recipe is not None
    assert read.recipe.load().fingerprint == read.fingerprint


def test_device_maps_that_cannot_be_used_are_refused_in_a_line(tmp_path: Path):
    saved(tmp_path)
    wrong: list[dict[str, Any]] = [
        {"device_map": 3},
        {"device_map": "nowhere"},
        {"device_map": "auto", "device": "cpu"},
    ]
    for given in wrong:
        with pytest.raises(ik.IdentikitError, match="device") as caught:
            ik.load(tmp_path, **given)
        assert "\n" not in str(caught.value)
    with pytest.raises(ik.InputError, match="keeps its own device"):
        ik.load(tiny.build("llama"), tiny.tokenizer(), device_map="auto")


def test_weights_that_only_a_larger_module_brings_in_are_refused(tmp_path: Path):
    model = tiny.build("llama")
    accelerate.cpu_offload(model, torch.device("cpu"), preload_module_classes=["LlamaDecoderLayer"])
    with pytest.raises(ik.ModelError, match="preload_module_classes"):
        ik.load(model, tiny.tokenizer())


def test_weights_that_a_model_reads_past_their_module_are_refused():
    """DeBERTa reads its relative positions off another module, for which accelerate brings nothing in."""
    away = accelerate.cpu_offload(tiny.build("deberta-v2"), torch.device("cpu"))
    with pytest.raises(ik.ModelError, match=r"failed on a made-up input .*meta tensor"):
        ik.load(away, tiny.tokenizer())


def test_offloaded_weights_that_change_make_another_model(tmp_path: Path):
    away = offloaded(tiny.build("llama"), "cpu", tmp_path)
    read = ik.load(away, tiny.tokenizer())
    before = read.fingerprint
    weight = away.model.layers[1].mlp.up_proj._hf_hook.weights_map["weight"]
    weight.data[0, 0] += 1.0
    with pytest.raises(ik.ModelError, match="changed after it was first read"):
        read.check_unchanged(before)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_and_interrupts_leave_weights_offloaded(error: type[BaseException], tmp_path: Path):
    away = offloaded(tiny.build("llama"), "cpu", tmp_path)
    read = ik.load(away, tiny.tokenizer())

    def fail(module: nn.Module, args: object) -> None:
        raise error("stop")

    inside = away.model.layers[1].mlp.up_proj
    forward = inside._old_forward
    with left_as_it_was(away):
        inside._old_forward = lambda *args: fail(inside, args)  # its weights have been brought in by then
        with pytest.raises(error):
            read.trace(read.sample((5,)))
        inside._old_forward = forward


def test_a_test_that_rewrites_weights_is_refused_in_a_line(tmp_path: Path):
    model = ik.load(offloaded(tiny.build("bert"), "cpu", tmp_path), tiny.tokenizer())
    with pytest.raises(ik.ModelError, match="without device_map=") as caught:
        ik.evaluate(model, ["w5 w6 w7", "w8 w9 w5"], ["mean"], tests="randomised")
    assert "\n" not in str(caught.value)
    assert all(weight.is_meta for weight in model.hf.parameters())
