"""How maps are trained and tested: which maps, for which task, with the settings of Appendix B.1, on which folds."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from identikit.checks import is_collection, known_name, known_names, random_seed, real_number, shortened, whole_number
from identikit.errors import InputError
from identikit.maths.neighbours import DISTANCES
from identikit.shapes import Int, Tensor

BLOCKS = 20
FOLDS = 10
MAPS = ("naive", "linear", "mlp", "ridge")
_TEST_BLOCKS = _VALIDATION_BLOCKS = 3
_LARGEST_COUNTS = {"batch_size": None, "patience": None, "epochs": None, "hidden_size": None, "folds": FOLDS}


@dataclass(frozen=True)
class MapChoice:
    """Which maps are fitted, for which distances and for which layers (counted from 0; by default all)."""

    maps: tuple[str, ...] = MAPS
    distances: tuple[str, ...] = DISTANCES
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        known_names("maps", self.maps, MAPS)
        known_names("distances", self.distances, DISTANCES)


@dataclass(frozen=True)
class Task:
    """What a map has to recover from a hidden vector, and from how much data it learns.

    `target` is "input" (x_i) or "previous" (the layer below, Appendix B.4); `offset` k asks for token i + k
    instead of i (Appendix B.5); `data_share` is the share of the training sentences that is used (Appendix B.2).
    """

    target: str = "input"
    offset: int = 0
    data_share: float = 1.0

    def __post_init__(self) -> None:
        known_name("target", self.target, ("input", "previous"))
        real_number("data_share", self.data_share, above=0, most=1)

    def target_layer(self, layer: int) -> int | None:
        """Return the layer whose hidden vectors a layer's map should recover; None: the input vectors."""
        return layer - 1 if self.target == "previous" and layer > 0 else None


@dataclass(frozen=True)
class Settings:
    """How maps are fitted; the defaults are those of Appendix B.1.

    - `folds`: how many of the ten folds are run; `seed`: the random seed for folds, starts and batches
    - `learning_rates`: all are tried, and the best is kept; `hidden_size`: that of the MLP
    - `batch_size`: tokens per batch; `epochs`: at most so many
    - `patience`: training stops after so many epochs without a smaller distance on the validation sentences
    - `device`: where maps are fitted, by default where the input vectors are
    - `memory`: bytes for maps that train together, by default 80 % of what a GPU has free, and 2 GiB on a CPU

    Products run in float32 unless the caller has allowed TF32 in torch.
    """

    folds: int = FOLDS
    seed: int = 0
    learning_rates: tuple[float, ...] = (0.003, 0.001, 0.0003, 0.0001, 0.00003, 0.00001, 0.000003)
    batch_size: int = 256
    patience: int = 20
    epochs: int = 500
    hidden_size: int = 1000
    device: str | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, largest in _LARGEST_COUNTS.items():
            whole_number(name, getattr(self, name), least=1, most=largest)
        rates = self.learning_rates
        if not is_collection(rates) or not len(rates):
            raise InputError(f"learning_rates={shortened(rates)} cannot be used: expected one or more numbers above 0.")
        for rate in rates:
            real_number("learning_rates", rate, above=0)
        random_seed(self.seed)
        if self.memory is not None:
            whole_number("memory", self.memory, least=1)

    def with_python_numbers(self) -> "Settings":
        """Return the same settings with NumPy's and torch's numbers as Python's."""
        counts = {name: int(getattr(self, name)) for name in (*_LARGEST_COUNTS, "seed")}
        rates = tuple(float(rate) for rate in self.learning_rates)
        memory = None if self.memory is None else int(self.memory)
        return replace(self, **counts, learning_rates=rates, memory=memory)


class FoldSplit(NamedTuple):
    """The numbers of a fold's sentences for training, validation and test."""

    train: Int[Tensor, " train"]
    validation: Int[Tensor, " validation"]
    test: Int[Tensor, " test"]


def stream(purpose: str, *key: int) -> np.random.Generator:
    """Return a random generator for a purpose and a key, such as "batches" and (seed, fold, epoch)."""
    return np.random.default_rng([*purpose.encode(), *key])


def sentence_blocks(n_sentences: int, *, seed: int) -> Int[Tensor, " sentence"]:
    """Shuffle the sentences into 20 blocks of equal size (to within one); return the block of each sentence."""
    if n_sentences < BLOCKS:
        raise InputError(
            f"Splitting texts into folds: got {n_sentences}, and at least {BLOCKS} are needed (70/15/15 as {BLOCKS} "
            "blocks). Give more texts."
        )
    block = torch.empty(n_sentences, dtype=torch.long)
    block[torch.from_numpy(stream("blocks", seed).permutation(n_sentences))] = torch.arange(n_sentences) % BLOCKS
    return block


def fold_split(block: Int[Tensor, " sentence"], fold: int, *, data_share: float = 1.0) -> FoldSplit:
    """Divide sentences by block: fold f tests on three blocks from 2f on, validates on the next three, trains on 14.

    That is the 70/15/15 split of Appendix B.1 for each of ten folds. `data_share` keeps the first of the training
    sentences in a fixed shuffled order, so a smaller share is part of a larger one.
    """
    turned = (block - 2 * fold) % BLOCKS
    is_test = turned < _TEST_BLOCKS
    is_train = turned >= _TEST_BLOCKS + _VALIDATION_BLOCKS
    train = is_train.nonzero().squeeze(1)
    order = torch.from_numpy(stream("share", fold).permutation(len(train)))
    count = max(1, round(data_share * len(train)))
    return FoldSplit(
        train=train[order[:count].sort().values],
        validation=(~is_test & ~is_train).nonzero().squeeze(1),
        test=is_test.nonzero().squeeze(1),
    )
