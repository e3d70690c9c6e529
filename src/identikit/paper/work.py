"""One model on the texts of one dataset: what inputs are computed from, and how much is computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from identikit.attribution.dataset import Tagger
from identikit.models.model import Model
from identikit.paper.texts import PIECES
from identikit.progress import Progress, silent
from identikit.runs.engines import Engine, Local
from identikit.texts.text import Text
from identikit.tokens.experiments import fit_maps, measure
from identikit.tokens.identify import hidden_states
from identikit.tokens.maps import FittedMap
from identikit.tokens.protocol import MapChoice, Settings, Task
from identikit.tokens.states import HiddenStates

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Effort:
    """How much is computed.

    - `probes`: directions of attribution; `rows`: rows of attention per text that are bounded
    - `folds`, `learning_rates`, `epochs`: of the learned maps
    """

    probes: int | str = "exact"
    folds: int = 10
    learning_rates: tuple[float, ...] = Settings().learning_rates
    epochs: int = Settings().epochs
    rows: int = 40


PAPER = Effort()
SAMPLE = Effort(probes=16, folds=3, learning_rates=(0.001,), epochs=30)


@dataclass(frozen=True)
class Work:
    """One model on the texts of one dataset."""

    model: Model
    data: str
    texts: list[Text]
    effort: Effort = PAPER
    precision: str = "full"
    seed: int = 0
    tagger: Tagger | None = None
    engine: Engine = field(default_factory=Local, compare=False)
    progress: Progress = field(default=silent, compare=False)

    @cached_property
    def lengths(self) -> list[int]:
        """How many tokens of each text are read."""
        return [len(text) for text in self.model.encode(self.texts, truncate=True, max_tokens=PIECES)]

    @cached_property
    def states(self) -> HiddenStates:
        """The hidden vectors of all texts."""
        return hidden_states(self.model, self.texts, truncate=True, max_tokens=PIECES, progress=self.progress)

    def __getstate__(self) -> dict[str, object]:
        """Leave out what stays in this process: the model, what was read with it, the engine and the progress bar."""
        stays = {"model": None, "engine": Local(), "progress": silent}
        return {entry.name: getattr(self, entry.name) for entry in fields(self)} | stays

    def fit(self, choice: MapChoice, tasks: list[Task], folds: int) -> list[FittedMap]:
        """Fit maps to the hidden vectors, for all tasks together."""
        settings = Settings(
            folds=folds,
            seed=self.seed,
            learning_rates=self.effort.learning_rates,
            epochs=self.effort.epochs,
            device=str(self.model.device),
        )
        return fit_maps(self.states, choice, tasks=tasks, settings=settings, progress=self.progress).maps

    def rates(
        self, maps: list[FittedMap], test_layers: Sequence[int] | None = None, splits: Sequence[str] = ("test",)
    ) -> Rows:
        """Return how often maps recover tokens, as plain rows."""
        device = str(self.model.device)
        rates = measure(self.states, maps, test_layers=test_layers, splits=splits, device=device)
        return [rate._asdict() for rate in rates]
