"""One check for each kind of argument, so that every public call refuses what it cannot use in the same words.

Numbers and truth values of NumPy and torch are taken as Python's own. True and False are no numbers, and neither are
strings, NaN and infinity.
"""

import math
import numbers
import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, TypeGuard

import torch

from identikit.errors import InputError

_SEEDS = 2**32  # more than anyone needs, and few enough for every generator


def whole_number(name: str, given: Any, *, least: int = 0, most: int | None = None) -> int:
    """Return a whole number."""
    found = as_whole(given)
    if found is None or found < least or (most is not None and found > most):
        limit = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise _refused(name, given, f"a whole number {limit}")
    return found


def random_seed(given: Any) -> int:
    """Return a random seed."""
    return whole_number("seed", given, most=_SEEDS - 1)


def real_number(
    name: str,
    given: Any,
    *,
    least: float | int | None = None,
    above: float | int | None = None,
    most: float | int | None = None,
    below: float | int | None = None,
) -> float:
    """Return a number within these bounds, of which `above` and `below` are no part; infinity only with `most=inf`."""
    below = math.inf if most is None and below is None else below
    bounds = (
        ("of at least", least, operator.ge),
        ("above", above, operator.gt),
        ("of at most", most, operator.le),
        ("below", below, operator.lt),
    )
    asked = [(words, bound, holds) for words, bound, holds in bounds if bound is not None]
    found = as_real(given)
    if found is None or not all(holds(found, bound) for _, bound, holds in asked):
        limits = " and ".join(f"{words} {bound:g}" for words, bound, _ in asked if bound != math.inf)
        raise _refused(name, given, f"a {'' if most == math.inf else 'finite '}number {limits}".rstrip())
    return found


def flag(name: str, given: Any) -> bool:
    """Return a truth value."""
    if not _is_truth(given):
        raise _refused(name, given, "True or False")
    return bool(given)


def float_dtype(name: str, given: Any, names: Sequence[str]) -> torch.dtype:
    """Return a number format of torch, given as itself or by its name, that is among those named."""
    short = str(given).removeprefix("torch.") if isinstance(given, torch.dtype | str) else ""
    if short not in names:
        raise _refused(name, given, " or ".join(f"torch.{one}" for one in names))
    return getattr(torch, short)


def function(name: str, given: Any) -> Callable[..., Any]:
    """Return a function."""
    if not callable(given):
        raise _refused(name, given, "a function")
    return given


def known(name: str, given: Any, names: Sequence[str]) -> str:
    """Return a name that is among those known."""
    if not isinstance(given, str) or given not in names:
        raise InputError(f"{name}={shortened(given)} is not known: use {', '.join(map(repr, names))}.")
    return given


def known_names(name: str, given: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Return one or several names that are among those known, each once."""
    several = [given] if isinstance(given, str) else given
    if not is_collection(several):
        raise _refused(name, given, f"some of {', '.join(map(repr, names))}")
    found = tuple(dict.fromkeys(known(name, one, names) for one in several))
    if not found:
        raise InputError(f"{name}={shortened(given)} names nothing: use some of {', '.join(map(repr, names))}.")
    return found


def is_collection(given: object) -> TypeGuard[Collection[object]]:
    """Whether an argument holds several things; an iterator does not, for it can be read only once, or without end."""
    return isinstance(given, Collection) and not isinstance(given, str | bytes) and getattr(given, "ndim", 1) != 0


def as_whole(given: Any) -> int | None:
    """Return a whole number as Python's own, or None for what is not one."""
    if _is_truth(given) or getattr(given, "ndim", 0) != 0:
        return None
    with suppress(TypeError, ValueError):
        return operator.index(given)
    return None


def as_real(given: Any) -> float | None:
    """Return a number as Python's own, or None for NaN and what is not one."""
    if _is_truth(given) or getattr(given, "ndim", 0) != 0:
        return None
    if not isinstance(given, numbers.Real) and not hasattr(given, "ndim"):
        return None
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        found = float(given)
        return None if math.isnan(found) else found
    return None


def shortened(given: object) -> str:
    """Return what was given as a message shows it: short, on one line, and without the addresses of objects."""
    try:
        words = " ".join(repr(given).split())
    except Exception:  # a class of the user's may do anything in its repr
        words = "<"
    if words.startswith("<") or (" at 0x" in words and not isinstance(given, str | bytes)):
        return f"an object of the class {type(given).__name__}"
    return words if len(words) <= 60 else f"{words:.59}…"


def _is_truth(given: Any) -> bool:
    """Whether this is one truth value, of Python, NumPy or torch."""
    if isinstance(given, bool):
        return True
    return getattr(given, "ndim", None) == 0 and str(getattr(given, "dtype", "")).endswith("bool")


def _refused(name: str, given: object, expected: str) -> InputError:
    return InputError(f"{name}={shortened(given)} cannot be used: expected {expected}.")
