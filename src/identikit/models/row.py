"""One row of the table of families: what an architecture calls its parts, and what it does differently."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from identikit.models.taps.tap import switched
from identikit.shapes import Tensor
from identikit.texts.features import Images, Sounds

Limit = Callable[[PreTrainedConfig], int | None]
Refusal = Callable[[PreTrainedConfig], str | None]
Watcher = Callable[[nn.Module, Callable[[Tensor], None]], list[RemovableHandle]]
"""Called with a block and what to pass its output to; returns the hooks, which the caller removes at the end."""


def table_size(config: PreTrainedConfig) -> int:
    """Return the size of the table of positions."""
    return config.get_text_config().max_position_embeddings


def nothing(config: PreTrainedConfig) -> None:
    """Return None: there is no limit, or no reason to refuse."""
    return


@dataclass(frozen=True)
class Family:
    """One architecture: what it calls its parts, and what it does differently.

    - `blocks`: its blocks, from the base model; `*` stands for every entry of a list
    - `output`: the output projection, from the block: a linear layer, or a bare (d, head, d_v) parameter
    - `value`: the layer that makes the values, alone or last of query, key, value; None: bare parameters, no bias
    - `interleaved`: that layer holds, for each key-value head in turn, its queries, its key and its value
    - `instead`: what some blocks have in the place of softmax attention, from the block; None: every block attends
    - `embedding`: the module whose input is the embedding sum x; None: the first block
    - `positions`: takes `position_ids`, so that texts may be padded on the left
    - `limit`: how many tokens it has positions for
    - `causal`: a token sees only those before it
    - `by_place`: what a token does depends on its place in the batch, so that it cannot be tried alone
    - `splits`: a block is post(x, mix(pre(x))) where mix is only the tap's softmax attention
    - `sequence_first`: its blocks put the sequence before the batch
    - `tap`: switches the tap in, and the model's own attention back at the end
    - `watch_output`: observes what a bare output projection makes; None: `output` is a module and can be watched
    - `stack`: the part that is read, from the base model, such as the encoder of two stacks; None: the whole model
    - `model_class`: the transformers class to load; None: the one that the checkpoint names
    - `features`: how it reads images or sounds; None: it reads texts
    - `refusal`: why a model with this configuration cannot be read; None: it can
    - `name`, `checkpoints`: what people call it, and hub ids that people know
    """

    blocks: str
    output: str
    value: str | None
    interleaved: bool = False
    instead: str | None = None
    embedding: str | None = None
    positions: bool = False
    limit: Limit = table_size
    causal: bool = False
    by_place: bool = False
    splits: bool = True
    sequence_first: bool = False
    tap: Callable[[PreTrainedModel], AbstractContextManager[None]] = switched
    watch_output: Watcher | None = None
    stack: str | None = None
    model_class: str | None = None
    features: Images | Sounds | None = None
    refusal: Refusal = nothing
    name: str = ""
    checkpoints: str = ""
