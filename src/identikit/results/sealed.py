"""Sealed files: moved to `results.files`."""

from identikit.results.files import (  # noqa: F401
    Damaged,
    Sealed,
    seal,
    seal_json,
    seal_record,
    unseal,
    unseal_json,
    unseal_record,
)
