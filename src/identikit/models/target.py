"""What an explanation explains: a number that a model computes from the last hidden vectors of a text.

- a next token, by its spelling or id; at another position `"Paris@7"`, and the model's own prediction there `"@7"`.
  A masked model is asked at its one masked position
- a class of a classification head, by its name or number
- `"prediction"`: the token or class that the model itself gives most
- a pair of these: the first against the second, a difference
- `"similarity"`: of the two halves of a pair of texts, for sentence encoders
- a function of the last hidden vectors (1, token, feature), or of the logits (None where there are none) and these
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from identikit.checks import as_integer, call_user_function, is_collection, shortened
from identikit.errors import InputError, ModelError
from identikit.models.load.check import TOLERANCE
from identikit.models.model import Model, Trace
from identikit.models.partial_run import EMBEDDING, FIRST_BLOCK, run_from
from identikit.models.text_run import TextRun, prepare_texts
from identikit.shapes import Float, Tensor
from identikit.texts.encoding import tokenize
from identikit.texts.text import Translation, is_text_list

PREDICTION = "prediction"
SIMILARITY = "similarity"
Number = Callable[[Float[Tensor, "batch n d"]], Float[Tensor, "batch"]]


@dataclass(frozen=True, eq=False)
class Target:
    """A number computed from the last hidden vectors.

    - `label`: what it is, in a few words
    - `runs`: the texts whose hidden vectors it depends on, one after another: the text itself, or both halves of a
      pair that were read apart from each other
    - `number`: computes the number, for each of a batch of last hidden vectors
    - `probability`: computes the probability of its token or class; None where there are several, or none
    - `token`: the token whose logit it is, if it is one
    """

    label: str
    runs: tuple[TextRun, ...]
    number: Number
    probability: Number | None = None
    token: int | None = None

    def states(self) -> Float[Tensor, "n d"]:
        """Return the last hidden vectors of the text itself."""
        return torch.cat([_trace(run).hidden[-1][0] for run in self.runs])

    def inputs(self, after: int = EMBEDDING, stack: Model | None = None) -> Float[Tensor, "n d_x"]:
        """Return the input vectors of the text itself: the embedding sums, or what enters the first block.

        With an encoder as the `stack`, they are those of the source.
        """
        model = self.runs[0].model
        if stack is None or stack is model:
            traces = [_trace(run) for run in self.runs]
        else:
            traces = [stack.trace(run.batch.source) for run in self.runs if run.batch.source is not None]
        if after == FIRST_BLOCK and (stack or model).family.embedding is not None:
            return torch.cat([trace.blocks[0].hidden[0] for trace in traces])
        return torch.cat([trace.inputs[0] for trace in traces])

    def of_inputs(
        self, vectors: Float[Tensor, "batch n d_x"], after: int = EMBEDDING, stack: Model | None = None
    ) -> Float[Tensor, "batch"]:
        """Return the number for other input vectors (see `inputs`), run through the whole model; differentiable."""
        lengths = [len(run.tokens) for run in self.runs] if len(self.runs) > 1 else [vectors.shape[1]]
        hidden = []
        for run, run_vectors in zip(self.runs, vectors.split(lengths, 1), strict=True):
            hidden.append(run_from(run.model, run.batch, run_vectors, after, stack=stack).hidden)
        return self.number(torch.cat(hidden, 1))


def checked_target(model: Model, text: object, target: object = PREDICTION) -> Target:
    """Return the target of an explanation of a text, which may be a `TextRun`; None is the model's own prediction."""
    if is_text_list(text):
        raise InputError("A target is of one text: pass a text, a pair or token ids.")
    text_run = with_trace(text if isinstance(text, TextRun) else prepare_texts(model, text)[0])
    if callable(target):
        _checked_logits(text_run)
        name = getattr(target, "__name__", "a function")
        return Target(name, (text_run,), partial(_function_values, text_run, _taking_logits(target)))
    if isinstance(target, str) and target == SIMILARITY:
        return _similarity_target(text_run)
    if isinstance(target, tuple):
        if len(target) != 2:
            raise InputError(f"target={shortened(target)} cannot be used: a pair is one target against another.")
        first, second = (checked_target(model, text_run, side) for side in target)
        if len(first.runs) != len(second.runs):
            raise InputError("'similarity' reads the halves of a pair apart: it cannot be set against other targets.")
        if not callable(target[0]) and (first.label, first.token) == (second.label, second.token):
            raise InputError(f"target={shortened(target)} sets the {first.label} against itself: all of it is 0.")
        label = f"{first.label} against {second.label}"
        return Target(label, first.runs, lambda states: first.number(states) - second.number(states))
    if is_collection(target):
        raise InputError(f"target={shortened(target)} cannot be used: expected one target.")
    return _logit_target(text_run, PREDICTION if target is None else target)


def with_trace(text_run: TextRun) -> TextRun:
    """Return a text together with its trace, so that the model does not run again for each use of it."""
    return text_run if text_run.trace is not None else replace(text_run, trace=text_run.model.trace(text_run.batch))


def _trace(text_run: TextRun) -> Trace:
    assert text_run.trace is not None
    return text_run.trace


def _checked_logits(text_run: TextRun) -> Tensor | None:
    """Return a text's logits; refuse a model that computes them from more than the last hidden vectors."""
    model = text_run.model
    trace = _trace(text_run)
    logits = trace.logits
    if logits is not None:
        again = run_from(model, text_run.batch, trace.hidden[-1], model.n_layers - 1).logits
        assert again is not None
        if float((again - logits).abs().max()) > TOLERANCE[model.dtype] * float(logits.abs().max()):
            raise ModelError(f"The logits of {model.name} are not made of its last hidden vectors alone.")
    return logits


# Logits


def _logit_target(text_run: TextRun, target: Any) -> Target:
    model = text_run.model
    logits = _checked_logits(text_run)
    if logits is None or logits.ndim not in (2, 3):
        raise InputError(
            f"A target is a logit, and {model.name} makes none. Use a model with a head. In Python, a function of the "
            "last hidden vectors (1, token, feature) that returns one number can be a target, too."
        )
    has_tokens = logits.ndim == 3 and model.modality == "text" and model.hf.get_output_embeddings() is not None
    name, position = _name_and_position(text_run, target, has_tokens) if logits.ndim == 3 else (target, None)
    choices = logits[0] if position is None else logits[0, position]
    if isinstance(name, str) and name == PREDICTION:
        index = int(choices.argmax())
    else:
        index = _token_id(model, name) if has_tokens and isinstance(name, str) else _class_index(model, name)
    if index is None or not 0 <= index < len(choices):
        kind = "a token" if has_tokens else "a class"
        raise InputError(
            f"target={shortened(target)} cannot be used: expected {kind}, a number from 0 to {len(choices) - 1}, or in "
            "Python a function."
        )
    label = f"token {model.tokenizer.decode([index])!r}" if has_tokens else f"class {_labels(model).get(index, index)}"
    is_next = has_tokens and _predicts_next(model) and position == logits.shape[1] - 1
    where = "" if position is None or is_next else f" at position {position}"
    positions = None if position is None else [position]

    def scores(states: Tensor) -> Float[Tensor, "batch choice"]:
        logits = run_from(model, text_run.batch, states, model.n_layers - 1, positions=positions).logits
        assert logits is not None
        return logits.flatten(0, logits.ndim - 2)

    return Target(
        f"{'next ' if is_next else ''}{label}{where}",
        (text_run,),
        lambda states: scores(states)[:, index],
        lambda states: scores(states).softmax(-1)[:, index],
        index if has_tokens else None,
    )


def _predicts_next(model: Model) -> bool:
    """Whether a model predicts, at each token, the next one: a causal model, or a decoder that looks at its source."""
    return model.causal or model.decoder_attention is not None


def _name_and_position(text_run: TextRun, target: object, has_tokens: bool) -> tuple[object, int]:
    """Return what a target names, and the position of its logits: `Paris@7` is `Paris` and 7."""
    model = text_run.model
    n = len(text_run.tokens)
    if isinstance(target, str) and not (has_tokens and _find_token_id(model, target) is not None):
        name, separator, position = target.rpartition("@")
        if separator and position.isdecimal():
            if int(position) >= n:
                raise InputError(f"target={shortened(target)} is at position {position}, and the text has {n} tokens.")
            return name or PREDICTION, int(position)
    if has_tokens and _predicts_next(model):
        return target, n - 1
    mask = getattr(model.tokenizer, "mask_token_id", None)
    assert text_run.batch.ids is not None or not has_tokens
    ids = [] if text_run.batch.ids is None else text_run.batch.ids[0].tolist()
    masked = [position for position, token in enumerate(ids) if has_tokens and token == mask]
    if len(masked) == 1:
        return target, masked[0]
    answers = f"{len(masked)} masked tokens" if has_tokens else "an answer for each token"
    raise InputError(
        f"{model.name} has {answers} here. Say which position the target is at, such as target='@{n // 2}'."
    )


def _spellings(model: Model, target: str) -> list[list[int]]:
    """Return the token ids of a word as it is typed, and with a space before it."""
    words = (target, f" {target}")
    return [tokenize(model.tokenizer, word, add_special_tokens=False)["input_ids"] for word in words]


def _find_token_id(model: Model, target: str) -> int | None:
    """Return the id of a word that is one token as it is typed, or else with a space before it; None: it is not."""
    tokenizer = model.tokenizer
    for ids in _spellings(model, target):
        if len(ids) == 1 and (ids[0] != tokenizer.unk_token_id or target == tokenizer.unk_token):
            return int(ids[0])
    return None


def _token_id(model: Model, target: str) -> int:
    token = _find_token_id(model, target)
    if token is None:
        count = min(map(len, _spellings(model, target)))
        problem = "not a token" if count == 1 else f"{count} tokens"  # one that is unknown
        raise InputError(f"target={shortened(target)} is {problem} of {model.name}. Give one token, or its id.")
    return token


def _labels(model: Model) -> dict[int, str]:
    return {int(number): str(name) for number, name in (getattr(model.hf.config, "id2label", None) or {}).items()}


def _class_index(model: Model, target: object) -> int | None:
    """Return the index of a class given by its name or index; None: it is neither."""
    if not isinstance(target, str):
        return as_integer(target)
    numbers = {name: number for number, name in _labels(model).items()}
    return numbers.get(target, int(target) if target.isdecimal() and len(target) < 10 else None)


# Functions and similarity


def _taking_logits(function: Callable[..., object]) -> Callable[[Tensor | None, Tensor], object]:
    """Return a user's function as one of logits and hidden vectors, even if it takes only the hidden vectors."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin one
        return lambda logits, hidden: function(hidden)
    for arguments, adapted in (((0, 0), function), ((0,), lambda logits, hidden: function(hidden))):
        with suppress(TypeError):
            signature.bind(*arguments)
            return adapted
    raise InputError(
        f"target={shortened(function)} cannot be used: expected a function of the last hidden vectors, or of the "
        f"logits and these, and its arguments are {signature}."
    )


def _function_values(text_run: TextRun, function: Callable[[Tensor | None, Tensor], object], states: Tensor) -> Tensor:
    model = text_run.model
    all_logits = run_from(model, text_run.batch, states, model.n_layers - 1).logits
    values = []
    for row in range(len(states)):
        logits = None if all_logits is None else all_logits[row : row + 1]
        value = call_user_function("target=", function, logits, states[row : row + 1])
        if (
            not isinstance(value, torch.Tensor)
            or value.numel() != 1
            or not value.isfinite().all()
            or (states.requires_grad and torch.is_grad_enabled() and not value.requires_grad)
        ):
            raise InputError("target= must return one finite number that depends on the logits or the hidden vectors.")
        values.append(value.reshape(()))
    return torch.stack(values)


def _is_pair(text: object) -> TypeGuard[tuple[str, str]]:
    """Whether a text is two strings that one model reads together."""
    if not isinstance(text, tuple) or isinstance(text, Translation):
        return False
    return len(text) == 2 and all(isinstance(half, str) for half in text)


def _similarity_target(text_run: TextRun) -> Target:
    """Return the cosine of the halves of a pair, each read by itself and averaged over all of its tokens."""
    pair = text_run.text
    if not _is_pair(pair):
        raise InputError("target='similarity' is of a pair of texts: pass a tuple of two strings.")
    model = text_run.model
    runs = tuple(with_trace(half) for half in prepare_texts(model, list(pair), truncate=text_run.truncate))
    lengths = [len(run.tokens) for run in runs]

    def cosine(states: Tensor) -> Tensor:
        means = []
        for run, vectors in zip(runs, states.split(lengths, 1), strict=True):
            final = run_from(model, run.batch, vectors, model.n_layers - 1).final
            if final is None:
                raise InputError(f"target='similarity' cannot be used: {model.name} has no vectors of its base model.")
            means.append(final.mean(1))
        return F.cosine_similarity(means[0], means[1], dim=-1)

    return Target("similarity of the pair", runs, cosine)
