"""Make this gallery from a folder that `identikit reproduce` wrote: python docs/gallery/make.py FOLDER.

A figure that the folder does not have keeps its old picture here, and the page says so.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pandas as pd

from identikit.maths.jacobian import NORMS
from identikit.paper.claims.judgements import NOTHING, Verdict
from identikit.paper.claims.report import JudgedClaim, by_section, counted, read_rows
from identikit.paper.figures.catalogue import FIGURES, Figure
from identikit.paper.reproduce import computed_on
from identikit.paper.texts import PART_OF

HERE = Path(__file__).parent
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


def command(figure: Figure) -> str:
    """The command that draws one figure, on the data that the paper used."""
    data = PART_OF.get(figure.data, figure.data)
    parts = [f"identikit reproduce {figure.name}", f"--data {data} --data-dir GLUE" if data else ""]
    parts += [f"--finetuned minilm-{data}" if "finetuned" in figure.needs else "", "--out out"]
    return " ".join(filter(None, parts))


def claims(folder: Path) -> list[str]:
    """The table of claims."""
    judged = read_rows(pd.read_parquet(folder / "claims.parquet"))
    symbols = ", ".join(f"{verdict.symbol} {verdict}" for verdict in Verdict if verdict != Verdict.MIXED)
    lines = [counted(judged), "", f"{symbols}; `claims.csv` of a run has the rules.", ""]
    lines += ["| claim | data | the paper | measured |", "|---|---|---|---|"]
    for one in [one for claims in by_section(judged).values() for one in claims]:  # our own come last
        lines.append(f"| {one.claim.words} ({one.claim.where}) | {one.data} | {one.claim.paper} | {cell(one)} |")
    return lines


def main() -> None:
    """Copy the figures and write the page."""
    folder = Path(sys.argv[1])
    about = json.loads((folder / "run.json").read_text())["run"]
    lines = [f"# The paper on {about['model']}", "", (HERE / "about.md").read_text().strip(), "", "## Claims", ""]
    lines += claims(folder)
    lines += ["", "## Figures", ""]
    for name, figure in FIGURES.items():
        drawn = folder / "figures" / f"{name}.png"
        if drawn.exists():
            shutil.copy(drawn, HERE)
        if (HERE / drawn.name).exists():
            kept = "" if drawn.exists() else f" {KEPT}"
            lines += [f"**{name}.** {figure.caption}{kept}", "", f"    {command(figure)}", ""]
            lines += [f"![{name}]({name}.png)", ""]
    lines += ["## Provenance", "", f"Weights {about['weights'][:16]}…, identikit {about['version']}.", ""]
    places = computed_on(str(folder)).items()
    lines += [f"- {place.removeprefix('computed on ')}: {inputs}." for place, inputs in places]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
