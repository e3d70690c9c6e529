"""Token identifiability: the batched grid against the same maps one after another, ridge for all folds, the full grid.

    identikit bench tokens [STATES.safetensors] --device cuda --out results.json

The file holds ``inputs`` (token, d_x), ``hidden`` (layer, token, d) and ``lengths`` (sentence): see HiddenStates.
Without one, the hidden states are those of the default model on the embedded sample texts.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file

from identikit.data import sample_texts
from identikit.models.load import load
from identikit.tokens.evaluate import measure
from identikit.tokens.fit import fit_maps
from identikit.tokens.identify import hidden_states
from identikit.tokens.maps import glorot_start
from identikit.tokens.protocol import MapChoice, Settings, Task, fold_split, sentence_blocks
from identikit.tokens.states import HiddenStates
from identikit.tokens.train import Member, Trial, epoch_order, train_grid

PARTS = ("batched", "ridge", "grid")


def run(
    states: HiddenStates, device: str, *, parts=PARTS, epochs: int = 3, probes: MapChoice | None = None, folds: int = 10
) -> dict:
    """Run the parts asked for on one device and give their figures, ready for JSON.

    ``epochs`` is how long "batched" trains; ``probes`` are the maps and distances of "grid": linear and cosine, unless
    given.
    """
    states = HiddenStates(states.inputs.to(device), states.hidden.to(device), states.lengths, states.model)
    settings = Settings(folds=folds, device=device)
    measured: dict = {"device": device_name(device), "torch": torch.__version__, "model": states.model, "folds": folds}
    if "batched" in parts:
        measured["batched"] = compare_batched(states, settings, epochs)
    if "ridge" in parts:
        measured["ridge"] = time_fit(states, MapChoice(maps=("naive", "ridge")), settings)
    if "grid" in parts:
        measured["grid"] = time_fit(states, probes or MapChoice(maps=("linear",), distances=("cosine",)), settings)
    return measured


def compare_batched(states: HiddenStates, settings: Settings, epochs: int) -> dict:
    """Train linear maps with cosine distance: all layers, folds and learning rates at once, then one by one."""
    settings = replace(settings, epochs=epochs)
    members = [
        Member("linear", "cosine", *cell)
        for cell in product(range(states.n_layers), range(settings.folds), [Task()], settings.learning_rates)
    ]
    train_grid(states, members, settings=replace(settings, epochs=1))  # warm up
    one_after_another(states, members[:1], replace(settings, epochs=1))
    together, batched = timed(lambda: train_grid(states, members, settings=settings).trials)
    in_turn, single = timed(lambda: one_after_another(states, members, settings))
    return {
        "members": len(members),
        "epochs": epochs,
        "batched_seconds": together,
        "one_after_another_seconds": in_turn,
        "speedup": in_turn / together,
        "largest_difference_of_validation_loss": max(
            abs(first.validation_loss - second.validation_loss) for first, second in zip(batched, single, strict=True)
        ),
    }


def one_after_another(states: HiddenStates, members: list[Member], settings: Settings) -> list[Trial]:
    """Train each member as one would by hand: torch's linear layer, cosine similarity and Adam, data on the device."""
    device = states.inputs.device
    blocks = sentence_blocks(states.n_sentences, seed=settings.seed)
    trials = []
    for member in members:
        split = fold_split(blocks, member.fold)
        rows, held_out = states.rows(split.train), states.rows(split.validation).to(device)
        features, targets = states.layer(member.layer), states.targets(Task(), member.layer)
        widths = (features.shape[1], settings.hidden_size, targets.shape[1])
        start = glorot_start("linear", widths, (settings.seed, member.layer, member.fold))
        linear = torch.nn.Linear(widths[0], widths[2], bias=False, device=device)
        linear.weight.data.copy_(start["weight"].T)
        optimizer = torch.optim.Adam(linear.parameters(), lr=member.learning_rate, fused=device.type == "cuda")
        losses = []
        for epoch in range(settings.epochs):
            order = epoch_order(rows, seed=settings.seed, fold=member.fold, epoch=epoch).to(device)
            for batch in order.split(settings.batch_size):
                optimizer.zero_grad()
                cosine_loss(linear(features[batch]), targets[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                losses.append(float(cosine_loss(linear(features[held_out]), targets[held_out])))
        trials.append(Trial(member, min(losses), 1 + losses.index(min(losses))))
    return trials


def cosine_loss(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (1 - torch.nn.functional.cosine_similarity(predicted, target)).mean()


def time_fit(states: HiddenStates, probes: MapChoice, settings: Settings) -> dict:
    """Fit maps, look all test tokens up on the same and on every other layer, and average rates over folds."""
    fitting, grid = timed(lambda: fit_maps(states, probes, tasks=[Task()], settings=settings, progress=say))
    looking, rates = timed(lambda: measure(states, grid.maps, test_layers=range(states.n_layers), progress=say))
    by_cell = defaultdict(list)
    for rate in rates:
        by_cell[rate.map, rate.distance, rate.layer, rate.test_layer].append(rate.rate)
    return {
        "fit_seconds": fitting,
        "look_up_seconds": looking,
        "chance": states.chance,
        "rates": [
            dict(
                zip(("map", "distance", "layer", "test_layer"), cell, strict=True),
                mean=statistics.mean(some),
                deviation=statistics.stdev(some) if len(some) > 1 else None,
            )
            for cell, some in by_cell.items()
        ],
        "trials": [trial.row() for trial in grid.trials],
    }


def read_states(path: Path, model: str) -> HiddenStates:
    """Read the hidden states of a dataset from a file."""
    arrays = load_file(path)
    return HiddenStates(arrays["inputs"], arrays["hidden"], arrays["lengths"], model)


def sample_states() -> HiddenStates:
    """Run the default model over the embedded sample texts."""
    return hidden_states(load(), sample_texts())


def timed(act):
    start = time.perf_counter()
    result = act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def say(words: str, done: int, total: int) -> None:
    if done == total or done % 25 == 0:
        print(f"{words}: {done} of {total}", flush=True)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", type=Path, nargs="?")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="model", help="its name, for the results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--epochs", type=int, default=3, help="how long the comparison trains")
    parser.add_argument("--maps", nargs="+", default=["linear"], help="maps of the full grid")
    parser.add_argument("--distances", nargs="+", default=["cosine"], help="distances of the full grid")
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--tf32", action="store_true", help="allow TF32 products on a GPU")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = given.tf32
    states = sample_states() if given.states is None else read_states(given.states, given.model)
    probes = MapChoice(maps=tuple(given.maps), distances=tuple(given.distances))
    measured = run(states, given.device, parts=given.parts, epochs=given.epochs, probes=probes, folds=given.folds)
    text = json.dumps({**measured, "tf32": given.tf32}, indent=1)
    if given.out:
        given.out.write_text(text)
        print(f"results in {given.out}")
    else:
        print(text)


if __name__ == "__main__":
    main()
