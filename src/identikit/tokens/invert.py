"""The exact token that a hidden vector came from, found by trying the whole vocabulary at its position."""

import hashlib
import warnings
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from identikit.checks import function, known_name, random_seed, real_number
from identikit.errors import InputError
from identikit.maths.neighbours import DISTANCES
from identikit.models.isolation import standard_torch_state
from identikit.models.machine import format_duration
from identikit.models.model import Model, checked_model
from identikit.models.text_run import TextRun, prepare_texts
from identikit.progress import Progress, Watched, reporting, silent
from identikit.results.axis import Axis, Index, selected_index, selected_indices
from identikit.results.several import Results, of_texts
from identikit.results.source import StoredArrays
from identikit.shapes import Float, Int, Tensor
from identikit.texts.text import is_text_list
from identikit.tokens.continuation import (
    LONG_SECONDS,
    Aims,
    Continuations,
    Position,
    SearchResult,
    Tick,
    Vocabulary,
    check_continues,
    expected_seconds,
    ids_batch,
    search,
    vocabulary,
)
from identikit.tokens.result import TokenInversion

NOISES = (0.0, 0.1, 0.3, 1.0, 3.0)
PREFIXES = ("given", "recovered")
WHAT = "inversion, candidates"
LOUDEST = 1e6  # noise relative to the norm of a vector; more leaves nothing of the vector


@dataclass(frozen=True)
class InversionOptions:
    """How hidden vectors are inverted; see `invert`. Several `noises` share one pass over the vocabulary."""

    prefix: str = "given"
    noises: tuple[float | int, ...] = NOISES
    distance: str = "l2"
    seed: int = 0
    truncate: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        known_name("prefix", self.prefix, PREFIXES)
        known_name("distance", self.distance, DISTANCES)
        random_seed(self.seed)
        for noise in self.noises:
            real_number("noise", noise, least=0, most=LOUDEST)

    def steps(self, positions: Collection[int]) -> int:
        """Return how many searches these positions take: with the prefix recovered, all up to the last."""
        return len(positions) if self.prefix == "given" else max(positions) + 1


@dataclass(frozen=True, eq=False)
class Sought:
    """Hidden vectors of one text to invert, and what is known of the tokens they came from.

    - `layers`, `hidden`: the layers, and their hidden vectors; `positions`: the positions to invert
    - `segments`: the token types, where the tokenizer makes any
    - `text`, `ids`: the run that they are from, and the true tokens; None where these are not known
    """

    layers: tuple[int, ...]
    hidden: Float[Tensor, "layer n d"]
    positions: tuple[int, ...]
    segments: Int[Tensor, "1 n"] | None
    text: Continuations | None = None
    ids: tuple[int, ...] | None = None

    def noisy(self, options: InversionOptions) -> Aims:
        r"""Return the vectors of every layer and noise: $h + \nu\,\|h\|\,\varepsilon/\sqrt d$, with $\nu$ the noise.

        $\varepsilon$ is standard normal and depends on the seed, the layer and the tokens; all noises share it.
        """
        vectors = []
        for layer, clean in zip(self.layers, self.hidden, strict=True):
            seed = zlib.crc32(repr((options.seed, layer, self.ids)).encode())
            drawn = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            scale = torch.linalg.vector_norm(clean, dim=-1, keepdim=True) / clean.shape[-1] ** 0.5
            vectors += [clean + noise * scale * drawn.to(clean) for noise in options.noises]
        return Aims(tuple(layer for layer in self.layers for _ in options.noises), torch.stack(vectors))


@of_texts
@reporting
@standard_torch_state()
def invert(
    model: Model,
    text: Any,
    *,
    layer: Index = None,
    layers: Index = None,
    positions: Index = None,
    prefix: str | None = None,
    noise: float | int = 0.0,
    distance: str = "l2",
    seed: int = 0,
    truncate: bool = False,
    max_tokens: int | None = None,
    progress: Watched = None,
) -> TokenInversion | Results[TokenInversion]:
    r"""Recover the tokens of a causal model's hidden vectors exactly, by trying the whole vocabulary.

    $$\hat t_i = \arg\min_{t} \|h^l(t_1, \ldots, t_{i-1}, t) - h_i^l\|$$

    In a causal model a hidden vector is a function of the tokens up to its position. With those before it known, every
    candidate's vector can be computed, so the winner, the runner-up and the margin between them are exact. Language
    models are almost surely injective, so without noise the true token wins, but for rounding: half precision can lose
    a few (Nikolaou et al. 2025, *Language Models are Injective and Hence Invertible*, arXiv 2510.15511).

    One text gives a `TokenInversion`, a list of texts a list. `text` is a string, a pair of strings or token ids, whose
    own hidden vectors are inverted; or hidden vectors $h^l$ of one layer, a tensor (n, d), whose tokens are not known.

    - `layer` or `layers`: one layer, or several (None is all), which one pass serves together; hidden vectors need
      `layer`
    - `positions`: only these positions or tokens; None is all of them
    - `prefix`: "given" takes the true tokens before each position, so each answer is independent; "recovered" takes
      the winners, so an error carries on. By default given for texts, and recovered for hidden vectors
    - `noise`: Gaussian noise on the hidden vectors, relative to their norm, drawn from `seed`
    - `distance`: "l2" or "cosine"
    - `truncate`: cut texts that are too long for the model, or than `max_tokens`, instead of refusing them
    """
    model = checked_model(model)
    progress = function("progress", progress)
    check_continues(model)
    is_hidden = _is_hidden(text) or (isinstance(text, list) and bool(text) and all(map(_is_hidden, text)))
    if prefix is None:
        prefix = "recovered" if is_hidden else "given"
    noises = (real_number("noise", noise, least=0, most=LOUDEST),)
    options = InversionOptions(prefix, noises, distance, random_seed(seed))
    if layer is not None and layers is not None:
        raise InputError("invert takes layer= or layers=, not both.")
    if is_hidden and layer is None:
        raise InputError("Inverting hidden vectors: say which layer they come from, with layer=.")
    if is_hidden and prefix == "given":
        raise InputError("prefix='given' needs the true tokens, and hidden vectors do not tell them. Pass the text.")
    if layer is not None:
        layer_indices = (selected_index("layer", layer, model.n_layers),)
    else:
        layer_indices = selected_indices("layer", layers, model.n_layers)
    several = is_text_list(text)
    sources: Sequence[TextRun | Tensor]
    if is_hidden:
        sources = [_checked_hidden(model, vectors) for vectors in (text if several else [text])]
        axes = [Axis("position", tuple(range(len(vectors)))) for vectors in sources]
    else:
        sources = prepare_texts(model, text, truncate=truncate, max_tokens=max_tokens)
        axes = [Axis("position", tuple(range(len(source.tokens))), source.tokens) for source in sources]
    position_indices = [axis.sel(positions).values for axis in axes]
    steps = sum(map(options.steps, position_indices))
    inversion = Inversion.of(model, options, progress, steps=steps, depth=max(layer_indices) + 1)
    pairs = zip(sources, position_indices, strict=True)
    results = [inversion.result(source, layer_indices, indices) for source, indices in pairs]
    if layer is not None:
        results = [result.sel(layer=layer_indices[0]) for result in results]
    return Results(results) if several else results[0]


@dataclass(frozen=True, eq=False)
class Inversion:
    """A model with its vocabulary, ready to invert hidden vectors; `tick` is told how many candidates were tried."""

    model: Model
    options: InversionOptions
    candidates: Vocabulary
    tick: Tick

    @classmethod
    def of(
        cls, model: Model, options: InversionOptions, progress: Progress = silent, *, steps: int, depth: int
    ) -> "Inversion":
        """Prepare for this many searches through the first `depth` blocks, and warn if they will take long."""
        candidates = vocabulary(model)
        size = len(candidates.ids)
        if size < 2:
            raise InputError(
                f"Inverting {model.name}: all {len(candidates.candidate_of):,} tokens of its vocabulary have the same "
                "embedding, so any answer would count as right. Use a model that tells its tokens apart."
            )
        seconds = expected_seconds(model, size, steps, depth)
        if seconds > LONG_SECONDS:
            warnings.warn(
                f"Inverting {steps} positions among {size:,} tokens takes about {format_duration(seconds)} on this "
                "machine. Choose some positions, or lower layers.",
                stacklevel=5,
            )
        tried = 0.0

        def tick(count: float | int) -> None:
            nonlocal tried
            tried += count
            progress(WHAT, round(tried), steps * size)

        return cls(model, options, candidates, tick)

    def sought(self, source: TextRun | Tensor, layers: tuple[int, ...], positions: tuple[int, ...]) -> Sought:
        """Run a text for its hidden vectors of these layers, or take hidden vectors as they are."""
        if not isinstance(source, TextRun):
            names = getattr(self.model.tokenizer, "model_input_names", ())
            segments = torch.zeros(1, len(source), dtype=torch.long) if "token_type_ids" in names else None
            return Sought(layers, source[None], positions, segments)
        text = Continuations.read(self.model, source.batch)
        hidden = torch.stack([text.trace.hidden[layer][0] for layer in layers])
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        ids = source.batch.ids
        assert ids is not None
        return Sought(layers, hidden, positions, source.batch.segments, text, tuple(ids[0].tolist()))

    def arrays(self, sought: Sought) -> dict[str, Tensor]:
        """Search for every layer, noise and position: arrays (aim, position), the noises of a layer one after another.

        If the true tokens are known, `recovered` says whether they won, and the margin is how much nearer the true
        token is than the best other; else how much nearer the winner is than the runner-up. A tie is a miss.
        """
        aims = sought.noisy(self.options)
        if self.options.prefix == "recovered" or sought.text is None:
            results = self._search_recovering_prefixes(sought, aims)
        else:
            results = []
            for index in sought.positions:
                position = sought.text.at(index, depth=max(aims.layers) + 1)
                results.append(self._search(position, Aims(aims.layers, aims.vectors[:, index]), sought, self.tick))
        result = SearchResult.stack(results)
        arrays = {"margin": result.runner_up_distance - result.winner_distance, **result._asdict()}
        if sought.ids is None:
            del arrays["own_distance"]
            return arrays
        true = torch.tensor([sought.ids[index] for index in sought.positions])
        first_equal = self.candidates.ids[self.candidates.candidate_of[true]]  # stands for all equal embeddings
        won = result.winner == first_equal
        margin = torch.where(won, result.runner_up_distance, result.winner_distance) - result.own_distance
        winner = torch.where(won, true, result.winner)
        return {"recovered": margin > 0} | arrays | {"margin": margin, "winner": winner}

    def _search_recovering_prefixes(self, sought: Sought, aims: Aims) -> list[SearchResult]:
        """Search from the first position on, each time after the winners so far; aims that agree share a search."""
        results: list[SearchResult] = []
        prefixes: list[tuple[int, ...]] = [() for _ in aims.layers]
        for index in range(max(sought.positions) + 1):
            result_of_aim: dict[int, SearchResult] = {}
            segments = None if sought.segments is None else sought.segments[:, : index + 1]
            for prefix in dict.fromkeys(prefixes):
                sharing = [aim for aim, winners in enumerate(prefixes) if winners == prefix]
                shared = Aims(tuple(aims.layers[aim] for aim in sharing), aims.vectors[sharing, index])
                ids = torch.tensor([[*prefix, int(self.candidates.ids[-1])]])  # the last is there to be replaced
                text = Continuations.read(self.model, ids_batch(ids, segments))
                position = text.at(index, depth=max(shared.layers) + 1)
                share = len(sharing) / len(prefixes)
                result = self._search(position, shared, sought, lambda count, share=share: self.tick(count * share))
                for aim, *values in zip(sharing, *result, strict=True):
                    result_of_aim[aim] = SearchResult(*values)
            results.append(SearchResult.stack([result_of_aim[aim] for aim in range(len(prefixes))]))
            winners = results[-1].winner.tolist()
            prefixes = [(*prefix, winner) for prefix, winner in zip(prefixes, winners, strict=True)]
        return [results[index] for index in sought.positions]

    def _search(self, position: Position, aims: Aims, sought: Sought, tick: Tick) -> SearchResult:
        token = None if sought.ids is None else sought.ids[position.index]
        return search(position, aims, self.candidates, token=token, distance=self.options.distance, tick=tick)

    def result(self, source: TextRun | Tensor, layers: tuple[int, ...], positions: tuple[int, ...]) -> TokenInversion:
        """Invert a text, or hidden vectors of one layer."""
        arrays = self.arrays(self.sought(source, layers, positions))
        words = token_words(self.model, torch.cat([arrays["winner"], arrays["runner_up"]]).flatten().tolist())
        if isinstance(source, TextRun):
            text = source.text
            about = source.about
            tokens = tuple(source.tokens[index] for index in positions)
        else:
            text = f"hidden vectors {hashlib.sha256(source.cpu().double().numpy().tobytes()).hexdigest()}"
            tokens = tuple(words[str(int(token))] for token in arrays["winner"][0])
            about = {"tokens": list(tokens), "special": [False] * len(tokens), "words": []}
        options = self.options
        settings = {"prefix": options.prefix, "noise": options.noises[0], "distance": options.distance}
        about = {**about, **settings, "candidates": len(self.candidates.ids), "vocabulary": words}
        provenance = self.model.provenance(text, **settings, seed=options.seed)
        axes = Axis("layer", layers), Axis("position", positions, tokens)
        stored = StoredArrays(arrays, dict.fromkeys(arrays, ("layer", "position")))
        return TokenInversion(axes, stored, provenance, about)


def token_words(model: Model, ids: Iterable[int]) -> dict[str, str]:
    """Return the token of each id, by the id as a string; one that the tokenizer does not know is `<id 32001>`."""
    unique = sorted(set(ids))
    tokens = model.tokenizer.convert_ids_to_tokens(unique)
    return {str(number): token or f"<id {number}>" for number, token in zip(unique, tokens, strict=True)}


def _is_hidden(argument: object) -> bool:
    """Whether an argument holds hidden vectors: a two-dimensional tensor or array of floats."""
    return getattr(argument, "ndim", 0) == 2 and torch.as_tensor(argument).is_floating_point()


def _checked_hidden(model: Model, vectors: Any) -> Float[Tensor, "n d"]:
    n, width = vectors.shape
    wrong = f"{n} vectors of {width} numbers"
    if isinstance(vectors, Tensor) and (vectors.is_meta or vectors.layout != torch.strided):
        wrong = "a tensor that is sparse or on the meta device"
    elif n and width == model.d_model and n <= (model.limit or n):
        hidden = torch.as_tensor(vectors).detach().to(model.device)
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        squares = hidden.square().sum(1)
        impossible = (squares == 0) | ~squares.isfinite()
        if not impossible.any():
            return hidden
        index = int(impossible.nonzero()[0])
        wrong = f"a vector at position {index} whose norm is {float(hidden[index].norm()):.1g}"
    limit = f", at most {model.limit} of them" if model.limit else ""
    raise InputError(
        f"Inverting hidden vectors of {model.name}: got {wrong}, expected dense, finite vectors of {model.d_model} "
        f"numbers, not all 0{limit}. Pass the vectors as the model made them."
    )
