"""The page of figures and claims: complete, self-contained, safe with any name, and readable without its script."""

import base64
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

from identikit.paper import page as module
from identikit.paper.claims.claim import Finding, Verdict
from identikit.paper.claims.report import JudgedClaim
from identikit.paper.page import Picture, gallery
from tests.paper.test_report import made

SVG = b'<?xml version="1.0"?><svg width="%dpt" height="90.5pt" xmlns="http://www.w3.org/2000/svg"></svg>'
PNG = b"\x89PNG made up"
ABOUT = {"model": "MiniLM", "data": "mrpc", "n": "408 texts", "seed": "0", "weights": "ab12", "torch": "2.13"}
VOID = {"meta", "img", "br", "hr", "link", "input"}


def picture(name: str, width: int = 238) -> Picture:
    return Picture(name, f"What {name} shows, 50 %.", PNG, SVG % width, "MiniLM · mrpc · n = 408 · seed 0")


class Page(HTMLParser):
    """A page as elements, each with what was open around it, and as text; it fails where tags do not match."""

    def __init__(self, page: bytes):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page.decode())
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def page_of(figures=(), judged=None, listed=(), about=None, title="All figures") -> Page:
    return Page(gallery(title, about or ABOUT, figures, made() if judged is None else judged, listed))


def test_every_figure_is_there_with_its_words_and_files():
    page = page_of([picture("fig1a"), picture("fig18b"), picture("collapse")])
    assert [image["alt"] for image in page.all("img")] == [
        "Figure 1a: What fig1a shows, 50 %.",
        "Figure 18b: What fig18b shows, 50 %.",
        "Collapse: What collapse shows, 50 %.",
    ]
    assert base64.b64decode(page.all("img")[0]["src"].removeprefix("data:image/svg+xml;base64,")) == SVG % 238
    links = [link["href"] for link in page.all("a")]
    for name in ("fig1a", "fig18b", "collapse"):
        assert [f"figures/{name}.{kind}" in links for kind in ("csv", "parquet", "svg", "png")] == [True] * 4
    assert "What fig1a shows, 50 %. MiniLM · mrpc · n = 408 · seed 0" in page.words


def test_figures_stand_in_their_sections_in_the_papers_order():
    names = ["collapse", "fig1a-sharp", "fig43", "fig6", "fig14", "fig37", "fig3b", "fig2a", "fig1c", "fig1a"]
    page = page_of([picture(name) for name in names])
    assert [figure["id"] for figure in page.all("figure")] == [
        "fig1c", "fig1a", "fig2a", "fig3b", "fig6", "fig14", "fig37", "fig43", "collapse", "fig1a-sharp",
    ]  # fmt: skip
    headings = ["Section 3", "Section 4", "Section 5", "Appendix A", "Appendix B", "Appendix C", "Appendix D", "Beside"]
    places = [page.words.rindex(heading) for heading in headings]
    assert places == sorted(places)
    sections = {section["id"] for section in page.all("section")}
    assert {link["href"][1:] for link in page.all("a") if link["href"].startswith("#")} <= sections


def test_large_drawings_are_shown_as_pixels_and_the_page_stays_small(monkeypatch):
    large = replace(picture("fig1a"), svg=SVG % 238 + b" " * 300_000)
    sources = [image["src"] for image in page_of([large, picture("fig1b")]).all("img")]
    assert sources[0] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert sources[1].startswith("data:image/svg+xml")
    many = [replace(picture(f"fig{number}"), svg=SVG % 238 + b" " * 200_000) for number in range(1, 61)]
    assert len(gallery("t", ABOUT, many, made(), [])) < 10_500_000
    monkeypatch.setattr(module, "ALL_SVG", 10**9)
    assert len(gallery("t", ABOUT, many, made(), [])) > 10_500_000


def test_wide_figures_take_a_row():
    figures = page_of([picture("fig1a"), picture("fig5", width=497), replace(picture("fig6"), svg=b"<svg/>")])
    assert [figure.get("class") for figure in figures.all("figure")] == [None, "wide", None]
    assert [(image.get("width"), image.get("height")) for image in figures.all("img")] == [
        ("476", "181"), ("994", "181"), (None, None),
    ]  # fmt: skip


def test_every_claim_is_there_with_its_verdicts():
    page = page_of()
    rows = [row["data-verdict"] for row in page.all("tr") if "data-verdict" in row]
    assert rows == ["holds", "undecided", "mixed", "none", "fails", "holds"]
    for words in ("words of own", "within 10 %", "Section 5.2, Fig. 3a", "10.7 %", "11.8 %", "12.8 %", "3 folds"):
        assert words in page.words
    assert page.words.count("stands for the paper's 12") == 1
    assert page.words.count("✗ does not hold") == 3 + 1  # three findings and a button
    assert [cell["colspan"] for cell in page.all("td") if "colspan" in cell] == ["3"] * 5
    assert all("scope" in head for head in page.all("th"))


def test_a_filter_shows_as_many_claims_as_its_button_and_the_summary_say():
    """Filters wait for the script, which shows the rows whose data-verdict is the button's data-show."""
    whole = gallery("t", ABOUT, [], made() * 3, []).decode()
    page = Page(whole.encode())
    assert ["hidden" in div for div in page.all("div") if div.get("class") == "filters"] == [True]
    buttons = re.findall(r'<button [^>]*data-show="(\w*)"[^>]*>[^<]*?(\d+)</button>', whole)
    shown = Counter(row["data-verdict"] for row in page.all("tr") if "data-verdict" in row)
    told = {kind: int(count) for kind, count in buttons}
    assert [*told] == ["", "holds", "fails", "mixed", "undecided", "none"]
    assert told.pop("") == shown.total() == 6 * 3
    assert told == shown
    assert "row.dataset.verdict !== kind" in whole
    summary = "18 claims: 6 hold, 3 do not hold, 3 depend on the norm, 3 are undecided, 3 are not applicable"
    assert summary in page.words


def test_what_was_not_drawn_or_judged_is_listed_with_the_reason():
    listed = [("fig38", "needs --data cola"), ("mrpc-size", "needs the whole dataset"), ("My_File.TSV", "not used")]
    page = page_of(listed=listed)
    assert page.words.count("Not drawn or judged") == 2
    assert all(f"{name} {reason}" in page.words for name, reason in listed)
    assert "#not-drawn" in [link["href"] for link in page.all("a")]
    empty = page_of(judged=[])
    assert "Not drawn" not in empty.words and "No claim was judged." in empty.words and empty.all("figure") == []


def test_the_header_tells_the_run_and_hides_the_rest():
    page = page_of()
    assert [tag for tag, _ in page.elements].index("dl") < [tag for tag, _ in page.elements].index("details")
    assert "model MiniLM data mrpc n 408 texts seed 0" in page.words
    assert "ab12" in page.words and page.words.count("408 texts") == 1
    assert page_of(about={"model": "MiniLM"}).all("details") == []


def test_names_are_text():
    nasty = "\"><script>alert('x')</script><b>a &lt; c</b>"
    figure = Picture("fig1a", nasty, PNG, SVG % 238, nasty)
    claim = replace(made()[1].claim, words=nasty, paper=nasty, where=f"Section 4, {nasty}", rule=nasty)
    judged = [JudgedClaim(claim, nasty, {"": Finding(Verdict.HOLDS, nasty, nasty)})]
    page = page_of([figure], judged, [("fig2a", nasty)], {"model": nasty, "k": nasty}, title=nasty)
    assert len(page.all("script")) == 1 and page.all("b") == []
    assert page.words.count(nasty) >= 12
    assert page.all("img")[0]["alt"] == f"Figure 1a: {nasty}"


def test_nothing_is_loaded_from_elsewhere():
    whole = gallery("t", ABOUT, [picture("fig1a")], made(), [])
    page = Page(whole)
    assert whole.startswith(b"<!doctype html>") and b"http" not in whole
    assert not {"link", "iframe", "object", "embed"} & {tag for tag, _ in page.elements}
    assert all("src" not in script for script in page.all("script"))
    assert all(image["src"].startswith("data:") for image in page.all("img"))
    assert b"url(" not in whole and b"@import" not in whole
