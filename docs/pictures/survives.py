"""Draw what survives of readings of attention.

    python docs/pictures/survives.py --runs NAME=RUN… --lengths NAME=RUN… --roles FOLDER --agreement FOLDER

Each run is a folder that `identikit measures` wrote; `--lengths` takes several of one name, of texts cut to several
lengths. The roles are a saved result of `ik.head_scores` that has "induction" among its scores; the agreement is one
of `ik.agreement`.
"""

import argparse
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import identikit as ik

STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#E3E3E3"}
COLOURS = {"attention": "#0072B2", "value norm": "#E69F00", "norm": "#009E73", "rollout": "#D55E00"}
CUT = ("attention", "rollout")
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


def cut_texts(runs: dict[str, list[Path]], where: Path) -> None:
    """Draw how much of attention and of rollout survives as texts grow: means over texts with their standard errors."""
    shown = (("determined", "determined share", 1.03), ("order", "certain order", 5.1))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, 2, figsize=(6.2, 4.4), layout="constrained", sharex=True, sharey="row")
        for (column, measure), (row, (number, label, top)) in product(enumerate(CUT), enumerate(shown)):
            axes = grid[row, column]
            for (name, folders), colour in zip(runs.items(), COLOURS.values(), strict=False):
                table = pd.concat([pd.read_parquet(folder / "measures.parquet") for folder in folders])
                by = table[table["measure"] == measure].groupby("tokens")[number]
                axes.errorbar(by.mean().index, by.mean(), by.sem(), fmt="o-", color=colour, markersize=3, label=name)
            axes.set(ylim=(0, top), xlabel="tokens" if row else "", xticks=sorted(table["tokens"].unique()))
            axes.set_ylabel(label if column == 0 else "")
            axes.set_title("" if row else measure, loc="left", fontsize=8)
            axes.grid(visible=True)
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
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


def agreement(folder: Path, where: Path) -> None:
    """Draw how alike measures rank sources, pair by pair, and how much of each ranking is determined."""
    found = ik.open_result(folder)
    names = [str(name).replace("_", " ") for name in found.axis("measure").values]
    places = range(len(names))
    with plt.rc_context(STYLE):
        figure, (pairs, bars) = plt.subplots(
            1, 2, figsize=(6.8, 2.8), layout="constrained", sharey=True, width_ratios=[1.25, 1]
        )
        means = found.read("correlation")
        errors = found.read("correlation_stderr")
        others = means.masked_fill(means == 1, float("nan"))
        pairs.imshow(others, cmap="Blues", vmin=0, vmax=2, aspect="auto")  # half of the scale: text stays readable
        for row, column in product(places, places):
            if row != column:
                written = f"{means[row, column]:.2f}\n±{errors[row, column]:.2f}"
                pairs.text(column, row, written, ha="center", va="center", fontsize=7)
        pairs.set(xticks=places, yticks=places, yticklabels=names)
        pairs.set_xticklabels([name.replace(" ", "\n") for name in names], fontsize=7)
        pairs.set_title("rank correlation of two measures", loc="left", fontsize=8)
        bars.barh(places, found.read("determined"), xerr=found.read("determined_stderr"), height=0.6, color="#9CC9E8")
        bars.set(xlim=(0, 1.03), xlabel="share of pairs of sources")
        bars.set_title("ranking that is determined, at least", loc="left", fontsize=8)
        bars.grid(axis="x")
        bars.set_axisbelow(True)
        figure.savefig(where, dpi=160, facecolor="white")
    plt.close(figure)


def named(pairs: list[str]) -> dict[str, list[Path]]:
    """Return the runs of each name."""
    found: dict[str, list[Path]] = {}
    for pair in pairs:
        name, run = pair.split("=", 1)
        found.setdefault(name, []).append(Path(run))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=[], metavar="NAME=RUN")
    parser.add_argument("--lengths", nargs="+", default=[], metavar="NAME=RUN")
    parser.add_argument("--roles", type=Path, metavar="FOLDER")
    parser.add_argument("--agreement", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    here = Path(__file__).parent
    if given.runs:
        by_length({name: run for name, (run,) in named(given.runs).items()}, here / "survives.png")
    if given.lengths:
        cut_texts(named(given.lengths), here / "lengths.png")
    if given.roles:
        roles(given.roles, here / "roles.png")
    if given.agreement:
        agreement(given.agreement, here / "agreement.png")
