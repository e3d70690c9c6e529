"""One model on the texts of one dataset: what inputs are computed from, and how much is computed."""

from dataclasses import dataclass, field
from functools import cached_property

from identikit.attribution.dataset import Tagger
from identikit.models.model import Model
from identikit.paper.texts import PIECES
from identikit.progress import Progress, silent
from identikit.runs.engines import Engine, Local
from identikit.texts.text import Text
from identikit.tokens.dataset import TextStates
from identikit.tokens.protocol import Settings


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
    def tags(self) -> list[str] | None:
        """The part of speech of each token of all texts; None where there is no tagger."""
        if self.tagger is None:
            return None
        encoded = self.model.encode(self.texts, truncate=True, max_tokens=PIECES)
        return [tag for text in encoded for tag in self.tagger(text)]

    @cached_property
    def states(self) -> TextStates:
        """The hidden vectors of all texts, which several inputs read."""
        return TextStates(tuple(self.texts), truncate=True, max_tokens=PIECES)
