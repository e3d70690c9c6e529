"""The alignment of a target to a source: what is framed, how far bars go, and what is said of it."""

from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from identikit import plots
from tests.attention.literal import literal_row
from tests.models import tiny
from tests.plots.test_plots import check_layout
from tests.reference import intervals as reference

SOURCE = "w5 w6 w7 w5 w9 w10 w12 w13 w14 w15"


@pytest.fixture(scope="module")
def attention() -> Any:
    model = tiny.two_stacks("t5-both")
    return ik.effective_attention(model, SOURCE, target="w8 w9 w5 w10 w17", attention="cross").sel(layer=1, head=0)


def framed(axes: Any) -> set[tuple[int, int]]:
    return {(round(patch.get_y() + 0.5), round(patch.get_x() + 0.5)) for patch in axes.patches}


def test_cells_are_framed_where_no_alternative_has_another(attention):
    found = attention.intervals()
    expected = []
    for query in range(len(attention.tokens)):
        row = literal_row(attention, 1, 0, query)
        weights, values = row.attention.numpy(), row.values.numpy()
        best = int(weights.argmax())
        others = [key for key in range(len(weights)) if key != best]
        unit = np.eye(len(weights))
        ahead = [unit[key] - unit[best] for key in others]
        most = max(c @ reference.optimum(-c, weights, values) for c in ahead)
        expected.append(best if most < 0 else -1)
    assert found.aligned.tolist() == expected
    assert 0 < sum(place >= 0 for place in expected) < len(expected)
    drawn = plots.alignment(found)
    assert framed(drawn[0]) == {(row, place) for row, place in enumerate(expected) if place >= 0}
    check_layout(drawn[0].figure)
    best = found.raw.argmax(-1)
    ends = sorted((bar.get_y() + 0.3, bar.get_x(), bar.get_x() + bar.get_width()) for bar in drawn[1].patches)
    at = torch.arange(len(best))
    np.testing.assert_allclose([end[1] for end in ends], found.lower[at, best], atol=1e-12)
    np.testing.assert_allclose([end[2] for end in ends], found.upper[at, best], atol=1e-12)


def test_it_is_said(attention):
    words = str(attention.intervals())
    aligned = attention.intervals().aligned
    count = int((aligned >= 0).sum())
    assert f"{count} of 7 target tokens are aligned to the same source token in every attention with this" in words
    first = int((aligned >= 0).nonzero()[0])
    assert f"{attention.tokens[first]} → {attention.keys[int(aligned[first])]}" in words
    one = attention.intervals(query=first)
    assert int(one.aligned) == int(aligned[first])
    assert "The target token is aligned to the same source token" in str(one)
    late = str(attention.intervals(seconds=1e-9))
    assert "At least 0 of 7 target tokens" in late
    assert "is not decided" in str(attention.intervals(query=first, seconds=1e-9))
    whole = ik.effective_attention(attention.captured().text_run.model.encoder, "w5 w6").intervals()
    assert "target token" not in str(whole)


def test_words_take_the_place_of_tokens(attention):
    groups = attention.intervals(groups="words")
    clear = groups.aligned >= 0
    assert clear.any() and (attention.intervals().aligned[clear] == groups.aligned[clear]).all()
    drawn = plots.alignment(groups, axes=plots.alignment(groups))
    assert drawn[0].get_xticklabels()[1].get_text() == "w5@1"


def test_what_is_no_alignment_is_refused():
    with pytest.raises(ik.InputError, match="expected attention intervals"):
        plots.alignment(ik.attention_measure(_whole(), name="attention").sel(layer=0, head=0))
    with pytest.raises(ik.InputError, match="still has the axes layer and head"):
        plots.alignment(_whole().intervals())


def _whole() -> Any:
    return ik.effective_attention(tiny.two_stacks("bart"), "w5 w6", target="w5", attention="cross")
