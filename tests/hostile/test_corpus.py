"""Every bad input ends in a clear error or in a right result; `python -m tests.hostile` prints the counts."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

from tests.hostile.cases import KINDS, Case, outcome
from tests.hostile.corpus import NAMED, corpus


@pytest.fixture(autouse=True)
def as_users_meet_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Without the shape checks of the tests: they would refuse wrong arguments before the library does."""
    monkeypatch.setenv("IDENTIKIT_CACHE", str(tmp_path / "cache"))
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case.kind}: {case.name}", marks=[pytest.mark.slow] if case.slow else [])
        for case in corpus()
    ],
)
def test_a_bad_input_is_refused_clearly_or_read_right(case: Case, tmp_path: Path):
    found = outcome(case, tmp_path)
    assert found.good, f"{found.end}: {found.said}"


def test_the_quick_corpus_is_large_and_of_every_kind():
    counts = Counter(case.kind for case in corpus() if not case.slow)
    assert counts.total() >= 400 and set(counts) == set(KINDS), counts
    assert all(number >= 10 for number in counts.values()), counts
    assert max(Counter((case.kind, case.name) for case in corpus()).values()) == 1


def test_what_once_went_wrong_is_always_tried():
    quick = {f"{case.kind}: {case.name}" for case in corpus() if not case.slow}
    assert quick >= NAMED
