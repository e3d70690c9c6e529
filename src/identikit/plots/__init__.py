"""Plots of Results, one per function: matplotlib axes in and out.

Without `ax` a plot makes a figure as wide as one or two columns of a page; `ax.figure.savefig("plot.pdf")` keeps text
as text. With `ax` it draws there; a figure made with `layout="constrained"` leaves room for labels and colour bars.
No plot calls `show`, opens a window or changes matplotlib's settings; a notebook shows the axes that a plot returns.
"""

from identikit.plots.attention import alignment, alternative_bars, head_grid, interval_bars, measure_bars, role_bars
from identikit.plots.attribution import attribution_map, sources, token_scores
from identikit.plots.certainty import certain_mass_by_length, correlation_by_length
from identikit.plots.evaluation import change_curves, score_bars
from identikit.plots.maps import agreement_map, head_maps, interval_maps, measure_maps, thumbnails
from identikit.plots.pictures import image_overlay
from identikit.plots.tokens import identity_map, inversion_map, rates

__all__ = [
    "agreement_map",
    "alignment",
    "alternative_bars",
    "attribution_map",
    "certain_mass_by_length",
    "change_curves",
    "correlation_by_length",
    "head_grid",
    "head_maps",
    "identity_map",
    "image_overlay",
    "interval_bars",
    "interval_maps",
    "inversion_map",
    "measure_bars",
    "measure_maps",
    "rates",
    "role_bars",
    "score_bars",
    "sources",
    "thumbnails",
    "token_scores",
]
