"""Make this gallery from a folder that `identikit reproduce` wrote: python docs/gallery/make.py FOLDER."""

import json
import re
import shutil
import sys
from pathlib import Path

import pandas as pd

from identikit.paper.claims.report import NOTHING, SYMBOLS
from identikit.paper.figures.catalogue import FIGURES
from identikit.paper.inputs import COMPUTED

HERE = Path(__file__).parent


def cell(rows: pd.DataFrame) -> str:
    """The verdicts on a claim, one for each norm it was judged under; a remark that all share stands once."""
    shared = rows["why"].iloc[0] if rows["why"].nunique() == 1 and len(rows) > 1 else ""
    lines = [
        f"{row.norm + ': ' if row.norm else ''}{SYMBOLS[row.verdict]}"
        f"{f' {row.measured}' if row.measured != NOTHING else ''}"
        f"{f' ({row.why})' if row.why and not shared else ''}"
        for row in rows.itertuples()
    ]
    lines += [f"({shared})"] if shared else []
    return "<br>".join(re.sub(r"([|`$*_])", r"\\\1", line) for line in lines)


def claims(folder: Path) -> list[str]:
    """The table of claims."""
    findings = pd.read_parquet(folder / "claims.parquet")
    lines = ["| claim | data | the paper | measured |", "|---|---|---|---|"]
    for _, rows in findings.groupby("claim", sort=False):
        first = rows.iloc[0]
        lines.append(f"| {first.words} ({first['where']}) | {first.data} | {first.paper} | {cell(rows)} |")
    return lines


def provenance(folder: Path) -> list[str]:
    """Where each input was computed."""
    found: dict[str, list[str]] = {}
    for file in sorted((folder / "inputs").glob(f"*/*/{COMPUTED}")):
        about = json.loads(file.read_text())
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        found.setdefault(f"{about['device']}: {versions}", []).append(" ".join(file.parts[-3:-1]))
    return [f"- {where}\n  ({', '.join(inputs)})" for where, inputs in found.items()]


def main() -> None:
    """Copy the figures and write the page."""
    folder = Path(sys.argv[1])
    about = json.loads((folder / "run.json").read_text())
    shown = [name for name in FIGURES if (folder / "figures" / f"{name}.png").exists()]
    lines = [f"# The paper on {about['model']}", "", (HERE / "about.md").read_text().strip(), "", "## Claims", ""]
    lines += ["✓ holds, ✗ does not hold, – not applicable; the rules are in `claims.csv` of a run.", ""]
    lines += claims(folder)
    lines += ["", "## Figures", ""]
    for name in shown:
        shutil.copy(folder / "figures" / f"{name}.png", HERE)
        lines += [f"**{name}.** {FIGURES[name].caption}", "", f"![{name}]({name}.png)", ""]
    lines += ["## Provenance", "", f"Weights {about['weights'][:16]}…, identikit {about['version']}.", ""]
    (HERE / "README.md").write_text("\n".join([*lines, *provenance(folder)]) + "\n")


if __name__ == "__main__":
    main()
