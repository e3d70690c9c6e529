"""What a claim and a finding are, how a claim is decided from uncertain numbers, and measures that claims share.

A claim is one function: it takes the evidence and returns a finding. Its docstring has the words, and after "Holds
if:" its rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from identikit.paper.claims.estimates import Curve, Measurement
from identikit.paper.evidence import Evidence

ONE_LAYER = "the model has only one layer"
BESIDE = "Beside the paper"  # the section of our own claims
NOTHING = "–"  # what stands for a measurement where there is none
EXACT = 1
AVERAGED = 20
RARE = 100
LEARNED = 200
WHOLE = 0
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
        verdict.symbol = symbol
        verdict.style = style
        verdict.kind = kind
        verdict.counted = counted
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


Judge = Callable[[Evidence], Finding]


@dataclass(frozen=True)
class Basis:
    """What claims rest on.

    - `needs`: names of tables, "own {norm}" where there is one for each norm
    - `data`: the paper's dataset, "" where the texts are the paper's own; `only`: whether no other dataset will do
    - `texts`: how many texts it takes (a key of `TEXTS`); with fewer a claim is undecided
    """

    needs: tuple[str, ...]
    data: str
    texts: int
    only: bool = False


@dataclass(frozen=True, kw_only=True)
class Claim(Basis):
    """A claim of the paper.

    - `where`: the place in the paper, to the figure
    - `words`: the claim; `paper`: what the paper reports; `rule`: when it holds
    - `judge`: takes the evidence; call it through `catalogue.judge`
    """

    name: str
    where: str
    words: str
    paper: str
    rule: str
    judge: Judge

    @property
    def section(self) -> str:
        """The section of the paper, under which it stands in the table of claims."""
        return self.where.split(",")[0].split(".")[0]

    @property
    def by_norm(self) -> bool:
        """Whether it rests on contributions, and so is judged under each norm."""
        return any("{norm}" in need for need in self.needs)


class Claims(dict[str, Claim]):
    """The claims of a module by name, in order; an instance is the decorator that adds one."""

    def __call__(
        self, name: str, where: str, basis: Basis, *, paper: str, words: str = "", rule: str = ""
    ) -> Callable[[Judge], Judge]:
        """Add a function as a claim; one that judges several has `words` and `rule` here instead of its docstring."""

        def add(judge: Judge) -> Judge:
            paragraphs = [" ".join(paragraph.split()) for paragraph in (judge.__doc__ or "").split("\n\n")]
            self[name] = Claim(
                **vars(basis),
                name=name,
                where=where,
                words=words or paragraphs[0].removesuffix("."),
                paper=paper,
                rule=rule or paragraphs[1].removeprefix("Holds if: ").removesuffix("."),
                judge=judge,
            )
            return judge

        return add


class NotApplicableError(Exception):
    """The model or its texts cannot have what a claim is about; the message says why."""


# Deciding

CLEAR = 2.0  # how many standard errors a number must be away from what it is compared with


def finding(holds: object, measured: str, why: str = "", *, certain: bool = False) -> Finding:
    """A finding of a claim whose tables do not say how uncertain they are."""
    return Finding(Verdict.HOLDS if holds else Verdict.FAILS, measured, why, certain)


def clauses(*words: str) -> str:
    """Join those clauses that say something."""
    return "; ".join(clause for clause in words if clause)


def decided(evidence: Evidence, margins: Sequence[Measurement], measured: str, why: str = "") -> Finding:
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
    return Finding(Verdict.UNDECIDED, measured, clauses(why, doubt))


def falls(evidence: Evidence, values: Curve, slack: float = 0.0) -> Finding:
    """Judge that a curve over layers falls with depth: at every layer unless there is a slack."""
    if len(values) < 2:
        raise NotApplicableError(ONE_LAYER)
    return decided(evidence, values.falling(slack), values.course(slack))


# Parts of the depth


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
    pairs = zip(named_layers(evidence, *papers), papers, strict=True)
    other = [(layer, paper) for layer, paper in pairs if layer != paper]
    if not other:
        return ""
    layers = list(dict.fromkeys(str(layer) for layer, _ in other))
    stand = "layers {} of {} stand" if len(layers) > 1 else "layer {} of {} stands"
    named = " and ".join(str(paper) for _, paper in other)
    return f"{stand.format(' and '.join(layers), evidence.subject.n_layers)} for the paper's {named}"
