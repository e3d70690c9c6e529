"""A result as one HTML file that works from disk, without a network."""

import hashlib
import html
import os
from base64 import b64encode
from pathlib import Path

from identikit.errors import InputError
from identikit.progress import Progress, silent
from identikit.result import Result
from identikit.web.bundle import bundle, style
from identikit.web.payload import packed

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


def save_report(result: Result, path: str | os.PathLike[str], *, progress: Progress = silent) -> Path:
    """Write the page of a result, whole or not at all; a page that is there already is replaced. Returns its path."""
    target = checked_target(path)
    page = report(result, progress=progress)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"Cannot write {target}: {error.strerror or error}.") from None
    return target


def checked_target(path: str | os.PathLike[str]) -> Path:
    """Return where a page is to be written, or refuse it before anything is computed."""
    try:
        target = Path(path)
    except TypeError:
        raise InputError(f"Writing a page: expected the path of a file, and got {type(path).__name__}.") from None
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"Writing a page to {target}: expected a name that ends in .html.")
    if target.is_dir() or not target.parent.is_dir():
        wrong = "it is a folder" if target.is_dir() else f"the folder {target.parent} does not exist"
        raise InputError(f"Writing a page to {target}: {wrong}. Give the name of a file in a folder that exists.")
    return target
