"""Bad inputs as users meet them: warnings only warn, and there is no endless waiting."""

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 300  # that a test may take before it counts as hung
MEMORY = 6 << 30  # bytes that a test may take


class Hung(BaseException):
    """A test did not end in time; nothing in between may catch it."""


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.filterwarnings("always"))


@pytest.fixture(autouse=True)
def with_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IDENTIKIT_CACHE", str(tmp_path / "cache"))


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
