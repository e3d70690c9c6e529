"""A run over a dataset: blocks of texts, computed by an engine, and kept as soon as they are done.

A block is a fixed range of texts, read together: which texts share a block depends on nothing but their lengths, so the
numbers do not depend on who computes them or when. A shard is a file of the blocks that were done in the last seconds,
so a run that is stopped loses little, however long a text takes.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from identikit.errors import InputError
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.results.files import Damaged
from identikit.results.provenance import text_hash
from identikit.runs.engines import Engine, Local, RunJob, RunTask, TaskProgress
from identikit.runs.store import PLAN, Store
from identikit.shapes import Tensor
from identikit.texts.text import Text

BLOCK_TEXTS = 32
BLOCK_TOKENS = 4096
SHARD_SECONDS = 20.0
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
        """Say what is wrong with the tensor of a block of texts of these lengths, if anything is."""
        rows = {"text": len(lengths), "token": sum(lengths)}.get(self.per or "")
        if rows is not None and (tensor.ndim == 0 or len(tensor) != rows):
            return f"has the shape {list(tensor.shape)}, and {rows} rows are expected"
        if tensor.dtype not in _DTYPES or tensor.is_floating_point() != self.real:
            return f"is stored as {tensor.dtype}"
        if self.real and not self.undefined and not tensor.isfinite().all():
            return "has numbers that are not finite"
        return None


@runtime_checkable
class BlockJob(RunJob, Protocol):
    """What is computed for each block: `compute` is given a list of texts, and returns named tensors."""

    @property
    def what(self) -> str:
        """What is counted, for showing progress."""
        ...

    @property
    def stored(self) -> Mapping[str, Stored]:
        """What each tensor holds, by name.

        A name that ends with `*` stands for any tensors whose names begin so; all others have to be there.
        """
        ...

    def cost(self, length: int) -> float:
        """Return about how long a text of this length takes, in any unit."""
        ...


@dataclass(frozen=True)
class TextBlock:
    """A range of texts that are read together."""

    number: int
    texts: tuple[Text, ...] = field(repr=False)
    lengths: tuple[int, ...]

    @property
    def hash(self) -> str:
        """The SHA-256 of the texts."""
        return text_hash(list(self.texts))

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return sum(self.lengths)


def blocks_of(texts: Sequence[Text], lengths: Sequence[int], most: int | None = None) -> list[TextBlock]:
    """Cut texts into blocks of at most `most` texts (`BLOCK_TEXTS`) and, if they are several, `BLOCK_TOKENS` tokens."""
    most = most or BLOCK_TEXTS
    cuts = [0]
    tokens = 0
    for place, length in enumerate(lengths):
        if place > cuts[-1] and (place - cuts[-1] == most or tokens + length > BLOCK_TOKENS):
            cuts.append(place)
            tokens = 0
        tokens += length
    ends = [*cuts[1:], len(texts)]
    return [
        TextBlock(number, tuple(texts[first:last]), tuple(lengths[first:last]))
        for number, (first, last) in enumerate(zip(cuts, ends, strict=True))
    ]


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
        """Return the tasks of this part."""
        if self.part is None:
            return list(tasks)
        index, count = self.part
        mine = [task for task in tasks if task.number % count == index - 1]
        if not mine:
            raise InputError(
                f"--shard {index}/{count}: there is nothing for it to do, as the run has only {len(tasks)} blocks of "
                f"texts. Use at most {len(tasks)} shards."
            )
        return mine

    def blocks(
        self,
        model: Model,
        job: BlockJob,
        blocks: Sequence[TextBlock],
        *,
        before: Callable[[list[TextBlock]], None] = lambda missing: None,
    ) -> list[Numbers]:
        """Return what a job computes for each block; what the store holds is not computed again.

        `before` is called with the blocks that are missing, before any is computed.
        """
        with self.store:
            computed = dict(_kept_blocks(self.store, job, blocks))
            tasks = [RunTask(block.number, list(block.texts), sum(map(job.cost, block.lengths))) for block in blocks]
            mine = self.mine(tasks)
            index, count = self.part or (1, 1)
            plan = {
                "blocks": [index - 1, len(blocks), count],  # as of a range
                "texts": sum(len(task.given) for task in mine),
                "tokens": sum(blocks[task.number].tokens for task in mine),
            }
            self.store.write_json(PLAN, plan)
            missing = [task for task in mine if task.number not in computed]
            if missing:
                before([blocks[task.number] for task in missing])
            shards = _Shards(self.store, model)
            stored = sum(blocks[number].tokens for number in computed)
            total = stored + sum(blocks[task.number].tokens for task in missing)
            told = _token_progress(self.progress, job.what, stored, total)
            try:
                with closing(self.engine.run(model, job, missing, told)) as results:
                    for task, numbers in results:
                        block = blocks[task.number]
                        if why := flaw(job, block, numbers):
                            first = sum(len(earlier.texts) for earlier in blocks[: block.number])
                            last = first + len(block.texts) - 1
                            raise InputError(f"Computing texts {first} to {last}: {why}.")
                        computed[task.number] = numbers
                        shards.add(block, numbers)
                        told(task, block.tokens)
            finally:
                shards.write()
        return [computed[number] for number in sorted(computed)]

    def parts(
        self,
        model: Model,
        job: RunJob,
        names: Mapping[str, Any],
        *,
        what: str,
        before: Callable[[], Any] = lambda: None,
    ) -> list[Any]:
        """Return what a job computes for each named part, as JSON can hold it; what the store holds is not computed.

        `before` is called before anything is computed, if something is.
        """
        with self.store:
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
    """Collects finished blocks, and writes those of some seconds to one file."""

    def __init__(self, store: Store, model: Model):
        self.store = store
        self.model = model
        self.fingerprint = model.fingerprint
        self.blocks: dict[int, tuple[TextBlock, Numbers]] = {}
        self.bytes = 0
        self.started = time.monotonic()

    def add(self, block: TextBlock, numbers: Numbers) -> None:
        self.blocks[block.number] = block, numbers
        self.bytes += sum(tensor.nbytes for tensor in numbers.values())
        if time.monotonic() - self.started >= SHARD_SECONDS or self.bytes >= SHARD_BYTES:
            self.write()

    def write(self) -> None:
        if self.blocks:
            self.model.check_unchanged(self.fingerprint)
            tensors: Numbers = {}
            for number, (_, numbers) in self.blocks.items():
                tensors |= {f"{number}/{name}": tensor for name, tensor in numbers.items()}
            about = {
                "blocks": {str(number): block.hash for number, (block, _) in self.blocks.items()},
                "texts": sum(len(block.texts) for block, _ in self.blocks.values()),
                "tokens": sum(block.tokens for block, _ in self.blocks.values()),
                "seconds": round(time.monotonic() - self.started, 3),
            }
            self.store.write_tensors(_shard_file(self.blocks), tensors, about)
            self.blocks = {}
            self.bytes = 0
        self.started = time.monotonic()


def _shard_file(blocks: Iterable[int]) -> str:
    return f"{_SHARD}{min(blocks):06d}.safetensors"


def shard_files(names: Sequence[str]) -> list[str]:
    """Return the shards among a folder's files."""
    return [name for name in names if name.startswith(_SHARD) and name.endswith(".safetensors")]


def _kept_blocks(store: Store, job: BlockJob, blocks: Sequence[TextBlock]) -> Iterator[tuple[int, Numbers]]:
    """Yield the stored blocks; a shard that is damaged or belongs to other texts is removed with a warning."""
    for file in shard_files(store.names()):
        yield from (store.usable(file, lambda name: _held(store, name, job, blocks)) or {}).items()


def _held(store: Store, file: str, job: BlockJob, blocks: Sequence[TextBlock]) -> dict[int, Numbers]:
    """Return the blocks of one shard, or raise `Damaged`."""
    tensors, about = store.read_tensors(file)
    hashes = about.get("blocks") if isinstance(about, dict) else None
    if not isinstance(hashes, dict) or not hashes:
        raise Damaged("it holds no block")
    held: dict[int, Numbers] = {}
    for key, digest in hashes.items():
        number = int(key) if key.isdecimal() else len(blocks)
        if number >= len(blocks) or blocks[number].hash != digest:
            raise Damaged("it holds other texts")
        prefix = f"{key}/"
        held[number] = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
        if why := flaw(job, blocks[number], held[number]):
            raise Damaged(why)
    if file != _shard_file(held):
        raise Damaged("its blocks are not those that its name says")
    return held


def flaw(job: BlockJob, block: TextBlock, numbers: Numbers) -> str | None:
    """Say what is wrong with the numbers of a block, if anything is: missing tensors, rows, or undefined numbers."""
    for name in job.stored:
        if name not in numbers and not name.endswith("*"):
            return f"{name!r} is missing"
    for name, tensor in numbers.items():
        declared = next((declared for declared in job.stored if fnmatchcase(name, declared)), None)
        if declared is None:
            return f"{name!r} is not expected"
        if why := job.stored[declared].flaw(tensor, block.lengths):
            return f"{name!r} {why}"
    return None


def restored_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row that `plain` was given, with NaN for what is undefined."""
    return {name: math.nan if value is None else value for name, value in row.items()}


def part_folder(index: int, number: int) -> str:
    """Return the folder of the `index`-th of `number` shards of a run, within the run's own."""
    return f"shard-{index:04d}-of-{number:04d}"


def _part_file(name: str) -> str:
    return f"{PART}{name}.json"
