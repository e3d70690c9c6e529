"""Shards of texts, one after another, each kept as soon as it is done."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from identikit.errors import InputError
from identikit.progress import Progress, silent
from identikit.provenance import text_hash
from identikit.runs.store import Store
from identikit.shapes import Tensor
from identikit.text import Text

SHARD = 32  # texts

Compute = Callable[[list[Text], Progress], Mapping[str, Tensor]]


def remaining(lengths: Sequence[int], store: Store, *, size: int | None = None) -> list[int]:
    """Return the lengths of the texts whose shards, of `size` texts (None: `SHARD`), the store does not hold yet."""
    size = size or SHARD
    return [length for place, length in enumerate(lengths) if not store.has(_file(place // size))]


def _file(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


def run_shards(
    texts: list[Text],
    compute: Compute,
    store: Store,
    *,
    lengths: Sequence[int],
    what: str,
    size: int | None = None,
    progress: Progress = silent,
) -> Iterator[dict[str, Tensor]]:
    """Yield what `compute` returns for each shard of `size` texts (None: `SHARD`).

    Shards that the store holds are not computed again. `lengths` are the texts' numbers of tokens. `progress` is called
    with `what` and with tokens of the whole dataset: first with those in stored shards, then whenever `compute` reports
    how many tokens of its shard are done. A stored shard whose texts differ from today's is refused: the data changed
    under the run.
    """
    size = size or SHARD
    store.start()  # a folder that cannot be written to is refused before anything is computed
    total = sum(lengths)
    done = total - sum(remaining(lengths, store, size=size))
    progress(what, done, total)
    for number, first in enumerate(range(0, len(texts), size)):
        name, shard = _file(number), texts[first : first + size]
        digest = text_hash(shard)
        if store.has(name):
            tensors, about = store.read_tensors(name)
            if about.get("texts") != digest:
                raise InputError(
                    f"Cannot resume {store.folder}: the texts of {name} have changed since it was computed. Restore "
                    "the data, or choose another folder with --out."
                )
        else:
            tensors = dict(compute(shard, lambda _, some, __, before=done: progress(what, before + some, total)))
            store.write_tensors(name, tensors, {"texts": digest})
            done += sum(lengths[first : first + size])
        yield tensors
