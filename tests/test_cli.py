"""The command line as a user meets it."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from identikit.cli import main


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["identikit", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return Done(int(caught.value.code or 0), *capsys.readouterr())

    return run


def test_explain_gives_a_verdict_on_the_embedded_sample():
    """In a process of its own, as `make demo` runs it: nothing but the verdict is printed."""
    command = [sys.executable, "-c", "from identikit.cli import main; main()", "explain"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told = " ".join(done.stdout.split())
    assert "all-MiniLM-L6-v2 6 layers, 12 heads, values of 32 dimensions a head, bidirectional" in told
    assert "Not all of it. The text has 99 tokens and a head's values only 32 dimensions" in told
    assert "up to 67 independent directions" in told
    assert "Where the picture misleads most" in told and "Certificate" in told


def test_explain_short_text_as_json(run):
    done = run("explain", "A short text.", "--pair", "And another.", "--json")
    told = json.loads(done.stdout)
    assert told["tokens"] == ["[CLS]", "a", "short", "text", ".", "[SEP]", "and", "another", ".", "[SEP]"]
    assert [layer["null_dim"] for layer in told["layers"]] == [[0, 0]] * 6
    assert told["heads"] == [] and told["pearson"] == pytest.approx(1.0)
    assert told["provenance"]["model"] == "all-MiniLM-L6-v2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", ""], "blank"),
        (["explain", "a", "--pair", "  "], "blank"),
        (["explain", "--pair", "b"], "--pair goes with a first text"),
        (["explain", "a", "--model", "nobody/nothing"], "loading nobody/nothing: there is no such folder"),
        (["explain", "word " * 600], "602 tokens and the model reads at most 512"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(run, arguments: list[str], message: str):
    done = run(*arguments)
    assert done.status == 1
    assert done.stdout == ""
    assert done.stderr.startswith("identikit: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


def test_truncate_is_explicit(run):
    done = run("explain", "word " * 600, "--truncate", "--json")
    assert len(json.loads(done.stdout)["tokens"]) == 512


def test_models_are_listed(run):
    families = [row["family"] for row in json.loads(run("models", "--json").stdout)]
    assert {"bert", "llama", "xlnet", "vit", "gemma3_text"} <= set(families)
    assert "xlnet" in run("models").stdout
    assert run("--version").stdout.startswith("identikit 0.")
