"""Readings of attention against their definitions, autograd and linear programs; and what holds for their ranges."""

import pickle
import time
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.attention.layer import USUAL, Layer
from identikit.attention.measure_kinds import MEASURE_KINDS
from identikit.attention.measure_result import AttentionMeasure
from identikit.attention.result import EffectiveAttention
from identikit.attention.stream import stream_of, watched_run
from identikit.maths import boxes
from identikit.maths.chain import Chain, greatest_through_layers
from identikit.maths.polytope.exact import extreme_rows
from tests.attention.literal import literal_row
from tests.models import tiny
from tests.reference import chain, readings

TEXT = "w5 w6 w7 w5 w6 w8 w9 w5 w6 w7 w10 w11"
MODELS = ("bert", "llama", "gpt_oss")  # plain; causal, with shared values; learned sinks
OUTER = ("globenc", "alti")
STREAM = ("norm with residual", "norm after layer norm", *OUTER)
READ = [
    (name, reading)
    for name, reading in product(MODELS, MEASURE_KINDS)
    if (name, reading)
    not in {("bert", "logit"), ("llama", "norm after layer norm"), ("gpt_oss", "norm after layer norm")}
]  # the others have no logits, or no norm there


@cache
def model_of(name: str) -> ik.Model:
    return tiny.loaded(name, dtype=torch.float64)


@cache
def attention_of(name: str) -> EffectiveAttention:
    return ik.effective_attention(model_of(name), TEXT)


def square(logits: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """A number of the last hidden vectors, for models that make no logits."""
    return hidden[0, -1].square().sum()


@cache
def measured(name: str, reading: str) -> AttentionMeasure:
    target = {"target": square} if MEASURE_KINDS[reading].needs == "gradient" else {}
    return ik.attention_measure(model_of(name), TEXT, reading, **target)


def of_layer(name: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The values and the output projection of each head."""
    call = attention_of(name).captured().layers[layer].call
    values = call.value[0].repeat_interleave(call.groups, 0).numpy()
    return values, model_of(name).projection(layer).numpy()


@cache
def alternatives(name: str, count: int) -> list[np.ndarray]:
    """Random attention with the same head outputs, (choice, head, query, key) of each layer: mixtures of vertices."""
    generator = torch.Generator().manual_seed(0)
    attention = attention_of(name)
    n = len(attention.tokens)
    found = []
    for layer, heads in zip(attention.captured().layers, attention.raw.double(), strict=True):
        rows = layer.rows(list(product(range(len(heads)), range(n))))
        directions = torch.randn(len(rows.group), 6, rows.attention.shape[1], generator=generator, dtype=torch.float64)
        vertices = extreme_rows(rows, directions)[0].flatten(1, 2)[..., :n]  # row, vertex, key
        drawn = torch.rand(count, len(vertices), 12, generator=generator, dtype=torch.float64).pow(8)
        mixed = torch.einsum("crv,rvk->crk", drawn / drawn.sum(-1, keepdim=True), vertices)
        found.append(mixed.unflatten(1, (-1, n)).numpy())
        values = torch.tensor(of_layer(name, layer.call.layer)[0])
        torch.testing.assert_close(torch.tensor(found[-1]) @ values, (heads @ values).expand(count, -1, -1, -1))
    return found


def autograd_derivatives(model: ik.Model) -> list[torch.Tensor]:
    """The derivative of `square` by every attention weight, with attention written out and kept in the graph."""
    maps = []

    def visit(call):
        weights = call.weights()
        if not weights.requires_grad:
            weights.requires_grad_()
        weights.retain_grad()
        maps.append(weights)
        return weights @ call.value.repeat_interleave(call.groups, dim=1)

    (encoded,) = model.encode(TEXT)
    (batch,) = model.batches([encoded])
    with model._watched(visit) as watch, torch.enable_grad():
        model.hf(**model.arguments(batch))
        square(None, watch.hidden[-1]).backward()
    return [leaf.grad[0] for leaf in maps]


# Definitions


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reading", ["attention", "value norm", "output share", "norm"])
def test_readings_of_heads_are_their_definitions(name: str, reading: str):
    found = measured(name, reading)
    define = getattr(readings, reading.replace(" ", "_"))
    for layer, array in product(range(3), ("raw", "effective")):
        weights = attention_of(name).array(array)[layer].numpy()
        values, projections = of_layer(name, layer)
        if reading == "norm":
            np.testing.assert_allclose(found.array(array)[layer], define(weights, values, projections), atol=1e-9)
            continue
        for head in range(len(weights)):
            more = (attention_of(name).raw[layer, head].numpy(),) if reading == "output share" else ()
            expected = define(weights[head], values[head], projections[head], *more)
            np.testing.assert_allclose(found.array(array)[layer, head], expected, atol=1e-9)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradients_are_those_of_autograd(name: str):
    gradients = autograd_derivatives(model_of(name))
    raw = attention_of(name).raw
    torch.testing.assert_close(measured(name, "gradient").raw, torch.stack(gradients) * raw, atol=1e-10, rtol=1e-8)
    expected = readings.relevance(list(raw.numpy()), [gradient.numpy() for gradient in gradients])
    np.testing.assert_allclose(measured(name, "relevance").raw, np.stack(expected), atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("reading", "residual"), [("rollout", 0.5), ("rollout without residual", 0.0)])
def test_rollout_is_its_definition(name: str, reading: str, residual: float):
    for array in ("raw", "effective"):
        expected = readings.rollout(list(attention_of(name).array(array).numpy()), residual)
        np.testing.assert_allclose(measured(name, reading).array(array), np.stack(expected), atol=1e-9)


@pytest.mark.parametrize(("name", "norm", "eps"), [("llama", "norm", "variance_epsilon"), ("gpt2", "ln_f", "eps")])
def test_what_an_edge_adds_to_a_logit_is_its_definition(name: str, norm: str, eps: str):
    model = model_of(name)
    found = ik.attention_measure(model, TEXT, "logit", target="w9")
    attention = attention_of(name)
    stream = attention.captured().text_run.trace.hidden[-1][0].numpy()
    last = getattr(model.hf.base_model, norm)
    unembedding = model.hf.get_output_embeddings().weight[9].detach().numpy()
    gain = last.weight.detach().numpy()
    directions = readings.logit_direction(stream, gain, name == "gpt2", getattr(last, eps), unembedding)
    for layer, head in product(range(3), range(2)):
        values, projections = of_layer(name, layer)
        expected = readings.logit(attention.raw[layer, head].numpy(), values[head], projections[head], directions)
        np.testing.assert_allclose(found.raw[layer, head], expected, atol=2e-6)  # Llama's norm is in float32


@cache
def literal_parts(name: str) -> list[tuple]:
    """What goes into a layer's sum and its norms: values, projections, residual, and norms as (whole, gain, eps)."""
    trace = attention_of(name).captured().text_run.trace
    found = []
    for layer in range(3):
        values, projections = of_layer(name, layer)
        block = model_of(name).blocks[layer]
        entered = trace.blocks[layer].hidden[0].numpy()
        output = np.einsum("hij,hjv,hvd->id", attention_of(name).raw[layer].numpy(), values, projections)
        norms = []
        if name == "bert":
            attended = block.attention.output
            whole = entered + output + attended.dense.bias.detach().numpy()
            first = (whole, attended.LayerNorm.weight.detach().numpy(), attended.LayerNorm.eps)
            normed = attended.LayerNorm(torch.tensor(whole))
            brought = block.output.dense(block.intermediate(normed))
            second = (
                (normed + brought).detach().numpy(),
                block.output.LayerNorm.weight.detach().numpy(),
                block.output.LayerNorm.eps,
            )
            norms = [first, second]
            total = normed.detach().numpy()
        else:
            total = entered + output + block.self_attn.o_proj.bias.detach().numpy()
        found.append((values, projections, entered, norms, total))
    return found


def literal(name: str, reading: str, maps: list[np.ndarray]) -> list[np.ndarray]:
    """Each layer of a reading that puts heads together, of maps (…, head, query, key)."""
    rows = []
    for weights, (values, projections, entered, norms, total) in zip(maps, literal_parts(name), strict=True):
        parts = readings.parts(weights, values, projections, entered)
        used = {"norm with residual": 0, "norm after layer norm": 1, "alti": 1, "globenc": 2}[reading]
        for norm in norms[:used]:
            parts = readings.layer_norm(parts, *norm)
        rows.append(readings.nearness(parts, total) if reading == "alti" else readings.lengths(parts))
    return readings.multiplied_shares(rows) if reading in OUTER else rows


STREAMS = [(name, reading) for name, reading in product(("bert", "llama"), STREAM) if (name, reading) in READ]


@pytest.mark.parametrize(("name", "reading"), STREAMS)
def test_readings_with_the_residual_are_their_definitions(name: str, reading: str):
    for array in ("raw", "effective"):
        expected = literal(name, reading, list(attention_of(name).array(array).numpy()))
        np.testing.assert_allclose(measured(name, reading).array(array), np.stack(expected), atol=1e-7)


@pytest.mark.parametrize(
    ("name", "projection"),
    [("gpt_neox", "attention.dense"), ("falcon-7b", "self_attention.dense"), ("opt", "self_attn.out_proj")],
)
def test_the_sum_holds_the_projections_bias_wherever_the_feed_forward_part_stands(name: str, projection: str):
    """Beside attention (GPT-NeoX; Falcon adds to it in place), or on vectors without a batch (OPT)."""
    reading = ik.effective_attention(tiny.shared(name, dtype=torch.float64), TEXT).captured().text_run
    run = watched_run(reading)
    for at, block in enumerate(reading.model.blocks):
        layer = Layer.of(reading, at, range(reading.model.n_heads), USUAL)
        weights = layer.call.weights(torch.arange(len(reading.tokens)))[0]
        output = weights @ layer.call.value[0].repeat_interleave(layer.call.groups, 0)
        brought = block.get_submodule(projection)(output.transpose(0, 1).flatten(1))
        assert torch.allclose(stream_of(run, layer).sum, run.trace.blocks[at].hidden[0] + brought, atol=1e-6)


def test_shares_of_a_row_of_zeros_are_zero():
    """In ALTI, no token of a row may be nearer to the whole than nothing is."""
    found = ik.attention_measure(tiny.shared("mistral3"), [3, 4, 5, 4, 9], "alti")
    assert (found.raw.sum(-1) == 0).any() and not found.raw.isnan().any() and not found.upper.isnan().any()
    assert (found.lower <= found.raw).all() and (found.raw <= found.upper).all()


# Ranges


@pytest.mark.parametrize(("name", "reading"), READ)
def test_the_reading_lies_in_its_range_and_ends_are_exact_or_say_that_they_are_not(name: str, reading: str):
    found = measured(name, reading)
    assert (found.lower <= found.raw + 1e-9).all() and (found.raw <= found.upper + 1e-9).all()
    scale = float(found.upper.abs().max())
    assert found.exact == (reading not in OUTER) and ("outer bounds" in str(found)) != found.exact
    if found.exact:
        assert found.gap.max() <= (1e-6 if MEASURE_KINDS[reading].joint else 1e-8) * max(1.0, scale)
    assert (found.certain_share >= 0).all() and (found.certain_share <= 1 + 1e-9).all()
    assert (found.upper - found.lower).max() > 1e-3  # something is free
    order = found.certain_order
    assert order.min() >= -1 and order.max() <= 5
    if MEASURE_KINDS[reading].factor:
        assert order.min() >= 0  # decided


@pytest.mark.parametrize(("name", "reading"), STREAMS)
def test_a_thousand_alternatives_stay_inside(name: str, reading: str):
    found = measured(name, reading)
    for layer, values in enumerate(literal(name, reading, alternatives(name, 1000))):
        assert (values <= found.upper[layer].numpy() + 1e-7).all()
        assert (values >= found.lower[layer].numpy() - 1e-7).all()


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("reading", ["attention", "value norm", "mean", "rollout"])
def test_alternatives_stay_inside_and_keep_the_order_that_is_certain(name: str, reading: str):
    found = measured(name, reading)
    maps = torch.tensor(np.stack(alternatives(name, 1000), axis=1))  # choice, layer, head, query, key
    if reading == "value norm":
        factor = torch.nan_to_num(found.raw / attention_of(name).raw)
        values = maps * factor
    elif reading == "attention":
        values = maps
    else:
        values = maps.mean(2)
    if reading == "rollout":
        half = 0.5 * values + 0.5 * torch.eye(values.shape[-1])
        values = torch.stack([half[:, 0], half[:, 1] @ half[:, 0], half[:, 2] @ half[:, 1] @ half[:, 0]], dim=1)
    assert (values <= found.upper + 1e-9).all() and (values >= found.lower - 1e-9).all()
    own = torch.eye(values.shape[-1], dtype=torch.bool) & (reading == "rollout")
    most = chain.certain_order
    for at in np.ndindex(*found.certain_order.shape):
        asked = ((found.upper[at] > 0) & ~own[at[-1]]).nonzero()[:, 0].tolist()
        seen = most(found.raw[at].numpy(), values[(slice(None), *at)].numpy(), asked, 5)
        assert int(found.certain_order[at]) <= seen  # what is certain is so in each of them


LINEAR = [("bert", name) for name in ("attention", "value norm", "output share")]
LINEAR += [("llama", name) for name in ("attention", "value norm", "output share", "gradient", "logit")]


@pytest.mark.parametrize(("name", "reading"), LINEAR)
def test_ends_and_order_of_a_row_are_those_of_linear_programs(name: str, reading: str):
    found = measured(name, reading)
    attention = attention_of(name)
    for layer, head, query in ((1, 2, 9), (2, 0, 13), (0, 3, 11)):
        row = literal_row(attention, layer, head, query)
        factor = torch.nan_to_num(found.raw[layer, head, query] / attention.raw[layer, head, query])[row.keys].numpy()

        unit = np.diag(factor)
        keys = row.keys.tolist()
        ends = np.array([row.ends(c) for c in unit])
        np.testing.assert_allclose(found.lower[layer, head, query, keys], ends[:, 0], atol=1e-8)
        np.testing.assert_allclose(found.upper[layer, head, query, keys], ends[:, 1], atol=1e-8)
        strongest = np.argsort(-factor * row.attention.numpy(), kind="stable")
        count = 0
        for place in range(min(5, len(strongest))):
            rest = strongest[place + 1 :]
            if any(row.ends(unit[other] - unit[strongest[place]])[1] > 1e-9 * np.abs(factor).max() for other in rest):
                break
            count += 1
        assert int(found.certain_order[layer, head, query]) == count


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_ends_of_a_mean_are_means_of_linear_programs(name: str):
    found = measured(name, "mean")
    attention = attention_of(name)
    layer, query = 1, 9
    rows = [literal_row(attention, layer, head, query) for head in range(attention.raw.shape[1])]
    keys = rows[0].keys.tolist()
    for unit, key in zip(np.eye(len(keys)), keys, strict=True):
        least, most = np.mean([row.ends(unit) for row in rows], axis=0)
        assert float(found.lower[layer, query, key]) == pytest.approx(least, abs=1e-8)
        assert float(found.upper[layer, query, key]) == pytest.approx(most, abs=1e-8)


@pytest.mark.parametrize(("name", "text"), [("llama", TEXT), ("gpt_oss", "w5 w6 w7 w5 w6 w8 w9")])
def test_the_order_through_layers_is_that_of_all_differences(name: str, text: str):
    """One chain for each pair of sources, from their difference, without asking the ends first.

    Of the second text, some sources are in a certain order though their ends overlap.
    """
    attention = ik.effective_attention(model_of(name), text)
    n = len(attention.tokens)
    rows = [layer.rows(list(product(range(4), range(n)))) for layer in attention.captured().layers]
    pairs = [(first, second) for first in range(n) for second in range(n) if first != second]
    unit = torch.eye(n, dtype=torch.float64)
    starts = torch.stack([unit[second] - unit[first] for first, second in pairs])
    ahead = torch.stack([extreme.value for extreme in greatest_through_layers(rows, Chain(0.5, 0.5), starts)])
    found = ik.attention_measure(attention, name="rollout")
    assert set(found.certain_order.unique().tolist()) >= {0, 1, 2}
    for layer, output in product(range(3), range(n)):
        asked = [source for source in range(n) if source != output and found.upper[layer, output, source] > 0]
        strongest = sorted(asked, key=lambda source: -float(found.raw[layer, output, source]))
        count = 0
        for place, first in enumerate(strongest[:5]):
            over = [ahead[layer, pairs.index((first, second)), output] for second in strongest[place + 1 :]]
            if over and max(over) > 1e-9:
                break
            count += 1
        assert int(found.certain_order[layer, output]) == count


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_the_order_of_weights_is_that_of_intervals(name: str):
    assert torch.equal(measured(name, "attention").certain_order, attention_of(name).intervals().certain_order)


def test_in_no_time_there_are_still_bounds():
    exact = measured("bert", "rollout")
    late = ik.attention_measure(model_of("bert"), TEXT, "rollout", seconds=1e-9)
    assert late.gap.isnan().any() and "in time" in str(late)
    assert (late.lower <= exact.lower + 1e-9).all() and (late.upper >= exact.upper - 1e-9).all()
    assert not late.order_is_decided.all() and exact.order_is_decided.all()


def test_norms_of_weights_that_were_not_bounded_take_no_search(monkeypatch: pytest.MonkeyPatch):
    exact = measured("bert", "norm")
    monkeypatch.setattr(boxes, "_ends", lambda *given: pytest.fail("Ends were searched for."))
    late = ik.attention_measure(model_of("bert"), TEXT, "norm", seconds=1e-9)
    assert late.gap.isnan().all() and "in time" in str(late)
    assert (late.lower <= exact.lower + 1e-9).all() and (late.upper >= exact.upper - 1e-9).all()


@pytest.mark.parametrize(("reading", "tick"), [("mean", 1.0), ("rollout", 0.2)])
def test_an_order_that_time_ran_out_for_counts_what_was_found(
    reading: str, tick: float, monkeypatch: pytest.MonkeyPatch
):
    """The limit holds for the order too, from when it is asked for: what was decided is right, and the rest says so."""
    whole = measured("bert", reading)
    ticks = iter(range(10**9))
    found = ik.attention_measure(model_of("bert"), TEXT, reading, seconds=20)
    assert not found.gap.isnan().any()
    monkeypatch.setattr(time, "monotonic", lambda: tick * next(ticks))  # between two looks at the clock
    decided = found.order_is_decided
    monkeypatch.undo()
    order = found.certain_order
    assert decided.any() and not decided.all()
    assert torch.equal(order[decided], whole.certain_order[decided])
    assert (order[~decided] <= whole.certain_order[~decided]).all() and (order[~decided] == -1).any()
    assert next(ticks) < 300  # it ended when it was late


# What is asked for


def test_a_reading_is_pickled_without_what_it_was_told():
    """Bars and functions of the caller belong to one process; the order of sources is found in the other."""
    reading = ik.attention_measure(
        model_of("bert"), TEXT, "gradient", target=lambda logits, hidden: hidden.sum(), progress=lambda *told: None
    )
    again = pickle.loads(pickle.dumps(reading))
    assert torch.equal(again.certain_order, reading.certain_order)


def test_attention_of_some_heads_is_read_of_those_that_are_selected_from_it():
    attention = ik.effective_attention(tiny.loaded("llama"), TEXT, layers=[0, 2], heads=[1, 3])
    selected = ik.attention_measure(attention.sel(layer=2, head=3), name="attention")
    assert selected.axis("head").values == (3,) and selected.axis("layer").values == (2,)
    torch.testing.assert_close(selected.raw[0, 0], attention.sel(layer=2, head=3).raw.double(), atol=1e-6, rtol=0)


def test_targets_are_tokens_classes_and_functions():
    model = tiny.shared("llama")
    default = ik.attention_measure(model, TEXT, "gradient", layers=[2])
    named = ik.attention_measure(model, TEXT, "gradient", target="w9", layers=[2])
    own = ik.attention_measure(model, TEXT, "gradient", target=lambda logits, hidden: logits[0, -1, 9], layers=[2])
    assert default.target != named.target == "next token 'w9'" and not torch.equal(named.raw, default.raw)
    torch.testing.assert_close(own.raw, named.raw)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("llama", {"name": "zebra"}, "'rollout'"),
        ("llama", {"target": 3}, "needs none"),
        ("llama", {"name": "rollout", "heads": [0]}, "all heads together"),
        ("llama", {"name": "gradient", "target": "w5 w6"}, "2 tokens"),
        ("llama", {"name": "gradient", "target": 99}, "0 to 59"),
        ("llama", {"name": "gradient", "target": lambda logits, hidden: 1.0}, "one finite number"),
        ("llama", {"name": "logit", "target": square}, "a token, or its number"),
        ("llama", {"name": "norm after layer norm"}, "before its attention"),
        ("gemma2", {"name": "alti"}, "does not simply add"),
        ("gemma2", {"name": "logit"}, "does not simply add"),
        ("bert", {"name": "gradient"}, "makes none"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, options: dict, words: str):
    with pytest.raises(ik.InputError, match=words):
        ik.attention_measure(tiny.shared(name), TEXT, **options)
