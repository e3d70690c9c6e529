"""Draw row.png, the README's figure of one row of attention: `python docs/pictures/make.py`."""

from pathlib import Path

import matplotlib.pyplot as plt

import identikit as ik

TEXT, ROW, SHOWN = 30, {"layer": 2, "head": 2, "query": "since"}, 12
STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.5,
}


def draw(where: Path) -> None:
    """Draw raw weights with what they could have been on the left, and effective ones on the right."""
    row = ik.effective_attention(ik.load(), ik.sample_texts()[TEXT]).sel(**ROW)
    bounds = row.intervals()
    weights = bounds.to_frame().assign(effective=row.effective.numpy()).nlargest(SHOWN, "upper")
    top = weights.iloc[0]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained", sharex=True)
        bounds.plot(ax=left, most=SHOWN)
        left.text(top.lower - 0.01, 0, f"at least {top.lower:.0%}", ha="right", va="center")
        right.barh(range(SHOWN), weights["effective"], height=0.6, color="#E69F00")
        right.text(top.effective + 0.01, 0, f"effective {top.effective:.0%}", va="center")
        right.set(ylim=left.get_ylim(), xlabel=left.get_xlabel(), yticks=range(SHOWN), yticklabels=[])
        right.grid(axis="x")
        right.set_axisbelow(True)
        right.set_title("effective attention of the same row", loc="left", fontsize=8)
        figure.savefig(where, dpi=160, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_name("row.png"))
