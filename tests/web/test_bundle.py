"""The modules keep to the rules that let them be laid end to end."""

import re
from collections import Counter

from identikit.web.bundle import bundle, static, style

MODULES = sorted(path.name for path in static().iterdir() if path.name.endswith(".js"))
PAGE = "page.js"  # a server's page, which browsers load as it is


def source(name: str) -> str:
    return (static() / name).read_text(encoding="utf-8")


def test_every_import_is_by_name_on_one_line_and_of_what_is_there():
    for name in MODULES:
        for line in re.findall(r"^import.*$|^.*\bimport\(.*$|^export \{.*$|^export \*.*$", source(name), re.MULTILINE):
            found = re.fullmatch(r'import \{ ([\w, ]+) \} from "\./(\w+\.js)";', line)
            assert found, f"{name}: {line}"
            wanted, other = found[1].split(", "), source(found[2])
            for one in wanted:
                assert re.search(rf"^export (async )?(function|class|const|let) {one}\b", other, re.MULTILINE), one


def test_top_level_names_are_unique():
    names: Counter[str] = Counter()
    for name in MODULES:
        if name != PAGE:
            text = source(name)
            names.update(re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", text, re.MULTILINE))
            names.update(
                one
                for found in re.findall(r"^(?:export )?(?:const|let) [\[{]([\w, :]+)[\]}] =", text, re.MULTILINE)
                for one in re.findall(r"\w+(?=\s*(?:,|$))", found)
            )
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_comes_from_elsewhere_and_text_is_never_markup():
    for name in MODULES:
        text = source(name)
        assert "default" not in re.findall(r"^export (\w+)", text, re.MULTILINE), name
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "import.meta"):
            assert banned not in text, f"{name}: {banned}"
        addresses = set(re.findall(r"https?://[^\s\"'`]+", text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set(), name
    assert style().count("{") == style().count("}")
    assert "url(" not in style()
    assert "@import" not in style()


def test_a_bundle_has_everything_once_and_nothing_to_load():
    for entry in ("report.js", "widget.js"):
        script = bundle(entry)
        assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
        assert script.count("function mount(") == 1
        assert "</script" not in script.lower()
