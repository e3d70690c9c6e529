"""Film tour.webp, the README's walk through the page: `python docs/pictures/tour.py`, with Playwright and Chromium."""

import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import sync_playwright

import identikit as ik

WIDTH, HEIGHT, CAPTION = 1280, 800, 64
SHOWN = 1000  # pixels across
HEAD = {"layer": 0, "head": 5}
QUERY, KEY, END = 15, 14, "lower"  # "and", which gives the comma before it 0.42, and need give it only 0.06
LONG, SHORT = 2600, 70  # milliseconds
WORDS = {
    "verdict": "1  The verdict: which attention is determined, which token this is, where it came from",
    "heads": "2  Every head, its maps, and the range of each weight of a row",
    "pull": "3  Pull an end of a bar: the whole row follows, and the head's output stays the same",
    "provenance": "4  Where the hidden vectors came from, layer by layer",
}


def scenes(page: Any) -> Iterator[tuple[str, int]]:
    """Go through the page; yields what is said and for how long, whenever a picture is due."""
    yield "verdict", LONG
    page.evaluate("document.querySelector('#panel-heads').scrollIntoView()")
    page.mouse.wheel(0, -16)
    page.wait_for_timeout(500)
    yield "heads", LONG
    slider = page.locator(".edge-pulls input")
    page.evaluate("(key) => document.getElementById('identikit').identikit.store.set({ key })", KEY)
    for step in range(0, 101, 5):
        slider.evaluate(
            "(input, at) => { input.value = at; input.dispatchEvent(new Event('input', { bubbles: true })); }",
            -step if END == "lower" else step,
        )
        page.wait_for_timeout(120)
        yield "pull", LONG if step == 100 else SHORT
    page.locator(".edge-pulls button", has_text="Reset").click()
    page.click("#tab-provenance")
    page.evaluate("document.querySelector('#panel-provenance').scrollIntoView()")
    page.wait_for_timeout(800)
    yield "provenance", LONG


def captioned(picture: Image.Image, words: str) -> Image.Image:
    """Return the picture with a line of words below it."""
    whole = Image.new("RGB", (WIDTH, HEIGHT + CAPTION), "#1b2430")
    whole.paste(picture, (0, 0))
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), 24)
    ImageDraw.Draw(whole).text((24, HEIGHT + 18), words, font=font, fill="white")
    return whole.resize((SHOWN, round(SHOWN * whole.height / whole.width)), Image.Resampling.LANCZOS)


def film(where: Path) -> None:
    """Write the page of the sample text, and film it."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder) / "report.html"
        ik.explain(ik.load()).save_html(report)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(f"{report.as_uri()}#layer={HEAD['layer']}&head={HEAD['head']}&query={QUERY}")
        page.wait_for_timeout(1500)
        frames = []
        durations = []
        for scene, duration in scenes(page):
            frames.append(captioned(Image.open(io.BytesIO(page.screenshot())).convert("RGB"), WORDS[scene]))
            durations.append(duration)
        browser.close()
    frames[0].save(where, save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=70, method=6)


if __name__ == "__main__":
    film(Path(__file__).with_name("tour.webp"))
