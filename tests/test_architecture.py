"""The rules of the house: rooms import downwards, names are unique, modules are small, and importing stays light.

`tests/house.py` lists what the rules still let pass.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import identikit
from tests import house

SOURCE = Path(identikit.__file__).parent
# From the ground up. A room may import what is on the floors below it, and nothing else on its own floor.
FLOORS = [
    {"errors", "shapes", "version", "progress", "proof"},
    {"checks", "maths"},
    {"texts"},
    {"results"},
    {"models"},
    {"runs"},
    {"attention", "tokens", "attribution"},
    {"explanation"},
    {"plots"},
    {"web"},
    {"__init__"},
    {"paper"},
    {"cli"},
    {"__main__"},
]
HEIGHTS = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
# A Result draws itself: the one way up, and only inside a function of a module that holds Results (`…result.py`).
DRAWS = {"plots", "web"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Module(NamedTuple):
    """A file of the package: its path in there, and its syntax tree."""

    place: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """The room that it stands in; a single file is its own."""
        return self.place.parts[0].removesuffix(".py")


@cache
def modules(source: Path) -> list[Module]:
    return [Module(path.relative_to(source), ast.parse(path.read_text())) for path in sorted(source.rglob("*.py"))]


# Imports


class Import(NamedTuple):
    """A room that a module imports; that of `identikit` itself is `__init__`."""

    room: str
    inside_function: bool


def imports(module: Module) -> Iterator[Import]:
    """Every room that a module imports by a statement, absolute or relative; `imports_by_name` sees what else can."""
    inner = set()
    for function in ast.walk(module.tree):
        if isinstance(function, FUNCTIONS):
            inner.update(map(id, ast.walk(function)))
    for node in ast.walk(module.tree):
        for name in imported_names(node, ("identikit", *module.place.parts[:-1])):
            package, *rest = name.split(".")
            if package == "identikit":
                yield Import(rest[0] if rest else "__init__", id(node) in inner)


def imported_names(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """The full dotted names of the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = package[: len(package) - node.level + 1] if node.level else ()
    module = ".".join((*base, *filter(None, [node.module])))
    if module != "identikit":
        return [module]
    return [f"identikit.{alias.name}" if alias.name in HEIGHTS else "identikit" for alias in node.names]


def upward_imports(source: Path) -> Iterator[str]:
    """Every import that goes up or sideways, and every room that stands on no floor."""
    for module in modules(source):
        if module.room not in HEIGHTS:
            yield f"{module.place} is on no floor"
            continue
        for imported in imports(module):
            if not may_import(module, imported):
                yield f"{module.place} imports {imported.room}"


def may_import(module: Module, imported: Import) -> bool:
    if imported.room == module.room:
        return True
    if imported.inside_function and module.place.name.endswith("result.py") and imported.room in DRAWS:
        return True
    return HEIGHTS.get(imported.room, len(FLOORS)) < HEIGHTS[module.room]


def imports_by_name(source: Path) -> Iterator[str]:
    """Every file that can import what no test sees; that of the package itself may."""
    for module in modules(source):
        names = {last_name(node) for node in ast.walk(module.tree)}
        if names & {"import_module", "__import__"} and module.place != Path("__init__.py"):
            yield str(module.place)


def last_name(node: ast.AST) -> str:
    """The last name of what a node speaks of, if it is one."""
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2]
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# What keeps the house small


def repeated_classes(source: Path) -> Iterator[str]:
    """Every class name that is used twice."""
    names = Counter(
        node.name for module in modules(source) for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
    )
    for name, times in names.items():
        if times > 1:
            yield name


def many_parameters(source: Path) -> Iterator[str]:
    """Every function of too many parameters: of a public one those by position, of kernels none."""
    for module in modules(source):
        for node in ast.walk(module.tree):
            if isinstance(node, FUNCTIONS) and parameters(node) > house.MOST_PARAMETERS:
                yield f"{module.place}: {node.name}"


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if any(ast.unparse(decorator) in ("triton.jit", "_compiled") for decorator in node.decorator_list):
        return 0
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    number = len(positional) - (positional[:1] in (["self"], ["cls"]))
    return number if node.name in identikit.__all__ else number + len(node.args.kwonlyargs)


def written_while_frozen(source: Path) -> Iterator[str]:
    """Every class that writes past its being frozen: `object.__setattr__`, or the dictionary behind its fields."""
    for module in modules(source):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and any(map(writes_past_frozen, ast.walk(node))):
                yield f"{module.place}: {node.name}"


def writes_past_frozen(node: ast.AST) -> bool:
    behind = ("vars(self)", "self.__dict__")
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in ("object.__setattr__", *(f"{fields}.update" for fields in behind))
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return ast.unparse(node.value) in behind
    return False


def long_modules(source: Path) -> dict[str, int]:
    """Every module of too many lines, with their number."""
    sizes = {str(path.relative_to(source)): len(path.read_text().splitlines()) for path in source.rglob("*.py")}
    return {place: size for place, size in sizes.items() if size > house.LONGEST_MODULE}


RULES = {
    upward_imports: house.IMPORTS,
    imports_by_name: house.IMPORTED_BY_NAME,
    repeated_classes: house.REPEATED_CLASSES,
    many_parameters: house.MANY_PARAMETERS,
    written_while_frozen: house.WRITTEN_WHILE_FROZEN,
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(rule: Callable[[Path], Iterator[str]]):
    broken = set(rule(SOURCE))
    assert sorted(broken - RULES[rule]) == [], str(rule.__doc__)
    assert sorted(RULES[rule] - broken) == [], "Delete these from tests/house.py."


def test_modules_are_short():
    sizes = long_modules(SOURCE)
    allowed = house.LONG_MODULES
    assert {place: size for place, size in sizes.items() if size > allowed.get(place, 0)} == {}
    assert sorted(allowed.keys() - sizes.keys()) == [], "Delete these from tests/house.py."


# The rules see what they should


def made_up(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_every_kind_of_import_is_seen(tmp_path: Path):
    files = {
        "attention/result.py": "from identikit.tokens.maps import FittedMap\n",
        "attribution/plan.py": "import identikit.attention.effective\n",
        "cellar.py": "",
        "maths/effective.py": "import identikit\n",
        "models/load.py": "def load():\n    from identikit import explain\n",
        "runs/store.py": "from identikit import explanation\n",
        "tokens/maps.py": "from ..attention import effective\n",
    }
    assert list(upward_imports(made_up(tmp_path, files))) == [
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
    files = {
        "attention/effective.py": inside,
        "attention/interval_result.py": inside,
        "attention/result.py": inside,
        "attribution/result.py": "def show():\n    from identikit.cli.main import app\n",
        "tokens/result.py": "from identikit.plots import maps\n",
    }
    assert list(upward_imports(made_up(tmp_path, files))) == [
        "attention/effective.py imports plots",
        "attribution/result.py imports cli",
        "tokens/result.py imports plots",
    ]


# What is public, and what importing it loads


def test_what_is_public_is_loaded_from_where_its_types_are_read():
    """The table of lazy names, which no import statement shows, and the imports that type checkers see, agree."""
    (package,) = [module for module in modules(SOURCE) if module.place == Path("__init__.py")]
    (typed,) = [node for node in package.tree.body if isinstance(node, ast.If)]
    seen = {}
    for statement in typed.body:
        assert isinstance(statement, ast.ImportFrom)
        seen |= {alias.name: statement.module for alias in statement.names}
    table = {name: f"identikit.{module}" for name, module in identikit._MODULES.items()}
    assert table == seen and set(table) == set(identikit.__all__)
    for name, module in table.items():
        path = SOURCE.parent / f"{module.replace('.', '/')}.py"
        assert path.exists(), f"{name}: there is no {module}"
        assert HEIGHTS[module.split(".")[1]] < HEIGHTS["__init__"], f"{name}: {module} stands above the package"


def test_no_room_takes_the_place_of_a_public_function():
    """Importing a submodule sets it as an attribute of the package, where a function of that name would be hidden."""
    assert not HEIGHTS.keys() & set(identikit.__all__)


def test_mathematics_knows_no_models():
    for module in modules(SOURCE):
        if module.room == "maths":
            assert {imported.room for imported in imports(module)} <= {"errors", "shapes", "maths"}, module.place
            assert "transformers" not in (SOURCE / module.place).read_text().replace("transformers'", ""), module.place


def printed(script: str) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


HEAVY = "matplotlib xarray fastapi ray datasets sentence_transformers pandas pyarrow numba typer rich"
BARE = (
    "import sys; sys.modules.update(jaxtyping=None, scipy=None); from identikit import *\n"
    "from identikit.shapes import Float, Tensor; assert Float[Tensor, 'n d'] is Tensor"
)


@pytest.mark.parametrize(
    ("loaded", "heavy"),
    [(BARE, HEAVY), ("import identikit.__main__, identikit.cli.main", "torch numpy")],
    ids=["the package, on a bare image", "the command line"],
)
def test_what_is_slow_is_loaded_when_it_is_needed(loaded: str, heavy: str):
    """The rooms that compute need torch, transformers, numpy and safetensors alone."""
    assert printed(f"{loaded}\nimport sys; print([name for name in {heavy.split()} if name in sys.modules])") == "[]"
