"""Where an output comes from, by its definition: autograd through one plain run, and Fisher's metric as a trace."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from identikit.models import families
from identikit.models.model import Model
from identikit.models.taps.tap import visit_calls
from identikit.texts.text import TokenBatch


class Plain:
    """One run of a model on one text with autograd on: `inputs` is a leaf (n, d_x), and all else follows from it.

    `layers` are the outputs of all blocks (n, d), and `hidden` is the last of them.
    """

    def __init__(self, model: Model, batch: TokenBatch, *, after: bool = False):
        leaves: list[Tensor] = []
        hidden: list[Tensor] = []
        base: list[Any] = []
        alone = 1 if model.family.sequence_first else 0

        def start(module, args, kwargs):
            if leaves:  # a block that is used again
                return None
            given = args[0] if args else kwargs["hidden_states"]
            leaves.append(given.detach().squeeze(alone).clone().requires_grad_())
            x = leaves[0].unsqueeze(alone)
            return ((x, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": x})

        def leave(module, args, output):
            hidden.append((output[0] if isinstance(output, tuple) else output).squeeze(alone))

        embedding = None if after else model.family.embedding
        first = model.blocks[0] if embedding is None else families.find(model.hf.base_model, embedding)
        with (
            model.tapped(),
            torch.enable_grad(),
            visit_calls(lambda call: None),
            sdpa_kernel(SDPBackend.MATH),
            ExitStack() as stack,
        ):
            stack.callback(first.register_forward_pre_hook(start, with_kwargs=True).remove)
            stack.callback(model.hf.base_model.register_forward_hook(lambda *call: base.append(call[2])).remove)
            for block in {id(block): block for block in model.blocks}.values():
                stack.callback(block.register_forward_hook(leave).remove)
            output = model.hf(**model.arguments(batch))
        self.inputs = leaves[0]
        self.layers = hidden
        self.hidden = hidden[-1]
        self.logits = getattr(output, "logits", None)
        self.final = getattr(base[-1], "last_hidden_state", None) if base else None

    def gradient(self, number: Callable[["Plain"], Tensor]) -> Tensor:
        """Return the derivative of a number by the inputs."""
        return torch.autograd.grad(number(self), self.inputs, retain_graph=True)[0]


def shares(gradient: Tensor) -> list[float]:
    """Return the share of each row's length in the sum of all."""
    lengths = [float(row.square().sum().sqrt()) for row in gradient]
    return [length / sum(lengths) for length in lengths]


def fisher_shares(plain: Plain, output: int) -> list[float]:
    r"""Return the share of each input in $\sqrt{tr(J^\top F J)}$ for one position, with F of its probabilities.

    $J = \partial e_j/\partial x_i$, $W = \partial logits_j/\partial e_j$ and $F = W^\top (diag(p) - p p^\top) W$, all
    written out; $W J$ is what autograd gives for the logits themselves.
    """
    logits = plain.logits[0, output]
    p = logits.softmax(0).detach()
    metric = torch.diag(p) - torch.outer(p, p)
    rows = [torch.autograd.grad(logit, plain.inputs, retain_graph=True)[0] for logit in logits]
    through = torch.stack(rows)  # (token, input, feature)
    traces = [
        float(torch.trace(through[:, place].T @ metric @ through[:, place])) for place in range(len(plain.inputs))
    ]
    roots = [max(trace, 0.0) ** 0.5 for trace in traces]
    return [root / sum(roots) for root in roots]
