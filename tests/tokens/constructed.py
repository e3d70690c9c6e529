"""Hidden states made by hand, so that what can be recovered from them is known."""

import torch

from identikit.tokens.states import HiddenStates


def states(*, sentences=40, length=(4, 9), width=6, hidden=None, layers=1, seed=0, dtype=torch.float32, inputs=None):
    """Random inputs, and hidden states made from them by ``hidden(inputs, generator)``, by default noise."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(*length, (sentences,), generator=generator)
    tokens = int(lengths.sum())
    if inputs is None:
        inputs = torch.randn(tokens, width, generator=generator, dtype=dtype)
    else:
        inputs = inputs(tokens, generator)
    make = hidden or (lambda inputs, generator: torch.randn(inputs.shape, generator=generator, dtype=dtype))
    return HiddenStates(
        inputs=inputs,
        hidden=torch.stack([make(inputs, generator) for _ in range(layers)]),
        lengths=lengths,
        model="constructed",
    )


def rotated(inputs, generator):
    """A random rotation of the inputs (or reflection): all of a token's identity is there, and none of its place."""
    rotation = torch.linalg.qr(torch.randn(inputs.shape[1], inputs.shape[1], generator=generator, dtype=inputs.dtype))[
        0
    ]
    return inputs @ rotation
