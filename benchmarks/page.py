"""What a page costs: its size, how long it takes from a text to the first view, and how long a frame takes.

Frames are counted in Chromium, without a window, while the mouse moves over the maps of one head: the time from one
frame to the next. This part needs Playwright and Chromium, and is left out where they are missing.
"""

import shutil
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Row, seconds
from identikit.attention.effective import effective_attention
from identikit.errors import InputError
from identikit.explanation.explain import explain
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.texts.data import sample_texts
from identikit.web.bundle import bundle, style
from identikit.web.report import save_html

LENGTHS = (64, 128, 512)
MOVES = 90
_STILL = "frame, the mouse still"
_FRAMES = """async (moves) => {
    const times = [];
    let last = performance.now();  // the time that frames are given is a multiple of the screen's
    while (times.length < moves) {
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        times.push(now - last);
        last = now;
    }
    return times;
}"""


@dataclass(frozen=True)
class Options:
    """What to measure: texts of how many tokens (`lengths`), and how long to bound rows of each (`seconds`)."""

    model: str | None = None
    lengths: tuple[int, ...] = LENGTHS
    seconds: float = 20.0


def run(options: Options, *, progress: Progress = silent) -> list[Row]:
    """Measure a page for each length, and the script that all pages share."""
    model = load(options.model)
    script = len(bundle("report.js").encode()) + len(style().encode())
    rows = [Row("every page", "script and style", script / 1e3, "kB")]
    with tempfile.TemporaryDirectory() as folder:
        for length in options.lengths:
            rows += _measured(model, length, options.seconds, Path(folder), progress)
    return rows


def _measured(model: Model, length: int, bounding: float, folder: Path, progress: Progress) -> list[Row]:
    text, case = text_of(model, length), f"{length} tokens"
    taken, found = seconds(lambda: explain(model, text, seconds=bounding, truncate=True, progress=progress))
    packing, page = seconds(lambda: save_html(found, folder / f"{length}.html", progress=progress))
    maps, _ = seconds(lambda: save_html(effective_attention(model, text, truncate=True), folder / "maps.html"))
    rows = [
        Row(case, "page", page.stat().st_size / 1e6, "MB"),
        Row(case, "explain", taken, "s"),
        Row(case, "make the page", packing, "s", packing / taken, "explain"),
        Row(case, "a page of maps alone, from the text", maps, "s", maps / taken, "explain"),
    ]
    return [*rows, *_in_browser(case, page)]


def text_of(model: Model, length: int) -> str:
    """Return a text of so many tokens, or of as many as the model reads if that is less: sample texts in turn."""
    words: list[str] = []
    for one in cycle(sample_texts()):
        words += str(one if isinstance(one, str) else one[0]).split()
        if len(words) > length:
            break
    low, high = 1, len(words)  # the most words that are not too many tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(model.encode([" ".join(words[:middle])], truncate=True, max_tokens=length + 1)[0]) <= length
        low, high = (middle, high) if fits else (low, middle - 1)
    return " ".join(words[:low])


def _in_browser(case: str, page: Path) -> list[Row]:
    """Measure how long a page takes until it is drawn, and its frames while the mouse moves over the maps."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or find_spec("playwright") is None:
        return []
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1440, "height": 1000})
        started = time.perf_counter()
        opened.goto(page.as_uri())
        while not opened.evaluate("document.getElementById('identikit').identikit !== undefined"):
            if time.perf_counter() - started > 60:
                raise InputError(f"Opening {page}: the page was not drawn within a minute.")
            opened.wait_for_timeout(20)
        drawn = time.perf_counter() - started
        frames = _hovering(opened)
        browser.close()
    still, moving = (median(frames[name]) for name in ("still", "moving"))
    late = sorted(frames["moving"])[int(0.95 * MOVES)]
    return [
        Row(case, "from opening to the first view", drawn, "s"),
        Row(case, _STILL, still, "ms"),
        Row(case, "frame while hovering, median", moving, "ms", moving / still, _STILL),
        Row(case, "frame while hovering, 95th percentile", late, "ms", late / still, _STILL),
    ]


def _hovering(opened: Any) -> dict[str, list[float]]:
    """Return the times between frames, while the mouse is still and while it moves over the maps."""
    canvas = opened.locator("#panel-attention canvas").first
    canvas.scroll_into_view_if_needed()
    opened.wait_for_timeout(3000)  # the maps of a long text are filled in first
    still = opened.evaluate(_FRAMES, MOVES)
    box = canvas.bounding_box()
    opened.evaluate(f"() => {{ window.moving = ({_FRAMES})({MOVES}); }}")
    for move in range(3 * MOVES):
        across, down = 0.15 + 0.3 * (move % 40) / 40, 0.08 + 0.3 * (move % 53) / 53
        opened.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
    moving = opened.evaluate("window.moving")
    # A time of whole milliseconds arrives as an int.
    return {"still": [float(frame) for frame in still], "moving": [float(frame) for frame in moving]}
