"""What a claim and a finding are, and the measures that the claims of several sections share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from identikit.paper.evidence import Evidence

Table = Any  # a pandas DataFrame or Series: pandas annotates what it returns with everything that might come back
HOLDS, FAILS, NOT_APPLICABLE = "holds", "does not hold", "not applicable"
ONE_LAYER = "the model has one layer"


@dataclass(frozen=True)
class Finding:
    """A judged claim: the verdict, what was measured, written as the paper writes it, and a clause where it helps."""

    verdict: str
    measured: str
    why: str = ""


Judge = Callable[[Evidence, str], Finding]
Curve = Callable[[Evidence, str], Table]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    - `words`: the claim; `paper`: what the paper reports; `rule`: when it holds
    - `needs`: names of tables, "own {norm}" where there is one for each norm
    - `data`: the paper's dataset, "" where the texts are the paper's own; `only`: whether no other can answer
    - `by_norm`: whether it rests on contributions, and so is judged under each norm
    - `judge`: takes an evidence and a norm ("" where not `by_norm`); call it through `claims.judge`
    """

    name: str
    where: str
    words: str
    paper: str
    rule: str
    needs: tuple[str, ...]
    data: str
    only: bool
    by_norm: bool
    judge: Judge


class NotApplicableError(Exception):
    """The model or its texts cannot have what a claim is about; the message says why."""


def finding(holds: object, measured: str, why: str = "") -> Finding:
    """A finding of a claim that can be judged."""
    return Finding(HOLDS if holds else FAILS, measured, why)


def percent(share: float, digits: int = 1) -> str:
    """A share as the paper prints it: 30.6 %."""
    return f"{100 * share:.{digits}f} %"


def near(measured: float, paper: float) -> bool:
    """Whether a number is within 10 % of the paper's."""
    return bool(abs(measured - paper) <= 0.1 * paper)


def table(evidence: Evidence, name: str) -> Table:
    """A table of the evidence."""
    return evidence.tables[name]


def by_layer(frame: Table, column: str) -> Table:
    """The mean of a column at each layer, in order of layers."""
    return frame.groupby("layer")[column].mean().sort_index()


def falls(values: Table, slack: float = 0.0) -> bool:
    """Whether values end lower than they start and on the way rise nowhere by more than `slack`."""
    return bool(values.iloc[-1] < values.iloc[0] and values.diff().max() <= slack)


def course(values: Table, slack: float = 0.0) -> str:
    """A falling curve in words: where it starts and ends, and at which layers it rises by more than `slack`."""
    rises = values.index[values.diff() > slack]
    ends = ", ".join(f"{percent(values[layer])} at layer {layer}" for layer in (values.index[0], values.index[-1]))
    return ends + (f"; higher than before at {', '.join(str(layer) for layer in rises)}" if len(rises) else "")


def halves(values: Table, n_layers: int) -> tuple[float, float]:
    """The means of values by layer over the first and over the second half of the layers."""
    if n_layers < 2:
        raise NotApplicableError(ONE_LAYER)
    return values[values.index <= n_layers / 2].mean(), values[values.index > n_layers / 2].mean()


def layers_within(n_layers: int, start: float, end: float) -> list[int]:
    """The layers that lie wholly in a part of the depth, which goes from 0 to 1: layer l from (l − 1)/n to l/n.

    However few there are, a part that starts at 0 has the first layer, and one that ends at 1 the last.
    """
    ends = {1 if start == 0 else None, n_layers if end == 1 else None}
    layers = range(1, n_layers + 1)
    return [layer for layer in layers if layer in ends or ((layer - 1) / n_layers >= start and layer / n_layers <= end)]


def named_layers(evidence: Evidence, *papers: int) -> list[int]:
    """The layers of this model that stand for these of the paper's 1, 6, 11 and 12."""
    standing: dict[int, int] = dict(zip((1, 6, 11, 12), evidence.subject.named_layers, strict=True))
    return [standing[layer] for layer in papers]


def stand_in(evidence: Evidence, *papers: int) -> str:
    """A clause on which layers stand for those that the paper names; nothing where they are the same."""
    pairs = [
        (mine, layer) for mine, layer in zip(named_layers(evidence, *papers), papers, strict=True) if mine != layer
    ]
    if not pairs:
        return ""
    mine = list(dict.fromkeys(layer for layer, _ in pairs))
    layers = " and ".join(str(layer) for layer in mine)
    noun, verb = ("layers", "stand") if len(mine) > 1 else ("layer", "stands")
    named = " and ".join(str(layer) for _, layer in pairs)
    return f"{noun} {layers} of {evidence.subject.n_layers} {verb} for the paper's {named}"


def falling(curve: Curve, slack: float = 0.0) -> Judge:
    """Judge that a curve over layers falls with depth: strictly unless there is a slack."""

    def judge(evidence: Evidence, norm: str) -> Finding:
        values = curve(evidence, norm)
        if len(values) < 2:
            raise NotApplicableError(ONE_LAYER)
        strictly = slack > 0 or values.diff().max() < 0
        return finding(strictly and falls(values, slack), course(values, slack))

    return judge
