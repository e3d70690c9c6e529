"""The views' modules as one, for a file and for a notebook.

On a server, browsers load the modules as they are. A file opened from disk and a notebook cell need a single script, so
the modules are laid end to end in the order of their imports. This works because they keep to a few rules, which a test
checks: one-line imports by name, no default exports, and top-level names that are unique over all modules.
"""

import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

_IMPORT = re.compile(r'^import \{ [\w, $]+ \} from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async )?(function|class|const|let) )", re.MULTILINE)


def static() -> Traversable:
    """Return the folder of the modules and the style."""
    return files("identikit.web") / "static"


@cache
def bundle(entry: str) -> str:
    """Return a module and everything that it imports as one script without imports or exports."""
    order: list[str] = []
    sources: dict[str, str] = {}

    def visit(name: str) -> None:
        if name in sources:
            return
        sources[name] = (static() / name).read_text(encoding="utf-8")
        for imported in _IMPORT.findall(sources[name]):
            visit(imported)
        order.append(name)

    visit(entry)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", sources[name])) for name in order)


@cache
def style(name: str = "style.css") -> str:
    """Return a style sheet."""
    return (static() / name).read_text(encoding="utf-8")
