"""All the cases, in one list."""

from dataclasses import replace
from functools import cache

from tests.hostile import (
    arguments,
    checkpoints,
    configs,
    environments,
    files,
    folders,
    models,
    numerics,
    readers,
    results,
    sharing,
    stores,
    texts,
)
from tests.hostile.cases import Case

ROOMS = (
    texts, files, checkpoints, folders, configs, stores, readers, results, sharing, arguments, environments, models,
    numerics,
)  # fmt: skip

# What once went wrong, or must never: `make test` tries it, whatever else it leaves out.
NAMED = {
    "texts: 20 MB in one word to attention",
    "texts: 20 MB in one word in a file takes little memory",
    "files: two columns of one name in tsv",
    "files: two columns of one name in csv",
    "files: two columns of one name in parquet",
    "checkpoints: bert: distance_embedding over absolute positions",
    "checkpoints: bert: a weight that its blocks do not have",
    "checkpoints: bert: a weight that its embeddings do not have",
    "checkpoints: bert: LoRA weights without an adapter's configuration",
    "checkpoints: bert: int8 matrices with their scales",
    "checkpoints: bert: encoder.layer.1.attention.self.query.weight of int8",
    "checkpoints: bert: encoder.layer.1.attention.self.query.weight with a row too few",
    "checkpoints: bert: an index that names weights above the folder",
    "checkpoints: bert: an index that names weights by an absolute path",
    "checkpoints: bert: weights cut in half",
    "checkpoints: bert: only a pickle",
    "checkpoints: bert: a pickle beside the weights",
    "checkpoints: bert: code for a known architecture",
    "checkpoints: bert: code for an unknown architecture",
    "configs: bert: a configuration of 2 layers over weights of 3",
    "configs: bert: a configuration of 4 layers over weights of 3",
    "configs: bert: hidden_size is a word",
    "configs: a tokenizer with an id beyond the embeddings",
    "configs: tokenizer.json that is cut in half",
    "stores: the first shard with a bit flipped in the middle",
    "stores: a shard with NaN and a right checksum",
    "stores: a shard with a row too few and a right checksum",
    "stores: a shard without one of its keys and a right checksum",
    "stores: cached maps with a bit flipped in the middle",
    "stores: an old run and a model with a changed tokenizer",
    "stores: an old run and a model with another activation",
    "stores: an old run and a model with another base of its rotary positions",
    "stores: a folder with a partial folder for --out",
    "stores: memory that is gone afterwards for --out",
    "stores: two processes into one folder",
    "stores: files of at most 30000 bytes",
    "arguments: intervals, key=1.5",
    "arguments: attention, sel key=1.5",
    "arguments: attention, tolerance=nan",
    "environments: a broken pipe",
    "environments: explain with an ASCII terminal",
    "environments: a full standard output",
    "environments: a JSON whose numbers are undefined",
    "environments: a ZeroDivisionError of our own",
    "environments: attention without pandas",
    "models: attention under autocast to bfloat16",
    "models: attention in inference mode",
    "models: attention with gradients on",
    "models: attribution with gradients on",
    "models: a model compiled",
    "models: two threads, attention beside the others",
    "models: two threads that load",
    "models: a verbosity of 10",
    "models: weights changed in place after loading",
    "numerics: NaN in the MLP, bert, float32: attention",
    "numerics: values are denormal, bert, float32: attention",
    "numerics: values are 0, bert, float32: attention",
    "numerics: softmax is saturated, bert, float32: attention",
    "numerics: one value is huge and ignored, bert, float32: explain",
}


@cache
def corpus() -> tuple[Case, ...]:
    """Return every case; no two of one kind share a name."""
    found = (case for room in ROOMS for case in room.cases())
    return tuple(replace(case, slow=case.slow and f"{case.kind}: {case.name}" not in NAMED) for case in found)
