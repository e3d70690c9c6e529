"""What a transformer's attention and hidden vectors really say.

Three questions about any Hugging Face transformer and a text: which attention the output determines, which token a
hidden vector still stands for, and where it came from. After Brunner et al., *On Identifiability in Transformers*
(ICLR 2020).
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from identikit.version import __version__ as __version__

if TYPE_CHECKING:
    from identikit.attention.agreement import agreement
    from identikit.attention.alternatives import alternative_attention
    from identikit.attention.effective import effective_attention
    from identikit.attention.given import attention_from
    from identikit.attention.intervals import attention_intervals
    from identikit.attention.measure import attention_measure
    from identikit.attention.scores import head_scores, repeated_tokens
    from identikit.attribution.attribute import token_attribution
    from identikit.attribution.scores import captum_attribution, scores
    from identikit.errors import IdentikitError, InputError, ModelError
    from identikit.explanation.evaluate import evaluate
    from identikit.explanation.explain import explain
    from identikit.explanation.result import open_result
    from identikit.models.load.load import load
    from identikit.models.model import Model
    from identikit.results.citation import cite
    from identikit.results.pictures import image_regions
    from identikit.results.result import Result
    from identikit.texts.data import read_texts, sample_texts
    from identikit.tokens.identify import token_identifiability
    from identikit.tokens.invert import invert
    from identikit.web.report import save_html

__all__ = [
    "load",
    "explain",
    "effective_attention",
    "attention_intervals",
    "attention_from",
    "alternative_attention",
    "attention_measure",
    "head_scores",
    "agreement",
    "evaluate",
    "repeated_tokens",
    "image_regions",
    "token_attribution",
    "captum_attribution",
    "scores",
    "token_identifiability",
    "invert",
    "open_result",
    "save_html",
    "read_texts",
    "sample_texts",
    "cite",
    "Model",
    "Result",
    "IdentikitError",
    "InputError",
    "ModelError",
]

_MODULES = {
    "alternative_attention": "attention.alternatives",
    "effective_attention": "attention.effective",
    "attention_intervals": "attention.intervals",
    "attention_from": "attention.given",
    "attention_measure": "attention.measure",
    "agreement": "attention.agreement",
    "head_scores": "attention.scores",
    "repeated_tokens": "attention.scores",
    "token_attribution": "attribution.attribute",
    "captum_attribution": "attribution.scores",
    "scores": "attribution.scores",
    "cite": "results.citation",
    "image_regions": "results.pictures",
    "read_texts": "texts.data",
    "sample_texts": "texts.data",
    "IdentikitError": "errors",
    "InputError": "errors",
    "ModelError": "errors",
    "load": "models.load.load",
    "Model": "models.model",
    "Result": "results.result",
    "open_result": "explanation.result",
    "token_identifiability": "tokens.identify",
    "invert": "tokens.invert",
    "explain": "explanation.explain",
    "evaluate": "explanation.evaluate",
    "save_html": "web.report",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line can start, help and stop at once."""
    if name not in _MODULES:
        raise AttributeError(f"module 'identikit' has no attribute {name!r}")
    collects = gc.isenabled()
    gc.disable()  # torch and transformers make half a million objects that stay: collecting takes a fifth longer
    try:
        value = globals()[name] = getattr(import_module(f"identikit.{_MODULES[name]}"), name)
    finally:
        if collects:
            gc.enable()
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
