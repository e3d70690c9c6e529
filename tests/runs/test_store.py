"""A run's folder: whole files only, resuming where it stopped, never mixing two runs."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from identikit.errors import InputError
from identikit.progress import Progress, silent
from identikit.results.files import Damaged, seal, seal_json, unseal, unseal_json, unseal_record
from identikit.runs import run as runs
from identikit.runs.lock import LOCK
from identikit.runs.run import BLOCK_TEXTS, Run, Stored, blocks_of
from identikit.runs.store import ERROR, MANIFEST, Store
from tests.models import tiny

TEXTS = [f"text {i}" for i in range(2 * BLOCK_TEXTS + 5)]
LENGTHS = [len(text) for text in TEXTS]


STORED = {"tokens": Stored("text"), "mean": Stored(real=True)}


@dataclass(frozen=True)
class Count:
    """Counts characters, in two steps; may be stopped before one of its texts."""

    stop: str = ""
    refuse: str = ""
    shift: float = 0.0
    what = "characters"
    stored = STORED

    def cost(self, length: int) -> float:
        return float(length)

    def compute(self, model: object, task: list[str], told: Progress) -> dict[str, torch.Tensor]:
        if self.stop in task:
            raise KeyboardInterrupt
        if self.refuse in task:
            raise InputError(f"{self.refuse!r} is refused.")
        tokens = torch.tensor([len(text) for text in task])
        told("of a block", int(tokens[0]), int(tokens.sum()))
        return {"tokens": tokens, "mean": tokens.double().mean() + self.shift}


COUNT = Count()


def counted(folder: Path, job: Count = COUNT, progress: Progress = silent) -> list[int]:
    blocks = blocks_of(TEXTS, LENGTHS)
    found = Run(Store(folder, {"seed": 1}), progress=progress).blocks(tiny.shared("bert"), job, blocks)
    return [int(one) for part in found for one in part["tokens"]]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def file_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)


def test_a_stopped_run_keeps_what_is_finished_and_computes_the_rest(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        counted(tmp_path / "run", Count(stop=TEXTS[-1]))
    assert (tmp_path / "run" / "shard-000000.safetensors").exists()  # two blocks were done, and are kept
    told: list[tuple[str, int, int]] = []
    assert counted(tmp_path / "run", Count(stop=TEXTS[0]), progress=lambda *step: told.append(step)) == LENGTHS
    before = sum(LENGTHS[: 2 * BLOCK_TEXTS])
    total = sum(LENGTHS)
    steps = (before, before + LENGTHS[2 * BLOCK_TEXTS], total)
    assert told == [("characters", tokens, total) for tokens in steps]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=80), st.integers(1, 40))
def test_blocks_cover_the_texts_in_order_and_are_small(lengths: list[int], most: int):
    texts = [str(number) for number in range(len(lengths))]
    blocks = blocks_of(texts, lengths, most)
    assert [text for block in blocks for text in block.texts] == texts
    assert [length for block in blocks for length in block.lengths] == lengths
    assert [block.number for block in blocks] == list(range(len(blocks)))
    for block in blocks:
        assert len(block.texts) == 1 or (len(block.texts) <= most and sum(block.lengths) <= runs.BLOCK_TOKENS)


@pytest.mark.usefixtures("file_per_block")
def test_a_shard_that_is_damaged_or_holds_something_else_is_computed_again(tmp_path: Path):
    assert counted(tmp_path / "run") == LENGTHS
    whole = content(tmp_path / "run")
    shards = [tmp_path / "run" / name for name in whole if name.startswith("shard-")]
    assert len(shards) == 3
    about = unseal(shards[0].read_bytes()).about
    tokens = torch.tensor(LENGTHS[:BLOCK_TEXTS])
    mean = torch.ones(())
    wrong = {
        "its content does not have its SHA-256": shards[0].read_bytes()[:-1] + b"\0",
        "it is not a sealed safetensors file": b"junk",
        "'tokens' is missing": seal({"0/mean": mean}, about),
        "'mean' is missing": seal({"0/tokens": tokens}, about),
        "'tag' is not expected": seal({"0/tokens": tokens, "0/mean": mean, "0/tag": mean}, about),
        "'mean' is stored as torch.int64": seal({"0/tokens": tokens, "0/mean": mean.long()}, about),
        r"'tokens' has the shape \[31\], and 32 rows are expected": seal(
            {"0/tokens": tokens[1:], "0/mean": mean}, about
        ),
        "'mean' has numbers that are not finite": seal({"0/tokens": tokens, "0/mean": mean * torch.nan}, about),
        "it holds other texts": seal({"0/tokens": tokens}, about | {"blocks": {"0": "of other texts"}}),
        "it holds no block": seal({"0/tokens": tokens}, {}),
    }
    for why, bad in wrong.items():
        shards[0].write_bytes(bad)
        with pytest.warns(UserWarning, match=f"shard-000000.safetensors cannot be used: {why}. What it held is"):
            assert counted(tmp_path / "run") == LENGTHS
        kept = unseal(shards[0].read_bytes())
        assert torch.equal(kept.tensors["0/tokens"], tokens) and kept.about["blocks"] == about["blocks"]


def test_numbers_that_are_not_finite_are_never_kept(tmp_path: Path):
    with pytest.raises(InputError, match="Computing texts 0 to 31: 'mean' has numbers that are not finite"):
        counted(tmp_path / "run", Count(shift=torch.nan))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("file_per_block")
def test_why_a_run_failed_is_noted_until_it_is_resumed(tmp_path: Path):
    with pytest.raises(InputError, match="'text 40' is refused"):
        counted(tmp_path / "run", Count(refuse=TEXTS[40]))
    assert json.loads((tmp_path / "run" / ERROR).read_text())["error"] == "'text 40' is refused."
    assert counted(tmp_path / "run") == LENGTHS and not (tmp_path / "run" / ERROR).exists()


@settings(max_examples=40)
@given(st.data())
def test_any_changed_byte_of_a_sealed_file_is_noticed(data: st.DataObject):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2])}
    for sealed, opened in ((seal(tensors, {"of": "x"}), unseal), (seal_json([{"of": "é", "b": None}]), unseal_json)):
        place = data.draw(st.integers(0, len(sealed) - 1))
        other = data.draw(st.integers(0, 255).filter(lambda byte: byte != sealed[place]))  # noqa: B023
        with pytest.raises(Damaged):
            opened(sealed[:place] + bytes([other]) + sealed[place + 1 :])
        with pytest.raises(Damaged):
            opened(sealed[:place])
        with pytest.raises(Damaged):
            opened(sealed + bytes([other]))


def test_sealed_files_give_back_what_they_were_given():
    whole = torch.arange(6.0).view(2, 3)
    tensors = {"a": whole, "b": whole, "row": whole[1], "turned": whole.T}  # these share memory
    found = unseal(seal(tensors, {"of": ["x", 1, None]}))
    assert found.about == {"of": ["x", 1, None]} and found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    assert seal(tensors, {"b": 1, "a": 2}) == seal(tensors, {"a": 2, "b": 1})
    assert unseal_json(seal_json({"a": [1.5, None, "é"]})) == {"a": [1.5, None, "é"]}
    with pytest.raises(ValueError):
        seal_json(float("nan"))


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(tmp_path / "run", {})
    store.write("first.csv", b"whole")

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"Cannot write table.csv to .*: no space left on device. Make room there"):
        store.write("table.csv", b"half")
    assert sorted(content(tmp_path / "run")) == [LOCK, "first.csv", MANIFEST]


def test_what_a_killed_writer_left_is_removed_and_what_is_not_ours_stays(tmp_path: Path):
    store = Store(tmp_path / "run", {})
    store.write("first.csv", b"whole")
    (tmp_path / "run" / f".table.csv.{'0a' * 16}.partial").write_bytes(b"half")
    (tmp_path / "run" / "notes.partial").write_bytes(b"mine")
    store.write("table.csv", b"whole")
    assert sorted(content(tmp_path / "run")) == [LOCK, "first.csv", "notes.partial", MANIFEST, "table.csv"]


def test_nothing_is_made_before_there_is_a_result(tmp_path: Path):
    Store(tmp_path / "run", {"norm": "refused"})
    assert not (tmp_path / "run").exists()
    with Store(tmp_path / "run", {"norm": "a mistake"}):
        pass  # nothing was computed, so another run may have the folder
    Store(tmp_path / "run", {"norm": "sum"}).write("table.csv", b"whole")
    assert sorted(content(tmp_path / "run")) == [LOCK, MANIFEST, "table.csv"]
    assert json.loads((tmp_path / "run" / MANIFEST).read_text())["run"] == {"norm": "sum"}


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(InputError, match=f"Cannot write {MANIFEST} to .*choose another folder with --out"):
        counted(tmp_path / "file" / "under", Count(stop=TEXTS[0]))


def test_a_run_that_another_process_began_meanwhile_is_not_mixed_with(tmp_path: Path):
    ours = Store(tmp_path / "run", {"seed": 1})
    theirs = Store(tmp_path / "run", {"seed": 2})
    theirs.write("table.csv", b"theirs")
    with pytest.raises(InputError, match="it holds another run, whose seed is 2, not 1"):
        ours.write("table.csv", b"ours")
    assert (tmp_path / "run" / "table.csv").read_bytes() == b"theirs"


def test_what_identifies_a_run_is_apart_from_what_is_recorded(tmp_path: Path):
    settings = {"data": {"source": "mrpc", "sample": 3}, "options": {"probes": "exact"}}
    Store(tmp_path / "run", settings, {"date": "today", "device": "cpu"}).write("table.csv", b"")
    before = content(tmp_path / "run")
    assert unseal_record(before[MANIFEST]) == {"run": settings, "recorded": {"date": "today", "device": "cpu"}}
    with Store(tmp_path / "run", settings, {"date": "tomorrow", "device": "cuda"}):
        pass
    assert content(tmp_path / "run") == before
    with pytest.raises(
        InputError, match=r"Cannot resume .* another run, whose data.sample is 3, not None. Use the same"
    ):
        Store(tmp_path / "run", settings | {"data": {"source": "mrpc"}})


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=f"holds files but no {MANIFEST}"):
        Store(tmp_path, {})
    with pytest.raises(InputError, match=r"it is a file\. Choose a folder with --out\."):
        Store(tmp_path / "thesis.tex", {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_shard_of_a_run_computes_its_own_blocks_alone(tmp_path: Path):
    blocks = blocks_of(TEXTS, LENGTHS)
    model = tiny.shared("bert")
    parts = [Run(Store(tmp_path / str(i), {}), part=(i, 2)).blocks(model, COUNT, blocks) for i in (1, 2)]
    assert [len(part) for part in parts] == [2, 1]
    assert parts[1][0]["tokens"].tolist() == LENGTHS[BLOCK_TEXTS : 2 * BLOCK_TEXTS]
    with pytest.raises(InputError, match=r"--shard 4/4: there is nothing for it to do, .* only 3 blocks"):
        Run(Store(tmp_path / "4", {}), part=(4, 4)).blocks(model, COUNT, blocks)
