"""A browser without a network, for the pages; without Chromium these tests are skipped."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from identikit.explanation.explain import explain
from identikit.web import report
from identikit.web.payload import packed
from identikit.web.report import save_html
from tests.models import tiny
from tests.web.served import Served, save_models, served

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, started once; it asks nobody for anything."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[tuple[Any, list[str]]]:
    """One page per module, and the errors on its console."""
    context = browser.new_context(accept_downloads=True)
    opened = context.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    yield opened, wrong
    context.close()


@pytest.fixture
def page(tab: tuple[Any, list[str]]) -> Iterator[Any]:
    """The module's page, as large as ever; a message on its console that is an error fails the test."""
    opened, wrong = tab
    opened.set_viewport_size({"width": 1440, "height": 1000})
    yield opened
    errors = [one for one in wrong if "Failed to load resource" not in one]
    wrong.clear()
    assert not errors


TEXT = " ".join(f"w{place % 23 + 3}" for place in range(30))


@pytest.fixture(scope="session")
def explanation() -> Any:
    """All three answers for a tiny model, with every row bounded."""
    return explain(tiny.loaded("bert"), TEXT, seconds=None)


@pytest.fixture(scope="session")
def measured() -> Any:
    """The same with readings of heads, of layers and through layers, and the roles of heads."""
    names = ("rollout", "value norm", "norm", "roles")
    return explain(tiny.loaded("bert"), TEXT, seconds=None, measures=names)


@pytest.fixture(scope="session")
def content(explanation: Any) -> bytes:
    """What its page is given."""
    return packed(explanation)


@pytest.fixture(scope="session")
def report_file(explanation: Any, content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its page, on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "packed", lambda *_, **__: content)  # packed once for all tests
        return save_html(explanation, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="session")
def server(folders: list[Path]) -> Iterator[Served]:
    """A server of both models, started once; long texts take it half a minute, short ones a second."""
    models = [option for folder in folders for option in ("--model", str(folder))]
    limits = ["--longest", "4000", "--waiting", "2", "--seconds", "60"]
    with served(*models, *limits, "--allow-host", "Example.org") as started:
        yield started
    assert [line for line in started.errors if "Traceback" in line] == []


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The models of a server, saved."""
    return save_models(tmp_path_factory.mktemp("models"))
