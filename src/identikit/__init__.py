"""What a transformer's attention and hidden vectors really say.

Three questions about any Hugging Face transformer and a text: which attention is real, which token a hidden vector
still stands for, and where it came from. After Brunner et al., *On Identifiability in Transformers* (ICLR 2020).
"""

from identikit.analyses.alternatives import alternative_attention, attention_intervals, minimum_norm_attention
from identikit.analyses.attention import effective_attention
from identikit.analyses.attribution import token_attribution
from identikit.analyses.identity import token_identifiability
from identikit.data import read_texts
from identikit.errors import IdentikitError, InputError, ModelError
from identikit.explain import explain
from identikit.models.load import load
from identikit.models.model import Model
from identikit.text import TokenBatch

__version__ = "0.1.0.dev0"

__all__ = [
    "load",
    "explain",
    "effective_attention",
    "attention_intervals",
    "alternative_attention",
    "minimum_norm_attention",
    "token_attribution",
    "token_identifiability",
    "read_texts",
    "Model",
    "TokenBatch",
    "IdentikitError",
    "InputError",
    "ModelError",
]
