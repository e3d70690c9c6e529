"""The attention that a measure goes through, layer by layer: of one stack, or of an encoder and then a decoder.

A decoder's block attends twice: to the target, and then to the source. Each is a layer of its own here, after which a
token keeps half of what it had, as rollout has it of every layer that attends and adds. So a block keeps a quarter of
a target token, takes a quarter from the target tokens that it sees, and half from the source, as the encoder left it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from identikit.attention.captured import Captured, capture
from identikit.attention.layer import Layer
from identikit.errors import InputError
from identikit.maths.polytope.rows import Rows
from identikit.models.decoder import DecoderModel, model_for_attention
from identikit.models.text_run import rerun_with
from identikit.shapes import Float, Tensor


@dataclass(frozen=True, eq=False)
class Walk:
    """Layers of attention in their order, from the inputs up.

    - `steps`: each layer as the captured attention it belongs to, and its index in there
    - `inputs`: how many tokens there are: those of the text, which are the `outputs`, and then those of a source
    - `spans`: for each layer, which tokens are its queries and which its keys
    - `ends`: the layers after which a block is done; in a decoder, every second one after the encoder's
    """

    steps: tuple[tuple[Captured, int], ...]
    inputs: int
    outputs: int
    spans: tuple[tuple[slice, slice], ...]
    ends: list[int]

    @property
    def layers(self) -> list[Layer]:
        """The layers themselves."""
        return [captured.layers[index] for captured, index in self.steps]

    def maps(self) -> tuple[list[Tensor], list[Tensor], list[Rows]]:
        """Return raw attention, effective attention, and the rows with their sets, of all heads of each layer."""
        raw = []
        effective = []
        rows = []
        for layer in self.layers:
            heads = torch.arange(len(layer.heads), device=layer.heads.device)
            queries = torch.arange(layer.call.query.shape[2], device=heads.device)
            raw.append(layer.call.weights(queries, heads=layer.heads, dtype=torch.float64)[0])
            effective.append(layer.effective(heads, queries, slice(None)).double())
            rows.append(layer.rows(list(product(heads.tolist(), queries.tolist()))))
        return raw, effective, rows

    def after_blocks(self, values: Sequence[Float[Tensor, "source token"]]) -> Float[Tensor, "block output source"]:
        """Return what the text's own tokens hold after each block, from what all tokens hold after each layer."""
        return torch.stack([values[end] for end in self.ends])[:, :, : self.outputs].mT


def walk_of(captured: Captured) -> Walk:
    """Return the walk through captured attention; for a decoder, through both stacks, which this runs again."""
    text_run = captured.text_run
    model = text_run.model
    n = len(text_run.tokens)
    count = len(captured.layers)
    if model.decoder_attention is None:
        steps = tuple((captured, index) for index in range(count))
        return Walk(steps, n, n, ((slice(0, n), slice(0, n)),) * count, list(range(count)))
    if not isinstance(model, DecoderModel):
        raise InputError(
            "Measures through layers of cross-attention go through the encoder, too, and so they need the model. Load "
            "it and use effective_attention(model, text, target=…, attention='cross')."
        )
    model.check_unchanged()
    source_batch = text_run.batch.source
    assert source_batch is not None
    text = slice(0, n)
    source = slice(n, n + len(source_batch.tokens[0]))
    stacks = (
        (model.encoder, source_batch),
        (model_for_attention(model.encoder, "decoder"), text_run.batch),
        (model_for_attention(model.encoder, "cross"), text_run.batch),
    )
    options = captured.layers[0].options
    encoder, decoder, cross = (capture(rerun_with(text_run, stack, batch), options) for stack, batch in stacks)
    steps = [(encoder, index) for index in range(len(encoder.layers))]
    spans = [(source, source)] * len(steps)
    ends = []
    for index in range(count):
        steps += [(decoder, index), (cross, index)]
        spans += [(text, text), (text, source)]
        ends.append(len(steps) - 1)
    return Walk(tuple(steps), source.stop, n, tuple(spans), ends)
