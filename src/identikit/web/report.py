"""A result as one HTML file that works from disk, without a network, and shown where the reader is."""

import hashlib
import html
import os
import sys
import webbrowser
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING

from identikit.checks import function, is_path, shortened
from identikit.errors import InputError
from identikit.maths.threads import one_thread
from identikit.progress import Progress, Watched, reporting, silent
from identikit.results.files import write_file
from identikit.results.result import Result
from identikit.web.bundle import bundle, style
from identikit.web.payload import packed

if TYPE_CHECKING:
    from identikit.web.widget import Widget

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="identikit"><noscript>This page draws its views with JavaScript, all of which is in this file.</noscript></div>
<script type="application/octet-stream" id="identikit-data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


@one_thread()
def report(result: Result, *, progress: Progress = silent) -> str:
    """Return the page of a result. Its content policy lets it run its own script and load nothing."""
    script = f"{bundle('report.js')}\nshowReport();\n"
    sheet = style("page.css") + style()
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(sheet)}'; img-src data: blob:"
    data = b64encode(packed(result, progress=progress)).decode()
    title = html.escape(f"{result.model_name}: {result.kind} - identikit")
    return _PAGE.format(policy=policy, title=title, style=sheet, data=data, script=script)


def _hash(content: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


@reporting
def save_report(result: Result, path: str | os.PathLike[str], *, progress: Watched = None) -> Path:
    """Write the page of a result, whole or not at all; a page that is there already is replaced. Returns its path."""
    target = checked_target(path)
    return write_page(target, report(result, progress=function("progress", progress)))


def write_page(target: Path, page: str) -> Path:
    """Write a page, whole or not at all, and return its path."""
    with _beside(target):
        write_file(target, page.encode())
    return target


def checked_target(path: str | os.PathLike[str]) -> Path:
    """Return where a page is to be written, or refuse it before anything is computed."""
    if not is_path(path):
        raise InputError(f"Writing a page: expected the path of a file, and got {shortened(path)}.")
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"Writing a page to {shortened(str(path))}: expected a name that ends in .html.")
    with _beside(target):
        if target.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
    return target


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a folder beside the target, which is gone afterwards; say what is wrong where nothing can be written."""
    try:
        with TemporaryDirectory(prefix=".identikit-", dir=target.parent) as folder:
            yield Path(folder)
    except OSError as error:
        wrong = (error.strerror or str(error)).lower()
        if not target.parent.is_dir():
            wrong = f"the folder {target.parent} does not exist"
        raise InputError(
            f"Writing a page to {target}: {wrong}. Give the name of a file in a folder that exists and can be written."
        ) from None


def show(result: Result) -> "Path | Widget":
    """Return a result's widget in a notebook; elsewhere open its page in a browser, and return the page's path."""
    if _in_notebook():
        try:
            from identikit.web.widget import widget
        except ModuleNotFoundError as missing:
            raise InputError(
                f"show() in a notebook needs the package {missing.name}: pip install 'identikit[notebook]'. "
                "Without it, save_html(path) writes the same views to a file."
            ) from None
        return widget(result)
    page = save_report(result, Path(mkdtemp(prefix="identikit-")) / "result.html")
    webbrowser.open(page.as_uri())
    return page


def _in_notebook() -> bool:
    """Return whether this runs in a kernel that displays what a cell returns."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
