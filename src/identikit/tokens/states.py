"""The hidden states and input vectors of texts, which maps are fitted to and tested on."""

import math
from dataclasses import dataclass
from functools import cached_property
from tempfile import NamedTemporaryFile

import torch

from identikit.errors import InputError
from identikit.maths.neighbours import number_distinct
from identikit.models.model import Model, Trace
from identikit.progress import Progress, silent
from identikit.shapes import Float, Int, Tensor
from identikit.tokens.protocol import Task

READING = "hidden states, tokens"
LARGEST_IN_MEMORY = 2 << 30  # bytes of hidden states above which they are kept in a file


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Input vectors and hidden states of a dataset: all that maps need to know about a model.

    Sentences lie one after another along `token`, padding left out. `inputs` holds x_i (the summed embedding before
    the embedding LayerNorm) and `hidden[l]` the output of block l before any final norm. `hidden` may be a
    memory-mapped tensor: it is read one layer at a time. `model` is the name shown in tables.
    """

    inputs: Float[Tensor, "token d_x"]
    hidden: Float[Tensor, "layer token d"]
    lengths: Int[Tensor, " sentence"]
    model: str

    @property
    def n_layers(self) -> int:
        """The number of layers."""
        return self.hidden.shape[0]

    @property
    def n_sentences(self) -> int:
        """The number of sentences."""
        return self.lengths.shape[0]

    @property
    def chance(self) -> float:
        """The rate of guessing at random: 1 over the mean number of tokens per sentence (Appendix D.1)."""
        return self.n_sentences / self.inputs.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """What maps compute in: float64 where the vectors are float64, otherwise float32."""
        return torch.promote_types(torch.float32, torch.promote_types(self.inputs.dtype, self.hidden.dtype))

    @cached_property
    def identity(self) -> Int[Tensor, " token"]:
        """Which of the dataset's distinct input vectors each token has, as a number."""
        return number_distinct(self.inputs)

    @cached_property
    def starts(self) -> Int[Tensor, " sentence"]:
        """The row of each sentence's first token."""
        lengths = self.lengths.cpu()
        return lengths.cumsum(0) - lengths

    def layer(self, index: int, *, device: torch.device | None = None) -> Float[Tensor, "token d"]:
        """Read one layer's hidden states, counted from 0, in `dtype`."""
        return self.hidden[index].to(device or self.inputs.device, self.dtype)

    def targets(self, task: Task, layer: int, *, device: torch.device | None = None) -> Float[Tensor, "token d_t"]:
        """Read the vectors that a layer's map should recover: the inputs, or the previous layer's hidden states."""
        source = task.target_layer(layer)
        if source is None:
            return self.inputs.to(device or self.inputs.device, self.dtype)
        return self.layer(source, device=device)

    def width(self, task: Task, layer: int) -> int:
        """Return the width of the vectors that a layer's map should recover."""
        return (self.inputs if task.target_layer(layer) is None else self.hidden).shape[-1]

    def rows(self, sentences: Int[Tensor, " chosen"]) -> Int[Tensor, " row"]:
        """Return the rows of all tokens of these sentences, in the order of the sentences."""
        lengths = self.lengths.cpu()[sentences]
        within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return self.starts[sentences].repeat_interleave(lengths) + within

    def rows_with_target(self, sentences: Int[Tensor, " chosen"], offset: int) -> Int[Tensor, " row"]:
        """Return the rows of these sentences whose neighbour at `offset` lies in the same sentence."""
        rows = self.rows(sentences)
        lengths = self.lengths.cpu()[sentences]
        target = rows + offset - self.starts[sentences].repeat_interleave(lengths)
        return rows[(target >= 0) & (target < lengths.repeat_interleave(lengths))]

    def __post_init__(self) -> None:
        """Refuse sentences in which nothing can be told apart."""
        identity = self.identity.cpu()
        lengths = self.lengths.tolist()
        for sentence, (start, length) in enumerate(zip(self.starts.tolist(), lengths, strict=True)):
            if length > 1 and bool((identity[start : start + length] != identity[start]).any()):
                continue
            why = f"all {length} tokens of text {sentence} have the same input vector, so any answer counts as right"
            if length < 2:
                why = f"text {sentence} has only one token, so there is nothing to tell it apart from"
            raise InputError(f"Reading hidden states of {self.model}: {why}. Use texts of several different tokens.")


def hidden_states(
    model: Model, texts: object, *, truncate: bool = False, max_tokens: int | None = None, progress: Progress = silent
) -> HiddenStates:
    """Run texts through a model once and keep every token's input vector and hidden vectors, in order, unpadded.

    Large ones are kept in a temporary file that is mapped into memory and vanishes with the result.
    """
    encoded = model.encode(texts, truncate=truncate, max_tokens=max_tokens)
    lengths = torch.tensor([len(text) for text in encoded])
    starts = (lengths.cumsum(0) - lengths).tolist()
    dtype = torch.promote_types(model.dtype, torch.float32)
    inputs = torch.empty(int(lengths.sum()), model.d_input, dtype=dtype)
    shape = (model.n_layers, len(inputs), model.d_model)
    size = math.prod(shape) * dtype.itemsize
    if size <= LARGEST_IN_MEMORY:
        hidden = torch.empty(shape, dtype=dtype)
    else:
        with NamedTemporaryFile(prefix="identikit-") as file:  # removed at once: the mapping keeps it while needed
            file.truncate(size)
            hidden = torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype).view(shape)
    tokens_read = 0
    progress(READING, tokens_read, len(inputs))
    for batch in model.batches(encoded):
        trace = model.trace(batch)
        for row, index in enumerate(batch.order):
            positions = batch.positions(row).to(model.device)
            rows = slice(starts[index], starts[index] + len(encoded[index]))
            inputs[rows] = trace.inputs[row, positions].to(inputs)
            for layer, states in enumerate(trace.hidden):
                hidden[layer, rows] = states[row, positions].to(inputs)
        tokens_read += sum(batch.lengths)
        progress(READING, tokens_read, len(inputs))
    return HiddenStates(inputs, hidden, lengths, model.name)


def states_of_trace(trace: Trace, model: str) -> HiddenStates:
    """Return the hidden states of one text from its trace."""
    dtype = torch.promote_types(trace.inputs.dtype, torch.float32)
    hidden = torch.stack([states[0] for states in trace.hidden]).to(dtype)
    return HiddenStates(trace.inputs[0].to(dtype), hidden, torch.tensor([trace.inputs.shape[1]]), model)
