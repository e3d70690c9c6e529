"""The decoder of a model of two stacks: its own attention, and its attention to what the encoder reads.

It is one more `Model` over the same weights, whose texts are pairs of a source and a target. So whatever works with a
model works with a decoder, and the encoder stays what it is without one.
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
from identikit.texts.text import EncodedText, TokenBatch, Translation, is_text_list

ATTENTIONS = ("encoder", "decoder", "cross")


class DecoderModel(Model):
    """A model of two stacks, read by its decoder's `attention`: "decoder" (to the target) or "cross" (to the source).

    It reads a `Translation`. Of the target it sees what the decoder is given: the start token, and then the
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
        translations: list[Any] = texts if isinstance(texts, list) else [texts]
        sources: Any = [translation.source for translation in translations]
        targets: Any = [self.target_ids(translation.target) for translation in translations]
        if not isinstance(texts, list):  # so that messages say "the text", not "texts[0]"
            sources = sources[0]
            targets = targets[0]
        source_texts = self.encoder.encode(sources, truncate=truncate, max_tokens=max_tokens, features=features)
        target_texts = self._encode_texts(targets, "target", truncate, max_tokens)
        encoded = []
        for translation, source, target in zip(translations, source_texts, target_texts, strict=True):
            words = translation.target if isinstance(translation.target, str) else target.text
            encoded.append(replace(target, source=source, text=Translation(source.text, words)))
        return encoded

    def target_ids(self, target: Any) -> Any:
        """Return the token ids that the decoder reads for a target text; token ids are returned as they are.

        A text's ids are shifted to the right, as in training: the start token goes before them, and the end token is
        left out. Without a start token of its own, the model starts with the last token, a language's (mBART).
        """
        if not isinstance(target, str):
            is_sequence = is_collection(target) or getattr(target, "ndim", None) == 1
            if not is_sequence or any(isinstance(item, str) or is_collection(item) for item in target):
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
        """Return the ids that the decoder reads when the model continues greedily by at most this many `tokens`."""
        hf: Any = self.hf
        if not hf.can_generate():
            raise InputError(
                f"generate= needs a model that predicts tokens, and {type(hf).__name__} does not. Load the class with "
                "its language-model head, or pass target=."
            )
        arguments = self.encoder.arguments(source.batch())
        if self.encoder.modality != "text":  # start as the tokenizer does, with a language and a task
            letter_length = len(tokenize(self.tokenizer, "a", add_special_tokens=False)["input_ids"])
            arguments["decoder_input_ids"] = torch.tensor([self.target_ids("a")[:-letter_length]], device=self.device)
        with self.prepared(), quiet_libraries():
            generate: Any = getattr(GenerationMixin, "generate")  # noqa: B009 - Whisper's own leaves out the start
            sequences = generate(hf, **arguments, max_new_tokens=tokens, do_sample=False, num_beams=1)
        ids: list[int] = sequences[0].tolist()
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


def stacks_of(text_run: TextRun) -> list[tuple[Model, TokenBatch]]:
    """Return the model and batch of each stack that reads a text: a decoder before its encoder."""
    model = text_run.model
    if not isinstance(model, DecoderModel):
        return [(model, text_run.batch)]
    assert text_run.batch.source is not None
    return [(model, text_run.batch), (model.encoder, text_run.batch.source)]


def input_facts(text_run: TextRun) -> dict[str, list[Any]]:
    """Return what a Result keeps of a text's inputs: its tokens, and after them those of its source."""
    return join_facts([text_facts(batch) for _, batch in stacks_of(text_run)])


def model_for_attention(model: Model, attention: str) -> Model:
    """Return the model that reads the "encoder", "decoder" or "cross" attention of a model; proved on first use."""
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
        decoder = DecoderModel(model, attention)
        prove(decoder)
        model.decoders[attention] = decoder
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
    """Return the model that reads an `attention`, and the texts for it, paired with their targets if it needs them."""
    model = checked_model(model)
    attention = known_name("attention", "encoder" if attention is None else attention, ATTENTIONS)
    attention_model = model_for_attention(model, attention)
    if attention_model is model:
        for name, value in (("target", target), ("generate", generate)):
            no_effect(name, value, "the encoder reads no target. Ask for attention='cross' or 'decoder'")
        return model, text
    if (target is None) == (generate is None):
        raise InputError(
            f"attention={attention!r} reads a target: pass target= (a text, or the ids that the decoder reads), or "
            "generate= (how many tokens the model itself may add)."
        )
    decoder = checked_model(attention_model)
    assert isinstance(decoder, DecoderModel)
    if generate is not None:
        limit = decoder.limit or sys.maxsize  # with the start token
        tokens = whole_number("generate", generate, least=1, most=limit - 1)
        sources = model.encode(text, truncate=truncate, max_tokens=max_tokens)
        targets = [decoder.generated(source, tokens) for source in sources]
        target = targets if is_text_list(text) else targets[0]
    if not is_text_list(text):
        return decoder, Translation(text, target)
    if not isinstance(target, list) or len(target) != len(text):
        raise InputError(f"Reading targets: expected a list of {len(text)}, one per source, not {shortened(target)}.")
    return decoder, [Translation(*pair) for pair in zip(text, target, strict=True)]
