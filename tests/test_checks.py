"""One check for each kind of argument: what each takes, and the words in which it refuses everything else."""

import itertools
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from identikit.checks import (
    flag,
    function,
    known_name,
    known_names,
    random_seed,
    real_number,
    shortened,
    whole_number,
)
from identikit.errors import InputError


class Unfriendly:
    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # pyright: ignore[reportAssignmentType]


NO_NUMBERS = [
    True, np.bool_(False), torch.tensor(True), "7", "", b"7", None, [], [1], [[1]], {}, (1,), math.nan,
    np.float32("nan"), torch.tensor(math.nan), 1 + 1j, Decimal("0.5"), slice(1), range(1), np.array([1]),
    torch.tensor([1]), object(), Unfriendly(), iter([1]), int, lambda: 1,
]  # fmt: skip


@pytest.mark.parametrize("wrong", [*NO_NUMBERS, 1.5, 1.0, Fraction(1), -1, math.inf, -(10**5000)], ids=shortened)
def test_what_is_not_a_whole_number(wrong: Any):
    with pytest.raises(InputError, match=r"^probes=.{1,60} cannot be used: expected a whole number of at least 0\.$"):
        whole_number("probes", wrong)


@pytest.mark.parametrize(
    "wrong", [*NO_NUMBERS, -0.1, 1, 1.0, 10**400, -(10**5000), math.inf, -math.inf, Fraction(3, 2)], ids=shortened
)
def test_what_is_not_a_number_in_range(wrong: Any):
    words = r"^tolerance=.{1,60} cannot be used: expected a finite number of at least 0 and below 1\.$"
    with pytest.raises(InputError, match=words):
        real_number("tolerance", wrong, least=0, below=1)


def test_numbers_of_any_library_become_pythons_own():
    for seven in (7, np.int32(7), np.array(7), torch.tensor(7), np.uint8(7)):
        found = whole_number("probes", seven, most=7)
        assert found == 7 and type(found) is int
    for half in (0.5, np.float16(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)):
        found = real_number("epsilon", half, above=0, most=0.5)
        assert found == 0.5 and type(found) is float
    assert real_number("seconds", 3, above=0) == 3.0 and real_number("seconds", math.inf, most=math.inf) == math.inf
    with pytest.raises(InputError, match="seconds=inf cannot be used: expected a finite number above 0"):
        real_number("seconds", math.inf, above=0)
    with pytest.raises(InputError, match="seconds=0 cannot be used: expected a number above 0"):
        real_number("seconds", 0, above=0, most=math.inf)
    with pytest.raises(InputError, match=r"probes=8 cannot be used: expected a whole number from 2 to 7\."):
        whole_number("probes", 8, least=2, most=7)
    assert random_seed(2**32 - 1) == 2**32 - 1
    with pytest.raises(InputError, match=r"seed=1180591620717411303424 cannot be used: .* from 0 to 4294967295"):
        random_seed(2**70)


def test_truth_values_and_functions():
    for yes in (True, np.bool_(True), torch.tensor(True), np.array(True)):
        assert flag("bias", yes) is True
    for wrong in (1, 0, "yes", None, [True], np.array([True]), torch.tensor([True]), Unfriendly()):
        with pytest.raises(InputError, match=r"bias=.* cannot be used: expected True or False"):
            flag("bias", wrong)
    assert function("progress", print) is print
    with pytest.raises(InputError, match="progress=None cannot be used: expected a function"):
        function("progress", None)


def test_messages_show_no_addresses_and_no_endless_names():
    for odd in (object(), [object()], {"a": print, "b": lambda: 3}, Unfriendly()):
        assert shortened(odd) == f"an object of the class {type(odd).__name__}"
    assert shortened("x" * 100) == f"'{'x' * 58}…"
    assert str(InputError(f"Reading {'x' * 500}: it is\nthere.")) == f"Reading {'x' * 60}…: it is there."
    path = f"/{'folder/' * 20}file.txt"
    assert str(pickle.loads(pickle.dumps(InputError(f"Reading {path}.")))) == f"Reading {path}."


def test_names():
    assert known_name("norm", "sum", ("sum", "frobenius")) == "sum"
    assert known_names("maps", "sum", ("sum",)) == known_names("maps", ["sum", "sum"], ("sum",)) == ("sum",)
    endless = itertools.repeat("sum")
    for wrong in ([], 3, ["other"], None, [None], [["sum"]], b"sum", endless, np.array("sum"), [Unfriendly()]):
        with pytest.raises(InputError, match="maps="):
            known_names("maps", wrong, ("sum",))


@given(st.one_of(st.text(), st.binary(), st.integers(), st.floats(), st.lists(st.text()), st.from_type(type)))
def test_what_was_given_is_shown_on_one_short_line(anything: object):
    words = shortened(anything)
    assert words and len(words) <= 100 and len(words.splitlines()) == 1 and " at 0x" not in words
