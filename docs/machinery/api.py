"""The reference of public names, from their signatures and docstrings.

Public are the names of `identikit.__all__`, the kinds of Result, and every class of identikit that the signatures and
fields of public ones name, and so on. Docstrings are Markdown, so each name becomes a page of MyST.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args

import identikit
from identikit.attention.captured import Captured
from identikit.results.facts import Fact
from identikit.results.measure import Attribute, OptionalAttribute
from identikit.results.result import CLASSES, Result

GROUPS = {
    "Functions": "What you call.",
    "Results": "What you get back. Each is a `Result`, with arrays of its own.",
    "Model and errors": "What `ik.load` gives, and what is raised.",
    "Parts": "What the others take and hold. Import them from the module that their page names.",
}
_INSIDE = (Captured,)  # what rooms of the package give to each other: its parts are not for callers
_MADE_FOR_YOU = (Result, identikit.Model)  # the functions make these, so how they are made is not shown


@dataclass(frozen=True)
class Member:
    """A method, property, array or field of a class."""

    name: str
    kind: str  # of the directive that shows it
    shown: str  # its arguments, or its type
    doc: str


@dataclass(frozen=True)
class Name:
    """A public name."""

    path: str  # what it is imported as
    thing: Any

    @property
    def name(self) -> str:
        """The name without its module."""
        return self.path.rpartition(".")[2]

    @property
    def doc(self) -> str:
        """Its docstring."""
        return inspect.cleandoc(self.thing.__doc__ or "")

    @property
    def group(self) -> str:
        """The heading that it is listed under."""
        if inspect.isfunction(self.thing):
            return "Functions"
        if issubclass(self.thing, Result):
            return "Results"
        return "Model and errors" if self.path == f"identikit.{self.name}" else "Parts"


@cache
def names() -> dict[Any, Name]:
    """Every public name, by what it names, in reading order."""
    waiting = [getattr(identikit, name) for name in identikit.__all__] + list(CLASSES.values())
    found: dict[Any, Name] = {}
    while waiting:
        thing = waiting.pop(0)
        if thing not in found and thing not in _INSIDE:
            exported = thing.__name__ in identikit.__all__
            found[thing] = Name(f"identikit.{thing.__name__}" if exported else _path(thing), thing)
            waiting += _named_by(thing)
    return found


def _path(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__name__}"


def _ours(thing: Any) -> bool:
    return getattr(thing, "__module__", "").split(".")[0] == "identikit"


def _named_by(thing: Any) -> Iterator[type]:
    """Yield the classes of identikit that a function's signature names, or a class's methods and fields."""
    annotations = list(inspect.get_annotations(inspect.unwrap(thing)).values())
    for _, value in _vars(thing) if inspect.isclass(thing) else ():
        annotations += inspect.get_annotations(_function(value)).values() if callable(_function(value)) else ()
    for annotation in annotations:
        yield from _classes(annotation)


def _classes(annotation: Any) -> Iterator[type]:
    if inspect.isclass(annotation) and _ours(annotation):
        yield annotation
    for part in annotation if isinstance(annotation, list) else get_args(annotation):
        yield from _classes(part)


def _vars(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the public attributes of a class and of its bases in identikit, nearest first."""
    for base in owner.__mro__:
        if _ours(base):
            yield from ((name, value) for name, value in vars(base).items() if not name.startswith("_"))


def _function(value: Any) -> Any:
    """The function behind a method or property; anything else as it is."""
    value = getattr(value, "fget", getattr(value, "func", getattr(value, "__func__", value)))
    return inspect.unwrap(value) if callable(value) and not inspect.isclass(value) else value


# What a class has


def members(owner: type) -> list[Member]:
    """What a class adds to its bases, or says anew: methods, properties and arrays, then fields.

    What has no docstring and is in a base too, is documented there.
    """
    fields = {name: Member(name, "attribute", kind, _field_doc(owner, name)) for name, kind in _fields(owner).items()}
    found = {name: _member(name, value) for name, value in vars(owner).items() if not name.startswith("_")}
    inherited = {name for base in owner.__mro__[1:] if _ours(base) for name in {*vars(base), *_fields(base)}}
    told = {name: one for name, one in found.items() if one.doc}
    return [one for one in (found | fields | told).values() if one.doc or one.name not in inherited]


def undocumented(among: Iterable[Name] | None = None) -> list[str]:
    """Public names, methods, properties and fields of which nothing is said; a class may name its fields in its own."""
    among = list(names().values() if among is None else among)
    found = [name.path for name in among if not name.doc]
    for name in among:
        for member in members(name.thing) if inspect.isclass(name.thing) else ():
            if not member.doc and not re.search(rf"`{member.name}[`(]", name.doc):
                found.append(f"{name.path}.{member.name}")
    return found


def _member(name: str, value: Any) -> Member:
    function = _function(value)
    if isinstance(value, Attribute):
        kind = "Tensor | None" if isinstance(value, OptionalAttribute) else "Tensor"
        return Member(name, "attribute", kind, _measure_doc(value))
    if isinstance(value, Fact):
        return Member(name, "attribute", "Any", value.__doc__ or "")
    if inspect.isfunction(function):
        doc = inspect.cleandoc(function.__doc__ or "")
        if hasattr(value, "fget") or hasattr(value, "func"):
            return Member(name, "property", typed(inspect.get_annotations(function).get("return")), doc)
        return Member(name, "method", arguments(function, method=not isinstance(value, staticmethod)), doc)
    return Member(name, "attribute", type(value).__name__, "")


def _measure_doc(attribute: Attribute) -> str:
    """What a measure is, over which axes, and what values it can have."""
    if not attribute.meaning:
        return ""
    return f"{attribute.meaning}\n\nOver {', '.join(attribute.axes)}; {attribute.range}."


def _fields(owner: type) -> dict[str, str]:
    """The public fields of a class with their types: those annotated, and those that its methods set."""
    found = {node.attr: "" for node in ast.walk(_tree(owner)) if isinstance(node, ast.Attribute) and _is_set(node)}
    found |= {name: typed(kind) for name, kind in inspect.get_annotations(owner).items()}
    return {name: kind for name, kind in found.items() if not name.startswith("_")}


def _field_doc(owner: type, name: str) -> str:
    """What is said of a field in the string below it, or in the comment beside it."""
    body = _tree(owner).body[0].body  # type: ignore[attr-defined]
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) == name:
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                return inspect.cleandoc(str(below.value.value))
            return inspect.getsource(owner).splitlines()[(node.end_lineno or 0) - 1].partition("  # ")[2]
    return ""


@cache
def _tree(owner: type) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(owner)))


def _is_set(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


# Signatures


def typed(annotation: Any) -> str:
    """A type as it is shown: our own with the path they are documented under, others by their last name."""
    if annotation in (None, inspect.Parameter.empty):
        return "None" if annotation is None else ""
    if isinstance(annotation, TypeVar):
        return "Self"
    paths = {_path(thing): name.path for thing, name in names().items()}

    def shorter(match: re.Match[str]) -> str:
        return paths.get(match[0], match[0].rpartition(".")[2])

    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b[A-Za-z_][\w.]*", shorter, text)


def arguments(function: Any, *, method: bool = False, returns: bool = True) -> str:
    """The arguments of a function with their types and defaults, and what it returns."""
    signature = inspect.signature(function)
    parts, last = [], None
    for parameter in list(signature.parameters.values())[method:]:
        if parameter.kind is parameter.KEYWORD_ONLY and last not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            parts.append("*")
        last = parameter.kind
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        kind, default = typed(parameter.annotation), parameter.default
        value = "" if default is parameter.empty else f" = {_value(default)}"
        parts.append(f"{star}{parameter.name}{f': {kind}' if kind else ''}{value}")
    returned = typed(signature.return_annotation)
    return f"({', '.join(parts)}){f' -> {returned}' if returned and returns else ''}"


def _value(default: Any) -> str:
    written = getattr(default, "__name__", repr(default))
    return "..." if written.startswith("<") else written


# Pages


def page(name: Name) -> str:
    """The page of one public name."""
    thing = name.thing
    if inspect.isfunction(thing):
        body = directive("py:function", name.path + arguments(thing), name.doc)
    else:
        made = arguments(thing, returns=False) if _is_made(thing) else ""
        body = directive("py:class", name.path + made, _class_body(name))
    return f"# {name.name}\n\n{body}"


def _is_made(owner: type) -> bool:
    """Whether a class says how it is made, and callers may make it."""
    says = any({"__init__", "__new__"} & {*vars(base)} for base in owner.__mro__ if _ours(base))
    return says and not issubclass(owner, _MADE_FOR_YOU) and not getattr(owner, "_is_protocol", False)


def _class_body(name: Name) -> str:
    parts = [name.doc]
    for member in filter(lambda member: member.doc, members(name.thing)):
        options = [f":type: {member.shown}"] if member.kind != "method" and member.shown else []
        given = member.shown if member.kind == "method" else ""
        parts.append(directive(f"py:{member.kind}", member.name + given, member.doc, options))
    mine = {member.name for member in members(name.thing)}
    for base in name.thing.__mro__[1:]:
        others = [one.name for one in members(base) if one.kind != "attribute"] if base in names() else []
        if more := ", ".join(f"`{base.__name__}.{one}`" for one in others if one not in mine):
            parts.append(f"As every `{base.__name__}`, it also has {more}.")
    return "\n\n".join(parts)


def directive(kind: str, argument: str, body: str, options: list[str] | tuple[str, ...] = ()) -> str:
    """A directive of MyST; the fence is longer than those within."""
    fence = ":" * (max([2, *(len(run) for run in re.findall(r"^:{3,}", body, re.MULTILINE))]) + 1)
    return "\n".join([f"{fence}{{{kind}}} {argument}", *options, "", body, fence])


def pages() -> dict[str, str]:
    """The pages of the reference, by their paths: one of each name, and the list of all."""
    found = {f"api/{name.name}.md": page(name) for name in names().values()}
    lines = ["# Python", "", "`import identikit as ik` gives the functions, `ik.Model`, `ik.Result` and the errors."]
    for group, words in GROUPS.items():
        listed = [name for name in names().values() if name.group == group]
        lines += ["", f"## {group}", "", words, "", "| name | |", "|---|---|"]
        lines += [f"| [`{name.name}`](api/{name.name}.md) | {name.doc.split(chr(10))[0]} |" for name in listed]
        toctree = [f"api/{name.name}" for name in listed]
        lines += ["", "```{toctree}", f":caption: {group}", ":hidden:", "", *toctree, "```"]
    return found | {"api.md": "\n".join(lines) + "\n"}
