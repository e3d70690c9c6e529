"""A run over a dataset: an engine computes texts, and their numbers are kept soon after they are done.

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
from identikit.runs.texts import compact
from identikit.shapes import Tensor
from identikit.texts.text import AnyText, EncodedText

GROUP_TEXTS = 16  # texts that a GPU computes together: more gain little, and take longer than a second
GROUP_WORK = 1e11  # their tokens times the model's parameters: a larger model is busy with fewer
SHARD_SECONDS = 20.0  # a shard is written at least this often,
SHARD_SHARE = 0.1  # or after this share of the time that the run has taken,
SHARD_LEAST = 1.0  # but no more often than this many seconds,
WRITING = 10.0  # and only after this many times the seconds that writing took
SHARD_BYTES = 1 << 26
PART = "part-"
_SHARD = "shard-"

_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)

Numbers = dict[str, Tensor]


class Stored(NamedTuple):
    """What a stored tensor holds: one row `per` text or token, or any number of rows if that is None.

    The numbers are `real`, or else whole ones, or yes and no; real ones may be `undefined` (NaN).
    """

    per: Literal["text", "token"] | None = None
    real: bool = False
    undefined: bool = False

    def flaw(self, tensor: Tensor, lengths: Sequence[int]) -> str | None:
        """Return what is wrong with the tensor of texts of these lengths; None if nothing is."""
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
        """What progress counts."""
        ...

    @property
    def stored(self) -> Mapping[str, Stored]:
        """What each tensor holds, by name."""
        ...

    def cost(self, length: int) -> float:
        """Return about how long a text of this length takes, in any unit."""
        ...

    def merged(self, parts: Sequence[Numbers], /) -> Numbers:
        """Merge the tensors without rows per text or token; the result must be exact, whatever the order of `parts`."""
        ...


def texts_per_group(model: Model) -> int:
    """Return how many texts are computed together at most: on a CPU only one, which costs little."""
    return 1 if model.device.type == "cpu" else GROUP_TEXTS


def groups_of(lengths: Sequence[int], group_size: int = 1, parameters: int = 1) -> list[tuple[int, ...]]:
    """Cut the indices of texts into groups of at most `group_size` texts and, if they are several, `GROUP_WORK`."""
    groups: list[tuple[int, ...]] = []
    tokens = 0
    for index, length in enumerate(lengths):
        tokens += length
        if not groups or len(groups[-1]) == group_size or tokens * parameters > GROUP_WORK:
            groups.append(())
            tokens = length
        groups[-1] += (index,)
    return groups


@dataclass(frozen=True)
class Run:
    """Where a run's results are kept, what computes them, and where progress is reported.

    `portion` is (i, n) for the i-th of n portions, counted from 1, of a run that is spread over several folders.
    """

    store: Store
    engine: Engine = field(default_factory=Local)
    portion: tuple[int, int] | None = None
    progress: Progress = silent

    def tasks_of_portion(self, tasks: Sequence[RunTask]) -> list[RunTask]:
        """Return the tasks of this portion; all portions take about as long."""
        if self.portion is None:
            return list(tasks)
        index, count = self.portion
        selected = by_cost(tasks)[index - 1 :: count]
        if not selected:
            raise InputError(
                f"--shard {index}/{count}: there is nothing for it to do, as the work can only be divided into "
                f"{len(tasks)}. Use at most {len(tasks)} shards."
            )
        return sorted(selected, key=lambda task: task.number)

    def texts(
        self,
        model: Model,
        job: TextJob,
        texts: Sequence[AnyText],
        encoded: Sequence[EncodedText],
        *,
        group_size: int = 1,
        prepare: Callable[[list[int]], None] = lambda lengths: None,
    ) -> Numbers:
        """Return what a job computes for texts, at most `group_size` at a time; what the store holds is not computed.

        `encoded` are the texts as tokens. Rows are in the order of the texts; a portion of a run has only its own.
        `prepare` is called with the lengths of the texts that are missing, before any is computed.
        """
        shards = _Shards(self.store, model, job, encoded)
        tasks = self.tasks_of_portion(shards.tasks(group_size))
        indices = [index for task in tasks for index in task.content]
        with self.store.held():
            stored = shards.load()
            self.store.write_json(PLAN, {"texts": indices, "tokens": shards.tokens(indices)})
            missing: dict[int, tuple[int, ...]] = {}  # the texts of each task, by its number
            for task in tasks:
                if absent := tuple(index for index in task.content if index not in stored):
                    missing[task.number] = absent
            waiting = []
            for task in tasks:
                if task.number in missing:
                    content = [compact(texts[index], encoded[index]) for index in missing[task.number]]
                    waiting.append(replace(task, content=content))
            missing_indices = [index for absent in missing.values() for index in absent]
            if missing_indices:
                prepare([shards.lengths[index] for index in missing_indices])
            tokens_done = shards.tokens(stored)
            report = _token_progress(self.progress, job.what, tokens_done, tokens_done + shards.tokens(missing_indices))
            try:
                with closing(self.engine.run(model, job, waiting, report)) as results:
                    for task, tensors in results:
                        shards.add(missing[task.number], tensors)
                        report(task, shards.tokens(missing[task.number]))
            finally:
                shards.write()
        return shards.in_text_order()

    def parts(
        self,
        model: Model,
        job: RunJob,
        contents: Mapping[str, object],
        *,
        what: str,
        prepare: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """Return what a job computes for each named part, as JSON can hold it; what the store holds is not computed.

        `prepare` is called before anything is computed, if something is.
        """
        names = list(contents)
        with self.store.held():
            computed = {}
            for name in names:
                value = self.store.usable(_part_file(name), self.store.read_json)
                if value is not None:
                    computed[name] = value
            tasks = self.tasks_of_portion(
                [RunTask(number, content) for number, content in enumerate(contents.values())]
            )
            self.store.write_json(PLAN, {"parts": [names[task.number] for task in tasks]})
            missing = [task for task in tasks if names[task.number] not in computed]
            if missing:
                prepare()
            self.progress(what, len(names) - len(missing), len(names))
            with closing(self.engine.run(model, job, missing, lambda task, done: None)) as results:
                for task, value in results:
                    name = names[task.number]
                    model.check_unchanged()
                    self.store.write_json(_part_file(name), value)
                    computed[name] = value
                    self.progress(what, len(computed), len(names))
        return [computed[name] for name in names if name in computed]


def _token_progress(progress: Progress, what: str, tokens_before: int, total: int) -> TaskProgress:
    """Return what reports how many tokens of the whole dataset are done: those before, and those of each task."""
    tokens_of_task: dict[int, int] = defaultdict(int)
    tokens = tokens_before

    def report(task: RunTask, task_tokens: int) -> None:
        nonlocal tokens
        tokens += task_tokens - tokens_of_task[task.number]
        tokens_of_task[task.number] = task_tokens
        progress(what, tokens, total)

    progress(what, tokens, total)
    return report


class _Shards:
    """The numbers of each text: read from a folder's shards, or just computed, to be written every few seconds.

    Indices are those of texts. `by_texts` has the tensors of each shard, and `unwritten` those of finished tasks.
    """

    def __init__(self, store: Store, model: Model, job: TextJob, encoded: Sequence[EncodedText]):
        self.store = store
        self.model = model
        self.fingerprint = model.fingerprint
        self.job = job
        self.encoded = encoded
        self.lengths = [len(text) for text in encoded]
        self.by_texts: dict[tuple[int, ...], Numbers] = {}
        self.unwritten: dict[tuple[int, ...], Numbers] = {}
        self.unwritten_bytes = 0
        self.run_start = time.monotonic()
        self.shard_start = self.run_start
        self.write_seconds = 0.0  # of the last shard

    def tokens(self, indices: Iterable[int]) -> int:
        return sum(self.lengths[index] for index in indices)

    def tasks(self, group_size: int) -> list[RunTask]:
        """Return groups of at most `group_size` texts as tasks, each with the indices of its texts."""
        parameters = sum(parameter.numel() for parameter in self.model.hf.parameters())
        tasks = []
        for number, indices in enumerate(groups_of(self.lengths, group_size, parameters)):
            cost = sum(self.job.cost(self.lengths[index]) for index in indices)
            tasks.append(RunTask(number, indices, cost))
        return tasks

    # What is stored

    def load(self) -> set[int]:
        """Read the shards of the folder, and return which texts they hold; unusable ones are removed with a warning."""
        stored: set[int] = set()
        for file in shard_files(self.store.names()):
            shard = self.store.usable(file, lambda name: self._read(name, stored))
            if shard is not None:
                indices, tensors = shard
                self.by_texts[indices] = tensors
                stored.update(indices)
        return stored

    def _read(self, file: str, stored: Collection[int]) -> tuple[tuple[int, ...], Numbers]:
        """Return which texts one shard holds, and their tensors, or raise `Damaged`."""
        tensors, about = self.store.read_tensors(file)
        indices = texts_held(about)
        if len({*indices} - {*stored}) < len(indices):
            raise Damaged("it holds a text that is there already")
        if not {*indices} <= {*range(len(self.lengths))} or self._hash(indices) != about.get("sha256"):
            raise Damaged("it holds other texts")
        if flaw := self._flaw(indices, tensors):
            raise Damaged(flaw)
        if file != _shard_file(indices):
            raise Damaged("its texts are not those that its name says")
        return indices, tensors

    def _hash(self, indices: Iterable[int]) -> str:
        """Return the SHA-256 of texts, or of what images and sounds hold, whatever their files are called."""
        return text_hash([self.encoded[index].text for index in indices])

    def _flaw(self, indices: Sequence[int], tensors: Numbers) -> str | None:
        """Return what is wrong with the tensors of some texts; None if nothing is."""
        for name in self.job.stored:
            if name not in tensors:
                return f"{name!r} is missing"
        lengths = [self.lengths[index] for index in indices]
        for name, tensor in tensors.items():
            declared = self.job.stored.get(name)
            flaw = "is not expected" if declared is None else declared.flaw(tensor, lengths)
            if flaw is not None:
                return f"{name!r} {flaw}"
        return None

    # What is computed

    def add(self, indices: tuple[int, ...], tensors: Numbers) -> None:
        """Keep the tensors of finished texts, and write a shard if it is time to."""
        if flaw := self._flaw(indices, tensors):
            texts = f"text {indices[0]}" if len(indices) == 1 else f"texts {indices[0]} to {indices[-1]}"
            raise InputError(f"Computing {texts}: {flaw}.")
        self.unwritten[indices] = tensors
        self.unwritten_bytes += sum(tensor.nbytes for tensor in tensors.values())
        now = time.monotonic()
        due = min(SHARD_SECONDS, max(SHARD_LEAST, SHARD_SHARE * (now - self.run_start), WRITING * self.write_seconds))
        if now - self.shard_start >= due or self.unwritten_bytes >= SHARD_BYTES:
            self.write()

    def write(self) -> None:
        """Write what is finished as one shard."""
        if self.unwritten:
            now = time.monotonic()
            self.model.check_unchanged(self.fingerprint)
            indices = tuple(index for group in self.unwritten for index in group)
            tensors = self._join(list(self.unwritten.values()))
            about = {
                "texts": indices,
                "sha256": self._hash(indices),
                "tokens": self.tokens(indices),
                "seconds": round(now - self.shard_start, 3),
            }
            self.store.write_tensors(_shard_file(indices), tensors, about)
            self.by_texts[indices] = tensors
            self.unwritten = {}
            self.unwritten_bytes = 0
            self.write_seconds = time.monotonic() - now
        self.shard_start = time.monotonic()

    def _join(self, parts: Sequence[Numbers]) -> Numbers:
        """Return the tensors of several parts together, with the rows of one part after those of another."""
        row_names = [name for name, stored in self.job.stored.items() if stored.per]
        return {name: torch.cat([part[name] for part in parts]) for name in row_names} | self.job.merged(parts)

    def in_text_order(self) -> Numbers:
        """Return the tensors of all shards together, with rows in the order of the texts."""
        indices = [index for group in self.by_texts for index in group]
        order = sorted(range(len(indices)), key=indices.__getitem__)
        sizes = {"text": [1] * len(indices), "token": [self.lengths[index] for index in indices]}
        joined = self._join(list(self.by_texts.values()))
        for name, stored in self.job.stored.items():
            if stored.per is not None:
                rows = joined[name].split(sizes[stored.per])
                joined[name] = torch.cat([rows[row] for row in order])
        return joined


def _shard_file(indices: Iterable[int]) -> str:
    return f"{_SHARD}{min(indices):06d}.safetensors"


def shard_files(names: Sequence[str]) -> list[str]:
    """Return the shards among a folder's files."""
    return [name for name in names if name.startswith(_SHARD) and name.endswith(".safetensors")]


def texts_held(about: Mapping[str, object]) -> tuple[int, ...]:
    """Return the indices of the texts that a shard says it holds, or raise `Damaged`."""
    indices = about.get("texts") if isinstance(about, Mapping) else None
    if not isinstance(indices, list) or not indices or not all(type(index) is int for index in indices):
        raise Damaged("it does not say which texts it holds")
    return tuple(indices)


def restored_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as it was before `plain` made it fit for JSON: undefined numbers are NaN again, not None."""
    return {name: math.nan if value is None else value for name, value in row.items()}


def _part_file(name: str) -> str:
    return f"{PART}{name}.json"
