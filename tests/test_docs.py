"""What the documents say is run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["README.md"])
def test_python_snippets_run(page: str):
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), {})


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_family_is_in_the_readme():
    from identikit.models.families import FAMILIES

    told = re.sub(r"[^a-z0-9]", "", (ROOT / "README.md").read_text().lower())
    names = {"xlm-roberta": "xlmr", "gemma3_text": "gemma3"}
    for family in FAMILIES:
        assert re.sub(r"[^a-z0-9]", "", names.get(family, family)) in told
