"""The rules of the house: rooms import downwards only, the public names are fixed, importing stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import identikit

SOURCE = Path(identikit.__file__).parent
# From the ground up: a room may import its own floor and those below it.
FLOORS = [
    {"errors", "shapes"},
    {"maths", "text"},
    {"data", "models", "tags"},
    {"results"},
    {"store"},
    {"engine"},
    {"probes"},
    {"analyses"},
    {"explain"},
    {"render", "bench", "finetune"},
    {"paper"},
    {"cli", "__init__", "__main__"},
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module == "identikit":
            names = [f"identikit.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("identikit.")}
    return rooms


def test_every_room_is_on_a_floor():
    assert {room(path) for path in SOURCE.rglob("*.py")} <= set(FLOOR)


def test_no_room_imports_a_higher_one():
    upward = [
        f"{path.relative_to(SOURCE)} imports {other}"
        for path in SOURCE.rglob("*.py")
        for other in imported_rooms(path)
        if FLOOR[other] > FLOOR[room(path)]
    ]
    assert upward == []


def test_mathematics_knows_no_models():
    for path in (SOURCE / "maths").glob("*.py"):
        assert imported_rooms(path) <= {"errors", "shapes", "maths"}
        assert "transformers" not in path.read_text().replace("transformers'", "")


def test_public_names():
    assert identikit.__all__ == [
        "load",
        "explain",
        "effective_attention",
        "attention_intervals",
        "alternative_attention",
        "minimum_norm_attention",
        "token_attribution",
        "token_identifiability",
        "read_texts",
        "Model",
        "TokenBatch",
        "IdentikitError",
        "InputError",
        "ModelError",
    ]
    assert all(hasattr(identikit, name) for name in identikit.__all__)


def test_import_is_light():
    heavy = ["matplotlib", "fastapi", "ray", "datasets", "sentence_transformers", "pandas", "highspy", "typer"]
    script = f"import sys, identikit; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_core_runs_on_a_bare_image():
    """maths, models and analyses need torch, transformers, numpy and safetensors alone."""
    hidden = ["jaxtyping", "einops", "pandas", "pyarrow", "scipy", "highspy", "typer", "rich", "matplotlib"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden}))\n"
        "import identikit.models.load, identikit.maths; from identikit.shapes import Float, Tensor\n"
        "assert Float[Tensor, 'n d'] is Tensor; print('ran')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "ran", done.stderr
