"""What figures and claims are read from: the tables of a model on a dataset, and the facts about the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from identikit.maths.mixing import first_middle_last

Table = Any  # a pandas DataFrame or Series: pandas annotates what it returns with everything that might come back
SHARES = (0.5, 0.8, 0.9, 1.0)  # of the training data, in the experiment of Appendix B.2


@dataclass(frozen=True)
class Subject:
    """A model as far as figures and claims need to know it; `finetuned` names the one it is compared with."""

    model: str
    n_layers: int
    n_heads: int
    d_value: int
    causal: bool
    finetuned: str | None = None

    @property
    def named_layers(self) -> tuple[int, int, int, int]:
        """The layers that stand for the paper's 1, 6, 11 and 12: first, middle, last but one, last; from 1."""
        first, middle, last = first_middle_last(self.n_layers)
        return first + 1, middle + 1, max(last, 1), last + 1


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
