"""Parts of speech, with the real tagger."""

import importlib.util

import pytest

from identikit.errors import InputError
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.texts import tags
from tests.models.real import STORIES, needs_stories

PAIR = ("The goalkeeper saved two penalties, and Northfield went through.", "It's been a while since 1904.")


def tagged(model: Model) -> list[tuple[str, str]]:
    encoded = model.encode(PAIR)[0]
    return list(zip(encoded.tokens, tags.penn_tags(encoded), strict=True))


def test_words_share_their_tag_with_their_pieces():
    found = tagged(load())
    assert found[:5] == [("[CLS]", "[CLS]"), ("the", "DT"), ("goalkeeper", "NN"), ("saved", "VBD"), ("two", "CD")]
    assert ("north", "NNP") in found and ("##field", "NNP") in found
    assert (
        found[13] == ("[SEP]", "[SEP]")
        and found[14] == ("it", "PRP")
        and found[-2:] == [(".", "."), ("[SEP]", "[SEP]")]
    )


def test_token_ids_are_tagged_as_the_text_they_spell():
    model = load()
    (text,) = model.encode("The goalkeeper saved two penalties.")
    (ids,) = model.encode(list(text.ids))
    assert tags.penn_tags(ids) == tags.penn_tags(text)
    assert "NN" in tags.penn_tags(ids)


@needs_stories
def test_pieces_of_another_tokenizer():
    found = tagged(load(STORIES))
    assert found[0] == ("<s>", "<s>") and ("▁two", "CD") in found and ("▁saved", "VBD") in found


def test_a_missing_tagger_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    encoded = load().encode("A text.")[0]
    there = importlib.util.find_spec
    for missing, message in (
        ("spacy", r"pip install 'identikit\[pos\]'"),
        ("en_core", "spacy download en_core_web_sm"),
    ):
        tags._pipeline.cache_clear()
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, missing=missing: None if name.startswith(missing) else there(name)
        )
        with pytest.raises(InputError, match=message):
            tags.penn_tags(encoded)
    tags._pipeline.cache_clear()
