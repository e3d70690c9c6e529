"""Hidden Token Attribution: what it refuses, how it fits into memory, and what it says before it takes long."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from identikit.attribution import memory, sweep
from identikit.attribution import plan as attribution
from identikit.attribution.attribute import token_attribution
from identikit.errors import InputError
from identikit.models.load.load import load
from identikit.models.machine import format_duration
from identikit.models.model import Model
from tests.attribution.test_attribute import TEXTS, asked
from tests.models import tiny


@pytest.mark.parametrize(("options", "message"), [
    ({"norm": "euclid"}, "norm='euclid' is not known: use 'frobenius', 'spectral', 'sum'"),
    ({"source": "tokens"}, "source='tokens' is not known: use 'before', 'after'"),
    ({"precision": "float8"}, "precision='float8' is not known"),
    ({"probes": 25}, "probes=25 cannot be used: expected a whole number from 2 to 24"),
    ({"probes": "all"}, "probes='all' cannot be used: expected 'exact' or a number from 2 to 24"),
    ({"probes": 4, "norm": "spectral"}, "cannot be estimated from a few directions"),
    ({"seed": "a"}, "seed='a' cannot be used"),
    ({"layers": [3]}, "There is no layer 3. The layers are 0 to 2, counted from 0."),
    ({"targets": [0, 7]}, "There is no target 7. The positions are 0 to 6"),
    ({"targets": "w99"}, "There is no target 'w99'"),
])  # fmt: skip
def test_mistakes_are_told(options: dict, message: str):
    with pytest.raises(InputError, match=message):
        token_attribution(tiny.loaded("bert"), TEXTS[0], **options)


def test_targets_may_be_tokens():
    model = tiny.loaded("bert")
    assert token_attribution(model, TEXTS[0], targets=["w9", -1]).targets == (2, 6)


def test_derivatives_that_overflow_are_told():
    """In float16 a LayerNorm of tiny vectors has derivatives past the largest number; they must not count as 0."""
    stock = tiny.build("bert")
    stock.embeddings.word_embeddings.weight.data *= 1e-3
    stock.embeddings.position_embeddings.weight.data *= 1e-3
    stock.embeddings.token_type_embeddings.weight.data *= 1e-3
    model = load(stock.half(), tiny.tokenizer())
    with pytest.raises(InputError, match=r"overflow in float16 from layer 0 on: \d+% of that layer are not finite"):
        token_attribution(model, TEXTS[0])


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch):
    model = load()
    text = "word " * 60
    monkeypatch.setattr(sweep, "sweep", lambda *args, **options: pytest.fail("it started"))
    monkeypatch.setattr(attribution, "free_bytes", lambda device: 1 << 27)
    with pytest.raises(
        InputError, match=r"Exact attribution of 62 tokens .* needs at least .*Use probes=\d+, an est"
    ) as refusal:
        token_attribution(model, text)
    named = int(str(refusal.value).split("probes=")[1].split(",")[0])
    attribution.make_plan(model, 62, asked(model, probes=named))
    monkeypatch.setattr(attribution, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(InputError, match="Use a smaller model, or a shorter text"):
        token_attribution(model, text)


def test_what_will_take_long_says_so(monkeypatch: pytest.MonkeyPatch):
    model = load()
    monkeypatch.setattr(attribution, "product_rate", lambda *place: 1e10)
    monkeypatch.setattr(attribution.AttributionPlan, "run", lambda *rest: [torch.ones(6, 62, 62)])
    with pytest.warns(UserWarning, match=r"about \d+ minutes and \d\.\d GiB of memory .*\. With probes=\d+ it takes"):
        token_attribution(model, "word " * 60)


def test_probes_are_advised_only_where_they_take_less(monkeypatch: pytest.MonkeyPatch):
    """The gradient of a sum takes one pass per target: exact is the fast way there."""
    model = load()
    monkeypatch.setattr(attribution, "product_rate", lambda *place: 1e9)
    exact = attribution.cost_warning(model, [62, 62], asked(model))
    probes = int(exact.split("probes=")[1].split()[0])
    faster = attribution.expected_seconds(model, [62, 62], asked(model, probes=probes))
    assert f"it takes {format_duration(faster)}" in exact
    assert faster < 0.7 * attribution.expected_seconds(model, [62, 62], asked(model))
    summed = attribution.cost_warning(model, [60], asked(model, norm="sum"))
    assert "takes about" in summed and "probes" not in summed
    assert not attribution.cost_warning(model, [4], asked(model, probes=2))


def test_affordable_probes_follow_from_sizes_alone(monkeypatch: pytest.MonkeyPatch):
    """A longer text is estimated from fewer directions, a tiny one is exact, and the clock is not asked."""
    model = load()
    monkeypatch.setattr(attribution, "product_rate", lambda *place: pytest.fail("the clock was asked"))
    monkeypatch.setattr(attribution, "free_bytes", lambda device: pytest.fail("the memory was asked"))
    chosen = [attribution.affordable_probes(model, n) for n in (8, 24, 55, 400)]
    assert chosen[0] == "exact" and chosen[2:] == [4, 4]
    assert 4 < chosen[1] < model.d_input


def test_saved_attention_counts_as_memory():
    """The way back from one target holds every layer's attention maps of the way forward."""
    model = load()
    few = asked(model, targets=(0,), probes=2)
    peaks = {plan.engine: plan.peak for plan in attribution._engines(model, 4096, few)}
    maps = model.n_layers * model.n_heads * 4096**2 * 4
    assert peaks["reverse"] > 2 * maps > peaks["generic"]


def test_short_texts_of_like_length_are_done_side_by_side(monkeypatch: pytest.MonkeyPatch):
    """On a GPU, within a part of its memory and of a number of tokens. What cannot be padded is alone."""
    model = load()
    lengths = [12, 40, 11, 12, 30, 13]
    plans = [attribution.make_plan(model, n, asked(model)) for n in lengths]
    assert [group for group, _ in attribution.side_by_side(model, plans, padded=True)] == [
        [place] for place in range(6)
    ]
    monkeypatch.setattr(Model, "device", SimpleNamespace(type="cuda"))
    apart = attribution.side_by_side(model, plans, padded=False)
    assert [group for group, _ in apart] == [[place] for place in range(6)]
    monkeypatch.setattr(attribution, "free_bytes", lambda device: 1 << 40)
    *others, (group, way) = attribution.side_by_side(model, plans, padded=True)
    assert [group for group, _ in others] == [[1], [4]] and group == [5, 0, 3, 2]
    assert way.round_size == sum(lengths[place] for place in group)
    monkeypatch.setattr(attribution, "_GROUP_TOKENS", 26)
    assert [group for group, _ in attribution.side_by_side(model, plans, padded=True)] == [[1], [4], [5, 0], [3, 2]]
    monkeypatch.setattr(attribution, "free_bytes", lambda device: 1 << 20)
    assert [group for group, _ in attribution.side_by_side(model, plans, padded=True)] == [[1], [4], [5], [0], [3], [2]]


def test_chunks_halve_until_they_fit():
    done: list[tuple[int, int]] = []

    def work(first: int, last: int) -> None:
        if last - first > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.append((first, last))

    memory.in_chunks(7, 5, work)
    assert done == [(0, 2), (2, 4), (4, 6), (6, 7)]


@pytest.mark.parametrize(("error", "told", "message"), [
    (MemoryError(), InputError, "memory ran out even for"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), InputError, "memory ran out even for"),
    (RuntimeError("another fault"), RuntimeError, "another fault"),
])  # fmt: skip
def test_what_halving_cannot_mend_is_told(error: Exception, told: type[Exception], message: str):
    def work(first: int, last: int) -> None:
        raise error

    with pytest.raises(told, match=message):
        memory.in_chunks(4, 4, work)


@pytest.mark.slow
def test_a_long_text_on_a_cpu_stays_under_four_gigabytes():
    """The first tokens reach the peak: derivatives are held by then, and tangents. A whole run took 2.5 GiB."""
    script = """
import resource, warnings
from identikit.attribution.attribute import token_attribution
from identikit.models.load.load import load

warnings.simplefilter("ignore")

def report(what, done, total):
    if done >= 2:
        print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, flush=True)
        raise SystemExit

token_attribution(load(), "word " * 126, progress=report)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    tokens, gigabytes = done.stdout.split()
    assert tokens == "128"
    assert float(gigabytes) < 4
