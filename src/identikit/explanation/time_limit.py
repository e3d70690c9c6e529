"""What fits in the time that `explain` may take: the limit itself, and the attribution that is planned within it."""

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from identikit.attribution.attribute import attribute
from identikit.attribution.plan import affordable_probes, cost_warning, expected_seconds, is_affordable
from identikit.attribution.request import AttributionOptions, Request
from identikit.attribution.result import TokenAttribution
from identikit.errors import InputError, Unavailable
from identikit.maths.threads import one_thread_if_busy
from identikit.models.machine import format_duration
from identikit.models.text_run import TextRun
from identikit.progress import Progress

_OFFERED_PROBES = 16  # directions of the attribution that is offered where all of it takes too long
_GIVEN_UP = 2.0  # times the limit, after which attribution is stopped


@dataclass
class TimeLimit:
    """How many seconds a call may take, counted from `started` on the monotonic clock; None: no limit."""

    seconds: float | None
    started: float = field(default_factory=time.monotonic)

    def passed(self, share: float) -> bool:
        """Whether this share of the time has passed."""
        return self.seconds is not None and time.monotonic() - self.started > share * self.seconds

    def allows(self, seconds: float) -> bool:
        """Whether there is time for work that holds up the rest: a quarter of what is left, or a second."""
        return seconds <= max(1.0, self.left() / 4)

    def left(self) -> float:
        """Return the seconds that are left; the last step may overrun by half of all, so that it is not left out."""
        if self.seconds is None:
            return math.inf
        left = self.started + self.seconds - time.monotonic()
        return max(left, min(0.5 * self.seconds, left + 0.5 * self.seconds), 0.0)

    def reserving(self, seconds: float) -> "TimeLimit":
        """Return a limit that keeps `seconds` of this one free for later work."""
        return replace(self, started=self.started - seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock within this context."""
        begun = time.monotonic()
        yield
        self.started += time.monotonic() - begun


class _Overdue(Exception):  # noqa: N818 - it ends work, and is not an error
    """So much time has passed that the current work is given up."""


@dataclass
class PendingAttribution:
    """The attribution of a text: planned first, so that time is kept for it, and computed after the other answers.

    - `answer`: the result, or why there is none; None until it is known
    - `request`: what is to be computed, where there is no answer yet
    - `limit`: it is given up when twice this limit has passed; None: never
    - `reserved_seconds`: how much of the time limit is kept free for it
    """

    reading: TextRun
    answer: TokenAttribution | Unavailable | None = None
    request: Request | None = None
    limit: TimeLimit | None = None
    reserved_seconds: float = 0.0

    def expected_seconds(self) -> float:
        """Return about how long it takes to compute."""
        assert self.request is not None
        return expected_seconds(self.reading.model, [len(self.reading.tokens)], self.request)

    def compute(self, progress: Progress) -> TokenAttribution | Unavailable:
        """Return the answer, computed by the first call."""
        if self.answer is None:
            self.answer = self._computed(progress)
        return self.answer

    def _computed(self, progress: Progress) -> TokenAttribution | Unavailable:
        def report_in_time(step: str, done: int, total: int) -> None:
            if self.limit is not None and self.limit.passed(_GIVEN_UP):
                raise _Overdue
            progress(step, done, total)

        assert self.request is not None
        try:
            with one_thread_if_busy():  # cores may be busy by now
                return attribute([self.reading], self.request, progress=report_in_time)[0]
        except _Overdue:
            reason = "Attribution was stopped: it takes longer than expected, and twice the time limit has passed."
            return _unavailable(reason, self.reading)
        except InputError as refusal:
            return Unavailable(str(refusal))


def plan_attribution(reading: TextRun, probes: int | str | None, limit: TimeLimit) -> PendingAttribution:
    """Choose how to attribute a text, and reserve the time that it takes; leave it out where it does not fit.

    Attribution of a few seconds is computed whatever the clock says, and so is what a caller requests by `probes`.
    """
    model = reading.model
    n = len(reading.tokens)
    seconds = 0.0
    try:
        request = AttributionOptions(affordable_probes(model, n) if probes is None else probes).checked(model)
        if not is_affordable(model, n, request):
            seconds = expected_seconds(model, [n], request)
            if probes is None and seconds > limit.left():
                too_long = f"more than is left of the time limit (seconds={limit.seconds:g})"
                return PendingAttribution(
                    reading, _unavailable(f"Attribution takes about {format_duration(seconds)}, {too_long}.", reading)
                )
        if warning := cost_warning(model, [n], request):
            warnings.warn(warning, stacklevel=4)
    except InputError as refusal:
        return PendingAttribution(reading, _unavailable(str(refusal), reading))
    return PendingAttribution(
        reading, request=request, limit=limit if probes is None else None, reserved_seconds=seconds
    )


def _unavailable(reason: str, reading: TextRun) -> Unavailable:
    """Return why attribution is left out, and which part of it takes less: the last token, and fewer layers."""
    model = reading.model
    n = len(reading.tokens)
    probes = min(_OFFERED_PROBES, model.d_input)
    offers = []
    for layers in dict.fromkeys((model.n_layers, max(1, model.n_layers // 4))):
        with suppress(InputError):
            request = AttributionOptions(probes=probes).checked(model, list(range(layers)))
            seconds = expected_seconds(model, [n], replace(request, targets=(n - 1,)))
            only_layers = f", layers=range({layers})" if layers < model.n_layers else ""
            call = f"`token_attribution(model, text, targets=[{n - 1}], probes={probes}{only_layers})`"
            offers.append(f"{call} takes about {format_duration(seconds)}")
    return Unavailable(f"{reason} Of the last token alone, {'; '.join(offers)}." if offers else reason)
