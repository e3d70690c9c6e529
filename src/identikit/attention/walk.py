"""The attention that a reading goes through, layer by layer: of one stack, or of an encoder and then a decoder.

A decoder's block attends twice: to the target, and then to the source. Each is a layer of its own here, after which a
token keeps half of what it had, as rollout has it of every layer that attends and adds. So a block keeps a quarter of
a target token, takes a quarter from the target tokens that it sees, and half from the source, as the encoder left it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from identikit.attention.captured import Captured
from identikit.attention.layer import Layer
from identikit.errors import InputError
from identikit.maths.polytope.rows import Rows
from identikit.models.decoder import DecoderModel, model_for_attention
from identikit.models.model import Model
from identikit.models.text_run import rerun_with
from identikit.shapes import Float, Tensor
from identikit.texts.text import TokenBatch


@dataclass(frozen=True, eq=False)
class Walk:
    """Layers of attention in their order, from the inputs up.

    - `places`: of each layer, the captured run that it is of, and its place there
    - `inputs`: how many tokens there are: those of the text, which are the `outputs`, and then those of a source
    - `spans`: of each layer, which of them look and which are seen; None: all
    - `ends`: the layers after which a block is done; of a decoder, every second one behind the encoder's
    """

    places: tuple[tuple[Captured, int], ...]
    inputs: int
    outputs: int
    spans: tuple[tuple[slice, slice], ...] | None
    ends: list[int]

    @property
    def layers(self) -> list[Layer]:
        """The layers themselves."""
        return [captured.layers[place] for captured, place in self.places]

    def span(self, at: int) -> tuple[range, range]:
        """Return which tokens look in a layer, and which are seen."""
        if self.spans is None:
            return range(self.inputs), range(self.inputs)
        queries, keys = (range(self.inputs)[tokens] for tokens in self.spans[at])
        return queries, keys

    def maps(self) -> tuple[list[Tensor], list[Tensor], list[Rows]]:
        """Return of each layer raw attention, effective attention, and the rows with their sets, of all heads."""
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

    def arrived(self, values: Sequence[Float[Tensor, "source token"]]) -> Float[Tensor, "block output source"]:
        """Return what has arrived at the text's own tokens after each block, of what there is after each layer."""
        return torch.stack([values[end] for end in self.ends])[:, :, : self.outputs].mT


def walk_of(captured: Captured) -> Walk:
    """Return the attention that was captured of one stack; of a decoder, that of both stacks, read again."""
    reading = captured.reading
    model = reading.model
    n = len(reading.tokens)
    if model.decoder_attention is None:
        layers = range(len(captured.layers))
        return Walk(tuple((captured, place) for place in layers), n, n, None, list(layers))
    if not isinstance(model, DecoderModel):
        raise InputError(
            "Readings through layers of cross-attention go through the encoder, too, and so they need the model. Load "
            "it and use effective_attention(model, text, target=…, attention='cross')."
        )
    model.check_unchanged()
    source = reading.batch.source
    assert source is not None
    text = slice(0, n)
    behind = slice(n, n + len(source.tokens[0]))

    def of(stack: Model, batch: TokenBatch) -> Captured:
        again = rerun_with(reading, stack, batch)
        heads = range(stack.n_heads)
        layers = (Layer.of(again, layer, heads, captured.layers[0].options) for layer in stack.attention_layers)
        return Captured(again, tuple(layers), {})

    encoder = model.encoder
    below = of(encoder, source)
    places = [(below, place) for place in range(len(below.layers))]
    spans = [(behind, behind)] * len(places)
    own, cross = (of(model_for_attention(encoder, side), reading.batch) for side in ("decoder", "cross"))
    ends = []
    for place in range(len(captured.layers)):
        places += [(own, place), (cross, place)]
        spans += [(text, text), (text, behind)]
        ends.append(len(places) - 1)
    return Walk(tuple(places), behind.stop, n, tuple(spans), ends)
