"""Readings of attention against their definitions, autograd and linear programs; and what holds for their ranges."""

from functools import cache

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.attention.measure_result import AttentionMeasure
from identikit.attention.measured import READINGS
from tests.attention.literal import literal_row
from tests.models import tiny
from tests.reference import intervals, readings

TEXT = "w5 w6 w7 w5 w6 w8 w9 w5 w6 w7 w10 w11"
MODELS = ("bert", "llama", "gpt_oss")  # plain; causal, with shared values; learned sinks


@cache
def model_of(name: str) -> ik.Model:
    return tiny.loaded(name, dtype=torch.float64)


def square(logits: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """A number of the last hidden vectors, for models that make no logits."""
    return hidden[0, -1].square().sum()


def measured(name: str, reading: str, **options) -> AttentionMeasure:
    target = {"target": square} if READINGS[reading].needs_target else {}
    return ik.attention_measure(model_of(name), TEXT, reading, **target, **options)


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
    with model._tapped(visit) as watch, torch.enable_grad():
        model._forward(batch)
        square(None, watch.hidden[-1]).backward()
    return [leaf.grad[0] for leaf in maps]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reading", ["attention", "value norm", "output share"])
def test_readings_of_a_head_are_their_definitions(name: str, reading: str):
    found = measured(name, reading)
    attention = ik.effective_attention(model_of(name), TEXT)
    define = getattr(readings, reading.replace(" ", "_"))
    for layer in range(len(attention.layers)):
        call = attention.captured().layers[layer].call
        projection = model_of(name).projection(layer).numpy()
        for head in range(model_of(name).n_heads):
            values = call.value[0, head // call.groups].numpy()
            raw = attention.raw[layer, head].numpy()
            for array in ("raw", "effective"):
                weights = attention.array(array)[layer, head].numpy()
                more = (raw,) if reading == "output share" else ()
                expected = define(weights, values, projection[head], *more)
                np.testing.assert_allclose(found.array(array)[layer, head], expected, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_the_norm_over_heads_is_its_definition(name: str):
    found = measured(name, "norm")
    attention = ik.effective_attention(model_of(name), TEXT)
    for layer in range(len(attention.layers)):
        call = attention.captured().layers[layer].call
        values = call.value[0].repeat_interleave(call.groups, 0).numpy()
        projection = model_of(name).projection(layer).numpy()
        for array in ("raw", "effective"):
            expected = readings.norm(attention.array(array)[layer].numpy(), values, projection)
            np.testing.assert_allclose(found.array(array)[layer], expected, atol=1e-9)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradients_are_those_of_autograd(name: str):
    found = measured(name, "gradient")
    gradients = autograd_derivatives(model_of(name))
    attention = ik.effective_attention(model_of(name), TEXT)
    for layer, gradient in enumerate(gradients):
        expected = gradient * attention.raw[layer]
        torch.testing.assert_close(found.raw[layer], expected, atol=1e-10, rtol=1e-8)
    relevance = measured(name, "relevance")
    maps = [attention.raw[layer].numpy() for layer in range(len(gradients))]
    expected = readings.relevance(maps, [gradient.numpy() for gradient in gradients])
    np.testing.assert_allclose(relevance.raw, np.stack(expected), atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("reading", "residual"), [("rollout", 0.5), ("rollout without residual", 0.0)])
def test_rollout_is_its_definition(name: str, reading: str, residual: float):
    found = measured(name, reading)
    attention = ik.effective_attention(model_of(name), TEXT)
    for array in ("raw", "effective"):
        expected = readings.rollout(list(attention.array(array).numpy()), residual)
        np.testing.assert_allclose(found.array(array), np.stack(expected), atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reading", READINGS)
def test_the_reading_lies_in_its_range_and_ends_are_exact(name: str, reading: str):
    found = measured(name, reading)
    assert (found.lower <= found.raw + 1e-9).all() and (found.raw <= found.upper + 1e-9).all()
    scale = float(found.upper.abs().max())
    assert found.exact and found.gap.max() <= (1e-6 if reading == "norm" else 1e-8) * max(1.0, scale)
    assert found.certain_order.max() <= 5
    certain = found.certain_share
    assert (certain >= 0).all() and (certain <= 1 + 1e-9).all()
    assert (found.upper - found.lower).max() > 1e-3  # something is free


def test_ends_of_a_scaled_weight_are_those_of_a_linear_program():
    found = measured("bert", "output share")
    attention = ik.effective_attention(model_of("bert"), TEXT)
    row = literal_row(attention, 1, 2, 4)
    factor = found.raw[1, 2, 4] / attention.raw[1, 2, 4]
    for key in (0, 3, 7):
        c = np.zeros(len(row.keys))
        c[key] = float(factor[key])
        least = c @ intervals.optimum(c, row.attention.numpy(), row.values.numpy())
        most = c @ intervals.optimum(-c, row.attention.numpy(), row.values.numpy())
        np.testing.assert_allclose(
            [float(found.lower[1, 2, 4, key]), float(found.upper[1, 2, 4, key])], [least, most], atol=1e-8
        )


def test_an_order_that_is_certain_is_kept_by_another_attention():
    found = measured("bert", "mean", layers=[0])
    attention = ik.effective_attention(model_of("bert"), TEXT)
    raw = attention.raw[0].clone()
    for head in range(model_of("bert").n_heads):
        for query in range(len(attention.tokens)):
            other = ik.alternative_attention(model_of("bert"), TEXT, layer=0, head=head, query=query)
            raw[head, query] = other.attention
    mean = raw.mean(0)
    assert (mean <= found.upper[0] + 1e-9).all() and (mean >= found.lower[0] - 1e-9).all()
    sure = found.certain_order[0] > 0
    assert torch.equal(mean.argmax(-1)[sure], found.raw[0].argmax(-1)[sure])


def test_in_no_time_there_are_still_bounds():
    exact = measured("bert", "rollout")
    late = measured("bert", "rollout", seconds=1e-9)
    assert late.gap.isnan().any() and "in time" in str(late)
    assert (late.lower <= exact.lower + 1e-9).all() and (late.upper >= exact.upper - 1e-9).all()


def test_targets_are_tokens_classes_and_functions():
    model = tiny.shared("llama")
    default = ik.attention_measure(model, TEXT, "gradient")
    named = ik.attention_measure(model, TEXT, "gradient", target="w9")
    number = ik.attention_measure(model, TEXT, "gradient", target=9)
    assert default.target != named.target == number.target == "next token 'w9'"
    assert torch.equal(named.raw, number.raw) and not torch.equal(named.raw, default.raw)
    own = ik.attention_measure(model, TEXT, "gradient", target=lambda logits, hidden: logits[0, -1, 9])
    torch.testing.assert_close(own.raw, number.raw)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "zebra"}, "'rollout'"),
        ({"target": 3}, "needs no gradient"),
        ({"name": "rollout", "heads": [0]}, "all heads together"),
        ({"name": "gradient", "target": "w5 w6"}, "2 tokens"),
        ({"name": "gradient", "target": 99}, "0 to 59"),
        ({"name": "gradient", "target": lambda logits, hidden: 1.0}, "one number"),
    ],
)
def test_what_cannot_be_read_is_refused(options: dict, words: str):
    with pytest.raises(ik.InputError, match=words):
        ik.attention_measure(tiny.shared("llama"), TEXT, **options)


def test_a_model_without_logits_asks_for_a_function():
    with pytest.raises(ik.InputError, match="makes none"):
        ik.attention_measure(tiny.shared("bert"), TEXT, "gradient")
