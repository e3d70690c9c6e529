"""How the command line ends: every way out, in a process of its own, as a shell sees it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from identikit.cli.endings import run
from tests.cli import made

COMMAND = [sys.executable, "-m", "identikit"]
WORD = "naïve 🙂 → Ġ"
PROSE = f"from identikit.cli.terminal import print_json; print_json(dict(word={WORD!a}))"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which `identikit` is the command."""
    line = f'identikit() {{ "{sys.executable}" -m identikit "$@"; }}; {line}'
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=os.environ | environment)


def ended(
    code: str, *, after: str = "", encoding: str = "utf-8", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code as a command, with what a shell puts after it."""
    script = f"from identikit.cli.endings import run\ndef command():\n    {code}\nrun(lambda: command)"
    line = ["bash", "-c", f'"$0" -c "$1" {after}', sys.executable, script]
    return subprocess.run(line, capture_output=True, encoding=encoding, env=os.environ | environment)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(2)", 2, ""),
        ("raise KeyboardInterrupt", 130, "Interrupted."),
        ("from identikit import InputError; raise InputError('No' + chr(10) + 'such text.')", 1, "No such text."),
        ("raise MemoryError", 1, "This needs more than memory. Pass a shorter text"),
        ("raise RuntimeError('CUDA out of memory. Tried')", 1, "This needs more than the GPU's memory."),
        ("open('no-such-file')", 1, "No such file or directory (no-such-file)."),
        ("import errno; raise OSError(errno.EMFILE, 'Too many open files')", 1, "Too many open files. Fix this"),
        ("raise RecursionError('maximum')", 70, "An internal error, which is not your fault: RecursionError: maximum."),
        ("1 / 0", 70, "An internal error, which is not your fault: ZeroDivisionError: division by zero."),
    ],
)
def test_every_exception_is_one_line_and_a_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: str,
    status: int,
    words: str,
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        run(lambda: lambda: exec(code))
    said = capsys.readouterr()
    assert caught.value.code == status and said.out == "" and said.err.count("\n") == bool(words)
    assert words in said.err and "Traceback" not in said.err
    reports = list(tmp_path.iterdir())
    assert len(reports) == (status == 70)
    for report in reports:  # an error of ours can be reported in full
        assert f"with the file {report}." in said.err and "Traceback (most recent" in report.read_text()


def test_an_internal_error_is_told_where_no_report_can_be_written():
    done = ended("import tempfile; tempfile.NamedTemporaryFile = lambda *_, **__: open('/no/where'); 1 / 0")
    assert done.returncode == 70 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_error():
    done = shell("identikit --help | head -1; echo ${PIPESTATUS[0]}")
    assert done.stderr == "" and done.stdout.splitlines()[-1] in ("0", "1")
    done = ended("[print('word' * 100) for _ in range(5000)]", after="| head -1")
    assert done.stderr == "" and done.stdout == "word" * 100 + "\n"


def test_a_full_disk_under_the_output_is_told():
    for code in ("print('short')", "print('word ' * 100_000)"):
        done = ended(code, after="> /dev/full")
        assert done.returncode == 1 and "No space left on device" in done.stderr and done.stderr.count("\n") == 1
    done = ended("1 / 0", after="2> /dev/full")
    assert done.returncode == 70 and done.stdout == ""


@pytest.mark.parametrize("after", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, after: str):
    """What is opened while a stream is closed is not taken for the stream."""
    file = tmp_path / "kept"
    done = ended(f"kept = open('{file}', 'w'); print('said'); kept.write('kept'); kept.close()", after=after)
    assert done.returncode == 0 and done.stderr == "" and file.read_text() == "kept"
    assert done.stdout == ("" if ">&-" in after.replace("2>&-", "") else "said\n")


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "cp437"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_any_encoding_can_be_printed_in_and_json_stays_json(environment: dict[str, str]):
    encoding = environment.get("PYTHONIOENCODING", "ascii")
    done = ended(PROSE, encoding=encoding, PYTHONCOERCECLOCALE="0", **environment)
    assert done.returncode == 0 and json.loads(done.stdout) == {"word": WORD} and done.stdout.count("\\u")
    code = f"from identikit import InputError; raise InputError({WORD!a})"
    assert ended(code, encoding=encoding, **environment).returncode == 1


def test_bytes_that_are_no_text_can_be_told():
    assert made.run("explain", "\udcff\udcfe", "--model", "/no/\udcff").refused("/no/\\udcff")


def test_any_terminal_will_do():
    line = "identikit --help && identikit explain --seconds many"
    done = shell(line, COLUMNS="-5", TERM="", LC_ALL="", PYTHONWARNINGS="error")
    assert done.returncode == 2 and "explain" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "status", "word"), [(2, 130, "Interrupted"), (15, 143, "Terminated")])
def test_signals_end_in_one_line_also_while_it_starts(number: int, status: int, word: str):
    waiting = "import time; print('begun', flush=True); time.sleep(60)"
    script = f"from identikit.cli.endings import run\ndef command():\n    {waiting}\nrun(lambda: command)"
    with subprocess.Popen(
        [sys.executable, "-c", script, "--out"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(number)
        _, told = process.communicate(timeout=20)
    assert process.returncode == status and told == f"identikit: {word}.\n"  # no folder holds anything
    with subprocess.Popen([*COMMAND, "models"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        time.sleep(1)  # while torch and its like are loaded
        process.send_signal(number)
        _, told = process.communicate(timeout=20)
    assert b"Traceback" not in told and told.count(b"\n") <= 1
    assert process.returncode in (0, status, -number)  # before Python itself has started, a signal just ends it


def test_a_second_signal_does_not_stop_what_is_written_at_the_end():
    script = """
import time
from identikit.cli.endings import run
def command():
    try:
        print('begun', flush=True)
        time.sleep(60)
    finally:
        time.sleep(1)
        print('written', flush=True)
run(lambda: command)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        printed, told = process.communicate(timeout=20)
    assert process.returncode == 130 and printed == "written\n" and told == "identikit: Interrupted.\n"


def test_a_signal_that_a_destructor_swallows_is_not_lost():
    script = """
import signal, time
from identikit.cli.endings import run
class Destroyed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
def command():
    Destroyed()
    print('went on', flush=True)
    time.sleep(60)
run(lambda: command)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        printed, told = process.communicate(timeout=20)
    assert process.returncode == 130 and printed == "went on\n" and told == "identikit: Interrupted.\n"


def test_a_signal_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run(lambda: lambda: None)
    assert ended.value.code == 0 and signal.getsignal(signal.SIGTERM) is before
