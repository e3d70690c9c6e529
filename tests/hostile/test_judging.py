"""The judge sees each kind of fault, so that tests without faults mean something."""

import pytest

import identikit as ik
from tests.hostile.judging import Refused, refused, refused_or_right

JUDGES = [refused, refused_or_right]
UNCLEAR = [
    "",
    "two\nlines.",
    "no end",
    "x " * 400 + ".",
    "An <object object at 0x7f> cannot be used.",
    "Traceback (most).",
]


@pytest.mark.parametrize("judge", JUDGES)
def test_only_a_refusal_in_a_clear_line_is_none(judge):
    for error in (ik.InputError, ik.ModelError, Refused):
        with judge():
            raise error("Reading x: it is blank. Pass words.")
    for message in UNCLEAR:
        with pytest.raises(AssertionError), judge():
            raise Refused(message)
    with pytest.raises(ValueError, match=r"^of Python's own$"), judge():
        raise ValueError("of Python's own")
    with pytest.raises(AssertionError, match="off by"), judge():
        raise AssertionError("off by 0.6")


def test_a_refusal_has_to_come_and_to_name_what_it_is_about():
    with pytest.raises(pytest.fail.Exception), refused():
        pass
    with pytest.raises(AssertionError), refused("'b'"):
        raise ik.InputError("There is no key 'a'.")
