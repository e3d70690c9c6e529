"""What figures are drawn from and claims judged on: facts about a model, and its tables on a dataset."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from identikit.maths.mixing import first_middle_last

Table = Any  # a pandas DataFrame or Series: pandas annotates what it returns with everything that might come back


@dataclass(frozen=True)
class Subject:
    """The facts about a model that figures and claims use; `finetuned` names the one it is compared with."""

    model: str
    n_layers: int
    d_value: int
    causal: bool
    finetuned: str | None = None

    @property
    def named_layers(self) -> dict[int, int]:
        """The layers in place of the paper's 1, 6, 11 and 12, counted from 1: first, middle, last but one and last."""
        first, middle, last = first_middle_last(self.n_layers)
        return {1: first + 1, 6: middle + 1, 11: max(last, 1), 12: last + 1}

    def layers_within(self, start: float, end: float) -> list[int]:
        """Return the layers that lie wholly between two depths from 0 to 1; layer l goes from (l − 1)/n to l/n.

        However few layers there are, a range that starts at 0 has the first, and one that ends at 1 the last.
        """
        n = self.n_layers
        layers = {layer for layer in range(1, n + 1) if (layer - 1) / n >= start and layer / n <= end}
        layers |= {1} if start == 0 else set()
        layers |= {n} if end == 1 else set()
        return sorted(layers)

    def stand_in(self, *paper_layers: int) -> str:
        """Return a clause on which layers stand for the paper's; empty where they are the same."""
        differ = [layer for layer in paper_layers if self.named_layers[layer] != layer]
        if not differ:
            return ""
        layers = list(dict.fromkeys(str(self.named_layers[layer]) for layer in differ))
        stand = "layers {} of {} stand" if len(layers) > 1 else "layer {} of {} stands"
        return f"{stand.format(' and '.join(layers), self.n_layers)} for the paper's {' and '.join(map(str, differ))}"


@dataclass(frozen=True)
class Evidence:
    """The tables of a model on one dataset, by name ("correlation", "own frobenius", "rates", …).

    Layers and heads in tables count from 1. `texts` and `tokens` are numbers of them, and `seed` is that of folds and
    probes. A claim on contributions is judged under `norm`.
    """

    subject: Subject
    data: str
    texts: int
    tokens: int
    seed: int
    tables: Mapping[str, Table]
    norm: str = ""

    def under_norm(self, name: str) -> Table:
        """Return a table of contributions ("own", "tags", …) under `norm`."""
        return self.tables[f"{name} {self.norm}"]

    @property
    def label(self) -> str:
        """The label of a figure: model, data, n and seed."""
        against = f" against {self.subject.finetuned}" if self.subject.finetuned else ""
        n = f"n = {self.texts:,} texts, {self.tokens:,} tokens"
        return f"{self.subject.model}{against} · {self.data} · {n} · seed {self.seed}"
