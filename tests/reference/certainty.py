"""Readings of intervals over a dataset by their definitions, one number at a time."""

import statistics

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def value_size(values: Array, projection: Array, keys: list[int]) -> float:
    """Mean ‖v_m H‖ of some keys over the median of the others."""
    norms = [float(np.sqrt(np.sum((value @ projection) ** 2))) for value in values]
    others = [norm for key, norm in enumerate(norms) if key not in keys]
    return statistics.fmean(norms[key] for key in keys) / statistics.median(others)


def mean_and_error(numbers: list[float]) -> tuple[float, float]:
    """The mean, and its standard error from the spread of the numbers."""
    return statistics.fmean(numbers), statistics.stdev(numbers) / len(numbers) ** 0.5
