"""Cross-attention, whose keys are tokens of another text, in everything that attention can be asked for."""

from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from identikit import proof
from identikit.attention.certainty import certainty
from identikit.attention.sample import sample_rows
from identikit.attention.token_types import TYPES, type_sums
from identikit.models.taps.tap import RowMask
from tests.attention.literal import assert_plain_programs, literal_row
from tests.models import tiny
from tests.reference import roles

SOURCE = "w5 w6 w7, w5 w9 w10 w11 w12 w13 w14 w15 w16 w17"
TARGET = "w8 w9 w5 w8"


@pytest.fixture(scope="module", params=["t5-both", "bart"])
def attention(request) -> Any:
    return ik.effective_attention(tiny.two_stacks(request.param), SOURCE, target=TARGET, attention="cross")


def projection(attention: Any, layer: int, head: int) -> np.ndarray:
    return attention.captured().text_run.model.projection(layer)[head].double().numpy()


def test_effective_attention_is_that_of_least_norm(attention):
    for layer, head, query in ((0, 0, 0), (1, 2, -1), (1, 3, 3)):
        row = literal_row(attention, layer, head, query)
        values = row.values.numpy() @ projection(attention, layer, head)
        expected = row.attention.numpy() @ values @ np.linalg.pinv(values, rcond=1e-10)
        np.testing.assert_allclose(attention.effective[layer, head, query], expected, atol=1e-9)
        rank = np.linalg.matrix_rank(values, tol=1e-10)
        assert int(attention.null_dim[layer, head, query]) == len(row.keys) - rank > 0
    assert attention.residual.max() < 1e-12
    assert attention.verify().hidden < 1e-12 and attention.sel(layer=0, head=1).run_with(0).hidden > 1e-3


def test_ends_are_those_of_linear_programs(attention):
    found = attention.intervals()
    assert_plain_programs(found, attention, (0, 0, 0), (1, 2, -1), (1, 3, 3))
    edge = attention.intervals(layer=1, head=2, query="w9", key="w7")
    at = (1, 2, attention.tokens.index("w9"), attention.keys.index("w7"))
    assert float(edge.upper) == pytest.approx(float(found.upper[at])) and edge.raw.item() == pytest.approx(
        float(found.raw[at])
    )


def test_simplex_and_alternatives_keep_the_output(attention):
    head = attention.sel(layer=0, head=1)
    assert (head.simplex.sum(-1) - 1).abs().max() < 1e-9 and head.simplex.min() >= 0
    assert head.run_with(head.simplex).hidden < 1e-7


def test_groups_are_of_source_tokens(attention):
    assert attention.intervals(layer=0, head=0, query=0, groups="special").about["groups"] == {"special": [0, 15]}
    words = attention.intervals(layer=0, head=0, query=0, groups="words")
    assert words.axes[-1].values[4:6] == ("w3@4", "w5@5")
    mine = attention.intervals(layer=0, head=0, query=0, weights={"a": {"w6": 1, "w7": -1}})
    raw = attention.sel(layer=0, head=0, query=0).raw
    assert float(mine.raw.squeeze()) == pytest.approx(float(raw[2] - raw[3]))


def test_scores_of_heads_are_their_definitions(attention):
    found = ik.head_scores(attention)
    assert found.scores == ("first", "special", "same token", "sink rate")
    batch = attention.captured().text_run.batch
    ids, keys = batch.ids[0].tolist(), batch.source.ids[0].tolist()
    assert len({*ids} & {*keys}) > 2
    for at, score in enumerate(found.scores[:3]):
        pattern = roles.crossing(score, ids, keys, attention.about["source"]["special"])
        rows = pattern.any(1)
        for name in ("raw", "effective"):
            maps = attention.array(name).numpy()
            expected = (maps * pattern)[:, :, rows].sum(-1).mean(-1)
            np.testing.assert_allclose(found.array(name)[at], expected, atol=1e-9)
        ends = [literal_row(attention, 1, 2, int(query)).ends(pattern[query]) for query in np.flatnonzero(rows)]
        lower, upper = np.mean(ends, 0)
        assert float(found.lower[at, 1, 2]) == pytest.approx(lower, abs=1e-8)
        assert float(found.upper[at, 1, 2]) == pytest.approx(upper, abs=1e-8)
    assert float(found.raw[3, 1, 2]) == float(found.raw[0, 1, 2] > 0.3)
    with pytest.raises(ik.InputError, match="only first, special, same token, sink rate mean something"):
        ik.head_scores(attention, scores=["previous"])


def test_measures_are_their_definitions(attention):
    call = attention.captured().layers[1].call
    added = [call.value[0, head].numpy() @ projection(attention, 1, head) for head in range(4)]
    raw = attention.raw[1].numpy()
    value_norm = ik.attention_measure(attention, name="value norm")
    np.testing.assert_allclose(value_norm.raw[1], raw * np.linalg.norm(added, axis=-1)[:, None], atol=1e-12)
    mean = ik.attention_measure(attention, name="mean")
    np.testing.assert_allclose(mean.raw[1], raw.mean(0), atol=1e-12)
    assert [axis.tokens for axis in mean.axes[1:]] == [attention.tokens, attention.keys]
    norm = ik.attention_measure(attention, name="norm")
    np.testing.assert_allclose(norm.raw[1], np.linalg.norm(np.einsum("hij,hjd->ijd", raw, added), axis=-1), atol=1e-12)
    bounds = attention.intervals()
    np.testing.assert_allclose(mean.upper[1], bounds.upper[1].mean(0), atol=1e-9)
    decided = ik.attention_measure(attention, name="mean", seconds=60)
    assert decided.certain_order.shape == (len(attention.layers), len(attention.tokens))


def test_gradients_are_of_the_next_target_token(attention):
    found = ik.attention_measure(attention, name="gradient")
    reading = attention.captured().text_run
    logits = reading.model.trace(reading.batch).logits[0, -1]
    assert found.about["target"] == f"next token {reading.model.tokenizer.decode([int(logits.argmax())])!r}"
    strongest = torch.unravel_index(found.raw.abs().argmax(), found.raw.shape)
    layer, head, query, key = (int(place) for place in strongest)
    step = 1e-3
    moved = []
    for sign in (1, -1):
        weights = attention.sel(layer=layer, head=head).raw.clone()
        weights[query, key] += sign * step

        def put(call: Any, weights: Any = weights) -> Any:
            output = call.output.clone()
            output[0, head] = weights @ call.value[0, head]
            return output if call.layer == layer else None

        moved.append(reading.model.trace(reading.batch, put).logits[0, -1, int(logits.argmax())])
    slope = float(moved[0] - moved[1]) / (2 * step)
    weight = float(attention.raw[layer, head, query, key])
    assert float(found.raw[layer, head, query, key]) == pytest.approx(weight * slope, rel=1e-2)  # T5 norms in float32


@pytest.mark.parametrize("name", ["norm with residual", "logit", "relevance", "alti"])
def test_what_follows_one_stack_is_refused(attention, name: str):
    with pytest.raises(ik.InputError, match=r"follows what one stack adds to its own tokens|of all heads"):
        ik.attention_measure(attention.sel(layer=[0, 1]), name=name)


def test_tables_words_files_and_proofs(attention, tmp_path):
    frame = attention.sel(layer=0, head=0).to_frame()
    assert len(frame) == len(attention.tokens) * len(attention.keys)
    assert frame.query("query == 2 and key == 4")[["query_token", "key_token"]].values.tolist() == [["w8", "w3"]]
    words = attention.words()
    assert words.axis("key").tokens == attention.keys and words.about["source"]["words"] is None
    torch.testing.assert_close(words.raw, attention.raw)
    attention.save(tmp_path / "saved")
    opened = ik.open_result(tmp_path / "saved")
    assert opened.keys == attention.keys and torch.equal(opened.raw, attention.raw)
    assert repr(opened) == repr(attention) and "5 queries" not in repr(attention)
    saved = attention.intervals(layer=0, head=0).save_proof(tmp_path / "proof.json")
    checked = list(proof.check((tmp_path / "proof.json").read_text()))
    assert len(checked) == saved.claims == 6 * 16 and all(slack >= 0 for *_, slack in checked)
    assert attention.sel(layer=0, head=0).plot()[0].get_ylabel() == "query"
    assert attention.intervals().plot() is not None


def test_a_mask_too_long_to_hold_is_read_row_by_row(attention, monkeypatch):
    monkeypatch.setattr("identikit.models.taps.tap.LONGEST_MASK", 4)
    model = attention.captured().text_run.model.encoder
    found = ik.effective_attention(model, SOURCE, target=TARGET, attention="cross")
    assert isinstance(found.captured().layers[0].call.mask, RowMask)
    torch.testing.assert_close(found.raw, attention.raw)
    assert torch.equal(found.null_dim, attention.null_dim)


def test_what_dataset_runs_read_knows_both_texts(attention):
    sums, number = type_sums(attention)
    assert number[0] == len(attention.tokens)
    expected = attention.raw[..., -1].mean(-1)  # the source's end, over all target tokens
    torch.testing.assert_close(sums[0, :, :, 0, TYPES.index("sep")], expected)
    sample = sample_rows(attention, [[0, 15]], seconds=None, seed=0)
    assert sample.bounded.lower.shape[1] == len(attention.keys)
    assert certainty(attention, 8, 0)["group_keys"].tolist()[:2] == [2, 1]
