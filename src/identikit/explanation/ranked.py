"""What each measure says of a text: how much every output token takes from every input token.

Measures go by the names under which they are declared: the readings of attention, and the attributions.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from identikit.attention.agreement import Given, Ranking, of_function, overall
from identikit.attention.effective import captured_attention
from identikit.attention.measure import MeasuredText
from identikit.attention.readings import READINGS
from identikit.attribution.attribute import attribute
from identikit.attribution.request import Request
from identikit.attribution.result import TokenAttribution
from identikit.explanation.replaced import ReplacedText
from identikit.shapes import Float, Tensor

LEAVE_ONE_OUT = "leave one out"
NAMES = (TokenAttribution.kind, *READINGS, LEAVE_ONE_OUT)
"""The measures that go by a name."""

BASELINES = ("random", "reversed")
"""What every measure is compared with: orders that are drawn, and leave one out from its weakest source on."""

DRAWS = 5
"""Of the random baseline in each text."""


@dataclass(frozen=True)
class TextRankings:
    """The rankings of a text by each measure, as its model makes them, and by the baselines.

    `seed` is that of random orders, and `attribution` what is asked of token attribution. Without `bounded`, the
    readings of attention come without their ranges.
    """

    text: ReplacedText
    measures: Mapping[str, Given]
    seed: int
    attribution: Request
    bounded: bool = False

    def every(self) -> dict[str, list[Ranking]]:
        """Return what each measure says: one ranking, but several of the random baseline."""
        rankings = {name: [self._of(name, given)] for name, given in self.measures.items()}
        n = len(self.text.reading.tokens)
        generator = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, self.text.batch.tokens)).encode()))
        drawn = torch.rand(DRAWS, n, n, dtype=torch.float64, generator=generator)
        rankings["random"] = [_plain(scores) for scores in drawn]
        rankings["reversed"] = [_plain(-self.left_out)]
        return rankings

    @cached_property
    def left_out(self) -> Float[Tensor, "output input"]:
        """How far each output moves when one token is replaced; special tokens never are, and have 0."""
        n = len(self.text.reading.tokens)
        plain = (~self.text.batch.special[0]).nonzero().squeeze(1)
        moved = torch.zeros(n, n, dtype=torch.float64)
        moved[:, plain] = self.text.changes(torch.eye(n, dtype=torch.bool)[plain]).mT
        return moved

    @cached_property
    def _attention(self) -> MeasuredText:
        captured = captured_attention(self.text.reading).captured()
        return MeasuredText(captured, None, math.inf if self.bounded else 0.0)

    def _of(self, name: str, given: Given) -> Ranking:
        reading = self.text.reading
        model = reading.model
        if callable(given):
            return of_function(name, given, reading)
        if name == LEAVE_ONE_OUT:
            return _plain(self.left_out)
        if name == TokenAttribution.kind:
            return _plain(attribute([reading], self.attribution)[0].whole()[-1].mT)
        return overall(self._attention.measure(READINGS[name], model.attention_layers))


def _plain(scores: Tensor) -> Ranking:
    """Return scores that no alternative attention moves."""
    scores = scores.double().cpu()
    return Ranking(scores, scores, scores)
