"""The rules of the house: rooms import downwards, siblings not at all, and importing the package stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import identikit

SOURCE = Path(identikit.__file__).parent
# From the ground up. A room may import what is on the floors below it, and nothing else on its own floor.
FLOORS = [
    {"errors", "shapes", "version", "progress"},
    {"checks", "maths"},
    {"texts"},
    {"results"},
    {"models"},
    {"runs"},
    {"attention", "tokens", "attribution"},
    {"explanation"},
    {"plots"},
    {"__init__"},
    {"web"},
    {"paper"},
    {"cli"},
    {"__main__"},
]
# A Result draws itself: the one way up, and only inside a function of a module that holds Results.
DRAWS = {"plots", "web"}


def violations(source: Path) -> list[str]:
    """Every import in a tree that goes up or sideways, and every room that stands on no floor."""
    floor = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
    found = []
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        room = place.parts[0].removesuffix(".py")
        if room not in floor:
            found.append(f"{place} is on no floor")
            continue
        holds_results = path.name == "result.py"
        for other, inside in imported_rooms(path, source):
            if other == room or (inside and holds_results and other in DRAWS):
                continue
            if other not in floor or floor[other] >= floor[room]:
                found.append(f"{place} imports {other}")
    return found


def imported_rooms(path: Path, source: Path) -> Iterator[tuple[str, bool]]:
    """Each room that a file imports, absolutely or relatively, and whether it does so inside a function."""
    package = ("identikit", *path.relative_to(source).parts[:-1])
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inner = {id(node) for function in ast.walk(tree) if isinstance(function, functions) for node in ast.walk(function)}
    for node in ast.walk(tree):
        for name in imported_names(node, package):
            parts = name.split(".")
            if parts[0] == "identikit":
                yield (parts[1] if len(parts) > 1 else "__init__"), id(node) in inner


def imported_names(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """The full dotted names that an import statement reaches for; `import identikit` is the whole package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = package[: len(package) - node.level + 1] if node.level else ()
    module = ".".join((*base, *filter(None, [node.module])))
    if module != "identikit":
        return [module]
    rooms = {path.name.removesuffix(".py") for path in SOURCE.iterdir()} | set().union(*FLOORS)
    return [f"identikit.{alias.name}" if alias.name in rooms else "identikit" for alias in node.names]


def test_no_room_imports_upwards_or_sideways():
    assert violations(SOURCE) == []


def made_up(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_the_rule_sees_every_kind_of_import(tmp_path: Path):
    house = made_up(
        tmp_path,
        attention__in__result="from identikit.tokens.maps import FittedMap\n",
        tokens__in__maps="from ..attention import effective\n",
        attribution__in__plan="import identikit.attention.effective\n",
        maths__in__effective="import identikit\n",
        models__in__load="def load():\n    from identikit import explain\n",
        runs__in__store="from identikit import explanation\n",
        cellar="",
    )
    assert violations(house) == [
        "attention/result.py imports tokens",
        "attribution/plan.py imports attention",
        "cellar.py is on no floor",
        "maths/effective.py imports __init__",
        "models/load.py imports __init__",
        "runs/store.py imports explanation",
        "tokens/maps.py imports attention",
    ]


def test_only_a_result_may_reach_up_and_only_to_draw(tmp_path: Path):
    inside = "def plot():\n    from identikit.plots import maps\n"
    house = made_up(
        tmp_path,
        attention__in__result=inside,
        attention__in__effective=inside,
        tokens__in__result="from identikit.plots import maps\n",
        attribution__in__result="def show():\n    from identikit.cli.main import app\n",
    )
    assert violations(house) == [
        "attention/effective.py imports plots",
        "attribution/result.py imports cli",
        "tokens/result.py imports plots",
    ]


def test_no_room_takes_the_place_of_a_public_function():
    """Importing a submodule sets it as an attribute of the package, where a function of that name would be hidden."""
    assert not set().union(*FLOORS) & set(identikit.__all__)


def test_mathematics_knows_no_models():
    for path in (SOURCE / "maths").rglob("*.py"):
        assert {room for room, _ in imported_rooms(path, SOURCE)} <= {"errors", "shapes", "maths"}
        assert "transformers" not in path.read_text().replace("transformers'", "")


def test_only_the_command_line_knows_the_paper():
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] not in ("paper", "cli"):
            assert "paper" not in {room for room, _ in imported_rooms(path, SOURCE)}, path


def test_import_is_light():
    heavy = [
        "matplotlib",
        "xarray",
        "fastapi",
        "ray",
        "datasets",
        "sentence_transformers",
        "pandas",
        "highspy",
        "numba",
        "typer",
    ]
    script = f"import sys; from identikit import *; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_command_line_starts_before_anything_slow_is_loaded():
    script = (
        "import sys, identikit.__main__, identikit.cli.main; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_core_runs_on_a_bare_image():
    """The rooms that compute need torch, transformers, numpy and safetensors alone."""
    hidden = ["jaxtyping", "pandas", "pyarrow", "scipy", "highspy", "numba", "typer", "rich", "matplotlib", "xarray"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden}))\n"
        "from identikit import *; from identikit.shapes import Float, Tensor\n"
        "assert Float[Tensor, 'n d'] is Tensor; print('ran')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "ran", done.stderr
