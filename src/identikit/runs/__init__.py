"""Folders of results that survive being stopped, and what computes and describes them."""
