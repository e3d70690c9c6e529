"""What tests ask of a page in a browser: its state, its numbers, its Python, and its exports."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from playwright.sync_api import TimeoutError

MOUNTED = "document.getElementById('identikit').identikit"


def opened(page: Any, file: Path, address: str = "") -> None:
    """Open a page from disk, and wait until its views are drawn."""
    page.goto(f"{file.as_uri()}#{address}")
    ready(page)


def ready(page: Any) -> None:
    until(page, "document.getElementById('identikit')?.identikit !== undefined")
    frames(page)


def until(page: Any, condition: str, seconds: float = 30) -> None:
    """Wait until a condition holds in the page; Playwright's own waiting would need a weaker content policy."""
    last = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < last, condition
        page.wait_for_timeout(50)


def frames(page: Any, count: int = 3) -> None:
    """Wait until the page was drawn again."""
    page.evaluate("async (count) => { for (; count; count -= 1) await new Promise(requestAnimationFrame); }", count)


def state(page: Any, **change: Any) -> dict[str, Any]:
    """Return the state; a change is made first, as a reader would, and drawn."""
    if change:
        page.evaluate(f"(change) => {MOUNTED}.store.set(change)", change)
        frames(page)
    return page.evaluate(f"{MOUNTED}.store.get()")


def table(page: Any, view: str) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the rows of a view's numbers, as it shows them now."""
    found = page.evaluate(f"(id) => {MOUNTED}.views[id].table({MOUNTED}.store.get())", view)
    return found["columns"], found["rows"]


def python(page: Any, view: str) -> str:
    """Return the Python that a view offers."""
    return page.evaluate(f"(id) => {MOUNTED}.views[id].python({MOUNTED}.store.get())", view)


def exported(page: Any, view: str, kind: str) -> bytes:
    """Export a view, and return the file."""
    if page.locator(".menu").get_attribute("open") is None:
        page.click(".menu summary")
    page.select_option(".menu select", view)
    for seconds in (10, 30):  # on a busy machine, Chromium drops a download now and then
        with suppress(TimeoutError), page.expect_download(timeout=1000 * seconds) as waiting:
            page.click(f".menu button:text-is('{kind}')")
            return Path(waiting.value.path()).read_bytes()
    raise AssertionError(f"{view} was not exported as {kind}")


def words_of(page: Any, selector: str) -> str:
    return page.locator(selector).first.inner_text()
