"""Learning to recover input tokens from hidden vectors, and reading one text with the learned maps."""

import json
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch

from identikit.checks import flag, function, known_name, known_names, shortened
from identikit.errors import InputError
from identikit.maths.neighbours import DISTANCES
from identikit.maths.threads import one_thread_if_busy
from identikit.models.isolation import standard_torch_state
from identikit.models.model import Model, checked_model
from identikit.models.text_run import TextRun, run_texts
from identikit.progress import Progress, Watched, reporting, silent
from identikit.results.axis import Axis, Index, selected_indices
from identikit.results.files import unseal, write_file
from identikit.results.provenance import text_hash
from identikit.results.source import StoredArrays
from identikit.texts.text import Text, is_text_list
from identikit.tokens.experiments import EXPERIMENTS, fit_maps, recover, run_experiment
from identikit.tokens.invert import invert as invert_text
from identikit.tokens.maps import FittedMap, read_maps, sealed_maps
from identikit.tokens.protocol import MAPS, MapChoice, Settings, Task
from identikit.tokens.result import IdentityMap, TokenIdentifiability, identifiability_result
from identikit.tokens.saved import saved_states
from identikit.tokens.states import hidden_states, states_of_trace

_READ_WITH = ("linear", "ridge", "mlp", "naive")  # the first of these that was fitted reads a text


@reporting
@one_thread_if_busy()
@standard_torch_state()
def token_identifiability(
    model: Model | None = None,
    texts: list[Any] | None = None,
    *,
    states: str | os.PathLike[str] | None = None,
    maps: Sequence[str] | str = MAPS,
    distances: Sequence[str] | str = DISTANCES,
    layers: Index = None,
    experiment: str = "same layer",
    settings: Settings | None = None,
    truncate: bool = False,
    max_tokens: int | None = None,
    progress: Watched = None,
) -> TokenIdentifiability:
    """Learn to recover input tokens from hidden vectors, and test how often it works (section 4).

    Maps are trained as in Appendix B.1 unless `settings` (folds, learning rates, device, …) say otherwise.
    `experiment` is one of:

    - "same layer": train and test on each layer (Fig. 2a, 38, 39)
    - "across layers": train on each, test on all (Fig. 2b, 8–10)
    - "generalisation": train against test, for shares of the data (Fig. 7, Appendix B.2)
    - "previous layer": recover each layer's own input (Fig. 11–13)
    - "neighbours": recover the tokens up to three places away (Fig. 14–17)

    `states` is a folder of hidden vectors that another tool saved, instead of a model and texts. Each text has a file:
    `.safetensors` with `hidden_states` (token, layer, feature) and `token_ids`, as vLLM writes them, or `NAME.npy`
    (layer, token, feature) beside `NAME.token_ids.npy`. The first layer is what enters the first block.
    """
    progress = function("progress", progress)
    known_name("experiment", experiment, tuple(EXPERIMENTS))
    maps = known_names("maps", maps, MAPS)
    distances = known_names("distances", distances, DISTANCES)
    settings = Settings() if settings is None else settings
    if not isinstance(settings, Settings):
        raise InputError(
            f"settings={shortened(settings)} cannot be used: expected identikit.tokens.protocol.Settings(…)."
        )
    settings = settings.with_python_numbers()
    about = {"experiment": experiment, "folds": settings.folds, "seed": settings.seed}
    if states is not None:
        if model is not None or texts is not None or truncate or max_tokens is not None:
            raise InputError("states= stands instead of a model and texts, and is never cut. Pass one or the other.")
        vectors, provenance = saved_states(states, about)
        layers = selected_indices("layer", layers, vectors.n_layers)
    else:
        model = checked_model(model)
        layers = selected_indices("layer", layers, model.n_layers)
        if not is_text_list(texts):
            raise InputError("token_identifiability learns from many texts: pass a list of them.")
        vectors = hidden_states(model, texts, truncate=truncate, max_tokens=max_tokens, progress=progress)
        provenance = model.provenance(json.dumps(model.provenance_texts(texts), default=str), **about, texts=len(texts))
    choice = MapChoice(maps=maps, distances=distances, layers=layers)
    rates, fit = run_experiment(EXPERIMENTS[experiment], vectors, choice, settings, progress)
    trials = [trial.row() for trial in fit.trials]
    return identifiability_result(rates, provenance, maps=fit.maps, trials=trials, model=model)


@standard_torch_state()
def identity_of_text(
    model: Model,
    text: Any,
    maps: Sequence[FittedMap],
    *,
    map: str | None = None,
    distance: str | None = None,
    invert: bool = False,
    progress: Progress = silent,
) -> IdentityMap:
    """Read one text with fitted maps; see `TokenIdentifiability.identity_map`."""
    if is_text_list(text):
        raise InputError("An identity map is of one text: pass a string, a pair of strings or token ids.")
    invert = flag("invert", invert)
    progress = function("progress", progress)
    (reading,) = run_texts(model, text, layers=(), truncate=False)
    identity = identity_of(reading, maps, map=map, distance=distance)
    if not invert:
        return identity
    exact = invert_text(model, text, layers=identity.axes[0].values, progress=progress)
    arrays = {name: identity.array(name) for name in identity.arrays} | {"invertible": exact.recovered}
    return replace(identity, source=StoredArrays(arrays, dict.fromkeys(arrays, ("layer", "token"))))


def identity_of(
    reading: TextRun, maps: Sequence[FittedMap], *, map: str | None = None, distance: str | None = None
) -> IdentityMap:
    """Read one encoded text with fitted maps."""
    own_input = [fitted for fitted in maps if fitted.task == Task()]
    if map is None:
        kinds = {fitted.map for fitted in own_input}
        map = next((name for name in _READ_WITH if name in kinds), "linear")
    known_name("map", map, MAPS)
    if distance is None:
        distance = next((fitted.distance for fitted in own_input if fitted.map == map), "cosine")
    known_name("distance", distance, DISTANCES)
    trace = reading.model.trace(reading.batch) if reading.trace is None else reading.trace
    states = states_of_trace(trace, reading.model.name)
    nearest = recover(states, maps, map=map, distance=distance)
    arrays = {
        "recovered": torch.stack([layer.hit for layer in nearest.values()]).cpu(),
        "margin": torch.stack([layer.margin for layer in nearest.values()]).cpu(),
        "winner": torch.stack([layer.winner for layer in nearest.values()]).cpu(),
    }
    axes = Axis("layer", tuple(nearest)), Axis("token", tuple(range(len(reading.tokens))), reading.tokens)
    provenance = reading.model.provenance(reading.text, map=map, distance=distance)
    repeated = states.identity.bincount()[states.identity] > 1
    about = reading.about | {"map": map, "distance": distance, "repeated": int(repeated.sum())}
    return IdentityMap(axes, StoredArrays(arrays, dict.fromkeys(arrays, ("layer", "token"))), provenance, about)


class CachedMaps(NamedTuple):
    """Maps that were fitted to texts, and the share of the texts' tokens that the tokenizer does not know."""

    maps: list[FittedMap]
    unknown: float


def cached_maps(model: Model, texts: list[Text], *, progress: Progress = silent) -> CachedMaps:
    """Return ridge maps for all layers, fitted to texts once and then kept in the cache folder.

    The folder is `$IDENTIKIT_CACHE`, or `identikit` in the user's cache folder. Maps whose file is damaged are fitted
    again.
    """
    path = _cache_folder() / f"cached-maps-{model.fingerprint[:16]}-{text_hash(texts)[:16]}-{model.dtype}.safetensors"
    with suppress(OSError):  # a cache that cannot be reached is no reason to fail
        if path.is_file():
            try:
                content = path.read_bytes()
                return CachedMaps(read_maps(content, str(path)), unseal(content).about["unknown"])
            except InputError:
                warnings.warn(f"The maps kept in {path} are damaged, and are fitted again.", stacklevel=2)
    states = hidden_states(model, texts, truncate=True, progress=progress)
    choice = MapChoice(("ridge",), ("cosine",))
    maps = fit_maps(states, choice, tasks=[Task()], settings=Settings(folds=1), progress=progress).maps
    ids = [token for text in model.encode(texts, truncate=True) for token in text.ids]
    unknown = ids.count(getattr(model.tokenizer, "unk_token_id", -1)) / len(ids)
    with suppress(OSError):  # nor is one that cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, sealed_maps(maps, {"unknown": unknown}))
    return CachedMaps(maps, unknown)


def _cache_folder() -> Path:
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    except RuntimeError:  # there is no home
        home = gettempdir()
    return Path(os.environ.get("IDENTIKIT_CACHE") or Path(home, "identikit"))
