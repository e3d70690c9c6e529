"""A model under the tap: run it, watch it, take its blocks apart."""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from identikit.errors import IdentikitError, InputError, ModelError
from identikit.models import families
from identikit.models.load.fingerprint import Identity, identity_of
from identikit.models.load.weights import broken_weight, wider_dtype
from identikit.models.surroundings import makeup, refuse_transforms, turn, uncompiled, undisturbed, without_gradients
from identikit.models.taps.tap import AttentionCall, Place, Visitor, evaluating, plain_experts, plain_outputs, visiting
from identikit.results.axis import Index, chosen
from identikit.results.provenance import Provenance, package_versions, text_hash
from identikit.shapes import Float, Tensor
from identikit.texts.encoding import encode
from identikit.texts.features import Source, encode_features
from identikit.texts.text import Encoded, Text, TokenBatch, batches

if TYPE_CHECKING:
    from identikit.models.load.load import Recipe


@dataclass(frozen=True)
class Trace:
    """One run of a model: the embedding sum x (`inputs`), every block's output e^l (`hidden`), and the `logits`.

    `hidden` is before any final norm. `blocks` holds each block that ran and what it was called with, so that the run
    can be taken apart afterwards.
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
    """A model taken apart for one batch: x (`inputs`), from there to the first block (`tail`), and its `blocks`."""

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
    calls: list[int] = field(default_factory=list)


class Model:
    """A transformer with its tokenizer (or image processor, or feature extractor), ready to be read.

    `n_layers`, `n_heads`, `n_key_value_heads`, `d_model`, `d_input`, `d_value` and `causal` are measured in a first run
    through the tap, not read from a configuration; so is `dtype`, the number format that its attention computes in.
    `limit` is how many tokens it has positions for (None: no limit). A layer is a block, counted from 0;
    `attention_layers` are those with softmax attention, in most models all.

    `hf` is the transformers model that is read, `blocks` are its modules for the layers, and `tokenizer` is what reads
    for it. `name` and `revision` are what it was loaded under, and `recipe` says how (None: it was in memory). `family`
    is its row in the table of architectures, and `proof` how it was proved that it is read correctly.

    One thread at a time reads a model, and finds it as it came; other threads wait. Your own forward passes in another
    thread are not held off: do not run a model while it is read.
    """

    recipe: "Recipe | None" = None

    def __init__(self, hf: PreTrainedModel, tokenizer: Any, *, name: str, revision: str | None = None):
        self.family = families.family_of(hf)
        self.hf = hf = families.stack_of(self.family, hf)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.limit = self.family.limit(hf.config)
        self._accepted = _accepted(hf)
        self._first = families.find_all(hf.base_model, self.family.blocks)[0]
        self.proof: tuple[Any, Callable[[Model], Any]] | None = None  # what `makeup` was when it was proved, and how
        with self.alone():
            self._measure()

    def __repr__(self) -> str:
        return (
            f"Model({self.name!r}, layers={self.n_layers}, heads={self.n_heads}, d_model={self.d_model}, "
            f"d_value={self.d_value}, causal={self.causal})"
        )

    def _measure(self) -> None:
        calls: list[AttentionCall] = []
        self._modules = families.find_all(self.hf.base_model, self.family.blocks)
        batch = self.sample((6,))
        with self._tapped(calls.append) as seen, _failing(self.name):
            self._forward(batch)
        first = calls[0]
        self.attention_layers = tuple(call.layer for call in calls)
        self.n_layers = len(seen.blocks)
        self.n_heads, self.n_key_value_heads = first.query.shape[1], first.key.shape[1]
        self.d_value = first.value.shape[-1]
        inputs = _not_none(seen.inputs)
        self._check_shapes(batch, inputs, seen.hidden, calls)
        self.d_model, self.d_input = seen.hidden[0].shape[-1], inputs.shape[-1]
        self.causal = not first.visible()[0, 0, 0, 1:].any().item()
        self.blocks = [module for module, _, _ in seen.blocks]
        self.dtype = first.value.dtype

    def _check_shapes(
        self, batch: TokenBatch, inputs: Tensor, hidden: list[Tensor], calls: list[AttentionCall]
    ) -> None:
        """Refuse a row whose vectors are not one per token, and a model whose layers differ in their heads."""
        row = f"Reading {self.name}: the row of {self.hf.config.model_type!r} says"
        where = {
            f"blocks={self.family.blocks!r} and sequence_first={self.family.sequence_first}": hidden,
            f"embedding={self.family.embedding!r}": [inputs],
        }
        for said, tensors in where.items():
            for one in tensors:
                if one.ndim != 3 or one.shape[:2] != batch.keep.shape or not one.is_floating_point():
                    raise ModelError(
                        f"{row} {said}, and there is a tensor {list(one.shape)} ({one.dtype}) where a vector for each "
                        f"token of a batch {list(batch.keep.shape)} is expected."
                    )
        dtypes = {call.value.dtype: call.layer for call in calls}
        if len(dtypes) > 1:
            found = "; ".join(f"layer {layer}: {str(one).removeprefix('torch.')}" for one, layer in dtypes.items())
            raise ModelError(
                f"Reading {self.name}: its layers differ in the number format of their values ({found}), so no single "
                "precision can be told. Convert it with model.to(dtype)."
            )
        shapes = {(call.query.shape[1], *call.key.shape[1:2], call.value.shape[-1]): call.layer for call in calls}
        if len(shapes) > 1:
            found = "; ".join(f"layer {layer}: {h}, {kv} and {d}" for (h, kv, d), layer in shapes.items())
            raise ModelError(
                f"Reading {self.name}: its layers differ in their numbers of heads, key-value heads and value "
                f"dimensions ({found}), and identikit reads models whose layers agree in them."
            )

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.hf.device

    @property
    def modality(self) -> str:
        """What the model reads: "text", "image" or "sound"."""
        return "text" if self.family.features is None else self.family.features.modality

    @property
    def fingerprint(self) -> str:
        """A SHA-256 over every weight, the configuration, the modules, active adapters and the tokenizer.

        It is taken anew when a public function is given the model, so that a result never claims weights of before.
        """
        return self.identity.model

    @cached_property
    def identity(self) -> Identity:
        """The fingerprints of the model and of its tokenizer, as last taken."""
        return identity_of(self.hf, self.tokenizer)

    def take_identity(self) -> None:
        """Take the fingerprints anew."""
        self.identity = identity_of(self.hf, self.tokenizer)

    def provenance(self, text: Text, **settings: Any) -> Provenance:
        """Return where a result of this model on `text` comes from, computed with `settings`."""
        return Provenance(
            model=self.name,
            revision=self.revision,
            weights=self.fingerprint,
            tokenizer=type(self.tokenizer).__name__,
            tokenizer_sha256=self.identity.reader,
            text=text_hash(text),
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            settings=json.loads(json.dumps(settings, default=str)),
            versions=package_versions(),
        )

    def check_unchanged(self, since: str | None = None) -> None:
        """Refuse a model that is not the one whose fingerprint is `since`; None: the one last taken."""
        if identity_of(self.hf, self.tokenizer).model != (self.fingerprint if since is None else since):
            raise ModelError(
                f"Reading {self.name}: its weights, configuration or tokenizer changed after it was first read, so the "
                "numbers would be of two models. Compute them again, and do not change the model meanwhile."
            )

    def projection(self, layer: int) -> Float[Tensor, "head d_v d"]:
        """Return H of Eq. 2 for every head: its slice of the layer's output projection."""
        (layer,) = self.attending(layer)
        return families.output_projection(self.family, self.blocks[layer], self.n_heads)

    def value_bias(self, layer: int) -> Float[Tensor, "kv_head d_v"] | None:
        """Return the bias in the layer's values, or None if there is none."""
        (layer,) = self.attending(layer)
        return families.value_bias(self.family, self.blocks[layer], self.n_key_value_heads, self.d_value)

    def attending(self, layers: Index = None) -> tuple[int, ...]:
        """Return the layers whose attention a caller asked for; None: all that have softmax attention."""
        if layers is None:
            return self.attention_layers
        wanted = chosen("layer", layers, self.n_layers)
        for layer in wanted:
            mixer = families.mixer_instead(self.family, self.blocks[layer])
            if mixer is not None:
                raise InputError(
                    f"Layer {layer} of {self.name} has no softmax attention ({type(mixer).__name__}); its attention "
                    f"layers are {', '.join(map(str, self.attention_layers))}."
                )
        return wanted

    def encode(
        self, texts: Any, *, truncate: bool = False, max_tokens: int | None = None, features: bool = True
    ) -> list[Encoded]:
        """Return a text (a string, a pair, or token ids), or a list of texts, as tokens.

        A text of more tokens than the model has positions for, or than `max_tokens`, is an error; with `truncate` it is
        cut there. In the place of texts, a model of images takes PIL images or their paths, and a model of sounds the
        paths of sound files or arrays of samples; with `features=False` only the names of their tokens are kept.
        """
        if self.family.features is not None:
            source, limits = Source(self.tokenizer, self.hf.main_input_name), {"limit": self.limit, "keep": features}
            return encode_features(
                self.family.features, source, texts, self.hf.config, max_tokens=max_tokens, truncate=truncate, **limits
            )
        encoded = encode(self.tokenizer, texts, limit=self.limit, max_tokens=max_tokens, truncate=truncate)
        for one in encoded:
            if max(one.ids) >= self.vocabulary:
                raise InputError(
                    f"Reading a text: its token {one.tokens[one.ids.index(max(one.ids))]!r} has the id {max(one.ids)}, "
                    f"and {self.name} has embeddings for only {self.vocabulary} ids. Use the model's own tokenizer."
                )
        return encoded

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has embeddings for."""
        return len(self.hf.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]

    def names(self, texts: list[Any]) -> list[Any]:
        """Return what stands for texts in provenance: they themselves, or a digest of each image or sound."""
        if self.modality == "text":
            return texts
        return [one.text for one in self.encode(texts, truncate=True, features=False)]

    def batches(self, encoded: list[Encoded], *, batch_tokens: int = 4096) -> Iterator[TokenBatch]:
        """Yield batches of texts of similar length, padded on the right."""
        return batches(encoded, batch_tokens=batch_tokens, pad_id=self.pad_id)

    @property
    def pad_id(self) -> int:
        """The id that fills up a padded batch; no real token ever looks at it."""
        own = getattr(self.tokenizer, "pad_token_id", None)
        pad = getattr(self.hf.config.get_text_config(), "pad_token_id", None) if own is None else own
        return pad if pad and self.modality == "text" and 0 < pad < self.vocabulary else 0

    def sample(self, lengths: tuple[int, ...]) -> TokenBatch:
        """Return a made-up batch of sequences of these lengths, for measuring and proving.

        Images and sounds are all of one length, whichever lengths are given.
        """
        kind, config = self.family.features, self.hf.config
        if kind is not None:
            made = torch.randn(
                len(lengths), *kind.shape(config), generator=torch.Generator().manual_seed(0), dtype=torch.float32
            )
            n = len(kind.tokens(config, made[0]))
            return _batch(None, torch.ones(len(lengths), n, dtype=torch.bool), made)
        n, vocabulary = max(lengths), self.hf.config.get_text_config().vocab_size
        keep = torch.arange(n) < torch.tensor(lengths)[:, None]
        ids = (self.pad_id + 1 + torch.arange(n) * 7 % (vocabulary - 1)) % vocabulary
        return _batch(torch.where(keep, ids, self.pad_id), keep, None)

    def trace(self, batch: TokenBatch, visit: Visitor = lambda call: None) -> Trace:
        """Run a batch through the tapped model.

        `visit` sees each layer's attention in turn. It may return another head output, which the model then uses. A run
        whose vectors hold NaN or infinity is refused, with the layer where they first do.
        """
        with self._tapped(visit) as seen:
            output = self._forward(batch)
        self._check_finite(batch, [_not_none(seen.inputs), *seen.hidden])
        return Trace(_not_none(seen.inputs), tuple(seen.hidden), getattr(output, "logits", None), tuple(seen.blocks))

    def _check_finite(self, batch: TokenBatch, vectors: list[Tensor]) -> None:
        """Refuse a run whose embedding sum, or a block's output, is not finite at a token; padding does not count."""
        padding = ~batch.keep.to(vectors[0].device)
        finite = torch.stack([(one.isfinite().all(-1) | padding).all() for one in vectors]).tolist()
        if all(finite):
            return
        first, dtype = finite.index(False), str(self.dtype).removeprefix("torch.")
        where = "before layer 0" if first == 0 else f"after layer {first - 1}"
        weight = broken_weight(self.hf)
        advice = wider_dtype(self.dtype) if weight is None else f"So does its weight {weight!r}: use an intact model."
        raise ModelError(
            f"Running {self.name}: its hidden vectors {where} hold NaN or infinity in {dtype}, so nothing can be read "
            f"from this text. {advice}"
        )

    def at_position(
        self, batch: TokenBatch, position: int, visit: Visitor, *, depth: int
    ) -> tuple[Float[Tensor, "batch d"], ...]:
        """Run texts of one token each through the first `depth` blocks, as if each stood at `position`.

        Such a token sees nothing before it, so `visit` has to return the head output of every layer. Returns what each
        block makes of the token.
        """
        arguments = self.arguments(batch)
        if "position_ids" in self._accepted:
            arguments["position_ids"] = torch.full_like(arguments["input_ids"], position)

        def stop(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if len(seen.hidden) == depth:
                raise _Reached

        with self._tapped(visit) as seen, ExitStack() as stack, suppress(_Reached):
            for module in self._modules:
                stack.callback(module.register_forward_hook(stop).remove)
            self.hf(**arguments)
        return tuple(hidden[:, 0] for hidden in seen.hidden)

    @contextmanager
    def split(self, batch: TokenBatch, run: tuple[Trace, list[AttentionCall]] | None = None) -> Iterator[Split]:
        """Take the model apart for one batch; the parts work only inside the `with` block.

        `run` is a trace of this batch and its attention calls, if it was run already.
        """
        if not self.family.splits:
            raise ModelError(f"{self.name} cannot be taken apart: its blocks mix tokens by more than softmax(QK)V.")
        if self.family.sequence_first:
            raise ModelError(
                f"{self.name} cannot be taken apart: its row says sequence_first, and a part is batch first."
            )
        if run is None:
            calls: list[AttentionCall] = []
            run = self.trace(batch, calls.append), calls
        trace, calls = run
        parts = [self._block(*entry, call) for entry, call in zip(trace.blocks, calls, strict=True)]
        with self._switched():
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
        if batch.features is not None:
            return {self.hf.main_input_name: batch.features.to(self.hf.dtype)}
        arguments: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.keep.long()}
        if batch.segments is not None and "token_type_ids" in self._accepted:
            arguments["token_type_ids"] = batch.segments
        if self.family.positions:  # without the mask they would mean packed sequences
            arguments["position_ids"] = (batch.keep.long().cumsum(-1) - 1).clamp(min=0)
        return arguments | {name: False for name in ("use_cache", "use_mems") if name in self._accepted}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads off the model; where its modules, hooks or dtypes have changed, prove it anew first."""
        with turn(self._first) as outermost:
            if outermost and self.proof is not None and self.proof[0] != makeup(self.hf):
                self._measure()
                self.proof[1](self)
            yield

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Have the model run as it is written, in evaluation mode, whatever surrounds the call."""
        with self.alone(), undisturbed(), torch.no_grad(), ExitStack() as stack:
            for part in (uncompiled, evaluating, without_gradients, plain_outputs, plain_experts):
                stack.enter_context(part(self.hf))
            yield

    @contextmanager
    def _switched(self) -> Iterator[None]:
        with self.ready(), self.family.tap(self.hf):
            yield

    @contextmanager
    def _tapped(self, visit: Visitor) -> Iterator[_Seen]:
        """Run with the tap in place and every block watched; at the end, check that each block attended just once."""
        seen = _Seen()
        with self._switched(), visiting(visit) as place, ExitStack() as stack:
            for hook in self._hooks(seen, place):
                stack.callback(hook.remove)
            yield seen
        if not seen.calls or place.calls != sum(seen.calls):
            raise ModelError(
                f"Reading {self.name}: its {len(seen.blocks)} blocks called the tapped attention {place.calls} times, "
                "not once each. Its attention does not go through transformers' attention interface as identikit needs."
            )

    def _hooks(self, seen: _Seen, place: Place) -> Iterator[Any]:
        def embedded(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.inputs = args[0] if args else None

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.family.embedding is None and seen.inputs is None:
                seen.inputs = self._batch_first(_hidden(args, kwargs))
            _not_none(seen.inputs)
            place.block = len(seen.blocks)
            seen.blocks.append((module, args, kwargs))

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen.hidden.append(self._batch_first(_first(output)))
            expected = int(families.mixer_instead(self.family, module) is None)
            made = place.calls - sum(seen.calls)
            if made != expected:
                raise ModelError(
                    f"Reading {self.name}: block {place.block} ({type(module).__name__}) called the tapped attention "
                    f"{made} times, not {'once' if expected else 'never'}."
                )
            seen.calls.append(made)

        if self.family.embedding is not None:
            yield families.find(self.hf.base_model, self.family.embedding).register_forward_pre_hook(embedded)
        for module in self._modules:
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave)

    def _batch_first(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(0, 1) if self.family.sequence_first else hidden


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """Turn what a model's own forward raises into one line."""
    try:
        yield
    except IdentikitError:
        raise
    except Exception as error:  # the modules are the user's, and raise what they like
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelError(
            f"Reading {name}: it failed on a made-up input ({type(error).__name__}: {said}). identikit runs a model as "
            "it is, without autocast: its weights must fit together."
        ) from error


def checked_model(model: Any) -> Model:
    """Return a model if it is one of ours, its fingerprint taken anew, or say what to do."""
    refuse_transforms()
    if isinstance(model, Model):
        with model.alone():  # where it has changed since it was loaded, it is proved anew
            model.take_identity()
            return model
    raise InputError(
        f"Expected a model from identikit.load, got {type(model).__name__}. Load it first: "
        "model = identikit.load(hf_model, tokenizer), or identikit.load('a folder or hub id')."
    )


def _accepted(hf: PreTrainedModel) -> frozenset[str]:
    """Return the arguments that a model's forward takes; those it hands on to its text model may say `use_cache`."""
    own = inspect.signature(hf.forward).parameters
    hands_on = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own.values())
    caches = hands_on and hasattr(hf.config.get_text_config(), "use_cache")
    return frozenset([*own, "use_cache"] if caches else own)


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
        raise ModelError(
            "Reading a model: its first block ran before the module that the row's `embedding` names, or that module "
            "was given nothing. `embedding` is the module whose input is the embedding sum."
        )
    return inputs


def _batch(ids: Tensor | None, keep: Tensor, features: Tensor | None) -> TokenBatch:
    rows = len(keep)
    return TokenBatch(
        ids=ids,
        keep=keep,
        special=torch.zeros_like(keep),
        segments=None,
        tokens=tuple(tuple("?" for _ in range(int(n))) for n in keep.sum(-1)),
        words=tuple(() for _ in range(rows)),
        order=tuple(range(rows)),
        features=features,
    )
