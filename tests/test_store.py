"""A run's folder: whole files only, going on where it stopped, never mixing two runs."""

import os
from pathlib import Path

import pytest
import torch

from identikit.engine.local import SHARD, run_shards
from identikit.errors import InputError
from identikit.store import MANIFEST, Store

TEXTS = [f"text {i}" for i in range(2 * SHARD + 5)]


def lengths(shard: list[str]) -> dict[str, torch.Tensor]:
    return {"tokens": torch.tensor([len(text) for text in shard])}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path):
    whole = Store(tmp_path / "whole", {"seed": 1})
    assert sum(len(part["tokens"]) for part in run_shards(TEXTS, lengths, whole)) == len(TEXTS)

    computed: list[str] = []

    def stopped_in_the_second(shard: list[str]) -> dict[str, torch.Tensor]:
        if TEXTS[SHARD] in shard and not computed:
            computed.append("stopped")
            raise KeyboardInterrupt
        computed.append(shard[0])
        return lengths(shard)

    with pytest.raises(KeyboardInterrupt):
        computed.clear()
        list(run_shards(TEXTS[:SHARD], lambda shard: lengths(shard), Store(tmp_path / "again", {"seed": 1})))
        list(run_shards(TEXTS, stopped_in_the_second, Store(tmp_path / "again", {"seed": 1})))
    done: list[tuple[int, int]] = []
    parts = list(
        run_shards(
            TEXTS,
            stopped_in_the_second,
            Store(tmp_path / "again", {"seed": 1}),
            progress=lambda *told: done.append(told),
        )
    )
    assert computed == ["stopped", TEXTS[SHARD], TEXTS[2 * SHARD]]  # the first shard was not computed again
    assert [texts for texts, _ in done] == [SHARD, SHARD, 5]
    assert sum(tokens for _, tokens in done) == sum(map(len, TEXTS))
    assert torch.cat([part["tokens"] for part in parts]).tolist() == [len(text) for text in TEXTS]
    assert content(tmp_path / "again") == content(tmp_path / "whole")


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(tmp_path / "run", {})

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"writing run.json .*no space left on device. Make room there"):
        store.write("table.csv", b"half")
    assert not store.has("table.csv")


def test_nothing_is_made_before_there_is_a_result(tmp_path: Path):
    Store(tmp_path / "run", {"norm": "refused"})
    assert not (tmp_path / "run").exists()
    Store(tmp_path / "run", {"norm": "sum"}).write("table.csv", b"whole")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [MANIFEST, "table.csv"]


def test_places_that_cannot_be_written_and_damaged_files(tmp_path: Path):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(InputError, match="choose another --out"):
        Store(tmp_path / "file" / "under", {}).write("table.csv", b"")
    with pytest.raises(InputError, match="Choose another place with --out"):
        Store("nowhere://there", {})
    store = Store(tmp_path / "run", {})
    list(run_shards(TEXTS, lengths, store))
    (tmp_path / "run" / "shard-000000.safetensors").write_bytes(b"junk")
    with pytest.raises(InputError, match=r"it is damaged\. Remove it"):
        list(run_shards(TEXTS, lengths, store))
    (tmp_path / "run" / MANIFEST).write_text("{bad")
    with pytest.raises(InputError, match="is damaged"):
        Store(tmp_path / "run", {})


def test_other_settings_and_other_data_are_refused(tmp_path: Path):
    store = Store(tmp_path / "run", {"model": "a", "seed": 1})
    list(run_shards(TEXTS, lengths, store))
    with pytest.raises(InputError, match=r"holds another run: its seed is 1, not 2. Choose another folder with --out"):
        Store(tmp_path / "run", {"model": "a", "seed": 2})
    with pytest.raises(InputError, match="the data changed"):
        list(run_shards(["other", *TEXTS], lengths, Store(tmp_path / "run", {"model": "a", "seed": 1})))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=f"holds files but no {MANIFEST}"):
        Store(tmp_path, {})
    with pytest.raises(InputError, match="is a file, and a folder is needed"):
        Store(tmp_path / "thesis.tex", {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
