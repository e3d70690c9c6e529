"""Folders of saved results: moved to `results.files`."""

from identikit.results.files import ABOUT, Files, described, description_of, read_folder, write_folder  # noqa: F401
