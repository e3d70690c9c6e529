"""Naming layers, heads, positions and tokens: every way that works, and what is said of every way that does not."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from identikit.errors import InputError
from identikit.results.axis import Axis, selected_index, selected_indices

LAYERS = Axis("layer", (3, 4, 5))
SHARES = Axis("data_share", (0.5, 1.0))
WORDS = Axis("query", (0, 1, 2, 3, 4), ("[CLS]", "Ġthe", "dog", "▁saw", "the"))


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        (None, [0, 1, 2]),
        (3, [0]),
        (-1, [2]),
        (np.int64(4), [1]),
        (torch.tensor(5), [2]),
        (np.array(5), [2]),
        ([5, 3], [2, 0]),
        ((4, -1), [1, 2]),
        (range(3, 5), [0, 1]),
        (np.array([3, 5]), [0, 2]),
        (torch.tensor([4]), [1]),
        ([4, 4], [1]),
        (slice(1, None), [1, 2]),
    ],
)
def test_numbers(wanted: object, places: list[int]):
    assert LAYERS.indices_of(wanted) == places


@pytest.mark.parametrize(
    ("wanted", "place"), [("dog", 2), ("saw", 3), ("▁saw", 3), ("[CLS]", 0), ("the@1", 1), ("Ġthe", 1), ("the@4", 4)]
)
def test_tokens(wanted: str, place: int):
    assert WORDS.indices_of(wanted) == [place]


def test_tokens_are_named_as_people_read_them():
    axis = Axis("key", (0, 1, 2, 3), ("Ġcaf", "Ã©", "Ċ", "ĠðŁį"))
    assert (
        axis.indices_of("é") == [1]
        and axis.indices_of("Ã©") == [1]
        and axis.indices_of(" caf") == axis.indices_of("caf") == [0]
    )
    assert axis.name_of(1) == "é" and axis.name_of(2) == "↵" and axis.indices_of("↵") == [2]
    assert axis.indices_of(axis.name_of(3)) == [3]


def test_an_axis_named_by_one_place_becomes_single_and_keeps_its_name():
    one, several, sliced = WORDS.sel("dog"), WORDS.sel(["dog"]), WORDS.sel(slice(2, 3))
    assert (one.single, several.single, sliced.single) == (True, False, False)
    assert one.values == several.values == sliced.values == (2,) and one.label == "dog"
    assert WORDS.name_of(1) == "the@1"
    assert one.sel(2) == one and one.sel("dog") == one
    assert LAYERS.sel([4, 5]).sel(5).source_indices == (2,) and one.sel(None).single
    with pytest.raises(InputError, match="There is no query 3"):
        one.sel(3)


def test_a_token_that_looks_like_a_position():
    axis = Axis("key", (0, 1, 2), ("a", "@", "a@1"))
    assert axis.indices_of("@") == [1] and axis.indices_of("a@1") == [2] and axis.indices_of("a@0") == [0]


@pytest.mark.parametrize(
    ("axis", "wanted", "message"),
    [
        (LAYERS, 0, "There is no layer 0. There are 3, 4, 5."),
        (LAYERS, 1.0, "expected a number, not float"),
        (LAYERS, True, "expected a number, not bool"),
        (LAYERS, {}, "nothing is selected"),
        (LAYERS, slice("a", None), "a slice takes whole numbers"),
        (LAYERS, object(), "Selecting layer an object of the class object: expected a number, not object"),
        (LAYERS, [10**5000], "There is no layer an object of the class int"),
        (LAYERS, torch.tensor([[3]]), "expected a number, not Tensor"),
        (WORDS, "the@" + "9" * 5000, "There is no query 'the@999"),
        (WORDS, 1.5, "expected a number or a token, not float"),
        (SHARES, 0.3, "There is no data_share 0.3. There are 0.5, 1.0."),
        (WORDS, "the", "The query 'the' occurs 2 times. Say which: the@1, the@4."),
        (WORDS, "cat", r"There is no query 'cat'. The positions are 0 to 4: \[CLS\], the, dog"),
        (WORDS, "dog@1", "position 1 is 'the'"),
        (WORDS, 5, "There is no query 5. The positions are 0 to 4"),
    ],
)
def test_what_is_not_there(axis: Axis, wanted: object, message: str):
    with pytest.raises(InputError, match=message):
        axis.indices_of(wanted)


@given(
    st.one_of(
        st.none(), st.integers(), st.floats(), st.text(), st.lists(st.integers(-9, 9)), st.binary(), st.booleans()
    )
)
def test_anything_is_found_or_refused_in_words(wanted: object):
    try:
        found = WORDS.indices_of(wanted)
    except InputError as refusal:
        assert str(refusal)[0].isupper() and str(refusal).endswith(".")
    else:
        assert found and all(0 <= place < len(WORDS) for place in found)


def test_options():
    assert selected_indices("layer", None, 3) == (0, 1, 2) and selected_indices("layer", [-1, 0], 3) == (2, 0)
    assert (
        selected_index("head", -1, 4) == 3 and SHARES.indices_of(np.float32(0.5)) == [0] and SHARES.indices_of(1) == [1]
    )
    for wrong in ([1], None, slice(1, 2)):
        with pytest.raises(InputError, match=r"expected one, a number from 0 to 3"):
            selected_index("head", wrong, 4)
