"""What Sphinx is taught: to write the reference, to begin with the README, to link names in code, and to set formulas.

Formulas become MathML, which needs no script and no fonts from elsewhere: docutils makes it, and browsers draw it.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform
from sphinx.util.logging import getLogger

from machinery import api, commands

REFERENCE = "docs/reference"


def write_reference(app: Sphinx) -> None:
    """Write the generated pages, where they have changed, and remove those of names that are gone."""
    folder = Path(app.srcdir) / REFERENCE
    made = {folder / path: text for path, text in (api.pages() | commands.pages()).items()}
    for page in [*folder.glob("api/*.md"), *folder.glob("commands/*.md")]:
        if page not in made:
            page.unlink()
    for page, text in made.items():
        page.parent.mkdir(exist_ok=True)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def begin_with_readme(app: Sphinx, page: str, source: list[str]) -> None:
    """Begin the start page with the README, whose links lead from the folder above."""
    if page == app.config.root_doc:
        readme = Path(app.srcdir) / "README.md"
        app.env.note_dependency(str(readme), docname=page)
        source[0] = re.sub(r"\]\((?![a-z]+:|#)", "](../", readme.read_text()) + source[0]


def refuse_what_is_elsewhere(app: Sphinx, error: Exception | None) -> None:
    """Fail if a page loads a script, a style or a picture from elsewhere: the site works without a network."""
    loads = re.compile(r'<(?:script|img|iframe|link [^>]*rel="stylesheet")[^>]*(?:src|href)="(?:https?:)?//[^"]*')
    found = {load for page in Path(app.outdir).rglob("*.html") for load in loads.findall(page.read_text())}
    if found and error is None:
        raise ExtensionError(f"The site loads what is elsewhere: {', '.join(sorted(found))}")


class LinkedCode(SphinxTransform):
    """Links code that names something of the reference: `ik.invert`, `Result.sel`, `identikit explain`.

    Names without `ik.` are linked where they cannot mean anything else: classes everywhere, functions in the reference.
    """

    default_priority = 500

    def apply(self, **_: Any) -> None:
        """Put a reference around each such piece of code that is not in a link or heading already."""
        here, targets = self.env.docname, _targets()
        owner = here.removeprefix(f"{REFERENCE}/api/")
        for code in list(self.document.findall(nodes.literal)):
            text = code.astext().partition("(")[0]
            name = text.removeprefix("ik.").removeprefix("identikit.")
            name = f"{owner}.{name}" if f"{owner}.{name}" in targets else name
            plain = name == text and name[:1].islower() and owner == here
            if isinstance(code.parent, nodes.title | nodes.reference | pending_xref) or name == owner:
                continue
            if name in targets and not plain:
                code.replace_self(_reference(code, here, "py", "obj", targets[name]))
            elif (page := _command(text)) and here != page:
                code.replace_self(_reference(code, here, "std", "doc", f"/{page}"))


@cache
def _targets() -> dict[str, str]:
    """What names are documented under: those of functions and classes, and of what classes have."""
    found = {name.name: name.path for name in api.names().values()}
    for name in api.names().values():
        shown = api.members(name.thing) if isinstance(name.thing, type) else []
        found |= {f"{name.name}.{one.name}": f"{name.path}.{one.name}" for one in shown if one.doc}
    return found


def _command(text: str) -> str | None:
    """The page of the command that a command line calls."""
    words = text.split()
    for command in reversed(commands.commands()):
        called = command.path.split()
        if command.page and words[: len(called)] == called:
            return f"{REFERENCE}/commands/{command.page}"
    return None


def _reference(code: nodes.literal, here: str, domain: str, kind: str, target: str) -> pending_xref:
    to = {"refdomain": domain, "reftype": kind, "reftarget": target}
    return pending_xref("", code.deepcopy(), refdoc=here, refexplicit=True, **to)


def mathml(formula: nodes.Element) -> str:
    """A formula as MathML."""
    # docutils would set an index below an accented letter, so an empty group after the letter carries it.
    tex = re.sub(r"(\\(?:wide)?(?:hat|tilde|bar)\s*(?:\{[^{}]*\}|\w))(?=\s*[_^])", r"\1{}", formula.astext())
    return tex2mathml(tex, as_block=isinstance(formula, nodes.math_block))


def _visit(self: Any, node: nodes.Element) -> None:
    try:
        formula = mathml(node)
    except MathError as error:
        formula = ""
        getLogger(__name__).warning("The formula %r cannot be set: %s", node.astext(), error, location=node)
    self.body.append(f'<div class="formula">{formula}</div>' if isinstance(node, nodes.math_block) else formula)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Teach Sphinx."""
    app.connect("builder-inited", write_reference)
    app.connect("source-read", begin_with_readme)
    app.connect("build-finished", refuse_what_is_elsewhere)
    app.add_transform(LinkedCode)
    app.add_html_math_renderer("mathml", inline_renderers=(_visit, None), block_renderers=(_visit, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
