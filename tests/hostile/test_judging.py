"""The judge of the corpus: it sees each kind of fault, so that a corpus without faults means something."""

import time
from pathlib import Path

import pytest

import identikit as ik
from tests.hostile import cases
from tests.hostile.cases import Case, Lost, Refused, Unclear, Wrong, kept, outcome, proved, unclear


def raising(error: BaseException):
    def run(_: Path) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "expect", "end"),
    [
        (ik.InputError("Reading x: it is blank. Pass words."), "refused", "refused"),
        (Refused("Reading x: it is blank."), "either", "refused"),
        (ik.ModelError("Reading x: fine."), "right", "wrong"),
        (ik.InputError(""), "refused", "unclear"),
        (ik.InputError("no end"), "refused", "unclear"),
        (ik.InputError("An <object object at 0x7f> cannot be used."), "refused", "unclear"),
        (ik.InputError("x " * 400 + "."), "refused", "unclear"),
        (ValueError("of Python's own"), "either", "traceback"),
        (SystemExit(3), "either", "traceback"),
        (Unclear("a traceback"), "either", "unclear"),
        (Wrong("off by 0.6"), "either", "wrong"),
        (Lost("gone"), "either", "lost"),
    ],
)
def test_each_end_is_seen(error: BaseException, expect: str, end: str, tmp_path: Path):
    assert outcome(Case("", "texts", raising(error), expect), tmp_path).end == end


def test_what_goes_through_is_right_only_where_it_may(tmp_path: Path):
    assert outcome(Case("", "texts", lambda _: None, "refused"), tmp_path).end == "wrong"
    assert outcome(Case("", "texts", lambda _: None, "either"), tmp_path).end == "right"
    assert outcome(Case("", "texts", lambda _: proved(False, "off"), "right"), tmp_path).end == "wrong"
    assert outcome(Case("", "texts", lambda _: kept(False, "gone"), "right"), tmp_path).end == "lost"


def test_a_refusal_names_what_it_is_about(tmp_path: Path):
    assert unclear("There is no key 'a'.", ("'a'",)) == "" and "'b'" in unclear("There is no key 'a'.", ("'b'",))


def test_a_case_that_hangs_or_takes_all_memory_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cases, "SECONDS", 1)
    assert "within 1 seconds" in outcome(Case("", "texts", lambda _: time.sleep(5)), tmp_path).said
    assert outcome(Case("", "texts", lambda _: bytearray(1 << 40)), tmp_path).end == "traceback"
