"""Show a result where the reader is: in a notebook, or in a browser."""

import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from identikit.errors import InputError
from identikit.results.result import Result
from identikit.web.report import save_report

if TYPE_CHECKING:
    from identikit.web.widget import Widget


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
    page = save_report(result, Path(tempfile.mkdtemp(prefix="identikit-")) / "result.html")
    webbrowser.open(page.as_uri())
    return page


def _in_notebook() -> bool:
    """Return whether this runs in a kernel that displays what a cell returns."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
