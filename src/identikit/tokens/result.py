"""What `token_identifiability` returns, and its reading of one text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from identikit.errors import InputError
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.results.axis import Axis
from identikit.results.facts import Fact
from identikit.results.files import Files, plain
from identikit.results.measure import Attribute, optional_array, stored_array
from identikit.results.provenance import Provenance
from identikit.results.result import Result
from identikit.results.source import StoredArrays
from identikit.results.words import percent
from identikit.texts.text import readable_token
from identikit.tokens.experiments import Rate, summary
from identikit.tokens.maps import FittedMap, read_maps, sealed_maps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

AXES = ("map", "distance", "layer", "test_layer", "target", "offset", "data_share", "split", "fold")
MEASURED = ("rate", "unique_rate", "duplicates", "n_tokens")
_MAPS = "maps.safetensors"
_TRIALS = "trials.json"


def layers_in_words(layers: Sequence[int]) -> str:
    """Write layers as 'layer 3', 'layers 0 to 5', 'layers 0, 4 and 7', or 'layers 0, 3 to 9 and 12 to 29'."""
    ranges: list[str] = []
    for _, numbered in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        run = [layer for _, layer in numbered]
        ranges += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    listed = " and ".join(filter(None, (", ".join(ranges[:-1]), ranges[-1])))
    return f"layer{'s' if len(layers) > 1 else ''} {listed}"


def _rate(meaning: str, values: str = "0 to 1") -> Attribute:
    """Declare an array of numbers with one for each tested fit."""
    return stored_array(" ".join(AXES), meaning, range=values, missing="This was not measured.")


@dataclass(frozen=True, repr=False, eq=False)
class TokenIdentifiability(Result):
    """How often a token can still be recovered from its hidden vector, and the maps that were fitted to find out.

    Arrays have an axis for each of map, distance, layer, test_layer, target, offset, data_share, split and fold, and
    are NaN where nothing was measured; `rates` is the same as a tidy table.

    - `rate`: share of tokens recovered; `unique_rate`: of those whose target occurs once in its text
    - `duplicates`: share of the others; `n_tokens`: how many tokens were looked up
    - `maps`: the fitted maps; `trials`: how each training of a learning rate went, one mapping each
    - `model`: what they were fitted to; None in a result that was opened from a folder, or made of
      saved vectors
    """

    maps: tuple[FittedMap, ...] = ()
    trials: tuple[Mapping[str, Any], ...] = ()
    model: Model | None = None

    kind = "token identifiability"
    main = MEASURED

    rate = _rate("The share of tokens recovered.")
    unique_rate = _rate("The same over tokens whose target occurs once in its text.")
    duplicates = _rate("The share of tokens whose target occurs more than once in its text.")
    n_tokens = _rate("The number of tokens tested.", "1 or more")
    chance = Fact("The rate of guessing at random.")

    @property
    def rates(self) -> "DataFrame":
        """A row for each map, distance, layer, tested layer, fold and part of the data that was measured."""
        frame: Any = self.to_frame().dropna(subset="rate").assign(model=self.model_name, chance=self.chance)
        order = ["model", *AXES[:-2], "fold", "split", *MEASURED[:3], "chance", "n_tokens"]
        return frame[order].astype({"n_tokens": int}).reset_index(drop=True)

    @property
    def summary(self) -> "DataFrame":
        """The rates averaged over folds, with their confidence and the rate of guessing at random."""
        return summary(self.rates)

    def identity_map(
        self,
        text: object,
        *,
        map: str | None = None,
        distance: str | None = None,
        invert: bool = False,
        progress: Progress = silent,
    ) -> "IdentityMap":
        """Read one text: for each layer and token, whether it is recovered, by what margin, and what won instead.

        `map` is the kind of map to read with; by default the first of linear, ridge, mlp and naive that was fitted.
        With `invert` the whole vocabulary is tried too (`identikit.invert`; causal models only, some seconds per
        token), which says what a linear map misses and the hidden vector still holds: `invertible`.
        """
        from identikit.tokens.identify import identity_of_text

        if self.model is None:
            raise InputError(
                "identity_map() needs the model, and this result was opened from a folder, or made of saved vectors. "
                "Use identikit.explain(model, text, maps=result), or fit the maps again."
            )
        self.model.check_unchanged(self.provenance.weights)
        return identity_of_text(
            self.model, text, self.maps, map=map, distance=distance, invert=invert, progress=progress
        )

    def _files(self) -> Files:
        trials = json.dumps(plain([dict(trial) for trial in self.trials]), allow_nan=False)
        return {**super()._files(), _MAPS: sealed_maps(self.maps), _TRIALS: trials.encode()}

    @classmethod
    def _from_files(cls, files: Files, about: Mapping[str, object], where: str) -> "TokenIdentifiability":
        numbers = super()._from_files(files, about, where)
        trials = tuple(json.loads(files[_TRIALS]))
        maps = tuple(read_maps(files[_MAPS], f"{where}/{_MAPS}"))
        return cls(numbers.axes, numbers.source, numbers.provenance, numbers.about, maps, trials)

    def describe(self) -> str:
        """Return how many tokens each kind of map recovers, in the first and in the last layer."""
        rates: Any = self.rates
        same_layer = rates[rates["layer"] == rates["test_layer"]]
        if same_layer.empty:
            return "No map was tested on its own layer."
        layers = sorted(same_layer["layer"].unique())
        ends = layers[:1] if len(layers) == 1 else [layers[0], layers[-1]]
        kinds = []
        for (name, distance), of_kind in same_layer.groupby(["map", "distance"], sort=False):
            means = of_kind.groupby("layer")["rate"].mean()
            kinds.append(f"{name} ({distance}) " + " → ".join(f"{percent(means[layer])}" for layer in ends))
        where = " → ".join(f"layer {layer}" for layer in ends)
        folds = same_layer["fold"].nunique()
        return (
            f"Tokens recovered, {where}: {', '.join(kinds)}. Means over {folds} fold{'s' if folds > 1 else ''}; "
            f"guessing recovers {self.chance:.1%}."
        )

    def plot(self, **options: Any) -> "Axes":
        """Draw rates by layer, a line for each map and distance, with error bars."""
        from identikit import plots

        return plots.rates(self, **options)


def identifiability_result(
    rates: Sequence[Rate],
    provenance: Provenance,
    *,
    maps: Sequence[FittedMap] = (),
    trials: Sequence[Mapping[str, object]] = (),
    model: Model | None = None,
) -> TokenIdentifiability:
    """Return measured rates as a Result, with the maps and trials they come from and the model."""
    values = {name: tuple(dict.fromkeys(getattr(rate, name) for rate in rates)) for name in AXES}
    values |= {name: tuple(sorted(values[name])) for name in ("layer", "test_layer", "offset", "data_share", "fold")}
    axes = tuple(Axis(name, values[name]) for name in AXES)
    index_of = {name: {value: index for index, value in enumerate(values[name])} for name in AXES}
    shape = tuple(len(axis) for axis in axes)
    arrays = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in MEASURED}
    for rate in rates:
        indices = tuple(index_of[name][getattr(rate, name)] for name in AXES)
        for name, array in arrays.items():
            array[indices] = getattr(rate, name)
    numbers = StoredArrays(arrays, dict.fromkeys(arrays, AXES))
    about = {"chance": rates[0].chance}
    return TokenIdentifiability(axes, numbers, provenance, about, tuple(maps), tuple(trials), model)


def _percentages(shares: Sequence[float]) -> str:
    return ", ".join(map(percent, shares))


class IdentityMap(Result):
    """One text, layer by layer: is each token recovered from its hidden vector, by what margin, and what won.

    Arrays are (layer, token). `winner` is the position whose input won; `margin` is how much nearer the token's own
    input is than the best other, negative where another won. `map` and `distance` say how it was read.

    Tokens whose input vectors are equal (repeated tokens, where a model's inputs hold no position) cannot be told
    apart: any of them counts as right. `repeated` says how many tokens that concerns.

    `invertible`, where it was asked for, says which tokens are found exactly by trying the whole vocabulary.
    """

    kind = "identity map"
    main = ("recovered", "margin", "winner")

    recovered = stored_array(
        "layer token", "Whether each token is recovered.", range="true or false", words={"token": "all"}
    )
    margin = stored_array(
        "layer token",
        "How much nearer the token's own input is than the best other; negative where another won.",
        words={"token": "min"},
    )
    winner = stored_array("layer token", "The position whose input won.", range="0 to tokens − 1")
    invertible = optional_array(
        "layer token",
        "Whether each token is found by trying the whole vocabulary; None where that was not asked for.",
        range="true or false",
        words={"token": "all"},
    )
    map = Fact("The kind of map it was read with.")
    distance = Fact("The distance it was read with.")
    repeated = Fact("How many tokens share their input vector with another token of the text.")

    @property
    def winners(self) -> tuple[tuple[str, ...], ...]:
        """The token that won, for each layer and token."""
        return tuple(tuple(self.tokens[position] for position in row) for row in self.read("winner").tolist())

    def describe(self) -> str:
        """Return how many of the tokens are still themselves, layer by layer."""
        axis = self.axis("layer")
        shares = self.recovered.double().reshape(len(axis), -1).mean(1).tolist()
        method = f"{self.map} maps, {self.distance} distance"
        words = f"Tokens recovered after {layers_in_words(axis.values)}: {_percentages(shares)} ({method})."
        if "invertible" in self.source.dims:
            invertible = self.read("invertible").double().mean(1).tolist()
            words += f" Invertible, by trying the whole vocabulary: {_percentages(invertible)}."
        if self.repeated:
            words += f" {self.repeated} tokens share their input vector with another, and any of these counts as right."
        return words

    def plot(self, **options: Any) -> "Axes":
        """Draw layers × tokens: recovered or not, by what margin, and what won."""
        from identikit import plots

        return plots.identity_map(self, **options)


class TokenInversion(Result):
    """The tokens that hidden vectors of a causal model came from, found by trying the whole vocabulary in their place.

    Arrays are (layer, position). Distances are relative to the norm of the hidden vector (cosine distances are as they
    are), and computed in float32 or wider.

    - `recovered`: whether the true token is nearest; None where it is not known
    - `winner`, `runner_up`: ids of the nearest token and the second; `winners` and `runners_up` are the tokens
    - `winner_distance`, `runner_up_distance`, `own_distance`: how far these two and the true token are
    - `margin`: how much nearer the true token is than the best other, negative where another won; where it is not
      known, how much nearer the winner is than the runner-up
    - `prefix`: whether the tokens before each position were "given" or "recovered"; `noise`: of the hidden vectors
    - `candidates`: how many distinct tokens were tried
    """

    kind = "token inversion"
    main = ("recovered", "margin", "winner", "runner_up", "winner_distance", "runner_up_distance", "own_distance")

    recovered = optional_array(
        "layer position",
        "Whether the true token is nearest; None where it is not known.",
        range="true or false",
        words={"position": "all"},
    )
    margin = stored_array(
        "layer position",
        "How much nearer the true token is than the best other, relative to the vector's norm.",
        words={"position": "min"},
    )
    winner = stored_array("layer position", "The id of the nearest token.", range="0 or more")
    runner_up = stored_array("layer position", "The id of the second nearest token.", range="0 or more")
    winner_distance = stored_array(
        "layer position", "How far the nearest token is, relative to the vector's norm.", range="0 or more"
    )
    runner_up_distance = stored_array(
        "layer position", "How far the second nearest token is, relative to the vector's norm.", range="0 or more"
    )
    own_distance = optional_array(
        "layer position",
        "How far the true token is, relative to the vector's norm; None where it is not known.",
        range="0 or more",
    )
    prefix = Fact('Whether the tokens before each position were "given" or "recovered".')
    noise = Fact("The noise on the hidden vectors, relative to their norm.")
    distance = Fact("The distance it was searched with.")
    candidates = Fact("How many distinct tokens were tried.")

    @property
    def winners(self) -> tuple[tuple[str, ...], ...]:
        """The nearest token, for each layer and position."""
        return tuple(tuple(map(self._word, row)) for row in self.read("winner").tolist())

    @property
    def runners_up(self) -> tuple[tuple[str, ...], ...]:
        """The second nearest token, for each layer and position."""
        return tuple(tuple(map(self._word, row)) for row in self.read("runner_up").tolist())

    def _word(self, token: int) -> str:
        return self.about["vocabulary"].get(str(token), f"<id {token}>")

    def to_frame(self, *names: str) -> "DataFrame":
        """Return a tidy table with a row for each layer and position; token ids come with their tokens."""
        frame: Any = super().to_frame(*names)
        tokens = {name: frame[name].map(self._word) for name in ("winner", "runner_up") if name in frame}
        words = {name: column.map(readable_token) for name, column in tokens.items()}
        if len(words) == 2:  # '▁Once' beside 'Once': keep the mark that tells them apart
            alike = words["winner"] == words["runner_up"]
            words = {name: column.where(~alike, tokens[name]) for name, column in words.items()}
        return frame.assign(**{f"{name}_token": column for name, column in words.items()})

    def describe(self) -> str:
        """Return how many tokens are recovered in each layer, and which was the closest call."""
        prefix = "with the true prefix given" if self.prefix == "given" else "each winner appended"
        method = f"{self.distance} distance, {prefix}"
        if self.noise:
            method += f", noise {self.noise:g}"
        among = f"among {self.candidates:,} candidates"
        layers = self.axis("layer").values
        if "recovered" in self.source.dims:
            shares = _percentages(self.read("recovered").double().mean(1).tolist())
            words = f"Tokens recovered after {layers_in_words(layers)}, {among}: {shares} ({method})."
        else:
            text = "".join(map(readable_token, self.winners[0])).strip()
            words = f"Recovered from layer {layers[0]}, {among}: {text!r:.200} ({method})."
        margins = self.read("margin").double()
        row, column = divmod(int(margins.argmin()), margins.shape[1])
        where = f"layer {layers[row]}, {self.axis('position').name_of(column)!r}"
        unit = "of the vector's norm" if self.distance == "l2" else "in cosine distance"
        return f"{words} The smallest margin is {float(margins[row, column]):.2g} {unit} ({where})."

    def plot(self, **options: Any) -> "Axes":
        """Draw layers × positions: recovered or not, by what margin, and what won."""
        from identikit import plots

        return plots.inversion_map(self, **options)
