"""The judge sees each kind of fault, so that tests without faults mean something."""

import pytest

import identikit as ik
from tests.hostile.judging import Refused, refused, refused_or_right, unclear


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("", "it is empty"),
        ("two\nlines.", "it has more than one line"),
        ("no end", "it does not end as a sentence"),
        ("x " * 400 + ".", "it has 801 characters"),
        ("An <object object at 0x7f> cannot be used.", "it shows '<object object at 0x'"),
        ("Traceback (most recent call last).", "it shows 'Traceback'"),
    ],
)
@pytest.mark.parametrize("judge", [refused, refused_or_right])
def test_a_message_that_helps_nobody_is_a_fault(message: str, why: str, judge):
    assert unclear(message) == why
    with pytest.raises(AssertionError), judge():
        raise Refused(message)


@pytest.mark.parametrize("judge", [refused, refused_or_right])
def test_a_refusal_in_a_clear_line_is_none(judge):
    for error in (ik.InputError, ik.ModelError, Refused):
        with judge():
            raise error("Reading x: it is blank. Pass words.")


def test_a_refusal_names_what_it_is_about():
    with refused("'a'", "key"):
        raise ik.InputError("There is no key 'a'.")
    with pytest.raises(AssertionError), refused("'b'"):
        raise ik.InputError("There is no key 'a'.")


def test_every_other_end_is_a_fault():
    with pytest.raises(pytest.fail.Exception), refused():
        pass
    for judge in (refused, refused_or_right):
        with pytest.raises(ValueError, match=r"^of Python's own$"), judge():
            raise ValueError("of Python's own")
        with pytest.raises(AssertionError, match="off by"), judge():
            raise AssertionError("off by 0.6")
