"""Opening results of every kind: this module knows them all."""

import os

from identikit.attention import result as _attention
from identikit.attribution import result as _attribution
from identikit.explanation import result as _explanation
from identikit.results.result import Result, saved_result
from identikit.tokens import result as _tokens

ROOMS = (_attention, _tokens, _attribution, _explanation)
"""Where the kinds of results are; a class is known once its module is loaded."""


def open_result(folder: str | os.PathLike[str]) -> Result:
    """Open a result that `Result.save` wrote. It has no model, so it cannot be verified or continued."""
    return saved_result(folder)
