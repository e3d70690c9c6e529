"""A run's folder: whole files only, resuming where it stopped, never mixing two runs."""

import json
import os
from pathlib import Path

import pytest
import torch

from identikit.errors import InputError
from identikit.progress import Progress, silent
from identikit.runs.local import SHARD, Compute, run_shards
from identikit.runs.store import MANIFEST, Store

TEXTS = [f"text {i}" for i in range(2 * SHARD + 5)]
LENGTHS = [len(text) for text in TEXTS]


def count(shard: list[str], told: Progress) -> dict[str, torch.Tensor]:
    """Count characters, in two steps."""
    tokens = torch.tensor([len(text) for text in shard])
    told("of a shard", int(tokens[0]), int(tokens.sum()))
    told("of a shard", int(tokens.sum()), int(tokens.sum()))
    return {"tokens": tokens}


def shards(texts: list[str], compute: Compute, store: Store, progress: Progress = silent) -> list[dict]:
    lengths = [len(text) for text in texts]
    return list(run_shards(texts, compute, store, lengths=lengths, what="characters", progress=progress))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_stopped_run_resumes_and_ends_with_the_same_bytes(tmp_path: Path):
    whole = Store(tmp_path / "whole", {"seed": 1})
    assert sum(len(part["tokens"]) for part in shards(TEXTS, count, whole)) == len(TEXTS)

    computed: list[str] = []

    def stopped_in_the_second(shard: list[str], told: Progress) -> dict[str, torch.Tensor]:
        if TEXTS[SHARD] in shard and not computed:
            computed.append("stopped")
            raise KeyboardInterrupt
        computed.append(shard[0])
        return count(shard, told)

    with pytest.raises(KeyboardInterrupt):
        shards(TEXTS[:SHARD], count, Store(tmp_path / "again", {"seed": 1}))
        shards(TEXTS, stopped_in_the_second, Store(tmp_path / "again", {"seed": 1}))
    done: list[tuple[str, int, int]] = []
    again = Store(tmp_path / "again", {"seed": 1})
    parts = shards(TEXTS, stopped_in_the_second, again, lambda *told: done.append(told))
    assert computed == ["stopped", TEXTS[SHARD], TEXTS[2 * SHARD]]  # the first shard was not computed again
    first, second, total = sum(LENGTHS[:SHARD]), sum(LENGTHS[: 2 * SHARD]), sum(LENGTHS)
    inside = first + LENGTHS[SHARD], second + LENGTHS[2 * SHARD]
    assert done == [("characters", tokens, total) for tokens in (first, inside[0], second, inside[1], total)]
    assert torch.cat([part["tokens"] for part in parts]).tolist() == [len(text) for text in TEXTS]
    assert content(tmp_path / "again") == content(tmp_path / "whole")


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(tmp_path / "run", {})

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"Cannot write run.json to .*: no space left on device. Make room there"):
        store.write("table.csv", b"half")
    assert not store.has("table.csv")


def test_nothing_is_made_before_there_is_a_result(tmp_path: Path):
    Store(tmp_path / "run", {"norm": "refused"})
    assert not (tmp_path / "run").exists()
    Store(tmp_path / "run", {"norm": "sum"}).write("table.csv", b"whole")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [MANIFEST, "table.csv"]


def test_places_that_cannot_be_written_and_damaged_files(tmp_path: Path):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(InputError, match="choose another folder with --out"):
        Store(tmp_path / "file" / "under", {}).write("table.csv", b"")
    with pytest.raises(InputError, match=r"Cannot write results to nowhere://there: .*Choose another folder"):
        Store("nowhere://there", {})

    def refuse(*_: object) -> dict[str, torch.Tensor]:
        raise AssertionError("computed, and cannot be kept")

    with pytest.raises(InputError, match=f"Cannot write {MANIFEST} to .*choose another folder with --out"):
        shards(TEXTS, refuse, Store(tmp_path / "file" / "under", {}))
    store = Store(tmp_path / "run", {})
    shards(TEXTS, count, store)
    (tmp_path / "run" / "shard-000000.safetensors").write_bytes(b"junk")
    with pytest.raises(InputError, match=r"the file is damaged\. Remove it"):
        shards(TEXTS, count, store)
    for damaged in ("{bad", "[]", '{"seed": 1}'):
        (tmp_path / "run" / MANIFEST).write_text(damaged)
        with pytest.raises(InputError, match=r"Cannot resume .*: run.json is damaged\."):
            Store(tmp_path / "run", {})


def test_tensors_that_share_memory_are_written(tmp_path: Path):
    whole = torch.arange(6.0).view(2, 3)
    store = Store(tmp_path / "run", {})
    store.write_tensors("shared.safetensors", {"a": whole, "b": whole, "row": whole[1], "turned": whole.T}, {"of": "x"})
    kept, about = store.read_tensors("shared.safetensors")
    assert about == {"of": "x"} and set(kept) == {"a", "b", "row", "turned"}
    assert torch.equal(kept["a"], whole) and torch.equal(kept["b"], whole)
    assert torch.equal(kept["row"], whole[1]) and torch.equal(kept["turned"], whole.T)


def test_other_settings_and_other_data_are_refused(tmp_path: Path):
    store = Store(tmp_path / "run", {"model": "a", "seed": 1})
    shards(TEXTS, count, store)
    with pytest.raises(InputError, match=r"Cannot resume .* another run, whose seed is 1, not 2. Use the same"):
        Store(tmp_path / "run", {"model": "a", "seed": 2})
    with pytest.raises(InputError, match=r"the texts of shard-000000.safetensors have changed"):
        again = Store(tmp_path / "run", {"model": "a", "seed": 1})
        shards(["other", *TEXTS], count, again)


def test_what_identifies_a_run_is_apart_from_what_is_recorded(tmp_path: Path):
    settings = {"data": {"source": "mrpc", "sample": 3}, "options": {"probes": "exact"}}
    Store(tmp_path / "run", settings, {"date": "today", "device": "cpu"}).start()
    before = content(tmp_path / "run")
    assert json.loads(before[MANIFEST]) == {"run": settings, "recorded": {"date": "today", "device": "cpu"}}
    Store(tmp_path / "run", settings, {"date": "tomorrow", "device": "cuda"}).start()
    assert content(tmp_path / "run") == before
    with pytest.raises(InputError, match=r"another run, whose data.sample is 3, not None"):
        Store(tmp_path / "run", settings | {"data": {"source": "mrpc"}})


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=f"holds files but no {MANIFEST}"):
        Store(tmp_path, {})
    with pytest.raises(InputError, match=r"it is a file\. Choose a folder with --out\."):
        Store(tmp_path / "thesis.tex", {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
