"""Figures of Results: one figure per function, matplotlib axes in and out."""
