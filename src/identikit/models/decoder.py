"""The decoder of a model of two stacks: its own attention, and its attention to what the encoder reads.

It is one more `Model` over the same weights, whose texts are pairs of a source and a target. So whatever reads a model
reads a decoder, and the encoder stays what it is without one.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationMixin

from identikit.checks import is_collection, known_name, no_effect, shortened, whole_number
from identikit.errors import InputError
from identikit.models.load.check import prove
from identikit.models.load.load import quiet_libraries
from identikit.models.model import Model, checked_model
from identikit.models.text_run import TextRun, join_facts, text_facts
from identikit.texts.encoding import tokenize
from identikit.texts.text import EncodedText, TokenBatch, Translation, collate, is_text_list

ATTENTIONS = ("encoder", "decoder", "cross")


class DecoderModel(Model):
    """A model of two stacks, read by its decoder's `attention`: "decoder" (to the target) or "cross" (to the source).

    It reads a `Translation`. What it reads of the target is what the decoder reads: the start token, and then the
    target's tokens without the end token. The vector at a token predicts the next one.
    """

    def __init__(self, encoder: Model, attention: str):
        assert encoder.full_model is not None and encoder.family.decoder is not None
        self.encoder = encoder
        self.decoder_attention = attention
        self.full_model = encoder.full_model
        self.decoders = encoder.decoders
        self.lock_module = encoder.lock_module
        self.name = encoder.name
        self.revision = encoder.revision
        self.family = encoder.family.decoder[attention]
        self._open(
            encoder.full_model, encoder.tokenizer if encoder.target_tokenizer is None else encoder.target_tokenizer
        )

    def encode(
        self, texts: object, *, truncate: bool = False, max_tokens: int | None = None, features: bool = True
    ) -> list[EncodedText]:
        """Return a `Translation`, or a list of them, as the target's tokens with their source's."""
        pairs: Any = texts
        if isinstance(texts, list):
            sources = [pair.source for pair in pairs]
            read_targets = [self.read_of(pair.target) for pair in pairs]
        else:
            sources = pairs.source
            read_targets = self.read_of(pairs.target)
            pairs = [pairs]
        encoded = self.encoder.encode(sources, truncate=truncate, max_tokens=max_tokens, features=features)
        targets = self._encode_texts(read_targets, "target", truncate, max_tokens)
        read = []
        for pair, source, target in zip(pairs, encoded, targets, strict=True):
            written = pair.target if isinstance(pair.target, str) else target.text
            read.append(replace(target, source=source, text=Translation(source.text, written)))
        return read

    def read_of(self, target: Any) -> Any:
        """Return the token ids that the decoder reads of a target; ids are what it reads already.

        They are shifted to the right, as in training: the start token goes before them, and the end token is left out.
        Without a start token of its own, the model starts with the last token, a language's (mBART).
        """
        if not isinstance(target, str):
            sequence = is_collection(target) or getattr(target, "ndim", None) == 1
            if not sequence or any(isinstance(item, str) or is_collection(item) for item in target):
                raise InputError(
                    f"Reading the target: {shortened(target)} is neither a text nor token ids that it reads."
                )
            return target
        if not target.strip():
            raise InputError(f"Reading the target: {shortened(target)} is blank. Pass some words, or generate=.")
        ids = list(tokenize(self.tokenizer, text_target=target)["input_ids"])
        configs = (self.hf.config, getattr(self.hf, "generation_config", None))
        starts = [getattr(config, "decoder_start_token_id", None) for config in configs]
        start = next((token for token in starts if token is not None), ids[-1])
        if ids[0] == start:
            ids = ids[1:]
        if ids and ids[-1] in self.tokenizer.all_special_ids:
            ids = ids[:-1]
        return (start, *ids)

    def generated(self, source: EncodedText, tokens: int) -> tuple[int, ...]:
        """Return what the decoder reads when the model itself continues greedily, by at most so many tokens."""
        hf: Any = self.hf
        if not hf.can_generate():
            raise InputError(
                f"generate= needs a model that predicts tokens, and {type(hf).__name__} does not. Load the class with "
                "its language-model head, or pass target=."
            )
        arguments = self.encoder.arguments(collate([source], pad_id=self.encoder.pad_id))
        if self.encoder.modality != "text":  # it starts as its tokenizer does: with a language and a task
            own = len(tokenize(self.tokenizer, "a", add_special_tokens=False)["input_ids"])
            arguments["decoder_input_ids"] = torch.tensor([self.read_of("a")[:-own]], device=self.device)
        with self.prepared(), quiet_libraries():
            generate: Any = getattr(GenerationMixin, "generate")  # noqa: B009 - Whisper's own leaves out the start
            made = generate(hf, **arguments, max_new_tokens=tokens, do_sample=False, num_beams=1)
        ids: list[int] = made[0].tolist()
        ends = hf.generation_config.eos_token_id
        if len(ids) > 1 and ids[-1] in (ends if isinstance(ends, list) else [ends]):
            ids = ids[:-1]
        return tuple(ids)

    def arguments(self, batch: TokenBatch) -> dict[str, Any]:
        """Return the arguments of the model's forward for a batch and its source."""
        assert batch.source is not None
        batch = batch.to(self.device)
        target = {"decoder_input_ids": batch.ids, "decoder_attention_mask": batch.keep.long(), "use_cache": False}
        return self.encoder.arguments(batch.source) | target  # pyright: ignore[reportArgumentType]

    def sample(self, lengths: tuple[int, ...]) -> TokenBatch:
        """Return made-up targets of these lengths, each with a source that is longer by two."""
        return replace(super().sample(lengths), source=self.encoder.sample(tuple(n + 2 for n in lengths)))


def stacks_of(reading: TextRun) -> list[tuple[Model, TokenBatch]]:
    """Return what reads a text's inputs, in their order: the model, and where it is a decoder then its encoder."""
    model = reading.model
    if not isinstance(model, DecoderModel):
        return [(model, reading.batch)]
    assert reading.batch.source is not None
    return [(model, reading.batch), (model.encoder, reading.batch.source)]


def input_facts(reading: TextRun) -> dict[str, list[Any]]:
    """Return what a Result keeps of a text's inputs: its tokens, and behind them those of a source."""
    return join_facts([text_facts(batch) for _, batch in stacks_of(reading)])


def model_for_attention(model: Model, attention: str) -> Model:
    """Return the model that reads one attention of a model of two stacks, proved on first use."""
    if attention == "encoder":
        return model
    if model.full_model is None:
        raise InputError(
            f"attention={attention!r} is of a decoder that attends to an encoder, and {model.name} has none here. "
            "Leave attention= out."
        )
    if model.modality != "text" and model.target_tokenizer is None:
        raise InputError(
            f"attention={attention!r} reads a target with a tokenizer, and {model.name} was loaded without one. "
            "Load it with its processor: load(model, processor)."
        )
    if attention not in model.decoders:
        side = DecoderModel(model, attention)
        prove(side)
        model.decoders[attention] = side
    return model.decoders[attention]


def model_and_texts(
    model: object,
    text: object,
    attention: object,
    target: object,
    generate: object,
    *,
    truncate: bool,
    max_tokens: int | None,
) -> tuple[Model, object]:
    """Return the model and the texts that a caller asks to read: as they are, or translations and their decoder."""
    model = checked_model(model)
    attention = known_name("attention", "encoder" if attention is None else attention, ATTENTIONS)
    side = model_for_attention(model, attention)
    if side is model:
        for name, value in (("target", target), ("generate", generate)):
            no_effect(name, value, "the encoder reads no target. Ask for attention='cross' or 'decoder'")
        return model, text
    if (target is None) == (generate is None):
        raise InputError(
            f"attention={attention!r} reads a target: pass target= (a text, or the ids that the decoder reads), or "
            "generate= (how many tokens the model itself may add)."
        )
    assert isinstance(side, DecoderModel)
    side = checked_model(side)
    assert isinstance(side, DecoderModel)
    if generate is not None:
        room = side.limit or sys.maxsize  # with the start token
        most = whole_number("generate", generate, least=1, most=room - 1)
        sources = model.encode(text, truncate=truncate, max_tokens=max_tokens)
        made = [side.generated(source, most) for source in sources]
        target = made if is_text_list(text) else made[0]
    if not is_text_list(text):
        return side, Translation(text, target)
    if not isinstance(target, list) or len(target) != len(text):
        raise InputError(f"Reading targets: expected a list of {len(text)}, one per source, not {shortened(target)}.")
    return side, [Translation(*pair) for pair in zip(text, target, strict=True)]
