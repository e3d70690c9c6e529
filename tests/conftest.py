"""Test-wide settings: shapes are checked in every call, hypothesis is repeatable, nothing reaches a network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

install_import_hook("identikit", "beartype.beartype")

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
