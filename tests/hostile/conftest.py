"""Bad inputs as users meet them: no shape checks of the tests, warnings only warn, and no endless waiting."""

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

SECONDS = 300  # that a test may take before it counts as hung
MEMORY = 6 << 30  # bytes that a test may take


class Hung(BaseException):
    """A test did not end in time; nothing in between may catch it."""


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.filterwarnings("always"))


@pytest.fixture(autouse=True)
def as_users_meet_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Without the shape checks of the tests: they would refuse wrong arguments before the library does."""
    monkeypatch.setenv("IDENTIKIT_CACHE", str(tmp_path / "cache"))
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def in_time_and_memory() -> Iterator[None]:
    """Let a greedy or endless call fail instead of the machine."""
    memory = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, hang)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, memory[1]))
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, memory)
    signal.signal(signal.SIGALRM, handler)


def hang(*_: object) -> None:
    raise Hung(f"it did not end within {SECONDS} seconds")
