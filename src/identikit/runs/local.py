"""Shards of texts, one after the other, each kept as soon as it is done."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from identikit.errors import InputError
from identikit.provenance import text_hash
from identikit.runs.store import Store
from identikit.shapes import Tensor
from identikit.text import Text

SHARD = 32  # texts

Count = Callable[[int, int], None]  # told how many tokens are done, and of how many
Compute = Callable[[list[Text], Count], Mapping[str, Tensor]]


def remaining(lengths: Sequence[int], store: Store) -> list[int]:
    """Return the lengths of the texts whose shards a store does not hold yet."""
    return [length for place, length in enumerate(lengths) if not store.has(_file(place // SHARD))]


def _file(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


def run_shards(
    texts: list[Text],
    compute: Compute,
    store: Store,
    *,
    lengths: Sequence[int],
    progress: Count = lambda done, total: None,
) -> Iterator[dict[str, Tensor]]:
    """Yield what `compute` gives for each shard of texts, computing only those that the store does not hold yet.

    `lengths` are the texts' numbers of tokens. `progress` is told of the tokens of all texts, first of those in stored
    shards, and then whenever `compute` tells how many of its own shard's are done. A stored shard whose texts differ
    from today's is an error: the data changed under the run.
    """
    store.start()  # now: a place that cannot be written to is told before anything is computed
    total = sum(lengths)
    done = total - sum(remaining(lengths, store))
    progress(done, total)
    for number, first in enumerate(range(0, len(texts), SHARD)):
        name, shard = _file(number), texts[first : first + SHARD]
        digest = text_hash(shard)
        if store.has(name):
            tensors, about = store.read_tensors(name)
            if about.get("texts") != digest:
                raise InputError(
                    f"going on with {store.folder}: the texts of {name} are not those it was computed from; the data "
                    "changed. Choose another folder with --out."
                )
        else:
            tensors = dict(compute(shard, lambda some, _, before=done: progress(before + some, total)))
            store.write_tensors(name, tensors, {"texts": digest})
            done += sum(lengths[first : first + SHARD])
        yield tensors
