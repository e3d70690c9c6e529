"""Make a page of the gallery from folders that `identikit reproduce` wrote.

    python docs/gallery/make.py PAGE FOLDER…

PAGE is a folder with about.md, which says what was run, such as docs/gallery. Figures and claims come from the first
FOLDER that has them. A figure that none has keeps its old picture, and the page says so.
"""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from identikit.maths.jacobian import NORMS
from identikit.paper.claims.catalogue import CLAIMS
from identikit.paper.claims.claim import NOTHING, Verdict
from identikit.paper.claims.report import JudgedClaim, by_section, counts_in_words, read_rows
from identikit.paper.figures.catalogue import FIGURES
from identikit.paper.figures.figure import Figure
from identikit.paper.reproduce import computed_on
from identikit.paper.texts import dataset_of

KEPT = "*An earlier picture, in an older style and without error bars.*"


def cell(judged: JudgedClaim) -> str:
    """The verdicts on a claim, one for each norm it was judged under; a remark that all share is given once."""
    lines = [
        f"{NORMS[norm] + ': ' if norm else ''}{found.verdict.symbol}"
        f"{f' {found.measured}' if found.measured != NOTHING else ''}"
        f"{f' ({found.why})' if found.why and not judged.remark else ''}"
        for norm, found in judged.findings.items()
    ]
    lines += [f"({judged.remark})"] if judged.remark else []
    return "<br>".join(re.sub(r"([|`$*_])", r"\\\1", line) for line in lines)


def arguments(folder: Path) -> dict[str, Any]:
    """The arguments of the command that wrote a folder."""
    return json.loads((folder / "command.json").read_text())["arguments"]


def command(figure: Figure, given: dict[str, Any]) -> str:
    """The command that draws one figure on the paper's data, with the model and the number of texts of a run."""
    data, model = dataset_of(figure.data), given.get("model")
    parts = [f"identikit reproduce {figure.name}", f"--data {data} --data-dir GLUE" if data else ""]
    parts += [f"--model {Path(model).name if Path(model).exists() else model}" if model else ""]
    parts += [f"--first {given['first']}" if given.get("first") else ""]
    parts += [f"--finetuned minilm-{data}" if "finetuned" in figure.needs else "", "--out out"]
    return " ".join(filter(None, parts))


def claims(folders: Sequence[Path]) -> list[str]:
    """The table of claims."""
    found, sizes = {}, {}
    for folder in reversed(folders):
        for one in read_rows(pd.read_parquet(folder / "claims.parquet")):
            found[one.claim.name], sizes[one.claim.name] = one, arguments(folder).get("first")
    judged = [found[name] for name in CLAIMS if name in found]
    symbols = ", ".join(f"{verdict.symbol} {verdict}" for verdict in Verdict if verdict != Verdict.MIXED)
    lines = [counts_in_words(judged), "", f"{symbols}; `claims.csv` of a run has the rules.", ""]
    lines += ["| claim | data | the paper | measured |", "|---|---|---|---|"]
    for one in [one for claims in by_section(judged).values() for one in claims]:  # our own come last
        texts = sizes[one.claim.name]
        data = f"{one.data}, {texts} texts" if texts else one.data
        lines.append(f"| {one.claim.words} ({one.claim.where}) | {data} | {one.claim.paper} | {cell(one)} |")
    return lines


def figures(page: Path, folders: Sequence[Path]) -> list[str]:
    """The figures, copied beside the page, each below its caption and its command."""
    lines = []
    for name, figure in FIGURES.items():
        drawn = [folder for folder in folders if (folder / "figures" / f"{name}.png").exists()]
        if drawn:
            shutil.copy(drawn[0] / "figures" / f"{name}.png", page)
        if (page / f"{name}.png").exists():
            kept, given = ("", arguments(drawn[0])) if drawn else (f" {KEPT}", {})
            lines += [f"**{name}.** {figure.caption}{kept}", "", f"    {command(figure, given)}", ""]
            lines += [f"![{name}]({name}.png)", ""]
    return lines


def main() -> None:
    """Copy the figures and write the page."""
    page, *folders = map(Path, sys.argv[1:])
    manifests = [json.loads((folder / "run.json").read_text()) for folder in folders]
    about, *others = [manifest["run"] for manifest in manifests]
    if any(other["weights"] != about["weights"] for other in others):
        sys.exit("The folders are of different models. A page is about one.")
    model = manifests[0]["recorded"]["model"]["name"]
    lines = [f"# The paper on {model}", "", (page / "about.md").read_text().strip(), "", "## Claims", ""]
    lines += [*claims(folders), "", "## Figures", "", *figures(page, folders)]
    lines += ["## Provenance", "", f"Weights {about['weights'][:16]}…, identikit {about['version']}.", ""]
    places = [place for folder in folders for place in computed_on(str(folder)).items()]
    lines += [f"- {place.removeprefix('computed on ')}: {inputs}." for place, inputs in places]
    (page / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
