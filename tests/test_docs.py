"""What the documents say is run."""

import re
from functools import cache
from pathlib import Path

import pytest
import typer
from machinery import pages
from typer.testing import CliRunner

import identikit as ik
from identikit.cli import endings
from identikit.cli.main import app
from identikit.paper.figures.catalogue import FIGURES
from identikit.paper.texts import dataset_of
from tests.test_architecture import FLOORS, SOURCE

ROOT = Path(__file__).parents[1]
RUNS = {"docs/tables.md": "attribution --data texts.txt --probes 2 --out runs/hta"}  # what their snippets read
packaged = cache(ik.load)


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in pages.written() if pages.snippets(page)])
def test_python_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each snippet by itself, but for those that say why not. They share the packaged model, which is read-only."""
    load = ik.load
    monkeypatch.setattr(ik, "load", lambda *of, **how: load(*of, **how) if of or how else packaged())
    monkeypatch.chdir(tmp_path)
    if page in RUNS:
        Path("texts.txt").write_text("A dog saw a cat.\nThe words null and NA are no missing values.\n")
        assert CliRunner().invoke(app, RUNS[page].split()).exit_code == 0
    for snippet in pages.snippets(ROOT / page):
        if snippet.not_run is None:
            exec(compile(snippet.code, page, "exec"), {"__name__": "__main__"})


def test_few_snippets_are_not_run():
    reasons = [snippet.not_run for page in pages.written() for snippet in pages.snippets(page)]
    assert sum(reason is not None for reason in reasons) <= 0.1 * len(reasons)


def test_snippets_are_found_wherever_they_stand(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("- one:\n\n  ```python\n  a = 1\n  ```\n\n<!-- not run: needs a GPU -->\n```python\nb = 2\n```\n")
    assert pages.snippets(page) == [("a = 1\n", None), ("b = 2\n", "needs a GPU")]


def test_what_the_readme_quotes_was_said():
    """Each part of the quoted output, between dots, is in the real one; lines may be broken elsewhere."""
    readme = (ROOT / "README.md").read_text()
    (quoted,) = re.findall(r"```text\n\$ identikit explain\n(.*?)```", readme, flags=re.DOTALL)
    printed = " ".join(str(ik.explain(packaged(), seconds=None)).split())
    parts = [" ".join(part.split()) for part in quoted.split("…") if part.strip()]
    assert len(parts) > 3
    for part in parts:
        assert part in printed


def test_numbers_of_the_readme():
    """Each number of its prose comes from the row that its figure shows, or from the page or file that has it."""
    from identikit.models.families import FAMILIES
    from identikit.texts.data import sample_text

    readme = " ".join((ROOT / "README.md").read_text().split())
    model = packaged()
    row = ik.effective_attention(model, ik.sample_texts()[30]).sel(layer=2, head=2, query="since")
    first = row.intervals(key="[CLS]")
    assert sample_text() == ik.sample_texts()[30]  # what `explain` reads without a text
    raw, least, effective = (f"{float(one):.2f}" for one in (first.raw, first.lower, row.effective[0]))
    assert f"to the {len(row.tokens)} tokens of a pair" in readme and f"only {model.d_value} dimensions" in readme
    assert f"`[CLS]` gets a weight of {raw}. No alternative gives it less than {least}." in readme
    assert f"the measure of the paper, gives it {effective}." in readme and f"at least {least} on `[CLS]`" in readme
    (measured,) = re.findall(r"\| 193–256 \| 29 .*", (ROOT / "docs" / "reading.md").read_text())  # MiniLM's
    cells = [float(cell.split("±")[0]) for cell in measured.split("|")[4:8]]
    assert f"{cells[0]:.0%} of the weight is determined" in readme and f"{cells[3]:.0%} of the rows. On" in readme
    needs = (ROOT / "pyproject.toml").read_text()
    assert "Python 3.11 or" in readme and 'requires-python = ">=3.11"' in needs
    assert "transformers 5.17 or" in readme and '"transformers>=5.17"' in needs
    assert "over a hundred architectures" in readme and len(FAMILIES) > 100


def test_the_figure_of_the_readme_is_what_its_script_draws(tmp_path: Path):
    import runpy

    import numpy as np
    from matplotlib.image import imread

    kept = ROOT / "docs" / "pictures"
    runpy.run_path(str(kept / "make.py"))["draw"](tmp_path / "row.png")
    drawn = imread(tmp_path / "row.png")
    expected = imread(kept / "row.png")
    assert drawn.shape == expected.shape
    assert np.abs(drawn - expected).mean() < 0.01  # fonts may differ a little


def test_three_tokens_by_hand():
    """The worked example of the tutorial and of docs/understand/attention.md, by the library's own formulas."""
    import torch

    from identikit.maths.polytope.exact import extreme_rows
    from tests.maths.polytope.cases import intervals, one_row

    weights = torch.tensor([0.8, 0.1, 0.1]).double()
    values = torch.tensor([[0.0], [1.0], [2.0]]).double()
    ends = intervals(weights, values)
    torch.testing.assert_close(ends.lower, torch.tensor([0.7, 0.0, 0.0]).double())
    torch.testing.assert_close(ends.upper, torch.tensor([0.85, 0.3, 0.15]).double())
    effective = weights @ values @ torch.linalg.pinv(values)
    torch.testing.assert_close(effective, torch.tensor([0.0, 0.06, 0.12]).double())
    first = torch.tensor([[[1.0, 0.0, 0.0]]]).double()
    vertices = extreme_rows(one_row(weights, values), first)[0][0, 0]
    last = torch.linspace(0, 0.15, 16).double()
    between = torch.stack([0.7 + last, 0.3 - 2 * last, last], -1)  # all attention with this output; the first is least
    torch.testing.assert_close(between @ values, (weights @ values).expand(16, 1))
    assert bool((between.norm(dim=-1).diff() > 0).all())
    torch.testing.assert_close(vertices, torch.tensor([[0.7, 0.3, 0.0], [0.85, 0.0, 0.15]]).double())


def test_claims_of_the_paper_are_quoted_from_the_pages_that_measured_them():
    """The numbers of a cell or a sentence of paper-claims.md stand together in the gallery or in docs/reading.md."""
    names = ("understand/paper-claims.md", "gallery/README.md", "gallery/causal/README.md", "reading.md")
    claims, minilm, causal, reading = ((ROOT / "docs" / page).read_text() for page in names)
    lines = re.sub(r"\]\([^)]*\)|section \d\.\d|\(2020\)|stories15m|SmolLM2|float32|L2 ", "", claims).splitlines()
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    prose = " ".join(line for line in lines if not line.startswith("|"))
    sources = [*(minilm + causal + reading).splitlines(), *reading.split("\n\n")]
    measured = [set(map(_plain, _NUMBER.findall(source))) for source in sources]
    quoted = [numbers for part in (*cells, *re.split(r"[.:?] ", prose)) if (numbers := set(_NUMBER.findall(part)))]
    assert len(quoted) > 15
    for numbers in quoted:
        assert any(set(map(_plain, numbers)) <= source for source in measured), numbers


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def _plain(number: str) -> float:
    return abs(float(number))


def test_what_other_tools_give_is_what_we_give():
    """BertViz, TransformerLens and nnsight read eager attention; Captum and nnsight the gradient of a sum."""
    import torch
    from transformers import AutoModel

    from identikit.models.load.load import _default_folder

    model = packaged()
    text = "The dog chased the cat."
    bert = AutoModel.from_pretrained(_default_folder(), attn_implementation="eager").eval()
    encoded = model.tokenizer(text, return_tensors="pt")
    raw = ik.effective_attention(model, text).raw
    seen = torch.stack(bert(**encoded, output_attentions=True).attentions)[:, 0]
    torch.testing.assert_close(raw, seen.detach(), atol=1e-5, rtol=0)

    embedded = bert.get_input_embeddings()(encoded.input_ids).detach().requires_grad_()
    bert(inputs_embeds=embedded, output_hidden_states=True).hidden_states[4][:, 2].sum().backward()
    assert embedded.grad is not None
    share = embedded.grad[0].norm(dim=-1)
    ours = ik.token_attribution(model, text, norm="sum", layers=[3], targets=[2]).contribution
    torch.testing.assert_close(ours[0, :, 0], share / share.sum(), atol=1e-5, rtol=0)


def test_the_coverage_of_standard_errors_is_said_once():
    """The page on attribution quotes what the docstring says."""
    page = " ".join((ROOT / "docs" / "understand" / "attribution.md").read_text().split())
    coverage = r"cover (\d+) % of the truth with (\d+) directions, (\d+) % with (\d+)"
    ((most, many, less, few),) = re.findall(coverage, str(ik.token_attribution.__doc__))
    assert f"covers {most} % of the true values with {many} directions, and {less} % with {few}" in page


def test_links_lead_somewhere():
    for page in pages.written():
        for target, heading in pages.links(page):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not heading or heading in pages.headings(linked), f"{page.name}: {target}#{heading}"


def test_the_page_on_models_is_up_to_date():
    """`identikit models --markdown > docs/models.md` makes it anew."""
    from identikit.models.family_list import models_page

    assert (ROOT / "docs" / "models.md").read_text() == models_page()


@pytest.mark.parametrize("folder", ["gallery", "gallery/causal"])
def test_every_figure_of_the_gallery_stands_below_the_command_that_draws_it(folder: str):
    page = (ROOT / "docs" / folder / "README.md").read_text()
    shown = re.findall(r"^    (identikit reproduce .+)\n\n!\[(\S+)\]\(\S+\)$", page, re.MULTILINE)
    assert [name for _, name in shown] == re.findall(r"^!\[(\S+)\]", page, re.MULTILINE)
    for written, name in shown:
        given = typer.main.get_command(app).commands["reproduce"].make_context("reproduce", written.split()[2:]).params
        needed = dataset_of(FIGURES[name].data)
        assert (list(given["names"]), list(given["data"] or [])) == ([name], [needed] if needed else [])
        assert (given["model"] is not None) == ("causal" in folder)
        assert bool(given["finetuned"]) == ("finetuned" in FIGURES[name].needs)


def test_the_page_on_architecture_has_every_room_in_the_order_of_the_floors():
    page = (ROOT / "docs" / "architecture.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert [set(re.findall("`(\\w+)`", cell)) for cell in cells] == FLOORS


def test_the_page_on_findings_names_tests_that_there_are():
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "findings.md").read_text())
    assert len(named) > 50
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), (file, test)


def test_the_page_on_architecture_names_files_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = {name for name in re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", page) if name not in ("figures/", "claims/")}
    assert named
    for name in named:
        assert (ROOT / name).exists() or (SOURCE / name).exists(), name


def test_agents_are_told_of_names_that_there_are():
    import identikit.explanation.result  # with it, every kind of Result is there

    page = (ROOT / "AGENTS.md").read_text()
    rows = re.findall(r"^\| .* \| (`.*`) \| (.*) \|$", page, flags=re.MULTILINE)
    assert len(rows) > 8
    assert identikit.explanation.result.open_result is ik.open_result
    kinds = [ik.Result]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for calls, fields in rows:
        assert set(re.findall(r"ik\.(\w+)\(", calls)) <= set(ik.__all__), calls
        for name in re.findall(r"`\.(\w+)", fields):
            assert any(hasattr(kind, name) for kind in kinds), name
    for status in (endings.FAILED, endings.INTERNAL, endings.INTERRUPTED):
        assert re.search(rf"\b{status}\b", page.rpartition("A command ends with")[2])


def test_the_index_for_language_models_points_at_files():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text())
    assert len(links) > 12
    for link in links:
        assert (ROOT / link).is_file(), link
