"""Threads that read one model, or several, at the same time: right numbers, and everything as it came."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as hf_logging

import identikit as ik
from identikit.models.isolation import exclusive_access
from identikit.models.load.load import quiet_libraries
from identikit.models.machine import product_precision
from identikit.models.model import Model
from tests.models import tiny
from tests.models.made import saved
from tests.models.state import state_of

TEXT, SHORT = "w4 w9 w4 w11 w30 w5 w4", "w4 w9 w4"
TEXTS = [f"w{3 + i} w{4 + i} w9" for i in range(20)]
Question = Callable[[Model], torch.Tensor]


def questions(model: Model) -> dict[str, Question]:
    maps = ik.token_identifiability(model, TEXTS, maps=("ridge",))

    def explained(one: Model) -> torch.Tensor:
        found = ik.explain(one, SHORT, maps=maps, probes=2, seconds=None)
        return torch.cat([found.array(name).double().flatten() for name in sorted(found.arrays)])

    return {
        "attention": lambda one: ik.effective_attention(one, TEXT).effective,
        "intervals": lambda one: ik.effective_attention(one, TEXT).intervals(layer=1, head=2).lower,
        "attribution": lambda one: ik.token_attribution(one, TEXT).contribution,
        "explain": explained,
    }


def together(*work: Callable[[], Any]) -> list[Any]:
    """Do all work at once, each in a thread of its own that switches as often as it can."""
    start = threading.Barrier(len(work))

    def wait_and_do(one: Callable[[], Any]) -> Any:
        start.wait()
        return one()

    with ThreadPoolExecutor(len(work)) as pool:
        return [done.result() for done in [pool.submit(wait_and_do, one) for one in work]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "deberta-v2"])
def test_two_threads_on_one_model_get_the_numbers_of_one(name: str):
    hf = tiny.build(name).train()
    own, other = ik.load(hf, tiny.tokenizer()), ik.load(hf, tiny.tokenizer())  # two of ours on one of transformers'
    asked = questions(own)
    expected = {what: ask(own) for what, ask in asked.items()}
    before = state_of(hf)

    def ask_all(model: Model, seed: int) -> list[str]:
        order = ["attention"] * 68 + ["intervals"] * 20 + ["attribution"] * 10 + ["explain"] * 2
        random.Random(seed).shuffle(order)
        return [what for what in order if not torch.equal(asked[what](model), expected[what])]

    assert together(lambda: ask_all(own, 0), lambda: ask_all(other, 1)) == [[], []]
    assert state_of(hf) == before


def test_a_part_of_a_model_is_read_in_turn_with_the_whole():
    hf = tiny.build("bert-mlm")
    whole, part = ik.load(hf, tiny.tokenizer()), ik.load(hf.bert, tiny.tokenizer())
    expected, before = ik.effective_attention(whole, TEXT).effective, state_of(hf)
    with ThreadPoolExecutor(2) as pool, exclusive_access(hf.bert.encoder.layer[0]):
        waiting = [pool.submit(ik.effective_attention, model, TEXT) for model in (whole, part)]
        time.sleep(0.2)
        assert not any(one.done() for one in waiting)
        expected_here = ik.effective_attention(whole, TEXT).effective  # the thread that has the turn goes on
    assert torch.equal(expected_here, expected)
    assert all(torch.equal(one.result().effective, expected) for one in waiting)
    assert state_of(hf) == before


@pytest.mark.slow
def test_derivatives_of_two_models_do_not_meet():
    """torch counts the levels of forward mode by process: two threads inside would end each other's."""
    models = [tiny.shared("llama"), tiny.shared("gpt2"), tiny.shared("deberta-v2")]
    expected, before = [ik.token_attribution(model, TEXT).contribution for model in models], state_of(models[0].hf)

    def ask(index: int) -> bool:
        found = [ik.token_attribution(models[index], TEXT).contribution for _ in range(6)]
        return all(torch.allclose(one, expected[index], rtol=1e-4, atol=1e-6) for one in found)

    assert together(*(lambda index=index: ask(index) for index in range(3))) == [True] * 3
    assert state_of(models[0].hf) == before


def test_threads_share_settings_of_the_process():
    """However calls overlap, the last to end gives back what the first found."""
    hf_logging.set_verbosity_info()
    hub_logging.set_verbosity_info()
    torch.set_float32_matmul_precision("medium")
    hf = tiny.build("bert")
    try:
        before = state_of(hf)
        for setting in (quiet_libraries, lambda: product_precision("full"), lambda: product_precision("tf32")):
            first, second = setting(), setting()
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            assert state_of(hf) != before
            second.__exit__(None, None, None)
            assert state_of(hf) == before
    finally:
        hf_logging.set_verbosity_warning()
        hub_logging.set_verbosity_warning()
        torch.set_float32_matmul_precision("highest")


def test_two_threads_load_at_once(tmp_path: Path):
    saved(tmp_path)
    expected = {
        name: ik.effective_attention(ik.load(tmp_path, dtype=name), TEXT).raw for name in ("float32", "bfloat16")
    }
    before = state_of(torch.nn.Module())

    def load(name: str) -> bool:
        loaded = [ik.load(tmp_path, dtype=name) for _ in range(2)]
        right = [torch.equal(ik.effective_attention(model, TEXT).raw, expected[name]) for model in loaded]
        return all(right) and {str(model.dtype) for model in loaded} == {f"torch.{name}"}

    assert together(lambda: load("float32"), lambda: load("bfloat16")) == [True, True]
    assert state_of(torch.nn.Module()) == before


@pytest.mark.parametrize(
    "name",
    ["llama", "xlnet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "gptj", "qwen3_next"))],
)
def test_an_interrupted_call_gives_everything_back(name: str):
    """Interrupt at every module in turn, whichever question was asked."""
    hf = tiny.build(name).train()
    model = ik.load(hf, tiny.tokenizer())
    expected = ik.effective_attention(model, TEXT).raw
    places = [one for one in hf.modules() if not list(one.children())]
    asked: list[Question] = [
        lambda one: ik.effective_attention(one, TEXT),
        lambda one: ik.token_attribution(one, SHORT),
    ]
    unreached = 0
    for ask in asked:
        for place in places[:: max(1, len(places) // 4)]:
            armed = place.register_forward_hook(lambda module, args, output: _interrupt())
            before = state_of(hf)
            with suppress(KeyboardInterrupt):  # attribution ends before the head, and some modules never run
                ask(model)
                unreached += 1
            assert state_of(hf) == before
            armed.remove()
    assert unreached <= 4
    assert torch.equal(ik.effective_attention(model, TEXT).raw, expected)


def _interrupt() -> None:
    raise KeyboardInterrupt
