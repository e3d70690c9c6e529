"""Variables, limits and missing packages that the command line meets, most in a real process.

Terminals, encodings and homes that cannot be written to are in `tests/cli`.
"""

import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.judging import refused, unclear
from tests.hostile.made import Done, checked, command, process, saved, strict_json, texts_file


def explain() -> list[str | Path]:
    return ["explain", "w5 w6 w7 w8", "--model", saved("bert")]


def numbers(done: Done) -> Any:
    told = strict_json(checked(done).stdout)
    told["provenance"].pop("versions", None)
    return told


@cache
def undisturbed() -> Any:
    """Return what is explained in a plain process."""
    return numbers(process(*explain(), "--json"))


def assert_near(value: Any, expected: Any) -> None:
    """Two JSON values are equal but for rounding: the last digits depend on the threads."""
    assert type(value) is type(expected)
    if isinstance(value, dict):
        assert value.keys() == expected.keys()
        for key in value:
            assert_near(value[key], expected[key])
    elif isinstance(value, list):
        assert len(value) == len(expected)
        for pair in zip(value, expected, strict=True):
            assert_near(*pair)
    elif isinstance(value, float):
        assert math.isclose(value, expected, rel_tol=1e-3, abs_tol=1e-5)
    else:
        assert value == expected


VARIABLES: dict[str, dict[str, str]] = {
    "of Python": {"PYTHONWARNINGS": "error", "PYTHONHASHSEED": "12345", "PYTHONDEVMODE": "1"},
    "of libraries": {"TRANSFORMERS_VERBOSITY": "nonsense", "CUDA_VISIBLE_DEVICES": "nonsense", "OMP_NUM_THREADS": "0",
                     "JAXTYPING_DISABLE": "1"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", VARIABLES)
def test_strange_variables_change_no_number(what: str):
    assert_near(numbers(process(*explain(), "--json", **VARIABLES[what])), undisturbed())


@pytest.mark.slow
def test_python_without_docstrings_is_refused():
    """Transformers cannot do without them."""
    with refused():
        checked(process(*explain(), PYTHONOPTIMIZE="2"))


# Packages and limits

OPTIONAL = ["numba", "matplotlib", "xarray", "peft", "datasets", "PIL", "soundfile", "spacy", "accelerate", "ray"]


def hide(*packages: str) -> str:
    return f"import sys; sys.modules.update(dict.fromkeys({packages!r}))"


def attend(place: Path) -> list[str | Path]:
    data = texts_file(place, ["w5 w6", "w7 w8"])
    return ["attention", "--model", saved("bert"), "--data", data, "--out", place / "out", "--json"]


@pytest.mark.slow
def test_no_command_needs_optional_packages(tmp_path: Path):
    assert numbers(process(*explain(), "--json", first=hide(*OPTIONAL, "pandas", "pyarrow"))) == undisturbed()
    done = checked(process(*attend(tmp_path), first=hide(*OPTIONAL)))
    assert (tmp_path / "out" / "texts.csv").exists() and strict_json(done.stdout)["texts"] == 2


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused("pandas"):
        command(*attend(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("package", ["numba", "scipy"])
def test_a_solver_that_is_missing_is_named_or_done_without(package: str):
    done = process(*explain(), "--json", first=hide(package))
    if done.status:
        with refused(package):
            checked(done)
    else:
        assert numbers(done) == undisturbed()


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (9 << 29, 9 << 29))",
        "import sys; import identikit.cli.main; sys.setrecursionlimit(120)",
        "import os, tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
    ],
    ids=["few open files", "little memory", "a shallow stack", "no working folder"],
)
def test_a_limit_is_told_in_a_line_or_changes_no_number(first: str):
    done = process(*explain(), "--json", first=first)
    if done.status:
        assert done.status in (1, 70) and unclear(done.stderr.strip()) == ""
    else:
        assert numbers(done) == undisturbed()
