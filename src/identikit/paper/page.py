"""All figures and claims on one page: a single file that can be read without a network, a script or other files."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from identikit.maths.jacobian import NORMS
from identikit.paper.claims.judgements import BESIDE, NOTHING, Finding
from identikit.paper.claims.report import SECTIONS, JudgedClaim, by_section, counted, counts

LARGEST_SVG = 300_000  # bytes; above it the PNG is shown
ALL_SVG = 7_500_000  # bytes of all figures together: base64 makes 10 MB of them
HEADLINE = ("model", "data", "n", "seed")
FILES = ("csv", "parquet", "svg", "png")
WIDE = 360  # points; a wider figure takes a row of its own
_FIGURES = {
    "Section 3": range(1, 2),
    "Section 4": range(2, 3),
    "Section 5": range(3, 5),
    "Appendix A": range(5, 7),
    "Appendix B": range(7, 18),
    "Appendix C": range(18, 38),
    "Appendix D": range(38, 44),
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
        return next((section for section, there in _FIGURES.items() if number and int(number[1]) in there), BESIDE)


def gallery(
    title: str,
    about: Mapping[str, str],
    figures: Sequence[Picture],
    judged: Sequence[JudgedClaim],
    listed: Sequence[tuple[str, str]],
) -> bytes:
    """Make one self-contained page of figures and claims.

    `about` describes the run: model, data, n and seed stand at the top, the rest under "Provenance". `listed` names
    what was not drawn, judged or used, each with the reason. Links lead to figures/NAME.csv, .parquet, .svg and .png
    beside the page.
    """
    sections = {
        section: [figure for figure in figures if figure.section == section]
        for section in SECTIONS
        if any(figure.section == section for figure in figures)
    }
    largest = min(LARGEST_SVG, ALL_SVG // max(1, len(figures)))
    drawn = "".join(_section(section, chosen, largest) for section, chosen in sections.items())
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#claims">Skip to the claims</a>\n'
        f"<header>\n<h1>{escape(title)}</h1>\n{_about(about)}\n{_contents(list(sections), bool(listed))}</header>\n"
        f"<main>\n{_claims(judged)}\n{drawn}{_listed(listed)}</main>\n"
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )
    return page.encode()


def _about(about: Mapping[str, str]) -> str:
    top = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(about[name])}</dd></div>" for name in HEADLINE if name in about
    )
    rest = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(told)}</td></tr>'
        for name, told in about.items()
        if name not in HEADLINE
    )
    provenance = f"\n<details><summary>Provenance</summary><table>{rest}</table></details>" if rest else ""
    return f'<dl class="about">{top}</dl>{provenance}'


def _contents(sections: list[str], listed: bool) -> str:
    links = [("claims", "Claims"), *((_anchor(section), section) for section in sections)]
    links += [("not-drawn", "Not drawn or judged")] if listed else []
    items = "".join(f'<li><a href="#{anchor}">{escape(words)}</a></li>' for anchor, words in links)
    return f'<nav aria-label="Contents"><ul>{items}</ul></nav>\n'


def _anchor(section: str) -> str:
    return section.lower().replace(" ", "-")


def _title(section: str) -> str:
    return f"{section}: {SECTIONS[section]}"


def _claims(judged: Sequence[JudgedClaim]) -> str:
    heads = "".join(f'<th scope="col" rowspan="2">{name}</th>' for name in ("Claim", "Where", "Paper"))
    norms = "".join(f'<th scope="col">{name} norm</th>' for name in NORMS.values())
    bodies = "".join(
        f'<tbody><tr class="section"><th colspan="6" scope="rowgroup">{escape(_title(section))}</th></tr>'
        f"{''.join(map(_claim, claims))}</tbody>"
        for section, claims in by_section(judged).items()
    )
    head = f'<tr>{heads}<th scope="colgroup" colspan="3">Measured</th></tr><tr class="norms">{norms}</tr>'
    table = f"<table><thead>{head}</thead>{bodies}</table>" if judged else ""
    return (
        f'<section id="claims" aria-labelledby="claims-heading">\n<h2 id="claims-heading">Claims</h2>\n'
        f"<p>{escape(counted(judged))}</p>\n{_filters(judged)}"
        f'<div class="scroll" role="region" aria-labelledby="claims-heading" tabindex="0">{table}</div>\n</section>'
    )


def _filters(judged: Sequence[JudgedClaim]) -> str:
    """Buttons that the page's script reveals; without it, all claims are shown."""
    buttons = [f'<button type="button" data-show="" aria-pressed="true">all {len(judged)}</button>']
    for verdict, count in counts(judged).items():
        words = f"{verdict.symbol} {verdict} {count}"
        buttons.append(f'<button type="button" data-show="{verdict.kind}" aria-pressed="false">{words}</button>')
    return f'<div class="filters" role="group" aria-label="Show claims that" hidden>{"".join(buttons)}</div>\n'


def _claim(judged: JudgedClaim) -> str:
    claim = judged.claim
    if claim.by_norm:
        cells = "".join(_cell(judged.findings.get(norm), judged.remark, NORMS[norm]) for norm in NORMS)
    else:
        cells = _cell(judged.findings[""], judged.remark, "")
    remark = f'<span class="why">{_text(judged.remark)}</span>' if judged.remark else ""
    data = f'<span class="data">{escape(judged.data)}</span>' if judged.data else ""
    return (
        f'<tr data-verdict="{judged.verdict.kind}">'
        f'<th scope="row">{_text(claim.words)}{remark}<span class="rule">Holds if: {_text(claim.rule)}</span></th>'
        f'<td>{_text(claim.where)}{data}</td><td data-label="Paper">{_text(claim.paper)}</td>{cells}</tr>\n'
    )


def _cell(found: Finding | None, remark: str, norm: str) -> str:
    label = f' data-label="{norm} norm"' if norm else ' colspan="3" data-label="Measured"'
    if found is None:
        return f"<td{label}>not computed</td>"
    verdict = f'<span class="verdict {found.verdict.kind}">{found.verdict.symbol} {found.verdict}</span>'
    measured = f" {_text(found.measured)}" if found.measured != NOTHING else ""
    why = f'<span class="why">{_text(found.why)}</span>' if found.why and not remark else ""
    return f"<td{label}>{verdict}{measured}{why}</td>"


def _text(words: str) -> str:
    """Return words as HTML; a number stays with its per cent sign, a figure with its number."""
    return escape(words).replace(" %", "&nbsp;%").replace("Fig. ", "Fig.&nbsp;")


def _section(section: str, figures: list[Picture], largest: int) -> str:
    drawn = "".join(_figure(figure, largest) for figure in figures)
    anchor = _anchor(section)
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-heading">\n'
        f'<h2 id="{anchor}-heading">{escape(_title(section))}</h2>\n'
        f'<div class="grid">\n{drawn}</div>\n</section>\n'
    )


def _figure(figure: Picture, largest: int) -> str:
    kind, image = ("svg+xml", figure.svg) if len(figure.svg) <= largest else ("png", figure.png)
    size = re.search(rb'<svg[^>]*? width="([\d.]+)pt" height="([\d.]+)pt"', figure.svg[:2000])
    width, height = map(float, size.groups()) if size else (0.0, 0.0)
    sized = f' width="{2 * width:.0f}" height="{2 * height:.0f}"' if size else ""
    layout = ' class="wide"' if width > WIDE else ""
    links = " ".join(
        f'<a href="figures/{escape(figure.name)}.{file}" aria-label="{escape(figure.title)} as {file}">{file}</a>'
        for file in FILES
    )
    return (
        f'<figure id="{escape(figure.name)}"{layout}>'
        f'<img src="data:image/{kind};base64,{base64.b64encode(image).decode()}"{sized} decoding="async" '
        f'alt="{escape(figure.title)}: {escape(figure.caption)}">'
        f"<figcaption><p><strong>{escape(figure.title)}.</strong> {_text(figure.caption)}</p>"
        f'<p class="label">{escape(figure.label)}</p><p class="files">{links}</p></figcaption></figure>\n'
    )


def _listed(listed: Sequence[tuple[str, str]]) -> str:
    if not listed:
        return ""
    items = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(reason)}</td></tr>' for name, reason in listed)
    return (
        '<section id="not-drawn" aria-labelledby="not-drawn-heading">\n'
        '<h2 id="not-drawn-heading">Not drawn or judged</h2>\n'
        f'<table class="listed">{items}</table>\n</section>\n'
    )


_SCRIPT = """
const filters = document.querySelector('.filters');
filters.hidden = false;
filters.addEventListener('click', event => {
  const button = event.target.closest('button');
  if (!button) return;
  for (const one of filters.children) one.setAttribute('aria-pressed', one === button);
  const kind = button.dataset.show;
  for (const body of document.querySelectorAll('#claims tbody')) {
    const rows = [...body.querySelectorAll('tr[data-verdict]')];
    for (const row of rows) row.hidden = kind && row.dataset.verdict !== kind;
    body.hidden = rows.every(row => row.hidden);
  }
});
"""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5c6168; --line: #d9dce1; --paper: #fff; --tint: #f5f6f8;
  --link: #0b57a4; --holds: #00603f; --holds-tint: #e0f3ea; --fails: #9a3412; --fails-tint: #fdeadf; --none: #4d5159;
  --none-tint: #eceef1; --unsure: #6b4e00; --unsure-tint: #fcf3d2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ec; --soft: #a2a8b1; --line: #383c43; --paper: #16181b;
  --tint: #1f2226; --link: #8ec2ff; --holds: #7ddcb2; --holds-tint: #10352a; --fails: #ffb38a; --fails-tint: #45220f;
  --none: #b9bec7; --none-tint: #2c3037; --unsure: #f3d277; --unsure-tint: #3d300a; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem clamp(1rem, 3vw, 2.5rem) 4rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: clamp(1.5rem, 1.1rem + 1.6vw, 2.1rem); line-height: 1.2; margin: 0.5rem 0 1rem; text-wrap: balance; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.75rem 0 0.75rem; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; border-radius: 2px; }
.skip { position: absolute; left: -99rem; }
.skip:focus { position: static; }
.about { display: flex; flex-wrap: wrap; gap: 0.5rem 2rem; margin: 0 0 1rem; }
dt { color: var(--soft); font-size: 0.8rem; }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--link); width: fit-content; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; list-style: none; margin: 1rem 0 0; padding: 0.75rem 0;
  border-block: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; line-height: 1.4; }
th, td { text-align: left; vertical-align: top; padding: 0.55rem 0.9rem 0.55rem 0; font-weight: 400;
  border-top: 1px solid var(--line); overflow-wrap: break-word; }
thead th { font-weight: 600; border-top: 0; padding-bottom: 0; }
.norms th { color: var(--soft); font-weight: 400; font-size: 0.8rem; padding-top: 0; }
tr.section th { font-weight: 600; padding-top: 1.6rem; border-top: 0; }
tbody tr:nth-child(2) > * { border-top: 2px solid var(--line); }
details table, .listed { width: auto; }
details th, .listed th { color: var(--soft); white-space: nowrap; }
.scroll { overflow-x: auto; }
#claims table { table-layout: fixed; }
#claims thead th:nth-child(1) { width: 30%; }
#claims thead th:nth-child(2), #claims thead th:nth-child(3) { width: 13%; }
.rule, .why, .data { display: block; color: var(--soft); font-size: 0.8rem; }
.verdict { display: block; width: fit-content; white-space: nowrap; border-radius: 0.25rem; padding: 0 0.4rem;
  margin-bottom: 0.2rem; font-size: 0.8rem; font-weight: 600; color: var(--none); background: var(--none-tint); }
.verdict.holds { color: var(--holds); background: var(--holds-tint); }
.verdict.fails { color: var(--fails); background: var(--fails-tint); }
.verdict.undecided { color: var(--unsure); background: var(--unsure-tint); }
.filters { display: flex; flex-wrap: wrap; gap: 0.5rem; margin: 0 0 0.5rem; }
[hidden] { display: none !important; }
button { font: inherit; font-size: 0.9rem; color: inherit; background: var(--tint); border: 1px solid var(--line);
  border-radius: 0.4rem; padding: 0.3rem 0.75rem; cursor: pointer; }
button[aria-pressed=true] { border-color: var(--link); box-shadow: inset 0 0 0 1px var(--link); font-weight: 600; }
.grid { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr));
  align-items: start; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 0.5rem; overflow: hidden; }
figure.wide { grid-column: 1 / -1; }
@media (min-width: 62rem) {
  figure.wide { display: grid; grid-template-columns: 2fr 1fr; }
  figure.wide figcaption { border-top: 0; border-left: 1px solid var(--line); }
}
figure img { display: block; width: 100%; height: auto; background: #fff; padding: 0.75rem; }
figcaption { padding: 0.75rem 1rem; border-top: 1px solid var(--line); font-size: 0.9rem; }
figcaption p { margin: 0 0 0.35rem; }
.label, .files { color: var(--soft); font-size: 0.8rem; overflow-wrap: anywhere; }
.files a { margin-right: 0.5rem; }
@media screen and (max-width: 46rem) {
  #claims table, #claims tbody, #claims tr, #claims th, #claims td { display: block; width: auto !important; }
  #claims thead { display: none; }
  #claims th, #claims td { border: 0 !important; padding: 0.15rem 0; }
  #claims tr.section th { padding: 1.5rem 0 0.5rem; }
  #claims tr[data-verdict] { border-top: 1px solid var(--line); padding: 0.75rem 0; }
  #claims tr[data-verdict] th { font-weight: 600; }
  #claims .rule, #claims .why { font-weight: 400; }
  #claims .data { display: inline; }
  #claims .data::before { content: " · "; }
  #claims td[data-label]::before { content: attr(data-label) ": "; color: var(--soft); }
  .verdict { display: inline-block; }
}
@media print {
  html { font-size: 9pt; }
  body { max-width: none; padding: 0; }
  nav, .filters, .files, .skip { display: none !important; }
  .scroll { overflow: visible; }
  thead { display: table-header-group; }
  tr, figure { break-inside: avoid; }
  h2, tr.section { break-after: avoid; }
  .grid { grid-template-columns: 1fr 1fr; }
  .verdict { border: 1px solid currentcolor; }
}
"""
