"""A model under the tap: run it, watch it, take its blocks apart."""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from identikit.errors import InputError, ModelError
from identikit.models import families
from identikit.models.blocks import Block, BlockWatcher, Split, Trace, check_layers_agree, embedding_tail, watch_blocks
from identikit.models.isolation import (
    Structure,
    clear_model_errors,
    exclusive_access,
    standard_model_state,
    standard_torch_state,
    structure_of,
)
from identikit.models.load.fingerprint import Identity, identity_of
from identikit.models.load.linear import differentiable, vocabulary_size
from identikit.models.load.weights import check_finite, check_weights, describe_packing, device_of
from identikit.models.taps.tap import AttentionCall, Visitor
from identikit.results.axis import Index, selected_indices
from identikit.results.provenance import Provenance, code_hash, package_versions, text_hash
from identikit.shapes import Float, Tensor
from identikit.texts.encoding import encode, token_limit
from identikit.texts.features import FeatureReader, encode_features
from identikit.texts.pictures import ImageTextEncoder
from identikit.texts.text import EncodedText, ReadText, TokenBatch, batches, collate

if TYPE_CHECKING:
    from identikit.models.load.load import Recipe


class Model:
    """A transformer with its tokenizer (or image processor, or feature extractor), ready to be read.

    Measured in a first run through the tap, not read from a configuration:

    - `n_layers`, `n_heads`, `n_key_value_heads`, `d_model`, `d_input`, `d_value`, `causal`; `dtype`, in which attention
      is computed; `packed`, how weights are packed, such as '4-bit weights (bitsandbytes nf4)', or ''
    - `blocks`: the modules of its layers, counted from 0; `attention_layers`: those with softmax attention, mostly all;
      `returned_counts`: how many things each returns in a tuple, 0 for its vectors alone
    - `gather_device`: where layers are on several devices, the one on which captured tensors come together, or None

    Given or looked up:

    - `hf`, `tokenizer`: the transformers model that is read, and its tokenizer (or image processor, or feature
      extractor); `images` encodes texts with images; `limit`: for how many tokens it has positions
    - `accepted_arguments`: the names of the arguments of its forward pass
    - `name`, `revision`, `recipe`: what it was loaded under, and how; `family`: its row in the table of architectures
    - `proof`: how it was proved that it is read correctly, and `proof_with_images`: the proof that held when this was
      also shown on a text with images
    - of two stacks, `hf` is the encoder and `full_model` both. `decoders` read the decoder, each by one
      `decoder_attention`, and `target_tokenizer` its texts, where `tokenizer` does not

    One thread at a time reads a model, and finds it as it came; other threads wait. Your own forward passes in another
    thread are not held off: do not run a model while it is read.
    """

    recipe: "Recipe | None" = None
    images: ImageTextEncoder | None = None
    target_tokenizer: Any = None
    decoder_attention: str | None = None
    lock_module: nn.Module  # a thread that reads the model has exclusive access to this module

    def __init__(self, hf: PreTrainedModel, tokenizer: Any, *, name: str, revision: str | None = None):
        self.family = families.family_of(hf)
        self.name = name
        self.revision = revision
        self.decoders: dict[str, Model] = {}
        self.full_model = hf if families.has_decoder(self.family, hf) else None
        self._open(families.stack_of(self.family, hf), tokenizer)

    def _open(self, hf: PreTrainedModel, tokenizer: Any) -> None:
        """Set the model that is read, or the stack of it, and measure it."""
        self.hf = hf
        self.tokenizer = tokenizer
        self.limit = self.family.limit(hf.config)
        parameters = inspect.signature(hf.forward).parameters
        self.accepted_arguments = set(parameters)
        takes_any_keyword = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        if takes_any_keyword and hasattr(hf.config.get_text_config(), "use_cache"):  # it goes on to the text model
            self.accepted_arguments.add("use_cache")
        if not hasattr(self, "lock_module"):
            self.lock_module = families.find_all(hf.base_model, self.family.blocks)[0]
        self.proof: tuple[Structure, Callable[[Model], int]] | None = None  # its structure then, and what proves it
        self.proof_with_images: object = None
        with self.exclusive():
            self._measure()

    def __repr__(self) -> str:
        sizes = f"layers={self.n_layers}, heads={self.n_heads}, d_model={self.d_model}, d_value={self.d_value}"
        return f"Model({self.name!r}, {sizes}, causal={self.causal})"

    def _measure(self) -> None:
        calls: list[AttentionCall] = []
        self.packed = describe_packing(self.hf)
        blocks = families.find_all(self.hf.base_model, self.family.blocks)
        is_spread = any(device_of(block) != self.device for block in blocks)
        self.gather_device = self.device if is_spread else None
        batch = self.sample((6,))
        advice = "identikit runs a model as it is, without autocast: its weights must fit together"
        advice += "; packed ones may do so only with dtype='auto'." if self.packed else "."
        with self._watched(calls.append) as watch, clear_model_errors(self.name, "a made-up input", advice):
            self.hf(**self.arguments(batch))
        watch.check_vectors(batch.keep, self.hf.config.model_type)
        check_layers_agree(self.name, calls)
        first = calls[0]
        self.attention_layers = tuple(call.layer for call in calls)
        self.blocks = [block.module for block in watch.blocks]
        self.returned_counts = watch.returned_counts
        self.n_layers = len(self.blocks)
        self.n_heads = first.query.shape[1]
        self.n_key_value_heads = first.key.shape[1]
        self.d_value = first.value.shape[-1]
        self.d_model = watch.hidden[0].shape[-1]
        self.d_input = watch.inputs.shape[-1]
        self.causal = not first.visible()[0, 0, 0, 1:].any().item()
        self.dtype = first.value.dtype

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return device_of(self.hf)

    @property
    def modality(self) -> str:
        """What the model reads: "text", "image" or "sound"."""
        return "text" if self.family.features is None else self.family.features.modality

    @property
    def fingerprint(self) -> str:
        """A SHA-256 over all that decides what the model computes; docs/understand/limits.md says what that is.

        It is taken anew when a public function is given the model, so that a result never reuses an old one.
        """
        return self.identity.model

    @cached_property
    def identity(self) -> Identity:
        """The fingerprints of the model and of its tokenizer, as last taken."""
        check_weights(self.hf, self.name)
        return identity_of(self.hf, self.tokenizer)

    def provenance(self, text: ReadText | list[ReadText], **settings: object) -> Provenance:
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
            code=code_hash(type(self.hf)),
            packed=self.packed,
        )

    def check_unchanged(self, since: str | None = None) -> None:
        """Refuse a model that is not the one whose fingerprint is `since`; None: the one last taken."""
        check_weights(self.hf, self.name)
        with exclusive_access(self.lock_module):  # while another thread reads the model, hooks are on it
            current = identity_of(self.hf, self.tokenizer).model
        if current != (self.fingerprint if since is None else since):
            raise ModelError(
                f"Reading {self.name}: its weights, configuration or tokenizer changed after it was first read, or "
                "what is set on its modules (numbers, functions, hooks, adapters): the numbers would be of two models. "
                "Compute them again, and do not change the model meanwhile."
            )

    def projection(self, layer: int) -> Float[Tensor, "head d_v d"]:
        """Return H of Eq. 2 for every head: a copy of its slice of the layer's output projection."""
        (layer,) = self.select_layers(layer)
        projection = families.output_projection(self.family, self.blocks[layer], self.n_heads, self.dtype)
        return projection.to(self.device, copy=True)

    def value_bias(self, layer: int) -> Float[Tensor, "kv_head d_v"] | None:
        """Return a copy of the bias in the layer's values, or None if there is none."""
        (layer,) = self.select_layers(layer)
        bias = families.value_bias(self.family, self.blocks[layer], self.n_key_value_heads, self.d_value)
        return None if bias is None else bias.to(self.device, copy=True)

    def select_layers(self, layers: Index = None) -> tuple[int, ...]:
        """Return the chosen layers' indices, each with softmax attention; None: all that have it."""
        if layers is None:
            return self.attention_layers
        selected = selected_indices("layer", layers, self.n_layers)
        for layer in selected:
            mixer = families.other_mixer(self.family, self.blocks[layer])
            if mixer is not None:
                raise InputError(
                    f"Layer {layer} of {self.name} has no softmax attention ({type(mixer).__name__}); its attention "
                    f"layers are {', '.join(map(str, self.attention_layers))}."
                )
        return selected

    def encode(
        self, texts: object, *, truncate: bool = False, max_tokens: int | None = None, features: bool = True
    ) -> list[EncodedText]:
        """Return a text (a string, a pair, or token ids), or a list of texts, as tokens.

        A text of more tokens than the model has positions for, or than `max_tokens`, is an error; with `truncate` it is
        cut there. Where the model reads `images`, a text may be (image, question), or messages with images. In the
        place of texts, a model of images takes PIL images or their paths, and a model of sounds the paths of sound
        files or arrays of samples; with `features=False` only the names of their tokens are kept.
        """
        if self.family.features is not None:
            source = FeatureReader(self.family.features, self.tokenizer, self.hf.main_input_name, self.hf.config)
            return encode_features(source, texts, token_limit(self.limit, max_tokens, truncate), keep=features)
        return self._encode_texts(texts, "text", truncate, max_tokens)

    def _encode_texts(self, texts: object, what: str, truncate: bool, max_tokens: int | None) -> list[EncodedText]:
        encoded = encode(
            self.tokenizer,
            texts,
            limit=self.limit,
            max_tokens=max_tokens,
            truncate=truncate,
            images=self.images,
            what=what,
        )
        for text in encoded:
            highest = max(text.ids) if text.images is None else 0  # an image token need not be in the vocabulary
            if highest >= self.vocabulary:
                raise InputError(
                    f"Reading a {what}: its token {text.tokens[text.ids.index(highest)]!r} has the id {highest}, and "
                    f"{self.name} has embeddings for only {self.vocabulary} ids. Use the model's own tokenizer."
                )
        return encoded

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has embeddings for."""
        return vocabulary_size(self.hf.get_input_embeddings())

    def provenance_texts(self, texts: list[Any]) -> list[Any]:
        """Return the texts as provenance names them: as they are, or by a digest of each image or sound."""
        if self.modality != "text" or self.decoder_attention is not None:
            return [encoded.text for encoded in self.encode(texts, truncate=True, features=False)]
        if self.images is None:
            return list(texts)
        return [str(self.encode(text)[0].text) if self.images.accepts(text) else text for text in texts]

    def batches(self, encoded: list[EncodedText]) -> Iterator[TokenBatch]:
        """Yield batches of texts of similar length, padded on the right."""
        return batches(encoded, pad_id=self.pad_id)

    @property
    def pad_id(self) -> int:
        """The id that pads a batch; no real token ever attends to it."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        if pad is None:
            pad = getattr(self.hf.config.get_text_config(), "pad_token_id", None)
        return pad if pad and self.modality == "text" and 0 < pad < self.vocabulary else 0

    def sample(self, lengths: tuple[int, ...]) -> TokenBatch:
        """Return a made-up batch of these lengths, for measuring and proving; images and sounds have one length."""
        config = self.hf.config
        kind = self.family.features
        encoded = []
        if kind is None:
            size = config.get_text_config().vocab_size
            ids = [(self.pad_id + 1 + index * 7 % (size - 1)) % size for index in range(max(lengths))]
            for n in lengths:
                encoded.append(EncodedText(tuple(ids[:n]), None, (False,) * n, ("?",) * n, (), "made up"))
        else:
            generator = torch.Generator().manual_seed(0)
            for features in torch.randn(len(lengths), *kind.shape(config), generator=generator, dtype=torch.float32):
                n = len(kind.tokens(config, features))
                text = EncodedText((), None, (False,) * n, ("?",) * n, (), "made up", features=features)
                encoded.append(text)
        return collate(encoded, pad_id=self.pad_id)

    def trace(self, batch: TokenBatch, visit: Visitor = lambda call: None) -> Trace:
        """Run a batch through the tapped model.

        `visit` sees each layer's attention in turn. It may return another head output, which the model then uses. A run
        whose vectors hold NaN or infinity is refused, with the layer where they first do.
        """
        with self._watched(visit) as watch:
            output = self.hf(**self.arguments(batch))
        check_finite(self.name, self.hf, batch.keep, [watch.inputs, *watch.hidden], self.dtype)
        logits = getattr(output, "logits", None)
        logits = None if logits is None else logits.to(watch.inputs.device)
        return Trace(watch.inputs, tuple(watch.hidden), logits, tuple(watch.blocks))

    def gradients(
        self, batch: TokenBatch, target: Callable[[Float[Tensor, "batch n d"]], Tensor]
    ) -> dict[int, Float[Tensor, "batch head query d_v"]]:
        """Return a target's gradient by each layer's head outputs; a target is a number made of last hidden vectors."""
        offsets: dict[int, Tensor] = {}

        def visit(call: AttentionCall) -> Tensor:
            offsets[call.layer] = torch.zeros_like(call.output).requires_grad_()
            return call.output + offsets[call.layer]

        with self.tapped(), torch.enable_grad():
            with self._watched(visit) as watch, torch.enable_grad():
                self.hf(**self.arguments(batch))
            value = target(watch.hidden[-1]).sum()
            gradients = torch.autograd.grad(value, list(offsets.values()), materialize_grads=True)
        return dict(zip(offsets, gradients, strict=True))

    @contextmanager
    def split(self, batch: TokenBatch, run: tuple[Trace, list[AttentionCall]] | None = None) -> Iterator[Split]:
        """Take the model apart for one batch; the parts work only inside the `with` block.

        `run` is a trace of this batch and its attention calls, if it was run already.
        """
        if not self.family.splits:
            raise ModelError(f"{self.name} cannot be taken apart: its blocks mix tokens by more than softmax(QK)V.")
        if self.family.sequence_first:
            words = "its row says sequence_first, and a part is batch first."
            raise ModelError(f"{self.name} cannot be taken apart: {words}")
        captured: list[AttentionCall] = []
        trace, calls = run or (self.trace(batch, captured.append), captured)

        def tail(x: Tensor) -> Tensor:
            if self.family.embedding is None:
                return x
            embedding = families.find(self.hf.base_model, self.family.embedding)
            return embedding_tail(lambda: self.hf(**self.arguments(batch)), embedding, self.blocks[0], x)

        with self.tapped():
            yield Split(trace.inputs, tail, tuple(map(Block, trace.blocks, calls)))

    def arguments(self, batch: TokenBatch) -> dict[str, Any]:
        """Return the arguments of the model's forward for a batch."""
        batch = batch.to(self.device)
        if batch.features is not None:
            return {self.hf.main_input_name: batch.features.to(self.hf.dtype)}
        arguments: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.keep.long()}
        if batch.segments is not None and "token_type_ids" in self.accepted_arguments:
            arguments["token_type_ids"] = batch.segments
        if self.family.positions:  # without the mask they would mean packed sequences
            arguments["position_ids"] = (batch.keep.long().cumsum(-1) - 1).clamp(min=0)
        if batch.images is not None:  # nothing is padded, and positions of images may have rows and columns
            arguments.pop("position_ids", None)
            arguments |= batch.images.to(self.device, self.hf.dtype)
        return arguments | {name: False for name in ("use_cache", "use_mems") if name in self.accepted_arguments}

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads off the model; where its modules, hooks or dtypes have changed, prove it anew first."""
        with exclusive_access(self.lock_module) as outermost:
            if outermost and self.proof is not None and self.proof[0] != structure_of(self.hf):
                self._measure()
                self.proof[1](self)
            yield

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Run the model as it is written, in evaluation mode, whatever surrounds the call."""
        with (
            self.exclusive(),
            standard_torch_state(),
            torch.no_grad(),
            standard_model_state(self.hf),
            differentiable(self.hf),
        ):
            yield

    @contextmanager
    def tapped(self) -> Iterator[None]:
        """Run the model with the tap in the place of its attention."""
        with self.prepared(), self.family.tap(self.hf):
            yield

    @contextmanager
    def _watched(self, visit: Visitor) -> Iterator[BlockWatcher]:
        """Run the model with the tap in place and every block watched."""
        with (
            self.tapped(),
            watch_blocks(self.name, self.family, self.hf.base_model, visit, self.gather_device) as watch,
        ):
            yield watch


def checked_model(model: object) -> Model:
    """Return a model if it is one of ours, its fingerprint taken anew, or say what to do."""
    if isinstance(model, Model):
        check_weights(model.hf, model.name)
        with model.exclusive():  # where it has changed since it was loaded, it is proved anew
            model.identity = identity_of(model.hf, model.tokenizer)
            return model
    raise InputError(
        f"Expected a model from identikit.load, got {type(model).__name__}. Load it first: "
        "model = identikit.load(hf_model, tokenizer), or identikit.load('a folder or hub id')."
    )
