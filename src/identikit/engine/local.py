"""Shards of texts, one after the other, each kept as soon as it is done."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from identikit.errors import InputError
from identikit.results import text_hash
from identikit.shapes import Tensor
from identikit.store import Store
from identikit.text import Text

SHARD = 32  # texts

Compute = Callable[[list[Text]], Mapping[str, Tensor]]
Progress = Callable[[int, int], None]  # told the texts and the tokens of each shard that is done


def remaining(texts: list[Text], store: Store) -> list[Text]:
    """Return the texts of the shards that a store does not hold yet."""
    return [text for place, text in enumerate(texts) if not store.has(_file(place // SHARD))]


def _file(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


def run_shards(
    texts: Iterable[Text], compute: Compute, store: Store, *, progress: Progress | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield what `compute` gives for each shard of texts, computing only those that the store does not hold yet.

    Among what `compute` gives are the `tokens` of the texts. A stored shard whose texts differ from today's is an
    error: the data changed under the run.
    """
    stream = iter(texts)
    number = 0
    while shard := list(islice(stream, SHARD)):
        name, digest = _file(number), text_hash(shard)
        if store.has(name):
            tensors, about = store.read_tensors(name)
            if about.get("texts") != digest:
                raise InputError(
                    f"going on with {store.folder}: the texts of {name} are not those it was computed from; the data "
                    "changed. Choose another folder with --out."
                )
        else:
            tensors = dict(compute(shard))
            store.write_tensors(name, tensors, {"texts": digest})
        if progress:
            progress(len(shard), int(tensors["tokens"].sum()))
        yield tensors
        number += 1
