"""What a claim and a finding are, how a claim is decided from uncertain numbers, and measures that claims share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from identikit.paper.claims.estimates import Curve, Estimate
from identikit.paper.evidence import Evidence

Table = Any  # a pandas DataFrame or Series: pandas annotates what it returns with everything that might come back
ONE_LAYER = "the model has only one layer"
BESIDE = "Beside the paper"  # the section of our own claims
NOTHING = "–"  # what stands for a measurement where there is none
EXACT, AVERAGED, RARE, LEARNED, WHOLE = 1, 20, 100, 200, 0
TEXTS = {
    EXACT: "what is proved, and the paper's own examples",
    AVERAGED: "averages over tokens",
    RARE: "what [CLS] gathers, and what never happens",
    LEARNED: "learned maps",
    WHOLE: "the datasets themselves",
}
"""How many texts claims take, and which claims those are; `WHOLE` stands for a whole dataset."""


class Verdict(StrEnum):
    """How a claim came out; each member carries its symbol, terminal style, page class and the words that count it."""

    symbol: str
    style: str
    kind: str
    counted: tuple[str, str]

    def __new__(cls, words: str, symbol: str, style: str, kind: str, counted: tuple[str, str]) -> "Verdict":
        """Make a verdict of its words, and give it the rest as attributes."""
        verdict = str.__new__(cls, words)
        verdict._value_ = words
        verdict.symbol, verdict.style, verdict.kind, verdict.counted = symbol, style, kind, counted
        return verdict

    HOLDS = "holds", "✓", "bold green", "holds", ("holds", "hold")
    FAILS = "does not hold", "✗", "bold red", "fails", ("does not hold", "do not hold")
    MIXED = "depends on the norm", "±", "bold magenta", "mixed", ("depends on the norm", "depend on the norm")
    UNDECIDED = "undecided", "?", "bold yellow", "undecided", ("is undecided", "are undecided")
    NOT_APPLICABLE = (
        "not applicable",
        "–",
        "bold",
        "none",
        ("is not applicable to this model", "are not applicable to this model"),
    )


@dataclass(frozen=True)
class Finding:
    """What came of judging a claim.

    `measured` is what was measured, written as the paper writes it, and `why` a clause where one helps. `certain` says
    that no further text can change the verdict, as after a counterexample.
    """

    verdict: Verdict
    measured: str
    why: str = ""
    certain: bool = False


Judge = Callable[[Evidence, str], Finding]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    - `section`: where it stands in the table of claims; `where`: the place in the paper, to the figure
    - `words`: the claim; `paper`: what the paper reports; `rule`: when it holds
    - `needs`: names of tables, "own {norm}" where there is one for each norm
    - `texts`: how many texts it takes (a key of `TEXTS`); with fewer it is undecided
    - `data`: the paper's dataset, "" where the texts are the paper's own; `only`: whether no other dataset will do
    - `by_norm`: whether it rests on contributions, and so is judged under each norm
    - `judge`: takes the evidence and a norm ("" where not `by_norm`); call it through `catalogue.judge`
    """

    name: str
    where: str
    words: str
    paper: str
    rule: str
    section: str
    needs: tuple[str, ...]
    texts: int
    data: str
    only: bool
    by_norm: bool
    judge: Judge


class NotApplicableError(Exception):
    """The model or its texts cannot have what a claim is about; the message says why."""


# Deciding

CLEAR = 2.0  # how many standard errors a number must be away from what it is compared with


def finding(holds: object, measured: str, why: str = "", *, certain: bool = False) -> Finding:
    """A finding of a claim whose tables do not say how uncertain they are."""
    return Finding(Verdict.HOLDS if holds else Verdict.FAILS, measured, why, certain)


def decided(evidence: Evidence, margins: Sequence[Estimate], measured: str, why: str = "") -> Finding:
    """Judge a rule of several comparisons, each given as the margin by which it is met.

    It holds where every margin is clearly above 0, and fails where one is clearly below: by `CLEAR` standard errors. In
    between the texts cannot decide it.
    """
    if any(margin.value <= -CLEAR * margin.error for margin in margins):
        return Finding(Verdict.FAILS, measured, why)
    unclear = [margin for margin in margins if margin.value <= CLEAR * margin.error]
    if not unclear:
        return Finding(Verdict.HOLDS, measured, why)
    worst = min(unclear, key=lambda margin: abs(margin.value) / margin.error)
    doubt = (
        f"{evidence.texts:,} texts: {100 * abs(worst.value):.2g} points from the rule's limit, less than two standard "
        f"errors of {100 * worst.error:.2g} points"
    )
    return Finding(Verdict.UNDECIDED, measured, "; ".join(clause for clause in (why, doubt) if clause))


# Measures


def table(evidence: Evidence, name: str) -> Table:
    """A table of the evidence."""
    return evidence.tables[name]


def halves(values: Curve, n_layers: int) -> tuple[Estimate, Estimate]:
    """The means over the first and over the second half of the layers."""
    if n_layers < 2:
        raise NotApplicableError(ONE_LAYER)
    return values.part(last=n_layers // 2).mean, values.part(n_layers // 2 + 1).mean


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


def falling(curve: Callable[[Evidence, str], Curve], slack: float = 0.0) -> Judge:
    """Judge that a curve over layers falls with depth: at every layer unless there is a slack."""

    def judge(evidence: Evidence, norm: str) -> Finding:
        values = curve(evidence, norm)
        if len(values) < 2:
            raise NotApplicableError(ONE_LAYER)
        return decided(evidence, values.falling(slack), values.course(slack))

    return judge
