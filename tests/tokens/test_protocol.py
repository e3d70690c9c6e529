import pytest
import torch

from identikit.errors import InputError
from identikit.tokens.protocol import MapChoice, Settings, Task, fold_split, sentence_blocks
from identikit.tokens.states import HiddenStates
from tests.tokens.constructed import states


@pytest.mark.parametrize("sentences", [20, 41, 100])
def test_folds_share_no_sentence_use_each_and_test_all(sentences):
    blocks = sentence_blocks(sentences, seed=3)
    splits = [fold_split(blocks, fold) for fold in range(10)]
    for split in splits:
        assert sorted(torch.cat(split).tolist()) == list(range(sentences))
        assert len(split.test) / sentences == pytest.approx(0.15, abs=3 / sentences)
        assert len(split.validation) / sentences == pytest.approx(0.15, abs=3 / sentences)
    assert {sentence for split in splits for sentence in split.test.tolist()} == {*range(sentences)}
    assert len({tuple(split.test.tolist()) for split in splits}) == 10


def test_blocks_are_seeded_and_even():
    first, again, other = (sentence_blocks(45, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert set(first.bincount(minlength=20).tolist()) == {2, 3}


def test_smaller_shares_of_data_are_parts_of_larger_ones():
    blocks = sentence_blocks(100, seed=0)
    parts = [set(fold_split(blocks, 4, data_share=share).train.tolist()) for share in (0.5, 0.8, 1.0)]
    assert parts[0] < parts[1] < parts[2]
    assert [len(part) for part in parts] == [35, 56, 70]


def test_rows_follow_sentences_and_offsets():
    given = HiddenStates(torch.randn(9, 2), torch.randn(1, 9, 2), torch.tensor([3, 2, 4]), "m")
    assert given.rows(torch.tensor([2, 0])).tolist() == [5, 6, 7, 8, 0, 1, 2]
    assert given.rows_with_target(torch.tensor([0, 1, 2]), 2).tolist() == [0, 5, 6]
    assert given.rows_with_target(torch.tensor([0, 1, 2]), -1).tolist() == [1, 2, 4, 6, 7, 8]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: sentence_blocks(19, seed=0), "got 19, and at least 20 are needed"),
        (lambda: states(length=(1, 3)), r"text \d+ has only one token"),
        (lambda: states(inputs=lambda tokens, _: torch.ones(tokens, 6)), "have the same input vector"),
        (lambda: Task(data_share=0.0), "data_share=0.0 cannot be used"),
        (lambda: MapChoice(maps=("linear", "cubic")), "maps='cubic' is not known: use 'naive'"),
        (lambda: Settings(folds=11), "folds=11 cannot be used: expected a whole number from 1 to 10"),
        (lambda: Settings(learning_rates=()), "one or more numbers above 0"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(act, message):
    with pytest.raises(InputError, match=message):
        act()
