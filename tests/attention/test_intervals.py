"""Intervals of whole heads, groups and texts, as a user asks for them."""

import pytest
import torch

import identikit as ik
from identikit.attention import intervals
from tests.models import tiny
from tests.models.tiny import TEXTS

MODELS = (
    "bert",
    "llama",
    "mistral",
    "gemma2",
    "t5",
)  # bidirectional, causal, windowed, soft-capped, with position bias
