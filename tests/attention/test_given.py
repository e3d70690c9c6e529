"""Attention given as tensors is the attention of the model that they were captured from."""

from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from tests.attention.test_effective import TEXTS
from tests.hostile.judging import refused
from tests.models import tiny

MODELS = ("bert", "llama", "mistral")  # bidirectional; causal with grouped heads; windowed


def tensors_of(attention: Any) -> dict[str, Any]:
    """Return the tensors that another tool would have captured of attention."""
    layers = attention.captured().layers
    calls = [layer.call for layer in layers]
    queries, keys = torch.arange(len(attention.tokens)), torch.arange(len(attention.keys))
    return {
        "values": torch.cat([call.value for call in calls]),
        "queries": torch.cat([call.query for call in calls]),
        "keys": torch.cat([call.key for call in calls]),
        "weights": torch.cat([call.weights() for call in calls]),
        "mask": torch.stack([layer.seen.block(queries, keys) for layer in layers]),
        "output": torch.cat([call.output for call in calls]),
        "output_projection": torch.stack([layer.projection for layer in layers]),
        "scaling": calls[0].scaling,
    }


def captured(name: str) -> tuple[Any, dict[str, Any]]:
    attention = ik.effective_attention(tiny.loaded(name, dtype=torch.float64), TEXTS[0])
    return attention, tensors_of(attention)


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    return captured(request.param)


def some(tensors: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: tensors[name] for name in ("values", "mask", "output_projection", *names)}


def test_queries_and_keys_give_the_models_own_result_bit_for_bit(pair):
    attention, tensors = pair
    given = ik.attention_from(**some(tensors, "queries", "keys", "scaling", "output"), tokens=attention.tokens)
    assert given.tokens == attention.tokens and given.arrays == attention.arrays
    for name in attention.arrays:
        torch.testing.assert_close(given.array(name), attention.array(name), rtol=0, atol=0, equal_nan=True, msg=name)
    place = {"layer": 1, "head": 0}
    expected = attention.intervals(**place)
    bounds = given.intervals(**place)
    assert torch.equal(bounds.lower, expected.lower) and torch.equal(bounds.upper, expected.upper)


def test_a_query_that_sees_nothing_has_weights_of_0():
    mask = torch.tensor([[True, True], [False, False]])
    weights = torch.tensor([[[0.3, 0.7], [0.0, 0.0]]])
    given = ik.attention_from(values=torch.tensor([[[1.0, 2.0], [3.0, 5.0]]]), weights=weights, mask=mask)
    assert torch.equal(given.raw[0], weights) and given.null_dim[0, 0, 1] == 0


def test_each_layer_has_its_own_mask():
    masks = torch.stack([torch.ones(3, 3).tril(), torch.ones(3, 3)]).bool()
    weights = (masks / masks.sum(-1, keepdim=True))[:, None]
    given = ik.attention_from(values=torch.randn(2, 1, 3, 4), weights=weights, mask=masks)
    assert torch.equal(given.visible, masks)


def test_weights_give_the_same_to_rounding_from_numpy_too(pair):
    attention, tensors = pair
    arrays = {name: np.asarray(tensor) for name, tensor in some(tensors, "weights", "output").items()}
    given = ik.attention_from(**arrays)
    torch.testing.assert_close(given.effective, attention.effective, atol=1e-10, rtol=0)
    assert torch.equal(given.null_dim, attention.null_dim)
    bounds = given.intervals(layer=0, head=1)
    expected = attention.intervals(layer=0, head=1)
    torch.testing.assert_close(bounds.lower, expected.lower, atol=1e-9, rtol=0)
    torch.testing.assert_close(bounds.upper, expected.upper, atol=1e-9, rtol=0)
    assert "reachable_dim" not in given.arrays  # it needs the keys
    with refused("has no reachable_dim"):
        _ = given.reachable_dim


def test_one_layer_needs_no_axis_of_layers(pair):
    attention, tensors = pair
    one = {name: tensor[1] for name, tensor in some(tensors, "weights").items()}
    given = ik.attention_from(**one)
    torch.testing.assert_close(given.effective[0], attention.effective[1], atol=1e-10, rtol=0)
    causal = not bool(tensors["mask"].triu(1).any())
    assert given.about["causal"] == causal


def test_heads_that_share_values_are_as_if_each_had_its_own():
    """Also where only one set of values determines its rows: each row's rank is that of its own key-value head."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
    values[1, :, 2:] = values[1, :, :2]  # rank 2
    weights = torch.rand(6, 4, 4, generator=generator, dtype=torch.float64)
    weights /= weights.sum(-1, keepdim=True)
    shared = ik.attention_from(values=values, weights=weights)
    own = ik.attention_from(values=values.repeat_interleave(3, 0), weights=weights)
    assert shared.rank[0, :, 0].tolist() == [4, 4, 4, 2, 2, 2]
    for name in ("effective", "null_dim", "polytope_dim", "simplex"):
        torch.testing.assert_close(shared.array(name), own.array(name), atol=1e-9, rtol=0, msg=name)
    bounds = shared.intervals()
    expected = own.intervals()
    assert bool((bounds.lower < bounds.upper)[0, 3:].any())
    torch.testing.assert_close(bounds.lower, expected.lower, atol=1e-9, rtol=0)
    torch.testing.assert_close(bounds.upper, expected.upper, atol=1e-9, rtol=0)


def test_a_causal_mask_has_a_name():
    attention, tensors = captured("llama")
    given = ik.attention_from(**some(tensors, "weights") | {"mask": "causal"})
    assert torch.equal(given.visible, attention.visible)


def test_it_is_saved_opened_drawn_and_shown(tmp_path):
    attention, tensors = captured("bert")
    given = ik.attention_from(**some(tensors, "weights"), tokens=attention.tokens, name="captured elsewhere")
    assert "captured elsewhere" in repr(given)
    given.sel(layer=0, head=0).plot()
    given.save_html(tmp_path / "page.html")
    assert "captured elsewhere" in (tmp_path / "page.html").read_text()
    given.save(tmp_path / "kept")
    opened = ik.open_result(tmp_path / "kept")
    assert torch.equal(opened.raw, given.raw) and opened.provenance.weights == given.provenance.weights
    assert len(given.to_frame()) == given.raw.numel()


def test_another_number_is_another_provenance():
    _, tensors = captured("bert")
    before = ik.attention_from(**some(tensors, "weights"))
    moved = some(tensors, "weights")
    moved["values"] = moved["values"].clone()
    moved["values"][0, 0, 0, 0] += 1
    assert ik.attention_from(**moved).provenance.weights != before.provenance.weights


def test_what_is_given_is_copied():
    _, tensors = captured("bert")
    given = ik.attention_from(**some(tensors, "weights"))
    before = given.raw.clone()
    tensors["weights"].zero_()
    assert torch.equal(given.raw, before)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weights": None}, "either weights, or queries and keys"),
        ({"weights": lambda tensors: tensors["weights"] * 1.01}, "sum to 1.01"),
        ({"weights": lambda tensors: tensors["weights"] - 0.1}, "never below 0"),
        ({"weights": lambda tensors: tensors["weights"][..., :-1]}, "fits"),
        ({"weights": lambda tensors: tensors["weights"].mT}, "sum to"),
        ({"weights": lambda tensors: tensors["weights"].tril()}, "mask='causal'"),
        ({"values": lambda tensors: tensors["values"] * torch.nan}, "NaN or infinity"),
        ({"values": lambda tensors: tensors["values"].long()}, "expected floats"),
        ({"values": lambda tensors: tensors["values"][0, 0]}, "expected floats over"),
        ({"values": lambda tensors: tensors["values"][:, :3]}, "cannot share"),
        ({"output": lambda tensors: tensors["output"].flip(1)}, "miss the output by"),
        ({"output_projection": lambda tensors: tensors["output_projection"][:, :2]}, "fits"),
        ({"tokens": lambda _: ["a", "b"]}, "strings"),
        ({"mask": lambda _: "sideways"}, "expected 'causal'"),
        ({"mask": lambda _: "causal"}, "hides a key"),
        ({"scaling": lambda _: 0.5}, "belongs to queries and keys"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changed, message):
    _, tensors = captured("bert")
    arguments = {"values": tensors["values"], "weights": tensors["weights"], "output": tensors["output"]}
    for name, change in changed.items():
        arguments[name] = None if change is None else change(tensors)
    with refused(message):
        ik.attention_from(**arguments)


READ = ("attention", "value norm", "output share", "mean", "norm", "rollout")


@pytest.mark.parametrize("name", READ)
def test_readings_of_tensors_are_those_of_the_model(pair, name):
    attention, tensors = pair
    given = ik.attention_from(**some(tensors, "queries", "keys", "scaling"), tokens=attention.tokens)
    reading = attention.captured().text_run
    expected = ik.attention_measure(reading.model, reading.text, name)
    for found in (ik.attention_measure(given, name=name), ik.attention_measure(attention, name=name)):
        for array in ("raw", "effective", "lower", "upper", "certain_share"):
            torch.testing.assert_close(found.array(array), expected.array(array), atol=1e-10, rtol=0, msg=array)


def test_a_selected_part_of_attention_is_read(pair):
    attention, _ = pair
    whole = ik.attention_measure(attention, name="value norm")
    part = ik.attention_measure(attention.sel(layer=[1], head=[2, 3]), name="value norm")
    assert part.axis("layer").values == (1,) and part.axis("head").values == (2, 3)
    torch.testing.assert_close(part.upper, whole.sel(layer=[1], head=[2, 3]).upper, atol=1e-10, rtol=0)
    scores = ik.head_scores(attention.sel(layer=[1], head=[2, 3]), scores="previous")
    every = ik.head_scores(attention, scores="previous")
    torch.testing.assert_close(scores.upper, every.sel(layer=[1], head=[2, 3]).upper, atol=1e-10, rtol=0)


def test_heads_of_tensors_are_scored_by_the_names_of_tokens():
    model = tiny.loaded("llama", dtype=torch.float64)
    ids = ik.repeated_tokens(model, 6, seed=1)
    tensors = tensors_of(ik.effective_attention(model, ids))
    given = ik.attention_from(**some(tensors, "weights"), tokens=[str(token) for token in ids])
    expected = ik.head_scores(model, ids)
    found = ik.head_scores(given)
    scores = [score for score in expected.scores if score != "special"]  # tensors do not tell which tokens these are
    for array in ("raw", "lower", "upper"):
        ours, theirs = (result.sel(score=scores).array(array) for result in (found, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=0, equal_nan=True)
    assert not found.sel(score="induction").raw.isnan().any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda given: given.verify(), "given as tensors"),
        (lambda given: ik.attention_measure(given, name="gradient"), "This needs the model"),
        (lambda given: ik.attention_measure(given, name="alti"), "This needs the model"),
        (lambda given: ik.attention_measure(given, "mean"), "text= does not go with attention"),
        (lambda given: ik.attention_measure(given.sel(head=0), name="mean"), "is of all heads together"),
        (lambda given: ik.attention_measure(given.sel(layer=1), name="rollout"), "needs other layers too"),
        (lambda given: ik.attention_measure(given.sel(query=0)), "reads whole rows"),
        (lambda given: ik.head_scores(given, ["a"]), "texts= does not go with attention"),
        (lambda given: ik.head_scores(given.sel(key=0)), "reads whole rows"),
    ],
)
def test_what_tensors_cannot_tell_is_refused(pair, call, message):
    _, tensors = pair
    given = ik.attention_from(**some(tensors, "weights"))
    with refused(message):
        call(given)


def test_a_changed_model_is_not_differentiated():
    model = tiny.loaded("llama", dtype=torch.float64)
    attention = ik.effective_attention(model, [5, 6, 7, 8])
    with torch.no_grad():
        next(iter(model.hf.parameters())).add_(1e-3)
    with refused("changed after it was first read"):
        ik.attention_measure(attention, name="norm with residual")


@pytest.mark.parametrize("name", ["t5-both", "bart"])
def test_cross_attention_has_keys_of_another_text(name: str):
    model = tiny.two_stacks(name)
    own = ik.effective_attention(model, "w5 w6 w7 w9 w10 w11 w12 w13 w14", target="w8 w9 w5", attention="cross")
    tensors = tensors_of(own) | {"tokens": own.tokens}
    shared = {name: tensors[name] for name in ("values", "output_projection", "output", "tokens")}
    scores = {name: tensors[name] for name in ("queries", "keys", "scaling")}
    made = ik.attention_from(**shared, **scores, source=own.keys)
    given = ik.attention_from(**shared, weights=tensors["weights"].numpy())
    assert made.tokens == own.tokens and made.keys == own.keys and given.keys == tuple(map(str, range(11)))
    for found in (made, given):
        for array in ("raw", "effective", "rank", "polytope_dim"):
            torch.testing.assert_close(found.array(array), own.array(array), atol=1e-9, rtol=0)
        torch.testing.assert_close(found.intervals().upper, own.intervals().upper, atol=1e-9, rtol=0)
    names = ("first", "same token")
    mine, theirs = (ik.head_scores(each, scores=names).raw for each in (made, own))
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_as_many_source_tokens_as_targets_are_said_to_be_a_source():
    tensors = {"values": torch.randn(2, 3, 4), "weights": torch.full((2, 3, 3), 1 / 3)}
    alone = ik.attention_from(**tensors)
    crossing = ik.attention_from(**tensors, tokens=["a", "b", "c"], source=["x", "y", "z"])
    assert alone.keys == alone.tokens and crossing.keys == ("x", "y", "z") != crossing.tokens
    with pytest.raises(ik.InputError, match=r"source=.* cannot be used: expected 3 strings"):
        ik.attention_from(**tensors, source=["x"])
    with pytest.raises(ik.InputError, match=r"mask='causal' cannot be used.*here \(2, 3\)"):
        ik.attention_from(values=torch.randn(2, 3, 4), weights=torch.full((2, 2, 3), 1 / 3), mask="causal")
    with pytest.raises(ik.InputError, match=r"weights has shape \(1, 2, 2, 4\)"):
        ik.attention_from(values=torch.randn(2, 3, 4), weights=torch.full((2, 2, 4), 1 / 4))
