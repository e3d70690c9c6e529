"""Which token is this: hidden states of a dataset, and the maps that recover input tokens from them (section 4)."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import torch

from identikit.errors import InputError
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.provenance import Provenance, provenance, text_hash
from identikit.runs.store import Store, write_tables
from identikit.shapes import Float, Tensor
from identikit.text import Encoded, Text
from identikit.tokens.evaluate import IdentityMap
from identikit.tokens.evaluate import identity_map as map_sentence
from identikit.tokens.fit import fit_maps
from identikit.tokens.maps import FittedMap, load_maps, save_maps
from identikit.tokens.protocol import MapChoice, Settings, Task
from identikit.tokens.states import HiddenStates

if TYPE_CHECKING:
    from pandas import DataFrame

    from identikit.tokens.experiments import Experiment

READING = "hidden states, tokens"
EXPERIMENTS = ("same layer", "across layers", "generalisation", "previous layer", "neighbours")
LARGEST_IN_MEMORY = 2 << 30  # bytes of hidden states above which they are kept in a file


@dataclass(frozen=True)
class TokenIdentifiability:
    """How often a hidden vector still gives its token away, and the maps that were fitted to find out.

    - `rates`: a row for each map, distance, layer, tested layer, fold and part of the data
    - `trials`: how each training of a learning rate went
    - `maps`: the fitted maps
    """

    rates: "DataFrame" = field(repr=False)
    trials: "DataFrame" = field(repr=False)
    maps: tuple[FittedMap, ...] = field(repr=False)
    provenance: Provenance
    model: Model = field(repr=False)

    @cached_property
    def summary(self) -> "DataFrame":
        """The rates averaged over folds, with their confidence and the rate of guessing at random."""
        from identikit.tokens.experiments import summary

        return summary(self.rates)

    def identity_map(self, text: Text, *, map: str | None = None, distance: str = "cosine") -> "TextIdentity":
        """Read one text: for each layer and token, whether it is recovered, by which margin, and what won instead.

        `map` is the kind of map to read with; by default the first of linear, ridge, mlp and naive that was fitted.
        """
        return read_identity(self.model, text, self.maps, map=map, distance=distance)

    def save_maps(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted maps to a safetensors file; `load_maps` reads it."""
        save_maps(Path(path), self.maps)


@dataclass(frozen=True)
class TextIdentity:
    """One text, layer by layer: is each token recovered from its hidden vector, by which margin, and what won.

    `recovered`, `margin` and `winner` (the position whose input won) are (layer, token); the margin is how much nearer
    the own input is than the best other, negative where another won.
    """

    tokens: tuple[str, ...]
    map: str
    distance: str
    found: IdentityMap

    @property
    def recovered(self) -> Tensor:
        """Whether each token is recovered: (layer, token)."""
        return self.found.recovered

    @property
    def margin(self) -> Tensor:
        """How much nearer the own input is than the best other: (layer, token)."""
        return self.found.margin

    @property
    def winners(self) -> tuple[tuple[str, ...], ...]:
        """The token that won, for each layer and token."""
        return tuple(tuple(self.tokens[place] for place in row) for row in self.found.winner.tolist())


def token_identifiability(
    model: Model,
    texts: list[Text],
    *,
    maps: Sequence[str] = ("naive", "linear", "mlp", "ridge"),
    distances: Sequence[str] = ("cosine", "l2"),
    layers: Sequence[int] | None = None,
    experiment: str = "same layer",
    settings: Settings | None = None,
    truncate: bool = False,
    progress: Progress = silent,
) -> TokenIdentifiability:
    """Learn to recover input tokens from hidden vectors, and test how often it works (section 4).

    Maps are trained as in Appendix B.1 unless `settings` (folds, learning rates, device, …) say otherwise.
    `experiment` is one of:

    - "same layer": train and test on each layer (Fig. 2a, 38, 39)
    - "across layers": train on each, test on all (Fig. 2b, 8–10)
    - "generalisation": train against test, for shares of the data (Fig. 7, Appendix B.2)
    - "previous layer": recover each layer's own input (Fig. 11–13)
    - "neighbours": recover the tokens up to three places away (Fig. 14–17)
    """
    from identikit.tokens import experiments

    if experiment not in EXPERIMENTS:
        raise InputError(
            f"token_identifiability: experiment={experiment!r} is not known: use {', '.join(EXPERIMENTS)}."
        )
    run: Callable[..., Experiment] = {
        "same layer": experiments.same_layer,
        "across layers": experiments.across_layers,
        "generalisation": experiments.generalisation,
        "previous layer": experiments.previous_layer,
        "neighbours": experiments.neighbouring_tokens,
    }[experiment]
    chosen = None if layers is None else tuple(model.layer(layer) for layer in layers)
    choice, settings = MapChoice(tuple(maps), tuple(distances), chosen), settings or Settings()
    states = hidden_states(model, texts, truncate=truncate, progress=progress)
    done = run(states, choice, settings, progress=progress)
    about = {"experiment": experiment, "folds": settings.folds, "seed": settings.seed, "texts": len(texts)}
    source = provenance(model, json.dumps(texts), **about)
    return TokenIdentifiability(done.rates, done.trials, done.maps, source, model)


def identifiability_tables(
    model: Model,
    texts: Iterable[Text],
    store: Store,
    *,
    folds: int = 10,
    seed: int = 0,
    truncate: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, "DataFrame"]:
    """Run an experiment of `token_identifiability` over a dataset into a store: its rates, their summary, its maps."""
    settings = Settings(folds=folds, seed=seed, device=str(model.device))

    def told(what: str, done: int, total: int) -> None:
        if what != READING:  # the data and the options have been checked: a place that cannot be written to is told now
            store.start()
        progress(what, done, total)

    fit = token_identifiability(model, list(texts), settings=settings, truncate=truncate, progress=told, **options)
    tables = {
        name: frame.assign(layer=frame["layer"] + 1, test_layer=frame["test_layer"] + 1)
        for name, frame in (("rates", fit.rates), ("summary", fit.summary))
    }
    write_tables(store, tables)
    return tables


def hidden_states(
    model: Model,
    texts: list[Text],
    *,
    truncate: bool = False,
    max_tokens: int | None = None,
    progress: Progress = silent,
) -> HiddenStates:
    """Run texts through a model once and keep every token's input vector and hidden vectors, in order, unpadded.

    Large ones are kept in a temporary file that is mapped into memory and vanishes with the result.
    """
    encoded = model.encode(texts, truncate=truncate, max_tokens=max_tokens)
    lengths = torch.tensor([len(one) for one in encoded])
    starts = (lengths.cumsum(0) - lengths).tolist()
    dtype = torch.promote_types(model.dtype, torch.float32)
    inputs = torch.empty(int(lengths.sum()), model.d_input, dtype=dtype)
    hidden = _room((model.n_layers, len(inputs), model.d_model), dtype)
    done = 0
    progress(READING, done, len(inputs))
    for batch in model.batches(encoded):
        trace = model.trace(batch)
        for row, index in enumerate(batch.order):
            kept, place = batch.rows(row).to(model.device), slice(starts[index], starts[index] + len(encoded[index]))
            inputs[place] = trace.inputs[row, kept].to(inputs)
            for layer, states in enumerate(trace.hidden):
                hidden[layer, place] = states[row, kept].to(inputs)
        done += sum(batch.lengths)
        progress(READING, done, len(inputs))
    return HiddenStates(inputs, hidden, lengths, model.name)


def _room(shape: tuple[int, int, int], dtype: torch.dtype) -> Float[Tensor, "layer token d"]:
    count = shape[0] * shape[1] * shape[2]
    size = count * dtype.itemsize
    if size <= LARGEST_IN_MEMORY:
        return torch.empty(shape, dtype=dtype)
    with NamedTemporaryFile(prefix="identikit-") as file:  # removed at once: the mapping keeps it while it is needed
        file.truncate(size)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)


def read_identity(
    model: Model,
    text: Any,
    maps: Sequence[FittedMap],
    *,
    map: str | None = None,
    distance: str = "cosine",
    truncate: bool = False,
) -> TextIdentity:
    """Read one text with fitted maps; see `TokenIdentifiability.identity_map`."""
    if map is None:
        there = {fitted.map for fitted in maps}
        map = next((name for name in ("linear", "ridge", "mlp", "naive") if name in there), "linear")
    encoded: list[Encoded] = model.encode(text, truncate=truncate)
    if len(encoded) != 1:
        raise InputError(f"identity_map: {len(encoded)} texts were given, expected one text or one pair.")
    states = hidden_states(model, [encoded[0].text], truncate=truncate)
    found = map_sentence(states, maps, map=map, distance=distance)
    return TextIdentity(encoded[0].tokens, map, distance, found)


def cached_maps(model: Model, texts: list[Text], *, progress: Progress = silent) -> list[FittedMap]:
    """Return ridge maps for all layers, fitted to texts once and then kept in the cache folder.

    The folder is `$IDENTIKIT_CACHE`, or `identikit` in the user's cache folder; a file there is written whole or not at
    all, and one that cannot be read is fitted anew.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "identikit"
    folder = Path(os.environ.get("IDENTIKIT_CACHE", default))
    path = folder / f"maps-{model.fingerprint[:16]}-{text_hash(texts)[:16]}-{model.dtype}.safetensors"
    if path.exists():
        with suppress(InputError):
            return load_maps(path)
    states = hidden_states(model, texts, truncate=True, progress=progress)
    choice, settings = MapChoice(("ridge",), ("cosine",)), Settings(folds=1)
    maps = fit_maps(states, choice, tasks=[Task()], settings=settings, progress=progress).maps
    with suppress(OSError):  # a cache that cannot be written is no reason to fail
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, delete=False) as partial:
            pass
        save_maps(partial.name, maps)
        Path(partial.name).replace(path)
    return maps
