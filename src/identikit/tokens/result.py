"""What `token_identifiability` gives back, and what it reads in one text."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from identikit.errors import InputError
from identikit.indexing import Axis
from identikit.models.model import Model
from identikit.provenance import Provenance
from identikit.result import Array, Fact, Held, Result
from identikit.tokens.evaluate import Rate
from identikit.tokens.maps import FittedMap, load_maps, save_maps

if TYPE_CHECKING:
    from pandas import DataFrame

_AXES = ("map", "distance", "layer", "test_layer", "target", "offset", "data_share", "split", "fold")
_MEASURED = ("rate", "unique_rate", "duplicates", "n_tokens")
_MAPS, _TRIALS = "maps.safetensors", "trials.json"


@dataclass(frozen=True, repr=False, eq=False)
class TokenIdentifiability(Result):
    """How often a token can still be recovered from its hidden vector, and the maps that were fitted to find out.

    Arrays have an axis for each of map, distance, layer, test_layer, target, offset, data_share, split and fold, and
    are NaN where nothing was measured; `rates` is the same as a tidy table.

    - `rate`: share of tokens recovered; `unique_rate`: of those whose target occurs once in its text
    - `duplicates`: share of the others; `n_tokens`: how many tokens were looked up
    - `maps`: the fitted maps; `trials`: how each training of a learning rate went, one mapping each
    """

    maps: tuple[FittedMap, ...] = ()
    trials: tuple[Mapping[str, Any], ...] = ()
    model: Model | None = None

    kind = "token identifiability"
    main = _MEASURED

    rate = Array("The share of tokens recovered.")
    chance = Fact("The rate of guessing at random.")

    @property
    def rates(self) -> "DataFrame":
        """A row for each map, distance, layer, tested layer, fold and part of the data that was measured."""
        frame: Any = self.to_frame().dropna(subset="rate").assign(model=self.model_name, chance=self.chance)
        order = ["model", *_AXES[:-2], "fold", "split", *_MEASURED[:3], "chance", "n_tokens"]
        return frame[order].astype({"n_tokens": int}).reset_index(drop=True)

    @property
    def summary(self) -> "DataFrame":
        """The rates averaged over folds, with their confidence and the rate of guessing at random."""
        from identikit.tokens.experiments import summary

        return summary(self.rates)

    def identity_map(self, text: Any, *, map: str | None = None, distance: str | None = None) -> "IdentityMap":
        """Read one text: for each layer and token, whether it is recovered, by what margin, and what won instead.

        `map` is the kind of map to read with; by default the first of linear, ridge, mlp and naive that was fitted.
        """
        from identikit.tokens.identify import identity_of_text

        if self.model is None:
            raise InputError(
                "identity_map() needs the model, and this result was opened from a folder. Use "
                "identikit.explain(model, text, maps=result), or fit the maps again."
            )
        return identity_of_text(self.model, text, self.maps, map=map, distance=distance)

    def save_maps(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted maps to a safetensors file; `tokens.maps.load_maps` reads it."""
        save_maps(Path(path), self.maps)

    def _write(self, folder: Path) -> None:
        super()._write(folder)
        save_maps(folder / _MAPS, self.maps)
        (folder / _TRIALS).write_text(json.dumps([dict(trial) for trial in self.trials]))

    @classmethod
    def _opened(cls, folder: Path, about: Mapping[str, Any]) -> "TokenIdentifiability":
        plain = super()._opened(folder, about)
        trials = tuple(json.loads((folder / _TRIALS).read_text()))
        return cls(plain.axes, plain.source, plain.provenance, plain.about, tuple(load_maps(folder / _MAPS)), trials)

    def said(self) -> str:
        """Say how many tokens each kind of map recovers, in the first and in the last layer."""
        rates: Any = self.rates
        own = rates[rates["layer"] == rates["test_layer"]]
        if own.empty:
            return "No map was tested on its own layer."
        layers = sorted(own["layer"].unique())
        told = []
        for (name, distance), part in own.groupby(["map", "distance"], sort=False):
            means = part.groupby("layer")["rate"].mean()
            ends = (
                f"{means[layers[0]]:.0%}" if len(layers) == 1 else f"{means[layers[0]]:.0%} → {means[layers[-1]]:.0%}"
            )
            told.append(f"{name} ({distance}) {ends}")
        where = f"layer {layers[0]}" if len(layers) == 1 else f"layer {layers[0]} → layer {layers[-1]}"
        folds = own["fold"].nunique()
        return (
            f"Tokens recovered, {where}: {', '.join(told)}. Means over {folds} fold{'s' if folds > 1 else ''}; "
            f"guessing recovers {self.chance:.1%}."
        )

    def plot(self, **options: Any) -> Any:
        """Draw rates by layer, a line for each map and distance, with error bars."""
        from identikit import plots

        return plots.rates(self, **options)


def identifiability_result(rates: Sequence[Rate], source: Provenance, **others: Any) -> TokenIdentifiability:
    """Return measured rates as a Result; `others` are its maps, trials and model."""
    values = {name: tuple(dict.fromkeys(getattr(rate, name) for rate in rates)) for name in _AXES}
    values |= {name: tuple(sorted(values[name])) for name in ("layer", "test_layer", "offset", "data_share", "fold")}
    axes = tuple(Axis(name, values[name]) for name in _AXES)
    places = {name: {value: place for place, value in enumerate(values[name])} for name in _AXES}
    shape = tuple(len(axis) for axis in axes)
    arrays = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in _MEASURED}
    for rate in rates:
        at = tuple(places[name][getattr(rate, name)] for name in _AXES)
        for name, array in arrays.items():
            array[at] = getattr(rate, name)
    return TokenIdentifiability(
        axes, Held(arrays, dict.fromkeys(arrays, _AXES)), source, {"chance": rates[0].chance}, **others
    )


class IdentityMap(Result):
    """One text, layer by layer: is each token recovered from its hidden vector, by what margin, and what won.

    Arrays are (layer, token). `winner` is the position whose input won; `margin` is how much nearer the token's own
    input is than the best other, negative where another won. `map` and `distance` say how it was read.

    Tokens whose input vectors are equal (repeated tokens, where a model's inputs hold no position) cannot be told
    apart: any of them counts as right. `repeated` says how many tokens that concerns.
    """

    kind = "identity map"
    main = ("recovered", "margin", "winner")
    by_word: ClassVar = {"recovered": {"token": "all"}, "margin": {"token": "min"}}

    recovered = Array("Whether each token is recovered.")
    margin = Array("How much nearer the token's own input is than the best other; negative where another won.")
    winner = Array("The position whose input won.")
    map = Fact("The kind of map it was read with.")
    distance = Fact("The distance it was read with.")
    repeated = Fact("How many tokens share their input vector with another token of the text.")

    @property
    def winners(self) -> tuple[tuple[str, ...], ...]:
        """The token that won, for each layer and token."""
        return tuple(tuple(self.tokens[place] for place in row) for row in self._read("winner").tolist())

    def words(self) -> "IdentityMap":
        """Return the result by words: a word is recovered if all of its pieces are."""
        return super().words()

    def said(self) -> str:
        """Say how many of the tokens are still themselves, layer by layer."""
        axis = self._axis("layer")
        shares = self.recovered.double().reshape(len(axis), -1).mean(1).tolist()
        told = ", ".join(f"{share:.0%}" for share in shares)
        layers = f"layer {axis.values[0]}" if len(axis) == 1 else f"layers {axis.values[0]} to {axis.values[-1]}"
        repeated = (
            f" {self.repeated} tokens share their input vector with another, and any of these counts as right."
            if self.repeated
            else ""
        )
        return f"Tokens recovered after {layers}: {told} ({self.map} maps, {self.distance} distance).{repeated}"

    def plot(self, **options: Any) -> Any:
        """Draw layers × tokens: recovered or not, by what margin, and what won."""
        from identikit import plots

        return plots.identity_map(self, **options)
