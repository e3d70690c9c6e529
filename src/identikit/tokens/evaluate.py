"""Judging fitted maps: identifiability rates on the parts of each fold, and the layer × token map of one sentence."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from identikit.errors import InputError
from identikit.maths.neighbours import Nearest, distinct, nearest_in_sentences
from identikit.progress import Progress, silent
from identikit.shapes import Float, Int, Tensor
from identikit.tokens.maps import FittedMap
from identikit.tokens.protocol import Task, fold_split, sentence_blocks
from identikit.tokens.states import HiddenStates


class Rate(NamedTuple):
    """One row of the table of rates.

    `rate` is the share of tokens recovered, `unique_rate` the same over tokens whose target occurs once in its
    sentence (NaN without any), `duplicates` the share of the others, `chance` 1 over the mean sentence length of
    the dataset, and `n_tokens` the number of tokens looked up. Layers count from 0.
    """

    model: str
    map: str
    distance: str
    layer: int
    test_layer: int
    target: str
    offset: int
    data_share: float
    fold: int
    split: str
    rate: float
    unique_rate: float
    duplicates: float
    chance: float
    n_tokens: int


def measure(
    states: HiddenStates,
    maps: Sequence[FittedMap],
    *,
    test_layers: Sequence[int] | None = None,
    splits: Sequence[str] = ("test",),
    device: str | None = None,
    progress: Progress = silent,
) -> list[Rate]:
    """Look up the tokens of each map's fold and count those recovered.

    Each map is tested on the layer it was fitted to, or on all `test_layers` (Fig. 2b). `splits` are any of
    "train", "validation" and "test".
    """
    where = torch.device(device) if device else states.inputs.device
    layers = sorted({fitted.layer for fitted in maps}) if test_layers is None else list(test_layers)
    rates = []
    for place, layer in enumerate(layers):
        hidden = states.layer(layer, device=where)
        tested: dict[str, _Tested] = {}
        for fitted in maps:
            if test_layers is None and fitted.layer != layer:
                continue
            target = fitted.task.target
            if target not in tested:
                candidates = states.targets(fitted.task, layer, device=where)
                tested[target] = _Tested(layer, hidden, candidates, distinct(candidates))
            rates += [_rate(states, fitted, split, tested[target]) for split in splits]
        progress("looking tokens up", place + 1, len(layers))
    return rates


def recover(states: HiddenStates, maps: Sequence[FittedMap], *, map: str, distance: str) -> dict[int, Nearest]:
    """Read one sentence with the first fold's maps of a kind: by layer, what is nearest to where each token is mapped.

    `states` holds only that sentence. One that the maps were trained on looks better than a new one would.
    """
    wanted = {
        fitted.layer: fitted
        for fitted in maps
        if (fitted.map, fitted.distance, fitted.fold, fitted.task) == (map, distance, 0, Task())
    }
    if not wanted:
        pairs = sorted({(fitted.map, fitted.distance) for fitted in maps if fitted.task == Task()})
        raise InputError(
            f"Reading the identity map of a text: no {map} map for {distance} distance and fold 0 was fitted. Use "
            f"one of those that were: {', '.join(' '.join(pair) for pair in pairs) or 'none'}."
        )
    return {
        layer: nearest_in_sentences(
            wanted[layer](states.layer(layer)),
            states.targets(Task(), layer),
            lengths=states.lengths,
            identity=states.identity,
            distance=distance,
        )
        for layer in sorted(wanted)
    }


class _Tested(NamedTuple):
    layer: int
    hidden: Float[Tensor, "token d"]
    candidates: Float[Tensor, "token d_t"]
    identity: Int[Tensor, " token"]


def _rate(states: HiddenStates, fitted: FittedMap, split: str, tested: _Tested) -> Rate:
    task = fitted.task
    blocks = sentence_blocks(states.n_sentences, seed=fitted.seed)
    sentences = getattr(fold_split(blocks, fitted.fold, data_share=task.data_share), split)
    rows = states.rows(sentences).to(tested.hidden.device)
    nearest = nearest_in_sentences(
        fitted(tested.hidden[rows]),
        tested.candidates[rows],
        lengths=states.lengths.cpu()[sentences],
        identity=tested.identity[rows],
        distance=fitted.distance,
        offset=task.offset,
    )
    looked_up = nearest.winner >= 0
    hit = nearest.hit[looked_up].double()
    duplicated = nearest.duplicated[looked_up]
    return Rate(
        model=states.model,
        map=fitted.map,
        distance=fitted.distance,
        layer=fitted.layer,
        test_layer=tested.layer,
        target=task.target,
        offset=task.offset,
        data_share=task.data_share,
        fold=fitted.fold,
        split=split,
        rate=float(hit.mean()),
        unique_rate=float(hit[~duplicated].mean()),
        duplicates=float(duplicated.double().mean()),
        chance=states.chance,
        n_tokens=len(hit),
    )
