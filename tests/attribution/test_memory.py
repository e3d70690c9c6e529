"""What attribution holds at once: planned from shapes, counted in a real run, and kept under a limit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch.profiler import ProfilerActivity, profile

from identikit.attribution import derivative, memory, request
from identikit.attribution import plan as planning
from identikit.models.model import Model
from tests.attribution.test_attribute import asked, off, read

TOKENS = 12


def peak_bytes(task: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator has given out at once, beyond what it had given out before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        task()
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    events: list[Any] = [one for one in watched.profiler.kineto_results.events() if one.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def test_bytes_are_counted():
    def task() -> None:
        first = torch.zeros(1000, 100)
        second = first + 1
        del first
        torch.cat([second, second])

    assert 3 * 400_000 <= peak_bytes(task) <= 3 * 400_000 + 2000


def llama(dtype: torch.dtype, layers: int = 3) -> Model:
    torch.manual_seed(0)
    config = hf.LlamaConfig(hidden_size=128, intermediate_size=448, num_hidden_layers=layers, vocab_size=40)
    config.num_attention_heads = 8
    config.num_key_value_heads = 2
    config.head_dim = 16
    stock: Any = hf.LlamaModel(config).eval()
    return Model(stock.to(dtype), None, name="a small Llama")


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of passes that weigh as little beside these shapes as real ones do beside real shapes."""
    for module in (memory, request, derivative, planning):
        monkeypatch.setattr(module, "working_bytes", lambda device, whole_blocks=False: 1 << 20)
    monkeypatch.setattr(planning, "_CHUNK_BYTES", {"cpu": 1 << 22})


@pytest.mark.usefixtures("little_work")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("probes", "engine"), [("exact", "sweep"), (64, "sweep"), (3, "generic")])
def test_the_peak_is_known_beforehand(dtype, probes, engine):
    model = llama(dtype)
    wanted = asked(model, probes=probes)
    text = read(model, model.sample((TOKENS,)))
    way = planning.make_plan(model, TOKENS, wanted)
    most = peak_bytes(lambda: way.run([text], [wanted], lambda count: None))
    assert way.engine == engine
    above = 1.2 if dtype == torch.float32 else 1.3  # processors with AMX repack the matrices of half precision
    assert 0.8 * way.peak <= most <= above * way.peak


@pytest.mark.usefixtures("little_work")
@pytest.mark.parametrize("precision", ["full", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_peak_of_texts_side_by_side_is_known_beforehand(precision):
    model = llama(torch.float32)
    wanted = asked(model, precision=precision)
    lengths = (TOKENS, TOKENS - 2)
    texts = [read(model, model.sample((n,))) for n in lengths]
    way = planning._joint_plan([planning.make_plan(model, n, wanted) for n in lengths])
    most = peak_bytes(lambda: way.run(texts, [wanted] * 2, lambda count: None))
    assert 0.8 * way.peak <= most <= 1.2 * way.peak


@pytest.mark.usefixtures("little_work")
def test_less_memory_gives_the_same_numbers():
    """All inputs in one round, or fewer in several: peaks differ as planned, and numbers do not."""
    model = llama(torch.float32)
    wanted = asked(model)
    text = read(model, model.sample((TOKENS,)))
    (plan,) = (each for each in planning._engines(model, TOKENS, wanted) if each.engine == "sweep")
    answers: list[torch.Tensor] = []

    def run(way: planning.AttributionPlan) -> None:
        answers.extend(way.run([text], [wanted], lambda count: None))

    for chunk, round_size in ((2, TOKENS), (1, 4)):
        way = replace(plan, chunk=chunk, round_size=round_size)
        assert 0.8 * way.peak <= peak_bytes(partial(run, way)) <= 1.2 * way.peak
    for other in answers[1:]:
        assert off(other, answers[0]) <= 5e-6


@pytest.mark.usefixtures("little_work")
def test_plans_stay_under_the_limit_and_go_round_again_where_they_must(monkeypatch):
    model = llama(torch.float32)
    wanted = asked(model)
    seen = []
    for limit in (1 << 26, 1 << 23, 6 << 20, 5 << 20):
        monkeypatch.setattr(planning, "free_bytes", lambda device, limit=limit: limit / planning._USABLE)
        way = planning.make_plan(model, TOKENS, wanted)
        assert way.peak <= limit
        seen.append(way)
    assert [way.operations for way in seen] == sorted(way.operations for way in seen)
    assert seen[0].operations < seen[-1].operations
