"""What a transformer's attention and hidden vectors really say.

Three questions about any Hugging Face transformer and a text: which attention is real, which token a hidden vector
still stands for, and where it came from. After Brunner et al., *On Identifiability in Transformers* (ICLR 2020).
"""

from identikit.attention.alternatives import alternative_attention
from identikit.attention.effective import effective_attention
from identikit.attention.intervals import attention_intervals
from identikit.attribution.attribute import token_attribution
from identikit.data import read_texts, sample_texts
from identikit.errors import IdentikitError, InputError, ModelError
from identikit.models.load import load
from identikit.models.model import Model
from identikit.result import Result, open_result
from identikit.tokens.identify import token_identifiability
from identikit.tokens.invert import invert
from identikit.verdict.numbers import explain
from identikit.version import __version__ as __version__

__all__ = [
    "load",
    "explain",
    "effective_attention",
    "attention_intervals",
    "alternative_attention",
    "token_attribution",
    "token_identifiability",
    "invert",
    "open_result",
    "read_texts",
    "sample_texts",
    "Model",
    "Result",
    "IdentikitError",
    "InputError",
    "ModelError",
]
