"""A model under the tap: run it, watch it, take its blocks apart."""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from identikit.encoding import encode
from identikit.errors import InputError, ModelError
from identikit.models import families
from identikit.models.tap import AttentionCall, Visitor, evaluating, visiting
from identikit.shapes import Float, Tensor
from identikit.text import Encoded, TokenBatch, batches, encode_images


@dataclass(frozen=True)
class Trace:
    """One run of a model: the embedding sum x, every block's output e^l (before any final norm), and the logits.

    `blocks` holds each block that ran and what it was called with, so that the run can be taken apart afterwards.
    """

    inputs: Float[Tensor, "batch n d_x"]
    hidden: tuple[Float[Tensor, "batch n d"], ...]
    logits: Tensor | None
    blocks: tuple[tuple[nn.Module, tuple[Any, ...], dict[str, Any]], ...] = ()


@dataclass(frozen=True)
class Block:
    """One block as post(x, mix(pre(x))): `pre` and `post` act on each position alone, and only `mix` looks across.

    - `input`: the hidden vectors that enter it; `call`: its attention, as captured
    - `pre(x)`: queries, keys and values; `post(x, o)`: the block's output for the head output o
    - `whole(x)`: the whole block
    - `after(start)`: the same block for the positions from `start` on; only its `input`, `pre` and `post` can be used
    """

    input: Float[Tensor, "batch n d"]
    call: AttentionCall
    pre: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    post: Callable[[Tensor, Tensor], Tensor]
    whole: Callable[[Tensor], Tensor]
    after: Callable[[int], "Block"]


@dataclass(frozen=True)
class Split:
    """A model taken apart for one batch: x, the rest of its embedding (from x to the first block), and its blocks."""

    inputs: Float[Tensor, "batch n d_x"]
    tail: Callable[[Tensor], Tensor]
    blocks: tuple[Block, ...]


class _Reached(Exception):  # noqa: N818 - not an error: it ends a run once the wanted part is done
    def __init__(self, *parts: Tensor):
        self.parts = parts


@dataclass
class _Seen:
    """What the hooks saw in one run."""

    inputs: Tensor | None = None
    hidden: list[Tensor] = field(default_factory=list)
    blocks: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class Model:
    """A transformer with its tokenizer (or image processor), ready to be read.

    `n_layers`, `n_heads`, `n_key_value_heads`, `d_model`, `d_input`, `d_value` and `causal` are measured in a first run
    through the tap, not read from a configuration. `limit` is how many tokens it has positions for (None: no limit).
    Layers count from 0.
    """

    def __init__(self, hf: PreTrainedModel, tokenizer: Any, *, name: str, revision: str | None = None):
        self.hf = hf
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.family = families.family_of(hf)
        self.limit = self.family.limit(hf.config)
        self._accepted = frozenset(inspect.signature(hf.forward).parameters)
        self._modules = families.find_all(hf.base_model, self.family.blocks)
        self._measure()

    def __repr__(self) -> str:
        return (
            f"Model({self.name!r}, layers={self.n_layers}, heads={self.n_heads}, d_model={self.d_model}, "
            f"d_value={self.d_value}, causal={self.causal})"
        )

    def _measure(self) -> None:
        calls: list[AttentionCall] = []
        with self._tapped(calls.append) as seen:
            self._forward(self.sample((6,)))
        first = calls[0]
        self.n_layers = len(calls)
        self.n_heads, self.n_key_value_heads = first.query.shape[1], first.key.shape[1]
        self.d_value = first.value.shape[-1]
        self.d_model = seen.hidden[0].shape[-1]
        self.d_input = _not_none(seen.inputs).shape[-1]
        self.causal = not first.visible()[0, 0, 0, 1:].any().item()
        self.blocks = [module for module, _, _ in seen.blocks]

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.hf.device

    @property
    def dtype(self) -> torch.dtype:
        """The number format that the model computes in."""
        return self.hf.dtype

    @property
    def vision(self) -> bool:
        """Whether the model reads images instead of texts."""
        return self.hf.main_input_name == "pixel_values"

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 over the name, shape, dtype and about 1,024 evenly spaced entries of every parameter.

        It tells checkpoints apart without reading gigabytes. It does not prove that two models agree in every entry.
        """
        digest = hashlib.sha256()
        for name, parameter in sorted(self.hf.named_parameters()):
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 1024)].double().cpu().numpy()
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + sample.tobytes())
        return digest.hexdigest()

    def projection(self, layer: int) -> Float[Tensor, "head d_v d"]:
        """Return H of Eq. 2 for every head: its slice of the layer's output projection."""
        return families.output_projection(self.family, self.blocks[self.layer(layer)], self.n_heads)

    def value_bias(self, layer: int) -> Float[Tensor, "kv_head d_v"] | None:
        """Return the bias in the layer's values, or None if there is none."""
        block = self.blocks[self.layer(layer)]
        return families.value_bias(self.family, block, self.n_key_value_heads, self.d_value)

    def layer(self, index: int) -> int:
        """Return a layer's index, counted from 0, if the layer exists."""
        if not 0 <= index < self.n_layers:
            raise InputError(
                f"Choosing layers: layer {index} does not exist: {self.name} has layers 0 to {self.n_layers - 1}."
            )
        return index

    def encode(self, texts: Any, *, truncate: bool = False, max_tokens: int | None = None) -> list[Encoded]:
        """Return a text (a string, a pair, or token ids), or a list of texts, as tokens.

        A text of more tokens than the model has positions for, or than `max_tokens`, is an error; with `truncate` it is
        cut there.
        """
        if self.vision:
            raise InputError(f"{self.name} reads images, not texts. Pass a PIL image or the path of one.")
        encoded = encode(self.tokenizer, texts, limit=self.limit, max_tokens=max_tokens, truncate=truncate)
        known = len(self.hf.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]
        for one in encoded:
            if max(one.ids) >= known:
                raise InputError(
                    f"Reading a text: its token {one.tokens[one.ids.index(max(one.ids))]!r} has the id {max(one.ids)}, "
                    f"and {self.name} has embeddings for only {known} ids. Use the model's own tokenizer."
                )
        return encoded

    def batches(self, encoded: list[Encoded], *, batch_tokens: int = 4096) -> Iterator[TokenBatch]:
        """Yield batches of texts of similar length, padded on the right."""
        return batches(encoded, batch_tokens=batch_tokens, pad_id=self.pad_id)

    def images(self, images: Any) -> TokenBatch:
        """Return PIL images, or their paths, as one batch whose tokens are patches."""
        if not self.vision:
            raise InputError(f"{self.name} reads texts, not images. Pass a text or a pair of texts.")
        side = self.hf.config.image_size // self.hf.config.patch_size
        return encode_images(self.tokenizer, images, grid=(side, side))

    @property
    def pad_id(self) -> int:
        """The id that fills up a padded batch; no real token ever looks at it."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        pad = self.hf.config.get_text_config().pad_token_id if pad is None else pad
        return 0 if pad is None else pad

    def sample(self, lengths: tuple[int, ...]) -> TokenBatch:
        """Return a made-up batch of sequences of these lengths, for measuring and proving."""
        if self.vision:
            config = self.hf.config
            size = (len(lengths), config.num_channels, config.image_size, config.image_size)
            pixels = torch.randn(size, generator=torch.Generator().manual_seed(0))
            n = self.limit or 0
            return _batch(None, torch.ones(len(lengths), n, dtype=torch.bool), pixels)
        n, vocabulary = max(lengths), self.hf.config.get_text_config().vocab_size
        keep = torch.arange(n) < torch.tensor(lengths)[:, None]
        ids = (self.pad_id + 1 + torch.arange(n) * 7 % (vocabulary - 1)) % vocabulary
        return _batch(torch.where(keep, ids, self.pad_id), keep, None)

    def trace(self, batch: TokenBatch, visit: Visitor = lambda call: None) -> Trace:
        """Run a batch through the tapped model.

        `visit` sees each layer's attention in turn. It may return another head output, which the model then uses.
        """
        with self._tapped(visit) as seen:
            output = self._forward(batch)
        return Trace(_not_none(seen.inputs), tuple(seen.hidden), getattr(output, "logits", None), tuple(seen.blocks))

    @contextmanager
    def split(self, batch: TokenBatch, run: tuple[Trace, list[AttentionCall]] | None = None) -> Iterator[Split]:
        """Take the model apart for one batch; the parts work only inside the `with` block.

        `run` is a trace of this batch and its attention calls, if it was run already.
        """
        if not self.family.splits:
            raise ModelError(f"{self.name} cannot be taken apart: its attention has terms beyond softmax(QK)V.")
        if run is None:
            calls: list[AttentionCall] = []
            run = self.trace(batch, calls.append), calls
        trace, calls = run
        parts = [self._block(*entry, call) for entry, call in zip(trace.blocks, calls, strict=True)]
        with self._switched(), torch.no_grad():
            yield Split(trace.inputs, lambda x: self._tail(batch, x), tuple(parts))

    def _block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: AttentionCall) -> Block:
        def run(x: Tensor, visitor: Visitor) -> Tensor:
            given = ((x, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": x})
            with visiting(visitor):
                return _first(module(*given[0], **given[1]))

        def pre(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            def stop(call: AttentionCall) -> None:
                raise _Reached(call.query, call.key, call.value)

            try:
                run(x, stop)
            except _Reached as reached:
                query, key, value = reached.parts
                return query, key, value
            raise ModelError(f"Reading {self.name}: {type(module).__name__} did not call its attention.")

        def post(x: Tensor, output: Tensor) -> Tensor:
            return run(x, lambda call: output)

        def whole(x: Tensor) -> Tensor:
            return run(x, lambda call: None)

        def after(start: int) -> Block:
            n = call.query.shape[2]
            return self._block(module, _positions_after(args, n, start), _positions_after(kwargs, n, start), call)

        return Block(_hidden(args, kwargs), call, pre, post, whole, after)

    def _tail(self, batch: TokenBatch, x: Tensor) -> Tensor:
        """Run the rest of the embedding, from the sum x up to the first block."""

        def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (x, *args[1:])

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Reached(_hidden(args, kwargs))

        if self.family.embedding is None:
            return x
        with ExitStack() as stack:
            embedding = families.find(self.hf.base_model, self.family.embedding)
            stack.callback(embedding.register_forward_pre_hook(replace).remove)
            stack.callback(self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True).remove)
            try:
                self._forward(batch)
            except _Reached as reached:
                return reached.parts[0]
        raise ModelError(f"Reading {self.name}: it ended before its first block.")

    def _forward(self, batch: TokenBatch) -> Any:
        return self.hf(**self.arguments(batch))

    def arguments(self, batch: TokenBatch) -> dict[str, Any]:
        """Return the arguments of the model's forward for a batch."""
        batch = batch.to(self.device)
        if batch.pixels is not None:
            return {"pixel_values": batch.pixels.to(self.dtype)}
        arguments: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.keep.long()}
        if batch.segments is not None and "token_type_ids" in self._accepted:
            arguments["token_type_ids"] = batch.segments
        if self.family.positions:  # without the mask they would mean packed sequences
            arguments["position_ids"] = (batch.keep.long().cumsum(-1) - 1).clamp(min=0)
        return arguments | {name: False for name in ("use_cache", "use_mems") if name in self._accepted}

    @contextmanager
    def _switched(self) -> Iterator[None]:
        with evaluating(self.hf), self.family.tap(self.hf):
            yield

    @contextmanager
    def _tapped(self, visit: Visitor) -> Iterator[_Seen]:
        """Run with the tap in place and every block watched; at the end, check that each block attended just once."""
        seen = _Seen()
        with self._switched(), torch.no_grad(), visiting(visit) as count, ExitStack() as stack:
            for hook in self._hooks(seen, count):
                stack.callback(hook.remove)
            yield seen
        if not seen.blocks or count[0] != len(seen.blocks):
            raise ModelError(
                f"Reading {self.name}: its {len(seen.blocks)} blocks called the tapped attention {count[0]} times, not "
                "once each. Its attention does not go through transformers' attention interface as identikit needs."
            )

    def _hooks(self, seen: _Seen, count: list[int]) -> Iterator[Any]:
        def embedded(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.inputs = args[0]

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if seen.inputs is None:
                seen.inputs = self._batch_first(_hidden(args, kwargs))
            seen.blocks.append((module, args, kwargs))

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen.hidden.append(self._batch_first(_first(output)))
            if count[0] != len(seen.blocks):
                raise ModelError(
                    f"Reading {self.name}: block {len(seen.blocks) - 1} ({type(module).__name__}) called the tapped "
                    f"attention {count[0] - len(seen.blocks) + 1} times, not once."
                )

        if self.family.embedding is not None:
            yield families.find(self.hf.base_model, self.family.embedding).register_forward_pre_hook(embedded)
        for module in self._modules:
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave)

    def _batch_first(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(0, 1) if self.family.sequence_first else hidden


def checked_model(model: Any) -> Model:
    """Return a model if it is one of ours, or say what to do."""
    if isinstance(model, Model):
        return model
    raise InputError(
        f"Expected a model from identikit.load, got {type(model).__name__}. Load it first: "
        "model = identikit.load(hf_model, tokenizer), or identikit.load('a folder or hub id')."
    )


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _positions_after(given: Any, n: int, start: int) -> Any:
    """Cut what a block was called with to the positions from `start` on; tensors of four axes are maps of positions."""
    if isinstance(given, tuple):
        return tuple(_positions_after(one, n, start) for one in given)
    if isinstance(given, dict):
        return {name: _positions_after(one, n, start) for name, one in given.items()}
    if not isinstance(given, Tensor):
        return given
    axes = (2, 3) if given.ndim == 4 else (min(1, given.ndim - 1),) if given.ndim else ()
    for axis in axes:
        given = given.narrow(axis, start, n - start) if given.shape[axis] == n else given
    return given


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _not_none(inputs: Tensor | None) -> Tensor:
    if inputs is None:
        raise ModelError("Reading a model: it ran without its embedding. Its family's row names the wrong module.")
    return inputs


def _batch(ids: Tensor | None, keep: Tensor, pixels: Tensor | None) -> TokenBatch:
    rows = len(keep)
    return TokenBatch(
        ids=ids,
        keep=keep,
        special=torch.zeros_like(keep),
        segments=None,
        tokens=tuple(tuple("?" for _ in range(int(n))) for n in keep.sum(-1)),
        words=tuple(() for _ in range(rows)),
        order=tuple(range(rows)),
        pixels=pixels,
    )
