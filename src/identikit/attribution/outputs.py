"""Where an output comes from: the derivative of a number that a model makes of a text, by one backward pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.func import jvp

from identikit.attribution.result import OutputAttribution
from identikit.attribution.tangents import forward_mode
from identikit.errors import InputError, ModelError
from identikit.maths import jacobian
from identikit.models.decoder import input_facts, stacks_of
from identikit.models.load.check import TOLERANCE
from identikit.models.load.weights import dtype_advice
from identikit.models.machine import differentiable_attention
from identikit.models.model import Model
from identikit.models.partial_run import EMBEDDING, FIRST_BLOCK, run_from
from identikit.models.target import Target, checked_target, with_trace
from identikit.models.text_run import TextRun, join_facts
from identikit.results.axis import Axis
from identikit.results.source import StoredArrays
from identikit.shapes import Float, Tensor


def attribute_output(text: TextRun, requested: object, *, source: str = "before") -> OutputAttribution:
    """Attribute a target of a text to its tokens; a list holds several targets, and gives an axis of them."""
    targets = checked_targets(text, requested)
    first = targets[0]
    after = EMBEDDING if source == "before" else FIRST_BLOCK
    entering, gradients = _gradients(targets, after)
    by_entering = gradients
    if any(stack.family.embedding is not None for stack, _ in stacks_of(text)):
        # A norm follows the embedding sum, and the derivative along the sum itself is 0.
        entering, by_entering = _gradients(targets, FIRST_BLOCK)
    lengths = torch.linalg.vector_norm(gradients, dim=-1, dtype=torch.promote_types(gradients.dtype, torch.float32))
    arrays = {
        "contribution": jacobian.contributions(lengths.unsqueeze(-1)).squeeze(-1),
        "gradient_x_input": (by_entering.to(lengths.dtype) * entering.cpu().to(lengths.dtype)).sum(-1),
    }
    labels = tuple(target.label for target in targets)
    states = first.states()[None]
    chances = [target.probability for target in targets]
    about = joint_facts(first.runs) | {
        "target": list(labels),
        "value": [float(target.number(states)) for target in targets],
        "probability": [None if chance is None else float(chance(states)) for chance in chances],
    }
    tokens = tuple(about["tokens"])
    axes = (
        Axis("target", labels, single=not isinstance(requested, list)),
        Axis("input", tuple(range(len(tokens))), tokens),
    )
    provenance = text.model.provenance(text.text, target=list(labels), source=source)
    return OutputAttribution(axes, StoredArrays(arrays, dict.fromkeys(arrays, ("target", "input"))), provenance, about)


def checked_targets(text: TextRun, requested: object) -> list[Target]:
    """Return one target, or those of a list, of one text; refuse those that cannot stand side by side."""
    several: Sequence[object] = requested if isinstance(requested, list) else [requested]
    if not several:
        raise InputError("target=[] cannot be used: the list is empty. Give at least one target.")
    text = with_trace(text)
    targets = [checked_target(text.model, text, target) for target in several]
    labels = [target.label for target in targets]
    for label in labels:
        if labels.count(label) > 1:
            advice = "Give each once, and each function a name of its own."
            raise InputError(f"target= has two targets that are called {label!r}. {advice}")
    if len({len(target.runs) for target in targets}) > 1:
        raise InputError("'similarity' reads the halves of a pair apart: it cannot be listed with other targets.")
    return targets


def joint_facts(texts: Sequence[TextRun]) -> dict[str, list[Any]]:
    """Return the facts that a Result keeps of texts whose inputs are joined."""
    return join_facts([input_facts(text) for text in texts])


def _gradients(targets: Sequence[Target], after: int) -> tuple[Tensor, Float[Tensor, "target n d_x"]]:
    """Return the input vectors, those of a source after the text's own, and each target's derivatives by them."""
    vectors = []
    gradients = []
    for stack, _ in stacks_of(targets[0].runs[0]):
        vectors.append(targets[0].inputs(after, stack))
        gradients.append(torch.stack([_gradient(target, vectors[-1], after, stack) for target in targets]))
    return torch.cat(vectors), torch.cat(gradients, dim=1).cpu()


def _gradient(target: Target, inputs: Float[Tensor, "n d_x"], after: int, stack: Model) -> Float[Tensor, "n d_x"]:
    vectors = inputs[None].detach().clone()
    model = target.runs[0].model
    with model.tapped(), differentiable_attention(), torch.enable_grad():
        vectors.requires_grad_()
        value = target.of_inputs(vectors, after, stack).sum()
        (gradient,) = torch.autograd.grad(value, vectors, materialize_grads=True)
    if not gradient.isfinite().all():
        raise InputError(
            f"The derivatives of {target.label} overflow in {str(model.dtype).removeprefix('torch.')}. "
            f"{dtype_advice(model.dtype)}"
        )
    return gradient[0]


def fisher_roots(text: TextRun, positions: Sequence[int] | None) -> Float[Tensor, "output d d"]:
    """Return `jacobian.fisher_root` of the probabilities at each position (None: at all of them)."""
    text = with_trace(text)
    assert text.trace is not None
    hidden = text.trace.hidden[-1][0]
    positions = range(len(hidden)) if positions is None else positions
    with text.model.exclusive(), forward_mode():
        return torch.stack([_fisher_root(text, hidden[position], position) for position in positions]).to(hidden)


def _fisher_root(text: TextRun, vector: Float[Tensor, "d"], position: int) -> Float[Tensor, "d d"]:
    """Differentiate the head at one hidden vector: every position holds that vector, and carries its own direction."""
    model = text.model
    n = len(text.tokens)
    d = len(vector)
    rows = -(-d // n)
    directions = torch.eye(d, dtype=vector.dtype, device=vector.device)
    tangents = torch.cat([directions, directions.new_zeros(rows * n - d, d)]).unflatten(0, (rows, n))
    states = vector.expand_as(tangents).contiguous()

    def head(vectors: Tensor) -> Tensor:
        logits = run_from(model, text.batch, vectors, model.n_layers - 1).logits
        assert logits is not None
        return logits

    logits, moved, *_ = jvp(head, (states,), (tangents,))
    assert text.trace is not None and text.trace.logits is not None
    expected = text.trace.logits[0, position]
    if float((logits - expected).abs().max()) > TOLERANCE[model.dtype] * float(expected.abs().max()):
        raise ModelError(f"The logits of {model.name} at a position are not made of its last hidden vector alone.")
    return jacobian.fisher_root(moved.flatten(0, 1)[:d].mT, expected)
