"""A run over a dataset: texts, computed by an engine, and kept as soon as they are done.

The numbers of a text depend on the text alone, and on a GPU also on the few short texts that are computed together with
it. Which these are follows from the lengths of all texts, so the numbers do not depend on who computes them or when. A
shard is a file of the texts that were done in the last seconds, so a run that is stopped loses little.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from identikit.errors import InputError
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.results.files import Damaged
from identikit.results.provenance import text_hash
from identikit.runs.engines import Engine, Local, RunJob, RunTask, TaskProgress, by_cost
from identikit.runs.store import PLAN, Store
from identikit.shapes import Tensor
from identikit.texts.text import EncodedText, Text

GROUP_TEXTS = 16  # texts that a GPU computes together: more gain little, and take longer than a second
GROUP_WORK = 1e11  # their tokens times the model's parameters: a larger model is busy with fewer
SHARD_SECONDS = 20.0  # what is done is written at least so often,
SHARD_SHARE = 0.1  # or after this share of the time that the run has taken,
SHARD_LEAST = 1.0  # but no more often than this many seconds,
WRITING = 10.0  # nor so often that writing takes a larger part than one in so many
SHARD_BYTES = 1 << 26
PART = "part-"
_SHARD = "shard-"

_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)

Numbers = dict[str, Tensor]


class Stored(NamedTuple):
    """What a stored tensor holds: a row `per` text or token, or any number of rows if that is None.

    The numbers are `real`, or else whole ones, or yes and no; real ones may be `undefined` (NaN).
    """

    per: Literal["text", "token"] | None = None
    real: bool = False
    undefined: bool = False

    def flaw(self, tensor: Tensor, lengths: Sequence[int]) -> str | None:
        """Say what is wrong with the tensor of texts of these lengths, if anything is."""
        rows = {"text": len(lengths), "token": sum(lengths)}.get(self.per or "")
        if rows is not None and (tensor.ndim == 0 or len(tensor) != rows):
            return f"has the shape {list(tensor.shape)}, and {rows} rows are expected"
        if tensor.dtype not in _DTYPES or tensor.is_floating_point() != self.real:
            return f"is stored as {tensor.dtype}"
        if self.real and not self.undefined and not tensor.isfinite().all():
            return "has numbers that are not finite"
        return None


@runtime_checkable
class TextJob(RunJob, Protocol):
    """What is computed for texts: `compute` is given a list of them, and returns named tensors."""

    @property
    def what(self) -> str:
        """What is counted, for showing progress."""
        ...

    @property
    def stored(self) -> Mapping[str, Stored]:
        """What each tensor holds, by name."""
        ...

    def cost(self, length: int) -> float:
        """Return about how long a text of this length takes, in any unit."""
        ...

    def merged(self, parts: Sequence[Numbers]) -> Numbers:
        """Return the tensors that have no row per text or token, of all parts together: exact, in whatever order."""
        ...


def together(model: Model) -> int:
    """Return how many texts are computed together at most: on a CPU each is computed separately, at little cost."""
    return 1 if model.device.type == "cpu" else GROUP_TEXTS


def groups_of(lengths: Sequence[int], most: int = 1, parameters: int = 1) -> list[tuple[int, ...]]:
    """Cut the numbers of texts into groups of at most `most` texts and, if they are several, `GROUP_WORK`."""
    groups: list[tuple[int, ...]] = []
    tokens = 0
    for number, length in enumerate(lengths):
        tokens += length
        if not groups or len(groups[-1]) == most or tokens * parameters > GROUP_WORK:
            groups.append(())
            tokens = length
        groups[-1] += (number,)
    return groups


@dataclass(frozen=True)
class Run:
    """Where a run's results are kept, what computes them, and where progress is reported.

    `part` is (i, n) for the i-th of n parts, counted from 1, of a run that is spread over several folders.
    """

    store: Store
    engine: Engine = field(default_factory=Local)
    part: tuple[int, int] | None = None
    progress: Progress = silent

    def mine(self, tasks: Sequence[RunTask]) -> list[RunTask]:
        """Return the tasks of this part: all parts take about as long."""
        if self.part is None:
            return list(tasks)
        index, count = self.part
        mine = by_cost(tasks)[index - 1 :: count]
        if not mine:
            raise InputError(
                f"--shard {index}/{count}: there is nothing for it to do, as the work can only be divided into "
                f"{len(tasks)}. Use at most {len(tasks)} shards."
            )
        return sorted(mine, key=lambda task: task.number)

    def texts(
        self,
        model: Model,
        job: TextJob,
        texts: Sequence[Text],
        encoded: Sequence[EncodedText],
        *,
        most: int = 1,
        before: Callable[[list[int]], None] = lambda missing: None,
    ) -> Numbers:
        """Return what a job computes for texts, at most `most` at a time; what the store holds is not computed again.

        `encoded` are the texts as tokens. Rows are in the order of the texts; a part of a run has only its own.
        `before` is called with the lengths of the texts that are missing, before any is computed.
        """
        shards = _Shards(self.store, model, job, encoded)
        mine = self.mine(shards.tasks(most))
        numbers = [number for task in mine for number in task.given]
        with self.store.held():
            stored = shards.load()
            self.store.write_json(PLAN, {"texts": numbers, "tokens": shards.tokens(numbers)})
            left = {task.number: tuple(number for number in task.given if number not in stored) for task in mine}
            tasks = []
            for task in mine:
                if left[task.number]:
                    tasks.append(replace(task, given=[texts[number] for number in left[task.number]]))
            if tasks:
                before([shards.lengths[number] for task in tasks for number in left[task.number]])
            done = shards.tokens(stored)
            told = _token_progress(self.progress, job.what, done, done + sum(map(shards.tokens, left.values())))
            try:
                with closing(self.engine.run(model, job, tasks, told)) as results:
                    for task, tensors in results:
                        shards.add(left[task.number], tensors)
                        told(task, shards.tokens(left[task.number]))
            finally:
                shards.write()
        return shards.ordered()

    def parts(
        self,
        model: Model,
        job: RunJob,
        names: Mapping[str, object],
        *,
        what: str,
        before: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """Return what a job computes for each named part, as JSON can hold it; what the store holds is not computed.

        `before` is called before anything is computed, if something is.
        """
        with self.store.held():
            kept = {name: self.store.usable(_part_file(name), self.store.read_json) for name in names}
            computed = {name: value for name, value in kept.items() if value is not None}
            name_of = list(names)
            tasks = self.mine([RunTask(number, given) for number, given in enumerate(names.values())])
            self.store.write_json(PLAN, {"parts": [name_of[task.number] for task in tasks]})
            missing = [task for task in tasks if name_of[task.number] not in computed]
            if missing:
                before()
            self.progress(what, len(names) - len(missing), len(names))
            with closing(self.engine.run(model, job, missing, lambda task, done: None)) as results:
                for task, value in results:
                    name = name_of[task.number]
                    model.check_unchanged()
                    self.store.write_json(_part_file(name), value)
                    computed[name] = value
                    self.progress(what, len(computed), len(names))
        return [computed[name] for name in names if name in computed]


def _token_progress(progress: Progress, what: str, done_before: int, total: int) -> TaskProgress:
    """Return what reports how many tokens of the whole dataset are done: those done before, and those of each task."""
    done_of: dict[int, int] = defaultdict(int)
    whole = done_before

    def told(task: RunTask, done: int) -> None:
        nonlocal whole
        whole += done - done_of[task.number]
        done_of[task.number] = done
        progress(what, whole, total)

    progress(what, whole, total)
    return told


class _Shards:
    """What is known of each text: read from a folder's shards, or just computed; then it is written every few seconds.

    `numbers` are always those of texts; `held` has the tensors of each shard.
    """

    def __init__(self, store: Store, model: Model, job: TextJob, encoded: Sequence[EncodedText]):
        self.store = store
        self.model = model
        self.fingerprint = model.fingerprint
        self.job = job
        self.encoded = encoded
        self.lengths = [len(text) for text in encoded]
        self.held: dict[tuple[int, ...], Numbers] = {}
        self.waiting: dict[tuple[int, ...], Numbers] = {}
        self.bytes = 0
        self.begun = time.monotonic()
        self.started = self.begun  # with what is waiting
        self.writing = 0.0  # how long it took the last time

    def tokens(self, numbers: Iterable[int]) -> int:
        return sum(self.lengths[number] for number in numbers)

    def tasks(self, most: int) -> list[RunTask]:
        """Return groups of at most `most` texts as tasks, each with the numbers of its texts."""
        parameters = sum(parameter.numel() for parameter in self.model.hf.parameters())
        tasks = []
        for place, group in enumerate(groups_of(self.lengths, most, parameters)):
            tasks.append(RunTask(place, group, sum(self.job.cost(self.lengths[number]) for number in group)))
        return tasks

    # What is stored

    def load(self) -> set[int]:
        """Read the shards of the folder, and return which texts they hold; unusable ones are removed with a warning."""
        done: set[int] = set()
        for file in shard_files(self.store.names()):
            if (found := self.store.usable(file, lambda name: self._read(name, done))) is not None:
                numbers, tensors = found
                self.held[numbers] = tensors
                done.update(numbers)
        return done

    def _read(self, file: str, done: Collection[int]) -> tuple[tuple[int, ...], Numbers]:
        """Return which texts one shard holds, and their tensors, or raise `Damaged`."""
        tensors, about = self.store.read_tensors(file)
        numbers = texts_held(about)
        if len({*numbers} - {*done}) < len(numbers):
            raise Damaged("it holds a text that is there already")
        if not {*numbers} <= {*range(len(self.lengths))} or self._hash(numbers) != about.get("sha256"):
            raise Damaged("it holds other texts")
        if why := self._flaw(numbers, tensors):
            raise Damaged(why)
        if file != _shard_file(numbers):
            raise Damaged("its texts are not those that its name says")
        return numbers, tensors

    def _hash(self, numbers: Iterable[int]) -> str:
        """Return the SHA-256 of texts, or of what images and sounds hold, whatever their files are called."""
        return text_hash([self.encoded[number].text for number in numbers])

    def _flaw(self, numbers: Sequence[int], tensors: Numbers) -> str | None:
        """Say what is wrong with the tensors of some texts, if anything is: missing ones, rows, undefined numbers."""
        for name in self.job.stored:
            if name not in tensors:
                return f"{name!r} is missing"
        lengths = [self.lengths[number] for number in numbers]
        for name, tensor in tensors.items():
            declared = self.job.stored.get(name)
            why = "is not expected" if declared is None else declared.flaw(tensor, lengths)
            if why is not None:
                return f"{name!r} {why}"
        return None

    # What is computed

    def add(self, numbers: tuple[int, ...], tensors: Numbers) -> None:
        """Keep the tensors of finished texts, and write all that wait if it is time to."""
        if why := self._flaw(numbers, tensors):
            which = f"text {numbers[0]}" if len(numbers) == 1 else f"texts {numbers[0]} to {numbers[-1]}"
            raise InputError(f"Computing {which}: {why}.")
        self.waiting[numbers] = tensors
        self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        now = time.monotonic()
        due = min(SHARD_SECONDS, max(SHARD_LEAST, SHARD_SHARE * (now - self.begun), WRITING * self.writing))
        if now - self.started >= due or self.bytes >= SHARD_BYTES:
            self.write()

    def write(self) -> None:
        """Write what waits as one shard."""
        if self.waiting:
            before = time.monotonic()
            self.model.check_unchanged(self.fingerprint)
            numbers = tuple(number for part in self.waiting for number in part)
            tensors = self._joined(list(self.waiting.values()))
            about = {
                "texts": numbers,
                "sha256": self._hash(numbers),
                "tokens": self.tokens(numbers),
                "seconds": round(before - self.started, 3),
            }
            self.store.write_tensors(_shard_file(numbers), tensors, about)
            self.held[numbers] = tensors
            self.waiting = {}
            self.bytes = 0
            self.writing = time.monotonic() - before
        self.started = time.monotonic()

    def _joined(self, parts: Sequence[Numbers]) -> Numbers:
        """Return the tensors of several parts together, with the rows of one part after those of another."""
        rows = [name for name, stored in self.job.stored.items() if stored.per]
        return {name: torch.cat([part[name] for part in parts]) for name in rows} | self.job.merged(parts)

    def ordered(self) -> Numbers:
        """Return the tensors of all shards together, with rows in the order of the texts."""
        numbers = [number for part in self.held for number in part]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        sizes = {"text": [1] * len(numbers), "token": [self.lengths[number] for number in numbers]}
        whole = self._joined(list(self.held.values()))
        for name, tensor in whole.items():
            declared = self.job.stored.get(name)
            if declared is not None and declared.per is not None:
                rows = tensor.split(sizes[declared.per])
                whole[name] = torch.cat([rows[place] for place in order])
        return whole


def _shard_file(numbers: Iterable[int]) -> str:
    return f"{_SHARD}{min(numbers):06d}.safetensors"


def shard_files(names: Sequence[str]) -> list[str]:
    """Return the shards among a folder's files."""
    return [name for name in names if name.startswith(_SHARD) and name.endswith(".safetensors")]


def texts_held(about: Mapping[str, object]) -> tuple[int, ...]:
    """Return the numbers of the texts that a shard says it holds, or raise `Damaged`."""
    numbers = about.get("texts") if isinstance(about, Mapping) else None
    if not isinstance(numbers, list) or not numbers or not all(type(number) is int for number in numbers):
        raise Damaged("it does not say which texts it holds")
    return tuple(numbers)


def restored_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row that `plain` was given, with NaN for what is undefined."""
    return {name: math.nan if value is None else value for name, value in row.items()}


def part_folder(index: int, number: int) -> str:
    """Return the folder of the `index`-th of `number` shards of a run, within the run's own."""
    return f"shard-{index:04d}-of-{number:04d}"


def _part_file(name: str) -> str:
    return f"{PART}{name}.json"
