"""A result as one HTML file that works from disk, without a network, and shown where the reader is."""

import hashlib
import html
import os
import sys
import webbrowser
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING

import torch

from identikit.attention.result import EffectiveAttention
from identikit.checks import function, is_collection, is_path, shortened
from identikit.errors import InputError
from identikit.explanation.result import COMING, Explanation
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
<meta name="viewport" content="width=device-width, initial-scale=1">{head}
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="identikit"><noscript>This page draws its views with JavaScript, all of which is in this file.</noscript></div>
{data}
<script type="module">{script}</script>
</body>
</html>
"""
_RELOADED = '\n<meta http-equiv="refresh" content="10">'  # until what is still being computed is written too
_DATA = '<script type="application/octet-stream" id="identikit-data{name}">{data}</script>'


@one_thread()
def page_of(results: Sequence[Result], *, progress: Progress = silent) -> str:
    """Return the page of a result, or of two side by side; its policy lets it run its own script and load nothing."""
    title = f"{results[0].model_name}: {results[0].kind}"
    entry = "report"
    names = [""]
    if len(results) > 1:
        title = " and ".join(dict.fromkeys(result.model_name for result in results))
        entry = "pair"
        names = ["-0", "-1"]  # under which the script finds what it shows
    opening = most_different_row(*results) if len(results) > 1 else None  # the second page follows the first
    data = []
    for name, result in zip(names, results, strict=True):
        content = packed(result, opening=opening if result is results[0] else None, progress=progress)
        data.append(_DATA.format(name=name, data=b64encode(content).decode()))
    coming = any(isinstance(result, Explanation) and result.attribution == COMING for result in results)
    script = f"{bundle(f'{entry}.js')}\nshow{entry.capitalize()}();\n"
    sheet = style("page.css") + style()
    return _PAGE.format(
        policy=f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(sheet)}'; img-src data: blob:",
        title=html.escape(f"{title} - identikit"),
        head=_RELOADED if coming else "",
        style=sheet,
        data="\n".join(data),
        script=script,
    )


def most_different_row(first: Result, second: Result) -> dict[str, int]:
    """Return the head in which raw attention differs most, and its row that does, as indices into the first result.

    Only positions with the same token in both are compared. Nothing is returned where the results have no such maps,
    where their texts have different numbers of tokens, and where nothing differs.
    """
    attentions = [result.attention if isinstance(result, Explanation) else result for result in (first, second)]
    left, right = attentions
    if not isinstance(left, EffectiveAttention) or not isinstance(right, EffectiveAttention):
        return {}
    if len(left.tokens) != len(right.tokens) or len(left.keys) != len(right.keys):
        return {}
    same_query = torch.tensor([token == twin for token, twin in zip(left.tokens, right.tokens, strict=True)])
    same_key = torch.tensor([token == twin for token, twin in zip(left.keys, right.keys, strict=True)])
    heads = [head for head in left.heads if head in right.heads]
    largest = 0.0
    opening = {}
    for layer in left.layers:
        if layer not in right.layers or not heads:
            continue
        maps = [attention.sel(layer=[layer], head=heads).read("raw")[0].cpu() for attention in (left, right)]
        distance = ((maps[0] - maps[1]).abs() * same_key).sum(-1) * same_query  # (head, query)
        means = distance.mean(-1)
        if float(means.max()) > largest:
            largest = float(means.max())
            head = int(means.argmax())
            query = int(distance[head].argmax())
            opening = {"layer": left.layers.index(layer), "head": left.heads.index(heads[head]), "query": query}
    return opening


def _hash(content: str) -> str:
    return f"sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


@reporting
def save_html(results: Result | Sequence[Result], path: str | os.PathLike[str], *, progress: Watched = None) -> Path:
    """Write one HTML file with the views of a result, or of two side by side; it works from disk, without a network.

    Two results may be of two texts or of two models. Layer and head are chosen for both. Where their texts have the
    same number of tokens, so are tokens, and the page shows the difference of the chosen head's maps, the first result
    less the second, at the positions where both have the same token. Returns the path.

    - `results`: a result, or a list of two
    - `path`: where to write it, a name that ends in .html; a page that is there already is replaced
    - `progress`: called with what is being done, how much of it is done, and how much there is
    """
    several = list(results) if is_collection(results) else [results]
    listed = [result for result in several if isinstance(result, Result)]
    if len(listed) not in (1, 2) or len(listed) < len(several):
        raise InputError(f"save_html takes a result, or a list of two, and got {shortened(results)}.")
    target = checked_target(path)
    return write_page(target, page_of(listed, progress=function("progress", progress)))


def write_page(target: Path, page: str) -> Path:
    """Write a page, whole or not at all, and return its path."""
    with _beside(target):
        write_file(target, page.encode())
    return target


def checked_target(path: str | os.PathLike[str]) -> Path:
    """Return the path of a page to write, or refuse it before anything is computed."""
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
    """Yield a temporary folder beside the target; raise an error in a sentence if nothing can be written there."""
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
    page = save_html(result, Path(mkdtemp(prefix="identikit-")) / "result.html")
    webbrowser.open(page.as_uri())
    return page


def _in_notebook() -> bool:
    """Return whether this runs in a kernel that displays what a cell returns."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
