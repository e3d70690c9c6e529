"""Test-wide settings: shapes are checked, hypothesis is repeatable, nothing reaches a network.

Shapes are checked in every call of the tests of the rooms that compute. A call on a tiny model then takes two to three
times as long, so the other tests, which go through the same calls, do without. `make test-all` checks everywhere.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start: each worker has one core

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

CHECKED = {"attention", "attribution", "explanation", "maths", "models", "texts", "tokens"}


def modules_with_shapes() -> list[str]:
    """Those that annotate shapes. Pyright sees what the others annotate, and to check it in every call is slow."""
    package = find_spec("identikit")
    assert package and package.origin
    source = Path(package.origin).parent
    imported = re.compile(r"^from identikit\.shapes import (Bool|Float|Int)", re.MULTILINE)
    files = [path.relative_to(source.parent) for path in source.rglob("*.py") if imported.search(path.read_text())]
    return [".".join(path.with_suffix("").parts) for path in files]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check shapes, or not, from the first fixture of a test on."""
    room = item.path.relative_to(Path(__file__).parent).parts[0]
    everywhere = "CHECK_SHAPES" in os.environ and room != "hostile"  # wrong arguments are for the library to refuse
    checked = everywhere or room in CHECKED
    jaxtyping.config.update("jaxtyping_disable", not checked)


def checked_outside(*, typechecker: Any, checked: Any = jaxtyping.jaxtyped) -> Any:
    """Leave functions inside functions alone: their checks would be compiled anew in every call, for 5 ms."""
    decorate = checked(typechecker=typechecker)
    return lambda thing: thing if "<locals>" in getattr(thing, "__qualname__", "") else decorate(thing)


jaxtyping.jaxtyped = checked_outside
jaxtyping.install_import_hook(modules_with_shapes(), "beartype.beartype")

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
