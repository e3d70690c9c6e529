"""What figures and claims are read from: the tables of a model on a dataset, and the facts about the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from identikit.maths.mixing import first_middle_last

Table = Any  # a pandas DataFrame or Series: pandas annotates what it returns with everything that might come back


@dataclass(frozen=True)
class Subject:
    """A model as far as figures and claims need to know it; `finetuned` names the one it is compared with."""

    model: str
    n_layers: int
    d_value: int
    causal: bool
    finetuned: str | None = None

    @property
    def named_layers(self) -> dict[int, int]:
        """The layers that stand for the paper's 1, 6, 11 and 12: first, middle, last but one, last; from 1."""
        first, middle, last = first_middle_last(self.n_layers)
        return {1: first + 1, 6: middle + 1, 11: max(last, 1), 12: last + 1}

    def layers_within(self, start: float, end: float) -> list[int]:
        """The layers that lie wholly in a part of the depth, which goes from 0 to 1: layer l from (l − 1)/n to l/n.

        However few there are, a part that starts at 0 has the first layer, and one that ends at 1 the last.
        """
        n = self.n_layers
        ends = {1 if start == 0 else None, n if end == 1 else None}
        return [one for one in range(1, n + 1) if one in ends or ((one - 1) / n >= start and one / n <= end)]

    def stand_in(self, *papers: int) -> str:
        """A clause that says which layers stand for the paper's; empty where they are the same."""
        other = {paper: self.named_layers[paper] for paper in papers if self.named_layers[paper] != paper}
        if not other:
            return ""
        layers = list(dict.fromkeys(map(str, other.values())))
        stand = "layers {} of {} stand" if len(layers) > 1 else "layer {} of {} stands"
        return f"{stand.format(' and '.join(layers), self.n_layers)} for the paper's {' and '.join(map(str, other))}"


@dataclass(frozen=True)
class Evidence:
    """The tables that were computed on one dataset, by name ("correlation", "own frobenius", "rates", …).

    Layers and heads in tables count from 1. `texts`, `tokens`: how many there are; `seed`: of folds and probes; `norm`:
    the one under which a claim on contributions is judged.
    """

    subject: Subject
    data: str
    texts: int
    tokens: int
    seed: int
    tables: Mapping[str, Table]
    norm: str = ""

    def under_norm(self, name: str) -> Table:
        """Return a table of contributions ("own", "tags", …) under the norm at hand."""
        return self.tables[f"{name} {self.norm}"]

    @property
    def label(self) -> str:
        """What every figure says of itself: model, data, n and seed."""
        against = f" against {self.subject.finetuned}" if self.subject.finetuned else ""
        n = f"n = {self.texts:,} texts, {self.tokens:,} tokens"
        return f"{self.subject.model}{against} · {self.data} · {n} · seed {self.seed}"
