"""How long learned maps take: trained together and one after another, ridge for all folds, and a full grid.

The part "inversion" is another benchmark, in `bench.inversion`.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from benchmarks.measure import Row, seconds, time_rows
from identikit.checks import shortened
from identikit.errors import InputError
from identikit.models.load.load import load
from identikit.progress import Progress, silent
from identikit.texts.data import sample_texts
from identikit.tokens.experiments import fit_maps, measure
from identikit.tokens.identify import hidden_states
from identikit.tokens.maps import glorot_start
from identikit.tokens.protocol import MapChoice, Settings, Task, fold_split, sentence_blocks
from identikit.tokens.states import HiddenStates
from identikit.tokens.train import Trial, TrialResult, epoch_order, train_maps

PARTS = ("together", "ridge", "grid")
INVERSION = "inversion"
TOGETHER, IN_TURN = "trained together", "one after another"


@dataclass(frozen=True)
class Options:
    """What to measure.

    - `states`: a safetensors file with `inputs` (token, d_x), `hidden` (layer, token, d) and `lengths` (sentence);
      None for the hidden states of `model` (None for the packaged MiniLM) on the embedded sample texts
    - `device`: where maps are trained; `tf32`: allow TF32 products there
    - `parts`: some of `PARTS`, or "inversion"; `folds`: how many of the ten folds
    - `epochs`: how long the comparison trains; `maps`, `distances`: those of the full grid
    """

    states: str | None = None
    model: str | None = None
    device: str = "cpu"
    tf32: bool = False
    parts: tuple[str, ...] = PARTS
    folds: int = 10
    epochs: int = 3
    maps: tuple[str, ...] = ("linear",)
    distances: tuple[str, ...] = ("cosine",)

    def __post_init__(self) -> None:
        known = (*PARTS, INVERSION)
        wrong = [part for part in self.parts if part not in known]
        if wrong:
            raise InputError(
                f"Benchmarking maps: part {shortened(wrong[0])} is not known. Use some of {', '.join(known)}."
            )


def run(options: Options, *, progress: Progress = silent) -> list[Row]:
    """Measure the parts asked for on one device."""
    states = read_states(options)
    states = replace(states, inputs=states.inputs.to(options.device), hidden=states.hidden.to(options.device))
    settings = Settings(folds=options.folds, device=options.device)
    allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, options.tf32
    try:
        rows = compare_together(states, settings, options.epochs, progress) if "together" in options.parts else []
        if "ridge" in options.parts:
            rows += time_fit(states, MapChoice(maps=("naive", "ridge")), settings, progress)
        if "grid" in options.parts:
            rows += time_fit(states, MapChoice(maps=options.maps, distances=options.distances), settings, progress)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return rows


def read_states(options: Options) -> HiddenStates:
    """Read hidden states from the file, or run the model over the embedded sample texts."""
    if options.states is None:
        return hidden_states(load(options.model), sample_texts(), truncate=True)
    try:
        arrays = load_file(options.states)
        return HiddenStates(arrays["inputs"], arrays["hidden"], arrays["lengths"], options.states)
    except (OSError, KeyError, SafetensorError) as error:
        raise InputError(
            f"Reading hidden states from {options.states}: {error}. Expected a safetensors file with inputs, hidden "
            "and lengths."
        ) from error


def compare_together(states: HiddenStates, settings: Settings, epochs: int, progress: Progress) -> list[Row]:
    """Train linear maps with cosine distance: all layers, folds and learning rates at once, then one by one."""
    settings = replace(settings, epochs=epochs)
    members = [
        Trial("linear", "cosine", *cell)
        for cell in product(range(states.n_layers), range(settings.folds), [Task()], settings.learning_rates)
    ]
    train_maps(states, members, settings=replace(settings, epochs=1))  # warm up
    one_after_another(states, members[:1], replace(settings, epochs=1), silent)
    together, batched = seconds(lambda: train_maps(states, members, settings=settings).trials)
    in_turn, single = seconds(lambda: one_after_another(states, members, settings, progress))
    case = f"{states.model}, {len(members)} linear maps, {epochs} epochs"
    losses = [abs(one.validation_loss - two.validation_loss) for one, two in zip(batched, single, strict=True)]
    return [
        *time_rows(case, {TOGETHER: together, IN_TURN: in_turn}, {IN_TURN: TOGETHER}),
        Row(case, "largest difference of a validation loss", max(losses)),
    ]


def one_after_another(
    states: HiddenStates, members: list[Trial], settings: Settings, progress: Progress
) -> list[TrialResult]:
    """Train each member as one would by hand: torch's linear layer, cosine similarity and Adam, data on the device."""
    blocks = sentence_blocks(states.n_sentences, seed=settings.seed)
    trials = []
    for done, member in enumerate(members):
        progress("maps, one after another", done, len(members))
        trials.append(_train_one(states, member, settings, blocks))
    progress("maps, one after another", len(members), len(members))
    return trials


def _train_one(states: HiddenStates, member: Trial, settings: Settings, blocks: torch.Tensor) -> TrialResult:
    device = states.inputs.device
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
            _cosine_loss(linear(features[batch]), targets[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(float(_cosine_loss(linear(features[held_out]), targets[held_out])))
    return TrialResult(member, min(losses), 1 + losses.index(min(losses)))


def _cosine_loss(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (1 - torch.nn.functional.cosine_similarity(predicted, target)).mean()


def time_fit(states: HiddenStates, choice: MapChoice, settings: Settings, progress: Progress) -> list[Row]:
    """Fit maps, and look up all test tokens on the same and on every other layer."""
    fitting, grid = seconds(lambda: fit_maps(states, choice, tasks=[Task()], settings=settings, progress=progress))
    looking, rates = seconds(lambda: measure(states, grid.maps, test_layers=range(states.n_layers), progress=progress))
    last, by_map = states.n_layers - 1, defaultdict(list)
    for rate in rates:
        if rate.layer == rate.test_layer == last:
            by_map[f"{rate.map}, {rate.distance}: rate in the last layer"].append(rate.rate)
    case = f"{states.model}, {' and '.join(choice.maps)}, {settings.folds} of 10 folds"
    times = time_rows(case, {"fit": fitting, "look-up": looking}, {})
    return times + [Row(case, what, fmean(found)) for what, found in by_map.items()]
