"""Explanations to look at: a report in one file, a widget in a notebook, and a server."""
