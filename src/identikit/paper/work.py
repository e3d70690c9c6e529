"""One model on the texts of one dataset: what inputs are computed from, and how much is computed."""

from dataclasses import dataclass, field
from functools import cached_property

from identikit.attribution.dataset import Tagger
from identikit.models.model import Model
from identikit.paper.texts import PIECES
from identikit.progress import Progress, silent
from identikit.runs.engines import Engine, Local
from identikit.texts.text import EncodedText, Text
from identikit.tokens.dataset import TextStates
from identikit.tokens.protocol import Settings


@dataclass(frozen=True)
class PaperOptions:
    """How much is computed, and how.

    - `probes`: directions of attribution; `rows`: rows of attention per text that are bounded
    - `folds`, `learning_rates`, `epochs`: of the learned maps
    - `precision`: of products on a GPU; `seed`: the random seed for folds, directions and rows
    """

    probes: int | str = "exact"
    folds: int = 10
    learning_rates: tuple[float, ...] = Settings().learning_rates
    epochs: int = Settings().epochs
    rows: int = 40
    precision: str = "full"
    seed: int = 0


PAPER = PaperOptions()
SAMPLE = PaperOptions(probes=16, folds=3, learning_rates=(0.001,), epochs=30)


@dataclass(frozen=True)
class Work:
    """One model on the texts of one dataset; `out` is the folder of the run."""

    model: Model
    data: str
    texts: list[Text]
    out: str
    options: PaperOptions = PAPER
    tagger: Tagger | None = None
    engine: Engine = field(default_factory=Local, compare=False)
    progress: Progress = field(default=silent, compare=False)

    @cached_property
    def _encoded(self) -> list[EncodedText]:
        return self.model.encode(self.texts, truncate=True, max_tokens=PIECES)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens read from each text."""
        return [len(text) for text in self._encoded]

    @cached_property
    def tags(self) -> list[str] | None:
        """The part of speech of each token of all texts; None without a tagger."""
        if self.tagger is None:
            return None
        return [tag for text in self._encoded for tag in self.tagger(text)]

    @cached_property
    def states(self) -> TextStates:
        """The hidden vectors of all texts, which several inputs read."""
        return TextStates(tuple(self.texts), truncate=True, max_tokens=PIECES)
