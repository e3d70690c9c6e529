"""All figures and claims on one page: a single file that needs no network, script or other files to be read."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from identikit.maths.jacobian import NORMS
from identikit.paper.claims.claim import BESIDE, NOTHING
from identikit.paper.claims.report import SECTIONS, JudgedClaim, by_section, counts_in_words, verdict_counts

LARGEST_SVG = 300_000  # bytes; above it the PNG is shown
ALL_SVG = 7_500_000  # bytes of all figures together: base64 makes 10 MB of them
HEADLINE = ("model", "data", "n", "seed")
FILES = ("csv", "parquet", "svg", "png")
WIDE = 720  # pixels; a wider figure takes a row of its own
_LAST = {  # the number of each section's last figure
    "Section 3": 1,
    "Section 4": 2,
    "Section 5": 4,
    "Appendix A": 6,
    "Appendix B": 17,
    "Appendix C": 37,
    "Appendix D": 43,
}


@dataclass(frozen=True)
class Picture:
    """A drawn figure: `name` is that of its files ("fig1a"), `label` gives model, data, n and seed."""

    name: str
    caption: str
    png: bytes
    svg: bytes
    label: str

    @property
    def title(self) -> str:
        """The figure's name for people: Figure 1a."""
        numbered = re.fullmatch(r"fig(\d.*)", self.name)
        return f"Figure {numbered[1]}" if numbered else self.name.capitalize()

    @property
    def section(self) -> str:
        """The section of the paper that the figure stands in."""
        number = re.fullmatch(r"fig(\d+)[a-c]?", self.name)
        if number is None:
            return BESIDE
        return next((section for section, last in _LAST.items() if int(number[1]) <= last), BESIDE)

    @cached_property
    def size(self) -> tuple[int, int] | None:
        """Width and height in pixels, two per point of the drawing."""
        points = re.search(rb'<svg[^>]*? width="([\d.]+)pt" height="([\d.]+)pt"', self.svg[:2000])
        return None if points is None else (round(2 * float(points[1])), round(2 * float(points[2])))

    @property
    def wide(self) -> bool:
        """Whether the figure takes a row of its own."""
        return self.size is not None and self.size[0] > WIDE

    def source(self, largest: int) -> str:
        """Return the picture as a data URI: the drawing, or pixels where it has more than `largest` bytes."""
        if len(self.svg) <= largest:
            return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


def gallery(
    title: str,
    about: Mapping[str, str],
    figures: Sequence[Picture],
    judged: Sequence[JudgedClaim],
    listed: Sequence[tuple[str, str]],
) -> bytes:
    """Return one self-contained page of figures and claims.

    `about` describes the run: model, data, n and seed stand at the top, the rest under "Provenance". `listed` names
    what was not drawn, judged or used, with the reasons. Links lead to figures/NAME.csv, .parquet, .svg and .png
    beside the page.
    """
    sections: dict[str, list[Picture]] = {section: [] for section in SECTIONS}
    for figure in figures:
        sections[figure.section].append(figure)
    page = _template().render(
        title=title,
        headline=HEADLINE,
        about=about,
        summary=counts_in_words(judged),
        counts=verdict_counts(judged),
        judged=judged,
        claims=by_section(judged),
        figures={section: pictures for section, pictures in sections.items() if pictures},
        largest=min(LARGEST_SVG, ALL_SVG // max(1, len(figures))),
        listed=listed,
        sections=SECTIONS,
        norms=NORMS,
        nothing=NOTHING,
        files=FILES,
    )
    return page.encode()


def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["joined"] = _joined
    environment.filters["anchor"] = lambda section: section.lower().replace(" ", "-")
    return environment.from_string(files("identikit.paper").joinpath("page.html").read_text("utf-8"))


def _joined(words: str) -> Markup:
    """Return words as HTML; a number stays with its per cent sign, a figure with its number."""
    return escape(words).replace(" %", Markup("&nbsp;%")).replace("Fig. ", Markup("Fig.&nbsp;"))
