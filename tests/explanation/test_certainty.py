"""The verdict on attention rests on intervals: every printed number is held against exact ones, in 50 texts."""

import math
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.attention import sample as sampling
from identikit.attention.estimate import (
    BoundedRows,
    RowSample,
    certain_rows,
    mean_by_head,
    mean_by_layer,
    mean_by_token,
    share_of_rows,
)
from identikit.attention.precision import equal_values
from identikit.attention.sample import sample_rows
from identikit.explanation import attention_facts
from identikit.explanation.attention_facts import candidates, causes, group_bounds, is_sink, least_certain, outside
from identikit.explanation.attention_words import _sink
from identikit.explanation.explain import explain
from identikit.explanation.result import Explanation
from identikit.explanation.words import verdict
from identikit.models.model import Model
from tests.explanation.test_result import MAPS
from tests.explanation.truth import FREEST, OUTSIDE, Truth, check
from tests.models import tiny

LONG = " ".join(f"w{i}" for i in range(5, 19))
REPEATED = "w5 w6 w5 w7 w6 w5 w9 w10 w5"


def deficient() -> Model:
    """A model whose output projection passes on 2 of 6 dimensions of one head, and 5 of another."""
    built: Any = tiny.build("bert")
    with torch.no_grad():
        built.encoder.layer[1].attention.output.dense.weight[:, 14:18] = 0.0
        built.encoder.layer[2].attention.output.dense.weight[:, 5] = 0.0
    return Model(built, tiny.tokenizer(), name="deficient")


def dependent() -> Model:
    """A model whose values lie in a plane in one layer."""
    built: Any = tiny.build("bert")
    with torch.no_grad():
        attention = built.encoder.layer[1].attention.self.value
        attention.weight[2:6], attention.bias[2:6] = attention.weight[:1], attention.bias[:1]
    return Model(built, tiny.tokenizer(), name="dependent")


@cache
def explained(name: str, text: str) -> tuple[Model, Explanation]:
    """A model and what it says of a text, all rows bounded."""
    model = {"deficient": deficient, "dependent": dependent}.get(name, lambda: tiny.loaded(name))()
    return model, explain(model, text, maps=MAPS, probes=2, seconds=None)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("bert", LONG, {"certain", "keys", "widest", FREEST, "layer"}),
        ("llama", REPEATED, {"certain", "keys", "repeated", FREEST, "layer"}),
        ("deficient", "w5 w6 w7 w8 w9", {"certain", "keys", "projection", "layer"}),
        ("dependent", "w5 w6 w7", {"certain", "dependent", "layer"}),
        ("bert", "w5 w6 w7", {"all"}),
        ("qwen3", LONG, {"certain", "keys", "shared", "layer"}),
    ],
)
def test_every_printed_number_is_that_of_an_exact_interval(name: str, text: str, expected: set[str]):
    model, explanation = explained(name, text)
    counts = check(model, text, explanation)
    assert expected <= set(counts) and counts["layer"] == (0 if "all" in expected else 3)
    assert max(counts.get(FREEST, 0), counts.get(OUTSIDE, 0)) <= 5
    assert ("keys" in counts) == ("keys" in expected) and ("repeated" in counts) == ("repeated" in expected)


def tiny_texts(count: int) -> list[tuple[str, str]]:
    """Words drawn from few or many, so that some repeat; in models of every kind that the naive maps fit."""
    drawn = np.random.default_rng(0)
    names = [name for name in sorted(tiny.BUILDERS) if name not in ("vit", "albert", "albert-groups", "electra")]
    texts = []
    for number in range(count):
        words = drawn.integers(5, drawn.integers(8, 60), size=drawn.integers(3, 17))
        texts.append((names[number % len(names)], " ".join(f"w{word}" for word in words)))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), tiny_texts(46))
def test_no_sentence_is_contradicted_by_an_interval_in_tiny_models(name: str, text: str):
    model = tiny.loaded(name)
    if model.modality != "text":
        pytest.skip("it reads no texts")
    explanation = explain(model, text, maps=MAPS[: model.n_layers], probes=2, seconds=None)
    free = explanation.about["certain"]["free_rows"]
    assert check(model, text, explanation)["layer"] == (model.n_layers if free else 0)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(4))
def test_no_sentence_is_contradicted_by_an_interval_in_minilm(place: int):
    model = ik.load()
    texts = [text for text in ik.sample_texts() if 34 <= len(model.encode(text)[0]) <= 40]
    explanation = ik.explain(model, texts[place], probes=2, seconds=None)
    counts = check(model, texts[place], explanation)
    assert {"certain", "keys", "layer", "sink", FREEST, OUTSIDE} <= set(counts)


@pytest.fixture(scope="module")
def attention() -> Any:
    return ik.effective_attention(tiny.loaded("bert"), LONG)


def bounded(attention: Any, groups: list[list[int]], seconds: float | None = None) -> RowSample:
    return sample_rows(attention, groups, seconds=seconds, seed=0)


@pytest.fixture(scope="module")
def everything(attention: Any) -> RowSample:
    return bounded(attention, [[0, 15], [3]])


def test_all_rows_are_bounded_when_there_is_time(attention: Any, everything: RowSample):
    assert everything.rows == 64 and everything.free.tolist() == [64] * 3
    rows = everything.bounded
    assert len({tuple(place) for place in rows.places.tolist()}) == 3 * 64 and rows.free.all()
    intervals = attention.intervals(method="exact")
    at = tuple(rows.places.T)
    for ours, theirs in ((rows.lower, intervals.lower), (rows.upper, intervals.upper)):
        assert torch.allclose(ours, theirs[at], atol=1e-7)
    assert torch.allclose(rows.effective, attention.effective[at].double(), atol=1e-6)
    assert torch.equal(rows.strongest, intervals.strongest_is_certain[at])
    assert torch.equal(rows.seen, torch.full((192,), 16))
    groups = attention.intervals(groups={"ends": [0, 15], "one": [3]}, method="exact")
    for place, ours in enumerate((groups.raw, groups.lower, groups.upper)):
        assert torch.allclose(rows.groups[:, place], ours[at], atol=1e-7)
    mass = mean_by_layer(everything, rows.lower.sum(-1), 1.0)
    assert torch.allclose(mass.mean, intervals.certain_mass.mean((1, 2))) and not mass.stderr.any()
    raw = groups.raw[..., 0].mean((1, 2))
    for ours, theirs in zip(group_bounds(everything, 0, raw), (groups.lower, groups.upper), strict=True):
        assert torch.allclose(ours.mean, theirs[..., 0].mean((1, 2)), atol=1e-7) and not ours.stderr.any()


def some_of(sample: RowSample, rows: BoundedRows) -> RowSample:
    """The sample with other rows."""
    return sample._replace(bounded=rows)


def drawn(sample: RowSample, seed: int, count: int) -> RowSample:
    """So many rows of each layer."""
    order = sampling._random_order(torch.ones(3, 4, 16, dtype=torch.bool), seed)
    wanted = {place for places in order for place in places[:count]}
    chosen = torch.tensor([tuple(place) in wanted for place in sample.bounded.places.tolist()])
    return some_of(sample, sample.bounded.select(chosen))


def test_two_standard_errors_hold_the_truth(everything: RowSample, attention: Any):
    """200 draws, of each layer, of each head and overall; what is said to be certain holds in all of them."""
    count = 5
    whole = [mean_by_layer(everything, everything.bounded.lower.sum(-1).clamp(max=1.0), 1.0)]
    free = attention.null_dim > 0
    whole.append(mean_by_head(certain_rows(attention, everything.bounded), free))
    inside: list[list[Any]] = [[], [], []]
    for seed in range(200):
        some = drawn(everything, seed, count)
        certain = certain_rows(attention, some.bounded)
        layers = mean_by_layer(some, some.bounded.lower.sum(-1).clamp(max=1.0), 1.0)
        assert layers.rows.tolist() == [count] * 3
        pairs = ((layers, whole[0]), (mean_by_head(certain, free), whole[1]), (layers.overall(), whole[0].overall()))
        for at, (ours, true) in enumerate(pairs):
            least, most = ours.ends()
            assert at == 2 or bool(((ours.least <= true.mean + 1e-9) & (true.mean <= ours.most + 1e-9)).all())
            inside[at].append((least <= true.mean + 1e-9) & (true.mean <= most + 1e-9))
    for at in inside:
        assert float(torch.stack(at).double().mean(0).min()) >= 0.93


def test_time_that_is_up_ends_it_and_says_so(attention: Any):
    few = bounded(attention, [[0]], seconds=1e-9)
    assert not len(few.bounded.places) and few.free.tolist() == [64] * 3
    mass = mean_by_layer(few, few.bounded.lower.sum(-1), 1.0)
    assert mass.mean.isnan().all() and (mass.least.tolist(), mass.most.tolist()) == ([0.0] * 3, [1.0] * 3)
    told = explain(tiny.loaded("bert"), LONG, maps=MAPS, probes=2, seconds=1e-9)
    facts = verdict(told).facts
    assert (facts["free_rows"], facts["bounded_rows"]) == (192, 0) and "Too few rows were bounded to say" in str(told)
    assert "nan" not in str(told).lower()


def test_rows_that_are_not_free_count_always():
    """Where no free row is bounded, what is known of a layer, a head and a token is a range, and holds the truth."""
    attention = ik.effective_attention(tiny.loaded("gpt2"), LONG)
    intervals = attention.intervals(method="exact")
    free = attention.null_dim > 0
    sample = bounded(attention, [[0]])
    assert 0 < int(free.sum()) < free.numel() and sample.free.tolist() == free.sum((1, 2)).tolist()
    for values, true in (
        (sample.bounded.lower.sum(-1), intervals.certain_mass),
        (sample.bounded.strongest, intervals.strongest_is_certain),
    ):
        assert torch.allclose(mean_by_layer(sample, values, 1.0).mean, true.mean((1, 2)))
    none = bounded(attention, [[0]], seconds=1e-9)
    certain = certain_rows(attention, none.bounded)
    true = intervals.certain_mass
    layers = mean_by_layer(none, none.bounded.lower.sum(-1), 1.0)
    found = (
        (layers, true.mean((1, 2))),
        (mean_by_head(certain, free), true.mean(-1)),
        (mean_by_token(certain, free), true.mean((0, 1))),
    )
    for ours, truth in found:
        share = 1 - ours.free / (len(attention.tokens) if ours.mean.ndim == 2 else none.rows if ours is layers else 12)
        assert torch.allclose(ours.least, share.double()) and not (ours.rows > 0).any()
        assert (ours.least - 1e-9 <= truth).all() and (truth <= ours.most + 1e-9).all()
        assert any(re.search(r"(unknown| to ).*free rows bounded\)$", words) for words in ours.words(str))


def test_a_sample_in_time_draws_where_the_answer_is_open(attention: Any, everything: RowSample):
    """Two rows of each layer come first; then layers whose rows agree get fewer."""
    agree = torch.where(everything.bounded.places[:, :1] == 0, 1.0 / 16, everything.bounded.lower)
    sample = drawn(some_of(everything, everything.bounded._replace(lower=agree)), 0, 8)
    waiting = [[(layer, 0, 0)] * 56 for layer in range(3)]
    batch = sampling._take_batch(waiting, sample, 40)
    counts = [sum(place[0] == layer for place in batch) for layer in range(3)]
    assert counts[0] < min(counts[1:]) and sum(counts) >= 40
    assert [len(left) for left in waiting] == [56 - count for count in counts]
    fresh = sampling._random_order(attention.null_dim > 0, 0)
    none = some_of(everything, everything.bounded.select(torch.arange(0)))
    assert [sampling._take_batch(fresh, none, 40)[0][0] for _ in range(3)] == [0, 1, 2]


def test_progress_ends_at_what_was_done(attention: Any, monkeypatch: Any):
    ticks = iter(range(1000))
    monkeypatch.setattr(sampling, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    told: list[tuple[int, int]] = []
    few = sample_rows(attention, [[0]], seconds=5.0, seed=0, progress=lambda _, done, total: told.append((done, total)))
    done = len(few.bounded.places)
    assert 6 < done < 192 and told[-1] == (done, 192) and told == sorted(told)


def test_rows_that_agree_do_not_make_a_share_certain(everything: RowSample):
    few = drawn(everything, 0, 2)
    share = share_of_rows(few, torch.ones(6, dtype=torch.float64))
    assert share.mean.tolist() == [1.0] * 3
    expected = math.sqrt((1 - 2 / 64) * (4 / 6 - (4 / 6) ** 2) / 2 * 5)
    assert share.stderr.tolist() == pytest.approx([expected] * 3)


def test_rows_that_could_not_be_proven_are_not_counted(attention: Any, monkeypatch: Any):
    bounds = sampling.bounds_of

    def unproven(captured: Any, places: Any, wanted: Any, **options: Any) -> Any:
        rows, found = bounds(captured, places, wanted, **options)
        lost = torch.tensor([[layer == 1] for layer, _, _ in places])
        return rows, found._replace(gap=found.gap.masked_fill(lost, torch.nan))

    monkeypatch.setattr(sampling, "bounds_of", unproven)
    few = bounded(attention, [[0]])
    assert few.bounded.places[:, 0].unique().tolist() == [0, 2]
    mass = mean_by_layer(few, few.bounded.lower.sum(-1), 1.0)
    assert mass.mean.isnan().tolist() == [False, True, False]


def test_part_of_the_rows_comes_with_standard_errors(monkeypatch: Any):
    ticks = iter(range(1000))
    monkeypatch.setattr(sampling, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    monkeypatch.setattr(attention_facts, "sample_rows", lambda *a, **o: sample_rows(*a, **{**o, "seconds": 5.0}))
    model = tiny.loaded("bert")
    found = explain(model, LONG, maps=MAPS, probes=2, seconds=5)
    certain = found.about["certain"]
    assert 6 < certain["bounded_rows"] < certain["free_rows"] == 192
    assert sum(certain["bounded_by_layer"]) == certain["bounded_rows"]
    facts = verdict(found).facts
    assert facts["certain_mass_stderr"] == certain["mass_stderr"] > 0
    table = verdict(found).tables[0]
    assert table.column("bounded") == list(zip(certain["bounded_by_layer"], certain["free_by_layer"], strict=True))
    truth = Truth(model, LONG)
    assert certain["mass_range"][0] <= float(truth.intervals.certain_mass.mean()) <= certain["mass_range"][1]
    special = truth.ends((0, 15))
    for name, true in (("lower", special[1]), ("upper", special[2])):
        estimated = found.array(f"special_{name}")
        error = found.array(f"special_{name}_stderr")
        assert ((estimated - true).abs() < 5 * error).all() and (error > 0).all()
    assert (found.array("special_lower") <= special[0]).all() and (special[0] <= found.array("special_upper")).all()


def test_edges_that_are_named_are_the_largest_of_their_heads(everything: RowSample):
    named = least_certain(everything)
    assert len(named) == 5 and len({(edge["layer"], edge["head"]) for edge in named}) == 5
    widths = [edge["upper"] - edge["lower"] for edge in named]
    assert widths == sorted(widths, reverse=True)
    rows = everything.bounded
    assert widths[0] == pytest.approx(float((rows.upper - rows.lower).max()))
    assert least_certain(some_of(everything, rows._replace(upper=rows.lower + 0.0009))) == []
    assert least_certain(some_of(everything, rows.select(torch.arange(0)))) == []


def test_a_head_whose_maps_agree_is_never_called_misleading(everything: RowSample):
    alike = torch.ones(3, 4)
    unlike = torch.zeros(3, 4)
    assert outside(everything, alike) == [] and outside(everything, torch.full((3, 4), torch.nan)) == []
    found = outside(everything, unlike)
    assert found
    for edge in found:
        assert not edge["lower"] <= edge["effective"] <= edge["upper"]
    one = unlike.clone()
    one[found[0]["layer"], found[0]["head"]] = 0.996
    assert (found[0]["layer"], found[0]["head"]) not in {
        (edge["layer"], edge["head"]) for edge in outside(everything, one)
    }
    rows = everything.bounded
    assert outside(some_of(everything, rows._replace(effective=rows.attention)), unlike) == []


def test_equal_values_are_found_where_positions_are_not_in_them():
    llama, bert = (ik.effective_attention(tiny.loaded(name), REPEATED) for name in ("llama", "bert"))
    assert equal_values(llama.source.layers[0].call, llama.tokens)[0].tolist() == [0, 1, 2, 1, 4, 2, 1, 7, 8, 1, 10]
    assert equal_values(bert.source.layers[0].call, bert.tokens)[0].tolist() == list(range(11))
    found = causes(llama)
    assert found["repeated"] == [{"layer": 0, "tokens": 4, "example": [1, 3]}] and found["dependent"] == []
    assert causes(bert)["repeated"] == []


def test_equal_values_that_no_query_sees_together_are_no_cause():
    """The window is 6 tokens, and the second w5 comes later than that."""
    far = ik.effective_attention(tiny.loaded("mistral"), "w5 w6 w7 w8 w9 w10 w11 w12 w5")
    assert equal_values(far.source.layers[0].call, far.tokens)[0][9] == 1 and causes(far)["repeated"] == []
    near = ik.effective_attention(tiny.loaded("mistral"), "w5 w6 w7 w5")
    assert causes(near)["repeated"] == [{"layer": 0, "tokens": 1, "example": [1, 4]}]


def test_sinks_stand_out_from_equal_weights():
    raw, even = torch.tensor([0.31, 0.29, 0.5, 0.9]), torch.tensor([0.05, 0.01, 0.3, 0.3])
    assert is_sink(raw, even).tolist() == [True, False, False, True]


def test_the_first_token_and_each_kind_of_special_token_may_be_a_sink():
    pair = ik.effective_attention(tiny.loaded("bert"), ("w5 w6", "w7"))
    assert candidates(pair) == {"<s>": [0], "</s>": [3, 5]}
    plain = tiny.tokenizer()
    plain.backend_tokenizer.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    causal = ik.effective_attention(Model(tiny.build("gpt2"), plain, name="plain"), "w5 w6 w5")
    assert candidates(causal) == {"w5@0": [0]}


def test_a_sink_is_named_with_its_bounds_and_the_size_of_its_value():
    """A causal model whose first token is a sink: its key fits every query."""
    plain = tiny.tokenizer()
    plain.backend_tokenizer.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    built: Any = tiny.build("gpt2")
    with torch.no_grad():
        built.transformer.wpe.weight[0] *= 40
        for block in built.transformer.h:
            key = (block.ln_1(built.transformer.wpe.weight[0]) @ block.attn.c_attn.weight)[24:48]
            block.attn.c_attn.bias[:24] += 60 * key
    model = Model(built, plain, name="sink")
    explanation = explain(model, LONG, maps=MAPS, probes=2, seconds=None)
    assert explanation.about["group"] == "first token" and explanation.about["sinks"]
    assert {"sink", "layer", "certain"} <= set(check(model, LONG, explanation))
    kept = dict(explanation.about["sinks"][0])
    kept |= {"lower": kept["raw"], "upper": kept["raw"]}
    assert "of a row's weight there, as in its alternatives (effective: " in _sink(kept, explanation).words
