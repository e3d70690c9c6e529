"""The texts of a run as tokens, so that each is tokenised once."""

import warnings

from identikit.errors import InputError, TooLongError
from identikit.models.model import Model
from identikit.texts.text import AnyText, EncodedText, Text


def compact(text: AnyText, encoded: EncodedText) -> AnyText:
    """Return a text as its tokens; one with an image or sound, whose pixels or samples are large, as it was given."""
    return encoded if encoded.is_tokens_only else text


def encode_texts(
    model: Model, texts: list[Text], *, truncate: bool, max_tokens: int | None, skip: bool
) -> tuple[list[AnyText], list[int]]:
    """Return texts as tokens, and the indices of those that are left out with `skip` because they are too long."""
    if not skip:
        encoded = model.encode(texts, truncate=truncate, max_tokens=max_tokens, features=False)
        return list(map(compact, texts, encoded)), []
    fitting: list[AnyText] = []
    skipped = []
    for index, text in enumerate(texts):
        try:
            (encoded_text,) = model.encode(text, max_tokens=max_tokens, features=False)
            fitting.append(compact(text, encoded_text))
        except TooLongError:
            skipped.append(index)
    if not fitting:
        raise InputError(f"All {len(texts)} texts are too long for {model.name}. Cut them with --truncate.")
    if skipped:
        listed = f"{', '.join(map(str, skipped[:10]))}{', …' if len(skipped) > 10 else ''}"
        warnings.warn(f"Left out {len(skipped)} of {len(texts)} texts, which are too long: {listed}.", stacklevel=2)
    return fitting, skipped
