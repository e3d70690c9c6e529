"""The commands over a run's folder, as a user meets them."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from identikit import effective_attention
from identikit.attention.dataset import AttentionJob
from identikit.errors import InputError
from identikit.results.files import seal_record, unseal_record
from identikit.runs.lock import FolderLock
from identikit.runs.store import Store
from identikit.texts import encoding
from identikit.tokens.dataset import IdentifiabilityJob
from tests.cli.made import Done, run
from tests.models import tiny
from tests.runs.made import save_model, tables

JOBS = {"attention": AttentionJob, "tokens": IdentifiabilityJob}  # of texts, and of parts
OPTIONS = {"attention": [], "tokens": ["--folds", "1", "--map", "naive"]}


@pytest.fixture(scope="module", autouse=True)
def one_shard() -> Iterator[None]:
    """All texts are in one shard, and no progress is printed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("runs.run.SHARD_LEAST", "runs.run.SHARD_SECONDS", "cli.terminal.QUIET_SECONDS"):
            patch.setattr(f"identikit.{name}", math.inf)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, and 21 texts."""
    folder = tmp_path_factory.mktemp("place")
    save_model(folder / "model")
    texts = [f"w{i + 4} w{i + 5} w{i + 9} w{i + 7} w{i + 6} w{i + 8}" for i in range(21)]
    (folder / "texts.txt").write_text("\n".join(texts))
    return folder


Compute = Callable[..., Done]


@pytest.fixture(scope="module")
def compute(place: Path) -> Compute:
    """Run a command over the texts, with paths relative to where they are."""

    def compute(command: str, out: Path, *options: str) -> Done:
        with chdir(place):
            return run(command, "--data", "texts.txt", "--model", "model", *OPTIONS[command], "--out", out, *options)

    return compute


@pytest.fixture(scope="module")
def whole(compute: Compute, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a complete run of each command; copy one before changing it."""
    folder = tmp_path_factory.mktemp("whole")
    for command in JOBS:
        assert compute(command, folder / command).status == 0
    return {command: folder / command for command in JOBS}


@pytest.fixture(scope="module")
def halves(compute: Compute, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of attention in two shards, not merged; copy it before changing it."""
    folder = tmp_path_factory.mktemp("halves")
    for shard in ("2/2", "1/2"):
        assert compute("attention", folder / "run", "--shard", shard).status == 0
    return folder / "run"


@pytest.fixture
def stopped(compute: Compute, monkeypatch: pytest.MonkeyPatch) -> Compute:
    """Run a command that fails in its third text or part."""

    def stopped(command: str, out: Path) -> Done:
        read = JOBS[command].compute
        calls = []

        def failing(*given: Any) -> Any:
            calls.append(given)
            if len(calls) > 2:
                raise InputError("The third failed.")
            return read(*given)

        with monkeypatch.context() as patched:
            patched.setattr(JOBS[command], "compute", failing)
            return compute(command, out)

    return stopped


@pytest.mark.parametrize("command", JOBS)
def test_shards_merge_into_what_one_run_gives(compute: Compute, whole: dict[str, Path], tmp_path: Path, command: str):
    assert run("merge", whole[command]).refused("it holds no shards")
    for shard in ("2/2", "1/2"):
        assert compute(command, tmp_path / "parts", "--shard", shard).status == 0
    merged = run("merge", tmp_path / "parts")
    assert merged.status == 0 and f"The tables are in {tmp_path / 'parts'}" in merged.stdout
    assert tables(tmp_path / "parts") == tables(whole[command]) != {}
    assert run("verify", tmp_path / "parts").status == 0
    about = [json.loads((folder / "run.json").read_text()) for folder in (tmp_path / "parts", whole[command])]
    assert about[0]["run"] == about[1]["run"] and about[0]["recorded"]["shards"].keys() == {"1/2", "2/2"}
    assert run("diff", tmp_path / "parts", whole[command], "--tolerance", "0").status == 0


@pytest.mark.parametrize("command", JOBS)
def test_a_run_resumes_from_its_folder_alone(stopped: Compute, whole: dict[str, Path], tmp_path: Path, command: str):
    """From another folder, with paths that were relative to the first one."""
    assert stopped(command, tmp_path / "run").refused("The third failed.")
    told = run("status", tmp_path / "run").stdout
    assert "Done: 2 of " in told and "The third failed." in told and "Nobody is writing to it." in told
    assert run("verify", tmp_path / "run").status == 1
    resumed = run("resume", tmp_path / "run")
    assert resumed.status == 0, resumed.stderr
    again = run("resume", whole[command])
    assert resumed.stdout == again.stdout.replace(str(whole[command]), str(tmp_path / "run"))
    assert tables(tmp_path / "run") == tables(whole[command])
    state = json.loads(run("status", tmp_path / "run", "--json").stdout)["run"]
    assert state["complete"] and state["share"] == 1 and not state["missing"] and state["error"] is None
    assert json.loads(run("resume", tmp_path / "run", "--json").stdout)["tables"]


def test_data_and_models_may_move_before_a_run_is_resumed(
    place: Path, stopped: Compute, whole: dict[str, Path], tmp_path: Path
):
    """They are known by their hashes; other texts are another run."""
    stopped("tokens", tmp_path / "run")
    shutil.copytree(place / "model", tmp_path / "renamed")
    shutil.copy(place / "texts.txt", tmp_path / "moved.txt")
    given = [*OPTIONS["tokens"], "--model", tmp_path / "renamed", "--out", tmp_path / "run"]
    (tmp_path / "other.txt").write_text((tmp_path / "moved.txt").read_text().replace("w4", "w5"))
    assert run("tokens", "--data", tmp_path / "other.txt", *given).refused("another run, whose data.sha256 is")
    kept = {path: path.read_bytes() for path in (tmp_path / "run").glob("part-*")}
    assert run("tokens", "--data", tmp_path / "moved.txt", *given).status == 0
    assert kept and all(path.read_bytes() == content for path, content in kept.items())
    rates = pd.read_parquet(tmp_path / "run" / "rates.parquet")
    assert set(rates["model"]) == {"renamed"}  # in the parts that were kept too
    assert rates.drop(columns="model").equals(pd.read_parquet(whole["tokens"] / "rates.parquet").drop(columns="model"))


def test_status_of_a_run_and_of_its_shards(compute: Compute, stopped: Compute, tmp_path: Path):
    out = tmp_path / "run"
    stopped("attention", out)
    lines = run("status", out).stdout.splitlines()
    assert lines[0] == f"{out}: attention, model model in float32, data texts.txt (21 texts)."
    assert lines[1].startswith("Settings: bias True, ") and "seed 0" in lines[1] and "threads 1" in lines[1]
    assert lines[3] == "Done: 2 of 21 texts, 16 of 168 tokens (10%)."
    assert lines[4] == "Missing: texts 2 to 20." and lines[5].startswith("Rate: ") and "left at that rate" in lines[5]
    assert lines[6].startswith("The last run ended with an error (20") and lines[6].endswith("): The third failed.")
    assert lines[7] == f"Nobody is writing to it. Continue with `identikit resume {out}`." and len(lines) == 8
    lock = FolderLock(Store(out, json.loads((out / "run.json").read_text())["run"]).files, str(out))
    lock.acquire()
    assert "is writing to it" in run("status", out).stdout
    assert run("resume", out).refused("is writing to it")
    lock.release()
    assert "Nobody is writing" in run("status", out).stdout

    shards = tmp_path / "shards"
    compute("attention", shards, "--shard", "1/3")
    told = run("status", shards).stdout.splitlines()
    assert told == [
        f"{shards}: a run in 3 shards.",
        "shard-0001-of-0003: complete, 7 of 7 texts, 56 of 56 tokens (100%)",
        "shard-0002-of-0003: missing",
        "shard-0003-of-0003: missing",
    ]
    assert run("status", shards / "shard-0001-of-0003").stdout.splitlines()[-1].startswith("Complete: nothing is left")
    assert run("resume", shards).refused("Resume each that is not complete")
    assert "Shard 1/3 is complete" in run("resume", shards / "shard-0001-of-0003").stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "command.json there is missing or damaged"),
        ('{"command": "explain", "arguments": {}}', "names the command 'explain'"),
        ('{"command": "attention", "arguments": {"rm": "/"}}', "'rm' is not an argument of attention"),
        ('{"command": "attention", "arguments": {"data": {"a": 1}}}', "data has the value {'a': 1}"),
        ('{"command": "attention", "arguments": {"data": "a\\u0000"}}', "data has the value"),
        ('{"command": "attention", "arguments": {"data": "a", "mass": "much"}}', "does not hold a command"),
        ('{"command": "attention", "arguments": {"data": "a", "address": "ray://b"}}', "Give --address again"),
        ('{"command": "attention", "arguments": {"data": "--help"}, "place": 3}', "--help"),
        ('{"command": "attention", "arguments": {}}', "does not hold a command"),
    ],
)
def test_a_noted_command_is_not_trusted(tmp_path: Path, content: str, words: str):
    (tmp_path / "run.json").write_text('{"run": {}}')
    sealed = seal_record(json.loads(content)) if content.endswith("}") else content.encode()
    (tmp_path / "command.json").write_bytes(sealed)
    done = run("resume", tmp_path)
    assert done.refused(words), done


def test_what_cannot_be_merged_is_refused(compute: Compute, halves: Path, tmp_path: Path):
    out = Path(shutil.copytree(halves, tmp_path / "run"))
    second = out / "shard-0002-of-0002"
    shutil.rmtree(second)
    assert run("merge", out).refused("shard-0002-of-0002 of 2 shards is missing")
    assert compute("attention", out, "--shard", "2/2", "--mass").status == 0
    assert run("merge", out).refused("options.mass is False in")
    shutil.rmtree(second)
    shutil.copytree(out / "shard-0001-of-0002", second)
    assert run("merge", out).refused("holds shard 1/2")
    shutil.rmtree(second)
    shutil.copytree(halves / second.name, second)
    (shard,) = second.glob("shard-*")
    content = shard.read_bytes()
    shard.unlink()
    assert run("merge", out).refused("shard-0002-of-0002 is not complete")
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run("merge", out).refused("is damaged (its content does not have its SHA-256)")
    shard.write_bytes(content)
    assert compute("attention", out, "--shard", "1/3").status == 0
    assert run("merge", out).refused("shards of different divisions, into 2 and 3")
    shutil.rmtree(out / "shard-0001-of-0003")
    assert not (out / "run.json").exists()  # nothing was written so far
    assert run("merge", out).status == run("merge", out).status == 0
    shutil.copy(out / "shard-000000.safetensors", out / "shard-000009.safetensors")
    assert run("merge", out).refused("it already holds results of its own, such as shard-000009.safetensors")


def test_a_merge_that_was_stopped_can_be_run_again(halves: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = Path(shutil.copytree(halves, tmp_path / "run"))
    write = Store.write
    written = []

    def failing(store: Store, name: str, content: bytes) -> None:
        written.append(name)
        if len(written) == 3:  # after the manifest and one shard
            raise KeyboardInterrupt
        write(store, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", failing)
        done = run("merge", out)
    assert done.status == 130 and "What was computed is kept in " in done.stderr
    assert len(list(out.glob("shard-*.safetensors"))) == 1
    assert run("merge", out).status == 0 and run("verify", out).status == 0


def test_verify_finds_every_kind_of_damage(whole: dict[str, Path], tmp_path: Path):
    out = tmp_path / "run"
    done = run("verify", whole["attention"])
    assert done.status == 0
    assert done.stdout.startswith(
        "Checked: 3 sealed files, 18 files against SHA256SUMS, 7 tables against columns.json."
    )

    def flipped(name: str) -> None:
        content = bytearray((out / name).read_bytes())
        content[len(content) // 2] ^= 4
        (out / name).write_bytes(content)

    def forged(sealed: bool = True, **changes: str) -> None:
        content = unseal_record((out / "command.json").read_bytes()) | changes
        (out / "command.json").write_bytes(seal_record(content) if sealed else json.dumps(content).encode())

    def holed() -> None:
        frame = pd.read_parquet(out / "null_dimension.parquet")
        frame.loc[3, "residual"] = float("nan")
        frame.to_parquet(out / "null_dimension.parquet", index=False)

    for harm, words in (
        (lambda: flipped("shard-000000.safetensors"), ["shard-000000.safetensors: its content", "not the one in"]),
        (lambda: flipped("types.csv"), ["types.csv: its SHA-256 is not the one in SHA256SUMS."]),
        (lambda: flipped("texts.parquet"), ["texts.parquet: its SHA-256"]),
        (lambda: (out / "texts.parquet").write_bytes(b"PAR1"), ["texts.parquet: it is not a Parquet file"]),
        (lambda: (out / "correlation.csv").unlink(), ["correlation.csv: it is missing"]),
        (lambda: (out / "SHA256SUMS").unlink(), ["run: it is not complete: SHA256SUMS is missing"]),
        (lambda: (out / "SHA256SUMS").write_text("../x"), ["'../x', which is not a checksum"]),
        (holed, ["column 'residual' has missing values"]),
        (lambda: flipped("plan.json"), ["plan.json: "]),
        (lambda: flipped("command.json"), ["command.json: "]),
        (lambda: forged(place="/elsewhere", sealed=False), ["command.json: it is not a sealed JSON file."]),
        (lambda: forged(command="reproduce"), ["command.json: it names the command 'reproduce', and run.json"]),
        (lambda: (out / "command.json").unlink(), ["command.json: it is missing."]),
    ):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole["attention"], out)
        harm()
        done = run("verify", out)
        assert done.status == 1 and all(word in done.stdout for word in words), done.stdout
    told = json.loads(run("verify", out, "--json").stdout)
    assert not told["right"] and told["wrong"]
    flipped("shard-000000.safetensors")
    assert "Damaged: shard-000000.safetensors" in run("status", out).stdout


def test_diff_says_what_differs(compute: Compute, whole: dict[str, Path], tmp_path: Path):
    one = whole["attention"]
    other = tmp_path / "other"
    compute("attention", other, "--mass")
    assert run("diff", one, one).stdout.startswith("Equal: no number in ")
    done = run("diff", one, other)
    assert done.status == 1 and "Setting options.mass: False and True.\n" in done.stdout
    assert "correlation, pearson: 21 rows differ, at most by 0." in done.stdout and "; text " in done.stdout
    assert "texts, " not in done.stdout
    told = json.loads(run("diff", one, other, "--json", "--tolerance", "2").stdout)
    assert not told["equal"]  # null dimensions are whole numbers, which no tolerance makes equal
    assert {difference["column"] for difference in told["differences"]} <= {"least", "greatest", "free"}
    for wrong in ("-1", "nan", "much"):
        assert run("diff", one, other, "--tolerance", wrong).status == 2


def test_a_reproduction_is_told_checked_and_resumed_with_its_inputs(place: Path, tmp_path: Path):
    out = tmp_path / "run"
    given = ["--data", place / "texts.txt", "--first", "12", "--model", place / "model"]
    assert run("reproduce", "fig1a", *given, "--out", out).status == 0
    told = run("status", out).stdout
    assert "Complete: all results are written." in told
    assert "/attention: complete, 12 of 12 texts" in told
    assert run("verify", out).status == 0 and run("resume", out).status == 0
    assert run("diff", out, out, "--tolerance", "0").status == 0
    (shard,) = out.glob("inputs/*/attention/shard-*")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "/attention: not complete, 0 of 12 texts" in run("status", out).stdout
    done = run("verify", out)
    assert done.status == 1 and "attention/shard-000000.safetensors: " in done.stdout


def test_saved_results_are_verified_and_compared(tmp_path: Path):
    effective_attention(tiny.shared("bert"), "w3 w4 w5").save(tmp_path / "result")
    assert run("verify", tmp_path / "result").status == run("diff", *[tmp_path / "result"] * 2).status == 0
    arrays = tmp_path / "result" / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"x")
    assert run("verify", tmp_path / "result").refused("it is damaged (arrays.safetensors does not have its SHA-256)")
    assert run("diff", *[tmp_path / "result"] * 2).refused("it is damaged (arrays.safetensors does not have", 2)


def test_the_page_on_runs_names_commands_and_options_that_there_are():
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    lines = re.findall(r"identikit (attention|status|resume|verify|merge|diff)\b([^`\n#]*)", page)
    assert {command for command, _ in lines} == {"attention", "status", "resume", "verify", "merge", "diff"}
    for command, rest in lines:
        told = run(command, "--help").stdout
        for option in re.findall(r"--[a-z-]+", rest):
            assert f"  {option} " in told, (command, option)


@pytest.mark.parametrize("command", JOBS)
@pytest.mark.parametrize("options", [[], ["--skip-long"]], ids=["plain", "skip long"])
def test_every_text_is_tokenised_once(
    command: str, options: list[str], compute: Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenised: list[str] = []
    tokenize = encoding.tokenize

    def counting(tokenizer: Any, *strings: str, **tokenizer_options: Any) -> Any:
        tokenised.extend(strings)
        return tokenize(tokenizer, *strings, **tokenizer_options)

    monkeypatch.setattr(encoding, "tokenize", counting)
    assert compute(command, tmp_path / "run", *options).status == 0
    texts = [text for text in tokenised if len(text.split()) == 6]
    assert len(texts) == len(set(texts)) == 21
