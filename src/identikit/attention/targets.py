"""What gradients are of: a next token, a class, what the model predicts itself, or a function of the user's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from identikit.checks import as_whole, shortened
from identikit.errors import InputError
from identikit.models.model import Model
from identikit.models.reading import Reading
from identikit.shapes import Tensor


class Target(NamedTuple):
    """What is differentiated: its name, the number that it makes of logits and last hidden vectors, and its token."""

    name: str
    number: Callable[[Tensor | None, Tensor], Tensor]
    token: int | None = None


def target_of(model: Model, reading: Reading, target: Any) -> Target:
    """Return what is differentiated: a logit of the last position, or of a class, or what a function makes."""
    if callable(target):
        return Target(getattr(target, "__name__", "a function"), _checked(target))
    logits = (reading.trace or model.trace(reading.batch)).logits
    if logits is None or logits.ndim not in (2, 3):
        raise InputError(
            f"A target is a logit, and {model.name} makes none. Pass target=, a function of the logits (None) and the "
            "last hidden vectors (batch, token, feature) that returns one number."
        )
    last = logits[0] if logits.ndim == 2 else logits[0, -1]
    what = "class" if logits.ndim == 2 else "token"
    number = int(last.argmax()) if target is None else _number(model, target, what)
    if not 0 <= number < len(last):
        raise InputError(f"target={shortened(target)} cannot be used: expected a number from 0 to {len(last) - 1}.")
    place = (0, number) if logits.ndim == 2 else (0, -1, number)
    name = f"{what} {number}"
    if what == "token":
        name = f"next token {model.tokenizer.decode([number])!r}"
    return Target(name, lambda made, hidden: _at(made, place), number if what == "token" else None)


def _at(logits: Tensor | None, place: tuple[int, ...]) -> Tensor:
    assert logits is not None
    return logits[place]


def _number(model: Model, target: Any, what: str) -> int:
    """Return the id of a token that is given as a string, or a number as it is."""
    if isinstance(target, str) and what == "token":
        ids = model.tokenizer(target, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise InputError(f"target={target!r} is {len(ids)} tokens of {model.name}. Give one token, or its id.")
        return int(ids[0])
    number = as_whole(target)
    if number is None:
        raise InputError(f"target={shortened(target)} cannot be used: expected a {what} by its number, or a function.")
    return number


def _checked(target: Callable[..., Any]) -> Callable[[Tensor | None, Tensor], Tensor]:
    def number(logits: Tensor | None, hidden: Tensor) -> Tensor:
        value = target(logits, hidden)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise InputError("target= must return one number that depends on the logits or the hidden vectors.")
        return value.reshape(())

    return number
