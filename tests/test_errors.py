"""Each place speaks its own language: what Python says, as the command line and a page say it."""

import pytest

from identikit.errors import for_command_line, for_page

OPTIONS = {"truncate": "--truncate", "probes": "--probes", "seconds": "--seconds", "tower": "--tower"} | {
    "columns": "--column",
    "data_dir": "--data-dir",
}


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ("Shorten it, or cut it with truncate=True.", "Shorten it, or cut it with --truncate."),
        ("probes=1 cannot be used: expected 'exact'.", "--probes 1 cannot be used: expected 'exact'."),
        ("It takes more (seconds=0.5).", "It takes more (--seconds 0.5)."),
        ("Use tower='text' or tower=\"vision\".", "Use --tower text or --tower vision."),
        ("Name it with columns=, or data_dir=.", "Name it with --column, or --data-dir."),
        ("layers=[1] is Python's alone.", "layers=[1] is Python's alone."),  # no such option here
        ("Reading out/probes=4/a.csv and 'probes=4'.", "Reading out/probes=4/a.csv and 'probes=4'."),  # names of files
        ("Of one, `attribute(text, probes=4)` does.", "Of one, `attribute(text, probes=4)` in Python does."),
        ("Run `pip install probes=4`.", "Run `pip install probes=4`."),
        ("(2 of 30; `to_dict()` has all)", "(2 of 30; --json has all)"),
    ],
)
def test_the_command_line_names_its_own_options(words: str, typed: str):
    assert for_command_line(words, OPTIONS) == typed


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("It has 9 tokens. Shorten it, or cut it with truncate=True.", "It has 9 tokens. Shorten it."),
        ("It takes 66 s, more than is left (seconds=20).", "It takes 66 s, more than is left."),
        ("It takes 66 s. With probes=4 it takes 2 s.", "It takes 66 s."),
        ("It takes 66 s. Of one token alone, `f(targets=[3])` takes 1 s.", "It takes 66 s."),
        ("epsilon=5 cannot be used: expected less.", "epsilon=5 cannot be used: expected less."),  # who set it reads it
        ("(2 of 30; `to_dict()` has all)", "(2 of 30; Provenance has all)"),
        ("Two texts, or one (a short one). Take it.", "Two texts, or one (a short one). Take it."),
    ],
)
def test_a_page_offers_nothing_that_cannot_be_set_there(words: str, shown: str):
    assert for_page(words) == shown
