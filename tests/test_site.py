"""Everything public is documented, the reference shows all of it, and what Sphinx is taught works."""

import ast
import inspect
import re
from dataclasses import dataclass

import pytest
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from machinery import api, commands
from machinery.sphinx import mathml
from typer.testing import CliRunner

import identikit as ik
from identikit.cli.main import app
from identikit.results.measure import stored_array
from identikit.results.result import CLASSES


def test_every_public_name_method_property_and_field_is_documented():
    assert not api.undocumented()


def test_every_command_option_and_argument_is_documented():
    assert not commands.undocumented()


class Silent:
    """A class that says something of `told`, of itself and of `heard`."""

    picture = stored_array("layer", "Said here.")
    blank = stored_array("layer", "")

    def __init__(self) -> None:
        self.told = 1
        self.untold = 2

    def heard(self) -> int:
        """Return what is documented."""
        return 1

    def unheard(self) -> None: ...

    @property
    def unseen(self) -> int:
        return 1


@dataclass
class Record:
    """Two fields."""

    first: int
    """The first."""
    second: int  # the second
    third: int


def bare() -> None: ...


def test_what_is_not_documented_is_found():
    found = api.undocumented(api.Name(f"module.{thing.__name__}", thing) for thing in (Silent, Record, bare))
    assert found == ["module.bare", *(f"module.Silent.{name}" for name in ("blank", "unheard", "unseen", "untold")),
                     "module.Record.third"]  # fmt: skip


def test_names_are_those_that_are_exported_and_every_kind_of_result():
    assert {getattr(ik, name) for name in ik.__all__} | set(CLASSES.values()) <= set(api.names())
    named = [name.name for name in api.names().values()]
    assert len(set(named)) == len(named)  # a page each


@pytest.mark.parametrize("owner", [thing for thing in api.names() if inspect.isclass(thing)])
def test_no_attribute_of_a_class_is_left_out(owner: type):
    ours = [base for base in owner.__mro__ if base in api.names() or base.__module__.startswith("identikit.")]
    shown = {member.name for base in ours for member in api.members(base)}
    public = {name for name in dir(owner) if not name.startswith("_") and any(name in vars(base) for base in ours)}
    assert public <= shown


def test_signatures_are_python_and_name_what_is_documented():
    paths = {name.path for name in api.names().values()}
    for path, text in api.pages().items():
        for signature in re.findall(r"\{py:(?:function|method)\} (.+)", text):
            name, _, rest = signature.partition("(")
            ast.parse(f"def {name.rpartition('.')[2]}({rest}: ...")
            assert set(re.findall(r"identikit(?:\.\w+)+", rest)) <= paths, path


def test_a_page_of_a_command_has_every_option_that_its_help_prints():
    made = commands.pages()
    for command in commands.commands()[1:]:
        told = CliRunner().invoke(app, [*command.path.split()[1:], "--help"], env={"COLUMNS": "300"})
        options = set(re.findall(r"^ +(--[\w-]+)", told.stdout, re.MULTILINE)) - {"--help"}
        page = made[f"commands/{command.page}.md"]
        assert options == set(re.findall(r"^:::\{option\} (--[\w-]+)", page, re.MULTILINE)), command.path
        assert " ".join(command.doc.split()) in " ".join(told.stdout.split())


def test_an_index_of_an_accented_letter_stands_beside_it():
    assert "munderover" in tex2mathml(r"\hat t_i")  # so docutils still needs help
    assert "munderover" not in mathml(nodes.math("", r"\hat t_i = \bar{x}^2"))
    assert 'display="block"' in mathml(nodes.math_block("", "x"))
