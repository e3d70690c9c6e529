"""Intervals of heads, groups and whole texts, as a user asks for them."""

import math
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import identikit as ik
from identikit.attention.intervals import Bounding
from identikit.attention.quantities import key_groups
from identikit.maths.polytope import exact
from identikit.maths.polytope import rows as polytopes
from identikit.maths.polytope.bounds import Question, proven_bounds
from identikit.maths.polytope.cpu import propose, propose_plainly
from tests.attention.literal import assert_plain_programs, literal_row
from tests.attention.test_effective import LONG, TEXTS
from tests.models import tiny

MODELS = ("bert", "llama", "mistral")  # bidirectional, causal, windowed


@pytest.fixture(scope="module")
def minilm():
    return ik.load()


@pytest.fixture(scope="module", params=MODELS)
def attention(request):
    return ik.effective_attention(tiny.loaded(request.param, dtype=torch.float64), TEXTS[0])


def test_ends_are_sharp_where_attention_is_so_sharp_that_its_set_is_nearly_flat(minilm):
    """A vertex that is not quite of its row's set attains more than the sharp end: then a gap would say too little."""
    text = "The quick brown fox jumps over the lazy dog while seven wizards brew coffee in the old tower at sea. " * 12
    attention = ik.effective_attention(minilm, text, truncate=True, layers=[0], heads=[2])
    rows = attention.captured().layers[0].rows([(0, query) for query in range(0, len(attention.tokens), 8)])
    drawn = torch.rand(6, rows.attention.shape[1], generator=torch.Generator().manual_seed(1))
    wanted = Question(objectives=drawn.double())
    proposed = propose(rows, wanted)
    assert proposed.distance.max() < 1e-11
    plain = proven_bounds(rows, wanted, propose_plainly(rows, wanted))
    found = proven_bounds(rows, wanted, proposed)
    known = found.gap + plain.gap + 1e-9  # linprog lets weights be a little below 0
    assert ((found.lower - plain.lower).abs() <= known).all()
    assert ((found.upper - plain.upper).abs() <= known).all()


def test_every_edge_of_a_text_is_that_of_a_plain_linear_program(attention):
    found = attention.intervals()
    assert found.method == "exact" and found.gap.max() < 1e-9
    assert (found.lower <= found.raw).all() and (found.raw <= found.upper).all()
    torch.testing.assert_close(found.certain_mass, found.lower.sum(-1))
    places = (0, 0, -1), (1, 2, -2), (2, 3, len(attention.tokens) // 2)
    assert_plain_programs(found, attention, *places)
    for layer, head, query in places:
        ends = found.sel(layer=layer, head=head, query=query)
        edge = attention.intervals(layer=layer, head=head, query=query, key=2)
        torch.testing.assert_close(torch.stack([edge.lower, edge.upper]), torch.stack([ends.lower[2], ends.upper[2]]))


def test_certified_ends_contain_the_exact_ones_and_their_gap_is_true(attention):
    exact, certified = attention.intervals(), attention.intervals(method="certified")
    assert certified.method == "certified"
    assert (certified.lower <= exact.lower + 1e-9).all() and (certified.upper >= exact.upper - 1e-9).all()
    assert (exact.lower - certified.lower <= certified.gap + 1e-9).all()
    assert (certified.upper - exact.upper <= certified.gap + 1e-9).all()
    decided = ~certified.strongest_is_certain.isnan()
    assert torch.equal(certified.strongest_is_certain[decided], exact.strongest_is_certain[decided])


def test_sums_with_weights_of_ones_own_are_those_of_a_linear_program(attention):
    n = len(attention.tokens)
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(n, generator=generator, dtype=torch.float64)
    by_query = 1e5 * torch.randn(n, n, generator=generator, dtype=torch.float64)
    found = attention.intervals(weights={"shared": shared, "by query": by_query, "two": {0: 1, 2: -1.5}})
    assert found.axis("quantity").values == ("shared", "by query", "two")
    for layer, head, query in ((0, 0, -1), (2, 3, n // 2)):
        row = literal_row(attention, layer, head, query)
        ends = found.sel(layer=layer, head=head, query=query)
        two = torch.zeros(n, dtype=torch.float64)
        two[0] = 1.0
        two[2] = -1.5
        for at, c in enumerate((shared, by_query[query], two)):
            c = c[row.keys].numpy()
            size = abs(c).max()
            least, most = row.ends(c)
            assert float(ends.lower[at]) == pytest.approx(least, abs=1e-7 * size)
            assert float(ends.upper[at]) == pytest.approx(most, abs=1e-7 * size)
            assert float(ends.raw[at]) == pytest.approx(c @ row.attention.numpy(), abs=1e-9 * size)
            assert float(ends.gap[at]) <= 1e-8 * size
    certified = attention.intervals(weights={"by query": by_query}, method="certified", layer=2, head=3)
    exact = found.sel(layer=2, head=3, quantity="by query")
    assert (certified.lower[:, 0] <= exact.lower + 1e-3).all() and (certified.upper[:, 0] >= exact.upper - 1e-3).all()


def test_weights_may_be_given_without_names(attention):
    n = len(attention.tokens)
    edge = attention.intervals(layer=1, head=2)
    plain = attention.intervals(layer=1, head=2, weights=torch.eye(n)[2])
    assert plain.axis("quantity").values == ("weights",)
    torch.testing.assert_close(plain.upper[:, 0], edge.upper[:, 2], atol=1e-8, rtol=0)
    several = attention.intervals(layer=1, head=2, weights=torch.eye(n)[:2])
    assert several.axis("quantity").values == ("0", "1")
    torch.testing.assert_close(several.lower, edge.lower[:, :2], atol=1e-8, rtol=0)
    diagonal = attention.intervals(layer=1, head=2, weights=torch.eye(n))
    torch.testing.assert_close(diagonal.upper[:, 0], edge.upper.diagonal(), atol=1e-8, rtol=0)
    assert "quantity" in repr(plain) and "Mean value" in str(plain)


def test_weights_in_lists_keep_their_digits(attention):
    n = len(attention.tokens)
    numbers = [1 / (3 + place) for place in range(n)]
    tiny = [1e-60 * number for number in numbers]  # nothing of these is left in single precision
    found = attention.intervals(layer=1, head=2, weights={"list": numbers, "tiny": tiny})
    expected = attention.intervals(layer=1, head=2, weights=torch.tensor(numbers, dtype=torch.float64))
    for name in ("raw", "lower", "upper"):
        own = getattr(expected, name)[..., 0]
        torch.testing.assert_close(getattr(found, name)[..., 0], own, atol=1e-15, rtol=1e-12)
        torch.testing.assert_close(1e60 * getattr(found, name)[..., 1], own, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    "weights",
    [
        "zebra",
        5,
        [1.0, 2.0],
        {},
        {"a": [1.0]},
        {"a": {"zebra": 1}},
        {"a": {0: "x"}},
        {1: {0: 1}, "1": {1: 1}},
        [[[1]]],
        torch.ones(5, device="meta"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(attention, weights):
    with pytest.raises(ik.InputError):
        attention.intervals(layer=0, head=0, weights=weights)
    with pytest.raises(ik.InputError, match="one of key="):
        attention.intervals(layer=0, head=0, key=0, weights={"a": {0: 1}})


def test_groups_lie_inside_the_sums_of_their_keys(attention):
    n = len(attention.tokens)
    groups = {"ends": [0, -1], "one": 2, "all": list(range(n))}
    found, keys = attention.intervals(groups=groups), attention.intervals()
    assert found.axis("group").values == ("ends", "one", "all")
    for at, members in enumerate(([0, n - 1], [2], list(range(n)))):
        torch.testing.assert_close(found.raw[..., at], keys.raw[..., members].sum(-1))
        assert (found.lower[..., at] >= keys.lower[..., members].sum(-1) - 1e-9).all()
        assert (found.upper[..., at] <= keys.upper[..., members].sum(-1) + 1e-9).all()
    torch.testing.assert_close(found.sel(group="one").lower, keys.lower[..., 2], atol=1e-9, rtol=0)
    torch.testing.assert_close(found.sel(group="all").lower, torch.ones_like(keys.certain_mass), atol=1e-9, rtol=0)
    certified = attention.intervals(groups=groups, method="certified")
    assert (certified.lower <= found.lower + 1e-9).all() and (certified.upper >= found.upper - 1e-9).all()


def test_the_values_of_a_layer_are_decomposed_once_for_all_of_its_heads(monkeypatch):
    """Four query heads share two key-value heads; exact and widened ends share the same decomposition."""
    calls = []
    decompose = polytopes.decompose_values
    monkeypatch.setattr(polytopes, "decompose_values", lambda values: calls.append(values.shape) or decompose(values))
    attention = ik.effective_attention(tiny.loaded("llama", dtype=torch.float64), TEXTS[0])
    attention.intervals()
    attention.intervals(epsilon=0.01)
    n = len(attention.tokens)
    assert calls == [(2, n, attention.about["d_value"])] * 3


def test_room_for_the_output_widens_every_interval():
    attention = ik.effective_attention(tiny.loaded("bert", dtype=torch.float64), TEXTS[0]).sel(layer=1, head=2)
    exact = attention.intervals()
    before = exact
    for epsilon in (1e-4, 1e-2, 0.3):
        wider = attention.intervals(epsilon=epsilon)
        assert wider.method == "certified" and wider.epsilon == epsilon
        assert (wider.lower <= before.lower + wider.gap + 1e-9).all()
        assert (wider.upper >= before.upper - before.gap - 1e-9).all()
        before = wider
    assert float((before.upper - before.lower).mean()) > float((exact.upper - exact.lower).mean()) + 0.05


def test_room_is_measured_behind_a_gate():
    """A gate that scales the whole output changes nothing; one that closes some dimensions gives more room."""
    attention = ik.effective_attention(tiny.loaded("llama", dtype=torch.float64), TEXTS[0])
    rows = {"layer": 1, "head": [0, 3], "query": slice(8, 12)}
    call = attention.captured().layers[1].call
    exact, even, uneven = attention.intervals(**rows), torch.full_like(call.query, 0.3), torch.ones_like(call.query)
    uneven[..., 3:] = 0.01
    found = []
    for gate in (None, even, uneven):
        object.__setattr__(call, "gate", gate)
        found.append(attention.intervals(**rows, epsilon=0.02))
        torch.testing.assert_close(exact.upper, attention.intervals(**rows).upper, atol=1e-9, rtol=0)
    plain, scaled, closed = found
    torch.testing.assert_close(scaled.upper, plain.upper, atol=1e-5, rtol=0)
    torch.testing.assert_close(scaled.lower, plain.lower, atol=1e-5, rtol=0)
    assert float((closed.upper - closed.lower).mean()) > float((plain.upper - plain.lower).mean()) + 0.01


def test_half_precision_also_reports_its_rounding():
    model = tiny.loaded("bert", dtype=torch.bfloat16)
    found = ik.attention_intervals(model, TEXTS[0], layer=1, head=2, query=3)
    assert found.rounding == torch.finfo(torch.bfloat16).eps
    assert (found.rounded_lower <= found.lower + 1e-9).all() and (found.rounded_upper >= found.upper - 1e-9).all()
    assert "half precision's rounding (0.008 of its norm)" in str(found)
    whole = ik.attention_intervals(tiny.loaded("bert"), TEXTS[0], layer=1, head=2, query=3)
    assert whole.rounding == 0 and "rounded_lower" not in whole.arrays


def test_named_groups(minilm):
    attention = ik.effective_attention(minilm, "The cat sat down. Unbelievably, it slept!")
    groups = key_groups(attention, ["special", "first", "words", "sentences"])
    tokens = attention.tokens
    assert groups["special"] == [0, len(tokens) - 1] and groups["first"] == [0]
    assert groups["sentence 0"] == [1, 2, 3, 4, 5] and groups["sentence 1"] == list(range(6, len(tokens) - 1))
    (word,) = [places for name, places in groups.items() if name.startswith("unbelievably")]
    assert len(word) > 1 and "".join(tokens[place].removeprefix("##") for place in word) == "unbelievably"


def test_words_say_what_was_found(minilm):
    attention = ik.effective_attention(minilm, LONG).sel(layer=3, head=2)
    row = attention.intervals(query=60)
    assert "strongest" in str(row) and "of the row is determined by the output." in str(row)
    several = attention.intervals(query=[60, 61, 62])
    assert "The strongest edge is determined in" in str(several)
    groups = attention.intervals(query=60, groups="special")
    assert "special" in str(groups) and "[" in str(groups)
    assert groups.plot().get_ylabel() == "group"
    with pytest.raises(ik.InputError, match='use groups="words"'):
        groups.words()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"groups": "verbs"}, "groups='verbs' is not known: use 'special'"),
        ({"groups": 3}, "groups=3 cannot be used"),
        ({"groups": {"a": "zebra"}}, "There is no key 'zebra'"),
        ({"groups": "special", "key": 0}, "takes one of key=, groups= and weights="),
        ({"epsilon": -0.1}, "epsilon=-0.1 cannot be used: expected a finite number of at least 0 and below 1"),
        ({"epsilon": 0.1, "method": "exact"}, "method='exact' cannot be used with epsilon="),
    ],
)
def test_mistakes(wrong, message):
    with pytest.raises(ik.InputError, match=message):
        ik.attention_intervals(tiny.loaded("bert"), TEXTS[0], layer=0, head=0, **wrong)


def test_one_edge_can_be_asked_for_with_epsilon():
    row = ik.effective_attention(tiny.loaded("bert"), " ".join(f"w{i}" for i in range(5, 20))).sel(
        layer=1, head=2, query=3
    )
    one, whole, exact = row.intervals(key=5, epsilon=0.01), row.intervals(epsilon=0.01), row.intervals(key=5)
    assert float(one.lower) == pytest.approx(float(whole.lower[5]), abs=1e-3)
    assert float(one.upper) == pytest.approx(float(whole.upper[5]), abs=1e-3)
    assert one.lower <= exact.lower + 1e-9 and exact.upper - 1e-9 <= one.upper


def test_options_of_effective_attention_do_not_change_what_the_attention_could_have_been():
    model = tiny.loaded("bert", dtype=torch.float64)
    wanted = {"layer": 1, "head": 2, "query": 3}
    plain = ik.effective_attention(model, TEXTS[0])
    for options in ({"mass": True}, {"bias": False}, {"tolerance": 0.1}):
        other = ik.effective_attention(model, TEXTS[0], **options)
        for epsilon in (0.0, 0.05):
            ends = plain.intervals(**wanted, epsilon=epsilon), other.intervals(**wanted, epsilon=epsilon)
            torch.testing.assert_close(ends[0].lower, ends[1].lower, atol=1e-6, rtol=0)
            torch.testing.assert_close(ends[0].upper, ends[1].upper, atol=1e-6, rtol=0)


def test_values_of_half_precision_keep_all_of_their_dimensions():
    text = TEXTS[0]
    for dtype in (torch.bfloat16, torch.float32):
        captured = ik.effective_attention(tiny.loaded("bert", dtype=dtype), text)
        rows = captured.captured().rows([(1, 2, 3)])
        assert int(rows.basis[0].any(0).sum()) == captured.about["d_value"] + 1


def test_room_is_measured_by_what_the_output_projection_passes_on():
    """A head whose projection drops dimensions: the literal definition, on a random point of the allowed set."""
    model = tiny.loaded("bert", dtype=torch.float64)
    model.hf.encoder.layer[1].attention.output.dense.weight.data[:, 12:15] = 0  # half of head 2's six dimensions
    captured = ik.effective_attention(model, TEXTS[0])
    rows = captured.captured().rows([(1, 2, 3)], moving=True)
    part = captured.captured().layers[1]
    T = part.call.value[0, 2].double() @ part.projection[2].double()
    assert int(rows.basis[0].any(0).sum()) == 4
    torch.testing.assert_close(rows.output[0], (rows.attention[0] @ T).norm())
    centred = T - T.mean(0)
    torch.testing.assert_close(rows.scale[0, 1:4], torch.linalg.svdvals(centred)[:3])


def test_a_time_limit_is_kept():
    import time

    attention = ik.effective_attention(ik.load(), LONG, layers=[0])
    for method in ("exact", "certified"):
        attention.intervals(head=0, query=[0, 1, 2], method=method)
        started = time.monotonic()
        found = attention.intervals(method=method, seconds=0.05)
        assert found.gap.isnan().any()
        assert time.monotonic() - started < 20  # all of it takes minutes


def test_texts_share_the_time_that_is_left(monkeypatch):
    monkeypatch.setattr("identikit.attention.intervals.time", SimpleNamespace(monotonic=lambda: 100.0))
    limited = Bounding(until=140.0)
    assert [limited.shared(texts).until for texts in (4, 2, 1)] == [110.0, 120.0, 140.0]
    assert Bounding().shared(4).until is None


def test_intervals_of_a_causal_head():
    progress = []
    found = ik.attention_intervals(
        tiny.loaded("llama"), TEXTS[0], layer=1, head=3, progress=lambda *told: progress.append(told)
    )
    n = len(found.tokens)
    assert found.lower.shape == (n, n) and progress[-1] == ("attention intervals, rows", n, n)
    assert not found.upper.triu(1).any()
    assert torch.allclose(found.certain_mass[:7], torch.ones(7).double())  # up to d_v + 1 keys there is one attention
    assert found.certain_mass[-1] < 1


def test_several_heads_and_texts_are_those_of_each():
    model = tiny.loaded("llama")
    together = ik.attention_intervals(model, TEXTS[:2], layer=[0, 2], head=[1, 3], query=[2, -1])
    assert [text.lower.shape[:3] for text in together] == [(2, 2, 2)] * 2
    alone = ik.attention_intervals(model, TEXTS[0], layer=2, head=3, query=-1)
    assert torch.allclose(together[0].sel(layer=2, head=3, query=-1).upper, alone.upper, atol=1e-6)


def test_what_is_not_done_in_time_is_bounded_by_what_is_known():
    found = ik.attention_intervals(tiny.loaded("bert"), TEXTS[0], layer=0, head=0, seconds=1e-9)
    late = found.gap.isnan()
    assert late.any()
    assert (found.lower[late] == 0).all() and (found.upper[late] == 1).all()
    assert (found.lower <= found.raw).all() and (found.raw <= found.upper).all()


def test_what_would_take_long_is_refused(monkeypatch):
    monkeypatch.setattr("identikit.attention.intervals.LONGEST_SECONDS", 0.0)
    with pytest.raises(ik.InputError, match=r"14 rows of 14 tokens would take about \d+ minutes. Select some rows"):
        ik.attention_intervals(tiny.loaded("bert"), TEXTS[0], layer=0, head=0)


def test_what_is_computed_for_good_does_not_follow_the_clock(monkeypatch: pytest.MonkeyPatch):
    """Portions decide the last bits: a first one that waits for the compiler must not change those of a dataset."""
    clock = count(step=20)
    monkeypatch.setattr(exact.time, "monotonic", lambda: next(clock))
    slow = [len(some) for some in exact.portions_in_time(torch.arange(20), math.inf, first=1)]
    assert slow[:3] == [1, 1, 1]
    steady = [len(some) for some in exact.portions_in_time(torch.arange(20), math.inf, first=1, repeatable=True)]
    assert steady == [1, 2, 4, 8, 5]
