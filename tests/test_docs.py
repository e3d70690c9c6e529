"""What the documents say is run."""

import re
from pathlib import Path

import pytest

from tests.test_architecture import FLOORS, SOURCE

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["README.md", "docs/reading.md", "docs/explorer.md"])
def test_python_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), {})


@pytest.mark.slow
def test_what_the_readme_quotes_was_said():
    """Each part of the quoted output, between dots, is in the real one; lines may be broken elsewhere."""
    import identikit as ik

    readme = (ROOT / "README.md").read_text()
    (quoted,) = re.findall(r"```text\n\$ identikit explain\n(.*?)```", readme, flags=re.DOTALL)
    said = " ".join(str(ik.explain(ik.load(), seconds=None)).split())
    parts = [" ".join(part.split()) for part in quoted.split("…") if part.strip()]
    assert len(parts) > 3
    for part in parts:
        assert part in said


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if not target.startswith("http"):
                linked = page.parent / target if target else page
                assert linked.exists(), f"{page.name}: {target}"
                assert not heading or heading in headings(linked), f"{page.name}: {target}#{heading}"


def headings(page: Path) -> set[str]:
    """The names that a page's headings have in links."""
    lines = [line.lstrip("# ") for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_the_page_on_models_is_up_to_date():
    """`identikit models --markdown > docs/models.md` makes it anew."""
    from identikit.models.page import markdown

    assert (ROOT / "docs" / "models.md").read_text() == markdown()


def test_the_page_on_architecture_has_every_room_in_the_order_of_the_floors():
    page = (ROOT / "docs" / "architecture.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert [set(re.findall("`(\\w+)`", cell)) for cell in cells] == FLOORS


def test_the_page_on_architecture_names_files_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = {name for name in re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", page) if name not in ("figures/", "claims/")}
    assert named
    for name in named:
        assert (ROOT / name).exists() or (SOURCE / name).exists(), name
