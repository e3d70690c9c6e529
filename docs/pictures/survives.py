"""Draw what survives of readings of attention: `python docs/pictures/survives.py --runs NAME=RUN… --roles FOLDER`.

Each run is a folder that `identikit measures` wrote, and the roles are a saved result of `ik.head_scores` that has
"induction" among its scores.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import identikit as ik

STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#E3E3E3"}
COLOURS = {"attention": "#0072B2", "value norm": "#E69F00", "norm": "#009E73", "rollout": "#D55E00"}
HEADS = 10


def by_length(runs: dict[str, Path], where: Path) -> None:
    """Draw the determined share, and the certain order, of each measure by the length of the text; a point per text."""
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, len(runs), figsize=(2.7 * len(runs), 4.2), layout="constrained", sharey="row")
        for column, (name, folder) in enumerate(runs.items()):
            table = pd.read_parquet(folder / "measures.parquet")
            for row, (number, label) in enumerate((("determined", "determined share"), ("order", "certain order"))):
                axes = grid[row, column]
                for measure, colour in COLOURS.items():
                    texts = table[table["measure"] == measure]
                    axes.plot(texts["tokens"], texts[number], "o", color=colour, markersize=3, alpha=0.7, label=measure)
                axes.set(ylim=(0, 1.03 if row == 0 else 5.1), xlabel="tokens" if row else "")
                axes.set_ylabel(label if column == 0 else "")
                axes.grid(visible=True)
            grid[0, column].set_title(name, loc="left", fontsize=8)
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(where, dpi=160, facecolor="white")
    plt.close(figure)


def roles(folder: Path, where: Path) -> None:
    """Draw the heads with the highest induction scores: raw with its range, and what effective attention gives."""
    scores = ik.open_result(folder).sel(score="induction")
    heads = scores.to_frame().nlargest(HEADS, "raw").reset_index(drop=True)
    names = [f"L{head.layer}H{head.head}" for head in heads.itertuples()]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.2, 2.9), layout="constrained")
        places = range(len(heads))
        axes.barh(places, heads["upper"] - heads["lower"], left=heads["lower"], height=0.6, color="#9CC9E8")
        axes.plot(heads["raw"], places, "|", color="black", markersize=11, label="raw")
        axes.plot(heads["effective"], places, "o", color="#E69F00", markersize=4, label="effective attention")
        axes.barh([-5], [0], color="#9CC9E8", label="every attention with the same output")
        axes.set(yticks=places, yticklabels=names, xlim=(0, 1), ylim=(len(heads) - 0.4, -0.6))
        axes.set_xlabel("induction score")
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(where, dpi=160, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", default=[], metavar="NAME=RUN")
    parser.add_argument("--roles", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    here = Path(__file__).parent
    if given.runs:
        by_length({name: Path(run) for name, run in (pair.split("=", 1) for pair in given.runs)}, here / "survives.png")
    if given.roles:
        roles(given.roles, here / "roles.png")
