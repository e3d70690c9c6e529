"""The pages that people write: which there are, and the snippets and links in them."""

import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_SNIPPET = re.compile(r"^( *)(?:<!-- not run: (.+?) -->\n+\1)?```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]*)#?([^)\s]*)\)")
_CODE = re.compile(r"^ *(`{3,}|:{3,}).*?^ *\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)


class Snippet(NamedTuple):
    """A Python snippet, and why it is not run: what stands before it as `<!-- not run: … -->`."""

    code: str
    not_run: str | None


def written() -> list[Path]:
    """Every page of Markdown that is not generated."""
    made = (ROOT / "docs" / "_build", ROOT / "docs" / "reference" / "api", ROOT / "docs" / "reference" / "commands")
    found = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if not any(page.with_suffix("").is_relative_to(folder) for folder in made)]


def snippets(page: Path) -> list[Snippet]:
    """The Python snippets of a page, in order."""
    return [
        Snippet(re.sub(rf"^{indent}", "", code, flags=re.MULTILINE), why or None)
        for indent, why, code in _SNIPPET.findall(page.read_text())
    ]


def cells() -> list[str]:
    """The code of notebooks and of pages with cells, which is executed when the site is built."""
    notebooks = [json.loads(path.read_text()) for path in sorted((ROOT / "docs").glob("*.ipynb"))]
    found = ["".join(cell["source"]) for one in notebooks for cell in one["cells"] if cell["cell_type"] == "code"]
    return found + [code for page in written() for code in _CELL.findall(page.read_text())]


def links(page: Path) -> list[tuple[str, str]]:
    """The links of a page to files and headings of ours: each as a path ("": the page itself) and a heading."""
    found = _LINK.findall(_CODE.sub("", page.read_text()))
    return [(path, heading) for path, heading in found if not re.match(r"[a-z]+:", path)]


def headings(page: Path) -> set[str]:
    """The names that a page's headings have in links."""
    lines = [line.lstrip("# ") for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}
