"""Count what is documented and checked: `cd docs && python -m machinery`. What is not documented makes it fail."""

import inspect
import sys

from machinery import api, commands, pages

names = list(api.names().values())
members = [one for name in names if inspect.isclass(name.thing) for one in api.members(name.thing)]
options = [one for command in commands.commands() for one in command.parameters]
snippets = [one for page in pages.written() for one in pages.snippets(page)]
links = [one for page in pages.written() for one in pages.links(page)]
lacking = api.undocumented() + commands.undocumented()
not_run = [one.not_run for one in snippets if one.not_run]

print(f"{len(names)} public names, with {len(members)} methods, properties and fields")
print(f"{len(commands.commands())} commands, with {len(options)} options and arguments")
print(f"{len(lacking)} of these not documented{': ' if lacking else ''}{', '.join(lacking)}")
print(f"{len(snippets) - len(not_run)} snippets run by the tests, {len(not_run)} not{': ' if not_run else ''}", end="")
print(", ".join(not_run) + f"; {len(pages.cells())} cells executed as the site is built")
print(f"{len(links)} internal links checked, on {len(pages.written())} pages")
sys.exit(bool(lacking))
