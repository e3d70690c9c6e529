"""What tests ask of a page in a browser: its state, its numbers, its Python, and its exports."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from playwright.sync_api import TimeoutError

MOUNTED = "document.getElementById('identikit').identikit"


def opened(page: Any, file: Path, address: str = "") -> None:
    """Open a page from disk anew, and wait until its views are drawn."""
    page.goto("about:blank")  # else another address of the same file would not load it again
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


def run(page: Any, code: str, *given: Any) -> Any:
    """Evaluate JavaScript that may use the page's `site`, `store` and `views`, and what is `given`."""
    return page.evaluate(f"(given) => {{ const {{ site, store, views }} = {MOUNTED}; {code} }}", *given)


def state(page: Any, **change: Any) -> dict[str, Any]:
    """Return the state; a change is made first, as a reader would, and drawn."""
    if change:
        run(page, "store.set(given);", change)
        frames(page)
    moved = "moved: state.moved && { ...state.moved, row: [...state.moved.row] }"
    return run(page, f"const state = store.get(); return {{ ...state, {moved} }};")


def table(page: Any, view: str) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the rows of a view's numbers, as it shows them now."""
    found = run(page, "return views[given].table(store.get());", view)
    return found["columns"], found["rows"]


def rows_of(page: Any, view: str, **change: Any) -> list[dict[str, Any]]:
    """Return the numbers of a view, as it would show them in another state, a mapping for each row."""
    found = run(page, f"return views.{view}.table({{ ...store.get(), ...given }});", change)
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def python(page: Any, view: str) -> str:
    """Return the Python that a view offers."""
    return run(page, "return views[given].python(store.get());", view)


def exported(page: Any, view: str, kind: str) -> bytes:
    """Export a view, and return the file, which is taken before Chromium downloads it: that takes a second."""
    page.evaluate("""() => {
      HTMLAnchorElement.prototype.click = () => {};
      URL.createObjectURL = (blob) => { window.taken = blob; return "blob:taken"; };
      window.taken = null;
    }""")
    press(page, view, kind)
    until(page, "window.taken !== null")
    return bytes(page.evaluate("async () => Array.from(new Uint8Array(await window.taken.arrayBuffer()))"))


def downloaded(page: Any, view: str, kind: str) -> bytes:
    """Export a view as a reader does, and return the file that Chromium saved."""
    for seconds in (10, 30):  # on a busy machine, Chromium drops a download now and then
        with suppress(TimeoutError), page.expect_download(timeout=1000 * seconds) as waiting:
            press(page, view, kind)
            return Path(waiting.value.path()).read_bytes()
    raise AssertionError(f"{view} was not exported as {kind}")


def press(page: Any, view: str, kind: str) -> None:
    """Choose a view in the menu of exports, and press a button."""
    if page.locator(".menu").get_attribute("open") is None:
        page.click(".menu summary")
    page.select_option(".menu select", view)
    page.click(f".menu button:text-is('{kind}')")


def words_of(page: Any, selector: str) -> str:
    return page.locator(selector).first.inner_text()
