"""The commands over a run's folder, as a user meets them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from identikit.attention.dataset import AttentionJob
from identikit.attribution.dataset import AttributionJob
from identikit.cli import main
from identikit.errors import InputError
from identikit.tokens.dataset import IdentifiabilityJob
from tests.models import tiny

JOBS = {"attention": AttentionJob, "attribution": AttributionJob, "tokens": IdentifiabilityJob}
OPTIONS = {"attention": ["--intervals", "2"], "attribution": ["--probes", "4"], "tokens": ["--folds", "2"]}


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str

    def refused(self, words: str, status: int = 1) -> bool:
        return self.status == status and self.stderr.count("\n") == 1 and words in self.stderr


Command = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["identikit", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Done(int(caught.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, and texts that it reads in four blocks."""
    folder = tmp_path_factory.mktemp("place")
    tiny.build("bert").save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    texts = [f"w{i % 50 + 3} w{i % 47 + 4} w{i % 43 + 5} w{i % 41 + 6}" for i in range(100)]
    (folder / "texts.txt").write_text("\n".join(texts))
    return folder


@pytest.fixture
def compute(run: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command over the texts, with paths relative to where they are."""

    def compute(command: str, out: Path, *options: str) -> Done:
        monkeypatch.chdir(place)
        done = run(command, "--data", "texts.txt", "--model", "model", *OPTIONS[command], "--out", out, *options)
        monkeypatch.chdir(Path(__file__).parent)
        return done

    return compute


@pytest.fixture
def stopped(compute: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command that fails in its third block or part."""

    def stopped(command: str, out: Path, *options: str) -> Done:
        read, calls = JOBS[command].compute, []

        def failing(*given: Any) -> Any:
            calls.append(given)
            if len(calls) > 2:
                raise InputError("The third failed.")
            return read(*given)

        with monkeypatch.context() as patched:
            patched.setattr(JOBS[command], "compute", failing)
            return compute(command, out, *options)

    return stopped


def tables(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.iterdir() if path.suffix in (".parquet", ".csv") or path.name == "columns.json"]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize("command", JOBS)
def test_shards_merge_into_what_one_run_gives(run, compute, tmp_path: Path, command: str):
    assert compute(command, tmp_path / "whole").status == 0
    assert run("merge", tmp_path / "whole").refused("it holds no shards")
    for shard in ("2/2", "1/2"):
        assert compute(command, tmp_path / "parts", "--shard", shard).status == 0
    merged = run("merge", tmp_path / "parts")
    assert merged.status == 0 and f"The tables are in {tmp_path / 'parts'}" in merged.stdout
    assert tables(tmp_path / "parts") == tables(tmp_path / "whole") != {}
    assert run("verify", tmp_path / "parts").status == 0
    about = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("parts", "whole")]
    assert about[0]["run"] == about[1]["run"] and about[0]["recorded"]["shards"].keys() == {"1/2", "2/2"}
    assert run("diff", tmp_path / "parts", tmp_path / "whole", "--tolerance", "0").status == 0


@pytest.mark.parametrize("command", JOBS)
def test_a_run_resumes_from_its_folder_alone(run, compute, stopped, tmp_path: Path, command: str):
    """From another folder, with paths that were relative to the first one."""
    assert stopped(command, tmp_path / "run").refused("The third failed.")
    told = run("status", tmp_path / "run").stdout
    assert "Done: 2 of " in told and "The third failed." in told and "Nobody is writing to it." in told
    assert run("verify", tmp_path / "run").status == 1
    resumed = run("resume", tmp_path / "run")
    assert resumed.status == 0, resumed.stderr
    whole = compute(command, tmp_path / "whole")
    assert resumed.stdout == whole.stdout.replace(str(tmp_path / "whole"), str(tmp_path / "run"))
    assert tables(tmp_path / "run") == tables(tmp_path / "whole")
    state = json.loads(run("status", tmp_path / "run", "--json").stdout)["run"]
    assert state["complete"] and state["share"] == 1 and not state["missing"] and state["error"] is None
    assert json.loads(run("resume", tmp_path / "run", "--json").stdout)["tables"]
