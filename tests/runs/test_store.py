"""A run's folder: whole files only, resuming where it stopped, never mixing two runs."""

import json
import os
from collections.abc import Sequence
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
from identikit.runs.run import Numbers, Run, Stored, groups_of
from identikit.runs.store import ERROR, MANIFEST, Store
from identikit.texts.text import EncodedText
from tests.hostile.made import content
from tests.models import tiny

TEXTS = [f"text {i}" for i in range(40)]
LENGTHS = [len(text) for text in TEXTS]
ENCODED = [EncodedText((), None, (), tuple(text), (), text) for text in TEXTS]  # a token per character


STORED = {"tokens": Stored("text"), "half": Stored("token", real=True), "sum": Stored()}


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

    def merged(self, parts: Sequence[Numbers]) -> Numbers:
        return {"sum": torch.stack([part["sum"] for part in parts]).sum(0)}

    def compute(self, model: object, task: list[str], progress: Progress) -> Numbers:
        if self.stop in task:
            raise KeyboardInterrupt
        if self.refuse in task:
            raise InputError(f"{self.refuse!r} is refused.")
        tokens = torch.tensor([len(text) for text in task])
        progress("of a text", 3, int(tokens.sum()))
        half = torch.tensor([ord(character) / 2 for text in task for character in text]) + self.shift
        return {"tokens": tokens, "half": half, "sum": tokens.sum()}


COUNT = Count()


def counted(folder: Path, job: Count = COUNT, progress: Progress = silent, most: int = 1) -> Numbers:
    run = Run(Store(folder, {"seed": 1}), progress=progress)
    return run.texts(tiny.shared("bert"), job, TEXTS, ENCODED, group_size=most)


def is_whole(found: Numbers) -> bool:
    spelled = "".join(chr(round(2 * half)) for half in found["half"].tolist())
    return found["tokens"].tolist() == LENGTHS and spelled == "".join(TEXTS) and int(found["sum"]) == sum(LENGTHS)


@pytest.fixture
def file_per_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)


def test_a_stopped_run_keeps_what_is_finished_and_computes_the_rest(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt) as stopped:
        counted(tmp_path / "run", Count(stop=TEXTS[3]))
    assert stopped.value.__notes__ == [
        f"What was computed is kept in {tmp_path / 'run'}. Run the same command again to continue."
    ]
    (shard,) = (tmp_path / "run").glob("shard-*")  # three texts were done, in less than a second
    assert unseal(shard.read_bytes()).about["texts"] == [0, 1, 2]
    told: list[tuple[str, int, int]] = []
    assert is_whole(counted(tmp_path / "run", Count(stop=TEXTS[0]), progress=lambda *step: told.append(step)))
    before = sum(LENGTHS[:3])
    steps = (before, before + 3, before + LENGTHS[3])
    assert told[:3] == [("characters", tokens, sum(LENGTHS)) for tokens in steps]


def test_a_run_that_is_stopped_before_its_first_result_leaves_nothing_and_says_so(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt) as stopped:
        counted(tmp_path / "run", Count(stop=TEXTS[0]))
    assert stopped.value.__notes__ == ["Nothing had been computed yet."] and not (tmp_path / "run").exists()


def test_what_is_done_is_written_often_at_first_and_then_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each text takes five seconds of a clock that stands still otherwise."""
    now = [0.0]
    monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
    started = Count.compute

    def slow(job: Count, model: object, task: list[str], progress: Progress) -> Numbers:
        now[0] += 5
        return started(job, model, task, progress)

    monkeypatch.setattr(Count, "compute", slow)
    counted(tmp_path / "run")
    sizes = [len(unseal(path.read_bytes()).about["texts"]) for path in sorted((tmp_path / "run").glob("shard-*"))]
    assert sizes[:10] == [1] * 10 and max(sizes) == sizes[-2] == 4 and sum(sizes) == 40


def test_texts_that_are_kept_are_not_computed_again_in_other_groups(tmp_path: Path):
    """As when a run that was begun on a CPU is resumed on a GPU, which takes several texts at a time."""
    with pytest.raises(KeyboardInterrupt):
        counted(tmp_path / "run", Count(stop=TEXTS[7]))
    assert is_whole(counted(tmp_path / "run", Count(stop=TEXTS[6]), most=4))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=80), st.integers(1, 40), st.sampled_from([1, 10**8]))
def test_groups_cover_the_texts_in_order_and_are_small(lengths: list[int], most: int, parameters: int):
    groups = groups_of(lengths, most, parameters)
    assert [number for group in groups for number in group] == list(range(len(lengths)))
    for group in groups:
        work = sum(lengths[number] for number in group) * parameters
        assert len(group) == 1 or (len(group) <= most and work <= runs.GROUP_WORK)


@pytest.mark.usefixtures("file_per_text")
def test_a_shard_that_is_damaged_or_holds_something_else_is_computed_again(tmp_path: Path):
    assert is_whole(counted(tmp_path / "run"))
    whole = content(tmp_path / "run")
    shards = [tmp_path / "run" / name for name in whole if name.startswith("shard-")]
    assert len(shards) == len(TEXTS)
    right, about = unseal(shards[0].read_bytes())
    wrong = {
        "its content does not have its SHA-256": shards[0].read_bytes()[:-1] + b"\0",
        "it is not a sealed safetensors file": b"junk",
        "'tokens' is missing": seal({"sum": right["sum"], "half": right["half"]}, about),
        "'sum' is missing": seal({"tokens": right["tokens"], "half": right["half"]}, about),
        "'tag' is not expected": seal(right | {"tag": right["sum"]}, about),
        "'sum' is stored as torch.float32": seal(right | {"sum": right["sum"].float()}, about),
        r"'half' has the shape \[5\], and 6 rows are expected": seal(right | {"half": right["half"][1:]}, about),
        "'half' has numbers that are not finite": seal(right | {"half": right["half"] * torch.nan}, about),
        "it holds other texts": seal(right, about | {"sha256": "of other texts"}),
        "it holds a text that is there already": seal(right, about | {"texts": [0, 0]}),
        "it does not say which texts it holds": seal(right, {}),
    }
    for why, bad in wrong.items():
        shards[0].write_bytes(bad)
        with pytest.warns(UserWarning, match=f"shard-000000.safetensors: {why}. Its contents will be"):
            assert is_whole(counted(tmp_path / "run"))
        kept = unseal(shards[0].read_bytes())
        assert torch.equal(kept.tensors["half"], right["half"]) and kept.about["sha256"] == about["sha256"]


def test_numbers_that_are_not_finite_are_never_kept(tmp_path: Path):
    with pytest.raises(InputError, match="Computing text 0: 'half' has numbers that are not finite"):
        counted(tmp_path / "run", Count(shift=torch.nan))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("file_per_text")
def test_why_a_run_failed_is_noted_until_it_is_resumed(tmp_path: Path):
    with pytest.raises(InputError, match="'text 4' is refused"):
        counted(tmp_path / "run", Count(refuse=TEXTS[4]))
    assert json.loads((tmp_path / "run" / ERROR).read_text())["error"] == "'text 4' is refused."
    assert is_whole(counted(tmp_path / "run")) and not (tmp_path / "run" / ERROR).exists()


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
    with Store(tmp_path / "run", {"norm": "a mistake"}).held():
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
    with Store(tmp_path / "run", settings, {"date": "tomorrow", "device": "cuda"}).held():
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


def test_shards_of_a_run_share_the_work_evenly(tmp_path: Path):
    """The work, not the number of texts, and each shard computes its own texts alone."""
    model = tiny.shared("bert")
    texts = ["long " * 40, *(f"text {i}" for i in range(40))]
    encoded = [EncodedText((), None, (), tuple(text), (), text) for text in texts]
    parts = [Run(Store(tmp_path / str(i), {}), portion=(i, 2)).texts(model, COUNT, texts, encoded) for i in (1, 2)]
    assert [len(part["tokens"]) for part in parts] == [21, 20]
    assert abs(int(parts[0]["sum"]) - int(parts[1]["sum"])) <= 200
    even = [Run(Store(tmp_path / f"even {i}", {}), portion=(i, 2)).texts(model, COUNT, TEXTS, ENCODED) for i in (1, 2)]
    assert [len(part["tokens"]) for part in even] == [20, 20]
    with pytest.raises(InputError, match=r"--shard 41/41: there is nothing for it to do, .* divided into 40\."):
        Run(Store(tmp_path / "41", {}), portion=(41, 41)).texts(model, COUNT, TEXTS, ENCODED)
    assert not (tmp_path / "41").exists()
