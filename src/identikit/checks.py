"""One check for each kind of argument, so that all public functions refuse a wrong one in the same words.

Numbers and truth values of NumPy and torch become Python's own. True, False, strings, NaN and infinity are not numbers.
"""

import math
import numbers
import operator
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, SupportsFloat, SupportsIndex, TypeGuard, cast

import torch

from identikit.errors import IdentikitError, InputError

_SEEDS = 2**32  # more than anyone needs, and few enough for every generator


def whole_number(name: str, value: object, *, least: int = 0, most: int | None = None) -> int:
    """Return a whole number."""
    number = as_integer(value)
    if number is None or number < least or (most is not None and number > most):
        limit = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise _refused(name, value, f"a whole number {limit}")
    return number


def random_seed(value: object) -> int:
    """Return a random seed."""
    return whole_number("seed", value, most=_SEEDS - 1)


def real_number(
    name: str,
    value: object,
    *,
    least: float | int | None = None,
    above: float | int | None = None,
    most: float | int | None = None,
    below: float | int | None = None,
) -> float:
    """Return a number within these bounds; `above` and `below` are excluded, infinity is taken only with `most=inf`."""
    if most is None and below is None:
        below = math.inf
    bounds = (
        ("of at least", least, operator.ge),
        ("above", above, operator.gt),
        ("of at most", most, operator.le),
        ("below", below, operator.lt),
    )
    given_bounds = [(words, bound, holds) for words, bound, holds in bounds if bound is not None]
    number = as_float(value)
    if number is None or not all(holds(number, bound) for _, bound, holds in given_bounds):
        limits = " and ".join(f"{words} {bound:g}" for words, bound, _ in given_bounds if bound != math.inf)
        raise _refused(name, value, f"a {'' if most == math.inf else 'finite '}number {limits}".rstrip())
    return number


def real_numbers(name: str, value: object, shape: Sequence[int]) -> torch.Tensor:
    """Return finite numbers of this shape, or a single one, as a float64 tensor."""
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        numbers = torch.as_tensor(value)
        fits = numbers.ndim == 0 or list(numbers.shape) == list(shape)
        plain = not numbers.is_complex() and numbers.dtype != torch.bool and numbers.layout == torch.strided
        if fits and plain and not numbers.is_meta and bool(numbers.isfinite().all()):
            return numbers.detach().double()
    raise _refused(name, value, f"a finite number, or as many as the selection has: {' × '.join(map(str, shape))}")


def flag(name: str, value: object) -> bool:
    """Return a truth value."""
    if not _is_truth(value):
        raise _refused(name, value, "True or False")
    return bool(value)


def function(name: str, value: object) -> Callable[..., Any]:
    """Return a function."""
    if not callable(value):
        raise _refused(name, value, "a function")
    return value


def call_user_function(what: str, function: Callable[..., object], *arguments: object) -> Any:
    """Return what a user's function returns; an error in it becomes a sentence that says that `what` failed."""
    try:
        return function(*arguments)
    except IdentikitError:
        raise
    except Exception as error:  # the function is the user's, and raises what it likes
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".: ")
        raise InputError(f"{what} failed on the text ({reason}).") from error


def known_name(name: str, value: object, names: Sequence[str]) -> str:
    """Return a name that is among those known."""
    if not isinstance(value, str) or value not in names:
        raise InputError(f"{name}={shortened(value)} is not known: use {', '.join(map(repr, names))}.")
    return value


def known_names(name: str, value: object, names: Sequence[str]) -> tuple[str, ...]:
    """Return one or several names that are among those known, without repeats."""
    values = [value] if isinstance(value, str) else value
    if not is_collection(values):
        raise _refused(name, value, f"some of {', '.join(map(repr, names))}")
    known_values = tuple(dict.fromkeys(known_name(name, entry, names) for entry in values))
    if not known_values:
        raise InputError(f"{name}={shortened(value)} names nothing: use some of {', '.join(map(repr, names))}.")
    return known_values


def is_collection(value: object) -> TypeGuard[Collection[object]]:
    """Whether an argument is a collection of values; an iterator, which can be read only once, is not."""
    return isinstance(value, Collection) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) != 0


def is_unicode(value: object) -> TypeGuard[str]:
    """Whether an argument is a string that can be printed and saved, that is, one without lone surrogates."""
    if not isinstance(value, str):
        return False
    with suppress(UnicodeEncodeError):
        value.encode()
        return True
    return False


def no_effect(name: str, value: object, reason: str) -> None:
    """Refuse an option that was given where it changes nothing."""
    if value is not None:
        raise InputError(f"{name}={shortened(value)} has no effect here: {reason}. Leave it out.")


def is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether an argument can be the path of a file: not empty, and made of what names of files can hold."""
    with suppress(TypeError, ValueError):  # not a path, or a lone surrogate
        path = os.fspath(cast(str, value))
        return isinstance(path, str) and path != "" and b"\0" not in os.fsencode(path)
    return False


def as_integer(value: object) -> int | None:
    """Return a whole number as Python's own, or None for anything else."""
    if _is_truth(value) or getattr(value, "ndim", 0) != 0:
        return None
    with suppress(TypeError, ValueError):
        return operator.index(cast(SupportsIndex, value))
    return None


def as_float(value: object) -> float | None:
    """Return a number as Python's own, or None for NaN and anything else."""
    if _is_truth(value) or getattr(value, "ndim", 0) != 0:
        return None
    if not isinstance(value, numbers.Real) and not hasattr(value, "ndim"):
        return None
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        number = float(cast(SupportsFloat, value))
        return None if math.isnan(number) else number
    return None


def shortened(value: object) -> str:
    """Return a value as a message shows it: short, on one line, and without the addresses of objects."""
    try:
        words = " ".join(repr(value).split())
    except Exception:  # a class of the user's may do anything in its repr
        words = "<"
    if words.startswith("<") or (" at 0x" in words and not isinstance(value, str | bytes)):
        return f"an object of the class {type(value).__name__}"
    return words if len(words) <= 60 else f"{words:.59}…"


def _is_truth(value: object) -> bool:
    """Whether this is one truth value, of Python, NumPy or torch."""
    if isinstance(value, bool):
        return True
    return getattr(value, "ndim", None) == 0 and str(getattr(value, "dtype", "")).endswith("bool")


def _refused(name: str, value: object, expected: str) -> InputError:
    return InputError(f"{name}={shortened(value)} cannot be used: expected {expected}.")
